"""What a run has to remember next, gathered into groups and stored together.  Knows the store and the listeners, not what the moves mean."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from drivers.base import Exit

from ..planning.plan import Node
from ..planning.schedule import Move
from ..storage.files import Content
from ..storage.store import AttemptRow, Event, Made, Published, StepRow, Trace
from .workspace import Workspace


class Listener(Protocol):
    """Hears every event after it was stored."""

    def events(self, batch: Sequence[Event]) -> None: ...


_PRESENT = 1 << 62


class Keys:
    """Claims on keys against other runs in this workspace: one byte of a file each, let go by the kernel when we die.

    The byte is named by 62 bits of the key; two keys that share one would only wait for each other.  One more byte is shared by all who live, and
    the file grows by a byte for each who came: one look at its length says whether we have been alone since we opened it.
    """

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _PRESENT)
        except OSError:
            self._alone = False
        else:
            self._alone = True
            os.ftruncate(self._handle, 0)
        os.write(self._handle, b".")
        fcntl.lockf(self._handle, fcntl.LOCK_SH, 1, _PRESENT)

    def alone(self) -> bool:
        """Whether no other run was alive here at any time since this was opened."""
        return self._alone and os.fstat(self._handle).st_size == 1

    def try_hold(self, key: str) -> bool:
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:16], 16) >> 2)
        except OSError:
            return False
        return True

    def release(self, key: str) -> None:
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, int(key[:16], 16) >> 2)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Ledger:
    """The pen of one claimed run."""

    def __init__(
        self, ws: Workspace, run: str, fence: int, recipe: str, listener: Listener | None, expected: Mapping[str, float], say: Callable[[str], None]
    ) -> None:
        self.ws, self.run, self.fence, self.recipe, self.expected, self.say = ws, run, fence, recipe, expected, say
        self.keys = Keys(str(ws.home / "locks" / "keys"))
        self._listener = listener
        self._moves: list[Move] = []
        self._state: tuple[str, str] | None = None  # the run's own, stored with the group
        self._traces: list[Trace] = []
        self._attempts: list[AttemptRow] = []
        self._published: list[Published] = []
        self._release: dict[str, None] = {}
        self._after: list[Callable[[], None]] = []
        self._tries: dict[str, int] = {}

    @property
    def size(self) -> int:
        return len(self._moves)

    def move(self, move: Move) -> None:
        self._moves.append(move)
        if move.subject == "run" and move.before != move.after:
            self._state = (str(move.after), move.reason)

    def next_attempt(self, step: str) -> int:
        self._tries[step] = number = self._tries.get(step, 0) + 1
        return number

    def tries(self, step: str) -> int:
        """How often a step was begun in this run."""
        return self._tries.get(step, 0)

    def trace(self, key: str, node: Node, outputs: Mapping[str, str], metrics: Mapping[str, Any], exit: Exit) -> None:
        import json

        paths = {name: path for name, path, _ in node.outputs}
        made = tuple(Made(name, paths[name], Content(content)) for name, content in outputs.items())
        seconds = exit.ended - exit.started if exit.ended else 0.0
        facts = json.dumps({"cpu": round(exit.cpu, 3), "peak_memory": exit.peak_memory})
        self._traces.append(
            Trace(key, self.recipe, node.id, self.run, time.time(), seconds, made, json.dumps(dict(metrics)) if metrics else "{}", facts)
        )
        if (sharing := self.ws.sharing) is not None:
            self.after_flush(partial(sharing.push, self._traces[-1], node))

    def attempt(
        self, step: str, name: str, key: str | None, started: float, outcome: str, reason: str, image: Mapping[str, Any], exit: Exit | None
    ) -> None:
        ended = {"code": exit.code, "cpu": exit.cpu, "peak_memory": exit.peak_memory} if exit else {}
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
            reason,
            ended,
            dict(image),
        )
        self._attempts.append(row)

    def published(self, path: str, content: str, step: str) -> None:
        self._published.append(Published(path, Content(content), "", self.run, step, self.recipe))

    def expanded(self, globs: Mapping[str, Sequence[str]]) -> None:
        """What a glob below an output turned out to be: part of the run's history."""
        self._moves.append(Move("run", self.run, "ACTIVE", "ACTIVE", "expanded", {"globs": {k: list(v) for k, v in globs.items()}}))

    def hold(self, key: str) -> bool:
        """Hold a key against other runs; one that was about to be let go is kept."""
        if key in self._release:
            del self._release[key]
            return True
        return self.keys.try_hold(key)

    def release_after_flush(self, key: str) -> None:
        self._release[key] = None

    def after_flush(self, do: Callable[[], None]) -> None:
        """Do something that may only happen once what was noted so far is stored."""
        self._after.append(do)

    def flush(self, state: tuple[str, str] | None = None) -> None:
        """Store the group.  Raises Stale when another worker has the run, Infrastructure when the disk fails."""
        state, self._state = state or self._state, None
        if not (self._moves or self._traces or self._attempts or self._published or state):
            self._settle()
            return
        steps = {move.id: StepRow(self.run, move.id, move.after, "", move.reason) for move in self._moves if move.subject == "step"}
        last = self.ws.store.group(
            self.run,
            self.fence,
            self._moves,
            steps=steps.values(),
            attempts=self._attempts,
            traces=self._traces,
            files=self.ws.cache.changes(),
            objects=self.ws.objects.changes(),
            published=self._published,
            run_state=state,
        )
        moves, now = self._moves, time.time()
        for trace in self._traces:
            self.ws.traces.add(trace.key)
        self._moves, self._traces, self._attempts, self._published = [], [], [], []
        self._settle()
        if self._listener is not None and moves:
            first = last - len(moves) + 1
            self._listener.events([Event(self.run, n, now, m.subject, m.id, m.before, m.after, m.reason, m.data) for n, m in enumerate(moves, first)])

    def _settle(self) -> None:
        for key in self._release:
            self.keys.release(key)
        after, self._after, self._release = self._after, [], {}
        for do in after:
            do()
