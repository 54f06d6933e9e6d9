"""`prime-rl@1` refuses configurations that fail hours later, and keeps checkpoints; a stand-in for prime-rl shows what it is told and what comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runner
from runner.execution.terms import Settings
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
CONFIG = ROOT / "fixtures" / "prime-rl" / "reverse-text.toml"

STAND_IN = f"""#!{sys.executable}
import json, pathlib, signal, sys, tomllib
words = sys.argv[1:]
assert words[0] == "@"
config = tomllib.load(open(words[1], "rb"))
options = dict(zip(words[2::2], words[3::2]))
if config.get("wait"):
    signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("told").touch(), signal.signal(signal.SIGTERM, signal.SIG_DFL), signal.raise_signal(signal.SIGTERM)))
    pathlib.Path("waiting").touch()
    signal.pause()
assert pathlib.Path(options["--model.name"], "config.json").exists()
run = pathlib.Path(options["--output-dir"]) / options["--run.name"]
assert not run.exists(), "prime-rl refuses a run directory with something in it"
first = int(options.get("--resume.dir", "step_0").rsplit("_", 1)[-1])
for step in range(first + config["ckpt"]["interval"], int(options["--max-steps"]) + 1, config["ckpt"]["interval"]):
    folder = pathlib.Path(options["--ckpt.output-dir"]) / "checkpoints" / f"step_{{step}}" / "trainer"
    folder.mkdir(parents=True)
    (folder / "shard").write_text(f"{{first}} to {{step}}")
(run / "broadcasts" / "step_4").mkdir(parents=True)
(run / "broadcasts" / "step_4" / "adapter_model.safetensors").write_text("weights")
(run / "orchestrator").mkdir()
(run / "orchestrator" / "metrics.jsonl").write_text(json.dumps({{"step": 4, "reward/mean": 0.5}}) + "\\n")
"""


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TRAINERS))
    import prime_guard  # type: ignore[import-not-found]

    yield prime_guard
    sys.modules.pop("prime_guard", None)


@pytest.fixture
def good() -> dict[str, Any]:
    return {**tomllib.loads(CONFIG.read_text()), "max_steps": 100}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the smoke preset."""
    return smoke("prime-rl@1", tmp_path_factory.mktemp("prime"))


def test_the_smoke_preset_guards_the_configuration_and_says_what_is_missing(ran: Path) -> None:
    report = json.loads((ran / "report.json").read_text())
    assert (
        report["trained"] is False
        and report["said"] == "not trained: prime-rl is not installed"
        and "it is not on PyPI" in report["remedy"]
    )
    config = tomllib.loads((ran / "rl.toml").read_text())
    assert config["ckpt"] == {"interval": 2, "keep_last": 2}
    assert "max_steps" not in config, "what is in the file is a part of the state of the training"
    assert config["orchestrator"]["group_size"] == 8, "an input goes over the file"
    assert config["orchestrator"]["train"]["source"][0]["env"]["taskset"] == {"id": "reverse-text"}
    assert json.loads((ran / "guard.json").read_text()) == {"faults": [], "warnings": []}


def test_a_real_run_without_prime_rl_fails_and_says_how_to_get_it(tmp_path: Path) -> None:
    summary = runner.run(
        "prime-rl@1", {"if_missing": "fail"}, preset="smoke", python="current", workspace=tmp_path
    )
    assert summary.state == "FAILED" and [failure.id for failure in summary.failed] == ["train"]
    assert (
        b"not trained: prime-rl is not installed" in summary.failed[0].tail
        and b"uv sync" in summary.failed[0].tail
    )


