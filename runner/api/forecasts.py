"""Forecast of a run: its steps, duration and cost, as JSON values. Read-only.

`POST /v1/plan` and `forecast` in Python return these values. Texts may contain local paths.
Callers that serve other users remove these paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..hosts.renting.offering import Shelf, rank_offers
from ..language.recipe import Recipe
from ..storage.workspace import Workspace
from ..survey.survey import Survey
from . import starting
from .plans import StepForecast, restored_bytes, step_plans
from .starting import Start
from .values import Facts

if TYPE_CHECKING:
    from ..advice.estimates import StepEstimate


class ForecastRequest(NamedTuple):
    """A run to forecast, with its driver and limits."""

    recipe: Recipe
    start: Start
    driver: str = "local"
    limits: Mapping[str, float] = {}
    """`time` in seconds, `cost` in US dollars."""

    @property
    def command(self) -> str | None:
        """The equivalent shell command, or None if no command line can express the request."""
        if self.limits.get("time"):
            return None
        return starting.command_line(self.recipe, self.start, self.driver, self.limits.get("cost"))


def forecast_run(
    ws: Workspace, found: Survey, asked: ForecastRequest, shelves: Mapping[str, Sequence[Shelf]]
) -> Facts:
    """Return the forecast of a surveyed run.

    `shelves` maps each step on a rented machine to the offers of the run's drivers.
    """
    steps = [_step(each) for each in step_plans(ws, found)]
    machines = [_machine(step, each) for step, each in shelves.items()]
    goes_to: dict[str, None] = {}
    for each in shelves.values():
        goes_to |= dict.fromkeys(shelf.driver for shelf in each)
    usd_of_machines = _sum([machine["usd"] for machine in machines])
    seconds = _sum([step["seconds"] for step in steps])
    usd = _sum([step["usd"] for step in steps])
    return {
        "recipe": found.plan.recipe,
        "instances": asked.start.instances,
        "command": asked.command,
        "driver": asked.driver,
        "machines": machines,
        "goes_to": list(goes_to),
        "usd_of_machines": usd_of_machines,
        "inputs": dict(found.plan.inputs),
        "steps": steps,
        "seconds": seconds,
        "usd": usd,
        "bytes": restored_bytes(ws, found),
    }


def _machine(step: str, shelves: Sequence[Shelf]) -> Facts:
    """Return the best GPU offer for a step, or the reason if no offer matches."""
    ranked = rank_offers(shelves)
    if not ranked:
        shelf = shelves[0]
        return {
            "step": step,
            "driver": shelf.driver,
            **dict.fromkeys(("offer", "gpu", "gpus", "region", "market", "usd_an_hour")),
            "hours": shelf.wish.hours,
            "usd": None,
            "failed": shelf.failed or f"{shelf.driver} offers no machine that does",
        }
    shelf, offer = ranked[0]
    return {
        "step": step,
        "driver": shelf.driver,
        "offer": offer.id,
        "gpu": offer.resources.gpu,
        "gpus": offer.resources.gpus,
        "region": offer.region,
        "market": offer.market,
        "usd_an_hour": offer.price,
        "hours": shelf.wish.hours,
        "usd": shelf.total_of(offer).usd,
        "failed": "",
    }


def _step(step: StepForecast) -> Facts:
    memory = _memory(step.estimate) if step.estimate is not None else None
    return {
        "id": step.id,
        "answer": step.answer,
        "reasons": list(step.reasons),
        "needs": list(step.needs),
        "seconds": step.seconds,
        "usd": step.usd,
        "memory": memory,
    }


def _memory(estimate: StepEstimate) -> Facts:
    needed = estimate.found.bytes if estimate.found else None
    return {
        "bytes": needed,
        "usable": estimate.usable,
        "gpu": estimate.gpu,
        "fits": estimate.verdict,
        "words": estimate.memory.removeprefix("memory: "),
    }


def _sum(parts: Sequence[float | None]) -> float | None:
    """Return the sum of the parts, or None if one of them is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
