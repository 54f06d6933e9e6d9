"""A step has the limits, the niceness and the namespaces of the run that started it, and a resumed run finds the jobs of an earlier one anywhere."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.hosts.link import local_agents
from tests.support import RECIPE, Workers, until
from tests.tools import needs

SHOW = 'ulimit -n; umask; nice; taskset -p $$ | sed "s/.*: //"'


class Yard(Workers):
    """A workspace whose runs are begun in a shell of their own each."""

    def begin(self, shell: str, *words: str) -> subprocess.Popen[str]:
        """The command line, after a shell script that sets its limits."""
        return self.within(["sh", "-c", f'{shell}\nexec "$@"', "sh"], *words)

    def within(self, before: list[str], *words: str) -> subprocess.Popen[str]:
        """The command line, run by other programs."""
        process = subprocess.Popen(
            [*before, *RECIPE, *words],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def done(self, process: subprocess.Popen[str]) -> str:
        """What a run said that must have gone well."""
        told, said = process.communicate(timeout=60)
        assert process.returncode == 0, told + said
        return said

    def starts(self, step: str = "slow") -> int:
        found = self.root / "starts"
        return found.read_text().split().count(step) if found.exists() else 0

    def gated(self, *, changed: bool = False) -> None:
        """A recipe of a step that waits for a line from `gate`, and one after it that shows its limits; `changed`: with other keys."""
        gate = self.root / "gate"
        if not gate.exists():
            os.mkfifo(gate)
        self.recipe(
            {
                "steps": {
                    "slow": {
                        "env": {"CHANGED": str(changed)},
                        "run": f"echo slow >> {self.root}/starts; read go < {gate}; echo made > {{{{ outputs.o }}}}",
                        "outputs": {"o": "slow.txt"},
                    },
                    "after": {
                        "env": {"CHANGED": str(changed)},
                        "run": f"({SHOW}) > {{{{ outputs.o }}}}",
                        "deps": ["slow.txt"],
                        "outputs": {"o": "after.txt"},
                    },
                }
            },
            name="slow.yaml",
        )

    def open_gate(self) -> None:
        gate = os.open(self.root / "gate", os.O_RDWR)
        os.write(gate, b"go\n")
        until(lambda: not _waiting(gate))
        os.close(gate)

    def agents(self) -> dict[int, Path]:
        """The agents of this workspace that live, and their roots."""
        return agents_below(self.root / ".recipe/local")


def _waiting(gate: int) -> bool:
    import array
    import fcntl
    import termios

    left = array.array("i", [0])
    fcntl.ioctl(gate, termios.FIONREAD, left)
    return left[0] > 0


def agents_below(folder: Path) -> dict[int, Path]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                for word in Path("/proc", entry, "cmdline").read_bytes().split(b"\0"):
                    if word.startswith(os.fsencode(folder)):
                        found[int(entry)] = Path(os.fsdecode(word))
    return found


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path / "work")
    yield yard
    for pid in yard.agents():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    yard.end()


def killed_while_slow_waits(yard: Yard, shell: str = ":", *, long: bool = True) -> None:
    """A run whose worker is dead, while its first step goes on waiting at the gate."""
    if not long:  # a step that was always short
        yard.gated(changed=True)
        first = yard.begin(shell, "run", "-f", "slow.yaml")
        yard.open_gate()
        yard.done(first)
        (yard.root / "starts").unlink()
        until(lambda: not yard.agents())
    yard.gated()
    worker = yard.begin(shell, "run", "-f", "slow.yaml")
    until(lambda: yard.starts() == 1)
    worker.kill()
    worker.communicate()


OTHER = "umask 077; ulimit -n 333"


@pytest.mark.parametrize("long", [True, False], ids=["outlives its agent", "does not"])
def test_a_run_resumed_in_another_shell_waits_for_the_job_that_lives(
    yard: Yard, long: bool
) -> None:
    killed_while_slow_waits(yard, long=long)
    after = yard.begin(OTHER, "run", "-f", "slow.yaml")
    until(lambda: len(yard.agents()) == 2)
    yard.open_gate()
    yard.done(after)
    assert yard.starts() == 1
    assert yard.read("after.txt").split()[:2] == ["333", "0077"], (
        "what the resumed run starts has its own limits"
    )


def test_a_job_that_ended_unseen_is_collected_from_another_shell(yard: Yard) -> None:
    killed_while_slow_waits(yard)
    yard.open_gate()
    until(lambda: not yard.agents())
    yard.done(yard.begin(OTHER, "run", "-f", "slow.yaml"))
    assert yard.starts() == 1


@pytest.mark.parametrize("long", [True, False], ids=["outlives its agent", "does not"])
def test_what_a_killed_agent_left_is_looked_after_and_nothing_new_is_begun_for_others_there(
    yard: Yard, long: bool
) -> None:
    killed_while_slow_waits(yard, long=long)
    ((pid, root),) = yard.agents().items()
    os.kill(pid, signal.SIGKILL)
    after = yard.begin(OTHER, "run", "-f", "slow.yaml")
    if not long:  # it is ended, and tried again
        until(lambda: yard.starts() == 2)
    until(lambda: local_agents.context_of(str(root)) not in ("", root.name))
    yard.recipe({"steps": {"s": {"run": f"({SHOW}) > o.txt", "outputs": {"o": "o.txt"}}}})
    yard.done(yard.begin(":", "run"))
    assert yard.read("o.txt").split()[0] != "333", "the agent of the other shell was taken for ours"
    yard.open_gate()
    yard.done(after)
    assert yard.starts() == (1 if long else 2)


def shown(yard: Yard, shell: str, number: int) -> list[str]:
    """What a step of a run sees that is begun after this script."""
    name = f"q{number}"
    yard.recipe(
        {
            "steps": {
                "s": {"run": f"({SHOW}) > {{{{ outputs.o }}}}", "outputs": {"o": f"{name}.txt"}}
            }
        },
        name=f"{name}.yaml",
    )
    yard.done(yard.begin(shell, "run", "-f", f"{name}.yaml"))
    return yard.read(f"{name}.txt").split()


def test_two_runs_at_once_have_the_limits_of_their_own_shells(yard: Yard) -> None:
    yard.gated()
    own = str(os.nice(0))
    needs("taskset")
    slow = yard.begin(
        "umask 077; ulimit -n 333; renice -n 19 $$; taskset -pc 0 $$", "run", "-f", "slow.yaml"
    )
    until(lambda: yard.starts() == 1)
    plain = shown(yard, ":", 1)
    assert plain[0] != "333" and plain[1:3] == ["0022", own], plain
    assert shown(yard, "ulimit -n 4000", 2)[0] == "4000"
    assert shown(yard, "umask 027", 3)[1] == "0027"
    yard.open_gate()
    yard.done(slow)
    assert yard.read("after.txt").split()[:4] == ["333", "0077", "19", "1"]


def test_a_limit_that_killed_a_step_is_gone_in_the_next_run(yard: Yard) -> None:
    yard.recipe(
        {"steps": {"a": {"run": "head -c 30000000 /dev/zero > big", "outputs": {"o": "big"}}}}
    )
    first = yard.begin("ulimit -f 20000", "run")
    told, said = first.communicate(timeout=60)
    assert first.returncode != 0 and "SIGXFSZ" in told + said
    yard.done(yard.begin(":", "run"))


def test_what_is_sent_with_each_job_makes_no_other_agent(yard: Yard) -> None:
    yard.gated()
    slow = yard.begin(":", "run", "-f", "slow.yaml")
    until(lambda: yard.starts() == 1)
    shown(yard, "export SOME=thing", 1)
    yard.recipe("steps: {s: {run: 'true'}}", name="q.yaml")
    yard.done(
        yard.within(
            ["setsid", "sh", "-c", 'cd /; cd "$0"; exec "$@"', str(yard.root)],
            "run",
            "-f",
            "q.yaml",
        )
    )
    assert len(list((yard.root / ".recipe/local").glob("*/journal"))) == 1
    yard.open_gate()
    yard.done(slow)


def test_a_step_of_a_run_in_a_namespace_sees_what_is_there(yard: Yard) -> None:
    needs("mount")
    yard.gated()
    slow = yard.begin(":", "run", "-f", "slow.yaml")
    until(lambda: yard.starts() == 1)
    place = yard.root.parent / "place"
    place.mkdir()
    (place / "f").write_text("outside")
    yard.recipe(
        f"steps: {{q: {{run: 'cat {place}/f; hostname > $O; cat {place}/f >> $O', env: {{O: \"{{{{ outputs.o }}}}\"}}, outputs: {{o: q.txt}}}}}}",
        name="q.yaml",
    )
    script = f'mount -t tmpfs tmpfs {place}; echo inside > {place}/f; hostname within; exec "$@"'
    yard.done(
        yard.within(["unshare", "-m", "-u", "sh", "-euc", script, "sh"], "run", "-f", "q.yaml")
    )
    assert yard.read("q.txt").split() == ["within", "inside"]
    yard.open_gate()
    yard.done(slow)


PIDS = ["unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", '"$@" & wait; sleep 600', "sh"]


@pytest.mark.parametrize(
    ("agent", "begun", "long"),
    [
        ("lives", "inside", True),
        ("lives", "outside", True),
        ("is killed", "inside", True),
        ("is killed", "outside", True),
        ("is killed", "outside", False),
    ],
)
def test_a_job_of_another_container_is_waited_for_and_never_started_again(
    yard: Yard, agent: str, begun: str, long: bool
) -> None:
    needs("mount")
    there = PIDS if begun == "inside" else []
    if not long:
        yard.gated(changed=True)
        first = yard.begin(":", "run", "-f", "slow.yaml")
        yard.open_gate()
        yard.done(first)
        (yard.root / "starts").unlink()
        until(lambda: not yard.agents())
    yard.gated()
    worker = yard.within(there, "run", "-f", "slow.yaml")
    until(lambda: yard.starts() == 1)
    for pid in workers(yard.root):
        os.kill(pid, signal.SIGKILL)
    if agent == "is killed":
        for pid in yard.agents():
            os.kill(pid, signal.SIGKILL)
    after = yard.within(PIDS if begun == "outside" else [], "run", "-f", "slow.yaml")
    looked_after = [agent, begun, long] == ["is killed", "inside", False]
    until(lambda: len(yard.agents()) == (1 if agent == "is killed" else 2) or looked_after)
    if (
        looked_after
    ):  # from outside its process is seen: it is ended and tried again, as without a namespace
        until(lambda: yard.starts() == 2)
    yard.open_gate()
    until(lambda: (yard.root / "after.txt").exists())
    assert yard.starts() == 1
    for process in (worker, after):
        process.kill()


def workers(root: Path) -> list[int]:
    """Processes of the command line that work in a folder, seen from here."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            ours = words[0] == os.fsencode(sys.executable) and os.fsencode(RECIPE[2]) in words
            if ours and os.readlink(f"/proc/{entry}/cwd") == str(root):
                found.append(int(entry))
    return found


