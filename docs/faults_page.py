"""Write the faults of fake providers as Markdown, from drivers/fakes/faults.py."""

from __future__ import annotations

from typing import Final

from drivers.fakes.faults import AMOUNTS, CHANCES

BEGIN: Final = "<!-- faults:begin -->"
END: Final = "<!-- faults:end -->"


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    before, _, rest = text.partition(BEGIN)
    lines = ["| fault | value | effect |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {kind} | {what} |"
        for kind, faults in (("chance", CHANCES), ("amount", AMOUNTS))
        for name, what in faults.items()
    ]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{rest.partition(END)[2]}"])
