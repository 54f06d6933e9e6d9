"""Step `compare` of eval@1: two models' scores side by side, with the error of their difference.  Runs no model.

Both models answered the same documents, so the error of a difference is that of the differences by document (Miller, 2024, "Adding Error Bars
to Evals", arXiv:2411.00640).  For sums over sums, such as bits per byte, it is that of a ratio (Cochran, Sampling Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loop import Metrics

ARROWS = {True: "↑", False: "↓", None: ""}
SURE = 2.0  # standard errors
# Of metrics that are sums of log-likelihoods over sums of lengths: the factor of that ratio, and whether they are its exponential.
RATIOS = {"bits_per_byte": (1 / math.log(2), False), "byte_perplexity": (1.0, True), "word_perplexity": (1.0, True)}


class Score(NamedTuple):
    """What a model scores by one metric of one task."""

    value: float
    error: float | None  # standard error; None: not known
    parts: list[float]  # by document, what moves the score: they sum to 0, and their squares to the error's; empty: not known


def main() -> None:
    options = _options()
    after = read(options.after)
    compared = (options.before / "scores.json").exists()
    before = read(options.before) if compared else {}
    told = json.loads((options.after / "scores.json").read_text())
    rows = [_row(key, before.get(key), score, told) for key, score in after.items()]
    options.out.mkdir(parents=True, exist_ok=True)
    first = json.loads((options.before / "scores.json").read_text())["model"] if compared else None
    table = {"before": first, "after": told["model"], "lm_eval": told["lm_eval"], "rows": rows}
    (options.out / "table.json").write_text(json.dumps(table, indent=2) + "\n")
    (options.out / "table.md").write_text(page(table), "utf-8")
    if file := os.environ.get("RECIPE_METRICS"):
        Metrics(Path(file)).tell(1, **numbers(rows))
    for row in rows:
        print(f"compare: {row['task']} {row['metric']}: {row['conclusion'] or format(row['after'], '.4f')}")


def read(folder: Path) -> dict[tuple[str, str], Score]:
    """The scores that lie in a folder, by task and metric (with its filter, where that is not `none`)."""
    kept = json.loads((folder / "scores.json").read_text())
    documents: dict[tuple[str, str, str], list[tuple[str, Any]]] = defaultdict(list)
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        for metric, value in sample["metrics"].items():
            documents[sample["task"], metric, sample["filter"]].append((sample["document"], value))
    found = {}
    for task, values in kept["results"].items():
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            said = values.get(f"{metric}_stderr,{chosen}")
            parts = influences(metric, value, [each for _, each in sorted(documents.get((task, metric, chosen), []), key=lambda item: item[0])])
            error = _error(parts) if parts else float(said) if isinstance(said, int | float) else None
            found[task, metric if chosen in ("", "none") else f"{metric} ({chosen})"] = Score(float(value), error, parts)
    return found


def influences(metric: str, value: float, documents: Sequence[Any]) -> list[float]:
    """How far each document moves the score from where it is; nothing where the score is made in another way than by mean or ratio."""
    if len(documents) < 2:
        return []
    if metric in RATIOS and all(isinstance(each, list) and len(each) == 2 for each in documents):
        factor, exponential = RATIOS[metric]
        lengths = sum(length for _, length in documents)
        ratio = -factor * sum(log for log, _ in documents) / lengths
        slope = value if exponential else 1.0
        made = [slope * (-factor * log - ratio * length) / lengths for log, length in documents]
        return made if math.isclose(math.exp(ratio) if exponential else ratio, value, rel_tol=1e-6) else []
    if all(isinstance(each, int | float) for each in documents) and math.isclose(sum(documents) / len(documents), value, rel_tol=1e-6, abs_tol=1e-9):
        return [(each - value) / len(documents) for each in documents]
    return []


def numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of the run: TASK_METRIC, and TASK_METRIC_before where there is a model before."""
    told = {}
    for row in rows:
        name = re.sub(r"\W+", "_", f"{row['task']}_{row['metric']}").strip("_")
        told[name] = row["after"]
        if row["before"] is not None:
            told[f"{name}_before"] = row["before"]
    return told


def page(table: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = []
    for row in table["rows"]:
        arrow = ARROWS[row["higher_is_better"]]
        cells = [row["task"], f"{row['metric']} {arrow}".strip(), str(row["documents"] or "")]
        if table["before"] is not None:
            cells += [_shown(row["before"], row["before_error"]), _shown(row["after"], row["after_error"])]
            cells += [_shown(row["difference"], row["difference_error"], signed=True), row["conclusion"]]
        else:
            cells.append(_shown(row["after"], row["after_error"]))
        lines.append(f"| {' | '.join(cells)} |")
    heads = ["task", "metric", "documents", *(["before", "after", "difference", ""] if table["before"] is not None else ["score"])]
    compared = f"`{table['after']}` against `{table['before']}`" if table["before"] is not None else f"`{table['after']}`"
    told = "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines])
    errors = "± is one standard error. ↑: more is better, ↓: less is."
    if table["before"] is not None:
        errors += (
            " Both models answered the same documents; the error of a difference is that of the differences\ndocument by document where the score is"
            " a mean or a ratio over documents, else that of two independent scores. A difference of less than\ntwo standard errors is called none:"
            " so many documents cannot show it."
        )
    return f"# Evaluation: {compared}\n\n{told}\n\n{errors} Scores by lm-evaluation-harness {table['lm_eval']}.\n"


def _row(key: tuple[str, str], before: Score | None, after: Score, told: Mapping[str, Any]) -> dict[str, Any]:
    task, metric = key
    better = told["higher_is_better"].get(task, {}).get(metric.partition(" ")[0])
    row: dict[str, Any] = {"task": task, "metric": metric, "documents": told["documents"].get(task), "higher_is_better": better}
    row |= {"before": None, "before_error": None, "after": after.value, "after_error": after.error}
    row |= {"difference": None, "difference_error": None, "conclusion": ""}
    if before is None:
        return row
    difference = after.value - before.value
    if after.parts and len(after.parts) == len(before.parts):
        error = _error([one - other for one, other in zip(after.parts, before.parts, strict=True)])
    elif after.error is not None and before.error is not None:
        error = math.hypot(after.error, before.error)
    else:
        error = None
    row |= {"before": before.value, "before_error": before.error, "difference": difference, "difference_error": error}
    return row | {"conclusion": _conclusion(difference, error, better)}


def _conclusion(difference: float, error: float | None, better: bool | None) -> str:
    if error is None or better is None:
        return "" if difference else "no difference"
    if abs(difference) <= SURE * error:
        return "no difference"
    return "better" if (difference > 0) == better else "worse"


def _error(parts: Sequence[float]) -> float:
    return math.sqrt(len(parts) / (len(parts) - 1) * sum(each * each for each in parts))


def _shown(value: float | None, error: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:{'+' if signed else ''}.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the scores of the model that is compared with; an empty folder: there is none")
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
