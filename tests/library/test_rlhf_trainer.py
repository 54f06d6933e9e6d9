"""Claims about the trainers of `rlhf@1`, run as programs of their own: who draws what, what a kill leaves, what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.library import forks
from tests.library.test_text_options import CALLBACK, difference
from tests.system.test_sft_trainer import launched, program

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
BASE = ROOT / "fixtures" / "tiny-llama"
PROMPTS = ROOT / "fixtures" / "datasets" / "python-prompts" / "prompts.jsonl"
STEPS = 4
FUNCTION = """
def reward(prompts, completions, answer, **columns):
    assert all(isinstance(text, str) for text in prompts + completions + answer)
    return [None if "q" in text else text.count("e") / 10 for text in completions]
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rlhf")]


def environment(**more: str) -> dict[str, str]:
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RECIPE_", "ACCELERATE_"))
    }
    fast = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
    return {
        **keep,
        **fast,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def run(argv: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    return forks.run(argv, env=environment(**env), timeout=300)


def training(prompts: Path, out: Path, *more: object, processes: int = 1) -> list[str]:
    alone = program(
        "rlhf_train.py", "--data", prompts, "--base", BASE, "--init", "random", "--method", "lora", "--rank", 8, "--algorithm", "rloo",
        "--rewards", '{"share": 1}', "--reward-pattern", "[aeiou]", "--num-generations", 4, "--max-completion-length", 8, "--beta", 0.001,
        "--global-batch", 16, "--micro-batch", 4, "--learning-rate", 0.01, "--max-steps", STEPS, "--save-every", 2, "--out", out / "learned",
        "--schedule", "linear", "--floor", 0, "--decay-steps", 2 * STEPS, "--weight-decay", 0.1, "--eval-every", 2, "--keep-best",
        "--history", out / "history.jsonl", "--checkpoints", out / "checkpoints", "--tensorboard", out / "tensorboard", *more,
    )  # fmt: skip
    return launched(alone, processes) if processes > 1 else alone


def history(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def weights(out: Path) -> bytes:
    return (out / "learned" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rlhf") / "prompts"
    done = run(
        program(
            "rlhf_data.py",
            "--data",
            PROMPTS,
            "--base",
            BASE,
            "--out",
            out,
            "--max-prompt-length",
            64,
            "--need",
            "answer",
            "--eval-fraction",
            0.1,
        )
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def trained(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training that nobody disturbed."""
    out = tmp_path_factory.mktemp("trained")
    done = run(
        launched(training(prompts, out)),
        RECIPE_WORLD_SIZE="1",
        RECIPE_METRICS=str(out / "metrics.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    return out


def test_each_step_tells_where_its_time_went(trained: Path) -> None:
    told = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    for line in told:
        assert (
            min(
                line[f"time_{phase}"]
                for phase in ("data", "generation", "tool", "model", "optimizer")
            )
            > 0
        )
        assert line["time_generation"] + line["time_tool"] + line["time_model"] < line["time_step"]
        assert line["samples_per_second"] > 0 and line["memory_gb"] > 0


def test_a_killed_training_ends_in_the_same_bits(
    prompts: Path, trained: Path, tmp_path: Path
) -> None:
    forks.signal_at(
        f"step 3/{STEPS}",
        training(prompts, tmp_path),
        signal.SIGKILL,
        tmp_path / "gate",
        env=environment(),
    )
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")] == [
        "checkpoint-2"
    ]
    done = run(training(prompts, tmp_path, "--resume", tmp_path / "checkpoints" / "checkpoint-2"))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path) == weights(trained)
    assert (tmp_path / "history.jsonl").read_bytes() == (trained / "history.jsonl").read_bytes()


def test_held_out_prompts_are_judged_by_their_reward_and_the_rate_falls_as_asked(
    trained: Path,
) -> None:
    told = history(trained)
    assert [line["lr"] for line in told] == pytest.approx(
        [0.01 * (1 - step / (2 * STEPS)) for step in range(1, STEPS + 1)]
    )
    assert [line["step"] for line in told if 0 < line.get("eval_reward", 0) < 1] == [2, 4]
    assert not any("eval_loss" in line for line in told)


def test_completions_of_both_models_are_compared_on_held_out_prompts(
    prompts: Path, trained: Path, tmp_path: Path
) -> None:
    done = run(
        program(
            "rlhf_evaluate.py", "--data", prompts, "--base", BASE, "--init", "random", "--model", trained / "learned", "--report", tmp_path,
            "--rewards", '{"share": 1}', "--reward-pattern", "[aeiou]", "--prompts", 3, "--samples", 2, "--max-completion-length", 8, "--micro-batch", 4,
        )
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["prompts"], report["samples"]) == (3, 6) and report["kl_per_token"] > 0
    assert report["rewards"]["share"] == {
        "weight": 1,
        "before": report["reward_before"],
        "after": report["reward_after"],
    }
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [set(sample) for sample in samples] == [{"prompt", "before", "after"}] * 6
    assert f"{report['kl_per_token']:.4f}" in (tmp_path / "report.md").read_text()


@pytest.mark.proof
def test_a_training_whose_reward_falls_is_over_and_its_best_model_comes_out_though_it_was_resumed(
    prompts: Path, tmp_path: Path
) -> None:
    """A rate that is far too high; with dropout, whose draws come back, and a callback of the user's."""
    (tmp_path / "told.py").write_text(CALLBACK)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = [
        "--dora",
        "--dropout",
        0.3,
        "--attention",
        "eager",
        "--eval-every",
        1,
        "--early-stopping",
        2,
        "--callbacks",
        f"{tmp_path / 'told.py'}:Told",
    ]
    harm = ["--learning-rate", 5, "--max-steps", 20, "--decay-steps", 0]
    done = run(training(prompts, whole, *flags, *harm))
    assert done.returncode == 0, done.stderr
    told = history(whole)
    best = max(told, key=lambda line: (line["eval_reward"], -line["step"]))
    last = told[-1]["step"]
    assert (
        last == best["step"] + 2
        and f"step {last}: eval_reward has not risen for 2 looks" in done.stdout
    )
    assert (
        "mine: step 1\n" in done.stdout
        and json.loads((whole / "learned" / "adapter_config.json").read_text())["use_dora"]
    )
    found = sorted(
        (whole / "checkpoints").glob("checkpoint-*"),
        key=lambda path: int(path.name.rpartition("-")[2]),
    )
    assert (found[-1] / "best" / "weights" / "adapter_model.safetensors").read_bytes() == weights(
        whole
    )
    assert (found[-1] / "adapter_model.safetensors").read_bytes() != weights(whole)
    done = run(training(prompts, resumed, *flags, *harm, "--resume", found[0]))
    assert done.returncode == 0 and "resumed at step 2" in done.stdout, done.stderr
    assert weights(resumed) == weights(whole) and history(resumed) == told


def test_two_processes_draw_what_one_draws_and_resume_to_the_same_bits(
    prompts: Path, trained: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = run(training(prompts, whole, processes=2), RECIPE_WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    for one, two in zip(history(trained), history(whole), strict=True):
        assert (
            two["reward"] == pytest.approx(one["reward"], abs=1e-6)
            and two["completion_tokens"] == one["completion_tokens"]
        )
        assert two["kl"] == pytest.approx(one["kl"], abs=1e-4) and two[
            "grad_norm"
        ] == pytest.approx(one["grad_norm"], rel=1e-3)

    argv, env = training(prompts, broken, processes=2), environment(RECIPE_WORLD_SIZE="2")
    said, _ = forks.signal_at(f"step 2/{STEPS}", argv, signal.SIGTERM, tmp_path / "gate", env=env)
    saved = broken / "checkpoints" / "checkpoint-3"  # they agree on it in their next step
    assert "asked to end; saved step 3" in said
    done = run(training(prompts, broken, "--resume", saved, processes=2), RECIPE_WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    assert weights(broken) == weights(whole)


@pytest.mark.proof
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_sharded_training_draws_what_one_process_draws_and_is_resumed_within_a_millionth(
    method: str, prompts: Path, tmp_path: Path
) -> None:
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    flags = [
        word for word in training(prompts, tmp_path, "--method", method) if word != "--keep-best"
    ]
    for out, sharding, more in (
        (whole, "fsdp", []),
        (resumed, "fsdp", ["--resume", str(whole / "checkpoints" / "checkpoint-2")]),
        (alone, "none", []),
    ):
        argv = [word.replace(str(tmp_path), str(out)) for word in flags] + [
            "--sharding",
            sharding,
            *more,
        ]
        processes = 1 if out is alone else 2
        done = run(launched(argv, processes), RECIPE_WORLD_SIZE=str(processes), FORKS_REAL="1")
        assert done.returncode == 0, done.stderr
    for name in ("reward", "kl"):
        assert [line[name] for line in history(whole)] == pytest.approx(
            [line[name] for line in history(alone)], abs=1e-4
        )
    assert difference(whole / "learned", resumed / "learned") <= 1e-6


WRITING = """
import os, sys
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LogitsProcessor, LogitsProcessorList
from argparse import Namespace
from pathlib import Path
import adapters, sharding
from peft import get_peft_model
from text_model import load_base

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
base = load_base(Path(sys.argv[1]), "random", 0, "no")
options = Namespace(method=sys.argv[2], rank=4, alpha=8.0, rank_stabilized=False, dora=False, dropout=0.0, train_embeddings=False)
config = adapters.lora(options, "CAUSAL_LM")
model = get_peft_model(base, config) if config else base

class Ends(LogitsProcessor):  # after 2 tokens, or 6
    def __init__(self): self.tokens = 0
    def __call__(self, ids, scores):
        self.tokens += 1
        scores[:, 0] = float("inf") if self.tokens > 2 + 4 * rank else float("-inf")
        return scores

def written():
    ids = torch.arange(3, 8)[None]
    ends = LogitsProcessorList([Ends()])
    with sharding.generating(model), torch.no_grad():
        told = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, logits_processor=ends, eos_token_id=0, pad_token_id=0)
    return told[0, 5:].tolist()

alone = written()
for layer in base.model.layers:
    fully_shard(layer)
fully_shard(model)
assert [written() for _ in range(2)] == [alone, alone], alone
assert len(alone) == (3, 7)[rank], alone
torch.distributed.barrier()
print("written", rank, flush=True)
os._exit(0)
"""


@pytest.mark.proof
@pytest.mark.parametrize("method", ["lora", "full"])
def test_processes_that_share_a_model_write_what_each_would_alone_however_long(
    method: str, tmp_path: Path
) -> None:
    """One is at its end before the other, and goes on gathering weights for it."""
    (tmp_path / "writing.py").write_text(WRITING)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(tmp_path / "writing.py"),
        str(BASE),
        method,
    ]
    done = subprocess.run(
        argv, env=environment(PYTHONPATH=str(TRAINERS)), capture_output=True, text=True, timeout=120
    )
    assert sorted(done.stdout.splitlines()) == ["written 0", "written 1"], done.stderr


def test_grpo_learns_from_a_function_and_a_reward_model_together(
    prompts: Path, tmp_path: Path
) -> None:
    """With all weights; the function has no opinion on some completions, and both rewards are told apart."""
    function = tmp_path / "reward.py"
    function.write_text(FUNCTION)
    more = [
        "--reward-function",
        function,
        "--reward-model",
        BASE,
        "--reward-init",
        "random",
        "--rewards",
        '{"model": 0.5}',
        "--beta",
        0.01,
    ]
    batches = [
        "--epochs",
        0.25,
        "--global-batch",
        32,
        "--num-generations",
        8,
        "--micro-batch",
        32,
        "--learning-rate",
        0.02,
        "--decay-steps",
        0,
        "--eval-every",
        0,
    ]
    argv = training(prompts, tmp_path, *more, *batches, "--algorithm", "grpo", "--method", "full")
    done = run([word for word in argv if word != "--keep-best"])
    assert done.returncode == 0, done.stderr
    points = history(tmp_path)
    assert len(points) == 15  # a quarter of an epoch
    for point in points:
        assert point["reward"] == pytest.approx(
            point["reward_function"] + 0.5 * point["reward_model"], abs=0.05
        )  # None counts as nothing
    assert (
        sum(point["reward"] for point in points[-5:]) / 5
        > sum(point["reward"] for point in points[:5]) / 5 + 0.1
    )
    made = json.loads((tmp_path / "learned" / "training.json").read_text())
    assert (made["algorithm"], made["method"], made["weights"]) == (
        "grpo",
        "full",
        {"function": 1.0, "model": 0.5},
    )


def test_a_batch_that_splits_a_group_is_refused(prompts: Path, tmp_path: Path) -> None:
    done = run(training(prompts, tmp_path, "--num-generations", 5))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "train: global_batch 16 is no multiple of num_generations 5",
    )
