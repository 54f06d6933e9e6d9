"""Make one attempt of a step ready: its directory, its command and environment, from where it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Command, DriverError

from ...digest import Digest
from ...errors import Infrastructure
from ...hosts.link import control_file
from ...hosts.place import launch
from ...hosts.place.hooks import INSTALL
from ...hosts.place.host_task import HostTask, Phase, StateFolder, TaskResult
from ...hosts.place.place import GRACE, Place
from ...hosts.place.spare_dirs import Scrap
from ...hosts.place.staging import Attempt
from ...hosts.pool import HostPool
from ...language.template import StatePath
from ...planning import judge as judging
from ...planning.fingerprint import World
from ...planning.judge import Made
from ...planning.plan import Node
from ...planning.secret_values import Passed, given, passed
from ...planning.step import DIRECTORY, StepSpec
from ...secrets import passwords
from ...storage.content.files import Content
from ...storage.content.inputs import StoredInputs
from ...storage.crash import crashpoint
from ...storage.locks import Lock
from ...storage.sources import chosen, fetch
from ...storage.workspace import Workspace
from ...survey import locks
from ...survey.env_files import EnvFiles
from ...survey.survey import Survey
from ...survey.trainings import steps_of
from .. import job_folders
from ..reporting import log_remote
from .bucket_inputs import BucketInputs
from .commit import GroupCommit
from .host_hooks import HostHooks

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...hosts.containers import Containers
    from ...hosts.environments import Wanted
    from ...hosts.place.host_task import Round
    from ...storage import checkpoints


AGAIN: Final = 0.1
"""Seconds after which a database that did not answer is asked again."""
INTERVALS: Final = (
    "METRICS_REPORT_INTERVAL_STEPS",
    "CHECKPOINT_INTERVAL_STEPS",
    "GPU_MEMORY_FRACTION",
)
"""Of the caller's environment: how often a training reports and saves, how much of its GPU it takes.  What it learns does not depend on them."""
LONG: Final = 60.0
"""Seconds from which on a step is worth a shell that knows its end should the agent be killed.  One that never ran may take longer."""


@dataclass(slots=True)
class Running:
    """One attempt under way."""

    node: Node
    number: int
    key: Digest | None
    world: World
    attempt: Attempt
    name: str
    log: str
    started: float
    state: checkpoints.Generation | None
    lock: Lock | None
    place: Place
    wants: Mapping[str, float]
    devices: tuple[
        Device, ...
    ] = ()  # GPUs that it holds; of one that was taken up they are not known
    goes_on: int | None = None  # the step of the checkpoint that it resumes from
    begins: Mapping[str, checkpoints.Newest] = field(
        default_factory=dict
    )  # the checkpoints that it resumes from
    taken_up: bool = False  # begun by an earlier worker
    task: HostTask = field(init=False)
    carried: asyncio.Task[None] | None = None  # what carries the task out
    brought: TaskResult | None = None
    stopped: bool = False  # we asked for its end
    asked: bool = False  # we asked it to save and to end by itself
    saved: int = 0  # bytes of checkpoints that were brought here while it ran

    @property
    def last_log(self) -> str:
        """The log that tells how it ended: of several nodes, that of the one which failed first."""
        part = self._part
        return f"{part.attempt.path}.log" if part is not None else self.log

    @property
    def left(self) -> Attempt:
        """The directory that goes with it."""
        part = self._part
        return part.attempt if part is not None else self.attempt

    @property
    def logs(self) -> Sequence[str]:
        """Of each node, by rank."""
        return [f"{part.attempt.path}.log" for part in self.task.parts] or [self.log]

    @property
    def _part(self) -> HostTask | None:
        return (
            self.task.parts[self.brought.node]
            if self.brought is not None and self.brought.node
            else None
        )


def saved(running: Running, spec: StepSpec) -> bool:
    """Whether it left a checkpoint here that is not the one it resumed from."""
    if running.state is None:
        return False
    from ...storage import checkpoints

    before = running.begins or running.task.restored
    for each in spec.state:
        found = checkpoints.newest(running.state.folder(each.name), each.checkpoint, thorough=False)
        if found.name is not None and (
            each.name not in before or before[each.name].name != found.name
        ):
            return True
    return False


def clear_up(running: Running, scrap: Scrap) -> None:
    """Take away what an attempt that never began has on this disk."""
    rest = running.attempt.retire(scrap)
    if rest is not None:
        rest()
    for path, give in (
        (f"{running.attempt.path}.sh", scrap.give_script),
        (running.log, scrap.give_log),
    ):
        if os.path.exists(path):
            give(path)


