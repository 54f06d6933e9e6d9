"""The five ways to ask something of a run, each with the same answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import pytest

import runner
from runner.api.outcomes import Outcome
from runner.errors import CannotAsk
from runner.interface.cli.main import main
from tests.servers.rest import Rest

PRIORITY: Final = 9
"""What `prioritize` gives a run."""


class Answer(NamedTuple):
    """What a front said: the run that continues, its state and whether that is done; or a refusal."""

    run: str = ""
    state: str = ""
    done: bool = True
    refusal: str = ""
    fix: str = ""


class Front(Protocol):
    """Asks a run for a verb."""

    def __call__(self, run: str, verb: str) -> Answer: ...


class World(NamedTuple):
    """A workspace, a server of it, and where its runs are kept."""

    root: Path
    rest: Rest
    to: str | None


def _of_outcome(call: Callable[[], Outcome]) -> Answer:
    try:
        outcome = call()
    except CannotAsk as error:
        return Answer(refusal=error.message, fix=error.problems[0].fix)
    return Answer(outcome.run, outcome.state, outcome.done)


def _python(to: str | None, root: Path) -> Front:
    def ask(run: str, verb: str) -> Answer:
        with runner.run_of(run, to=to, workspace=root) as handle:
            if verb == "prioritize":
                return _of_outcome(lambda: handle.prioritize(PRIORITY))
            if verb != "retry":
                return _of_outcome(getattr(handle, verb))

            def retry() -> Outcome:
                again = handle.retry()
                return Outcome(again.id, again.status().state, True)

            return _of_outcome(retry)

    return ask


def python(world: World, _capture: pytest.CaptureFixture[str]) -> Front:
    return _python(world.to, world.root)


def python_at_a_server(world: World, _capture: pytest.CaptureFixture[str]) -> Front:
    return _python(world.rest.url, world.root)


def rest(world: World, _capture: pytest.CaptureFixture[str]) -> Front:
    def ask(run: str, verb: str) -> Answer:
        if verb == "prioritize":
            reply = world.rest.ask("PATCH", f"/v1/runs/{run}", {"priority": PRIORITY})
        else:
            reply = world.rest.ask("POST", f"/v1/runs/{run}/{verb}")
        body = reply.json()
        if reply.status_code not in (200, 202):
            assert reply.status_code == 409, reply.text
            return Answer(refusal=body["error"]["message"], fix=body["error"]["fix"])
        if verb == "prioritize":
            assert body["priority"] == PRIORITY
            return Answer(body["id"], body["state"])
        return Answer(body["run"], body["state"], body["done"])

    return ask


def _command(root: Path, to: tuple[str, ...], capture: pytest.CaptureFixture[str]) -> Front:
    def ask(run: str, verb: str) -> Answer:
        how = "--no-wait" if verb in ("cancel", "pause") else "--queue"
        how = str(PRIORITY) if verb == "prioritize" else how
        capture.readouterr()
        code = main(["-C", str(root), verb, run, how, *to])
        out, err = capture.readouterr()
        if code == 3:
            refusal, _, fix = err.strip().partition("\n")
            return Answer(
                refusal=refusal.removeprefix("error: ").partition("[")[0].strip(),
                fix=fix.strip().removeprefix("fix: "),
            )
        assert code == 0, err
        if verb == "retry":
            return Answer(out.strip(), "QUEUED")
        words = out.split()
        assert words[:2] == ["run", run], out
        if "sent the request to" in out or "was about to pause" in out:
            return Answer(run, "ACTIVE", done=False)
        return Answer(run, words[3].strip(":;"))

    return ask


def command(world: World, capture: pytest.CaptureFixture[str]) -> Front:
    return _command(world.root, ("--to", world.to or "here"), capture)


def command_at_a_server(world: World, capture: pytest.CaptureFixture[str]) -> Front:
    assert os.environ["RECIPE_TOKEN"] == world.rest.token
    return _command(world.root, ("--to", world.rest.url), capture)


FRONTS: Final = (command, command_at_a_server, python, python_at_a_server, rest)
