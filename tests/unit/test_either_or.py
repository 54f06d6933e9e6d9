"""An expression needs what its taken branch reads, and nothing of the branch that is not taken."""

from __future__ import annotations

from typing import Any

import pytest

from runner.planning.plan import SKIP, WHEN_LATE, Node, Plan
from tests.unit.test_compile import plan, problem

STEPS = """
inputs:
  aug: {type: boolean, default: false}
  k: {type: integer, default: 4}
steps:
  m: {run: 'echo > "{{ outputs.o }}"', metrics: true, outputs: {o: m.txt}}
  a: {run: 'echo > "{{ outputs.o }}"', when: "{{ inputs.aug }}", outputs: {o: a.txt}}
  b: {run: 'echo > "{{ outputs.o }}"', outputs: {o: b.txt}}
  late: {run: 'echo > "{{ outputs.o }}"', when: "{{ steps.m.metrics.loss < 2 }}", outputs: {o: late.txt}}
  behind: {run: 'cat "{{ steps.late.o }}" > "{{ outputs.o }}"', outputs: {o: behind.txt}}
  none: {matrix: {k: [1, 2]}, when: "{{ inputs.aug }}", run: 'echo > "{{ outputs.o }}"', outputs: {o: "n{{ matrix.k }}"}}
  some: {matrix: {k: [1, 2]}, when: "{{ matrix.k > 1 }}", run: 'echo > "{{ outputs.o }}"', outputs: {o: "s{{ matrix.k }}"}}
"""


def planned(step: str, given: dict[str, Any] | None = None, **more: Any) -> tuple[Plan, Node]:
    made = plan(f"{STEPS}  c: {{{step}}}\n", given, **more)
    return made, made.nodes[made.index["c"]]


def reads(step: str, given: dict[str, Any] | None = None) -> list[str]:
    """The files that the step `c` needs of others; `skipped` if it is."""
    _, node = planned(step, given)
    return ["skipped"] if node.flags & SKIP else sorted(each.name for each in node.upstream)


CHOICES = [
    "steps.a.o if inputs.aug else steps.b.o",
    "steps.a.o | default(steps.b.o)",
    "steps.b.o if steps.a.o is none else steps.a.o",
    "steps.b.o if steps.a.o == null else steps.a.o",
    "steps.a.o if steps.a.o != null else steps.b.o",
    "steps.a.o if steps.a.o is defined else steps.b.o",
    "steps.a.o if steps.a.o else steps.b.o",
    "steps.a.o or steps.b.o",
    "(steps.a.o if inputs.k > 1 else none) or steps.b.o",
    "steps.b.o if not steps.a.o else steps.a.o",
    "[steps.a.o, steps.b.o][0] if inputs.aug else [steps.b.o][0]",
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "step",
    [
        "run: [cat, '{{ %s }}']",
        "run: 'cat \"{{ %s }}\"'",
        "run: [cat], env: {X: '{{ %s }}'}",
        "run: [cat], files: {c.json: ['{{ %s }}']}",
        "accelerate: {script: t.py, args: {x: '{{ %s }}'}}",
    ],
)
def test_the_taken_branch_alone_is_needed(choice: str, step: str) -> None:
    assert reads(step % choice) == ["b.txt"]
    assert "b.txt" not in reads(step % choice, {"aug": True}) or "[steps.a.o" in choice


def test_a_skipped_step_that_is_needed_skips_the_step() -> None:
    for words in ("steps.a.o", "steps.a.o | name", "steps.a.o ~ 1", "steps.a.o if true else 1"):
        assert reads(f"run: [cat, '{{{{ {words} }}}}']") == ["skipped"]
    assert reads("run: [cat], needs: [a]") == ["skipped"]
    assert reads("run: [cat, '{{ steps.a.o | default(1) }}', '{{ steps.a.o }}']") == ["skipped"]
    assert reads("run: [cat, '{{ steps.none.o }}']") == ["skipped"]
    assert reads("run: [cat, '{{ steps.some.o }}']") == ["s2"]


def test_a_matrix_that_is_skipped_whole_is_null() -> None:
    made, node = planned("run: [cat, '{{ steps.none.o | default([steps.b.o]) }}']")
    assert [each.name for each in node.upstream] == ["b.txt"]
    assert made.specs()[made.index["c"]].names.steps["none"] == {"o": None}


def test_both_branches_are_edges_where_only_a_run_can_tell() -> None:
    for words in (
        "steps.late.o if steps.m.metrics.loss < 2 else steps.b.o",
        "steps.late.o | default(steps.b.o)",
        "steps.behind.o | default(steps.b.o)",
        "steps.b.o if steps.late.o is none else steps.late.o",
    ):
        made, node = planned(f"run: [cat, '{{{{ {words} }}}}']")
        late = "behind" if "behind" in words else "late"
        assert sorted(each.name for each in node.upstream) == ["b.txt", f"{late}.txt"]
        assert {made.nodes[each].id for each in node.choices} == {late, "b"}


