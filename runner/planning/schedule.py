"""Scheduling decisions of a run: steps to look up in the cache, to start and to retry.

Pure: works without hosts, files, clocks and databases.

READY and QUEUED differ.  The dependencies of a READY step are final, and it must be judged.  A
QUEUED step was judged, must run, and waits for free slots.

`_Board.move` makes every state change and is the only writer of counters, queues and pools.  Every
method returns its moves.  They can be stored in order with a crash after any of them: a new
Scheduler derives the rest from the stored states.

Steps start in order of priority, and a step that does not fit lets others pass.  After sixteen
starts from its pools, the amounts of the waiting step are reserved until it starts.  There is one
reservation at a time, and it precedes any priority.  A step that requests more than a pool holds
gets the whole pool.  Preflight checks whether such a step can run.  A pool without a capacity is
unlimited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple, TypeAlias

from ..retry import pause


class State(StrEnum):
    """State of a step."""

    WAITING = "WAITING"  # a dependency is not final
    READY = "READY"  # all dependencies are final; must be judged
    FRESH = "FRESH"  # up to date
    QUEUED = "QUEUED"  # must run; waits for a slot and pools
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"  # its `when` is false, it was stopped early, or a dependency is SKIPPED
    BLOCKED = "BLOCKED"  # a dependency failed
    CANCELLED = "CANCELLED"


_S = State

MOVES: Mapping[State, frozenset[State]] = {
    _S.WAITING: frozenset({_S.READY, _S.SKIPPED, _S.BLOCKED, _S.CANCELLED}),
    _S.READY: frozenset(
        {_S.FRESH, _S.QUEUED, _S.SKIPPED, _S.WAITING, _S.CANCELLED}
    ),  # WAITING: a dependency is rebuilt
    _S.QUEUED: frozenset(
        {_S.RUNNING, _S.READY, _S.WAITING, _S.CANCELLED}
    ),  # READY: another run or step created the outputs
    _S.RUNNING: frozenset(
        {_S.DONE, _S.FAILED, _S.QUEUED, _S.CANCELLED, _S.SKIPPED}
    ),  # QUEUED: retry, lost, pause, busy or orphaned; SKIPPED: stopped early
    _S.FRESH: frozenset({_S.QUEUED}),  # outputs lost
    _S.DONE: frozenset({_S.QUEUED}),  # outputs lost
    _S.FAILED: frozenset(),
    _S.SKIPPED: frozenset(),
    _S.BLOCKED: frozenset(),
    _S.CANCELLED: frozenset(),
}

FINAL: frozenset[State] = frozenset(
    {_S.FRESH, _S.DONE, _S.FAILED, _S.SKIPPED, _S.BLOCKED, _S.CANCELLED}
)

Decision: TypeAlias = Literal["fresh", "run", "skip"]
RunState: TypeAlias = Literal["ACTIVE", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]
_Rank: TypeAlias = "tuple[float, int, str]"
"""Place of a step in its queue: negated priority, order of creation, and id."""

_STATES_AFTER: Mapping[Decision, State] = {"fresh": _S.FRESH, "run": _S.QUEUED, "skip": _S.SKIPPED}
PREEMPTIONS = frozenset({"lost", "preempted"})
LIMIT = "limit"  # reason: stopped by a limit of the run, without a retry
EARLY = "stopped early"  # reason: stopped by successive halving; steps that read its outputs are skipped
BUSY = "busy"  # reason: the attempt never began, because the host had no room after all
ORPHANED = "orphaned"  # reason: the worker is lost; another one resumes or restarts the attempt
_FREE = frozenset({"stopped", BUSY, ORPHANED})  # reasons that cost no retry budget
_NOT_STARTED = (_S.WAITING, _S.READY, _S.QUEUED)
_PASSED = (_S.DONE, _S.FRESH, _S.SKIPPED)
_PATIENCE = 16
_UNIT = 1_000_000  # pools are counted in whole millionths, because sums of floats would drift


_NO_DATA: Mapping[str, object] = {}
_NOTHING: Mapping[str, float] = {}


class Move(NamedTuple):
    """State change of a step, run, lease or request, as stored and shown."""

    subject: Literal["step", "run", "lease", "request"]
    id: str
    before: str
    after: str
    reason: str = ""
    data: Mapping[str, object] = _NO_DATA


class Task(NamedTuple):
    """Step as the scheduler sees it: dependencies, pool amounts and retry budgets.

    `required` are the steps whose outputs it reads: if one is SKIPPED, the step is skipped too.
    `after` are steps that must end first, or whose outputs it reads as a list or by choice: a
    SKIPPED one is left out.  A failed step of either kind blocks the step, unless the failed step
    has `allow_failure`.
    """

    id: str
    required: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    pools: Mapping[str, float] = _NOTHING
    retries: int = 0
    preemptions: int = 10
    allow_failure: bool = False
    priority: float = 0.0


class AttemptOutcome(NamedTuple):
    """Result of a step's attempt.

    `reason` is exit, signal, oom, timeout, idle, stopped, busy (never began), orphaned, lost,
    output, preempted and so on.
    """

    ok: bool
    reason: str = "exit"
    detail: str = ""
    saved: bool = False
    """Whether the attempt saved a new checkpoint.  A preemption then costs no retry budget."""
    adjusted: bool = (
        False  # the step was changed for the next attempt, for example after running out of memory
    )


class SpentRetries(NamedTuple):
    """Used amounts of a step's two retry budgets: failures and preemptions."""

    failures: int = 0
    preemptions: int = 0


