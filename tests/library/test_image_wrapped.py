"""`image-lora@1` hands prepared images to diffusers' example scripts: a stand-in shows what a script is told and what comes back of it.

The scripts themselves are run where RECIPE_DIFFUSERS names a checkout of diffusers: each one's own parser takes the command, and with tiny models on a CPU
they train.  torchvision, which they import, is a stand-in of ours there (torchvision_stub): it is large, and images come prepared.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from tests.library import forks
from tests.library.siblings import siblings
from tests.library.smoke import smoke
from tests.library.tiny_families import tiny
from tests.support import RECIPE
from tests.system.test_sft_trainer import environment, program
from tests.tools import diffusers_examples

ROOT = Path(__file__).resolve().parents[2]
EMOJI, TINY = ROOT / "fixtures" / "datasets" / "emoji", ROOT / "fixtures" / "tiny-flux"
READ: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "image-lora@1.yaml").read_text())
FAMILIES = READ["inputs"]["family"]["choices"]
ROWS = [
    {"id": "000000-a", "caption": "zxq, a cup", "width": 64, "height": 128, "repeats": 1},
    {"id": "000001-b", "caption": "zxq, a jug", "width": 128, "height": 64, "repeats": 2},
]

# Takes what it gets for options; "trains" in micro batches as diffusers' scripts do, which save before they tell the step that they save.
STAND_IN = """
import argparse, json, os, pathlib, random
from accelerate import Accelerator

def parse_args(words):
    parser = argparse.ArgumentParser()
    for word in words:
        if word.startswith("--") and word != "--lora_lyers":
            following = words[words.index(word) + 1: words.index(word) + 2]
            flag = not following or following[0].startswith("--")
            parser.add_argument(word, **({"action": "store_true"} if flag else {}))
    return parser.parse_args(words)

class BucketBatchSampler:
    def __init__(self):
        self.batches = list(range(100))
    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)

def main(given):
    assert given is args
    accelerator = Accelerator(log_with=given.report_to)
    accelerator.init_trackers("dreambooth", config=vars(given))
    first = int(getattr(given, "resume_from_checkpoint", "checkpoint-0").rpartition("-")[2])
    micro = int(given.gradient_accumulation_steps)
    for step in range(first + 1, int(given.max_train_steps) + 1):
        for number in range(1, micro + 1):
            last = number == micro
            if last and step % int(given.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(given.output_dir, f"checkpoint-{step}"))
            accelerator.log({"loss": 10.0 - step + number, "lr": 0.1}, step=step if last else step - 1)
    accelerator.end_training()
    sampler = BucketBatchSampler()
    told = {"options": vars(given), "rows": open(os.path.join(given.dataset_name, "metadata.jsonl")).read(), "same": list(sampler) == list(sampler)}
    pathlib.Path(given.output_dir, "pytorch_lora_weights.safetensors").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def trainer() -> Iterator[Any]:
    with siblings():
        import image_lora_train  # type: ignore[import-not-found]

        yield image_lora_train


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder in which the step runs, with two images and a stand-in for each script."""
    for name in ("images", "checkpoints", "scripts", "base"):
        (tmp_path / name).mkdir()
    for row in ROWS:
        (tmp_path / "images" / f"{row['id']}.png").touch()
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "base" / "model_index.json").write_text("{}")
    for name in ("z_image", "flux_kontext"):
        (tmp_path / "scripts" / f"train_dreambooth_lora_{name}.py").write_text(STAND_IN)
    return tmp_path


def words(folder: Path, **more: object) -> list[str]:
    """The command line of the step, as the recipe writes it."""
    told: dict[str, object] = {
        "family": "z-image", "scripts": folder / "scripts", "base": folder / "base", "init": "pretrained", "images": folder / "images",
        "manifest": folder / "manifest.jsonl", "trigger": "zxq", "resolution": 64, "max-steps": 4, "learning-rate": 0.01, "warmup-steps": 0,
        "optimizer": "adamw", "weight-decay": 0, "rank": 4, "alpha": 4, "guidance": 1, "timesteps": "logit_normal", "caption-dropout": 0,
        "global-batch": 2, "micro-batch": 1, "precision": "no", "base-storage": "same", "seed": 0, "save-every": 2, "tracker": "none",
        "adapter": folder / "adapter.safetensors", "history": folder / "history.jsonl", "report": folder / "report.json",
        "command": folder / "command.txt", "tensorboard": folder / "tensorboard", "checkpoints": folder / "checkpoints",
    }  # fmt: skip
    told |= {name.replace("_", "-"): value for name, value in more.items()}
    return [str(word) for name, value in told.items() for word in (f"--{name}", value)]


def trained(
    folder: Path, env: dict[str, str] | None = None, **more: object
) -> subprocess.CompletedProcess[str]:
    return forks.run(
        program("image_lora_train.py", *words(folder, **more)),
        cwd=folder,
        env=environment(**env or {}),
        timeout=120,
    )


def composed(
    trainer: Any, folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, **more: object
) -> list[str]:
    """The command that the script of a family gets."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["image_lora_train.py", *words(folder, family=family, **more)])
    options, script = trainer._options(), trainer.SCRIPTS[family]
    trainer.unable(options, script)
    made: list[str] = trainer.command(
        options, script, ROWS, base=folder / "base", data=folder / "learned", precision="bf16"
    )
    return made


