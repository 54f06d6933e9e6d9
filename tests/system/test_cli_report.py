"""`recipe report` tells of a run what happened, and of its trainings where their time went; also while they run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import Space, until
from tests.system.test_cli_why import Recipe, recipe

__all__ = ["recipe"]

TRAIN = """
inputs:
  micro_batch: {type: integer, default: 2}
  gate: {type: string, default: ""}
steps:
  data:
    run: echo data > {{ outputs.o }}
    outputs: {o: data.txt}
  train:
    run: |
      for n in 1 2 3; do
        echo '{"step": '$n', "loss": '$((9 - n))', "samples_per_second": 4, "memory_gb": 1.5, "time_step": 2, "time_model": 1.5, "time_optimizer": 0.3, "time_data": 0.1}'
      done >> "$RECIPE_METRICS"
      echo '{"step": 4, "lo' >> "$RECIPE_METRICS"
      cat "{{ inputs.gate }}" /dev/null > {{ outputs.o }}
    deps: [data.txt]
    outputs: {o: model.txt}
    metrics: true
"""


def test_a_report_tells_steps_and_where_a_trainings_time_went(space: Space, recipe: Recipe) -> None:
    space.recipe(TRAIN.replace('cat "{{ inputs.gate }}"', "cat"))
    space.run()
    said = recipe("report")
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert "t@1" in lines[0] and "COMPLETED" in lines[0]
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["data", "DONE", "1"],
        ["train", "DONE", "1"],
    ]
    assert "train: 3 steps of 2.00 s, 4 samples/s, loss 8 -> 6, peak 1.5 GB of CPU memory" in lines
    assert any(line.split()[:2] == ["model", "75%"] for line in lines)
    assert "  THROUGHPUT-BOUND: generation and training take 90% of a step (more than 80%)" in lines
    assert "    - use a GPU: the step ran on the CPU, which is many times slower" in lines
    space.recipe(
        TRAIN.replace('cat "{{ inputs.gate }}"', "cat").replace(
            '"memory_gb"', '"gpu": "NVIDIA L4", "memory_gb"'
        )
    )
    space.run()
    lines = recipe("report").out.splitlines()
    assert "train: 3 steps of 2.00 s, 4 samples/s, loss 8 -> 6, peak 1.5 GB on NVIDIA L4" in lines
    assert (
        "    - raise micro_batch (micro_batch is 2): larger batches use the GPU better, if memory allows"
        in lines
    )


WORKS = """
import hashlib, json, os, sys, time

with open(os.environ["RECIPE_METRICS"], "a") as told:
    for step in (1, 2, 3):
        line, begun = {"step": step}, time.process_time()  # what it did, and not what it waited for while others worked on this machine
        for part, work in json.loads(sys.argv[1]).items():
            before = time.process_time()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10_000 * work)
            line["time_" + part] = time.process_time() - before
        print(json.dumps({**line, "time_step": time.process_time() - begun}), file=told)
open("done.txt", "w").close()
"""


@pytest.mark.parametrize(
    ("verdict", "parts", "advice"),
    [
        (
            "LATENCY-BOUND",
            {"generation": 1, "tool": 9, "model": 1},
            "run the tool calls of a step in parallel",
        ),
        ("DATA-BOUND", {"data": 7, "model": 3}, "raise workers (workers is 2)"),
        (
            "THROUGHPUT-BOUND",
            {"data": 1, "generation": 9, "model": 8, "optimizer": 2},
            "the step ran on the CPU",
        ),
        (
            "BALANCED",
            {"model": 5, "evaluation": 5},
            "evaluate less often (eval_every is 10)",
        ),
    ],
)
def test_each_verdict_comes_of_what_a_trainer_really_did(
    verdict: str, parts: dict[str, int], advice: str, space: Space, recipe: Recipe
) -> None:
    space.write("works.py", WORKS)
    space.recipe(f"""
inputs: {{workers: {{type: integer, default: 2}}, eval_every: {{type: integer, default: 10}}}}
steps:
  train:
    run: [python, works.py, '{json.dumps(parts)}']
    code: [works.py]
    outputs: {{done: done.txt}}
    metrics: true