def test_a_job_whose_agent_cannot_be_reached_from_here_is_waited_for_and_that_is_said(
    yard: Yard,
) -> None:
    killed_while_slow_waits(yard)
    (root,) = yard.agents().values()
    (root / "socket").rename(root / "hidden")
    after = yard.begin(OTHER, "run", "-f", "slow.yaml")
    assert after.stderr is not None
    for line in after.stderr:
        if "waiting for run" in line:
            assert "this process cannot reach the agent" in line and "recipe cancel" in line
            break
    yard.open_gate()
    assert after.wait(60) == 0
    assert yard.starts() == 1


@pytest.mark.parametrize(("verb", "state"), [("cancel", "CANCELLED"), ("pause", "PAUSED")])
def test_a_run_without_a_worker_is_ended_from_another_shell(
    yard: Yard, verb: str, state: str
) -> None:
    killed_while_slow_waits(yard)
    told, said = yard.begin(OTHER, verb).communicate(timeout=60)
    assert f"is {state}" in told, said
    until(lambda: not yard.agents())
    (journal,) = (yard.root / ".recipe/local").glob("*/journal")
    assert '"stopped"' in journal.read_text()


def test_a_cancel_that_cannot_reach_the_job_says_so(yard: Yard) -> None:
    killed_while_slow_waits(yard)
    (root,) = yard.agents().values()
    (root / "socket").rename(root / "hidden")
    code, _, said = yard.command("cancel")
    assert code != 0 and "cannot reach the agent" in said, said


