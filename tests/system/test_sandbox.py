"""Promise: a step with `sandbox` sees only its declared files, its programs and the system, and behaves as any other step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.agent import sandbox
from runner.errors import CannotRun, Invalid
from runner.settings import load
from tests.support import Space, until
from tests.tools import needs


@pytest.fixture(autouse=True)
def made_here() -> None:
    needs("sandbox")


def recipe(space: Space, run: str, more: str = "outputs: {made: made.txt}", top: str = "") -> None:
    body = "".join(f"      {line}\n" for line in run.strip().splitlines())
    space.recipe(f"{top}steps:\n  s:\n    sandbox: true\n    {more}\n    run: |\n{body}")


def made(space: Space) -> str:
    return (space.root / "made.txt").read_text()


def test_only_declared_files_are_seen(space: Space) -> None:
    space.write("data/declared.txt", "d")
    space.write("other.txt", "o")
    recipe(
        space,
        f"cat data/declared.txt > made.txt; ls {space.root} >> made.txt; ls {space.root}/data >> made.txt || :",
        "deps: [data]\n    outputs: {made: made.txt}",
    )
    assert space.run() == ["s"]
    assert "other" not in made(space) and "recipe.yaml" not in made(space)


def test_an_undeclared_path_fails_with_a_hint(space: Space) -> None:
    outside = space.root.parent / "outside.txt"
    outside.write_text("o")
    recipe(space, f"cat {outside} > made.txt")
    code, _, said = space.command("run")
    assert code == 1 and f"{outside} is not declared; a sandboxed step sees only" in said, said


def test_a_declared_link_to_a_large_file_elsewhere_is_seen(space: Space) -> None:
    far = space.root.parent / "far"
    far.mkdir()
    (far / "rows.txt").write_text("r" * (1 << 20))
    (space.root / "rows.txt").symlink_to(far / "rows.txt")
    recipe(space, "wc -c < rows.txt > made.txt", "deps: [rows.txt]\n    outputs: {made: made.txt}")
    assert space.run() == ["s"] and int(made(space)) == 1 << 20


def test_there_is_no_network_unless_it_is_asked_for(space: Space) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        run = f'python3 -c "{dial}" 2> /dev/null && echo open > made.txt || echo closed > made.txt'
        recipe(space, run)
        assert space.run() == ["s"] and made(space) == "closed\n"
        text = space.read("recipe.yaml").replace("sandbox: true", "sandbox: {network: true}")
        space.write("recipe.yaml", text)
        assert space.run() == []  # it is no part of the key
        space.command("run", "-B")
        assert made(space) == "open\n"


def test_programs_of_a_step_speak_over_the_loopback(space: Space) -> None:
    words = (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        " c = socket.create_connection(s.getsockname()); s.accept()[0].send(b'hi');"
        " open('made.txt', 'wb').write(c.recv(2))"
    )
    recipe(space, f'python3 -c "{words}"')
    assert space.run() == ["s"] and made(space) == "hi"


def test_temporary_files_and_home_are_its_own(space: Space) -> None:
    recipe(space, "ls $HOME > made.txt; touch $HOME/x /tmp/of-the-step /dev/shm/of-the-step")
    assert space.run() == ["s"] and made(space) == ""
    assert not os.path.exists("/tmp/of-the-step") and not os.path.exists("/dev/shm/of-the-step")
    assert not list((space.root / ".recipe/attempts").glob("*.box"))


def test_it_sees_its_own_processes_alone_and_no_device_of_a_disk(space: Space) -> None:
    recipe(space, "ls -d /proc/[0-9]* | wc -l > made.txt; ls /dev >> made.txt")
    assert space.run() == ["s"]
    count, *devices = made(space).split()
    assert int(count) <= 5
    assert {"null", "urandom", "shm"} <= set(devices)
    assert not [name for name in devices if name.startswith(("sd", "vd", "loop", "mem", "kvm"))]


@pytest.mark.parametrize(("end", "code"), [("exit 7", "exit 7"), ("kill -SEGV $$", "SIGSEGV")])
def test_the_exit_is_that_of_the_step(space: Space, end: str, code: str) -> None:
    recipe(space, end)
    status, _, said = space.command("run")
    assert status == 1 and code in said, said


def test_a_missing_program_is_named(space: Space) -> None:
    space.recipe("steps:\n  s: {run: [there-is-none], sandbox: true}\n")
    code, _, said = space.command("run")
    assert code == 1 and "there-is-none is not on the step's PATH" in said, said


def test_metrics_states_and_environments_work_inside(space: Space) -> None:
    recipe(
        space,
        """
        echo '{"step": 1, "loss": 2.5}' >> "$RECIPE_METRICS"
        python3 -c 'import json, sys; print(sys.prefix)' > made.txt
        echo saved > state/run/step_1
        [ -e state/run/step_0 ] || { touch state/run/step_0; exit 3; }
        """,
        "metrics: true\n    retries: 1\n    state: {run: {checkpoint: 'step_*'}}\n    outputs: {made: made.txt}",
    )
    assert space.run() == ["s", "s"]
    (row,) = json.loads(space.command("show", "last", "--json")[1])["steps"]
    assert row["values"]["loss"] == 2.5, row
    assert Path(made(space).strip()).exists()


def test_the_signal_of_a_stop_reaches_the_step_alone(space: Space) -> None:
    recipe(
        space,
        """
        trap 'echo saved >> state/run/saved; exit 0' TERM
        touch state/run/begun
        while :; do sleep 0.05; done
        """,
        "state: {run: {}}\n    outputs: {made: {path: made.txt, optional: true}}",
    )
    run = space.start("run")
    states = space.root / ".recipe/states"
    until(lambda: list(states.glob("**/begun")))
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert list(states.glob("**/saved"))


def test_what_a_step_leaves_in_the_background_ends_with_it(space: Space) -> None:
    recipe(space, "setsid sleep 7654321 & echo done > made.txt")
    assert space.run() == ["s"]
    assert not _processes("7654321")


def test_a_killed_parent_takes_the_whole_sandbox_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "attempt"
    folder.mkdir()
    script = "setsid sleep 7654322 & sleep 7654322"
    shown = ("1", "w", str(folder), str(folder))
    words = ["closed", f"{folder}.box", "", *shown, "sh", "-c", script]
    outside = subprocess.Popen([sys.executable, sandbox.__file__, *words], cwd=folder)
    until(lambda: len(_processes("7654322")) >= 4)
    outside.kill()
    outside.wait()
    until(lambda: not _processes("7654322"))


@pytest.mark.parametrize(
    ("settings", "recipe", "step", "sandbox"),
    [
        ("", "", "", ""),
        ("", "true", "", "closed"),
        ("", "true", "false", ""),
        ("", "true", "{network: true}", "network"),
        ("true", "", "", "closed"),
        ("true", "false", "", ""),
        ("true", "{network: true}", "", "network"),
    ],
)
def test_a_step_comes_before_its_recipe_and_that_before_the_settings(
    space: Space, settings: str, recipe: str, step: str, sandbox: str
) -> None:
    space.write("recipe.toml", f"[steps]\nsandbox = {settings}\n" if settings else "")
    top = f"sandbox: {recipe}\n" if recipe else ""
    own = f", sandbox: {step}" if step else ""
    space.recipe(f"{top}steps:\n  s: {{run: 'true'{own}}}\n")
    (spec,) = space.plan().plan.specs()
    flags = load(space.root, {}).flags
    assert spec.options.sandbox_where(flags) == sandbox


def test_a_step_on_a_host_is_closed_too(space: Space) -> None:
    space.write("other.txt", "o")
    recipe(space, f"ls {space.root} > made.txt 2>&1 || echo hidden >> made.txt; touch $HOME/x")
    code, _, said = space.command("run", "--driver", "loopback", "--everything-there")
    assert code == 0, said
    assert "other" not in made(space)


def test_several_nodes_need_a_network(space: Space) -> None:
    space.recipe("steps:\n  s: {run: 'true', sandbox: true, nodes: 2}\n")
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 2 and "its sandbox has no network" in said, said


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A folder of a user who is not root, and where that user reaches it."""
    needs("root")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        mine = Path(folder, "mine")
        mine.mkdir()
        os.chown(mine, 65534, 65534)
        yield mine


