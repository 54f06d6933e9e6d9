"""What a run says of a file that it would replace: whose it is."""

from __future__ import annotations

import pytest

from runner.errors import CannotRun
from tests.support import Space


def test_a_file_that_would_be_replaced_is_anothers_an_edit_or_older(space: Space) -> None:
    space.recipe(
        "recipe: mlp@1\nsummary: x\nsteps: {s: {run: 'echo 1 > outputs/model.pt', outputs: {o: outputs/}}}\n"
    )
    space.run()
    space.recipe(
        "recipe: mine@1\nsummary: x\nsteps:\n  a: {run: 'echo 2 > o', outputs: {o: o}}\n  b: {run: 'echo 3 > outputs/model.pt', outputs: {o: outputs/model.pt}}\n"
        "  c: {run: 'echo 4 > p', outputs: {o: p}}\n",
        name="mine.yaml",
    )
    space.file = "mine.yaml"
    space.write("p", "mine\n")
    with pytest.raises(CannotRun) as caught:
        space.run()
    assert str(caught.value).splitlines() == [
        "the run would replace outputs/model.pt, which is in outputs, created by mlp@1",
        "the run would replace p, which was not created by recipe",
    ]
    (space.root / "p").unlink()
    (space.root / "outputs/model.pt").unlink()
    space.run()
    space.write("o", "edited\n")
    code, said, _ = space.command("plan", "./mine.yaml")
    assert code == 0 and "would replace o, which was edited after mine@1 created it" in said
    assert (
        "it would replace o, which was edited after mine@1 created it"
        in space.command("why", "a", "./mine.yaml")[1]
    )