def test_raising_max_steps_continues_the_training(tmp_path: Path) -> None:
    launcher = tmp_path / "rl"
    launcher.write_text(STAND_IN)
    launcher.chmod(0o755)
    (tmp_path / "w").mkdir()

    def shards(max_steps: int) -> dict[str, object]:
        inputs: dict[str, Any] = {
            "if_missing": "fail",
            "launcher": [str(launcher)],
            "max_steps": max_steps,
        }
        summary = runner.run(
            "prime-rl@1", inputs, preset="smoke", python="current", workspace=tmp_path / "w"
        )
        assert summary.state == "COMPLETED", summary.failed
        results = tmp_path / "w" / "out" / "prime-rl@1" / "latest"
        return {
            "steps": json.loads((results / "report.json").read_text())["steps"],
            "shard": (results / "checkpoint" / "trainer" / "shard").read_text(),
        }

    assert shards(4) == {"steps": 4, "shard": "0 to 4"}
    assert shards(8) == {"steps": 8, "shard": "4 to 8"}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "short trainer": (
        {"trainer": {"model": {"seq_len": 512}}},
        "trainer.model.seq_len 512 is less than orchestrator.seq_len 1024",
    ),
    "long rollouts": (
        {"orchestrator": {"seq_len": 4096}},
        "trainer.model.seq_len 1024 is less than orchestrator.seq_len 4096",
    ),
    "top_p": (
        {"orchestrator": {"train": {"sampling": {"top_p": 0.9}}}},
        "orchestrator.train.sampling.top_p: rollouts of a cut distribution",
    ),
    "top_p in a source": (
        {"orchestrator": {"train": {"source": [{"sampling": {"extra_body": {"top_k": 5}}}]}}},
        "source.0.sampling.extra_body.top_k: ",
    ),
    "truncated": (
        {"orchestrator": {"mask_truncated_completions": True}},
        "orchestrator.mask_truncated_completions: prime-rl has no such parameter",
    ),
    "lora": (
        {"trainer": {"model": {"lora": {}}}, "weight_broadcast": {"type": "nccl"}},
        "weight_broadcast.type nccl does not know LoRA",
    ),
    "old lora": (
        {"trainer": {"model": {"experimental": {"lora": {"rank": 8}}}}},
        "trainer.model.experimental.lora is not read any more; it is trainer.model",
    ),
    "offload": (
        {"trainer": {"model": {"fsdp_cpu_offload": True}}},
        "fsdp_cpu_offload and optim_cpu_offload exclude each other",
    ),
    "batch": (
        {"orchestrator": {"group_size": 7}},
        "orchestrator.batch_size 64 is no multiple of group_size 7",
    ),
    "no environment": (
        {"orchestrator": {"train": {"source": []}}},
        "no environment to learn in: environment=ID",
    ),
    "nodes": ({"deployment": {"type": "multi_node"}}, "deployment.type multi_node needs SLURM"),
    "gpus": (
        {"deployment": {"num_infer_gpus": 8}},
        "1 GPUs to train and 8 to generate are more than deployment.gpus_per_node 8",
    ),
    "resume": (
        {"resume": {"step": 5}},
        "resume: the recipe resumes from the newest whole checkpoint by itself",
    ),
    "half a checkpoint": (
        {"trainer": {"ckpt": {"interval": 5}}},
        "trainer.ckpt: checkpoints are the recipe's, on trainer and orchestrator alike",
    ),
    "unknown": ({"orchestrater": {}}, "prime-rl has no section orchestrater; is it orchestrator?"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_guard_refuses_what_would_fail_later(
    guard: ModuleType, good: dict[str, Any], name: str
) -> None:
    change, message = FAULTS[name]
    assert guard.faults(good) == []
    guard._lay(good, change)
    assert any(message in fault for fault in guard.faults(good)), guard.faults(good)
    assert len(guard.faults(good)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"orchestrator": {"eval": {"sampling": {"top_p": 0.9}}}},
        {"trainer": {"model": {"lora": {"rank": 8}}}, "weight_broadcast": {"type": "filesystem"}},
        {"weight_broadcast": {"type": "nccl"}},
        {"trainer": {"model": {"fsdp_cpu_offload": True, "optim_cpu_offload": False}}},
        {"trainer": {"model": {"seq_len": 4096}}},
    ],
)
def test_the_guard_lets_pass_what_is_right(
    guard: ModuleType, good: dict[str, Any], change: dict[str, Any]
) -> None:
    guard._lay(good, change)
    assert guard.faults(good) == []


