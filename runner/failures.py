"""Kinds of failures. Decisions depend on the kind, and the message is for people."""

from __future__ import annotations

from enum import StrEnum


class LeaseFailure(StrEnum):
    """Reason of a lease's early end, as stored in the ledger."""

    TAKEN = "taken"
    """The order was rejected: the machine or the zone has no capacity left."""
    FAILED = "failed"
    """The machine did not start, or was lost or unusable before a step ran."""
    LACKS = "lacks"
    """The machine has less than offered."""
    DENIED = "denied"
    """The provider rejects the account for all orders."""
    TAKEN_AWAY = "taken-away"
    """The provider preempted a spot machine."""


class StepFailure(StrEnum):
    """Kinds of step failures that affect decisions. `planning.causes` has fixes for others."""

    UNPLACED = "unplaced"
    """No host was available."""
    ERROR = "error"
    """The step could not be started, or its result could not be collected."""
    OOM = "oom"
    """The step ran out of memory."""


class RunFailure(StrEnum):
    """Kinds of run failures without a failed step. Otherwise a run has its failed step's kind."""

    PROVISIONING = "provisioning"
    """No host was available for a step."""
    POISON = "poison"
    """The run's workers died repeatedly before a step finished."""
    POINTS = "points"
    """The program of `[hooks] spend` refused the cost."""
    WORKER_GONE = "worker-gone"
    """The worker died, and another run took over. Its jobs may still be running."""
    INVALID = "invalid"
    """The recipe or inputs are invalid, or a step cannot run here."""
    INFRASTRUCTURE = "infrastructure"
    """A driver, a host, a disk or a store failed."""


def of_step(kind: str) -> str:
    """Return the kind of failure of a run with a failed step."""
    return RunFailure.PROVISIONING if kind == StepFailure.UNPLACED else kind


class DeliveryFailure(StrEnum):
    """Why a delivery to a webhook endpoint or a program failed."""

    GONE = "gone"
    """The endpoint no longer exists. Nothing more is sent."""
    REFUSED = "refused"
    """The endpoint or program rejected the message."""
    SERVER_ERROR = "server-error"
    """The endpoint failed or is overloaded."""
    UNREACHABLE = "unreachable"
    """No response."""


def of_answer(status: int) -> DeliveryFailure:
    """Return the kind of failure of a delivery by its HTTP status, 0 without a response."""
    if status == 410:
        return DeliveryFailure.GONE
    if status == 429 or status >= 500:
        return DeliveryFailure.SERVER_ERROR
    return DeliveryFailure.REFUSED if status else DeliveryFailure.UNREACHABLE