class _Seat(NamedTuple):
    """One node of an attempt: its rank, where it runs, its directory, its interpreter, and what its job is called."""

    rank: int
    place: Place
    attempt: Attempt
    python: str
    name: str


class Attempts:
    """The attempts of one run.  `made` is what its steps have left so far, as it grows."""

    def __init__(
        self,
        ws: Workspace,
        survey: Survey,
        commits: GroupCommit,
        host_pool: HostPool,
        hooks: HostHooks,
        scrap: Scrap,
        made: Mapping[int, Made],
    ) -> None:
        self.ws, self.survey, self.commits, self.host_pool = ws, survey, commits, host_pool
        self.hooks, self.scrap, self.made = hooks, scrap, made
        self._top = str(ws.root)
        self._base: dict[
            tuple[object, ...], Passed
        ] = {}  # what attempts inherit, by what they ask for
        self._env_files = EnvFiles(ws.own)
        self._pythons: dict[
            tuple[Place, Wanted], asyncio.Task[str]
        ] = {}  # interpreters of environments, by place
        self._boxes: dict[str, Containers] = {}
        self._buckets = BucketInputs(ws, survey, commits, host_pool.name)
        self._inputs = StoredInputs(ws.objects, ws.cache)
        self._said: set[tuple[str, str]] = set()  # inputs that are not files of ours, and why

    def image(self, spec: StepSpec) -> str:
        """The image that a step runs in; empty for the host's own programs."""
        return "" if self.survey.request.current_python else str(spec.image or "")

    def wrapped(self, spec: StepSpec, place: Place) -> str:
        """The image of the container that a step needs there; empty where the machine itself is one of it."""
        image = self.image(spec)
        return "" if image == place.members[0].image else image

    def containers_of(self, place: Place) -> Containers:
        from ...hosts.containers import Containers

        if place.name not in self._boxes:
            box = self.host_pool.box if place.elsewhere else self.ws.config.driver("local")
            near = None if place.elsewhere else self.ws.environ
            self._boxes[place.name] = Containers(
                place.host, f"{place.folder.root}/attempts", self.commits.say, box, near
            )
        return self._boxes[place.name]

    def environment(self, node: Node, spec: StepSpec) -> Wanted | None:
        """What environment a step asks for; None for the Python of where it runs."""
        if not (node.lock or spec.python) or self.survey.request.current_python or spec.image:
            return None
        from ...hosts.environments import Wanted

        if not node.lock:
            return Wanted(None, "", spec.python)
        lock = locks.file_of(Path(self.survey.plan.homes[node.home], node.lock))
        return Wanted(lock, str(self.survey.facts.locks[node.home, node.lock]), spec.python)

    async def python(self, node: Node, spec: StepSpec, place: Place) -> str:
        """The interpreter of a step there, of its version and with the packages of its lock; in an image, the image's own.  Raises CannotRun."""
        if self.wrapped(spec, place):
            return "python"
        wanted = self.environment(node, spec)
        if wanted is None:
            return place.python
        # Installing takes minutes: hosts do it at the same time, also those whose turn comes later.
        others = (
            [other for other in self.host_pool.places if not other.lost]
            if place in self.host_pool.places
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
        """The Python that a step is given there, as people read it; empty in a container, which has its own."""
        if self.wrapped(spec, place):
            return ""
        wanted = self.environment(node, spec)
        if wanted is None:
            return place.described(place.python)
        made = self._pythons.get((place.members[0], wanted))
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return ""
        return place.described(made.result())

    async def _built(self, lock: str, place: Place, wanted: Wanted) -> str:
        from ...hosts.environments import built, python_of

        what = f"{lock or f'Python {wanted.version}'}{f' on {place.elsewhere}' if place.elsewhere else ''}"
        if lock and not await built(place, wanted):
            self.commits.say(f"installing the packages of {what}, once")
        return await python_of(
            self.hooks.of(place), wanted, lambda words: self.commits.say(f"{what}: {words}")
        )

    async def end_installs(self) -> None:
        """Stop waiting for what hosts still install."""
        installing = [task for task in self._pythons.values() if not task.done()]
        if installing:
            for hooks in self.hooks:
                with contextlib.suppress(DriverError):
                    await hooks.stop(INSTALL)
            await asyncio.wait(installing, timeout=GRACE.total_seconds())
            for task in installing:
                task.cancel()

    def processes(self, spec: StepSpec, n: int, place: Place) -> int | None:
        """How many processes an accelerate step runs as; None for any other command, whose checkpoints do not tell."""
        if spec.accelerate is None:
            return None
        scope = judging.scope_of(spec, self.survey.plan, n, self.made) | {
            "host": place.capacity.seen(spec.resources.gpus)
        }
        return launch.processes(spec.accelerate, scope) * len(place.members)

    def restored(
        self, spec: StepSpec, generation: checkpoints.Generation | None, world: int | None
    ) -> dict[str, checkpoints.Newest]:
        """From which checkpoint each state goes on, as far as what is here shows."""
        if generation is None:
            return {}
        from ...storage import checkpoints

        return {
            each.name: checkpoints.newest(
                generation.folder(each.name), each.checkpoint, world=world
            )
            for each in spec.state
        }

    def task(
        self,
        running: Running,
        spec: StepSpec,
        pythons: Sequence[str],
        restored: Mapping[str, checkpoints.Newest],
    ) -> HostTask:
        """What carries an attempt out, on the host that it runs on, or on several; `pythons` are the interpreters there."""
        if len(running.place.members) == 1:
            return self._task(
                running,
                spec,
                _Seat(0, running.place, running.attempt, pythons[0], running.name),
                restored,
            )
        running.attempt.called = f"{running.name}.0"
        parts = []
        for rank, (place, python) in enumerate(zip(running.place.members, pythons, strict=True)):
            name = f"{running.name}.{rank}"
            attempt = (
                Attempt(f"{os.path.dirname(running.attempt.path)}/{name}")
                if rank
                else running.attempt
            )
            parts.append(
                self._task(running, spec, _Seat(rank, place, attempt, python, name), restored)
            )
            parts[-1].python = "" if self.wrapped(spec, place) else python
        return dataclasses.replace(parts[0], name=running.name, parts=parts)

    def _task(
        self,
        running: Running,
        spec: StepSpec,
        seat: _Seat,
        restored: Mapping[str, checkpoints.Newest],
    ) -> HostTask:
        node, place, generation, attempt = running.node, seat.place, running.state, seat.attempt
        states: list[StateFolder] = []
        if generation is not None:
            for name, path, pattern, every, keep, _shared in spec.state:
                states.append(
                    StateFolder(
                        name,
                        path,
                        generation.folder(name),
                        f"states/{generation.id}/{name}",
                        pattern,
                        every,
                        keep,
                    )
                )
                states[-1].here.mkdir(parents=True, exist_ok=True)
        if not seat.rank:
            shown = {each.name: each.here for each in states}
            job_folders.show(self.ws, self.commits.run, node.id, shown, self.commits.say)

        def compose(found: Mapping[str, checkpoints.Newest]) -> tuple[Command, bytes | None]:
            attempt.folder.begin(self.scrap)
            crashpoint("attempt-made")
            self.stage(node, spec, attempt, place)
            attempt.note_given()
            self._explain(node, attempt)
            place.give_states(attempt, states)
            running.begins = found
            running.goes_on = max(
                (newest.step for newest in found.values() if newest.step is not None), default=None
            )
            return self.command(running, spec, seat, found)

        say = functools.partial(self._say, node.id)
        outputs = () if seat.rank else node.outputs
        task = HostTask(
            seat.name,
            outputs,
            attempt,
            compose,
            self.scrap,
            say,
            self._confirmed,
            spec.metrics,
            states,
            restored,
        )
        task.bring = functools.partial(self._buckets.bring, node, attempt, place)
        if place.elsewhere:
            task.phase = functools.partial(self._log_phase, node.id, place)
        if states:
            task.processes = self.processes(spec, running.number, running.place)
            task.round = functools.partial(self._report_round, running)
        if spec.sync and not seat.rank:
            from ...hosts.place.output_sync import Synced

            made = {name: (path, bool(flags & DIRECTORY)) for name, path, flags in node.outputs}
            task.synced = [Synced(*made[name], every) for name, every in spec.sync]
        return task

    def _log_phase(self, step: str, place: Place, phase: Phase) -> None:
        pool = self.host_pool
        log_remote(self.ws, self.commits.run, pool.name, pool.instance_of(place), phase, step)

    async def _confirmed(self) -> None:
        """The run is ours at this moment.  Waits for a database that does not answer: nothing begins meanwhile.  Raises Stale."""
        while True:
            try:
                return self.commits.confirm()
            except Infrastructure:
                await asyncio.sleep(AGAIN)

    def _say(self, id: str, words: str) -> None:
        self.commits.say(f"{id}: {words}")

    def command(
        self,
        running: Running,
        spec: StepSpec,
        seat: _Seat,
        restored: Mapping[str, checkpoints.Newest],
    ) -> tuple[Command, bytes | None]:
        """What is run on one node, and the script that has to lie beside the attempt for it."""
        node, (rank, place, attempt, python, _) = running.node, seat
        gpus = (
            0 if place.port and spec.resources.gpus else spec.resources.gpus
        )  # those of a step under a head are its workers'
        members, devices = (
            running.place.members,
            running.place.capacity.share(rank, running.devices),
        )
        addresses = [each.address for each in members] if len(members) > 1 else ["127.0.0.1"]
        paths = place.paths(attempt)
        attempt.prepare_outputs(node.outputs)  # after the state, below which some may lie
        scope: dict[str, object] = {}
        if not launch.plain(spec):
            last = {
                each.name: f"{each.path}/{name}" if (name := restored[each.name].name) else None
                for each in spec.state
            }
            scope = judging.scope_of(spec, self.survey.plan, running.number, self.made)
            scope |= {
                "state": {
                    each.name: StatePath(each.path, {"latest": last[each.name]})
                    for each in spec.state
                },
                "run": {"id": self.commits.run, "recipe": self.survey.plan.recipe},
                "step": {"id": node.id, "key": running.key or ""},
                "node": {"rank": rank},
                "nodes": {"count": len(addresses), "addresses": addresses},
                "host": place.capacity.seen(gpus),
            }
        made = launch.render(spec, scope, python=python)
        for path, data in made.files.items():
            attempt.add_bytes(data, path)
        attempt.folder.ready()
        script = made.script.encode("utf-8", "surrogateescape") if made.script is not None else None
        argv = made.argv if script is None else (*made.argv, paths.script)
        image = self.wrapped(spec, place)
        inherited = self._inherited(spec, place, image)
        env = {**inherited.plain, "RECIPE_STEP": node.id}
        if gpus is not None and not (
            image and gpus
        ):  # a container that is given some sees no other, and counts them anew
            from drivers.devices import assigned

            env |= assigned(devices, env)
        if not image and python != place.python:
            env["PATH"] = f"{os.path.dirname(python)}:{env['PATH']}"
        if spec.metrics is not None and spec.metrics.in_environment:
            env["RECIPE_METRICS"] = paths.metrics
        if spec.state:
            env["RECIPE_CONTROL"] = control_file.control_file(paths.cwd)
        if "RECIPE_METRICS" in env and (total := steps_of(self.survey, node.id)):
            env["RECIPE_TOTAL_STEPS"] = f"{total:.0f}"
        env |= {
            name: self.ws.environ[name]
            for name in INTERVALS
            if name in self.ws.environ and (spec.state or "RECIPE_METRICS" in env)
        }
        if len(members) > 1:
            env |= {
                "NODE_RANK": str(rank),
                "NNODES": str(len(members)),
                "RECIPE_NODES": ",".join(addresses),
            }
            env |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": launch.PORT}
        env |= made.env
        secrets = {
            secret.name: secret.reveal
            for secret in (*inherited.secrets, *given(spec, self.ws.environ))
        }
        locks = tuple(device.lock for device in devices)
        short = self.commits.expected.get(node.id, LONG) < LONG
        # Of several nodes the first one's silence counts: as a rule it alone prints.
        idle = None if rank else spec.idle_timeout
        command = Command(
            argv, paths.cwd, env, secrets, spec.timeout, idle, paths.log, locks, outlives=not short
        )
        if image:
            limited = "CUDA_VISIBLE_DEVICES" in place.login
            held = devices if gpus is not None else place.capacity.devices if limited else None
            mounts = place.mounts(attempt, command, running.task.states)
            command = self.containers_of(place).wrap(
                command, image, mounts, held, needed=bool(gpus)
            )
        return command, script

    def _inherited(self, spec: StepSpec, place: Place, image: str) -> Passed:
        """What an attempt gets of the login on its machine, of the caller's variables and of its files of them.  Raises CannotRun."""
        inherits = (place.name, bool(image), *spec.pass_env, None, *spec.env_files, None, *spec.env)
        if (found := self._base.get(inherits)) is None:
            more = passed(spec, self._env_files.values(spec.env_files), self.ws.environ)
            if image:
                from ...hosts.containers import base_env

                base = base_env(place.login)
            else:
                base = place.env({*more.plain, *spec.env})
            ours = {"RECIPE_RUN": self.commits.run, "NODE_RANK": "0", "NNODES": "1"}
            found = self._base[inherits] = Passed({**base, **more.plain, **ours}, more.secrets)
            self.commits.masker.learn([*more.secrets, *passwords(found.plain)])
        return found

    def stage(self, node: Node, spec: StepSpec, attempt: Attempt, place: Place) -> None:
        """Put all that a step declares into its attempt directory; an output that is not here, but where it will run, by name only."""
        cache, objects = self.ws.cache, self.ws.objects
        attempt.boxed = bool(self.wrapped(spec, place))
        inputs = None if place.own_disk else self._inputs
        add = functools.partial(attempt.add_path, cache, inputs=inputs)
        for at, content, source, name, group in self._declared(node):
            add(at, content, source, name, copy=not group, group=group)
        for url, commit, at in spec.git:
            from ...storage.git_checkout import checkout, located

            checkout(
                self.ws,
                located(url, self.survey.plan.homes[node.home]),
                commit,
                Path(attempt.target_of(at)),
            )
        for taken in node.takes:
            name, kind, address, only = taken
            if kind == "path":
                source = str(self.ws.absolute(address))
                if only and os.path.isdir(source):
                    identity, contents = chosen(cache, source, only)
                    for path in contents:
                        each = f"{source}/{path}"
                        add(each, contents[path], each, f"{name}/{path}", group=name)
                    if identity != self.survey.facts.takes[taken.asked]:
                        attempt.doubtful.append(
                            source
                        )  # one came, went or changed since the key was made
                    continue
                add(source, self.survey.facts.takes[taken.asked], source, name)
            elif (
                kind != "stream" and name not in attempt.objects
            ):  # else its host has it from its bucket
                source = str(
                    fetch(self.ws, kind, address, str(self.survey.facts.takes[taken.asked]), only)
                )
                if address in self.ws.addresses:
                    self.ws.store.runs.opened(self.commits.run, address)
                add(source, None, source, name)
        for producer, output, name, below in node.upstream:
            made = self.made[producer].outputs.get(output)
            if made is None:
                continue  # an optional output that was not made
            if below and place.own_disk:
                source = f"{objects.path(Content(made))}/{below}"
                add(source, None, source, name)
            elif below:
                attempt.add_part(objects, made, below, name)
            elif place.folder.holds(made) and not objects.has(Content(made)):
                attempt.objects[name] = made
            else:
                attempt.add_object(objects, made, name, by_link=place.own_disk)
        attempt.give_files(cache, self._inputs)

    def _explain(self, node: Node, attempt: Attempt) -> None:
        """Say once a run which inputs are links, or copies for each step, and why."""
        for name, why in attempt.notices.items():
            if (name, why) not in self._said:
                self._said.add((name, why))
                self.commits.say(f"{node.id}: input {name}: {why}")

    def _declared(self, node: Node) -> Iterator[tuple[str, str | None, str, str, str]]:
        """Files and folders of the caller's that a step is given: the cache's name of each, its content, path, name there, and its pattern.

        The pattern is empty for code, which is copied.
        """
        facts = self.survey.facts
        found = {path: dep for dep in node.deps for path in facts.matches.get(dep, (dep,))}
        for path in sorted(found):  # a folder before what is in it
            yield path, facts.files.get(path), f"{self._top}/{path}", path, found[path]
        for pattern in node.code:
            base = os.path.realpath(self.survey.plan.homes[node.home])
            for name, content in facts.code.get((node.home, pattern), ()):
                yield f"{base}/{name}", content, f"{base}/{name}", name, ""

    def recall(self, node: Node, attempt: Attempt) -> bool:
        """Whether what an earlier worker staged is what the step's key says now; from then on it is looked at as if this worker had staged it."""
        same = [
            attempt.recall_path(self.ws.cache, at, content or "", source, name)
            for at, content, source, name, _ in self._declared(node)
        ]
        for name, kind, address, only in node.takes:
            if kind == "path" and not only:
                source, identity = (
                    str(self.ws.absolute(address)),
                    self.survey.facts.takes[kind, address],
                )
                same.append(
                    attempt.recall_path(self.ws.cache, source, identity or "", source, name)
                )
        for producer, output, name, below in node.upstream:
            made = self.made[producer].outputs.get(output)
            if made is not None and not below:
                same.append(attempt.recall_object(made, name))
        return all(same)

    def _report_round(self, running: Running, round: Round) -> None:
        """What a checkpoint sync reports to the user."""
        if round.brought:
            running.saved += round.size
        for words in (round.problem, round.warning):
            if words:
                self.commits.say(f"{running.place.name}: {words}")
        for name, why in round.passed:
            self.commits.say(f"checkpoint {name} on {running.place.name} is passed over: {why}")
