"""The server itself: tokens, the workers of its workspace, machines that could be rented, and figures for Prometheus."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from ..errors import CannotRun, Infrastructure, Invalid
from ..hosts.renting import offering
from ..interface import costs, shelves
from ..interface.pairs import filters
from ..interface.views import moment
from ..planning.schedule import word
from ..storage.records.ledger import Ledger, of_user
from ..storage.records.runs import Wanted
from ..storage.workspace import Workspace
from .answers import Refused, plain
from .room import ADMIN, READ, Given, InRoom, Moment, run_of
from .streams import feed_of
from .tokens import Scope, Token

router = APIRouter(tags=["server"])

OPEN = ("QUEUED", "ACTIVE", "PAUSED")
LOOKED_AT = 10_000
"""Open runs that are counted."""


class WorkerView(BaseModel):
    worker: str
    alive: bool
    runs: list[str] = Field(description="The runs that it has.")


class WorkerList(BaseModel):
    workers: list[WorkerView]


class Shelf(BaseModel):
    model_config = ConfigDict(extra="allow")

    driver: str
    failed: str = Field(description="Why it was not asked; empty where it was.")
    ends: str
    left_out: dict[str, int]
    offers: list[dict[str, Any]]


class OfferList(BaseModel):
    drivers: list[Shelf]


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


@router.get("/v1/offers", dependencies=READ, summary="Machines that could be rented now")
def machines(
    room: InRoom,
    driver: Annotated[str, Query(max_length=64, pattern=r"^[a-z][a-z0-9_-]*$")] = "all",
    where: Annotated[
        list[Annotated[str, Query(max_length=100, pattern=r"^[a-z_]+=.+$")]] | None,
        Query(max_length=16),
    ] = None,
) -> OfferList:
    from drivers.base import Need, Wish

    wish = Wish(Need(gpus=1), filters=filters(where or ()))
    found = []
    with room.working() as ws:
        try:
            drivers = offering.priced(ws, driver).drivers
        except CannotRun as error:
            raise Refused(
                404, "not-found", str(error), "GET /v1/offers asks all that do"
            ) from error
        for name, each in drivers.items():
            try:
                found += asyncio.run(offering.shelves({name: (each, [wish])}))
            except (
                Infrastructure,
                Invalid,
            ) as error:  # no key for it, or it has no such filter: the others are shown all the same
                found.append(offering.Shelf(name, wish, failed=plain(str(error), ws.root)))
    return OfferList(drivers=[Shelf.model_validate(shelves.as_json("", shelf)) for shelf in found])


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
    machines = Gauge("recipe_machines", "Machines that are rented", ["driver"], registry=registry)
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        for lease in ledger.living():
            machines.labels(lease.driver).inc()
    Gauge(
        "recipe_month_cost_usd",
        "What machines cost since the first of the month",
        registry=registry,
    ).set(costs.of_month().usd)
    Gauge(
        "recipe_artifact_bytes", "Bytes of the objects that are stored here", registry=registry
    ).set(ws.store.index.stored_bytes())
    Gauge("recipe_streams", "Clients that follow a run", registry=registry).set(streams)
    return registry
