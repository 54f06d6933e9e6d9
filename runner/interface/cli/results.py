"""Compare the results of a recipe's runs in a table for `recipe results`.  Read-only."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from ...errors import NotFound, did_you_mean
from ...language.units import count_text
from ...planning.ids import bare, inner_names, names, stored_form
from ...survey import comparison
from ...survey.comparison import OWN, Cell, Comparison, Result
from ..tables import align, cell, markdown
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP
from .targets import find_recipe, format_time, open_for_reading, suggest_step, sweep_name

_LISTED = 60  # table rows per step
_COMPARED = 20  # maximum number of runs that the web page compares
_METRICS = 5  # maximum number of metrics in a table
_TEXT = frozenset({"step", "run", "label", "state", "reason", "where", "best", "made"})


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="Recipe whose runs to compare, by its name or path (default: the recipe of the last run)",
    )
    parser.add_argument(
        "--step",
        type=stored_form,
        metavar="STEP",
        help="Show only this step; for a matrix step, all its instances",
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
        help="Open a comparison of the newest of these runs in the web interface",
    )
    parser.epilog = "Examples:\n  recipe results\n  recipe results sweep@1 --sort eval_loss\n  recipe results --columns lr,seed,eval_loss,time --md"


def run(args: argparse.Namespace) -> int:
    with open_for_reading(args.workspace) as ws:
        recipe = find_recipe(ws, args.location, args.recipe)
        found = comparison.collect_results(ws, recipe)
        found += comparison.collect_results(ws, sweep_name(recipe))
        chosen = comparison.read_criteria(ws, recipe)
    if args.step is not None:
        found = _choose_step(found, args.step, recipe)
    least = None if args.best is None else args.best == "min"
    tables = comparison.compare(found, chosen, sort=args.sort, least=least)
    if args.sort is not None:
        tables = _choose_sortable(tables, args.sort, recipe, found)
    columns = _split_columns(args.columns)
    _check_columns(columns, tables)
    if args.opens:
        return _open_comparison(args, tables)
    if args.json:
        _print_json(recipe, tables)
    elif args.csv:
        _print_csv(tables, columns)
    elif not tables:
        print(f"no step of {recipe} reported metrics: {_NONE}")
    else:
        _print_text(recipe, tables, columns, in_markdown=args.md)
    return 0


def _choose_step(found: Sequence[Result], step: str, recipe: str) -> list[Result]:
    """Return the results of a step, or of the steps with this name in nested recipes.

    Raises NotFound.
    """
    for names_of in (names, inner_names):
        chosen = [result for result in found if step in names_of(result.step)]
        if chosen:
            return chosen
    known = [result.step for result in found]
    fix = suggest_step(step, known) if known else _NONE
    raise NotFound(f'no result of "{step}" in the runs of {recipe}', fix=fix)


def _choose_sortable(
    tables: Sequence[Comparison], column: str, recipe: str, found: Sequence[Result]
) -> list[Comparison]:
    """Return the tables that have the column.  Raises NotFound if none has the column."""
    sortable = [table for table in tables if table.has(column)]
    if not sortable:
        available: set[str] = set()
        for result in found:
            available.update(result.values, result.metrics)
        known = sorted(available)
        fix = did_you_mean(column, known) or f"available columns: {', '.join(known)}"
        raise NotFound(f'no result of {recipe} has a column "{column}"', fix=fix)
    return sortable


def _split_columns(names: str | None) -> list[str] | None:
    if names is None:
        return None
    return [name.strip() for name in names.split(",")]


def _print_json(recipe: str, tables: Sequence[Comparison]) -> None:
    results = list(chain.from_iterable(map(_as_json, tables)))
    print(json.dumps({"recipe": recipe, "results": results}, indent=2))


def _print_csv(tables: Sequence[Comparison], columns: Sequence[str] | None) -> None:
    rows = _flat_rows(tables)
    header = columns or _column_names(rows)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([row.get(name) for name in header])


def _flat_rows(tables: Sequence[Comparison]) -> list[dict[str, Cell]]:
    return list(chain.from_iterable(table.flat() for table in tables))


def _column_names(rows: Iterable[Mapping[str, Cell]]) -> list[str]:
    """Return the names of the rows' columns, in the order of their first appearance."""
    return list(dict.fromkeys(chain.from_iterable(rows)))


def _print_text(
    recipe: str, tables: Sequence[Comparison], columns: Sequence[str] | None, *, in_markdown: bool
) -> None:
    texts = [as_text(table, recipe, columns, in_markdown=in_markdown) for table in tables]
    print("\n\n".join("\n".join(lines) for lines in texts))


def _open_comparison(args: argparse.Namespace, tables: Sequence[Comparison]) -> int:
    """Open the comparison page of the runs with the newest results.

    Raises NotFound without results.
    """
    from .serve import page

    made: dict[str, float] = {}
    for table in tables:
        for result in table.results:
            made[result.run] = result.made
    if not made:
        raise NotFound("no results to compare", fix=_NONE)
    newest = sorted(made, key=lambda run: made[run], reverse=True)[:_COMPARED]
    return page(args.workspace, f"&compare={'+'.join(newest)}")


_NONE = (
    "set `metrics: true` and append JSON lines to $RECIPE_METRICS, or set `metrics: {pattern: …}`"
)


def _check_columns(columns: Sequence[str] | None, tables: Sequence[Comparison]) -> None:
    """Raise NotFound if a column is in none of the tables."""
    known = _column_names(_flat_rows(tables))
    for name in columns or ():
        if name not in known:
            fix = did_you_mean(name, known) or f"available columns: {', '.join(known)}"
            raise NotFound(f'unknown column "{name}"', fix=fix)


