"""`recipe pack`: a dataset has one name wherever it is, and a written pack is read by ordinary tools and checked to the byte."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import Corrupt, NotFound
from runner.interface.cli import main
from runner.interface.cli import pack as command
from runner.storage.content import pack, packed
from runner.storage.content.files import Changed, Content, Entry, entries, scan, tree_id
from tests.support import Space
from tests.tools import needs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about 64 kB, so that a small tree has several."""
    monkeypatch.setattr(pack.shards, "__defaults__", (64 << 10,))


def fill(root: Path, *, seed: int = 1, order: Callable[[list[int]], list[int]] = list) -> Path:
    """A tree of 120 files and all that a tree may hold, made in some order."""
    chance = Random(seed)
    contents = [chance.randbytes(chance.randrange(8000)) for _ in range(120)]
    root.mkdir(parents=True)
    for n in order(list(range(120))):
        path = root / f"{n % 7}/{n:03}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents[n])
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "0/twin.bin").write_bytes(contents[5])
    (root / "empty").mkdir()
    (root / "latest").symlink_to("3/003.bin")
    (root / "späß\n").write_text("odd")
    (root / os.fsdecode(b"\xff")).write_text("odder")
    return root


@pytest.fixture
def data(space: Space) -> Path:
    return fill(space.root / "data")


def done(space: Space, *words: str) -> tuple[int, str]:
    """In this process; the exit status, and what went to stdout."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(main, "_flush", lambda code: code)
        code = main.main(["pack", "-C", str(space.root), *words])
    return code, out.getvalue()


def named(root: Path) -> tuple[str, list[str], list[str]]:
    """The id of a tree, the names of its shards, and the SHA-256 of their bytes."""
    manifest = entries(root)
    cut = pack.shards(manifest)
    sums = [
        hashlib.sha256(b"".join(packed.tar_stream(str(root), shard.entries))).hexdigest()
        for shard in cut
    ]
    return tree_id(manifest), [shard.name for shard in cut], sums


# -- one name --------------------------------------------------------------------------------------------------------------------------------------


def _dates(root: Path) -> None:
    for n, path in enumerate(sorted(root.rglob("*"))):
        os.utime(path, (n, 10**9 + n), follow_symlinks=False)


def _links(root: Path) -> None:
    (root / "0/twin.bin").unlink()
    os.link(root / "5/005.bin", root / "0/twin.bin")


def _owners(root: Path) -> None:
    needs("root")
    for path in root.rglob("*"):
        os.chown(path, 1234, 4321, follow_symlinks=False)


def _modes(root: Path) -> None:
    for path in root.rglob("*.bin"):
        path.chmod(0o640)
    (root / "run.sh").chmod(0o711)


VARIANTS: dict[str, Callable[[Path], Any]] = {
    "dates": _dates,
    "hard links": _links,
    "owners": _owners,
    "modes": _modes,
}


@pytest.mark.parametrize("variant", [*VARIANTS, "order", "umask", "place", "workers"])
def test_a_pack_has_one_name_and_one_set_of_bytes(
    data: Path, tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = named(data)
    assert len(wanted[1]) > 4
    if variant in VARIANTS:
        VARIANTS[variant](data)
        assert named(data) == wanted
    elif variant == "order":
        assert named(fill(tmp_path / "other", order=lambda numbers: numbers[::-1])) == wanted
    elif variant == "umask":
        before = os.umask(0o077)
        try:
            assert named(fill(tmp_path / "other")) == wanted
        finally:
            os.umask(before)
    elif variant == "place":
        (tmp_path / "some where/else").mkdir(parents=True)
        (tmp_path / "link").symlink_to("some where/else")
        shutil.move(data, tmp_path / "some where/else/tree")
        assert named(tmp_path / "link/tree") == wanted
    else:
        for workers in (1, 5):
            monkeypatch.setattr(packed, "_WORKERS", workers)
            made = packed.write(
                str(data), Content(wanted[0]), entries(data), tmp_path / str(workers)
            )
            assert ([shard.name for shard in made.shards], made.sums) == wanted[1:]


SCRIPT = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
from runner.storage.content import files, pack, tar
manifest = files.entries(sys.argv[2])
cut = pack.shards(manifest, 64 << 10)
sums = [hashlib.sha256(b"".join(tar.tar_stream(sys.argv[2], shard.entries))).hexdigest() for shard in cut]
print(json.dumps([files.tree_id(manifest), [shard.name for shard in cut], sums]))
"""


