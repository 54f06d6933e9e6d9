"""Claims about the scheduler.  A tiny world plays the rest: it ends attempts by a table of outcomes, and remembers moves as the store would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.planning.schedule import (
    EARLY,
    FINAL,
    MOVES,
    AttemptOutcome,
    Move,
    Scheduler,
    SpentRetries,
    State,
    Task,
    backoff,
    budget_used,
    describe_run_state,
    priorities,
)

CAPACITY = {"cpus": 2.0, "gpus": 1.0}


@dataclass
class World:
    """What survives a crash (states, bad reasons) and what decides the future: verdicts, and the outcome of each try."""

    tasks: list[Task]
    verdicts: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, list[str]] = field(
        default_factory=dict
    )  # "ok" or a reason, by number of bad tries so far
    jobs: int = 2
    keep_going: bool = True
    states: dict[str, State] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    log: list[Move] = field(default_factory=list)
    ending: str = ""  # the step whose command ended, and which is not stored yet
    makes_room: bool = False  # whether such a step frees its slot

    def scheduler(self) -> Scheduler:
        used = {id: budget_used(reasons) for id, reasons in self.reasons.items()}
        return Scheduler(
            self.tasks,
            CAPACITY,
            jobs=self.jobs,
            keep_going=self.keep_going,
            states=dict(self.states),
            attempts=used,
        )

    def store(self, moves: list[Move], crash_at: int | None) -> bool:
        """Remember these moves, up to the crash.  False: we died."""
        for move in moves:
            if crash_at is not None and len(self.log) >= crash_at:
                return False
            before = self.states.get(move.id, State.WAITING)
            assert (move.before, move.after) == (before, move.after) and move.after in MOVES[before]
            if before is State.RUNNING and move.after in ("QUEUED", "FAILED"):
                self.reasons.setdefault(move.id, []).append(move.reason)
            self.states[move.id] = State(move.after)
            self.log.append(move)
            if move.after == "RUNNING":
                self.check_start(move.id)
        return True

    def check_start(self, id: str) -> None:
        by_id = {task.id: task for task in self.tasks}
        for need in by_id[id].required + by_id[id].after:
            state = self.states[need]
            assert state in (State.DONE, State.FRESH, State.SKIPPED) or (
                state is State.FAILED and by_id[need].allow_failure
            )
        assert not any(self.states[need] is State.SKIPPED for need in by_id[id].required)
        running = [
            by_id[other]
            for other, state in self.states.items()
            if state is State.RUNNING and other != self.ending
        ]
        assert len(running) <= self.jobs
        for pool, size in CAPACITY.items():
            assert sum(min(task.pools.get(pool, 0), size) for task in running) <= size + 1e-6
        if not self.keep_going:
            assert not any(
                self.states.get(task.id) is State.FAILED and not task.allow_failure
                for task in self.tasks
            )

    def outcome(self, id: str) -> AttemptOutcome:
        script = self.outcomes.get(id, [])
        tries = len(self.reasons.get(id, []))
        reason = script[tries] if tries < len(script) else "ok"
        return AttemptOutcome(reason == "ok", reason)

    def start(self, scheduler: Scheduler, crash_at: int | None) -> bool:
        for id in scheduler.startable():
            if not self.store([scheduler.start(id)], crash_at):
                self.ending = ""
                return False
        return True

    def live(self, crash_at: int | None = None, newest_first: bool = False) -> Scheduler | None:
        """Run until finished, or until the crash after that many moves."""
        scheduler = self.scheduler()
        if not self.store(list(scheduler.opening), crash_at):
            return None
        for _ in range(10_000):
            if scheduler.is_finished:
                assert scheduler.states() == {
                    task.id: self.states.get(task.id, State.WAITING) for task in self.tasks
                }
                return scheduler
            for id in scheduler.ready():
                if not self.store(scheduler.judge(id, self.verdicts.get(id, "run")), crash_at):  # type: ignore[arg-type]
                    return None
            if not self.start(scheduler, crash_at):
                return None
            running = [id for id, state in scheduler.states().items() if state is State.RUNNING]
            if running:
                id = running[-1 if newest_first else 0]
                if self.makes_room and self.outcome(id).ok and scheduler.make_room(id):
                    self.ending = id
                    if not self.start(scheduler, crash_at):
                        return None
                    self.ending = ""
                if not self.store(scheduler.end(id, self.outcome(id)), crash_at):
                    return None
        raise AssertionError("does not terminate")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 9))
    names = [f"s{n}" for n in range(size)]
    tasks = []
    for n, name in enumerate(names):
        edges = (
            draw(st.lists(st.tuples(st.sampled_from(names[:n]), st.booleans()), max_size=3))
            if n
            else []
        )
        tasks.append(
            Task(
                name,
                required=tuple(id for id, hard in edges if hard),
                after=tuple(id for id, hard in edges if not hard),
                pools=draw(
                    st.dictionaries(
                        st.sampled_from(["cpus", "gpus", "unlisted"]),
                        st.sampled_from([0, 0.1, 0.7, 1, 2, 5]),
                        max_size=2,
                    )
                ),
                retries=draw(st.integers(0, 2)),
                preemptions=draw(st.integers(0, 2)),
                allow_failure=draw(st.booleans()),
                priority=draw(st.sampled_from([0.0, 1.0, 2.5])),
            )
        )
    verdicts = {
        name: draw(st.sampled_from(["run", "run", "run", "fresh", "skip"])) for name in names
    }
    outcomes = {
        name: draw(st.lists(st.sampled_from(["ok", "exit", "oom", "lost"]), max_size=4))
        for name in names
    }
    return World(tasks, verdicts, outcomes, draw(st.integers(1, 3)), makes_room=draw(st.booleans()))


def copy(world: World, **changes: object) -> World:
    return replace(world, states={}, reasons={}, log=[], **changes)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(worlds(), st.data())
def test_a_run_that_died_after_any_move_ends_in_the_same_final_states(
    world: World, data: st.DataObject
) -> None:
    whole = copy(world).live()
    assert whole is not None
    broken = copy(world)
    died = 0
    while (
        scheduler := broken.live(
            len(broken.log) + data.draw(st.integers(1, 6)) if died < 8 else None,
            data.draw(st.booleans()),
        )
    ) is None:
        died += 1
    assert scheduler.states() == whole.states() and scheduler.result == whole.result


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(0, 25))
def test_without_keep_going_nothing_starts_after_a_failure_and_the_result_survives_a_crash(
    world: World, crash_at: int
) -> None:
    whole = copy(world, keep_going=False).live()
    assert whole is not None
    broken = copy(world, keep_going=False)
    scheduler = broken.live(crash_at) or broken.live()
    assert scheduler is not None and scheduler.result == whole.result


@settings(max_examples=100, deadline=None)
@given(
    worlds(),
    st.lists(
        st.sampled_from([*["judge", "start", "end"] * 2, "gone", "adopt", "drain", "cancel"]),
        max_size=60,
    ),
)
def test_any_interruption_ends_and_what_is_final_stays(world: World, actions: list[str]) -> None:
    world = copy(world)
    scheduler = world.scheduler()
    world.store(list(scheduler.opening), None)
    asked = False
    for what in actions:
        states = scheduler.states()
        before = {id: state for id, state in states.items() if state in FINAL}
        moves: list[Move] = []
        now = {state: [id for id, at in states.items() if at is state] for state in State}
        if what == "judge" and (ready := scheduler.ready(1)):
            moves = scheduler.judge(ready[0], world.verdicts[ready[0]])  # type: ignore[arg-type]
        elif what == "start" and (startable := scheduler.startable()):
            moves = [scheduler.start(startable[0])]
        elif what == "end" and now[State.RUNNING]:
            moves = scheduler.end(now[State.RUNNING][0], world.outcome(now[State.RUNNING][0]))
        elif what == "gone" and (made := now[State.DONE] + now[State.FRESH]):
            moves = scheduler.lose(made[0], "blob is gone")
            before.pop(made[0])
        elif what == "adopt" and now[State.QUEUED] and not asked:
            moves = scheduler.adopt(now[State.QUEUED][0], "made elsewhere")
        elif what in ("drain", "cancel"):
            moves = scheduler.drain() if what == "drain" else scheduler.cancel("asked")
            asked = True
        for move in moves:
            assert (
                world.states.get(move.id, State.WAITING) == move.before
                and move.after in MOVES[State(move.before)]
            )
            world.states[move.id] = State(move.after)
            if move.after == "RUNNING":
                world.check_start(move.id)
        assert all(scheduler.state(id) is state for id, state in before.items())
        assert sum(scheduler.counts.values()) == len(world.tasks)
        if asked:
            assert not scheduler.ready() and not scheduler.startable()
    scheduler.cancel("asked")
    for id, state in scheduler.states().items():
        if state is State.RUNNING:
            scheduler.end(id, AttemptOutcome(False, "stopped"))
    assert scheduler.is_finished


def run(scheduler: Scheduler, *ids: str) -> None:
    for id in ids:
        scheduler.judge(id, "run")
        scheduler.start(id)


def simple(*tasks: Task, jobs: int = 4, keep_going: bool = False, **capacity: float) -> Scheduler:
    return Scheduler(tasks, capacity, jobs=jobs, keep_going=keep_going)


def test_the_two_budgets_never_mix() -> None:
    s = simple(Task("a", retries=1, preemptions=1))
    run(s, "a")
    for reason, state in [
        ("lost", State.QUEUED),
        ("exit", State.QUEUED),
        ("preempted", State.FAILED),
    ]:
        s.end("a", AttemptOutcome(False, reason))
        assert s.state("a") is state
        if state is State.QUEUED:
            s.start("a")
    assert budget_used(["lost", "exit", "stopped", "oom", "preempted"]) == SpentRetries(
        failures=2, preemptions=2
    )


def test_a_preemption_after_a_new_checkpoint_costs_nothing_of_the_budget() -> None:
    s = simple(Task("a", preemptions=1))
    run(s, "a")
    for saved, state in [
        (True, State.QUEUED),
        (True, State.QUEUED),
        (False, State.QUEUED),
        (True, State.QUEUED),
        (False, State.FAILED),
    ]:
        s.end("a", AttemptOutcome(False, "preempted", saved=saved))
        assert s.state("a") is state
        if state is State.QUEUED:
            s.start("a")


def test_a_failure_blocks_everything_below_it_however_deep() -> None:
    n = 5_000
    s = simple(Task("s0"), *(Task(f"s{i}", (f"s{i - 1}",)) for i in range(1, n)), keep_going=True)
    run(s, "s0")
    moves = s.end("s0", AttemptOutcome(False))
    assert (
        len(moves) == n
        and s.counts[State.BLOCKED] == n - 1
        and s.is_finished
        and s.result == "FAILED"
    )
    assert moves[1].reason == "needs s0"


def test_without_keep_going_the_rest_is_cancelled_when_the_last_running_step_ends() -> None:
    s = simple(Task("a"), Task("b"), Task("c"))
    run(s, "a", "b")
    s.judge("c", "run")
    assert [m.after for m in s.end("a", AttemptOutcome(False))] == ["FAILED"]
    assert s.startable() == [] and s.state("c") is State.QUEUED
    assert [(m.id, m.after) for m in s.end("b", AttemptOutcome(True))] == [
        ("b", "DONE"),
        ("c", "CANCELLED"),
    ]
    assert s.result == "FAILED"


def test_a_skipped_step_skips_what_mentions_it_and_not_what_follows_it() -> None:
    s = simple(
        Task("a"),
        Task("mentions", ("a",)),
        Task("follows", after=("a",)),
        Task("deeper", ("mentions",)),
    )
    s.judge("a", "skip", "when is false")
    assert s.state("mentions") is s.state("deeper") is State.SKIPPED and s.ready() == ["follows"]


def test_a_step_that_is_stopped_early_skips_what_mentions_it_and_the_run_completes() -> None:
    scheduler = simple(
        Task("a"), Task("b"), Task("of a", required=("a",)), Task("best", after=("a", "b"))
    )
    run(scheduler, "a", "b")
    scheduler.end("a", AttemptOutcome(False, EARLY, "far behind"))
    scheduler.end("b", AttemptOutcome(True))
    assert (
        scheduler.state("a") is scheduler.state("of a") is State.SKIPPED
        and scheduler.state("best") is State.READY
    )
    run(scheduler, "best")
    scheduler.end("best", AttemptOutcome(True))
    assert scheduler.result == "COMPLETED"


def test_an_allowed_failure_lets_the_steps_below_go_on_and_the_run_complete() -> None:
    s = simple(Task("a", allow_failure=True), Task("b", ("a",)))
    run(s, "a")
    s.end("a", AttemptOutcome(False))
    s.judge("b", "fresh")
    assert s.is_finished and s.result == "COMPLETED"


def test_bytes_that_are_gone_put_the_steps_below_back_even_one_that_is_retried() -> None:
    s = simple(Task("a"), Task("b", ("a",)), Task("c", ("a",), retries=1), Task("d", ("a",)))
    s.judge("a", "fresh")
    s.judge("b", "run")
    run(s, "c")
    assert {m.id: m.after for m in s.lose("a", "blob missing")} == {
        "a": "QUEUED",
        "b": "WAITING",
        "d": "WAITING",
    }
    s.end("c", AttemptOutcome(False))
    assert s.state("c") is State.WAITING and s.startable() == ["a"]
    s.start("a")
    s.end("a", AttemptOutcome(True))
    assert s.ready() == ["b", "c", "d"]


@pytest.mark.parametrize("below", [State.READY, State.QUEUED])
def test_a_crash_before_the_steps_below_went_back_is_made_good(below: State) -> None:
    s = Scheduler(
        [Task("a"), Task("b", ("a",))],
        {},
        jobs=2,
        keep_going=False,
        states={"a": State.QUEUED, "b": below},
    )
    assert (
        [(m.id, m.after) for m in s.opening] == [("b", "WAITING")]
        and s.startable() == ["a"]
        and s.ready() == []
    )


def test_a_paused_step_waits_again_at_no_cost_and_nothing_new_starts() -> None:
    s = simple(Task("a"), Task("b"))
    run(s, "a")
    s.pause()
    assert s.ready() == [] and s.result == "ACTIVE"
    s.end("a", AttemptOutcome(False, "stopped"))
    assert (s.state("a"), s.startable(), str(s.result)) == (State.QUEUED, [], "PAUSED")
    again = Scheduler([Task("a"), Task("b")], {}, jobs=1, keep_going=False, states=s.states())
    assert again.startable() == ["a"]


def test_a_cancel_wins_over_steps_that_still_end_well() -> None:
    s = simple(Task("a"))
    run(s, "a")
    s.cancel("asked")
    s.end("a", AttemptOutcome(True))
    assert s.state("a") is State.DONE and s.result == "CANCELLED"


def test_a_drain_that_came_too_late_changes_nothing() -> None:
    s = simple(Task("a"))
    run(s, "a")
    s.drain()
    s.end("a", AttemptOutcome(True))
    assert s.result == "COMPLETED"


def test_a_matrix_may_become_its_instances_while_running() -> None:
    s = simple(Task("split"), Task("merge", ("split",)))
    moves = s.extend([Task("split[0]"), Task("split[1]"), Task("merge", ("split[0]", "split[1]"))])
    assert {m.id for m in moves} == {"split[0]", "split[1]"}
    s.judge("split", "fresh", "became 2")
    run(s, "split[0]", "split[1]")
    s.end("split[0]", AttemptOutcome(True))
    assert s.state("merge") is State.WAITING
    s.end("split[1]", AttemptOutcome(True))
    assert s.ready() == ["merge"]


def test_a_consumer_of_a_matrix_that_became_empty_is_ready() -> None:
    s = simple(Task("split"), Task("merge", ("split",)))
    assert [(m.id, m.after) for m in s.extend([Task("merge")])] == [("merge", "READY")]


def test_the_most_urgent_goes_first_and_smaller_ones_pass_what_does_not_fit() -> None:
    s = simple(
        Task("low"),
        Task("big", pools={"cpus": 2}, priority=5),
        Task("high", pools={"cpus": 1}, priority=9),
        cpus=2,
    )
    for id in s.ready():
        s.judge(id, "run")
    assert s.startable() == ["high", "low"] and s.startable(resting={"high"}) == ["big", "low"]


def test_a_big_step_is_not_starved_by_a_stream_of_urgent_small_ones() -> None:
    small = [Task(f"s{i}", pools={"cpus": 1}, priority=9) for i in range(200)]
    s = simple(*small, Task("big", pools={"cpus": 2}), cpus=2)
    for id in s.ready():
        s.judge(id, "run")
    running: list[str] = []
    started = 0
    while s.state("big") is State.QUEUED:
        for id in s.startable():
            s.start(id)
            running.append(id)
            started += 1
        s.end(running.pop(0), AttemptOutcome(True))
    assert 16 <= started <= 20


def test_a_step_that_asks_for_more_than_there_is_runs_alone() -> None:
    s = simple(Task("a", pools={"cpus": 99}), Task("b", pools={"cpus": 0.5}), cpus=2)
    run(s, "a")
    s.judge("b", "run")
    assert s.startable() == []
    s.end("a", AttemptOutcome(True))
    assert s.startable() == ["b"]


def test_tenths_of_a_pool_add_up() -> None:
    s = simple(*(Task(f"s{i}", pools={"gpus": 0.1}) for i in range(11)), jobs=20, gpus=1)
    for id in s.ready():
        s.judge(id, "run")
    assert len(s.startable()) == 10


def test_a_move_that_the_table_does_not_have_is_a_bug() -> None:
    s = simple(Task("a"))
    with pytest.raises(AssertionError, match="BUG"):
        s.end("a", AttemptOutcome(True))
    with pytest.raises(AssertionError, match="BUG: a plan with a cycle"):
        priorities([Task("a", ("b",)), Task("b", ("a",))], {})


def test_priority_is_the_way_to_the_end() -> None:
    assert priorities(
        [Task("a"), Task("b", ("a",)), Task("c", after=("a",))], {"a": 2, "b": 5}
    ) == {"a": 7, "b": 5, "c": 1}


def test_backoff_grows_to_a_limit() -> None:
    waits = [backoff(n) for n in range(1, 40)]
    assert waits == sorted(waits) and waits[0] == 0.5 and waits[-1] == backoff(10_000) == 300.0


@pytest.mark.parametrize(
    ("run", "failure", "steps", "leases", "claimed", "seen"),
    [
        ("QUEUED", "", [("WAITING", "")], [], False, "QUEUED"),
        ("ACTIVE", "", [("READY", "")], ["COMING"], True, "PROVISIONING"),
        ("ACTIVE", "", [("RUNNING", "staging")], ["UP"], True, "TRANSFERRING_DATA"),
        ("ACTIVE", "", [("RUNNING", "staging"), ("RUNNING", "")], ["COMING"], True, "EXECUTING"),
        ("ACTIVE", "", [("RUNNING", "fetching")], ["UP"], True, "FETCHING_RESULTS"),
        ("ACTIVE", "", [("DONE", ""), ("FRESH", "")], ["RELEASING"], True, "FETCHING_RESULTS"),
        ("ACTIVE", "", [("RUNNING", "")], ["UP"], False, "NEEDS_RECOVERY"),
        ("FAILED", "provisioning", [("CANCELLED", "")], [], False, "FAILED_PROVISIONING"),
        ("FAILED", "exit", [("FAILED", "exit")], [], False, "FAILED"),
        ("COMPLETED", "", [("DONE", "")], ["RELEASING"], False, "COMPLETED"),
    ],
)
def test_people_see_one_word(
    run: str,
    failure: str,
    steps: list[tuple[str, str]],
    leases: list[str],
    claimed: bool,
    seen: str,
) -> None:
    assert (
        describe_run_state(run, failure=failure, steps=steps, leases=leases, claimed=claimed)
        == seen
    )


def test_a_host_that_joins_a_run_gives_room_for_its_steps_and_their_pools() -> None:
    tasks = [Task(str(n), pools={"cpus": 2.0}) for n in range(3)]
    scheduler = Scheduler(tasks, {"cpus": 2.0}, jobs=1, keep_going=False)
    for id in scheduler.ready():
        scheduler.judge(id, "run")
    scheduler.start("0")
    assert scheduler.startable() == []
    scheduler.grow(2, {"cpus": 2.0, "memory": 1.0})
    assert scheduler.startable() == ["1"]


def _started(*tasks: Task, jobs: int = 1) -> Scheduler:
    """A scheduler whose first step runs, and whose other READY steps are queued."""
    scheduler = Scheduler(tasks, CAPACITY, jobs=jobs, keep_going=True)
    for id in scheduler.ready():
        scheduler.judge(id, "run")
    scheduler.start(tasks[0].id)
    return scheduler


def test_a_step_that_makes_room_is_followed_before_its_end_and_frees_its_slot_once() -> None:
    scheduler = _started(Task("a", pools={"cpus": 2}), Task("b", pools={"cpus": 2}), Task("c"))
    assert not scheduler.startable() and scheduler.make_room("a")
    assert scheduler.startable() == ["b"]
    scheduler.start("b")
    assert scheduler.room == 0 and scheduler.state("a") is State.RUNNING
    scheduler.end("a", AttemptOutcome(True))
    assert scheduler.room == 0 and not scheduler.startable()
    scheduler.end("b", AttemptOutcome(True))
    assert scheduler.room == 1 and scheduler.startable() == ["c"]


def test_a_more_urgent_dependent_keeps_the_slot_of_its_dependency() -> None:
    slow = Task("slow", priority=1.0)
    scheduler = _started(Task("a", priority=9.0), slow, Task("next", ("a",), priority=5.0))
    assert not scheduler.make_room("a") and scheduler.room == 0
    scheduler = _started(Task("a", priority=9.0), slow, Task("next", ("a", "slow"), priority=5.0))
    assert scheduler.make_room("a") and scheduler.startable() == ["slow"]


@pytest.mark.parametrize("resting", [(), ("b",)])
def test_a_step_keeps_its_slot_if_no_queued_step_could_use_it(resting: tuple[str, ...]) -> None:
    scheduler = _started(Task("a"), Task("b" if resting else "later", () if resting else ("a",)))
    assert not scheduler.make_room("a", resting) and scheduler.room == 0
    scheduler = _started(Task("a"), Task("b"))
    scheduler.drain()
    assert not scheduler.make_room("a") and scheduler.room == 0
