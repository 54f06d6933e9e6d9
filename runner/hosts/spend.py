"""The setting `[hooks] spend`: a program that is asked before a run rents, and that is given what the run cost.  Knows the ledger, no drivers.

It gets one JSON object on its standard input.  `do` is `reserve` before the first rent of a run, and once the run has given everything back `charge`,
or `refund` where no machine came up.  A run that died and goes on asks again: `run` is the key by which the program knows that it has done so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal

from ..errors import Invalid, Problem
from ..storage.ledger import LeaseRow, Spent

PATIENCE: Final = 60.0
"""Seconds that the program has."""


class Spend:
    """The program of one run."""

    def __init__(self, argv: Sequence[str], run: str, workspace: str, driver: str, environ: Mapping[str, str]) -> None:
        self._argv, self._environ = argv, environ
        self._about = {"run": run, "workspace": workspace, "driver": driver}
        self._reserved = False

    async def reserve(self, limit: float | None) -> None:
        """Ask whether the run may spend, and how much at most where that is known, in US dollars.  Raises Invalid where it may not."""
        if why := await self._ask("reserve", {"usd": limit}):
            fix = "ask whoever set `[hooks] spend`; `recipe config` shows where it is set"
            raise Invalid([Problem("limit", f"nothing may be spent: {why}", fix=fix)])
        self._reserved = True

    async def settle(self, rows: Sequence[LeaseRow], costs: Mapping[str, Spent]) -> str:
        """Say what a run that is over cost, in US dollars.  Answers what went wrong; empty when nothing did."""
        if not rows and not self._reserved:
            return ""
        used = [row for row in rows if row.up is not None]
        leases = [
            {"key": row.key, "offer": row.offer.get("id", ""), "usd": costs[row.key].usd, "source": costs[row.key].source}
            for row in rows
            if row.key in costs
        ]
        what: Literal["charge", "refund"] = "charge" if used else "refund"
        return await self._ask(what, {"usd": sum(costs[row.key].usd for row in rows if row.key in costs), "leases": leases})

    async def _ask(self, what: Literal["reserve", "charge", "refund"], more: Mapping[str, object]) -> str:
        """What the program says against it; empty when it ends well."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=self._environ)
        except OSError as error:
            return f"{self._argv[0]} cannot be run: {error.strerror}"
        try:
            async with asyncio.timeout(PATIENCE):
                said, _ = await process.communicate(json.dumps({"do": what, **self._about, **more}).encode() + b"\n")
        except TimeoutError:
            return f"{self._argv[0]} does not answer within {PATIENCE:g} s"
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return "" if process.returncode == 0 else last or f"{self._argv[0]} ends with {process.returncode}"
