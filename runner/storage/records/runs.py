"""What workers share of runs: their steps, attempts and events, and who may write them.  The contract of a backend, and the values that it keeps.

A group is one guarded transaction: claim and fence must be ours, and the same update numbers the events, gap-free.  A stale worker writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from ...errors import Busy, Invalid, NotFound, Problem
from ...failures import RunFailure
from .database import Data, Json, Row, damaged_value, mapping, parse_stored, text
from .exchange import Exchange, Output, outputs_of
from .index import NOTHING, Changes

if TYPE_CHECKING:
    from ...planning.schedule import Move
    from .outbox import Letter, Outbox
    from .workers import Workers

FINAL: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
LET_GO: Final = FINAL | {"PAUSED"}
"""States that end the claim of a run."""
STEP_FINAL: Final = frozenset({"FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"})
KEY_IN_USE: Final = "key-in-use"
"""The code of the problem that an idempotency key was used for another request."""


NO_DATA: Final[Data] = {}


ELSEWHERE: Final = 600.0
"""Seconds after a worker's last word from which another machine may take a run whose jobs run on the worker's own."""
ALONE: Final = 540.0
"""Seconds after which an agent ends the jobs of such a worker."""
DESCRIBED: Final = "described"
"""The reason of the event of a run of which people said something else: its name, tags, note, or that it is put away."""
PRIORITIZED: Final = "prioritized"
"""The reason of the event of a run whose priority was changed, which its data has."""
LIMITED: Final = ("user", "recipe", "driver")
"""What runs are counted by."""


class RunPlace(NamedTuple):
    """Where a run stands in a list: by the time it was created, in seconds since the epoch, then by its id."""

    created: float
    id: str


class Wanted(NamedTuple):
    """Which runs are listed.  Empty: any."""

    states: Collection[str] = ()
    recipe: str = ""
    user: str = ""
    label: tuple[str, str] | None = None
    key: str = ""  # the submitter's own name for the request
    name: str = ""  # that it was given
    part: str = ""  # of its id
    tag: str = ""
    archived: str = ""  # "yes": only runs that are put away; "no": none of them
    worked: bool = False  # also those that were submitted elsewhere, and carried out here
    before: RunPlace | None = None  # only runs that were created before this one: the next page


class Stale(Busy):
    """This run is not ours any more: another worker has claimed it."""


class Requested(Busy):
    """Somebody has asked for something that this change of the run's state does not answer."""

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
    """From when on any worker may take it; None for a run that only its submitter works on."""
    idempotency: str = ""
    """The submitter's own name for the request."""
    recoveries: int = 0
    """Claims after a worker that died, since a step ended or its job was found again."""
    failure: str = ""
    """The kind of failure of a run that FAILED: a `RunFailure`, or the kind of its step.  `reason` has the words."""
    user: str = ""
    """Who submitted it."""
    bundle: str = ""
    """The SHA-256 of the archive that a worker unpacks; empty for a run that is carried out in its own workspace."""
    store: str = ""
    """The URL of the shared store that has what the bundle has not, and that gets what the run makes."""
    outputs: Sequence[Output] = ()
    """What it made, in the shared store; empty until it has COMPLETED."""


class Submitted(NamedTuple):
    """The run that a request became; `fence` is 0 where it was not claimed."""

    id: str
    fence: int = 0


class Offer(NamedTuple):
    """What a worker takes: runs for this driver, or for any; and those whose labels are all among its own."""

    driver: str = ""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    """Of `user`, `recipe` or `driver`: how many runs with the same one may be worked on at once, by all workers."""
    store: str = ""
    """Runs of any workspace that use the shared store at this URL, instead of those of the worker's own workspace."""


class RunState(NamedTuple):
    """The next state of a run.  `failure` is the kind, for one that FAILED, and `reason` the words."""

    state: str
    reason: str = ""
    failure: str = ""


class StepRow(NamedTuple):
    run: str
    step: str
    state: str
    key: str = ""
    reason: str = ""
    """The kind of failure of a step that FAILED, the phase of one that is RUNNING, else why it is in its state."""
    detail: str = ""
    """The words of a failure: the error, as far as it is known."""
    numbers: str = ""
    """What its last attempt reported last, as JSON: see `planning.run_view.Training`."""
    began: float | None = None
    """When its last attempt began."""


