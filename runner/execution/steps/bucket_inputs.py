"""Inputs from buckets on hosts with disks of their own: they go there directly where that can be, instead of through this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...digest import of_value
from ...hosts.place.place import Place
from ...hosts.place.staging import SMALL, AttemptDirectory
from ...hosts.renting.several import driver_names
from ...logs import Log
from ...planning.plan import Node
from ...planning.step import Source
from ...secrets import Secret
from ...storage.sources import copy_of
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .commit import GroupCommit

if TYPE_CHECKING:
    from ...storage.signed import Signed

_log = Log("loop")
LEARNED = 64
"""Of signed addresses at most so many are looked for in all that is shown: each makes every line of a log dearer, and no step is given any."""


class BucketInputs:
    """Those of one run, on hosts of the driver called `driver`."""

    def __init__(self, ws: Workspace, survey: Survey, commits: GroupCommit, driver: str) -> None:
        self._ws, self._survey, self._commits = ws, survey, commits
        self._secret = all(
            ws.config.driver(name).get("secrets", "send") != "deny"
            for name in driver_names(ws.config, driver)
        )
        self._turns: dict[
            tuple[str, str], asyncio.Lock
        ] = {}  # by host and input: what two steps take goes there once
        self._passed: set[tuple[str, str]] = (
            set()
        )  # host and address: that goes through this machine
        self._learned = 0

    async def bring(self, node: Node, attempt: AttemptDirectory, place: Place) -> None:
        """Let a host have the inputs of a step that come from buckets, as far as it can.  Raises what `HostStore.pull` does."""
        for taken in node.takes:
            if taken.in_bucket and place.folder.pulls:
                identity = str(self._survey.facts.takes[taken.lookup_key])
                note = (
                    self._ws.home
                    / "cache"
                    / f"content-{of_value('content', [taken.address, identity, *taken.only])[:32]}"
                )
                async with self._turns.setdefault((place.name, note.name), asyncio.Lock()):
                    if content := await self._content(place, taken, identity, note):
                        attempt.objects[taken.name] = content

    async def _content(self, place: Place, taken: Source, identity: str, note: Path) -> str:
        """What an input is that the host has now; empty for one that is to go through this machine."""
        from ...hosts.transfer.pulling import CannotPull

        known, size = self._known(taken, identity, note)
        if known:
            if not place.folder.holds(known):
                await place.folder.look_for([known])
            if place.folder.holds(known):
                return known
        if (place.name, taken.address) in self._passed or 0 <= size <= SMALL:
            return ""
        source = await asyncio.to_thread(self._listed, taken, identity)
        if source is None or source.size <= SMALL:
            return ""
        try:
            content = await place.folder.pull(source, known, self._learn)
        except CannotPull as error:
            self._passed.add((place.name, taken.address))
            self._commits.say(
                f"copying {taken.address} to {place.name} through this machine: {error}"
            )
            return ""
        self._ws.write(note, json.dumps([content, source.size]).encode())
        _log.info("%s has %s from its bucket: %d bytes", place.name, taken.address, source.size)
        return content

    def _listed(self, taken: Source, identity: str) -> Signed | None:
        from ...storage.signed import sign_objects

        return sign_objects(self._ws, taken.address, identity, taken.only, secret=self._secret)

    def _known(self, taken: Source, identity: str, note: Path) -> tuple[str, int]:
        """What an input was when it was had last, and its bytes; empty, and -1, where that is not known."""
        copy = copy_of(self._ws, taken.address, identity, taken.only)
        try:
            if copy.exists():
                os.utime(copy.parent)
                return self._ws.cache.content_of(
                    str(copy)
                ) or "", copy.stat().st_size if copy.is_file() else -1
            content, size = json.loads(note.read_bytes())
            os.utime(note)  # `gc` goes by when it was last wanted
            return str(content), int(size)
        except (OSError, ValueError, TypeError):
            return "", -1

    def _learn(self, secrets: Sequence[Secret]) -> None:
        """Show none of what opens them."""
        some = secrets[: max(0, LEARNED - self._learned)]
        self._learned += len(some)
        if some:
            self._commits.masker.learn(some)