def test_gc_removes_the_roots_of_agents_that_nobody_needs(yard: Yard) -> None:
    killed_while_slow_waits(yard)
    (needed,) = yard.agents().values()
    shown(yard, OTHER, 1)
    local = yard.root / ".recipe/local"
    until(lambda: list(yard.agents().values()) == [needed])
    other = {path.parent for path in local.glob("*/journal")} - {needed}
    assert len(other) == 1
    yard.done(yard.begin(":", "gc"))
    assert needed.exists() and not other.pop().exists()
    yard.open_gate()
    until(lambda: not yard.agents())
    yard.done(yard.begin(":", "gc"))
    assert needed.exists(), "its journal knows how the job of a run ended that can be resumed"
    yard.done(yard.begin(OTHER, "run", "-f", "slow.yaml"))
    assert yard.starts() == 1
    until(lambda: not yard.agents())
    yard.done(yard.begin(":", "gc"))
    assert not list(local.glob("*/*")) and not needed.exists()


def test_gc_keeps_the_root_of_a_killed_agent_whose_job_lives(yard: Yard) -> None:
    killed_while_slow_waits(yard)
    ((pid, root),) = yard.agents().items()
    os.kill(pid, signal.SIGKILL)
    for name in (yard.root / ".recipe/local/claims").iterdir():
        name.unlink()
    until(lambda: not yard.agents())
    yard.done(yard.begin(":", "gc"))
    assert root.exists()
    yard.open_gate()


