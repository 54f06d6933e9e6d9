"""The same instance of another matrix: the one whose axes have this step's values."""

from __future__ import annotations

from typing import Any

from runner.planning.plan import SKIP, Plan
from tests.unit.test_compile import plan, pointed, problem

TRAIN = """
steps:
  train:
    matrix: {lr: [1, 2], seed: [0, 1]}
    run: 'echo > "{{ outputs.model }}"'
    metrics: true
    outputs: {model: "m/{{ matrix.lr }}-{{ matrix.seed }}"}
"""


def makers(made: Plan, id: str) -> list[str]:
    node = made.nodes[made.index[id]]
    return [made.nodes[each.producer].id for each in node.upstream]


def after(step: str, text: str = TRAIN, **more: Any) -> Plan:
    return plan(f"{text}  c: {{{step}}}\n", **more)


def test_a_step_with_the_same_axes_reads_one_instance() -> None:
    made = after(
        "matrix: {seed: [0, 1], lr: [2, 1]}, run: [test, '{{ steps.train.same.model }}', -gt, '{{ steps.train.same.metrics.loss }}']"
    )
    assert makers(made, "c[seed=1,lr=2]") == ["train[lr=2,seed=1]"]
    n = made.index["c[seed=1,lr=2]"]
    assert made.specs()[n].names.steps == {"train": {"same": {"model": "m/2-1"}}}
    assert [made.nodes[each.producer].id for each in made.nodes[n].late] == ["train[lr=2,seed=1]"]


def test_more_axes_here_read_one_instance_and_fewer_a_list() -> None:
    made = after(
        "matrix: {lr: [1, 2], seed: [0, 1], data: [x, y]}, run: [cat, '{{ steps.train.same.model }}']"
    )
    assert makers(made, "c[lr=1,seed=0,data=y]") == ["train[lr=1,seed=0]"]
    made = after("matrix: {lr: [1, 2]}, run: [cat, '{{ steps.train.same.model }}']")
    assert makers(made, "c[lr=2]") == ["train[lr=2,seed=0]", "train[lr=2,seed=1]"]


def test_it_stands_in_deps_env_when_and_with() -> None:
    axes = "matrix: {lr: [1, 2], seed: [0, 1]}"
    made = after(f"{axes}, run: [cat], deps: ['{{{{ steps.train.same.model }}}}']")
    assert makers(made, "c[lr=1,seed=0]") == ["train[lr=1,seed=0]"]
    made = after(f"{axes}, run: [cat], when: '{{{{ steps.train.same.metrics.loss < 2 }}}}'")
    (late,) = made.nodes[made.index["c[lr=1,seed=0]"]].late
    assert made.nodes[late.producer].id == "train[lr=1,seed=0]"
    inner = """
recipe: inner@1
inputs: {x: {type: file}}
steps:
  i: {run: 'cat "{{ inputs.x }}" > "{{ outputs.o }}"', outputs: {o: i.txt}}
"""
    made = after(
        f"{axes}, uses: ./inner.yaml, with: {{x: '{{{{ steps.train.same.model }}}}'}}", inner=inner
    )
    assert makers(made, "c[lr=2,seed=1]/i") == ["train[lr=2,seed=1]"]


def test_instances_of_a_recipe_that_is_used_are_paired() -> None:
    inner = """
recipe: inner@1
inputs: {x: {type: integer}}
steps:
  i: {run: 'echo {{ inputs.x }} > "{{ outputs.o }}"', outputs: {o: i.txt}}
"""
    text = "steps:\n  s: {matrix: {x: [1, 2]}, uses: ./inner.yaml, with: {x: '{{ matrix.x }}'}}\n"
    made = after("matrix: {x: [2, 1]}, run: [cat, '{{ steps.s.same.o }}']", text, inner=inner)
    assert makers(made, "c[x=2]") == ["s[x=2]/i"]


def test_an_axis_over_files_is_compared_by_name() -> None:
    text = """
steps:
  split: {run: 'echo > "{{ outputs.d }}/1"', outputs: {d: parts/}}
  each: {matrix: {f: {glob: "parts/*"}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "e/{{ matrix.f | name }}"}}
"""
    step = "matrix: {f: {glob: 'parts/*'}}, run: [cat, '{{ steps.each.same.o }}']"
    assert "c" in after(step, text).waiting
    made = after(step, text, globs={"split/d:*": ("1", "2")})
    assert "each[f=parts%2F2]" in makers(made, "c[f=parts%2F2]")


def test_a_skipped_instance_skips_its_like_alone() -> None:
    text = TRAIN.replace("    metrics", '    when: "{{ matrix.lr > 1 }}"\n    metrics')
    axes = "matrix: {lr: [1, 2], seed: [0, 1]}"
    made = after(f"{axes}, run: [cat, '{{{{ steps.train.same.model }}}}']", text)
    skipped = {node.id for node in made.nodes if node.flags & SKIP and node.id.startswith("c")}
    assert skipped == {"c[lr=1,seed=0]", "c[lr=1,seed=1]"}
    made = after(f"{axes}, run: [cat, '{{{{ steps.train.same.model | default(1) }}}}']", text)
    assert not any(node.flags & SKIP for node in made.nodes if node.id.startswith("c"))


def test_what_has_no_like_is_an_error_with_its_place() -> None:
    words = "run: [cat, '{{ steps.train.same.model }}']"
    found = problem(f"{TRAIN}  c: {{{words}}}\n")
    assert "share no axis" in found.message and "axis lr" in found.fix
    found = problem(f"{TRAIN}  c: {{matrix: {{x: [1]}}, {words}}}\n")
    assert pointed(found) == "steps.train.same.model"
    found = problem(f"{TRAIN}  c: {{matrix: {{lr: [3]}}, {words}}}\n")
    assert found.message == 'no instance of "train" has lr=3, as c[lr=3] has'
    found = problem(
        f"{TRAIN}  c: {{matrix: {{lr: [1]}}, run: [cat, '{{{{ steps.train.same.modle }}}}']}}\n"
    )
    assert "steps.train.same.model" in found.fix
