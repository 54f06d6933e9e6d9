"""Claims about what flux-lora and sdxl-lora may be asked for beside the plain training.  All on one tiny model and one data set that has all of it."""

from __future__ import annotations

import json
import shutil
import signal
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.library.test_image_lora import EMOJI, ROOT, Bench, call, encode, trainers, training
from tests.system.test_sft_trainer import run, signal_at

__all__ = ["trainers"]

ALL = {
    "tag_orders": 3, "caption_dropout": 0.2, "regularisation_share": 0.25, "regularisation_weight": 0.5, "mask_floor": 0.1, "ema": 0.9,
}  # fmt: skip
"""Whatever draws, or keeps something from step to step."""

pytestmark = pytest.mark.xdist_group("images")


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images in two folders, with tags, and three of their kind in general; where emoji show nothing they are transparent."""
    home = tmp_path_factory.mktemp("things")
    for number, file in enumerate(sorted(EMOJI.glob("*.png"))[:9]):
        folder = home / ("data/fruit" if number < 4 else "data/rest" if number < 6 else "general")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder)
        (folder / f"{file.stem}.txt").write_text(f"{file.stem}, whole, on white, drawn")
    return home


def prepare(home: Path, out: Path, *more: object) -> list[dict[str, Any]]:
    import image_data  # type: ignore[import-not-found]

    call(
        image_data,
        "--data",
        home / "data",
        "--out",
        out,
        "--resolution",
        64,
        "--bucket-step",
        16,
        *more,
    )
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(
    things: Path, trainers: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return prepare(things, tmp_path_factory.mktemp("options") / "prepared", "--regularisation", things / "general", "--repeats", '["fruit=2"]', "--more-resolutions",
                   "[32]", "--masks", "alpha", "--trigger", "zxq", "--eval-fraction", 0.2)  # fmt: skip


@pytest.fixture(scope="module")
def encoded(
    things: Path, rows: object, trainers: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Namespace:
    prepared = next(tmp_path_factory.getbasetemp().glob("options*")) / "prepared"
    made = encode(
        "flux",
        prepared,
        trainers,
        tmp_path_factory.mktemp("encoded"),
        "--tag-orders",
        3,
        "--keep-tags",
        2,
    )
    return Namespace(**{**vars(made), **ALL, "keep_tags": 2})


def test_folders_repeat_and_what_is_general_has_no_trigger(rows: list[dict[str, Any]]) -> None:
    assert len(rows) > 12 and {row["source"].split("/")[0] for row in rows} == {
        "dataset",
        "regularisation",
    }
    for row in rows:
        general = row["source"].startswith("regularisation/")
        assert (
            row["regular"] == general
            and row["caption"].startswith("zxq, ") != general
            and not (general and row["held_out"])
        )
        assert row["repeats"] == (2 if "/fruit/" in row["source"] else 1)


def test_an_image_is_learned_at_each_resolution_that_does_not_enlarge_it_and_judged_at_the_largest(
    things: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    sizes = {row["source"]: [] for row in rows}
    for row in rows:
        sizes[row["source"]].append(row["width"])
        assert row["id"].endswith("-32") == (row["width"] == 32)
    held_out = {row["source"] for row in rows if row["held_out"]}
    assert held_out and all(
        found == ([64] if source in held_out else [64, 32]) for source, found in sizes.items()
    )
    found = prepare(things, tmp_path, "--more-resolutions", "[48, 128]")
    assert {row["width"] for row in found} == {64, 48}
    assert {
        row["width"]
        for row in prepare(things, tmp_path, "--more-resolutions", "[96]", "--resolution", 128)
    } == {96}  # the least that can be


def test_a_mask_goes_with_its_image_to_the_latent(
    rows: list[dict[str, Any]], encoded: Namespace
) -> None:
    import torch
    from safetensors.torch import load_file

    row = rows[0]
    with Image.open(encoded.manifest.parent / row["file"]) as image:
        assert image.mode == "RGBA" and image.getpixel((0, 0)) == (
            255,
            255,
            255,
            0,
        )  # what is behind it, hidden
        shown = (
            torch.tensor(list(image.getchannel("A").tobytes()))
            .view(8, 8, 8, 8)
            .double()
            .mean((1, 3))
            / 255
        )
    assert torch.allclose(
        load_file(encoded.latents / f"{row['id']}.safetensors")["mask"][0].double(),
        shown,
        atol=1e-6,
    )


def test_a_mask_may_lie_beside_its_image(
    things: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(things / "data", data)
    one, other = sorted(data.rglob("*.png"))[:2]
    for image, size, grey in ((one, (64, 64), 128), (other, (32, 64), 255)):
        Image.new("L", size, grey).save(image.with_name(f"{image.stem}-masklabel.png"))
    with pytest.raises(
        SystemExit,
        match=r"its mask avocado-masklabel.png has 32×64 pixels, the image 64×64; make them alike",
    ):
        prepare(tmp_path, tmp_path / "out", "--masks", "files")
    Image.new("L", (64, 64), 0).save(other.with_name(f"{other.stem}-masklabel.png"))
    with pytest.raises(SystemExit, match="its mask leaves nothing to learn"):
        prepare(tmp_path, tmp_path / "out", "--masks", "files")
    other.with_name(f"{other.stem}-masklabel.png").unlink()
    assert len(prepare(tmp_path, tmp_path / "out", "--masks", "files")) == 6
    modes = {
        file.name[:6]: Image.open(file).mode for file in (tmp_path / "out" / "images").iterdir()
    }
    assert (
        Counter(modes.values()) == {"RGBA": 1, "RGB": 5}
        and "data: 1 image with a mask" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("repeats", "complaint"), [
    ('["fruit"]', r'repeats: "fruit" is not FOLDER=TIMES; write it as portraits=10'),
    ('["fruit=0"]', r'repeats: "fruit=0" is not FOLDER=TIMES'),
    ('["friut=3"]', r'repeats: no image is in a folder "friut"; folders with images: fruit, rest'),
])  # fmt: skip
def test_repeats_that_say_nothing_are_refused(
    repeats: str, complaint: str, things: Path, trainers: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=complaint):
        prepare(things, tmp_path, "--repeats", repeats)


def test_an_epoch_has_an_image_as_often_as_it_repeats_and_beside_them_those_in_general(
    trainers: SimpleNamespace, encoded: Namespace
) -> None:
    learned = [row for row in trainers.model.rows(encoded.manifest) if not row.held_out]
    own = sum(row.repeats for row in learned if not row.regular)
    reading = trainers.train.Reading(learned, encoded)
    length = own + round(own / 3)
    epoch = Counter(reading.chosen(0, length))
    assert all(epoch[index] == row.repeats for index, row in enumerate(learned) if not row.regular)
    assert sum(epoch[index] for index, row in enumerate(learned) if row.regular) == length - own
    assert reading.chosen(0, 3 * length)[length + 1 : length + 9] == reading.chosen(length + 1, 8)
    many = Counter(reading.chosen(0, 6 * length))
    general = [many[index] for index, row in enumerate(learned) if row.regular]
    assert max(general) - min(general) <= 1
    alone = trainers.train.Reading(
        learned, Namespace(**{**vars(encoded), "regularisation_share": 0.0})
    )
    assert not any(learned[index].regular for index in alone.chosen(0, 3 * own))


def test_tags_change_places_behind_those_that_stay_and_each_order_is_learned(
    trainers: SimpleNamespace, encoded: Namespace
) -> None:
    found = trainers.model.orders("zxq, a cat, red, small, sitting, indoors", 4, 2)
    assert len(found) == 4 and found[0] == "zxq, a cat, red, small, sitting, indoors"
    assert all(
        each.startswith("zxq, a cat, ") and sorted(each.split(", ")) == sorted(found[0].split(", "))
        for each in found
    )
    assert (
        trainers.model.orders("a sentence", 4, 1) == ["a sentence"]
        and len(trainers.model.orders("a, b, c", 50, 1)) == 2
    )
    made = Bench(trainers, encoded)
    drawn = Counter(
        made.training._captioned(step, place, 3) for step in range(100) for place in range(8)
    )
    assert all(drawn[True, order] == pytest.approx(800 * 0.8 / 3, rel=0.2) for order in range(3))
    prompts = [
        made.learned.conditions([trainers.train.Example(0, True, order)])["prompt"]
        for order in range(3)
    ]
    assert (
        len({prompt.numpy().tobytes() for prompt in prompts}) == 3
        and made.learned.orders(0) == 3
        and made.held_out.orders(0) == 1
    )


def test_what_has_no_room_in_memory_is_read_again(
    trainers: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    monkeypatch.setattr(trainers.train, "HELD", 4)
    for name in "ab":
        save_file({"latent": torch.ones(1)}, tmp_path / name)
    files = trainers.train.Files()
    kept, again = (files.read(tmp_path / name) for name in "ab")
    assert (
        files.read(tmp_path / "a") is kept
        and files.read(tmp_path / "b") is not again
        and torch.equal(files.read(tmp_path / "b")["latent"], torch.ones(1))
    )


def test_what_a_mask_hides_is_not_learned_and_an_image_counts_as_one(
    trainers: SimpleNamespace, encoded: Namespace
) -> None:
    import torch

    def loss(floor: float, hidden: float, shown: float = 0.0) -> float:
        target = torch.tensor([hidden, shown]).view(1, 1, 1, 2).expand(1, 4, 2, 2)
        training = SimpleNamespace(
            _accelerator=SimpleNamespace(device="cpu", autocast=lambda: torch.enable_grad()), _options=SimpleNamespace(guidance=1.0, mask_floor=floor),
            _family=SimpleNamespace(predict=lambda *given: torch.zeros(1, 4, 2, 2)), model=None, _dtype=None,
        )  # fmt: skip
        mask = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(1, 1, 2, 2)
        return float(
            trainers.train.Training._loss(
                training, [(target[0], target[0], torch.tensor(0.5), 1.0)], {"mask": mask}
            )
        )

    assert loss(0.0, 5.0) == 0.0 and loss(0.0, 5.0, 3.0) == 9.0
    assert loss(1.0, 5.0, 3.0) == 17.0 and loss(0.25, 5.0, 3.0) == pytest.approx(
        (0.25 * 25 + 9) / 1.25
    )


def test_what_is_general_weighs_as_is_asked(trainers: SimpleNamespace, encoded: Namespace) -> None:
    made = Bench(trainers, Namespace(**{**vars(encoded), "regularisation_weight": 0.0}))
    general = [index for index, row in enumerate(made.learned.rows) if row.regular]
    own = [index for index, row in enumerate(made.learned.rows) if not row.regular]
    assert made.training.step(1, made.learned, general[:2], made._silent, False, 0.01)[0] == 0.0
    assert made.training.step(2, made.learned, own[:2], made._silent, False, 0.01)[0] > 0.5


def test_what_comes_out_is_the_average(
    trainers: SimpleNamespace, encoded: Namespace, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    made = Bench(trainers, encoded)
    made.go(1, 3)
    made.training.export(tmp_path / "last")
    with made.training.averaged():
        made.training.export(tmp_path / "average")
        judged = made.training.glance(made.held_out)
    made.training.export(tmp_path / "again")
    assert (tmp_path / "last").read_bytes() == (
        tmp_path / "again"
    ).read_bytes() and judged != made.training.glance(made.held_out)
    last, average = load_file(tmp_path / "last"), load_file(tmp_path / "average")
    assert any((last[name] != average[name]).any() for name in last)


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_so_many_blocks_stay_in_main_memory_wherever_the_model_goes(
    family: str, trainers: SimpleNamespace, encoded: Namespace
) -> None:
    import torch

    kind = trainers.model.family(family)
    denoisers = [
        kind.denoiser(ROOT / "fixtures" / f"tiny-{family}", "random", torch.float32)
        for _ in range(3)
    ]
    count = len({trainers.model._block(name) for name, _ in trainers.model.linear(denoisers[0])})
    sizes = []
    for model, blocks in zip(denoisers, (0, 1, 100), strict=True):
        trainers.model.away(model, blocks)
        model.to("meta")
        sizes.append(
            sum(weight.numel() for weight in model.parameters() if weight.device.type == "cpu")
        )
    assert (
        count > 1
        and 0 == sizes[0] < sizes[1] < sizes[2]
        and not trainers.model.linear(denoisers[2])
    )


def test_a_training_over_blocks_in_main_memory_learns_the_same_bits(
    trainers: SimpleNamespace, encoded: Namespace
) -> None:
    import torch

    options = Namespace(**{**vars(encoded), "checkpoint_activations": True})
    made = [
        Bench(trainers, Namespace(**{**vars(options), "offload_blocks": blocks}))
        for blocks in (0, 3)
    ]
    assert made[0].go(1, 2) == made[1].go(1, 2)
    one, other = (each.training.tensors() for each in made)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_base_in_4_bits_is_learned_over_and_resumed_to_the_same_bits(
    trainers: SimpleNamespace, encoded: Namespace
) -> None:
    import torch

    options = Namespace(**{**vars(encoded), "base_storage": "nf4"})
    made, again = Bench(trainers, options), Bench(trainers, options)
    packed = [
        name
        for name, weight in made.training.model.named_parameters()
        if weight.dtype == torch.uint8
    ]
    assert (
        len(packed) > 10
        and not any("lora" in name for name in packed)
        and all("transformer_blocks." in name for name in packed)
    )
    before, plain = made.training.glance(made.held_out), Bench(trainers, encoded)
    assert before == pytest.approx(
        plain.training.glance(plain.held_out), rel=0.05
    ) and before != plain.training.glance(plain.held_out)
    made.go(1, 2)
    middle = {name: value.clone() for name, value in made.training.tensors().items()}
    losses = made.go(3, 8)
    again.training.restore(middle)
    assert again.go(3, 8) == losses and made.training.glance(made.held_out) < before
    one, other = made.training.tensors(), again.training.tensors()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_samples_are_drawn_over_a_base_in_main_memory_and_in_4_bits(
    family: str, trainers: SimpleNamespace, encoded: Namespace, tmp_path: Path
) -> None:
    base = ROOT / "fixtures" / f"tiny-{family}"
    made = (
        encode(family, encoded.manifest.parent, trainers, tmp_path)
        if family != encoded.family
        else encoded
    )
    adapter = Bench(trainers, made)
    adapter.go(1, 2)
    (tmp_path / "snapshots").mkdir()
    for step in (1, 2):
        adapter.training.export(tmp_path / "snapshots" / f"step-00000{step}.safetensors")
    same = ("--family", family, "--base", base, "--init", "random", "--precision", "no")
    call(
        trainers.text,
        *same,
        "--manifest",
        encoded.manifest,
        "--prompts",
        '["zxq banana"]',
        "--out",
        tmp_path / "prompts",
    )
    drawn = {}
    for name, more in (
        ("plain", ()),
        ("away", ("--offload-blocks", 100)),
        ("nf4", ("--base-storage", "nf4")),
    ):
        call(trainers.sample, *same, "--vae", base / "vae", "--prompts", tmp_path / "prompts", "--snapshots", tmp_path / "snapshots", "--vae-precision", "no",
             "--objective", made.objective, "--size", 64, "--steps", 2, "--guidance", 2, "--seed", 0, "--out", tmp_path / name, "--sheet", tmp_path / "sheet.png",
             *more)  # fmt: skip
        drawn[name] = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
    assert drawn["away"] == drawn["plain"]
    assert drawn["nf4"].keys() == drawn["plain"].keys() and drawn["nf4"]["base.png"] not in (
        drawn["plain"]["base.png"],
        drawn["nf4"]["step-000002.png"],
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor", "prodigy"])
def test_with_all_of_it_a_resumed_training_ends_in_the_same_bits(
    optimizer: str, trainers: SimpleNamespace, encoded: Namespace
) -> None:
    import torch

    options = Namespace(
        **{**vars(encoded), "optimizer": optimizer, "weight_decay": 0.01, "beta1": 0.8}
    )
    made, again = Bench(trainers, options), Bench(trainers, options)
    made.go(1, 2)
    middle = {name: value.clone() for name, value in made.training.tensors().items()}
    losses = made.go(3, 4)
    again.training.restore(middle)
    assert again.go(3, 4) == losses
    one, other = made.training.tensors(), again.training.tensors()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], middle[name]) for name in one)


@pytest.mark.proof
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_compiled_blocks_learn_the_same_and_are_resumed_to_the_same_bits(
    family: str,
    trainers: SimpleNamespace,
    encoded: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is traced of the blocks, for two shapes of images, run without the C++ compiler, which takes minutes: a resume begins with another shape."""
    import torch
    from diffusers.models.modeling_utils import ModelMixin

    compiled = ModelMixin.compile_repeated_blocks
    monkeypatch.setattr(
        ModelMixin,
        "compile_repeated_blocks",
        lambda self, **more: compiled(self, backend="aot_eager", **more),
    )
    kind = (
        encode(
            family, encoded.manifest.parent, trainers, tmp_path, "--tag-orders", 3, "--keep-tags", 2
        )
        if family != encoded.family
        else encoded
    )
    options = Namespace(
        **{**vars(kind), **ALL, "keep_tags": 2, "compile": True, "checkpoint_activations": True}
    )
    made, plain = (
        Bench(trainers, options),
        Bench(trainers, Namespace(**{**vars(options), "compile": False})),
    )
    assert made.go(1, 3) == plain.go(1, 3)
    middle = {name: value.clone() for name, value in made.training.tensors().items()}
    losses = made.go(4, 6)
    torch._dynamo.reset()
    again = Bench(trainers, options)
    again.training.restore(middle)
    assert again.go(4, 6) == losses == plain.go(4, 6)
    one, other = made.training.tensors(), again.training.tensors()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.proof
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="not run: torch.compile wants a C++ compiler"
)
def test_blocks_made_by_the_compiler_learn_what_is_learned_without_and_are_resumed_to_the_same_bits(
    trainers: SimpleNamespace, encoded: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inductor, which makes C++ of them: sums are added up in another order, so losses differ in their last digits."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    options = Namespace(**{**vars(encoded), "compile": True, "checkpoint_activations": True})
    made, plain = (
        Bench(trainers, options),
        Bench(trainers, Namespace(**{**vars(options), "compile": False})),
    )
    assert made.go(1, 2) == pytest.approx(plain.go(1, 2), rel=1e-5)
    assert list((tmp_path / "made").rglob("*.cpp"))
    middle = {name: value.clone() for name, value in made.training.tensors().items()}
    losses = made.go(3, 4)
    assert losses == pytest.approx(plain.go(3, 4), rel=1e-4)
    again = Bench(trainers, options)
    again.training.restore(middle)
    assert again.go(3, 4) == losses


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "prodigy"])
def test_with_all_of_it_a_killed_training_ends_in_the_same_bits(
    optimizer: str, encoded: Namespace, tmp_path: Path
) -> None:
    """As programs, killed at step 9, resumed at 5, the same files at the end."""
    options = Namespace(
        **{
            **vars(encoded),
            "optimizer": optimizer,
            "warmup_steps": 4,
            "decay_steps": 12,
            "schedule": "linear",
            "learning_rate": 0.5,
        }
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    done = run(training(options, whole, max_steps=12))
    assert done.returncode == 0, done.stderr
    signal_at(
        "step 9/12", training(options, killed, max_steps=12), signal.SIGKILL, tmp_path / "gate"
    )
    done = run(
        training(options, killed, "--resume", killed / "checkpoints" / "step-000005", max_steps=12)
    )
    assert "resumed at step 5" in done.stdout, done.stderr
    for name in (
        "adapter.safetensors",
        "snapshots/step-000008.safetensors",
        "history.jsonl",
        "report.json",
        "checkpoints/step-000012/state.safetensors",
    ):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.proof
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_with_all_of_it_two_processes_learn_what_one_does(
    family: str, trainers: SimpleNamespace, encoded: Namespace, tmp_path: Path
) -> None:
    """The same images, captions, noise, masks and weights; sums of gradients differ in their last digits, those of a resume with two do not."""
    from safetensors.numpy import load_file

    kind = (
        encode(
            family, encoded.manifest.parent, trainers, tmp_path, "--tag-orders", 3, "--keep-tags", 2
        )
        if family != encoded.family
        else encoded
    )
    options = Namespace(**{**vars(kind), **ALL, "keep_tags": 2, "ema": 0.9})
    outs = {name: tmp_path / name for name in ("one", "two", "killed")}
    for out in outs.values():
        out.mkdir()
    for processes, name in ((1, "one"), (2, "two")):
        done = run(
            training(options, outs[name], max_steps=12, processes=processes),
            RECIPE_WORLD_SIZE=str(processes),
        )
        assert done.returncode == 0, done.stderr
    losses = {
        name: [
            json.loads(line)["loss"]
            for line in (outs[name] / "history.jsonl").read_text().splitlines()
        ]
        for name in ("one", "two")
    }
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    told = json.loads((outs["two"] / "report.json").read_text())
    assert told["eval_loss_after"] < 0.98 * told["eval_loss_before"]
    one, two = (load_file(outs[name] / "adapter.safetensors") for name in ("one", "two"))
    assert all(
        float(abs(one[name] - two[name]).max()) <= 1e-3 * float(abs(one[name]).max())
        for name in one
    )
    signal_at(
        "step 9/12",
        training(options, outs["killed"], max_steps=12, processes=2),
        signal.SIGKILL,
        tmp_path / "gate",
        RECIPE_WORLD_SIZE="2",
    )
    saved = outs["killed"] / "checkpoints" / "step-000005"
    done = run(
        training(options, outs["killed"], "--resume", saved, max_steps=12, processes=2),
        RECIPE_WORLD_SIZE="2",
    )
    assert "resumed at step 5" in done.stdout, done.stderr
    for name in (
        "adapter.safetensors",
        "history.jsonl",
        "checkpoints/step-000012/state.safetensors",
    ):
        assert (outs["killed"] / name).read_bytes() == (outs["two"] / name).read_bytes(), name
