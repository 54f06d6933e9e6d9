"""A recipe on another machine is the same recipe: same keys, same results, same answers to failures; and no machine is needed for ever."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path

import pytest

from drivers.base import Exit, HostLost, Unreachable
from runner.execution.steps.orphans import Orphans
from runner.execution.terms import Choice, Settings
from runner.hosts.link.contact import RemoteContact
from runner.hosts.place import collecting, following
from runner.hosts.place.following import AttemptFollower
from runner.storage.records.runs import Event
from tests.servers.sshd import Sshd, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until
from tests.tools import needs

LOOPBACK = Settings(driver="loopback")
CRASHES = {
    "attempt-carried": 2,
    "job-started": 2,
    "job-over": 2,
    "outputs-stored": 2,
    "object-put": 2,
    "group-committed": 3,
}


def starts(space: Space, step: str) -> int:
    path = space.root / "starts"
    return path.read_text().split().count(step) if path.exists() else 0


def count(space: Space) -> str:
    """A line of a script that tells us of a start, from whatever machine."""
    return f"echo $RECIPE_STEP >> {space.root}/starts"


def chain(space: Space, *, slow: str = "") -> None:
    """A file, a tree, a file, each made from the one before it."""
    space.recipe(
        f"steps:\n  a: {{run: '{count(space)}; cat raw/one > a.txt', deps: [raw/], outputs: {{o: a.txt}}}}\n"
        f"  b: {{run: '{count(space)}; {slow} cp {{{{ steps.a.o }}}} b/x; head -c 200000 /dev/zero > b/y', outputs: {{o: b/}}}}\n"
        f"  c: {{run: '{count(space)}; cat {{{{ steps.b.o }}}}/x > c.txt', outputs: {{o: c.txt}}}}\n"
    )
    space.write("raw/one", "one\n")
    space.write("raw/large", "x" * 200_000)


def is_whole(space: Space) -> bool:
    return (
        space.read("a.txt") == space.read("b/x") == space.read("c.txt") == "one\n"
        and (space.root / "b/y").stat().st_size == 200_000
    )


def loopback(space: Space, **settings: object) -> None:
    """What `recipe.toml` says about the machines."""
    lines = [
        f"{name} = {value if not isinstance(value, str) else repr(value)}"
        for name, value in settings.items()
    ]
    space.write("recipe.toml", "[drivers.loopback]\n" + "\n".join(lines) + "\n")


def there(space: Space, host: int = 1) -> Path:
    """Our root on a machine that is played."""
    return space.root / ".recipe" / "loopback" / f"host-{host}" / ".recipe-host"


def test_an_error_of_our_own_in_an_attempt_fails_its_step_ends_its_job_and_is_in_its_log(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung the run: the waiter for the attempt's end was gone."""
    chain(space, slow="sleep 60;")
    whole = AttemptFollower.wait_for_end

    async def broken(
        follower: AttemptFollower, beside: Sequence[Coroutine[object, object, object]]
    ) -> Exit:
        if follower.task.outputs[0].path == "b":
            raise KeyError("injected")
        return await whole(follower, beside)

    monkeypatch.setattr(AttemptFollower, "wait_for_end", broken)
    assert space.attempt(settings=LOOPBACK) == ["a", "b"]
    assert space.summary is not None and space.summary.state == "FAILED"
    (failure,) = space.summary.failed
    assert (
        "internal error of recipe: KeyError: 'injected'" in failure.reason
        and "report it" in failure.hint
    )
    assert "raise KeyError" in Path(failure.log).read_text()
    monkeypatch.undo()
    chain(space)
    assert space.run(settings=LOOPBACK) == ["b", "c"] and is_whole(space)


def sites(events: list[Event]) -> dict[str, object]:
    return {event.id: event.data.get("site") for event in events if event.after == "RUNNING"}


# -- the same recipe -----------------------------------------------------------------------------------------------------------------------------


def test_what_ran_elsewhere_is_fresh_here_and_the_other_way_round(space: Space) -> None:
    chain(space)
    assert space.run(settings=LOOPBACK) == ["a", "b", "c"]
    assert is_whole(space)
    keys = space.keys()
    assert space.run() == []
    shutil.rmtree(space.root / ".recipe")
    assert space.run(settings=Settings(overwrite=True)) == ["a", "b", "c"]
    assert space.keys() == keys
    assert space.run(settings=LOOPBACK) == []


