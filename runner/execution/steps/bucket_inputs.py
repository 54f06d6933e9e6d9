"""Bucket inputs that hosts with their own disks download directly, without this machine."""

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
from ...hosts.renting.any_driver import denying_drivers
from ...logs import Log
from ...planning.plan import Node
from ...planning.step import Source
from ...secrets import Secret
from ...storage.sources import cache_path
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .commit import GroupCommit

if TYPE_CHECKING:
    from ...storage.signed import SignedObjects

_log = Log("loop")
LEARNED = 64
"""Maximum number of signed URLs to mask in output.

Each URL slows the masking of every log line, and no step receives any.
"""


class BucketInputs:
    """Bucket inputs of a run that hosts of the driver `driver` download directly."""

    def __init__(self, ws: Workspace, survey: Survey, commits: GroupCommit, driver: str) -> None:
        self._ws, self._survey, self._commits = ws, survey, commits
        self._secret = not denying_drivers(ws.config, driver)
        self._turns: dict[
            tuple[str, str], asyncio.Lock
        ] = {}  # by host and input, so that each input is downloaded once
        self._passed: set[tuple[str, str]] = (
            set()
        )  # host and address of inputs copied through this machine
        self._learned = 0

    async def bring(self, node: Node, attempt: AttemptDirectory, place: Place) -> None:
        """Let a host download the bucket inputs of a step directly, if possible.

        Raises the errors of `HostStore.pull`.
        """
        for taken in node.takes:
            if taken.in_bucket and place.folder.can_pull:
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
        """Return the digest of an input that the host has stored, downloading it if possible.

        Empty if the input has to be copied through this machine.
        """
        from ...hosts.transfer.pulling import CannotPull

        known, size = self._last_content(taken, identity, note)
        if known:
            if not place.folder.holds(known):
                await place.folder.look_up([known])
            if place.folder.holds(known):
                return known
        if (place.name, taken.address) in self._passed or 0 <= size <= SMALL:
            return ""
        source = await asyncio.to_thread(self._sign_objects, taken, identity)
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

    def _sign_objects(self, taken: Source, identity: str) -> SignedObjects | None:
        from ...storage.signed import sign_objects

        return sign_objects(self._ws, taken.address, identity, taken.only, secret=self._secret)

    def _last_content(self, taken: Source, identity: str, note: Path) -> tuple[str, int]:
        """Return the last known content digest and size in bytes of an input, or ("", -1)."""
        copy = cache_path(self._ws, taken.address, identity, taken.only)
        try:
            if copy.exists():
                os.utime(copy.parent)
                return self._ws.cache.content_of(
                    str(copy)
                ) or "", copy.stat().st_size if copy.is_file() else -1
            content, size = json.loads(note.read_bytes())
            os.utime(note)  # the time of last use, for `recipe gc`
            return str(content), int(size)
        except (OSError, ValueError, TypeError):
            return "", -1

    def _learn(self, secrets: Sequence[Secret]) -> None:
        """Mask the secrets in signed URLs, at most `LEARNED` of them."""
        some = secrets[: max(0, LEARNED - self._learned)]
        self._learned += len(some)
        if some:
            self._commits.masker.learn(some)