class AttemptRow(NamedTuple):
    """One try of one step.  `dir` is relative to the store's root."""

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


class Tried(NamedTuple):
    """Which attempt it was: of which step, in which run, the how manieth."""

    id: str
    run: str
    step: str
    n: int
    key: str


def run_of(row: Row) -> RunRow:
    """A row of the table of runs."""
    fields = list(row)
    fields[3], fields[13], fields[22:] = (
        mapping(row[3]),
        mapping(row[13]),
        map(outputs_of, row[22:]),
    )
    return RunRow(*fields)


def attempt_of(row: Row) -> AttemptRow:
    """A row of the table of attempts."""
    return AttemptRow._make(
        (*row[:5], mapping(row[5]), *row[6:11], mapping(row[11]), parse_stored(row[12]))
    )


def attempt_row(attempt: AttemptRow) -> Row:
    """The same as it is stored."""
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
    """Whether a step is further than an earlier worker brought it: it ended, or its job was found again."""
    return move.subject == "step" and (move.after in STEP_FINAL or "taken_up" in move.data)


class Reporter(NamedTuple):
    """The messages to receivers about runs."""

    listened_to: Callable[[str, Data | None], bool]
    """Whether this run has receivers.  `data` is what it is stored with; None: it is stored, and may be read."""
    letters: Callable[[Sequence[Event]], Sequence[Letter]]
    """What is sent of the moves of one run.  Asked within the transaction that stores them; it may read that run."""


SILENT: Final = Reporter(lambda run, data: False, lambda events: ())
"""Of a store without a receiver."""


def events_of(run: str, first: int, now: float, moves: Sequence[Move]) -> list[Event]:
    """The events of a group, numbered from `first`, of which receivers may hear: a run's own changes of state."""
    return [
        Event(
            run,
            number,
            now,
            move.subject,
            move.id,
            str(move.before),
            str(move.after),
            move.reason,
            move.data,
        )
        for number, move in enumerate(moves, first)
        if move.subject == "run" and move.before != move.after
    ]


def is_over(run: RunRow, tally: Mapping[tuple[str, str], int]) -> bool:
    """Whether a run will never be resumed: it ended, or its worker died after its last step.  `tally` is of its steps, by (state, phase)."""
    if run.state in FINAL:
        return run.failure != RunFailure.WORKER_GONE
    from ...planning.schedule import FINAL as ENDED

    total, fresh = run.data.get("total"), run.data.get("fresh")
    known = (
        isinstance(total, int) and isinstance(fresh, int) and sum(tally.values()) + fresh >= total
    )  # others stand in no row yet
    return known and all(state in ENDED for state, _ in tally)


def same_request(new: RunRow, known: str, data: Data) -> None:
    """Check that a request whose idempotency key is in use is the one that used it.  Raises Invalid."""
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
"""Those of a run that both databases call alike."""


STEP_COLUMNS: Final = "run, step, state, key, reason, detail, numbers, began"


class Words(NamedTuple):
    """What the two databases write differently in a query."""

    columns: str
    """Of a run, in the order of `RunRow`."""
    listed: str
    """The runs of a workspace, `:workspace`."""
    meant: str
    """Those that a person may mean there."""
    among: str
    """Whether a value is in a list; `{}` stands for the list's name."""
    last_attempts: str
    """The query for the attempt at each of `:steps` that began last in any run of `:recipe`."""
    archived: Mapping[str, str]
    """Whether a run is put away: `yes` or `no`."""
    asked: Mapping[str, str]
    """Conditions by fields of `Wanted`; its label is `:label`, as NAME=VALUE."""


Beside: TypeAlias = tuple[Sequence["Move"], Sequence[StepRow]]
"""What is stored together with the next state of a run."""


