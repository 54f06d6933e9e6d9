"""Routes for workers, the queue, leases, offers, stores, drivers, tokens and Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, Field, TypeAdapter

from drivers.base import Need, Wish

from ..api import costs
from ..api.artifacts import list_outputs
from ..api.drivers import list_drivers
from ..api.leases import end_lease, list_leases
from ..api.metrics import last_samples
from ..api.queue import LOOKED_AT, OPEN, list_queue, list_workers
from ..api.stores import list_stores, measure_store
from ..api.values import moment
from ..errors import CannotRun, NotFound
from ..hosts.renting import offering
from ..hosts.renting.any_driver import driver_names
from ..interface import shelves
from ..interface.pairs import filters
from ..storage.records.ledger import Ledger, of_user
from ..storage.records.runs import FINAL, RunFilter, RunRow
from ..storage.workspace import Workspace
from .answers import Refused, hide_local_paths, hide_paths_in_value
from .market import InMarket
from .recipes import OfferList, OfferShelf, require_driver
from .room import ADMIN, OPERATE, READ, InRoom, Moment, Nothing, RequestBody, run_of
from .runs import WaitView
from .streams import feed_of
from .tokens import Scope, Token

router = APIRouter(tags=["server"])

LATEST = 50
"""Number of latest runs whose time in each state is measured."""
MEASURED = 20
"""Maximum number of runs whose machines are measured, and of recipes whose outputs are measured."""


class WorkerView(BaseModel):
    """A process that executes runs, one at a time."""

    worker: str = Field(description="Name of the worker, HOST process PID.")
    alive: bool
    idle: bool = Field(description="True if the worker is alive and has no run.")
    takes_runs: bool = Field(description="False for `recipe run`, which executes only its own run.")
    capacity: int = Field(description="Number of concurrent runs.")
    driver: str = Field(
        description="The only driver whose runs the worker claims. Empty: any driver."
    )
    labels: dict[str, str]
    at_most: dict[str, int] = Field(
        description="Maximum number of concurrent runs, over all workers, with the same `user`, `recipe` or `driver`."
    )
    any_workspace: bool = Field(
        description="True if the worker claims runs of all workspaces with its shared store."
    )
    since: str | None
    heard: str | None = Field(
        description="Time of the last heartbeat. Heartbeats are sent every 15 seconds."
    )
    runs: list[str] = Field(description="Claimed runs of the worker, also of a dead one.")


class WorkerList(BaseModel):
    workers: list[WorkerView]


class QueuedRun(BaseModel):
    """A run that waits for a worker."""

    run: str
    recipe: str
    user: str
    position: int = Field(description="Position in the workspace's queue.")
    priority: int
    due: str | None = Field(
        description="Time from which workers may claim the run. Null for runs of `recipe run`, which workers do not claim."
    )
    waits: WaitView


class Queue(BaseModel):
    runs: list[QueuedRun]


class NewToken(RequestBody):
    scope: Scope
    name: str = Field(default="", max_length=100, pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]*)?$")
    run: str = Field(default="", max_length=40, description="Restrict the token to this run.")
    expires: Moment | None = Field(
        default=None, description="Expiry time in RFC 3339. Default: never."
    )


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
    token: str = Field(description="The secret token, shown only once.")


@router.get("/v1/workers", dependencies=READ, summary="List the workers, including idle ones")
def workers(room: InRoom) -> WorkerList:
    with room.borrow_workspace() as ws:
        return WorkerList.model_validate({"workers": list_workers(ws)})


@router.get(
    "/v1/queue", dependencies=READ, summary="List the queued runs, next first, with reasons"
)
def queue(room: InRoom) -> Queue:
    with room.borrow_workspace() as ws:
        found = [
            {**each, "waits": hide_paths_in_value(each["waits"], ws.root)}
            for each in list_queue(ws)
        ]
    return Queue.model_validate({"runs": found})


class LeaseView(BaseModel):
    """A rented or requested machine, or an unpaid slot."""

    key: str
    provider: str
    run: str = Field(description="The current or last run on the machine, or empty.")
    here: bool = Field(description="True if the machine was rented from this workspace.")
    state: str = Field(description="ASKED, COMING, UP or RELEASING.")
    gpus: int
    gpu: str
    since: str
    until: str | None = Field(description="Latest end of the rental period.")
    usd_an_hour: float
    usd: float = Field(description="Cost so far in US dollars.")
    used: str = Field(
        description="at-work: used by its run; kept: used by a stack; releasing: being released. Unused machines: the run is"
        " over, dead, never (started) or unknown, or the machine is overdue."
    )
    why: str = Field(description="Explanation of `used`.")
    stack: str = Field(description="The stack of the machine, or empty.")


class LeaseList(BaseModel):
    leases: list[LeaseView]
    usd_an_hour: float = Field(description="Total hourly price of all rented machines.")


class EndedLease(BaseModel):
    key: str
    ended: bool = Field(description="True if the provider confirmed the termination.")
    said: str = Field(description="Why the machine still exists, or empty.")


@router.get(
    "/v1/leases",
    dependencies=READ,
    summary="List rented machines of all the user's runs and workspaces",
)
def leases(room: InRoom) -> LeaseList:
    found = hide_paths_in_value(list_leases(room.root, room.environ), room.root)
    listed = TypeAdapter(list[LeaseView]).validate_python(found)
    return LeaseList(leases=listed, usd_an_hour=sum(each.usd_an_hour for each in listed))


@router.post(
    "/v1/leases/{key}/end",
    dependencies=OPERATE,
    summary="Terminate a machine that no run uses",
)
def end(key: str, room: InRoom, _body: Nothing | None = None) -> EndedLease:
    try:
        said = end_lease(room.root, room.environ, key)
    except NotFound as error:
        raise Refused(
            404, "not-found", str(error), "list the machines with GET /v1/leases"
        ) from error
    except CannotRun as error:
        raise Refused(409, "in-use", str(error), error.fix) from error
    return EndedLease(key=key, ended=not said, said=hide_local_paths(said, room.root))


@router.get(
    "/v1/offers",
    dependencies=READ,
    summary="List machine offers, at most one minute old",
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
    wish = Wish(Need(gpus=gpus), filters=filters(where or ()))
    with room.open_workspace() as ws:
        try:
            drivers = ",".join(driver_names(ws.config, driver))
            for name in drivers.split(","):
                if name != "all":
                    require_driver(name)
            names = [*offering.priced_drivers(ws, drivers).drivers]
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
    """Disk usage of one category."""

    name: str
    bytes: int = Field(description="Disk usage in bytes.")
    files: int
    whole: bool = Field(
        description="False if counting ran out of time, and the real numbers are higher."
    )


class SharedStore(BaseModel):
    name: str
    url: str
    default: bool = Field(description="True if `store` in recipe.toml names this store.")
    checkpoints: bool = Field(description="True if the store also keeps checkpoints.")


class StoreList(BaseModel):
    parts: list[KeptPart] = Field(
        description="Disk usage of the workspace by category, largest first."
    )
    free: int = Field(description="Free disk space in bytes.")
    total: int
    shared: list[SharedStore]


@router.get(
    "/v1/stores",
    dependencies=READ,
    summary="Show the workspace's disk usage and the shared stores",
)
def stores(room: InRoom) -> StoreList:
    with room.borrow_workspace() as ws:
        return StoreList.model_validate(hide_paths_in_value(list_stores(ws), ws.root))


class StoreSize(BaseModel):
    bytes: int
    files: int
    whole: bool = Field(
        description="False if listing ran out of time, and the real numbers are higher."
    )


@router.get(
    "/v1/stores/{name}/size",
    dependencies=READ,
    summary="Measure the size of a shared store, for at most 10 seconds",
)
def store_size(name: str, room: InRoom) -> StoreSize:
    with room.borrow_workspace() as ws:
        return StoreSize.model_validate(measure_store(ws, name))


class DriverView(BaseModel):
    """A driver for runs."""

    name: str
    configured: bool = Field(
        description="True if recipe.toml or the user's settings contain [drivers.NAME]."
    )
    priced: bool = Field(description="True if machines of the driver cost money.")
    lacks: str = Field(
        description="Missing requirement of the driver, or empty. The provider is not contacted."
    )


class DriverList(BaseModel):
    drivers: list[DriverView]


@router.get(
    "/v1/drivers",
    dependencies=READ,
    summary="List the drivers, configured ones first, with missing requirements",
)
def drivers(room: InRoom) -> DriverList:
    with room.borrow_workspace() as ws:
        return DriverList.model_validate(
            {"drivers": hide_paths_in_value(list_drivers(ws), ws.root)}
        )


@router.get("/v1/tokens", dependencies=ADMIN, summary="List the tokens without their secrets")
def tokens(room: InRoom) -> TokenList:
    return TokenList(tokens=[_token_view(token) for token in room.tokens.all()])


@router.post(
    "/v1/tokens",
    status_code=201,
    dependencies=ADMIN,
    summary="Create a token for all runs or one run",
)
def make(asked: NewToken, room: InRoom) -> MadeToken:
    if asked.run:
        with room.borrow_workspace() as ws:
            run_of(ws, asked.run)
    expires = asked.expires.timestamp() if asked.expires is not None else None
    token, secret = room.tokens.create(asked.scope, asked.name, asked.run, expires)
    return MadeToken(**_token_view(token).model_dump(), token=secret)


@router.delete("/v1/tokens/{id}", status_code=204, dependencies=ADMIN, summary="Delete a token")
def remove(id: str, room: InRoom) -> None:
    if not room.tokens.remove(id):
        raise Refused(404, "not-found", "unknown token", "list the tokens with GET /v1/tokens")


def _token_view(token: Token) -> TokenView:
    times = {"created": moment(token.created), "expires": moment(token.expires)}
    return TokenView.model_validate({**token._asdict(), **times})


@router.get(
    "/metrics", dependencies=READ, summary="Show metrics for Prometheus", response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)  # fmt: skip
def figures(room: InRoom, request: Request) -> Response:
    with room.borrow_workspace() as ws:
        return Response(
            generate_latest(collect_metrics(ws, feed_of(request).streams)),
            media_type="text/plain; version=0.0.4",
        )


def collect_metrics(ws: Workspace, streams: int) -> CollectorRegistry:
    """Return the current values of all Prometheus metrics."""
    registry, runs = CollectorRegistry(), ws.store.runs
    rows = runs.page(RunFilter(states=OPEN), LOOKED_AT)
    count = Gauge("recipe_open_runs", "Unfinished runs", ["state"], registry=registry)
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
        "Seconds since the oldest unfinished run was due",
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
        "Cost of machines since the first of the month",
        registry=registry,
    ).set(costs.of_month().usd)
    Gauge("recipe_artifact_bytes", "Size of all stored objects in bytes", registry=registry).set(
        ws.store.index.stored_bytes()
    )
    _count_artifacts(ws, registry)
    Gauge("recipe_streams", "Open streams", registry=registry).set(streams)
    return registry


def _count_workers(ws: Workspace, registry: CollectorRegistry) -> None:
    found = [each for each in list_workers(ws) if each["alive"]]
    for name, words, number in (
        ("recipe_workers", "Live workers", len(found)),
        (
            "recipe_idle_workers",
            "Live workers without a run",
            sum(bool(each["idle"]) for each in found),
        ),
    ):
        Gauge(name, words, registry=registry).set(number)


def _count_machines(ws: Workspace, registry: CollectorRegistry) -> None:
    machines = Gauge("recipe_machines", "Rented machines", ["driver"], registry=registry)
    prices = Gauge(
        "recipe_machines_usd_an_hour",
        "Price of rented machines in US dollars per hour",
        ["driver", "gpu", "state"],
        registry=registry,
    )
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        for lease in ledger.living_leases():
            machines.labels(lease.driver).inc()
            _, model = lease.gpus
            prices.labels(lease.driver, model, lease.state).inc(lease.price)


def _count_seconds(ws: Workspace, registry: CollectorRegistry) -> None:
    """Measure the time that the latest runs spent in each state."""
    spent = Gauge(
        "recipe_state_seconds",
        f"Total seconds of the latest {LATEST} runs in each state",
        ["state"],
        registry=registry,
    )
    passed = Gauge(
        "recipe_state_runs",
        f"Number of the latest {LATEST} runs that were in each state",
        ["state"],
        registry=registry,
    )
    now = time.time()
    rows = ws.store.runs.page(RunFilter(), LATEST)
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
    """Measure the network rates of the machines of running steps, from the last agent samples."""
    rate = Gauge(
        "recipe_network_bytes_per_second",
        "Network traffic of the machines of running steps",
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
        "Size in bytes of each output of the last COMPLETED run of a recipe",
        ["recipe", "output"],
        registry=registry,
    )
    last: dict[str, RunRow] = {}
    for row in ws.store.runs.page(RunFilter(states=("COMPLETED",)), LATEST):
        last.setdefault(row.recipe, row)
    for recipe, row in list(last.items())[:MEASURED]:
        for each in list_outputs(ws, row):
            if each["bytes"] is not None:
                sizes.labels(recipe, each["name"]).set(each["bytes"])
