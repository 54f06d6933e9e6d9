"""Which steps run, are reused or skipped once their dependencies are finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.errors import CannotRun, StoreUnavailable
from runner.execution.steps import judging
from runner.execution.steps.assembly import Options
from runner.execution.steps.failing import Cause
from runner.execution.steps.judging import Judge
from runner.planning.judge import NOTHING, StepResult, Verdict
from runner.planning.plan import SELECT
from runner.planning.schedule import State
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

CHAIN = """
steps:
  a: {run: "true", deps: [in.txt], outputs: {o: a.txt}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
outputs: {b: "{{ steps.b.o }}"}
"""
PROGRAMS = {"a": writes(a="1"), "b": writes(b="2")}


def _run(root: Path, recipe: str = CHAIN) -> SimulatedRun:
    run = SimulatedRun(root, recipe, PROGRAMS)
    assert run.run().state == "COMPLETED"
    return run


def test_a_step_with_an_equal_input_is_reused_although_its_dependency_ran(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    _run(tmp_path)
    (tmp_path / "in.txt").write_text("y")
    run = _run(tmp_path)
    assert run.started == ["a"] and run.states_of("b") == ["READY", "FRESH"]


def test_a_reused_result_that_is_not_in_place_is_restored(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    _run(tmp_path)
    for each in tmp_path.rglob("b.txt"):
        if "objects" not in each.parts:
            each.unlink()
    (tmp_path / "in.txt").write_text("y")
    run = _run(tmp_path)
    assert run.last_of("b").data["restored"] is True


def test_instances_that_failed_are_left_out_of_what_needs_all(tmp_path: Path) -> None:
    recipe = """
steps:
  a: {matrix: {n: [1, 2]}, run: "echo {{ matrix.n }}", allow_failure: true, outputs: {o: "a{{ matrix.n }}.txt"}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
"""
    read: list[int] = []

    async def counts(job: StartedJob) -> Exit:
        read.append(len([*job.folder.rglob("a*.txt")]))
        return await writes(b="2")(job)

    run = SimulatedRun(
        tmp_path,
        recipe,
        {"a[n=1]": exits(1), "a[n=2]": writes(a2="1"), "b": counts},
        options=Options(jobs=4, keep_going=True),
    )
    assert run.run().state == "COMPLETED" and read == [1]


MADE = StepResult(True, {"o": "f-o"}, {})
KEY: Any = "k"
RUN = Verdict("run", KEY, ("it is new",), None)
REUSE = Verdict("fresh", KEY, ("nothing changed",), MADE)
AGAIN = "its stored output was deleted"


class Bench:
    """A judge of step `b`, which reads the output `o` of step `a` as `c` reads that of `b`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shares: bool = False) -> None:
        self.calls, self.grown = list[str](), 0
        self.states: dict[str, State] = {"a": State.DONE, "b": State.READY, "c": State.WAITING}
        self.answers: list[Verdict | Exception] = [RUN]
        self.here, self.there, self.on_hosts = {"f-o"}, set[str](), set[str]()
        self.made: dict[int, StepResult] = {0: MADE}
        self.todo = {"a", "b", "c"}
        self.earlier, self.smaller, self.uses_smaller = 0, True, False
        self.publishing: CannotRun | None = None
        self.warnings: list[str] = []
        self.reports: bool | None = False
        self.asked, self.awaited, self.sends = list[Any](), set[str](), False
        self.forced, self.done = list[bool](), set[str]()
        self.targets: dict[int, list[tuple[str, str]]] = {}
        self.data: object = None
        monkeypatch.setattr(judging, "judge", self._answer)
        nodes: dict[str, Any] = {
            "a": Of(id="a", flags=0, upstream=[]),
            "b": Of(id="b", flags=0, upstream=[Of(producer=0, output="o")]),
            "c": Of(id="c", flags=0, upstream=[Of(producer=1, output="o")]),
        }
        self.nodes = nodes
        numbers = {id: n for n, id in enumerate(nodes)}
        self.facts = Of(there={})
        steps: Any = Of(
            plan=Of(nodes=[*nodes.values()], dependencies=lambda n: {n - 1} if n else set[int]()),
            number=numbers.__getitem__,
            node=nodes.__getitem__,
            spec=lambda _id: Of(
                metrics=None if self.reports is None else Of(in_environment=self.reports)
            ),
            made=self.made,
            todo=self.todo,
            facts=self.facts,
            survey=Of(forces=lambda id: id in self.done, targets=self.targets),
            consumers=lambda n: ["abc"[n + 1]] if n < 2 else [],
            set_made=self.made.__setitem__,
            set_failed=lambda id: self.calls.append(f"failed {id}"),
            set_verdict=lambda id, verdict: self.calls.append(f"verdict {id} {verdict.answer}"),
        )
        trace = Of(facts={"warnings": self.warnings}, key="k")
        ws: Any = Of(
            remote_cache=Of(has=self.there.__contains__),
            delivers=True,
            objects=Of(has=self.here.__contains__),
            store=Of(index=Of(trace=lambda _key: trace)),
        )
        schedule: Any = Of(
            ready=lambda: [id for id, state in self.states.items() if state is State.READY],
            state=self.states.__getitem__,
            judge=self._judge,
            make_again=lambda id, why: self.calls.append(f"make {id} again: {why}"),
            judge_again=lambda id, _why: self.calls.append(f"judge {id} again"),
        )
        me: Any = self
        pool: Any = Of(places=[Of(folder=Of(holds=self.on_hosts.__contains__))])
        commits: Any = Of(made=set[str]())
        self.commits = commits
        self.ws = ws
        self.judge = Judge(ws, steps, schedule, commits, me, me, me, pool, me if shares else None)

    def _answer(self, *_words: Any, force: bool = False, targets: Any) -> Verdict:
        self.forced.append(force)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    def _judge(self, id: str, decision: str, reason: str, data: object = None) -> None:
        self.calls.append(f"{decision} {id}: {reason}")
        self.data = data

    # -- as the publisher, the smaller inputs, the growth and the downloads

    def try_publish(self, _n: int, _made: StepResult) -> CannotRun | None:
        self.calls.append("publish")
        return self.publishing

    def take_earlier(self, _id: str) -> int:
        return self.earlier

    def are_used_by(self, _id: str) -> bool:
        return self.uses_smaller

    def divide(self, _id: str) -> bool:
        self.calls.append("divide")
        return self.smaller

    def note_result(self, _id: str, _trace: Any) -> None:
        self.calls.append("note result")

    def grow(self) -> None:
        self.grown += 1

    def add(self, ids: set[str]) -> None:
        self.calls.append(f"add {sorted(ids)}")

    def is_awaited(self, id: str) -> bool:
        return id in self.awaited

    def ask(self, id: str, _node: Any, verdict: Verdict, missing: Sequence[str]) -> bool:
        self.asked.append((id, verdict.answer, list(missing)))
        return self.sends

    def look(self, *answers: Verdict | Exception) -> list[str]:
        """Judge `b`, and return what was asked for besides its verdict."""
        self.answers = [*answers] or self.answers
        self.has_moved = self.judge.judge_ready()
        return [call for call in self.calls if not call.startswith("verdict")]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, shares=True)


