"""Values for the imports of Python files and the scripts in a command.

`python_reader` creates them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from .values import Tree

_EXPRESSION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_WORD: Final = re.compile(
    r"(?<![\w./@+\0-])(?:-m[ \t]+([A-Za-z_][\w.]*)|([\w./@+-]+\.(?:py|sh)))(?![\w./@+\0-])"
)


BY_VALUE: Final = "imports a module whose name is computed"
"""A doubt about a file: some of its imports are known only at run time."""


class Import(NamedTuple):
    """One import: `from ..module import names` has level 2; `import module` has no names."""

    level: int
    module: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "." * self.level + (self.module or "".join(self.names[:1]))


class Imports(NamedTuple):
    """Imports of a Python file, the names in its `__all__`, and doubts about completeness.

    A doubt is a sentence without its subject, the file.
    """

    found: tuple[Import, ...] = ()
    exported: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def module_names(self) -> tuple[str, ...]:
        """All names that may be modules of other packages, such as `a` and `a.b`."""
        names: dict[str, None] = {}
        for each in self.found:
            if not each.level:
                names[each.module] = None
                names.update((f"{each.module}.{name}", None) for name in each.names)
        return tuple(names)

    @classmethod
    def load(cls, row: Sequence[Any]) -> Imports:
        """Load imports from their JSON array."""
        found, exported, doubts = row
        return cls(
            tuple(Import(level, module, tuple(names)) for level, module, names in found),
            tuple(exported),
            tuple(doubts),
        )


class EntryPoint(NamedTuple):
    """A script path or module name started by a command."""

    kind: Literal["script", "module"]
    name: str


def find_starts(
    run: Sequence[Tree] | str | None, accelerate: Mapping[str, Tree] | None
) -> list[EntryPoint]:
    """Return the distinct scripts and modules started by a command, as written.

    Words with a template are left out.
    """
    if isinstance(run, str):
        found = _started_by_script(run)
    else:
        found = _started_by_arguments(run or ())
    return list(dict.fromkeys([*found, *_started_by_accelerate(accelerate or {})]))


def _started_by_script(run: str) -> Iterator[EntryPoint]:
    for module, script in _WORD.findall(_EXPRESSION.sub("\0", run)):
        if module:
            yield EntryPoint("module", module)
        else:
            yield EntryPoint("script", script)


def _started_by_arguments(run: Sequence[Tree]) -> Iterator[EntryPoint]:
    before = ""
    for word in _texts(run):
        if "{{" not in word:
            if before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", word):
                yield EntryPoint("module", word)
            elif word.endswith((".py", ".sh")) and not word.startswith("-"):
                yield EntryPoint("script", word)
        before = word


def _started_by_accelerate(block: Mapping[str, Tree]) -> Iterator[EntryPoint]:
    kinds: tuple[Literal["script", "module"], ...] = ("script", "module")
    for kind in kinds:
        name = block.get(kind)
        if isinstance(name, str) and "{{" not in name:
            yield EntryPoint(kind, name)


def _texts(run: Sequence[Tree]) -> Iterator[str]:
    """Yield the words of a command, including words in nested lists."""
    for item in run:
        if isinstance(item, list):
            yield from _texts(item)
        elif isinstance(item, str):
            yield item
