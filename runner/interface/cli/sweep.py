"""`recipe sweep`: run a recipe for combinations of input values and print a results table."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...api import sweeps
from ...api.sweeps import Space, draft
from ...digest import of_value
from ...errors import Invalid, NotFound, Problem, did_you_mean
from ...execution.session import preview
from ...language import document, library, parse
from ...paths import is_path
from ...storage.workspace import Workspace
from ...survey import comparison, stopped
from ...survey.request import Request
from ...survey.results import read_attempt_points
from .. import search
from . import run as running
from .flags import check_driver, positive, published_below, recipe_and_values
from .results import as_text

if TYPE_CHECKING:
    from ...language.recipe import Recipe
    from ...language.values import Tree
    from ...survey.comparison import Comparison, Result
    from ...survey.survey import Survey

_TRIAL: Final = re.compile(r"[^/]*\[trial=(\d+)\]/")
ROUND: Final = 4
"""Default number of trials in a round of a search; `--jobs` overrides it."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    running.arguments(parser, "run")
    best = parser.add_mutually_exclusive_group()
    best.add_argument(
        "--min", metavar="METRIC", help="Mark the trial with the lowest METRIC as the best"
    )
    best.add_argument(
        "--max", metavar="METRIC", help="Mark the trial with the highest METRIC as the best"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--random", type=positive, metavar="N", help="Run N randomly chosen combinations"
    )
    how.add_argument(
        "--tpe",
        type=positive,
        metavar="N",
        help="Run N trials proposed by Optuna's TPE sampler (extra `search`)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help=(
            "Random seed for --random and --tpe (default: 0). With the same seed, a larger "
            "--random or --tpe adds combinations"
        ),
    )
    parser.add_argument(
        "--stop-early",
        action="store_true",
        help=("Stop underperforming trials early (successive halving); their checkpoints are kept"),
    )
    parser.description = (
        "Run a recipe once for each combination of input values, and compare the results "
        "in a table. Give an input several values to sweep over it, for example "
        "lr=1e-4,3e-4. Other inputs work as in `recipe run`. Steps that are the same in "
        "all combinations run once, and earlier results are reused. With --tpe, a number "
        "may be a range: LOW..HIGH or LOW..HIGH:log. TPE trials run in rounds of -j "
        "(default: 4); each round uses the results so far."
    )
    parser.epilog = (
        "Examples:\n  recipe sweep sft@1 learning_rate=1e-4,3e-4 rank=8,16 --min eval_loss\n  recipe sweep train lr=1e-4,1e-3 -n\n"
        "  recipe sweep train lr=1e-5..1e-2:log rank=8,16,32 --min eval_loss --tpe 30"
    )


def run(args: argparse.Namespace) -> int:
    check_driver(args.driver)
    meant, given, origins = recipe_and_values(args)
    source = library.find(meant, args.workspace)
    asked = _SweepRequest(args, parse.load(source), meant, source, given, origins)
    needs_metric = args.tpe is not None or args.stop_early
    if asked.metric is None and needs_metric:
        flag = "--tpe" if args.tpe is not None else "--stop-early"
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    f"{flag} requires --min or --max",
                    fix="add --min METRIC or --max METRIC",
                )
            ]
        )
    args.goal = (asked.metric, args.min is not None) if args.stop_early else None
    with Workspace.open(args.workspace) as ws:
        ws.share(args.store)
        if args.tpe is not None:
            return _Search(ws, asked).run()
        return _try_combinations(ws, asked)


class _SweepRequest(NamedTuple):
    """A sweep request: the recipe and its input values."""

    args: argparse.Namespace
    recipe: Recipe
    meant: str
    source: Path
    given: Mapping[str, object]
    origins: Mapping[str, str]

    @property
    def metric(self) -> str | None:
        named: str | None = self.args.min or self.args.max
        return named

    @property
    def folder(self) -> Path:
        """Return the directory of the generated sweep recipes."""
        return Path(os.path.abspath(self.args.workspace)) / ".recipe/sweeps"

    @property
    def uses(self) -> str:
        """Return the swept recipe as the generated recipe refers to it: a relative path or a name."""
        if not is_path(self.meant):
            return self.meant
        return os.path.relpath(os.path.abspath(self.source), self.folder)

    @property
    def name(self) -> str:
        return self.recipe.id.partition("@")[0]

    def request(self, path: Path, fixed: Mapping[str, object]) -> Request:
        """Return the Request for the generated recipe at `path`, with the inputs that are not
        swept.
        """
        out = published_below(self.args) or Path("sweeps")
        folders = self.args.location.folders(fixed)
        recipe = f"./{path.relative_to(os.path.abspath(self.args.workspace))}"
        return Request(
            recipe,
            dict(fixed),
            self.args.preset,
            out,
            self.args.python == "current",
            self.args.update,
            folders,
        )


