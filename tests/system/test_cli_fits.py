"""`plan` says what a training takes of its GPU, `new --from … --gpu` finds what fits, and both learn from what runs measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.advice import estimates
from runner.language import library, parse
from runner.storage.workspace import Workspace
from tests.support import Space
from tests.system.test_cli_why import Recipe, recipe

__all__ = ["recipe"]

QWEN = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip

TRAIN = """
inputs:
  base: {type: model, default: ./qwen}
  max_length: {type: integer, default: 1024}
  micro_batch: {type: integer, default: 1}
  global_batch: {type: integer, default: 16}
  max_steps: {type: integer, default: 100}
  rank: {type: integer, default: 16}
  told: {type: string, default: "", key: false}
resources: {gpus: 1, gpu: RTX 4090, gpu_memory: 24GB}
presets: {measured: {resources: {gpus: 0}}}
steps:
  train:
    run: |
      printf '%s\\n' "{{ inputs.told }}" >> "$RECIPE_METRICS"
      echo {{ inputs.rank }} > {{ outputs.o }}
      : {{ inputs.base }} {{ state.s }} {{ inputs.max_length }} {{ inputs.max_steps }}
    state: {s: {}}
    outputs: {o: model.txt}
    metrics: true
"""


@pytest.fixture
def trains(space: Space) -> Space:
    """A recipe that trains on a GPU, and a model's config beside it."""
    space.recipe(TRAIN)
    space.write("qwen/config.json", json.dumps(QWEN))
    return space


def memory(recipe: Recipe, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(recipe("plan", *words, "--json").out)["steps"][0]["memory"]
    return found


def test_a_plan_says_what_a_training_takes_and_whether_it_fits(
    trains: Space, recipe: Recipe
) -> None:
    lines = [line.strip() for line in recipe("plan").out.splitlines()]
    assert any(
        line.startswith(
            "memory: about 17-23 GB, FITS on rtx4090 (24 GB) (frozen weights of linear layers 13.1"
        )
        for line in lines
    )
    assert any(
        line.startswith("time: 11 min to ") and line.endswith("(a guess from its arithmetic)")
        for line in lines
    )
    assert memory(recipe, "max_length=8192")["verdict"] == "NO"
    told = memory(recipe)
    assert (
        told["low"] < told["bytes"] < told["high"]
        and sum(told["terms"].values()) == told["bytes"]
        and told["usable"] > 24e9
    )


def test_without_the_models_config_it_is_not_known(
    trains: Space, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "memory: not known (the config.json of hf://org/name is not in the local cache yet)"
        in recipe("plan", "base=org/name").out
    )
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN))
    assert memory(recipe, "base=org/name")["verdict"] == "FITS"
    (trains.root / "qwen" / "config.json").write_text("{torn")
    assert "not in the local cache yet" in recipe("plan").out
    (trains.root / "qwen" / "config.json").write_text('{"model_type": "t5"}')
    assert '(cannot count the weights of the model family "t5"' in recipe("plan").out


def test_what_needs_no_gpu_has_no_estimate(trains: Space, recipe: Recipe) -> None:
    assert "memory:" not in recipe("plan", "--preset", "measured").out
    trains.recipe(TRAIN.replace("    state: {s: {}}\n", "").replace(" {{ state.s }}", ""))
    assert "memory:" not in recipe("plan").out  # it may convert or evaluate: nobody can tell


