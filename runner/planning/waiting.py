"""Why runs wait, and which is next: a pure decision over the queue and its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple


class WaitKind(StrEnum):
    """Why a run is not being carried out."""

    NOT_DUE = "not-due"
    """It was submitted for later."""
    NO_WORKER = "no-worker"
    """No worker is there."""
    LABELS = "labels"
    """No worker that is there has its labels."""
    DRIVER = "driver"
    """No worker that is there takes runs for its driver."""
    STORE = "store"
    """No worker that is there reaches the files that it needs."""
    LIMIT = "limit"
    """As many runs of its user, recipe or driver are carried out as the workers take at once."""
    BUSY = "busy"
    """Every worker that may take it has a run, or is about to take an earlier one."""
    STARTING = "starting"
    """A worker that may take it is free, and does so within seconds."""
    SUBMITTER = "submitter"
    """Workers do not take it: `recipe run` stored it."""


class Waiting(NamedTuple):
    """A run that is not being carried out."""

    run: str
    priority: int = 0
    due: float | None = None
    """From when on workers take it; None: they do not."""
    driver: str = ""
    labels: Mapping[str, str] = {}
    user: str = ""
    recipe: str = ""
    store: str = ""
    """The URL of the shared store that has its files; empty: they are in its workspace."""


class Taker(NamedTuple):
    """A worker that is there."""

    driver: str = ""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    store: str = ""
    free: bool = True


class Wait(NamedTuple):
    """Why a run waits, and its place among those that do, from 1."""

    run: str
    position: int
    kind: WaitKind
    words: str
    fix: str = ""


START: Final = "start a worker with `recipe worker`"
_Refusal = tuple[WaitKind, str, str]


def explain_waits(
    runs: Sequence[Waiting], takers: Sequence[Taker], worked_on: Sequence[Waiting], now: float
) -> list[Wait]:
    """Return the runs that wait in the order in which workers take them, each with its reason.

    `worked_on` are the runs that workers have, which count for what workers take at once.
    """
    free = [taker for taker in takers if taker.free]
    busy = Counter(pair for each in worked_on for pair in _limit_groups(each))
    waits = []
    for position, run in enumerate(sorted(runs, key=lambda each: _order(each, now)), 1):
        kind, words, fix = _reason(run, takers, free, busy, now)
        if kind == WaitKind.STARTING:
            free.remove(_able(run, free, busy)[0])
            busy.update(_limit_groups(run))
        waits.append(Wait(run.run, position, kind, words, fix))
    return waits


def _order(run: Waiting, now: float) -> tuple[int, int, float, str]:
    """As workers take runs; what is not due yet comes behind, and what they do not take last."""
    if run.due is None:
        return (2, 0, 0.0, run.run)
    if run.due > now:
        return (1, 0, run.due, run.run)
    return (0, -run.priority, run.due, run.run)


def _reason(
    run: Waiting,
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
    refusal, fitting = _workers_for(run, takers)
    if refusal is not None:
        return refusal
    if _able(run, free, busy):
        return WaitKind.STARTING, "an idle worker will claim the run within seconds", ""
    if not _able(run, fitting, busy):
        return _limit_reached(run, fitting, busy)
    count = len(fitting)
    has = "the only eligible worker is" if count == 1 else f"all {count} eligible workers are"
    return (
        WaitKind.BUSY,
        f"{has} busy",
        "wait, start another `recipe worker`, or raise the run's priority",
    )


def _workers_for(run: Waiting, takers: Sequence[Taker]) -> tuple[_Refusal | None, list[Taker]]:
    """The workers that may take a run by what they take at all; or why none may."""
    of_store = [taker for taker in takers if taker.store == run.store]
    if not of_store:
        return _no_worker_of_store(run.store), []
    of_driver = [taker for taker in of_store if taker.driver in ("", run.driver)]
    if not of_driver:
        words = f"no running worker accepts the driver {run.driver}"
        return (WaitKind.DRIVER, words, f"start one with `recipe worker --driver {run.driver}`"), []
    labelled = [taker for taker in of_driver if run.labels.items() <= taker.labels.items()]
    if not labelled:
        return _no_worker_with(run.labels), []
    return None, labelled


def _no_worker_of_store(store: str) -> _Refusal:
    if not store:
        return WaitKind.STORE, "no running worker works in its directory", START
    words = f"no running worker uses the shared store {store}"
    return WaitKind.STORE, words, "start one with `recipe worker --workspace`"


def _no_worker_with(labels: Mapping[str, str]) -> _Refusal:
    written = [f"{name}={value}" for name, value in sorted(labels.items())]
    words = f"no eligible worker has the labels {', '.join(written)}"
    flags = " ".join(f"--label {label}" for label in written)
    return WaitKind.LABELS, words, f"start one with `recipe worker {flags}`"


def _able(run: Waiting, takers: Sequence[Taker], busy: Counter[tuple[str, str]]) -> list[Taker]:
    """Those of the workers that may take a run now, by how many such runs there may be at once."""
    _, fitting = _workers_for(run, takers)
    return [taker for taker in fitting if not _over(run, taker, busy)]


def _over(run: Waiting, taker: Taker, busy: Counter[tuple[str, str]]) -> str:
    """The limit of a worker that keeps it from taking a run, as `user=2`; empty: none."""
    for kind, value in _limit_groups(run):
        most = taker.at_most.get(kind)
        if most is not None and busy[kind, value] >= most:
            return f"{kind}={most}"
    return ""


def _limit_reached(
    run: Waiting, fitting: Sequence[Taker], busy: Counter[tuple[str, str]]
) -> _Refusal:
    limit = _over(run, fitting[0], busy)
    kind = limit.partition("=")[0]
    value = dict(_limit_groups(run))[kind]
    words = f"{busy[kind, value]} runs of the {kind} {value} are running, the most that workers accept at once"
    return (
        WaitKind.LIMIT,
        words,
        f"wait, or start a worker with a higher limit than `--at-most {limit}`",
    )


def _limit_groups(run: Waiting) -> list[tuple[str, str]]:
    """What runs are counted by."""
    return [("user", run.user), ("recipe", run.recipe), ("driver", run.driver)]