def test_a_when_may_ask_whether_a_step_was_skipped() -> None:
    assert reads("run: [cat], when: '{{ steps.a.o is none }}'") == []
    assert reads("run: [cat], when: '{{ steps.a.o is not none }}'") == ["skipped"]
    _, node = planned("run: [cat], when: '{{ steps.late.o == null }}'")
    assert node.flags & WHEN_LATE
    assert reads("run: [cat], when: '{{ inputs.k > 1 or steps.m.metrics.loss < 2 }}'") == []


def test_an_input_file_of_a_branch_that_is_not_taken_is_not_asked_for() -> None:
    text = """
inputs: {small: {type: file, default: s.txt}, big: {type: dataset, default: "org/big"}, all: {type: boolean, default: false}}
steps:
  c: {run: [cat, "{{ inputs.big if inputs.all else inputs.small }}"]}
"""
    assert [each.address for each in plan(text).nodes[0].takes] == ["s.txt"]
    assert [each.address for each in plan(text, {"all": True}).nodes[0].takes] == ["org/big"]


def test_deps_choose_too() -> None:
    assert reads("run: [cat], deps: ['{{ steps.a.o | default(steps.b.o) }}']") == ["b.txt"]
    assert reads("run: [cat], deps: ['{{ steps.a.o if inputs.aug else steps.b.o }}']") == ["b.txt"]
    assert reads("run: [cat], deps: ['{{ steps.late.o | default(steps.b.o) }}']") == [
        "b.txt",
        "late.txt",
    ]
    assert reads("run: [cat], deps: ['{{ steps.a.o }}']") == ["skipped"]


def test_a_recipe_that_is_used_gets_the_branch_that_is_taken() -> None:
    inner = """
recipe: inner@1
inputs: {x: {type: file}}
steps:
  i: {run: 'cat "{{ inputs.x }}" > "{{ outputs.o }}"', outputs: {o: i.txt}}
"""
    step = "uses: ./inner.yaml, with: {{x: '{{{{ {} }}}}'}}"
    for words in ("steps.a.o if inputs.aug else steps.b.o", "steps.a.o | default(steps.b.o)"):
        made = plan(f"{STEPS}  c: {{{step.format(words)}}}\n", inner=inner)
        node = made.nodes[made.index["c/i"]]
        assert not node.flags & SKIP
        assert [made.nodes[each.producer].id for each in node.upstream] == ["b"]
    made = plan(f"{STEPS}  c: {{{step.format('steps.a.o')}}}\n", inner=inner)
    assert made.nodes[made.index["c/i"]].flags & SKIP
    found = problem(
        f"{STEPS}  c: {{{step.format('steps.late.o | default(steps.b.o)')}}}\n", inner=inner
    )
    assert found.code == "late-name"


def test_outputs_of_a_recipe_choose() -> None:
    made = plan(f"{STEPS}outputs: {{x: '{{{{ steps.a.o | default(steps.b.o) }}}}'}}\n")
    assert [(made.nodes[p.step].id, p.name) for p in made.publish] == [("b", "x")]
    made = plan(f"{STEPS}outputs: {{x: '{{{{ steps.a.o }}}}'}}\n")
    assert made.publish == []
    late = problem(f"{STEPS}outputs: {{x: '{{{{ steps.late.o | default(steps.b.o) }}}}'}}\n")
    assert late.code == "late-name"


def test_a_step_waits_only_for_steps_that_it_may_need() -> None:
    text = """
inputs: {split: {type: boolean, default: true}}
steps:
  raw: {run: 'echo > "{{ outputs.o }}"', outputs: {o: raw.txt}}
  cut: {run: 'echo > "{{ outputs.d }}/1"', outputs: {d: parts/}}
  each: {matrix: {f: {glob: "parts/*"}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "e/{{ matrix.f | name }}"}}
  join: {run: 'cat {{ steps.each.o }} > "{{ outputs.o }}"', outputs: {o: joined.txt}}
  c: {run: [cat, "{{ steps.join.o if inputs.split else steps.raw.o }}"]}
"""
    assert "c" in plan(text).waiting
    made = plan(text, {"split": False})
    assert "c" not in made.waiting
    assert [each.name for each in made.nodes[made.index["c"]].upstream] == ["raw.txt"]


def test_a_matrix_over_what_a_skipped_step_makes_is_one_skipped_step() -> None:
    text = """
inputs: {split: {type: boolean, default: false}}
steps:
  cut: {when: "{{ inputs.split }}", run: 'echo > "{{ outputs.d }}/1"', outputs: {d: parts/}}
  each: {matrix: {f: {glob: "parts/*"}}, run: 'cat "{{ matrix.f }}" > "{{ outputs.o }}"', outputs: {o: "e/{{ matrix.f | name }}"}}
  join: {run: 'cat {{ steps.each.o }} > "{{ outputs.o }}"', outputs: {o: joined.txt}}
"""
    made = plan(text)
    assert [(node.id, bool(node.flags & SKIP)) for node in made.nodes] == [
        ("cut", True),
        ("each", True),
        ("join", True),
    ]
    assert not made.waiting and not made.pending