def test_a_script_gets_images_captions_and_the_settings(step: Path) -> None:
    done = trained(step, set='{"lora_layers": "to_k,to_q", "allow_tf32": true}')
    assert done.returncode == 0, done.stderr
    told = json.loads((step / "adapter.safetensors").read_text())
    options = told["options"]
    assert (
        options["max_train_steps"],
        options["train_batch_size"],
        options["gradient_accumulation_steps"],
    ) == ("4", "1", "2")
    assert options["aspect_ratio_buckets"] == "128,64;64,128", (
        "height and width of each size that is there"
    )
    assert (
        options["lora_layers"] == "to_k,to_q"
        and options["allow_tf32"] is True
        and options["report_to"] is None
    )
    rows = [json.loads(line) for line in told["rows"].splitlines()]
    assert [row["text"] for row in rows] == ["zxq, a cup", "zxq, a jug", "zxq, a jug"] and len(
        {row["file_name"] for row in rows}
    ) == 3
    assert (
        (step / "command.txt")
        .read_text()
        .startswith(
            "accelerate launch train_dreambooth_lora_z_image.py \\\n  --pretrained_model_name_or_path "
        )
    )


def test_each_step_is_reported_once_with_the_mean_of_its_micro_batches(step: Path) -> None:
    done = trained(step, {"RECIPE_METRICS": str(step / "metrics.jsonl")})
    assert done.returncode == 0, done.stderr
    history = [json.loads(line) for line in (step / "history.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in history] == [
        (1, 10.5),
        (2, 9.5),
        (3, 8.5),
        (4, 7.5),
    ]
    metrics = [json.loads(line) for line in (step / "metrics.jsonl").read_text().splitlines()]
    # Three images, as one repeats, in steps of two: the script ends an epoch with a step of one image.
    told = [(line["step"], line["epoch"]) for line in metrics if "loss" in line]
    assert told == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert json.loads((step / "report.json").read_text()) == {
        "steps": 4, "images": 2, "held_out": 0, "mean_of_steps": 2, "loss_first": 10.0, "loss_last": 8.0,
    }  # fmt: skip
    assert any((step / "tensorboard").iterdir())


def test_a_training_goes_on_from_its_checkpoint_with_its_history(step: Path) -> None:
    assert trained(step).returncode == 0
    whole = (step / "history.jsonl").read_text()
    assert sorted(path.name for path in (step / "checkpoints").glob("*checkpoint*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert (step / "checkpoints" / "checkpoint-2" / "history.jsonl").read_text() == "".join(
        whole.splitlines(keepends=True)[:2]
    )
    shutil.rmtree(step / "checkpoints" / "checkpoint-4")
    done = trained(step, resume=step / "checkpoints" / "checkpoint-2")
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((step / "adapter.safetensors").read_text())["options"]["resume_from_checkpoint"]
        == "checkpoint-2"
    )
    assert (step / "history.jsonl").read_text() == whole


def test_batches_keep_their_order_where_a_script_finds_captions_by_it(step: Path) -> None:
    """Kontext's script shuffles batches in each epoch, and takes the caption of the batch that had this place in the first."""
    done = trained(step, family="kontext")
    assert done.returncode == 0, done.stderr
    assert json.loads((step / "adapter.safetensors").read_text())["same"] is True


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"set": '{"seed": 1}'}, "set names seed, which this recipe decides itself; leave it out"),
        (
            {"set": '{"lora_lyers": "to_k"}'},
            "train_dreambooth_lora_z_image.py refuses its options: unrecognized arguments: --lora_lyers to_k",
        ),
        (
            {"global-batch": 3, "micro-batch": 2},
            "global_batch 3 is no multiple of micro_batch × 1 processes = 2; change one of them",
        ),
        (
            {"global-batch": 3, "micro-batch": 3},
            "no size has 3 images, so no batch of micro_batch 3 is ever full; take micro_batch=1",
        ),
        ({"alpha": 1.5}, "whole numbers for alpha, not 1.5"),
        (
            {"family": "kontext", "base-storage": "nf4"},
            "train_dreambooth_lora_flux_kontext.py knows no base in 4 bits; take base_storage=same",
        ),
        (
            {"family": "qwen-image", "caption-dropout": 0.1},
            "train_dreambooth_lora_qwen_image.py drops no captions; take caption_dropout=0",
        ),
        (
            {"family": "sd3.5", "alpha": 8},
            "train_dreambooth_lora_sd3.py takes alpha for rank: leave alpha to its default, or set it to 4",
        ),
        ({"family": "sd3.5"}, "train_dreambooth_lora_sd3.py is not there"),
        ({"base": ROOT}, "is no model folder as diffusers lays it out: it has no model_index.json"),
    ],
)
def test_what_cannot_be_done_is_said_by_name(
    step: Path, more: dict[str, object], said: str
) -> None:
    done = trained(step, **more)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]