def _pythons() -> list[str]:
    found = [sys.executable]
    for version in ("3.12", "3.13", "3.14"):
        there = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
        found += (
            [str(there[-1])]
            if there
            else [name]
            if (name := shutil.which(f"python{version}"))
            else []
        )
    return found


@pytest.mark.parametrize("python", _pythons(), ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}, {"LC_ALL": "tr_TR.UTF-8"}],
    ids=str,
)
def test_every_python_and_locale_gives_the_same_name(
    data: Path, python: str, locale: dict[str, str]
) -> None:
    environment = {"PATH": os.environ["PATH"], **locale}
    told = subprocess.run(
        [python, "-I", "-c", SCRIPT, str(ROOT), str(data)], env=environment, capture_output=True
    )
    assert told.returncode == 0, told.stderr.decode()
    assert tuple(json.loads(told.stdout)) == named(data)


def test_a_python_that_reads_names_otherwise_is_reported_with_how_not_to(data: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(data)], env=environment, capture_output=True
    )
    assert told.returncode and b"reads file names as ascii" in told.stderr


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            "content",
            "name",
            "executable",
            "target",
            "remove",
            "add",
            "empty",
            "kind",
            "date",
            "other mode",
        ]
    ),
    st.integers(0, 119),
)
def test_the_id_changes_with_what_is_content_and_with_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, edit: str, n: int
) -> None:
    root = _base(tmp_path_factory)
    path = root / f"{n % 7}/{n:03}.bin"
    before, was, mode = scan(root), path.read_bytes(), path.stat().st_mode
    beside = path.with_name("beside")
    if edit == "content":
        path.write_bytes(was + b"\0")
    elif edit == "name":
        path.rename(beside)
    elif edit == "executable":
        path.chmod(0o755)
    elif edit == "target":
        beside.symlink_to("a")
        middle = scan(root)
        beside.unlink()
        beside.symlink_to("b")
        assert scan(root) != middle
    elif edit == "remove":
        path.unlink()
    elif edit == "add":
        beside.touch()
    elif edit == "empty":
        beside.mkdir()
    elif edit == "kind":
        path.unlink()
        path.symlink_to("x")
    elif edit == "date":
        os.utime(path, (n, n))
    else:
        path.chmod(0o600)
    assert (scan(root) == before) == (edit in ("date", "other mode"))
    if beside.is_dir() and not beside.is_symlink():
        beside.rmdir()
    beside.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(was)
    path.chmod(mode)
    assert scan(root) == before


def _base(factory: pytest.TempPathFactory) -> Path:
    root = factory.getbasetemp() / "edited"
    return root if root.is_dir() else fill(root)


# -- the command -----------------------------------------------------------------------------------------------------------------------------------


def test_pack_says_what_a_dataset_is_called_and_how_it_travels(space: Space, data: Path) -> None:
    code, out = done(space, "data", "--json")
    told = json.loads(out)
    manifest = entries(data)
    assert (code, told["id"], told["files"], told["warnings"]) == (0, tree_id(manifest), 124, [])
    assert told["bytes"] == sum(entry.size for entry in manifest if entry.kind in "fx")
    assert [(shard["name"], shard["size"]) for shard in told["shards"]] == [
        (shard.name, shard.size) for shard in pack.shards(manifest)
    ]
    assert done(space, "data/", "-q") == (0, f"{told['id']}\n")
    code, out = done(space, str(data))
    assert out.startswith(f"{told['id']}\n124 files, ") and len(out.splitlines()) == 2 + len(
        told["shards"]
    )


