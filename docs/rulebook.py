"""Write the preflight rules as Markdown, from recipes/gotchas.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from runner.advice import rule_files
from runner.advice.rules import ALWAYS, Rule
from runner.language.template import references

BEGIN: Final = "<!-- rules:begin -->"
END: Final = "<!-- rules:end -->"
FACTS: Final = {
    "model": "the model",
    "data": "the dataset",
    "gpu": "the GPU",
    "host": "the host",
    "environment": "the installed packages",
    "kept": "earlier runs",
    "memory": "the memory estimate",
    "offer": "the rented machine",
}
"""The subject of each fact that a rule may need, in the words of a sentence."""


def markdown() -> str:
    """What each rule finds and needs, its remedy, and from where it is known; then the names of settings."""
    library = rule_files.load()
    lines: list[str] = []
    for rule in library.rules:
        lines += ["", f"### {rule.id}", "", *_section(rule)]
    lines += ["", "### Names of settings", "", "| name in rules | names in tools |", "|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(f'`{other}`' for other in others)} |"
        for name, others in library.names.items()
    ]
    return "\n".join(lines[1:])


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def _section(rule: Rule) -> Iterator[str]:
    yield f"**Problem ({rule.severity})** · {rule.title}."
    yield ""
    needs = dict.fromkeys(
        each.path[0]
        for text in (rule.when, rule.each)
        for each in references(text)
        if each.path[0] not in ALWAYS
    )
    if needs:
        yield f"- The rule needs facts about {' and '.join(f'{FACTS[name]} (`{name}`)' for name in needs)}."
    remedy = _plain(rule.remedy)
    yield f"- Fix: {remedy[:1].upper()}{remedy[1:]}."
    if rule.fix:
        sets = [
            f"`{name}: {_plain(str(value).lower() if isinstance(value, bool) else str(value))}`"
            for values in rule.fix.values()
            for name, value in values.items()
        ]
        yield f"- `recipe check --fix` proposes {', '.join(sets)}."
    yield f"- Evidence: {', '.join(f'<{each}>' if each.startswith('https://') and ' ' not in each else each for each in rule.evidence)}."


def _plain(text: str) -> str:
    """A template as people read it: what is filled in is named after what it comes from."""
    text = re.sub(r"\{\{ '(\{\{|\}\})' \}\}", r"\1", text)
    return (
        re.sub(r"\{\{(?! state)\s*(.+?)\s*\}\}", lambda found: _named(found[1]), text)
        .strip()
        .rstrip(".")
    )


def _named(expression: str) -> str:
    name = re.fullmatch(r"[a-z]+\.([a-z_]+)(?: \|.*)?", expression)
    return f"⟨{name[1]}⟩" if name else "…"