def test_a_script_that_pairs_by_place_takes_one_device(
    trainer: Any, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError,
        match="pairs images with captions by the number of a batch, which 2 processes mix up; take one GPU",
    ):
        composed(trainer, step, "kontext", monkeypatch)
    assert "--gradient_accumulation_steps" in composed(trainer, step, "flux2-klein", monkeypatch)


def test_images_that_fill_no_batch_are_counted(trainer: Any) -> None:
    rows = [{"width": 64, "height": 64, "repeats": 1}] * 5
    left = "train: 1 of 5 images are left out of each epoch, as a batch has 2 of one size"
    assert trainer.skipped(rows, 2, buckets=True) == [left]
    assert trainer.skipped(rows, 1, buckets=True) == []
    assert trainer.skipped(rows, 2, buckets=False) == []


def test_an_image_that_repeats_fills_batches_as_several_do(trainer: Any) -> None:
    rows = [{"width": 64, "height": 64, "repeats": 3}, {"width": 64, "height": 96, "repeats": 1}]
    left = "train: 2 of 4 images are left out of each epoch, as a batch has 2 of one size"
    assert trainer.skipped(rows, 2, buckets=True) == [left]
    with pytest.raises(ValueError, match="no size has 4 images"):
        trainer.skipped(rows, 4, buckets=True)


