"""Run records shared by workers (runs, steps, attempts, events), and the interface of a backend.

A group is one guarded transaction: it checks claim and fence, and numbers the events without gaps.
A worker without the claim writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from ...errors import Busy, Invalid, NotFound, Problem
from ...failures import RunFailure
from ...planning.schedule import FINAL as ENDED
from ...planning.schedule import Move
from .database import Data, Json, Row, damaged_value, mapping, parse_stored, text
from .exchange import Exchange, SharedOutput, outputs_of
from .index import NOTHING, Changes

if TYPE_CHECKING:
    from .outbox import Letter, Outbox
    from .workers import Workers

FINAL: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
LET_GO: Final = FINAL | {"PAUSED"}
"""Run states that end the claim of a worker."""
STEP_FINAL: Final = frozenset({"FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"})
KEY_IN_USE: Final = "key-in-use"
"""Problem code for a reused idempotency key."""


NO_DATA: Final[Data] = {}


ELSEWHERE: Final = 600.0
"""Time without a heartbeat after which another machine may claim a run, in seconds.

This applies to runs whose jobs run on their worker's machine.
"""
ALONE: Final = 540.0
"""Time without a heartbeat after which the agent stops the jobs of a worker, in seconds."""
DESCRIBED: Final = "described"
"""Reason of the event for a changed name, tag, note or archive flag."""
PRIORITIZED: Final = "prioritized"
"""Reason of the event for a changed priority."""
LIMITED: Final = ("user", "recipe", "driver")
"""Fields by which workers limit concurrent runs."""


class RunPlace(NamedTuple):
    """Position of a run in a list: creation time in seconds since the epoch, then id."""

    created: float
    id: str


class RunFilter(NamedTuple):
    """Filter for listing runs.

    Empty fields match everything.
    """

    states: Collection[str] = ()
    recipe: str = ""
    user: str = ""
    label: tuple[str, str] | None = None
    key: str = ""  # idempotency key
    name: str = ""  # name given by the user
    part: str = ""  # part of the id
    tag: str = ""
    archived: str = ""  # "yes": only archived runs; "no": no archived runs
    worked: bool = False  # also runs submitted elsewhere and executed here
    before: RunPlace | None = None  # only runs created before this position: the next page


class Stale(Busy):
    """Another worker has claimed the run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"another worker has claimed run {run}")


class Requested(Busy):
    """A pending request conflicts with this state change."""

    def __init__(self, request: str) -> None:
        super().__init__(f"{request} was requested first")
        self.request = request


class RunRow(NamedTuple):
    id: str
    recipe: str
    plan: str
    inputs: Data
    workspace: str
    state: str = "QUEUED"
    reason: str = ""
    request: str = ""
    created: float = 0.0
    ended: float | None = None
    claim: str = ""
    fence: int = 0
    next_event: int = 1
    data: Data = {}  # noqa: RUF012  (never written to)
    priority: int = 0
    due: float | None = None
    """Time from which any worker may claim the run; None if only the submitter executes it."""
    idempotency: str = ""
    """Idempotency key."""
    recoveries: int = 0
    """Number of claims after a dead worker since the last progress.

    Progress is a finished step or reattached job.
    """
    failure: str = ""
    """Failure kind of a FAILED run: a `RunFailure`, or its step's kind.

    `reason` has the message.
    """
    user: str = ""
    """Submitter of the run."""
    bundle: str = ""
    """SHA-256 of the submitted archive; empty if the run is executed in its own workspace."""
    store: str = ""
    """URL of the shared store that provides large inputs and receives the results."""
    outputs: Sequence[SharedOutput] = ()
    """Outputs in the shared store; empty until COMPLETED."""


class Submission(NamedTuple):
    """Result of a submission: the run id and its fence.

    `fence` is 0 if the run was not claimed.
    """

    id: str
    fence: int = 0


class ClaimCriteria(NamedTuple):
    """Criteria for runs that a worker accepts: driver, labels, limits and shared store."""

    driver: str = ""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    """Maximum concurrent runs over all workers with the same `user`, `recipe` or `driver`."""
    store: str = ""
    """URL of the shared store whose runs are accepted, of any workspace.

    Without it, only the worker's own workspace counts.
    """


