"""The table of docs/memory.md: each published measurement, and what the formula and a rule of thumb say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import yaml

from runner.advice.memory import TrainingSetup, estimate, read
from runner.language import library

MARKS: Final = "<!-- published: begin -->", "<!-- published: end -->"
RULE: Final = {"full": 8.0, "lora": 2.0, "qlora": 0.5}
"""Bytes for each weight in the table of LLaMA-Factory's README: pure bf16, LoRA on 16 bits, 4 bits."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; sizes in 10⁹ bytes, errors as shares of what was measured."""

    id: str
    what: str
    source: str
    known: bool
    measured: float
    counts: str
    estimated: float = 0.0
    rule: float = 0.0
    said: str = ""  # what is assumed, or why it is out

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1

    @property
    def error_of_rule(self) -> float:
        return self.rule / self.measured - 1


def rows() -> list[Row]:
    """Every row of fixtures/memory/published.yaml; `estimated` is 0 for those that the formula is not for."""
    data = yaml.safe_load((library.fixtures() / "memory" / "published.yaml").read_text("utf-8"))
    return [_row(row, data["models"]) for row in data["rows"]]


def _row(row: dict[str, Any], models: dict[str, Any]) -> Row:
    found = Row(row["id"], row["what"], row["source"], row["known"], row["gb"], row["counts"])
    if "out" in row:
        return Row(
            found.id,
            found.what,
            found.source,
            False,
            found.measured,
            found.counts,
            said=f"not estimated: {row['out']}",
        )
    training = TrainingSetup(**row["training"], context=row["counts"] == "device")
    model = read(models[row["model"]])
    terms = dict(estimate(model, training).terms)
    if row["counts"] == "allocated":
        del terms["lost between tensors"]  # which is what PyTorch holds beyond it
    rule = (
        RULE[training.method] * model.parameters / (training.devices if training.stage == 3 else 1)
    )
    said = f"assumed: {row['assumed']}" if "assumed" in row else ""
    return Row(
        found.id,
        found.what,
        found.source,
        found.known,
        found.measured,
        found.counts,
        sum(terms.values()) / 1e9,
        rule / 1e9,
        said,
    )


def table() -> str:
    """The rows as Markdown."""
    lines = [
        "| # | what | measured, GB | estimated | error | simple rule | its error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        start = f"| [{row.id}]({row.source.split(' (')[0]}) | {row.what} | {row.measured:g} {row.counts} |"
        if not row.estimated:
            lines.append(f"{start} | | | | {row.said} |")
            continue
        error = f"**{row.error:+.0%}**" if row.known else f"{row.error:+.0%}"
        lines.append(
            f"{start} {row.estimated:.1f} | {error} | {row.rule:.1f} | {row.error_of_rule:+.0%} | {row.said} |"
        )
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
