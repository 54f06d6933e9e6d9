"""Distinguish declared settings from guesses by name.

A setting is declared if the type of an input or a known tool confirms its meaning.
"""

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
"""Input types that confirm a model (`base`) or data (`dataset`)."""
_OF_ACCELERATE: Final = ("mixed_precision",)
"""Settings that a step's `accelerate` block declares."""
_MAY: Final = "string"
"""The only other input type that can hold an address."""


@dataclass(frozen=True, slots=True)
class Declarations:
    """Known tools and input types of one step, to tell declared settings from guesses.

    `names` are the tools' names of each setting, `types` the types of the recipe's inputs.
    `commanded`: the step's command starts a known tool; otherwise the code only imports it.
    `launched`: the step has `accelerate`.
    """

    names: Mapping[str, Sequence[str]]
    types: Mapping[str, str]
    tools: Sequence[str]
    commanded: bool
    launched: bool = False

    def of_program(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """Yield a program's arguments and configuration values with `declared` set.

        Omits settings whose input type contradicts their name.
        """
        for each in settings:
            is_of_block = self.launched and each.key in _OF_ACCELERATE
            if self.commanded or is_of_block:
                yield each
            else:
                yield from self._mark_declared(each)

    def of_inputs(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """Yield the recipe inputs as settings with `declared` set, like `of_program`."""
        for each in settings:
            yield from self._mark_declared(each)

    def _mark_declared(self, setting: Setting) -> Iterator[Setting]:
        type = self.types.get(setting.origin.name) if setting.origin.kind == "input" else None
        subject = self._subject(setting.key)
        if subject is None:
            yield setting._replace(declared=bool(self.tools) or type in ADDRESSES)
        elif type in _SAYS[subject]:
            yield setting
        elif type in (None, _MAY):
            yield setting._replace(declared=False)

    def _subject(self, key: str) -> str | None:
        """Return `base` or `dataset` if a setting of this name holds such an address, else None."""
        called = set(ends(key))
        for subject in _SAYS:
            if not called.isdisjoint((subject, *self.names.get(subject, ()))):
                return subject
        return None