def test_what_runs_measured_corrects_the_estimate(trains: Space, recipe: Recipe) -> None:
    before = memory(recipe)
    told = {"step": 1, "memory_gb": 30.0}
    trains.run({"told": json.dumps(told), "rank": 8}, preset="measured")
    assert memory(recipe) == before  # main memory, for there was no GPU
    trains.run(
        {"told": json.dumps(told | {"gpu": "NVIDIA H100 80GB HBM3"}), "rank": 9}, preset="measured"
    )
    assert memory(recipe) == before  # another kind of GPU
    held = round(before["bytes"] / 1e9, 1)
    trains.run(
        {
            "told": json.dumps(told | {"gpu": "NVIDIA GeForce RTX 4090", "memory_gb": held}),
            "rank": 16,
        },
        preset="measured",
    )
    trains.run(
        {
            "told": json.dumps(told | {"gpu": "NVIDIA GeForce RTX 4090", "memory_gb": held}),
            "rank": 17,
            "max_length": 1000,
        },
        preset="measured",
    )
    after = memory(recipe, "rank=18")
    assert (
        after["bytes"] > before["bytes"]
        and after["high"] - after["low"] < before["high"] - before["low"]
    )
    assert after["measured"] == f"measured {held} GB on NVIDIA GeForce RTX 4090 in 2 runs"
    assert f"({after['measured']})" in recipe("plan", "rank=18").out


def test_cost_is_reported_where_a_price_is_known(trains: Space, recipe: Recipe) -> None:
    assert "cost:" not in recipe("plan").out
    trains.write("recipe.toml", '[prices]\nrtx4090 = "0.50 USD"\nh100-80gb = "3 USD"\n')
    told = memory(recipe)
    least, most = told["seconds"]
    assert told["usd_an_hour"] == 0.5 and told["usd"] == pytest.approx([least / 7200, most / 7200])
    assert (
        f"cost: about {least / 7200:.2f} to {most / 7200:.2f} USD, at 0.5 USD an hour"
        in recipe("plan").out
    )
    assert "prices.rtx4090" in recipe("config").out
    trains.write("recipe.toml", '[prices]\nrtx409 = "0.50 USD"\n')
    assert 'did you mean "rtx4090"?' in recipe("plan", "rank=4").err
    trains.write("recipe.toml", '[prices]\nrtx4090 = "half a dollar"\n')
    said = recipe("plan")
    assert said.code == 3 and 'prices.rtx4090 has an invalid value "half a dollar"' in said.err


def test_a_diffusion_training_that_was_measured_here_is_known_from_that(
    space: Space, recipe: Recipe
) -> None:
    space.write("flux/config.json", "{}")
    drawn = TRAIN.replace("default: ./qwen", "default: ./flux").replace(
        "max_length: {type: integer, default: 1024}", "resolution: {type: integer, default: 1024}"
    )
    space.recipe(drawn.replace("inputs.max_length", "inputs.resolution"))
    assert memory(recipe)["source"].startswith("https://") and memory(recipe)["verdict"] == "NO"
    told = {
        "step": 1,
        "gpu": "NVIDIA GeForce RTX 4090",
        "memory_gb": 19.0,
        "samples_per_second": 0.5,
    }
    space.run({"told": json.dumps(told), "max_steps": 3, "rank": 17}, preset="measured")
    assert memory(recipe)["verdict"] == "NO"  # another rank is another case
    space.run({"told": json.dumps(told), "max_steps": 4}, preset="measured")
    space.write("flux/other.json", "{}")  # something to do again
    found = memory(recipe)
    assert (
        found["measured"] == "measured 19.0 GB on NVIDIA GeForce RTX 4090 in 1 run"
        and found["verdict"] == "FITS"
        and not found["source"]
    )
    assert (
        found["seconds"][0] < 3200 < found["seconds"][1]
        and found["seconds_from"] == "by 2 runs on NVIDIA GeForce RTX 4090"
    )
    assert "there is no published measurement of" in memory(recipe, "resolution=2048")["unknown"]


