"""Whole runs over SSH, as somebody at a prompt meets them: fresh here afterwards, a host that is down, one that restarts, one that nobody knows."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers.receiver import Receiver
from tests.servers.sshd import Sshd, free_port
from tests.support import RECIPE, until
from tests.tools import needs

RECIPE_YAML = """\
recipe: t@1
summary: Two steps, the second waits at a gate
steps:
  count:
    run: wc -w < words.txt > count.txt
    deps: [words.txt]
    outputs: {count: count.txt}
  last:
    run: echo begun; read line < "$GATE"; cp count.txt last.txt
    deps: [count.txt]
    pass_env: [GATE]
    outputs: {last: last.txt}
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd") as server:
        yield server


class Place:
    """A workspace whose steps run over SSH."""

    def __init__(self, root: Path, sshd: Sshd) -> None:
        self.root, self.sshd = root, sshd
        root.mkdir()
        (root / "recipe.yaml").write_text(RECIPE_YAML)
        (root / "words.txt").write_text("a few words\n")
        os.mkfifo(root.parent / "gate")
        self.gate = os.open(root.parent / "gate", os.O_RDWR)
        self.settings([sshd.address])

    def settings(self, hosts: Sequence[str], known_hosts: str = "") -> None:
        table = {
            "hosts": hosts,
            "known_hosts": known_hosts or str(self.sshd.known_hosts),
            "identity": str(self.sshd.identity),
        }
        (self.root / "recipe.toml").write_text(
            "[drivers.ssh]\n"
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
        )

    def open(self) -> None:
        os.write(self.gate, b"\n")

    def begin(self, *words: str) -> subprocess.Popen[str]:
        env = {**os.environ, "HOME": str(self.root.parent), "GATE": str(self.root.parent / "gate")}
        return subprocess.Popen(
            [*RECIPE, "run", *words],
            cwd=self.root,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.begin(*words)
        try:
            said = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            said = process.communicate(timeout=60)[0]
        return process.returncode, said


@pytest.fixture
def place(tmp_path: Path, sshd: Sshd) -> Iterator[Place]:
    made = Place(tmp_path / "space", sshd)
    yield made
    os.close(made.gate)


def test_what_ran_over_ssh_is_fresh_here(place: Place) -> None:
    place.open()
    code, said = place.run("--driver", "ssh")
    assert code == 0, said
    assert "2 ran" in said
    assert (place.root / "last.txt").read_text() == "3\n"
    code, said = place.run()
    assert (code, "everything is fresh" in said) == (0, True), said


def test_a_step_in_a_sandbox_there_sees_its_own_files_alone(place: Place) -> None:
    needs("sandbox")
    (place.root / "recipe.yaml").write_text(
        "recipe: t@1\nsummary: A test\nsteps:\n"
        "  s:\n"
        "    sandbox: true\n"
        f"    run: 'cat words.txt > o.txt; ls $HOME /root {place.root} >> o.txt || echo hidden >> o.txt'\n"
        "    deps: [words.txt]\n"
        "    outputs: {o: o.txt}\n"
    )
    code, said = place.run("--driver", "ssh")
    assert code == 0, said
    lines = (place.root / "o.txt").read_text().splitlines()
    assert lines[0] == "a few words" and lines[-1] == "hidden" and "recipe.yaml" not in lines


def test_a_host_that_is_down_is_left_out(place: Place) -> None:
    place.settings([place.sshd.address, f"somebody@127.0.0.1:{free_port()}"])
    place.open()
    code, said = place.run("--driver", "ssh")
    assert code == 0, said
    assert "skipped host " in said


def test_a_host_that_answers_late_keeps_no_other_waiting_and_is_used_once_it_answers(
    place: Place, tmp_path: Path
) -> None:
    """It answers once a step runs on the other host, and that step waits for one that runs on it."""
    begun = tmp_path / "begun"
    begun.mkdir()
    with Sshd(tmp_path / "late") as late:
        late.trust((place.sshd.place / "client.pub").read_text())
        (late.home / "bin").mkdir()
        (late.home / "bin/df").write_text(
            f'#!/bin/sh\nuntil [ -n "$(ls {begun})" ]; do sleep 0.05; done; exec {shutil.which("df")} "$@"\n'
        )
        (late.home / "bin/df").chmod(0o755)
        (late.home / ".bashrc").write_text('PATH="$HOME/bin:$PATH"\n')
        known = tmp_path / "known"
        known.write_text(place.sshd.known_hosts.read_text() + late.known_hosts.read_text())
        place.settings([late.address, place.sshd.address], str(known))
        (place.root / "recipe.yaml").write_text(
            "recipe: t@1\nsummary: Two that wait for each other\nsteps:\n  s:\n    matrix: {n: [1, 2]}\n    run: |\n"
            f"      touch {begun}/{{{{ matrix.n }}}}\n"
            f"      until [ -e {begun}/1 ] && [ -e {begun}/2 ]; do sleep 0.05; done\n"
        )
        code, said = place.run("--driver", "ssh")
        assert code == 0 and f"ssh {late.address} answers now, and the run uses it, too" in said, (
            said
        )


def test_a_server_that_restarts_in_the_middle_of_a_run_changes_nothing(place: Place) -> None:
    with place.begin("--driver", "ssh", "-v") as process:
        journal = place.sshd.home / ".recipe-host" / "agent" / "journal"
        while not journal.exists() or journal.read_text().count('"began"') < 2:
            assert process.poll() is None
            select.select([], [], [], 0.02)
        place.sshd.stop()
        place.sshd.start()
        place.open()
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "0 failed" in said
    assert (place.root / "last.txt").read_text() == "3\n"


def test_a_machine_that_is_silent_raises_an_alert_and_another_when_it_answers(
    place: Place,
) -> None:
    with Receiver() as receiver:
        with (place.root / "recipe.toml").open("a") as file:
            file.write("[alerts]\nsilent_minutes = 0.001\n")
            file.write(f'[[webhooks]]\nurl = "{receiver.url}"\nevents = ["alert.machine_*"]\n')
        with place.begin("--driver", "ssh", "-v") as process:
            journal = place.sshd.home / ".recipe-host" / "agent" / "journal"
            until(lambda: journal.exists() and journal.read_text().count('"began"') >= 2)
            try:
                place.sshd.stop()
                receiver.wait(1)
                place.sshd.start()
                silent, answers = receiver.wait(2)
            finally:
                place.open()
                said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said
    assert [each.json["type"] for each in (silent, answers)] == [
        "alert.machine_silent",
        "alert.machine_answers",
    ]
    for each in (silent, answers):
        assert each.json["data"]["message"] in said, "people at the console hear it, too"
    assert " has not answered for " in silent.json["data"]["message"]
    assert " answers again, after " in answers.json["data"]["message"]


def test_an_unknown_host_starts_nothing(place: Place) -> None:
    place.settings([place.sshd.address], known_hosts="/nowhere")
    code, said = place.run("--driver", "ssh")
    assert code == 5
    assert "is not known here, and nothing was sent" in said
    assert "ssh-keyscan" in said
    assert list(place.sshd.home.iterdir()) == []


@contextlib.contextmanager
def disk_of(size: str, root: Path) -> Iterator[None]:
    """`root` is a small disk of its own."""
    root.mkdir(exist_ok=True)
    needs("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", root], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def test_a_disk_that_a_step_fills_there_is_called_that(place: Place) -> None:
    with disk_of("24m", place.sshd.home / ".recipe-host"):
        # The program says nothing about a disk, as many do not: the host is asked.
        (place.root / "recipe.yaml").write_text(
            "recipe: t@1\nsteps:\n  big: {run: 'head -c 50000000 /dev/zero >big.bin 2>/dev/null || exit 3', outputs: {o: big.bin}}\n"
        )
        code, said = place.run("--driver", "ssh")
        assert code == 1, said
        assert (
            "exit 3: no space left on a disk of ssh " in said
            and " bytes are free for attempts)" in said
        )
        (place.root / "recipe.yaml").write_text(
            "recipe: t@1\nsteps:\n  big: {run: 'echo small >big.bin; exit 3', outputs: {o: big.bin}}\n"
        )
        code, said = place.run("--driver", "ssh")
        assert code == 1 and "exit 3" in said and "no space" not in said, said


@pytest.mark.parametrize("size", ["4k", "28k", "40k"])
def test_a_disk_that_is_full_before_a_step_starts_there_is_called_that_with_what_to_do(
    place: Place, size: str
) -> None:
    with disk_of(size, place.sshd.home / ".recipe-host"):
        code, said = place.run("--driver", "ssh")
    assert code == 2, said
    assert "No space left on device" in said and ("free disk space" in said), said


def test_a_home_that_is_read_only_is_called_that_and_another_root_is_used_instead(
    place: Place,
) -> None:
    (place.root / "recipe.yaml").write_text(
        "recipe: t@1\nsteps:\n  one: {run: 'echo one > one.txt', outputs: {o: one.txt}}\n"
    )
    with disk_of("1m", place.sshd.home):
        subprocess.run(["mount", "-o", "remount,ro", place.sshd.home], check=True)
        code, said = place.run("--driver", "ssh")
        assert code == 2, said
        assert "Read-only file system" in said and "set `root` to a writable directory" in said, (
            said
        )
        with (place.root / "recipe.toml").open("a") as file:
            file.write(f"root = {json.dumps(str(place.root.parent / 'scratch'))}\n")
        code, said = place.run("--driver", "ssh")
        assert code == 0, said


def test_python_is_the_python_of_the_host_where_only_python3_is(place: Place) -> None:
    # Debian and Ubuntu have a python3 and no python; others have an older one of that name.
    folder = place.root.parent / "its own"
    folder.mkdir()
    (folder / "python3.x").write_text(f'#!/bin/sh\nMARK=named exec {sys.executable} "$@"\n')
    (folder / "python").write_text("#!/bin/sh\necho an old one >&2; exit 1\n")
    for name in ("python3.x", "python"):
        (folder / name).chmod(0o755)
    with (place.root / "recipe.toml").open("a") as file:
        file.write(f"python = {json.dumps(str(folder / 'python3.x'))}\n")
    (place.root / "recipe.yaml").write_text(
        "recipe: t@1\nsteps:\n  py: {run: [python, -c, \"import os, sys; open(sys.argv[1], 'w').write(os.environ['MARK'])\", '{{ outputs.o }}'], outputs: {o: o.txt}}\n"
    )
    code, said = place.run("--driver", "ssh")
    assert code == 0, said
    assert (place.root / "o.txt").read_text() == "named"


@pytest.mark.parametrize("own", [False, True], ids=["of the driver", "of one host"])
def test_what_setup_loads_is_there_for_our_program_and_for_steps_and_what_it_prints_and_reads_is_not_ours(
    place: Place, own: bool
) -> None:
    folder = place.root.parent / "a module"
    folder.mkdir()
    (folder / "python3.x").symlink_to(sys.executable)
    setup = [
        "echo loading $0; cat; no-such-module load python",
        f'export PATH=\'{folder}\':"$PATH" CUDA_HOME="it\'s loaded"',
    ]
    settings = (place.root / "recipe.toml").read_text()
    if own:
        (hosts,) = [line for line in settings.splitlines() if line.startswith("hosts")]
        address = json.loads(hosts.partition("=")[2])[0]
        settings = settings.replace(
            hosts,
            f'hosts = [{{host = {json.dumps(address)}, python = "python3.x", setup = {json.dumps(setup)}}}]',
        )
    else:
        settings += f'python = "python3.x"\nsetup = {json.dumps(setup)}\n'
    (place.root / "recipe.toml").write_text(settings)
    (place.root / "recipe.yaml").write_text(
        "recipe: t@1\nsteps:\n  a: {run: 'command -v python3.x > o.txt; echo \"$CUDA_HOME\" >> o.txt', outputs: {o: o.txt}}\n"
    )
    code, said = place.run("--driver", "ssh")
    assert code == 0 and "loading" not in said, said
    assert (place.root / "o.txt").read_text() == f"{folder}/python3.x\nit's loaded\n"


def test_a_program_that_a_host_has_not_is_reported_with_what_to_ask(place: Place) -> None:
    (place.root / "recipe.yaml").write_text("recipe: t@1\nsteps:\n  a: {run: [no-such-program]}\n")
    code, said = place.run("--driver", "ssh")
    assert (
        code == 1
        and "exit 127: program not found on ssh " in said
        and "run `recipe doctor --driver ssh` to see the installed programs" in said
    ), said
