"""What an attempt runs in: an image, an environment of packages, or the host's own Python."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.base import DriverError

from ...hosts.place.hooks import INSTALL
from ...hosts.place.place import GRACE, Place
from ...hosts.pool import HostPool
from ...planning.plan import Node
from ...planning.step import StepSpec
from ...storage.workspace import Workspace
from ...survey import locks
from .commit import GroupCommit
from .host_hooks import HostHooks
from .run_plan import RunPlan

if TYPE_CHECKING:
    from ...hosts.containers import Containers
    from ...hosts.environments import EnvironmentSpec
    from ...hosts.sandbox import Sandboxes


class StepEnvironments:
    """The images and interpreters of the steps of one run, on every host."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        pool: HostPool,
        hooks: HostHooks,
    ) -> None:
        self._ws, self._steps, self._commits, self._pool, self._hooks = (
            ws,
            steps,
            commits,
            pool,
            hooks,
        )
        self._pythons: dict[tuple[Place, EnvironmentSpec], asyncio.Task[str]] = {}
        self._containers: dict[str, Containers] = {}
        self._sandboxes: Sandboxes | None = None

    def image(self, spec: StepSpec) -> str:
        """The image that a step runs in; empty for the host's own programs."""
        return "" if self._steps.survey.request.current_python else str(spec.image or "")

    def container_image(self, spec: StepSpec, place: Place) -> str:
        """The image of the container that a step needs there.

        Empty where the machine itself is a container of it.
        """
        image = self.image(spec)
        return "" if image == place.members[0].image else image

    def containers_of(self, place: Place) -> Containers:
        from ...hosts.containers import Containers

        if place.name not in self._containers:
            box = self._pool.box if place.elsewhere else self._ws.config.driver("local")
            near = None if place.elsewhere else self._ws.environ
            self._containers[place.name] = Containers(
                place.host, f"{place.folder.root}/attempts", self._commits.say, box, near
            )
        return self._containers[place.name]

    def sandbox(self, spec: StepSpec) -> str:
        """The sandbox of a step: `closed`, or `network` with a network; empty for none."""
        return spec.options.sandbox_where(self._ws.config.flags)

    async def make_ready(self, spec: StepSpec, place: Place) -> None:
        """Have the image of a step on a host, and see to it that the host makes its sandbox.

        Raises CannotRun, DriverError.
        """
        if image := self.container_image(spec, place):
            await self.containers_of(place).image(image)
        elif self.sandbox(spec):
            from ...hosts.sandbox import Sandboxes

            self._sandboxes = self._sandboxes or Sandboxes()
            await self._sandboxes.check(place)

    def _wanted(self, node: Node, spec: StepSpec) -> EnvironmentSpec | None:
        """What environment a step asks for; None for the Python of where it runs."""
        if (
            not (node.lock or spec.python)
            or self._steps.survey.request.current_python
            or spec.image
        ):
            return None
        from ...hosts.environments import EnvironmentSpec

        if not node.lock:
            return EnvironmentSpec(None, "", spec.python)
        lock = locks.lock_file(Path(self._steps.plan.homes[node.home], node.lock))
        return EnvironmentSpec(
            lock, str(self._steps.facts.locks[node.home, node.lock]), spec.python
        )

    async def python(self, node: Node, spec: StepSpec, place: Place) -> str:
        """The interpreter of a step there, with its version and the packages of its lock.

        In an image it is the image's own. Raises CannotRun.
        """
        if self.container_image(spec, place):
            return "python"
        wanted = self._wanted(node, spec)
        if wanted is None:
            return place.python
        # Installing takes minutes: hosts do it at the same time, also those whose turn comes later.
        others = (
            [other for other in self._pool.places if not other.lost]
            if place in self._pool.places
            else []
        )
        for each in [place, *others]:
            if (each, wanted) not in self._pythons:
                self._pythons[each, wanted] = asyncio.get_running_loop().create_task(
                    self._built(node.lock, each, wanted)
                )
                self._pythons[each, wanted].add_done_callback(
                    lambda task: task.cancelled() or task.exception()
                )  # it may not be awaited
        return await self._pythons[place, wanted]

    def interpreter(self, node: Node, spec: StepSpec, place: Place) -> str:
        """The Python of a step there, as people read it; empty in a container, which has its own."""
        if self.container_image(spec, place):
            return ""
        wanted = self._wanted(node, spec)
        if wanted is None:
            return place.described(place.python)
        made = self._pythons.get((place.members[0], wanted))
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return ""
        return place.described(made.result())

    async def _built(self, lock: str, place: Place, wanted: EnvironmentSpec) -> str:
        from ...hosts.environments import is_built, provide_python

        what = lock or f"Python {wanted.version}"
        if place.elsewhere:
            what += f" on {place.elsewhere}"
        if lock and not await is_built(place, wanted):
            self._commits.say(f"installing the packages of {what} (first use only)")
        return await provide_python(
            self._hooks.of(place), wanted, lambda words: self._commits.say(f"{what}: {words}")
        )

    async def end_installs(self) -> None:
        """Stop waiting for what hosts still install."""
        installing = [task for task in self._pythons.values() if not task.done()]
        if installing:
            for hooks in self._hooks:
                with contextlib.suppress(DriverError):
                    await hooks.stop(INSTALL)
            await asyncio.wait(installing, timeout=GRACE.total_seconds())
            for task in installing:
                task.cancel()