def test_a_step_runs_with_its_reason(bench: Bench) -> None:
    assert bench.look() == ["run b: it is new"] and bench.has_moved and bench.grown == 0
    assert bench.calls[0] == "verdict b run"


def test_nothing_has_moved_if_no_step_is_ready(bench: Bench) -> None:
    bench.states["b"] = State.RUNNING
    assert bench.look() == [] and not bench.has_moved


def test_a_reused_result_is_known_to_the_run_and_may_let_it_grow(bench: Bench) -> None:
    assert bench.look(REUSE) == ["fresh b: nothing changed"]
    assert bench.made[1] is MADE and bench.grown == 1 and bench.data == {}


def test_a_restored_result_is_published_first(bench: Bench) -> None:
    assert bench.look(REUSE._replace(answer="restore")) == ["publish", "fresh b: nothing changed"]
    assert bench.data == {"restored": True}


def test_a_result_that_cannot_be_published_fails_its_step_when_it_starts(bench: Bench) -> None:
    bench.publishing = CannotRun("out.txt is yours", fix="move it")
    assert bench.look(REUSE._replace(answer="restore")) == ["publish", "run b: "]
    assert bench.judge.refusal_of("b") == Cause("publish", "out.txt is yours", "move it")
    assert bench.judge.refusal_of("a") is None and bench.grown == 0


