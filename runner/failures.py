"""The kinds of failure.  Decisions are made by kind, and the words beside it are for people."""

from __future__ import annotations

from enum import StrEnum


class LeaseFailure(StrEnum):
    """Why a lease ended before its time, as the ledger stores it."""

    TAKEN = "taken"
    """The order was refused: another has the machine, or the zone has none left."""
    FAILED = "failed"
    """The machine did not come up, or was gone or of no use before a step ran there."""
    LACKS = "lacks"
    """The machine has less than was sold."""
    DENIED = "denied"
    """The provider refuses the account, whatever is ordered."""
    TAKEN_AWAY = "taken-away"
    """The provider preempted a spot machine."""