def test_every_fault_is_reported_at_once_and_nothing_is_trained(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(
        "wandb = {project = 'x'}\nseqlen = 1\nmax_steps = 7\n[model]\nname = 'other/model'\n"
    )
    past_preflight = Settings(allow=("prime-rl-unknown-section",))
    config = {"config": str(tmp_path / "rl.toml")}
    summary = runner.run(
        "prime-rl@1",
        config,
        preset="smoke",
        python="current",
        workspace=tmp_path,
        settings=past_preflight,
    )
    assert summary.state == "FAILED" and summary.counts.get("SUCCEEDED", 0) == 0
    said = summary.failed[0].tail.decode()
    assert "guard: 3 things to put right before anything is rented or trained" in said
    assert (
        "wandb is not read any more; it is monitors.wandb now" in said
        and "prime-rl has no section seqlen; is it seq_len?" in said
    )
    assert (
        "rl.toml says max_steps = 7; the recipe's input goes over it: 4" in said
        and "rl.toml says model.name = 'other/model'" in said
    )


@pytest.mark.parametrize(
    ("text", "said"), [("a = [", "rl.toml is not TOML"), ("a = '\udcff'", "rl.toml is not TOML")]
)
def test_a_file_that_is_no_toml_is_named(
    guard: ModuleType, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "rl.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=said):
        guard.merge({"defaults": {}, "given": {}, "always": {}}, tmp_path / "rl.toml", {})


def test_a_model_with_a_vision_part_is_refused_unless_meant(
    guard: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 3}}
        )
    )
    (told,) = guard._not_text_only({}, tmp_path)
    assert (
        "the model (Qwen2VLForConditionalGeneration) has a vision part: take the text-only one"
        in told
    )
    assert (
        guard._not_text_only({"model": {"vlm": {"vision_encoder_attr": "visual"}}}, tmp_path) == []
    )
    assert guard._not_text_only({}, ROOT / "fixtures" / "tiny-llama") == []