@pytest.mark.parametrize(
    ("reports", "data"), [(True, {"warnings": ["few rows"]}), (False, {}), (None, {})]
)
def test_warnings_of_a_reused_result_are_stored_with_it(
    bench: Bench, reports: bool | None, data: object
) -> None:
    bench.warnings += ["few rows"]
    bench.reports = reports
    bench.look(REUSE)
    assert bench.data == data


def test_a_step_is_skipped_without_a_result(bench: Bench) -> None:
    assert bench.look(Verdict("skip", None, ("`when` is false",), NOTHING)) == [
        "failed b",
        "skip b: `when` is false",
    ]


def test_a_selection_that_cannot_be_made_from_results_fails(bench: Bench) -> None:
    bench.nodes["b"].flags = SELECT
    assert bench.look() == ["run b: "]
    assert bench.judge.refusal_of("b") == Cause("select", "it is new")


def test_a_condition_that_cannot_be_read_fails_its_step(bench: Bench) -> None:
    assert bench.look(CannotRun("no such metric", fix="report it")) == ["run b: "]
    assert bench.judge.refusal_of("b") == Cause("when", "no such metric", "report it")


def test_a_store_without_an_answer_ends_the_run_instead_of_the_step(bench: Bench) -> None:
    with pytest.raises(StoreUnavailable):
        bench.look(StoreUnavailable("no answer"))
    assert bench.judge.refusal_of("b") is None


@pytest.mark.parametrize(
    ("state", "known"),
    [(State.SKIPPED, True), (State.FAILED, True), (State.DONE, False), (State.FRESH, False)],
)
def test_a_dependency_that_was_skipped_or_failed_has_no_result(
    bench: Bench, state: State, known: bool
) -> None:
    bench.made.clear()
    bench.states["a"] = state
    bench.look()
    assert bench.made == ({0: NOTHING} if known else {})


def test_a_dependency_outside_the_run_is_left_as_it_is(bench: Bench) -> None:
    bench.made.clear()
    bench.todo -= {"a"}
    bench.states["a"] = State.FAILED
    bench.look()
    assert bench.made == {}


@pytest.mark.parametrize("where", ["here", "there", "on_hosts", ""])
def test_a_result_is_reused_only_if_what_others_read_of_it_can_be_had(
    bench: Bench, where: str
) -> None:
    bench.here.clear()
    if where:
        getattr(bench, where).add("f-o")
    reused = bench.look(REUSE) == ["fresh b: nothing changed"]
    assert reused == bench.judge.is_made(1) == bool(where)
    if not where:
        assert bench.calls[-1] == f"run b: {AGAIN}" and 1 not in bench.made


def test_what_is_in_the_shared_store_counts_only_if_the_run_delivers(bench: Bench) -> None:
    bench.here.clear()
    bench.there.add("f-o")
    bench.ws.delivers = False
    assert bench.look(REUSE) == [f"run b: {AGAIN}"]
    bench.ws.delivers, bench.ws.remote_cache = True, None
    assert not bench.judge.is_made(1)


def test_outputs_that_nobody_reads_need_not_be_there(bench: Bench) -> None:
    bench.here.clear()
    bench.nodes["c"].upstream = [Of(producer=0, output="o")]  # the output of another step
    assert bench.look(REUSE) == ["fresh b: nothing changed"]


@pytest.mark.parametrize(
    ("verdict", "is_made"),
    [
        (REUSE, True),
        (REUSE._replace(answer="restore"), True),
        (RUN, False),
        (REUSE._replace(answer="run"), False),
        (REUSE._replace(made=None), False),
    ],
)
def test_a_step_is_made_if_its_result_is_up_to_date(
    bench: Bench, verdict: Verdict, is_made: bool
) -> None:
    bench.answers = [verdict]
    assert bench.judge.is_made(1) == is_made


