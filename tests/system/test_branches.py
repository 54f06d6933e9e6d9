"""Either/or in a run: which branch is taken shows in the files, and what is skipped in the summary."""

from __future__ import annotations

from pathlib import Path

from tests.support import Space

LATE = """
inputs: {x: {type: number, default: 3}}
steps:
  m: {run: 'echo "{\\"loss\\": {{ inputs.x }}}" >> "$RECIPE_METRICS"', metrics: true}
  a: {run: 'echo a > "{{ outputs.o }}"', when: "{{ steps.m.metrics.loss < 2 }}", outputs: {o: a.txt}}
  b: {run: 'echo b > "{{ outputs.o }}"', outputs: {o: b.txt}}
  z: {run: 'cat "{{ steps.a.o }}" > "{{ outputs.o }}"', outputs: {o: z.txt}}
  by_metric: {run: 'cat "{{ steps.a.o if steps.m.metrics.loss < 2 else steps.b.o }}" > "{{ outputs.o }}"', outputs: {o: 1.txt}}
  by_default: {run: 'cat "{{ steps.z.o | default(steps.b.o) }}" > "{{ outputs.o }}"', outputs: {o: 2.txt}}
  by_when: {run: 'echo none > "{{ outputs.o }}"', when: "{{ steps.a.o == null }}", outputs: {o: 3.txt}}
  by_deps: {run: 'cat a.txt b.txt > "{{ outputs.o }}" || true', deps: ["{{ steps.a.o or steps.b.o }}"], outputs: {o: 4.txt}}
"""


def test_a_step_runs_with_the_branch_that_a_run_takes(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe(LATE)
    assert "a" not in space.run()
    assert [space.read(f"{n}.txt").split() for n in (1, 2, 3, 4)] == [["b"], ["b"], ["none"], ["b"]]
    assert space.summary is not None
    assert space.summary.counts["SKIPPED"] == 2
    assert space.summary.skipped == ["a: its `when` is false", "z: a.txt of a is missing"]
    assert space.run() == []
    assert "by_when" not in space.run({"x": 1})
    assert [space.read(f"{n}.txt").split() for n in (1, 2, 4)] == [["a"], ["a"], ["a", "b"]]


def test_what_a_run_skips_stands_in_the_summary(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe(
        """
inputs: {on: {type: boolean, default: false}}
steps:
  a: {run: 'echo a > "{{ outputs.o }}"', when: "{{ inputs.on }}", outputs: {o: a.txt}}
  m: {matrix: {k: [1, 2]}, run: 'cat "{{ steps.a.o }}" > "{{ outputs.o }}"', outputs: {o: "m{{ matrix.k }}"}}
  all: {run: [echo, "{{ steps.m.o }}"]}
  b: {run: 'echo b > "{{ outputs.o }}"', outputs: {o: b.txt}}
"""
    )
    lines = (
        "a: its `when` is false",
        "m (2 instances): a.txt of a is missing",
        "all: m is skipped",
    )
    assert space.run() == ["b"]
    assert space.summary is not None
    assert tuple(space.summary.skipped) == lines
    assert space.summary.counts == {"DONE": 1, "FRESH": 0, "SKIPPED": 4}
    space.run()
    assert tuple(space.summary.skipped) == lines
    reasons = {v.reasons for v in space.plan().verdicts if v.answer == "skip"}
    assert ("a, a dependency, is skipped",) in reasons


def test_an_instance_reads_its_like_and_one_that_failed_skips_its_like(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe(
        """
steps:
  train:
    matrix: {k: [1, 2, 3]}
    allow_failure: true
    run: 'test {{ matrix.k }} != 2; echo "{\\"loss\\": {{ matrix.k }}}" >> "$RECIPE_METRICS"; echo {{ matrix.k }} > "{{ outputs.m }}"'
    metrics: true
    outputs: {m: "m{{ matrix.k }}"}
  test:
    matrix: {k: [1, 2, 3], on: [x]}
    run: 'echo $(cat "{{ steps.train.same.m }}") {{ steps.train.same.metrics.loss }} > "{{ outputs.o }}"'
    outputs: {o: "t{{ matrix.k }}"}
  all: {run: 'cat {{ steps.test.o }} > "{{ outputs.o }}"', outputs: {o: all.txt}}
"""
    )
    space.run()
    assert space.read("all.txt").split() == ["1", "1", "3", "3"]
    assert space.summary is not None and space.summary.counts["SKIPPED"] == 1