def test_a_base_of_another_family_is_said_before_the_run(tmp_path: Path) -> None:
    def check(*inputs: str) -> set[str]:
        argv = [
            *RECIPE,
            "check",
            "image-lora@1",
            "-C",
            str(tmp_path),
            "--preset",
            "smoke",
            "--python",
            "current",
            "--format",
            "json",
            *inputs,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        return {finding["code"] for finding in json.loads(done.stdout)}

    assert "wrong-model-kind" in check("family=z-image") and "wrong-model-kind" not in check()


# ---- with the scripts themselves


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scripts_own_parser_takes_the_command(
    family: str, trainer: Any, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = diffusers_examples() / "examples" / "dreambooth" / trainer.SCRIPTS[family].file
    (function,) = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "parse_args"
    ]
    space: dict[str, Any] = {"argparse": argparse, "os": os, "warnings": warnings}
    exec(compile(ast.Module([function], []), str(file), "exec"), space)
    storage = {"base-storage": "nf4"} if trainer.SCRIPTS[family].nf4 else {}
    dropout = {"caption-dropout": 0.05} if trainer.SCRIPTS[family].dropout else {}
    more = {"resume": "checkpoints/checkpoint-2", "optimizer": "adamw_8bit", **storage, **dropout}
    took = space["parse_args"](composed(trainer, step, family, monkeypatch, **more))
    assert (
        took.max_train_steps,
        took.train_batch_size,
        took.rank,
        took.resume_from_checkpoint,
    ) == (4, 1, 4, "checkpoint-2")
    assert (
        took.use_8bit_adam
        and took.cache_latents is trainer.SCRIPTS[family].cache
        and took.weighting_scheme == "logit_normal"
    )
    assert all(
        hasattr(took, name)
        for name in trainer.OURS
        if trainer.SCRIPTS[family].buckets or "aspect" not in name
    )


def stubbed(home: Path) -> Path:
    """The scripts, below `home` as in diffusers' repository, with what stands in for torchvision beside them."""
    made = home / "examples" / "dreambooth"
    shutil.copytree(
        diffusers_examples() / "examples" / "dreambooth",
        made,
        ignore=shutil.ignore_patterns("test_*", "*.md", "torchvision"),
    )
    shutil.copytree(
        ROOT / "tests" / "library" / "torchvision_stub" / "torchvision", made / "torchvision"
    )
    return made


def recipe_with(space: Path) -> Path:
    """The recipe, its scripts checked out by git from a repository here, as tests have no network."""
    repository = space / "diffusers"
    stubbed(repository)

    def git(*given: str) -> str:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(repository), *given]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", "--all", "--force")
    git("commit", "--quiet", "-m", "scripts")
    for name in ("trainers", "locks"):
        shutil.copytree(ROOT / "recipes" / name, space / name)
    pinned = yaml.safe_load((ROOT / "recipes" / "image-lora@1.yaml").read_text())
    (code,) = [each for each in pinned["steps"]["train"]["code"] if isinstance(each, dict)]
    code |= {"git": str(repository), "commit": git("rev-parse", "HEAD")}
    pinned["presets"]["smoke"] |= {"dataset": str(EMOJI), "base": str(TINY)}
    recipe = space / "image-lora@1.yaml"
    recipe.write_text(yaml.safe_dump(pinned, sort_keys=False))
    return recipe


@pytest.mark.proof
def test_the_smoke_preset_trains_draws_and_exports(tmp_path: Path) -> None:
    """The loss falls from 3.4 to 2.9 when this was written, means of ten steps."""
    recipe = recipe_with(tmp_path)
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image, ImageChops, ImageStat
    from safetensors import safe_open

    smoke("image-lora@1", tmp_path, {"alpha": 32}, source=recipe)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (
        report["steps"] == 20
        and report["images"] == 48
        and report["loss_last"] < 0.93 * report["loss_first"]
    )
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 20
    drawn = {file.stem: Image.open(file) for file in (tmp_path / "samples").glob("*.png")}
    assert set(drawn) == {"base", "step-000020"}
    assert (
        ImageStat.Stat(
            ImageChops.difference(drawn["base"], drawn["step-000020"]).convert("L")
        ).mean[0]
        > 1
    )
    adapter = tmp_path / "model" / "pytorch_lora_weights.safetensors"
    with safe_open(adapter, "pt") as read:
        metadata = read.metadata()
    assert (
        metadata["recipe"] == "image-lora@1"
        and json.loads(metadata["recipe.settings"])["family"] == "kontext"
    )
    assert "20 steps on 48 images" in (tmp_path / "model" / "README.md").read_text()
    with siblings():
        from image_lora_base import base_folder  # type: ignore[import-not-found]

        base = base_folder(TINY, "random", tmp_path / "drawn")
    pipeline = DiffusionPipeline.from_pretrained(
        base, torch_dtype=torch.float32, local_files_only=True
    )
    pipeline.load_lora_weights(adapter.parent)
    (scale,) = {
        layer.scaling["default_0"]
        for layer in pipeline.transformer.modules()
        if hasattr(layer, "scaling")
    }
    assert scale == 2, "alpha 32 over rank 16 is in the file"
    more = runner.plan(
        str(recipe),
        {"alpha": 32, "max_steps": 30},
        preset="smoke",
        python="current",
        workspace=tmp_path,
    )
    answers = {
        node.id: verdict.answer
        for node, verdict in zip(more.plan.nodes, more.verdicts, strict=True)
    }
    assert (answers["data"], answers["train"]) == ("fresh", "run")


