"""What the caller's own token may do."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.values import moment
from .room import READ_ANY, Caller
from .tokens import Scope

router = APIRouter(tags=["server"])


class Me(BaseModel):
    """The token of the request."""

    name: str
    scope: Scope
    run: str = Field(description="The one run that it opens; empty: all.")
    expires: str | None


@router.get("/v1/me", dependencies=READ_ANY, summary="What the token of the request may do")
def me(caller: Caller) -> Me:
    return Me(name=caller.name, scope=caller.scope, run=caller.run, expires=moment(caller.expires))
