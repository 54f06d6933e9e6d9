"""Hints for failed attempts, from their inputs, log and environment."""

from __future__ import annotations

import functools
import os

from drivers.base import Exit

from ...hosts.place.staging import find_undeclared_file
from ...language.imports import find_starts
from ...planning import causes
from ...storage.workspace import Workspace
from ...survey import imports
from ...survey.env_files import EnvFiles
from . import attempt_result, hints
from .attempt import Attempt
from .environments import StepEnvironments
from .failing import Cause
from .run_plan import RunPlan


class FailureHints:
    """Finder of hints for one run's failed attempts."""

    def __init__(self, ws: Workspace, steps: RunPlan, environments: StepEnvironments) -> None:
        self._ws, self._steps, self._environments = ws, steps, environments

    def hint_for(
        self, id: str, attempt: Attempt, cause: Cause, tail: str, exit: Exit | None
    ) -> str:
        """Return a hint for fixing a failed attempt; empty if none is known.

        `tail` is the end of its log. `exit` is None for an attempt that did not exit by itself.
        """
        hint = cause.fix
        if cause.reason == "unwatched":
            hint = "in the step, kill only processes that it started, by process ID"
        if cause.reason in ("exit", "output"):
            hint = self._about_inputs(id, attempt, tail)
        if exit is not None and not hint:
            hint = self._about_exit(attempt, cause, tail, exit)
        return hint

    def _about_inputs(self, id: str, attempt: Attempt, tail: str) -> str:
        """Return a hint about a missing input, if the log indicates one."""
        directory, spec = attempt.directory, attempt.spec
        declared = [
            *directory.staged,
            *directory.links,
            *directory.objects,
            *(output.path for output in attempt.node.outputs),
        ]
        base = self._steps.plan.homes[attempt.node.home]
        commands = find_starts(spec.run, spec.accelerate)
        hint = imports.import_advice(tail, id, base, declared, commands)
        if hint:
            return hint
        cwd = attempt.place.paths(directory).cwd
        missing = find_undeclared_file(tail, self._ws.root, cwd, declared)
        if not missing:
            return ""
        return f"{missing} is in the workspace but not declared: add it to `deps` of {id}"

    def _about_exit(self, attempt: Attempt, cause: Cause, tail: str, exit: Exit) -> str:
        if cause.reason != "oom" and causes.REMEDIES.get(cause.reason):
            return causes.REMEDIES[cause.reason]
        node, spec, place = attempt.node, attempt.spec, attempt.place
        image = self._environments.container_image(spec, place)
        directory = attempt.directory
        ran = hints.AttemptEnvironment(
            self._environments.interpreter(node, spec, place),
            "" if self._steps.survey.request.current_python else node.lock,
            image,
            place.elsewhere,
            given_files=bool(directory.staged or directory.objects or directory.links),
            executable=lambda path: attempt_result.is_executable(self._ws.root / path),
            sandbox=self._environments.sandbox(spec),
            hidden=functools.partial(_may_be_hidden, attempt, image),
        )
        dotenv = EnvFiles(self._ws.own).names(".env")
        return hints.find_hint(exit, tail, spec, ran, self._ws.environ, dotenv)


def _may_be_hidden(attempt: Attempt, image: str, path: str) -> bool:
    """Return True if the sandbox may hide this absolute path from the step.

    On another machine, any path may exist.
    """
    place = attempt.place
    if image or path.startswith(place.paths(attempt.directory).cwd):
        return False
    return bool(place.elsewhere) or os.path.lexists(path) or os.path.isdir(os.path.dirname(path))
