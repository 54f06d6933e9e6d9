"""Step `evaluate` of classify: how well the model tells the labels of held-out rows, before and after.  Does not know how it was trained."""

from __future__ import annotations

from typing import Any

import reports
import text_record
import torch
import tuned
from classify_model import figures, logits
from loop import fail
from precision import autocast
from splits import Splits
from transformers import AutoTokenizer

SHOWN = 40  # labels in the page


def main() -> None:
    options = reports.parser(__doc__).parse_args()
    rows = Splits(options.data)
    if not len(rows.held_out):
        fail("no row is held out: a greater eval_fraction, or eval_fraction=0 for no report")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made, labels = text_record.read(options.model), rows.manifest["labels"]
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)

    def judge(model: Any) -> dict[str, Any]:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        with autocast(made["precision"], device.type):
            found, true = logits(model.to(device).eval(), rows.held_out, tokenizer, options.micro_batch, device)
        return figures(found.argmax(-1).numpy(), true.numpy(), labels) | {"loss": float(torch.nn.functional.cross_entropy(found, true))}

    before = judge(tuned.load_judge(options.base, made["init"], made["seed"], made["precision"], labels=labels))
    after = judge(tuned.load(options.base, options.model, judge=True))
    facts = {name: rows.manifest[name] for name in ("rows", "examples", "truncated_rows", "duplicate_rows", "contradictions", "bad_rows")}
    report = {**after, "conclusion": conclusion(before, after), "before": before, "data": facts}
    metrics = {f"{name}_{when}": found[name] for when, found in (("before", before), ("after", after)) for name in ("accuracy", "macro_f1", "loss")}
    reports.write(options.report, report, _page(report), metrics)
    shares = f"{after['accuracy']:.1%} of {after['rows']} held-out rows right (before {before['accuracy']:.1%})"
    print(f"evaluate: {shares}, macro-F1 {after['macro_f1']:.3f} (before {before['macro_f1']:.3f})")


def conclusion(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What the figures say, in a sentence."""
    chance = max(before["accuracy"], after["accuracy_of_most"])
    error = (chance * (1 - chance) / after["rows"]) ** 0.5  # of the share of rows that are right, if nothing was learned
    if after["accuracy"] <= chance + 2 * error:
        return (
            f"Nothing can be concluded: {after['accuracy']:.1%} of {after['rows']} rows are right, and without training, or by always saying the most"
            f" frequent label, {chance:.1%} are. Train longer, or hold out more rows."
        )
    worst = min(after["labels"], key=lambda name: after["labels"][name]["f1"] if after["labels"][name]["rows"] else 2)
    return f'It learned to tell the labels. The hardest is "{worst}", with an F1 of {after["labels"][worst]["f1"]:.2f}.'


def _page(report: dict[str, Any]) -> str:
    before, facts = report["before"], report["data"]
    labels = "\n".join(
        f"| {name} | {found['rows']} | {found['precision']:.3f} | {found['recall']:.3f} | {found['f1']:.3f} |"
        for name, found in list(report["labels"].items())[:SHOWN]
    )
    more = f"\n{len(report['labels']) - SHOWN} more labels are in report.json.\n" if len(report["labels"]) > SHOWN else ""
    return f"""# Classification report

Judged on {report["rows"]} rows that were kept from training, of {facts["rows"]} in all.

| | head as drawn | trained | always the most frequent |
|---|---|---|---|
| rows that are right | {before["accuracy"]:.1%} | {report["accuracy"]:.1%} | {report["accuracy_of_most"]:.1%} |
| macro-F1 | {before["macro_f1"]:.3f} | {report["macro_f1"]:.3f} | |
| loss of a row | {before["loss"]:.4f} | {report["loss"]:.4f} | |

**{report["conclusion"]}**

| label | rows | precision | recall | F1 |
|---|---|---|---|---|
{labels}
{more}
Data: {facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["contradictions"]} with another label than an equal text,
{facts["bad_rows"]} bad rows left out.
"""


if __name__ == "__main__":
    main()