class RunState(NamedTuple):
    """Next state of a run.

    `failure` is the kind of failure for FAILED, and `reason` the message.
    """

    state: str
    reason: str = ""
    failure: str = ""


class StepRow(NamedTuple):
    run: str
    step: str
    state: str
    key: str = ""
    reason: str = ""
    """Failure kind of a FAILED step, phase of a RUNNING step, otherwise the reason of its state."""
    detail: str = ""
    """Error message of a failure."""
    numbers: str = ""
    """Last metrics of the last attempt as JSON, see `planning.run_view.TrainingReport`."""
    began: float | None = None
    """Start time of the last attempt."""


class AttemptRow(NamedTuple):
    """Database row of a step's attempt.

    `dir` is relative to the store's root.
    """

    id: str
    run: str
    step: str
    n: int
    key: str = ""
    job: Data = {}  # noqa: RUF012
    dir: str = ""
    started: float | None = None
    ended: float | None = None
    outcome: str = ""
    reason: str = ""
    exit: Data = {}  # noqa: RUF012
    preimage: Json = None


class AttemptId(NamedTuple):
    """Identity of an attempt: its run, step and attempt number."""

    id: str
    run: str
    step: str
    n: int
    key: str


def run_of(row: Row) -> RunRow:
    """Parse a row of the runs table."""
    values = dict(zip(RunRow._fields, row, strict=False))  # some queries leave out `outputs`
    values |= {"inputs": mapping(values["inputs"]), "data": mapping(values["data"])}
    if "outputs" in values:
        values["outputs"] = outputs_of(values["outputs"])
    return RunRow(**values)


def attempt_of(row: Row) -> AttemptRow:
    """Parse a row of the attempts table."""
    return AttemptRow._make(
        (*row[:5], mapping(row[5]), *row[6:11], mapping(row[11]), parse_stored(row[12]))
    )


def attempt_row(attempt: AttemptRow) -> Row:
    """Return an attempt as a row of the attempts table."""
    return (
        *attempt[:5],
        text(attempt.job),
        *attempt[6:11],
        text(attempt.exit),
        text(attempt.preimage),
    )


class Event(NamedTuple):
    run: str
    seq: int
    at: float
    subject: str
    id: str
    before: str
    after: str
    reason: str
    data: Data


def is_progress(move: Move) -> bool:
    """Return True if a state change is progress: a step finished, or its job was reattached."""
    return move.subject == "step" and (move.after in STEP_FINAL or "taken_up" in move.data)


class Reporter(NamedTuple):
    """Builder of the webhook deliveries for run events."""

    listened_to: Callable[[str, Data | None], bool]
    """Function that tells whether a run has webhook endpoints.

    `data` is the run's data, or None to read the stored run.
    """
    letters: Callable[[Sequence[Event]], Sequence[Letter]]
    """Function that returns the deliveries for the events of one run.

    Called within the transaction that stores the events.
    """


SILENT: Final = Reporter(lambda run, data: False, lambda events: ())
"""Reporter without webhook endpoints."""


def events_of(run: str, first: int, now: float, moves: Sequence[Move]) -> list[Event]:
    """Return a run's own state changes as events for webhooks, numbered from `first`."""
    events = []
    for number, move in enumerate(moves, first):
        if move.subject == "run" and move.before != move.after:
            before, after = str(move.before), str(move.after)
            events.append(
                Event(
                    run, number, now, move.subject, move.id, before, after, move.reason, move.data
                )
            )
    return events


def is_over(run: RunRow, tally: Mapping[tuple[str, str], int]) -> bool:
    """Return True if the run can never resume.

    It finished, or its worker died after the last step. `tally` counts its steps by (state,
    phase).
    """
    if run.state in FINAL:
        return run.failure != RunFailure.WORKER_GONE

    total, fresh = run.data.get("total"), run.data.get("fresh")
    if not isinstance(total, int) or not isinstance(fresh, int):
        return False
    if sum(tally.values()) + fresh < total:  # the other steps have no row yet
        return False
    return all(state in ENDED for state, _ in tally)


