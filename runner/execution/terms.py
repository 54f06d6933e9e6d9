"""How a run is asked for, and what a caller learns of it: values that the command line, Python and the store share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ..errors import Invalid, Problem
from ..secrets import Masker

if TYPE_CHECKING:
    from ..planning.step import LimitSpec
    from ..storage.records.runs import Event, RunRow
    from ..storage.workspace import Workspace
    from ..survey.request import Request
    from .steps.failing import Failure


@dataclass(frozen=True, slots=True)
class Choice:
    """Which steps, of all that the plan has."""

    only: str | None = None
    until: str | None = None
    begin: str | None = None  # --from: this step and everything after it, whatever is remembered
    again: tuple[str, ...] = ()  # -R
    all: bool = False  # -B
    leave: tuple[str, ...] = ()  # these steps and what needs them, though they are not fresh


EVERYTHING: Final = Choice()


class Label(NamedTuple):
    """What the caller calls a run, for `runs` and `results`."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


NO_LABEL: Final = Label()


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run, as opposed to what."""

    driver: str = "local"  # where hosts come from
    hosts: tuple[str, ...] = ()  # for the driver, instead of those in the settings
    jobs: int = 0  # 0: one per processor here, or as many as the hosts have places
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    allow: tuple[str, ...] = ()  # preflight rules that are not asked; `all`: none is
    everything_there: bool = False  # on rented machines also steps that ask for no GPU
    label: Label = NO_LABEL
    store: str = ""  # the shared store that was named; empty: that of recipe.toml
    where: Mapping[str, str] = field(
        default_factory=dict
    )  # filters of what is rented, beside those of the driver's settings
    python: str = ""  # for steps that have no lock: a path, a virtual environment, a name on PATH; else see hosts/interpreters.py
    upload: str = ""  # an address, s3:// gs:// hf://, that the results are uploaded to
    stop_early: tuple[str, bool] | None = (
        None  # a metric, and whether less is better: instances of a step that fall behind in it are stopped
    )
    limits: Mapping[str, float] = field(
        default_factory=dict
    )  # `time` in seconds and `cost` in USD, where the recipe allows more
    stack: str = ""  # of the settings: it names the driver, and more
    keep_alive: bool = False  # leave the kept machine of the stack running after the run


class Overview(NamedTuple):
    """What is about to happen."""

    run: str
    recipe: str
    total: int
    fresh: int
    to_run: Sequence[str]
    expected: Mapping[str, float]
    jobs: int
    workspace: str
    masker: Masker = Masker()
    """Takes the run's secrets out of what a step prints."""
    command: Callable[[str], str] = lambda id: ""
    """A step's command as it would be typed, by the step's id."""
    steps: Callable[[str], float | None] = lambda id: None
    """How many steps a training takes, by the step's id; None where its inputs do not say."""
    pattern: Callable[[str], str | None] = lambda id: None
    """By which pattern a step's metrics are read from its log, by the step's id; None where they are not."""
    trains: str = ""
    """The step that trains, without its instances; empty where none does."""


class Summary(NamedTuple):
    """What happened.  `results` are (name, path) of what was published.

    `interrupted`: it was asked to end, by Ctrl-C or another; it may be COMPLETED all the same, where that came too late to leave anything out.
    """

    state: str
    counts: Mapping[str, int]
    seconds: float
    failed: Sequence[Failure] = ()
    results: Sequence[tuple[str, str]] = ()
    run: str = ""
    interrupted: bool = False
    left_running: Sequence[str] = ()
    warnings: Sequence[str] = ()
    skipped: Sequence[str] = ()
    """A line for each step that was skipped: its name, and why."""


class Listener(Protocol):
    """Hears a run from beginning to end.  `tick` comes about ten times a second while the run waits; `page` draws the run for a browser."""

    def begin(self, overview: Overview) -> None: ...
    def events(self, batch: Sequence[Event]) -> None: ...
    def tick(self) -> None: ...
    def say(self, text: str) -> None: ...
    def end(self, summary: Summary) -> None: ...
    def page(self, ws: Workspace, run: str) -> str: ...


class Since(NamedTuple):
    """When a request came."""

    at: float  # by a clock that is never set
    version: int  # of the store

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.at


def asked(request: Request) -> dict[str, object]:
    """A request as it is stored with its run: what `why` and `status` ask about when nothing else is named."""
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


def noted(choice: Choice, settings: Settings) -> dict[str, object]:
    """How a run is asked for, as it is stored with it."""
    how: dict[str, object] = {
        "choice": asdict(choice),
        "settings": {name: value for name, value in asdict(settings).items() if name != "label"},
    }
    return how | {name: value for name, value in settings.label._asdict().items() if value}


def limits_of(limits: LimitSpec) -> dict[str, object]:
    """The limits of a run, as they are stored with it: seconds and US dollars."""
    known = {
        name: value
        for name, value in (("time", limits.time), ("cost", limits.cost))
        if value is not None
    }
    return {"limits": known} if known else {}


def request_of_run(row: RunRow) -> Request | None:
    """What a run was asked for; None for one that did not note it."""
    from ..survey.request import Request

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
    """Which steps a run was asked for."""
    return Choice(**_values(row, "choice"))


def lower(own: LimitSpec, asked: Mapping[str, float]) -> LimitSpec:
    """Of the limits of a recipe and those of a request, the lower of each."""

    def of(name: str, most: float | None) -> float | None:
        return min((each for each in (most, asked.get(name)) if each is not None), default=None)

    return own._replace(time=of("time", own.time), cost=of("cost", own.cost))


def placed(ws: Workspace, settings: Settings) -> Settings:
    """These settings with what their stack says; the workspace has its driver's settings from then on.  Raises NotFound, Invalid."""
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
    """The limits of a request, with those of its stack.  Raises NotFound."""
    if not settings.stack:
        return settings.limits
    from ..language.units import duration, money

    read = {"time": duration, "cost": money}
    return {
        **{name: read[name](text) for name, text in ws.config.stack(settings.stack).limits.items()},
        **settings.limits,
    }


def settings_of_run(row: RunRow) -> Settings:
    """How a run was asked to be carried out."""
    return Settings(**_values(row, "settings"))


def _values(row: RunRow, what: str) -> dict[str, Any]:
    """What a run noted, as the values that it had; empty where it was an earlier version's."""
    found = row.data.get(what)
    return (
        {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        if isinstance(found, dict)
        else {}
    )


def login(environ: Mapping[str, str]) -> str:
    """Who works here."""
    return environ.get("USER") or environ.get("LOGNAME") or f"user {os.getuid()}"


def new_id() -> str:
    """A run's name: the time it began, to read and to sort by, and enough chance to be the only one."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(3).hex()
