"""Explain why queued runs wait, and the order in which workers claim them.

Pure: works on the queue and its workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple


class WaitKind(StrEnum):
    """Reason for which a run is not executed."""

    NOT_DUE = "not-due"
    """The run was submitted with a later start time."""
    NO_WORKER = "no-worker"
    """No worker is running."""
    LABELS = "labels"
    """No running worker has the run's labels."""
    DRIVER = "driver"
    """No running worker accepts the run's driver."""
    STORE = "store"
    """No running worker can access the run's files."""
    LIMIT = "limit"
    """The concurrency limit for the run's user, recipe or driver is reached."""
    BUSY = "busy"
    """Every eligible worker is busy, or about to take an earlier run."""
    STARTING = "starting"
    """An eligible worker is idle and will claim the run within seconds."""
    SUBMITTER = "submitter"
    """`recipe run` started the run, so workers do not claim it."""


class WaitingRun(NamedTuple):
    """Queued run that is not being executed."""

    run: str
    priority: int = 0
    due: float | None = None
    """Earliest time at which workers claim the run, or None if they never do."""
    driver: str = ""
    labels: Mapping[str, str] = {}
    user: str = ""
    recipe: str = ""
    store: str = ""
    """URL of the shared store with the run's files; empty for files in the run's workspace."""


class Taker(NamedTuple):
    """Running worker that can claim runs."""

    driver: str = ""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    store: str = ""
    free: bool = True


class Wait(NamedTuple):
    """Position of a queued run, from 1, and the reason why it waits."""

    run: str
    position: int
    kind: WaitKind
    words: str
    fix: str = ""


START: Final = "start a worker with `recipe worker`"
_Refusal = tuple[WaitKind, str, str]


def explain_waits(
    runs: Sequence[WaitingRun], takers: Sequence[Taker], worked_on: Sequence[WaitingRun], now: float
) -> list[Wait]:
    """Return the queued runs in the order in which workers claim them, with reasons to wait.

    `worked_on` are the runs in execution, which count towards the workers' limits.
    """
    free = [taker for taker in takers if taker.free]
    busy = Counter[tuple[str, str]]()
    for each in worked_on:
        busy.update(_list_limit_groups(each))
    waits = []
    in_order = sorted(runs, key=lambda run: _sort_key(run, now))
    for position, run in enumerate(in_order, 1):
        kind, words, fix = _explain_wait(run, takers, free, busy, now)
        if kind == WaitKind.STARTING:
            free.remove(_find_claiming(run, free, busy)[0])
            busy.update(_list_limit_groups(run))
        waits.append(Wait(run.run, position, kind, words, fix))
    return waits


def _sort_key(run: WaitingRun, now: float) -> tuple[int, int, float, str]:
    """Return the sort key of a run in the queue.

    Queued runs come first, then runs that start later, then runs that workers do not claim.
    """
    if run.due is None:
        return (2, 0, 0.0, run.run)
    if run.due > now:
        return (1, 0, run.due, run.run)
    return (0, -run.priority, run.due, run.run)


def _explain_wait(
    run: WaitingRun,
    takers: Sequence[Taker],
    free: Sequence[Taker],
    busy: Counter[tuple[str, str]],
    now: float,
) -> _Refusal:
    if run.due is None:
        fix = f"resume the run with `recipe resume {run.run}`; add `--queue` to let a worker execute it"
        return WaitKind.SUBMITTER, "`recipe run` started this run, so workers do not claim it", fix
    if run.due > now:
        return WaitKind.NOT_DUE, "the run was submitted with a later start time", ""
    if not takers:
        return WaitKind.NO_WORKER, "no worker is running", START
    refusal, fitting = _find_eligible(run, takers)
    if refusal is not None:
        return refusal
    if _find_claiming(run, free, busy):
        return WaitKind.STARTING, "an idle worker will claim the run within seconds", ""
    if not _find_claiming(run, fitting, busy):
        return _explain_limit(run, fitting, busy)
    count = len(fitting)
    has = "the only eligible worker is" if count == 1 else f"all {count} eligible workers are"
    return (
        WaitKind.BUSY,
        f"{has} busy",
        "wait, start another `recipe worker`, or raise the run's priority",
    )


def _find_eligible(run: WaitingRun, takers: Sequence[Taker]) -> tuple[_Refusal | None, list[Taker]]:
    """Return the workers that accept a run, or the reason why none does."""
    fitting = list(takers)
    for is_met, refuse in _REQUIREMENTS:
        fitting = [taker for taker in fitting if is_met(run, taker)]
        if not fitting:
            return refuse(run), []
    return None, fitting


def _uses_store(run: WaitingRun, taker: Taker) -> bool:
    return taker.store == run.store


def _accepts_driver(run: WaitingRun, taker: Taker) -> bool:
    return taker.driver in ("", run.driver)


def _has_labels(run: WaitingRun, taker: Taker) -> bool:
    return run.labels.items() <= taker.labels.items()


def _explain_no_store(run: WaitingRun) -> _Refusal:
    if not run.store:
        return WaitKind.STORE, "no running worker works in its directory", START
    words = f"no running worker uses the shared store {run.store}"
    return WaitKind.STORE, words, "start one with `recipe worker --workspace`"


def _explain_no_driver(run: WaitingRun) -> _Refusal:
    words = f"no running worker accepts the driver {run.driver}"
    return WaitKind.DRIVER, words, f"start one with `recipe worker --driver {run.driver}`"


def _explain_no_labels(run: WaitingRun) -> _Refusal:
    written = [f"{name}={value}" for name, value in sorted(run.labels.items())]
    words = f"no eligible worker has the labels {', '.join(written)}"
    flags = " ".join(f"--label {label}" for label in written)
    return WaitKind.LABELS, words, f"start one with `recipe worker {flags}`"


_REQUIREMENTS: Final = (
    (_uses_store, _explain_no_store),
    (_accepts_driver, _explain_no_driver),
    (_has_labels, _explain_no_labels),
)
"""Conditions for a worker to accept a run, each with the reason if no worker meets it."""


def _find_claiming(
    run: WaitingRun, takers: Sequence[Taker], busy: Counter[tuple[str, str]]
) -> list[Taker]:
    """Return the workers that can claim a run now, within their concurrency limits."""
    _, fitting = _find_eligible(run, takers)
    return [taker for taker in fitting if not _find_reached_limit(run, taker, busy)]


def _find_reached_limit(run: WaitingRun, taker: Taker, busy: Counter[tuple[str, str]]) -> str:
    """Return the concurrency limit that stops a worker from claiming a run, or an empty string.

    For example `user=2`.
    """
    for kind, value in _list_limit_groups(run):
        most = taker.at_most.get(kind)
        if most is not None and busy[kind, value] >= most:
            return f"{kind}={most}"
    return ""


def _explain_limit(
    run: WaitingRun, fitting: Sequence[Taker], busy: Counter[tuple[str, str]]
) -> _Refusal:
    limit = _find_reached_limit(run, fitting[0], busy)
    kind = limit.partition("=")[0]
    value = dict(_list_limit_groups(run))[kind]
    words = f"{busy[kind, value]} runs of the {kind} {value} are running, the most that workers accept at once"
    return (
        WaitKind.LIMIT,
        words,
        f"wait, or start a worker with a higher limit than `--at-most {limit}`",
    )


def _list_limit_groups(run: WaitingRun) -> list[tuple[str, str]]:
    """Return the (kind, value) groups of a run that count towards workers' concurrency limits."""
    return [("user", run.user), ("recipe", run.recipe), ("driver", run.driver)]
