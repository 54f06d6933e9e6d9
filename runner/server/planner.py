"""Compute plans and previews in child processes, with limits of time, memory and number.

Clients can request arbitrarily large plans and files, and a process that reads them answers no
other request. A fork server with all modules imported therefore forks a child for each of them
within milliseconds. The child frees all its memory when it exits.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Annotated, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

from fastapi import Depends, Request

from ..errors import Problem, RecipeError
from .answers import Refused, refusal_of
from .room import ServedWorkspace

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE: Final = 2
"""Maximum number of plans that are computed at once."""
WAITING: Final = 32
"""Maximum number of plans that are computed or waiting. Further requests are rejected."""
SECONDS: Final = 60.0
"""Time limit of a plan in seconds."""
MEMORY: Final = 1 << 30
"""Memory limit of a plan in bytes, in addition to the initial memory of its process."""
_IMPORTED: Final = (
    *(f"runner.{name}" for name in ("server.app", "execution.session", "survey.bundles")),
    *("jinja2", "jsonschema", "networkx", "referencing", "yaml"),
    *("PIL.Image", "PIL.WebPImagePlugin"),
)
"""Modules that the fork server imports before it forks processes for plans and previews."""
NICENESS: Final = 5
"""Niceness of plan processes, so that responses of the server have priority."""


class Subject(NamedTuple):
    """The kind of computed result, such as plans or previews, for error messages."""

    name: str
    many: str
    fix: str


PLANS: Final = Subject("plan", "plans", "use fewer matrix values, or shorter lists")
PREVIEWS: Final = Subject(
    "preview", "previews", "download the file, and open it with its own program"
)


class _Failure(NamedTuple):
    """An error sent by a child process. `trace` is the traceback of an unexpected error."""

    status: int
    code: str
    message: str
    fix: str
    problems: list[Problem]
    trace: str = ""


class Planner:
    """Runner of computations in limited child processes, by default for plans.

    Use only in the event loop.
    """

    def __init__(
        self, seconds: float = SECONDS, memory: int = MEMORY, subject: Subject = PLANS
    ) -> None:
        self._seconds, self._memory, self._subject = seconds, memory, subject
        self._asked = 0
        self._children: set[ForkServerProcess] = set()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="plan")
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(list(_IMPORTED))

    async def call(
        self,
        function: Callable[Concatenate[ServedWorkspace, P], T],
        workspace: ServedWorkspace,
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Call `function` in a child process and return the result.

        The function must be a module-level function, and its arguments and result picklable. Raises
        Refused from the function, 503 if too many calls are waiting, and 422 if the call exceeds
        its time or memory limit.
        """
        if self._asked >= WAITING:
            many = self._subject.many
            refused = Refused(
                503,
                f"too-many-{many}",
                f"{WAITING} {many} are waiting",
                "repeat the request in a few seconds",
            )
            refused.headers = {"retry-after": "5"}
            raise refused
        self._asked += 1
        try:
            loop = asyncio.get_running_loop()
            call = _Call(
                function,
                workspace.root,
                dict(workspace.environ),
                workspace.for_owner,
                args,
                more,
                self._subject,
            )
            found = await loop.run_in_executor(self._threads, self._compute, call)
        finally:
            self._asked -= 1
        if isinstance(found, _Failure):
            raise _as_error(found)
        return cast("T", found)

    def start(self) -> None:
        """Start the fork server in advance, so that the first plan is fast."""
        forkserver.ensure_running()

    def close(self) -> None:
        """Kill running child processes and start no others."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in tuple(self._children):
            child.kill()

    def _compute(self, call: _Call) -> object:
        ours, theirs = self._processes.Pipe(duplex=False)
        child = self._processes.Process(
            target=_run_call, args=(theirs, call, self._seconds, self._memory), daemon=True
        )
        with ours:
            child.start()
            self._children.add(child)
            theirs.close()
            try:
                if not ours.poll(self._seconds):
                    return _too_large(
                        self._subject,
                        f"computing the {self._subject.name} takes more than {self._seconds:g} s",
                    )
                return ours.recv()
            except EOFError:
                words = f"the {self._subject.name} could not be computed: its process was killed"
                return _too_large(self._subject, words)
            finally:
                self._children.discard(child)
                child.kill()
                child.join()


async def _get_planner(request: Request) -> Planner:
    return cast("Planner", request.app.state.planner)


async def _get_previewer(request: Request) -> Planner:
    return cast("Planner", request.app.state.previewer)


InPlanner = Annotated[Planner, Depends(_get_planner)]
InPreviewer = Annotated[Planner, Depends(_get_previewer)]


class _Call(NamedTuple):
    """A function call for a child process."""

    function: Callable[..., object]
    root: Path
    environ: Mapping[str, str]
    for_owner: bool
    args: tuple[object, ...]
    more: Mapping[str, object]
    subject: Subject

    def execute(self) -> object:
        room = ServedWorkspace(self.root, self.environ, for_owner=self.for_owner)
        return self.function(room, *self.args, **self.more)


def _run_call(pipe: Connection, call: _Call, seconds: float, memory: int) -> None:
    """Execute a call in this process, and send its result or error."""
    os.nice(NICENESS)
    _limit_resources(seconds, memory)
    found: object
    try:
        found = call.execute()
    except Refused as error:
        found = _failure_of(error)
    except RecipeError as error:
        found = _failure_of(refusal_of(error))
    except MemoryError:
        words = f"computing the {call.subject.name} takes more than {memory / 1e9:.1f} GB of memory"
        found = _too_large(call.subject, words)
    except RecursionError:
        words = f"the {call.subject.name} is nested too deeply to be computed"
        found = _too_large(call.subject, words)
    except Exception:
        found = _Failure(500, "", "", "", [], traceback.format_exc())
    pipe.send(found)


def _limit_resources(seconds: float, memory: int) -> None:
    """Limit the time and memory of this process.

    The limits apply even if the server is killed and cannot stop this process.
    """
    signal.alarm(int(seconds) + 5)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    whole = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, most if most >= 0 else whole + 5))
    if sys.platform == "linux":  # elsewhere RLIMIT_DATA counts something else, or nothing
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        now = _data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (min(now, most) if most >= 0 else now, most))


def _data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts for this process (proc_pid_status(5))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _failure_of(error: Refused) -> _Failure:
    # Locations in files are left out, because responses do not show them.
    problems = [problem._replace(where=None) for problem in error.problems]
    return _Failure(error.status, error.code, error.message, error.fix, problems)


def _too_large(subject: Subject, words: str) -> _Failure:
    return _Failure(422, f"{subject.name}-too-large", words, subject.fix, [])


def _as_error(failure: _Failure) -> Exception:
    if failure.trace:
        return RuntimeError(f"its process ended with an error of ours:\n{failure.trace}")
    return Refused(failure.status, failure.code, failure.message, failure.fix, failure.problems)