def test_inputs_go_over_the_file_and_set_over_both(guard: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(
        "seq_len = 1\nmax_steps = 1\n[trainer.optim]\nlr = 1.0\n[orchestrator.renderer]\nname = 'mine'\n"
    )
    settings: dict[str, Any] = {
        "environment": "wordle",
        "defaults": {"orchestrator": {"renderer": {"name": "default"}}},
        "given": {
            "seq_len": 2,
            "trainer": {"optim": {"lr": None}},
            "orchestrator": {"batch_size": 8},
        },
        "always": {"max_steps": 3},
    }
    config, notes = guard.merge(
        settings, tmp_path / "rl.toml", {"orchestrator": {"batch_size": 16}}
    )
    assert config == {
        "seq_len": 2,
        "max_steps": 3,
        "trainer": {"optim": {"lr": 1.0}},
        "orchestrator": {
            "renderer": {"name": "mine"},
            "batch_size": 16,
            "train": {"source": [{"name": "wordle", "env": {"taskset": {"id": "wordle"}}}]},
        },
    }
    assert notes == ["rl.toml says max_steps = 1; the recipe's input goes over it: 3"]


def test_tool_calls_elsewhere_and_groups_of_one_are_worth_a_word(
    guard: ModuleType, good: dict[str, Any]
) -> None:
    agent = good["orchestrator"]["train"]["source"][0]["env"]["agent"]
    assert [told.split(":")[0] for told in guard.doubts(good)] == ["orchestrator.group_size is 1"]
    good["orchestrator"]["group_size"] = 8
    agent |= {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    (told,) = guard.doubts(good)
    assert "environment reverse-text calls tools in a runtime of its own (docker)" in told


scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=4))
def test_what_is_written_as_toml_is_what_is_read(config: dict[str, Any]) -> None:
    sys.path.insert(0, str(TRAINERS))
    try:
        from prime_guard import toml
    finally:
        sys.path.remove(str(TRAINERS))
    assert tomllib.loads(toml(config)) == config


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    for name in ("checkpoint", "model", "bin", "state/prime/checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "rl.toml").write_text("[ckpt]\ninterval = 2\n")
    (folder / "bin" / "rl").write_text(STAND_IN)
    (folder / "bin" / "rl").chmod(0o755)
    return folder


def command(step: Path, *more: str) -> list[str]:
    words = [
        "--launcher",
        str(step / "bin" / "rl"),
        "--config",
        "rl.toml",
        "--base",
        str(ROOT / "fixtures" / "tiny-llama"),
        "--max-steps",
        "4",
        "--runs",
        "outputs",
    ]
    words += [
        "--checkpoints",
        "state/prime/checkpoints",
        "--if-missing",
        "fail",
        "--report",
        "report.json",
        "--checkpoint",
        "checkpoint",
        "--model",
        "model",
    ]
    return [sys.executable, str(TRAINERS / "prime_run.py"), *words, *more]


def test_prime_rl_saves_into_the_state_and_the_last_checkpoint_comes_out(step: Path) -> None:
    env = {**os.environ, "RECIPE_METRICS": str(step / "told.jsonl")}
    done = subprocess.run(
        command(step), cwd=step, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((step / "told.jsonl").read_text())
    assert told == {"step": 4, "max_steps": 4, "reward/mean": 0.5}
    assert sorted(path.name for path in (step / "state/prime/checkpoints").iterdir()) == [
        "step_2",
        "step_4",
    ]
    assert (step / "checkpoint" / "trainer" / "shard").read_text() == "0 to 4"
    assert (step / "model" / "adapter_model.safetensors").read_text() == "weights"
    assert json.loads((step / "report.json").read_text()) == {
        "trained": True,
        "steps": 4,
        "weights": "model",
    }


def test_prime_rl_goes_on_from_a_checkpoint_in_a_new_run_directory(step: Path) -> None:
    subprocess.run(command(step), cwd=step, check=True, capture_output=True)
    shutil.rmtree(step / "outputs")
    shutil.rmtree(step / "state/prime/checkpoints/step_4")
    subprocess.run(
        command(step, "--resume", "state/prime/checkpoints/step_2"),
        cwd=step,
        check=True,
        capture_output=True,
    )
    assert (step / "checkpoint" / "trainer" / "shard").read_text() == "2 to 4"


def test_a_stop_reaches_prime_rl_and_is_reported_as_one(step: Path) -> None:
    (step / "rl.toml").write_text("wait = true\n")
    process = subprocess.Popen(command(step), cwd=step, env=dict(os.environ))
    deadline = time.monotonic() + 30
    while not (step / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert (step / "told").exists()


MISTYPED = {
    "text for a number": (
        '[orchestrator]\nbatch_size = "many"\n',
        "orchestrator.batch_size is a whole",
    ),
    "a value for a section": ("trainer = 3\n", "trainer is a section, not 3"),
    "a value for a nested section": ("[trainer]\nmodel = 'x'\n", "trainer.model is a section"),
    "a fraction of sequences": ("seq_len = 0.5\n", "seq_len is a whole number"),
    "a table for a list": (
        "[orchestrator.train.source]\nname = 'x'\n",
        "is a list of environments",
    ),
}


@pytest.mark.parametrize("fault", MISTYPED)
def test_a_value_of_another_kind_is_a_sentence_and_no_traceback(
    guard: ModuleType, tmp_path: Path, fault: str
) -> None:
    text, words = MISTYPED[fault]
    (tmp_path / "rl.toml").write_text(text)
    settings: dict[str, Any] = {"defaults": {}, "given": {}, "always": {"max_steps": 4}}
    with pytest.raises(ValueError, match=words):
        guard.merge(settings, tmp_path / "rl.toml", {})


def test_a_slip_below_a_section_is_told(guard: ModuleType, good: dict[str, Any]) -> None:
    good["trainer"] = {**good.get("trainer", {}), "modell": {"seq_len": 5}}
    assert guard.near_misses(good)[0].startswith("trainer.modell: is it model?")
    assert guard.near_misses({"orchestrator": {"batch_size": 4, "train": {"source": []}}}) == []


MODELS = """
from pydantic import BaseModel, ConfigDict
class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seq_len: int = 1
class Trainer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: Model = Model()
class RLConfig(BaseModel):
    trainer: Trainer = Trainer()
"""


def test_where_prime_rl_is_installed_its_own_models_are_asked(
    guard: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "prime_rl" / "configs"
    package.mkdir(parents=True)
    (package / "rl.py").write_text(MODELS)
    for name, line in (
        ("rl", "exit 9"),
        ("python", f'PYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    config = {"trainer": {"model": {"fsdp": True, "seq_len": "x"}}}
    told = guard.refused(config, [str(tmp_path / "rl")])
    assert any(each.startswith("trainer.model.fsdp: Extra inputs") for each in told), told
    assert any(each.startswith("trainer.model.seq_len: ") for each in told), told
    assert guard.refused({"trainer": {"model": {}}}, [str(tmp_path / "rl")]) == []
    assert guard.refused(config, ["no-such-program", "rl"]) == []
