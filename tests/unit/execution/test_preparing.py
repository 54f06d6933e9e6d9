"""The directory, the task and the first checkpoints of an attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.errors import Infrastructure
from runner.execution.steps import preparing
from runner.execution.steps.attempt import Attempt
from runner.execution.steps.preparing import Preparer, find_restored
from runner.hosts.place.host_task import SyncRound
from runner.planning.step import DIRECTORY, MetricsSpec, StateSpec, StepSpec, SyncSpec
from runner.storage.checkpoints import CheckpointValidity, Generation, Newest, holder

OUTPUTS = [("model", "model", DIRECTORY), ("log", "log.txt", 0)]
SAVES = StateSpec("c", "ckpt", "step-*", 60.0, 3, every_steps=100)
PLAIN = StepSpec("", "a", {})


def host(name: str, gpus: int = 0, elsewhere: str = "") -> Any:
    me = Of(name=name, elsewhere=elsewhere, linked=[])
    me.members = (me,)
    me.capacity = Of(template_host=lambda _share: {"gpus": gpus})
    me.link_states = lambda directory, states: me.linked.append((directory.path, list(states)))
    return me


class Preparation:
    """A run's preparer, and what it asked of its neighbours."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / "attempts").mkdir()
        self.root, self.said, self.ready = root, list[str](), list[str]()
        self.built, self.begun, self.links = list[Any](), list[str](), list[Any]()
        self.phases, self.instances = list[tuple[str, str]](), list[Any]()
        self.explained, self.staged, self.confirms = list[str](), list[str](), list[object]()
        self.images: dict[str, str] = {}
        ws: Any = Of(home=root)
        monkeypatch.setattr(preparing, "BucketInputs", lambda *_words: Of(bring=self._bring))
        monkeypatch.setattr("runner.execution.job_folders.link_folders", self._link)
        monkeypatch.setattr("runner.planning.judge.scope_of", lambda *_words: {"n": 4})
        monkeypatch.setattr(preparing, "log_remote", lambda *words: self.instances.append(words))
        monkeypatch.setattr(preparing, "CONFIRM_AGAIN_SECONDS", 0.0)
        parts: list[Any] = [
            Of(survey=Of(), plan=Of(), made={}),
            Of(run="r", say=self.said.append, enter_phase=self._enter, confirm=self._confirm),
            Of(name="vastai", instance_of=lambda place: f"i-{place.name}"),
            Of(
                python=self._python,
                make_ready=self._make_ready,
                container_image=lambda _spec, place: self.images.get(place.name, ""),
            ),
            Of(
                stage=self._stage,
                explain=lambda node, directory: self.explained.append(node.id),
            ),
            Of(build=self._build),
            Of(take_folder=lambda _path: None),
        ]
        self.preparer = Preparer(ws, *parts)

    def _stage(self, _node: Any, _spec: Any, directory: Any, place: Any) -> None:
        self.staged.append(place.name)
        directory.objects["data"] = "f-data"

    async def _python(self, _node: Any, _spec: Any, place: Any) -> str:
        return f"/{place.name}/python"

    async def _make_ready(self, _spec: Any, place: Any) -> None:
        self.ready.append(place.name)

    async def _bring(self, node: Any, directory: Any, place: Any) -> None:
        self.begun.append(f"{node.id} {Path(directory.path).name} {place.name}")

    def _link(self, _ws: Any, run: str, step: str, states: Any, _say: Any) -> None:
        self.links.append((run, step, dict(states)))

    def _enter(self, step: str, phase: str) -> None:
        self.phases.append((step, phase))

    def _confirm(self) -> None:
        answer = self.confirms.pop(0)
        if isinstance(answer, Exception):
            raise answer

    def _build(self, attempt: Any, seat: Any, resumed_from: Any) -> Any:
        self.built.append((seat.rank, seat.name, seat.python))
        return "command", b"script"

    def prepare(
        self, hosts: Sequence[Any], spec: StepSpec = PLAIN, *, restored: Any = None
    ) -> Attempt:
        place: Any = hosts[0] if len(hosts) == 1 else host("stack", elsewhere="far")
        if len(hosts) > 1:
            place.members = hosts
            place.capacity = hosts[0].capacity
        node: Any = Of(id="a", outputs=OUTPUTS)
        attempt = Attempt(0, node, spec, None, None, place)  # type: ignore[arg-type]
        attempt.name = "run-7"
        if spec.state:
            attempt.state = Generation(self.root / "states" / "g" / "1", "", "g1")
            attempt.state.path.mkdir(parents=True)
        attempt.restored = restored or {}
        asyncio.run(self.preparer.prepare(attempt))
        return attempt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparation:
    return Preparation(tmp_path, monkeypatch)