@pytest.mark.proof
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kontext"])
def test_each_script_trains_goes_on_and_what_it_made_draws(family: str, tmp_path: Path) -> None:
    """Kontext is what `smoke` runs.  Two steps, and two more from the checkpoint: as few as in the scripts' own tests."""
    scripts = stubbed(tmp_path)
    prepared = (
        "--data",
        EMOJI,
        "--out",
        tmp_path / "prepared",
        "--resolution",
        64,
        "--trigger",
        "zxq",
        "--bucket-step",
        64,
    )
    env = environment()
    assert forks.run(program("image_data.py", *prepared), env=env, timeout=60).returncode == 0
    told: dict[str, object] = {
        "family": family, "scripts": scripts, "base": tiny(family, tmp_path / "base"), "init": "random", "images": tmp_path / "prepared" / "images",
        "manifest": tmp_path / "prepared" / "manifest.jsonl", "global-batch": 8, "micro-batch": 4,
    }  # fmt: skip
    (tmp_path / "checkpoints").mkdir()

    def go(**more: object) -> list[dict[str, Any]]:
        argv = program("image_lora_train.py", *words(tmp_path, **told, **more))
        done = forks.run(argv, cwd=tmp_path, env=env, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]

    assert [line["step"] for line in go(max_steps=2)] == [1, 2]
    resumed = go(max_steps=4, resume=tmp_path / "checkpoints" / "checkpoint-2")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4] and all(
        0 < line["loss"] < 10 for line in resumed
    )
    sample = program(
        "image_lora_sample.py", "--base", told["base"], "--adapter", tmp_path / "adapter.safetensors", "--manifest", told["manifest"],
        "--report", tmp_path / "report.json", "--out", tmp_path / "samples", "--sheet", tmp_path / "samples.png", "--prompts", '["zxq banana"]',
        "--init", "random", "--precision", "no", "--size", 64, "--steps", 2, "--seed", 0, "--guidance", 2,
    )  # fmt: skip
    done = forks.run(sample, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    from PIL import Image, ImageChops

    drawn = [Image.open(tmp_path / "samples" / f"{name}.png") for name in ("base", "step-000004")]
    assert {image.size for image in drawn} == {(64, 64)} and ImageChops.difference(
        *drawn
    ).getbbox() is not None, "the adapter changes what is drawn"


@pytest.mark.proof
def test_captions_are_read_as_the_pipeline_reads_them_when_it_draws(trainer: Any) -> None:
    """FLUX.2 [klein]'s script takes other layers by itself, and that of SD 3.5 fewer tokens."""
    import inspect

    from diffusers import Flux2KleinPipeline, StableDiffusion3Pipeline

    layers = (
        inspect.signature(Flux2KleinPipeline.__call__).parameters["text_encoder_out_layers"].default
    )
    assert trainer.SCRIPTS["flux2-klein"].reads == ("--text_encoder_out_layers", *map(str, layers))
    tokens = (
        inspect.signature(StableDiffusion3Pipeline.__call__)
        .parameters["max_sequence_length"]
        .default
    )
    assert trainer.SCRIPTS["sd3.5"].reads == ("--max_sequence_length", str(tokens))
