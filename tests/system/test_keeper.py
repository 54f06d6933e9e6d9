"""Checkpoints of a training elsewhere: what comes home, what is put on the next host, what is deleted, and what a kill at any instant costs."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivers.base import HostLost, Rejected, Unreachable
from runner.errors import Infrastructure
from runner.hosts.place.checkpoint_sync import (
    LINK,
    CheckpointPruner,
    CheckpointSync,
    DirectoryListing,
    disk_strain,
)
from runner.hosts.place.host_task import StateFolder, SyncRound
from runner.storage import checkpoints

EXAMPLES = int(os.environ.get("RECIPE_KEEPER_EXAMPLES", "20"))
PATTERN = "step-*"
PICKLE = pickle.dumps([1, 2, 3])
ROOM = 1 << 30


class Elsewhere:
    """A host whose disk is a folder that the other side never looks into: `CheckpointHost` with faults."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.free, self.total = ROOM, ROOM
        self.partial = False
        self.questions = 0
        self.during: Callable[[str, Path], None] = lambda path, target: (
            None
        )  # what happens while something is on its way
        self.fails: list[Exception] = []

    async def list_files(self, path: str) -> DirectoryListing:
        self.questions += 1
        if self.fails:
            raise self.fails.pop(0)
        return DirectoryListing(self._known(Path(path)), self.free, self.total)

    list_resumable = list_files

    async def download(self, path: str, target: Path) -> int:
        self.during(path, target)
        return self._copy(Path(path), target)

    async def upload(self, source: Path, path: str) -> int:
        return self._copy(source, Path(path))

    async def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            assert path.startswith(str(self.root))
            self._drop(Path(path))

    def _known(self, top: Path) -> dict[str, tuple[int, int]]:
        return {
            str(p.relative_to(top)): (
                LINK if p.is_symlink() else p.lstat().st_size,
                p.lstat().st_mtime_ns,
            )
            for p in top.rglob("*")
            if not p.is_dir() or p.is_symlink()
        }

    def _drop(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _copy(self, source: Path, target: Path) -> int:
        if target.exists():
            self._drop(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(
            source, target, copy_function=shutil.copy
        ) if source.is_dir() else shutil.copy(source, target)
        return (
            sum(p.stat().st_size for p in target.rglob("*"))
            if target.is_dir()
            else target.stat().st_size
        )


class Training:
    """A trainer's folder on some host: what it saves, whole and not.  `known`: in accelerate's layout, else in one of its own."""

    def __init__(self, folder: Path, *, known: bool = False) -> None:
        self.folder = folder
        self.name = "checkpoint-%d" if known else "step-%d"
        self.rest = (
            {"optimizer.bin": PICKLE, "random_states_0.pkl": PICKLE}
            if known
            else {"optimizer.json": b"{}"}
        )
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int, *, size: int = 64) -> Path:
        """The first half of a save, in which every file is whole: that is what makes it dangerous."""
        path = self.folder / (self.name % step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        head = json.dumps(
            {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        ).encode()
        (path / "model.safetensors").write_bytes(
            len(head).to_bytes(8, "little") + head + bytes([step % 251]) * size
        )
        return path

    def end(self, step: int) -> None:
        """The other half, of what is not there yet."""
        for name, data in self.rest.items():
            path = self.folder / (self.name % step) / name
            if path.parent.is_dir() and not path.exists():
                path.write_bytes(data)

    def save(self, step: int, *, size: int = 64) -> Path:
        path = self.begin(step, size=size)
        self.end(step)
        return path

    def whole(self, folder: Path) -> set[int]:
        """The steps whose checkpoints in a folder are as they were saved."""
        made = {int(path.name.rpartition("-")[2]): path for path in folder.glob("*-*")}
        names = {"model.safetensors", *self.rest}
        return {
            step
            for step, path in made.items()
            if names == set(checkpoints.files(path)) and checkpoints.examine(path).ok
        }


def steps(folder: Path) -> list[int]:
    return sorted(
        int(path.name.rpartition("-")[2]) for path in folder.glob("*-*") if path.name[0] != "."
    )


class Scene:
    """One state here and on hosts, and a keeper of it."""

    def __init__(
        self, tmp: Path, *, keep: int | None = 2, pattern: str | None = PATTERN, known: bool = False
    ) -> None:
        self.tmp, self.keep, self.pattern, self.known = tmp, keep, pattern, known
        self.here = tmp / "home" / "1" / "ckpt"
        self.told: list[SyncRound] = []
        self.paused: list[float] = []
        self.while_paused: Callable[[], None] = lambda: None
        self.host("a")

    def host(self, name: str) -> Elsewhere:
        self.there = Training(self.tmp / name / "states" / "id" / "ckpt", known=self.known)
        self.away = Elsewhere(self.tmp / name)
        self.worker()
        return self.away

    def worker(self) -> None:
        """Somebody else goes on with this attempt."""
        kept = StateFolder(
            "ckpt", "ckpt", self.here, str(self.there.folder), self.pattern, None, self.keep
        )
        self.keeper = CheckpointSync(self.away, [kept], self.told.append, pause=self.pause)

    async def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.while_paused()

    def do(self, what: Awaitable[object]) -> object:
        async def run() -> object:
            return await what

        return asyncio.run(run())

    def sync(self) -> SyncRound:
        self.do(self.keeper.sync())
        return self.told[-1]

    def finish(self) -> SyncRound:
        self.do(self.keeper.finish())
        return self.told[-1]

    def restore(self) -> checkpoints.Newest:
        found = self.do(self.keeper.restore())
        assert isinstance(found, dict)
        return found["ckpt"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_whole_checkpoints_come_home_once_and_old_ones_go_on_both_sides(scene: Scene) -> None:
    for step in range(1, 6):
        scene.there.save(step)
    first = scene.sync()
    assert sorted(first.copied) == ["step-4", "step-5"] and first.size > 0
    assert steps(scene.here) == [4, 5] == steps(scene.there.folder)
    asked = scene.away.questions
    assert scene.sync().copied == [] and scene.away.questions == asked + 1
    scene.there.save(6)
    assert scene.sync().copied == ["step-6"]
    assert steps(scene.here) == [5, 6] == steps(scene.there.folder)
    assert sorted(
        path.name for path in scene.here.parent.iterdir() if not path.name.startswith(".")
    ) == ["ckpt"]


def test_the_newest_counts_only_when_it_holds_still(scene: Scene) -> None:
    scene.there.save(1)
    path = scene.there.begin(2)
    scene.while_paused = lambda: (path / "optimizer.json").write_text("{}") and None
    assert scene.sync().copied == ["step-1"]
    scene.while_paused = lambda: None
    assert scene.sync().copied == ["step-2"]
    assert scene.paused == [2.0]  # the second time it had held still since the last look


def test_what_a_gone_node_may_have_had_a_part_of_counts_only_where_its_files_tell(
    tmp_path: Path,
) -> None:
    for known in (False, True):
        scene = Scene(tmp_path / f"{known}", known=known)
        scene.there.save(1)
        scene.away.partial = True
        assert scene.finish().rejected == (
            [] if known else [("step-1", "a lost node may have held a part of the checkpoint")]
        )
        assert steps(scene.here) == [1] * known


def test_a_whole_one_here_stays_when_a_node_with_a_part_of_it_is_gone(scene: Scene) -> None:
    path = scene.there.save(1)
    scene.sync()
    (path / "optimizer.json").unlink()
    scene.away.partial = True
    assert scene.finish().copied == [] and scene.there.whole(scene.here) == {1}


def test_one_that_changes_while_it_is_copied_is_not_taken_and_comes_at_the_next_round(
    scene: Scene,
) -> None:
    path = scene.there.begin(1)
    scene.away.during = lambda _path, _target: (path / "optimizer.json").write_text("{}") and None
    assert scene.sync().copied == [] and steps(scene.here) == []
    scene.away.during = lambda _path, _target: None
    assert scene.sync().copied == ["step-1"]


def test_one_that_its_trainer_deletes_while_it_is_copied_is_no_error(scene: Scene) -> None:
    for step in (1, 2):
        scene.there.save(step)
    scene.away.during = lambda path, target: (
        shutil.rmtree(path) if path.endswith("step-1") else None
    )
    done = scene.sync()
    assert (done.copied, done.problem) == (["step-2"], "")
    assert steps(scene.here) == [2]


def test_a_broken_one_is_said_once_and_the_one_before_it_comes_home(scene: Scene) -> None:
    for step in (1, 2, 3):
        scene.there.save(step)
    os.truncate(scene.there.folder / "step-3" / "model.safetensors", 90)
    done = scene.sync()
    assert [name for name, _ in done.rejected] == [
        "step-3"
    ] and "model.safetensors" in done.rejected[0][1]
    assert steps(scene.here) == [1, 2]
    assert scene.sync().rejected == []
    assert steps(scene.there.folder) == [
        1,
        2,
        3,
    ]  # nothing that is broken is deleted, and nothing that is needed
    scene.there.save(3)
    assert scene.sync().copied == ["step-3"]


def test_one_that_was_spoilt_here_comes_home_again(scene: Scene) -> None:
    model = scene.there.save(1) / "model.safetensors"
    scene.sync()
    copy = scene.here / "step-1" / "model.safetensors"
    copy.write_bytes(b"\0" * copy.stat().st_size)
    os.utime(copy, ns=(model.stat().st_mtime_ns, model.stat().st_mtime_ns))
    assert scene.sync().copied == ["step-1"]
    assert copy.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("pattern", [PATTERN, None])
def test_a_kill_between_the_two_renames_of_a_replacement_loses_neither(
    pattern: str | None, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, pattern=pattern)
    scene.there.save(1)
    scene.sync()
    incoming = scene.here.parent / ".incoming" / "ckpt"
    incoming.mkdir(parents=True)
    (scene.here / "step-1" if pattern else scene.here).rename(
        incoming / ("step-1.old" if pattern else "whole.old")
    )
    scene.here.mkdir(exist_ok=True)
    scene.host("b")
    scene.restore()
    assert steps(scene.here) == steps(scene.there.folder) == [1]


def test_a_host_that_dies_in_the_middle_of_a_copy_leaves_nothing_half_visible(scene: Scene) -> None:
    scene.there.save(1)
    scene.sync()
    scene.there.save(2)

    def die(path: str, target: Path) -> None:
        target.with_name(target.name + ".coming").mkdir()
        (target.with_name(target.name + ".coming") / "half").write_text("x")
        raise HostLost("gone")

    scene.away.during = die
    assert "gone" in scene.sync().problem
    assert [path.name for path in scene.here.iterdir()] == ["step-1"]
    # What the copy would resume from stays, until that checkpoint is no longer asked for.
    assert (scene.here.parent / ".incoming" / "ckpt" / "step-2.coming" / "half").exists()
    shutil.rmtree(scene.there.folder / "step-2")
    scene.away.during = lambda _path, _target: None
    scene.sync()
    assert not (scene.here.parent / ".incoming" / "ckpt").exists()


def test_a_full_disk_here_is_said_and_what_was_half_copied_makes_room(scene: Scene) -> None:
    scene.there.save(1)

    def fill(path: str, target: Path) -> None:
        target.with_name(target.name + ".coming").mkdir()
        raise Infrastructure("the disk is full")

    scene.away.during = fill
    assert "the disk is full" in scene.sync().problem
    assert not any((scene.here.parent / ".incoming" / "ckpt").iterdir())


def test_the_last_round_takes_what_is_no_checkpoint_too_and_waits_for_nothing(scene: Scene) -> None:
    scene.there.save(1)
    (scene.there.folder / "log.txt").write_text("hello")
    (scene.there.folder / ".step-2.unfinished").mkdir()
    (scene.there.folder / ".step-2.unfinished" / "x").write_text("x")
    assert scene.sync().copied == ["step-1"]
    scene.there.save(2)
    assert sorted(scene.finish().copied) == ["log.txt", "step-2"]
    assert sorted(path.name for path in scene.here.iterdir()) == ["log.txt", "step-1", "step-2"]
    assert scene.paused == [2.0]


def test_what_cannot_be_brought_keeps_nothing_else_from_coming_home(scene: Scene) -> None:
    for step in (1, 2, 3):
        scene.there.save(step)
    for name in ("best", "log.txt"):
        (scene.there.folder / name).write_text("hello")

    def refuse(path: str, target: Path) -> None:
        if path.endswith(("step-3", "best")):
            raise Rejected(f"{path} cannot be read")

    scene.away.during = refuse
    assert "step-3 cannot be read" in scene.finish().problem
    assert sorted(path.name for path in scene.here.iterdir()) == ["log.txt", "step-1", "step-2"]


def test_the_last_round_tries_again_while_the_host_cannot_be_reached_and_then_says_what_is_missing(
    scene: Scene,
) -> None:
    scene.there.save(1)
    scene.away.fails = [Unreachable("no route")] * 2
    assert scene.finish().copied == ["step-1"]
    scene.there.save(2)
    scene.away.fails = [Unreachable("no route")] * 4
    assert "copy is incomplete: no route" in scene.finish().problem
    assert scene.paused == [1.0, 2.0, 1.0, 2.0, 4.0]


def test_the_next_host_gets_the_newest_whole_one_and_all_that_is_no_checkpoint(
    scene: Scene,
) -> None:
    for step in (1, 2, 3):
        scene.there.save(step)
    (scene.there.folder / "log.txt").write_text("hello")
    scene.finish()
    os.truncate(scene.here / "step-3" / "model.safetensors", 20)
    scene.host("b")
    found = scene.restore()
    assert found.name == "step-2" and "skipped step-3" in found.words
    assert (
        steps(scene.there.folder) == [2] and (scene.there.folder / "log.txt").read_text() == "hello"
    )
    scene.there.save(3)
    assert scene.sync().copied == ["step-3"]
    assert 3 in scene.there.whole(scene.here)


def test_what_a_host_still_has_comes_home_before_a_training_goes_on_there(scene: Scene) -> None:
    scene.there.save(1)
    scene.sync()
    scene.there.save(2)
    scene.worker()
    assert scene.restore().name == "step-2"
    assert steps(scene.here) == [1, 2] and scene.told[-1].copied == ["step-2"]


def test_an_older_one_that_a_host_has_does_not_take_the_place_of_ours(scene: Scene) -> None:
    scene.there.save(2)
    scene.sync()
    old = scene.there.folder
    scene.host("b")
    scene.restore()
    for step in (2, 3):
        scene.there.save(step)
    scene.finish()
    mine = (scene.here / "step-2" / "model.safetensors").stat().st_mtime_ns
    (old / "step-2" / "optimizer.json").write_text(json.dumps({"stale": True}))
    scene.host("a")
    assert scene.restore().name == "step-3"
    assert (scene.here / "step-2" / "model.safetensors").stat().st_mtime_ns == mine
    assert (scene.here / "step-2" / "optimizer.json").read_text() == "{}"


def test_a_link_beside_the_checkpoints_does_not_travel(scene: Scene) -> None:
    scene.there.save(1)
    (scene.there.folder / "latest").symlink_to("step-1")
    (scene.there.folder / "step-9").symlink_to("step-1")
    assert scene.finish().copied == ["step-1"] and scene.finish().copied == []
    (scene.here / "step-9").symlink_to("step-1")
    scene.host("b")
    scene.restore()
    assert sorted(path.name for path in scene.there.folder.iterdir()) == ["step-1"]


def test_a_state_without_checkpoints_comes_home_as_a_whole(tmp_path: Path) -> None:
    scene = Scene(tmp_path, pattern=None, keep=None)
    (scene.there.folder / "study.json").write_text("[1]")
    assert scene.sync().copied == ["ckpt"]
    (scene.there.folder / "study.json").write_text("[1, 2")
    assert (
        scene.sync().copied == [] and (scene.here / "study.json").read_text() == "[1]"
    )  # half written: the one before stays
    assert scene.finish().copied == ["ckpt"] and (scene.here / "study.json").read_text() == "[1, 2"
    scene.host("b")
    scene.restore()
    assert (scene.there.folder / "study.json").read_text() == "[1, 2"
    (scene.there.folder / "study.json").write_text("[1, 2, 3]")
    scene.worker()
    scene.restore()
    assert (scene.here / "study.json").read_text() == "[1, 2, 3]"


def test_a_disk_there_with_no_room_for_the_next_one_keeps_only_the_newest_and_says_so(
    scene: Scene,
) -> None:
    scene.keep = 3
    scene.host("a")
    for step in (1, 2, 3):
        scene.there.save(step, size=10_000)
    scene.away.free, scene.away.total = 15_000, 200_000
    done = scene.sync()
    assert steps(scene.there.folder) == [1, 2, 3] and "nearly full" in done.warning
    scene.away.free = 5_000
    done = scene.sync()
    assert done.warning == ""
    assert steps(scene.here) == [1, 2, 3] and steps(scene.there.folder) == [3]
    done = scene.sync()
    assert "the next checkpoint requires about" in done.warning
    assert scene.sync().warning == ""  # once


def test_a_disk_that_is_too_small_for_the_state_is_said_before_anything_is_sent(
    scene: Scene,
) -> None:
    scene.there.save(1, size=10_000)
    scene.finish()
    scene.host("b").free = 5_000
    with pytest.raises(
        Exception, match=r"5.0 kB free, but the checkpoints of ckpt require 10\.\d kB"
    ):
        scene.restore()
    assert steps(scene.there.folder) == []


def test_checkpoints_without_numbers_are_distinguished_by_their_times(tmp_path: Path) -> None:
    scene = Scene(tmp_path, pattern="*.json", keep=1)
    for name, at in (("zebra.json", 1), ("last.json", 2), ("best.json", 3)):
        (scene.there.folder / name).write_text("{}")
        os.utime(scene.there.folder / name, (at, at))
    assert scene.sync().copied == ["best.json"]
    assert sorted(path.name for path in scene.here.iterdir()) == ["best.json"]
    scene.host("b")
    assert scene.restore().name == "best.json"


def test_rounds_come_as_often_as_the_recipe_says_and_one_that_fails_is_tried_at_the_next(
    scene: Scene,
) -> None:
    scene.there.save(1)
    scene.away.fails = [Unreachable("no route")]
    kept = StateFolder("ckpt", "ckpt", scene.here, str(scene.there.folder), PATTERN, 7.0, 2)

    async def three() -> None:
        turns = asyncio.Queue[float]()
        going = asyncio.Semaphore(0)

        async def pause(seconds: float) -> None:
            turns.put_nowait(seconds)
            if seconds > 3.0:  # not the look whether one is closed
                await going.acquire()

        keeper = CheckpointSync(scene.away, [kept], scene.told.append, pause=pause)
        task = asyncio.create_task(keeper.run())
        for _ in range(3):
            going.release()
        while len(scene.told) < 3:
            await asyncio.wait_for(turns.get(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(three())
    assert [bool(done.problem) for done in scene.told] == [True, False, False]
    assert steps(scene.here) == [1]


@pytest.mark.usefixtures("room")
def test_a_janitor_here_keeps_the_newest_and_never_counts_one_that_is_being_written(
    tmp_path: Path,
) -> None:
    here = Training(tmp_path / "ckpt")
    janitor = CheckpointPruner(here.folder, PATTERN, 1)
    here.save(1)
    here.begin(2)
    assert janitor.delete_old() == ([], "")
    here.save(2)
    assert janitor.delete_old()[0] == []
    assert janitor.delete_old()[0] == ["step-1"]
    assert steps(here.folder) == [2]
    assert CheckpointPruner(tmp_path / "none", PATTERN, 1).delete_old() == ([], "")


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("late", [1, 4])
def test_a_janitor_here_waits_with_a_checkpoint_that_appears_during_its_look(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Training(tmp_path / "ckpt")
    janitor = CheckpointPruner(here.folder, PATTERN, 1)
    for step in (2, 3):
        here.save(step)
    janitor.delete_old()
    listed = checkpoints.newest_first

    def list_then_save(folder: Path, pattern: str | None) -> Sequence[str]:
        names = listed(folder, pattern)
        here.save(late)
        return names

    monkeypatch.setattr(checkpoints, "newest_first", list_then_save)
    assert janitor.delete_old()[0] == ["step-2"]
    assert steps(here.folder) == sorted({late, 3})


@pytest.mark.parametrize(
    ("free", "total", "need", "words"),
    [
        (50, 100, 10, ""),
        (9, 100, 5, "nearly full"),
        (4, 1000, 5, "requires about 5 B"),
        (0, 0, 0, ""),
        (9, 0, 5, ""),
    ],
)
def test_a_disk_is_spoken_of_before_it_is_full(
    free: int, total: int, need: int, words: str
) -> None:
    level, said = disk_strain(free, total, need)
    assert words in said and bool(words) == bool(said) == bool(level)


STEPS = st.one_of(
    st.just(("save",)),
    st.just(("begin",)),
    st.just(("sync",)),
    st.just(("finish",)),
    st.just(("cut off",)),
    st.just(("host dies",)),
    st.just(("worker dies",)),
    st.just(("trainer deletes",)),
    st.tuples(
        st.sampled_from(["spoil there", "spoil here"]), st.sampled_from(["short", "header", "file"])
    ),
)


def spoil(path: Path, how: str) -> None:
    model = path / "model.safetensors"
    if how == "short":
        os.truncate(model, model.stat().st_size - 1)
    elif how == "header":
        data = bytearray(model.read_bytes())
        data[9] ^= 0xFF
        model.write_bytes(data)
    else:
        model.unlink()


@pytest.mark.longer
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(story=st.lists(STEPS, max_size=25), keep=st.integers(1, 3), known=st.booleans())
def test_whatever_happens_a_training_goes_on_from_the_newest_whole_checkpoint_that_was_there_when_we_last_looked(
    story: list[tuple[str, ...]], keep: int, known: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scene = Scene(tmp_path_factory.mktemp("story"), keep=keep, known=known, pattern="*-*")
    step, hosts = 0, 0
    safe: set[int] = set()  # whole here when we last looked, and not spoilt since

    def check(at_least: int = 0) -> None:
        nonlocal safe
        now = scene.there.whole(scene.here) if scene.here.is_dir() else set()
        assert max({at_least, *safe}) <= max(now, default=0)
        safe = now

    def resumed() -> int:
        found = scene.restore()
        check()
        assert (found.step or 0) == max(safe, default=0)
        assert not found.step or found.step in scene.there.whole(scene.there.folder)
        return found.step or 0

    for kind, *how in story:
        there = scene.there.whole(scene.there.folder)
        if kind == "save":
            scene.there.save(step := step + 1)
        elif kind == "begin" and (
            known or steps(scene.there.folder)[-1:] == sorted(there)[-1:] != []
        ):
            # Of the first one in a layout of its own nobody can say whether it is whole.
            scene.there.begin(step := step + 1)
            scene.while_paused = partial(scene.there.end, step)
        elif kind in ("sync", "finish"):
            done = scene.sync() if kind == "sync" else scene.finish()
            assert not done.problem
            check(max(there, default=0))
        elif kind == "cut off":
            scene.away.during = cut
            scene.sync()
            scene.away.during = lambda path, target: None
            check()
        elif kind == "host dies":
            scene.host(f"host-{(hosts := hosts + 1)}")
            step = max(step, resumed())
        elif kind == "worker dies":
            scene.worker()
        elif kind == "trainer deletes":
            for old in steps(scene.there.folder):
                if old < max(there, default=0):
                    shutil.rmtree(scene.there.folder / (scene.there.name % old))
        elif kind.startswith("spoil"):
            folder = scene.there.folder if kind == "spoil there" else scene.here
            if (found := scene.there.whole(folder)) and (known or how[0] != "file"):
                spoil(folder / (scene.there.name % max(found)), how[0])
                safe -= {max(found)} if folder == scene.here else set()
    scene.host("last")
    at = resumed()
    assert steps(scene.there.folder) == ([at] if at else [])


def cut(path: str, target: Path) -> None:
    raise Unreachable("cut")
