"""What every store of runs promises, whatever it is made of.

A test module imports these and gives a fixture `store`, and `fresh`, which opens another connection to the same memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import Invalid, NotFound
from runner.storage.content.files import Content
from runner.storage.records.index import CachedOutput, Changes, PublishedFile, Trace
from runner.storage.records.outbox import Letter
from runner.storage.records.processes import machine, this_process
from runner.storage.records.runs import (
    AttemptRow,
    ClaimCriteria,
    Event,
    Reporter,
    Requested,
    RunFilter,
    RunPlace,
    RunRow,
    RunState,
    Stale,
    StepRow,
    settle,
)
from runner.storage.records.store import Store
from runner.storage.records.workers import SILENT, WorkerRow


@dataclass(frozen=True, slots=True)
class Move:
    subject: str
    id: str
    before: str
    after: str
    reason: str = ""
    data: Mapping[str, object] = field(default_factory=dict)


Fresh = Callable[[], Store]
RUN = RunRow("r1", "tool@1", "plan", {"rank": 16}, "here")
DONE = Move("step", "a", "RUNNING", "DONE")
CONTENT = Content("f:" + "0" * 64)
ANY = ClaimCriteria()


def trace(
    key: str,
    *,
    step: str = "a",
    seconds: float = 1.0,
    made_at: float = 1.0,
    recipe: str = "tool@1",
    content: Content = CONTENT,
) -> Trace:
    return Trace(
        key,
        recipe,
        step,
        "r1",
        made_at,
        seconds,
        (CachedOutput("out", "o/a", content),),
        '{"loss":0.5}',
        '{"gpu":"none"}',
    )


@pytest.fixture
def claimed(store: Store) -> int:
    store.runs.submit(RUN)
    fence = store.runs.claim("r1", "worker 1")
    assert fence is not None
    return fence


def test_a_group_is_stored_whole(store: Store, fresh: Fresh, claimed: int) -> None:
    attempt = AttemptRow(
        "r1/a/1",
        "r1",
        "a",
        1,
        "k",
        {"pid": 7},
        "attempts/1",
        1.0,
        2.0,
        "done",
        "exit",
        {"code": 0},
        {"deps": ["x"]},
    )
    published = PublishedFile("o/a", CONTENT, "id", "r1", "a", "tool@1")
    moves = [Move("step", "a", "QUEUED", "RUNNING", data={"host": "local"}), DONE]
    files = [("o/a", 1, 2, 3, 4, 5, CONTENT)]
    last = store.runs.group("r1", claimed, moves, steps=[StepRow("r1", "a", "DONE", "k")], attempts=[attempt], changes=Changes(traces=[trace("k")], files=files, published=[published]))  # fmt: skip
    other = fresh()
    assert other.index.traces(["k", "none"]) == {"k": trace("k")} and other.index.traces(["k"])[
        "k"
    ].metrics == {"loss": 0.5}
    assert other.index.trace("k") == trace("k") and other.index.trace("none") is None
    assert (
        other.index.outputs("tool@1") == {"k": ([["out", "o/a", CONTENT]], True)}
        and other.index.outputs("other@1") == {}
    )
    assert (
        other.runs.attempts("r1") == [attempt] == other.runs.attempts("r1", "a")
        and other.runs.attempts("r1", "b") == []
    )
    assert other.runs.steps("r1") == {"a": StepRow("r1", "a", "DONE", "k")}
    assert (
        other.index.list_published() == {"o/a": published}
        and other.index.list_published("other@1") == {}
    )
    assert other.index.files() == files
    assert [(event.seq, event.after) for event in other.runs.events("r1")] == [
        (1, "QUEUED"),
        (2, "RUNNING"),
        (3, "DONE"),
    ]
    assert [event.seq for event in other.runs.events("r1", after=2)] == [last] == [
        3
    ] and other.runs.events("r1")[1].data == {"host": "local"}
    row = other.runs.get("r1")
    assert (row.inputs, row.state, row.claim, row.next_event) == (
        {"rank": 16},
        "QUEUED",
        "worker 1",
        4,
    ) and other.runs.latest() == [row]


def test_the_first_trace_of_a_key_wins(store: Store, claimed: int) -> None:
    store.runs.group("r1", claimed, changes=Changes(traces=[trace("k", seconds=1)]))
    store.runs.group("r1", claimed, changes=Changes(traces=[trace("k", seconds=2)]))
    assert store.index.traces(["k"])["k"].seconds == 1


def test_a_key_that_is_made_again_has_its_newest_trace(store: Store, claimed: int) -> None:
    store.runs.group("r1", claimed, changes=Changes(traces=[trace("k", seconds=1)]))
    store.runs.group("r1", claimed, changes=Changes(traces=[trace("k", seconds=2)], again={"k"}))
    assert store.index.traces(["k"])["k"].seconds == 2


def test_metrics_by_a_rule_belong_to_one_trace_and_go_with_it(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    first = trace("k")._replace(measured_json='{"rule 1":{"loss":0.5}}')
    store.runs.group("r1", claimed, changes=Changes(traces=[first]))
    store.index.learn([first._replace(measured_json='{"rule 2":{"acc":1}}')])
    assert (
        fresh().index.traces(["k"])["k"].measured
        == {"rule 1": {"loss": 0.5}, "rule 2": {"acc": 1}}
        == store.index.traces(["k"])["k"].measured
    )
    store.index.learn(
        [trace("k", made_at=2)._replace(measured_json='{"rule 3":{"f1":0}}')]
    )  # of another attempt
    assert (
        list(fresh().index.traces(["k"])["k"].measured) == ["rule 1", "rule 2"]
        and fresh().index.outputs("tool@1")["k"][1]
    )
    store.runs.group("r1", claimed, changes=Changes(traces=[trace("k", made_at=3)], again={"k"}))
    assert fresh().index.traces(["k"])["k"].measured == {}


def test_a_stale_worker_writes_nothing(store: Store, fresh: Fresh, claimed: int) -> None:
    store.runs.release("r1", claimed)
    other = fresh()
    newer = other.runs.claim("r1", "worker 2")
    assert newer is not None and newer > claimed
    with pytest.raises(Stale):
        store.runs.group(
            "r1",
            claimed,
            [DONE],
            steps=[StepRow("r1", "a", "DONE")],
            changes=Changes(traces=[trace("k")]),
        )
    with pytest.raises(Stale):
        store.runs.take_request("r1", claimed)
    assert (
        store.index.traces(["k"]) == {}
        and store.runs.steps("r1") == {}
        and len(store.runs.events("r1")) == 1
    )
    other.runs.group("r1", newer, [DONE])


def test_two_workers_never_hold_one_run(store: Store, fresh: Fresh, claimed: int) -> None:
    assert (
        fresh().runs.claim("r1", "worker 2") is None
        and store.runs.live("r1")
        and fresh().runs.live("r1")
    )
    store.close()
    assert not fresh().runs.live("r1") and fresh().runs.claim("r1", "worker 2") is not None


def test_a_run_that_is_prepared_is_submitted_and_claimed_as_any_other(
    store: Store, fresh: Fresh
) -> None:
    store.runs.prepare("r1")
    assert store.runs.submit(RUN, "worker 1").fence == 1 and fresh().runs.live("r1")
    store.close()
    assert not fresh().runs.live("r1")


def test_a_request_before_the_end_wins_and_after_it_is_refused(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    assert (
        fresh().runs.request("r1", "cancel") and store.runs.take_request("r1", claimed) == "cancel"
    )
    store.runs.group(
        "r1", claimed, [DONE], changes=Changes(traces=[trace("k")])
    )  # a step that had ended is committed all the same
    with pytest.raises(Requested) as caught:
        store.runs.group(
            "r1", claimed, [Move("run", "r1", "ACTIVE", "COMPLETED")], run_state=("COMPLETED", "")
        )
    assert caught.value.request == "cancel" and store.runs.get("r1").state == "QUEUED"
    store.runs.group(
        "r1",
        claimed,
        [Move("run", "r1", "ACTIVE", "CANCELLED")],
        run_state=("CANCELLED", "asked"),
        answers="cancel",
    )
    row = store.runs.get("r1")
    assert (
        (row.state, row.reason, row.request, row.claim) == ("CANCELLED", "asked", "", "")
        and row.ended
        and not store.runs.live("r1")
    )
    assert not fresh().runs.request("r1", "pause")
    with pytest.raises(Stale):
        store.runs.group("r1", claimed, [DONE])
    assert [event.after for event in store.runs.events("r1")] == [
        "QUEUED",
        "cancel",
        "DONE",
        "CANCELLED",
    ]


def test_the_kind_of_a_failure_and_its_words_are_two_columns(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    step = StepRow("r1", "a", "FAILED", "", "oom", "CUDA out of memory")
    end = RunState("FAILED", "CUDA out of memory", "oom")
    store.runs.group("r1", claimed, [DONE], steps=[step], run_state=end)
    row = fresh().runs.get("r1")
    assert RunState(row.state, row.reason, row.failure) == end
    assert fresh().runs.steps("r1") == {"a": step}
    store.runs.outbox.post("r1", [Letter("webhook POST http://x", "1", "FAILED", "{}")])
    (letter,) = store.runs.outbox.take(["webhook POST http://x "])
    store.runs.outbox.put_off(letter, 0.0, "HTTP 503", "server-error")
    (letter,) = fresh().runs.outbox.list_letters()
    assert (letter.reason, letter.failure) == ("HTTP 503", "server-error")
    store.runs.outbox.give_up(letter, "HTTP 404", "refused")
    assert [each.failure for each in fresh().runs.outbox.list_letters()] == ["refused"]


def test_the_numbers_of_a_running_step_are_stored_with_its_row(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    moves = [Move("step", "a", "QUEUED", "RUNNING")]
    step = StepRow("r1", "a", "RUNNING", numbers='{"step":1}', began=5.5)
    last = store.runs.group("r1", claimed, moves, steps=[step])
    assert fresh().runs.steps("r1") == {"a": step}
    step = step._replace(numbers='{"step":2}')
    assert store.runs.group("r1", claimed, steps=[step]) == last
    assert fresh().runs.steps("r1") == {"a": step}


def test_what_is_asked_of_a_run_before_it_begins_is_there_to_be_read(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    assert fresh().runs.request("r1", "pause")
    store.runs.group(
        "r1", claimed, [Move("run", "r1", "QUEUED", "ACTIVE")], run_state=("ACTIVE", "")
    )
    assert (
        store.runs.get("r1").state == "ACTIVE" and store.runs.take_request("r1", claimed) == "pause"
    )
    store.runs.group("r1", claimed, run_state=("ACTIVE", ""), answers="pause")
    assert store.runs.take_request("r1", claimed) == ""


def test_a_run_that_is_over_is_claimed_by_no_worker(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    store.runs.group(
        "r1", claimed, [Move("run", "r1", "ACTIVE", "COMPLETED")], run_state=("COMPLETED", "")
    )
    assert fresh().runs.claim("r1", "worker 2") is None and store.runs.get("r1").fence == claimed


def test_a_pause_lets_go_of_a_run_which_hears_nothing_until_it_is_claimed(
    store: Store, fresh: Fresh, claimed: int
) -> None:
    store.runs.group(
        "r1", claimed, [Move("run", "r1", "ACTIVE", "PAUSED")], run_state=("PAUSED", "paused")
    )
    assert not store.runs.live("r1") and not fresh().runs.request("r1", "cancel")
    fence = fresh().runs.claim("r1", "worker 2")
    assert (
        fence is not None
        and store.runs.get("r1").recoveries == 0
        and store.runs.request("r1", "cancel")
    )


@pytest.mark.parametrize(
    ("what", "wanted", "state"),
    [
        ("cancel", "PAUSED", "CANCELLED"),
        ("pause", "CANCELLED", "CANCELLED"),
        ("resume", "PAUSED", "QUEUED"),
    ],
)
def test_what_is_asked_while_a_run_is_settled_is_heeded(
    store: Store, fresh: Fresh, claimed: int, what: str, wanted: str, state: str
) -> None:
    other, seen = fresh(), list[str]()

    def beside(found: str) -> tuple[list[Move], list[StepRow]]:
        if not seen:
            other.runs.request("r1", what)
        seen.append(found)
        return [DONE], [StepRow("r1", "a", "DONE")]

    assert settle(store.runs, "r1", claimed, wanted, "", beside) == state and seen == [
        wanted,
        state,
    ]
    row = store.runs.get("r1")
    assert (row.state, row.request) == (state, "")
    assert [event.after for event in store.runs.events("r1")] == [
        "QUEUED",
        what,
        "DONE",
        *([state] if state != "QUEUED" else []),
    ]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.integers(0, 5), max_size=6), asks=st.sets(st.integers(0, 5)))
def test_events_are_numbered_without_gaps(store: Store, sizes: list[int], asks: set[int]) -> None:
    run = f"r{len(store.runs.latest())}"
    store.runs.submit(RUN._replace(id=run))
    fence = store.runs.claim(run, "w")
    assert fence is not None
    for n, size in enumerate(sizes):
        last = store.runs.group(run, fence, [DONE] * size)
        assert last == store.runs.events(run)[-1].seq
        if n in asks:
            store.runs.request(run, "pause")
        with pytest.raises(Stale):
            store.runs.group(run, fence + 1, [DONE] * 3)
    seen = [event.seq for event in store.runs.events(run)]
    assert seen == list(range(1, 2 + sum(sizes) + len([n for n in range(len(sizes)) if n in asks])))


def test_a_run_submitted_twice_is_one_run(store: Store) -> None:
    store.runs.submit(RUN)
    store.runs.submit(RUN)
    assert len(store.runs.latest()) == 1 and len(store.runs.events("r1")) == 1
    with pytest.raises(NotFound, match="no run r2"):
        store.runs.get("r2")
    with pytest.raises(NotFound):
        store.runs.claim("r2", "w")
    assert not store.runs.live("r2") and not store.runs.request("r2", "cancel")


def test_a_run_is_claimed_with_its_submission_or_not_at_all(store: Store, fresh: Fresh) -> None:
    mine = store.runs.submit(RUN, "worker 1")
    assert mine == ("r1", 1) and store.runs.live("r1") and store.runs.get("r1").claim == "worker 1"
    assert fresh().runs.submit(RUN, "worker 2") == ("r1", 0)
    store.runs.group("r1", mine.fence, [DONE])


def taken(store: Store, offer: ClaimCriteria = ANY) -> tuple[str, int] | None:
    row = store.runs.claim_next("w", offer)
    assert row is None or row == store.runs.get(row.id), (
        "the row is as it is now that it is claimed"
    )
    return row and (row.id, row.fence)


def test_the_run_of_the_highest_priority_that_is_due_longest_is_claimed_first(
    store: Store, fresh: Fresh
) -> None:
    for name, priority, due in (
        ("c", 0, 1.0),
        ("a", 0, 2.0),
        ("b", 0, 2.0),
        ("d", 7, 3.0),
        ("later", 9, 4e12),
        ("own", 9, None),
    ):
        store.runs.submit(RUN._replace(id=name, priority=priority, due=due))
    found = [fresh().runs.claim_next("w", ClaimCriteria()) for _ in range(5)]
    assert [each.id if each is not None else None for each in found] == ["d", "c", "a", "b", None]


def test_a_worker_takes_runs_of_its_driver_whose_labels_it_has(store: Store) -> None:
    store.runs.submit(
        RUN._replace(due=1.0, data={"settings": {"driver": "ssh"}, "labels": {"gpu": "a100"}})
    )
    for offer in (
        ClaimCriteria(),
        ClaimCriteria("ssh"),
        ClaimCriteria("local", {"gpu": "a100"}),
        ClaimCriteria("", {"gpu": "h100"}),
    ):
        assert store.runs.claim_next("w", offer) is None
    assert taken(store, ClaimCriteria("ssh", {"gpu": "a100", "disk": "fast"})) == ("r1", 1)


def test_a_dead_workers_run_is_claimed_anew_and_each_such_claim_is_counted_until_a_step_ends(
    store: Store, fresh: Fresh
) -> None:
    store.runs.submit(RUN._replace(due=1.0))
    workers = [fresh() for _ in range(4)]
    for n, each in enumerate(workers[:3]):
        assert taken(each) == ("r1", n + 1) and store.runs.get("r1").recoveries == n
        each.runs.group("r1", n + 1, [Move("step", "a", "QUEUED", "RUNNING")])
        each.close()
    assert workers[3].runs.claim("r1", "w") == 4 and store.runs.get("r1").recoveries == 3
    workers[3].runs.group("r1", 4, [DONE])
    assert store.runs.get("r1").recoveries == 0
    workers[3].runs.release("r1", 4)
    assert taken(store) == ("r1", 5) and store.runs.get("r1").recoveries == 0


def test_one_idempotency_key_is_one_request(store: Store) -> None:
    first = RUN._replace(idempotency="k", data={"body": "1"})
    assert store.runs.submit(first).id == store.runs.submit(first._replace(id="r2")).id == "r1"
    with pytest.raises(Invalid, match="r1"):
        store.runs.submit(first._replace(id="r3", data={"body": "2"}))
    assert len(store.runs.latest()) == 1


def test_the_time_a_step_may_take_is_known_from_earlier_ones(store: Store, claimed: int) -> None:
    mine = [trace("1", seconds=10, made_at=1), trace("2", seconds=20, made_at=2)]
    store.runs.group(
        "r1",
        claimed,
        changes=Changes(traces=[*mine, trace("3", step="b"), trace("4", recipe="x@1")]),
    )
    assert (
        store.index.expected_seconds("tool@1", ["a", "c"]) == {"a": 15}
        and store.index.expected_seconds("tool@1", []) == {}
    )
    assert store.index.last("tool@1", ["a", "c"]) == {"a": mine[1]}


def test_an_adopted_result_replaces_the_trace_of_its_key(store: Store, claimed: int) -> None:
    store.runs.group(
        "r1",
        claimed,
        changes=Changes(
            traces=[trace("k")], published=[PublishedFile("o/a", CONTENT, "", "r1", "a", "tool@1")]
        ),
    )
    mine = Content("f:" + "1" * 64)
    store.index.adopt(
        trace("k", content=mine), [PublishedFile("o/a", mine, "", "r1", "a", "tool@1")]
    )
    assert (
        store.index.traces(["k"])["k"].outputs[0].content
        == mine
        == store.index.list_published()["o/a"].content
    )
    store.index.unpublish(["o/a"])
    assert store.index.list_published() == {}


def test_thousands_of_keys_are_found_and_only_those(store: Store, claimed: int) -> None:
    store.runs.group("r1", claimed, changes=Changes(traces=[trace(f"k{n}") for n in range(1200)]))
    for asked in ([f"k{n}" for n in range(600, 1800)], ["k7", "none"]):
        expected = {key for key in asked if key != "none" and int(key[1:]) < 1200}
        assert set(store.index.traces(asked)) == expected
    assert len(store.index.outputs("tool@1")) == 1200 and store.index.traces([]) == {}


def test_the_place_of_a_step_is_the_host_on_which_it_was_begun_last(
    store: Store, claimed: int
) -> None:
    begun = [
        Move("step", id, "QUEUED", "RUNNING", data=data)
        for id, data in (("a", {"site": "box"}), ("b", {"site": "box"}), ("b", {}), ("c", {}))
    ]
    store.runs.group("r1", claimed, [*begun, DONE])
    assert store.runs.places(["r1", "none"]) == {("r1", "a"): "box"} and store.runs.places([]) == {}


def test_who_follows_runs_learns_what_has_moved(store: Store, claimed: int) -> None:
    begun = time.time()
    first = store.runs.get("r1").next_event
    moves = [Move("run", "r1", "QUEUED", "ACTIVE"), Move("step", "s", "READY", "QUEUED")]
    store.runs.group("r1", claimed, moves, run_state=("ACTIVE", ""))
    stands = {"r1": ("ACTIVE", first + 2)}
    assert store.runs.states_of(["r1", "none"]) == stands
    assert store.runs.states_since(begun + 60) == stands, "it is not over"
    over = Move("run", "r1", "ACTIVE", "COMPLETED")
    store.runs.group("r1", claimed, [over], run_state=("COMPLETED", ""))
    assert store.runs.states_since(begun + 60) == {}
    assert store.runs.states_since(0.0) == {"r1": ("COMPLETED", first + 3)}
    missed = store.runs.moves_since(begun - 1, 100)[-3:]
    assert [(each.seq, each.after) for each in missed] == [
        (first, "ACTIVE"),
        (first + 1, "QUEUED"),
        (first + 2, "COMPLETED"),
    ]
    assert store.runs.moves_since(begun + 60, 100) == []
    states = [state for _, state in store.runs.run_moves(["r1"])["r1"]]
    assert states[-2:] == ["ACTIVE", "COMPLETED"]


def test_a_run_is_found_by_its_name_or_a_part_of_its_id(store: Store) -> None:
    for n, name in enumerate(("one", "two", "two", "0101")):
        store.runs.submit(
            RunRow(f"20260101-00000{n}-aaaaa{n}", "a@1", "", {}, "/w", data={"name": name})
        )

    def ends(wanted: RunFilter) -> str:
        return "".join(row.id[-1] for row in store.runs.page(wanted, 9))

    assert (
        ends(RunFilter(name="one")) == "0"
        and ends(RunFilter(name="two")) == "21"
        and ends(RunFilter(name="three")) == ""
    )
    assert (
        ends(RunFilter(part="20260101")) == "3210"
        and ends(RunFilter(part="aaaaa2")) == "2"
        and ends(RunFilter(part="%")) == ""
    )


def test_a_worker_is_known_from_its_first_word_to_its_end(store: Store, fresh: Fresh) -> None:
    here = WorkerRow(
        this_process(), "host process 1", store.runs.workspace, "ssh", {"gpu": "a100"}, {"user": 2}
    )
    store.runs.workers.hear(here)
    store.runs.workers.hear(here)
    (found,) = fresh().runs.workers.all(store.runs.workspace)
    assert found._replace(age=0.0, silent=0.0) == here and found.alive and found.silent < 5
    elsewhere = here._replace(process="other/boot 1 1", workspace="/elsewhere", store="s3://bucket")
    store.runs.workers.hear(elsewhere)
    dead = here._replace(process=f"{machine()} 1 0")
    store.runs.workers.hear(dead)
    known = {each.process: each for each in store.runs.workers.all(store.runs.workspace)}
    assert known[elsewhere.process].alive and not known[dead.process].alive
    assert not known[elsewhere.process]._replace(silent=SILENT).alive
    for each in (here, elsewhere, dead):
        store.runs.workers.forget(each.process)
    assert store.runs.workers.all(store.runs.workspace) == []


def test_a_run_of_a_higher_priority_is_claimed_first_also_when_it_got_it_later(
    store: Store,
) -> None:
    for n in "12":
        store.runs.submit(RUN._replace(id=f"r{n}", due=1.0))
    before = store.runs.get("r2").next_event
    store.runs.prioritize("r2", 5)
    (event,) = store.runs.events("r2", before - 1)
    assert (event.subject, event.after, event.reason) == ("run", "QUEUED", "prioritized")
    assert event.data == {"priority": 5}
    claimed = store.runs.claim_next("worker", ANY)
    assert claimed is not None and (claimed.id, claimed.priority) == ("r2", 5)


def test_what_people_say_of_a_run_changes_and_is_heard_also_when_it_is_over(store: Store) -> None:
    for n in "12":
        store.runs.submit(
            RunRow(f"2026-r{n}", "a@1", "", {}, "/w", data={"name": "old", "kept": 1})
        )
    before = store.runs.get("2026-r1").next_event
    store.runs.describe("2026-r1", {"name": None, "tags": ["base", "x%"], "archived": True})
    assert store.runs.get("2026-r1").data == {"kept": 1, "tags": ["base", "x%"], "archived": True}
    (event,) = store.runs.events("2026-r1", before - 1)
    assert (event.subject, event.before, event.after) == ("run", "QUEUED", "QUEUED")
    assert (event.reason, store.runs.get("2026-r1").next_event) == ("described", before + 1)

    def ids(wanted: RunFilter) -> list[str]:
        return [row.id for row in store.runs.page(wanted, 9)]

    assert ids(RunFilter(tag="base")) == ["2026-r1"] and ids(RunFilter(tag="bas")) == []
    assert ids(RunFilter(archived="yes")) == ["2026-r1"] and ids(RunFilter(archived="no")) == [
        "2026-r2"
    ]
    assert (
        ids(RunFilter(tag="x%", archived="no")) == []
        and store.runs.get("2026-r2").data["name"] == "old"
    )


def test_the_attempt_that_gave_a_result_is_known_by_its_key(store: Store) -> None:
    for run, outcomes in (("r1", ("failed", "done")), ("r2", ("done",))):
        fence = store.runs.submit(RunRow(run, "a@1", "", {}, "/w"), "me").fence
        tries = [
            AttemptRow(f"{run}/s/{n}", run, "s", n, "k", ended=float(n), outcome=outcome)
            for n, outcome in enumerate(outcomes, 1)
        ]
        steps = [StepRow(run, "s", "DONE", "k")]
        store.runs.group(run, fence, steps=steps, attempts=tries)
    assert store.runs.makers(["k", "none"]) == {"k": ("r1/s/2", "r1", "s", 2, "k")}
    assert [each.id for each in store.runs.finished_attempts(["r1"])] == ["r1/s/1", "r1/s/2"]
    found = store.runs.steps_of(["r2", "none"])
    assert (found["r2"]["s"].state, found["r2"]["s"].key, found["none"]) == ("DONE", "k", {})


def test_runs_are_listed_newest_first_page_by_page(store: Store) -> None:
    for n in range(5):
        data = {"labels": {"gpu": str(n)}}
        recipe = "b@1" if n else "a@1"
        store.runs.submit(
            RunRow(
                f"20260101-00000{n}-aaaaaa",
                recipe,
                "",
                {},
                "/w",
                data=data,
                due=4e9,
                idempotency=f"k{n}",
                created=100.0 + n,
                user="ann" if n % 2 else "bob",
            )
        )

    def seconds(wanted: RunFilter, limit: int = 9) -> str:
        return "".join(row.id[14] for row in store.runs.page(wanted, limit))

    place = RunPlace(103.0, "20260101-000003-aaaaaa")
    assert seconds(RunFilter(), 2) == "43" and seconds(RunFilter(before=place)) == "210"
    assert (
        seconds(RunFilter(user="ann", recipe="b@1")) == "31"
        and seconds(RunFilter(label=("gpu", "2"))) == "2"
    )
    assert seconds(RunFilter(key="k3")) == "3" and seconds(RunFilter(key="k")) == ""
    assert (
        seconds(RunFilter(states=["FAILED", "ACTIVE"])) == ""
        and seconds(RunFilter(states=["QUEUED"])) == "43210"
    )


def test_runs_of_one_second_are_listed_in_the_order_in_which_they_were_created(
    store: Store,
) -> None:
    for n, end in enumerate("cab"):
        run = f"20260101-000000-{end}"
        store.runs.submit(RunRow(run, "a@1", "", {}, "/w", created=50.0 + n / 10, due=4e9))
    store.runs.submit(RunRow("20260101-000000-z", "a@1", "", {}, "/w", created=50.0, due=4e9))

    def ends(wanted: RunFilter, limit: int = 9) -> str:
        return "".join(row.id[-1] for row in store.runs.page(wanted, limit))

    assert ends(RunFilter()) == ends(RunFilter(states=["QUEUED", "ACTIVE"])) == "bazc"
    last = store.runs.page(RunFilter(), 3)[-1]
    assert ends(RunFilter(before=RunPlace(last.created, last.id))) == "c"


def test_a_worker_takes_no_more_of_one_user_than_its_limit_and_then_the_oldest(
    store: Store, fresh: Fresh
) -> None:
    for n, user in enumerate(("ada", "ada", "bob")):
        store.runs.submit(RUN._replace(id=f"r{n}", user=user, due=float(n + 1)))
    offer = ClaimCriteria(at_most={"user": 1})
    first, second = store.runs.claim_next("w", offer), fresh().runs.claim_next("w2", offer)
    assert first is not None and second is not None and (first.id, second.id) == ("r0", "r2")
    assert fresh().runs.claim_next("w3", offer) is None
    store.runs.group("r0", first.fence, [DONE], run_state=("COMPLETED", ""))
    third = fresh().runs.claim_next("w3", offer)
    assert third is not None and third.id == "r1"
    assert store.runs.get("r1").user == "ada"


def test_limits_count_recipes_and_drivers_too(store: Store, fresh: Fresh) -> None:
    for n, driver in enumerate(("ssh", "ssh", "vastai")):
        store.runs.submit(RUN._replace(id=f"r{n}", due=1.0, data={"settings": {"driver": driver}}))
    claimed = [fresh().runs.claim_next("w", ClaimCriteria(at_most={"driver": 1})) for _ in range(3)]
    assert [each and each.id for each in claimed] == ["r0", "r2", None]
    assert fresh().runs.claim_next("w", ClaimCriteria(at_most={"recipe": 2})) is None
    assert fresh().runs.claim_next("w", ClaimCriteria(at_most={"recipe": 3})) is not None


def letters_of(events: Sequence[Event]) -> list[Letter]:
    """Two receivers are told of each move."""
    return [
        Letter(f"webhook POST http://{name}", f"{each.run}-{each.seq}", each.after, "{}")
        for each in events
        for name in ("x", "y")
    ]


RECEIVERS = Reporter(lambda run, data: True, letters_of)
KNOWN = ("webhook POST http://x ", "webhook POST http://y ")


def test_letters_are_stored_with_the_move_that_they_tell_of_or_not_at_all(
    store: Store, fresh: Fresh
) -> None:
    store.runs.reporter = RECEIVERS
    claim = store.runs.submit(RUN, "w")
    assert [each.type for each in fresh().runs.outbox.list_letters()] == ["QUEUED"] * 2
    store.runs.request("r1", "cancel")
    with pytest.raises(Requested):
        store.runs.group(
            "r1",
            claim.fence,
            [Move("run", "r1", "QUEUED", "COMPLETED")],
            run_state=("COMPLETED", ""),
        )
    with pytest.raises(Stale):
        store.runs.group("r1", claim.fence + 1, [Move("run", "r1", "QUEUED", "ACTIVE")])
    store.runs.group("r1", claim.fence, [DONE, Move("run", "r1", "ACTIVE", "ACTIVE", "expanded")])
    assert len(store.runs.outbox.list_letters()) == 2
    store.runs.group(
        "r1",
        claim.fence,
        [DONE, Move("run", "r1", "QUEUED", "CANCELLED")],
        run_state=("CANCELLED", ""),
        answers="cancel",
    )
    found = fresh().runs.outbox.list_letters()
    assert [(each.type, each.id) for each in found[2:]] == [
        ("CANCELLED", f"r1-{store.runs.get('r1').next_event - 1}")
    ] * 2
    store.runs.forget(["r1"])
    assert store.runs.outbox.list_letters() == []


def test_the_first_letter_of_a_run_and_receiver_is_taken_by_one_and_the_next_when_it_is_gone(
    store: Store, fresh: Fresh
) -> None:
    store.runs.reporter = RECEIVERS
    claim = store.runs.submit(RUN, "w")
    store.runs.group(
        "r1", claim.fence, [Move("run", "r1", "QUEUED", "ACTIVE")], run_state=("ACTIVE", "")
    )
    mine, other = store.runs.outbox, fresh().runs.outbox
    assert (
        mine.take(("webhook POST http://z ",)) == []
        and mine.due(("webhook POST http://z ",)) is None
    )
    (first,) = mine.take(KNOWN[:1])
    assert (first.type, first.receiver, first.tries) == ("QUEUED", "webhook POST http://x", 0)
    (second,) = other.take(KNOWN)
    assert (
        second.receiver == "webhook POST http://y"
        and other.take(KNOWN) == []
        and (other.due(KNOWN) or 0) > 50
    )
    mine.mark_delivered(first)
    assert [each.type for each in other.take(KNOWN, ["webhook POST http://y"])] == [
        "ACTIVE"
    ] and mine.due(KNOWN, ["webhook POST http://x"]) is not None
    mine.put_off(second, 0.0, "HTTP 500")
    assert [(each.tries, each.reason) for each in mine.take(KNOWN)] == [(1, "HTTP 500")]
    mine.put_off(second, 100.0, "HTTP 500")
    assert mine.take(KNOWN) == [] and 95 < (mine.due(KNOWN, ["webhook POST http://x"]) or 0) <= 100
    mine.give_up(second, "too often")
    assert [each.type for each in mine.take(KNOWN)] == ["ACTIVE"]  # one that is dead holds up none
    assert (
        mine.stop("webhook POST http://y", "gone") == 1
        and mine.retry([second.number]) == 1
        and mine.retry([]) == 1
    )
    assert {each.state for each in mine.list_letters()} == {"waiting"}


def test_metric_points_that_wait_are_thinned_and_the_newest_stay(store: Store) -> None:
    store.runs.submit(RUN, "w")
    for n in range(25):
        body = json.dumps(
            {"job_id": "j", "metrics": [{"step": n * 500 + each} for each in range(500)]}
        )
        store.runs.outbox.post("r1", [Letter("metrics PUT http://x", str(n), "metrics", body, 500)])
    dropped = store.runs.outbox.thin("r1", "metrics PUT http://x")
    left = [
        point["step"]
        for each in store.runs.outbox.list_letters()
        for point in json.loads(each.body)["metrics"]
    ]
    assert len(left) + dropped == 12500 and 5000 < len(left) <= 10_000
    assert left == sorted(left) and left[-500:] == list(range(12000, 12500))
    assert store.runs.outbox.thin("r1", "metrics PUT http://x") == 0
