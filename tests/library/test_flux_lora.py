"""`flux-lora@1` trains: sixty steps on a tiny model, held-out flow-matching loss 3.35 -> 2.24 when this was written, asserted with room to spare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

import runner
from runner.execution.terms import Choice
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flux-lora")]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flux-lora")


@pytest.fixture(scope="module")
def results(workspace: Path) -> Path:
    return smoke("flux-lora@1", workspace)


def redone(workspace: Path, **inputs: object) -> set[str]:
    """The steps that a run with these inputs over the smoke preset would do again, for all that is known beforehand."""
    survey = runner.plan(
        "flux-lora@1", inputs, preset="smoke", workspace=workspace, python="current"
    )
    return {
        node.id
        for node, verdict in zip(survey.plan.nodes, survey.verdicts, strict=True)
        if verdict.answer in ("run", "maybe")
    }


def test_the_adapter_lowers_the_loss_on_held_out_images(results: Path) -> None:
    report = json.loads((results / "report.json").read_text())
    assert report["held_out"] == 7 and report["images"] == 41
    assert report["eval_loss_after"] < 0.8 * report["eval_loss_before"]
    history = [json.loads(line) for line in (results / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in history] == list(range(1, 61))
    assert [line["step"] for line in history if "eval_loss" in line] == [30, 60]


def test_the_adapter_changes_what_is_drawn(results: Path) -> None:
    drawn = {file.stem: Image.open(file) for file in (results / "samples").iterdir()}
    assert sorted(drawn) == ["base", "step-000030", "step-000060"]
    assert {image.size for image in drawn.values()} == {(128, 64)}  # two prompts
    for name in ("step-000030", "step-000060"):
        assert (
            ImageStat.Stat(ImageChops.difference(drawn["base"], drawn[name]).convert("L")).mean[0]
            > 5
        )  # of 255; 20 when this was written
    for name in ("samples.png", "contact-sheet.png", "loss.png"):
        assert (results / name).read_bytes().startswith(b"\x89PNG")


def test_the_file_says_where_it_comes_from(results: Path) -> None:
    from safetensors import safe_open

    with safe_open(results / "model" / "pytorch_lora_weights.safetensors", "pt") as read:
        metadata, names = read.metadata(), set(read.keys())
    assert (
        metadata["recipe"] == "flux-lora@1"
        and len(metadata["recipe.key"]) == 64
        and len(metadata["recipe.data"]) == 64
    )
    assert json.loads(metadata["recipe.settings"]) == {
        "warmup_steps": 0, "decay_steps": 0, "schedule": "cosine", "floor": 0.1, "optimizer": "adamw", "weight_decay": 0, "beta1": 0.9, "beta2": 0.999,
        "caption_dropout": 0.05, "more_resolutions": [], "masks": "none", "mask_floor": 0.1, "repeats": [], "tag_orders": 1, "keep_tags": 1,
        "regularisation_share": 0.5, "regularisation_weight": 1, "ema": 0, "offload_blocks": 0, "compile": False,
        "base": "./tiny-flux", "base_revision": None, "init": "random", "trigger": "zxq", "resolution": 64, "max_steps": 60, "learning_rate": 0.01, "rank": 16, "alpha": 16, "guidance": 1,
        "timesteps": "flux_shift", "global_batch": 8, "precision": "no", "base_storage": "same", "seed": 0,
    }  # fmt: skip
    assert metadata["modelspec.trigger_phrase"] == "zxq"
    assert all(name.startswith("transformer.") for name in names)
    card = (results / "model" / "README.md").read_text()
    assert (
        "60 steps on 41 images" in card and "base_model" not in card
    )  # the base is a folder here, not a model of the Hub


COARSE: dict[str, object] = {"base_storage": "fp8", "checkpoint_activations": True}


@pytest.mark.proof  # that the trainer learns, resumes and draws over it: test_image_lora
def test_over_a_base_in_8_bits_it_learns_and_draws_too(results: Path, workspace: Path) -> None:
    """The whole of it but for what is prepared, which does not depend on how the base is stored.  3.36 to 2.24 when this was written."""
    before, inputs = json.loads((results / "report.json").read_text()), COARSE
    summary = runner.run(
        "flux-lora@1", inputs, preset="smoke", workspace=workspace, python="current"
    )
    assert summary.state == "COMPLETED"
    made = workspace / "out" / "flux-lora@1" / "latest"
    report = json.loads((made / "report.json").read_text())
    assert report["eval_loss_after"] < 0.8 * report["eval_loss_before"]
    # Coarser weights are another base, a little.
    assert (
        report["eval_loss_before"]
        != before["eval_loss_before"]
        == pytest.approx(report["eval_loss_before"], rel=0.05)
    )
    drawn = [
        Image.open(made / "samples" / f"{name}.png")
        for name in ("base", "step-000030", "step-000060")
    ]
    assert all(
        ImageStat.Stat(ImageChops.difference(drawn[0], other).convert("L")).mean[0] > 5
        for other in drawn[1:]
    )
    assert '| base_storage | "fp8" |' in (made / "model" / "README.md").read_text()


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(("inputs", "steps"), [
    ({"rank": 4}, {"train", "samples", "plot", "export"}),
    (COARSE, {"train", "samples", "plot", "export"}),
    ({"max_steps": 80}, {"train", "samples", "plot", "export"}),
    ({"sample_prompts": ["zxq avocado"]}, {"prompts", "samples", "export"}),
    ({"tracker": "trackio", "workers": 2}, set()),
])  # fmt: skip
def test_a_change_redoes_what_depends_on_it(
    inputs: dict[str, object], steps: set[str], workspace: Path
) -> None:
    assert redone(workspace, **inputs) == steps


@pytest.mark.usefixtures("results")
def test_an_edited_caption_encodes_no_image_again(workspace: Path, tmp_path: Path) -> None:
    edited = tmp_path / "emoji"
    shutil.copytree(ROOT / "fixtures" / "datasets" / "emoji", edited)
    (edited / "banana.txt").write_text("a ripe banana\n")
    inputs = {"dataset": str(edited)}
    summary = runner.run(
        "flux-lora@1",
        inputs,
        preset="smoke",
        workspace=workspace,
        python="current",
        choice=Choice(until="data"),
    )
    assert summary.state == "COMPLETED"
    assert redone(workspace, **inputs) == {
        "sheet",
        "text",
        "prompts",
        "train",
        "samples",
        "plot",
        "export",
    }