def test_where_only_a_size_is_asked_for_each_gpu_that_has_a_price_and_is_large_enough_is_reported(
    trains: Space, recipe: Recipe
) -> None:
    trains.recipe(TRAIN.replace("gpu: RTX 4090, ", ""))
    assert "of training" not in recipe("plan").out
    trains.write(
        "recipe.toml", '[prices]\nrtx4090 = "0.50 USD"\nh100-80gb = "3 USD"\nt4 = "0.10 USD"\n'
    )
    lines = [line.strip() for line in recipe("plan").out.splitlines()]
    assert [line.split(" (")[0] for line in lines if line.startswith("on ")] == [
        "on h100-80gb",
        "on rtx4090",
    ]
    slow, fast = (
        next(each for each in memory(recipe)["choices"] if each["gpu"].startswith(name))
        for name in ("rtx4090", "h100")
    )
    assert (
        slow["seconds"][0] > fast["seconds"][1] / 3 and slow["verdict"] == fast["verdict"] == "FITS"
    )
    assert (
        f"{slow['usd'][0]:.2f} to {slow['usd'][1]:.2f} USD (a guess from its arithmetic)"
        in recipe("plan").out
    )


def test_time_and_cost_are_by_earlier_trainings_on_such_a_gpu_and_by_what_is_to_be_computed(
    trains: Space, recipe: Recipe
) -> None:
    trains.write("recipe.toml", '[prices]\nrtx4090 = "0.50 USD"\n')
    guess = memory(recipe)
    told = {"step": 1, "samples_per_second": 2.0}
    trains.run({"told": json.dumps(told), "rank": 8, "max_steps": 1}, preset="measured")
    assert memory(recipe)["seconds"] == guess["seconds"]  # a smoke without a GPU
    assert "~" not in recipe("plan").out
    trains.run(
        {"told": json.dumps(told | {"gpu": "NVIDIA H100 80GB HBM3"}), "rank": 9}, preset="measured"
    )
    assert memory(recipe)["seconds"] == guess["seconds"]  # another kind
    trains.run(
        {"told": json.dumps(told | {"gpu": "NVIDIA GeForce RTX 4090"}), "rank": 4, "max_steps": 3},
        preset="measured",
    )
    after = memory(recipe)
    least, most = after["seconds"]
    assert least < 1600 / 2 < most and most < 1.4 * least  # 100 steps of 16 samples
    assert after["seconds_from"] == "by 1 run on NVIDIA GeForce RTX 4090" and after[
        "usd"
    ] == pytest.approx([least / 7200, most / 7200])
    assert (
        "time: 11 min to 15 min of training on rtx4090 (24 GB) (by 1 run on NVIDIA GeForce RTX 4090)"
        in recipe("plan").out
    )
    assert memory(recipe, "max_steps=200")["seconds"] == pytest.approx([2 * least, 2 * most])
    assert memory(recipe, "max_length=512")["seconds"] == pytest.approx(
        [least / 2, most / 2], rel=0.02
    )  # attention is less than half
    trains.run(
        {"told": json.dumps(told | {"gpu": "NVIDIA GeForce RTX 4090", "gpus": 2}), "rank": 5},
        preset="measured",
    )
    assert memory(recipe)["seconds"][1] > 1.5 * most  # two of them were as fast as one


def test_new_for_a_gpu_writes_a_recipe_that_is_valid_and_fits(space: Space, recipe: Recipe) -> None:
    space.write("qwen/config.json", json.dumps(QWEN))
    space.write("d.jsonl", '{"text": "a"}\n')
    said = recipe("new", "mine", "--from", "sft@1", "--gpu", "rtx4090", "base=./qwen")
    assert said.code == 0 and said.out == "./mine.yaml\n"
    assert (
        "memory: about 17-23 GB, FITS on rtx4090 (24 GB)" in said.err
        and "next: recipe plan ./mine.yaml dataset=…" in said.err
    )
    assert "of training on rtx4090 (24 GB) (a guess from its arithmetic)" in said.err
    assert recipe("validate", "mine.yaml").code == 0
    plan = json.loads(
        recipe("plan", "./mine.yaml", "dataset=./d.jsonl", "--python", "current", "--json").out
    )
    train = next(step for step in plan["steps"] if step["id"] == "sft/train")
    assert train["memory"]["verdict"] == "FITS" and train["memory"]["gpu"] == "rtx4090 (24 GB)"
    assert (
        recipe("new", "mine", "--from", "sft@1", "--gpu", "t4", "base=./qwen").code == 3
    )  # never replaced


