"""What only a real machine can do to the agent: kills, daemons, races, a torn journal, a long path."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path

import pytest

from drivers.base import Command, Denied, Exit, Job, Rejected, Unreachable
from drivers.local import LocalHost
from runner.agent import journal, locks, protocol
from runner.hosts.link import client
from runner.hosts.link.wire import Wire
from tests.tools import needs, small_disk

LONG = timedelta(seconds=60)
ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "root"


def on(root: Path, act: Callable[[client.Client], Coroutine[None, None, None]]) -> None:
    async def acting() -> None:
        host = client.connect_local(root)
        try:
            async with asyncio.timeout(60):
                await act(host)
        finally:
            await host.aclose()

    asyncio.run(acting())


async def begin(
    host: client.Client,
    root: Path,
    script: str,
    key: str = "job",
    *,
    outlives: bool = False,
    limit: float | None = None,
) -> Job:
    return await host.start(
        Command(
            ("/bin/sh", "-euc", script), str(root.parent), ENV, timeout=limit, outlives=outlives
        ),
        key,
    )


async def over(host: client.Client, job: Job) -> Exit:
    end = await host.wait(job, LONG)
    assert end is not None, f"{job.key} is still going"
    return end


async def said(host: client.Client, job: Job) -> int:
    """The number that a job prints when it has begun."""
    while not (text := await host.log(job, 0)).endswith(b"\n"):  # noqa: ASYNC110  # a host is asked again, it does not call
        await asyncio.sleep(0.01)
    return int(text)


def agents(root: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(root).encode() in words:
                found.append(int(entry))
    return found


def ended(pid: int, seconds: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def told(fifo: Path) -> int:
    """A pid that a job wrote into a fifo (opened for both, so that nothing here can wait for a writer that never came)."""
    fd = os.open(fifo, os.O_RDWR)
    try:
        assert select.select([fd], [], [], 60)[0], "nothing was written"
        return int(os.read(fd, 100))
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "script",
    [
        "sleep 1000 & echo $! > pid",
        "setsid sh -c 'echo $$ > pid; exec sleep 1000' & wait_for pid",
        "(setsid sh -c 'echo $$ > pid; exec sleep 1000' &) ; wait_for pid",
        "(env -i setsid /bin/sh -c 'echo $$ > pid; trap \"\" TERM; while :; do /bin/sleep 1000; done' &) ; wait_for pid",
    ],
    ids=["background", "own session", "double fork", "no environment, deaf"],
)
def test_what_a_job_leaves_behind_is_ended_and_counted(root: Path, script: str) -> None:
    async def act(host: client.Client) -> None:
        job = await begin(host, root, "wait_for() { until [ -s $1 ]; do :; done; }; " + script)
        end = await over(host, job)
        assert end.code == 0
        assert end.strays >= 1
        assert ended(int((root.parent / "pid").read_text()), 0)

    on(root, act)


def test_a_daemon_of_a_running_job_is_left_alone_when_another_job_ends(root: Path) -> None:
    os.mkfifo(root.parent / "said")

    async def act(host: client.Client) -> None:
        slow = await begin(
            host, root, "(setsid sleep 1000 & echo $! > said) ; read line < gate", "slow"
        )
        daemon = told(root.parent / "said")
        for number in range(3):
            quick = await over(host, await begin(host, root, "exit 0", f"quick{number}"))
            assert quick.strays == 0
        assert not ended(daemon, 0)
        gate = os.open(root.parent / "gate", os.O_RDWR)
        os.write(gate, b"go\n")
        assert (await over(host, slow)).strays == 1
        os.close(gate)
        assert ended(daemon, 0)

    on(root, act)


def test_a_stopped_job_whose_shell_is_gone_keeps_its_grace(root: Path) -> None:
    async def act(host: client.Client) -> None:
        saver = "trap 'sleep 1.3; echo saved > result; exit' TERM; echo $$ > gate; while :; do sleep 0.05; done"
        job = await begin(host, root, f"sh -c '{saver.replace(chr(39), chr(34))}' & wait")
        told(root.parent / "gate")
        await host.stop(job, LONG)
        assert (await over(host, job)).reason == "stopped"
        assert (root.parent / "result").read_text() == "saved\n"

    on(root, act)


def test_when_the_agent_is_killed_what_was_not_to_outlive_it_is_ended_and_lost_and_never_run_again(
    root: Path,
) -> None:
    async def act(host: client.Client) -> None:
        done = await begin(host, root, "exit 4", "done")
        assert (await over(host, done)).code == 4
        script = "echo ran >> count; echo $$ > gate; exec sleep 1000"
        job = await begin(host, root, script)
        pid = told(root.parent / "gate")
        waiting = asyncio.ensure_future(over(host, job))
        assert await host.wait(job, timedelta(0)) is None
        (agent,) = agents(root)
        os.kill(agent, signal.SIGKILL)
        end = await waiting
        assert (end.code, end.reason) == (None, "lost")
        assert ended(pid, 0)
        other = client.connect_local(root)
        assert (await over(other, await begin(other, root, script))).reason == "lost"
        assert (await over(other, done)).code == 4
        assert (root.parent / "count").read_text() == "ran\n"
        await other.aclose()

    on(root, act)


def test_a_job_outlives_its_agent_and_the_next_one_tells_its_end(root: Path) -> None:
    async def act(host: client.Client) -> None:
        script = "echo ran >> count; echo $$; read go < gate; (exec sleep 600) & exit 7"
        job = await begin(host, root, script, outlives=True)
        await said(host, job)
        waiting = asyncio.ensure_future(over(host, job))
        assert await host.wait(job, timedelta(0)) is None
        for _ in range(3):
            while not (there := agents(root)):  # noqa: ASYNC110  # the next one is on its way
                await asyncio.sleep(0.01)
            (agent,) = there
            os.kill(agent, signal.SIGKILL)
            assert await asyncio.to_thread(ended, agent, 10)
            assert await host.wait(job, timedelta(0)) is None
            assert (
                await host.start(Command(("false",), str(root.parent), outlives=True), "job") == job
            )  # it is that job, not another one
        await asyncio.to_thread((root.parent / "gate").write_text, "go\n")
        end = await waiting
        assert (end.code, end.reason, end.strays) == (7, "exit", 1)
        assert (root.parent / "count").read_text() == "ran\n"

    on(root, act)


@pytest.mark.parametrize(
    ("last", "code", "number"), [("exit 0", 0, None), ("exit 7", 7, None), ("kill -9 $$", 137, 9)]
)
def test_the_end_of_a_job_that_ended_while_there_was_no_agent_is_known(
    root: Path, last: str, code: int, number: int | None
) -> None:
    async def leave(host: client.Client) -> None:
        shell = await said(
            host, await begin(host, root, f"echo $PPID; read go < gate; {last}", outlives=True)
        )
        (agent,) = agents(root)
        await host.aclose()
        os.kill(agent, signal.SIGKILL)
        await asyncio.to_thread((root.parent / "gate").write_text, "go\n")
        assert await asyncio.to_thread(ended, shell, 10)

    async def come_back(host: client.Client) -> None:
        end = await over(host, Job("job"))
        assert (end.code, end.signal, end.reason) == (code, number, "signal" if number else "exit")
        assert end.ended >= end.started > 0

    on(root, leave)
    on(root, come_back)


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_below_a_shell_saves_before_it_ends_when_it_is_stopped(
    root: Path, killed: bool
) -> None:
    async def act(host: client.Client) -> None:
        job = await begin(
            host,
            root,
            "trap 'echo saved > saved; exit 3' TERM; echo $$; while :; do sleep 0.02; done",
            outlives=True,
        )
        await said(host, job)
        if killed:
            os.kill(agents(root)[0], signal.SIGKILL)
        await host.stop(job, LONG)
        end = await over(host, job)
        assert (end.code, end.reason) == (3, "stopped")
        assert (root.parent / "saved").read_text() == "saved\n"

    on(root, act)


def test_a_job_that_outlives_its_agent_keeps_its_limit_and_one_that_ignores_it_is_killed(
    root: Path,
) -> None:
    async def act(host: client.Client) -> None:
        limited = await begin(
            host,
            root,
            "trap 'exit 4' TERM; echo $$; while :; do sleep 0.02; done",
            outlives=True,
            limit=1.0,
        )
        await said(host, limited)
        deaf = await begin(
            host, root, "trap '' TERM; echo $$; while :; do sleep 0.02; done", "deaf", outlives=True
        )
        pid = await said(host, deaf)
        os.kill(agents(root)[0], signal.SIGKILL)
        end = await over(host, limited)
        assert (end.code, end.reason) == (4, "timeout") and end.ended - end.started < 10
        await host.stop(deaf, timedelta(seconds=0.1))
        end = await over(host, deaf)
        assert (end.code, end.reason) == (None, "stopped") and ended(pid, 0)

    on(root, act)


def test_slots_are_used_again_and_never_while_something_of_their_job_lives(root: Path) -> None:
    async def act(host: client.Client) -> None:
        for number in range(5):
            await over(host, await begin(host, root, "exit 0", f"job-{number}", outlives=True))
        assert os.listdir(root / "slots") == ["0"]
        await said(
            host, await begin(host, root, "echo $$; read go < gate; exit 7", "waits", outlives=True)
        )
        os.kill(agents(root)[0], signal.SIGKILL)
        assert (
            await over(host, await begin(host, root, "exit 5", "other", outlives=True))
        ).code == 5
        assert sorted(os.listdir(root / "slots")) == ["0", "1"]
        await asyncio.to_thread((root.parent / "gate").write_text, "go\n")
        assert (await over(host, Job("waits"))).code == 7

    on(root, act)


def test_an_unused_agent_leaves_and_its_ends_stay(root: Path) -> None:
    async def act(host: client.Client) -> None:
        job = await begin(host, root, "exit 6")
        assert (await over(host, job)).code == 6
        (first,) = agents(root)
        await host.aclose()
        assert await asyncio.to_thread(ended, first, 60)
        assert (await over(client.connect_local(root), job)).code == 6
        again = await begin(host, root, "exit 8", "again")
        assert (await over(host, again)).code == 8

    on(root, act)


def test_clients_that_come_at_once_share_one_agent(root: Path) -> None:
    async def act(host: client.Client) -> None:
        hosts = [client.connect_local(root) for _ in range(8)]
        jobs = await asyncio.gather(
            *(begin(each, root, "echo ran >> count; exit 5") for each in hosts)
        )
        assert {end.code for end in await asyncio.gather(*map(over, hosts, jobs))} == {5}
        assert (root.parent / "count").read_text() == "ran\n"
        assert len(agents(root)) == 1
        for each in hosts:
            await each.aclose()

    on(root, act)


@pytest.mark.parametrize(
    "fields",
    [
        *(
            ("",),
            ("start",),
            ("no such word", "job"),
            ("stop", "job"),
            ("stop", "job", "soon"),
            ("arm", "x"),
            ("leave", "1"),
            ("free", "x", ""),
            ("free", "1"),
        ),
        ("start", "job", "/", "log", "", "", "", "", "x", "/bin/true"),
        ("start", "job", "/", "log", "", "", "", "", "0", "/bin/true"),
        ("start", "job", "/", "log", "", "", "", "", "2", "/bin/true"),
        ("start", "job", "/", "log", "soon", "", "", "", "1", "/bin/true"),
        ("start", "job", "/", "log", "", "", "", "", "1", "/bin/true", "a name without a value"),
        ("start", "job", "/", "log", "", "", "\ud8ff", "", "1", "/bin/true"),
    ],
    ids=" ".join,
)
def test_a_client_that_makes_no_sense_is_dismissed_and_the_jobs_of_others_go_on(
    root: Path, fields: tuple[str, ...]
) -> None:
    async def act(host: client.Client) -> None:
        job = await begin(host, root, "read go < gate; exit 7")
        assert await host.wait(job, timedelta(0)) is None
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(root / "socket"))
            message = "\0".join(fields).encode("utf-8", "surrogatepass")
            other.sendall(len(message).to_bytes(4, "little") + message)
            other.settimeout(20)
            while other.recv(1000):
                pass  # the greeting, then the end
        (root.parent / "gate").write_text("\n")
        assert (await over(host, job)).code == 7

    on(root, act)


@pytest.fixture(params=["socket", "stream"])
def reached(request: pytest.FixtureRequest, root: Path) -> tuple[Path, Callable[[], client.Client]]:
    """The root of an agent, and what makes a client of it: on this machine, and over the stream that leads to others."""
    if request.param == "socket":
        return root, lambda: client.connect_local(root)
    return root / "agent", lambda: client.connect_remote(
        Wire(LocalHost(root / "unused"), str(root))
    )


def begin_numbered(tmp_path: Path, root: Path, number: int) -> None:
    """Begin the agent of a root as the program of another protocol, which is this one but for its number.  Unused, it leaves at once."""
    folder = tmp_path / "program"
    shutil.copytree(
        Path(protocol.__file__).parent,
        folder / "agent",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name, line in (
        ("protocol.py", f"NUMBER = {protocol.NUMBER}\n"),
        ("server.py", "LINGER = 2.0 "),
    ):
        assert line in (folder / "agent" / name).read_text()
    changed = (
        (folder / "agent/protocol.py")
        .read_text()
        .replace(f"NUMBER = {protocol.NUMBER}\n", f"NUMBER = {number}\n")
    )
    (folder / "agent/protocol.py").write_text(changed)
    changed = (folder / "agent/server.py").read_text().replace("LINGER = 2.0 ", "LINGER = 0.05 ")
    (folder / "agent/server.py").write_text(changed)
    root.mkdir(parents=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from agent.reach import reach; from agent.protocol import greeting\n"
        "line = reach(sys.argv[2]); line.setblocking(True); assert line.recv(100) == greeting() + b'\\n'\n"
        "begin = b'\\0'.join([b'start', b'theirs', *map(str.encode, [sys.argv[3], sys.argv[3] + '/theirs.log', '', '', '', '', '3'])])\n"
        "begin += b'\\0/bin/sh\\0-c\\0read go < gate; exit 7'\n"
        "line.sendall(len(begin).to_bytes(4, 'little') + begin); line.recv(100)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(root), str(tmp_path)], check=True)


@pytest.mark.parametrize(("agent", "ours"), [(0, 1), (1, 2)])
def test_an_agent_of_the_protocol_before_ours_goes_on_serving(
    tmp_path: Path,
    reached: tuple[Path, Callable[[], client.Client]],
    monkeypatch: pytest.MonkeyPatch,
    agent: int,
    ours: int,
) -> None:
    root, made = reached
    monkeypatch.setattr(client, "PROTOCOLS", (ours - 1, ours))
    begin_numbered(tmp_path, root, agent)
    (serving,) = agents(root)

    async def act() -> None:
        host = made()
        assert (await over(host, await begin(host, root, "exit 3", "ours"))).code == 3
        assert serving in agents(root), "the agent that has a job serves on"
        (tmp_path / "gate").write_text("\n")
        assert (await over(host, Job("theirs"))).code == 7
        await host.aclose()

    asyncio.run(asyncio.wait_for(act(), 60))


@pytest.mark.parametrize(
    ("agent", "ours", "words"), [(2, 1, "a newer"), (0, 2, "an older"), (1, 0, "a newer")]
)
def test_an_agent_of_a_protocol_that_we_do_not_speak_is_refused_in_a_sentence_until_its_jobs_are_over(
    tmp_path: Path,
    reached: tuple[Path, Callable[[], client.Client]],
    monkeypatch: pytest.MonkeyPatch,
    agent: int,
    ours: int,
    words: str,
) -> None:
    root, made = reached
    monkeypatch.setattr(client, "PROTOCOLS", (ours - 1, ours))
    monkeypatch.setattr(client, "NUMBER", ours)
    monkeypatch.setattr(client, "UNUSED", 0.2)
    begin_numbered(tmp_path, root, agent)

    async def refused(host: client.Client) -> None:
        with pytest.raises(
            Unreachable,
            match=f"belongs to {words} recipe .*: .*wait until the agent's jobs finish",
        ):
            await host.wait(await begin(host, root, "exit 3", "ours"), timedelta(0))

    async def taken(host: client.Client) -> None:
        assert (await over(host, await begin(host, root, "exit 3", "ours"))).code == 3

    async def act(
        what: Callable[[client.Client], Coroutine[None, None, None]], patience: float
    ) -> None:
        host = made()
        host._line.patience = patience
        await what(host)
        await host.aclose()

    asyncio.run(asyncio.wait_for(act(refused, 0.0), 60))
    (tmp_path / "gate").write_text("\n")
    if protocol.NUMBER in client.PROTOCOLS:  # the agent that comes next is of this program
        asyncio.run(asyncio.wait_for(act(taken, 30.0), 60))


def test_a_torn_journal_line_is_ignored(root: Path) -> None:
    (root / "logs").mkdir(parents=True)
    (root / "journal").write_text(
        '{"job": "old", "began": 1}\n{"job": "old", "code": 3, "reason": "exit"}\n{"job": "torn", "co'
    )

    async def act(host: client.Client) -> None:
        assert (await over(host, Job("old"))).code == 3
        assert (await over(host, await begin(host, root, "exit 2", "torn"))).code == 2

    on(root, act)
    assert all(
        json.loads(line)
        for line in (root / "journal").read_text().splitlines()
        if line.endswith("}")
    )


def test_a_long_journal_is_pruned_and_keeps_what_has_no_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setattr(journal, "LIMIT", 100)
    lines = [
        f'{{"job": "{number}", "began": 1}}\n{{"job": "{number}", "code": 0}}\n'
        for number in range(9)
    ]
    Path("journal").write_text('{"job": "open", "began": 1}\n' + "".join(lines))
    remembered: dict[bytes, bytes] = {}
    fd, unended = journal.open_journal(remembered, 3)
    os.close(fd)
    assert list(unended) == [b"open"]
    assert list(remembered) == [b"6", b"7", b"8"]
    again: dict[bytes, bytes] = {}
    fd, unended = journal.open_journal(again, 3)
    os.close(fd)
    assert (again, list(unended)) == (remembered, [b"open"])
    assert Path("journal").read_text().count("\n") == 4


def test_who_only_looks_how_a_job_stands_waits_for_the_agent_that_another_process_begins(
    root: Path,
) -> None:
    root.mkdir()
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)

    async def act(host: client.Client) -> None:
        looking = asyncio.ensure_future(host.wait(Job("never"), timedelta(0)))
        assert not (await asyncio.wait([looking], timeout=0.2))[0]
        os.close(lock)
        end = await looking
        assert end is not None and end.reason == "lost"

    on(root, act)


def test_a_root_with_a_long_path_works(tmp_path: Path) -> None:
    root = tmp_path / ("d" * 100) / ("e" * 100) / "root"

    async def act(host: client.Client) -> None:
        assert (await over(host, await begin(host, tmp_path / "x", "exit 1"))).code == 1

    on(root, act)


def test_a_root_that_cannot_be_made_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def act(host: client.Client) -> None:
        with pytest.raises(Denied, match="file"):
            await begin(host, tmp_path / "x", "exit 1")

    on(tmp_path / "file" / "root", act)


@pytest.mark.parametrize(
    ("argv", "change", "code", "words"),
    [
        (("/bin/true",), {"cwd": "/no/such"}, 126, "cannot enter the working directory /no/such: No such file"),
        (("./script",), {}, 127, "the interpreter named in its first line does not exist"),
        (("./plain",), {}, 126, "cannot run ./plain: Exec format error"),
        (("./data",), {}, 126, "cannot run ./data: Permission denied"),
        (("/bin/true",), {"log": "/no/such/log"}, 126, "cannot write the log /no/such/log: No such file"),
        (("/bin/true",), {"log": "/dev/full"}, 0, ""),
    ],
)  # fmt: skip
def test_a_command_that_cannot_begin_says_which_part_failed(
    root: Path, argv: tuple[str, ...], change: dict[str, str], code: int, words: str
) -> None:
    for name, text, mode in (
        ("script", "#!/no/such/sh\n", 0o755),
        ("plain", "true\n", 0o755),
        ("data", "", 0o644),
    ):
        (root.parent / name).write_text(text)
        (root.parent / name).chmod(mode)

    async def act(host: client.Client) -> None:
        end = await over(
            host,
            await host.start(
                Command(argv, **{"cwd": str(root.parent), "env": ENV, **change}), "bad"
            ),
        )
        assert end.code == code
        assert words in end.detail

    on(root, act)


def test_nothing_that_the_worker_holds_open_is_held_by_the_agent(root: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)

    async def act(host: client.Client) -> None:
        job = await begin(host, root, "ls /proc/self/fd | wc -l")
        await over(host, job)
        os.close(writing)
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 1) == b""
        # the three, the one that lists them, and the lock that says that a job lives
        assert int(await host.log(job, 0)) == 5

    on(root, act)
    os.close(reading)


def test_a_nul_in_a_command_is_rejected(root: Path) -> None:
    async def act(host: client.Client) -> None:
        with pytest.raises(Rejected, match="NUL"):
            await begin(host, root, "echo a\0b")

    on(root, act)


def test_a_lock_stays_held_by_a_job_whose_agent_was_killed(root: Path) -> None:
    lock = f"test-{os.urandom(8).hex()}"

    async def act(host: client.Client) -> None:
        script = "echo $$; trap '' TERM; read go < gate; read go < gate"
        job = await host.start(
            Command(("/bin/sh", "-euc", script), cwd=str(root.parent), env=ENV, locks=(lock,)),
            "job",
        )
        while not (said := await host.log(job, 0)):  # noqa: ASYNC110  # a host is asked again, it does not call
            await asyncio.sleep(0.01)
        (agent,) = agents(root)
        os.kill(agent, signal.SIGSTOP)  # so that nothing takes its place yet
        await host.aclose()
        os.kill(agent, signal.SIGKILL)
        assert list(await host.find_free_locks([lock])) == []
        os.kill(int(said), signal.SIGKILL)
        while not await host.find_free_locks([lock]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    try:
        on(root, act)
    finally:
        Path(f"/tmp/recipe-{os.geteuid()}/gpus/{lock}.lock").unlink(missing_ok=True)


def test_a_lock_folder_of_somebody_else_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login that makes the folder first does not keep the steps of another from running."""
    places = [tmp_path / name for name in ("first", "second", "third")]
    elsewhere = tmp_path / "elsewhere"
    for each in (*places, elsewhere):
        each.mkdir()
    monkeypatch.setattr(locks, "PLACES", [str(each) for each in places])
    name = f"recipe-{os.geteuid()}"
    (places[0] / name).symlink_to(elsewhere)
    held = locks.take_locks(["x"])
    assert held is not None and locks.take_locks(["x"]) is None
    os.close(held[0])
    assert locks.free_locks(["x"]) == ["x"]
    assert list(elsewhere.iterdir()) == []
    assert [path.name for path in (places[1] / name / "gpus").iterdir()] == ["x.lock"]
    (places[1] / name).chmod(0o777)  # others could hold its locks
    (places[2] / name).write_text("")
    with pytest.raises(PermissionError, match="must be a private directory of this user") as found:
        locks.free_locks(["x"])
    assert str(found.value.filename) == ", ".join(str(each / name) for each in places)


