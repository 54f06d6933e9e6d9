"""The server itself: tokens, the workers of its workspace, machines that could be rented, and figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, Field, TypeAdapter

from ..api import costs
from ..api.artifacts import list_outputs
from ..api.drivers import list_drivers
from ..api.leases import end_lease, gpus_of, list_leases
from ..api.metrics import last_samples
from ..api.queue import LOOKED_AT, OPEN, list_queue, list_workers
from ..api.stores import list_stores, measure_store
from ..api.values import moment
from ..errors import CannotRun, NotFound
from ..hosts.renting import offering
from ..interface import shelves
from ..interface.pairs import filters
from ..storage.records.ledger import Ledger, of_user
from ..storage.records.runs import FINAL, RunRow, Wanted
from ..storage.workspace import Workspace
from .answers import Refused, plain, plain_value
from .market import InMarket
from .recipes import OfferList, OfferShelf
from .room import ADMIN, OPERATE, READ, Given, InRoom, Moment, Nothing, run_of
from .runs import WaitView
from .streams import feed_of
from .tokens import Scope, Token

router = APIRouter(tags=["server"])

LATEST = 50
"""Runs whose states are looked at for how long they took."""
MEASURED = 20
"""Runs whose machines, and recipes whose outputs are looked at for each answer."""


class WorkerView(BaseModel):
    """Who has runs, or takes them: one process, which carries out one run after another."""

    worker: str = Field(description="HOST process PID.")
    alive: bool
    idle: bool = Field(description="It lives, and has no run.")
    takes_runs: bool = Field(description="False: it is a `recipe run`, and has its own run alone.")
    capacity: int = Field(description="Runs that it carries out at once.")
    driver: str = Field(description="It takes runs for this driver alone; empty: for any.")
    labels: dict[str, str]
    at_most: dict[str, int] = Field(
        description="Of `user`, `recipe` or `driver`: runs with the same one that all workers may have at once."
    )
    any_workspace: bool = Field(
        description="It takes runs of all workspaces that use its shared store."
    )
    since: str | None
    heard: str | None = Field(
        description="When it said last that it is there, which it does every 15 seconds."
    )
    runs: list[str] = Field(description="The runs that it has; of one that died, had.")


class WorkerList(BaseModel):
    workers: list[WorkerView]


class QueuedRun(BaseModel):
    """A run that waits for a worker."""

    run: str
    recipe: str
    user: str
    position: int = Field(description="Its place among the runs of this workspace that wait.")
    priority: int
    due: str | None = Field(
        description="From when on workers take it; null: they do not, since `recipe run` stored it."
    )
    waits: WaitView


class Queue(BaseModel):
    runs: list[QueuedRun]


class NewToken(Given):
    scope: Scope
    name: str = Field(default="", max_length=100, pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]*)?$")
    run: str = Field(default="", max_length=40, description="It opens this run alone.")
    expires: Moment | None = Field(default=None, description="RFC 3339; without it never.")


class TokenView(BaseModel):
    id: str
    scope: Scope
    name: str
    run: str
    created: str
    expires: str | None


class TokenList(BaseModel):
    tokens: list[TokenView]


class MadeToken(TokenView):
    token: str = Field(description="Shown here once.")


@router.get("/v1/workers", dependencies=READ, summary="Who takes runs, also such as have none now")
def workers(room: InRoom) -> WorkerList:
    with room.reading() as ws:
        return WorkerList.model_validate({"workers": list_workers(ws)})


@router.get("/v1/queue", dependencies=READ, summary="The runs that wait, the next first, and why")
def queue(room: InRoom) -> Queue:
    with room.reading() as ws:
        found = [{**each, "waits": plain_value(each["waits"], ws.root)} for each in list_queue(ws)]
    return Queue.model_validate({"runs": found})


class LeaseView(BaseModel):
    """A machine that is rented or about to be, or a place that costs nothing."""

    key: str
    provider: str
    run: str = Field(description="The run that has it, or had; empty where none did.")
    here: bool = Field(description="It was rented from the workspace of this server.")
    state: str = Field(description="ASKED, COMING, UP or RELEASING.")
    gpus: int
    gpu: str
    since: str
    until: str | None = Field(description="When it ends, whatever happens.")
    usd_an_hour: float
    usd: float = Field(description="What it has cost so far.")
    used: str = Field(
        description="at-work: by its run; kept: for a stack; releasing; else by nothing: its run is over, dead, never (begun)"
        " or unknown, or its time is overdue."
    )
    why: str = Field(description="The same in words.")
    stack: str = Field(description="The stack that it was rented for; empty: none.")


class LeaseList(BaseModel):
    leases: list[LeaseView]
    usd_an_hour: float = Field(description="Of all of them.")


class EndedLease(BaseModel):
    key: str
    ended: bool = Field(description="The provider says that it is gone.")
    said: str = Field(description="Why it is still there; empty where it ended.")


@router.get(
    "/v1/leases",
    dependencies=READ,
    summary="The machines that are rented, of all runs and workspaces of this user",
)
def leases(room: InRoom) -> LeaseList:
    found = plain_value(list_leases(room.root, room.environ), room.root)
    listed = TypeAdapter(list[LeaseView]).validate_python(found)
    return LeaseList(leases=listed, usd_an_hour=sum(each.usd_an_hour for each in listed))


@router.post(
    "/v1/leases/{key}/end",
    dependencies=OPERATE,
    summary="End a machine on which no run is at work, for good",
)
def end(key: str, room: InRoom, _body: Nothing | None = None) -> EndedLease:
    try:
        said = end_lease(room.root, room.environ, key)
    except NotFound as error:
        raise Refused(
            404, "not-found", str(error), "list the leases with GET /v1/leases"
        ) from error
    except CannotRun as error:
        raise Refused(409, "in-use", str(error), error.fix) from error
    return EndedLease(key=key, ended=not said, said=plain(said, room.root))


@router.get(
    "/v1/offers",
    dependencies=READ,
    summary="Machines that could be rented, the newest answers of the last minute",
)
def machines(
    room: InRoom,
    market: InMarket,
    driver: Annotated[str, Query(max_length=64, pattern=r"^[a-z][a-z0-9_:,-]*$")] = "all",
    where: Annotated[
        list[Annotated[str, Query(max_length=100, pattern=r"^[a-z_]+=.+$")]] | None,
        Query(max_length=16),
    ] = None,
    gpus: Annotated[int, Query(ge=0, le=1024)] = 1,
) -> OfferList:
    from drivers.base import Need, Wish

    from ..hosts.renting.several import names_of

    wish = Wish(Need(gpus=gpus), filters=filters(where or ()))
    with room.working() as ws:
        try:
            names = [*offering.priced_drivers(ws, ",".join(names_of(ws.config, driver))).drivers]
        except CannotRun as error:
            raise Refused(
                404,
                "not-found",
                str(error),
                "get the offers of all renting drivers with GET /v1/offers",
            ) from error
    found = market.ask(room, [(name, wish) for name in names])
    return OfferList(
        drivers=[OfferShelf.model_validate(each) for each in shelves.rank_for_programs("", found)]
    )


class KeptPart(BaseModel):
    """What a workspace keeps of one kind."""

    name: str
    bytes: int = Field(description="On the disk.")
    files: int
    whole: bool = Field(description="False: there was no time to count all; there is more.")


class SharedStore(BaseModel):
    name: str
    url: str
    default: bool = Field(description="`store` of recipe.toml names it.")
    checkpoints: bool = Field(description="It keeps checkpoints, too.")


class StoreList(BaseModel):
    parts: list[KeptPart] = Field(description="In the folder of the workspace, the largest first.")
    free: int = Field(description="Bytes that its disk has left.")
    total: int
    shared: list[SharedStore]


@router.get(
    "/v1/stores",
    dependencies=READ,
    summary="How much is kept here, by what it is, and the shared stores",
)
def stores(room: InRoom) -> StoreList:
    with room.reading() as ws:
        return StoreList.model_validate(plain_value(list_stores(ws), ws.root))


class StoreSize(BaseModel):
    bytes: int
    files: int
    whole: bool = Field(description="False: there was no time to list all; there is more.")


@router.get(
    "/v1/stores/{name}/size",
    dependencies=READ,
    summary="How much a shared store keeps; it is listed for this, 10 seconds at most",
)
def store_size(name: str, room: InRoom) -> StoreSize:
    with room.reading() as ws:
        return StoreSize.model_validate(measure_store(ws, name))


class DriverView(BaseModel):
    """A driver that a run can name."""

    name: str
    configured: bool = Field(description="recipe.toml or the user's settings have [drivers.NAME].")
    priced: bool = Field(description="Its machines cost money.")
    lacks: str = Field(
        description="What is missing before it can be used; empty: nothing that is known without asking its provider."
    )


class DriverList(BaseModel):
    drivers: list[DriverView]


@router.get(
    "/v1/drivers",
    dependencies=READ,
    summary="The drivers that a run can name; those of the settings first, and what each lacks",
)
def drivers(room: InRoom) -> DriverList:
    with room.reading() as ws:
        return DriverList.model_validate({"drivers": plain_value(list_drivers(ws), ws.root)})


@router.get("/v1/tokens", dependencies=ADMIN, summary="The tokens, without their secrets")
def tokens(room: InRoom) -> TokenList:
    return TokenList(tokens=[_viewed(token) for token in room.tokens.all()])


@router.post(
    "/v1/tokens",
    status_code=201,
    dependencies=ADMIN,
    summary="Make a token, for everything or for one run",
)
def make(asked: NewToken, room: InRoom) -> MadeToken:
    if asked.run:
        with room.reading() as ws:
            run_of(ws, asked.run)
    token, secret = room.tokens.make(
        asked.scope,
        asked.name,
        asked.run,
        asked.expires.timestamp() if asked.expires is not None else None,
    )
    return MadeToken(**_viewed(token).model_dump(), token=secret)


@router.delete("/v1/tokens/{id}", status_code=204, dependencies=ADMIN, summary="Forget a token")
def remove(id: str, room: InRoom) -> None:
    if not room.tokens.remove(id):
        raise Refused(404, "not-found", "unknown token", "list the tokens with GET /v1/tokens")


def _viewed(token: Token) -> TokenView:
    times = {"created": moment(token.created), "expires": moment(token.expires)}
    return TokenView.model_validate({**token._asdict(), **times})


@router.get(
    "/metrics", dependencies=READ, summary="Figures for Prometheus", response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)  # fmt: skip
def figures(room: InRoom, request: Request) -> Response:
    with room.reading() as ws:
        return Response(
            generate_latest(counted(ws, feed_of(request).streams)),
            media_type="text/plain; version=0.0.4",
        )


def counted(ws: Workspace, streams: int) -> CollectorRegistry:
    """What is counted when it is asked for: the server itself remembers nothing."""
    registry, runs = CollectorRegistry(), ws.store.runs
    rows = runs.page(Wanted(states=OPEN), LOOKED_AT)
    count = Gauge("recipe_open_runs", "Runs that are not over", ["state"], registry=registry)
    oldest: dict[str, float] = {}
    begun = [row for row in rows if row.state == "ACTIVE" or row.claim]
    words = {view.id: view.word for view in ws.run_views.summaries(begun)}
    for row in rows:
        name = words.get(row.id, row.state)
        count.labels(name).inc()
        age = time.time() - max(row.created, row.due or 0.0)
        oldest[name] = max(oldest.get(name, 0.0), age)
    ages = Gauge(
        "recipe_oldest_run_seconds",
        "How long the oldest of them has been due",
        ["state"],
        registry=registry,
    )
    for name, seconds in oldest.items():
        ages.labels(name).set(seconds)
    _count_workers(ws, registry)
    _count_machines(ws, registry)
    _count_seconds(ws, registry)
    _count_rates(ws, registry, [row for row in rows if row.state == "ACTIVE"])
    Gauge(
        "recipe_month_cost_usd",
        "What machines cost since the first of the month",
        registry=registry,
    ).set(costs.of_month().usd)
    Gauge(
        "recipe_artifact_bytes", "Bytes of the objects that are stored here", registry=registry
    ).set(ws.store.index.stored_bytes())
    _count_artifacts(ws, registry)
    Gauge("recipe_streams", "Clients that follow a run", registry=registry).set(streams)
    return registry


def _count_workers(ws: Workspace, registry: CollectorRegistry) -> None:
    found = [each for each in list_workers(ws) if each["alive"]]
    for name, words, number in (
        ("recipe_workers", "Workers that live", len(found)),
        (
            "recipe_idle_workers",
            "Those that have no run",
            sum(bool(each["idle"]) for each in found),
        ),
    ):
        Gauge(name, words, registry=registry).set(number)


def _count_machines(ws: Workspace, registry: CollectorRegistry) -> None:
    machines = Gauge("recipe_machines", "Machines that are rented", ["driver"], registry=registry)
    prices = Gauge(
        "recipe_machines_usd_an_hour",
        "What these cost an hour",
        ["driver", "gpu", "state"],
        registry=registry,
    )
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        for lease in ledger.living_leases():
            machines.labels(lease.driver).inc()
            prices.labels(lease.driver, gpus_of(lease)[1], lease.state).inc(lease.price)


def _count_seconds(ws: Workspace, registry: CollectorRegistry) -> None:
    """How long runs stood in each state: those that were stored last."""
    spent = Gauge(
        "recipe_state_seconds",
        f"Seconds that the latest {LATEST} runs were in each state, together",
        ["state"],
        registry=registry,
    )
    passed = Gauge(
        "recipe_state_runs", "How many of these runs were in it", ["state"], registry=registry
    )
    now = time.time()
    rows = ws.store.runs.page(Wanted(), LATEST)
    for moves in ws.store.runs.run_moves([row.id for row in rows]).values():
        ends = [at for at, _ in moves[1:]] + [now]
        stayed: dict[str, float] = {}
        for (at, state), end in zip(moves, ends, strict=True):
            if state not in FINAL:
                stayed[state] = stayed.get(state, 0.0) + max(0.0, end - at)
        for state, seconds in stayed.items():
            spent.labels(state).inc(seconds)
            passed.labels(state).inc()


def _count_rates(ws: Workspace, registry: CollectorRegistry, rows: Sequence[RunRow]) -> None:
    """What goes over the wires of the machines on which steps run, as their agents saw it last."""
    rate = Gauge(
        "recipe_network_bytes_per_second",
        "What the machines of running steps receive and send",
        ["run", "direction"],
        registry=registry,
    )
    for row in rows[:MEASURED]:
        last = last_samples(ws, row)
        for direction in ("received", "sent"):
            found = [each.get(f"net_{direction}_mb_per_s") for each in last.values()]
            numbers = [each for each in found if isinstance(each, (int, float))]
            if numbers:
                rate.labels(row.id, direction).set(sum(numbers) * 1e6)


def _count_artifacts(ws: Workspace, registry: CollectorRegistry) -> None:
    sizes = Gauge(
        "recipe_output_bytes",
        "Bytes of each output of the last run of a recipe that COMPLETED",
        ["recipe", "output"],
        registry=registry,
    )
    last: dict[str, RunRow] = {}
    for row in ws.store.runs.page(Wanted(states=("COMPLETED",)), LATEST):
        last.setdefault(row.recipe, row)
    for recipe, row in list(last.items())[:MEASURED]:
        for each in list_outputs(ws, row):
            if each["bytes"] is not None:
                sizes.labels(recipe, each["name"]).set(each["bytes"])
