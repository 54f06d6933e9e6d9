"""Steps in containers, with a real Podman and, where its daemon runs or can be started, a real Docker.

Skipped, saying why, where an engine cannot run a container.  The images are a static busybox and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.base import Command, Exit, Job, Order, Wish
from drivers.devices import Device
from drivers.loopback import Loopback
from runner.errors import CannotRun
from runner.hosts import containers
from runner.hosts.engines import Engine, Image, Mount
from runner.hosts.link.client import Client, connect_local
from runner.hosts.link.client import connect_remote as there_on
from runner.hosts.link.wire import Wire
from tests.servers.engines import EACH, Machine, daemon, machine, root_of  # noqa: F401  # fixtures
from tests.support import Space, until
from tests.tools import lacks, needs

LONG = timedelta(seconds=60)
TOKEN = "a-value-that-nobody-may-see"


@dataclass
class Room:
    """A place for attempts on this machine, whose commands run in containers."""

    root: Path
    machine: Machine
    host: Client
    engine: Engine
    loop: asyncio.Runner
    attempts: list[str] = field(default_factory=list)

    def do(self, doing: Coroutine[Any, Any, Any]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(60):
                return await doing

        return self.loop.run(within())

    def command(
        self,
        *argv: str,
        mounts: Sequence[Mount] = (),
        image: str = "",
        engine: Engine | None = None,
        **more: Any,
    ) -> Command:
        """A wrapped command in a new attempt directory."""
        name = f"attempt-{len(self.attempts)}"
        self.attempts.append(name)
        cwd = self.root / "attempts" / name
        cwd.mkdir(mode=0o700, parents=True)
        env = {**containers.base_env({}), **more.pop("env", {})}
        plain = Command(argv, str(cwd), env, log=f"{cwd}.log", **more)
        found = self.do(containers.pull_image(self.host, self.engine, image or self.machine.image))
        return containers.wrap(
            plain,
            found,
            engine or self.engine,
            [*containers.find_mounts(plain, str(self.root / "objects")), *mounts],
        )

    def start(self, command: Command) -> Job:
        job: Job = self.do(self.host.start(command, os.path.basename(command.cwd)))
        return job

    def end(self, job: Job) -> Exit:
        exit = self.do(self.host.wait(job, LONG))
        assert exit is not None
        return exit  # type: ignore[no-any-return]

    def log(self, job: Job) -> str:
        return bytes(self.do(self.host.log(job, 0))).decode()

    def run(self, *argv: str, **more: Any) -> tuple[Exit, str]:
        job = self.start(self.command(*argv, **more))
        return self.end(job), self.log(job)

    def sh(self, script: str, **more: Any) -> tuple[Exit, str]:
        return self.run("sh", "-euc", script, **more)

    def begun(self, script: str, **more: Any) -> tuple[Job, Command]:
        """A command that has come as far as to say `ready`."""
        command = self.command("sh", "-euc", script, **more)
        job = self.start(command)
        until(lambda: "ready\n" in self.log(job))
        return job, command

    def left(self) -> list[str]:
        """Containers of ours that the engine knows of."""
        label = f"label={containers.LABEL}={self.root}/attempts"
        return self.machine.cli("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()

    def processes(self, cwd: str) -> list[psutil.Process]:
        """Living processes of the container of an attempt."""
        mark, found = f".{os.path.basename(cwd)}", []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("RECIPE_CONTAINER", "").endswith(mark)
                    and process.cwd() == cwd
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


BOTH_INITS = pytest.mark.parametrize("room", ["init", "no-init"], indirect=True)
"""With the engine's init program and without one; a test without it takes what the machine has."""


@pytest.fixture
def room(request: pytest.FixtureRequest, machine: Machine, tmp_path: Path) -> Iterator[Room]:  # noqa: F811
    wanted = getattr(request, "param", "")
    if wanted == "init" and not machine.engine.init:
        lacks("catatonit" if machine.kind == "podman" else "docker-init")
    engine = replace(machine.engine, init=False) if wanted == "no-init" else machine.engine
    with asyncio.Runner() as loop:
        host = connect_local(tmp_path / "agent")
        room = Room(tmp_path, machine, host, engine, loop)
        try:
            yield room
        finally:
            for name in room.left():
                loop.run(
                    containers.remove_container(
                        host, machine.engine, f"{tmp_path}/attempts/{name.partition('.')[2]}"
                    )
                )
            loop.run(host.aclose())


# -- a command in a container ----------------------------------------------------------------------------------------------------------------------------