""")
    space.run()
    training = json.loads(recipe("report", "--json").out)["steps"][0]["training"]
    assert training["verdict"] == verdict and any(advice in line for line in training["advice"]), (
        training
    )


def test_a_report_for_programs_has_every_number(space: Space, recipe: Recipe) -> None:
    space.recipe(TRAIN.replace('cat "{{ inputs.gate }}"', "cat"))
    space.run()
    told = json.loads(recipe("report", "last", "--step", "train", "--json").out)
    assert told["state"] == "COMPLETED" and [step["id"] for step in told["steps"]] == ["train"]
    training = told["steps"][0]["training"]
    assert (
        training["verdict"] == "THROUGHPUT-BOUND"
        and training["steps"] == 3
        and training["last_step"] == 3
    )
    assert training["parts"]["model"] == {"seconds": 1.5, "share": 0.75} and training["parts"][
        "other"
    ]["seconds"] == pytest.approx(0.1)
    assert training["loss"] == [8, 6] and training["memory_gb"] == 1.5 and training["gpu"] is None
    assert told["steps"][0]["seconds"] > 0 and told["steps"][0]["peak_memory"] > 0


def test_a_report_of_a_run_under_way(space: Space, recipe: Recipe, tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    space.recipe(TRAIN)
    process = space.start("run", f"gate={gate}")

    def told() -> bool:
        return any(
            b'"lo' in path.read_bytes()
            for path in (space.root / ".recipe" / "attempts").glob("*.metrics")
        )

    until(told)
    until(
        lambda: (
            ["train", "RUNNING"]
            in [
                [step["id"], step["state"]]
                for step in json.loads(recipe("report", "--json").out)["steps"]
            ]
        )
    )
    lines = recipe("report").out.splitlines()
    assert any(line.split()[:3] == ["train", "RUNNING", "1"] for line in lines)
    assert any("3 steps of 2.00 s" in line for line in lines)
    # What the agent writes once a step has run for 5 seconds.
    (metrics,) = (space.root / ".recipe" / "attempts").glob("*.metrics")
    samples = [
        {"gpu_utilization_percent": 80.0, "gpu_memory_used_gb": 20.0},
        {"gpu_utilization_percent": 90.0, "gpu_memory_used_gb": 10.0},
    ]
    more = {
        "step": 3,
        "total": 12,
        "percent": 25.0,
        "eta": 18.0,
        "cpu_percent": 12.0,
        "ram_used_gb": 4.2,
    }
    metrics.with_suffix(".host").write_text(
        "".join(json.dumps({**each, **more}) + "\n" for each in samples)
    )
    # How far the step is says what it reported itself, by its row.
    machine = "GPU 90%, 10.0 GB; processors 12%, 4.2 GB of memory in use"
    seen = f"  train: step 3, loss 6, samples_per_second 4, memory_gb 1.5, {machine}"
    until(lambda: seen in recipe("status").out.splitlines())
    used = "the machine of train: GPU 85%, 20.0 GB; processors 12%, 4.2 GB of memory in use"
    assert used in recipe("report").out.splitlines()
    gate.write_text("")
    assert process.wait(60) == 0
    assert used in recipe("report").out.splitlines() and not metrics.with_suffix(".host").exists()


def test_of_a_step_that_was_reported_twice_the_later_counts(space: Space, recipe: Recipe) -> None:
    space.recipe(
        """
steps:
  train:
    run: |
      test -e "$HOME_OF_TEST/once" && first=2 || first=1
      for n in $first 2 3; do echo '{"step": '$n', "time_step": '$first', "time_model": '$first'}'; done >> "$RECIPE_METRICS"
      test -e "$HOME_OF_TEST/once" || { touch "$HOME_OF_TEST/once"; exit 1; }
      touch {{ outputs.o }}
    pass_env: [HOME_OF_TEST]
    outputs: {o: o.txt}
    metrics: true
    retries: {failure: 1}
