"""Journal of a run, which collects changes into groups and stores each in one transaction."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from drivers.base import Exit

from ...errors import Infrastructure
from ...logs import Log
from ...planning.plan import Node
from ...planning.schedule import FINAL, Move, State
from ...secrets import Masker
from ...storage.content.files import Content
from ...storage.records.index import CachedOutput, Changes, PublishedFile, Trace
from ...storage.records.links import TrackerLink
from ...storage.records.runs import LET_GO, AttemptRow, Event, RunState, StepRow
from ...storage.workspace import Workspace


class EventListener(Protocol):
    """Callback protocol for stored events."""

    def events(self, batch: Sequence[Event]) -> None: ...


_PRESENT = 1 << 62


class Keys:
    """File locks on cache keys against other runs in this workspace.

    The kernel releases the locks when the process dies. Each key locks one byte of a file. The
    byte's position is 62 bits of the key; keys with the same position only wait for each other.

    All live runs share the lock on one more byte, and each run appends one byte to the file. The
    length of the file therefore shows whether another run was alive since this run opened it.
    """

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._alone = self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, _PRESENT)
        if self._alone:
            os.ftruncate(self._handle, 0)
        self._lock(fcntl.LOCK_SH, _PRESENT)
        os.write(self._handle, b".")  # after a truncation by another run

    def alone(self) -> bool:
        """Return True if no other run was alive since this lock file was opened.

        Return False once closed.
        """
        return self._alone and self._handle >= 0 and os.fstat(self._handle).st_size == 1

    def try_hold(self, key: str) -> bool:
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, int(key[:16], 16) >> 2)

    def release(self, key: str) -> None:
        self._lock(fcntl.LOCK_UN, int(key[:16], 16) >> 2)

    def _lock(self, how: int, byte: int) -> bool:
        """Lock or unlock a byte of the file; return False if another run holds it.

        On Linux the lock belongs to this opening of the file. A lock of the process would not
        exclude other threads, and would end when any of them closes the file.
        """
        try:
            if sys.platform == "linux":
                kind = {
                    fcntl.LOCK_EX: fcntl.F_WRLCK,
                    fcntl.LOCK_SH: fcntl.F_RDLCK,
                    fcntl.LOCK_UN: fcntl.F_UNLCK,
                }[how & ~fcntl.LOCK_NB]
                do = fcntl.F_OFD_SETLK if how & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
                fcntl.fcntl(
                    self._handle, do, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
                )  # struct flock
            else:
                fcntl.lockf(self._handle, how, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@dataclass(slots=True)
class _Group:
    """Changes that are stored in one transaction, and the actions after it."""

    moves: list[Move] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)  # steps with new metrics
    traces: list[Trace] = field(default_factory=list)
    again: set[str] = field(default_factory=set)  # keys whose stored trace is replaced
    attempts: list[AttemptRow] = field(default_factory=list)
    published: list[PublishedFile] = field(default_factory=list)
    tiny: dict[Content, bytes] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)  # paths of log files to delete
    release: dict[str, None] = field(default_factory=dict)  # keys to release
    after: list[Callable[[], None]] = field(default_factory=list)
    state: RunState | None = None  # new state of the run
    last: int = 0  # number of the group's last event
    at: float = 0.0


_log = Log("storage")


def _words_of(move: Move) -> str:
    """Return the error message of a state change with a reason; otherwise ""."""
    return str(move.data.get("error") or move.data.get("detail") or "") if move.reason else ""


class GroupCommit:
    """Journal writer of one claimed run: collects, masks and stores its changes."""

    def __init__(
        self,
        ws: Workspace,
        run: str,
        fence: int,
        recipe: str,
        listener: EventListener | None,
        expected: Mapping[str, float],
        say: Callable[[str], None],
        masker: Masker,
        *,
        tries: Mapping[str, int] = MappingProxyType({}),
        made: Collection[str] = (),
    ) -> None:
        self.ws, self.run, self.fence, self.recipe, self.expected, self.masker = (
            ws,
            run,
            fence,
            recipe,
            expected,
            masker,
        )
        self._say = say
        self.keys = Keys(str(ws.home / "locks" / "keys"))
        self._listener = listener
        self._sent: _Group | None = None
        self._next = _Group()
        self._tries: dict[str, int] = dict(tries)
        self._holders: dict[
            str, str
        ] = {}  # steps of held keys, because kernel locks do not exclude this process itself
        self._uploading: dict[
            str, None
        ] = {}  # keys held for other machines until the shared store has their results
        self._numbers: dict[str, str] = {}  # latest metrics of each open step
        self._began: dict[str, float] = {}  # start of the last attempt, by step
        self._phases: dict[str, str] = {}  # phase of each step on a host with its own disk
        self._running: dict[str, StepRow] = {}  # stored rows of RUNNING steps
        self.made: set[str] = set(made)
        """Keys whose traces this run stored."""
        self.answers = ""
        """The request that the run's next state answers: `cancel`, `pause` or `resume`."""

    @property
    def size(self) -> int:
        """Number of pending state changes and of steps with new metrics."""
        return len(self._next.moves) + len(self._next.reported)

    def say(self, text: str) -> None:
        """Show a message, with secrets masked."""
        self._say(self.masker.text(text))

    def add_move(self, move: Move) -> None:
        """Add a state change to the next group, with secrets masked."""
        if self.masker:
            move = move._replace(
                reason=self.masker.text(move.reason), data=self.masker.value(move.data)
            )
        self._next.moves.append(move)
        if move.subject == "step" and move.after == State.RUNNING != move.before:
            self._numbers.pop(move.id, None)
            self._phases.pop(move.id, None)
            self._began[move.id] = time.time()
        if move.subject == "run" and move.before != move.after:
            failure = str(move.data.get("failure", ""))
            self._next.state = RunState(str(move.after), move.reason, failure)

    def add_metrics(self, step: str, numbers: str) -> None:
        """Add the latest metrics of a running step, already masked, to the next group."""
        self._numbers[step] = numbers
        self._next.reported.add(step)

    def enter_phase(self, step: str, phase: str) -> None:
        """Add the phase of a running step to the next group.

        It is a phase of `planning.schedule.describe_run_state`.
        """
        self._phases[step] = phase
        self._next.reported.add(step)

    def take_back(self) -> None:
        """Remove the last state change, because a stop request came in the meantime."""
        self._next.moves.pop()
        self._next.state = None

    def next_attempt(self, step: str) -> int:
        self._tries[step] = number = self._tries.get(step, 0) + 1
        return number

    def tries(self, step: str) -> int:
        """Return the number of attempts of a step in this run."""
        return self._tries.get(step, 0)

    def add_trace(
        self,
        key: str,
        node: Node,
        outputs: Mapping[str, str],
        metrics: Mapping[str, Any],
        exit: Exit,
        facts: Mapping[str, Any],
        *,
        again: bool,
    ) -> Trace:
        """Add the cached result of a step, or replace the stored result with `again`.

        `facts` are shown by `why`.
        """
        paths = {output.name: output.path for output in node.outputs}
        made = tuple(
            CachedOutput(name, paths[name], Content(content)) for name, content in outputs.items()
        )
        seconds = exit.ended - exit.started if exit.ended else 0.0
        used = f'{{"cpu": {round(exit.cpu, 3)}, "peak_memory": {exit.peak_memory}'
        provenance = f"{used}, {json.dumps(dict(facts))[1:]}" if facts else f"{used}}}"
        numbers = json.dumps(dict(metrics)) if metrics else "{}"
        trace = Trace(
            key, self.recipe, node.id, self.run, time.time(), seconds, made, numbers, provenance
        )
        if node.rule:
            trace = trace._replace(metrics_json="{}", measured_json=f'{{"{node.rule}": {numbers}}}')
        self._next.traces.append(trace)
        if again:
            self._next.again.add(key)
        if (remote_cache := self.ws.remote_cache) is not None:
            self.after_flush(partial(remote_cache.push, self._next.traces[-1], node))
        return trace

    def stand_for(self, key: str, trace: Trace, note: Mapping[str, object]) -> None:
        """Cache a result under a second key, too; `note` is the reason."""
        self._next.traces.append(
            trace._replace(key=key, facts_json=json.dumps({**trace.facts, **note}))
        )

    def add_attempt(
        self,
        step: str,
        name: str,
        key: str | None,
        started: float,
        outcome: str,
        reason: str,
        image: Mapping[str, Any],
        exit: Exit | None,
        python: str = "",
        *,
        saved: bool = False,
        links: Sequence[TrackerLink] = (),
    ) -> None:
        """Add the row of an ended attempt to the next group, with secrets masked.

        `saved` means that the trainer saved a checkpoint and exited on request.  `image` is the
        content of the cache key in its stored form.
        """
        ended: dict[str, object] = (
            {"code": exit.code, "cpu": exit.cpu, "peak_memory": exit.peak_memory} if exit else {}
        )
        if python:
            ended["python"] = python
        if saved:
            ended["saved"] = True
        if links:
            ended["links"] = [[each.name, each.to] for each in links]
        row = AttemptRow(
            f"{self.run}/{step}/{self._tries[step]}",
            self.run,
            step,
            self._tries[step],
            key or "",
            {},
            f"attempts/{name}",
            started,
            time.time(),
            outcome,
            self.masker.text(reason),
            ended,
            dict(image),
        )
        self._next.attempts.append(row)

    def add_published(self, path: str, content: str, step: str) -> None:
        self._next.published.append(
            PublishedFile(path, Content(content), "", self.run, step, self.recipe)
        )

    def add_expansion(self, globs: Mapping[str, Sequence[str]], steps: int) -> None:
        """Record the files of an expanded glob axis and the number of new steps."""
        data = {"globs": {k: list(v) for k, v in globs.items()}, "steps": steps}
        self._next.moves.append(Move("run", self.run, "ACTIVE", "ACTIVE", "expanded", data))

    def hold(self, key: str, step: str) -> bool:
        """Claim a cache key for a step; return False if another run or another step holds the key.

        A step that was about to release the key keeps it.
        """
        if self._holders.get(key, step) != step:
            return False
        for release in (self._next.release, self._sent.release if self._sent else {}):
            if key in release:
                del release[key]
                return True
        if not self.keys.try_hold(key):
            return False
        if self.ws.delivers and not self.ws.store.runs.exchange.hold_key(key, self.run):
            self.keys.release(key)
            return False
        self._uploading.pop(key, None)
        self._holders[key] = step
        return True

    def confirm(self) -> None:
        """Check that this worker still holds the claim on the run.

        Raises Stale.
        """
        self.ws.store.runs.exchange.confirm(self.run, self.fence)

    def holds(self, key: str) -> bool:
        """Return True if a step of this run holds the cache key."""
        return key in self._holders

    def release(self, key: str) -> None:
        """Release a cache key now."""
        self._holders.pop(key, None)
        self.keys.release(key)
        if self.ws.delivers:
            self._uploading[key] = None

    def release_uploaded(self) -> None:
        """Release cache keys for other machines once the shared store has their results."""
        cache = self.ws.remote_cache
        if cache is None:
            uploaded = [*self._uploading]
        else:
            uploaded = [key for key in self._uploading if not cache.is_sending(key)]
        if uploaded:
            self.ws.store.runs.exchange.release_keys(uploaded, self.run)
        for key in uploaded:
            del self._uploading[key]

    def release_after_flush(self, key: str) -> None:
        self._next.release[key] = None

    def after_flush(self, do: Callable[[], None]) -> None:
        """Call `do` once all changes so far are stored."""
        self._next.after.append(do)

    @property
    def busy(self) -> bool:
        """Return True while a group is being stored; no other group can be sent then."""
        return self._sent is not None

    def send(self, landed: Callable[[], None]) -> None:
        """Start storing the group of changes in the background.

        A thread calls `landed` when the group is on disk; then call `land`. Raises the errors of
        `flush`.
        """
        self._sent = self._store(landed)

    def land(self) -> None:
        """Run the actions that waited for the sent group of changes.

        Raises Infrastructure if the group could not be stored; its changes then join the next
        group.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            self.ws.store.runs.land()
        except Infrastructure:
            late, self._next = self._next, sent
            sent.moves += late.moves
            sent.reported |= late.reported
            sent.traces += late.traces
            sent.again |= late.again
            sent.attempts += late.attempts
            sent.published += late.published
            sent.tiny |= late.tiny
            sent.logs += late.logs
            sent.release |= late.release
            sent.after += late.after
            sent.state = late.state or sent.state
            raise
        self._settle(sent)

    def flush(self) -> None:
        """Store all pending changes now.

        Raises Stale if another worker has claimed the run, and Infrastructure if the disk fails.
        """
        self.land()
        self._settle(self._store(None))

    def _store(self, landed: Callable[[], None] | None) -> _Group:
        group, state = self._next, self._next.state
        tiny, logs = self.ws.objects.tiny.take_unstored()
        group.tiny |= tiny
        group.logs += logs
        steps = self._steps_of(group)
        if steps or any((group.moves, group.traces, group.attempts, group.published, group.tiny)):
            begun = time.monotonic()
            group.last = self.ws.store.runs.group(
                self.run,
                self.fence,
                group.moves,
                steps=steps.values(),
                attempts=group.attempts,
                changes=Changes(
                    group.traces,
                    group.again,
                    self.ws.cache.changes(),
                    self.ws.objects.seals.changes(),
                    group.tiny,
                    group.published,
                ),
                run_state=state,
                answers=self.answers if state is not None and state.state in LET_GO else "",
                landed=landed,
            )
            _log.debug(
                "group of %d moves, %d traces: %.1f ms",
                len(group.moves),
                len(group.traces),
                1000 * (time.monotonic() - begun),
            )
            self._note_stored(steps)
        group.at, self._next = time.time(), _Group()
        return group

    def _steps_of(self, group: _Group) -> dict[str, StepRow]:
        """Return the new database rows of steps with state changes or metrics."""
        rows = {}
        for move in group.moves:
            if move.subject != "step":
                continue
            reason = move.reason
            if move.after == State.RUNNING:
                reason = self._phases.get(move.id, reason)
            rows[move.id] = StepRow(
                self.run,
                move.id,
                move.after,
                "",
                reason,
                _words_of(move),
                self._numbers.get(move.id, ""),
                self._began.get(move.id),
            )
        for step in group.reported:
            if step not in rows and step in self._running:
                row = self._running[step]
                rows[step] = row._replace(
                    reason=self._phases.get(step, row.reason), numbers=self._numbers.get(step, "")
                )
        return rows

    def _note_stored(self, steps: Mapping[str, StepRow]) -> None:
        for step, row in steps.items():
            if row.state == State.RUNNING:
                self._running[step] = row
                continue
            self._running.pop(step, None)
            if row.state in FINAL:
                self._numbers.pop(step, None)
                self._began.pop(step, None)

    def _settle(self, group: _Group) -> None:
        """Run the actions after a stored group, and notify the listener."""
        for trace in group.traces:
            self.ws.traces.add(trace.key)
            self.made.add(trace.key)
        for log in group.logs:
            with contextlib.suppress(FileNotFoundError):  # another run has also deleted the log
                os.unlink(log)
        for do in group.after:
            do()
        for key in group.release:
            self.release(key)
        if self._listener is not None and group.moves:
            first = group.last - len(group.moves) + 1
            self._listener.events(
                [
                    Event(
                        self.run, n, group.at, m.subject, m.id, m.before, m.after, m.reason, m.data
                    )
                    for n, m in enumerate(group.moves, first)
                ]
            )
