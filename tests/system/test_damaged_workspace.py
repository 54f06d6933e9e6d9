"""What others, a broken disk or an odd umask made of a workspace or a store is answered in a sentence, and never with a traceback."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support import Space

MAKES = "steps:\n  a: {run: 'echo a > \"{{ outputs.o }}\"', outputs: {o: o.txt}}\n"


def test_a_database_whose_schema_is_damaged_is_said_to_be(space: Space) -> None:
    space.recipe(MAKES)
    space.run()
    file = space.root / ".recipe" / "recipe.db"
    whole = file.read_bytes()
    assert b"CREATE TABLE runs" in whole
    file.write_bytes(whole.replace(b"CREATE TABLE runs", b"CREATE T\xff\xfeLE runs"))
    code, _, err = space.command("run", "./recipe.yaml")
    assert code == 5 and "recipe.db is damaged" in err and "Traceback" not in err, err
    assert "fix: restore the file from a backup, or move it away" in err


def test_with_umask_000_others_cannot_enter_the_folder_of_recipe(space: Space) -> None:
    space.recipe(MAKES)
    before = os.umask(0)
    try:
        code, _, err = space.command("run", "./recipe.yaml")
    finally:
        os.umask(before)
    assert code == 0, err
    assert stat.S_IMODE((space.root / ".recipe").stat().st_mode) == 0o770


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_any_other_umask_has_the_last_word(space: Space, umask: int) -> None:
    space.recipe(MAKES)
    before = os.umask(umask)
    try:
        space.command("run", "./recipe.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((space.root / ".recipe").stat().st_mode) == 0o777 & ~umask


def traces(store: Path) -> list[Path]:
    return [path for path in (store / "traces").rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["nested", "a folder", "a pipe"])
def test_a_trace_of_a_store_that_is_none_ends_no_run_with_a_traceback(
    space: Space, kind: str
) -> None:
    space.recipe(MAKES)
    store = space.root / "store"
    store.mkdir()
    space.write("recipe.toml", f'[stores.team]\nurl = "file://{store}"\n')
    space.run()
    code, _, err = space.command("push", "./recipe.yaml", "--store", "team")
    assert code == 0, err
    found = traces(store)
    assert found
    for trace in found:
        trace.unlink()
        if kind == "nested":
            trace.write_text("[" * 100_000)
        elif kind == "a folder":
            trace.mkdir()
        else:
            os.mkfifo(trace)
    (space.root / "o.txt").unlink()
    again = Space(space.root.parent / "other")
    again.recipe(MAKES)
    again.write("recipe.toml", f'[stores.team]\nurl = "file://{store}"\n')
    code, _, err = again.command("run", "./recipe.yaml", "--store", "team")
    assert "Traceback" not in err
    if kind == "nested":
        assert code == 0 and again.read("o.txt") == "a\n", err
    else:
        assert "it is not a regular file" in err and "remove this path from the store" in err, err
