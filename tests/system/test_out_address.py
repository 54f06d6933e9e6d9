"""`--out` names a folder of this machine; an address is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import runner
from runner.errors import Invalid
from tests.support import Space

MADE = 'steps: {s: {run: echo 1 > o, outputs: {o: o}}}\noutputs: {o: "{{ steps.s.o }}"}\n'


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("s3://bucket/folder", "recipe push --store s3://bucket/folder"),
        ("gs://bucket", "recipe push --store gs://bucket"),
        ("ssh://host/folder", "name a folder"),
        ("file:///tmp/x", "name a folder"),
    ],
)
def test_results_are_not_published_into_a_folder_that_is_called_like_an_address(space: Space, address: str, fix: str) -> None:
    space.recipe(MADE)
    code, _, err = space.command("run", "--out", address)
    assert code == 3 and f"--out {address} is an address" in err and fix in err
    assert [path.name for path in space.root.iterdir()] == ["recipe.yaml"]


def test_a_pack_is_not_written_into_an_address(space: Space) -> None:
    space.write("data/a", "a")
    code, _, err = space.command("pack", "data", "--out", "s3://bucket/pack")
    assert code == 3 and "--out s3://bucket/pack is an address" in err
    assert not (space.root / "s3:").exists()


@pytest.mark.parametrize("out", ["s3://bucket/folder", Path("s3://bucket/folder")])
def test_python_callers_are_refused_an_address_too(space: Space, out: str | Path) -> None:
    space.recipe(MADE)
    with pytest.raises(Invalid, match="s3://bucket/folder is an address"):
        runner.run("./recipe.yaml", workspace=space.root, out=out)


def test_a_folder_with_a_colon_is_a_folder(space: Space) -> None:
    space.recipe(MADE)
    space.run(out="a:b/c")
    assert space.read("a:b/c/o") == "1\n"


def test_an_output_is_no_address(space: Space) -> None:
    space.recipe('steps: {s: {run: "true", outputs: {o: "s3://bucket/o"}}}\n')
    code, _, err = space.command("run")
    assert code == 3 and 'output "o" of "s" is an address, "s3://bucket/o"' in err and "recipe push" in err
