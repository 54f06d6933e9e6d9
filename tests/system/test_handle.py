"""`runner.submit` and handles of runs: the same in a workspace, a database and behind a server, at once and by `await`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import runner
from drivers import install_line
from runner.api.submitting import QueueSettings, submit
from runner.errors import CannotRun, Infrastructure, Invalid, NotFound
from runner.execution.terms import Choice, Settings
from runner.interface.handle.core import TimedOut
from runner.interface.handle.shells import Run
from runner.storage import run_views
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.cloud import cloud
from tests.servers.postgres import Postgres
from tests.servers.proxy import Proxy
from tests.servers.rest import Rest
from tests.support import RECIPE, Space, until

TALK = """\
recipe: talk@1
summary: Says what it is asked to.
inputs: {word: {type: string, default: hello}, times: {type: integer, default: 3, minimum: 1}}
steps:
  say:
    run: |
      for n in $(seq {{ inputs.times }}); do echo {{ inputs.word }} $n; done
      printf 'an open line'; echo '{"loss": 2.5}' >> $RECIPE_METRICS
      mkdir -p {{ outputs.all }}/deep; echo {{ inputs.word }} > {{ outputs.all }}/deep/said.txt; echo 2 > {{ outputs.all }}/two.txt
      cd {{ outputs.all }}; mkdir empty; ln -s deep/said.txt last; ln -s deep/none gone; echo '#!/bin/sh' > tool; chmod +x tool
    metrics: true
    outputs: {all: all/}
  copy: {run: 'cp {{ steps.say.all }}/two.txt {{ outputs.two }}; echo copied', outputs: {two: two.txt}}
"""
GATE = """\
recipe: gate@1
summary: Waits for a file.
inputs: {name: {type: string}}
steps:
  wait:
    run: |
      n=0
      echo begun
      while [ ! -e ROOT/go-{{ inputs.name }} ]; do n=$((n + 1)); echo line $n; sleep 0.02; done
      echo over > {{ outputs.o }}
    outputs: {o: over.txt}
