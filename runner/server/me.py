"""Route for the permissions of the caller's token."""

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
    run: str = Field(description="The only run that the token gives access to. Empty: all runs.")
    expires: str | None


@router.get("/v1/me", dependencies=READ_ANY, summary="Show the permissions of the request's token")
def me(caller: Caller) -> Me:
    return Me(name=caller.name, scope=caller.scope, run=caller.run, expires=moment(caller.expires))
