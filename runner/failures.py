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


class StepFailure(StrEnum):
    """Kinds of a step's failure that decide more than the words people read; `planning.causes` has remedies for others."""

    UNPLACED = "unplaced"
    """No host could be had for it."""
    ERROR = "error"
    """It could not be started, or its result could not be taken."""
    OOM = "oom"
    """It ran out of memory."""


class RunFailure(StrEnum):
    """Kinds of a run's failure that are no step's.  A run that failed with a step has the kind of that step."""

    PROVISIONING = "provisioning"
    """No host could be had for a step."""
    POISON = "poison"
    """Its workers died again and again before a step ended."""
    POINTS = "points"
    """The program of `[hooks] spend` gave nothing."""
    WORKER_GONE = "worker-gone"
    """Its worker was gone, and another run took its place: what it began may still run."""
    INVALID = "invalid"
    """Its recipe or inputs are wrong, or a step cannot run here."""
    INFRASTRUCTURE = "infrastructure"
    """A driver, a host, a disk or a store failed."""


def of_step(kind: str) -> str:
    """Return the kind of failure of a run whose step failed in this way."""
    return RunFailure.PROVISIONING if kind == StepFailure.UNPLACED else kind


class DeliveryFailure(StrEnum):
    """Why a delivery to a webhook endpoint or a program failed."""

    GONE = "gone"
    """The endpoint says that it is gone for good: nothing more is sent to it."""
    REFUSED = "refused"
    """The endpoint, or the program, does not take the message."""
    SERVER_ERROR = "server-error"
    """The endpoint fails, or has too much to do."""
    UNREACHABLE = "unreachable"
    """No answer came."""


def of_answer(status: int) -> DeliveryFailure:
    """Return the kind of failure of a delivery with this HTTP status, which is 0 if no answer came."""
    if status == 410:
        return DeliveryFailure.GONE
    if status == 429 or status >= 500:
        return DeliveryFailure.SERVER_ERROR
    return DeliveryFailure.REFUSED if status else DeliveryFailure.UNREACHABLE
