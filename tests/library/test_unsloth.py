"""`unsloth@1` checks rows and writes unsloth's configuration; a stand-in for its command shows what it is told and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import runner
from runner.execution.terms import Settings
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys, yaml
assert sys.argv[1:3] == ["train", "--config"]
config = yaml.safe_load(open(sys.argv[3]))
out = pathlib.Path(os.environ["UNSLOTH_STUDIO_HOME"]) / "outputs" / config["training"]["output_dir"]
(out / "checkpoint-4").mkdir(parents=True)
(out / "checkpoint-4" / "trainer_state.json").write_text(json.dumps({{"log_history": [{{"step": 1, "loss": 3.0}}, {{"train_runtime": 1}}]}}))
(out / "adapter_model.safetensors").write_text("weights")
print("{{'loss': '3.0', 'learning_rate': '0.001'}}\\r 25%|# | 1/4 [00:01<00:03,  1.0s/it]")
if config["lora"].get("fail"):
    sys.exit(3)
"""


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    for name in ("rows", "model", "bin", "site/unsloth_cli", "gpu/torch"):
        (folder / name).mkdir(parents=True)
    (folder / "rows" / "data.json").write_text(json.dumps({"format": "prompt-completion"}))
    (folder / "rows" / "train.jsonl").write_text('{"prompt": "2+2", "completion": "4"}\n')
    (folder / "unsloth.yaml").write_text(
        yaml.safe_dump(
            {
                "model": "m",
                "training": {"batch_size": 2, "output_dir": "model", "max_steps": 4},
                "lora": {"lora_r": 4},
            }
        )
    )
    (folder / "bin" / "unsloth").write_text(STAND_IN)
    (folder / "bin" / "unsloth").chmod(0o755)
    (folder / "site" / "unsloth_cli" / "__init__.py").touch()
    (folder / "gpu" / "torch" / "__init__.py").write_text(
        "class accelerator:\n    is_available = staticmethod(lambda: True)\n"
    )
    return folder


def run(step: Path, *more: str, gpu: bool = True) -> subprocess.CompletedProcess[str]:
    words = [
        "--settings",
        "unsloth.yaml",
        "--data",
        "rows",
        "--global-batch",
        "8",
        "--if-missing",
        "fail",
        "--report",
        "report.json",
    ]
    words += ["--config-out", "used.yaml", "--model", "model", "--history", "history.jsonl"]
    site = f"{step / 'site'}:{step / 'gpu'}" if gpu else str(step / "site")
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "RECIPE_METRICS": str(step / "told.jsonl"),
        "PYTHONPATH": site,
        "PATH": f"{step / 'bin'}:{os.environ['PATH']}",
    }
    program = ROOT / "recipes" / "trainers" / "unsloth_run.py"
    return subprocess.run(
        [sys.executable, program, *words, *more],
        cwd=step,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_smoke_preset_prepares_data_and_says_what_is_missing(tmp_path: Path) -> None:
    results = smoke("unsloth@1", tmp_path)
    report = json.loads((results / "report.json").read_text())
    assert (
        report["trained"] is False
        and report["said"] == "not trained: unsloth is not installed"
        and "pip install unsloth" in report["remedy"]
    )
    assert (
        yaml.safe_load((results / "unsloth-used.yaml").read_text())["data"]["format_type"]
        == "alpaca"
    )


def test_a_real_run_without_unsloth_fails_and_says_how_to_get_it(tmp_path: Path) -> None:
    past_preflight = Settings(allow=("wrapped-tool-missing",))
    summary = runner.run(
        "unsloth@1",
        {"if_missing": "fail"},
        preset="smoke",
        python="current",
        workspace=tmp_path,
        settings=past_preflight,
    )
    assert (
        summary.state == "FAILED"
        and b"unsloth is not installed in the Python of this step" in summary.failed[0].tail
    )


def test_plain_text_is_refused_before_anything_is_rented(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "plain"}\n')
    summary = runner.run(
        "unsloth@1",
        {"dataset": str(tmp_path / "d.jsonl"), "columns": {}},
        preset="smoke",
        python="current",
        workspace=tmp_path,
    )
    assert [failure.id for failure in summary.failed] == ["data"]
    assert (
        b"d.jsonl:1: no column to learn from; it has: text; read are prompt and completion, or messages"
        in summary.failed[0].tail
    )


def test_unsloth_gets_the_rows_and_the_batch_and_its_model_is_gathered(step: Path) -> None:
    done = run(step, "--set", '{"lora": {"use_rslora": true}}')
    assert done.returncode == 0, done.stderr
    told = yaml.safe_load((step / "used.yaml").read_text())
    assert told["data"] == {"local_dataset": ["unsloth-rows.jsonl"], "format_type": "alpaca"}
    assert told["training"]["gradient_accumulation_steps"] == 4 and told["lora"] == {
        "lora_r": 4,
        "use_rslora": True,
    }
    assert json.loads((step / "unsloth-rows.jsonl").read_text()) == {
        "instruction": "2+2",
        "input": "",
        "output": "4",
    }
    assert (step / "model" / "adapter_model.safetensors").read_text() == "weights"
    assert json.loads((step / "history.jsonl").read_text()) == {"step": 1, "loss": 3.0}
    assert json.loads((step / "report.json").read_text())["trained"] is True
    told = json.loads((step / "told.jsonl").read_text())
    assert told == {"step": 1, "max_steps": 4, "loss": 3.0, "lr": 0.001}


def test_without_a_gpu_unsloth_is_not_started(step: Path) -> None:
    done = run(step, gpu=False)
    assert (
        done.returncode == 1
        and done.stderr
        == "not trained: unsloth needs a GPU, and this machine has none; run it on one that has\n"
    )
    done = run(step, "--if-missing", "report", gpu=False)
    report = json.loads((step / "report.json").read_text())
    assert (
        done.returncode == 0
        and report["trained"] is False
        and report["said"] == "not trained: unsloth needs a GPU, and this machine has none"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", '{"lora": {"fail": true}}'], "unsloth ended with exit code 3"),
        (
            ["--set", '{"data": {"dataset": "x"}}'],
            "set may name training, lora and logging, without training.output_dir; not data",
        ),
        (
            ["--set", '{"training": {"output_dir": "x"}}'],
            "without training.output_dir; not training",
        ),
        (
            ["--global-batch", "5"],
            "global_batch 5 is no multiple of micro_batch 2; change one of them",
        ),
    ],
)
def test_what_cannot_work_ends_with_one_sentence(step: Path, more: list[str], said: str) -> None:
    done = run(step, *more)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]
