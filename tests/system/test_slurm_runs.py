"""Whole runs on a cluster of Slurm, as somebody at a prompt meets them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import runner
from drivers import slurm as driver
from runner.errors import Invalid, RecipeError
from runner.execution.terms import Settings
from tests.servers import cluster_engines
from tests.servers.slurm import CGROUPS, Slurm, slurm  # noqa: F401  (a fixture)
from tests.servers.sshd import Sshd
from tests.support import RECIPE, Space, Workers, until
from tests.tools import needs

SLURM = Settings(driver="slurm")
STEPS = int(os.environ.get("RECIPE_SLURM_STEPS", "40"))
COMMANDS = ("sinfo", "sbatch", "squeue", "scancel", "srun", "scontrol")


@pytest.fixture
def cluster(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:  # noqa: F811
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    yield slurm
    slurm.cancel()


@pytest.fixture
def space(cluster: Slurm, tmp_path: Path) -> Iterator[Space]:
    """A workspace; what is on the nodes is beside it."""
    space = Workers(tmp_path / "work")
    settings(space)
    yield space
    space.end()


def settings(space: Space, more: str = "") -> None:
    space.write("recipe.toml", f"[drivers.slurm]\nroot = '{space.root.parent}/there'\n{more}\n")


def test_a_step_on_two_nodes_is_one_allocation_and_nothing_is_left_of_it(
    space: Space, cluster: Slurm
) -> None:
    space.recipe(
        "steps:\n"
        "  a: {run: 'env | cut -d= -f1 | grep SLURM | wc -l > {{ outputs.o }}', outputs: {o: o.txt}}\n"
        "  b: {nodes: 2, deps: [o.txt], run: 'echo $NODE_RANK of $NNODES; pwd > {{ outputs.p }}', outputs: {p: p.txt}}\n"
    )
    assert space.run(settings=SLURM) == ["a", "b"]
    assert space.read("o.txt").strip() == "0", "a step is not told that it is a job of Slurm"
    assert re.search("/there/n[12]/attempts/", space.read("p.txt"))
    assert [space.command("logs", "b", "--node", str(rank))[1] for rank in (0, 1)] == [
        "0 of 2\n",
        "1 of 2\n",
    ]
    assert (
        cluster.jobs() == [] and len(cluster.ask("scontrol", "show", "job", "-o").splitlines()) >= 1
    )
    assert space.run() == [], "what was made on a cluster is fresh here"


def test_a_step_in_a_sandbox_on_two_nodes_sees_its_own_files_alone(space: Space) -> None:
    needs("sandbox")
    space.recipe(
        "steps:\n"
        "  a:\n"
        "    nodes: 2\n"
        "    sandbox: {network: true}\n"
        f"    run: 'ls {space.root} > o.txt 2>&1 || echo $NODE_RANK of $NNODES > o.txt'\n"
        "    outputs: {o: o.txt}\n"
    )
    assert space.run(settings=SLURM) == ["a"]
    assert space.read("o.txt") == "0 of 2\n"


def test_prices_of_nodes_are_shown_asked_about_counted_and_held_to_the_limit(
    space: Space, cluster: Slurm
) -> None:
    def recipe(words: str, more: str = "") -> None:
        space.recipe(f"steps: {{s: {{nodes: 2, run: 'echo {words}'}}}}\n{more}")

    recipe("one", "limits: {cost: 6 USD}")
    settings(space, "prices = {main = '30 USD'}")
    assert (
        "allocates for the run: slurm main, 2 nodes, $60.000 an hour"
        in space.command("plan", "--driver", "slurm")[1]
    )
    (told,) = json.loads(space.command("offers", "--driver", "slurm", "--json")[1])
    assert [(offer["id"], offer["usd_an_hour"]) for offer in told["offers"]] == [
        ("main", 30.0),
        ("short", 0.0),
    ]
    assert space.run(settings=SLURM) == ["s"]
    (cost,) = json.loads(space.command("report", "--cost", "--json")[1])["leases"]
    assert (
        cost["offer"] == "main"
        and cost["usd"] == pytest.approx(60 * cost["hours"], rel=0.05)
        and 0 < cost["hours"] < 0.02
    )
    recipe("two", "limits: {cost: 4 USD}")
    with pytest.raises(Invalid, match=r"only \$4 of `limits.cost` is left.*\$60.00 an hour"):
        space.run(settings=SLURM)
    recipe("two")
    settings(space, "prices = {main = '30 USD'}\nconfirm = 0")
    code, _, said = space.command("run", "--driver", "slurm")
    assert code == 3 and "the run would cost about $" in said, said
    settings(space, "prices = {man = '30 USD'}")
    with pytest.raises(RecipeError, match='unknown partition "man", did you mean "main"'):
        space.run(settings=SLURM)
    assert cluster.jobs() == []


def test_a_worker_that_is_killed_leaves_its_allocation_to_the_next_and_the_step_begins_once(
    space: Space, cluster: Slurm
) -> None:
    gate, begun = space.root / "gate", space.root / "begun"

    def steps() -> list[str]:
        return cluster.ask("squeue", "-h", "-s", "-o", "%i").split()

    space.recipe(
        "recipe: other@1\nsummary: Another\nsteps: {other: {run: 'true'}}", name="other.yaml"
    )
    space.recipe(
        f"steps: {{s: {{shell: bash, outputs: {{o: o.txt}}, run: 'echo begun >> {begun}; until [ -e {gate} ]; do read -t 0.05 x <> <(:) || :; done;"
        " echo made > o.txt'}}"
    )
    worker = space.start("run", "--driver", "slurm")
    until(begun.exists, seconds=30)
    before = cluster.jobs()
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    until(lambda: len(steps()) == 2, seconds=30)
    _, _, said = space.command("run", "./other.yaml", "--driver", "slurm")
    assert (
        "its run lost its worker; left running; terminate it with `recipe reap" in said
        and cluster.jobs() == before
    )
    again = space.start("run", "--driver", "slurm")
    until(lambda: again.poll() is not None or len(steps()) > 2, seconds=30)
    assert cluster.jobs() == before
    gate.touch()
    _, told = again.communicate(timeout=60)
    assert again.returncode == 0, told
    assert begun.read_text() == "begun\n" and space.read("o.txt") == "made\n", told
    assert cluster.jobs() == []


def test_a_step_whose_allocation_is_taken_away_begins_again_in_another(
    space: Space, cluster: Slurm
) -> None:
    gate, begun = space.root / "gate", space.root / "begun"
    space.recipe(
        f"steps: {{s: {{run: 'echo begun >> {begun}; until [ -e {gate} ]; do sleep 0.05; done; echo made > o.txt', outputs: {{o: o.txt}}}}}}"
    )
    worker = space.start("run", "--driver", "slurm")
    until(begun.exists, seconds=30)
    before = cluster.jobs()
    cluster.cancel()
    until(lambda: begun.read_text() == "begun\n" * 2 or worker.poll() is not None, seconds=60)
    gate.touch()  # not before: a step that is asked to end could end well
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said
    assert f": Slurm job {before[0]} has finished" in said and " replaces " in said
    assert begun.read_text() == "begun\n" * 2 and cluster.jobs() == []


TRAIN = """
import hashlib, json, os, pathlib, signal, sys, time
latest, out, steps, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
done, digest, begun = json.loads(pathlib.Path(latest, "done").read_text()) if latest != "none" else (0, "", 0)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
for step in range(done + 1, steps + 1):
    digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    time.sleep(pause)
    while not pause and begun == 0 and step == 5 and not asked:
        time.sleep(0.02)  # the first attempt is in the middle when its time is over
    if asked:
        pathlib.Path("ckpt/new").mkdir(parents=True)
        pathlib.Path("ckpt/new/done").write_text(json.dumps([step, digest, begun + 1]))
        os.rename("ckpt/new", f"ckpt/step-{step}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
print("attempts before this:", begun)
pathlib.Path(out).write_text(digest)
"""


@pytest.mark.parametrize(
    ("grace", "steps", "pause", "nodes"),
    [
        ("grace = 55", 9, 0, 1),
        pytest.param("grace = 50", 9, 0, 2, marks=pytest.mark.proof),
        pytest.param("", 1800, 0.1, 1, marks=pytest.mark.proof),
    ],
)
def test_a_training_outlives_its_walltime_and_learns_the_same(
    space: Space, cluster: Slurm, grace: str, steps: int, pause: float, nodes: int
) -> None:
    """A minute is the shortest walltime of Slurm: SIGTERM comes after five seconds of it, or, by default, after 45, to a training of three minutes."""
    settings(space, f"partition = 'short'\n{grace}")
    space.write("train.py", TRAIN)
    space.recipe(f"""steps:
  s:
    nodes: {nodes}
    run: exec python3 train.py {{{{ state.ckpt.latest | default("none") }}}} {{{{ outputs.o }}}} {steps} {pause}
    code: [train.py]
    retries: {{preemption: 0}}
    state: {{ckpt: {{path: ckpt/, checkpoint: "step-*", every: 1s}}}}
    outputs: {{o: o}}
""")
    run = space.start("run", "--driver", "slurm")
    _, said = run.communicate(timeout=60 + steps)
    assert run.returncode == 0, said
    digest = ""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    assert space.read("o") == digest, "bit-equal to a training that nobody interrupted"
    assert (
        "s is saving a checkpoint and will resume on another host" in said
        and "replaces slurm n" in said
    )
    begun = int(space.command("logs", "s")[1].rpartition("before this: ")[2])
    assert begun + 1 >= (3 if pause else 2), said
    assert cluster.jobs() == []


def test_at_the_walltime_a_step_saves_although_its_worker_is_gone(
    space: Space, cluster: Slurm
) -> None:
    settings(space, "partition = 'short'\ngrace = 57")
    space.write("train.py", TRAIN)
    begun = space.root / "begun"
    space.recipe(f"""steps:
  s:
    run: touch {begun}; exec python3 train.py none {{{{ outputs.o }}}} 10000 0.05
    code: [train.py]
    state: {{ckpt: {{path: ckpt/, checkpoint: "step-*"}}}}
    outputs: {{o: o}}
""")
    worker = space.start("run", "--driver", "slurm")
    there = space.root.parent / "there"
    until(lambda: begun.exists() or worker.poll() is not None, seconds=30)
    worker.kill()
    worker.communicate()
    until(lambda: list(there.glob("n*/states/*/ckpt/step-*/done")), seconds=30)


def test_a_run_says_why_it_waits_and_gives_up_what_can_never_begin(
    space: Space, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(space, "partition = 'short'\ntime = 10")
    told: list[str] = []

    def say(_listener: object, text: str) -> None:
        told.append(text)
        if "is waiting in the Slurm queue (Partition" in text:
            monkeypatch.setattr(
                driver, "PATIENCE", 0.0
            )  # not before: Slurm may need longer to say why

    monkeypatch.setattr(runner._Calls, "say", say)
    space.recipe("steps: {s: {run: 'true'}}")
    with pytest.raises(
        RecipeError, match=r"cannot start: the partition .*lower time limit than `time`"
    ):
        space.attempt(settings=SLURM)
    assert any("is waiting in the Slurm queue (Partition" in words for words in told)
    assert cluster.jobs() == []


@pytest.mark.longer
def test_many_steps_cost_the_controller_few_questions(
    space: Space, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, asked, path = (space.root.parent / name for name in ("counted", "asked", "bin"))
    path.mkdir()
    for name in COMMANDS:
        wrapper = path / name
        log = f'echo "$*" >> {asked}\n' if name == "sbatch" else ""
        wrapper.write_text(
            f'#!/bin/sh\necho {name} >> {counted}\n{log}exec {shutil.which(name)} "$@"\n'
        )
        wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(path), prepend=":")
    space.recipe(
        f"steps: {{s: {{matrix: {{n: {list(range(STEPS))}}}, run: 'true', resources: {{cpus: 1}}}}}}"
    )
    assert len(space.run(settings=SLURM)) == STEPS
    said = counted.read_text().split()
    tried, submitted = asked.read_text().splitlines()
    assert (
        "--test-only" in tried and "--nodes=1" in submitted and "--cpus-per-task=2" in submitted
    ), "one allocation, as large as a node"
    assert len(said) < 36 <= STEPS, {
        name: said.count(name) for name in COMMANDS
    }  # a busy machine holds a few streams more


def test_an_allocation_without_work_ends_itself(space: Space, cluster: Slurm) -> None:
    settings(space, "idle = 1")
    space.recipe("steps: {s: {run: 'echo begun > begun; sleep 1000', outputs: {o: o.txt}}}")
    worker = space.start("run", "--driver", "slurm")
    until(
        lambda: (
            list(space.root.parent.glob("there/n*/attempts/*/begun")) or worker.poll() is not None
        ),
        seconds=30,
    )
    worker.kill()
    worker.communicate()
    assert cluster.jobs(), "a step runs there"
    for cwd in space.root.parent.glob("there/n*/attempts/*"):
        cluster.ask("pkill", "-f", "sleep 1000", check=False) if cwd.is_dir() else None
    until(lambda: not cluster.jobs(), seconds=90)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_in_the_queue_leaves_no_job_there(
    space: Space, cluster: Slurm, number: signal.Signals
) -> None:
    cluster.ask("sbatch", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 100")
    space.recipe("steps: {s: {run: 'true'}}")
    worker = space.start("run", "--driver", "slurm")
    until(lambda: len(cluster.jobs()) == 2 or worker.poll() is not None, seconds=30)
    worker.send_signal(number)
    _, said = worker.communicate(timeout=30)
    assert worker.returncode == 130, said
    assert len(cluster.jobs()) == 1
    assert "released the request" in said


@pytest.mark.parametrize(
    ("more", "nodes", "code", "words"),
    [
        ("", 3, 5, "partition main has 2 nodes, but 3 are requested"),
        ("partition = 'mian'", 1, 5, 'unknown partition "mian", did you mean "main"?'),
        ("time = 'soon'", 1, 3, "time"),
        ("options = ['--nodes=7']", 1, 3, "`options` cannot contain"),
        ("container = 'aptainer'", 1, 3, 'did you mean "apptainer"?'),
        ("constraint = 'h100'", 1, 5, "no matching node"),
        ("constraint = 'a100_80gb-sxm'", 1, 5, "no matching node"),
        ("gres = 'gpu:8'", 1, 5, "no matching node"),
        ("options = ['--reservation=zz']", 1, 5, "Requested reservation is invalid"),
        (
            "memory = '64G'",
            1,
            5,
            "Slurm rejected the job: Requested node configuration is not available",
        ),
        ("python = '/nowhere/python3'", 1, 5, "has no Python 3.9 or later"),
        ("root = '/proc/nowhere'", 1, 5, "is not writable"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_in_a_sentence_and_nothing_is_left_in_the_queue(
    space: Space, cluster: Slurm, more: str, nodes: int, code: int, words: str
) -> None:
    if "root" in more:
        space.write("recipe.toml", f"[drivers.slurm]\n{more}\n")
    else:
        settings(space, more)
    space.recipe(f"steps: {{s: {{nodes: {nodes}, run: 'true'}}}}")
    began = time.monotonic()
    with pytest.raises(RecipeError) as refused:
        space.attempt(settings=SLURM)
    assert (refused.value.exit_code, words in str(refused.value)) == (code, True), refused.value
    assert time.monotonic() - began < 10 and cluster.jobs() == []


def test_the_commands_of_slurm_may_run_on_a_login_node(
    space: Space, cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = f"HOME={tmp_path / 'sshd' / 'home'}"
    with Sshd(
        tmp_path / "sshd", options=[f"SetEnv SLURM_CONF={cluster.env['SLURM_CONF']} {home}"]
    ) as login:
        keys = f"identity = '{login.identity}', known_hosts = '{login.known_hosts}', agent = false"
        settings(space, f"login = {{host = '{login.address}', {keys}}}")
        monkeypatch.setenv("SLURM_CONF", "/nowhere")
        space.recipe("steps: {s: {run: 'pwd > o.txt', outputs: {o: o.txt}}}")
        assert space.run(settings=SLURM) == ["s"]
    assert re.search("/there/n[12]/attempts/", space.read("o.txt"))
    monkeypatch.undo()
    assert cluster.jobs() == []


def test_a_worker_in_the_cluster_outlives_its_own_job_and_the_step_begins_once(
    space: Space, cluster: Slurm
) -> None:
    gate, begun = space.root / "gate", space.root / "begun"
    space.recipe(
        f"steps: {{s: {{run: 'echo begun >> {begun}; until [ -e {gate} ]; do sleep 0.05; done; echo made > o.txt', outputs: {{o: o.txt}}}}}}"
    )
    code, out, said = space.command("run", "--driver", "slurm", "--in-cluster")
    assert code == 0, said
    first = re.search(r"job (\d+) executes this run", out)
    log = re.search(r"tail -F (\S+)", out)
    assert first and log
    until(begun.exists, seconds=30)
    cluster.ask(
        "scancel", "--batch", "--signal=USR1", first[1]
    )  # as Slurm does before the end of its time
    until(lambda: Path(log[1]).read_text().count("resuming run") == 1, seconds=30)
    gate.touch()
    until(lambda: not cluster.jobs(), seconds=30)
    assert space.read("o.txt") == "made\n" and begun.read_text() == "begun\n", Path(
        log[1]
    ).read_text()
    assert (
        space.command("run", "--driver", "slurm", "--in-cluster")[1].count("executes this run") == 0
    ), "nothing is submitted where all is fresh"
    assert space.command("run", "--in-cluster", "-B")[0] == 2, "only a cluster has such jobs"
    assert space.command("watch", "--driver", "slurm", "--in-cluster")[0] == 2, (
        "does not support --in-cluster"
    )


def test_large_inputs_on_a_disk_of_the_cluster_are_read_where_they_lie(
    space: Space, cluster: Slurm
) -> None:
    """The nodes see the workspace: no byte of a data set is copied, for one node or for two, and what is made is stored as ever."""
    (space.root / "data").mkdir()
    for name in ("a.bin", "b.bin"):
        with (space.root / "data" / name).open("wb") as file:
            file.write(os.urandom(200_000))
            file.truncate(40 << 20)
    space.recipe(
        "steps:\n"
        "  make: {deps: [data], run: 'readlink -f data data/a.bin > {{ outputs.where }}; head -c 200000 data/a.bin > {{ outputs.all }}', outputs: {where: where.txt, all: all.bin}}\n"
        "  use: {nodes: 2, deps: [all.bin], run: 'stat -c %i all.bin; sha256sum < all.bin > {{ outputs.sum }}', outputs: {sum: sum.txt}}\n"
    )
    assert space.run(settings=SLURM) == ["make", "use"]
    folder, file = space.read("where.txt").split()
    assert file == str(space.root / "data/a.bin") and folder != str(space.root / "data")
    digest = hashlib.sha256((space.root / "all.bin").read_bytes()).hexdigest()
    assert space.read("sum.txt").split()[0] == digest
    stored = (space.root / ".recipe/objects" / digest[:2] / digest).stat().st_ino
    for rank in ("0", "1"):
        assert space.command("logs", "use", "--node", rank)[1].split()[0] == str(stored)
    assert space.run() == []


def test_an_input_that_is_edited_while_a_node_reads_it_makes_no_result(
    space: Space, cluster: Slurm
) -> None:
    with (space.root / "data.bin").open("wb") as file:
        file.truncate(65 << 20)
    space.recipe(
        f"steps: {{s: {{deps: [data.bin], run: 'echo > {space.root}/began; read go < {space.root}/gate; wc -c data.bin > o', outputs: {{o: o}}}}}}"
    )
    os.mkfifo(space.root / "gate")
    worker = space.start("run", "--driver", "slurm")
    until((space.root / "began").exists, seconds=30)
    with (space.root / "data.bin").open("ab") as file:
        file.write(b"more")
    (space.root / "gate").write_text("go\n")
    _, said = worker.communicate(timeout=60)
    assert (
        worker.returncode == 1 and "the step or another process changed its input data.bin" in said
    )
    assert not (space.root / "o").exists()


@pytest.mark.parametrize("container", ["apptainer", pytest.param("pyxis", marks=pytest.mark.proof)])
def test_the_image_of_a_step_is_entered_on_each_of_its_nodes(
    space: Space, cluster: Slurm, container: str
) -> None:
    """A program of `setup` runs it, as a child of the agent: no srun inside of srun, and what a node is given comes through."""
    needs("root")
    there = space.root.parent
    cluster_engines.install(there / "bin", there)
    cluster_engines.image(there / "team_trainer:1", ("sh", "cat", "echo", "env"))
    (space.root / "big.bin").write_bytes(bytes(2 << 20))
    path = f"export PATH={there}/bin:$PATH APPTAINER_CACHEDIR={there}/cache ENROOT_DATA_PATH={there}/rootfs"
    settings(space, f"container = '{container}'\nsetup = ['{path}']")
    space.recipe(
        "image: team/trainer:1\nsteps: {s: {nodes: 2, deps: [big.bin], outputs: {o: o.txt},"
        " run: 'cat big.bin > /dev/null; echo $NODE_RANK of $NNODES, $FROM_IMAGE; echo made > {{ outputs.o }}'}}"
    )
    assert space.run(settings=SLURM) == ["s"]
    assert space.read("o.txt") == "made\n"
    assert [space.command("logs", "s", "--node", str(rank))[1] for rank in (0, 1)] == [
        "0 of 2, yes\n",
        "1 of 2, yes\n",
    ]


def test_doctor_describes_the_cluster(space: Space) -> None:
    code, out, _ = space.command("doctor", "--driver", "slurm")
    assert (
        code == 0
        and "proctrack/" in out
        and "main (2 nodes, no limit), short (2 nodes, 1 minutes)" in out
    )
    assert (
        re.search(r"a node +n[12]: Python 3\.", out)
        and f"{space.root.parent}/there, on a disk that this machine sees" in out
    )
    assert not (space.root.parent / "there").exists(), "nothing is left of the look"
    settings(space, "python = '/nowhere/python3'")
    assert "has no Python 3.9" in "".join(map(str, space.command("doctor", "--driver", "slurm")))


def test_two_allocations_that_share_a_node_share_no_agent(space: Space, cluster: Slurm) -> None:
    """An agent begins its jobs inside its own allocation: with one agent for both, the end of the first would be the end of what the second runs."""
    settings(space, "cpus = 1\noptions = ['--nodelist=n1']")
    gate, begun = space.root / "gate", space.root / "begun"
    hold = f"echo $0 >> {begun}; until [ -e {gate} ]; do sleep 0.05; done"
    space.recipe(f"steps: {{one: {{run: '{hold}; echo 1 > o.txt', outputs: {{o: o.txt}}}}}}")
    other = Workers(space.root.parent / "other")
    settings(other, "cpus = 1\noptions = ['--nodelist=n1']")
    other.recipe(f"steps: {{two: {{run: '{hold}; pwd > p.txt', outputs: {{p: p.txt}}}}}}")
    first = space.start("run", "--driver", "slurm")
    until(begun.exists, seconds=30)
    [before] = cluster.jobs()
    second = other.start("run", "--driver", "slurm")
    until(lambda: len(begun.read_text().splitlines()) == 2, seconds=30)
    cluster.ask("scancel", before)
    until(lambda: len(begun.read_text().splitlines()) == 3 or first.poll() is not None, seconds=60)
    gate.touch()  # not before: a step that is asked to end could end well
    for worker in (first, second):
        _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0, said
    assert len(begun.read_text().splitlines()) == 3, (
        "the step whose allocation was cancelled begins again, the other goes on"
    )
    assert "/there/n1.2/attempts/" in other.read("p.txt") and cluster.jobs() == []
    other.end()


def test_two_jobs_of_slurm_on_one_node_have_an_agent_each(space: Space, cluster: Slurm) -> None:
    """Else the steps of the second would die with the first, and count against its memory."""
    jobs = []
    for name in ("one", "two"):
        step = f"cat /proc/self/cgroup > cg; read go < {space.root}/{name}; mv cg $O"
        os.mkfifo(space.root / name)
        outputs = {"o": f"{name}.txt"}
        recipe = {"s": {"run": step, "env": {"O": "{{ outputs.o }}"}, "outputs": outputs}}
        space.recipe({"steps": recipe}, name=f"{name}.yaml")
        words = " ".join((*RECIPE, "run", "-f", f"{name}.yaml", "--driver", "local"))
        command = (f"--chdir={space.root}", "-w", "n1", f"--output={name}.log", f"--wrap={words}")
        jobs.append(cluster.ask("sbatch", "--parsable", *command))
        until(partial(begun, space, len(jobs)))
    assert len(list(space.root.glob(".recipe/local/*/journal"))) == 2
    first, second = jobs
    cluster.ask("scancel", first)
    until(lambda: cluster.ask("squeue", "-h", "-o", "%i") == second)
    (space.root / "two").write_text("go\n")
    until(lambda: (space.root / "two.txt").exists())
    if CGROUPS:
        assert f"/job_{second}/" in space.read("two.txt")


def begun(space: Space, count: int) -> bool:
    return len(list(space.root.glob(".recipe/attempts/*/cg"))) == count
