"""Compute and explain the cache key of a step, from values and digests.

The author half of a key is the effective text of the recipe for the step, with every value that its
templates read.  It is hashed once, at compile time.  The world half is the content behind those
names: every file, dataset, code file and upstream output under its path in the attempt directory,
and late values (metrics of other steps).

    author key = H("author/1", author)          key = H("step/1", [author key, world])
    world      = sorted list of [kind, name, value], kind one of file, code, lock, model, tool, value, absent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from ..digest import Digest, canonical, of_value

VERSION: Final = 1
"""Version of the cache key.  Raising it makes every step rerun once; see docs/design.md."""

World: TypeAlias = list[list[object]]
_Part: TypeAlias = tuple[str, str]
"""Displayed name and section of a cache key part.

A compile-time value and a late value may share a name.
"""


def author_digest(author: Mapping[str, object]) -> Digest:
    return of_value(f"author/{VERSION}", author)


def former_author_digest(author: Mapping[str, object], rule: Sequence[str | None]) -> Digest:
    """Return the recipe's part of the cache key as computed by an earlier version.

    That version included the metrics rule (file and pattern).
    """
    return author_digest({**author, "metrics": list(rule)})


def key(author: Digest, world: World) -> Digest:
    """Return the cache key of a step.

    `world` need not be sorted.  Raises TypeError or ValueError if a part cannot be hashed.
    """
    return of_value(f"step/{VERSION}", [author, sorted(world, key=_order)])


def _order(entry: Sequence[object]) -> tuple[str, str]:
    return str(entry[0]), str(entry[1])


class Change(NamedTuple):
    """Part that differs between two cache keys, with its value before and after.

    None means absent.
    """

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
    """Return the parts that differ between the contents of two cache keys, in a fixed order.

    Contents have the form `{"author": …, "world": …}`.  The result is empty if the keys are equal.
    """
    old, new = dict(_parts(before)), dict(_parts(after))
    changes: list[Change] = []
    for part in sorted(old.keys() | new.keys()):
        if _form(old, part) != _form(new, part):
            name, _ = part
            changes.append(Change(name, old.get(part), new.get(part)))
    return changes


def _form(parts: Mapping[_Part, object], part: _Part) -> bytes | None:
    """Return the canonical bytes of a cache key part.

    `1`, `1.0` and `true` are equal in Python, but not in a key.
    """
    return canonical(parts[part]) if part in parts else None


def _parts(image: Mapping[str, object]) -> Iterable[tuple[_Part, object]]:
    """Yield all parts of a cache key's content with their values."""
    author, world = image["author"], image["world"]
    assert isinstance(author, dict)
    assert isinstance(world, Sequence)
    yield from _author_parts(author)
    for kind, name, value in world:
        shown = str(name) if kind == "value" else f"{kind} {name}"
        yield (shown, f"world {kind}"), value


def _author_parts(author: Mapping[str, object]) -> Iterable[tuple[_Part, object]]:
    for section, value in author.items():
        if section == "metrics" and _is_former_rule(value):
            continue
        if isinstance(value, dict) and (value or section == "reads"):
            for name, each in value.items():
                yield (_shown_name(section, name), section), each
        else:
            yield (section, section), value


def _is_former_rule(metrics: object) -> bool:
    """Return whether the `metrics` of a key name a file or a pattern, as in an earlier version.

    The current version stores them outside the key, and here only that there is neither.
    """
    return isinstance(metrics, Sequence) and any(metrics)


def _shown_name(section: str, name: str) -> str:
    """Return the displayed name of a value in a section of the cache key."""
    if section == "reads":
        return name
    if section == "outputs":
        # A declared output needs another name than the `outputs.x` that templates read.
        return f"output {name}"
    return f"{section}.{name}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