def test_the_id_is_the_one_by_which_a_run_knows_the_dataset(space: Space, data: Path) -> None:
    shutil.rmtree(data)
    fill(data, seed=2)
    (data / os.fsdecode(b"\xff")).unlink()
    space.recipe(
        "inputs: {d: {type: dataset}}\nsteps: {a: {run: 'ls {{ inputs.d }} > o', outputs: {o: o}}}\n"
    )
    space.run({"d": "./data"})
    assert (
        space.root / ".recipe/manifests" / f"{done(space, 'data', '-q')[1][2:66]}.json"
    ).exists()


def test_a_file_is_packed_as_it_is(space: Space, data: Path) -> None:
    subprocess.run(["tar", "-czf", "data.tar.gz", "data"], cwd=space.root, check=True)
    code, out = done(space, "data.tar.gz", "--out", "packed")
    assert (code, out.split()[0]) == (0, scan(space.root / "data.tar.gz"))
    assert done(space, "--verify", "packed")[0] == 0
    assert done(space, "data.tar.gz", "--verify", "packed")[0] == 0
    assert done(space, "data/0/000.bin", "--verify", "packed")[0] == 1
    (space.root / "link").symlink_to("data.tar.gz")
    assert done(space, "link", "--out", "other") == (code, out.replace("packed", "other"))


def test_ordinary_tools_read_a_written_pack(space: Space, data: Path, tmp_path: Path) -> None:
    assert done(space, "data", "--out", "packed")[0] == 0
    folder = space.root / "packed"
    checked = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert (
        checked.returncode == 0
        and checked.stdout.count(": OK") == len(list(folder.glob("*.tar"))) > 4
    )
    (tmp_path / "out").mkdir()
    for tar in folder.glob("*.tar"):
        done_ = subprocess.run(["tar", "-xf", tar, "-C", tmp_path / "out"], capture_output=True)
        assert (done_.returncode, done_.stderr) == (0, b"")
    assert scan(tmp_path / "out") == scan(data)
    assert packed.read(folder).manifest == entries(data)


def test_packing_again_writes_only_what_changed_and_removes_what_is_over(
    space: Space, data: Path
) -> None:
    done(space, "data", "--out", "packed")
    before = {path.name: path.stat().st_ino for path in (space.root / "packed").glob("*.tar")}
    (data / "3/new").write_text("new")
    assert done(space, "data", "--out", "packed")[0] == 0
    after = {path.name: path.stat().st_ino for path in (space.root / "packed").glob("*.tar")}
    assert len(after.items() - before.items()) <= 2 and len(before.items() - after.items()) <= 2
    assert done(space, "--verify", "packed")[0] == 0


def test_what_a_kill_left_behind_is_no_pack_and_is_taken_up(space: Space, data: Path) -> None:
    done(space, "data", "--out", "packed")
    folder = space.root / "packed"
    first, second, *_ = sorted(folder.glob("*.tar"))
    (folder / "manifest.json").unlink()
    first.rename(f"{first}.part")
    second.write_bytes(second.read_bytes()[:-1] + b"x")
    assert done(space, "--verify", "packed")[0] == 3
    assert done(space, "data", "--out", "packed")[0] == 0
    assert done(space, "--verify", "packed")[0] == 0 and list(folder.glob("*.part")) == []