@EACH
def test_what_a_step_writes_in_its_directory_is_there_and_ours(room: Room) -> None:
    exit, log = room.sh("pwd; echo made > out.txt; mkdir deep; echo more > deep/file")
    place = room.root / "attempts" / "attempt-0"
    assert (exit.code, exit.reason, exit.strays, log) == (0, "exit", 0, f"{place}\n")
    assert (place / "out.txt").read_text() == "made\n"
    assert {(path.stat().st_uid, path.stat().st_gid) for path in place.rglob("*")} == {
        (os.getuid(), os.getgid())
    }
    assert room.left() == []
    assert sorted(os.listdir(place.parent)) == ["attempt-0", "attempt-0.log"]


@EACH
def test_the_environment_is_the_images_and_the_steps_and_nothing_of_the_host(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "1")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert room.run("/bin/busybox", "sh", "-c", "/bin/echo $PATH") == (
        ANY,
        f"{path}\n",
    )  # the engine's for an image that says nothing
    own = {
        "WORDS": "two\nlines ' \" $x",
        "LD_LIBRARY_PATH": "/opt/lib",
        "DOCKER_HOST": "of the step",
        "PATH": "/own:/bin",
    }
    _, log = room.sh("cat /proc/self/environ", env=own)
    env = dict(pair.split("=", 1) for pair in log.split("\0") if pair)
    engines = {"HOSTNAME", "TERM", "container", "PWD", "SHLVL", "OLDPWD"}
    assert {name: value for name, value in env.items() if name not in engines} == {
        **own,
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "FROM_IMAGE": "yes",
        "RECIPE_CONTAINER": env["RECIPE_CONTAINER"],
        "RECIPE_JOB": env["RECIPE_JOB"],
    }


@EACH
def test_the_exit_code_of_a_step_is_its_own_also_where_engines_have_a_meaning_for_it(
    room: Room,
) -> None:
    for code in (3, 125, 127):
        exit, log = room.sh(f"echo said; exit {code}")
        assert (exit.code, log) == (code, "said\n")
        assert containers.explain(exit, log.encode(), "the-image") == ""


@EACH
def test_links_of_an_attempt_directory_lead_to_the_same_files_inside(
    room: Room, tmp_path: Path
) -> None:
    objects, state, data = (tmp_path / name for name in ("objects", "states", "data, set"))
    for folder in (objects / "ab", state, data / "deep"):
        folder.mkdir(parents=True)
    (objects / "ab" / "123").write_text("stored")
    (data / "deep" / "file").write_text("given")
    outside = tmp_path / "blobs"
    outside.write_text("blob")
    (data / "link").symlink_to(outside)
    cwd = tmp_path / "attempts" / "attempt-0"
    plain = Command(
        ("sh", "-c", "cat object data/deep/file data/link; echo x > data/new || echo x > ckpt/new"),
        str(cwd),
        {"HOME": "/tmp"},
    )
    cwd.mkdir(parents=True)
    for name, target in (("object", objects / "ab" / "123"), ("data", data), ("ckpt", state)):
        (cwd / name).symlink_to(target)
    found = containers.find_mounts(plain, str(objects), [str(state)])
    assert set(found) == {
        Mount(str(cwd), True),
        Mount(str(state), True),
        Mount(str(objects)),
        Mount(str(data)),
        Mount(str(outside)),
    }
    image = room.do(containers.pull_image(room.host, room.engine, room.machine.image))
    job = room.start(replace(containers.wrap(plain, image, room.engine, found), log=f"{cwd}.log"))
    assert room.end(job).code == 0, room.log(job)
    assert "storedgivenblob" in room.log(job)
    assert not (data / "new").exists()
    assert (state / "new").read_text() == "x\n"


def test_the_script_and_the_metrics_beside_the_directory_are_seen(room: Room) -> None:
    cwd = room.root / "attempts" / "attempt-0"
    script = Path(f"{cwd}.sh")
    script.parent.mkdir()
    script.write_text('echo \'{"loss": 1}\' >> "$RECIPE_METRICS"; echo x >> "$0" || echo protected')
    exit, log = room.run("/bin/sh", "-eu", str(script), env={"RECIPE_METRICS": f"{cwd}.metrics"})
    assert exit.code == 0
    assert "protected\n" in log
    assert Path(f"{cwd}.metrics").read_text() == '{"loss": 1}\n'


def test_no_argument_of_any_process_holds_a_secret(room: Room) -> None:
    job, command = room.begun(
        'echo "$TOKEN" > seen; mkfifo on; echo ready; cat on', secrets={"TOKEN": TOKEN}
    )
    lines = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert any("recipe-container" in line for line in lines if line)
    assert not [line for line in lines if any(TOKEN in word for word in line or ())]
    assert Path(command.cwd, "seen").read_text() == f"{TOKEN}\n"
    assert TOKEN not in repr(command)
    Path(command.cwd, "on").write_text("go on")
    assert room.end(job).code == 0


