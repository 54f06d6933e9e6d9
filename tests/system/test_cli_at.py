"""The command line at a server, a database and a workspace: the same verbs, by `--to` or RECIPE_SERVER."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.interface.cli.main import main
from runner.interface.cli.transports import SERVER_ARGUMENTS
from runner.interface.cli.verbs import REMOTE_VERBS
from tests.servers.rest import Rest
from tests.support import until
from tests.system.test_handle import folder

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with Rest(folder(tmp_path_factory.mktemp("at") / "space"), "--with-worker") as server:
        yield server


@pytest.fixture
def command(
    rest: Rest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Command:
    """A command line in an empty folder, whose runs are that server's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECIPE_TOKEN", rest.token)
    monkeypatch.setenv("RECIPE_SERVER", rest.url)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return run


def test_a_run_is_submitted_followed_shown_compared_and_fetched(
    command: Command, tmp_path: Path
) -> None:
    code, out, err = command("submit", "talk", "times=2")
    run = out.strip()
    assert code == 0 and f"logs -f {run}" in err, err
    code, out, err = command("logs", "-f", run)
    assert (
        code == 0 and out == "==> say <==\nhello 1\nhello 2\nan open line\n==> copy <==\ncopied\n"
    ), err
    until(lambda: "COMPLETED" in command("show", run)[1])
    code, out, err = command("show", run)
    assert (
        code == 0
        and out.splitlines()[0].startswith(f"{run}  talk@1  ")
        and "times=2 word=hello" in out
        and "copy.two" in out
    ), out
    assert json.loads(command("show", "--json")[1])["id"] == run
    second = command("submit", "talk", "word=bye", "-q")[1].strip()
    assert list(command("logs", "-f", f"{second[-6:]}/say")[1].splitlines())[:1] == ["bye 1"]
    until(lambda: "COMPLETED" in command("show", second)[1])
    code, out, err = command("runs")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["RUN", second, run], out
    assert [row["id"] for row in json.loads(command("runs", "-n", "1", "--json")[1])] == [second]
    code, out, err = command("diff")
    assert (
        code == 0 and out.startswith(f"A  {run}") and "word: hello -> bye" in out.replace('"', "")
    ), out
    assert json.loads(command("diff", run, second, "--json")[1])["b"]["id"] == second
    code, out, err = command("fetch", run, "--out", "got")
    assert (
        code == 0
        and (tmp_path / "got/copy.two").read_text() == "2\n"
        and (tmp_path / "got/say.all/deep/said.txt").read_text() == "hello\n"
    ), err
    assert (tmp_path / "got/say.all/gone").is_symlink() and "say.all/gone" in out
    (tmp_path / "got/copy.two").write_text("mine")
    assert (
        command("fetch", run, "--out", "got")[0] == 2
        and (tmp_path / "got/copy.two").read_text() == "mine"
    )
    assert not (tmp_path / ".recipe").exists()


def test_a_run_is_paused_resumed_cancelled_and_retried(command: Command) -> None:
    run = command("submit", "gate@1", "name=at", "-q")[1].strip()
    until(lambda: "RUNNING" in command("show", run)[1])
    assert run in command("status")[1]
    assert command("pause", run)[0] == 0
    until(lambda: "PAUSED" in command("show", run)[1])
    until(lambda: command("resume", run)[0] == 0)
    assert command("cancel")[0] == 0
    until(lambda: "CANCELLED" in command("show", run)[1])
    code, _, err = command("cancel", run)
    assert code == 3 and "already CANCELLED" in err
    again = command("retry", run)[1].strip()
    assert again != run and command("cancel", again)[0] == 0


def test_what_a_server_cannot_do_is_refused_in_a_sentence(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: mine@1\nsteps: {a: {run: 'true'}}\n")
    code, _, err = command("submit", "./mine.yaml")
    assert (
        code == 3
        and "a local file, but a server runs only its own recipes" in err
        and "allow" in err
    )
    code, _, err = command("submit", "talk", "--python", "python3", "--host", "me@x")
    assert (
        code == 3
        and "--python does not apply to runs on a server" in err
        and "--host does not apply to runs on a server" in err
    )
    code, _, err = command("submit", "tlak")
    assert code == 3 and "talk" in err
    code, _, err = command("show", "20200101-000000-aaaaaa")
    assert code == 3 and "no run " in err
    code, _, err = command("runs", "--to", "ftp://x")
    assert code == 3 and "neither a server nor a database" in err


def test_here_is_this_workspace_and_a_database_is_one(
    command: Command, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "recipe: mine@1\nsteps: {a: {run: 'echo hi > {{ outputs.o }}', outputs: {o: o.txt}}}\n"
    )
    assert command("run", "./mine.yaml", "-q")[0] == 0
    code, out, _ = command("show", "last", "--to", "here")
    assert code == 0 and "mine@1" in out and "COMPLETED" in out and "a.o" in out
    monkeypatch.setenv("RECIPE_RUNS", "")  # what --to sets is taken back
    code, out, err = command("submit", "./mine.yaml", "--here", "-q", "--to", url)
    run = out.strip()
    assert code == 0 and run in command("runs", "--to", url)[1], err
    assert (
        "QUEUED" in command("show", run, "--to", url)[1]
        and command("cancel", run, "--to", url)[0] == 0
    )
    assert os.environ["RECIPE_RUNS"] == url


def test_each_verb_that_takes_to_is_known_to_a_server() -> None:
    assert set(SERVER_ARGUMENTS) == REMOTE_VERBS