def test_an_attempt_on_one_host_has_one_task_with_all_outputs(run: Preparation) -> None:
    here = host("local")
    attempt = run.prepare([here])
    task = attempt.task
    assert task.name == "run-7" and task.outputs == OUTPUTS and not task.parts
    assert attempt.directory.path == f"{run.root}/attempts/run-7" and task.attempt.called == ""
    assert run.ready == ["local"] and attempt.started > 0 and not Path(task.attempt.path).exists()
    assert not task.states and not task.synced and task.processes is None
    assert task.compose({})[1] == b"script" and Path(task.attempt.path).is_dir()
    assert run.built == [(0, "run-7", "/local/python")]
    assert not (run.root / "attempts" / "run-7.site").exists()


def test_an_attempt_on_several_hosts_has_a_task_on_each_and_outputs_of_the_first(
    run: Preparation,
) -> None:
    hosts = [host("h0", elsewhere="h0"), host("h1", elsewhere="h1")]
    run.images = {"h1": "pytorch"}
    attempt = run.prepare(hosts)
    parts = attempt.task.parts
    assert attempt.task.name == "run-7" and [part.name for part in parts] == ["run-7.0", "run-7.1"]
    assert [part.outputs for part in parts] == [OUTPUTS, ()]
    assert [Path(part.attempt.path).name for part in parts] == ["run-7", "run-7.1"]
    assert attempt.directory.called == "run-7.0" and run.ready == ["h0", "h1"]
    # The image has its own interpreter.
    assert [part.python for part in parts] == ["/h0/python", ""]
    assert (run.root / "attempts" / "run-7.site").read_text() == "h0\nh1"
    assert [step for _, step, _ in run.links] == ["a"]
    for part in parts:
        part.compose({})
    assert run.built == [(0, "run-7.0", "/h0/python"), (1, "run-7.1", "/h1/python")]
    assert run.staged == ["h0", "h1"]


def test_inputs_are_recorded_and_explained_when_they_are_staged(run: Preparation) -> None:
    attempt = run.prepare([host("local")])
    given = Path(f"{attempt.directory.path}.given")
    assert run.staged == run.explained == [] and not given.exists()
    attempt.task.compose({})
    assert run.staged == ["local"] and run.explained == ["a"]
    assert json.loads(given.read_text())["objects"] == {"data": "f-data"}


def test_only_the_first_host_of_those_elsewhere_reports_phases(run: Preparation) -> None:
    first, second = run.prepare([host("h0", elsewhere="h0"), host("h1", elsewhere="h1")]).task.parts
    second.phase("TRANSFERRING_DATA")
    assert run.phases == []
    first.phase("TRANSFERRING_DATA")
    first.phase("EXECUTING")
    assert run.phases == [("a", "staging"), ("a", "")]
    assert run.instances[0][1:] == ("r", "vastai", "i-h0", "TRANSFERRING_DATA", "a")


def test_a_step_on_this_machine_has_no_phases(run: Preparation) -> None:
    run.prepare([host("local")]).task.phase("EXECUTING")
    assert run.phases == []


def test_inputs_in_buckets_are_brought_to_the_host_of_each_task(run: Preparation) -> None:
    attempt = run.prepare([host("h0", elsewhere="h0"), host("h1", elsewhere="h1")])
    for part in attempt.task.parts:
        asyncio.run(part.bring())  # type: ignore[arg-type]
    assert run.begun == ["a run-7 h0", "a run-7.1 h1"]


def test_checkpoint_folders_are_made_held_and_linked(run: Preparation) -> None:
    here = host("local")
    attempt = run.prepare([here], PLAIN._replace(state=[SAVES]))
    (folder,) = attempt.task.states
    local = run.root / "states" / "g" / "1" / "c"
    assert folder.local_path == local and local.is_dir()
    assert folder.host_path == "states/g1/c" and folder.path == "ckpt"
    assert (folder.pattern, folder.every, folder.keep, folder.every_steps) == (
        ("step-*", 60.0, 3, 100)
    )
    assert holder(local.parent.parent) == "run-7"
    assert run.links == [("r", "a", {"c": local})]
    attempt.task.compose({})
    assert here.linked == [(attempt.directory.path, [folder])]