def test_a_step_may_run_as_anybody_the_engine_says(room: Room) -> None:
    engine = replace(
        room.engine, args=(*room.engine.args, "--hostname", "inside"), user="1234:1234"
    )
    cwd = room.root / "attempts"
    cwd.mkdir()
    exit, log = room.run("/bin/id", "-u", engine=engine)
    assert (exit.code, log) == (0, "1234\n")


# -- its end ---------------------------------------------------------------------------------------------------------------------------------------------


@EACH
@BOTH_INITS
def test_stop_asks_every_process_in_the_container_once_and_gives_it_time(room: Room) -> None:
    script = """
        trap 'echo outer >> told; wait; exit 7' TERM
        sh -c 'trap "echo inner >> told; exit" TERM; echo ready; while :; do sleep 0.05; done' &
        while :; do sleep 0.05; done
    """
    job, command = room.begun(script)
    room.do(room.host.stop(job, timedelta(seconds=20)))
    exit = room.end(job)
    assert (exit.code, exit.reason, exit.strays) == (7, "stopped", 0)
    assert sorted(Path(command.cwd, "told").read_text().split()) == ["inner", "outer"]
    assert room.left() == []


@EACH
@BOTH_INITS
def test_one_that_does_not_listen_is_killed_and_nothing_is_left_of_it(room: Room) -> None:
    job, command = room.begun(
        "trap '' TERM; (trap '' TERM; while :; do sleep 0.05; done) & echo ready; while :; do sleep 0.05; done"
    )
    assert room.processes(command.cwd)
    room.do(room.host.stop(job, timedelta(seconds=0.3)))
    assert room.end(job).reason == "stopped"
    room.do(containers.remove_container(room.host, room.engine, command.cwd))
    assert room.processes(command.cwd) == []
    assert room.left() == []
    assert not os.path.exists(f"{command.cwd}.box")


@EACH
@BOTH_INITS
def test_one_that_is_stopped_before_it_began_leaves_nothing(room: Room) -> None:
    for pause in (0.0, 0.1):
        job = room.start(room.command("sh", "-c", "while :; do sleep 0.05; done"))
        assert room.do(room.host.wait(job, timedelta(seconds=pause))) is None
        room.do(room.host.stop(job, timedelta(seconds=20)))
        assert room.end(job).reason == "stopped"
        assert room.left() == []


def test_another_machine_runs_and_stops_containers_too(machine: Machine, tmp_path: Path) -> None:  # noqa: F811
    async def there() -> None:
        driver = Loopback(tmp_path / "machines")
        lease = await driver.acquire(
            Order((await driver.offers(Wish()))[0], "lease", datetime.now(UTC) + timedelta(hours=1))
        )
        (machine_of,) = await driver.hosts(lease) or ()
        host = there_on(Wire(machine_of, machine_of.root))
        attempt = tmp_path / "machines" / "host-1" / "attempts" / "one"
        attempt.mkdir(parents=True)
        said: list[str] = []
        settings = {
            "container_engine": machine.kind,
            "engine_args": machine.flags,
            "container_args": machine.args,
        }
        boxes = containers.Containers(
            host, str(attempt.parent), said.append, settings, machine.environ
        )
        await boxes.provide_image(machine.image)
        script = (
            'trap "exit 7" TERM; echo "$TOKEN" > seen; echo ready; while :; do sleep 0.05; done'
        )
        command = Command(
            ("sh", "-c", script),
            str(attempt),
            containers.base_env({}),
            {"TOKEN": TOKEN},
            log=f"{attempt}.log",
        )
        job = await host.start(
            boxes.wrap(command, machine.image, [Mount(str(attempt), True)]), "one"
        )
        async with asyncio.timeout(60):
            while b"ready" not in await host.log(job, 0):
                assert await host.wait(job, timedelta(seconds=0.05)) is None
        assert (attempt / "seen").read_text() == f"{TOKEN}\n"
        await host.stop(job, timedelta(seconds=20))
        exit = await host.wait(job, LONG)
        assert exit is not None and (exit.code, exit.reason) == (7, "stopped")
        await boxes.clean_up(str(attempt), exit)
        assert sorted(os.listdir(attempt.parent)) == ["one", "one.log"]
        assert said == []
        await host.aclose()
        await driver.release(lease)

    asyncio.run(there())


