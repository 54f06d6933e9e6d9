"""Options of a run and its summary, shared by the command line, the Python API and the store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ..errors import Invalid, Problem
from ..language.units import duration, money
from ..secrets import Masker
from ..survey.request import Request

if TYPE_CHECKING:
    from ..planning.step import LimitSpec
    from ..storage.records.runs import Event, RunRow
    from ..storage.workspace import Workspace
    from .steps.failing import FailureDetails


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of the plan's steps by the caller."""

    only: str | None = None
    until: str | None = None
    begin: str | None = None  # --from: this step and all downstream steps, also if cached
    again: tuple[str, ...] = ()  # -R
    all: bool = False  # -B
    leave: tuple[str, ...] = ()  # skip these steps and their downstream steps


EVERYTHING: Final = Choice()


class Label(NamedTuple):
    """Caller's name, tags and note for a run, shown by `runs` and `results`."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


NO_LABEL: Final = Label()


@dataclass(frozen=True, slots=True)
class Settings:
    """Execution settings of a run: its hosts, limits and options."""

    driver: str = "local"  # the source of hosts
    hosts: tuple[str, ...] = ()  # replace the driver's configured hosts
    jobs: int = 0  # 0: the number of processors, or of the hosts' slots
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    allow: tuple[str, ...] = ()  # preflight rules to ignore; `all` ignores every rule
    everything_there: bool = False  # run CPU-only steps on rented machines, too
    label: Label = NO_LABEL
    store: str = ""  # shared store; empty: the default in recipe.toml
    where: Mapping[str, str] = field(
        default_factory=dict
    )  # rental filters, added to the driver's settings
    python: str = ""  # for steps without a lock: a path, a virtual environment or a name on PATH; default in hosts/interpreters.py
    upload: str = ""  # upload address for the results: s3://, gs:// or hf://
    stop_early: tuple[str, bool] | None = (
        None  # metric for early stopping, and whether less is better
    )
    limits: Mapping[str, float] = field(
        default_factory=dict
    )  # `time` in seconds and `cost` in USD; lower limits in the recipe win
    stack: str = ""  # a configured stack, with its driver
    keep_alive: bool = False  # leave the stack's persistent machine running


class Overview(NamedTuple):
    """Data about a run that is about to start, for listeners."""

    run: str
    recipe: str
    total: int
    fresh: int
    to_run: Sequence[str]
    expected: Mapping[str, float]
    jobs: int
    workspace: str
    masker: Masker = Masker()
    """Masker for the run's secrets in a step's output."""
    command: Callable[[str], str] = lambda id: ""
    """Function that returns a step's command line, by step ID."""
    steps: Callable[[str], float | None] = lambda id: None
    """Function that returns the number of training steps, by step ID, or None if unknown."""
    pattern: Callable[[str], str | None] = lambda id: None
    """Function that returns the pattern for metrics in a step's log, by step ID, or None."""
    trains: str = ""
    """ID of the training step without its matrix values; empty if there is none."""


class Summary(NamedTuple):
    """Summary of a finished run.

    `results` are (name, path) of the published outputs. `interrupted`: a signal or a request asked
    the run to stop. The state is still COMPLETED if no step was left out.
    """

    state: str
    counts: Mapping[str, int]
    seconds: float
    failed: Sequence[FailureDetails] = ()
    results: Sequence[tuple[str, str]] = ()
    run: str = ""
    interrupted: bool = False
    left_running: Sequence[str] = ()
    warnings: Sequence[str] = ()
    skipped: Sequence[str] = ()
    """Lines with the name and the reason of each skipped step."""


class Listener(Protocol):
    """Callback protocol for a run's events and messages.

    `tick` is called about ten times a second while the run waits; `page` returns the run's HTML
    page.
    """

    def begin(self, overview: Overview) -> None: ...
    def events(self, batch: Sequence[Event]) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self, summary: Summary) -> None: ...
    def page(self, ws: Workspace, run: str) -> str: ...


class Since(NamedTuple):
    """Arrival time of a request, and the store's version at that time."""

    at: float  # monotonic clock
    version: int  # version of the store

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.at


