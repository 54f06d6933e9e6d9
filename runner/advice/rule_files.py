"""Read preflight rules from the library and from a gotchas.yaml beside a user's recipes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, Problem
from ..language import document
from ..language.document import Document
from ..paths import shipped
from . import rules, schema_faults
from .rules import Rule

if TYPE_CHECKING:
    from ..survey.survey import Survey

NAME: Final = "gotchas.yaml"
"""Name of the rule files, in the library and beside a user's recipes."""


@dataclass(frozen=True, slots=True)
class Library:
    """The active preflight rules, and the setting names and tools that their files define."""

    rules: tuple[Rule, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tools: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load(homes: Iterable[str] = ()) -> Library:
    """Load the library's preflight rules, merged with the rules in the directories `homes`.

    Raises Invalid with every problem of the files in `homes`.
    """
    ours = _load_library()
    known, names, tools = list(ours.rules), dict(ours.names), dict(ours.tools)
    for home in homes:
        path = Path(home) / NAME
        read = document.read(path)
        wrong = faults(read)
        if wrong:
            raise Invalid(wrong)
        theirs = _plain(read.value)
        replaced = {each["id"] for each in theirs.get("rules", ())}
        known = [rule for rule in known if rule.id not in replaced]
        known += rules.rules(theirs, own=True)
        _extend(names, theirs.get("names", {}))
        _extend(tools, theirs.get("tools", {}))
    return Library(tuple(known), names, tools)


def _extend(known: dict[str, Sequence[str]], more: Mapping[str, Sequence[str]]) -> None:
    """Add words to the lists of a mapping."""
    for name, words in more.items():
        known[name] = [*known.get(name, ()), *words]


@lru_cache(maxsize=1)
def _load_library() -> Library:
    tree = _plain(document.read(shipped() / "recipes" / NAME).value)
    return Library(rules.rules(tree), tree.get("names", {}), tree.get("tools", {}))


def faults(read: Document) -> list[Problem]:
    """Return every problem of a gotchas file: schema violations, duplicate ids, bad expressions."""
    wrong = schema_faults.faults(read, "gotchas.schema.json", "bad-rule")
    if wrong:
        return wrong
    seen: set[str] = set()
    for n, rule in enumerate(_plain(read.value).get("rules", ())):
        if rule["id"] in seen:
            wrong.append(
                read.problem(
                    "bad-rule",
                    f'two rules have the id "{rule["id"]}"',
                    ("rules", n, "id"),
                    fix="rename one of the two rules",
                )
            )
        seen.add(rule["id"])
        for where, error in rules.faults(rule):
            wrong.append(
                read.problem(
                    "bad-rule",
                    str(error),
                    ("rules", n, *where),
                    fix=error.fix,
                    offset=error.offset,
                    length=error.length,
                )
            )
    return wrong


def find_homes(found: Survey) -> tuple[str, ...]:
    """Return the recipe folders with their own gotchas.yaml."""
    ours = str(shipped() / "recipes")
    homes = dict.fromkeys((str(found.source.parent), *found.plan.homes))
    own: list[str] = []
    for home in homes:
        if os.path.exists(f"{home}/{NAME}") and os.path.realpath(home) != ours:
            own.append(home)
    return tuple(own)


def _plain(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
