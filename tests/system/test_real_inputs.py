"""What a step may rely on: its inputs are real folders and files, which it cannot spoil."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import RECIPE, Space
from tests.tools import needs, small_disk

NOBODY = 65534
SOMEBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    # root's own Python may lie where nobody else can read; what can be written stays as it is for them
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
"""What begins the command of somebody who is not root."""
BIG = 100_000
"""Bytes of a file that is too large for a copy of its own."""


class Person(Space):
    """A workspace and who works in it."""

    def __init__(self, root: Path, *, privileged: bool) -> None:
        super().__init__(root)
        self.privileged = privileged

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        before: tuple[str, ...] = ()
        if os.geteuid() == 0 and not self.privileged:
            for path in (self.root, *self.root.rglob("*")):
                if not path.is_symlink() and path.stat().st_uid != NOBODY:
                    os.chown(path, NOBODY, NOBODY)
            before = SOMEBODY
        env = os.environ | {"HOME": str(self.root), "RECIPE_LEDGER": f"{self.root}/ledger.db"}
        return subprocess.Popen(
            [*before, *RECIPE, *words],
            cwd=self.root,
            env=env | {"TMPDIR": "/tmp"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(params=["root", "nobody"])
def person(request: pytest.FixtureRequest) -> Iterator[Person]:
    """Root, where the tests are run by root, and somebody who is not."""
    if request.param == "root":
        needs("root")
    elif os.geteuid() == 0:
        needs("setpriv")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path is closed to others
        os.chmod(folder, 0o755)
        yield Person(Path(folder, "space"), privileged=request.param == "root")


def state_of(top: Path) -> dict[str, tuple[str, int, int, int]]:
    """The digest, mode, mtime and ctime of every file."""
    found = {}
    for path in sorted(top.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        seen = path.lstat()
        found[str(path)] = digest, seen.st_mode, seen.st_mtime_ns, seen.st_ctime_ns
    return found


def dataset(space: Space, name: str = "ds") -> Path:
    """A data set of small and large files in folders, with a program, a link and an empty folder."""
    space.write(f"{name}/a.jpg", "a")
    space.write(f"{name}/sub/b.jpg", "b")
    space.write(f"{name}/sub/line\nend.txt", "odd")
    space.write(f"{name}/big.bin", "x" * BIG)
    space.write(f"{name}/tool", "#!/bin/sh\necho works\n").chmod(0o755)
    (space.root / name / "empty").mkdir()
    (space.root / name / "l").symlink_to("sub/b.jpg")
    return space.root / name


LOOK = """
import json, mmap, os, shutil, stat, subprocess, sys
top, model = sys.argv[1:]
def sh(text): return subprocess.run(text, shell=True, check=True, capture_output=True, text=True).stdout
found = {}
found["files"] = len(sh(f"find {top} -type f -print0").split("\\0")) - 1
found["links"] = sorted(os.path.relpath(p, top) for p in sh(f"find {top} -type l").split())
found["tool"] = sh(f"{top}/tool")
found["bytes"] = sum(int(n) for n in sh(f"find {top} {model} -type f -printf '%s\\n'").split())
shutil.copytree(top, "copy", symlinks=True)
sh(f"cp -r {top} cp; tar cf o.tar {top} {model}; zip -qry o.zip {top} {model}")
sh("rsync -a " + top + "/ rs" if shutil.which("rsync") else f"cp -r {top} rs")
for each in ("copy", "cp", "rs"):
    sh(f"diff -r {top} {each}")
if shutil.which("git"):
    env = "GIT_CONFIG_GLOBAL=/dev/null git -c safe.directory='*' -C repo"
    sh(f"mkdir repo; cp -r {top} repo/ds; {env} init -q; {env} add .")
    found["git"] = sorted({line.split()[0] for line in sh(f"{env} ls-files -s").splitlines()})
with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as seen:
    found["mapped"] = len(seen)
