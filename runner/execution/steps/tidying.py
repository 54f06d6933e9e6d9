"""Deletion and retention of the files of finished attempts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ...digest import of_value
from ...hosts.place.spare_dirs import SparePool
from ...storage.content.disk import delete
from ...storage.workspace import Workspace
from . import attempt_result
from .attempt import Attempt
from .commit import GroupCommit


class AttemptCleanup:
    """Cleanup of the files of one run's attempts.

    `beside` runs a coroutine in the background.
    """

    def __init__(
        self,
        ws: Workspace,
        commits: GroupCommit,
        scrap: SparePool,
        recipe: str,
        beside: Callable[[Coroutine[Any, Any, None]], None],
        *,
        failures_kept: bool,
    ) -> None:
        self.ws, self.commits, self.recipe = ws, commits, recipe
        self._scrap, self._beside, self._failures_kept = scrap, beside, failures_kept
        self._attempts, self._logs = f"{ws.home}/attempts", f"{ws.home}/runs/{commits.run}"

    def kept_directory(self, attempt: Attempt) -> str:
        """Return the stored directory of a failed attempt; empty if the attempt wrote no file."""
        kept = f"{self._attempts}/{self.failed_name(attempt.id)}"
        for folder, _, names in os.walk(kept):
            for name in names:
                path = f"{folder}/{name}"
                mode = os.lstat(path).st_mode
                if not attempt.directory_of_end.is_staged(path.removeprefix(f"{kept}/"), mode):
                    return kept
        return ""

    def failed_name(self, id: str) -> str:
        """Return the name of the directory that stores a step's last failed attempt.

        Each step has one such directory, so that they do not accumulate.
        """
        return f"failed-{of_value('step', [self.recipe, id])[:24]}"

    def tidy(self, attempt: Attempt, *, success: bool) -> None:
        """Keep the directory and checkpoints of a failed attempt; delete the remaining files.

        Files that are needed after a kill are deleted once the trace is stored.
        """
        spec, path = attempt.spec, attempt.directory.path
        for state in spec.state:
            if attempt.state is not None:
                from ...storage import checkpoints

                folder = attempt.state.folder(state.name)
                checkpoints.prune(folder, state.checkpoint, state.keep)
        if success:
            # Only once the trace is stored: until then the next worker needs all files.
            self.commits.after_flush(functools.partial(self._forget, attempt))
        clearing = functools.partial(
            attempt.place.clear_after,
            attempt.task,
            attempt.task.states if success and not spec.continues else (),
        )
        self.commits.after_flush(lambda: self._beside(clearing()))
        self._scrap.add_script(path + ".sh")
        failed = (
            f"{self._attempts}/{self.failed_name(attempt.id)}"
            if self._failures_kept or not success
            else ""
        )
        if failed and os.path.lexists(failed):
            delete(Path(failed))
        if not success:
            self._failures_kept = True
            for part in attempt.task.parts or [attempt.task]:
                part.attempt.delete_record()
            with contextlib.suppress(OSError):
                os.rename(attempt.directory_of_end.path, failed)
            if attempt.directory_of_end is not attempt.directory:
                delete(Path(path))

    def discard(self, attempt: Attempt) -> None:
        """Delete the files of an attempt that did not start."""
        self._beside(attempt.place.clear_after(attempt.task, ()))
        attempt.clear_up(self._scrap)

    def _forget(self, attempt: Attempt) -> None:
        """Delete the local files of a successful attempt whose result is cached."""
        rest = attempt.directory.retire(self._scrap)
        if rest is not None:
            self._beside(asyncio.to_thread(rest))
        with contextlib.suppress(OSError):
            self.discard_log(attempt)
        if attempt.state is not None and not attempt.spec.continues:
            delete(attempt.state.path)

    def copy_logs(self, id: str, attempt: Attempt) -> str:
        """Copy the log and metrics files of an attempt to the logs of its run, with secrets masked.

        Returns the path of the log that explains its end; empty without a log. Raises OSError.
        """
        kept = f"{self._logs}/{id.replace('/', '%2F')}.{self.commits.tries(id)}"
        found = {
            attempt.log: attempt_result.copy_log(
                attempt.log, _metrics_file_of(attempt), kept, self.commits.masker
            )
        }
        for rank, log in enumerate(attempt.logs[1:], 1):
            found[log] = attempt_result.copy_log(log, "", f"{kept}.{rank}", self.commits.masker)
        return found[attempt.last_log]

    def discard_log(self, attempt: Attempt) -> None:
        """Delete the original log and metrics files of an attempt after they were stored.

        Raises OSError.
        """
        attempt_result.discard_log(attempt.log, _metrics_file_of(attempt), self._scrap)


def _metrics_file_of(attempt: Attempt) -> str:
    """Return the path of an attempt's metrics file; empty if its step has none."""
    metrics = attempt.spec.metrics
    return attempt.metrics_file if metrics is not None and metrics.in_environment else ""