def test_the_smoke_of_such_a_recipe_is_that_of_the_library(space: Space, recipe: Recipe) -> None:
    space.write("qwen/config.json", json.dumps(QWEN))
    recipe("new", "mine", "--from", "sft@1", "--gpu", "h100-80gb", "base=./qwen")
    with Workspace.open(space.root):
        theirs, mine = (
            [
                json.loads(
                    recipe("plan", word, "--preset", "smoke", "--python", "current", "--json").out
                )["steps"]
            ]
            for word in ("sft@1", "./mine.yaml")
        )
    assert [step["key"] for step in theirs[0]] == [step["key"] for step in mine[0]]


def test_where_there_is_room_the_micro_batch_grows_and_where_there_is_none_the_mildest_goes(
    space: Space, recipe: Recipe
) -> None:
    space.write("qwen/config.json", json.dumps(QWEN))
    said = recipe("new", "big", "--from", "sft@1", "--gpu", "h100-80gb", "base=./qwen")
    assert "chosen: micro_batch=" in said.err and "same result, faster" in said.err
    assert parse.load(space.root / "big.yaml").inputs["micro_batch"].default in (8, 16)
    said = recipe(
        "new",
        "small",
        "--from",
        "sft@1",
        "--gpu",
        "rtx4090",
        "base=./qwen",
        "max_length=32768",
        "micro_batch=2",
    )
    assert (
        said.code == 2
        and "does not fit rtx4090, even with all options that save memory" in said.err
        and "choose a GPU that fits: h100-80gb" in said.err
    )
    said = recipe(
        "new", "small", "--from", "sft@1", "--gpu", "rtx4090", "base=./qwen", "method=full"
    )
    assert said.code == 2 and not (space.root / "small.yaml").exists()  # what was given stays
    said = recipe("new", "small", "--from", "axolotl@1", "--gpu", "t4", "base=./qwen")
    assert (
        "precision=fp16: t4 has no bf16" in said.err
        and "max_length=512: longer texts are truncated" in said.err
    )


def test_a_diffusion_recipe_is_put_where_others_have_seen_it_fit(
    space: Space, recipe: Recipe
) -> None:
    said = recipe("new", "mine", "--from", "flux-lora@1", "--gpu", "a100-40gb")
    assert (
        said.code == 0
        and "FITS on a100-40gb (40 GB) (as published: https://github.com/bghira/SimpleTuner"
        in said.err
    )
    assert recipe("validate", "mine.yaml").code == 0


def test_flux_is_put_on_a_card_of_16_gb_with_its_base_in_4_bits(recipe: Recipe) -> None:
    said = recipe("new", "mine", "--from", "flux-lora@1", "--gpu", "t4")
    assert (
        said.code == 0
        and 'chosen: base_storage="nf4": a 4-bit base model' in said.err
        and "FITS on t4 (16 GB)" in said.err
    )