def same_request(new: RunRow, known: str, data: Data) -> None:
    """Raise Invalid if a used idempotency key belongs to a different request."""
    if data.get("body") != new.data.get("body"):
        words = (
            f"the key {new.idempotency} was already used for run {known}, with a different request"
        )
        raise Invalid(
            [Problem(KEY_IN_USE, words, fix="use another key, or repeat the same request")]
        )


RUN_COLUMNS: Final = (
    "id, recipe, plan, inputs, workspace, state, reason, request, created, ended, claim, fence, next_event, data, priority, due, idempotency,"
    " recoveries, failure"
)
"""Columns of a run with equal names in both databases."""


STEP_COLUMNS: Final = "run, step, state, key, reason, detail, numbers, began"


class Words(NamedTuple):
    """SQL differences between SQLite and PostgreSQL."""

    columns: str
    """Columns of a run, in the order of `RunRow`."""
    listed: str
    """SQL condition for the runs of `:workspace`."""
    meant: str
    """SQL condition for the runs that a user of the workspace can name."""
    among: str
    """SQL membership test in a list; `{}` stands for the list's name."""
    last_attempts: str
    """SQL query for the latest attempt of each of `:steps` in any run of `:recipe`."""
    archived: Mapping[str, str]
    """SQL conditions for archived runs, by `yes` or `no`."""
    asked: Mapping[str, str]
    """SQL conditions by field of `Wanted`. The label is `:label`, as NAME=VALUE."""


Beside: TypeAlias = tuple[Sequence["Move"], Sequence[StepRow]]
"""Events and step rows that are stored together with a run's next state."""


