"""`recipe results`: the instances and runs of a recipe beside each other: inputs that differ, metrics, time, place.  Changes nothing."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from ...errors import NotFound, did_you_mean
from ...planning.ids import bare, inner_names, names, stored_form
from ...survey import comparison
from ...survey.comparison import OWN, Cell, Comparison
from ..tables import align, cell, markdown
from ..tail import safe_ids, safe_line, span
from .chosen import moment, near_step, open_to_look, recipe_of, sweep_name
from .flags import JSON_HELP

_LISTED = 60  # results of a step
_COMPARED = 20  # runs in a browser, which shows so many
_METRICS = 5  # of a table
_TEXT = frozenset({"step", "run", "label", "state", "reason", "where", "best", "made"})


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="Recipe that ran here, by its name or path (default: that of the last run)",
    )
    parser.add_argument(
        "--step",
        type=stored_form,
        metavar="STEP",
        help="Only this step; a matrix step includes all its instances",
    )
    parser.add_argument(
        "--sort",
        metavar="NAME",
        help="Sort by a metric, best first, or by an input (default: the metric of `select`)",
    )
    parser.add_argument(
        "--best",
        choices=["min", "max"],
        help=(
            "Whether the lowest or highest value is best (default: as in `select`, otherwise "
            "by the metric's name)"
        ),
    )
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        help="Columns to show, separated by commas: names of inputs and metrics, `min loss`, "
        + ", ".join(OWN),
    )
    parser.add_argument(
        "--csv",
        action="store_true",
        help="Print all results as CSV, with times in seconds",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--md", action="store_true", help="Print a Markdown table")
    parser.add_argument(
        "--open",
        dest="opens",
        action="store_true",
        help="Compare the newest of these runs in a browser, as `recipe ui` does",
    )
    parser.epilog = "Examples:\n  recipe results\n  recipe results sweep@1 --sort eval_loss\n  recipe results --columns lr,seed,eval_loss,time --md"


def run(args: argparse.Namespace) -> int:
    with open_to_look(args.workspace) as ws:
        recipe = recipe_of(ws, args.location, args.recipe)
        found = comparison.collect_results(ws, recipe)
        found += comparison.collect_results(ws, sweep_name(recipe))
        chosen = comparison.read_criteria(ws, recipe)
    if args.step is not None:
        known = [result.step for result in found]
        found = [result for result in found if args.step in names(result.step)] or [
            result for result in found if args.step in inner_names(result.step)
        ]
        if not found:
            raise NotFound(
                f'no result of "{args.step}" in the runs of {recipe}',
                fix=near_step(args.step, known) if known else _NONE,
            )
    tables = comparison.compare(
        found, chosen, sort=args.sort, least=None if args.best is None else args.best == "min"
    )
    if args.sort is not None:
        tables = [table for table in tables if table.has(args.sort)]
        if not tables:
            known = sorted({name for result in found for name in (*result.values, *result.metrics)})
            raise NotFound(
                f'no result of {recipe} has a column "{args.sort}"',
                fix=did_you_mean(args.sort, known) or f"available columns: {', '.join(known)}",
            )
    wanted = (
        [name.strip() for name in args.columns.split(",")] if args.columns is not None else None
    )
    _check(wanted, tables)
    if args.opens:
        return _open_comparison(args, tables)
    if args.json:
        print(
            json.dumps(
                {"recipe": recipe, "results": [row for table in tables for row in _as_json(table)]},
                indent=2,
            )
        )
    elif args.csv:
        rows = [row for table in tables for row in table.flat()]
        columns = wanted or list(dict.fromkeys(name for row in rows for name in row))
        csv.writer(sys.stdout, lineterminator="\n").writerows(
            [columns, *([row.get(name) for name in columns] for row in rows)]
        )
    elif not tables:
        print(f"no step of {recipe} reported metrics: {_NONE}")
    else:
        print(
            "\n\n".join(
                "\n".join(as_text(table, recipe, wanted, in_markdown=args.md)) for table in tables
            )
        )
    return 0


def _open_comparison(args: argparse.Namespace, tables: Sequence[Comparison]) -> int:
    """Open the page where it compares the runs that made the newest results.  Raises NotFound where there are none."""
    from .serve import page

    made = {result.run: result.made for table in tables for result in table.results}
    if not made:
        raise NotFound("no results to compare", fix=_NONE)
    newest = sorted(made, key=lambda run: made[run], reverse=True)[:_COMPARED]
    return page(args.workspace, f"&compare={'+'.join(newest)}")


_NONE = (
    "set `metrics: true` and append JSON lines to $RECIPE_METRICS, or set `metrics: {pattern: …}`"
)


def _check(wanted: Sequence[str] | None, tables: Sequence[Comparison]) -> None:
    """That some table has each of the columns.  Raises NotFound."""
    known = dict.fromkeys(name for table in tables for row in table.flat() for name in row)
    for name in wanted or ():
        if name not in known:
            raise NotFound(
                f'unknown column "{name}"',
                fix=did_you_mean(name, known) or f"available columns: {', '.join(known)}",
            )


def _as_json(table: Comparison) -> list[dict[str, object]]:
    return [
        {
            "step": result.step, "run": result.run, "label": result.label, "made": result.made,
            "state": result.state, "reason": result.reason, "seconds": result.seconds, "where": result.where or None,
            "best": result is table.best, "inputs": dict(result.values),
            "metrics": {name: {"last": each.last, "min": each.least, "max": each.greatest} for name, each in result.metrics.items()},
        }
        for result in table.results
    ]  # fmt: skip


def as_text(
    table: Comparison, recipe: str, wanted: Sequence[str] | None, *, in_markdown: bool
) -> list[str]:
    """The results of one step for people."""
    rows, best, by = table.flat(), table.best, table.by
    columns = list(wanted) if wanted is not None else _columns(table, rows)
    marks = [] if best is None or in_markdown else [""]
    listed = rows[:_LISTED]
    text = [
        [*marks, *(safe_line(name).upper() if name in OWN else safe_line(name) for name in columns)]
    ]
    for row in listed:
        cells = [_text(name, row.get(name)) for name in columns]
        if in_markdown and row["best"]:
            cells[0] = f"**{cells[0]}**"
        text.append([*("*" if row["best"] else "" for _ in marks), *cells])
    right = {
        n + len(marks)
        for n, name in enumerate(columns)
        if name not in _TEXT and _numbers(listed, name)
    }
    runs, gap = len({result.run for result in table.results}), [""] if in_markdown else []
    many = (
        f"{len(rows)} result{'s' if len(rows) != 1 else ''} of {runs} run{'s' if runs != 1 else ''}"
    )
    lines = [
        f"{safe_ids(bare(table.results[0].step))} of {recipe}: {many}",
        *gap,
        *(markdown if in_markdown else align)(text, right),
    ]
    if len(rows) > len(listed):
        lines.append(f"… and {len(rows) - len(listed)} more (--csv and --json have all)")
    if best is not None and by is not None:
        lines += [
            *gap,
            f"{'In bold' if in_markdown else '*'}: {safe_line(by.words)}, {safe_ids(best.step)} of {best.run}",
        ]
    return lines


def _columns(table: Comparison, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """What people want to see: what differs, the metrics, how long it took, and where."""
    differs = comparison.differing_inputs(table.results)
    inputs = [f"inputs.{name}" if name in OWN else name for name in differs]
    taken = {*OWN, *(name for result in table.results for name in result.values)}
    first = [table.by.metric] if table.by is not None else []
    metrics = []
    for name in list(dict.fromkeys([*first, *comparison.metric_names(table.results)]))[:_METRICS]:
        word = f"metrics.{name}" if name in taken else name
        best = comparison.best_column(word)
        metrics += [
            word,
            *([best] if any(row.get(best) not in (None, row.get(word)) for row in rows) else []),
        ]
    distinct = inputs and len(
        {json.dumps([row.get(name) for name in inputs]) for row in rows}
    ) == len(rows)
    state = ["state"] if any(row["state"] != "DONE" for row in rows) else []
    label = ["label"] if any(row["label"] for row in rows) else []
    where = ["where"] if any(row["where"] for row in rows) else []
    return [
        *([] if distinct else ["step"]),
        *inputs,
        *metrics,
        *state,
        "time",
        *where,
        "run",
        *label,
    ]


def _numbers(rows: Iterable[Mapping[str, Cell]], name: str) -> bool:
    return all(row.get(name) is None or isinstance(row[name], (int, float)) for row in rows)


def _text(name: str, value: Cell) -> str:
    if name == "time" and isinstance(value, (int, float)):
        return span(value)
    if name == "made" and isinstance(value, (int, float)):
        return moment(value)
    if name == "step" and isinstance(value, str):
        return safe_ids(value)
    if name == "where" and not value:
        return "here"
    return "yes" if name == "best" and value else "" if name == "best" else cell(value)