@BOTH_INITS
def test_a_process_that_saves_its_work_has_the_time_that_it_has_outside_of_a_container(
    room: Room,
) -> None:
    saves = (
        "trap 'sleep 0.3; echo saved > saved; exit' TERM; echo ready; while :; do sleep 0.05; done"
    )
    job, command = room.begun(f'sh -c "{saves}"; echo never')
    room.do(room.host.stop(job, timedelta(seconds=20)))
    assert room.end(job).reason == "stopped"
    assert "never" not in room.log(job)
    assert Path(command.cwd, "saved").read_text() == "saved\n"
    assert room.left() == []


@BOTH_INITS
def test_a_timeout_ends_the_container(room: Room) -> None:
    exit, log = room.sh("echo ready; while :; do sleep 0.05; done", timeout=1.5)
    assert (exit.reason, log) == ("timeout", "ready\n")
    assert room.left() == []


def test_a_container_does_not_outlive_its_client(room: Room) -> None:
    job, command = room.begun("echo ready; while :; do sleep 0.05; done")
    os.kill(_client(command), signal.SIGKILL)
    exit = room.end(job)
    assert exit.code == 137
    until(lambda: not room.processes(command.cwd))
    assert room.left() == []


def test_a_container_does_not_outlive_the_script_that_watches_it(room: Room) -> None:
    job, command = room.begun("echo ready; while :; do sleep 0.05; done")
    script = psutil.Process(_client(command)).parent()
    assert script is not None
    os.killpg(script.pid, signal.SIGKILL)  # as a host ends a job that does not listen
    assert room.end(job).signal == signal.SIGKILL
    room.do(containers.remove_container(room.host, room.engine, command.cwd))
    assert room.processes(command.cwd) == []
    assert room.left() == []


@EACH
def test_a_container_does_not_outlive_the_supervisor_of_its_host(room: Room) -> None:
    job, command = room.begun("echo ready; while :; do sleep 0.05; done")
    supervisor = psutil.Process(_client(command)).parent().parent()  # type: ignore[union-attr]
    assert supervisor is not None
    supervisor.kill()
    assert room.end(job).reason == "lost"
    room.do(containers.remove_container(room.host, room.engine, command.cwd))
    assert room.processes(command.cwd) == []
    assert room.left() == []


@EACH
def test_the_guard_alone_ends_a_container_when_all_else_is_gone(room: Room, tmp_path: Path) -> None:
    """On a host whose own supervisor looks after a group only: the group gets SIGKILL, and nobody comes to look."""
    command = room.command("sh", "-c", "echo ready; while :; do sleep 0.05; done")
    with open(tmp_path / "said", "wb") as log:
        script = subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env=dict(command.env),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until(lambda: (tmp_path / "said").read_text() == "ready\n")
    os.killpg(script.pid, signal.SIGKILL)
    script.wait()
    until(lambda: not os.path.exists(f"{command.cwd}.box"))
    assert room.processes(command.cwd) == []
    assert room.left() == []


