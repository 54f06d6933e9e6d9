"""What `adopt`, `clean` and `gc` take and remove: only what is ours and what nobody needs, and never what a person changed."""

from __future__ import annotations

import json
import os

import pytest

from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace
from runner.survey import upkeep
from tests.support import Space
from tests.system.test_cli_why import FAN, LETTERS, Recipe, letters, recipe

__all__ = ["letters", "recipe"]


def paths(space: Space) -> list[str]:
    """Every file and empty directory of the caller's."""
    found = [
        path
        for path in space.root.rglob("*")
        if ".recipe" not in path.parts and (not path.is_dir() or not any(path.iterdir()))
    ]
    return sorted(str(path.relative_to(space.root)) for path in found)


def age(space: Space, days: float) -> None:
    """Make everything that is stored look so much older."""
    with Workspace.open(space.root) as ws:
        past = days * 86400
        for table, column in (("traces", "made_at"), ("runs", "created"), ("attempts", "started")):
            ws.store.database.connection.execute(f"UPDATE {table} SET {column} = {column} - {past}")
        for folder in ("runs", "plans", "manifests", "states", "partial", "attempts"):
            for path in (
                [ws.home / folder, *(ws.home / folder).rglob("*")]
                if (ws.home / folder).exists()
                else []
            ):
                found = path.lstat()
                os.utime(
                    path, (found.st_atime - past, found.st_mtime - past), follow_symlinks=False
                )


def test_an_adopted_edit_is_the_result_from_then_on(letters: Space, recipe: Recipe) -> None:
    letters.write("text.txt", "mine\n")
    assert recipe("run").code == 2  # it would be replaced
    said = recipe("adopt", "make")
    assert said.code == 0 and "make is now up to date: text.txt (f:" in said.out
    assert (
        letters.run() == ["count"]
        and letters.read("text.txt") == "mine\n"
        and letters.read("out/count.txt").strip() == "5"
    )
    assert (
        "adopted with `recipe adopt`" in recipe("why", "make").out
        and recipe("adopt", "make").out == "make is already up to date\n"
    )
    (letters.root / "text.txt").unlink()
    assert (
        letters.run() == [] and letters.read("text.txt") == "mine\n"
    )  # it is stored like any other result


def test_files_made_otherwise_are_adopted_before_anything_ran(space: Space, recipe: Recipe) -> None:
    space.recipe(FAN)
    space.write("one.txt", "")
    for n in (1, 2):
        space.write(f"many/{n}", "m")
    said = recipe("adopt", "many")
    assert (
        said.code == 2
        and "depends on the outputs of one" in said.err
        and "adopt files for them" in said.err
    )
    assert recipe("adopt", "one").code == 0 and recipe("adopt", "many", "./recipe.yaml").code == 0
    assert space.run() == ["all"] and space.read("all.txt") == "mm"


def test_what_is_not_there_or_not_right_is_not_adopted(space: Space, recipe: Recipe) -> None:
    space.recipe(
        "steps: {a: {run: 'true', outputs: {x: x.txt, d: d/, e: {path: e, nonempty: true}}}, b: {run: 'true', cache: false, outputs: {o: b}}}"
    )
    space.write("d", "a file")
    space.write("e", "")
    said = recipe("adopt", "a")
    assert said.code == 2 and "x.txt does not exist; d is not a directory; e is empty" in said.err
    assert recipe("adopt", "b").code == 2 and recipe("adopt", "c").code == 3
    assert space.answers() == {"a": "run", "b": "run"}


def test_clean_removes_what_we_made_and_nothing_else(letters: Space, recipe: Recipe) -> None:
    letters.write("out/mine.txt", "mine")
    before = paths(letters)
    assert (
        recipe("clean", "-n").out == "would remove out/count.txt\nwould remove text.txt\n"
        and paths(letters) == before
    )
    letters.write("text.txt", "edited")
    said = recipe("clean")
    assert (
        said.code == 0
        and said.out == "removed out/count.txt\n"
        and "kept text.txt: it was edited" in said.err
    )
    assert paths(letters) == [
        "data.txt",
        "out/mine.txt",
        "recipe.yaml",
        "set/a",
        "set/b",
        "text.txt",
    ]
    assert recipe("clean", "--force").out == "removed text.txt\n"
    (letters.root / "out" / "mine.txt").unlink()
    assert letters.run() == []  # nothing runs again: what was removed is stored
    assert json.loads(recipe("clean", "--json").out) == {
        "removed": ["out/count.txt", "text.txt"],
        "kept": [],
        "dry_run": False,
    }
    assert paths(letters) == [
        "data.txt",
        "recipe.yaml",
        "set/a",
        "set/b",
    ]  # the directory that we made is gone too


