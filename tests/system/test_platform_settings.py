"""The environment that platforms set: for the server, for workers, and in a pod."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.errors import Invalid
from runner.execution.session import preview
from runner.execution.terms import request_of_run
from runner.interface.cli import serve, worker
from runner.language import parse
from runner.planning.schedule import Move
from runner.reports.receivers import Receivers
from runner.server import platform
from runner.server.answers import Refused
from runner.server.platform import Execute
from runner.server.room import Room
from runner.server.tokens import Tokens
from runner.storage.locks import Locks
from runner.storage.workspace import Workspace
from runner.survey.kept_state import find_states
from tests.support import Space
from tests.system.test_worker import row, submitted, work

TRAIN = """
inputs:
  base: {type: model, default: hf://acme/base}
  rows: {type: dataset}
  precision: {type: choice, default: auto, choices: [auto, "no"]}
  push_to: {type: string, default: ""}
steps:
  train:
    run: "echo {{ inputs.base }} {{ inputs.precision }} {{ inputs.push_to }} $GPU_MEMORY_FRACTION > {{ outputs.o }}; cat {{ inputs.rows }} >> {{ outputs.o }}"
    outputs: {o: o.txt}
    metrics: true
"""


def parsed(verb: str, module: object, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.arguments(parser, verb)  # type: ignore[attr-defined]
    return parser.parse_args(words)


def test_where_a_server_listens_and_how_much_a_worker_does_at_once_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("HOST", "0.0.0.0"), ("PORT", "9000"), ("MAX_CONCURRENT_JOBS", "3")):
        monkeypatch.setenv(name, value)
    told = parsed("serve", serve, [])
    assert (told.address, told.port) == ("0.0.0.0", 9000) and parsed(
        "serve", serve, ["--port", "1"]
    ).port == 1
    assert parsed("worker", worker, []).concurrency == 3
    monkeypatch.setenv("MAX_CONCURRENT_JOBS", "many")
    with pytest.raises(SystemExit):
        parsed("worker", worker, [])


def test_a_pod_gives_a_recipe_what_its_environment_names(space: Space) -> None:
    space.recipe(TRAIN)
    space.write("rows.txt", "rows\n")
    space.write("base/config.json", "{}")
    pod = {
        "JOB_ID": "j1",
        "MODEL_NAME": "./base",
        "DATASET_URL": "rows.txt",
        "HF_REPO_NAME": "ann/tuned",
        "GPU_MEMORY_FRACTION": "0.5",
    }
    code, _, err = space.command("run", "precision=no", env=pod)
    assert code == 0, err
    words = space.read("o.txt").split()
    assert words[0].endswith("base") and words[1:] == ["no", "ann/tuned", "0.5", "rows"]
    code, _, err = space.command("run", env={**pod, "JOB_ID": ""})
    assert code == 3 and "rows" in err, "without a job it is no pod"


def test_a_job_is_stored_as_the_settings_of_the_platform_say(space: Space) -> None:
    space.recipe(TRAIN.replace("recipe: t@1", ""))
    space.write("recipe.toml", '[recipes]\nallow = ["./recipe.yaml"]\n')
    space.write("sets/rows.txt", "rows\n")
    environ = {"DATA_DIR": "sets", "OUTPUT_DIR": "results", "ENABLE_MIXED_PRECISION": "false"}
    room = Room(
        space.root, {**os.environ, **environ}, Tokens(space.root / "server", Locks(space.root))
    )
    recipe = parse.load(space.root / "recipe.yaml").id
    asked = Execute.model_validate(
        {"job_id": "j1", "recipe": recipe, "dataset_url": "sets/rows.txt"}
    )
    assert platform.store_job(room, asked, "local").status == "queued"
    with Workspace.open(space.root) as ws:
        run = ws.store.runs.latest()[0]
    assert run.inputs["precision"] == "no" and json.loads(json.dumps(run.data["asked"]))[
        "out"
    ] == str(space.root / "results" / "j1")


@pytest.mark.parametrize("variable", ["DATA_DIR", "DATASETS_DIR", "MODELS_DIR", "CHECKPOINTS_DIR"])
def test_a_folder_of_the_platform_and_what_is_in_it_are_inputs(space: Space, variable: str) -> None:
    space.recipe(TRAIN)
    space.write("recipe.toml", '[recipes]\nallow = ["./recipe.yaml"]\n')
    space.write("sets/rows/rows.txt", "rows\n")
    for path in ("sets", "sets/rows"):
        job = {"job_id": path.replace("/", "-"), "recipe": "t", "dataset_url": path}
        assert stored(space, job, **{variable: "sets"}).status == "queued"
    with pytest.raises(Invalid, match="outside the directories"):
        stored(space, {"job_id": "j", "recipe": "t", "dataset_url": "."}, **{variable: "sets"})


def stored(space: Space, job: Mapping[str, object], **environ: str) -> platform.Executed:
    room = Room(
        space.root, {**os.environ, **environ}, Tokens(space.root / "server", Locks(space.root))
    )
    return platform.store_job(room, Execute.model_validate(job), "local")


def test_a_strict_server_refuses_what_others_ignore(space: Space) -> None:
    space.recipe(TRAIN)
    space.write("rows.txt", "rows\n")
    job = {"job_id": "j", "recipe": "t", "name": "x", "config": {"rows": "rows.txt", "bf16": False}}
    allowed = '[recipes]\nallow = ["./recipe.yaml"]\n[data]\nroots = ["."]\n[server]\n'
    space.write("recipe.toml", f"{allowed}strict_jobs = true\n")
    with pytest.raises(Invalid) as refused:
        stored(space, job)
    assert [each.message.partition(":")[0] for each in refused.value.problems] == [
        "name",
        "config.bf16",
    ]
    space.write("recipe.toml", f"{allowed}strict_jobs = false\n")
    assert len(stored(space, job).ignored) == 2


def test_a_jobs_resources_stand_instead_of_the_recipes(space: Space) -> None:
    big = "resources: {gpus: 8, gpu: H100, gpu_memory: 80GB, memory: 900GB}"
    space.recipe(
        f"{big}\nsteps:\n"
        "  train: {run: 'echo x > {{ outputs.o }}', outputs: {o: o}}\n"
        "  after: {run: 'cat {{ steps.train.o }} > {{ outputs.p }}', resources: {gpus: 0}, outputs: {p: p}}\n"
    )
    space.write("recipe.toml", '[recipes]\nallow = ["./recipe.yaml"]\n')
    stored(space, {"job_id": "j", "recipe": "t", "resources": {"gpus": 0, "memory": "1GB"}})
    work(space)
    with Workspace.open(space.root) as ws:
        (run,) = ws.store.runs.latest()
    assert (run.state, run.failure) == ("COMPLETED", ""), run.reason
    space.recipe(space.read("recipe.yaml").replace("memory: 900GB", "memory: 900GB, key: true"))
    with pytest.raises(Invalid, match="part of its cache key"):
        stored(space, {"job_id": "k", "recipe": "t", "resources": {"gpus": 0}})


def test_a_gpu_is_asked_for_by_the_steps_that_have_one(space: Space) -> None:
    space.recipe(
        "steps:\n"
        "  train: {run: 'echo x > {{ outputs.o }}', resources: {gpus: 1, cpus: 3}, outputs: {o: o}}\n"
        "  data: {run: 'echo x > {{ outputs.p }}', resources: {gpus: 0}, outputs: {p: p}}\n"
    )
    plan = space.plan().plan
    plan.demand({"gpus": 2, "gpu_memory": 24 * 10**9})
    assert {
        node.id: spec.resources.as_key for node, spec in zip(plan.nodes, plan.specs(), strict=True)
    } == {
        "train": {"gpus": 2, "cpus": 3, "gpu_memory": 24 * 10**9},
        "data": {"gpus": 0},
    }


def test_a_report_without_a_token_of_its_job_has_the_key_of_the_worker(space: Space) -> None:
    with Workspace.open(space.root, environ={"API_KEY": "wak_1"}) as ws:
        assert Receivers(ws)._secrets("metrics", "", None) == ["wak_1"]
    with Workspace.open(space.root, environ={"API_KEY": "wak_1", "JOB_TOKEN": "of-the-job"}) as ws:
        assert Receivers(ws)._secrets("metrics", "", None) == ["of-the-job"]


def test_a_platform_finds_a_jobs_checkpoints_and_logs_in_its_folders(space: Space) -> None:
    space.recipe(
        "steps:\n  t:\n    run: 'echo trained; mkdir -p ckpt/step-1; echo x > ckpt/step-1/w; echo x > {{ outputs.o }}'\n"
        "    state: {ckpt: {checkpoint: 'step-*'}}\n    outputs: {o: o}\n"
    )
    folders = {"CHECKPOINTS_DIR": "checkpoints", "LOGS_DIR": str(space.root / "logs")}
    space.write("checkpoints/mine.txt", "kept")
    code, _, said = space.command("run", env={"JOB_ID": "j1", **folders})
    assert code == 0, said
    assert space.read("logs/j1/t.1.log") == "trained\n"
    kept = space.root / "checkpoints" / "j1" / "t" / "ckpt"
    assert kept.is_symlink() and space.read("checkpoints/mine.txt") == "kept"
    code, _, said = space.command("run", "-B", env={"JOB_ID": "j1", **folders})
    assert code == 0, said
    (space.root / "logs" / "j2").mkdir()
    code, _, said = space.command("run", "-B", env={"JOB_ID": "j2", **folders})
    assert code == 0 and f"cannot link {space.root}/logs/j2 to " in said, said
    assert not (space.root / "logs" / "j3").exists()


def test_a_job_goes_on_from_a_checkpoint_of_its_own_and_from_no_other(space: Space) -> None:
    space.recipe(
        "steps:\n  t:\n    run: 'mkdir -p ckpt; ls ckpt > {{ outputs.o }}'\n    state: {ckpt: {checkpoint: 'step-*'}}\n    outputs: {o: o}\n"
    )
    run = submitted(space)
    with Workspace.open(space.root) as ws:
        fence = ws.store.runs.claim(run, "test")
        assert fence is not None
        ws.store.runs.group(
            run,
            fence,
            [Move("run", run, "QUEUED", "PAUSED", "paused")],
            run_state=("PAUSED", "paused"),
        )
        ws.store.runs.release(run, fence)
        request = request_of_run(ws.store.runs.get(run))
        assert request is not None
        found = preview(ws, request)
        (state,) = find_states(ws, found, found.todo)
        for n in (1, 2):
            (state.folder / f"step-{n}").mkdir(parents=True)
            (state.folder / f"step-{n}" / "weights.bin").write_text(str(n))
    room = Room(space.root, os.environ, Tokens(space.root / "server", Locks(space.root)))
    for other in ("/etc/passwd", "step-3", "../step-1", "ep-1"):
        with pytest.raises(Refused, match="not a checkpoint of this job"):
            platform.go_back(room, run, other)
    (space.root / "checkpoints").symlink_to(state.folder)  # as CHECKPOINTS_DIR has it
    platform.go_back(room, run, "checkpoints/step-1")
    assert sorted(path.name for path in Path(state.folder).iterdir()) == ["step-1"]
    assert row(space, run).state == "PAUSED"
    work(space)


def test_a_training_is_told_of_how_many_steps_it_is_unless_epochs_decide_that(space: Space) -> None:
    space.recipe(
        "inputs: {max_steps: {type: integer, default: 500}, epochs: {type: number, default: 0}}\n"
        "steps: {train: {run: 'echo ${RECIPE_TOTAL_STEPS:-unknown} {{ inputs.max_steps }} {{ inputs.epochs }} > o', metrics: true, outputs: {o: o}}}\n"
    )
    for epochs, total in (("0", "500"), ("2", "unknown")):
        assert space.command("run", f"epochs={epochs}")[0] == 0
        assert (space.root / "o").read_text().split()[0] == total


def test_a_memory_of_a_gpu_that_is_no_number_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 8²'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    platform.gpu.cache_clear()
    try:
        found = platform.gpu()
    finally:
        platform.gpu.cache_clear()
    assert found.available and found.name == "NVIDIA H100" and found.memory is None
