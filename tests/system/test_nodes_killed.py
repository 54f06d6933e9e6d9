"""Promise: whatever is killed during a training on two nodes, and when, it ends in the same bits, begins nothing twice and leaves no lease.

A training of no packages tells of each of its nodes, in a folder outside, when it begins and ends, and holds a lock there as long as it lives.  Killed
are `recipe run`, over and over, and in other trainings single nodes: a machine that is gone, one that restarts, its agent, its sshd, slurmd or raylet.

RECIPE_NODE_KILLS says how often the worker is killed on each engine but Ray, which gets a third; a fourth of it is how often a node is.  60 is 250 in all.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import pytest

from drivers.loopback import Loopback, _end_all
from runner.storage.records.ledger import Ledger, of_workspace
from tests.servers.ray import LOOPBACK as RAY_STAYS_HERE
from tests.servers.ray import Ray
from tests.servers.slurm import Slurm
from tests.servers.sshd import Sshd, free_port
from tests.support import Workers, until

KILLS = int(os.environ.get("RECIPE_NODE_KILLS", "2"))
SEED = int(os.environ.get("RECIPE_NODE_SEED", "15"))
STEPS, PAUSE = 16, 0.1
PATIENCE = 180.0
AT_ONCE = 4
"""Kills of the worker in one training."""

# Each step needs a word of the other node.  Node 0 writes its part of a checkpoint first, with the list of what belongs to it, and answers then.
TRAIN = """
import fcntl, hashlib, json, os, shutil, socket, sys, time
latest, out, outside, steps, pause = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
rank, attempt = int(os.environ["NODE_RANK"]), os.path.basename(os.getcwd()).rpartition(".")[0]
first = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def tell(what):
    with open(f"{outside}/told", "a") as file:
        file.write(f"{what} {rank} {attempt}\\n")
def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()
def save(step, files):
    shutil.rmtree(f"ckpt/step-{step}", ignore_errors=True)
    os.makedirs("ckpt/tmp-new", exist_ok=True)
    for name, text in files.items():
        with open(f"ckpt/tmp-new/{name}", "w") as file:
            file.write(text)
    os.rename("ckpt/tmp-new", f"ckpt/step-{step}")
alone = open(f"{outside}/{rank}.lock", "a")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    tell("twice")
    sys.exit("another process is this node")
tell("begins")
done, digest = 0, ""
if latest != "none":
    with open(f"{latest}/rank-{rank}.json") as file:
        done, digest = json.load(file)
if rank == 0:
    with socket.create_server(("", first[1])) as listening:
        other = listening.accept()[0]
else:
    while True:
        try:
            other = socket.create_connection(first)
            break
        except OSError:
            time.sleep(0.02)
lines = other.makefile("rw")
for step in range(done + 1, steps + 1):
    mine = sha(f"{digest} {rank} {step}")
    if rank == 0:
        time.sleep(pause)
        both = sha(mine + (lines.readline().strip() or sys.exit("node 1 is gone")))
    else:
        print(mine, file=lines, flush=True)
        both = lines.readline().strip() or sys.exit("node 0 is gone")
    files = {f"rank-{n}.json": json.dumps([step, sha(f"{both} {n}")]) for n in (0, 1)}
    digest = sha(f"{both} {rank}")
    if rank == 0:
        listed = {name: sha(text) for name, text in files.items()}
        save(step, {"rank-0.json": files["rank-0.json"], "checkpoint.json": json.dumps({"step": step, "settings": {}, "files": listed})})
        print(both, file=lines, flush=True)
    else:
        save(step, {"rank-1.json": files["rank-1.json"]})
if rank == 0:
    with open(out, "w") as file:
        file.write(digest)
tell("ends")
"""
RECIPE = """
steps:
  train:
    nodes: 2
    run: exec python3 train.py {{{{ state.ckpt.latest | default("none") }}}} {{{{ outputs.o }}}} {outside} {steps} {pause}
    code: [train.py]
    retries: {{failure: 0}}
    state: {{ckpt: {{path: ckpt/, checkpoint: "step-*", every: 1s, keep: 2}}}}
    outputs: {{o: o}}