"""


class Kept(NamedTuple):
    """Where runs are kept, and the folder of the workers."""

    to: str | None
    root: Path
    talk: str
    gate: str

    def submit(self, word: str, **inputs: object) -> Run:
        return runner.submit(
            word,
            inputs,
            to=self.to,
            workspace=self.root,
            here=self.to is not None and self.to.startswith("postgresql"),
        )


def folder(root: Path) -> Path:
    root.mkdir()
    (root / "talk.yaml").write_text(TALK)
    (root / "gate.yaml").write_text(GATE.replace("ROOT", str(root)))
    (root / "recipe.toml").write_text('[recipes]\nallow = ["talk.yaml", "gate.yaml"]\n')
    return root


@pytest.fixture(scope="module", params=["workspace", "database", "server"])
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Postgres
) -> Iterator[Kept]:
    root = folder(tmp_path_factory.mktemp("kept") / "space")
    if request.param == "server":
        with Rest(root, "--with-worker") as rest, pytest.MonkeyPatch.context() as environ:
            environ.setenv("RECIPE_TOKEN", rest.token)
            yield Kept(rest.url, root, "talk", "gate@1")
        return
    to = server.url() if request.param == "database" else None
    environ = {**os.environ, **({"RECIPE_RUNS": to} if to else {})}
    worker = subprocess.Popen(
        [*RECIPE, "worker", "--tied", "-qq"], cwd=root, env=environ, stdin=subprocess.PIPE
    )
    yield Kept(to, root, "./talk.yaml", "./gate.yaml")
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(60) == 0


def test_a_run_is_submitted_followed_and_its_results_downloaded(kept: Kept, tmp_path: Path) -> None:
    with kept.submit(kept.talk, times=4) as run:
        printed = list(run.logs(follow=True))
        assert [str(line) for line in printed] == [
            *(f"hello {n}" for n in range(1, 5)),
            "an open line",
            "copied",
        ]
        assert [line.step for line in printed] == ["say"] * 5 + ["copy"]
        ended = run.wait(60)
        assert (ended.state, ended.over, ended.recipe, ended.inputs["times"]) == (
            "COMPLETED",
            True,
            "talk@1",
            4,
        )
        assert [(step.id, step.state) for step in ended.steps] == [
            ("say", "DONE"),
            ("copy", "DONE"),
        ] and ended.progress.percent == 100
        events = list(run.events(follow=True))
        assert [event.seq for event in events] == list(range(1, ended.seq + 1)) and events[
            -1
        ].after == "COMPLETED"
        assert (
            list(run.events(after=events[-2].seq)) == events[-1:] and events[0].at <= events[-1].at
        )
        assert [(point.step, point.values) for point in run.metrics()] == [("say", {"loss": 2.5})]
        assert [(each.name, each.folder) for each in run.outputs()] == [
            ("say.all", True),
            ("copy.two", False),
        ]
        paths = run.download(tmp_path / "results")
        assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
            "results/say.all/deep/said.txt",
            "results/say.all/gone",
            "results/say.all/last",
            "results/say.all/tool",
            "results/say.all/two.txt",
            "results/copy.two",
        ]
        assert [path.read_text() for path in paths if path.exists()] == [
            "hello\n",
            "hello\n",
            "#!/bin/sh\n",
            "2\n",
            "2\n",
        ]
        assert [path.name for path in paths if os.access(path, os.X_OK)] == [
            "tool"
        ] and os.readlink(paths[2]) == "deep/said.txt"
        assert list((tmp_path / "results/say.all/empty").iterdir()) == []
        assert [line.text for line in run.logs(step="copy")] == ["copied"]
        (tmp_path / "results/copy.two").write_text("mine")
        with pytest.raises(CannotRun, match="already exists with other content"):
            run.download(tmp_path / "results", "copy.two")
        assert (tmp_path / "results/copy.two").read_text() == "mine" and len(
            list((tmp_path / "results").iterdir())
        ) == 2
        run.download(tmp_path / "results", "copy.two", overwrite=True)
        assert (tmp_path / "results/copy.two").read_text() == "2\n"
        with pytest.raises(NotFound, match="no output"):
            run.download(tmp_path, "copy.tow")
    assert "COMPLETED" in runner.run_of(run.id, to=kept.to, workspace=kept.root)._repr_html_()


def test_the_same_is_awaited(kept: Kept, tmp_path: Path) -> None:
    async def main() -> None:
        here = kept.to is not None and kept.to.startswith("postgresql")
        run = await runner.submit_async(
            kept.talk, {"word": "hi"}, to=kept.to, workspace=kept.root, here=here
        )
        async with run:
            assert [line.text async for line in run.logs(follow=True)] == [
                "hi 1",
                "hi 2",
                "hi 3",
                "an open line",
                "copied",
            ]
            ended = await run.wait(60)
            assert ended.state == "COMPLETED" and [
                event.seq async for event in run.events()
            ] == list(range(1, ended.seq + 1))
            assert [point.values for point in await run.metrics()] == [{"loss": 2.5}]
            assert [path.read_text() for path in await run.download(tmp_path, "copy.two")] == [
                "2\n"
            ]
            assert {each.name for each in await run.outputs()} == {"copy.two", "say.all"}
            with pytest.raises(Invalid, match="COMPLETED"):
                await run.cancel()
        again = await runner.run_of_async(run.id, to=kept.to, workspace=kept.root)
        assert (await again.status()).state == "COMPLETED"
        await again.close()

    asyncio.run(main())


def test_a_run_is_paused_resumed_and_cancelled_and_a_with_does_none_of_it(kept: Kept) -> None:
    with kept.submit(kept.gate, name=f"p{kept.to is None}") as run:
        pass
    run = runner.run_of(run.id, to=kept.to, workspace=kept.root)
    lines = run.logs(follow=True)
    assert next(lines).text == "begun"
    with pytest.raises(TimedOut, match="has not finished yet"):
        run.wait(0.05)
    run.pause()
    until(lambda: run.status().state == "PAUSED")
    with pytest.raises(Invalid, match="already PAUSED"):
        run.pause()
    until(lambda: _does(run.resume))
    until(lambda: [step.state for step in run.status().steps] == ["RUNNING"])
    run.cancel()
    assert run.wait(60).state == "CANCELLED"
    for refused in (run.cancel, run.pause, run.resume):
        with pytest.raises(Invalid, match="is already CANCELLED"):
            refused()
    assert [event.after for event in run.events() if event.subject == "run"][-1] == "CANCELLED"
    again = run.retry()
    assert again.id != run.id
    again.cancel()
    assert again.wait(60).state == "CANCELLED"


def _does(call: object) -> bool:
    """Whether a request is accepted: the worker of a run that has just paused may not have let go of it."""
    from runner.errors import Busy

    try:
        call()  # type: ignore[operator]
    except Busy:
        return False
    return True


def test_errors_are_those_of_the_command_line(kept: Kept) -> None:
    with pytest.raises(NotFound):
        kept.submit("no-such-recipe")
    with pytest.raises(Invalid) as found:
        kept.submit(kept.talk, times=0, wrod="x")
    assert len(found.value.problems) == 2 and found.value.exit_code == 3
    with pytest.raises(NotFound):
        runner.run_of("20260101-000000-abcdef", to=kept.to, workspace=kept.root)
    with pytest.raises(NotFound):
        runner.run_of("../../x", to=kept.to, workspace=kept.root)


def test_a_run_that_waits_again_for_a_worker_needs_no_recovery(tmp_path: Path) -> None:
    (tmp_path / "talk.yaml").write_text(TALK)
    with runner.submit(tmp_path / "talk.yaml", workspace=tmp_path) as run:
        run.pause()
        run.resume()
        listed = subprocess.run(
            [*RECIPE, "runs", "-C", str(tmp_path), "--json"],
            capture_output=True,
            check=True,
            text=True,
        )
    assert [each["state"] for each in json.loads(listed.stdout)] == ["QUEUED"]


def test_an_option_that_is_misspelt_or_that_no_run_can_have_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "talk.yaml").write_text(TALK)
    wrong: list[dict[str, Any]] = [
        {"limits": {"tme": 1}},
        {"limits": {"cost": -1}},
        {"priority": "x"},
        {"labels": {"a": 1}},
        {"user": 5},
    ]
    for how in [*wrong, {"not_before": "soon"}, {"limits": 5}]:
        with pytest.raises(Invalid):
            runner.submit("./talk.yaml", workspace=tmp_path, **how)
    misspelt: dict[str, Any] = {"limit": {"cost": 1}}
    with pytest.raises(TypeError, match="limits"):
        runner.submit("./talk.yaml", workspace=tmp_path, **misspelt)
    assert not (tmp_path / ".recipe").exists()


def test_a_retry_is_reported_to_whom_the_run_was(tmp_path: Path) -> None:
    hooks = [{"url": "https://hooks.example/runs", "events": ["run.*"]}]
    with Workspace.open(folder(tmp_path / "space")) as ws:
        ticket = QueueSettings(
            reports_to={"webhooks": hooks}, labels={"gpu": "none"}, priority=3, user="ann"
        )
        first = submit(ws, Request("./talk.yaml", {}), Choice(), Settings(), ticket).id
        with runner.run_of(first, workspace=ws.root) as run:
            run.cancel()
            again = ws.store.runs.get(run.retry().id)
        assert again.id != first and (again.data["webhooks"], again.priority, again.user) == (
            hooks,
            3,
            "ann",
        )


def test_the_recipes_that_may_be_run_are_listed(kept: Kept) -> None:
    known = {each.id: each for each in runner.recipes(to=kept.to, workspace=kept.root)}
    assert "sft@1" in known and known["talk@1"].summary == "Says what it is asked to."
    assert known["talk@1"].file == "./talk.yaml" and not known["sft@1"].file
    awaited = asyncio.run(runner.recipes_async(to=kept.to, workspace=kept.root))
    assert [each.id for each in awaited] == [*known]


def test_a_forecast_is_the_same_wherever_the_run_would_be_kept(kept: Kept) -> None:
    found = runner.forecast(
        kept.talk, {"times": 2, "word": "plan"}, to=kept.to, workspace=kept.root
    )
    assert (found.recipe, found.driver, found.instances) == ("talk@1", "local", 1)
    assert found.inputs == {"word": "plan", "times": 2}
    assert [(each.id, each.answer, list(each.needs)) for each in found.steps] == [
        ("say", "run", []),
        ("copy", "maybe", ["say"]),
    ]
    assert found.machines == [] and found.usd_of_machines == 0
    assert found.command == "recipe run ./talk.yaml times=2 word=plan"
    again = runner.forecast_async(
        kept.talk, {"times": 2, "word": "plan"}, to=kept.to, workspace=kept.root
    )
    assert asyncio.run(again) == found
    with pytest.raises(Invalid, match="times"):
        runner.forecast(kept.talk, {"times": 0}, to=kept.to, workspace=kept.root)


def test_a_forecast_has_the_machine_that_would_be_rented(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud(space)
    space.recipe("steps:\n  train: {run: 'true', resources: {gpus: 1}}\n")
    (machine,) = runner.forecast(space.file, driver="loopback", workspace=space.root).machines
    assert (machine.step, machine.driver, machine.failed) == ("train", "loopback", "")
    assert machine.offer and machine.usd_an_hour


def test_a_key_is_one_run(kept: Kept) -> None:
    here = kept.to is not None and kept.to.startswith("postgresql")
    ids = {
        runner.submit(kept.talk, {}, to=kept.to, workspace=kept.root, here=here, key="once").id
        for _ in range(2)
    }
    assert len(ids) == 1
    with pytest.raises(Invalid, match="once"):
        runner.submit(
            kept.talk, {"times": 2}, to=kept.to, workspace=kept.root, here=here, key="once"
        )


# -- a server alone --------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rest, Proxy]]:
    """A server behind a proxy that breaks connections."""
    root = folder(tmp_path_factory.mktemp("proxied") / "space")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Proxy(port) as proxy:
        with (root / "recipe.toml").open("a") as settings:
            settings.write(f'[server]\nhosts = ["127.0.0.1:{proxy.port}"]\n')
        with (
            Rest(root, "--with-worker", "--port", str(port)) as rest,
            pytest.MonkeyPatch.context() as environ,
        ):
            environ.setenv("RECIPE_TOKEN", rest.token)
            yield rest, proxy


def test_a_lost_network_leaves_no_gap_and_repeats_nothing(proxied: tuple[Rest, Proxy]) -> None:
    rest, proxy = proxied
    run = runner.submit("gate", {"name": "net"}, to=f"http://127.0.0.1:{proxy.port}")
    seen: list[str] = []
    for n, line in enumerate(run.logs(follow=True)):
        seen.append(line.text)
        if n in (5, 20, 40, 60):
            proxy.reset() if n % 2 else proxy.cut()
        if n == 80:
            (rest.root / "go-net").touch()
    assert seen == ["begun", *(f"line {n}" for n in range(1, len(seen)))]
    assert len(seen) > 80
    proxy.cut()
    assert run.wait(60).state == "COMPLETED" and len(proxy.connections) >= 5


@pytest.mark.proof
def test_a_log_goes_on_behind_a_server_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder(tmp_path / "space")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    first = Rest(root, "--port", port)
    monkeypatch.setenv("RECIPE_TOKEN", first.token)
    run = runner.submit("gate", {"name": "again"}, to=first.url)
    worker = subprocess.Popen([*RECIPE, "worker", "--once", "-qq"], cwd=root)
    lines = run.logs(follow=True)
    seen = [next(lines).text for _ in range(10)]
    assert first.end() == 0
    with Rest(root, "--port", port):
        seen += [next(lines).text for _ in range(30)]
        (root / "go-again").touch()
        seen += [line.text for line in lines]
        assert run.wait(60).state == "COMPLETED"
    assert worker.wait(60) == 0
    assert seen == ["begun", *(f"line {n}" for n in range(1, len(seen)))]


def test_a_file_and_what_is_of_this_machine_are_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    nobody = "https://127.0.0.1:9"
    with pytest.raises(
        Invalid, match="local file, but a server runs only its own recipes"
    ) as found:
        runner.submit("./talk.yaml", {}, to=nobody)
    assert "allow" in found.value.problems[0].fix
    with pytest.raises(Invalid, match="in this machine's workspace"):
        runner.submit("talk", {}, to=nobody, out=tmp_path)
    with pytest.raises(Invalid, match="neither a database nor a server"):
        runner.submit("talk", {}, to="ftp://host/x")


def test_a_token_is_not_sent_in_the_clear_nor_read_from_an_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECIPE_TOKEN", raising=False)
    with pytest.raises(Invalid, match="unencrypted"):
        runner.run_of("x", to="http://runs.example:8765")
    file = tmp_path / "token"
    file.write_text("rcp_x\n")
    file.chmod(0o644)
    monkeypatch.setenv("RECIPE_TOKEN_FILE", str(file))
    with pytest.raises(Invalid, match="other users can read"):
        runner.run_of("x", to="http://127.0.0.1:9")


def test_a_wrong_token_and_a_stranger_are_distinguished(
    proxied: tuple[Rest, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, _ = proxied
    monkeypatch.setenv("RECIPE_TOKEN", "rcp_wrong")
    with pytest.raises(Invalid) as found:
        runner.run_of("x", to=rest.url)
    assert "RECIPE_TOKEN" in found.value.problems[0].fix
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr("runner.interface.handle.core.FEW", 1)
    with pytest.raises(Infrastructure, match="cannot reach the server"):
        runner.run_of("x", to=f"http://127.0.0.1:{port}")


def test_a_status_reads_the_graph_of_its_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, reads = folder(tmp_path / "w"), list[str]()
    run, recall = (
        runner.run_of(runner.run("talk", {}, workspace=root).run, workspace=root),
        run_views.recall,
    )
    monkeypatch.setattr(run_views, "recall", lambda at, id: reads.append(id) or recall(at, id))
    assert run.status().progress.percent == 100 and reads == [run.id]


def test_without_httpx_the_fix_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Infrastructure) as found:
        runner.run_of("x", to="http://127.0.0.1:9")
    assert found.value.fix == install_line("client")
