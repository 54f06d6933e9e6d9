"""What earlier workers left here: attempts that still run somewhere, ended unseen, or were cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
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
"""What a worker leaves in `attempts`: its run, and its fence."""

_FAILED = frozenset({"exit", "signal", "oom", "timeout", "idle"})
"""How a command ends by itself, or by a limit of its own."""


class Orphans:
    """Attempt directories that were there already, by the beginning of their keys."""

    def __init__(self, ws: Workspace, commits: GroupCommit, host_pool: HostPool) -> None:
        self.ws, self.commits, self.host_pool = ws, commits, host_pool
        self._attempts = f"{ws.home}/attempts"
        self._found = self._look()
        self._awaited: set[str] = set()
        """Attempts whose agent cannot be reached from here, as people know."""

    def look_again(self) -> None:
        self._found = self._look()

    @property
    def any_failed(self) -> bool:
        """Whether a failed attempt is kept, to be looked at."""
        return "failed" in self._found

    def __contains__(self, head: str) -> bool:
        """Whether there is an attempt whose key begins so."""
        return head in self._found

    def has_unreachable(self, head: str) -> bool:
        """Whether an unreachable agent may be working on an attempt whose key begins so.

        It can be neither seen nor ended. Said once.
        """
        for name in self._found.get(head, ()):
            if self.is_unreachable(name):
                if name not in self._awaited:
                    self._awaited.add(name)
                    self.commits.say(
                        f"waiting for {self._run_of(name)}, which began this step in another container "
                        "or on another machine: its agent lives, and cannot be reached from here; "
                        "to end it, run `recipe cancel` there"
                    )
                return True
        return False

    def is_unreachable(self, name: str) -> bool:
        """Whether the agent of an attempt lives in this workspace and cannot be reached from here."""
        return not os.path.exists(f"{self._attempts}/{name}.site") and not is_reachable(
            self._root_of(name)
        )

    def _run_of(self, name: str) -> str:
        tag = _LEFT.fullmatch(name)
        return f"run {tag[1]}" if tag is not None else name

    def _root_of(self, name: str) -> Path:
        """The root of the agent that began an attempt on this machine."""
        tag = _LEFT.fullmatch(name)
        own = Path(self.host_pool.local.root)
        return root_of(Path(self.ws.home), tag[1], tag[2]) if tag is not None else own

    def take(self, head: str) -> list[str]:
        """The attempts whose key begins so; they are not reported again."""
        return self._found.pop(head, [])

    async def find_job(self, node: Node, name: str, always: bool) -> tuple[Job, Place] | None:
        """The job that an earlier worker left and where, if it is worth to go on with it.

        It runs still, ended well unseen, or failed unseen in this very run. Else its files are
        deleted: an attempt that was cut off, or that failed in a run that is over, costs no retry.
        Raises HostLost when its host cannot be asked for long.
        """
        path = f"{self._attempts}/{name}"
        place = self.place_of(name)
        if place is None:
            self.commits.say(
                f"{node.id} was begun by an earlier run on a host that this one does not use; "
                "what it makes there is not waited for"
            )
            clear(path)
            return None
        paths = place.paths(AttemptDirectory(path))
        job = Job(name, {"log": paths.log})
        exit = await place.contact.insist(lambda: place.wait(job, timedelta(0)))
        if exit is None:
            return job, place
        if (
            exit.code == 0
            and exit.reason == "exit"
            and not always
            and place.may_have_made(AttemptDirectory(path), node.outputs)
        ):
            return job, place
        tag = _LEFT.fullmatch(name)
        if (
            exit.reason in _FAILED
            and (exit.code != 0 or exit.reason != "exit")
            and tag is not None
            and tag[1] == self.commits.run
        ):
            return job, place
        await self._clear(place, path)
        return None

    async def end(self, node: Node, job: Job, place: Place) -> None:
        """Stop an attempt whose inputs are not what its key says, and delete it."""
        self.commits.say(
            f"{node.id} was begun by an earlier run, and an input that it was given was changed "
            "since: it is started anew"
        )
        await place.stop(job, GRACE)
        await place.contact.insist(lambda: place.wait(job, 2 * GRACE))
        await self._clear(place, f"{self._attempts}/{job.key}")

    async def _clear(self, place: Place, path: str) -> None:
        await place.folder.clear(place.paths(AttemptDirectory(path)))
        clear(path)

    async def is_running(self, name: str) -> bool:
        """Whether the job of an attempt is still running.

        Raises DriverError while its host cannot be asked.
        """
        place = self.place_of(name)
        if place is None:
            return False
        if self.is_unreachable(name):
            raise Unreachable(f"the agent that began {name} cannot be reached from here")
        over = await place.wait(Job(name), timedelta(0))
        if over is not None:
            await place.folder.clear(Paths.at(f"{place.folder.root}/attempts/{name}"))
        return over is None

    def place_of(self, name: str) -> Place | None:
        """Where an attempt of an earlier worker was begun; None when this run has nothing there."""
        try:
            with open_regular(f"{self._attempts}/{name}.site") as file:
                called = file.read().decode()
        except FileNotFoundError:
            return self.host_pool.here_of(self._root_of(name))
        return self.host_pool.named(called.split("\n"))

    def places(self) -> set[Place]:
        """Where attempts were begun that no step of this run has taken up yet."""
        found = (self.place_of(name) for names in self._found.values() for name in names)
        return {member for place in found if place is not None for member in place.members}

    async def sweep(self) -> None:
        """Delete what dead workers of this recipe left and no worker took up.

        What still runs is only spoken of. The files of a host that cannot be asked now stay for
        the next run of the recipe.
        """
        folder, own = self._attempts, self.commits.run
        left: dict[str, list[str]] = {}
        for name in os.listdir(folder):
            if (tag := _LEFT.fullmatch(name)) and (tag[1], tag[2]) != (
                own,
                str(self.commits.fence),
            ):
                left.setdefault(tag[1], []).append(name)
        for run, names in left.items():
            if run != self.commits.run and not self._is_abandoned(run):
                continue
            begun = {
                name.removesuffix(".site")
                for name in names
                if "." not in name or name.endswith(".site")
            }
            going, unseen = list[str](), set[str]()
            for name in sorted(begun):
                try:
                    if await self.is_running(name):
                        going.append(name)
                except DriverError:
                    unseen.add(name)
            for name in going:
                place = self.place_of(name)
                where = (place.elsewhere if place is not None else "") or "this machine"
                self.commits.say(
                    f"{where} still runs a job of {run}, a run that is gone, and this run does not "
                    "need it: start that one again to take it over"
                )
            for name in names:
                if name.partition(".")[0] not in unseen.union(going):
                    await asyncio.to_thread(delete_whole, Path(folder, name))

    def _is_abandoned(self, run: str) -> bool:
        """Whether a run of this recipe has no worker, and will have none."""
        try:
            row = self.ws.store.runs.get(run)
        except NotFound:
            return False
        waits = row.due is not None and row.state not in FINAL
        return row.recipe == self.commits.recipe and not waits and not self.ws.store.runs.live(run)

    def _look(self) -> dict[str, list[str]]:
        """The attempt directories that are there already, by the beginning of their keys.

        Their workers died, or live and hold the key.
        """
        found: dict[str, list[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._attempts)):
                if "." not in name:
                    found.setdefault(name.partition("-")[0], []).append(name)
        return found


def left_by(home: Path, run: str) -> tuple[dict[Path, list[str]], dict[str, str]]:
    """The attempts of a run in a workspace.

    Returns those of this machine by the roots of their agents, and the hosts of the others by name.
    """
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


def clear(path: str) -> None:
    """Delete all that there is of an attempt, on whatever number of nodes."""
    for each in (path, path + CHANGES, *glob(f"{path}.[0-9]*")):
        delete_whole(Path(each))
    for suffix in (".log", ".sh", ".metrics", ".host", ".latest", ".taken", ".site", ".given"):
        with contextlib.suppress(OSError):
            os.unlink(path + suffix)