found["kinds"] = [stat.S_ISREG(os.lstat(model).st_mode), stat.S_ISDIR(os.lstat(top).st_mode)]
found["empty"] = os.listdir(f"{top}/empty")
json.dump(found, open("found.json", "w"))
"""


@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_tar_find_cp_zip_rsync_git_and_mmap_see_the_data(space: Space, driver: str) -> None:
    needs("zip")
    top = dataset(space)
    space.write("look.py", LOOK)
    space.recipe(
        {
            "steps": {
                "up": {
                    "run": f"head -c {BIG} /dev/zero > m.bin; cp -r ds out",
                    "deps": ["ds/"],
                    "outputs": {"m": "m.bin", "o": "out/"},
                },
                "own": {
                    "run": [sys.executable, "look.py", "ds", "{{ steps.up.m }}"],
                    "code": ["look.py"],
                    "deps": ["ds/"],
                    "outputs": {"f": "found.json", "t": "o.tar", "z": "o.zip"},
                },
                "made": {
                    "run": [
                        "sh",
                        "-c",
                        'cd "$1" && find . -type f -print0 | tr -cd "\\0" | wc -c > "$OLDPWD/n.txt"; find . -type l | wc -l >> "$OLDPWD/n.txt"',
                        "-",
                        "{{ steps.up.o }}/ds",
                    ],
                    "outputs": {"n": "n.txt"},
                },
            }
        }
    )
    code, _, said = space.command("run", "--driver", driver)
    assert code == 0, said
    found = json.loads(space.read("found.json"))
    assert found == {
        "files": 5,
        "links": ["l"],
        "tool": "works\n",
        "bytes": sum(p.stat().st_size for p in top.rglob("*") if p.is_file() and not p.is_symlink())
        + BIG,
        "git": ["100644", "100755", "120000"],
        "mapped": BIG,
        "kinds": [True, True],
        "empty": [],
    }
    with tarfile.open(space.root / "o.tar") as tar:
        sizes = {each.name: each.size for each in tar.getmembers() if each.isreg()}
        assert sizes["ds/big.bin"] == BIG and sizes["m.bin"] == BIG and len(sizes) == 6
    listed = subprocess.run(
        ["unzip", "-l", space.root / "o.zip"], capture_output=True, text=True, check=False
    )
    assert listed.stdout == "" or str(BIG) in listed.stdout
    assert space.read("n.txt").split() == ["5", "1"]
    assert space.run() == []


IN_PLACE = {
    "write": "echo changed > ds/a.jpg",
    "append": "echo more >> ds/big.bin",
    "truncate": "truncate -s 1 ds/big.bin",
    "single": "echo more >> single.txt",
    "mmap": f"{sys.executable} -c \"import mmap; f = open('ds/big.bin', 'r+b'); mmap.mmap(f.fileno(), 0)[0] = 0\"",
}
BESIDE = {
    "sed": "sed -i s/a/b/ ds/a.jpg",
    "mv": "echo new > n; mv n ds/a.jpg",
    "rm": "rm -rf ds/sub ds/big.bin",
    "cache": "echo c > ds/labels.cache; test -s ds/labels.cache; mkdir ds/more",
    "chmod": "chmod -R u+w,go-r ds; chmod 755 ds/tool",
    "all": "rm -rf ds",
    "link": "cp -al ds there; ln ds/big.bin b",
    "copy": "cp -r --no-preserve=mode ds c; echo more >> c/big.bin; install -m 644 ds/a.jpg i; echo more >> i",
}


def test_no_step_changes_the_original(person: Person) -> None:
    top = dataset(person)
    person.write("single.txt", "s")
    steps = {
        name: {
            "run": f"{line} || exit 7; echo over; touch {name}",
            "deps": ["ds/", "single.txt"],
            "outputs": {"o": name},
        }
        for name, line in (IN_PLACE | BESIDE).items()
    }
    person.recipe({"steps": steps})
    person.command("validate")  # the workspace is whose it shall be
    before = state_of(top)
    code, _, said = person.command("run", "-k", "-j", "1")
    assert code == 1 and state_of(top) == before, said
    assert {name for name in steps if (person.root / name).exists()} == set(BESIDE), said
    for name in IN_PLACE:
        log = person.command("logs", f"last/{name}")[1]
        if person.privileged:
            changed = "single.txt" if name == "single" else "ds"
            assert "over" in log and f"the step changed its input {changed}" in said
        else:
            assert "over" not in log and "ermission denied" in log
    if not person.privileged:
        assert "--no-preserve=mode" in said
    ran = person.command("run", "-k", "-j", "1")[2]
    assert f"{len(BESIDE)} fresh" in ran, "what was made beside an input is no part of a key"


@pytest.mark.parametrize("how", ["cp -r ds out", "cp -p ds/big.bin out", "copytree"])
def test_a_copy_of_an_input_can_be_written_to_where_the_step_is_told_how(
    person: Person, how: str
) -> None:
    """Root may at once; anybody else after a chmod, and hears that."""
    if how == "copytree":
        how = f"{sys.executable} -c \"import shutil; shutil.copytree('ds', 'out/ds')\""
    dataset(person)
    find = "f=$(find out -name big.bin)"
    step = {"deps": ["ds/"], "outputs": {"o": "out/"}}
    person.recipe({"steps": {"s": {**step, "run": f'{how}; {find}; echo more >> "$f"'}}})
    code, _, said = person.command("run")
    if not person.privileged:
        assert code == 1 and "chmod -R u+w" in said
        step["run"] = f'{how}; chmod -R u+w out; {find}; echo more >> "$f"'
        person.recipe({"steps": {"s": step}})
        code, _, said = person.command("run")
    assert code == 0, said
    (made,) = (person.root / "out").rglob("big.bin")
    assert made.stat().st_size == BIG + 5
    next_step = 'cp -r --no-preserve=mode {{ steps.s.o }} two; f=$(find two -name big.bin); echo more >> "$f"'
    person.recipe(
        {
            "steps": {
                "s": step | {"run": step.get("run", f'{how}; {find}; echo more >> "$f"')},
                "t": {"run": next_step, "outputs": {"o": "two/"}},
            }
        }
    )
    code, _, said = person.command("run")
    assert code == 0, said
    (made,) = (person.root / "two").rglob("big.bin")
    assert made.stat().st_size == BIG + 10


OVERLAID = """
set -e
for d in ds old; do
    test -z "$(find $d -type l ! -name l)"
    cp -r $d out-$d; cp -p big out-$d/copy
    for f in $(find out-$d -type f ! -name '*end*' ! -name 'line*'); do echo more >> $f; done
    echo more >> $d/a.jpg; rm $d/big.bin; mv $d/sub $d/moved; echo c > $d/labels.cache; mkdir -p $d/empty/new
