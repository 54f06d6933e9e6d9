"""Claims about the trainers of dpo, orpo and reward, run as programs of their own: what a kill leaves, what is refused, what is saved."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.storage.checkpoint_layouts import recognize_layout
from tests.library.siblings import siblings
from tests.library.test_text_options import difference
from tests.system.test_sft_trainer import BASE, ROOT, launched, program, run, signal_at

PAIRS = ROOT / "fixtures" / "datasets" / "explain-or-show" / "pairs.jsonl"
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("preference")]


def training(
    kind: str, pairs: Path, out: Path, *more: object, processes: int = 1, max_steps: int = STEPS
) -> list[str]:
    alone = program(
        f"{kind}_train.py", "--data", pairs, "--base", BASE, "--init", "random", "--out", out / "weights", "--history", out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--tensorboard", out / "tensorboard", "--max-steps", max_steps, "--rank", 4, "--alpha", 8,
        "--global-batch", 8, "--micro-batch", 4, "--save-every", 3, "--learning-rate", 0.01, "--warmup-steps", 2, "--eval-every", 0, *more,
    )  # fmt: skip
    return launched(alone, processes) if processes > 1 else alone


def learned(out: Path) -> dict[str, bytes]:
    """The adapter or the model, its settings, and the history."""
    return {
        file.name: file.read_bytes()
        for file in (
            out / "history.jsonl",
            *(out / "weights").glob("*.safetensors"),
            *(out / "weights").glob("*config.json"),
        )
    }


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("preference") / "pairs"
    done = run(
        program(
            "preference_data.py",
            "--data",
            PAIRS,
            "--base",
            BASE,
            "--out",
            out,
            "--max-length",
            64,
            "--eval-fraction",
            "0.25",
        )
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DPO training that nobody disturbed."""
    out = tmp_path_factory.mktemp("trained")
    done = run(launched(training("dpo", pairs, out)), RECIPE_METRICS=str(out / "metrics.jsonl"))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def common() -> Iterator[Any]:
    """The module, with its siblings."""
    with siblings():
        import trl_common  # type: ignore[import-not-found]

        yield trl_common