def test_flux_is_put_on_a_card_of_24_gb_with_its_base_in_8_bits(
    space: Space, recipe: Recipe
) -> None:
    said = recipe("new", "mine", "--from", "flux-lora@1", "--gpu", "rtx4090")
    assert said.code == 0 and 'chosen: base_storage="fp8": an 8-bit base model' in said.err
    assert "FITS on rtx4090 (24 GB) (counted, not measured: docs/memory.md)" in said.err
    assert recipe("validate", "mine.yaml").code == 0
    space.write("images/one.txt", "a thing")
    checked = recipe("check", "mine.yaml", "dataset=./images")
    assert (
        checked.code == 0 and "no problems found, " in checked.out and " not checked" in checked.out
    )
    told = recipe("check", "mine.yaml", "dataset=./images", "base_storage=same")
    assert (
        told.code == 3
        and "needs about 29.4 to 33.0 GB" in told.out
        and "base_storage=nf4, lower the resolution" in told.out
    )
    # What is given stays, and a card that is too small for all is refused with those that are not.
    said = recipe(
        "new",
        "other",
        "--from",
        "flux-lora@1",
        "--gpu",
        "rtx4090",
        "base_storage=same",
        "resolution=1024",
    )
    assert (
        said.code == 2
        and "does not fit rtx4090, even with all options that save memory" in said.err
        and "choose a GPU that fits" in said.err
    )
    said = recipe(
        "new",
        "other",
        "--from",
        "flux-lora@1",
        "--gpu",
        "t4",
        "base_storage=fp8",
        "resolution=1024",
    )
    assert (
        said.code == 2
        and "does not fit t4" in said.err
        and "rtx4090" not in said.err.partition("fix: choose")[0]
    )


@pytest.mark.parametrize(
    ("words", "heard"),
    [
        (("--from", "sft@1"), "--from requires --gpu"),
        (("--gpu", "t4"), "--from requires --gpu"),
        (("--from", "sft@1", "--gpu", "rtx409", "base=./qwen"), 'did you mean "rtx4090"?'),
        (
            ("--from", "sft@1", "--gpu", "t4", "base=./qwen", "max_lenght=8"),
            'did you mean "max_length"?',
        ),
        (("--from", "sft@1", "--gpu", "t4", "base=./qwen", "--preset", "nope"), "nope"),
        (("--from", "sft@1", "--gpu", "t4", "base"), '"base" is not INPUT=VALUE'),
        (
            ("--from", "sft@1", "--gpu", "t4", "base=./nowhere"),
            "cannot choose settings: the config.json of ./nowhere is not in the local cache yet",
        ),
        (("--from", "./mine.yaml", "--gpu", "t4"), "./mine.yaml"),
        (("max_length=8",), "inputs and --preset require --from"),
    ],
)
def test_what_cannot_be_is_reported(
    space: Space, recipe: Recipe, words: tuple[str, ...], heard: str
) -> None:
    space.write("qwen/config.json", json.dumps(QWEN))
    said = recipe("new", "x", *words)
    assert said.code in (2, 3) and heard in said.err
    assert not (space.root / "x.yaml").exists()


def test_every_library_recipe_with_a_gpu_preset_has_an_estimate_or_says_why_not(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        estimates, "read_model_config", lambda ws, kind, address: QWEN if address else None
    )
    with Workspace.open(space.root) as ws:
        for entry in library.entries():
            found = parse.load(entry.path)
            if found.name in ("sft", "dpo", "orpo", "reward", "cpt", "rlhf"):
                values = {name: spec.default for name, spec in found.inputs.items()} | {
                    "base": "hf://Qwen/Qwen2.5-7B",
                    "method": "lora",
                }
                told = estimates.estimate_values(
                    ws, found.id, values, estimates.load_hardware().find("h200"), 1
                )
                assert told.found is not None and told.found.bytes > 15e9, (found.id, told.unknown)


def test_what_vllm_takes_first_is_not_there_for_the_training(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "read_model_config", lambda ws, kind, address: QWEN)
    inputs = parse.load(library.find("rlhf@1", space.root)).inputs
    values = {name: spec.default for name, spec in inputs.items()} | {
        "base": "hf://Qwen/Qwen2.5-7B",
        "method": "lora",
    }
    with Workspace.open(space.root) as ws:
        h100 = estimates.load_hardware().find("h100-80gb")
        alone, beside = (
            estimates.estimate_values(
                ws, "rlhf@1", values | {"use_vllm": used, "vllm_memory": 0.4}, h100, 1
            )
            for used in (False, True)
        )
    assert alone.usable == h100.usable and beside.usable == pytest.approx(0.6 * h100.usable)