def _as_json(table: Comparison) -> list[dict[str, object]]:
    return [_result_as_json(result, is_best=result is table.best) for result in table.results]


def _result_as_json(result: Result, *, is_best: bool) -> dict[str, object]:
    metrics = {
        name: {"last": metric.last, "min": metric.least, "max": metric.greatest}
        for name, metric in result.metrics.items()
    }
    return {
        "step": result.step,
        "run": result.run,
        "label": result.label,
        "made": result.made,
        "state": result.state,
        "reason": result.reason,
        "seconds": result.seconds,
        "where": result.where or None,
        "best": is_best,
        "inputs": dict(result.values),
        "metrics": metrics,
    }


def as_text(
    table: Comparison, recipe: str, columns: Sequence[str] | None, *, in_markdown: bool
) -> list[str]:
    """Return the lines of a step's result table, with a title and a legend for the best result."""
    rows = table.flat()
    if columns is None:
        columns = _choose_columns(table, rows)
    listed = rows[:_LISTED]
    has_marks = table.best is not None and not in_markdown
    cells, right = _table_cells(listed, columns, has_marks=has_marks, in_markdown=in_markdown)
    # Without a blank line, Markdown takes the legend for a row of the table.
    gap = [""] if in_markdown else []
    lay_out = markdown if in_markdown else align
    lines = [_title(table, recipe), *gap, *lay_out(cells, right)]
    if len(rows) > len(listed):
        lines.append(f"… and {len(rows) - len(listed)} more (--csv and --json have all)")
    if table.best is not None and table.by is not None:
        mark = "In bold" if in_markdown else "*"
        best = f"{safe_ids(table.best.step)} of {table.best.run}"
        lines += [*gap, f"{mark}: {safe_line(table.by.words)}, {best}"]
    return lines


def _title(table: Comparison, recipe: str) -> str:
    step = safe_ids(bare(table.results[0].step))
    results = count_text(len(table.results), "result")
    runs = count_text(len({result.run for result in table.results}), "run")
    return f"{step} of {recipe}: {results} of {runs}"


def _table_cells(
    rows: Sequence[Mapping[str, Cell]],
    columns: Sequence[str],
    *,
    has_marks: bool,
    in_markdown: bool,
) -> tuple[list[list[str]], set[int]]:
    """Return the header and rows of a table, and the indices of its right-aligned columns.

    With `has_marks`, the first column marks the best result. In Markdown, the first cell of the
    best result is bold.
    """
    header = [_heading(name) for name in columns]
    if has_marks:
        header.insert(0, "")
    text = [header]
    for row in rows:
        cells = [_cell_text(name, row.get(name)) for name in columns]
        if in_markdown and row["best"]:
            cells[0] = f"**{cells[0]}**"
        if has_marks:
            mark = "*" if row["best"] else ""
            cells.insert(0, mark)
        text.append(cells)
    right = {n + has_marks for n, name in enumerate(columns) if _is_numeric(rows, name)}
    return text, right


def _heading(column: str) -> str:
    """Return the heading of a column: in capitals, unless a user named the column."""
    name = safe_line(column)
    return name.upper() if column in OWN else name


_DETAILS: Final = ("state", "time", "where", "run", "label")
"""Columns after the inputs and metrics."""


def _choose_columns(table: Comparison, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Return the default columns: the inputs that differ, metrics, time, and non-empty details."""
    inputs = [_input_column(name) for name in comparison.find_differing_inputs(table.results)]
    step = [] if _are_distinct(rows, inputs) else ["step"]
    details = [name for name in _DETAILS if _is_worth_a_column(name, rows)]
    return [*step, *inputs, *_metric_columns(table, rows), *details]


def _input_column(name: str) -> str:
    """Return the column of an input, with a prefix if its name is that of another column."""
    return f"inputs.{name}" if name in OWN else name


def _is_worth_a_column(detail: str, rows: Sequence[Mapping[str, Cell]]) -> bool:
    """Return True for the time and the run, and for other details if a row has an unusual value."""
    if detail in ("time", "run"):
        return True
    if detail == "state":
        return any(row["state"] != "DONE" for row in rows)
    return any(row[detail] for row in rows)


def _metric_columns(table: Comparison, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Return the metric columns, each followed by its best value if that differs from the last."""
    taken = set(OWN).union(*(result.values for result in table.results))
    metrics = comparison.list_metric_names(table.results)
    if table.by is not None:
        metrics = [table.by.metric, *metrics]
    columns = []
    for name in list(dict.fromkeys(metrics))[:_METRICS]:
        column = f"metrics.{name}" if name in taken else name
        columns.append(column)
        best = comparison.best_column(column)
        if any(row.get(best) not in (None, row.get(column)) for row in rows):
            columns.append(best)
    return columns


def _are_distinct(rows: Sequence[Mapping[str, Cell]], inputs: Sequence[str]) -> bool:
    """Return True if the input values alone tell all rows apart."""
    if not inputs:
        return False
    combinations = set()
    for row in rows:
        values = [row.get(name) for name in inputs]
        combinations.add(json.dumps(values))
    return len(combinations) == len(rows)


def _is_numeric(rows: Iterable[Mapping[str, Cell]], name: str) -> bool:
    if name in _TEXT:
        return False
    return all(row.get(name) is None or isinstance(row[name], (int, float)) for row in rows)


_NUMBER_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {"time": span, "made": format_time}
"""Formats of the columns whose numbers are durations or times."""


def _cell_text(name: str, value: Cell) -> str:
    if name in _NUMBER_FORMATS and isinstance(value, (int, float)):
        return _NUMBER_FORMATS[name](value)
    if name == "step" and isinstance(value, str):
        return safe_ids(value)
    if name == "where" and not value:
        return "here"
    if name == "best":
        return "yes" if value else ""
    return cell(value)
