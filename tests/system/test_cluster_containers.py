"""Steps in containers of Apptainer and Enroot: with stand-ins that enter a root of their own, and with a real one where it is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivers.base import Command, Exit, Job
from drivers.devices import Device
from runner.errors import CannotRun
from runner.hosts import cluster_containers, containers
from runner.hosts.engines import Engine, Image, Mount
from runner.hosts.link.client import Client, connect_local
from tests.servers import cluster_engines
from tests.support import until
from tests.tools import needs

LONG = timedelta(seconds=60)
APPLETS = ("sh", "cat", "echo", "env", "ls", "mkdir", "sleep", "touch")
TOKEN = "a-value-that-nobody-may-see"


class Box:
    """A place for attempts on this machine, and an engine."""

    def __init__(self, kind: str, place: Path, loop: asyncio.Runner) -> None:
        self.kind, self.place, self.loop = kind, place, loop
        self.host: Client = connect_local(place / "agent")
        self.image = str(place / "images" / "team_trainer:1")
        self.engine: Engine = self.do(containers.detect(self.host, engine=kind, environ=os.environ))
        self.found: Image = self.do(containers.pull_image(self.host, self.engine, self.image))

    def do(self, doing: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(asyncio.wait_for(doing, 60))

    def start(self, *argv: str, **more: Any) -> tuple[Job, str]:
        cwd = (
            self.place
            / "attempts"
            / f"attempt {len(list(self.place.glob('attempts/attempt*.log')))}"
        )
        cwd.mkdir(parents=True)
        env = {**containers.base_env({}), **more.pop("env", {})}
        mounts, gpus = more.pop("mounts", ()), more.pop("gpus", ())
        plain = Command(argv, str(cwd), env, log=f"{cwd}.log", **more)
        wrapped = containers.wrap(
            plain,
            self.found,
            self.engine,
            [*containers.find_mounts(plain, str(self.place / "objects")), *mounts],
            gpus,
        )
        return self.do(self.host.start(wrapped, cwd.name)), str(cwd)

    def end(self, job: Job) -> tuple[Exit, str]:
        exit = self.do(self.host.wait(job, LONG))
        assert exit is not None
        return exit, bytes(self.do(self.host.log(job, 0))).decode()

    def run(self, *argv: str, **more: Any) -> tuple[Exit, str]:
        return self.end(self.start(*argv, **more)[0])


@pytest.fixture(params=["apptainer", "pyxis"])
def box(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Box]:
    kind = request.param
    installed(tmp_path, monkeypatch)
    with asyncio.Runner() as loop:
        box = Box(kind, tmp_path, loop)
        yield box
        loop.run(box.host.aclose())


def installed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines, and the image team/trainer:1."""
    needs("root")
    needs("mount")
    real = shutil.which("enroot")
    cluster_engines.install(place / "bin", place / "images")
    (place / "images").mkdir()
    made = cluster_engines.image(place / "images" / "team_trainer:1", APPLETS)
    if real:  # which wants files of its own kind
        (place / "bin" / "enroot").unlink()
        cluster_engines.squashed(made)
    monkeypatch.setenv("PATH", f"{place}/bin", prepend=":")
    monkeypatch.setenv("ENROOT_DATA_PATH", f"{place}/enroot")
    monkeypatch.setenv("APPTAINER_CACHEDIR", f"{place}/cache")


def test_what_a_step_writes_is_there_and_its_environment_is_the_images_and_its_own(
    box: Box,
) -> None:
    (box.place / "data, set").mkdir()
    (box.place / "data, set" / "in").write_text("given")
    own = {
        "WORDS": "two\nlines ' \" $x \\",
        "LD_LIBRARY_PATH": "/opt/lib",
        "PATH": "/own:/bin",
        "RECIPE_METRICS": f"{box.place}/attempts/attempt 0.metrics",
    }
    script = f"pwd; echo made > out; cat '{box.place}/data, set/in'; echo x > '{box.place}/data, set/in' || echo; echo m >> $RECIPE_METRICS; echo -----; cat /proc/self/environ"
    exit, log = box.run(
        "sh",
        "-c",
        script,
        env=own,
        secrets={"TOKEN": TOKEN},
        mounts=[Mount(f"{box.place}/data, set")],
    )
    cwd = box.place / "attempts" / "attempt 0"
    assert exit.code == 0, log
    assert log.startswith(f"{cwd}\ngiven") and (cwd / "out").read_text() == "made\n"
    assert (box.place / "data, set" / "in").read_text() == "given", (
        "what is mounted to be read is not written"
    )
    env = dict(
        pair.split("=", 1) for pair in log.rpartition("-----\n")[2].split("\0") if "=" in pair
    )
    assert (
        {name: env.get(name) for name in own} == own
        and env["FROM_IMAGE"] == "yes"
        and env["TOKEN"] == TOKEN
    )
    assert not [
        name
        for name in env
        if name.startswith(("RECIPE_IN_", "ENROOT_DATA", "APPTAINER_CACHE", "XDG_"))
    ]
    assert (box.place / "attempts" / "attempt 0.metrics").read_text() == "m\n"
    assert not Path(f"{cwd}.box").exists() and TOKEN not in " ".join(map(str, box.place.rglob("*")))


