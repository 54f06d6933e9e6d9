"""What judging answers from facts alone: fresh, restore, run, maybe, skip, and each reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from runner.planning.judge import (
    FRESH,
    MAYBE,
    NOTHING,
    RESTORE,
    RUN,
    SKIPPED,
    Facts,
    StepResult,
    Verdict,
    judge,
    scope_of,
)
from runner.planning.plan import Plan, Target
from tests.unit.test_compile import plan


@dataclass
class Trace:
    outputs: list[list[str]] = field(default_factory=list)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Traces(dict[str, Trace]):
    """Traces by key; `of` remembers what a step would leave if it ran now."""

    def of(
        self, found: Plan, id: str, facts: Facts, made: Mapping[int, StepResult], **contents: str
    ) -> None:
        n = found.index[id]
        key = judge(found, n, facts, made).key
        assert key is not None
        paths = {name: path for name, path, _ in found.nodes[n].outputs}
        self[key] = Trace([[name, paths[name], content] for name, content in contents.items()])


def world(found: Plan, **files: str | None) -> tuple[Facts, Traces]:
    traces = Traces()
    facts = Facts(traces, {}, stored={"f:1", "f:2"})
    facts.files = {
        dep: files.get(dep.replace(".", "_"), "f:0") for node in found.nodes for dep in node.deps
    }
    return facts, traces


def ask(
    found: Plan, id: str, facts: Facts, made: Mapping[int, StepResult] | None = None, **more: Any
) -> Verdict:
    return judge(found, found.index[id], facts, made or {}, **more)


CHAIN = """
steps:
  a: {run: x, deps: [in.txt], outputs: {o: a.txt}}
  b: {run: "x {{ steps.a.o }}", outputs: {o: b.txt}}
"""


@pytest.fixture
def chain() -> Plan:
    return plan(CHAIN)


PLACES = {0: [Target("o", "a.txt")], 1: [Target("o", "b.txt")]}


def test_a_key_without_a_trace_runs(chain: Plan) -> None:
    facts, _ = world(chain)
    verdict = ask(chain, "a", facts)
    assert verdict.answer == RUN and verdict.key and verdict.made is None


def test_a_trace_whose_outputs_lie_where_they_must_is_fresh(chain: Plan) -> None:
    facts, traces = world(chain)
    traces.of(chain, "a", facts, {}, o="f:1")
    facts.there = {"a.txt": "f:1"}
    verdict = ask(chain, "a", facts, targets=PLACES)
    assert verdict.answer == FRESH and verdict.made == StepResult(True, {"o": "f:1"}, {})


@pytest.mark.parametrize(("there", "word"), [(None, "missing"), ("f:9", "")])
def test_a_trace_whose_outputs_are_elsewhere_is_restored(
    chain: Plan, there: str | None, word: str
) -> None:
    facts, traces = world(chain)
    traces.of(chain, "a", facts, {}, o="f:1")
    facts.there, facts.ours = {"a.txt": there}, {"a.txt": "f:9"}
    verdict = ask(chain, "a", facts, targets=PLACES)
    assert verdict.answer == RESTORE and word in verdict.reasons[0] and verdict.conflicts == ()


def test_a_trace_whose_bytes_are_gone_runs_and_says_so(chain: Plan) -> None:
    facts, traces = world(chain)
    traces.of(chain, "a", facts, {}, o="f:lost")
    verdict = ask(chain, "a", facts, targets=PLACES)
    assert verdict.answer == RUN and "no longer stored" in verdict.reasons[0]


def test_bytes_that_lie_where_they_must_need_not_be_stored(chain: Plan) -> None:
    facts, traces = world(chain)
    traces.of(chain, "a", facts, {}, o="f:lost")
    facts.there = {"a.txt": "f:lost"}
    assert ask(chain, "a", facts, targets=PLACES).answer == FRESH


def test_what_somebody_else_put_there_is_a_conflict(chain: Plan) -> None:
    facts, _ = world(chain)
    facts.there = {"a.txt": "f:theirs"}
    assert ask(chain, "a", facts, targets=PLACES).conflicts == ("a.txt",)
    facts.ours = {"a.txt": "f:theirs"}
    assert ask(chain, "a", facts, targets=PLACES).conflicts == ()


def test_an_unknown_upstream_makes_it_a_maybe(chain: Plan) -> None:
    facts, _ = world(chain)
    verdict = ask(chain, "b", facts)
    assert verdict.answer == MAYBE and verdict.key is None and "a" in verdict.reasons[0]


def test_an_upstream_that_came_out_the_same_changes_nothing_below(chain: Plan) -> None:
    facts, traces = world(chain)
    traces.of(chain, "b", facts, {0: StepResult(True, {"o": "f:1"}, {})}, o="f:2")
    facts.there = {"b.txt": "f:2"}
    assert (
        ask(
            chain, "b", facts, {0: StepResult(True, {"o": "f:1"}, {"other": 1})}, targets=PLACES
        ).answer
        == FRESH
    )
    assert (
        ask(chain, "b", facts, {0: StepResult(True, {"o": "f:2"}, {})}, targets=PLACES).answer
        == RUN
    )


def test_force_runs_whatever_is_remembered(chain: Plan) -> None:
    facts, traces = world(chain)
    traces.of(chain, "a", facts, {}, o="f:1")
    facts.there = {"a.txt": "f:1"}
    verdict = ask(chain, "a", facts, targets=PLACES, force=True)
    assert verdict.answer == RUN and verdict.reasons == ("forced",) and verdict.key is not None


def test_a_missing_file_gives_no_key_and_is_named(chain: Plan) -> None:
    facts, _ = world(chain)
    facts.files = {"in.txt": None}
    verdict = ask(chain, "a", facts)
    assert (
        verdict.answer == RUN and verdict.key is None and "in.txt does not exist" in verdict.reasons
    )


def test_cache_false_runs_every_time() -> None:
    found = plan("steps: {a: {run: x, cache: false, outputs: {o: a.txt}}}")
    facts, traces = world(found)
    traces.of(found, "a", facts, {}, o="f:1")
    facts.there = {"a.txt": "f:1"}
    assert ask(found, "a", facts, targets=PLACES).answer == RUN


# -- when, and what hangs on it ---------------------------------------------------------------------------------------------------------------------

GUARDED = """
steps:
  a: {run: x, metrics: true}
  b: {run: x, when: "{{ steps.a.metrics.loss < 1 }}", outputs: {o: b.txt}}
  mention: {run: "x {{ steps.b.o }}"}
  order: {run: x, needs: [b]}
  dep: {run: x, deps: [b.txt]}
  far: {run: "x", needs: [order]}