class Runs(Protocol):
    """The runs of one store.  A backend is a subclass: it is read as written here, and writes in its own way."""

    shared: bool
    """Whether workers of other machines may see these runs."""
    exchange: Exchange
    """What these hand each other."""
    reporter: Reporter
    """Asked by `submit` and `group` for what is stored in the outbox in the same transaction."""
    words: Words
    workspace: str

    def all(self, statement: str, values: Mapping[str, object]) -> list[Row]:
        """Every row of a query, in which `:name` stands for a value."""
        ...

    def get(self, run: str) -> RunRow:
        """One run.  Raises NotFound."""
        rows = self.all(f"SELECT {self.words.columns} FROM runs WHERE id = :run", {"run": run})  # noqa: S608
        if not rows:
            raise NotFound(f"there is no run {run}", fix="list the runs with `recipe runs`")
        return run_of(rows[0])

    def latest(self, *, recipe: str | None = None, last: int = 1_000_000) -> list[RunRow]:
        """The latest runs, newest first."""
        where = f"{self.words.meant} AND (CAST(:recipe AS text) IS NULL OR recipe = :recipe) ORDER BY created DESC, id DESC LIMIT :last"
        values = {"workspace": self.workspace, "recipe": recipe, "last": last}
        return [
            run_of(row)
            for row in self.all(f"SELECT {self.words.columns} FROM runs WHERE {where}", values)  # noqa: S608
        ]

    def page(self, wanted: Wanted, limit: int) -> list[RunRow]:
        """At most `limit` runs that are as `wanted`, the newest first; of one time by id."""
        if (
            len(wanted.states) > 1
        ):  # a page of each, so that an index serves them, and the newest of all
            found = [
                row
                for state in dict.fromkeys(wanted.states)
                for row in self.page(wanted._replace(states=(state,)), limit)
            ]
            return sorted(found, key=lambda row: (row.created, row.id), reverse=True)[:limit]
        values = wanted._asdict() | {
            "state": "".join(wanted.states),
            "label": "=".join(wanted.label or ()),
            **(wanted.before._asdict() if wanted.before is not None else {}),
        }
        # An index serves a condition only where nothing else could be meant.
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
        here = self.words.meant if meant else self.words.listed
        where = " AND ".join(
            [here, *(condition for name, condition in asked.items() if values[name])]
        )
        query = f"SELECT {self.words.columns} FROM runs WHERE {where} ORDER BY created DESC, id DESC LIMIT :limit"  # noqa: S608
        return [
            run_of(row)
            for row in self.all(query, {**values, "workspace": self.workspace, "limit": limit})
        ]

    def steps(self, run: str) -> dict[str, StepRow]:
        """The steps of a run that have moved, by id."""
        return self.steps_of([run])[run]

    def steps_of(self, runs: Collection[str]) -> dict[str, dict[str, StepRow]]:
        """The same of several runs, by run."""
        answer: dict[str, dict[str, StepRow]] = {run: {} for run in runs}
        query = f"SELECT {STEP_COLUMNS} FROM steps WHERE run {self.words.among.format('runs')}"  # noqa: S608
        for row in self.all(query, {"runs": list(runs)}):
            if row[0] not in answer:
                raise damaged_value(row[0])
            answer[row[0]][row[1]] = StepRow(*row)
        return answer

    def step_moves(self, run: str) -> list[Event]:
        """The moves of its steps to and from RUNNING, in order."""
        query = (
            "SELECT * FROM events WHERE run = :run AND subject = 'step'"
            " AND (after = 'RUNNING' OR before = 'RUNNING') ORDER BY seq"
        )
        return [Event._make((*row[:8], mapping(row[8]))) for row in self.all(query, {"run": run})]

    def tried(self, runs: Collection[str]) -> list[Tried]:
        """The attempts of runs that are over, in order."""
        query = f"SELECT id, run, step, n, key FROM attempts WHERE run {self.words.among.format('runs')} ORDER BY run, step, n"  # noqa: S608
        return [Tried(*row) for row in self.all(query, {"runs": list(runs)})]

    def makers(self, keys: Collection[str]) -> dict[str, Tried]:
        """By key, the attempt that gave its result; the last, where several did."""
        query = f"SELECT id, run, step, n, key FROM attempts WHERE outcome = 'done' AND key {self.words.among.format('keys')} ORDER BY ended"  # noqa: S608
        return {row[4]: Tried(*row) for row in self.all(query, {"keys": list(keys)})}

    def tallies(self, runs: Collection[str]) -> dict[str, dict[tuple[str, str], int]]:
        """How many steps of each run are in each (state, phase); only a RUNNING step has a phase."""
        count = "SELECT run, state, CASE state WHEN 'RUNNING' THEN reason ELSE '' END, count(*) FROM steps"
        answer: dict[str, dict[tuple[str, str], int]] = {run: {} for run in runs}
        for run, state, phase, number in self.all(
            f"{count} WHERE run {self.words.among.format('runs')} GROUP BY 1, 2, 3",
            {"runs": list(runs)},
        ):
            answer[run][state, phase] = number
        return answer

    def attempts(self, run: str, step: str | None = None) -> list[AttemptRow]:
        """The attempts of a run, or of one step of it, in order."""
        query = "SELECT * FROM attempts WHERE run = :run AND (CAST(:step AS text) IS NULL OR step = :step) ORDER BY step, n"
        return [attempt_of(row) for row in self.all(query, {"run": run, "step": step})]

    def latest_attempts(
        self, recipe: str, steps: Collection[str], *, run: str | None = None
    ) -> dict[str, AttemptRow]:
        """The last attempt of each of `steps` in any run of a recipe, or in one run: whose pre-image says what it was run with."""
        if run is None:
            values = {"steps": list(steps), "recipe": recipe, "workspace": self.workspace}
            return {row[2]: attempt_of(row) for row in self.all(self.words.last_attempts, values)}
        wanted = set(steps)
        found = sorted(
            (attempt for attempt in self.attempts(run) if attempt.step in wanted),
            key=lambda attempt: attempt.started or 0.0,
        )
        return {attempt.step: attempt for attempt in found}

    def events(self, run: str, after: int = 0, limit: int = 1_000_000) -> list[Event]:
        """The events of a run with a number above `after`, in order, without gaps."""
        query = "SELECT * FROM events WHERE run = :run AND seq > :after ORDER BY seq LIMIT :limit"
        return [
            Event._make((*row[:8], mapping(row[8])))
            for row in self.all(query, {"run": run, "after": after, "limit": limit})
        ]

    def standing(self, runs: Collection[str]) -> dict[str, tuple[str, int]]:
        """The state of each of these runs that there is, and the number of its next event."""
        query = f"SELECT id, state, next_event FROM runs WHERE id {self.words.among.format('runs')}"  # noqa: S608
        return {
            id: (str(state), int(number))
            for id, state, number in self.all(query, {"runs": list(runs)})
        }

    def standing_since(self, since: float) -> dict[str, tuple[str, int]]:
        """The same of all runs of the workspace that are not over, or were stored after `since`."""
        recent = "state IN ('QUEUED', 'ACTIVE', 'PAUSED') OR created > :since"
        query = f"SELECT id, state, next_event FROM runs WHERE {self.words.listed} AND ({recent})"  # noqa: S608
        values = {"since": since, "workspace": self.workspace}
        return {id: (str(state), int(number)) for id, state, number in self.all(query, values)}

    def moves_since(self, since: float, limit: int) -> list[Event]:
        """The first events after `since` of runs that are not over, or ended after it: of each run in order."""
        columns = "e.run, e.seq, e.at, e.subject, e.id, e.before, e.after, e.reason, e.data"
        query = (
            f"SELECT {columns} FROM runs JOIN events e ON e.run = runs.id WHERE {self.words.listed}"  # noqa: S608
            " AND (runs.ended IS NULL OR runs.ended > :since) AND e.at > :since"
            " ORDER BY e.at, e.run, e.seq LIMIT :limit"
        )
        values = {"since": since, "limit": limit, "workspace": self.workspace}
        return [Event._make((*row[:8], mapping(row[8]))) for row in self.all(query, values)]

    def run_moves(self, runs: Collection[str]) -> dict[str, list[tuple[float, str]]]:
        """When each of these runs came into which state, in order."""
        query = (
            f"SELECT run, at, after FROM events WHERE run {self.words.among.format('runs')}"  # noqa: S608
            " AND subject = 'run' AND before <> after ORDER BY run, seq"
        )
        found: dict[str, list[tuple[float, str]]] = {}
        for run, at, after in self.all(query, {"runs": list(runs)}):
            found.setdefault(run, []).append((float(at), str(after)))
        return found

    def places(self, runs: Collection[str]) -> dict[tuple[str, str], str]:
        """By run and step, the host on which the step was begun last; a step that ran on this machine has none."""
        query = f"SELECT run, id, data FROM events WHERE run {self.words.among.format('runs')} AND subject = 'step' AND after = 'RUNNING'"  # noqa: S608
        begun = {
            (run, id): data
            for run, id, data in self.all(f"{query} ORDER BY run, seq", {"runs": list(runs)})
        }
        return {
            step: str(place)
            for step, data in begun.items()
            if '"site"' in data and (place := mapping(data).get("site"))
        }

    def live(self, run: str) -> bool:
        """Whether a worker of this machine is alive and has claimed the run."""
        ...

    def close(self) -> None:
        """Let go of every claim."""
        ...

    def news(self) -> int:
        """A number that is another one once something may have been asked or submitted, or a claim has to be kept.  Cheap."""
        ...

    def take_request(self, run: str, fence: int) -> str:
        """What has been asked of the run that we have claimed; the claim is kept for longer.  Raises Stale."""
        ...

    def prepare(self, run: str) -> None:
        """Be alive for a run, as `live` has it, that this process is about to submit: places are taken for it already."""
        ...

    def submit(self, run: RunRow, who: str = "", bundle: bytes = b"") -> Submitted:
        """Store a new run, QUEUED, with its first event and the bundle that it names, and claim it in the same transaction for `who`, if anybody.

        The same id twice is the same run.  So is the same idempotency key with the same `data["body"]`.  Raises Invalid for another body.
        """
        ...

    def claim(self, run: str, who: str) -> int | None:
        """Become the run's only worker, also after one that died; None while another lives, or where the run is over.

        Answers the fence, which every write must carry.  What was known of the run before may be so no more.
        """
        ...

    def claim_next(self, who: str, offer: Offer) -> RunRow | None:
        """Claim the first run that is due and that no worker has: by priority, then by how long it has been due.  None: there is none."""
        ...

    def forget_opener(self, run: str, address: str) -> None:
        """Forget what opens an address of a run, which was fetched: where no other machine can be asked to fetch it again."""
        ...

    def release(self, run: str, fence: int, *, due: float | None = None) -> None:
        """Give the claim back; the run stays as it is.

        With `due` any worker may take it from then on, even if only its submitter worked on it.
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
        """Store all this together, or raise and store nothing.  Answers the number of the last event.

        `changes` are for this disk's index: where it is in the same file they are part of the transaction.

        With `landed` a thread waits for the disk, and calls it in the end; `land` then says whether this is stored.  A reader waits meanwhile.

        `run_state` is the run's next state, with its reason; a final one ends the run and its claim, and forgets what opens
        its addresses; PAUSED ends the claim, too.  One that ends the claim must answer the request that is pending, if any:
        otherwise Requested is raised, so that a cancel that came before the end wins.  In any other state a request that
        it does not answer stays, to be read.  Stale: another worker has the run.
        """
        ...

    def land(self) -> None:
        """Wait until the group that was stored last is on the disk.  Raises what kept it from that; nothing of it is stored then."""
        ...

    @property
    def outbox(self) -> Outbox:
        """What waits for receivers."""
        ...

    @property
    def workers(self) -> Workers:
        """Who takes runs."""
        ...

    def request(self, run: str, what: str, data: Data = NO_DATA) -> bool:
        """Ask a run for `cancel`, `pause` or `resume`, with `data` in its event: durable when this returns.

        False: no worker would read it, since the run is over, or is paused and has none.
        """
        ...

    def prioritize(self, run: str, priority: int) -> None:
        """Have workers take a run earlier or later.  An event tells who follows it."""
        ...

    def describe(self, run: str, changes: Data) -> None:
        """Change what people say of a run, in its `data`: a null takes a part out.  An event tells who follows it."""
        ...

    def forget(self, runs: Iterable[str]) -> None:
        """Delete runs and all that is stored of them: what `gc` decided."""
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
    """Give a claimed run, on which nothing works, its next state, and answer it: a cancel that is asked for until it is stored wins.

    `beside` answers what goes with a state: moves of steps, and their rows.  Raises Stale.
    """
    from ...planning.schedule import Move

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
        except Requested:  # since we looked
            continue
        return state