def test_a_task_has_the_metrics_of_its_step_and_the_checkpoints_found_before(
    run: Preparation,
) -> None:
    spec = PLAIN._replace(state=[SAVES], metrics=MetricsSpec("m.jsonl", None))
    found = {"c": Newest("step-9")}
    task = run.prepare([host("local")], spec, restored=found).task
    assert task.metrics == spec.metrics and task.restored == found


@pytest.mark.parametrize(
    ("steps", "resumed"), [((20, 30, None), 30), ((30, 20), 30), ((None,), None), ((), None)]
)
def test_an_attempt_resumes_from_the_latest_of_its_checkpoints(
    run: Preparation, steps: Sequence[int | None], resumed: int | None
) -> None:
    attempt = run.prepare([host("local")], PLAIN._replace(state=[SAVES]))
    found = {
        str(step): Newest(f"step-{step}", CheckpointValidity(True, "file", step)) for step in steps
    }
    attempt.task.compose(found)
    assert attempt.resumed_step == resumed and attempt.resumed_from == found


def test_processes_count_on_all_hosts_of_a_step_that_accelerate_launches(run: Preparation) -> None:
    launched = PLAIN._replace(accelerate={"script": "train.py"}, state=[SAVES])
    one, two = host("h0", gpus=4, elsewhere="h0"), host("h1", gpus=4, elsewhere="h1")
    attempt = run.prepare([one, two], launched)
    assert {part.processes for part in attempt.task.parts} == {8}
    assert run.preparer.processes(launched, 0, one) == 4
    assert run.preparer.processes(PLAIN, 0, one) is None
    given = launched._replace(accelerate={"processes": 3})
    assert run.preparer.processes(given, 0, one) == 3


def test_outputs_that_are_copied_while_a_step_runs_are_those_of_the_first_host(
    run: Preparation,
) -> None:
    spec = PLAIN._replace(sync=[SyncSpec("model", 30.0), SyncSpec("log", 5.0)])
    first, second = run.prepare([host("h0"), host("h1")], spec).task.parts
    assert [*map(tuple, first.synced)] == [("model", True, 30.0), ("log.txt", False, 5.0)]
    assert not second.synced


def test_a_job_starts_only_when_the_claim_is_confirmed(run: Preparation) -> None:
    attempt = run.prepare([host("local")])
    run.confirms = [Infrastructure("locked"), Infrastructure("locked"), None]
    asyncio.run(attempt.task.confirm())  # type: ignore[arg-type]
    assert run.confirms == []
    run.confirms = [ValueError("stale"), None]
    with pytest.raises(ValueError, match="stale"):
        asyncio.run(attempt.task.confirm())  # type: ignore[arg-type]


def test_what_a_download_of_checkpoints_finds_is_said_with_the_host(run: Preparation) -> None:
    attempt = run.prepare([host("h0", elsewhere="h0")], PLAIN._replace(state=[SAVES]))
    attempt.task.say("copying")
    attempt.task.round(SyncRound(copied=["c/1"], size=10))
    attempt.task.round(SyncRound(size=99, problem="no answer", warning="disk is full"))
    attempt.task.round(SyncRound(copied=["c/2"], size=5, rejected=[("c/3", "it is empty")]))
    assert attempt.checkpoint_bytes == 15
    assert run.said == [
        "a: copying",
        "h0: no answer",
        "h0: disk is full",
        "skipped checkpoint c/3 on h0: it is empty",
    ]


def test_the_newest_checkpoint_of_each_folder_is_found_here(tmp_path: Path) -> None:
    generation = Generation(tmp_path, "", "g1")
    for name in ("c/step-9", "c/step-10", "d"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("c/step-9", "c/step-10"):
        (tmp_path / name / "w.bin").write_bytes(b"1")
    spec = PLAIN._replace(state=[SAVES, SAVES._replace(name="d", path="other")])
    found = find_restored(spec, generation, None)
    assert {name: each.name for name, each in found.items()} == {"c": "step-10", "d": None}