# -- checking --------------------------------------------------------------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_damage_of_a_written_pack_is_named(space: Space, data: Path) -> None:
    done(space, "data", "--out", "packed")
    folder = space.root / "packed"
    whole = packed.read(folder)
    first, second = whole.shards[:2]
    path = folder / f"{first.name}.tar"
    third = next(n for n, entry in enumerate(first.entries) if n > 1 and entry.size)
    place = sum(map(packed.member_size, first.entries[:third]))
    original = path.read_bytes()
    for at, word in (
        (place, first.entries[third].path),
        (place + 512, first.entries[third].path),
        (0, first.entries[0].path),
        (-1, "the end of the archive i"),
    ):
        _flip(path, at)
        assert [word in fault for fault in packed.faults(folder, whole)] == [True]
        path.write_bytes(original)
    path.write_bytes(original[:-512])
    assert len(list(packed.faults(folder, whole))) == 2  # its size, and its end
    path.write_bytes((folder / f"{second.name}.tar").read_bytes())
    assert len(list(packed.faults(folder, whole))) > 3
    path.unlink()
    code, out = done(space, "--verify", "packed")
    assert (code, out) == (1, f"{path.name}: missing\n")
    path.write_bytes(original)
    (folder / "SHA256SUMS").write_text("")
    assert json.loads(done(space, "--verify", "packed", "--json")[1])["faults"] == [
        "SHA256SUMS: the list of files differs from manifest.json"
    ]


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another content": lambda found: found.update(content="t:" + "0" * 64),
    "an entry less": lambda found: found["entries"].pop(),
    "an entry twice": lambda found: found["entries"].append(found["entries"][-1]),
    "another order": lambda found: found["entries"].reverse(),
    "a shard less": lambda found: found["shards"].pop(),
    "another shard size": lambda found: found["shards"][0].update(size=1),
    "a path outside": lambda found: found["entries"][0].__setitem__(0, "../x"),
    "a negative size": lambda found: found["entries"][0].__setitem__(2, -1),
    "a text for a size": lambda found: found["entries"][0].__setitem__(2, "1"),
    "an unknown kind": lambda found: found["entries"][0].__setitem__(1, "z"),
    "no entries": lambda found: found.pop("entries"),
    "a later format": lambda found: found.update(pack=2),
}


@pytest.mark.parametrize("edit", MANIFESTS)
def test_a_manifest_that_does_not_agree_with_itself_is_refused(
    space: Space, data: Path, edit: str
) -> None:
    done(space, "data", "--out", "packed")
    path = space.root / "packed/manifest.json"
    found = json.loads(path.read_text())
    MANIFESTS[edit](found)
    path.write_text(json.dumps(found))
    with pytest.raises(Corrupt):
        packed.read(path.parent)
    assert done(space, "--verify", "packed")[0] == 5


def test_what_differs_from_a_pack_or_an_id_is_named(space: Space, data: Path) -> None:
    id = done(space, "data", "--out", "packed")[1].split()[0]
    assert (
        done(space, "data", "--verify", id)
        == done(space, "data", "--verify", "packed")
        == (0, f"data is {id}\n")
    )
    (data / "0/000.bin").write_bytes(b"other")
    (data / "1/001.bin").unlink()
    (data / "1/002.bin").write_bytes(b"new")
    (data / "3/003.bin").chmod(0o755)
    (data / "latest").unlink()
    (data / "latest").symlink_to("run.sh")
    wanted = "changed  0/000.bin\nmissing  1/001.bin\nnew      1/002.bin\nmode     3/003.bin\nlink     latest\n"
    assert (
        done(space, "data", "--verify", "packed")
        == done(space, "data", "--verify", id)
        == (1, wanted)
    )
    told = json.loads(done(space, "data", "--verify", id, "--json")[1])
    assert (told["ok"], told["expected"], len(told["differences"])) == (False, id, 5)
    code, out, err = space.command("pack", "data", "--verify", "t:" + "0" * 64)
    assert (code, out) == (1, "") and "is not stored here" in err


def test_a_digest_that_is_remembered_wrongly_is_found_by_verify(space: Space, data: Path) -> None:
    id = done(space, "data", "--out", "packed", "-q")[1].strip()
    path = data / "0/000.bin"
    was = path.stat()
    _flip(path, 0)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert done(space, "data", "--verify", id)[0] == 1


# -- what goes wrong -------------------------------------------------------------------------------------------------------------------------------