def test_each_process_of_a_step_is_asked_to_end_once_and_has_the_time_that_it_needs(
    box: Box,
) -> None:
    script = (
        "trap 'echo outer >> told; wait; exit 7' TERM;"
        " sh -c 'trap \"echo inner >> told; exit\" TERM; echo ready; while :; do sleep 0.05; done' & while :; do sleep 0.05; done"
    )
    job, cwd = box.start("sh", "-c", script)
    until(lambda: b"ready\n" in box.do(box.host.log(job, 0)))
    box.do(box.host.stop(job, timedelta(seconds=20)))
    exit, log = box.end(job)
    assert (exit.code, exit.reason, exit.strays) == (7, "stopped", 0), log
    assert sorted(Path(cwd, "told").read_text().split()) == ["inner", "outer"]


def test_nothing_is_left_of_a_step_that_does_not_listen(box: Box) -> None:
    job, cwd = box.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    until(lambda: b"ready\n" in box.do(box.host.log(job, 0)))
    box.do(box.host.stop(job, timedelta(seconds=0.2)))
    assert box.end(job)[0].reason == "stopped"
    box.do(containers.remove_container(box.host, box.engine, cwd))
    assert not Path(f"{cwd}.box").exists()
    until(
        lambda: (
            not [
                path
                for path in Path("/proc").glob("[0-9]*/environ")
                if f"RECIPE_CONTAINER={Path(cwd).name}.box".encode() in _read(path)
            ]
        )
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_cannot_begin_says_why(box: Box) -> None:
    exit, log = box.run("no-such-program")
    assert exit.code in (127, 255), log
    words = containers.explain(exit, log.encode(), "the-image")
    assert (
        words.startswith("the image the-image does not have no-such-program")
        if box.kind == "apptainer"
        else words == ""
    ), log
    box.engine = replace(box.engine, args=("--no-such-flag",))
    exit, log = box.run("true")
    assert exit.code == 1 and ("no-such-flag" in log or "Usage: enroot start" in log)


def test_an_image_of_a_registry_is_fetched_once(box: Box) -> None:
    if not box.engine.program.startswith(str(box.place)):
        pytest.skip("a real Enroot asks a real registry")
    said: list[str] = []
    for _ in range(2):
        found = box.do(containers.pull_image(box.host, box.engine, "team/trainer:1", said.append))
    assert (
        said == ["pulling the image team/trainer:1 (first use only)"]
        and found.digest == "team/trainer:1"
    )
    with pytest.raises(CannotRun, match=r"cannot pull the image team/none:2: .*(unknown|404)"):
        box.do(containers.pull_image(box.host, box.engine, "team/none:2"))
    box.found = found
    assert box.run("sh", "-c", "echo $FROM_IMAGE")[1] == "yes\n"


@pytest.mark.parametrize(
    ("kind", "image", "address"),
    [
        ("apptainer", "pytorch/pytorch:2.13.0", "docker://pytorch/pytorch:2.13.0"),
        (
            "apptainer",
            "nvcr.io/nvidia/pytorch:26.10-py3@sha256:ab",
            "docker://nvcr.io/nvidia/pytorch@sha256:ab",
        ),
        ("apptainer", "oras://ghcr.io/team/trainer:7", "oras://ghcr.io/team/trainer:7"),
        ("enroot", "nvcr.io/nvidia/pytorch:26.10-py3", "docker://nvcr.io#nvidia/pytorch:26.10-py3"),
        ("enroot", "localhost:5000/a@sha256:ab", "docker://localhost:5000#a@sha256:ab"),
        ("enroot", "ubuntu", "docker://ubuntu"),
        ("enroot", "/images/trainer.sqsh", "/images/trainer.sqsh"),
    ],
)
def test_an_image_is_called_as_the_engine_calls_it(kind: str, image: str, address: str) -> None:
    assert cluster_containers.image_address(kind, image) == address


def test_gpus_are_given_in_the_way_the_engine_knows() -> None:
    plain, two = (
        Command(("true",), "/w/a", {}),
        (Device("1", "GPU-b", "1"), Device("0", "GPU-a", "0")),
    )
    apptainer, enroot = (
        Engine(kind, f"/bin/{kind}", "1", "", cards=2, gpus="own")
        for kind in ("apptainer", "enroot")
    )  # type: ignore[arg-type]

    def given(engine: Engine, gpus: tuple[Device, ...] | None) -> tuple[bool, object]:
        made = containers.wrap(plain, Image("i", "i"), engine, [], gpus)
        return "--nv" in made.argv, made.env.get(
            "CUDA_VISIBLE_DEVICES" if engine is apptainer else "NVIDIA_VISIBLE_DEVICES"
        )

    assert [given(apptainer, gpus) for gpus in (None, (), two)] == [
        (True, None),
        (False, None),
        (True, "1,0"),
    ]
    assert [given(enroot, gpus)[1] for gpus in (None, (), two)] == ["all", "void", "GPU-b,GPU-a"]
    with pytest.raises(CannotRun, match="requires 2 GPU"):
        containers.wrap(plain, Image("i", "i"), replace(enroot, gpus=""), [], two, needed=True)


def test_a_path_that_no_flag_can_spell_is_refused() -> None:
    assert (
        cluster_containers._csv_mount(Mount('/a,"b"'))
        == 'type=bind,"source=/a,""b""","destination=/a,""b""",ro'
    )
    assert (
        cluster_containers._fstab_mount(Mount("/a b", True))
        == "/a\\040b:/a\\040b:none:x-create=auto,bind,rw"
    )
    for spelled, path in (
        (cluster_containers._csv_mount, "/a\nb"),
        (cluster_containers._fstab_mount, "/a:b"),
    ):
        with pytest.raises(CannotRun, match="cannot mount"):
            spelled(Mount(path))