def test_a_lock_folder_that_another_login_made_first_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the mode that it should have, or open to all: the locks are in the next place."""
    needs("root")
    as_other = [needs("setpriv"), "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")) for _ in range(3)]
        for place, mode in zip(places, ("700", "777"), strict=False):
            os.chmod(place, 0o1777)
            taken = f"{place}/recipe-{os.geteuid()}"
            subprocess.run([*as_other, "mkdir", "-m", mode, taken], check=True)
        monkeypatch.setattr(locks, "PLACES", places)
        held = locks.take_locks(["gpu-0"])
        assert held is not None and locks.free_locks(["gpu-0"]) == []
        os.close(held[0])
        assert os.listdir(f"{places[2]}/recipe-{os.geteuid()}/gpus") == ["gpu-0.lock"]


STOPPED = """
import asyncio, os, signal, sys
from pathlib import Path
from drivers.base import Command
from runner.hosts.link import client

async def work():
    host = client.connect_local(Path(sys.argv[1]), 1.0)
    job = await host.start(Command(("/bin/sh", "-c", "echo $$ > pid.new; mv pid.new pid; exec sleep 600"), sys.argv[2], {"PATH": os.environ["PATH"]}), "theirs")
    while not Path(sys.argv[2], "pid").exists():
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(work())
"""


def test_the_job_of_a_stopped_client_is_ended_and_that_of_one_that_lives_is_not(
    tmp_path: Path,
) -> None:
    """The connection of a stopped process stays open: that is no word of it."""

    async def act() -> None:
        host = client.connect_local(tmp_path / "root", 1.0)
        try:
            ours = await host.start(Command(("/bin/sleep", "600"), str(tmp_path), ENV), "ours")
            stopped = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STOPPED, str(tmp_path / "root"), str(tmp_path)
            )
            try:
                while not (tmp_path / "pid").exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                theirs = int((tmp_path / "pid").read_text())
                assert await asyncio.to_thread(ended, theirs, 30)
                assert await host.wait(ours, timedelta(0)) is None
                over = await host.wait(Job("theirs"), LONG)
                assert over is not None and (over.reason, over.detail) == (
                    "stopped",
                    "no client contacted the agent about the job for 1 seconds",
                )
            finally:
                stopped.kill()
                await stopped.wait()
            await host.stop(ours, timedelta(seconds=1))
            await host.wait(ours, LONG)
        finally:
            await host.aclose()

    asyncio.run(act())


INHERITS = """\
import os, sys
from runner.agent import server
os.sysconf, os.closerange = lambda _name: 1 << 30, lambda low, high: sys.exit(f"it closes {high - low} numbers one by one")

