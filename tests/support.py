"""A workspace to try recipes in, as a caller sees it: write, run, look.  Knows the public API and the command line, nothing inside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import runner
from runner.errors import Invalid, Problem
from runner.execution.terms import Choice, Settings, Summary
from runner.interface.cli.main import main
from runner.storage.records.runs import Event
from runner.survey.survey import Survey

RECIPE = (sys.executable, "-m", "runner.interface.cli.main")
LOOKING = frozenset(
    ["check", "checkpoints", "diff", "graph", "list", "logs", "path", "plan", "report", "results", "runs", "schema", "show", "status", "validate", "why"]
)  # fmt: skip
"""Verbs that only look: called in this process they say the same, and to start Python and import the runner costs more than they do.

With an environment of its own a command gets a process: libraries read theirs once.
"""


class Space:
    """A folder with a recipe in it.  `run` answers which steps were executed, in the order in which they began."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = "recipe.yaml"
        self.summary: Summary | None = None
        self.events: list[Event] = []
        root.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def read(self, name: str) -> str:
        return (self.root / name).read_text()

    def recipe(self, body: str | Mapping[str, Any], *, name: str = "recipe.yaml") -> None:
        """Write a recipe; one without a head gets one.  A mapping is written as JSON, which is YAML."""
        if isinstance(body, Mapping):
            self.write(name, json.dumps({"recipe": "t@1", "summary": "A test", **body}, indent=1))
        else:
            self.write(
                name,
                body
                if body.lstrip().startswith("recipe:")
                else f"recipe: t@1\nsummary: A test\n{body}",
            )

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        choice: Choice | None = None,
        settings: Settings | None = None,
        **more: Any,
    ) -> list[str]:
        """Run, and demand that it worked."""
        ran = self.attempt(inputs, choice=choice, settings=settings, **more)
        assert self.summary is not None
        assert self.summary.state == "COMPLETED", [
            (f.id, f.reason, f.hint, f.tail) for f in self.summary.failed
        ]
        return ran

    def attempt(self, inputs: Mapping[str, Any] | None = None, **more: Any) -> list[str]:
        """Run, however it ends."""
        self.events = []
        self.summary = runner.run(
            f"./{self.file}", inputs, workspace=self.root, on_event=self.events.append, **more
        )
        return [
            event.id
            for event in self.events
            if event.subject == "step" and event.after == "RUNNING"
        ]

    def plan(self, inputs: Mapping[str, Any] | None = None, **more: Any) -> Survey:
        return runner.plan(f"./{self.file}", inputs, workspace=self.root, **more)

    def answers(self, inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, str]:
        """What a run would do with each step."""
        survey = self.plan(inputs, **more)
        return {
            node.id: verdict.answer
            for node, verdict in zip(survey.plan.nodes, survey.verdicts, strict=True)
        }

    def keys(self, inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, str]:
        """The key of every step.  All must be known: what they need has been made."""
        survey = self.plan(inputs, **more)
        found = {
            node.id: verdict.key
            for node, verdict in zip(survey.plan.nodes, survey.verdicts, strict=True)
        }
        assert None not in found.values(), {
            id: survey.verdicts[survey.plan.index[id]].reasons
            for id, key in found.items()
            if key is None
        }
        return {id: str(key) for id, key in found.items()}

    def key(self, step: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> str:
        survey = self.plan(inputs, **more)
        verdict = survey.verdicts[survey.plan.index[step]]
        assert verdict.key is not None, verdict.reasons
        return verdict.key

    def problems(self, inputs: Mapping[str, Any] | None = None) -> list[Problem]:
        """What is wrong with the recipe; empty when nothing is."""
        try:
            self.plan(inputs)
        except Invalid as error:
            return list(error.problems)
        return []

    def pointed(self, problem: Problem) -> str:
        """The text that a problem underlines."""
        assert problem.where is not None
        return problem.where.text[problem.where.column - 1 :][: problem.where.length]

    def of_agents(self, name: str) -> str:
        """What stands in the file of this name of the agents of this machine, one after the other."""
        found = sorted(self.root.glob(f".recipe/local/*/{name}"))
        return "".join(path.read_text() for path in found)

    def start(
        self, *words: str, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """The command line, in a process of its own."""
        return subprocess.Popen(
            [*RECIPE, *words],
            cwd=self.root,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        )

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """The command line: its exit status, and what it said."""
        if words and words[0] in LOOKING and not env and self._is_like_a_process():
            return self._called(words)
        process = self.start(*words, env=env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def _is_like_a_process(self) -> bool:
        """Whether a process of `start` would have the user, environment and packages of this one, and no other thread sees its folder change."""
        return (
            type(self).start is Space.start
            and "PYTHONPATH" not in os.environ
            and threading.current_thread() is threading.main_thread()
        )

    def _called(self, words: Sequence[str]) -> tuple[int, str, str]:
        """The same in this process, whose folder and streams are those of the command meanwhile."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8") as err,
            contextlib.chdir(self.root),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(words)
            out.seek(0)
            err.seek(0)
            return code, out.read(), err.read()


def calls(act: Callable[[], object]) -> int:
    """How many functions `act` calls, of Python and of C: its cost, which no other process of the machine changes."""
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def old_python() -> str | None:
    """A Python 3.9, the oldest that the agent runs on."""
    kept = Path(
        os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions"
    ).expanduser()  # pyenv has them, though none may be chosen here
    for name in ("python3.9", *map(str, kept.glob("3.9.*/bin/python3.9"))):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(
                [name, "-c", "import sys; print(sys.executable)"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
    return None


def until(true: Callable[[], object], *, seconds: float = 120.0) -> None:
    """Wait for something that another process does.  The limit is for what never happens: it is far above what a busy machine takes."""
    begun = time.monotonic()
    while not true():
        waited = time.monotonic() - begun
        assert waited < seconds, "it did not happen in time"
        time.sleep(min(0.05, max(0.005, waited / 20)))  # what takes long is looked at less often


class Workers(Space):
    """A workspace whose runs do not outlive their test: one that failed would take the nodes of the next."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        self.started.append(super().start(*words, **more))
        return self.started[-1]

    def end(self) -> None:
        """Kill those that are left."""
        for worker in self.started:
            worker.kill()
            worker.wait()
