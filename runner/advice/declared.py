"""Which settings are what they are called: the type of an input says it, or the tool that is given them.  A name alone is a guess."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .tool_settings import Setting, ends

ADDRESSES: Final = ("model", "dataset", "file")
_SAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "base": ("model",),
    "dataset": ("dataset", "file", "list"),
}
"""The types of inputs that say that a value is a model, or data."""
_OF_ACCELERATE: Final = ("mixed_precision",)
"""What a step's own `accelerate` says."""
_MAY: Final = "string"
"""The one other type of which a value could be an address."""


@dataclass(frozen=True, slots=True)
class Declarations:
    """What is known of one step: `names` that tools have for settings, `types` of its recipe's inputs, and which tools it uses.

    `commanded`: one of them is started by the step's own command; else tools are only imported by its code.  `launched`: the step has `accelerate`.
    """

    names: Mapping[str, Sequence[str]]
    types: Mapping[str, str]
    tools: Sequence[str]
    commanded: bool
    launched: bool = False

    def of_program(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """Arguments and configuration, those that can be what they are called, each with whether it is known to be."""
        for each in settings:
            if self.commanded or (self.launched and each.key in _OF_ACCELERATE):
                yield each
            else:
                yield from self._judged(each)

    def of_inputs(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """As `of_program`, of inputs by their own names."""
        for each in settings:
            yield from self._judged(each)

    def _judged(self, setting: Setting) -> Iterator[Setting]:
        type = self.types.get(setting.origin.name) if setting.origin.kind == "input" else None
        subject = self._subject(setting.key)
        if subject is None:
            yield setting._replace(declared=bool(self.tools) or type in ADDRESSES)
        elif type in _SAYS[subject]:
            yield setting
        elif type in (None, _MAY):
            yield setting._replace(declared=False)

    def _subject(self, key: str) -> str | None:
        """What a setting of this name would be the address of; None: of nothing."""
        called = set(ends(key))
        for subject in _SAYS:
            if not called.isdisjoint((subject, *self.names.get(subject, ()))):
                return subject
        return None