class Agent:
    def __init__(self, listener, first, blind): pass
    def serve(self): print(*sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")))

server.Agent = Agent
server.main("/", *map(int, sys.argv[1:]))
"""


def test_an_agent_lets_go_of_what_it_inherited_and_of_nothing_up_to_a_limit_of_a_thousand_million() -> (
    None
):
    """Where Python has no close_range, as in builds for older systems, an agent took minutes to begin in such a container."""
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(6)]
    try:
        argv = [sys.executable, "-c", INHERITS, *map(str, others[1:4])]
        ran = subprocess.run(
            argv,
            pass_fds=others,
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert (ran.stdout.split(), ran.stderr) == (["0", "1", "2", *map(str, others[1:4])], "")
    finally:
        for fd in others:
            os.close(fd)


@pytest.mark.parametrize(
    "log",
    [
        'plain "\\\n',
        "é",
        "\U0001f389 \U00020000 \uffff",
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
    ],
)
def test_the_journal_has_the_name_of_a_log_as_it_is(log: str) -> None:
    """Under another name a job that an agent had left was taken for one that prints nothing, and ended by its `idle_timeout`."""
    line = journal.start_line(0.0, b"job", 1, os.fsencode(log), b"", b"5")
    assert json.loads(line)["log"] == log


def test_an_end_that_a_full_disk_had_no_room_for_is_written_when_there_is_some(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "small", "1m") as disk:
        root, filler = disk / "root", disk / "filler"

        async def act(host: client.Client) -> None:
            os.mkfifo(tmp_path / "gate")
            job = await host.start(
                Command(
                    ("/bin/sh", "-c", f"read line < {tmp_path}/gate; exit 6"),
                    str(tmp_path),
                    ENV,
                    log=str(tmp_path / "log"),
                ),
                "job",
            )
            await host.wait(job, timedelta(0))
            journal_of(root, disk)
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            (tmp_path / "gate").write_text("go\n")
            assert (await over(host, job)).code == 6

        on(root, act)
        (agent,) = agents(root)
        assert not ended(agent, 4), "it left with the only word of how the job ended"
        assert '"code"' not in (root / "journal").read_text()
        filler.unlink()
        assert ended(agent, 30)
        assert '"code": 6' in (root / "journal").read_text()


def journal_of(root: Path, disk: Path) -> None:
    """Fill the last block of the journal, where a line would find room on any disk."""
    size = (root / "journal").stat().st_size
    with (root / "journal").open("ab", buffering=0) as file:
        file.write(b" " * (-size % os.statvfs(disk).f_bsize - 1) + b"\n")
