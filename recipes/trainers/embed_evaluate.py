"""Step `evaluate` of embed: how well held-out queries find their documents, before and after.  Does not know how the model was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reports
import text_record
import torch
from embed_model import Embedder, dimensions, load, retrieval
from loop import fail
from precision import autocast
from splits import Splits

MEASURES = {"ndcg@10": "ndcg", "mrr@10": "mrr", "accuracy@1": "accuracy", "recall@10": "recall"}
"""What sentence-transformers' InformationRetrievalEvaluator calls each measure, and what it is called here."""


def main() -> None:
    options = reports.parser(__doc__).parse_args()
    rows = Splits(options.data)
    if not len(rows.held_out):
        fail("no row is held out: a greater eval_fraction, or eval_fraction=0 for no report")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = text_record.read(options.model)

    def judge(folder: Path, init: str) -> dict[int, dict[str, float]]:
        model = load(
            folder, init, made["seed"], made["precision"], pooling=made["pooling"], prompts=made["prompts"], max_length=made["max_length"]
        ).to(device)
        with autocast(made["precision"], device.type):
            return _found(model, rows, options.micro_batch, made["matryoshka"])

    report = _report(judge(options.base, made["init"]), judge(options.model, "pretrained"), rows)
    before, names = report["before"], MEASURES.values()
    metrics = {f"{name}_{when}": found[name] for when, found in (("before", before), ("after", report)) for name in names}
    reports.write(options.report, report, _page(report), metrics)
    print(
        f"evaluate: NDCG@10 {report['ndcg']:.3f} (before {before['ndcg']:.3f}); {report['accuracy']:.1%} of {report['queries']} "
        f"held-out queries find their document first (before {before['accuracy']:.1%})"
    )


def _report(before: dict[int, dict[str, float]], after: dict[int, dict[str, float]], rows: Splits) -> dict[str, Any]:
    """Return what the page and report.json say: the measures of whole embeddings, and of each dimension."""
    whole = max(after)
    judge = retrieval(rows.held_out, rows.manifest["prompts"], 1)
    facts = ("rows", "examples", "truncated_rows", "duplicate_rows", "contradictions", "bad_rows")
    return {
        **after[whole],
        "queries": len(judge.queries),
        "documents": len(judge.corpus),
        "conclusion": conclusion(before[whole], after[whole], len(judge.queries)),
        "before": before[whole],
        "dimensions": {str(size): {"before": before[size], "after": after[size]} for size in after},
        "data": {name: rows.manifest[name] for name in facts},
    }


def _found(model: Embedder, rows: Splits, size: int, matryoshka: list[int]) -> dict[int, dict[str, float]]:
    """Return the measures for each number of dimensions that is judged, the most first."""
    whole = model.get_embedding_dimension() or 0
    found = {}
    for dimension in dimensions(matryoshka, whole):
        told = retrieval(rows.held_out, rows.manifest["prompts"], size, dimension if dimension < whole else None)(model)
        found[dimension] = {mine: float(told[f"cosine_{name}"]) for name, mine in MEASURES.items()}
    return found


def conclusion(before: dict[str, float], after: dict[str, float], queries: int) -> str:
    """Say in a sentence what the measures show."""
    error = 0.5 / queries**0.5  # at most, of a mean of so many numbers between 0 and 1
    if after["ndcg"] <= before["ndcg"] + 2 * error:
        return (
            f"Nothing can be concluded: NDCG@10 is {after['ndcg']:.3f} with {queries} queries, and before training it was {before['ndcg']:.3f}."
            f" Train longer, or hold out more rows."
        )
    return f"It learned to find documents: NDCG@10 rose by {after['ndcg'] - before['ndcg']:.3f}."


def _page(report: dict[str, Any]) -> str:
    facts = report["data"]
    lines = [
        f"| {size} | {found['before'][name]:.3f} | {found['after'][name]:.3f} | {long} |"
        for size, found in report["dimensions"].items()
        for long, name in MEASURES.items()
    ]
    table = "\n".join(lines)
    return f"""# Retrieval report

Judged by {report["queries"]} queries that were kept from training, among {report["documents"]} documents: all texts of the held-out rows.

| dimensions | before | trained | measure |
|---|---|---|---|
{table}

**{report["conclusion"]}**

Data: {facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["bad_rows"]} bad rows left out,
{facts["contradictions"]} rows with a negative that another row has as a match.
"""


if __name__ == "__main__":
    main()