@pytest.mark.parametrize(
    ("repeated", "calls"), [(True, "fresh b: nothing changed"), (False, "run b: it is new")]
)
def test_a_forced_step_runs_once_in_a_run(bench: Bench, repeated: bool, calls: str) -> None:
    bench.done.add("b")
    if repeated:
        bench.commits.made.add("k")
    assert bench.look(RUN._replace(forced=True), REUSE) == [calls]
    assert bench.forced == ([True, False] if repeated else [True])


def test_a_step_that_nobody_forces_is_judged_once(bench: Bench) -> None:
    bench.commits.made.add("k")
    assert bench.look() == ["run b: it is new"] and bench.forced == [False]


def test_a_step_that_ran_out_of_memory_before_is_judged_with_smaller_inputs(bench: Bench) -> None:
    bench.earlier = 2
    smaller = RUN._replace(reasons=("smaller",))
    assert bench.look(RUN, smaller) == ["divide", "divide", "run b: smaller"]
    assert bench.calls[0] == "verdict b run"  # the key that was asked for


def test_inputs_that_cannot_be_smaller_leave_the_verdict(bench: Bench) -> None:
    bench.earlier, bench.smaller, bench.uses_smaller = 1, False, True
    assert bench.look(RUN, REUSE) == ["divide", "run b: it is new"]
    assert bench.calls.count("verdict b run") == 1


@pytest.mark.parametrize("uses_smaller", [True, False])
def test_a_result_of_smaller_inputs_stands_for_that_of_those_asked_for(
    bench: Bench, uses_smaller: bool
) -> None:
    bench.uses_smaller = uses_smaller
    assert bench.look(REUSE) == ["note result"] * uses_smaller + ["fresh b: nothing changed"]


# -- with a shared store


def test_a_step_waits_for_the_answer_of_the_shared_store(shared: Bench) -> None:
    shared.sends = True
    assert shared.look() == [] and shared.asked == [("b", "run", [])]
    shared.awaited.add("b")
    assert shared.look() == [] and not shared.has_moved and len(shared.asked) == 1
    shared.awaited.clear()
    shared.sends = False
    assert shared.look() == ["run b: it is new"]


@pytest.mark.parametrize("state", [State.FRESH, State.DONE])
def test_a_producer_whose_output_is_lost_runs_again_first(shared: Bench, state: State) -> None:
    shared.here.clear()
    shared.states["a"] = state
    assert shared.look() == [f"make a again: {AGAIN}", "judge a again"]
    assert shared.asked == [("b", "run", ["f-o"])]
    shared.calls, shared.states["a"] = [], State.RUNNING
    assert shared.look() == [] and not shared.has_moved
    shared.states["a"] = State.DONE
    shared.here.add("f-o")
    assert shared.look() == ["run b: it is new"]


def test_a_producer_that_runs_already_is_not_made_twice(shared: Bench) -> None:
    shared.here.clear()
    shared.states["a"] = State.RUNNING
    assert shared.look() == []


def test_a_producer_outside_the_run_is_added_to_it(shared: Bench) -> None:
    shared.here.clear()
    shared.todo -= {"a"}
    assert shared.look() == ["add ['a']"]


def test_a_result_whose_contents_are_lost_runs_without_its_producer(shared: Bench) -> None:
    shared.here.clear()
    shared.here.add("f-a")
    shared.made[0] = StepResult(True, {"o": "f-a"}, {})
    assert shared.look(REUSE) == [f"run b: {AGAIN}"]
    assert shared.asked == [("b", "fresh", ["f-o"]), ("b", "run", [])]


@pytest.mark.parametrize(("there", "missing"), [("f-p", []), ("f-old", ["f-p"])])
def test_published_outputs_are_fetched_unless_they_are_in_place(
    shared: Bench, there: str, missing: list[str]
) -> None:
    shared.targets[1] = [("p", "p.txt"), ("gone", "gone.txt")]
    shared.facts.there = {"p.txt": there, "gone.txt": "x"}
    made = StepResult(True, {"o": "f-o", "p": "f-p"}, {})
    shared.look(REUSE._replace(made=made))
    assert shared.asked == [("b", "fresh", missing)]


def test_a_skipped_step_needs_no_contents(shared: Bench) -> None:
    shared.here.clear()
    shared.look(Verdict("skip", None, ("no",), None))
    assert shared.asked == [("b", "skip", [])]
