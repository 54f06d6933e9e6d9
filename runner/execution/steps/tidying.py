"""What is kept of an attempt that is over, and what is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ...digest import of_value
from ...hosts.place.spare_dirs import Scrap
from ...planning.step import StepSpec
from ...storage.content.disk import delete
from ...storage.workspace import Workspace
from . import attempt_result
from .attempts import Running
from .commit import GroupCommit


class Tidying:
    """Tidies up after the attempts of one run.  `beside` goes on with something while the loop does other things."""

    def __init__(
        self,
        ws: Workspace,
        commits: GroupCommit,
        scrap: Scrap,
        recipe: str,
        beside: Callable[[Coroutine[Any, Any, None]], None],
        *,
        failures_kept: bool,
    ) -> None:
        self.ws, self.commits, self.recipe = ws, commits, recipe
        self._scrap, self._beside, self._failures_kept = scrap, beside, failures_kept
        self._attempts, self._logs = f"{ws.home}/attempts", f"{ws.home}/runs/{commits.run}"

    def left(self, running: Running) -> str:
        """Where what a failed attempt wrote is to be looked at; empty when it wrote no file."""
        kept = f"{self._attempts}/{self.failed_name(running.node.id)}"
        for folder, _, names in os.walk(kept):
            for name in names:
                path = f"{folder}/{name}"
                mode = os.lstat(path).st_mode
                if not running.left.was_given(path.removeprefix(f"{kept}/"), mode):
                    return kept
        return ""

    def failed_name(self, id: str) -> str:
        """Where the directory of a step's last failed attempt is kept, to be looked at: one for each step, so that they do not pile up."""
        return f"failed-{of_value('step', [self.recipe, id])[:24]}"

    def tidy(self, running: Running, spec: StepSpec, *, success: bool) -> None:
        """Keep the directory of a failed attempt and its states; delete the rest once the trace is stored."""
        for state in spec.state:
            if running.state is not None:
                from ...storage import checkpoints

                checkpoints.prune(running.state.folder(state.name), state.checkpoint, state.keep)
        path = running.attempt.path
        if success:
            # Not before the trace is stored: until then a worker that comes after us has to find all of it.
            self.commits.after_flush(functools.partial(self._forget, running, spec))
        clearing = functools.partial(
            running.place.clear_after,
            running.task,
            running.task.states if success and not spec.continues else (),
        )
        self.commits.after_flush(lambda: self._beside(clearing()))
        self._scrap.give_script(path + ".sh")
        failed = (
            f"{self._attempts}/{self.failed_name(running.node.id)}"
            if self._failures_kept or not success
            else ""
        )
        if failed and os.path.lexists(failed):
            delete(Path(failed))
        if not success:
            self._failures_kept = True
            for part in running.task.parts or [running.task]:
                part.attempt.forget_given()
            with contextlib.suppress(OSError):
                os.rename(running.left.path, failed)
            if running.left is not running.attempt:
                delete(Path(path))

    def _forget(self, running: Running, spec: StepSpec) -> None:
        """The trace of an attempt is stored: nothing of it is needed any more."""
        rest = running.attempt.retire(self._scrap)
        if rest is not None:
            self._beside(asyncio.to_thread(rest))
        with contextlib.suppress(OSError):
            attempt_result.discard(running.log, self.measured(running, spec), self._scrap)
        if running.state is not None and not spec.continues:
            delete(running.state.path)

    def keep_log(self, id: str, running: Running, spec: StepSpec) -> str:
        """Keep what the attempt printed and measured: where the log that tells of its end is from now on, if it has one."""
        kept = f"{self._logs}/{id.replace('/', '%2F')}.{self.commits.tries(id)}"
        found = {
            running.log: attempt_result.keep(
                running.log, self.measured(running, spec), kept, self.commits.masker
            )
        }
        for rank, log in enumerate(running.logs[1:], 1):
            found[log] = attempt_result.keep(log, "", f"{kept}.{rank}", self.commits.masker)
        return found[running.last_log]

    def measured(self, running: Running, spec: StepSpec) -> str:
        """The file that an attempt may write metrics to; empty when its step has none."""
        return (
            f"{running.attempt.path}.metrics"
            if spec.metrics is not None and spec.metrics.in_environment
            else ""
        )
