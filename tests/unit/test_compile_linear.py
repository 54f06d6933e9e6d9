"""Compiling is linear in instances: four times of them are at most five times the calls, and no function does more than that."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import pytest

from runner.digest import of_value
from runner.errors import Invalid
from runner.language import document, inputs, parse
from runner.planning.compile import compile_plan

FEW, MANY = 100, 400


def axis(n: int) -> str:
    return f"[{', '.join(map(str, range(n)))}]"


def one(n: int, more: str) -> str:
    return f"""\
recipe: a@1
steps:
  t:
    matrix: {{v: {axis(n)}}}
    run: [echo, "{{{{ matrix.v }}}}", "{{{{ outputs.o }}}}"]
    outputs: {{o: "out/{{{{ matrix.v }}}}.txt"}}
{more}
"""


def second(n: int, more: str) -> str:
    """A matrix that reads another's outputs, each one."""
    return one(
        n,
        f"""\
  e:
    matrix: {{v: {axis(n)}}}
    run: [cat, "out/{{{{ matrix.v }}}}.txt"]
    deps: ["out/{{{{ matrix.v }}}}.txt", "out/{{{{ matrix.v }}}}.t*"]
    {more}
""",
    )


SHAPES: dict[str, Callable[[int], str]] = {
    "literal": lambda n: one(
        n,
        '    env: {A: "{{ matrix.v }}"}\n    files: {c.json: {v: "{{ matrix.v }}"}}\n    when: "{{ matrix.v >= 0 }}"',
    ),
    "fan-in": lambda n: one(
        n,
        '    metrics: true\n  all: {run: [cat, "{{ steps.t.o }}"], outputs: [all.txt]}\n  b: {select: t, min: loss}\n'
        '  g: {run: [cat], deps: ["out/*.txt"], outputs: [g.txt]}\n  n: {run: [cat], needs: [t]}\n'
        '  m: {run: [cat, "{{ steps.t.metrics.loss }}"]}',
    ),
    "two matrices": lambda n: second(n, "outputs: {o: 'ev/{{ matrix.v }}/x'}"),
    "deps one by one": lambda n: one(
        n,
        f"  all: {{run: [cat], deps: [{', '.join(f'out/{i}.txt, data/{i}' for i in range(n))}]}}",
    ),
    "skipped": lambda n: one(n, "    when: false\n  e: {run: [cat], needs: [t]}"),
    "wrong one by one": lambda n: second(n, "outputs: {o: 'out/{{ matrix.v }}.txt/x'}"),
    "the same instance": lambda n: one(
        n,
        f"    metrics: true\n  e: {{matrix: {{v: {axis(n)}}}, run: [cat, '{{{{ steps.t.same.o }}}}', '{{{{ steps.t.same.metrics.loss }}}}'],"
        " deps: ['{{ steps.t.same.o }}']}",
    ),
    "either or": lambda n: one(
        n,
        '    when: "{{ matrix.v > 1 }}"\n  l: {run: [x], metrics: true, outputs: {o: l.txt}}\n'
        f"  e: {{matrix: {{v: {axis(n)}}}, when: '{{{{ steps.l.metrics.x > matrix.v }}}}',"
        " run: [cat, '{{ 1 if matrix.v > 3 else steps.l.o }}', '{{ steps.t.same.o | default(steps.l.o) }}']}",
    ),
    "read by all": lambda n: one(
        n,
        f"  c: {{run: [x], outputs: {{o: c.txt}}}}\n  e: {{matrix: {{v: {axis(n)}}}, run: [cat, '{{{{ steps.c.o | default(1) }}}}'],"
        " deps: ['{{ steps.c.o }}']}",
    ),
    "a glob": lambda n: (
        'recipe: a@1\nsteps:\n  t: {matrix: {f: {glob: "data/*"}}, run: [echo, "{{ matrix.f }}"], outputs: {o: "out/{{ matrix.f | stem }}"}}\n'
        '  all: {run: [cat, "{{ steps.t.o }}"]}\n'
    ),
    "a glob below an output": lambda n: (
        "recipe: a@1\nsteps:\n  s: {run: [split], outputs: {d: parts/}}\n"
        '  t: {matrix: {f: {glob: "parts/*"}}, run: [echo, "{{ matrix.f }}"], outputs: {o: "out/{{ matrix.f | stem }}"}}\n'
        '  all: {run: [cat, "{{ steps.t.o }}"]}\n'
    ),
}


def calls(shape: str, n: int) -> dict[object, int]:
    """How often each function is called."""
    recipe = parse.recipe(document.parse(SHAPES[shape](n), "a.yaml"))
    found = tuple(f"{i}" for i in range(n))
    globs = {"data/*": tuple(f"data/{i}" for i in found), "s/d:*": found}
    profile = cProfile.Profile()
    profile.enable()
    try:
        plan = compile_plan(
            recipe, {}, digest=of_value("x", 1), used={}, globs=globs, bind=inputs.bind,
            kind_of=inputs.kind_of,
        )  # fmt: skip
        assert len(list(plan.dump())) > 0
    except Invalid as error:
        assert shape == "wrong one by one" and len(error.problems) >= n
    finally:
        profile.disable()
    return {function: row[0] for function, row in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_the_instances_are_at_most_five_times_the_calls(shape: str) -> None:
    calls(shape, 2)  # what is read once is read
    few, many = calls(shape, FEW), calls(shape, MANY)
    assert sum(many.values()) <= 5 * sum(few.values())
    worse = {
        function: (few.get(function, 0), n)
        for function, n in many.items()
        if n > MANY and n > 5 * few.get(function, 0)
    }
    assert worse == {}