@EACH
def test_a_sweep_ends_orphans_and_leaves_a_living_job_alone(room: Room) -> None:
    job, command = room.begun("mkfifo on; echo ready; cat on")
    left = room.command("sh", "-c", "while :; do sleep 0.05; done")
    words = list(left.argv)
    words = words[words.index("run") :]
    words.insert(1, "--detach")
    subprocess.run(
        [room.machine.kind, *room.machine.flags, *_without_files(words)],
        env={**os.environ, **left.env},
        check=True,
        capture_output=True,
    )
    assert len(room.left()) == 2
    assert room.do(containers.sweep(room.host, room.engine, f"{room.root}/attempts")) == [
        os.path.basename(left.cwd)
    ]
    assert [name.partition(".")[2] for name in room.left()] == [os.path.basename(command.cwd)]
    Path(command.cwd, "on").write_text("go on")
    assert room.end(job).code == 0


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_the_supervising_script_runs_in_any_posix_shell(
    room: Room, tmp_path: Path, shell: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to(needs(shell))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    engine = replace(room.engine, env={**room.engine.env, "PATH": path})
    job, _ = room.begun(
        "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", engine=engine
    )
    room.do(room.host.stop(job, timedelta(seconds=20)))
    assert (room.end(job).code, room.left()) == (7, [])


# -- a recipe --------------------------------------------------------------------------------------------------------------------------------------------

BOXED = """
image: IMAGE
inputs: {data: {type: file}}
steps:
  copy:
    run: |
      cat {{ inputs.data }} > {{ outputs.copy }}
      echo '{"loss": 0.5}' >> $RECIPE_METRICS
    outputs: {copy: copy.bin}
    metrics: true
  whole: {run: [cat, "{{ steps.copy.copy }}"]}
  goes_on: {run: "mkdir -p {{ state.ckpt }}/step-1; cat conf.json", files: {conf.json: {x: 1}}, state: {ckpt: {path: ckpt/, checkpoint: "step-*"}}}
"""


@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_a_recipe_with_an_image_runs_in_it_here_and_elsewhere(
    machine: Machine,  # noqa: F811
    tmp_path: Path,
    driver: str,
) -> None:
    space = Space(tmp_path / "space")
    space.write("big.bin", "x" * 200_000)  # too large for a copy: a link
    space.recipe(BOXED.replace("IMAGE", machine.image))
    space.write(
        "recipe.toml",
        f"[drivers.{driver}]\nengine_args = {list(machine.flags)}\ncontainer_args = {list(machine.args)}\n",
    )
    words = ("run", "--driver", driver, "data=big.bin")
    env = {**machine.environ, "HOME": str(tmp_path)}
    code, out, err = space.command(*words, env=env)
    assert code == 0, err + out
    assert "3 ran" in err
    assert space.read("copy.bin") == "x" * 200_000
    assert "1 to run" not in space.command("plan", "data=big.bin", env=env)[1]
    assert "everything is fresh" in space.command(*words, env=env)[2]
    space.recipe({"image": machine.image, "steps": {"a": {"run": ["no-such-program"]}}})
    code, out, err = space.command("run", "--driver", driver, env=env)
    assert code == 1
    assert f"the image {machine.image} does not have " in err


# -- what cannot work ------------------------------------------------------------------------------------------------------------------------------------


@EACH
def test_inputs_of_a_step_in_an_image_are_real_folders_and_files(
    machine: Machine,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One that can be no object is mounted under its name."""
    space = Space(tmp_path / "space")
    for top, size in (("small", 100_000), ("large", 65 << 20)):
        (space.root / top).mkdir()
        with (space.root / top / "big.bin").open("wb") as file:
            file.truncate(size)
    settings = {
        "container_engine": machine.kind,
        "engine_args": list(machine.flags),
        "container_args": list(machine.args),
    }
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    space.write("recipe.toml", f"[drivers.local]\n{lines}\n")
    space.recipe(
        f"image: {json.dumps(machine.image)}\n"
        "steps:\n"
        "  s:\n"
        "    deps: [small/, large/]\n"
        "    outputs: {o: o.txt, t: t.tar}\n"
        "    run: find small large -type f > o.txt; find small large -type l >> o.txt; tar cf t.tar small large/; echo c > small/labels.cache\n"
    )
    code, _, said = space.command("run", env=machine.environ)
    assert code == 0, said
    assert sorted(space.read("o.txt").split()) == ["large/big.bin", "small/big.bin"]
    assert (space.root / "t.tar").stat().st_size > 65 << 20
    assert "input large: it is mounted read-only" in said or "cannot clone" not in said
    assert not (space.root / "small/labels.cache").exists()


@EACH
def test_an_image_that_is_nowhere_is_named_with_the_engines_reason(room: Room) -> None:
    with pytest.raises(
        CannotRun,
        match=r"cannot pull the image localhost:1/none:9: .*(refused|lookup|registry)",
    ) as error:
        room.do(containers.pull_image(room.host, room.engine, "localhost:1/none:9"))
    assert "log in to its registry" in error.value.fix


def test_an_image_is_known_by_its_digest_and_pinned_by_it(room: Room) -> None:
    found = room.do(containers.pull_image(room.host, room.engine, room.machine.image))
    assert found.id.startswith("sha256:") and len(found.id) == 71
    assert found.digest.startswith("sha256:") and len(found.digest) == 71
    assert room.do(containers.pull_image(room.host, room.engine, found.id)).id == found.id


@EACH
def test_an_image_is_fetched_once_and_one_pinned_by_digest_is_that_one(
    machine: Machine,  # noqa: F811
    room: Room,
    tmp_path: Path,
) -> None:
    """From a registry, of which this is as much as an engine needs to pull."""
    layer = root_of(("true",))
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [_sha(layer)]},
        }
    ).encode()
    kinds = {"config": "container.image.v1+json", "layer": "image.rootfs.diff.tar"}
    parts = {
        name: {
            "mediaType": f"application/vnd.docker.{kinds[name]}",
            "size": len(data),
            "digest": _sha(data),
        }
        for name, data in (("config", config), ("layer", layer))
    }
    form = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": form,
            "config": parts["config"],
            "layers": [parts["layer"]],
        }
    ).encode()
    served = {_sha(data): data for data in (layer, config, manifest)} | {"1": manifest}
    asked: list[str] = []

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = b"{}" if self.path == "/v2/" else served.get(self.path.rpartition("/")[2])
            self.send_response(404 if data is None else 200)
            self.send_header(
                "Content-Type", form if data is manifest else "application/octet-stream"
            )
            self.send_header("Content-Length", str(len(data or b"")))
            self.send_header("Docker-Content-Digest", _sha(data or b""))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        (tmp_path / "registries.conf").write_text(
            f'[[registry]]\nlocation = "{place}"\ninsecure = true\n'
        )
        room.engine = replace(
            room.engine,
            env={**room.engine.env, "CONTAINERS_REGISTRIES_CONF": f"{tmp_path}/registries.conf"},
        )
        said: list[str] = []
        try:
            for name in (f"{place}/team/trainer:1", f"{place}/team/trainer@{_sha(manifest)}"):
                found = room.do(containers.pull_image(room.host, room.engine, name, said.append))
                assert (found.id, found.digest) == (_sha(config), _sha(manifest))
                del asked[:]
                assert (
                    room.do(containers.pull_image(room.host, room.engine, name, said.append))
                    == found
                )
                assert asked == []
            assert said[0] == f"pulling the image {place}/team/trainer:1 (first use only)"
            assert room.run("/bin/true", image=f"{place}/team/trainer:1")[0].code == 0
            with pytest.raises(CannotRun, match=r"cannot pull the image .*team/trainer:2"):
                room.do(containers.pull_image(room.host, room.engine, f"{place}/team/trainer:2"))
        finally:
            machine.cli("rmi", "--force", _sha(config))
            server.shutdown()


@EACH
def test_an_image_without_a_shell_is_distinguished_from_a_step_that_failed(room: Room) -> None:
    exit, log = room.run("/bin/sh", "-c", "true", image=room.machine.bare)
    assert exit.code != 0
    words = containers.explain(exit, log.encode(), "the-image")
    assert (
        words.startswith("the image the-image does not have ")
        and "a script requires /bin/sh" in words
    )
    exit, log = room.run("/bin/busybox", "true", image=room.machine.bare)
    assert exit.code == 0, log


def test_a_host_without_setsid_says_so_and_nothing_hangs(room: Room, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "rm", "mkdir", "mkfifo", "sleep", "kill", "date"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    exit, log = room.sh(
        "true", engine=replace(room.engine, env={**room.engine.env, "PATH": f"{tmp_path}/bin"})
    )
    assert exit.code == 127 and "setsid" in log
    assert containers.explain(exit, log.encode(), "the-image") == ""


@EACH
def test_a_program_that_cannot_be_run_is_distinguished_from_one_that_is_not_there(
    room: Room,
) -> None:
    exit, log = room.run("/tmp")
    words = containers.explain(exit, log.encode(), "the-image")
    assert words.startswith("the image the-image cannot run ") and "ermission denied" in words


@EACH
def test_an_engine_that_cannot_begin_says_why(room: Room) -> None:
    engine = replace(room.engine, args=("--no-such-flag",))
    exit, log = room.sh("true", engine=engine)
    assert exit.code == 125
    words = containers.explain(exit, log.encode(), "the-image")
    assert words.startswith("cannot start a container of the-image: ")
    assert room.left() == []


# -- finding an engine -------------------------------------------------------------------------------------------------------------------------------------


def _found(tmp_path: Path, docker: str = "", podman: str = "", files: str = "") -> Engine:
    """What is detected on a machine whose engines are scripts that answer `info` with these words."""
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    for name in ("sh", "sed", "env", "id", "ls", "wc", "grep", "timeout", "tr", "cat"):
        if not (folder / name).exists():
            (folder / name).symlink_to(str(shutil.which(name)))
    for name, said in (("docker", docker), ("podman", podman)):
        if said:
            (folder / name).write_text(
                f"#!/bin/sh\n[ \"$1\" = --version ] && {{ echo {name} version 1; exit; }}\ncat <<'END'\n{said}\nEND\n"
            )
            (folder / name).chmod(0o755)

    async def detected() -> Engine:
        host = connect_local(tmp_path / "agent")
        try:
            return await containers.detect(
                host, environ={"PATH": str(folder), "HTTPS_PROXY": "http://user:hunter2@proxy"}
            )
        finally:
            await host.aclose()

    return asyncio.run(detected())


def _docker(**more: Any) -> str:
    return json.dumps(
        {"ServerVersion": "27.0", "InitBinary": "docker-init", "SecurityOptions": [], **more}
    )


def _podman(*, rootless: bool) -> str:
    return json.dumps(
        {"host": {"security": {"rootless": rootless}}, "version": {"Version": "5.1"}}, indent=1
    )


def test_docker_is_taken_where_its_daemon_answers_else_podman(tmp_path: Path) -> None:
    found = _found(
        tmp_path,
        docker=_docker(ServerVersion="", ServerErrors=["Cannot connect"]),
        podman=_podman(rootless=True),
    )
    assert (found.kind, found.version, found.rootless, found.user) == (
        "podman",
        "5.1",
        True,
        f"{os.getuid()}:{os.getgid()}",
    )
    found = _found(tmp_path, docker=_docker(SecurityOptions=["name=rootless"]))
    assert (found.kind, found.version, found.init, found.user) == ("docker", "27.0", True, "0:0")


def test_an_engine_that_names_an_init_program_and_lacks_it_is_used_without_one(
    tmp_path: Path,
) -> None:
    assert _found(tmp_path, docker=_docker(InitCommit={"ID": "de40ad0"})).init
    assert not _found(tmp_path, docker=_docker(InitCommit={"ID": "N/A"})).init


def test_where_no_engine_works_each_is_named_with_its_trouble(tmp_path: Path) -> None:
    with pytest.raises(
        CannotRun, match=r"docker does not work: Cannot connect to it; podman is not installed"
    ):
        _found(tmp_path, docker=_docker(ServerVersion="", ServerErrors=["Cannot connect to it"]))
    with pytest.raises(CannotRun, match=r"podman does not work: Error: no space"):
        _found(tmp_path, docker="permission denied", podman="Error: no space")


def test_a_password_in_a_proxys_address_stays_out_of_what_an_engine_prints(tmp_path: Path) -> None:
    assert "hunter2" not in repr(_found(tmp_path, podman=_podman(rootless=False)))


# -- the words of a command, without an engine -----------------------------------------------------------------------------------------------------------

PLAIN_COMMAND = Command(("true",), "/w/attempts/a", {"A": "1"}, {"TOKEN": "secret"})
IMAGE = Image("sha256:1", "sha256:2")


def _words(
    engine: Engine,
    mounts: Sequence[Mount] = (),
    gpus: Sequence[Device] | None = None,
    command: Command = PLAIN_COMMAND,
    *,
    needed: bool = False,
    network: bool = True,
) -> list[str]:
    wrapped = containers.wrap(command, IMAGE, engine, mounts, gpus, needed=needed, network=network)
    argv = list(wrapped.argv)
    return argv[argv.index("run") :]


def _pairs(words: Sequence[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


DOCKER = Engine("docker", "/usr/bin/docker", "27.0", "1000:1000")
PODMAN = Engine("podman", "/usr/bin/podman", "5.1", "1000:1000", rootless=True)


def test_gpus_are_given_in_the_way_the_engine_knows_and_only_where_there_are_some() -> None:
    assert ("--gpus", "all") in _pairs(_words(replace(DOCKER, cards=2, gpus="gpus")))
    assert ("--device", "nvidia.com/gpu=all") in _pairs(
        _words(replace(DOCKER, cards=2, gpus="cdi"))
    )
    assert ("--device", "nvidia.com/gpu=all") in _pairs(
        _words(replace(PODMAN, cards=2, gpus="cdi"))
    )
    assert not {"--gpus", "--device"} & set(_words(DOCKER))


def test_a_container_is_given_the_gpus_of_its_step_and_no_other() -> None:
    two = (Device("1", "GPU-b", "1"), Device("0", "GPU-a", "0"))
    assert ("--gpus", '"device=GPU-b,GPU-a"') in _pairs(
        _words(replace(DOCKER, cards=2, gpus="gpus"), gpus=two)
    )
    assert ("--gpus", '"device=1"') in _pairs(
        _words(replace(DOCKER, cards=2, gpus="gpus"), gpus=(Device("1"),))
    )
    given = _words(replace(PODMAN, cards=2, gpus="cdi"), gpus=two)
    assert [word for word in given if word.startswith("nvidia.com")] == [
        "nvidia.com/gpu=1",
        "nvidia.com/gpu=0",
    ]
    for engine in (replace(DOCKER, cards=2, gpus="gpus"), replace(PODMAN, cards=2, gpus="cdi")):
        assert not {"--gpus", "--device"} & set(_words(engine, gpus=()))


def test_a_step_that_needs_a_gpu_is_refused_where_the_engine_can_give_none() -> None:
    with pytest.raises(
        CannotRun, match=r"requires 1 GPU.*podman 5.1 on the host cannot pass GPUs"
    ) as error:
        _words(replace(PODMAN, cards=1), gpus=(Device("0"),), needed=True)
    assert not {"--gpus", "--device"} & set(_words(replace(PODMAN, cards=1), gpus=(Device("0"),)))
    assert "nvidia-ctk cdi generate" in error.value.fix


def test_a_rootless_podman_keeps_the_users_number() -> None:
    assert ("--userns", "keep-id") in _pairs(_words(PODMAN))
    assert "--userns" not in _words(replace(PODMAN, rootless=False))


def test_the_network_is_the_hosts_unless_the_settings_say_otherwise() -> None:
    assert ("--network", "host") in _pairs(_words(DOCKER))
    without = replace(DOCKER, args=("--network=none",))
    assert ("--network", "host") not in _pairs(_words(without))
    assert ("--network", "none") in _pairs(_words(DOCKER, network=False))
    assert ("--network", "none") not in _pairs(_words(without, network=False))
    with pytest.raises(CannotRun, match="`container_args` sets one"):
        _words(replace(DOCKER, args=("--net", "bridge")), network=False)
    with pytest.raises(
        CannotRun, match="apptainer on the host cannot run a sandbox with the network disabled"
    ):
        _words(replace(DOCKER, kind="apptainer"), network=False)
    assert ("--shm-size", "50") in _pairs(_words(replace(DOCKER, memory=100)))
    assert "--shm-size" not in _words(replace(DOCKER, memory=100, args=("--ipc", "host")))


def test_values_of_variables_stay_out_of_the_words_and_reach_the_client() -> None:
    wrapped = containers.wrap(
        PLAIN_COMMAND, IMAGE, replace(DOCKER, env={"HOME": "/home/me", "HTTPS_PROXY": "p"}), ()
    )
    assert {("--env", "A"), ("--env", "TOKEN")} <= _pairs(wrapped.argv)
    assert wrapped.env == {"HOME": "/home/me", "A": "1"}
    assert wrapped.secrets == {"TOKEN": "secret"}
    assert "secret" not in " ".join(wrapped.argv)


def test_a_variable_that_the_client_reads_itself_goes_round_it_and_a_secret_of_such_a_name_is_refused() -> (
    None
):
    wrapped = containers.wrap(
        replace(PLAIN_COMMAND, env={"PATH": "/own", "LD_PRELOAD": "x.so"}),
        IMAGE,
        replace(DOCKER, env={"PATH": "/bin"}),
        (),
    )
    assert wrapped.env == {"PATH": "/bin"}
    assert {("--env", "PATH=/own"), ("--env", "LD_PRELOAD=x.so")} <= _pairs(wrapped.argv)
    with pytest.raises(
        CannotRun, match="the secret DOCKER_HOST has a variable name that docker itself uses"
    ):
        containers.wrap(
            replace(PLAIN_COMMAND, secrets={"DOCKER_HOST": "secret"}), IMAGE, DOCKER, ()
        )


def test_a_path_that_no_flag_can_spell_is_refused() -> None:
    assert ("--volume", "/a,b:/a,b:ro") in _pairs(_words(DOCKER, [Mount("/a,b")]))
    assert ("--mount", "type=bind,source=/a b:c,target=/a b:c") in _pairs(
        _words(DOCKER, [Mount("/a b:c", True)])
    )
    with pytest.raises(CannotRun, match="cannot mount '/a,b:c'"):
        _words(DOCKER, [Mount("/a,b:c")])


_paths = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=5).map(
    lambda parts: "/" + "/".join(parts)
)


@given(st.lists(_paths, max_size=40), st.integers(1, 8))
def test_few_mounts_cover_many_paths(paths: list[str], most: int) -> None:
    found = containers.cover_paths(paths, most)
    assert len(found) <= most
    assert all(
        any(path == top or path.startswith(top.rstrip("/") + "/") for top in found)
        for path in paths
    )
    assert not any(a != b and b.startswith(a.rstrip("/") + "/") for a in found for b in found)
    if len(set(paths)) <= most:
        assert set(found) <= set(paths)


def _client(command: Command) -> int:
    """The engine's client of a wrapped command that runs."""
    words = list(
        command.argv[10:]
    )  # after the script, what it is told, and the number of the engine's words
    found = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == words
    ]
    assert len(found) == 1
    return int(found[0])


def _sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _without_files(words: Sequence[str]) -> list[str]:
    """The words of a `run` without the files into which it writes numbers of processes: their folder is made by the script."""
    left = list(words)
    for flag in ("--pidfile", "--conmon-pidfile"):
        if flag in left:
            at = left.index(flag)
            del left[at : at + 2]
    return left
