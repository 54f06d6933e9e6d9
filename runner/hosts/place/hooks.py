"""The hooks of a run: setup once per host, health checks while the run continues, cleanup at the
end.

A hook runs in an empty directory with the environment of a step; `inputs` and `host` are in scope.
A marker file below the root on the host (here `.recipe/setup/DIGEST`), named by the digest of the
commands, shows that a setup was done.  So every host runs a setup once, and again if it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType

from drivers.base import Command, Exit, HostLost, Job

from ...digest import of_value
from ...errors import CannotRun
from ...language.values import Tree
from ...planning.step import RunSettings, StepSpec
from . import launch
from .host_task import FOREVER
from .place import GRACE, Place

INSTALL = "environment"
"""The kind of hook that creates an environment."""
LOOK = timedelta(seconds=5)
"""Time between two reads of a hook's output."""
TAIL = 2 << 10
NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class Hooks:
    """The hooks of one run on one host.

    `fence` identifies the worker: hooks of an earlier worker have other names.
    """

    def __init__(
        self, place: Place, run: str, fence: int, settings: RunSettings, inputs: Mapping[str, Tree]
    ) -> None:
        self.place, self._run, self._fence, self._settings = place, run, fence, settings
        self._scope = {"inputs": inputs, "host": place.capacity.template_host(None)}
        self._doing: dict[str, Job] = {}
        self._stopped: set[str] = set()
        self._count = 0

    async def setup(self) -> None:
        """Run the setup commands unless they have run on this host.

        Raises CannotRun with the end of the output.
        """
        commands = self._settings.setup
        if not commands:
            return
        digest = of_value("setup", commands)
        note = f"setup/{digest}"
        if await self.place.folder.has_marker(note):
            return
        with self.place.ws.locks.hold(f"setup-{of_value('site', [self.place.name, digest])[:32]}"):
            if await self.place.folder.has_marker(note):
                return
            for command in commands:
                exit, output = await self.run_command("setup", command)
                if exit.reason == "lost":
                    raise HostLost(f"lost {self.place.name} during setup")
                if exit.code != 0:
                    raise CannotRun(
                        f"setup failed ({_show_command(command)}: {_describe_exit(exit)}){output}",
                        fix="correct `setup` and run again; no step was started",
                    )
            await self.place.folder.write_marker(note)

    async def cleanup(self) -> list[str]:
        """Run the cleanup commands; return messages about failures."""
        problems = []
        for command in self._settings.cleanup:
            try:
                exit, output = await self.run_command("cleanup", command)
            except CannotRun as error:
                problems.append(f"cleanup failed: {error}")
                continue
            if exit.code != 0:
                problems.append(
                    f"cleanup failed ({_show_command(command)}: {_describe_exit(exit)}){output}"
                )
        return problems

    async def is_healthy(self, command: str | Sequence[Tree], seconds: float) -> bool:
        """Run one health check; return whether it succeeded within `seconds`."""
        exit, _ = await self.run_command("health", command, seconds)
        return exit.code == 0

    async def stop(self, kind: str = "") -> None:
        """Stop all running hooks, or those of one kind."""
        self._stopped.add(kind)
        for name, job in list(self._doing.items()):
            if name.startswith(kind):
                await self.place.host.stop(job, GRACE)

    def is_stopped(self, kind: str) -> bool:
        """Return whether hooks of this kind were stopped and no more may start."""
        return not self._stopped.isdisjoint(("", kind))

    async def run_command(
        self,
        kind: str,
        command: str | Sequence[Tree],
        seconds: float | None = None,
        pass_env: Sequence[str] = (),
        files: Mapping[str, bytes] = NO_FILES,
        on_line: Callable[[bytes], None] | None = None,
    ) -> tuple[Exit, str]:
        """Run a command to its end; return its exit and the indented end of its output.  `on_line` receives each line soon after it is printed."""
        self._count += 1
        name = f"{kind}-{self._run}-{self._fence}-{self._count}"
        made = launch.render(StepSpec("", kind, {}, run=command), self._scope, python="python")
        script = None if made.script is None else made.script.encode("utf-8", "surrogateescape")
        paths = await self.place.folder.create_scratch(name, files, script)
        argv = made.argv if script is None else (*made.argv, paths.script)
        environ = self.place.ws.environ
        passed = {name: environ[name] for name in pass_env if name in environ}
        env = {**self.place.env(passed), **passed, "RECIPE_RUN": self._run, **made.env}
        try:
            job = await self.place.host.start(
                Command(tuple(argv), paths.cwd, env, {}, seconds, None, paths.log), name
            )
            self._doing[name] = job
            if on_line is None:
                exit = await self.place.host.wait(job, FOREVER)
            else:
                exit = await self._listen(job, on_line)
            assert exit is not None
            output = (await self.place.host.log(job, 0)).decode(errors="replace")[-TAIL:].strip()
            return exit, "".join(f"\n  {line}" for line in output.splitlines())
        finally:
            self._doing.pop(name, None)
            await self.place.folder.clear(paths)

    async def _listen(self, job: Job, on_line: Callable[[bytes], None]) -> Exit:
        """Wait for the end of a job and pass its output to `on_line` meanwhile.

        Requests to an unreachable host are repeated.
        """
        host, exit, received, part = self.place.host, None, 0, b""
        while exit is None:
            exit = await self.place.contact.insist(lambda: host.wait(job, LOOK))
            while data := await self.place.contact.insist(partial(host.log, job, received)):
                received += len(data)
                *lines, part = (part + data).split(b"\n")
                for line in lines:
                    on_line(line)
        return exit


def _show_command(command: object) -> str:
    words = " ".join(map(str, command)) if isinstance(command, list) else str(command).strip()
    return words if len(words) <= 60 else words[:57] + "…"


def _describe_exit(exit: Exit) -> str:
    return f"exit {exit.code}" if exit.reason == "exit" and exit.code is not None else exit.reason