def test_another_user_than_root_has_it_too(anybody: Path) -> None:
    folder = anybody / "attempt"
    as_user = [needs("setpriv"), "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    subprocess.run([*as_user, "mkdir", folder], check=True)
    # The text alone: nothing of ours need be readable for that user.
    python = ["/usr/bin/python3", "-I", "-S", "-c", Path(sandbox.__file__).read_text()]
    if not os.path.exists(python[0]):
        pytest.skip("there is no Python that another user can run")
    script = f"id -u; grep CapEff /proc/self/status; touch here; ls {anybody}"
    words = ["closed", f"{anybody}/box", "", "1", "w", folder, folder, "sh", "-c", script]
    made = subprocess.run(
        [*as_user, *python, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if sandbox.MARK in made.stderr and "not permitted" in made.stderr:
        pytest.skip(f"another user than root gets no sandbox here: {made.stderr}")
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == ["65534", "CapEff:", "0" * 16, "attempt"]
    assert (folder / "here").stat().st_uid == 65534


@pytest.mark.parametrize("users", ["4", "0"])
def test_root_has_it_where_no_user_namespace_is_made(tmp_path: Path, users: str) -> None:
    """`users`: how many namespaces of users may be made below one of the test's own."""
    needs("root")
    script = 'echo "$1" > /proc/sys/user/max_user_namespaces; shift; exec "$@"'
    words = [
        "closed",
        f"{tmp_path}/box",
        "",
        "0",
        "sh",
        "-c",
        "ls /; grep CapEff /proc/self/status",
    ]
    made = subprocess.run(
        [
            *(needs("unshare"), "-U", "-r", "sh", "-c", script, "sh", users),
            *(sys.executable, sandbox.__file__, *words),
        ],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.split()[-1] == "00000000000000fb" and "home" not in made.stdout.split()


def test_a_machine_that_makes_none_refuses_before_anything_starts(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.hosts.sandbox.find_local_refusal", lambda: "it is forbidden here")
    space.recipe("steps:\n  a: {run: touch a, outputs: [a]}\n  s: {run: 'true', sandbox: true}\n")
    with pytest.raises(CannotRun, match="it is forbidden here") as refused:
        space.run()
    assert "sandbox: false" in refused.value.fix
    assert not (space.root / "a").exists()


def test_a_sandbox_of_a_kind_that_there_is_not_is_refused(space: Space) -> None:
    space.recipe("steps:\n  s: {run: 'true', sandbox: strict}\n")
    with pytest.raises(Invalid, match="sandbox"):
        space.plan()


def _processes(word: str) -> list[str]:
    """The processes whose command has a word, but for zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found
