"""Read the rules of what goes wrong: those of the library, and those of a gotchas.yaml beside recipes of somebody else.  Asks none of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, Problem
from ..paths import shipped
from . import rules, schema_faults
from .rules import Rule

if TYPE_CHECKING:
    from ..language.document import Document
    from ..survey.survey import Survey

NAME: Final = "gotchas.yaml"
"""A file of rules: that of the library, and one beside recipes of somebody else."""


@dataclass(frozen=True, slots=True)
class Library:
    """The rules in force, with what their files say of names and tools."""

    rules: tuple[Rule, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tools: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load(homes: Iterable[str] = ()) -> Library:
    """The rules of the library, and of the folders of other people's recipes.  Raises Invalid with every problem of theirs."""
    from ..language import document

    ours = _ours()
    known, names, tools = list(ours.rules), dict(ours.names), dict(ours.tools)
    for home in homes:
        path = Path(home) / NAME
        read = document.read(path)
        if wrong := faults(read):
            raise Invalid(wrong)
        theirs = _plain(read.value)
        replaced = {each["id"] for each in theirs.get("rules", ())}
        known = [
            *(rule for rule in known if rule.id not in replaced),
            *rules.rules(theirs, own=True),
        ]
        names |= {
            name: [*names.get(name, ()), *more] for name, more in theirs.get("names", {}).items()
        }
        tools |= {
            tool: [*tools.get(tool, ()), *more] for tool, more in theirs.get("tools", {}).items()
        }
    return Library(tuple(known), names, tools)


@lru_cache(maxsize=1)
def _ours() -> Library:
    from ..language import document

    tree = _plain(document.read(shipped() / "recipes" / NAME).value)
    return Library(rules.rules(tree), tree.get("names", {}), tree.get("tools", {}))


def faults(read: Document) -> list[Problem]:
    """Everything in which a gotchas file is not what its schema says, and every expression in it that cannot be read."""
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


def beside(found: Survey) -> tuple[str, ...]:
    """The folders of recipes that bring rules of their own."""

    ours = str(shipped() / "recipes")
    return tuple(
        home
        for home in dict.fromkeys((str(found.source.parent), *found.plan.homes))
        if os.path.exists(f"{home}/{NAME}") and os.path.realpath(home) != ours
    )


def _plain(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