def test_the_notes_of_a_run_that_left_nothing_are_gone(yard: Yard) -> None:
    shown(yard, ":", 1)
    assert not list((yard.root / ".recipe/local/claims").iterdir())


def test_the_identity_is_that_of_what_a_process_passes_on() -> None:
    def of(*before: str) -> str:
        script = (
            "from runner.hosts.link.local_agents import process_identity; print(process_identity())"
        )
        words = [*before, sys.executable, "-c", script]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    shell = ("sh", "-c")
    ours = of()
    alike = [
        of("setsid"),
        of("env", "SOME=thing"),
        of(*shell, 'cd /tmp; PYTHONPATH=$0 exec "$@"', os.getcwd()),
    ]
    assert set(alike) == {ours}
    other = [
        of(*shell, 'ulimit -n 333; exec "$@"', "sh"),
        of(*shell, 'ulimit -S -c 0; ulimit -S -s 4096; exec "$@"', "sh"),
        of(*shell, 'umask 027; exec "$@"', "sh"),
        of("nice", "-n", "1"),
        of("taskset", "-c", "0"),
        of("chrt", "--batch", "0"),
        of("setpriv", "--no-new-privs"),
        of("setarch", "-R"),
        of(*shell, 'echo 300 > /proc/self/oom_score_adj; exec "$@"', "sh"),
        of("env", "SLURM_JOB_ID=7"),
    ]
    assert len({ours, *other}) == 1 + len(other)


def test_without_proc_the_identity_is_asked_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_agents, "_PROC", (str(tmp_path),))
    before = local_agents.process_identity()
    assert local_agents.process_identity() == before
    mask = os.umask(0o027)
    try:
        assert local_agents.process_identity() != before
    finally:
        os.umask(mask)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        assert local_agents.process_identity() != before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
