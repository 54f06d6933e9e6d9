"""A rule of `metrics:` says how numbers are read, and not what is made: changed, it re-reads what is kept, and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.planning import fingerprint
from runner.storage import metrics
from runner.storage.workspace import Workspace
from tests.support import Space

RATES = (1, 2, 3, 4, 5, 6)
LOSS = "loss=(?P<loss>[0-9.]+)"
SWEEP = """
steps:
  train:
    matrix: {{lr: [1, 2, 3, 4, 5, 6]}}
    run: "echo started >> {root}/starts; echo loss=0.{{{{ matrix.lr }}}} acc=0.$((9 - {{{{ matrix.lr }}}})); echo {{{{ matrix.lr }}}} > {{{{ outputs.m }}}}"
    outputs: {{m: "m-{{{{ matrix.lr }}}}"}}
    {metrics}
  {more}
"""
BEST = "best: {select: train, %s}\n  use: {run: 'cp {{ steps.best.m }} best.txt', outputs: {o: best.txt}}"


def sweep(space: Space, metrics: str = "", more: str = "") -> None:
    space.recipe(SWEEP.format(root=space.root, metrics=metrics, more=more))


def pattern(text: str) -> str:
    return f"metrics: {{pattern: '{text}'}}"


def starts(space: Space) -> int:
    return len(space.read("starts").split())


def logs(space: Space, id: str = "") -> list[Path]:
    return [
        path for path in (space.root / ".recipe/runs").glob("*/*.log") if path.name.startswith(id)
    ]


def numbers(space: Space, id: str) -> dict[str, object]:
    found = space.plan()
    made = found.made[found.plan.index[id]]
    return dict(made.metrics)


def test_metrics_added_to_a_finished_sweep_run_none_of_it_and_select_sees_the_numbers(
    space: Space,
) -> None:
    sweep(space)
    assert len(space.run()) == len(RATES)
    sweep(space, pattern(LOSS), BEST % "max: loss")
    assert space.answers()["train[lr=3]"] == "fresh"
    assert (
        space.run() == ["use"] and space.read("best.txt") == "6\n" and starts(space) == len(RATES)
    )
    sweep(space, pattern("acc=(?P<acc>[0-9.]+)"), BEST % "max: acc")
    space.run()
    assert space.read("best.txt") == "1\n" and starts(space) == len(RATES)


def test_without_its_log_only_what_is_read_runs_again_and_why_says_so(space: Space) -> None:
    sweep(space)
    space.run()
    (log,) = logs(space, "train[lr=3]")
    log.unlink()
    sweep(space, pattern(LOSS))
    assert (
        space.run() == []
        and numbers(space, "train[lr=3]") == {}
        and numbers(space, "train[lr=4]") == {"loss": 0.4}
    )
    sweep(space, pattern(LOSS), BEST % "min: loss")
    _, said, _ = space.command("why", "train[lr=3]", "./recipe.yaml")
    assert (
        "best reads its metric loss by a new rule, and the earlier metrics are no longer stored"
        in said
    )
    assert (
        space.run() == ["train[lr=3]", "use"]
        and starts(space) == len(RATES) + 1
        and space.read("best.txt") == "1\n"
    )
    assert (
        space.run() == [] and "loss 0.3" in space.command("why", "train[lr=3]", "./recipe.yaml")[1]
    )


def test_numbers_of_a_rule_are_read_once_and_an_earlier_rule_is_remembered(space: Space) -> None:
    sweep(space, pattern(LOSS))
    space.run()
    sweep(space, pattern("acc=(?P<acc>[0-9.]+)"))
    assert numbers(space, "train[lr=1]") == {"acc": 0.8}
    for log in logs(space):
        log.unlink()
    assert numbers(space, "train[lr=1]") == {"acc": 0.8}
    sweep(space, pattern(LOSS))
    assert numbers(space, "train[lr=1]") == {"loss": 0.1} and space.run() == []


def test_a_when_and_a_mention_are_judged_with_the_numbers_of_the_new_rule(space: Space) -> None:
    text = """
