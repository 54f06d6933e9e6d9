"""Environments of steps: a container image, installed packages, or the host's own Python."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.base import DriverError

from ...hosts import interpreters
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
    """Container images and Python interpreters of one run's steps on every host."""

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
        """Return the container image of a step; empty if it uses the programs of its host."""
        return "" if self._steps.survey.request.current_python else str(spec.image or "")

    def container_image(self, spec: StepSpec, place: Place) -> str:
        """Return the image for the step's container on a host; empty without a container.

        A machine that is itself a container of the image needs none.
        """
        image = self.image(spec)
        return "" if image == place.members[0].image else image

    def containers_of(self, place: Place) -> Containers:
        from ...hosts.containers import Containers

        if place.name not in self._containers:
            box = (
                self._pool.container_settings
                if place.elsewhere
                else self._ws.config.driver("local")
            )
            near = None if place.elsewhere else self._ws.environ
            self._containers[place.name] = Containers(
                place.host, f"{place.folder.root}/attempts", self._commits.say, box, near
            )
        return self._containers[place.name]

    def sandbox(self, spec: StepSpec) -> str:
        """Return the sandbox mode of a step: "closed", "network" (with network access), or ""."""
        return spec.options.sandbox_where(self._ws.config.flags)

    async def make_ready(self, spec: StepSpec, place: Place) -> None:
        """Pull the container image of a step to a host, or check the host's sandbox support.

        Raises CannotRun, DriverError.
        """
        if image := self.container_image(spec, place):
            await self.containers_of(place).provide_image(image)
        elif self.sandbox(spec):
            from ...hosts.sandbox import Sandboxes

            self._sandboxes = self._sandboxes or Sandboxes()
            await self._sandboxes.check(place)

    def _environment_of(self, node: Node, spec: StepSpec) -> EnvironmentSpec | None:
        """Return the Python environment of a step; None for the host's own Python."""
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
        """Return the Python interpreter of a step on a host, after installing its locked packages.

        In a container, it is the image's own Python. Raises CannotRun.
        """
        if self.container_image(spec, place):
            return "python"
        wanted = self._environment_of(node, spec)
        if wanted is None:
            if spec.names_python and not place.elsewhere:
                interpreters.ask_version(place.python)
            return place.python
        # Installing takes minutes, so all hosts install at the same time.
        hosts = [place]
        if place in self._pool.places:
            hosts += [other for other in self._pool.places if not other.lost]
        for each in hosts:
            if (each, wanted) not in self._pythons:
                task = asyncio.create_task(self._install(node.lock, each, wanted))
                # asyncio complains about an exception that nobody retrieves, and perhaps no
                # caller awaits this task.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._pythons[each, wanted] = task
        return await self._pythons[place, wanted]

    def interpreter(self, node: Node, spec: StepSpec, place: Place) -> str:
        """Describe the Python version of a step on a host; return "" in a container.

        A shim is run for its version only if the step's command names Python.
        """
        if self.container_image(spec, place):
            return ""
        wanted = self._environment_of(node, spec)
        if wanted is None:
            return place.describe_python(place.python, may_ask=spec.names_python)
        made = self._pythons.get((place.members[0], wanted))
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return ""
        return place.describe_python(made.result(), may_ask=True)

    async def _install(self, lock: str, place: Place, wanted: EnvironmentSpec) -> str:
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
        """Stop the package installations that are still running on hosts."""
        installing = [task for task in self._pythons.values() if not task.done()]
        if installing:
            for hooks in self._hooks:
                with contextlib.suppress(DriverError):
                    await hooks.stop(INSTALL)
            await asyncio.wait(installing, timeout=GRACE.total_seconds())
            for task in installing:
                task.cancel()