def _try_combinations(ws: Workspace, asked: _SweepRequest) -> int:
    """Run all combinations or a random sample, and print the results; return the exit code."""
    args = asked.args
    swept = draft(
        asked.recipe,
        asked.uses,
        asked.given,
        preset=args.preset,
        origins=asked.origins,
        metric=asked.metric,
        draws=args.random,
        seed=args.seed,
    )
    path = asked.folder / f"{swept.stem}.yaml"
    if not path.exists():
        ws.write(path, swept.text.encode())
    request = asked.request(path, swept.fixed)
    if args.stop_early:
        code = _round(ws, request, args)
    else:
        code = running.execute_request(ws, request, args)
    if code in (0, 1) and not _is_silent(args):
        _print(ws, request, asked.metric, least=args.min is not None)
    return code


def _is_silent(args: argparse.Namespace) -> bool:
    """Return True if the table of results is not printed."""
    return bool(args.dry_run or args.json) or args.quiet > 1


class _Search:
    """A search of `--tpe`: rounds of trials, proposed from the results of earlier rounds.

    The generated recipe lists all trials, so that a later call with the same search continues them.
    """

    def __init__(self, ws: Workspace, asked: _SweepRequest) -> None:
        args = asked.args
        search.library()  # raises an error if Optuna is missing, before any step runs
        self._ws = ws
        self._asked = asked
        self._args = args
        self._metric = str(asked.metric)
        self._least = args.min is not None
        self._space = sweeps.search_space(
            asked.recipe,
            asked.given,
            preset=args.preset,
            origins=asked.origins,
            metric=self._metric,
        )
        self._path = asked.folder / f"{asked.name}-tpe-{self._digest()[:8]}.yaml"
        self._request = asked.request(self._path, self._space.fixed)
        self._drawn: list[list[Tree]] = []
        if self._path.exists():
            written = document.read(self._path).value
            self._drawn = sweeps.read_trials(written, self._space.axes)

    def _digest(self) -> str:
        """Return the digest of all that the trials depend on."""
        fixed = {name: str(each) for name, each in self._space.fixed.items()}
        space = {**self._space._asdict(), "fixed": fixed}
        uses, preset, seed = self._asked.uses, self._args.preset, self._args.seed
        return of_value("search", [uses, space, preset, self._metric, self._least, seed])

    def run(self) -> int:
        """Run the trials, and print the results; return the exit code."""
        if self._args.dry_run:
            new = self._propose(self._read_results())
            _announce(self._space, len(self._drawn), new)
            return 0
        code = self._run_rounds()
        has_results = bool(self._drawn) and code in (0, 1)
        if has_results and not _is_silent(self._args):
            _print(self._ws, self._request, self._metric, least=self._least)
        return code

    def _run_rounds(self) -> int:
        """Run rounds until one fails or no trial is left, and return the last one's exit code."""
        code = 0
        has_work = bool(self._drawn) or self._draw({})
        while has_work:
            is_last = len(self._drawn) >= self._args.tpe
            code = _round(self._ws, self._request, self._args, more=not is_last)
            has_work = self._may_continue(code) and self._draw_after(code)
        return code

    def _may_continue(self, code: int) -> bool:
        return code == 0 or (code == 1 and self._args.keep_going)

    def _draw_after(self, code: int) -> bool:
        """Add the trials of the round after one with exit code `code`; return False for none."""
        results = self._read_results()
        if code == 0 and not results:
            return False  # `_print` reports the available metrics
        return self._draw(results)

    def _read_results(self) -> dict[int, float]:
        """Return the metric by trial number; empty without trials."""
        if not self._drawn:
            return {}
        return _results(self._ws, preview(self._ws, self._request), self._metric)

    def _propose(self, results: Mapping[int, float]) -> list[list[Tree]]:
        """Return the values of the next round's trials."""
        args = self._args
        tried = [search.Trial(values, results.get(n)) for n, values in enumerate(self._drawn)]
        count = min(args.tpe - len(self._drawn), args.jobs or ROUND)
        return search.propose(self._space, tried, count, least=self._least, seed=args.seed)

    def _draw(self, results: Mapping[int, float]) -> bool:
        """Add the trials of the next round to the recipe; return False if there are none."""
        new = self._propose(results)
        if not new:
            return False
        self._drawn += new
        asked = self._asked
        text = sweeps.write_search(
            asked.recipe, asked.uses, self._space, self._drawn, self._args.preset
        )
        self._ws.write(self._path, text.encode())
        return True


