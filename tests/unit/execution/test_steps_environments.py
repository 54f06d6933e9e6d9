"""The image, the packages or the own Python of a host that each step gets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Unreachable
from runner.errors import CannotRun
from runner.execution.steps import environments
from runner.execution.steps.environments import StepEnvironments
from runner.hosts.environments import EnvironmentSpec
from runner.language.step_options import StepOptions
from runner.planning.step import StepSpec

PLAIN = StepSpec("", "a", {}, run="make")
IN_IMAGE = PLAIN._replace(image="pytorch:2")
NAMES_PYTHON = PLAIN._replace(run="python train.py")
UNLOCKED: Any = Of(lock="", home=0)
LOCKED: Any = Of(lock="req.lock", home=0)


class Host(Of):
    """Is equal to itself alone, as places are."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def host(name: str, image: str = "") -> Any:
    me = Host(name=name, elsewhere="" if name == "local" else name, image=image, lost="")
    me.members, me.host, me.python = (me,), Of(), f"/{name}/python"
    me.folder = Of(root=f"/{name}")
    me.describe_python = lambda python, may_ask: f"{python} {'3.12' if may_ask else '?'}"
    return me


class Hosts:
    """A run on these hosts, and what was done there for the environments of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: Sequence[Any] = ()) -> None:
        self.places, self.said, self.pulled = [*places], list[str](), list[tuple[str, str]]()
        self.made, self.checked, self.asked = list[Any](), list[str](), list[str]()
        self.installs, self.stopped = list[tuple[str, EnvironmentSpec]](), list[str]()
        self.built = self.unreachable = False
        self.refusals: dict[str, str] = {}
        self.goes_on = asyncio.Event()
        self.request = Of(current_python=False)
        self.flags: dict[str, object] = {}
        ws: Any = Of(
            environ={"HOME": "/me"},
            config=Of(driver=lambda name: {"of": name}, flags=self.flags),
        )
        facts = Of(locks={(0, "req.lock"): "f-lock"})
        parts: list[Any] = [
            Of(survey=Of(request=self.request), plan=Of(homes=["/recipes"]), facts=facts),
            Of(say=self.said.append),
            Of(container_settings={"of": "vastai"}, places=self.places),
            self,
        ]
        monkeypatch.setattr("runner.hosts.containers.Containers", self._containers)
        monkeypatch.setattr("runner.hosts.sandbox.Sandboxes", lambda: Of(check=self._check))
        monkeypatch.setattr("runner.hosts.environments.is_built", self._is_built)
        monkeypatch.setattr("runner.hosts.environments.provide_python", self._provide)
        monkeypatch.setattr("runner.hosts.interpreters.ask_version", self.asked.append)
        monkeypatch.setattr("runner.survey.locks.lock_file", lambda path: path)
        self.own = StepEnvironments(ws, *parts)

    def _containers(self, host: Any, attempts: str, _say: Any, *given: Any) -> Any:
        async def pull(image: str) -> None:
            self.pulled.append((attempts, image))

        self.made.append(given)
        return Of(provide_image=pull)

    async def _check(self, place: Any) -> None:
        self.checked.append(place.name)

    def of(self, place: Any) -> Any:
        return Of(place=place, stop=self._stop)

    def __iter__(self) -> Any:
        return iter([self.of(place) for place in self.places])

    async def _stop(self, what: str) -> None:
        self.stopped.append(what)
        if self.unreachable:
            raise Unreachable("far")
        self.goes_on.set()

    async def _is_built(self, _place: Any, _wanted: Any) -> bool:
        return self.built

    async def _provide(self, hooks: Any, wanted: Any, say: Callable[[str], None]) -> str:
        name = hooks.place.name
        self.installs.append((name, wanted))
        say("downloading")
        await self.goes_on.wait()
        if name in self.refusals:
            raise CannotRun(self.refusals[name])
        return f"/{name}/env/python"


Rented = Callable[..., Hosts]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Rented:
    return lambda *places: Hosts(monkeypatch, places)


def python(run: Hosts, place: Any, node: Any = LOCKED, spec: StepSpec = PLAIN) -> str:
    async def ask() -> str:
        run.goes_on.set()
        found = await run.own.python(node, spec, place)
        await asyncio.sleep(0)
        return found

    return asyncio.run(ask())


def test_a_step_runs_in_its_image_unless_the_machine_is_one_of_it(hosts: Rented) -> None:
    run = hosts()
    assert run.own.container_image(IN_IMAGE, host("h1")) == "pytorch:2"
    assert run.own.container_image(IN_IMAGE, host("h1", "pytorch:2")) == ""
    assert run.own.container_image(IN_IMAGE, host("h1", "other")) == "pytorch:2"
    assert run.own.container_image(PLAIN, host("h1")) == ""
    run.request.current_python = True
    assert run.own.container_image(IN_IMAGE, host("h1")) == run.own.image(IN_IMAGE) == ""


@pytest.mark.parametrize(
    ("name", "settings", "environ"),
    [("local", {"of": "local"}, {"HOME": "/me"}), ("h1", {"of": "vastai"}, None)],
)
def test_containers_have_the_settings_of_their_hosts_driver(
    hosts: Rented, name: str, settings: object, environ: object
) -> None:
    run, place = hosts(), host(name)
    assert run.own.containers_of(place) is run.own.containers_of(place)
    assert run.made == [(settings, environ)]


@pytest.mark.parametrize(
    ("spec", "flags", "pulled", "checked"),
    [
        (PLAIN, {}, False, False),
        (IN_IMAGE, {}, True, False),
        (PLAIN._replace(options=StepOptions(sandbox="closed")), {}, False, True),
        (PLAIN, {"steps.sandbox": True}, False, True),
        (IN_IMAGE, {"steps.sandbox": True}, True, False),  # a container is one
    ],
)
def test_a_host_gets_the_image_of_a_step_or_is_checked_for_its_sandbox(
    hosts: Rented, spec: StepSpec, flags: dict[str, object], pulled: bool, checked: bool
) -> None:
    run = hosts()
    run.flags.update(flags)
    asyncio.run(run.own.make_ready(spec, host("h1")))
    assert run.pulled == ([("/h1/attempts", "pytorch:2")] if pulled else [])
    assert run.checked == (["h1"] if checked else [])


@pytest.mark.parametrize(
    ("node", "spec", "current", "path"),
    [
        (UNLOCKED, PLAIN, False, "/h1/python"),
        (LOCKED, PLAIN, False, "/h1/env/python"),
        (UNLOCKED, PLAIN._replace(python="3.12"), False, "/h1/env/python"),
        (LOCKED, PLAIN, True, "/h1/python"),
        (LOCKED, IN_IMAGE, False, "python"),
    ],
)
def test_the_interpreter_of_a_step_is_that_of_its_image_its_packages_or_the_host(
    hosts: Rented, node: Any, spec: StepSpec, current: bool, path: str
) -> None:
    place = host("h1")
    run = hosts(place)
    run.request.current_python = current
    assert python(run, place, node, spec) == path
    assert len(run.installs) == (path == "/h1/env/python")


def test_the_image_of_the_machine_itself_has_the_packages(hosts: Rented) -> None:
    place = host("h1", "pytorch:2")
    run = hosts(place)
    assert python(run, place, LOCKED, IN_IMAGE) == "/h1/python" and run.installs == []


@pytest.mark.parametrize(
    ("spec", "name", "asked"),
    [(NAMES_PYTHON, "local", True), (PLAIN, "local", False), (NAMES_PYTHON, "h1", False)],
)
def test_a_python_of_this_machine_is_asked_for_its_version_if_the_step_names_it(
    hosts: Rented, spec: StepSpec, name: str, asked: bool
) -> None:
    run, place = hosts(), host(name)
    assert python(run, place, UNLOCKED, spec) == f"/{name}/python"
    assert run.asked == (["/local/python"] if asked else [])


def test_all_hosts_of_a_run_install_at_once_and_each_once(hosts: Rented) -> None:
    one, two, lost = host("h1"), host("h2"), host("h3")
    lost.lost = "switched off"
    run = hosts(one, two, lost)
    assert python(run, one) == "/h1/env/python"
    wanted = EnvironmentSpec(Path("/recipes/req.lock"), "f-lock", "")
    assert run.installs == [("h1", wanted), ("h2", wanted)]


def test_a_host_outside_those_of_the_run_installs_alone(hosts: Rented) -> None:
    run = hosts(host("h1"))
    assert python(run, host("local")) == "/local/env/python"
    assert [name for name, _ in run.installs] == ["local"]


def test_hosts_that_cannot_install_fail_the_steps_there_alone(hosts: Rented) -> None:
    one, two = host("h1"), host("h2")
    run = hosts(one, two)
    run.refusals = {"h2": "no wheel"}

    async def ask() -> None:
        run.goes_on.set()
        assert await run.own.python(LOCKED, PLAIN, one) == "/h1/env/python"
        with pytest.raises(CannotRun, match="no wheel"):
            await run.own.python(LOCKED, PLAIN, two)
        assert run.own.interpreter(LOCKED, PLAIN, one) == "/h1/env/python 3.12"
        assert run.own.interpreter(LOCKED, PLAIN, two) == ""

    asyncio.run(ask())


def test_installing_is_said_with_the_host_at_the_first_use(hosts: Rented) -> None:
    here, there = host("local"), host("h1")
    run = hosts(here, there)
    python(run, here)
    assert run.said == [
        "installing the packages of req.lock (first use only)",
        "req.lock: downloading",
        "installing the packages of req.lock on h1 (first use only)",
        "req.lock on h1: downloading",
    ]
    again = hosts(here)
    again.built = True
    python(again, here)
    assert again.said == ["req.lock: downloading"]
    version = hosts(here)
    python(version, here, UNLOCKED, PLAIN._replace(python="3.12"))
    assert version.said == ["Python 3.12: downloading"]


def test_the_interpreter_is_described_unless_it_is_in_an_image_or_not_installed(
    hosts: Rented,
) -> None:
    run, place = hosts(), host("h1")
    assert run.own.interpreter(LOCKED, IN_IMAGE, place) == ""
    assert run.own.interpreter(UNLOCKED, NAMES_PYTHON, place) == "/h1/python 3.12"
    assert run.own.interpreter(UNLOCKED, PLAIN, place) == "/h1/python ?"
    assert run.own.interpreter(LOCKED, PLAIN, place) == ""


@pytest.mark.parametrize("unreachable", [False, True])
def test_installations_that_still_run_are_stopped_with_the_run(
    hosts: Rented, unreachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = host("h1"), host("h2")
    run = hosts(one, two)
    run.unreachable = unreachable
    monkeypatch.setattr(environments, "GRACE", Of(total_seconds=lambda: 0.0))

    async def end() -> asyncio.Task[str]:
        waits = asyncio.ensure_future(run.own.python(LOCKED, PLAIN, one))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert run.own.interpreter(LOCKED, PLAIN, one) == ""
        await run.own.end_installs()
        for _ in range(5):
            await asyncio.sleep(0)
        assert waits.done()
        assert run.own.interpreter(LOCKED, PLAIN, one) == (
            "" if unreachable else "/h1/env/python 3.12"
        )
        return waits

    waits = asyncio.run(end())
    assert len(run.stopped) == 2 and waits.cancelled() == unreachable


def test_asyncio_does_not_complain_about_an_installation_that_no_step_awaits(
    hosts: Rented,
) -> None:
    one, two = host("h1"), host("h2")
    run = hosts(one, two)
    run.refusals = {"h2": "no wheel"}
    complaints = list[object]()

    async def ask() -> None:
        handler = lambda _loop, context: complaints.append(context)  # noqa: E731
        asyncio.get_running_loop().set_exception_handler(handler)
        run.goes_on.set()
        await run.own.python(LOCKED, PLAIN, one)
        await asyncio.sleep(0)
        run.own._pythons.clear()
        gc.collect()

    asyncio.run(ask())
    assert complaints == []


def test_nothing_is_stopped_if_all_is_installed(hosts: Rented) -> None:
    place = host("h1")
    run = hosts(place)

    async def end() -> None:
        run.goes_on.set()
        await run.own.python(LOCKED, PLAIN, place)
        await run.own.end_installs()

    asyncio.run(end())
    assert run.stopped == []