def request_data(request: Request) -> dict[str, object]:
    """Return a request in the form that is stored with its run.

    `why` and `status` use the stored request if the caller names no recipe.
    """
    inputs = json.loads(json.dumps(dict(request.inputs), default=str))
    out = str(request.out) if request.out is not None else None
    return {
        "recipe": request.recipe,
        "inputs": inputs,
        "preset": request.preset,
        "out": out,
        "current_python": request.current_python,
        "nodes": request.nodes,
        "resources": dict(request.resources),
    }


def options_data(choice: Choice, settings: Settings) -> dict[str, object]:
    """Return the step selection, settings and label of a run in their stored form."""
    how: dict[str, object] = {
        "choice": asdict(choice),
        "settings": {name: value for name, value in asdict(settings).items() if name != "label"},
    }
    return how | {name: value for name, value in settings.label._asdict().items() if value}


def limits_data(limits: LimitSpec) -> dict[str, object]:
    """Return the limits of a run in their stored form, in seconds and US dollars."""
    known = {
        name: value
        for name, value in (("time", limits.time), ("cost", limits.cost))
        if value is not None
    }
    return {"limits": known} if known else {}


def request_of_run(row: RunRow) -> Request | None:
    """Return the stored request of a run, or None if none is stored."""
    asked = row.data.get("asked")
    if not isinstance(asked, dict):
        return None
    out = Path(asked["out"]) if asked["out"] is not None else None
    return Request(
        asked["recipe"],
        asked["inputs"],
        asked["preset"],
        out,
        asked["current_python"],
        nodes=asked.get("nodes", 0),
        resources=asked.get("resources", {}),
    )


def choice_of_run(row: RunRow) -> Choice:
    """Return the stored step selection of a run."""
    return Choice(**_values(row, "choice"))


def lower_limits(own: LimitSpec, asked: Mapping[str, float]) -> LimitSpec:
    """Return the lower value of each limit, from the recipe and from the request."""

    def of(name: str, most: float | None) -> float | None:
        return min((each for each in (most, asked.get(name)) if each is not None), default=None)

    return own._replace(time=of("time", own.time), cost=of("cost", own.cost))


def apply_stack(ws: Workspace, settings: Settings) -> Settings:
    """Return the settings with the driver and the limits of their stack.

    The workspace uses the stack's driver settings from now on. Raises NotFound, Invalid.
    """
    stack = ws.on(settings.stack) if settings.stack else None
    if settings.keep_alive and (stack is None or not stack.keep):
        fix = 'pass `--stack NAME` of a stack with `keep = "stopped"`, or remove `--keep-alive`'
        raise Invalid(
            [
                Problem(
                    "clash",
                    "--keep-alive requires a stack with a persistent machine",
                    fix=fix,
                )
            ]
        )
    if stack is None:
        return settings
    return replace(settings, driver=stack.driver, limits=limits_asked(ws, settings))


def limits_asked(ws: Workspace, settings: Settings) -> Mapping[str, float]:
    """Return the limits of a request combined with those of its stack.

    Raises NotFound.
    """
    if not settings.stack:
        return settings.limits

    read = {"time": duration, "cost": money}
    return {
        **{name: read[name](text) for name, text in ws.config.stack(settings.stack).limits.items()},
        **settings.limits,
    }


def settings_of_run(row: RunRow) -> Settings:
    """Return the stored execution settings of a run."""
    return Settings(**_values(row, "settings"))


def _values(row: RunRow, what: str) -> dict[str, Any]:
    """Return the stored fields `what` of a run, with lists as tuples.

    Empty if an earlier version stored none.
    """
    stored = row.data.get(what)
    if not isinstance(stored, dict):
        return {}
    values = {}
    for name, value in stored.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def login_name(environ: Mapping[str, str]) -> str:
    """Return the user's login name, or "user UID"."""
    return environ.get("USER") or environ.get("LOGNAME") or f"user {os.getuid()}"


def new_id() -> str:
    """Return a new run ID: the UTC time, for sorting, and random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(3).hex()