def test_clean_stale_removes_only_what_no_step_makes(letters: Space, recipe: Recipe) -> None:
    letters.recipe(LETTERS.replace("out/count.txt", "n.txt"))
    letters.run()
    assert "out/count.txt" in recipe("status").out
    assert recipe("clean", "--stale").out == "removed out/count.txt\n"
    assert (
        paths(letters) == ["data.txt", "n.txt", "recipe.yaml", "set/a", "set/b", "text.txt"]
        and recipe("status").code == 0
    )


LEFT = {
    "an optional output": "steps: {a: {run: 'if {{ inputs.e }}; then echo o > o; fi', outputs: {o: {path: o, optional: true}}}}",
    "a skipped step": "steps: {a: {run: 'echo o > o', when: '{{ inputs.e }}', outputs: {o: o}}}",
    "one that a metric skips": """steps:
  m: {run: 'printf "{\\"e\\": %s}" {{ inputs.e }} > $RECIPE_METRICS', metrics: true}
  a: {run: 'echo o > o', when: '{{ steps.m.metrics.e }}', outputs: {o: o}}""",
}


@pytest.mark.parametrize("steps", LEFT.values(), ids=LEFT)
def test_what_is_not_made_this_time_is_stale(space: Space, recipe: Recipe, steps: str) -> None:
    space.recipe(f"inputs: {{e: {{type: boolean, default: true}}}}\n{steps}")
    space.run()
    assert json.loads(recipe("status", "--json").out)["recipes"][0]["stale"] == []
    space.run({"e": False})
    assert (
        "stale outputs of earlier runs" in recipe("status", "e=false").out
        and "  o\n" in recipe("status", "e=false").out
    )
    assert (
        recipe("clean", "--stale", "-n", "e=false").out == "would remove o\n"
        and recipe("clean", "--stale", "e=true").out == ""
    )
    space.write("o", "mine")
    assert recipe("clean", "--stale", "e=false").out == "" and space.read("o") == "mine"
    space.write("o", "o\n")
    assert (
        recipe("clean", "--stale", "e=false").out == "removed o\n"
        and not (space.root / "o").exists()
    )
    assert space.run() == [] and space.read("o") == "o\n", "what was removed is stored"


def test_what_may_still_be_made_is_not_stale(space: Space, recipe: Recipe) -> None:
    space.recipe(f"inputs: {{e: {{type: boolean, default: true}}}}\n{LEFT['an optional output']}")
    space.run()
    assert recipe("clean", "--stale", "e=false").out == "" and (space.root / "o").exists(), (
        "whether it is made is not known before its step ran"
    )


def test_what_was_adopted_is_not_stale(space: Space, recipe: Recipe) -> None:
    space.recipe("steps: {a: {run: 'touch o', outputs: {o: o}}}")
    space.write("o", "mine")
    assert recipe("adopt", "a").code == 0
    space.recipe("steps: {b: {run: 'touch p', outputs: {p: p}}}")
    assert recipe("clean", "--stale").out == "" and space.read("o") == "mine"


def test_a_published_file_that_became_a_link_or_a_pipe_is_kept(
    letters: Space, recipe: Recipe
) -> None:
    (letters.root / "text.txt").rename(letters.root / "elsewhere")
    (letters.root / "text.txt").symlink_to("elsewhere")
    (letters.root / "out" / "count.txt").unlink()
    os.mkfifo(letters.root / "out" / "count.txt")
    said = recipe("clean")
    assert (
        said.out == ""
        and said.err.count("it was edited") == 2
        and (letters.root / "elsewhere").exists()
    )


