"""What Python files import, as values, and which of them a command starts.  What reads their syntax is `python_reader`."""

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


class Import(NamedTuple):
    """One import: `from ..module import names` has level 2; `import module` has no names."""

    level: int
    module: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "." * self.level + (self.module or "".join(self.names[:1]))


class Imports(NamedTuple):
    """What a file imports, what it names in `__all__`, and where that cannot be read: sentences without a subject."""

    found: tuple[Import, ...] = ()
    exported: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def dotted(self) -> tuple[str, ...]:
        """Every name that may be a module of another package, such as `a`, `a.b`."""
        names = (
            (each.module, *(f"{each.module}.{name}" for name in each.names))
            for each in self.found
            if not each.level
        )
        return tuple(dict.fromkeys(name for group in names for name in group))

    @classmethod
    def load(cls, row: Sequence[Any]) -> Imports:
        """From its JSON array."""
        found, exported, doubts = row
        return cls(
            tuple(Import(level, module, tuple(names)) for level, module, names in found),
            tuple(exported),
            tuple(doubts),
        )


class Start(NamedTuple):
    """A file that a command starts by its path, or a module that it starts by its name."""

    kind: Literal["script", "module"]
    name: str


def started(run: Sequence[Tree] | str | None, accelerate: Mapping[str, Tree] | None) -> list[Start]:
    """The scripts and modules that a command names, as they are written; a word with a value in it is none."""
    found: list[Start] = []
    if isinstance(run, str):
        for module, script in _WORD.findall(_EXPRESSION.sub("\0", run)):
            found.append(Start("module", module) if module else Start("script", script))
    elif run:
        before = ""
        for word in _leaves(run):
            if "{{" not in word:
                if before == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", word):
                    found.append(Start("module", word))
                elif word.endswith((".py", ".sh")) and word[0] != "-":
                    found.append(Start("script", word))
            before = word
    for key in ("script", "module"):
        value = (accelerate or {}).get(key)
        if isinstance(value, str) and "{{" not in value:
            found.append(Start("script" if key == "script" else "module", value))
    return list(dict.fromkeys(found))


def _leaves(run: Sequence[Tree]) -> Iterator[str]:
    for each in run:
        if isinstance(each, list):
            yield from _leaves(each)
        elif isinstance(each, str):
            yield each
