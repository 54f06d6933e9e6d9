"""Command line and environment of an attempt on each of its nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Command
from drivers.devices import Device, device_variables

from ...hosts import variables
from ...hosts.link import control_file
from ...hosts.place import launch
from ...hosts.place.overlays import wrap_overlays
from ...hosts.place.place import Place
from ...hosts.place.staging import AttemptDirectory
from ...language.template import StatePath
from ...planning import judge as judging
from ...planning.secret_values import PassedVariables, find_secrets_set, variables_passed
from ...planning.step import StepSpec
from ...secrets import find_passwords
from ...storage.workspace import Workspace
from ...survey.env_files import EnvFiles
from ...survey.trainings import training_length
from .attempt import Attempt
from .commit import GroupCommit
from .environments import StepEnvironments
from .run_plan import RunPlan

if TYPE_CHECKING:
    from ...storage import checkpoints

INTERVALS: Final = (
    "METRICS_REPORT_INTERVAL_STEPS",
    "CHECKPOINT_INTERVAL_STEPS",
    "GPU_MEMORY_FRACTION",
)
"""Caller's environment variables for report and checkpoint intervals and for GPU memory.

The result of a training does not depend on them.
"""
LONG: Final = 60.0
"""Minimum expected seconds for a shell wrapper that records the exit if the agent is killed.

Steps with unknown duration get the wrapper, too.
"""


class Seat(NamedTuple):
    """Node of an attempt: its rank, host, directory and interpreter."""

    rank: int
    place: Place
    directory: AttemptDirectory
    python: str
    """Path of the node's Python interpreter."""
    name: str
    """Name of the node's job."""