def budget_used(reasons: Iterable[str]) -> SpentRetries:
    """Return the retry budgets used by attempts that failed for the given reasons.

    Requested stops, orphaned attempts and attempts that never began are free.
    """
    failures = preemptions = 0
    for reason in reasons:
        if reason in PREEMPTIONS:
            preemptions += 1
        elif reason not in _FREE:
            failures += 1
    return SpentRetries(failures, preemptions)


def backoff(attempt: int) -> float:
    """Return the seconds to wait after attempt number `attempt`: exponential, at most five minutes.

    The pause is half a second, doubled each time.
    """
    return pause(attempt, 0.5, 300.0)


def priorities(tasks: Sequence[Task], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each step's priority: the longest path, in seconds, to the end of the run.

    A step of unknown duration counts as one second.  `tasks` are in topological order, so that one
    pass from last to first is enough, without networkx.
    """
    lengths: dict[str, float] = {}
    rest: dict[str, float] = {}  # longest path from the end of a step to the end of the run
    for task in reversed(tasks):
        lengths[task.id] = length = rest.get(task.id, 0.0) + seconds.get(task.id, 1.0)
        for each in task.required + task.after:
            if each in lengths:
                raise AssertionError(
                    f"BUG: a plan with a cycle through {each} reached the scheduler"
                )
            rest[each] = max(rest.get(each, 0.0), length)
    return lengths


PHASES: Final[Mapping[str, str]] = {
    "TRANSFERRING_DATA": "staging",
    "EXECUTING": "",
    "FETCHING_RESULTS": "fetching",
}
"""Stored form of the phases of a RUNNING step on a host with its own disk."""


def describe_run_state(
    run: str,
    *,
    failure: str,
    steps: Collection[tuple[str, str]],
    leases: Collection[str],
    claimed: bool,
) -> str:
    """Return the displayed state of a run, such as EXECUTING or NEEDS_RECOVERY.

    `run` and `failure` are its stored columns.  `steps` are the (state, reason) pairs of its steps:
    the reason of a RUNNING step is its phase, such as `staging` or `fetching`, or any other text
    while it executes.  `leases` are the states of its leases, and `claimed` tells whether a live
    worker holds the run.
    """
    if run == "FAILED":
        return "FAILED_PROVISIONING" if failure == "provisioning" else run
    if run != "ACTIVE":
        return run
    if not claimed:
        return "NEEDS_RECOVERY"
    phases = {phase for state, phase in steps if state == _S.RUNNING}
    if phases - {PHASES["TRANSFERRING_DATA"], PHASES["FETCHING_RESULTS"]}:
        return "EXECUTING"
    if PHASES["TRANSFERRING_DATA"] in phases:
        return "TRANSFERRING_DATA"
    if phases or all(state in FINAL for state, _ in steps):
        return "FETCHING_RESULTS"
    if "ASKED" in leases or "COMING" in leases:
        return "PROVISIONING"
    return "EXECUTING"


class Scheduler:
    """Scheduler of one run: decides which steps to check, start, retry or cancel.

    `states` and `attempts` are the stored ones.  A RUNNING step stays RUNNING until `end` is
    called.  `opening` holds the moves that follow from the stored states.  The caller must pass a
    plan without cycles and with existing dependencies (`priorities` checks for cycles).
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        capacity: Mapping[str, float],
        *,
        jobs: int,
        keep_going: bool,
        states: Mapping[str, State] | None = None,
        attempts: Mapping[str, SpentRetries] | None = None,
    ) -> None:
        self._jobs = max(1, jobs)
        self._keep_going = keep_going
        self._board = _Board(_PoolQueues(capacity))
        self._draining = ""
        self._cancelling = ""
        self._pausing = False
        self.opening: tuple[Move, ...] = tuple(self._add(tasks, states or {}, attempts or {}))

    # Next steps

    def ready(self, limit: int | None = None) -> list[str]:
        """Return the steps to look up in the cache now, most urgent first."""
        if not len(self._board.ready) or self.is_held:
            return []
        if limit is None:
            limit = len(self._board.ready)
        return self._board.ready.first(limit)

    def startable(self, resting: Collection[str] = ()) -> list[str]:
        """Return the steps that can all start now, most urgent first.

        Steps in `resting`, which pause before a retry, are left out.
        """
        if not self._has_slot or not self._board.counts[_S.QUEUED]:
            return []
        return self._board.room.choose(self.room, resting)

    # Events

    def judge(self, id: str, decision: Decision, reason: str = "") -> list[Move]:
        """Apply a decision about a READY step, and return all state changes."""
        return self._apply(self._board.nodes[id], _STATES_AFTER[decision], reason)

    def start(self, id: str, data: Mapping[str, object] | None = None) -> Move:
        """Mark a QUEUED step as RUNNING.

        Raises AssertionError if the step does not fit.
        """
        node = self._board.nodes[id]
        if not self._has_slot or not self._board.room.fits(node):
            raise AssertionError(f"BUG: no room to start {id}")
        (move,) = self._apply(node, _S.RUNNING, data=data)
        self._board.room.let_past(node)
        return move

    def make_room(self, id: str, resting: Collection[str] = ()) -> bool:
        """Free the slot and the pools of a RUNNING step whose command succeeded, before its `end`.

        Returns False, and frees nothing, if no queued step could start, or only one that is less
        urgent than a dependent of the step.  `resting` are the steps that `startable` leaves out.
        """
        board, node = self._board, self._board.nodes[id]
        if self.is_held or not board.counts[_S.QUEUED]:
            return False
        board.vacate(node)
        chosen = board.room.choose(1, resting)
        if chosen and not node.has_waiting_dependent_before(board.nodes[chosen[0]]):
            return True
        board.occupy(node)
        return False

    def end(self, id: str, outcome: AttemptOutcome) -> list[Move]:
        """Record the result of a RUNNING step's attempt, and return all state changes.

        The step is done, retried or failed.
        """
        node = self._board.nodes[id]
        data: dict[str, object] = {"detail": outcome.detail} if outcome.detail else {}
        if outcome.ok:
            after = _S.DONE
        elif self._cancelling:
            after = _S.CANCELLED
        elif outcome.reason == EARLY:
            after = _S.SKIPPED
        elif outcome.reason == "stopped":
            after = self._state_after_stop()
        elif outcome.reason in (BUSY, ORPHANED):
            after = _S.CANCELLED if self._draining else _S.QUEUED
        elif outcome.reason == LIMIT:
            after = _S.FAILED
            # A limit fails the run even if the step has `allow_failure`.
            self._board.hard_failures += node.task.allow_failure
        elif self._use_budget(node, outcome):
            after = _S.QUEUED
            data["wait"] = backoff(node.failures + node.preemptions)
        else:
            after = _S.FAILED
        reason = "" if outcome.ok else outcome.reason
        return self._apply(node, after, reason, data)

    def _state_after_stop(self) -> State:
        """Return the next state of a running step that was stopped on request."""
        if self._pausing:
            return _S.QUEUED
        return _S.CANCELLED if self._draining else _S.FAILED

    def _use_budget(self, node: _Node, outcome: AttemptOutcome) -> bool:
        """Charge a failed attempt to its retry budget, and return whether it may be retried."""
        if outcome.adjusted:
            return not self._draining
        if outcome.reason in PREEMPTIONS:
            node.preemptions += not outcome.saved
            return node.preemptions <= node.task.preemptions
        node.failures += 1
        return node.failures <= node.task.retries

    def lose(self, id: str, reason: str) -> list[Move]:
        """Queue a FRESH or DONE step again, because its outputs are lost.

        Unstarted downstream steps wait for it.  Running and final ones are unchanged.
        """
        return self._apply(self._board.nodes[id], _S.QUEUED, reason)

    def adopt(self, id: str, reason: str) -> list[Move]:
        """Return a QUEUED step to READY, because another step or run created the same outputs."""
        return self._apply(self._board.nodes[id], _S.READY, reason)

    def extend(self, tasks: Iterable[Task]) -> list[Move]:
        """Add steps or replace WAITING steps during a run, for example for an expanded matrix."""
        return self._add(tasks, {}, {})

    def grow(self, jobs: int, capacity: Mapping[str, float]) -> None:
        """Raise the maximum of parallel steps by `jobs`, and add capacity to the limited pools."""
        self._jobs += jobs
        self._board.room.grow(capacity)

    # Requests by users

    def drain(self, reason: str = "interrupted") -> list[Move]:
        """Stop starting steps, and cancel the unstarted ones once no step runs."""
        self._draining = reason
        moves: list[Move] = []
        self._sweep(moves)
        return moves

    def cancel(self, reason: str) -> list[Move]:
        """Cancel all unstarted steps now, and each running step when it ends without success."""
        self._cancelling = reason
        moves: list[Move] = []
        self._sweep(moves)
        return moves

    def pause(self) -> None:
        """Stop starting steps until `resume`.

        A running step that is stopped is QUEUED again, at no cost to its retry budgets.
        """
        self._pausing = True

    def resume(self) -> None:
        """Start steps again after a pause."""
        self._pausing = False

    # State

    def state(self, id: str) -> State:
        return self._board.nodes[id].state

    def states(self) -> dict[str, State]:
        return {id: node.state for id, node in self._board.nodes.items()}

    @property
    def room(self) -> int:
        """Number of further steps that can run in parallel."""
        return self._jobs - self._board.counts[_S.RUNNING] + self._board.vacated

    @property
    def is_held(self) -> bool:
        """Whether the scheduler currently starts no new steps."""
        return self._pausing or self._giving_up

    @property
    def _has_slot(self) -> bool:
        return self.room > 0 and not self.is_held

    @property
    def counts(self) -> dict[State, int]:
        return dict(self._board.counts)

    @property
    def is_finished(self) -> bool:
        """Whether every step of the run is in a final state."""
        counts = self._board.counts
        return not counts[_S.RUNNING] and not any(counts[state] for state in _NOT_STARTED)

    @property
    def result(self) -> RunState:
        """Return the state of the run, as stored.

        A cancellation wins if requested before the last step ended.  A drain after that has no
        effect.
        """
        if not self.is_finished:
            is_paused = self._pausing and not self._board.counts[_S.RUNNING]
            return "PAUSED" if is_paused else "ACTIVE"
        if self._cancelling:
            return "CANCELLED"
        if self._board.hard_failures or self._board.counts[_S.BLOCKED]:
            return "FAILED"
        return "CANCELLED" if self._board.counts[_S.CANCELLED] else "COMPLETED"

    # Consequences

    def _apply(
        self, node: _Node, after: State, reason: str = "", data: Mapping[str, object] | None = None
    ) -> list[Move]:
        moves: list[Move] = []
        self._board.move(node, after, moves, reason, data)
        self._board.follow([node], moves)
        if after is _S.QUEUED:
            self._board.go_back(node, moves)
            if node.state is _S.WAITING:
                self._board.update_waiting(node, moves)
        self._sweep(moves)
        return moves

    def _add(
        self,
        tasks: Iterable[Task],
        states: Mapping[str, State],
        attempts: Mapping[str, SpentRetries],
    ) -> list[Move]:
        board = self._board
        added: list[_Node] = []
        for task in tasks:
            if task.id in board.nodes:
                added.append(board.replace(task))
            else:
                state = states.get(task.id, _S.WAITING)
                added.append(board.add(task, state, attempts.get(task.id)))
        for node in added:
            board.connect(node)
        moves: list[Move] = []
        # A crash may have separated the moves of a rebuilt step and its dependents.
        for node in added:
            board.go_back(node, moves)
        for node in added:
            if node.state is _S.WAITING:
                self._board.update_waiting(node, moves)
        self._sweep(moves)
        return moves

    def _sweep(self, moves: list[Move]) -> None:
        """Cancel the unstarted steps of an ending run.

        A cancelled run cancels them at once, otherwise they are cancelled once no step runs.
        """
        if not self._giving_up:
            return
        if self._board.counts[_S.RUNNING] and not self._cancelling:
            return
        reason = self._cancelling or self._draining or "a step failed"
        self._board.cancel_unstarted(moves, reason)

    @property
    def _giving_up(self) -> bool:
        if self._cancelling or self._draining:
            return True
        return bool(self._board.hard_failures) and not self._keep_going