steps:
  a: {{run: "echo x=2 y=1", outputs: {{o: {{path: o, optional: true}}}}, metrics: {{pattern: '{name}=(?P<v>[0-9]+)'}}}}
  b: {{run: "echo {{{{ steps.a.metrics.v }}}} > b", outputs: {{o: b}}}}
  c: {{run: "echo c > c", when: "{{{{ steps.a.metrics.v < 2 }}}}", outputs: {{o: c}}}}
"""
    space.recipe(text.format(name="x"))
    assert space.run() == ["a", "b"] and space.read("b") == "2\n"
    space.recipe(text.format(name="y"))
    assert sorted(space.run()) == ["b", "c"] and space.read("b") == "1\n"


@pytest.mark.parametrize(
    "declared", ["outputs: {d: out/}", "outputs: {o: out/1.jsonl}"], ids=["in a folder", "a file"]
)
def test_a_file_among_the_outputs_is_read_again_from_where_it_is_stored(
    space: Space, declared: str
) -> None:
    body = (
        'steps:\n  a:\n    run: \'mkdir -p out; echo "{\\"f1\\": 0.5}" > out/1.jsonl\'\n    '
        + declared
        + "\n"
    )
    space.recipe(body)
    space.run()
    for log in (space.root / ".recipe/runs").glob("*/*"):
        log.unlink()
    space.recipe(
        body
        + "    metrics: {file: 'out/*.jsonl'}\n  b: {run: 'echo {{ steps.a.metrics.f1 }} > b', outputs: {o: b}}\n"
    )
    assert space.run() == ["b"] and space.read("b") == "0.5\n"


def test_a_rule_gives_the_step_no_file_to_write_to(space: Space) -> None:
    space.recipe(
        "steps: {a: {run: 'echo v=${RECIPE_METRICS-none} > a', outputs: {o: a}, metrics: {pattern: 'v=(?P<v>.*)'}}}"
    )
    space.run()
    assert space.read("a") == "v=none\n"


def test_a_result_that_was_stored_while_the_rule_was_part_of_the_key_is_fresh(space: Space) -> None:
    sweep(space, pattern(LOSS), BEST % "max: loss")
    found = space.plan()
    n = found.plan.index["train[lr=6]"]
    space.run()
    key = space.key("train[lr=6]")
    author = fingerprint.former_author_digest(found.plan.specs()[n].author, (None, LOSS))
    former = fingerprint.key(author, [])
    with Workspace.open(space.root) as ws:  # as the program before stored it
        trace = ws.store.index.trace(key)
        assert trace is not None
        ws.store.index.forget(traces=[key])
        ws.store.index.learn(
            [trace._replace(key=former, metrics_json=json.dumps({"loss": 0.6}), measured_json="{}")]
        )
    for log in logs(space):
        log.unlink()
    assert (
        space.run() == []
        and space.key("train[lr=6]") == key
        and numbers(space, "train[lr=6]") == {"loss": 0.6}
    )
    with Workspace.open(space.root) as ws:
        ws.store.index.forget(traces=[former])
    assert space.run() == []


SLOW = "(?P<n>(x+x+)+y)"
LONG = f"steps: {{{{train: {{{{run: 'echo {'x' * 4000}; echo x > o', outputs: {{{{o: o}}}}, {{}}}}}}}}}}"


def test_a_pattern_that_backtracks_is_a_problem_of_its_step_and_runs_nothing(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 0.05)
    space.recipe(LONG.format(pattern("loss=(?P<loss>.)")))
    space.run()
    space.recipe(LONG.format(pattern(SLOW)))
    (problem,) = space.problems()
    assert (
        problem.code == "pattern-too-slow"
        and problem.message.startswith(f"train: the metrics pattern `{SLOW}` takes more than")
        and problem.fix
    )


def test_what_a_step_made_is_kept_though_its_pattern_backtracks(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 0.05)
    space.recipe(LONG.format(pattern(SLOW)))
    space.run()
    assert space.read("o") == "x\n" and space.run() == []
