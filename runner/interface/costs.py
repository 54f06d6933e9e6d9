"""Format the costs of rented machines as a table or JSON."""

from __future__ import annotations

import json

from ..api.costs import Costs
from .tables import align


def as_text(costs: Costs) -> list[str]:
    """Format the costs as a table with the total."""
    if not costs.leases:
        return ["no machines were rented"]
    rows = [
        (
            cost["driver"],
            cost["key"],
            cost["run"],
            cost["offer"],
            cost["state"],
            f"{cost['hours']:.2f}",
            f"{cost['usd']:.2f}",
            cost["source"],
        )
        for cost in costs.leases
    ]
    table = align(
        [("DRIVER", "LEASE", "RUN", "OFFER", "STATE", "HOURS", "USD", "BY"), *rows], right={5, 6}
    )
    return [*table, f"${costs.usd:.2f}"]


def as_json(costs: Costs) -> str:
    return json.dumps({"usd": costs.usd, "leases": costs.leases}, indent=2)