class Runs(Protocol):
    """Runs of one store, as an interface for SQLite and PostgreSQL.

    Backends inherit the queries and implement the changes.
    """

    shared: bool
    """Whether workers on other machines can see these runs."""
    exchange: Exchange
    """Data exchange between the workers of these runs."""
    reporter: Reporter
    """Builder of the deliveries that `submit` and `group` store in the same transaction."""
    words: Words
    workspace: str

    def all(self, statement: str, values: Mapping[str, object]) -> list[Row]:
        """Return all rows of a query; `:name` stands for a value."""
        ...

    def get(self, run: str) -> RunRow:
        """Return a run by its id.

        Raises NotFound.
        """
        rows = self.all(f"SELECT {self.words.columns} FROM runs WHERE id = :run", {"run": run})  # noqa: S608
        if not rows:
            raise NotFound(f"there is no run {run}", fix="list the runs with `recipe runs`")
        return run_of(rows[0])

    def latest(self, *, recipe: str | None = None, last: int = 1_000_000) -> list[RunRow]:
        """Return the latest runs, newest first."""
        where = f"{self.words.meant} AND (CAST(:recipe AS text) IS NULL OR recipe = :recipe) ORDER BY created DESC, id DESC LIMIT :last"
        values = {"workspace": self.workspace, "recipe": recipe, "last": last}
        return [
            run_of(row)
            for row in self.all(f"SELECT {self.words.columns} FROM runs WHERE {where}", values)  # noqa: S608
        ]

    def page(self, wanted: RunFilter, limit: int) -> list[RunRow]:
        """Return at most `limit` runs that match `wanted`, newest first, then by id."""
        if len(wanted.states) > 1:
            # A page per state, so that an index applies, then the newest of all.
            found: list[RunRow] = []
            for state in dict.fromkeys(wanted.states):
                found += self.page(wanted._replace(states=(state,)), limit)
            return sorted(found, key=lambda row: (row.created, row.id), reverse=True)[:limit]
        values = wanted._asdict()
        values |= {"state": "".join(wanted.states), "label": "=".join(wanted.label or ())}
        if wanted.before is not None:
            values |= wanted.before._asdict()
        # An index applies only if each condition has no alternatives.
        asked = {
            "before": "(created, id) < (:created, :id)",
            "key": "idempotency = :key",
            "recipe": "recipe = :recipe",
            "state": "state = :state",
            **self.words.asked,
        }
        if wanted.archived:
            asked["archived"] = self.words.archived[wanted.archived]
        meant = wanted.name or wanted.part or wanted.worked
        conditions = [self.words.meant if meant else self.words.listed]
        conditions += [condition for name, condition in asked.items() if values[name]]
        where = " AND ".join(conditions)
        query = f"SELECT {self.words.columns} FROM runs WHERE {where} ORDER BY created DESC, id DESC LIMIT :limit"  # noqa: S608
        rows = self.all(query, {**values, "workspace": self.workspace, "limit": limit})
        return [run_of(row) for row in rows]

    def steps(self, run: str) -> dict[str, StepRow]:
        """Return the steps of a run that have changed state, by id."""
        return self.steps_of([run])[run]

    def steps_of(self, runs: Collection[str]) -> dict[str, dict[str, StepRow]]:
        """Return the steps of several runs that have changed state, by run."""
        answer: dict[str, dict[str, StepRow]] = {run: {} for run in runs}
        query = f"SELECT {STEP_COLUMNS} FROM steps WHERE run {self.words.among.format('runs')}"  # noqa: S608
        for row in self.all(query, {"runs": list(runs)}):
            if row[0] not in answer:
                raise damaged_value(row[0])
            answer[row[0]][row[1]] = StepRow(*row)
        return answer

    def step_moves(self, run: str) -> list[Event]:
        """Return the step events to and from RUNNING, in order."""
        query = (
            "SELECT * FROM events WHERE run = :run AND subject = 'step'"
            " AND (after = 'RUNNING' OR before = 'RUNNING') ORDER BY seq"
        )
        return [Event._make((*row[:8], mapping(row[8]))) for row in self.all(query, {"run": run})]

    def finished_attempts(self, runs: Collection[str]) -> list[AttemptId]:
        """Return the finished attempts of several runs, in order."""
        query = f"SELECT id, run, step, n, key FROM attempts WHERE run {self.words.among.format('runs')} ORDER BY run, step, n"  # noqa: S608
        return [AttemptId(*row) for row in self.all(query, {"runs": list(runs)})]

    def makers(self, keys: Collection[str]) -> dict[str, AttemptId]:
        """Return the last successful attempt for each cache key."""
        query = f"SELECT id, run, step, n, key FROM attempts WHERE outcome = 'done' AND key {self.words.among.format('keys')} ORDER BY ended"  # noqa: S608
        return {row[4]: AttemptId(*row) for row in self.all(query, {"keys": list(keys)})}

    def tallies(self, runs: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
        """Return the step counts of each run by (state, phase).

        Only RUNNING steps have a phase.
        """
        count = "SELECT run, state, CASE state WHEN 'RUNNING' THEN reason ELSE '' END, count(*) FROM steps"
        answer: dict[str, dict[tuple[str, str], int]] = {run: {} for run in runs}
        for run, state, phase, number in self.all(
            f"{count} WHERE run {self.words.among.format('runs')} GROUP BY 1, 2, 3",
            {"runs": list(runs)},
        ):
            answer[run][state, phase] = number
        return answer

    def attempts(self, run: str, step: str | None = None) -> list[AttemptRow]:
        """Return the attempts of a run or of one step, in order."""
        query = "SELECT * FROM attempts WHERE run = :run AND (CAST(:step AS text) IS NULL OR step = :step) ORDER BY step, n"
        return [attempt_of(row) for row in self.all(query, {"run": run, "step": step})]

    def latest_attempts(
        self, recipe: str, steps: Collection[str], *, run: str | None = None
    ) -> dict[str, AttemptRow]:
        """Return the latest attempt of each step in any run of a recipe, or in one run."""
        if run is None:
            values = {"steps": list(steps), "recipe": recipe, "workspace": self.workspace}
            return {row[2]: attempt_of(row) for row in self.all(self.words.last_attempts, values)}
        wanted = set(steps)
        found = [attempt for attempt in self.attempts(run) if attempt.step in wanted]
        found.sort(key=lambda attempt: attempt.started or 0.0)
        return {attempt.step: attempt for attempt in found}

    def events(self, run: str, after: int = 0, limit: int = 1_000_000) -> list[Event]:
        """Return the events of a run after the number `after`, in order."""
        query = "SELECT * FROM events WHERE run = :run AND seq > :after ORDER BY seq LIMIT :limit"
        return [
            Event._make((*row[:8], mapping(row[8])))
            for row in self.all(query, {"run": run, "after": after, "limit": limit})
        ]

    def states_of(self, runs: Collection[str]) -> dict[str, tuple[str, int]]:
        """Return the state and the next event number of each existing run."""
        query = f"SELECT id, state, next_event FROM runs WHERE id {self.words.among.format('runs')}"  # noqa: S608
        return {
            id: (str(state), int(number))
            for id, state, number in self.all(query, {"runs": list(runs)})
        }

    def states_since(self, since: float) -> dict[str, tuple[str, int]]:
        """Return the state and next event number of unfinished and recent runs of the workspace.

        Recent runs were created after `since`.
        """
        recent = "state IN ('QUEUED', 'ACTIVE', 'PAUSED') OR created > :since"
        query = f"SELECT id, state, next_event FROM runs WHERE {self.words.listed} AND ({recent})"  # noqa: S608
        values = {"since": since, "workspace": self.workspace}
        return {id: (str(state), int(number)) for id, state, number in self.all(query, values)}

    def moves_since(self, since: float, limit: int) -> list[Event]:
        """Return the first events after `since` of runs that had not ended before.

        The events of each run are in order.
        """
        columns = "e.run, e.seq, e.at, e.subject, e.id, e.before, e.after, e.reason, e.data"
        query = (
            f"SELECT {columns} FROM runs JOIN events e ON e.run = runs.id WHERE {self.words.listed}"  # noqa: S608
            " AND (runs.ended IS NULL OR runs.ended > :since) AND e.at > :since"
            " ORDER BY e.at, e.run, e.seq LIMIT :limit"
        )
        values = {"since": since, "limit": limit, "workspace": self.workspace}
        return [Event._make((*row[:8], mapping(row[8]))) for row in self.all(query, values)]

    def run_moves(self, runs: Collection[str]) -> dict[str, list[tuple[float, str]]]:
        """Return the time and the new state of each run's state changes, in order."""
        query = (
            f"SELECT run, at, after FROM events WHERE run {self.words.among.format('runs')}"  # noqa: S608
            " AND subject = 'run' AND before <> after ORDER BY run, seq"
        )
        found: dict[str, list[tuple[float, str]]] = {}
        for run, at, after in self.all(query, {"runs": list(runs)}):
            found.setdefault(run, []).append((float(at), str(after)))
        return found

    def places(self, runs: Collection[str]) -> dict[tuple[str, str], str]:
        """Return the last host of each step by (run, step).

        Steps on this machine are left out.
        """
        query = f"SELECT run, id, data FROM events WHERE run {self.words.among.format('runs')} AND subject = 'step' AND after = 'RUNNING'"  # noqa: S608
        begun = {
            (run, id): data
            for run, id, data in self.all(f"{query} ORDER BY run, seq", {"runs": list(runs)})
        }
        places = {}
        for step, data in begun.items():
            if '"site"' in data:  # parse only the data that can have a host
                place = mapping(data).get("site")
                if place:
                    places[step] = str(place)
        return places

    def live(self, run: str) -> bool:
        """Return True if a live worker has claimed the run."""
        ...

    def close(self) -> None:
        """Release all claims on runs."""
        ...

    def news(self) -> int:
        """Return a number that changes after a new request or run, or when a claim must be renewed.

        The number may also change without these. Cheap.
        """
        ...

    def take_request(self, run: str, fence: int) -> str:
        """Return the pending request of a claimed run, and renew the claim.

        Raises Stale.
        """
        ...

    def prepare(self, run: str) -> None:
        """Mark a run that this process is about to submit as live.

        The process already holds slots for the run.
        """
        ...

    def submit(self, run: RunRow, who: str = "", bundle: bytes = b"") -> Submission:
        """Store a new QUEUED run with its first event and bundle.

        If `who` is given, the same transaction claims the run for this worker.

        A repeated id, or a repeated idempotency key with the same `data["body"]`, returns the
        existing run. Raises Invalid for a different body.
        """
        ...

    def claim(self, run: str, who: str) -> int | None:
        """Claim a run, even if its worker died, and return the fencing token that all writes need.

        Returns None if a live worker has the run, or if it is finished. Read the run again
        afterwards.
        """
        ...

    def claim_next(self, who: str, offer: ClaimCriteria) -> RunRow | None:
        """Claim the first due unclaimed run, by priority, then by due time.

        Return None if there is none.
        """
        ...

    def forget_opener(self, run: str, address: str) -> None:
        """Delete the credentials of a downloaded input URL.

        Keeps them if another machine can be asked to download the input again.
        """
        ...

    def release(self, run: str, fence: int, *, due: float | None = None) -> None:
        """Release the claim on a run without changing the run.

        With `due`, any worker may claim the run from that time on.
        """
        ...

    def group(
        self,
        run: str,
        fence: int,
        moves: Sequence[Move] = (),
        *,
        steps: Iterable[StepRow] = (),
        attempts: Iterable[AttemptRow] = (),
        changes: Changes = NOTHING,
        run_state: RunState | tuple[str, str] | None = None,
        answers: str = "",
        landed: Callable[[], None] | None = None,
    ) -> int:
        """Store all changes of a run in one transaction, and return the number of the last event.

        `changes` are for the local index, which may be in the same database.

        With `landed`, a thread waits for the disk and then calls it; `land` then raises any error.
        Readers wait meanwhile.

        `run_state` is the run's next state. A final state ends the run and its claim, and deletes
        the credentials of its input addresses. PAUSED also ends the claim. Such a state must answer
        the pending request, if any. Otherwise Requested is raised, so that an earlier cancel
        request wins. In other states, an unanswered request stays pending. Raises Stale if another
        worker has the run.
        """
        ...

    def land(self) -> None:
        """Wait until the last group of changes is on disk.

        Raises its error, in which case nothing was stored.
        """
        ...

    @property
    def outbox(self) -> Outbox:
        """Webhook deliveries of these runs."""
        ...

    @property
    def workers(self) -> Workers:
        """Workers that execute runs of this database."""
        ...

    def request(self, run: str, what: str, data: Data = NO_DATA) -> bool:
        """Store a request (`cancel`, `pause` or `resume`) for a run, with `data` in its event.

        Returns False if no worker would read it: the run is finished, or paused without a worker.
        """
        ...

    def prioritize(self, run: str, priority: int) -> None:
        """Change the priority of a run, and record an event."""
        ...

    def describe(self, run: str, changes: Data) -> None:
        """Change the user's description of a run in its `data`; None removes a field.

        An event is stored.
        """
        ...

    def forget(self, runs: Iterable[str]) -> None:
        """Delete runs and all their records, for garbage collection."""
        ...


def settle(
    runs: Runs,
    run: str,
    fence: int,
    state: str,
    reason: str,
    beside: Callable[[str], Beside] = lambda _state: ((), ()),
    *,
    failure: str = "",
) -> str:
    """Store the next state of a claimed run without an event loop, and return the state.

    A pending cancel request wins until the state is stored.

    `beside` returns the step events and rows for a state. Raises Stale.
    """
    while True:
        row = runs.get(run)
        if row.request == "cancel":
            state, reason, failure = "CANCELLED", "cancelled", ""
        elif row.request == "resume" and state == "PAUSED":
            state, reason = "QUEUED", "resumed"
        moves, steps = beside(state)
        if row.state != state:
            data = {"failure": failure} if failure else {}
            moves = [*moves, Move("run", run, row.state, state, reason, data)]
        try:
            runs.group(
                run,
                fence,
                moves,
                steps=steps,
                run_state=RunState(state, reason, failure),
                answers=row.request,
            )
        except Requested:  # since the row was read
            continue
        return state
