"""What an attempt says of inputs that would not hold still."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from runner.hosts.place.spare_dirs import SparePool
from runner.hosts.place.staging import SMALL, AttemptDirectory
from runner.planning.step import DIRECTORY, OutputSpec
from runner.storage.content.digest_cache import DigestCache
from runner.storage.content.files import Changed, Content
from runner.storage.content.inputs import StoredInputs
from runner.storage.content.objects import Objects


class Restless(DigestCache):
    """A disk on which everything changes while it is read."""

    def contents(self, paths: Iterable[str]) -> dict[str, Content | None]:
        raise Changed(next(iter(paths)))


def test_a_source_that_does_not_hold_still_is_stale(tmp_path: Path) -> None:
    attempt = AttemptDirectory(str(tmp_path / "a"), sources={"in.txt": "f:0"}, doubtful=["other"])
    assert attempt.find_stale_sources(Restless(tmp_path)) == ["other", "in.txt"]


def test_a_link_whose_target_does_not_hold_still_was_changed(tmp_path: Path) -> None:
    attempt = AttemptDirectory(str(tmp_path / "a"), links={"data": ("in", "t:0")})
    assert (
        attempt.find_changed_input(Restless(tmp_path), Objects(tmp_path))
        == "the step or another process changed its input data"
    )


def test_a_folder_of_an_earlier_attempt_makes_way(tmp_path: Path) -> None:
    attempts, cache = tmp_path / "attempts", DigestCache(tmp_path)
    for name in ("lib/sub/a", "lib/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    scrap = SparePool(str(attempts), "t", 8)

    def begun(name: str) -> AttemptDirectory:
        attempt = AttemptDirectory(str(attempts / name))
        attempt.folder.begin(scrap)
        return attempt

    one = begun("one")
    for name in ("lib/sub/a", "lib/b"):
        one.add_path(cache, name, None, str(tmp_path / name), name)
    one.retire(scrap)
    two = begun("two")
    two.add_path(cache, "lib", None, str(tmp_path / "lib"), "lib")
    two.folder.remove_unused()
    assert (attempts / "two" / "lib").is_symlink() and (
        attempts / "two" / "lib/sub/a"
    ).read_text() == "lib/sub/a"


def test_a_folder_that_a_step_makes_is_there_though_an_earlier_attempt_had_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_text("a")
    scrap = SparePool(str(tmp_path / "attempts"), "t", 8)
    for name in ("one", "two"):
        attempt = AttemptDirectory(str(tmp_path / "attempts" / name))
        attempt.folder.begin(scrap)
        if name == "one":
            attempt.add_path(DigestCache(tmp_path), "a", None, str(tmp_path / "a"), "out/a")
            attempt.retire(scrap)
    attempt.prepare_outputs([OutputSpec("o", "out", DIRECTORY)])
    attempt.folder.remove_unused()
    assert (tmp_path / "attempts/two/out").is_dir()


def test_a_file_of_the_recipe_takes_the_place_of_an_input_and_is_not_written_into_it(
    tmp_path: Path,
) -> None:
    for folder in ("objects", "partial"):
        (tmp_path / ".recipe" / folder).mkdir(parents=True)
    (tmp_path / "in").write_bytes(b"x" * (SMALL + 1))
    objects, cache = Objects(tmp_path / ".recipe"), DigestCache(tmp_path)
    inputs = StoredInputs(objects, cache)
    for stored in (inputs, None):  # an object, and a link
        attempt = AttemptDirectory(str(tmp_path / f"attempt-{stored is None}"))
        attempt.folder.begin(None)
        attempt.add_path(cache, "in", None, str(tmp_path / "in"), "in", inputs=stored)
        attempt.stage_queued_files(cache, inputs)
        assert Path(attempt.path, "in").is_symlink() == (stored is None)
        attempt.add_bytes(b"ours", "in")
        assert Path(attempt.path, "in").read_bytes() == b"ours"
        assert attempt.find_changed_input(cache, objects) == ""
    assert (tmp_path / "in").read_bytes() == b"x" * (SMALL + 1)


def test_an_input_that_a_step_changed_is_changed_though_another_staging_has_healed_it(
    tmp_path: Path,
) -> None:
    for folder in ("objects", "partial"):
        (tmp_path / ".recipe" / folder).mkdir(parents=True)
    (tmp_path / "in").write_bytes(b"x" * (SMALL + 1))
    objects, cache = Objects(tmp_path / ".recipe"), DigestCache(tmp_path)
    inputs = StoredInputs(objects, cache)

    def staged(name: str) -> AttemptDirectory:
        attempt = AttemptDirectory(str(tmp_path / name))
        attempt.folder.begin(None)
        attempt.add_path(cache, "in", None, str(tmp_path / "in"), "in", inputs=inputs)
        attempt.stage_queued_files(cache, inputs)
        return attempt

    spoiler, reader = staged("spoiler"), staged("reader")
    given = Path(spoiler.path, "in")
    given.chmod(0o644)
    given.write_bytes(b"spoiled" * SMALL)
    later = staged("later")
    assert Path(later.path, "in").read_bytes() == b"x" * (SMALL + 1)
    # The reader may have read what the spoiler wrote.
    for attempt in (spoiler, reader):
        assert attempt.find_changed_input(cache, objects) == "the step changed its input in"
    assert later.find_changed_input(cache, objects) == ""


def test_a_folder_of_very_many_files_says_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.hosts.place.staging.MANY_FILES", 3)
    for folder in ("objects", "partial"):
        (tmp_path / ".recipe" / folder).mkdir(parents=True)
    objects, cache = Objects(tmp_path / ".recipe"), DigestCache(tmp_path)
    attempt = AttemptDirectory(str(tmp_path / "attempt"))
    attempt.folder.begin(None)
    for name, count in (("few", 3), ("many", 4)):
        (tmp_path / name).mkdir()
        for n in range(count):
            (tmp_path / name / str(n)).touch()
        inputs = StoredInputs(objects, cache)
        attempt.add_path(cache, name, None, str(tmp_path / name), name, inputs=inputs)
    assert list(attempt.notices) == ["many"] and "it has 4 files" in attempt.notices["many"]
