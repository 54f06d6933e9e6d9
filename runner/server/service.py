"""The server itself: tokens, the workers of its workspace, machines that could be rented, and figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, Field

from ..api.artifacts import list_outputs
from ..api.metrics import last_samples
from ..api.values import LAST, moment
from ..errors import CannotRun
from ..hosts.renting import offering
from ..interface import costs, shelves
from ..interface.pairs import filters
from ..planning.schedule import word
from ..storage.records.ledger import LeaseRow, Ledger, of_user
from ..storage.records.runs import FINAL, RunRow, Wanted
from ..storage.workspace import Workspace
from .answers import Refused
from .market import InMarket
from .recipes import OfferList, OfferShelf
from .room import ADMIN, READ, Given, InRoom, Moment, run_of
from .streams import feed_of
from .tokens import Scope, Token

router = APIRouter(tags=["server"])

OPEN = ("QUEUED", "ACTIVE", "PAUSED")
LOOKED_AT = 10_000
"""Open runs that are counted."""
LATEST = 50
"""Runs whose states are looked at for how long they took."""
MEASURED = 20
"""Runs whose machines, and recipes whose outputs are looked at for each answer."""


class WorkerView(BaseModel):
    worker: str
    alive: bool
    runs: list[str] = Field(description="The runs that it has.")


class WorkerList(BaseModel):
    workers: list[WorkerView]


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


@router.get(
    "/v1/workers",
    dependencies=READ,
    summary="The workers that have a run; one that waits is not known",
)
def workers(room: InRoom) -> WorkerList:
    with room.reading() as ws:
        by_name: dict[str, list[str]] = {}
        for row in ws.store.runs.page(Wanted(states=OPEN), LOOKED_AT):
            if row.claim:
                by_name.setdefault(row.claim, []).append(row.id)
        return WorkerList(
            workers=[
                WorkerView(worker=name, alive=any(map(ws.store.runs.live, runs)), runs=runs)
                for name, runs in by_name.items()
            ]
        )


class LeaseView(BaseModel):
    """A machine that is rented, or about to be."""

    key: str
    provider: str
    run: str = Field(description="The run that has it.")
    state: str = Field(description="ASKED, COMING, UP or RELEASING.")
    gpus: int
    gpu: str
    since: str
    until: str | None = Field(description="When it ends, whatever happens.")
    usd_an_hour: float
    usd: float = Field(description="What it has cost so far.")


class LeaseList(BaseModel):
    leases: list[LeaseView]
    usd_an_hour: float = Field(description="Of all of them.")


@router.get("/v1/leases", dependencies=READ, summary="The machines that are rented, of all runs")
def leases(room: InRoom) -> LeaseList:
    with (
        room.reading() as ws,
        Ledger.open(of_user(ws.environ), read_only=True) as ledger,
    ):
        rows = [row for row in ledger.living() if row.workspace == str(ws.root)]
        spent = ledger.costs([row.key for row in rows])
    found = [
        LeaseView(
            key=row.key,
            provider=row.driver,
            run=row.run,
            state=row.state,
            gpus=_gpu(row)[0],
            gpu=_gpu(row)[1],
            since=str(moment(row.up or row.asked)),
            until=moment(row.until) if row.until < LAST else None,
            usd_an_hour=row.price,
            usd=spent[row.key].usd if row.key in spent else 0.0,
        )
        for row in rows
    ]
    return LeaseList(leases=found, usd_an_hour=sum(each.usd_an_hour for each in found))


@router.get(
    "/v1/offers",
    dependencies=READ,
    summary="Machines that could be rented, the newest answers of the last minute",
)
def machines(
    room: InRoom,
    market: InMarket,
    driver: Annotated[str, Query(max_length=64, pattern=r"^[a-z][a-z0-9_-]*$")] = "all",
    where: Annotated[
        list[Annotated[str, Query(max_length=100, pattern=r"^[a-z_]+=.+$")]] | None,
        Query(max_length=16),
    ] = None,
    gpus: Annotated[int, Query(ge=0, le=1024)] = 1,
) -> OfferList:
    from drivers.base import Need, Wish

    wish = Wish(Need(gpus=gpus), filters=filters(where or ()))
    with room.working() as ws:
        try:
            names = [*offering.priced(ws, driver).drivers]
        except CannotRun as error:
            raise Refused(
                404, "not-found", str(error), "GET /v1/offers asks all that do"
            ) from error
    found = market.ask(room, [(name, wish) for name in names])
    return OfferList(
        drivers=[OfferShelf.model_validate(each) for each in shelves.ranked("", found)]
    )


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
        raise Refused(404, "not-found", "there is no such token", "GET /v1/tokens lists them")


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
    tallies = runs.tallies([row.id for row in rows if row.state == "ACTIVE"])
    count = Gauge("recipe_open_runs", "Runs that are not over", ["state"], registry=registry)
    oldest: dict[str, float] = {}
    for row in rows:
        live = row.state == "ACTIVE" and runs.live(row.id)
        name = word(
            row.state,
            failure=row.failure,
            steps=[*tallies.get(row.id, ()), ("WAITING", "")],
            leases=(),
            claimed=live,
        )
        count.labels(name).inc()
        oldest[name] = max(oldest.get(name, 0.0), time.time() - max(row.created, row.due or 0.0))
    age = Gauge(
        "recipe_oldest_run_seconds",
        "How long the oldest of them has been due",
        ["state"],
        registry=registry,
    )
    for name, seconds in oldest.items():
        age.labels(name).set(seconds)
    Gauge("recipe_workers", "Workers that have a run", registry=registry).set(
        len({row.claim for row in rows if row.claim})
    )
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


def _count_machines(ws: Workspace, registry: CollectorRegistry) -> None:
    machines = Gauge("recipe_machines", "Machines that are rented", ["driver"], registry=registry)
    prices = Gauge(
        "recipe_machines_usd_an_hour",
        "What these cost an hour",
        ["driver", "gpu", "state"],
        registry=registry,
    )
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        for lease in ledger.living():
            machines.labels(lease.driver).inc()
            prices.labels(lease.driver, _gpu(lease)[1], lease.state).inc(lease.price)


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


def _gpu(lease: LeaseRow) -> tuple[int, str]:
    """How many GPUs a lease has, and which."""
    have = lease.offer.get("resources")
    have = have if isinstance(have, dict) else {}
    count, name = have.get("gpus"), have.get("gpu")
    return count if isinstance(count, int) else 0, str(name or "")
