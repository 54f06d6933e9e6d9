"""Execution of attempts in background tasks, whose results the event loop collects."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import traceback
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...errors import Infrastructure, RecipeError
from ...logs import Log
from ...planning.ids import readable
from ...storage.content.files import no_space
from . import attempt_result
from .attempt import GRACE, Attempt
from .run_schedule import RunSchedule
from .running_attempts import End, RunningAttempts
from .shared_states import SharedStates

_log: Final = Log("loop")


class AttemptExecutor:
    """Executor of a run's attempts in background tasks."""

    def __init__(
        self, schedule: RunSchedule, running: RunningAttempts, shared_states: SharedStates
    ) -> None:
        self._schedule, self._running, self._shared_states = schedule, running, shared_states

    def begin(self, id: str, attempt: Attempt) -> None:
        """Start executing an attempt, and reserve its capacity on the host."""
        self._running.add(id, attempt)
        attempt.task.make_room = functools.partial(self._make_room, id, attempt)
        execution = self._execute(id, attempt)
        attempt.execution = asyncio.get_running_loop().create_task(execution)

    async def _make_room(self, id: str, attempt: Attempt) -> None:
        """Let the event loop start a queued step before the outputs of this attempt are collected.

        A step that its metrics may still fail keeps its slot.
        """
        if attempt.stop_asked or attempt.spec.options.ends_on_nan:
            return
        if self._schedule.make_room(id):
            self._running.make_room(id)
            # The event loop launches the other attempt, and then the task of that attempt sends its
            # command.
            for _ in range(2):
                await asyncio.sleep(0)

    async def _execute(self, id: str, attempt: Attempt) -> None:
        end: End
        try:
            async with self._shared_states.upload_during(attempt, attempt.spec):
                attempt.result = await attempt.place.run_attempt(attempt.task)
            end = _end_of(attempt, attempt.result.exit)
        except asyncio.CancelledError:
            if not attempt.stop_asked:
                raise
            lost = attempt.place.lost
            end = HostLost(lost) if lost else Exit(None, reason="stopped")
        except (DriverError, RecipeError) as error:
            end = error
        except OSError as error:
            end = no_space(error, error.filename or attempt.name)
        except Exception as error:
            end = await _internal_error(id, attempt, error)
        self._running.note_end(id, end)


def _end_of(attempt: Attempt, exit: Exit) -> Exit:
    """Return the exit, with the reason "stopped" if the attempt was asked to save and exit."""
    if attempt.save_asked and exit.reason in ("exit", "signal") and exit.code != 0:
        return exit._replace(reason="stopped")
    return exit


async def _internal_error(id: str, attempt: Attempt, error: Exception) -> RecipeError:
    """Stop the job after an internal error, log the traceback and return a user-facing error."""
    text = "".join(traceback.format_exception(error))
    _log.error("%s: %s", readable(id), text)
    with contextlib.suppress(OSError):
        attempt_result.append_to_log(attempt.log, text)
    if attempt.task.job is not None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(attempt.stop(), 2 * GRACE.total_seconds())
    words = f"internal error of recipe: {type(error).__name__}: {error}"
    return Infrastructure(
        words,
        fix="run again; if the error repeats, report it with the last lines of the step's log",
    )