"""


class Hit(NamedTuple):
    """What was done to a node."""

    what: str
    mortal: bool
    """Whether what ran there is dead."""


class Engine(ABC):
    """Two hosts of a driver, and what can be done to them."""

    driver = ""
    share = 1
    """It gets this part of the kills."""
    span = 4.0
    """Seconds in which a training there may be over."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @abstractmethod
    def settings(self, space: Workers) -> str:
        """What `recipe.toml` of a workspace says."""

    @abstractmethod
    def hurt(self, space: Workers, luck: random.Random) -> Hit | None:
        """Do something to one node; None where nothing of the run is there yet."""

    @abstractmethod
    def left(self, space: Workers) -> list[str]:
        """What is taken still."""


class OnLoopback(Engine):
    driver = "loopback"

    def settings(self, space: Workers) -> str:
        return "[drivers.loopback]\nhosts = 2\n"

    def hurt(self, space: Workers, luck: random.Random) -> Hit | None:
        driver = self._driver(space)
        if not (leases := asyncio.run(driver.leases())):
            return None
        lease, what = luck.choice(list(leases)), luck.choice(("gone", "restarted", "agent"))
        home = space.root / ".recipe" / "loopback" / lease.data["host"]
        if what == "gone":
            driver._lose(lease)
        elif what == "restarted":
            _end_all(home)
        else:
            end_agents(f"{home}/.recipe-host")
        return Hit(f"{lease.data['host']} {what}", what != "agent")

    def left(self, space: Workers) -> list[str]:
        return [lease.id for lease in asyncio.run(self._driver(space).leases())] + attempts(
            space.root / ".recipe" / "loopback", "*/.recipe-host"
        )

    def _driver(self, space: Workers) -> Loopback:
        return Loopback(space.root / ".recipe" / "loopback", hosts=2)


class OnSsh(Engine):
    driver = "ssh"

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._servers = [
            self.stack.enter_context(Sshd(place / f"sshd-{number}")) for number in (1, 2)
        ]
        self._servers[1].trust((self._servers[0].place / "client.pub").read_text())
        self._known = place / "known_hosts"
        self._known.write_text("".join(server.known_hosts.read_text() for server in self._servers))

    def settings(self, space: Workers) -> str:
        hosts = [server.address for server in self._servers]
        return f"[drivers.ssh]\nhosts = {json.dumps(hosts)}\nknown_hosts = '{self._known}'\nidentity = '{self._servers[0].identity}'\nagent = false\n"

    def hurt(self, space: Workers, luck: random.Random) -> Hit | None:
        number, what = luck.choice((0, 1)), luck.choice(("sshd", "restarted", "agent"))
        server = self._servers[number]
        if what == "sshd":
            server.stop()
            server.start()
        elif what == "restarted":
            server.reboot()
        else:
            end_agents(f"{server.home}/.recipe-host")
        return Hit(f"host {number} {what}", what == "restarted")

    def left(self, space: Workers) -> list[str]:
        found = []
        for server in self._servers:
            found += [
                path.name
                for path in server.home.glob(".recipe-host/leases/[!.]*")
                if path.name != "lock"
            ] + attempts(server.home, ".recipe-host")
        return found


class OnSlurm(Engine):
    driver = "slurm"
    span = 6.0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._cluster = self.stack.enter_context(Slurm())
        patch.setenv("SLURM_CONF", self._cluster.env["SLURM_CONF"])

    def settings(self, space: Workers) -> str:
        return f"[drivers.slurm]\nroot = '{space.root.parent}/there'\n"

    def hurt(self, space: Workers, luck: random.Random) -> Hit | None:
        node, what = luck.choice(("n1", "n2")), luck.choice(("slurmd", "restarted", "agent"))
        if what == "agent":
            end_agents(f"{space.root.parent}/there/{node}")
        else:
            self._cluster.restart(node, everything=what == "restarted")
        return Hit(f"{node} {what}", what == "restarted")

    def left(self, space: Workers) -> list[str]:
        return self._cluster.jobs()