"""


def left(found: Plan, facts: Facts, first: StepResult) -> dict[str, str]:
    """The answer for each node in turn, where those that run leave nothing special."""
    made, answers = {0: first}, {}
    for n, node in enumerate(found.nodes):
        if n:
            verdict = judge(found, n, facts, made)
            answers[node.id] = verdict.answer
            made[n] = verdict.made or StepResult(
                True, {name: "f:1" for name, _, _ in node.outputs}, {}
            )
    return answers


def test_what_hangs_on_a_step_whose_when_came_out_false_is_skipped_too() -> None:
    found = plan(GUARDED)
    facts, _ = world(found)
    assert set(left(found, facts, StepResult(True, {}, {"loss": 2})).values()) == {SKIPPED}
    assert set(left(found, facts, StepResult(True, {}, {"loss": 0.5})).values()) == {RUN}


def test_instances_that_are_skipped_leave_the_list_and_all_of_them_skip_what_reads_it() -> None:
    found = plan("""
steps:
  a: {run: x, metrics: true}
  m: {run: x, matrix: {n: [1, 2]}, when: "{{ steps.a.metrics.loss < matrix.n }}", outputs: {o: "m{{ matrix.n }}"}}
  all: {run: [cat, "{{ steps.m.o }}"]}
""")
    facts, _ = world(found)
    assert left(found, facts, StepResult(True, {}, {"loss": 1})) == {
        "m[n=1]": SKIPPED,
        "m[n=2]": RUN,
        "all": RUN,
    }
    assert set(left(found, facts, StepResult(True, {}, {"loss": 5})).values()) == {SKIPPED}
    made = {0: NOTHING, 1: NOTHING, 2: StepResult(True, {"o": "f:1"}, {})}
    scope = scope_of(found.specs()[3], found, 3, made)
    assert scope["steps"]["m"]["o"] == ["m2"]


def test_an_instance_that_may_fail_leaves_the_list_and_changes_the_key() -> None:
    found = plan("""
steps:
  m: {run: x, matrix: {n: [1, 2]}, allow_failure: true, outputs: {o: "m{{ matrix.n }}"}}
  all: {run: [cat, "{{ steps.m.o }}"]}