def test_each_step_is_reported_once_with_its_times(trained: Path) -> None:
    told = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    assert (
        told[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and told[0]["margin"] == 0
    )  # nothing moved yet: −log σ(0)
    assert [line["lr"] for line in told] == [0.005, 0.01, 0.01, 0.01, 0.01, 0.01]
    for line in told:
        assert line["samples_per_second"] > 0 and line["memory_gb"] > 0 and line["grad_norm"] > 0
        assert 0 < line["time_model"] <= line["time_step"] and {
            "time_data",
            "time_optimizer",
            "time_communication",
        } <= set(line)
    # The time of a checkpoint is that of the next step, whose line is not in it.
    assert [line["step"] for line in told if "time_checkpoint" in line] == [4]
    history = [json.loads(line) for line in (trained / "history.jsonl").read_text().splitlines()]
    assert [set(line) & {"samples_per_second", "time_step", "memory_gb"} for line in history] == [
        set()
    ] * STEPS
    assert list((trained / "tensorboard").glob("events.*"))


def test_a_checkpoint_is_whole_by_the_engines_own_judgement(trained: Path) -> None:
    assert checkpoints(trained) == ["checkpoint-3", "checkpoint-6"]
    folder = trained / "checkpoints" / "checkpoint-3"
    found = recognize_layout({file.name for file in folder.iterdir()}, folder=folder.name)
    assert (found.kind, found.processes, found.missing) == ("transformers", 1, ())
    record = json.loads((folder / "recipe.json").read_text())
    assert (
        record["step"] == 3
        and record["settings"]["world"] == 1
        and set(record["files"]) == {file.name for file in folder.iterdir()} - {"recipe.json"}
    )
    assert len((folder / "history.jsonl").read_text().splitlines()) == 3


def test_a_killed_training_ends_in_the_same_bits(
    pairs: Path, trained: Path, tmp_path: Path
) -> None:
    """Killed after step 5 of a training of eight, resumed at 3 and continued to 6."""
    metrics = tmp_path / "metrics.jsonl"
    signal_at(
        "step 5/8",
        training("dpo", pairs, tmp_path, max_steps=8),
        signal.SIGKILL,
        tmp_path / "gate",
        RECIPE_METRICS=str(metrics),
    )
    assert [name for name in checkpoints(tmp_path) if not name.startswith(".")] == ["checkpoint-3"]
    assert not (tmp_path / "weights").exists()
    done = run(
        training("dpo", pairs, tmp_path, "--resume", tmp_path / "checkpoints" / "checkpoint-3"),
        RECIPE_METRICS=str(metrics),
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step 3" in done.stdout
    assert learned(tmp_path) == learned(trained)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(
        range(1, STEPS + 1)
    )


@pytest.mark.parametrize(
    ("kind", "method", "processes"),
    [
        ("dpo", "full", 1),
        ("orpo", "lora", 2),
        ("reward", "lora", 2),
        *(pytest.param(kind, "lora", 1, marks=pytest.mark.proof) for kind in ("orpo", "reward")),
    ],
)
def test_a_resumed_training_ends_in_the_same_bits(
    kind: str, method: str, processes: int, pairs: Path, tmp_path: Path
) -> None:
    """With noise on what is read, decay, and attention by another way: whatever any of them draws comes back.  A part of an epoch are six steps."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    part = (STEPS - 0.5) * 8 / json.loads((pairs / "manifest.json").read_text())["pairs"]["train"]
    flags = (
        "--epochs",
        part,
        "--method",
        method,
        "--dropout",
        0.3,
        "--neftune",
        5,
        "--weight-decay",
        0.1,
        "--attention",
        "eager",
    )
    for out, more in ((whole, ()), (resumed, ("--resume", whole / "checkpoints" / "checkpoint-3"))):
        done = run(
            training(kind, pairs, out, *flags, *more, processes=processes, max_steps=99),
            RECIPE_WORLD_SIZE=str(processes),
        )
        assert done.returncode == 0, done.stderr
    assert learned(resumed) == learned(whole) and len(learned(whole)) >= 3
    assert checkpoints(resumed) == ["checkpoint-6"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "method"), [("dpo", "lora"), ("dpo", "full"), ("orpo", "lora"), ("reward", "lora")]
)
def test_a_sharded_training_that_is_resumed_ends_where_an_undisturbed_one_does(
    kind: str, method: str, pairs: Path, tmp_path: Path
) -> None:
    """FSDP 2 over gloo, in full with a second model to compare with: the losses of one process, and a resume within a millionth."""
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    flags = ("--method", method, "--eval-every", 3, "--sharding")
    for out, more in ((whole, ()), (resumed, ("--resume", whole / "checkpoints" / "checkpoint-3"))):
        done = run(
            training(kind, pairs, out, *flags, "fsdp", *more, processes=2),
            RECIPE_WORLD_SIZE="2",
            FORKS_REAL="1",
        )
        assert done.returncode == 0, done.stderr
    assert (whole / "checkpoints" / "checkpoint-3" / "pytorch_model_fsdp.bin").exists()
    assert run(training(kind, pairs, alone, *flags, "none")).returncode == 0
    told = [
        [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
        for out in (whole, alone)
    ]
    losses = [
        [line[name] for line in each for name in ("loss", "eval_loss") if name in line]
        for each in told
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == STEPS + 2
    assert difference(whole / "weights", resumed / "weights") <= 1e-6


def test_two_processes_resume_exactly_and_learn_what_one_learns(
    pairs: Path, trained: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    whole, ended = tmp_path / "whole", tmp_path / "ended"
    done = run(training("dpo", pairs, whole, processes=2), RECIPE_WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    # Their launcher dies in the midst of it: both save the step that they are at.
    again = training("dpo", pairs, ended, "--save-every", 1000, processes=2)
    said = signal_at(
        "step 2/", again, signal.SIGKILL, tmp_path / "gate", whole=False, RECIPE_WORLD_SIZE="2"
    )
    (saved,) = checkpoints(ended)
    step = int(saved.removeprefix("checkpoint-"))
    assert 2 <= step < STEPS and f"asked to end; saved step {step}" in said
    found = recognize_layout(
        {file.name for file in (ended / "checkpoints" / saved).iterdir()}, folder=saved
    )
    assert (found.kind, found.processes, found.missing) == ("transformers", 2, ())
    done = run(
        training("dpo", pairs, ended, "--resume", ended / "checkpoints" / saved, processes=2),
        RECIPE_WORLD_SIZE="2",
    )
    assert done.returncode == 0, done.stderr
    assert learned(ended) == learned(whole)
    # One process adds up the same pairs in another order.
    alone, both = (
        load_file(out / "weights" / "adapter_model.safetensors") for out in (trained, whole)
    )
    assert max(float(abs(alone[name] - both[name]).max()) for name in alone) < 1e-4

    refused = run(
        training("dpo", pairs, tmp_path / "one", "--resume", ended / "checkpoints" / saved)
    )
    assert (
        refused.returncode == 1
        and "it was made by another training: world was 2, is 1" in refused.stderr
    )


@pytest.mark.parametrize("kind", ["dpo", "orpo", "reward"])
def test_a_training_that_is_asked_to_end_saves_its_step_and_dies_of_the_signal(
    kind: str, pairs: Path, tmp_path: Path
) -> None:
    said = signal_at(
        "step 2/",
        training(kind, pairs, tmp_path, "--save-every", 1000),
        signal.SIGTERM,
        tmp_path / "gate",
    )
    (saved,) = checkpoints(tmp_path)
    assert f"asked to end; saved step {saved.removeprefix('checkpoint-')}" in said
    assert not (tmp_path / "weights").exists()


def test_what_the_control_file_asks_is_done_and_the_resumed_training_ends_in_the_same_bits(
    pairs: Path, trained: Path, tmp_path: Path
) -> None:
    """A checkpoint after the first step, the interval of the environment after that, and a pause: one more checkpoint, and no status of success."""
    control, metrics = tmp_path / "control", tmp_path / "metrics.jsonl"
    control.write_text('{"ask": "checkpoint"}\n')
    env = {"RECIPE_CONTROL": str(control), "RECIPE_METRICS": str(metrics)}
    done = run(
        training("dpo", pairs, tmp_path, max_steps=2),
        CHECKPOINT_INTERVAL_STEPS="100",
        METRICS_REPORT_INTERVAL_STEPS="100",
        **env,
    )
    assert done.returncode == 0 and checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"], (
        done.stderr
    )
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [2]
    control.write_text('{"ask": "pause"}\n')
    done = run(
        training("dpo", pairs, tmp_path, "--resume", tmp_path / "checkpoints/checkpoint-1"), **env
    )
    assert done.returncode == -signal.SIGTERM and "asked to end; saved step 2" in done.stdout
    done = run(training("dpo", pairs, tmp_path, "--resume", tmp_path / "checkpoints/checkpoint-2"))
    assert done.returncode == 0 and learned(tmp_path) == learned(trained), done.stderr


def test_fewer_processes_than_asked_for_are_refused(pairs: Path, tmp_path: Path) -> None:
    done = run(training("orpo", pairs, tmp_path), RECIPE_WORLD_SIZE="2")
    assert done.returncode == 1 and "2 processes were asked for, 1 came up" in done.stderr


def test_a_loss_that_is_no_number_ends_the_training(pairs: Path, tmp_path: Path) -> None:
    done = run(training("reward", pairs, tmp_path, "--learning-rate", 1e37, "--warmup-steps", 0))
    assert done.returncode == 1
    assert "the loss is nan at step 2; a smaller learning_rate" in done.stderr
    assert checkpoints(tmp_path) == [".unfinished"] or not checkpoints(tmp_path)


def test_a_training_in_full_starts_as_its_reference_and_comes_out_whole(
    pairs: Path, tmp_path: Path
) -> None:
    done = run(
        training("dpo", pairs, tmp_path, "--method", "full", "--learning-rate", 0.001, max_steps=2)
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()
    )
    assert first["margin"] == 0 and first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert second["loss"] < first["loss"]
    weights = tmp_path / "weights"
    assert (weights / "model.safetensors").exists() and not (
        weights / "adapter_config.json"
    ).exists()


def test_computing_the_reference_beforehand_changes_nothing_and_writes_nothing_beside_the_data(
    pairs: Path, trained: Path, tmp_path: Path
) -> None:
    before = sorted(file.name for file in pairs.iterdir())
    done = run(training("dpo", pairs, tmp_path, "--precompute-reference", max_steps=2))
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in pairs.iterdir()) == before
    lines = [
        [json.loads(line)["loss"] for line in (out / "history.jsonl").read_text().splitlines()[:2]]
        for out in (tmp_path, trained)
    ]
    assert lines[0] == pytest.approx(lines[1], rel=1e-5)


@pytest.mark.parametrize("damage", ["short", "gone", "no record", "other settings", "too far"])
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused(
    damage: str, common: Any, trained: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "checkpoint-3"
    shutil.copytree(trained / "checkpoints" / "checkpoint-3", torn)
    settings = json.loads((torn / "recipe.json").read_text())["settings"]
    assert common._check(torn, settings, 3)[0] == 3
    optimizer = torn / "optimizer.pt"
    if damage == "short":
        optimizer.write_bytes(optimizer.read_bytes()[:-1])
    elif damage in ("gone", "no record"):
        (optimizer if damage == "gone" else torn / "recipe.json").unlink()
    elif damage == "other settings":
        settings["beta"] = 0.2
    why = {
        "short": "optimizer.pt is not as it was saved", "gone": "not a complete checkpoint", "no record": "not a complete checkpoint",
        "other settings": "made by another training: beta was 0.1, is 0.2", "too far": "it is at step 3, beyond max_steps 2",
    }[damage]  # fmt: skip
    with pytest.raises(SystemExit, match=rf"cannot resume from .*{why}"):
        common._check(torn, settings, 2 if damage == "too far" else 6)


def test_the_end_token_does_not_fill_up_where_the_vocabulary_has_room(
    common: Any, tmp_path: Path
) -> None:
    from types import SimpleNamespace

    import torch

    def model(rows: int) -> SimpleNamespace:
        return SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(rows, 1))

    assert (
        common.tokenizer_of(BASE, model(1024)).pad_token == "<|endoftext|>"
    )  # no room: masks are made from lengths
    roomy = common.tokenizer_of(BASE, model(1088))
    assert roomy.pad_token == "<|pad|>" and roomy.pad_token_id == 1024 != roomy.eos_token_id
    named = tmp_path / "named"
    shutil.copytree(BASE, named)
    words = json.loads((named / "tokenizer.json").read_text())
    words["model"]["vocab"]["[PAD]"] = words["model"]["vocab"].pop("Ā")
    (named / "tokenizer.json").write_text(json.dumps(words))
    assert common.tokenizer_of(named, model(1024)).pad_token == "[PAD]"


@pytest.mark.parametrize(
    ("gained", "likelier", "loss", "said"),
    [
        (
            0.925,
            (0.45, 0.45),
            (3.0, 2.9),
            "It learned the preference: chosen answers gained on rejected ones in 92.5% of 40 pairs. The chosen answer is the",
        ),
        (
            0.925,
            (0.45, 0.9),
            (3.0, 3.1),
            "It learned the preference: chosen answers gained on rejected ones in 92.5% of 40 pairs.",
        ),
        (
            0.6,
            (0.45, 0.45),
            (3.0, 2.9),
            "Nothing can be concluded: chosen answers gained on rejected ones in 60.0% of 40 pairs, and a coin comes as far.",
        ),
        (0.1, (0.45, 0.2), (3.0, 2.9), "It learned the opposite"),
        (
            0.925,
            (0.45, 0.9),
            (3.0, 3.4),
            "Chosen answers became less likely, too (loss per token 3.00 before, 3.40 after)",
        ),
    ],
)
def test_a_preference_report_says_what_to_conclude(
    gained: float, likelier: tuple[float, float], loss: tuple[float, float], said: str
) -> None:
    with siblings():
        from preference_evaluate import conclusion  # type: ignore[import-not-found]

    told = conclusion(40, gained, likelier, loss)
    assert (
        said in told
        and ("less likely" in told) == (loss[1] > 3.2)
        and ("by less than" in told) == (likelier[0] == likelier[1] and gained > 0.7)
    )
