"""recipes/hardware.yaml is what its schema says; a GPU is found by what people, drivers and resources call it; guesses of time are in order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.advice import estimates
from runner.advice.estimates import load_hardware
from runner.advice.hardware import (
    count_extra_adapter_bytes,
    count_offloaded_bytes,
    count_operations,
    estimate_image_seconds,
    estimate_seconds,
    find_row,
)
from runner.advice.memory import TrainingSetup, read
from runner.advice.training_from_inputs import (
    count_samples,
    count_tokens,
    list_larger_batches,
    list_memory_savings,
    read_diffusion_training,
    read_text_training,
)
from runner.errors import Invalid, NotFound
from runner.language import document
from runner.paths import shipped

HOME = shipped()
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
SFT: dict[str, Any] = {
    "max_length": 1024,
    "micro_batch": 2,
    "global_batch": 16,
    "rank": 16,
    "max_steps": 100,
}


def test_the_file_is_what_its_schema_says() -> None:
    schema = json.loads((HOME / "schemas" / "hardware.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    tree = document.read(HOME / "recipes" / "hardware.yaml").value
    assert [error.message for error in Draft202012Validator(schema).iter_errors(tree)] == []


def test_each_gpu_is_found_by_each_of_its_names_and_no_name_means_two() -> None:
    seen: dict[str, str] = {}
    for gpu in load_hardware().gpus:
        for name in (gpu.name, *gpu.names, *(f"NVIDIA {name}" for name in gpu.names)):
            assert load_hardware().find(name) == gpu
            assert seen.setdefault(name.lower(), gpu.name) == gpu.name
        assert load_hardware().find_requested(gpu.asked, round(gpu.memory * 1e9)) == gpu
        # The driver finds it by that word in the name that nvidia-smi shows.
        assert any(gpu.asked.lower() in name.lower() for name in gpu.names)
        assert 0.9 < gpu.usable / (gpu.memory * 1e9) < 1.1


def test_without_a_name_and_a_size_no_gpu_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "load_hardware", lambda: pytest.fail("hardware.yaml was read"))
    assert estimates.find_gpus(None, None) == []


def test_a_gpu_without_figures_is_reported_with_those_near() -> None:
    with pytest.raises(NotFound) as caught:
        load_hardware().find("rtx409")
    assert "rtx4090" in caught.value.fix
    assert load_hardware().find_requested("A100", None) is None  # there are two
    assert load_hardware().find_requested("RTX 4090", 80 * 10**9) is None


def own_cards(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "hardware.yaml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))


def test_a_users_cards_join_those_that_are_known_and_change_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_hardware()
    own_cards(
        tmp_path,
        "gpus:\n  acme: {memory: 36, capability: 9.0, tflops: 200, names: [ACME Trainer]}\n  rtx4090: {memory: 48, reports: 49140}\n",
        monkeypatch,
    )
    theirs = load_hardware()
    acme = theirs.find("NVIDIA ACME Trainer")
    assert (
        acme == theirs.find("acme") == theirs.find_requested("ACME Trainer", 36 * 10**9)
        and acme.bf16
        and acme.asked == "ACME Trainer"
    )
    assert 0.95 < acme.usable / 36e9 < 0.97
    assert (
        theirs.find("GeForce RTX 4090").memory == 48
        and theirs.find("rtx4090").tflops == ours.find("rtx4090").tflops
    )
    assert len(theirs.gpus) == len(ours.gpus) + 1
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert load_hardware() == ours


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        (
            "gpus:\n  acme: {memory: 36, capability: 9.0}\n",
            "unknown GPU acme: add its tflops",
            2,
        ),
        ("gpus:\n  rtx4090: {memory: much}\n", "gpus.rtx4090.memory must be a number", 2),
        ("gpus:\n  rtx4090:\n    memmory: 24\n", 'gpus.rtx4090 has no key "memmory"', 3),
        ("cards: {}\n", 'the file has no key "cards"', 1),
        ("gpus: [\n", "is never closed", 1),
    ],
)
def test_a_file_of_cards_that_is_wrong_is_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str, line: int
) -> None:
    own_cards(tmp_path, text, monkeypatch)
    with pytest.raises(Invalid) as caught:
        load_hardware()
    problem = next(each for each in caught.value.problems if words in each.message)
    assert problem.where is not None and problem.where.path.endswith("recipe/hardware.yaml")
    assert problem.where.line == line


def test_what_can_be_done_follows_from_the_capability() -> None:
    assert not load_hardware().find("t4").bf16 and load_hardware().find("a100-40gb").bf16


def test_of_a_size_on_the_box_the_least_usable_of_its_kind_counts() -> None:
    assert load_hardware().estimate_usable(24 * 10**9) == load_hardware().find("l4").usable
    assert load_hardware().estimate_usable(7 * 10**9) == round(0.97 * 7e9)


def test_operations_are_six_for_each_weight_and_token() -> None:
    model = read(LLAMA)
    full = count_operations(model, TrainingSetup(method="full", checkpointing=False), 1000)
    assert full == pytest.approx(
        6 * 1000 * model.parameters, rel=0.08
    )  # embeddings are looked up, not multiplied
    lora = count_operations(model, TrainingSetup(method="lora", checkpointing=False), 1000)
    assert lora == pytest.approx(full * 4 / 6, rel=0.02)
    assert count_operations(model, TrainingSetup(method="lora"), 1000) == pytest.approx(
        full, rel=0.02
    )
    long = count_operations(
        model, TrainingSetup(method="full", checkpointing=False, length=64 * 1024), 1000
    )
    assert long - full == pytest.approx(
        3 * 2 * 32 * 4096 * 63 * 1024 * 1000
    )  # attention goes by the length


def test_a_measured_speed_is_within_the_guess() -> None:
    # Mistral-7B, LoRA, 4096 tokens, A100: 3,597 tokens a second (fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv).
    work = count_operations(
        read({**LLAMA, "vocab_size": 32000}),
        TrainingSetup(targets="attention", length=4096, batch=4),
        3597,
    )
    least, most = estimate_seconds(load_hardware(), load_hardware().find("a100-80gb"), work)
    assert least < 1 < most


def test_the_inputs_of_a_recipe_say_what_is_trained() -> None:
    model = read(LLAMA)
    made = read_text_training("sft@1", SFT, model)
    assert made == TrainingSetup(method="lora", length=1024, batch=2, rank=16, logits="fused")
    shared = read_text_training(
        "sft@1",
        {
            **SFT,
            "method": "qlora",
            "optimizer": "paged_adamw_8bit",
            "sharding": "fsdp",
            "attention": "eager",
        },
        model,
        devices=2,
    )
    assert shared is not None and (
        shared.method,
        shared.optimizer,
        shared.stage,
        shared.attention,
    ) == ("qlora", "paged_adamw_8bit", 3, "eager")
    assert count_tokens({**SFT, "epochs": 3}, made) is None
    assert made is not None and count_tokens(SFT, made) == 100 * 16 * 1024
    pairs = read_text_training("dpo@1", SFT, model)
    assert (
        pairs is not None
        and pairs.pairs
        and pairs.logits == "fused"
        and pairs.others == 0
        and count_tokens(SFT, pairs) == 2 * 100 * 16 * 1024
    )
    full = read_text_training("dpo@1", {**SFT, "method": "full"}, model)
    assert full is not None and full.others == model.parameters and full.master
    written = read_text_training(
        "rlhf@1",
        {"max_prompt_length": 100, "max_completion_length": 400, "rank": 8, "global_batch": 64},
        model,
        devices=2,
        reward=model,
    )
    assert (
        written is not None
        and written.length == 500
        and written.generating == 32
        and written.others == model.parameters
    )
    assert written.logits == "fused"
    rewards = read_text_training("reward@1", SFT, model)
    assert rewards is not None and rewards.pairs and rewards.logits == "none"
    assert read_text_training("sft@1", {"rank": 16}, model) is None
    assert read_text_training("sft@1", {**SFT, "method": "dora"}, model) is None


def test_what_is_given_up_begins_with_what_costs_only_time() -> None:
    steps = [
        name
        for more, _ in list_memory_savings(
            "sft@1", {**SFT, "checkpoint_activations": False, "method": "full"}
        )
        for name in more
    ]
    assert steps[:2] == ["micro_batch", "checkpoint_activations"] and steps[-1] == "method"
    given = [
        more
        for more, _ in list_memory_savings(
            "sft@1",
            {
                **SFT,
                "micro_batch": 1,
                "method": "lora",
                "optimizer": "adamw",
                "max_length": 512,
                "rank": 8,
            },
        )
    ]
    assert given == [{"optimizer": "adamw_8bit"}, {"method": "qlora"}]
    ranks = [more["rank"] for more, _ in list_memory_savings("sft@1", {"rank": 32})]
    assert ranks == [16, 8]


def test_a_base_is_in_fewer_bits_before_it_leaves_the_gpu() -> None:
    inputs = {"base_storage": "same", "offload_blocks": 0}
    flux, sdxl = (
        [more for more, _ in list_memory_savings(recipe, inputs)]
        for recipe in ("flux-lora@1", "sdxl-lora@1")
    )
    assert flux == [
        {"base_storage": "fp8"},
        {"base_storage": "nf4"},
        {"base_storage": "same", "offload_blocks": 57},
    ]
    assert sdxl == [{"base_storage": "nf4"}, {"base_storage": "same", "offload_blocks": 70}]


def test_what_grows_shares_the_global_batch_evenly() -> None:
    assert [
        more["micro_batch"] for more in list_larger_batches({"micro_batch": 2, "global_batch": 12})
    ] == [
        12,
        6,
        4,
        3,
    ]
    assert list_larger_batches({"micro_batch": 2}) == []


def test_a_diffusion_training_takes_the_row_that_asks_for_no_less() -> None:
    inputs = {"resolution": 512, "rank": 16, "micro_batch": 1}
    seen = read_diffusion_training("flux-lora@1", inputs, "hf://black-forest-labs/FLUX.1-dev")
    assert seen is not None and (seen.family, seen.method) == ("flux", "lora")
    rows = load_hardware().diffusion

    def gb(**more: Any) -> float | None:
        row = find_row(rows, replace(seen, **more))
        return row.gb if row is not None else None

    assert gb() == 26 and gb(resolution=768) == 30 and gb(rank=64) == 30
    assert (
        gb(batch=5) is None
        and gb(resolution=2048) is None
        and gb(checkpointing=False) is None
        and gb(rank=65) is None
    )
    assert gb(family="sdxl", resolution=1024, batch=4) == gb(family="sdxl") == 9.9
    stored = read_diffusion_training("flux-lora@1", {**inputs, "base_storage": "fp8"}, "")
    assert (
        stored == replace(seen, stored="fp8")
        and str(stored) == "flux lora at 512 pixels, batch 1, rank 16, base in fp8"
    )
    # Eight bits multiplied with are not eight bits stored, and what is counted is taken where nobody published.
    row = find_row(rows, stored)
    assert row is not None and row.precision == "fp8" and not row.source and row.gb < 22
    assert find_row(rows, replace(stored, checkpointing=False)) is None
    assert (
        count_extra_adapter_bytes(row, replace(stored, rank=32)) == 16 * 4085760 * 16
        and count_extra_adapter_bytes(row, replace(stored, rank=8)) == 0
    )
    # What the optimizer and an average keep of the adapter counts; of several resolutions the largest does.
    kept = {
        name: read_diffusion_training("flux-lora@1", {**inputs, "optimizer": name}, "")
        for name in ("adamw_8bit", "prodigy")
    }
    assert (
        kept["prodigy"] == replace(seen, adapter=24)
        and count_extra_adapter_bytes(row, kept["prodigy"]) == 16 * 4085760 * 8
    )
    assert (
        kept["adamw_8bit"] == replace(seen, adapter=10)
        and count_extra_adapter_bytes(row, kept["adamw_8bit"]) == 0
    )
    assert read_diffusion_training(
        "flux-lora@1", {**inputs, "ema": 0.99, "more_resolutions": [768]}, ""
    ) == replace(seen, adapter=20, resolution=768)
    assert [
        more
        for more, _ in list_memory_savings(
            "mine@1", {"resolution": 768, "more_resolutions": [1024]}
        )
    ] == [{"resolution": 512, "more_resolutions": []}]
    # What stays in main memory is no more here, but for one block of it at a time.
    away = read_diffusion_training("flux-lora@1", {**inputs, "offload_blocks": 20}, "")
    assert away == replace(seen, away=20) and str(away).endswith(
        "rank 16, 20 blocks offloaded to CPU memory"
    )
    assert (
        count_offloaded_bytes(away) == pytest.approx((18 * 339830784 + 141591552) * 2.06)
        and count_offloaded_bytes(seen) == 0
    )
    assert read_diffusion_training("sdxl-lora@1", inputs, "") is not None
    assert read_diffusion_training("sft@1", inputs, "meta-llama/Llama-3.1-8B") is None
    assert (
        read_diffusion_training(
            "image-lora@1", inputs, "hf://black-forest-labs/FLUX.2-klein-base-4B"
        )
        is None
    )


def test_a_published_speed_is_carried_over_by_the_gpu_and_by_pixels() -> None:
    hardware = load_hardware()
    case: dict[str, Any] = {"family": "flux", "method": "lora"}

    def each(gpu: str, pixels: int = 512 * 768, devices: int = 1) -> tuple[float, float]:
        found = estimate_image_seconds(
            hardware, hardware.find(gpu), pixels=pixels, devices=devices, **case
        )
        assert found is not None
        return found

    assert each("rtx4090")[0] == pytest.approx(41 * 60 / 700 / 4, rel=0.01) and each("t4")[
        1
    ] == pytest.approx(4 * 3600 / 700 / 4, rel=0.02)
    assert each("rtx4090", 2 * 512 * 768) == pytest.approx([2 * value for value in each("rtx4090")])
    assert each("h100-80gb")[1] < each("rtx4090")[1] and each("t4", devices=2)[1] < each("t4")[1]
    assert (
        estimate_image_seconds(
            hardware, hardware.find("t4"), family="sdxl", method="lora", pixels=1024**2
        )
        is None
    )
    assert (
        count_samples({"max_steps": 100, "global_batch": 4}) == 400
        and count_samples({"max_steps": 100}) is None
    )


def test_each_figure_has_been_read_again_or_says_that_it_has_not() -> None:
    gpus = document.read(HOME / "recipes" / "hardware.yaml").value["gpus"]  # type: ignore[index, call-overload]
    assert [
        name for name, each in gpus.items() if not each.get("seen") and not each.get("unchecked")
    ] == []
    assert {row.gpu for row in load_hardware().speed} <= set(gpus)