""")
    facts, _ = world(found)
    ok = StepResult(True, {"o": "f:1"}, {})
    keys = {
        ask(found, "all", facts, {0: one, 1: other}).key
        for one, other in ((ok, ok), (ok, NOTHING), (NOTHING, ok), (NOTHING, NOTHING))
    }
    assert len(keys) == 4 and None not in keys


def test_a_when_that_only_asks_is_no_part_of_the_key() -> None:
    found = plan(GUARDED)
    facts, _ = world(found)
    keys = {
        ask(found, "b", facts, {0: StepResult(True, {}, {"loss": loss})}).key for loss in (0.1, 0.2)
    }
    assert len(keys) == 1


def test_a_metric_that_a_command_reads_is_part_of_the_key() -> None:
    found = plan(
        'steps: {a: {run: x, metrics: true}, b: {run: "x {{ steps.a.metrics.loss }}", when: "{{ steps.a.metrics.loss < 1 }}"}}'
    )
    facts, _ = world(found)
    keys = {
        ask(found, "b", facts, {0: StepResult(True, {}, {"loss": loss})}).key for loss in (0.1, 0.2)
    }
    assert len(keys) == 2


MEASURED = """
steps:
  a: {run: x, metrics: {pattern: "loss=(?P<loss>.*)"}, outputs: {o: a.txt}}
  b: {run: "x {{ steps.a.metrics.loss }}", outputs: {o: b.txt}}
"""


def test_a_number_by_a_known_rule_is_not_read_again() -> None:
    found = plan(MEASURED)
    facts, traces = world(found)
    traces.of(found, "a", facts, {}, o="f:1")
    (trace,) = traces.values()
    trace.measured = {found.nodes[0].rule: {"loss": 0.5}}
    facts.numbers = lambda key, rule: pytest.fail("it was read again")
    verdict = ask(found, "a", facts)
    assert verdict.answer == FRESH and verdict.made == StepResult(True, {"o": "f:1"}, {"loss": 0.5})


def test_a_step_whose_numbers_are_lost_runs_only_if_they_are_read() -> None:
    for text, answer in ((MEASURED, RUN), (MEASURED[: MEASURED.index("  b:")], FRESH)):
        found = plan(text)
        facts, traces = world(found)
        traces.of(found, "a", facts, {}, o="f:1")
        verdict = ask(found, "a", facts)
        assert verdict.answer == answer and (
            "b reads its metric loss" in "".join(verdict.reasons)
        ) == (answer == RUN)
        facts.numbers = lambda key, rule: {"loss": 1}
        assert ask(found, "a", facts).answer == FRESH


# -- select -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "winner"), [("min", "f:2"), ("max", "f:3")])
def test_select_takes_the_least_or_greatest_number(how: str, winner: str) -> None:
    found = plan(f"""
steps:
  m: {{run: x, matrix: {{n: [1, 2, 3, 4, 5]}}, allow_failure: true, metrics: true, outputs: {{o: "m{{{{ matrix.n }}}}"}}}}
  best: {{select: m, {how}: loss}}
""")
    facts, _ = world(found)
    scores: list[Any] = [2.0, 1, 3, float("nan"), "low"]
    made = {
        n: StepResult(True, {"o": f"f:{n + 1}"}, {"loss": score}) for n, score in enumerate(scores)
    }
    verdict = ask(found, "best", facts, made)
    assert (
        verdict.answer == FRESH
        and verdict.made is not None
        and verdict.made.outputs == {"o": winner}
    )


def test_select_without_a_number_says_so() -> None:
    found = plan(
        'steps: {m: {run: x, matrix: {n: [1]}, metrics: true, outputs: {o: "m{{ matrix.n }}"}}, best: {select: m, min: loss}}'
    )
    facts, _ = world(found)
    verdict = ask(found, "best", facts, {0: StepResult(True, {"o": "f:1"}, {"other": 1})})
    assert verdict.answer == RUN and "the metric loss" in verdict.reasons[0]


def test_select_from_no_instances_says_so() -> None:
    found = plan("""
inputs: {ns: {type: list, items: integer, default: []}}
steps:
  m: {run: x, matrix: {n: "{{ inputs.ns }}"}, metrics: true, outputs: {o: "m{{ matrix.n }}"}}
  best: {select: m, min: loss}
""")
    facts, _ = world(found)
    verdict = ask(found, "best", facts, {})
    assert verdict.answer == RUN and verdict.reasons == ("no instance to select from",)
