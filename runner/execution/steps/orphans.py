"""Attempts of earlier workers that still run, ended without a worker, or were interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from glob import glob
from pathlib import Path

from drivers.base import DriverError, Job, Unreachable

from ...agent.regular import open_regular
from ...errors import NotFound
from ...hosts.link.local_agents import is_reachable, root_of
from ...hosts.place.host_task import Paths
from ...hosts.place.overlays import CHANGES
from ...hosts.place.place import Place
from ...hosts.place.staging import AttemptDirectory
from ...hosts.pool import HostPool
from ...planning.plan import Node
from ...storage.content.disk import delete_whole
from ...storage.records.runs import FINAL
from ...storage.workspace import Workspace
from .attempt import GRACE
from .commit import GroupCommit

_LEFT = re.compile(
    r"(?:spare[.-]|[0-9a-f]{24}-|[a-z]+-)?(\d{8}-\d{6}-[0-9a-f]{6})[.-](?:\d+-)?(\d+)[.-]\d+(?:\.\d+)?(?:\.\w+)?"
)
"""Pattern for file names in `attempts`, with the run and the claim number of the worker."""

_FAILED = frozenset({"exit", "signal", "oom", "timeout", "idle"})
"""Exit reasons of a command that was not stopped from outside."""


class Orphans:
    """Attempt directories of earlier workers, by the first 24 characters of their cache keys."""

    def __init__(self, ws: Workspace, commits: GroupCommit, host_pool: HostPool) -> None:
        self.ws, self.commits, self.host_pool = ws, commits, host_pool
        self._attempts = f"{ws.home}/attempts"
        self._found = self._look()
        self._awaited: set[str] = set()
        """Attempts with an unreachable agent that were reported."""

    def look_again(self) -> None:
        self._found = self._look()

    @property
    def any_failed(self) -> bool:
        """Return True if a failed attempt is stored for inspection."""
        return "failed" in self._found

    def __contains__(self, head: str) -> bool:
        """Return True if an earlier worker left an attempt whose cache key begins with `head`."""
        return head in self._found

    def has_unreachable(self, head: str) -> bool:
        """Return True if an unreachable agent may still execute an attempt with this key.

        Such an attempt can be neither checked nor stopped. Shows a message, once for each attempt.
        """
        for name in self._found.get(head, ()):
            if self.is_unreachable(name):
                if name not in self._awaited:
                    self._awaited.add(name)
                    self.commits.say(
                        f"waiting for {self._run_of(name)}: its agent still runs this step in another "
                        "container or on another machine, and this process cannot reach the agent; "
                        "to stop that run, run `recipe cancel` in that container or on that machine"
                    )
                return True
        return False

    def is_unreachable(self, name: str) -> bool:
        """Return True if the attempt's agent is in this workspace but out of reach from here."""
        return not os.path.exists(f"{self._attempts}/{name}.site") and not is_reachable(
            self._root_of(name)
        )

    def _run_of(self, name: str) -> str:
        tag = _LEFT.fullmatch(name)
        return f"run {tag[1]}" if tag is not None else name

    def _root_of(self, name: str) -> Path:
        """Return the root directory of the local agent that started an attempt."""
        tag = _LEFT.fullmatch(name)
        own = Path(self.host_pool.local.root)
        return root_of(Path(self.ws.home), tag[1], tag[2]) if tag is not None else own

    def take(self, head: str) -> list[str]:
        """Remove and return the names of attempts whose cache key begins with `head`."""
        return self._found.pop(head, [])

    async def find_job(self, node: Node, name: str, always: bool) -> tuple[Job, Place] | None:
        """Return an earlier worker's job and its host if the job can continue; otherwise None.

        The job is still running, or it succeeded without a worker, or it failed without a worker in
        this run. Files of other attempts are deleted. These attempts were interrupted, or failed
        in a run that has ended, and cost no retry.

        Raises HostLost if its host does not answer for a long time.
        """
        path = f"{self._attempts}/{name}"
        place = self.place_of(name)
        if place is None:
            self.commits.say(
                f"ignoring a job of {node.id} that an earlier run started on a host outside this run"
            )
            delete_attempt(path)
            return None
        paths = place.paths(AttemptDirectory(path))
        job = Job(name, {"log": paths.log})
        exit = await place.contact.insist(lambda: place.wait(job, timedelta(0)))
        if exit is None:
            return job, place
        if exit.reason == "exit" and exit.code == 0:
            may_count = not always and place.may_have_made(AttemptDirectory(path), node.outputs)
        else:
            may_count = exit.reason in _FAILED and self._is_of_this_run(name)
        if may_count:
            return job, place
        await self._clear(place, path)
        return None

    def _is_of_this_run(self, name: str) -> bool:
        tag = _LEFT.fullmatch(name)
        return tag is not None and tag[1] == self.commits.run

    async def end(self, node: Node, job: Job, place: Place) -> None:
        """Stop and delete an earlier worker's attempt, because its inputs have changed."""
        self.commits.say(f"restarting {node.id}: an input changed since the earlier run started it")
        await place.stop(job, GRACE)
        await place.contact.insist(lambda: place.wait(job, 2 * GRACE))
        await self._clear(place, f"{self._attempts}/{job.key}")

    async def _clear(self, place: Place, path: str) -> None:
        await place.folder.clear(place.paths(AttemptDirectory(path)))
        delete_attempt(path)

    async def is_running(self, name: str) -> bool:
        """Return True if the job of an earlier worker's attempt is still running.

        Raises DriverError while its host does not answer.
        """
        place = self.place_of(name)
        if place is None:
            return False
        if self.is_unreachable(name):
            raise Unreachable(f"cannot reach the agent that started {name}")
        over = await place.wait(Job(name), timedelta(0))
        if over is not None:
            await place.folder.clear(Paths.at(f"{place.folder.root}/attempts/{name}"))
        return over is None

    def place_of(self, name: str) -> Place | None:
        """Return the host of an earlier worker's attempt; None if the host is not in this run."""
        try:
            with open_regular(f"{self._attempts}/{name}.site") as file:
                called = file.read().decode()
        except FileNotFoundError:
            return self.host_pool.local_place_of(self._root_of(name))
        return self.host_pool.find_place(called.split("\n"))

    def places(self) -> set[Place]:
        """Return the hosts of earlier attempts that this run has not reattached to."""
        members: set[Place] = set()
        for names in self._found.values():
            for name in names:
                place = self.place_of(name)
                if place is not None:
                    members.update(place.members)
        return members

    async def sweep(self) -> None:
        """Delete the remaining files of dead workers of this recipe.

        Jobs that still run are only reported. Files of hosts that do not answer stay for the next
        run.
        """
        for run, names in self._find_left_files().items():
            if run == self.commits.run or self._is_abandoned(run):
                await self._sweep_run(run, names)

    def _find_left_files(self) -> dict[str, list[str]]:
        """Return the names of the files of other workers' attempts, by run."""
        own = (self.commits.run, str(self.commits.fence))
        left: dict[str, list[str]] = {}
        for name in os.listdir(self._attempts):
            tag = _LEFT.fullmatch(name)
            if tag is not None and (tag[1], tag[2]) != own:
                left.setdefault(tag[1], []).append(name)
        return left

    async def _sweep_run(self, run: str, names: Sequence[str]) -> None:
        """Delete these files of a run, except those of attempts that may still run."""
        begun: set[str] = set()
        for name in names:
            if "." not in name or name.endswith(".site"):
                begun.add(name.removesuffix(".site"))
        running, unseen = list[str](), set[str]()
        for name in sorted(begun):
            try:
                if await self.is_running(name):
                    running.append(name)
            except DriverError:
                unseen.add(name)
        for name in running:
            place = self.place_of(name)
            where = (place.elsewhere if place is not None else "") or "this machine"
            self.commits.say(
                f"{where} still runs a job of {run}, whose worker exited; this run does not need "
                "the job; to take over the job, start that run again"
            )
        remaining = unseen.union(running)
        for name in names:
            if name.partition(".")[0] not in remaining:
                await asyncio.to_thread(delete_whole, Path(self._attempts, name))

    def _is_abandoned(self, run: str) -> bool:
        """Return True if a run of this recipe has no worker and is not queued."""
        try:
            row = self.ws.store.runs.get(run)
        except NotFound:
            return False
        waits = row.due is not None and row.state not in FINAL
        return row.recipe == self.commits.recipe and not waits and not self.ws.store.runs.live(run)

    def _look(self) -> dict[str, list[str]]:
        """Return the attempt directories on disk, by the beginning of their cache keys.

        Their workers died, or are alive and hold the key.
        """
        found: dict[str, list[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._attempts)):
                if "." not in name:
                    found.setdefault(name.partition("-")[0], []).append(name)
        return found


def find_left_attempts(home: Path, run: str) -> tuple[dict[Path, list[str]], dict[str, str]]:
    """Return a run's remaining attempts: local ones by agent root, and others with their hosts."""
    folder = f"{home}/attempts"
    here: dict[Path, list[str]] = {}
    elsewhere = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if "." in name or not (tag := _LEFT.fullmatch(name)) or tag[1] != run:
            continue
        try:
            elsewhere[name] = (
                Path(folder, f"{name}.site").read_text(encoding="utf-8").replace("\n", ", ")
            )
        except FileNotFoundError:
            here.setdefault(root_of(home, run, tag[2]), []).append(name)
    return here, elsewhere


def delete_attempt(path: str) -> None:
    """Delete all local files of an attempt, on any number of nodes."""
    for each in (path, path + CHANGES, *glob(f"{path}.[0-9]*")):
        delete_whole(Path(each))
    for suffix in (".log", ".sh", ".metrics", ".host", ".latest", ".taken", ".site", ".given"):
        with contextlib.suppress(OSError):
            os.unlink(path + suffix)