def test_the_same_recipe_runs_over_ssh(space: Space, sshd: Sshd) -> None:  # noqa: F811
    chain(space)
    settings = sshd.settings()
    lines = [
        f"hosts = {settings['hosts']!r}",
        f"known_hosts = '{settings['known_hosts']}'",
        f"identity = '{settings['identity']}'",
        "agent = false",
    ]
    space.write("recipe.toml", "[drivers.ssh]\n" + "\n".join(lines) + "\n")
    assert space.run(settings=Settings(driver="ssh")) == ["a", "b", "c"]
    assert is_whole(space)
    assert space.run() == []
    assert not [*(sshd.home / ".recipe-host" / "attempts").iterdir()]
    assert not [
        path
        for path in (sshd.home / ".recipe-host" / "leases").iterdir()
        if path.name.startswith("slot")
    ]


def test_what_is_there_is_not_sent_again(space: Space) -> None:
    chain(space)
    space.run(settings=LOOPBACK)
    objects = {
        path: path.stat().st_ino for path in (there(space) / "objects").rglob("*") if path.is_file()
    }
    assert any(path.stat().st_size == 200_000 for path in objects)
    space.write("raw/one", "two\n")
    assert space.run(settings=LOOPBACK) == ["a", "b", "c"]
    assert {path: path.stat().st_ino for path in objects} == objects


def test_what_was_unused_for_weeks_is_deleted_from_a_host_after_a_run(space: Space) -> None:
    chain(space)
    space.run(settings=LOOPBACK)
    old = {path.name for path in (there(space) / "used").iterdir()}
    for path in (*(there(space) / "used").iterdir(), there(space) / "swept"):
        os.utime(path, (0, 0))
    space.write("raw/one", "two\n")
    space.run(settings=LOOPBACK)
    left = {path.name for path in (there(space) / "used").iterdir()}
    assert old and left and not old & left


def test_a_step_sees_there_what_it_declares_and_nothing_else(space: Space) -> None:
    space.recipe(
        "steps:\n  s: {run: 'find . -type f -o -type l | grep -vw o | LC_ALL=C sort > o; env | cut -d= -f1 | LC_ALL=C sort > e', deps: [in/], outputs: {o: o, e: e}}\n"
    )
    space.write("in/one", "1")
    space.write("other", "2")
    space.run(settings=LOOPBACK)
    assert set(space.read("o").split()) == {"./in/one"}
    assert not {"VIRTUAL_ENV", "PYTEST_CURRENT_TEST"} & set(space.read("e").split())