def _round(ws: Workspace, request: Request, args: argparse.Namespace, *, more: bool = False) -> int:
    """Run the instances without a result, and return the exit code.

    With `--stop-early`, instances that were stopped early are skipped. `more` announces further
    rounds.
    """
    found = preview(ws, request)
    args.leave = tuple(stopped.stopped_attempts(ws, found)) if args.stop_early else ()
    if args.leave and not args.quiet:
        print(
            f"recipe: {len(args.leave)} instances that an earlier sweep stopped early are skipped; to continue them, omit `--stop-early`",
            file=sys.stderr,
        )
    # `args.leave` has changed since the first preview, and is a part of the choice.
    has_work = bool(preview(ws, request, running.choice_of(args)).todo)
    if not has_work and not args.dry_run:
        return 0
    return running.execute_request(ws, request, args, more=more)


def _results(ws: Workspace, found: Survey, metric: str) -> dict[int, float]:
    """Return the metric by trial number: the last value of a finished or early-stopped step."""
    results: dict[int, float] = {}
    numbers = {found.plan.nodes[n].id: [made.metrics.get(metric)] for n, made in found.made.items()}
    for id, attempt in stopped.stopped_attempts(ws, found).items():
        numbers[id] = [point.get(metric) for point in read_attempt_points(ws, attempt) or ()]
    for id, values in numbers.items():
        trial = _TRIAL.match(id)
        if trial is None:
            continue
        for value in values:
            if comparison.is_comparable(value):
                results[int(trial[1])] = float(value)
    return results


def _announce(where: Space, known: int, new: Sequence[Sequence[Tree]]) -> None:
    """Print the values of the proposed trials."""
    for n, point in enumerate(new, known):
        values = zip(where.axes, point, strict=True)
        words = [f"{name}={json.dumps(value)}" for name, value in values]
        print(f"trial {n}: {' '.join(words)}")


def _print(ws: Workspace, request: Request, metric: str | None, *, least: bool) -> None:
    """Print tables that compare the sweep's instances.

    Raises NotFound if instances finished and none reported the metric.
    """
    found = preview(ws, request)
    keys = {verdict.key for verdict in found.verdicts if verdict.key is not None}
    results = comparison.collect_results(ws, found.plan.recipe, keys)
    tables = _compare(results, metric, least=least)
    if found.plan.publish and tables:
        print()  # separate the table from the published paths
    texts = [as_text(table, found.plan.recipe, None, in_markdown=False) for table in tables]
    print("\n\n".join("\n".join(lines) for lines in texts))


def _compare(results: Sequence[Result], metric: str | None, *, least: bool) -> list[Comparison]:
    """Return a table per step; with a metric, only those of steps that report it.

    Raises NotFound if instances finished and none reported the metric.
    """
    if metric is None:
        return comparison.compare(results, {})
    tables = comparison.compare(results, {}, sort=metric, least=least)
    tables = [table for table in tables if _is_by(metric, table)]
    if not tables and any(result.state == "DONE" for result in results):
        raise _no_metric(metric, results)
    return tables


def _is_by(metric: str, table: Comparison) -> bool:
    return table.by is not None and table.by.metric == metric


def _no_metric(metric: str, results: Sequence[Result]) -> NotFound:
    """Return the error for a metric that no step reported."""
    known = comparison.list_metric_names(results)
    fix = did_you_mean(metric, known) or f"use one of the reported metrics: {', '.join(known)}"
    words = f'all instances finished, but no step reported the metric "{metric}"'
    return NotFound(words, fix=fix)
