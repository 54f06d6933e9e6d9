"""Claims about what `sft@1` and `cpt@1` may be asked for beside the plain training: 4 bits, noise, other optimizers, an early end, sharding, callbacks."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import signal
import sys
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.library.siblings import siblings
from tests.library.test_text_train import TOPICS, prepare, training, weights
from tests.system.test_sft_trainer import BASE, ROOT, TRAINERS, checkpoints, run, signal_at

pytestmark = pytest.mark.xdist_group("text")
CALLBACK = """
from transformers import TrainerCallback
class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("mine: step", state.global_step, flush=True)
"""


def difference(one: Path, other: Path) -> float:
    """By how much exported weights differ at most, relative to the greatest of their matrix."""
    from safetensors.numpy import load_file

    (name,) = (file.name for file in one.glob("*.safetensors"))
    first, second = load_file(one / name), load_file(other / name)
    assert len(first) > 20 and set(first) == set(second)
    return max(
        float(abs(first[key] - second[key]).max() / max(abs(first[key]).max(), 1e-12))
        for key in first
    )


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("topics") / "tokens"
    prepare(TOPICS, out)
    return out


def history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_adapter_on_a_base_in_4_bits_that_is_killed_and_resumed_ends_in_the_same_bits(
    topics: Path, tmp_path: Path
) -> None:
    """With noise, direction and size apart, an optimizer of 8 bits and a slope: whatever any of them draws or keeps comes back."""
    pytest.importorskip("bitsandbytes")
    flags = (
        "--method",
        "qlora",
        "--dora",
        "--neftune",
        5,
        "--optimizer",
        "adamw_8bit",
        "--schedule",
        "linear",
        "--save-every",
        2,
        "--micro-batch",
        16,
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(training(topics, whole, *flags, max_steps=4))
    assert done.returncode == 0, done.stderr
    signal_at(
        "step 3/4", training(topics, killed, *flags, max_steps=4), signal.SIGKILL, tmp_path / "gate"
    )
    assert [path.name for path in checkpoints(killed)] == ["checkpoint-2"]
    done = run(training(topics, killed, *flags, "--resume", checkpoints(killed)[-1], max_steps=4))
    assert "resumed at step 2" in done.stdout, done.stderr
    assert weights(killed) == weights(whole) and history(killed) == history(whole)
    config = json.loads((whole / "weights" / "adapter_config.json").read_text())
    assert config["use_dora"] and history(whole)[3]["loss"] < history(whole)[0]["loss"]


@pytest.mark.proof
def test_a_training_that_gets_worse_is_over_and_its_best_model_comes_out_though_it_was_resumed(
    topics: Path, tmp_path: Path
) -> None:
    """A rate that is far too high: soon nothing gets better, and what judged best is what comes out."""
    (tmp_path / "told.py").write_text(CALLBACK)
    flags = (
        "--eval-every",
        1,
        "--save-every",
        2,
        "--early-stopping",
        2,
        "--keep-best",
        "--decay-steps",
        0,
        "--epochs",
        0.5,
    )
    harm = ("--learning-rate", 5, "--warmup-steps", 0)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = run(
        training(topics, whole, *flags, *harm, "--callbacks", f"{tmp_path / 'told.py'}:Told")
    )
    assert done.returncode == 0, done.stderr
    told = history(whole)
    looks = [(line["eval_loss"], int(line["step"])) for line in told if "eval_loss" in line]
    best = min(looks)
    last = int(told[-1]["step"])
    assert (
        last == best[1] + 2 and f"step {last}: eval_loss has not fallen for 2 looks" in done.stdout
    )
    sequences = json.loads((topics / "manifest.json").read_text())["sequences"]["train"]
    assert (
        f"step 1/{math.ceil(sequences / 32)}  " in done.stdout
    )  # half an epoch, whatever max_steps says
    assert "mine: step 1\n" in done.stdout
    assert json.loads((whole / "weights" / "training.json").read_text())["max_steps"] == last
    assert (
        checkpoints(whole)[-1] / "best" / "weights" / "adapter_model.safetensors"
    ).read_bytes() == weights(whole)["adapter_model.safetensors"]
    assert (checkpoints(whole)[-1] / "adapter_model.safetensors").read_bytes() != weights(whole)[
        "adapter_model.safetensors"
    ]
    # From its middle, and from its very end.
    for checkpoint in (checkpoints(whole)[0], checkpoints(whole)[-1]):
        shutil.rmtree(resumed, ignore_errors=True)
        done = run(training(topics, resumed, *flags, *harm, "--resume", checkpoint))
        assert done.returncode == 0, done.stderr
        assert weights(resumed) == weights(whole) and history(resumed) == told, done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sharding", "fsdp"), "sharding fsdp shares a model among processes, and one came up"),
        (
            ("--early-stopping", "2", "--eval-every", "0"),
            "early_stopping goes by looks at held-out data, and there is none",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    flags: tuple[str, str], said: str, topics: Path, tmp_path: Path
) -> None:
    done = run(training(topics, tmp_path / "out", *flags, max_steps=1))
    assert done.returncode == 1 and f"train: {said}" in done.stderr


def test_callbacks_are_those_classes_that_are_named(tmp_path: Path) -> None:
    """Each once, in the order in which they are named; two of one file see the same names."""
    (tmp_path / "told.py").write_text(
        f"{CALLBACK}\nclass More(Told):\n    seen = Told\nTold.more = More\n"
    )
    with siblings():
        common: Any = importlib.import_module("trl_common")
        more, told = common.callbacks(
            [f"{tmp_path / 'told.py'}:{name}" for name in ("More", "Told")]
        )
    assert (
        [type(each).__name__ for each in (more, told)] == ["More", "Told"]
        and more.seen is type(told)
        and told.more is type(more)
    )


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("hooks.py:Nope", "callbacks: hooks.py has no Nope"),
        ("hooks.py:Plain", "callbacks: hooks.py:Plain is no class on transformers.TrainerCallback"),
        (
            "hooks.py:Wants",
            r"callbacks: hooks.py:Wants failed: TypeError: .*missing 1 required positional argument: 'what'",
        ),
        ("broken.py:Told", "callbacks: broken.py:Told failed: ZeroDivisionError: division by zero"),
        ("absent.py:Told", "callbacks: absent.py:Told failed: FileNotFoundError"),
    ],
)
def test_a_callback_that_cannot_be_had_is_named(named: str, said: str, tmp_path: Path) -> None:
    wants = "class Wants(Told):\n    def __init__(self, what): pass\n"
    (tmp_path / "hooks.py").write_text(f"{CALLBACK}\nclass Plain: pass\n{wants}")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with siblings():
        common: Any = importlib.import_module("trl_common")
        with pytest.raises(SystemExit, match=said):
            common.callbacks([f"{tmp_path}/{named}"])


@pytest.mark.parametrize(("dropout", "neftune"), [(0.5, 0.0), (0.0, 50.0)])
def test_noise_acts_where_gradients_are_taken_and_nowhere_else(
    dropout: float, neftune: float
) -> None:
    """In training mode, in which TRL has a model write and compares it with its base; and though TRL took the dropout away."""
    import torch
    from peft import get_peft_model
    from transformers.integrations.neftune import activate_neftune
    from trl.trainer.utils import disable_dropout_in_model

    options = Namespace(
        method="lora",
        rank=4,
        alpha=8.0,
        rank_stabilized=False,
        dora=False,
        dropout=dropout,
        neftune=neftune,
    )
    with siblings():
        adapters: Any = importlib.import_module("adapters")
        text_model: Any = importlib.import_module("text_model")
        base = text_model.load_base(BASE, "random", 0, "no")
        model: Any = get_peft_model(base, adapters.lora(options, "CAUSAL_LM"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
        disable_dropout_in_model(model)
        if neftune:
            activate_neftune(model, neftune)
        adapters.noise(model, options)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        still, plain = model.train()(ids).logits, model.eval()(ids).logits
    noisy = model.train()(ids).logits
    assert torch.equal(still, plain) and not torch.allclose(noisy, plain, atol=1e-3)


def test_attention_is_what_was_asked_for() -> None:
    with siblings():
        loaders = (
            importlib.import_module("text_model").load_base,
            importlib.import_module("tuned").load_judge,
        )
        assert [
            loads(BASE, "random", 0, "no", attention="eager").config._attn_implementation
            for loads in loaders
        ] == ["eager", "eager"]


def test_a_package_that_is_missing_is_named_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with siblings():
        sharding: Any = importlib.import_module("sharding")
        model: Any = importlib.import_module("text_model")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            SystemExit,
            match=r"sharding zero3 needs deepspeed, .* pip install deepspeed, or sharding=fsdp",
        ):
            sharding.arguments(Namespace(sharding="zero3", keep_best=False), 2)
        with pytest.raises(
            SystemExit,
            match=r"method qlora needs bitsandbytes, .* pip install bitsandbytes, or method=lora",
        ):
            model.nf4("bf16")


@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_is_given_is_what_transformers_fills_in(stage: int) -> None:
    from accelerate import Accelerator  # noqa: F401  (first: its modules import each other)
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    with siblings():
        config = HfDeepSpeedConfig(importlib.import_module("sharding").zero(stage))
    assert (
        config.is_zero2() == (stage == 2)
        and config.is_zero3() == (stage == 3)
        and not config.is_offload()
    )
    assert (
        config.get_value("train_micro_batch_size_per_gpu")
        == config.get_value("gradient_clipping")
        == "auto"
    )


@pytest.mark.proof
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_sharded_training_that_is_resumed_ends_where_an_undisturbed_one_does(
    method: str, topics: Path, tmp_path: Path
) -> None:
    """FSDP 2 over gloo, which shares out every weight: the loss of one process, and weights that a resume changes by no more than a millionth."""
    flags = ("--method", method, "--decay-steps", 0, "--save-every", 3, "--sharding")
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    for out, more in ((whole, ()), (resumed, ("--resume", whole / "checkpoints" / "checkpoint-3"))):
        done = run(
            training(topics, out, *flags, "fsdp", *more, processes=2, max_steps=6),
            RECIPE_WORLD_SIZE="2",
            FORKS_REAL="1",
        )
        assert done.returncode == 0, done.stderr
    assert (whole / "checkpoints" / "checkpoint-3" / "pytorch_model_fsdp.bin").exists()
    assert run(training(topics, alone, *flags, "none", max_steps=6)).returncode == 0
    assert [line["loss"] for line in history(whole)] == pytest.approx(
        [line["loss"] for line in history(alone)], rel=1e-5
    )
    assert difference(whole / "weights", resumed / "weights") <= 1e-6


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_is_that_of_a_plain_script_of_trl(seed: int, topics: Path, tmp_path: Path) -> None:
    """The same rows in the same order, from the same weights: means of the last 20 of 60 steps within 1 %."""
    flags = (
        "--train-embeddings",
        "--seed",
        seed,
        "--decay-steps",
        0,
        "--warmup-steps",
        0,
        "--weight-decay",
        0,
    )
    done = run(training(topics, tmp_path, *flags, max_steps=60))
    assert done.returncode == 0, done.stderr
    ours = [line["loss"] for line in history(tmp_path)]
    plain = [
        sys.executable,
        str(ROOT / "benchmarks" / "plain_sft.py"),
        "--data",
        topics,
        "--base",
        BASE,
        "--out",
        tmp_path / "plain",
        "--init",
        "random",
    ]
    plain += [
        "--seed",
        seed,
        "--max-steps",
        60,
        "--global-batch",
        16,
        "--micro-batch",
        8,
        "--learning-rate",
        0.01,
    ]
    plain += ["--rank", 8, "--alpha", 16, "--train-embeddings"]
    done = run([str(word) for word in plain], PYTHONPATH=str(TRAINERS))
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])["losses"]
    assert len(theirs) == len(ours) == 60 and ours[-1] < ours[0] - 1
    assert mean(ours[-20:]) == pytest.approx(mean(theirs[-20:]), rel=0.01)
