"""Several runs at once in one workspace: they share work, start nothing twice, and spoil nothing."""

from __future__ import annotations

import os

import pytest

from tests.support import Space, until


def starts(space: Space) -> list[str]:
    path = space.root / "starts"
    return sorted(path.read_text().split()) if path.exists() else []


@pytest.mark.parametrize(("runs", "steps"), [(2, 12), (4, 50)])
def test_runs_of_one_plan_start_each_step_once(space: Space, runs: int, steps: int) -> None:
    body = "".join(
        f"  s{n}: {{run: 'echo s{n} >> {space.root}/starts; echo {n} > o{n}.txt', outputs: {{o: o{n}.txt}}}}\n"
        for n in range(steps)
    )
    space.recipe(f"steps:\n{body}")
    workers = [space.start("run", "-j2") for _ in range(runs)]
    for worker in workers:
        _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0, said
    assert starts(space) == sorted(f"s{n}" for n in range(steps))
    assert [space.read(f"o{n}.txt") for n in range(steps)] == [f"{n}\n" for n in range(steps)]
    assert os.listdir(space.root / ".recipe" / "attempts") == []
    assert space.run() == []


def test_plans_that_overlap_share_what_they_have_in_common(space: Space) -> None:
    common = "".join(
        f"  s{n}: {{run: 'echo s{n} >> {space.root}/starts; echo {n} > o{n}.txt', outputs: {{o: o{n}.txt}}}}\n"
        for n in range(15)
    )
    for name in "ab":
        own = f"  {name}: {{run: 'cat {{{{ steps.s3.o }}}} > {name}.txt; echo {name} >> {space.root}/starts', outputs: {{o: {name}.txt}}}}\n"
        space.recipe(
            f"recipe: {name}@1\nsummary: A test\nsteps:\n{common}{own}", name=f"{name}.yaml"
        )
    workers = [space.start("run", f"./{name}.yaml", "-j2") for name in "ab"]
    for worker in workers:
        _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0, said
    assert starts(space) == sorted(["a", "b", *(f"s{n}" for n in range(15))])
    assert space.read("a.txt") == space.read("b.txt") == "3\n"


def test_a_run_that_waits_for_another_takes_over_when_that_is_killed(space: Space) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    space.recipe(
        f"steps:\n  one: {{run: 'echo one >> {space.root}/starts; read go < {gate}; echo x > o.txt', outputs: {{o: o.txt}}}}\n"
    )
    first = space.start("run")
    until(lambda: starts(space) == ["one"])
    second = space.start("run")
    until(lambda: space.command("runs")[1].count("t@1") == 2)
    first.kill()
    first.communicate()
    opened = os.open(gate, os.O_RDWR)
    os.write(opened, b"go\n")
    _, said = second.communicate(timeout=60)
    os.close(opened)
    assert second.returncode == 0, said
    assert starts(space) == ["one"]
    assert space.read("o.txt") == "x\n"


def test_what_another_run_published_last_is_not_edited_by_hand(space: Space) -> None:
    """Of two runs at once, the last to write down where it published need not be the last to publish."""
    space.recipe(
        "inputs: {v: {type: integer}}\nsteps: {a: {run: 'echo {{ inputs.v }} > x.txt', outputs: {o: x.txt}}}"
    )
    space.run({"v": 1})
    space.run({"v": 2})
    space.write("x.txt", "1\n")
    for value in (1, 2):
        code, told, _ = space.command("status", "./recipe.yaml", f"v={value}")
        assert "edited outputs" not in told, told
    space.write("x.txt", "mine\n")
    code, told, _ = space.command("status", "./recipe.yaml", "v=2")
    assert code == 1 and "edited outputs" in told