def test_links_of_a_repository_are_links_there_and_nothing_that_they_lead_to_is_sent(
    space: Space,
) -> None:
    origin = space.root / "origin"
    (origin / "d").mkdir(parents=True)
    (origin / "run").write_text(
        "find . -type l | sort | while read -r link; do readlink $link; done\n"
    )
    space.write("private", "a secret of ours")
    private = [("in", str(space.root / "private")), ("out", "../../../../private")]
    for name, target in (
        ("dangling", "nowhere"),
        ("round", "."),
        ("all", "d"),
        ("d/up", "../run"),
        *private,
    ):
        os.symlink(target, origin / name)
    git = [needs("git"), "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@y.z"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    space.recipe(
        f"steps:\n  s: {{run: 'cd lib; sh d/up > ../o', code: [{{git: ./origin, commit: {commit}, at: lib}}], outputs: [o]}}\n"
    )
    for settings in (Settings(), LOOPBACK):
        space.run(choice=Choice(all=True), settings=settings)
        assert space.read("o").splitlines() == [
            "d",
            "../run",
            "nowhere",
            private[0][1],
            private[1][1],
            ".",
        ]


def test_a_step_that_stays_here_runs_here(space: Space) -> None:
    space.recipe(
        "steps:\n  far: {run: 'pwd > far', outputs: {o: far}}\n"
        "  near: {run: 'pwd > near; cat {{ steps.far.o }} >> near', outputs: {o: near}, where: local}\n"
    )
    space.run(settings=LOOPBACK)
    near, far = space.read("near").split()
    assert near.startswith(f"{space.root}/.recipe/attempts/")
    assert far.startswith(str(there(space)))


def test_metrics_come_home_and_what_its_agent_saw_and_a_later_step_can_use_them(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SAMPLED", 0.0)
    space.recipe(
        """steps:
  train:
    run: |
      echo '{"step": 1, "loss": 2.5}' >> $RECIPE_METRICS
      echo '{"step": 2, "loss": 0.5}' >> $RECIPE_METRICS
      echo '{"cpu_percent": 12.5}' > ${RECIPE_METRICS%.metrics}.host
      echo done > o
    outputs: {o: o}
    metrics: true
  tell: {run: "echo {{ steps.train.metrics.loss }} > p", outputs: {p: p}}
"""
    )
    space.run(settings=LOOPBACK)
    assert space.read("p") == "0.5\n"
    kept = next((space.root / ".recipe/runs").glob("*/train.1.metrics"))
    assert (
        len(kept.read_text().splitlines()) == 2
        and kept.with_suffix(".host").read_text() == '{"cpu_percent": 12.5}\n'
    )


def test_metrics_in_a_file_of_the_step_come_home(space: Space) -> None:
    space.recipe(
        """steps:
  train: {run: 'mkdir logs; echo "{\\"loss\\": 0.25}" > logs/a.jsonl; echo 1 > o', outputs: {o: o}, metrics: {file: logs/*.jsonl}}
  tell: {run: "echo {{ steps.train.metrics.loss }} > p", outputs: {p: p}}
"""
    )
    space.run(settings=LOOPBACK)
    assert space.read("p") == "0.25\n"


def test_a_metrics_file_that_comes_in_several_pieces_is_read_to_its_end(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "ROOM", 20)
    space.recipe(
        """steps:
  train: {run: 'for n in 1 2 3; do echo "{\\"loss\\": 0.$n}" >> a.jsonl; done; echo 1 > o', outputs: {o: o}, metrics: {file: a.jsonl}}
  tell: {run: "echo {{ steps.train.metrics.loss }} > p", outputs: {p: p}}
"""
    )
    space.run(settings=LOOPBACK)
    assert space.read("p") == "0.3\n"


def test_a_pattern_finds_the_metrics_files_there_that_it_finds_here(space: Space) -> None:
    space.recipe(
        """steps:
  train: {run: 'mkdir -p logs/a/b; echo "{\\"loss\\": 0.25}" > logs/a/b/m.jsonl; echo 1 > o', outputs: {o: o}, metrics: {file: "logs/**/*.jsonl"}}
  tell: {run: "echo {{ steps.train.metrics.loss }} > p", outputs: {p: p}}
"""
    )
    space.run()
    assert space.read("p") == "0.25\n"
    assert space.run(choice=Choice(all=True), settings=LOOPBACK) == ["train", "tell"]
    assert space.read("p") == "0.25\n"


def test_an_output_that_says_sync_is_here_while_its_step_runs(space: Space) -> None:
    def seen(pattern: str) -> str:
        return f"until cat {space.root}/.recipe/attempts/*/{pattern} 2>/dev/null | grep -q"

    space.recipe(
        f"""steps:
  a:
    timeout: 60s
    run: |
      echo one > log; echo early > s/1; {seen("s/1")} early; do sleep 0.02; done
      {seen("log")} one; do sleep 0.02; done
      rm s/1; echo late > s/2; {seen("s/2")} late; do sleep 0.02; done
      test ! -e "$(echo {space.root}/.recipe/attempts/*/s/1)"; echo two >> log
    outputs: {{s: {{path: s/, sync: 0.05s}}, log: {{path: log, sync: 0.05s}}, never: {{path: never, optional: true, sync: 0.05s}}}}
"""
    )
    assert space.run(settings=LOOPBACK) == ["a"]
    assert [path.name for path in (space.root / "s").iterdir()] == ["2"] and space.read(
        "log"
    ) == "one\ntwo\n"
    assert not list((space.root / ".recipe" / "partial").iterdir())


def test_setup_is_done_once_for_each_host(space: Space) -> None:
    loopback(space, hosts=2)
    space.recipe(
        f"setup: ['echo $PWD >> {space.root}/setups']\nsteps:\n  s: {{matrix: {{n: [1, 2, 3, 4]}}, run: 'echo {{{{ matrix.n }}}} > o{{{{ matrix.n }}}}', "
        "outputs: {o: 'o{{ matrix.n }}'}}\n"
    )
    space.run(settings=LOOPBACK)
    assert len({line.split("/.recipe-host")[0] for line in space.read("setups").split()}) == 2
    (space.root / "o1").unlink()
    shutil.rmtree(space.root / ".recipe" / "objects")
    space.run(settings=LOOPBACK)
    assert len(space.read("setups").split()) == 2


def test_steps_are_spread_over_the_places_of_all_hosts(space: Space) -> None:
    loopback(space, hosts=2, slots=2)
    gates = [space.root / f"gate{n}" for n in range(4)]
    for gate in gates:
        os.mkfifo(gate)
    space.recipe(
        f"steps:\n  s: {{matrix: {{n: [0, 1, 2, 3]}}, run: 'read go < {space.root}/gate{{{{ matrix.n }}}}; echo 1 > o{{{{ matrix.n }}}}', "
        "outputs: {o: 'o{{ matrix.n }}'}}\n"
    )
    worker = space.start("run", "--driver", "loopback")
    for gate in gates:  # opened by all four at once, or never
        with gate.open("w") as file:
            file.write("go\n")
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said


def test_an_input_that_the_step_changed_there_fails_it(space: Space) -> None:
    chain(space)
    space.recipe(
        "steps:\n  s: {run: 'chmod -R u+w in/; echo more >> in/file; echo 1 > o', deps: [in/], outputs: {o: o}}\n"
    )
    space.write("in/file", "x" * 100)
    space.attempt(settings=LOOPBACK)
    assert space.summary is not None and space.summary.state == "FAILED"
    assert "the step changed its input in" in space.summary.failed[0].reason
    # what it spoilt there is not used again
    space.recipe("steps:\n  s: {run: 'cat in/file > o', deps: [in/], outputs: {o: o}}\n")
    space.run(settings=LOOPBACK)
    assert space.read("o") == "x" * 100


# -- failures ------------------------------------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_there_is_reported_with_its_log_and_what_it_lacks(space: Space) -> None:
    space.recipe("steps:\n  s: {run: 'echo trying; cat words.txt > o', outputs: {o: o}}\n")
    space.write("words.txt", "hello")
    space.attempt(settings=LOOPBACK)
    assert space.summary is not None
    failure = space.summary.failed[0]
    assert b"trying" in failure.tail and failure.reason == "exit 1"
    assert "add it to `deps` of s" in failure.hint
    assert "trying" in Path(failure.log).read_text()


def test_small_files_of_an_attempt_that_failed_there_come_home_and_are_reported(
    space: Space,
) -> None:
    space.write("raw/one", "one\n")
    wrote = "mkdir -p deep 'odd name'; echo trace > deep/trace.txt; echo x > 'odd name/x'; head -c 2000000 /dev/zero > large.bin; ln -s large.bin link"
    for end, words in (("exit 3", "exit 3"), (":", "declared output o.txt was not created")):
        space.recipe(
            f'steps:\n  s:\n    run: "{wrote}; cat raw/one; {end}"\n    deps: [raw/]\n    outputs: {{o: o.txt}}\n'
        )
        code, _, said = space.command("run", "--driver", "loopback")
        assert code == 1 and words in said, said
        assert (
            "s: 1 of 3 files left on loopback host-1 are not copied: too large, too many, or unreadable"
            in said
        )
        left = Path(said.partition("kept for debugging: ")[2].partition("\n")[0])
        assert (left / "deep/trace.txt").read_text() == "trace\n" and (
            left / "odd name/x"
        ).read_text() == "x\n"
        assert not (left / "large.bin").exists()
        assert os.listdir(there(space) / "attempts") == []


def test_what_a_host_says_a_failed_attempt_left_never_goes_where_inputs_are(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "attempt").mkdir()
    (tmp_path / "attempt" / "input").symlink_to(tmp_path / "data")
    (tmp_path / "attempt" / "file").write_text("ours")
    for name in ("input/evil", "file", "file/below", "new/file"):
        collecting._write_leftover(str(tmp_path / "attempt"), name, b"theirs")
    assert os.listdir(tmp_path / "data") == []
    assert (tmp_path / "attempt" / "file").read_text() == "ours"
    assert (tmp_path / "attempt" / "new" / "file").read_text() == "theirs"


def test_an_output_that_was_not_made_there_is_named(space: Space) -> None:
    space.recipe("steps:\n  s: {run: 'mkfifo p', outputs: {o: o, p: p}}\n")
    space.attempt(settings=LOOPBACK)
    assert space.summary is not None
    words = space.summary.failed[0].reason
    assert "declared output o was not created" in words and "p" in words


def test_an_output_that_is_a_link_comes_home_as_what_it_leads_to(space: Space) -> None:
    space.recipe(
        "steps:\n  s: {run: 'echo large > real; ln -s real o; ln -s /etc/passwd p', outputs: {o: o, p: p}}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("o") == "large\n" and not (space.root / "o").is_symlink()
    assert space.read("p") == Path("/etc/passwd").read_text()


def test_an_output_that_is_a_link_into_another_output_comes_home_in_any_order(space: Space) -> None:
    space.recipe(
        "steps:\n  s: {run: 'echo best > all/3; ln -s all/3 best; ln -s all every', outputs: {all: all/, best: best, every: every}}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("best") == space.read("all/3") == space.read("every/3") == "best\n"


@pytest.mark.parametrize("output", ["o", "o/"])
def test_an_output_with_a_time_that_is_yet_to_come_is_no_input_that_a_step_changed(
    space: Space, output: str
) -> None:
    """As archives from a zone that is ahead have them."""
    made, folder = ("o/d/x", "mkdir o/d;") if output == "o/" else ("o", "")
    space.recipe(
        f"steps:\n  a: {{run: '{folder} head -c 100000 /dev/zero > {made}; find o -exec touch -d 2099-01-01 {{}} +', outputs: {{o: {output}}}}}\n"
        "  b: {run: 'find -H {{ steps.a.o }} -type f -exec cat {} + | wc -c > b', outputs: [b]}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("b") == "100000\n"


def test_a_secret_reaches_the_step_there_and_stays_nowhere(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush-1234")
    space.recipe(
        "inputs: {token: {type: secret, env: TOKEN}}\nsteps:\n  s: {run: 'echo $TOKEN; test ${#TOKEN} = 14; echo 1 > o', "
        "outputs: {o: o}, secrets: [token]}\n"
    )
    space.run(settings=LOOPBACK)
    hits = [
        path
        for path in space.root.rglob("*")
        if path.is_file() and path.name != "recipe.yaml" and b"hush-hush" in path.read_bytes()
    ]
    assert [path for path in hits if not path.name.endswith(".sh")] == []


@pytest.mark.parametrize("point", CRASHES)
def test_a_worker_killed_anywhere_is_followed_by_one_that_goes_on(space: Space, point: str) -> None:
    chain(space)
    code, _, said = space.command(
        "run", "--driver", "loopback", env={"RECIPE_CRASH_AT": f"{point}:{CRASHES[point]}"}
    )
    assert code == -signal.SIGKILL, said
    space.run(settings=LOOPBACK)
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    assert space.run(settings=LOOPBACK) == []
    space.run(
        settings=LOOPBACK, choice=Choice(again=("c",))
    )  # only a run that does something looks around
    assert os.listdir(space.root / ".recipe" / "attempts") == []
    assert os.listdir(there(space) / "attempts") == []


def test_what_a_dead_run_left_on_a_host_that_cannot_be_asked_stays_for_the_next_run(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}")
    space.run(settings=LOOPBACK)
    assert space.summary is not None
    left = space.root / ".recipe" / "attempts" / f"{'a' * 24}-{space.summary.run}-1-1"
    left.mkdir(parents=True)
    left.with_name(f"{left.name}.site").write_text("loopback host-1")

    async def silent(orphans: Orphans, name: str) -> bool:
        raise Unreachable("host-1 does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Orphans, "is_running", silent)
        space.run(settings=LOOPBACK, choice=Choice(again=("s",)))
    assert left.exists()
    space.run(settings=LOOPBACK, choice=Choice(again=("s",)))
    assert os.listdir(left.parent) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP], ids=["killed", "terminal closed"])
def test_a_job_goes_on_while_its_worker_is_dead_and_is_found_again(
    space: Space, how: signal.Signals
) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    chain(space, slow=f"echo early; read go < {gate}; echo late;")
    worker = space.start("run", "--driver", "loopback")
    until(lambda: starts(space, "b") == 1)
    worker.send_signal(how)
    worker.communicate(timeout=60)
    after = space.start("run", "--driver", "loopback")
    with gate.open("w") as file:
        file.write("go\n")
    _, said = after.communicate(timeout=60)
    assert after.returncode == 0, said
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]
    log = next((space.root / ".recipe/runs").glob("*/b.1.log")).read_text()
    assert log == "early\nlate\n"


def test_a_job_that_goes_on_and_is_not_needed_is_reported_with_its_host_and_its_run(
    space: Space,
) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    chain(space, slow=f"read go < {gate};")
    worker = space.start("run", "--driver", "loopback")
    until(lambda: starts(space, "b") == 1)
    worker.kill()
    worker.communicate(timeout=60)
    died = json.loads(space.command("runs", "--json")[1])[0]["id"]
    chain(space)
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 0, said
    assert f"loopback host-1 still runs a job of {died}, whose worker exited" in said
    with gate.open("w") as file:
        file.write("go\n")


def test_an_interrupt_stops_what_runs_there(space: Space) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    chain(
        space, slow=f'trap "echo stopped > {space.root}/told; exit 1" TERM; read go < {gate} || :;'
    )
    worker = space.start("run", "--driver", "loopback")
    until(lambda: starts(space, "b") == 1)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert os.listdir(there(space) / "attempts") == []
    assert [
        path for path in (space.root / ".recipe/loopback/leases").iterdir() if path.name != "lock"
    ] == []


# -- hosts that go -------------------------------------------------------------------------------------------------------------------------------


def test_a_step_goes_to_another_host_when_its_own_is_lost(space: Space) -> None:
    space.write("recipe.toml", "[drivers.loopback]\nhosts = 2\nfaults = {lost_on_call = 12}\n")
    chain(space)
    space.attempt(settings=LOOPBACK)
    assert space.summary is not None and space.summary.state == "COMPLETED", space.summary
    assert is_whole(space)


def test_all_that_runs_on_a_host_that_is_lost_goes_to_another(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was waited for when the host was given up was waited for without end."""
    loopback(space, hosts=2, slots=2)
    whole, lost = AttemptFollower.wait_for_end, list[str]()

    async def loses(
        follower: AttemptFollower, beside: Sequence[Coroutine[object, object, object]]
    ) -> Exit:
        if follower.task.outputs[0].path == "a" and not lost:
            await asyncio.to_thread(until, (space.root / "b.here").exists)
            lost.append("host-1")
            raise HostLost("it is gone")
        return await whole(follower, beside)

    monkeypatch.setattr(AttemptFollower, "wait_for_end", loses)
    first = f"test -e {space.root}/b.here || {{ touch {space.root}/b.here; until test -e {space.root}/over; do sleep 0.1; done; }}"
    space.recipe(
        f"steps:\n  a: {{run: echo a > a, outputs: [a]}}\n  b: {{run: '{first}; echo b > b', outputs: [b]}}\nlimits: {{time: 30s}}\n"
    )
    try:
        assert sorted(space.run(settings=LOOPBACK)) == ["a", "a", "b", "b"]
    finally:
        (space.root / "over").touch()


def test_what_is_temporary_stays_there_and_is_made_again_when_it_is_lost(space: Space) -> None:
    def recipe(more: str) -> None:
        space.recipe(
            f"steps:\n  a: {{run: '{count(space)}; echo large > a.bin', outputs: {{o: {{path: a.bin, temporary: true}}}}}}\n"
            f"  b: {{run: '{count(space)}; wc -c < {{{{ steps.a.o }}}} > b.txt{more}', outputs: {{o: b.txt}}}}\n"
        )

    recipe("")
    space.run(settings=LOOPBACK)
    assert space.read("b.txt") == "6\n"
    assert not (space.root / "a.bin").exists()
    assert "large\n" not in [
        path.read_text() for path in (space.root / ".recipe/objects").rglob("*") if path.is_file()
    ]
    assert space.run(settings=LOOPBACK) == []
    recipe("; echo more >> b.txt")
    shutil.rmtree(space.root / ".recipe" / "loopback")
    assert space.run(settings=LOOPBACK) == ["a", "b"]
    assert space.read("b.txt") == "6\nmore\n"


@pytest.mark.parametrize("output", ["a.bin", "a/"])
def test_what_is_temporary_comes_here_for_a_step_that_runs_here(space: Space, output: str) -> None:
    made = output + "file" * output.endswith("/")
    space.recipe(
        f"steps:\n  a: {{run: 'head -c 100000 /dev/zero > {made}; chmod +x {made}', outputs: {{o: {{path: {output}, temporary: true}}}}}}\n"
        f"  b: {{run: 'find -H {{{{ steps.a.o }}}} -type f -perm -u+x -exec cat {{}} + | wc -c > b.txt', outputs: {{o: b.txt}}, where: local}}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("b.txt") == "100000\n" and space.run(settings=LOOPBACK) == []


def test_what_is_temporary_on_two_hosts_comes_together_for_a_step_that_takes_both(
    space: Space,
) -> None:
    loopback(space, hosts=2, slots=1)
    meet = f"touch {space.root}/$RECIPE_STEP.here; until test -e {space.root}/a.here && test -e {space.root}/b.here; do :; done"
    space.recipe(
        "steps:\n"
        + "".join(
            f"  {n}: {{run: '{meet}; echo {n} > {n}.bin', outputs: {{o: {{path: {n}.bin, temporary: true}}}}, timeout: 60s}}\n"
            for n in "ab"
        )
        + "  c: {run: 'cat {{ steps.a.o }} {{ steps.b.o }} > c.txt', outputs: {o: c.txt}}\nlimits: {time: 60s}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("c.txt") == "a\nb\n"


def test_what_is_temporary_and_was_deleted_there_is_made_again_for_a_step_that_runs_here(
    space: Space,
) -> None:
    objects = there(space) / "objects"
    space.recipe(
        f"steps:\n  a: {{run: '{count(space)}; echo large > a.bin', outputs: {{o: {{path: a.bin, temporary: true}}}}}}\n"
        f"  spoil: {{run: 'test -e {space.root}/spoilt || rm -r {objects}/*; touch {space.root}/spoilt', needs: [a], where: local}}\n"
        "  b: {run: 'cat {{ steps.a.o }} > b.txt', outputs: {o: b.txt}, needs: [spoil], where: local}\n"
    )
    space.run(settings=LOOPBACK)
    assert space.read("b.txt") == "large\n" and starts(space, "a") == 2


@pytest.mark.parametrize("point", ["job-over:1", "outputs-stored:1", "job-started:2"])
def test_what_is_temporary_is_found_again_on_its_host_when_the_worker_was_killed(
    space: Space, point: str
) -> None:
    def recipe(more: str) -> None:
        space.recipe(
            f"steps:\n  a: {{run: '{count(space)}; echo large > a.bin', outputs: {{o: {{path: a.bin, temporary: true}}}}}}\n"
            f"  b: {{run: '{count(space)}; wc -c < {{{{ steps.a.o }}}} > b.txt{more}', outputs: {{o: b.txt}}}}\n"
        )

    recipe("")
    code, _, _ = space.command("run", "--driver", "loopback", env={"RECIPE_CRASH_AT": point})
    assert code == -signal.SIGKILL
    space.run(settings=LOOPBACK)
    assert [starts(space, step) for step in "ab"] == [1, 1]
    recipe("; echo more >> b.txt")
    assert space.run(settings=LOOPBACK) == ["b"]
    assert [starts(space, step) for step in "ab"] == [1, 2] and space.read("b.txt") == "6\nmore\n"


def test_a_host_that_cannot_be_reached_for_a_while_costs_nothing(space: Space) -> None:
    space.write(
        "recipe.toml", "[drivers.loopback]\nfaults = {unreachable_on_call = 8, unreachable = 2}\n"
    )
    chain(space)
    assert space.run(settings=LOOPBACK) == ["a", "b", "c"]
    assert is_whole(space)
    assert [starts(space, step) for step in "abc"] == [1, 1, 1]


def test_a_step_starts_where_somebody_answers_as_long_as_there_is_such_a_place(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback(space, hosts=2, slots=2)
    monkeypatch.setattr(
        RemoteContact,
        "silent",
        property(lambda contact: contact.name.endswith("host-1"), lambda _contact, _value: None),
        raising=False,
    )
    space.recipe(
        "steps:\n  s: {matrix: {i: [1, 2, 3]}, run: 'echo {{ matrix.i }} > {{ matrix.i }}.txt', outputs: {o: '{{ matrix.i }}.txt'}}\n"
    )
    space.run(settings=LOOPBACK)
    where = list(sites(space.events).values())
    assert where == [
        "loopback host-2",
        "loopback host-1",
        "loopback host-1",
    ]  # three places were taken, one of them there


def test_no_place_is_one_clear_error(space: Space) -> None:
    space.write("recipe.toml", "[drivers.loopback]\nfaults = {no_offers = 100}\n")
    chain(space)
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 5
    assert "offers no host" in said and "Traceback" not in said
    assert space.run() == ["a", "b", "c"]


def test_a_step_that_no_host_is_large_enough_for_is_refused_before_anything_starts(
    space: Space,
) -> None:
    space.recipe("steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}, resources: {gpus: 8}}\n")
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 2
    assert "s requires 8 GPU(s), but its largest host has 0" in said


# -- state ---------------------------------------------------------------------------------------------------------------------------------------


def test_state_goes_with_a_step_from_host_to_host(space: Space) -> None:
    """It saves 1, fails; goes on elsewhere from 1, saves 2, fails; ends here from 2."""
    space.recipe(
        """steps:
  train:
    run: |
      last={{ state.ckpt.latest | default("none") }}
      n=0; [ "$last" = none ] || n=$(cat "$last/n")
      n=$((n + 1)); mkdir -p "ckpt/step-$n"; echo $n > "ckpt/step-$n/n"
      [ $n -ge 3 ]
      cp "ckpt/step-$n/n" o
    state: {ckpt: {path: ckpt/, checkpoint: "step-*"}}
    outputs: {o: o}
"""
    )
    space.attempt(settings=LOOPBACK)
    shutil.rmtree(space.root / ".recipe" / "loopback")
    space.attempt(settings=LOOPBACK)
    space.run()
    assert space.read("o") == "3\n"


def test_python_current_is_this_python_on_loopback_and_needs_the_same_packages_elsewhere(
    space: Space,
) -> None:
    space.recipe(
        'python: {lock: none.lock}\nsteps:\n  s: {run: [python, -c, \'import sys; open("o", "w").write(sys.prefix)\'], outputs: {o: o}}\n'
    )
    space.write("none.lock", "")
    other = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
    space.write("recipe.toml", f"[drivers.loopback]\npython = '{other}'\n")
    code, _, said = space.command("run", "--driver", "loopback", "--python", "current")
    assert code == 2 and "have different packages" in said
    space.write("recipe.toml", "")
    code, _, said = space.command("run", "--driver", "loopback", "--python", "current")
    assert code == 0, said
    assert space.read("o") == sys.prefix


def test_why_tells_where_a_result_was_made_and_from_which_checkpoint(space: Space) -> None:
    space.recipe(
        """steps:
  train:
    run: |
      last={{ state.ckpt.latest | default("none") }}
      mkdir -p ckpt/step-7; echo 7 > ckpt/step-7/n
      [ "$last" != none ]
      echo 1 > o
    state: {ckpt: {path: ckpt/, checkpoint: "step-*"}}
    outputs: {o: o}
"""
    )
    space.attempt(settings=LOOPBACK)
    space.run(settings=LOOPBACK)
    said = space.command("why", "train")[1]
    assert "host loopback host-1" in said and "continued_from 7" in said


def test_a_host_that_cannot_be_set_up_ends_the_run(space: Space) -> None:
    space.recipe(
        "setup: ['echo no such disk; exit 3']\nsteps:\n  s: {run: 'echo 1 > o', outputs: {o: o}}\n"
    )
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 2 and "no such disk" in said
    assert "NEEDS_RECOVERY" not in space.command("runs")[1]


def test_a_host_that_nothing_will_run_on_is_not_set_up(space: Space) -> None:
    space.recipe(
        f"setup: ['echo $PWD >> {space.root}/setups']\nsteps:\n  s: {{run: 'echo 1 > o', outputs: {{o: o}}, where: local}}\n"
    )
    space.run(settings=LOOPBACK)
    assert ".recipe/loopback" not in space.read("setups")
