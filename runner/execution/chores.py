"""Commands around the steps of a run: setup once per host, health while it runs, cleanup at its end.  Knows jobs and markers, not what steps need.

A chore runs in an empty directory of its own with the environment of a step; `inputs` and `host` are in scope.  That a setup was done is a file named
by the digest of its commands, `.recipe/setup/DIGEST`, so that every workspace does it once, and again when it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivers.base import Command, Exit, Host, Job

from ..digest import of_value
from ..errors import CannotRun
from ..storage.artifacts import delete
from . import launch
from .workspace import Workspace

GRACE = timedelta(seconds=10)
FOREVER = timedelta(days=3650)
TAIL = 2 << 10


class Chores:
    """The chores of one run on one host."""

    def __init__(self, ws: Workspace, host: Host, run: str, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        self.ws, self._host, self._run, self._settings = ws, host, run, settings
        self._scope = {"inputs": inputs, "host": {"gpus": int(ws.machine()["gpus"]), "cpus": int(ws.machine()["cpus"])}}
        self._doing: dict[str, Job] = {}
        self._count = 0

    async def setup(self) -> None:
        """Do what has to be done once.  Raises CannotRun with the end of what it printed."""
        commands = self._settings.get("setup") or ()
        if not commands:
            return
        digest = of_value("setup", commands)
        marker = self.ws.home / "setup" / digest
        if marker.exists():
            return
        with self.ws.locks.hold(f"setup-{digest[:32]}"):
            if marker.exists():
                return
            for command in commands:
                exit, said = await self.do("setup", command)
                if exit.code != 0:
                    raise CannotRun(f"setup failed ({_shown(command)}: {_how(exit)}){said}", fix="no step was started; correct `setup` and run again")
            self.ws.write(marker, b"")

    async def cleanup(self) -> list[str]:
        """Do what is always done at the end; what failed is told, not raised."""
        problems = []
        for command in self._settings.get("cleanup") or ():
            try:
                exit, said = await self.do("cleanup", command)
            except CannotRun as error:
                problems.append(f"cleanup failed: {error}")
                continue
            if exit.code != 0:
                problems.append(f"cleanup failed ({_shown(command)}: {_how(exit)}){said}")
        return problems

    async def healthy(self, command: object, seconds: float) -> bool:
        """One look at the host; one that takes longer than `seconds` is a bad one."""
        exit, _ = await self.do("health", command, seconds)
        return exit.code == 0

    async def stop(self) -> None:
        """End the chores that run, if any do."""
        for job in list(self._doing.values()):
            await self._host.stop(job, GRACE)

    async def do(self, kind: str, command: object, seconds: float | None = None, pass_env: Sequence[str] = ()) -> tuple[Exit, str]:
        """Run one command to its end: how it ended, and the last of what it printed, indented."""
        self._count += 1
        name = f"{kind}-{self._run}-{self._count}"
        path = f"{self.ws.home}/attempts/{name}"
        made = launch.render({"env": {}, "files": {}, "accelerate": None, "run": command, "shell": "sh"}, self._scope, python="python")
        argv: Sequence[str] = made.argv
        Path(path).mkdir(parents=True)
        if made.script is not None:
            argv = (*argv, f"{path}.sh")
            self.ws.write(Path(argv[-1]), made.script.encode("utf-8", "surrogateescape"))
        env = {**launch.base_env(list(pass_env)), "RECIPE_RUN": self._run, **made.env}
        try:
            job = await self._host.start(Command(tuple(argv), path, env, {}, seconds, None, f"{path}.log"), name)
            self._doing[name] = job
            exit = await self._host.wait(job, FOREVER)
            assert exit is not None
            said = (await self._host.log(job, 0)).decode(errors="replace")[-TAIL:].strip()
            return exit, "".join(f"\n  {line}" for line in said.splitlines())
        finally:
            self._doing.pop(name, None)
            delete(Path(path))
            for suffix in (".sh", ".log"):
                Path(path + suffix).unlink(missing_ok=True)


def _shown(command: object) -> str:
    words = " ".join(map(str, command)) if isinstance(command, list) else str(command).strip()
    return words if len(words) <= 60 else words[:57] + "…"


def _how(exit: Exit) -> str:
    return f"exit {exit.code}" if exit.reason == "exit" and exit.code is not None else exit.reason
