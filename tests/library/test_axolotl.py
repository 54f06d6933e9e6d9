"""`axolotl@1` checks rows, writes axolotl's configuration and keeps its checkpoints; a stand-in for axolotl shows what it is told and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from runner.execution.terms import Settings
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"

# Reads the configuration as axolotl does, "trains" to max_steps from where resume_from_checkpoint says, saves as transformers does.
STAND_IN = """
import json, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
out = pathlib.Path(config["output_dir"])
first = int(config.get("resume_from_checkpoint", "checkpoint-0").rsplit("-", 1)[-1])
rows = [json.loads(line) for line in open(config["datasets"][0]["path"])]
points = [{"step": step, "loss": 9 - step} for step in range(1, config["max_steps"] + 1)]
last = out / f"checkpoint-{config['max_steps']}"
last.mkdir(parents=True, exist_ok=True)
(last / "trainer_state.json").write_text(json.dumps({"log_history": points}))
(out / "adapter_model.safetensors").write_text(f"{first} {len(rows)}")
(out / "runs").mkdir(exist_ok=True)
(out / "runs" / "events.out").write_text("events")
print({"loss": "5.0", "grad_norm": "0.5", "learning_rate": "0.0002", "epoch": "1"})
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "axolotl" / "cli").mkdir(parents=True)
    for name in ("axolotl/__init__.py", "axolotl/cli/__init__.py"):
        (folder / name).touch()
    (folder / "axolotl" / "cli" / "train.py").write_text(STAND_IN)
    (folder / "axolotl" / "cli" / "preprocess.py").write_text(
        "import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))['dataset_prepared_path'])"
    )
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder in which the step runs, with the rows and the settings that the recipe puts there."""
    folder = tmp_path / "step"
    for name in ("rows", "model", "tensorboard", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "rows" / "data.json").write_text(
        json.dumps({"format": "messages", "rows": 3, "rows_held_out": 1})
    )
    row = json.dumps(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    )
    (folder / "rows" / "train.jsonl").write_text(f"{row}\n{row}\n")
    (folder / "axolotl.yaml").write_text(
        yaml.safe_dump({"base_model": "b", "micro_batch_size": 2, "save_steps": 5, "max_steps": 6})
    )
    return folder


def run(
    step: Path, *more: str, site: Path | None = None, world: str = "1"
) -> subprocess.CompletedProcess[str]:
    words = [
        "--stage",
        "train",
        "--settings",
        "axolotl.yaml",
        "--data",
        "rows",
        "--prepared",
        "prepared",
        "--global-batch",
        "8",
        "--if-missing",
        "fail",
    ]
    words += [
        "--report",
        "report.json",
        "--checkpoints",
        "checkpoints",
        "--model",
        "model",
        "--history",
        "history.jsonl",
        "--tensorboard",
        "tensorboard",
    ]
    env = {**os.environ, "PYTHONPATH": str(site or ""), "WORLD_SIZE": world}
    return subprocess.run(
        [sys.executable, TRAINERS / "axolotl_run.py", *words, *more],
        cwd=step,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def config(step: Path) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((step / "axolotl-0.yaml").read_text())
    return made


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the smoke preset has run."""
    workspace = tmp_path_factory.mktemp("axolotl")
    smoke("axolotl@1", workspace)
    return workspace


def plan(workspace: Path, inputs: dict[str, Any]) -> dict[str, str]:
    planned = runner.plan(
        "axolotl@1", inputs, preset="smoke", python="current", workspace=workspace
    )
    return {
        node.id: verdict.answer
        for node, verdict in zip(planned.plan.nodes, planned.verdicts, strict=True)
    }


def test_the_smoke_preset_prepares_data_and_says_what_is_missing(ran: Path) -> None:
    results = ran / "out" / "axolotl@1" / "latest"
    report = json.loads((results / "report.json").read_text())
    assert (
        report["trained"] is False
        and report["said"] == "not trained: axolotl is not installed"
        and "pip install axolotl" in report["remedy"]
    )
    used = yaml.safe_load((results / "axolotl-used.yaml").read_text())
    assert (
        used["datasets"][0]["type"],
        used["max_steps"],
        used["gradient_accumulation_steps"],
    ) == ("completion", 4, 2)


def test_a_real_run_without_axolotl_fails_and_says_how_to_get_it(tmp_path: Path) -> None:
    past_preflight = Settings(allow=("wrapped-tool-missing",))
    summary = runner.run(
        "axolotl@1",
        {"if_missing": "fail"},
        preset="smoke",
        python="current",
        workspace=tmp_path,
        settings=past_preflight,
    )
    assert summary.state == "FAILED"
    assert [failure.id for failure in summary.failed] == ["prepare"]
    assert b"axolotl is not installed in the Python of this step" in summary.failed[0].tail


def test_what_was_not_trained_is_not_taken_for_trained(ran: Path) -> None:
    """A report of nothing is no result of a run that wants one."""
    assert plan(ran, {"if_missing": "fail"})["prepare"] == "run"


def test_axolotl_gets_the_rows_the_batch_and_the_callers_own_settings(
    step: Path, tool: Path
) -> None:
    done = run(
        step, "--set", '{"lora_dropout": 0.1, "optimizer": "adamw_8bit"}', site=tool, world="2"
    )
    assert done.returncode == 0, done.stderr
    told = config(step)
    assert told["datasets"] == [
        {
            "path": "rows/train.jsonl",
            "ds_type": "json",
            "type": "chat_template",
            "field_messages": "messages",
        }
    ]
    assert told["test_datasets"][0]["path"] == "rows/held_out.jsonl" and told["eval_steps"] == 5
    assert told["gradient_accumulation_steps"] == 2, "8 sequences, 2 at once on each of 2 devices"
    assert (told["lora_dropout"], told["optimizer"], told["chat_template"]) == (
        0.1,
        "adamw_8bit",
        "tokenizer_default_fallback_chatml",
    )
    assert "resume_from_checkpoint" not in told
    assert told["plugins"] == ["axolotl_points.PointsPlugin"]


def test_what_axolotl_made_is_gathered(step: Path, tool: Path) -> None:
    assert run(step, site=tool).returncode == 0
    assert (step / "model" / "adapter_model.safetensors").read_text() == "0 2"
    assert [
        json.loads(line)["loss"] for line in (step / "history.jsonl").read_text().splitlines()
    ] == [8, 7, 6, 5, 4, 3]
    assert (step / "tensorboard" / "events.out").read_text() == "events"
    assert json.loads((step / "report.json").read_text()) == {
        "trained": True,
        "axolotl": "of unknown version",
        "steps": 6,
    }


def test_axolotl_goes_on_from_the_checkpoint_it_is_given(step: Path, tool: Path) -> None:
    assert run(step, "--resume", "checkpoints/checkpoint-5", site=tool).returncode == 0
    assert (step / "model" / "adapter_model.safetensors").read_text() == "5 2"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--set", '{"output_dir": "x"}'],
            "set names output_dir, which this recipe decides itself; leave it out",
        ),
        (
            ["--global-batch", "5"],
            "global_batch 5 is no multiple of micro_batch × 1 processes = 2; change one of them",
        ),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(
    step: Path, tool: Path, more: list[str], said: str
) -> None:
    done = run(step, *more, site=tool)
    assert done.returncode == 1 and said in done.stderr


def test_another_learning_rate_prepares_nothing_anew(ran: Path) -> None:
    answers = plan(ran, {"learning_rate": 1e-5})
    assert (answers["data"], answers["prepare"], answers["train"]) == ("fresh", "fresh", "run")
