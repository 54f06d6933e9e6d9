"""The key of a step and its explanation, from one pre-image.  Knows values and digests, not files, stores or templates.

A key is hashed in two levels.  The author's half is what the recipe says about the step, reduced to what acts, with every value that its templates
read; it is hashed once, when the plan is compiled.  The world's half is what those names stood for: the content of every file, dataset, piece of code
and upstream output under its name in the attempt directory, and values known only late (metrics of another step).

    author key = H("author/1", author)          key = H("step/1", [author key, world])
    world      = sorted list of [kind, name, value], kind one of file, code, lock, model, value, absent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from ..digest import Digest, canonical, of_value

VERSION: Final = 1
"""Of the key itself.  Raising it makes every step run again once; see docs/design.md."""

World: TypeAlias = list[list[object]]
_Part: TypeAlias = tuple[str, str]
"""How a part is called, and what it belongs to: what was read when the plan was compiled and what is read late may have one name."""


def author_digest(author: Mapping[str, object]) -> Digest:
    return of_value(f"author/{VERSION}", author)


def former_author_digest(author: Mapping[str, object], rule: Sequence[str | None]) -> Digest:
    """The author's half as it was hashed while a rule of metrics, its file and pattern, was part of every key."""
    return author_digest({**author, "metrics": list(rule)})


def key(author: Digest, world: World) -> Digest:
    """The key of a step.  `world` need not be sorted.  Raises TypeError or ValueError when a part cannot be hashed: then there is no key."""
    return of_value(f"step/{VERSION}", [author, sorted(world, key=_order)])


def _order(entry: Sequence[object]) -> tuple[str, str]:
    return str(entry[0]), str(entry[1])


class Change(NamedTuple):
    """One difference between two pre-images: the part, and its value before and after (None: not there)."""

    part: str
    before: object
    after: object

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.part} is new: {_short(self.after)}"
        if self.after is None:
            return f"{self.part} is gone (was {_short(self.before)})"
        if self.part.startswith(("file ", "code ", "lock ", "model ")):
            return f"{self.part} changed"
        return f"{self.part} changed: {_short(self.before)} -> {_short(self.after)}"


def explain(before: Mapping[str, object], after: Mapping[str, object]) -> list[Change]:
    """Every part that differs between two pre-images (`{"author": …, "world": …}`), in a fixed order; empty when their keys are equal."""
    old, new = dict(_parts(before)), dict(_parts(after))
    return [
        Change(part[0], old.get(part), new.get(part))
        for part in sorted(old.keys() | new.keys())
        if _form(old, part) != _form(new, part)
    ]


def _form(parts: Mapping[_Part, object], part: _Part) -> bytes | None:
    """A part as it is hashed: `1`, `1.0` and `true` are equal in Python and in no key."""
    return canonical(parts[part]) if part in parts else None


def _parts(image: Mapping[str, object]) -> Iterable[tuple[_Part, object]]:
    author = image["author"]
    assert isinstance(author, dict)
    for name, value in author.items():
        if name == "metrics" and any(value):
            continue  # of an attempt that was stored while such a rule was part of the key
        if not isinstance(value, dict) or (name != "reads" and not value):
            yield (name, name), value
            continue
        for inner, each in value.items():
            yield (_shown_name(name, inner), name), each
    world = image["world"]
    assert isinstance(world, Sequence)
    for kind, name, value in world:
        shown = str(name) if kind == "value" else f"{kind} {name}"
        yield (shown, f"world {kind}"), value


def _shown_name(section: str, name: str) -> str:
    """What a value of a section of the author's half is called."""
    if section == "reads":
        return name
    if section == "outputs":
        # Templates read `outputs.x` too: what is declared about it goes by another name.
        return f"output {name}"
    return f"{section}.{name}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