class _Board:
    """States of all steps in a scheduler.

    Only `move` changes counters and queues; the other methods apply a move's consequences.
    """

    def __init__(self, room: _PoolQueues) -> None:
        self.room = room
        self.nodes: dict[str, _Node] = {}
        self.counts = dict.fromkeys(State, 0)
        self.hard_failures = 0
        """Number of FAILED steps without `allow_failure`."""
        self.vacated = 0
        """Number of RUNNING steps without a slot, because their commands have ended."""
        self.ready = _Queue()

    def add(self, task: Task, state: State, used: SpentRetries | None) -> _Node:
        """Add a step in a stored or initial state."""
        node = self.nodes[task.id] = _Node(task, len(self.nodes), state, used)
        self._enter(node)
        return node

    def replace(self, task: Task) -> _Node:
        """Replace a WAITING step, and disconnect it from its dependencies."""
        node = self.nodes[task.id]
        if node.state is not _S.WAITING:
            raise AssertionError(f"BUG: step {task.id} is {node.state}, too late to replace it")
        for dependency in node.above:
            dependency.below.remove(node)
        node.replace(task)
        return node

    def connect(self, node: _Node) -> None:
        """Connect a step to its dependencies, and count the unfinished ones."""
        ids = dict.fromkeys(node.task.required + node.task.after)
        node.above = [self.nodes[id] for id in ids]
        for dependency in node.above:
            dependency.below.append(node)
            node.unmet += not dependency.passed

    def move(
        self,
        node: _Node,
        after: State,
        moves: list[Move],
        reason: str = "",
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Change the state of a step, and append the change to `moves`."""
        before = node.state
        if after not in MOVES[before]:
            raise AssertionError(f"BUG: step {node.task.id} cannot go from {before} to {after}")
        self._leave(node)
        node.state = after
        self._enter(node)
        if data is None:
            data = _NO_DATA
        moves.append(Move("step", node.task.id, before, after, reason, data))

    def _leave(self, node: _Node) -> None:
        state = node.state
        self.counts[state] -= 1
        if state is _S.READY:
            self.ready.discard(node)
        elif state is _S.QUEUED:
            self.room.leave(node)
        elif state is _S.RUNNING:
            self.vacate(node)
            self.vacated -= 1
            node.is_vacated = False

    def vacate(self, node: _Node) -> None:
        """Free the slot and the pools of a RUNNING step, unless they are free already."""
        if not node.is_vacated:
            node.is_vacated = True
            self.vacated += 1
            self.room.give_back(node)

    def occupy(self, node: _Node) -> None:
        """Take back the slot and the pools that `vacate` freed."""
        node.is_vacated = False
        self.vacated -= 1
        self.room.take(node)

    def _enter(self, node: _Node) -> None:
        """Update counters and queues for a step that entered its current state."""
        state = node.state
        self.counts[state] += 1
        if state is _S.READY:
            self.ready.push(node)
        elif state is _S.QUEUED:
            self.room.wait(node)
        elif state is _S.RUNNING:
            self.room.take(node)
        elif state is _S.FAILED and not node.task.allow_failure:
            self.hard_failures += 1

    def go_back(self, node: _Node, moves: list[Move]) -> None:
        """Return a READY or QUEUED step to WAITING while one of its dependencies is rebuilt."""
        if node.unmet and node.state in (_S.READY, _S.QUEUED):
            self.move(node, _S.WAITING, moves, "a dependency is being rebuilt")

    def follow(self, work: list[_Node], moves: list[Move]) -> None:
        """Update all downstream steps after state changes, without recursion.

        `work` holds the changed steps.
        """
        while work:
            node = work.pop()
            passes = node.passes
            if passes and not node.passed:
                node.passed = True
                for below in node.below:
                    below.unmet -= 1
                    if below.unmet or below.state is not _S.WAITING:
                        continue
                    if self._admit(below, moves) is _S.SKIPPED:
                        work.append(below)
            elif node.passed and not passes:
                node.passed = False
                for below in node.below:
                    below.unmet += 1
                    self.go_back(below, moves)
            elif node.is_broken:
                for below in node.below:
                    if below.state is _S.WAITING:
                        self.move(below, _S.BLOCKED, moves, f"needs {node.task.id}")
                        work.append(below)

    def _admit(self, node: _Node, moves: list[Move]) -> State:
        """Move a WAITING step with finished dependencies to READY or SKIPPED.

        The step is SKIPPED if a step in `required` is skipped.  This waits for all of them, because
        the result must not depend on the order of a skip and a failure.
        """
        for dependency in node.task.required:
            if self.nodes[dependency].state is _S.SKIPPED:
                self.move(node, _S.SKIPPED, moves, f"{dependency} is skipped")
                return _S.SKIPPED
        self.move(node, _S.READY, moves)
        return _S.READY

    def update_waiting(self, node: _Node, moves: list[Move]) -> None:
        """Move a WAITING step to the state that follows from its dependencies."""
        if not node.unmet:
            if self._admit(node, moves) is _S.SKIPPED:
                self.follow([node], moves)
            return
        for dependency in node.above:
            if dependency.is_broken:
                self.move(node, _S.BLOCKED, moves, f"needs {dependency.task.id}")
                self.follow([node], moves)
                return

    def cancel_unstarted(self, moves: list[Move], reason: str) -> None:
        if not any(self.counts[state] for state in _NOT_STARTED):
            return  # avoids a loop over all steps
        for node in self.nodes.values():
            if node.state in _NOT_STARTED:
                self.move(node, _S.CANCELLED, moves, reason)


class _PoolQueues:
    """Free amounts of all resource pools, the queued steps, and the reservation."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self._capacity = {pool: int(amount * _UNIT) for pool, amount in capacity.items()}
        self._free = dict(self._capacity)
        self._shapes: dict[tuple[tuple[str, int], ...], _Shape] = {}
        self._reserved: _Shape | None = None

    def grow(self, capacity: Mapping[str, float]) -> None:
        """Add amounts to the limited resource pools."""
        for pool in capacity.keys() & self._capacity.keys():
            more = int(capacity[pool] * _UNIT)
            self._capacity[pool] += more
            self._free[pool] += more

    def wait(self, node: _Node) -> None:
        self._shape(node).queue.push(node)

    def leave(self, node: _Node) -> None:
        """Remove a step from its queue."""
        self._shape(node).queue.discard(node)

    def take(self, node: _Node) -> None:
        self._shape(node).take(self._free)

    def give_back(self, node: _Node) -> None:
        self._shape(node).give_back(self._free)

    def fits(self, node: _Node) -> bool:
        return self._shape(node).fits(self._free)

    def choose(self, most: int, resting: Collection[str]) -> list[str]:
        """Return queued steps that fit into the resource pools together, most urgent first.

        Steps in `resting`, which pause before a retry, are left out.
        """
        free = dict(self._free)
        walks = {shape: shape.queue.walk(resting) for shape in self._list_waiting()}
        chosen = self._choose_reserved(walks, free)
        heads: list[tuple[_Rank, _Shape]] = []
        for shape, walk in walks.items():
            node = walk.next()
            if node is not None:
                heads.append((node.rank, shape))
        heapify(heads)
        while heads and len(chosen) < most:
            (_, _, id), shape = heappop(heads)
            if not shape.fits(free):
                continue  # no other step of this shape fits either
            shape.take(free)
            chosen.append(id)
            node = walks[shape].next()
            if node is not None:
                heappush(heads, (node.rank, shape))
        for walk in walks.values():
            walk.stop()
        return chosen

    def _choose_reserved(self, walks: dict[_Shape, _QueueWalk], free: dict[str, int]) -> list[str]:
        """Return the first step of the shape with the reservation, if there is one and it fits.

        If it does not fit, its amounts are taken from `free` all the same, and its shape leaves
        `walks`.
        """
        elder = self._reserved
        if elder is None or elder not in walks:
            return []
        node = walks[elder].next()
        if node is None:
            return []
        chosen: list[str] = []
        if elder.fits(free):
            chosen.append(node.task.id)
        else:
            walks[elder].stop()
            del walks[elder]
        elder.take(free)  # amounts of the started or reserved step; others share the rest
        return chosen

    def let_past(self, begun: _Node) -> None:
        """Count a start against queued steps that lack the same pools, to prevent starvation.

        The first step that reaches the limit gets the reservation.
        """
        started = self._shape(begun)
        started.passed = 0
        reserved = self._reserved
        if reserved is not None and (reserved is started or not reserved.queue):
            self._reserved = None
        for shape in self._overtaken_by(started):
            shape.passed += 1
            if shape.passed >= _PATIENCE and self._reserved is None:
                self._reserved = shape

    def _overtaken_by(self, started: _Shape) -> list[_Shape]:
        """Return the waiting shapes that lack a pool of a started step."""
        others = (shape for shape in self._list_waiting() if shape is not started)
        return [shape for shape in others if shape.is_short_of(started, self._free)]

    def _list_waiting(self) -> list[_Shape]:
        """Return the shapes with queued steps."""
        return [shape for shape in self._shapes.values() if shape.queue]

    def _shape(self, node: _Node) -> _Shape:
        """Return the queue of all steps that request the same pool amounts as this step."""
        if node.shape is None:
            amounts = self._amounts_of(node.task)
            shape = self._shapes.get(amounts)
            if shape is None:
                shape = self._shapes[amounts] = _Shape(amounts)
            node.shape = shape
        return node.shape

    def _amounts_of(self, task: Task) -> tuple[tuple[str, int], ...]:
        """Return the amounts that a step takes from the limited pools, sorted by pool."""
        amounts: list[tuple[str, int]] = []
        for pool, asked in task.pools.items():
            if pool in self._capacity:
                # A step that requests more than there is takes all, and so runs alone.
                amount = min(int(asked * _UNIT), self._capacity[pool])
                if amount > 0:
                    amounts.append((pool, amount))
        return tuple(sorted(amounts))


class _Node:
    """Step in the scheduler, with its direct dependencies and dependents."""

    __slots__ = (
        "above",
        "below",
        "failures",
        "is_vacated",
        "order",
        "passed",
        "preemptions",
        "rank",
        "shape",
        "state",
        "task",
        "unmet",
    )

    def __init__(self, task: Task, order: int, state: State, used: SpentRetries | None) -> None:
        self.order = order
        self.state = state
        self.is_vacated = False
        self.failures = used.failures if used else 0
        self.preemptions = used.preemptions if used else 0
        self.below: list[_Node] = []
        self.replace(task)
        self.passed = self.passes  # value at the last update of the dependents

    def replace(self, task: Task) -> None:
        self.task = task
        self.rank = (-task.priority, self.order, task.id)
        self.shape: _Shape | None = None
        self.above: list[_Node] = []
        self.unmet = 0  # number of unfinished dependencies

    def has_waiting_dependent_before(self, other: _Node) -> bool:
        """Return whether a dependent that waits only for this step is more urgent than `other`."""
        waiting = (below for below in self.below if below.state is _S.WAITING and below.unmet == 1)
        return any(below.rank < other.rank for below in waiting)

    @property
    def passes(self) -> bool:
        """Whether the step's result lets its dependents start."""
        if self.state is _S.FAILED:
            return self.task.allow_failure
        return self.state in _PASSED

    @property
    def is_broken(self) -> bool:
        """Whether the step's failure blocks its dependents."""
        return self.state is _S.BLOCKED or (self.state is _S.FAILED and not self.task.allow_failure)


class _Shape:
    """QUEUED steps that request the same pool amounts.

    If the first does not fit, none does.  A decision therefore costs time per shape, not per step.
    """

    __slots__ = ("amounts", "passed", "queue")

    def __init__(self, amounts: tuple[tuple[str, int], ...]) -> None:
        self.amounts = amounts
        self.queue = _Queue()
        self.passed = 0

    def __lt__(self, other: _Shape) -> bool:
        return self.amounts < other.amounts

    def fits(self, free: Mapping[str, int]) -> bool:
        return all(amount <= free[pool] for pool, amount in self.amounts)

    def take(self, free: dict[str, int]) -> None:
        for pool, amount in self.amounts:
            free[pool] -= amount

    def give_back(self, free: dict[str, int]) -> None:
        for pool, amount in self.amounts:
            free[pool] += amount

    def is_short_of(self, taker: _Shape, free: Mapping[str, int]) -> bool:
        """Return whether too little is free in a pool that the steps of `taker` use, too."""
        takes = {pool for pool, _ in taker.amounts}
        return any(amount > free[pool] and pool in takes for pool, amount in self.amounts)


class _Queue:
    """Priority queue of steps, with O(log n) operations.

    A removed step stays in the heap until it reaches the top, and is not pushed twice if it returns
    before that.
    """

    __slots__ = ("_heap", "_here", "_in_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[_Rank, _Node]] = []
        self._here: set[_Node] = set()
        self._in_heap: set[_Node] = set()

    def __len__(self) -> int:
        return len(self._here)

    def push(self, node: _Node) -> None:
        self._here.add(node)
        if node not in self._in_heap:
            self._in_heap.add(node)
            heappush(self._heap, (node.rank, node))

    def discard(self, node: _Node) -> None:
        self._here.discard(node)

    def first(self, limit: int) -> list[str]:
        walk = self.walk(())
        ids: list[str] = []
        while len(ids) < limit:
            node = walk.next()
            if node is None:
                break
            ids.append(node.task.id)
        walk.stop()
        return ids

    def walk(self, skip: Collection[str]) -> _QueueWalk:
        return _QueueWalk(self._heap, self._here, self._in_heap, skip)


class _QueueWalk:
    """Ordered, temporary read of a priority queue.

    `stop` restores the read entries.
    """

    __slots__ = ("_heap", "_here", "_in_heap", "_read", "_skip")

    def __init__(
        self,
        heap: list[tuple[_Rank, _Node]],
        here: set[_Node],
        in_heap: set[_Node],
        skip: Collection[str],
    ) -> None:
        self._heap, self._here, self._in_heap, self._skip = heap, here, in_heap, skip
        self._read: list[tuple[_Rank, _Node]] = []

    def next(self) -> _Node | None:
        while self._heap:
            entry = heappop(self._heap)
            node = entry[1]
            if node not in self._here:
                self._in_heap.discard(node)
                continue
            self._read.append(entry)
            if node.task.id not in self._skip:
                return node
        return None

    def stop(self) -> None:
        for entry in self._read:
            heappush(self._heap, entry)
        self._read.clear()