def test_results_of_a_library_recipe_go_with_their_folder_and_latest(
    space: Space, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.language import library

    shelf = space.root / "shelf"
    space.recipe(
        "recipe: tool@1\nsummary: A tool\nsteps: {a: {run: 'touch o', outputs: {o: o}}}",
        name="shelf/recipes/tool@1.yaml",
    )
    monkeypatch.setattr(library, "shipped", lambda: shelf)
    assert (
        recipe("run", "tool@1").code == 0
        and (space.root / "out" / "tool@1" / "latest" / "o").exists()
    )
    assert recipe("status", "tool@1").code == 0 and recipe("clean", "tool@1").code == 0
    assert paths(space) == ["shelf/recipes/tool@1.yaml"]


def test_clean_does_not_wait_and_takes_nothing_from_a_living_run(
    letters: Space, recipe: Recipe
) -> None:
    with Workspace.open(letters.root) as ws:
        ws.store.runs.submit(RunRow("r-live", "t@1", "", {}, ""))
        fence = ws.store.runs.claim("r-live", "a test")
        assert fence is not None
        ws.store.runs.group("r-live", fence, run_state=("ACTIVE", ""))
        said = recipe("clean", "./recipe.yaml")
    assert said.code == 4 and "r-live" in said.err and (letters.root / "text.txt").exists()


def test_gc_keeps_what_is_published_and_what_is_young(letters: Space, recipe: Recipe) -> None:
    letters.run({"word": "bye"})
    assert "nothing to remove" in recipe("gc").out
    age(letters, 100)
    told = json.loads(recipe("gc", "-n", "--keep-runs", "1", "--json").out)
    assert told["counts"]["run"] == 1 and told["counts"]["object"] == 2 and told["bytes"] > 0
    assert "freed" in recipe("gc", "--keep-runs", "1").out
    assert json.loads(recipe("gc", "-n", "--keep-runs", "1", "--json").out)["bytes"] == 0
    assert letters.answers({"word": "bye"}) == {"make": "fresh", "count": "fresh"}
    assert letters.run() == ["make", "count"]  # what went is made again
    assert letters.read("text.txt").endswith("hello\n")


def test_a_run_that_died_does_not_keep_everything_forever(letters: Space, recipe: Recipe) -> None:
    with Workspace.open(letters.root) as ws:
        ws.store.runs.submit(RunRow("r-dead", "t@1", "", {}, ""))
        fence = ws.store.runs.claim("r-dead", "a test")
        assert fence is not None
        ws.store.runs.group("r-dead", fence, run_state=("ACTIVE", ""))
    assert (
        "NEEDS_RECOVERY" in recipe("runs").out
        and "died: r-dead" in recipe("status", "./recipe.yaml").out
    )
    letters.run({"word": "bye"})
    assert "died" not in recipe("status").out
    age(letters, 100)
    assert json.loads(recipe("gc", "--keep-runs", "0", "--json").out)["counts"]["object"] == 2


def test_gc_removes_unused_states_attempts_and_environments_and_half_written_files(
    space: Space, recipe: Recipe
) -> None:
    body = "steps: {a: {run: 'echo 1 > ck/step-1; exit 1', state: {ck: {path: ck/, checkpoint: 'step-*'}}, outputs: {o: o}}}"
    space.recipe(body)
    space.attempt()
    home = space.root / ".recipe"
    (home / "partial" / "torn").write_text("x" * 1000)
    for name in ("envs", "git"):
        (home / name / "old").mkdir(parents=True)
        (home / name / "old" / "HEAD").touch()
    assert list((home / "states").iterdir()) and list((home / "attempts").iterdir())
    assert "nothing to remove" in recipe("gc").out and not list((home / "partial").iterdir())
    told = json.loads(recipe("gc", "--keep-days", "0", "--keep-runs", "0", "--json").out)
    assert told["counts"]["state"] == 1 and told["counts"]["attempt"] == 1 and told["bytes"] > 0
    assert told["counts"]["environment"] == 1 and told["counts"]["repository"] == 1
    assert not any(list((home / name).iterdir()) for name in ("states", "attempts", "envs", "git"))


@pytest.mark.parametrize(
    "words",
    [
        ("gc", "--keep-days", "-1"),
        ("gc", "--keep-runs", "x"),
        ("clean", "nope@1"),
        ("adopt",),
        ("clean", "./none.yaml"),
    ],
)
def test_bad_words_change_nothing(letters: Space, recipe: Recipe, words: tuple[str, ...]) -> None:
    before = paths(letters)
    said = recipe(*words)
    assert said.code == 3 and said.err and paths(letters) == before


def test_a_download_that_was_not_used_for_long_is_deleted(letters: Space, recipe: Recipe) -> None:
    for name in ("old", "young"):
        (letters.root / ".recipe/cache" / name).mkdir(parents=True)
        (letters.root / ".recipe/cache" / name / "data.bin").write_bytes(b"0" * 1000)
    for path in (letters.root / ".recipe/cache/old/data.bin", letters.root / ".recipe/cache/old"):
        os.utime(path, (1, 1))
    assert recipe("gc", "--keep-days", "30").code == 0
    assert [path.name for path in (letters.root / ".recipe/cache").iterdir()] == ["young"]


def test_a_leftover_that_cannot_be_deleted_does_not_stay_locked(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise OSError("the disk has an error")

    with Workspace.open(space.root) as ws:
        folder = ws.home / "envs" / "abc"
        folder.mkdir(parents=True)
        monkeypatch.setattr(upkeep.disk, "delete", refuse)
        with pytest.raises(OSError, match="the disk has an error"):
            upkeep.delete_leftovers(ws, [upkeep.Leftover("environment", folder, 1)])
        assert not ws.locks.is_held("env-abc")
