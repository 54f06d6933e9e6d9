"""Why runs wait, and in which order: by what workers take, have, and may take at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.planning.waiting import Taker, Wait, WaitingRun, WaitKind, explain_waits

NOW = 1000.0
RUN = WaitingRun("r1", due=1.0, driver="local", user="ann", recipe="a@1")


def kinds(
    runs: Sequence[WaitingRun], takers: Sequence[Taker], worked_on: Sequence[WaitingRun] = ()
) -> list[str]:
    return [str(wait.kind) for wait in explain_waits(runs, takers, worked_on, NOW)]


def only(run: WaitingRun, *takers: Taker, worked_on: Sequence[WaitingRun] = ()) -> Wait:
    (found,) = explain_waits([run], takers, worked_on, NOW)
    return found


@pytest.mark.parametrize(
    ("run", "takers", "kind", "fix"),
    [
        (RUN, [], "no-worker", "`recipe worker`"),
        (RUN, [Taker()], "starting", ""),
        (RUN, [Taker(free=False)], "busy", "priority"),
        (RUN, [Taker(driver="ssh")], "driver", "--driver local"),
        (RUN._replace(labels={"gpu": "a100"}), [Taker()], "labels", "--label gpu=a100"),
        (RUN._replace(labels={"gpu": "a100"}), [Taker(labels={"gpu": "a100"})], "starting", ""),
        (RUN._replace(due=NOW + 1), [Taker()], "not-due", ""),
        (RUN._replace(due=None), [Taker()], "submitter", "recipe resume r1"),
        (RUN._replace(store="s3://b"), [Taker()], "store", "--workspace"),
        (RUN, [Taker(store="s3://b")], "store", "recipe worker"),
    ],
)
def test_a_run_says_by_a_kind_why_it_waits(
    run: WaitingRun, takers: list[Taker], kind: str, fix: str
) -> None:
    found = only(run, *takers)
    assert found.kind == WaitKind(kind) and found.position == 1
    assert fix in found.fix and bool(fix) == bool(found.fix) and found.words


def test_higher_priorities_are_first_then_what_has_been_due_longest() -> None:
    runs = [
        RUN._replace(run="late", due=5.0),
        RUN._replace(run="early", due=2.0),
        RUN._replace(run="urgent", due=9.0, priority=1),
        RUN._replace(run="tomorrow", due=NOW + 9, priority=5),
        RUN._replace(run="mine", due=None, priority=9),
    ]
    found = explain_waits(runs, [], [], NOW)
    assert [wait.run for wait in found] == ["urgent", "early", "late", "tomorrow", "mine"]
    assert [wait.position for wait in found] == [1, 2, 3, 4, 5]


def test_a_free_worker_is_promised_to_one_run_only() -> None:
    runs = [RUN, RUN._replace(run="r2", due=2.0)]
    assert kinds(runs, [Taker()]) == ["starting", "busy"]
    assert kinds(runs, [Taker(), Taker()]) == ["starting", "starting"]


def test_a_limit_of_the_workers_holds_a_run_back_until_others_of_its_kind_are_over() -> None:
    other = RUN._replace(run="r0")
    found = only(RUN, Taker(at_most={"user": 1}), worked_on=[other])
    assert found.kind == WaitKind.LIMIT and "user ann" in found.words
    assert kinds([RUN, RUN._replace(run="r2", due=2.0)], [Taker(at_most={"user": 1})] * 2) == [
        "starting",
        "limit",
    ]
    assert kinds([RUN], [Taker(at_most={"recipe": 1})], [other._replace(recipe="b@1")]) == [
        "starting"
    ]