done
if echo more >> big; then exit 9; fi
echo more >> small; mkdir -p out; mv out-* out
"""


def overlaid(space: Space) -> Path:
    """A workspace that asks for overlays, with a data set too large for a copy."""
    needs("mount")
    top = dataset(space)
    os.truncate(top / "big.bin", 65 << 20)
    shutil.copy(top / "big.bin", space.root / "big")
    space.write("small", "s")
    space.write("recipe.toml", 'inputs = "overlay"')
    return top


def test_with_overlays_a_step_may_change_its_inputs_and_copies_of_them(person: Person) -> None:
    top = overlaid(person)
    made = f"mkdir -p old/sub; head -c {BIG} /dev/zero > old/big.bin; echo b > old/a.jpg; touch old/sub/b"
    step = {"run": OVERLAID, "deps": ["ds/", "big", "small", "old/"], "outputs": {"o": "out/"}}
    person.recipe({"steps": {"up": {"run": made, "outputs": {"o": "old/"}}, "s": step}})
    person.command("validate")  # the workspace is whose it shall be
    before = state_of(top)
    code, _, said = person.command("run")
    assert code == 0 and "symbolic" not in said, said
    assert state_of(top) == before and (person.root / "old/big.bin").stat().st_size == BIG
    copied = person.root / "out/out-ds/copy"
    assert (
        copied.stat().st_size == (65 << 20) + 5 and person.read("out/out-old/a.jpg") == "b\nmore\n"
    )
    assert not list((person.root / ".recipe/attempts").iterdir())
    assert "everything is fresh" in person.command("run")[2]


def test_overlays_that_a_machine_refuses_are_said_once(space: Space) -> None:
    needs("unshare")
    overlaid(space)
    run = "cp -r ds {{ outputs.o }}"
    steps = {n: {"run": run, "deps": ["ds/", "small"], "outputs": {"o": n + "/"}} for n in "ab"}
    space.recipe({"steps": steps})
    limited = 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec "$@"'
    words = ["unshare", "-Ur", "sh", "-c", limited, "-", *RECIPE, "run"]
    ran = subprocess.run(words, cwd=space.root, capture_output=True, text=True, check=False)
    assert (
        "is not supported on this machine (cannot create a namespace: the limit on namespaces is reached)"
        in ran.stderr
    )
    assert (
        ran.stderr.count("is not supported on this machine") == 1
        and "is staged as symbolic links" in ran.stderr
    )


def test_an_overlay_of_a_step_whose_worker_was_killed_goes_with_the_next_run(space: Space) -> None:
    overlaid(space)
    os.mkfifo(space.root / "gate")
    run = (
        f"echo c > ds/cache; echo > {space.root}/began; read go < {space.root}/gate; cp ds/a.jpg o"
    )
    space.recipe({"steps": {"s": {"run": run, "deps": ["ds/"], "outputs": {"o": "o"}}}})
    worker = space.start("run")
    while not (space.root / "began").exists():
        assert worker.poll() is None
    worker.kill()
    worker.wait()
    second = space.start("run")
    (space.root / "gate").write_text("go\n")
    said = second.communicate(timeout=60)[1]
    assert second.returncode == 0 and space.read("o") == "a", said
    assert not list((space.root / ".recipe/attempts").iterdir())


def test_a_step_reads_the_bytes_of_its_key_whatever_happens_to_the_original(space: Space) -> None:
    top = dataset(space)
    space.recipe(
        {
            "steps": {
                "first": {"run": "cat ds/a.jpg > one", "deps": ["ds/"], "outputs": {"o": "one"}},
                "second": {
                    "run": f"cat one > /dev/null; echo edited > {top}/a.jpg; cat ds/a.jpg > two",
                    "deps": ["ds/", "one"],
                    "outputs": {"o": "two"},
                },
            }
        }
    )
    assert space.run() == ["first", "second"]
    assert space.read("two") == "a" and not any(event.data.get("note") for event in space.events)
    (top / "a.jpg").write_text("a")
    assert space.run() == []


def test_an_input_on_another_file_system_is_copied_once(space: Space, tmp_path: Path) -> None:
    with small_disk(tmp_path / "far", "32m") as far:
        shutil.copytree(dataset(space), far / "ds", symlinks=True)
        shutil.rmtree(space.root / "ds")
        (space.root / "ds").symlink_to(far / "ds")
        run = "find ds -type f -printf '%i\\n' | sort > {{ outputs.o }}"
        space.recipe(
            {"steps": {name: {"run": run, "deps": ["ds"], "outputs": {"o": name}} for name in "ab"}}
        )
        assert sorted(space.run()) == ["a", "b"]
        assert space.read("a") == space.read("b") and len(space.read("a").split()) == 5


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_large_input_that_cannot_be_cloned_is_a_folder_of_links_and_that_is_said_once(
    space: Space, what: str
) -> None:
    top = dataset(space)
    os.truncate(top / "big.bin", 65 << 20)
    path = "ds" if what == "folder" else "ds/big.bin"
    run = f"find {path} -type l | wc -l > {{{{ outputs.o }}}}; du -Lb {path}"
    steps = {n: {"run": run, "deps": [path], "outputs": {"o": n}} for n in "ab"}
    space.recipe({"steps": steps})
    code, _, said = space.command("run")
    if space.read("a").strip() in ("0", "1") and what == "folder":
        pytest.skip("this file system can clone files")
    assert (
        code == 0 and said.count("is staged as symbolic links because larger than 64 MiB") == 1
    ), said
    assert "Use `tar -h` and `find -L`" in said
    assert space.read("a") == space.read("b") == ("7\n" if what == "folder" else "1\n")


def test_links_to_a_large_input_are_made_once_and_no_step_can_change_them(space: Space) -> None:
    top = dataset(space)
    os.truncate(top / "big.bin", 65 << 20)
    look = "find ds -type l -links +1 | wc -l > {{ outputs.o }}; rm -r ds/sub ds/a.jpg; echo c > ds/new"
    steps = {n: {"run": look, "deps": ["ds/"], "outputs": {"o": n}} for n in "ab"}
    space.recipe({"steps": steps})
    code, _, said = space.command("run", "-j", "1")
    if "staged as symbolic links" not in said:
        pytest.skip("this file system can clone files")
    assert code == 0 and space.read("a") == space.read("b") == "7\n", said
    assert (top / "a.jpg").stat().st_nlink == 1, "never to the caller's own"
    gone = json.loads(space.command("gc", "--json", "--keep-days", "0")[1])
    assert gone["counts"]["input"] == 1, "the folder of links is a stored input"


@pytest.mark.proof
@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_a_hundred_thousand_files_of_equal_content_are_an_input_as_any_other(
    space: Space, driver: str
) -> None:
    """ext4 allows 65,000 names of a file."""
    made = "import os\nfor n in range(100_000):\n    f = f'ds/{n // 1000}/{n}'\n"
    made += "    os.makedirs(os.path.dirname(f), exist_ok=True)\n    open(f, 'w').write('equal')\n"
    look = "find {{ steps.up.o }} -type f -size -2 | wc -l > o; tar cf t.tar {{ steps.up.o }}"
    space.recipe(
        {
            "steps": {
                "up": {"run": [sys.executable, "-c", made], "outputs": {"o": "ds/"}},
                "s": {"run": look, "outputs": {"o": "o", "t": "t.tar"}},
            }
        }
    )
    running = space.start("run", "--driver", driver)
    said = running.communicate(timeout=900)[1]
    assert running.returncode == 0 and space.read("o") == "100000\n", said
    assert driver != "local" or "it has 100,000 files" in said
    with tarfile.open(space.root / "t.tar") as tar:
        assert sum((each.isreg() and each.size == 5) or each.islnk() for each in tar) == 100_000


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_large_input_is_cloned_where_the_file_system_can(
    space: Space, tmp_path: Path, kind: str
) -> None:
    needs("mount")
    make = needs(f"mkfs.{kind}")
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([make, "-q", image], check=True, capture_output=True)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no loop device may be mounted here")
    try:
        far = Space(disk / "space")
        top = dataset(far)
        (top / "big.bin").write_bytes(os.urandom(70 << 20))
        subprocess.run(["sync", "-f", disk], check=True)
        used = os.statvfs(disk).f_bfree
        before = state_of(top)
        far.recipe(
            "steps: {s: {run: 'find ds -type f | wc -l > o; sha256sum < ds/big.bin >> o', deps: [ds/], outputs: {o: o}}}"
        )
        assert far.run() == ["s"]
        assert far.read("o").split()[:2] == [
            "6",  # the name with a line end counts twice
            hashlib.sha256((top / "big.bin").read_bytes()).hexdigest(),
        ]
        assert state_of(top) == before
        taken = (used - os.statvfs(disk).f_bfree) * os.statvfs(disk).f_frsize
        assert taken < 20 << 20, "its bytes are shared"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_an_input_that_finds_no_room_in_the_workspace_is_given_as_links(
    tmp_path: Path, space: Space
) -> None:
    top = dataset(space)
    (top / "big.bin").write_bytes(os.urandom(24 << 20))
    with small_disk(tmp_path / "small", "16m") as small:
        near = Space(small / "space")
        (near.root / "ds").symlink_to(top)
        near.recipe("steps: {s: {run: 'cat ds/big.bin | wc -c > o', deps: [ds], outputs: {o: o}}}")
        code, _, said = near.command("run")
        assert code == 0 and near.read("o").strip() == str(24 << 20), said
        assert "the disk of the workspace is full" in said
        assert not list((near.root / ".recipe/partial").iterdir())


def test_stored_inputs_are_counted_by_gc_and_stay_while_they_are_used(space: Space) -> None:
    dataset(space)
    space.recipe("steps: {s: {run: 'cp ds/a.jpg o', deps: [ds/], outputs: {o: o}}}")
    space.run()

    def gc(*words: str) -> dict[str, Any]:
        code, said, _ = space.command("gc", "--json", *words)
        assert code == 0
        return dict(json.loads(said))

    assert gc("-n")["inputs"] == [], "it was given to a step a moment ago"
    told = gc("--keep-days", "0")
    assert len(told["inputs"]) == told["counts"]["input"] == 1 and told["objects"] == []
    assert told["bytes"] >= BIG and not list((space.root / ".recipe/inputs").iterdir())
    assert space.run() == [] and space.run(settings=None) == []
    (space.root / "o").unlink()
    space.recipe("steps: {s: {run: 'cp ds/a.jpg o; true', deps: [ds/], outputs: {o: o}}}")
    assert space.run() == ["s"], "and is stored again"


def test_an_input_in_use_survives_gc(space: Space) -> None:
    dataset(space)
    step = "deps: [ds/], outputs: {o: o}"
    space.recipe(f"steps: {{s: {{run: 'cp ds/a.jpg o', {step}}}}}")
    space.run()
    os.mkfifo(space.root / "gate")
    run = f"echo > {space.root}/began; read go < {space.root}/gate; cp ds/sub/b.jpg o"
    space.recipe(f"steps: {{s: {{run: '{run}', {step}}}}}")
    worker = space.start("run")
    while not (space.root / "began").exists():
        assert worker.poll() is None
    assert json.loads(space.command("gc", "--json", "--keep-days", "0")[1])["inputs"] == []
    (space.root / "gate").write_text("go\n")
    assert worker.wait(timeout=60) == 0 and space.read("o") == "b"


def test_a_failed_step_left_nothing_of_its_own_though_its_inputs_are_there(space: Space) -> None:
    dataset(space)
    space.recipe("steps: {s: {run: 'exit 1', deps: [ds/]}}")
    assert "kept for debugging" not in space.command("run")[2]