def test_a_dataset_that_changes_meanwhile_is_packed_again_and_named_when_it_goes_on(
    space: Space, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, left = packed.write, [2]

    def moving(*args: Any) -> object:
        if left[0]:
            left[0] -= 1
            (data / "0/000.bin").write_text("x" * left[0])
        return real(*args)

    monkeypatch.setattr(packed, "write", moving)
    code, out = done(space, "data", "--out", "packed")
    assert (code, out.split()[0]) == (0, scan(data))
    assert (
        capsys.readouterr().err.count(
            "0/000.bin: the file changed while recipe read it; trying again"
        )
        == 2
    )
    assert done(space, "--verify", "packed")[0] == 0
    left[0] = 100
    assert done(space, "data", "--out", "other")[0] == 2
    assert (
        left[0] == 100 - command.TRIES and "0/000.bin: the file changed" in capsys.readouterr().err
    )
    assert not (space.root / "other/manifest.json").exists()


def test_what_looks_like_a_key_and_names_that_collide_are_reported(space: Space) -> None:
    for name in (
        ".env",
        "sub/.git/HEAD",
        "sub/.git/config",
        "deep/id_rsa",
        "my.pem",
        ".env.example",
        "public.txt",
        "A/b",
        "a/c",
        "É",
        "é",
        "keys.txt",
    ):
        space.write(f"data/{name}", name)
    warnings = json.loads(done(space, "data", "--json")[1])["warnings"]
    assert [line.split("'")[1] for line in warnings if "looks like a secret" in line] == [
        ".env",
        "deep/id_rsa",
        "my.pem",
        "sub/.git",
    ]
    assert [line.split("'")[1::2] for line in warnings if "same name" in line] == [
        ["A", "a"],
        ["É", "é"],
    ]
    code, _, err = space.command("pack", "data", "-q")
    assert code == 0 and err.count("warning") == 6
    assert space.command("pack", "data", "-qq")[2] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no path given"),
        (("nothing",), "nothing does not exist"),
        (("data", "--out", "data/packed"), "is inside the directory to pack"),
        (("data", "--out", "other"), "contains other files: mine"),
        (("data", "--out", "other/mine"), "is not a directory"),
        ((".",), "which changes while recipe runs"),
        (("--verify", "data"), "is not a pack"),
        (("--verify", "none"), "is not a pack"),
        (("data", "--verify", "packed", "--out", "x"), "--verify and --out exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    space: Space, data: Path, words: tuple[str, ...], message: str
) -> None:
    space.write("other/mine", "precious")
    code, out, err = space.command("pack", *words)
    assert (code, out) == (3, "")
    assert message in err and "fix: " in err
    assert space.read("other/mine") == "precious" and not (data / "packed").exists()


def test_a_file_that_cannot_be_read_is_named(
    space: Space, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.open

    def refusing(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("4/004.bin"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert done(space, "data")[0] == 2
    assert "4/004.bin: cannot be read: Permission denied" in capsys.readouterr().err
    os.mkfifo(data / "pipe")
    assert done(space, "data")[0] == 2
    assert "data/pipe: a named pipe" in capsys.readouterr().err


def test_on_a_terminal_a_line_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock = iter([0.0, 0.05, 10.0, 20.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with command.ProgressBar(argparse.Namespace(quiet=0), "hashing") as told:
        told(10**6, 10**10)
        told(10**9, 10**10)
        told(5 * 10**9, 10**10)
    assert "\rhashing 1.0 GB of 10.0 GB, 100 MB/s, 90 s left" in terminal.getvalue()
    assert terminal.getvalue().count("hashing") == 2 and terminal.getvalue().endswith("\r\x1b[K")


def test_an_empty_directory_is_a_pack_without_shards(space: Space) -> None:
    (space.root / "data").mkdir()
    assert done(space, "data", "--out", "packed")[0] == 0
    assert done(space, "--verify", "packed")[0] == 0
    assert sorted(os.listdir(space.root / "packed")) == ["SHA256SUMS", "manifest.json"]


def test_every_difference_has_its_word() -> None:
    before = [Entry("a", "f", 1, "1"), Entry("b", "l", 1, "x"), Entry("c", "d", 0, "")]
    now = [
        Entry("a", "x", 1, "1"),
        Entry("b", "f", 1, "2"),
        Entry("c", "d", 0, ""),
        Entry("d", "d", 0, ""),
    ]
    assert packed.differences(before, now) == [("mode", "a"), ("changed", "b"), ("new", "d")]
    assert packed.differences(now, now) == []
    assert issubclass(Changed, Exception) and issubclass(NotFound, Exception)