class CommandBuilder:
    """Builder of the commands for the steps of one run."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        commits: GroupCommit,
        environments: StepEnvironments,
    ) -> None:
        self._ws, self._steps, self._commits = ws, steps, commits
        self._environments = environments
        self._env_files = EnvFiles(ws.own)
        self._inherited: dict[tuple[object, ...], PassedVariables] = {}  # by request of attempts

    def build(
        self, attempt: Attempt, seat: Seat, restored: Mapping[str, checkpoints.Newest]
    ) -> tuple[Command, bytes | None]:
        """Build the command of one node, and the content of its script or None.

        Writes the files that the command reads. Raises CannotRun.
        """
        spec, place, directory = attempt.spec, seat.place, seat.directory
        paths = place.paths(directory)
        # After the state directory, which may contain outputs.
        directory.prepare_outputs(attempt.node.outputs)
        scope: dict[str, object] = {}
        if not launch.is_plain(spec):
            scope = self._scope_of(attempt, seat, restored)
        rendered = launch.render(spec, scope, python=seat.python)
        for path, data in rendered.files.items():
            directory.add_bytes(data, path)
        directory.folder.remove_unused()
        script, argv = None, rendered.argv
        if rendered.script is not None:
            script = rendered.script.encode("utf-8", "surrogateescape")
            argv = (*rendered.argv, paths.script)
        image = self._environments.container_image(spec, place)
        devices = attempt.place.capacity.share(seat.rank, attempt.devices)
        sandbox = "" if image else self._environments.sandbox(spec)
        inherited = self._inherited_by(spec, place, image, sandboxed=bool(sandbox))
        secrets = (*inherited.secrets, *find_secrets_set(spec, self._ws.environ))
        given = self._env_of(attempt, seat, inherited.plain, image, devices)
        # With several nodes, usually only the first one prints.
        idle_timeout = None if seat.rank else spec.options.idle_timeout
        command = Command(
            argv,
            paths.cwd,
            {**given, **rendered.env},
            {secret.name: secret.reveal for secret in secrets},
            spec.options.timeout,
            idle_timeout,
            paths.log,
            tuple(device.lock for device in devices),
            outlives=self._commits.expected.get(attempt.id, LONG) >= LONG,
        )
        if image:
            command = self._in_container(attempt, seat, command, image, devices)
        elif sandbox:
            command = self._in_sandbox(attempt, seat, command, network=sandbox == "network")
        elif directory.overlays is not None:
            command = wrap_overlays(command, directory.path, directory.mountable_inputs)
        return command, script

    def _scope_of(
        self, attempt: Attempt, seat: Seat, restored: Mapping[str, checkpoints.Newest]
    ) -> dict[str, object]:
        """Return the template variables of a step's attempt."""
        spec, plan = attempt.spec, self._steps.plan
        states: dict[str, StatePath] = {}
        for each in spec.state:
            name = restored[each.name].name
            latest = f"{each.path}/{name}" if name else None
            states[each.name] = StatePath(each.path, {"latest": latest})
        addresses = _addresses_of(attempt)
        scope = judging.scope_of(spec, plan, attempt.number, self._steps.made)
        return scope | {
            "state": states,
            "run": {"id": self._commits.run, "recipe": plan.recipe},
            "step": {"id": attempt.id, "key": attempt.key or ""},
            "node": {"rank": seat.rank},
            "nodes": {"count": len(addresses), "addresses": addresses},
            "host": seat.place.capacity.template_host(_gpus_of(spec, seat.place)),
        }

    def _env_of(
        self,
        attempt: Attempt,
        seat: Seat,
        inherited: Mapping[str, str],
        image: str,
        devices: Sequence[Device],
    ) -> dict[str, str]:
        """Return the environment variables of a node, without the step's own `env`."""
        spec, place = attempt.spec, seat.place
        gpus = _gpus_of(spec, place)
        env = {**inherited, "RECIPE_STEP": attempt.id}
        # A container sees only its own GPUs, and numbers them from 0.
        if gpus is not None and not (image and gpus):
            env |= device_variables(devices, env)
        if not image and seat.python != place.python:
            env["PATH"] = f"{os.path.dirname(seat.python)}:{env['PATH']}"
        env |= self._training_env_of(attempt, seat)
        if len(attempt.place.members) > 1:
            addresses = _addresses_of(attempt)
            env["NODE_RANK"] = str(seat.rank)
            env["NNODES"] = str(len(addresses))
            env["RECIPE_NODES"] = ",".join(addresses)
            env["MASTER_ADDR"] = addresses[0]
            env["MASTER_PORT"] = launch.PORT
        return env

    def _training_env_of(self, attempt: Attempt, seat: Seat) -> dict[str, str]:
        """Return the environment variables for metrics, control file and reporting intervals."""
        spec, paths = attempt.spec, seat.place.paths(seat.directory)
        env: dict[str, str] = {}
        reports = spec.metrics is not None and spec.metrics.in_environment
        if spec.state:
            env["RECIPE_CONTROL"] = control_file.control_file(paths.cwd)
        if reports:
            env["RECIPE_METRICS"] = paths.metrics
            total = training_length(self._steps.survey, attempt.id)
            if total:
                env["RECIPE_TOTAL_STEPS"] = f"{total:.0f}"
        if spec.state or reports:
            environ = self._ws.environ
            env |= {name: environ[name] for name in INTERVALS if name in environ}
        return env

    def _in_container(
        self,
        attempt: Attempt,
        seat: Seat,
        command: Command,
        image: str,
        devices: Sequence[Device],
    ) -> Command:
        place, gpus = seat.place, _gpus_of(attempt.spec, seat.place)
        visible: Sequence[Device] | None = None
        if gpus is not None:
            visible = devices
        elif "CUDA_VISIBLE_DEVICES" in place.login:
            visible = place.capacity.devices
        mounts = place.find_mounts(seat.directory, command, attempt.task.states)
        containers = self._environments.containers_of(place)
        network = self._environments.sandbox(attempt.spec) != "closed"
        needed = bool(gpus)
        return containers.wrap(command, image, mounts, visible, needed=needed, network=network)

    def _in_sandbox(
        self, attempt: Attempt, seat: Seat, command: Command, *, network: bool
    ) -> Command:
        from ...hosts import sandbox

        mounts = seat.place.find_mounts(seat.directory, command, attempt.task.states)
        return sandbox.wrap(command, seat.place, seat.python, mounts, network=network)

    def _inherited_by(
        self, spec: StepSpec, place: Place, image: str, *, sandboxed: bool
    ) -> PassedVariables:
        """Return the variables from the host's login and from the caller's environment and files.

        Raises CannotRun.
        """
        asked = (
            place.name,
            bool(image),
            sandboxed,
            *spec.pass_env,
            None,
            *spec.env_files,
            None,
            *spec.env,
        )
        known = self._inherited.get(asked)
        if known is not None:
            return known
        more = variables_passed(spec, self._env_files.values(spec.env_files), self._ws.environ)
        if image:
            from ...hosts.containers import base_env

            base = base_env(place.login)
        else:
            base = place.env({*more.plain, *spec.env})
            base = variables.sandbox_variables(base) if sandboxed else base
        ours = {"RECIPE_RUN": self._commits.run, "NODE_RANK": "0", "NNODES": "1"}
        found = PassedVariables({**base, **more.plain, **ours}, more.secrets)
        self._inherited[asked] = found
        self._commits.masker.learn([*more.secrets, *find_passwords(found.plain)])
        return found


def _gpus_of(spec: StepSpec, place: Place) -> int | None:
    """Return the number of GPUs for the command.

    It is 0 on a head node, whose workers have the GPUs.
    """
    if place.port and spec.resources.gpus:
        return 0
    return spec.resources.gpus


def _addresses_of(attempt: Attempt) -> list[str]:
    """Return the network address of each node, by rank."""
    members = attempt.place.members
    return [each.address for each in members] if len(members) > 1 else ["127.0.0.1"]
