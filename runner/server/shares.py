"""Routes for links to one run, with read-only tokens that expire."""

from __future__ import annotations

import time
from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.values import moment
from .answers import Refused
from .room import OPERATE_RUN, InRoom, RequestBody, Whole, run_of
from .tokens import Token

router = APIRouter(prefix="/v1/runs/{run}/shares", tags=["runs"])

SHARED: Final = "shared"
"""Name of tokens for links."""
MOST: Final = 20
"""Maximum number of active links per run."""
LONGEST: Final = 90
"""Maximum lifetime of a link in days."""
A_DAY: Final = 86400


class NewShare(RequestBody):
    days: Whole = Field(default=7, ge=1, le=LONGEST, description="Lifetime of the link in days.")


class ShareView(BaseModel):
    id: str
    created: str
    expires: str


class ShareList(BaseModel):
    shares: list[ShareView]


class MadeShare(ShareView):
    token: str = Field(
        description="The secret token, shown only once. Use it in the link `…/#token=TOKEN&run=RUN`. The part after # is not sent to a server."
    )


def _active_links(room: InRoom, run: str) -> list[Token]:
    """Return the active share links to a run."""
    links = []
    for token in room.tokens.all():
        is_link = (token.name, token.scope, token.run) == (SHARED, "read", run)
        if is_link and not token.is_expired:
            links.append(token)
    return links


def _link_facts(token: Token) -> dict[str, str]:
    return {
        "id": token.id,
        "created": str(moment(token.created)),
        "expires": str(moment(token.expires)),
    }


@router.post(
    "",
    status_code=201,
    dependencies=OPERATE_RUN,
    summary="Create a read-only link to a run",
)
def share(run: str, room: InRoom, asked: NewShare) -> MadeShare:
    with room.borrow_workspace() as ws:
        run_of(ws, run)
    _forget_expired(room)
    if len(_active_links(room, run)) >= MOST:
        words = f"this run already has {MOST} active links"
        raise Refused(409, "too-many-shares", words, "revoke one of the links first")
    token, secret = room.tokens.create(
        "read", SHARED, run, expires=time.time() + asked.days * A_DAY
    )
    return MadeShare(**_link_facts(token), token=secret)


def _forget_expired(room: InRoom) -> None:
    for token in room.tokens.all():
        if token.name == SHARED and token.is_expired:
            room.tokens.remove(token.id)


@router.get("", dependencies=OPERATE_RUN, summary="List the active links to a run")
def shares(run: str, room: InRoom) -> ShareList:
    return ShareList(shares=[ShareView(**_link_facts(token)) for token in _active_links(room, run)])


@router.delete("/{id}", status_code=204, dependencies=OPERATE_RUN, summary="Revoke a link")
def end(run: str, id: str, room: InRoom) -> None:
    if not any(token.id == id for token in _active_links(room, run)) or not room.tokens.remove(id):
        raise Refused(404, "not-found", "unknown link", f"GET /v1/runs/{run}/shares")