"""
    )
    os.environ["HOME_OF_TEST"] = str(space.root)
    try:
        space.run()
    finally:
        del os.environ["HOME_OF_TEST"]
    step = json.loads(recipe("report", "--json").out)["steps"][0]
    assert step["attempts"] == 2
    assert step["training"]["steps"] == 3 and step["training"]["step_seconds"] == 2


def test_a_run_without_such_numbers_says_so(space: Space, recipe: Recipe) -> None:
    space.recipe("steps: {a: {run: 'echo a > {{ outputs.o }}', outputs: {o: o}}}")
    space.run()
    assert "no step reported metrics: set `metrics: true`" in recipe("report").out
    space.recipe(
        "steps: {a: {run: 'for n in 1 2; do echo {\\\"step\\\": $n}; done >> $RECIPE_METRICS; echo > {{ outputs.o }}', outputs: {o: o}, metrics: true}}"
    )
    space.run()
    assert (
        "no bottleneck analysis: the metrics contain no timings (time_step, time_data, …, or the timings of prime-rl)"
        in recipe("report").out
    )


SWEEP = """
steps:
  train:
    matrix: {lr: [1, 2]}
    run: "for n in 3 1 2; do echo step $n loss=0.$n$(( {{ matrix.lr }} )) acc=0.$n; done; touch {{ outputs.o }}"
    outputs: {o: "o{{ matrix.lr }}"}
    metrics: {pattern: 'loss=(?P<loss>[0-9.]+) acc=(?P<acc>[0-9.]+)'}
"""


def test_a_report_has_a_table_of_the_last_and_best_metrics_of_a_sweep(
    space: Space, recipe: Recipe
) -> None:
    space.recipe(SWEEP)
    space.run()
    lines = recipe("report").out.splitlines()
    table = lines[lines.index("") + 1 : lines.index("") + 4]
    assert [line.split("  ")[0].split()[0] for line in table] == [
        "METRICS",
        "train[lr=1]",
        "train[lr=2]",
    ]
    assert table[0].split() == ["METRICS", "loss", "min", "loss", "acc", "max", "acc"]
    assert [line.split()[1:] for line in table[1:]] == [
        ["0.21", "0.11", "0.2", "0.3"],
        ["0.22", "0.12", "0.2", "0.3"],
    ]
    (log,) = (space.root / ".recipe/runs").glob("*/train[[]lr=2].1.log")
    log.unlink()
    assert (
        "the log or metrics file of train[lr=2] is no longer stored: only the last values are known"
        in recipe("report").out.splitlines()
    )
    told = json.loads(recipe("report", "--json").out)["steps"][0]["metrics"]
    assert told == {
        "loss": {"last": 0.21, "min": 0.11, "max": 0.31},
        "acc": {"last": 0.2, "min": 0.1, "max": 0.3},
    }


def test_a_report_shows_metrics_by_a_rule_that_is_newer_than_the_run(
    space: Space, recipe: Recipe
) -> None:
    space.recipe(SWEEP.replace("    metrics:", "    # metrics:"))
    space.run()
    assert "no step reported metrics" in recipe("report").out
    space.recipe(SWEEP)
    assert space.run() == []
    assert json.loads(recipe("report", "--json").out)["steps"][1]["metrics"]["loss"] == {
        "last": 0.22,
        "min": None,
        "max": None,
    }


def test_what_is_not_there_is_named(space: Space, recipe: Recipe) -> None:
    said = recipe("report")
    assert said.code == 3 and "no runs in this workspace" in said.err
    space.recipe("steps: {train: {run: 'echo a > {{ outputs.o }}', outputs: {o: o}}}")
    space.run()
    said = recipe("report", "--step", "trian")
    assert said.code == 3 and 'did you mean "train"' in said.err
    assert recipe("report", "nowhere").code == 3


def test_a_failed_run_is_reported_with_what_it_did(space: Space, recipe: Recipe) -> None:
    space.recipe(
        'steps: {train: {run: \'for n in 1 2; do echo {\\"step\\": $n, \\"time_tool\\": 3}; done >> $RECIPE_METRICS; exit 3\', outputs: {o: o}, metrics: true}}'
    )
    space.attempt()
    lines = recipe("report").out.splitlines()
    assert "FAILED" in lines[0] and any(
        "LATENCY-BOUND: tools, rewards and environments take 100%" in line for line in lines
    )