class OnRay(Engine):
    driver = "ray"
    share = 3
    span = 8.0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        ray = pytest.importorskip("ray", reason="ray is not installed")
        super().__init__()
        self._cluster = self.stack.enter_context(Ray())
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        for name, value in {**RAY_STAYS_HERE, "RAY_ADDRESS": self._cluster.address}.items():
            patch.setenv(name, value)
        ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)
        self.stack.callback(ray.shutdown)

    def settings(self, space: Workers) -> str:
        return f"[drivers.ray]\nroot = '{space.root.parent}/there'\n"

    def hurt(self, space: Workers, luck: random.Random) -> Hit | None:
        self._cluster.add()
        self._cluster.kill()
        return Hit("raylet", True)

    def left(self, space: Workers) -> list[str]:
        from ray.util import list_named_actors, placement_group_table

        groups = [
            group["name"]
            for group in placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        return groups + [str(actor) for actor in list_named_actors(all_namespaces=True)]


ENGINES: dict[str, Callable[[Path, pytest.MonkeyPatch], Engine]] = {
    "loopback": lambda _place, _patch: OnLoopback(),
    "ssh": lambda place, _patch: OnSsh(place),
    "slurm": lambda _place, patch: OnSlurm(patch),
    "ray": lambda _place, patch: OnRay(patch),
}


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    found = ENGINES[request.param](tmp_path, monkeypatch)
    with found.stack:
        yield found


def end_agents(root: str) -> None:
    """Kill the agent of a host, and what brings it questions; not its jobs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if f"{root}/agent" in process.cmdline():
                process.kill()


def attempts(folder: Path, pattern: str) -> list[str]:
    """The attempts that lie on hosts below a folder still."""
    return [path.name for path in folder.glob(f"{pattern}/attempts/*")]


class Training:
    """A training in a workspace of its own, and the worker of its run."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self.engine, self.outside, self.log = engine, place / "outside", place / "said"
        self.space = Workers(place / "work")
        self.outside.mkdir()
        self.space.write("recipe.toml", engine.settings(self.space))
        self.space.write("train.py", TRAIN)
        self.space.recipe(RECIPE.format(outside=self.outside, steps=STEPS, pause=PAUSE))
        self.worker = self.begin()

    def begin(self) -> subprocess.Popen[str]:
        """Run it, or go on."""
        with self.log.open("a") as said:
            self.worker = self.space.start(
                "run", "--driver", self.engine.driver, stdout=said, stderr=said
            )
        return self.worker

    def over(self, after: float) -> bool:
        """Whether the worker is, so many seconds later."""
        with suppress(subprocess.TimeoutExpired):
            self.worker.wait(after)
        return self.worker.poll() is not None

    def told(self, what: str) -> list[tuple[str, str]]:
        """The nodes that told this, with the names of their attempts."""
        path = self.outside / "told"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(rank, attempt) for said, rank, attempt in lines if said == what]

    def whole(self) -> set[str]:
        """The attempts that have begun on both nodes."""
        begun = self.told("begins")
        return {name for rank, name in begun if rank == "0"} & {
            name for rank, name in begun if rank == "1"
        }

    def wrong(self, learned: str, most: int) -> list[str]:
        """What is not as it must be at the end, of a training that may have begun so many attempts."""
        code = self.worker.wait(PATIENCE)
        begun = self.told("begins")
        found = [f"it ended with {code}"] * bool(code)
        if (
            "everything is fresh" not in self.log.read_text()
        ):  # else it was killed before it tidied up, which the next run with a step there does
            found += [f"{each} is left" for each in self.engine.left(self.space)]
        found += [
            f"node {rank} of {name} began while it ran already" for rank, name in self.told("twice")
        ]
        found += [
            f"node {rank} of {name} began twice"
            for rank, name in {*begun}
            if begun.count((rank, name)) > 1
        ]
        if len({name for _, name in begun}) > most:
            found.append(f"{len({name for _, name in begun})} attempts began")
        if not code and self.space.read("o") != learned:
            found.append("it learned something else")
        with Ledger.open(of_workspace(self.space.root / ".recipe"), read_only=True) as known:
            found += [f"the ledger has {row.key} as {row.state}" for row in known.living_leases()]
        return found

    def story(self) -> str:
        """What was said and told, for who looks for a cause."""
        return self.log.read_text()[-8000:] + "\n".join(
            f"begins {' '.join(each)}" for each in self.told("begins")
        )


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training learns that nobody runs, and nothing disturbs."""
    place = tmp_path_factory.mktemp("alone")
    port, nodes = str(free_port()), []
    for rank in ("0", "1"):
        (place / f"a.{rank}" / "ckpt").mkdir(parents=True)
        env = {**os.environ, "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-c", TRAIN, "none", "o", str(place), str(STEPS), "0"],
                cwd=place / f"a.{rank}",
                env=env,
            )
        )
    assert [node.wait(60) for node in nodes] == [0, 0]
    return (place / "a.0" / "o").read_text()


FEW = [
    "loopback",
    *(pytest.param(name, marks=pytest.mark.proof) for name in ("ssh", "slurm", "ray")),
]


@pytest.mark.longer
@pytest.mark.parametrize("engine", FEW, indirect=True)
def test_a_training_on_two_nodes_outlives_every_kill_of_its_worker(
    engine: Engine, learned: str, tmp_path: Path
) -> None:
    """What had begun on both nodes goes on, and never begins again."""
    luck, kills, trainings = random.Random(SEED), 0, 0
    while kills < KILLS // engine.share:
        training, moments, most = Training(engine, tmp_path / f"t{trainings}"), list[float](), STEPS
        trainings += 1
        while len(moments) < AT_ONCE and kills < KILLS // engine.share:
            moments.append(round(luck.uniform(0.2, engine.span), 2))
            if training.over(moments[-1]):
                break
            training.worker.send_signal(signal.SIGKILL)
            training.worker.wait(60)
            kills += 1
            if training.whole():
                most = min(most, len({name for _, name in training.told("begins")}))
            training.begin()
        wrong = training.wrong(learned, most)
        assert not wrong, (
            f"{wrong}, seed {SEED}, training {trainings}, killed after {moments} s\n{training.story()}"
        )
        print(f"{engine.driver}: {kills} kills of the worker, {trainings} trainings", flush=True)


@pytest.mark.longer
@pytest.mark.parametrize("engine", FEW, indirect=True)
def test_a_training_on_two_nodes_outlives_what_is_done_to_one_of_them(
    engine: Engine, learned: str, tmp_path: Path
) -> None:
    """It begins again once at most, and only where what ran there is dead."""
    luck, hits, trainings = random.Random(SEED), list[str](), 0
    while len(hits) < max(1, KILLS // engine.share // 4):
        training = Training(engine, tmp_path / f"t{trainings}")
        trainings += 1
        moment = round(luck.uniform(0, STEPS * PAUSE), 2)
        until(lambda: training.whole() or training.worker.poll() is not None)  # noqa: B023
        if training.over(moment) or (hit := engine.hurt(training.space, luck)) is None:
            training.worker.wait(PATIENCE)
            continue
        hits.append(hit.what)
        wrong = training.wrong(learned, 2 if hit.mortal else 1)
        assert not wrong, (
            f"{wrong}, seed {SEED}, training {trainings}, {hit.what} after {moment} s of it\n{training.story()}"
        )
        print(
            f"{engine.driver}: {len(hits)} nodes, the last: {hit.what} after {moment} s of its training",
            flush=True,
        )
