"""The names of Hugging Face's trainers in the config of a job: which input each is, what has no counterpart, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from docs import platforms_page
from runner.language.recipe import Recipe
from runner.server.hugging_face import NAMES, NO_COUNTERPART, input_of, translate

RECIPES = {recipe.id.partition("@")[0]: recipe for recipe in platforms_page.recipes()}
SFT = RECIPES["sft"]


def test_the_training_recipes_of_the_library_are_looked_at() -> None:
    assert {"sft", "dpo", "ppo", "axolotl", "flux-lora", "ai-toolkit"} <= RECIPES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_an_input_of_a_recipe(name: str) -> None:
    taking = [recipe for recipe in RECIPES.values() if input_of(recipe, name)]
    assert taking, f"no recipe has {NAMES[name].input}"
    assert all(NAMES[name].input in recipe.inputs for recipe in taking)
    assert set(NAMES[name].not_in) <= RECIPES.keys()


def test_a_name_without_a_counterpart_is_an_input_of_no_recipe() -> None:
    known = {name for recipe in RECIPES.values() for name in recipe.inputs}
    assert not NO_COUNTERPART.keys() & (known | NAMES.keys())


@pytest.mark.parametrize(
    ("recipe", "config", "inputs"),
    [
        (SFT, {"num_train_epochs": 3, "learning_rate": 1e-4}, {"epochs": 3, "learning_rate": 1e-4}),
        (SFT, {"bf16": True, "optim": "adamw_torch"}, {"precision": "bf16", "optimizer": "adamw"}),
        (SFT, {"optim": "adafactor", "fp16": False}, {"optimizer": "adafactor"}),
        (SFT, {"report_to": ["wandb"], "lora_r": 8}, {"tracker": "wandb", "rank": 8}),
        (SFT, {"report_to": []}, {"tracker": "none"}),
        (SFT, {"load_in_4bit": True}, {"method": "qlora"}),
        (SFT, {"per_device_train_batch_size": 4}, {"micro_batch": 4, "global_batch": 8}),
        (
            SFT,
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            {"micro_batch": 4, "global_batch": 24},
        ),
        (SFT, {"gradient_accumulation_steps": 3}, {"global_batch": 6}),
        (SFT, {"max_steps": -1, "epochs": 2}, {"epochs": 2}),
        (SFT, {"max_stps": 5}, {"max_stps": 5}),
        (SFT, {"num_train_epochs": 3, "epochs": 3}, {"epochs": 3}),
        (RECIPES["ppo"], {"num_train_epochs": 3}, {}),
        (RECIPES["ppo"], {"num_ppo_epochs": 2}, {"epochs": 2}),
        (RECIPES["flux-lora"], {"max_train_steps": 9}, {"max_steps": 9}),
    ],
)
def test_a_config_is_read_as_inputs(
    recipe: Recipe, config: dict[str, Any], inputs: dict[str, Any]
) -> None:
    found = translate(recipe, config, gpus=2)
    assert (found.inputs, found.problems) == (inputs, ())


def test_what_a_preset_sets_is_the_batch_of_a_device() -> None:
    found = translate(SFT, {"gradient_accumulation_steps": 4}, 1, {"micro_batch": 2})
    assert found.inputs == {"global_batch": 8}


def test_a_name_without_a_counterpart_is_said_with_what_says_it_here() -> None:
    found = translate(SFT, {"warmup_ratio": 0.1, "guidance_scale": 3.5, "bf16": False}, 1)
    assert found.inputs == {}
    assert found.ignored == {
        "warmup_ratio": "use `warmup_steps`, a number of steps",
        "guidance_scale": "sft@1 has no such input",
        "bf16": "false leaves the precision to the recipe",
    }


def test_every_so_many_steps_are_told() -> None:
    assert translate(SFT, {"logging_steps": 10}, 1).every == 10
    (problem,) = translate(SFT, {"logging_steps": 0.1}, 1).problems
    assert problem.message == '"logging_steps" must be a whole number above 0'


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"num_train_epochs": 3, "epochs": 2},
            '"num_train_epochs" and "epochs" set different values for epochs',
        ),
        ({"bf16": True, "fp16": True}, '"bf16" and "fp16" set different values for precision'),
        (
            {"per_device_train_batch_size": 4, "global_batch": 16},
            '"global_batch" and "per_device_train_batch_size × 1 GPUs" set different values for global_batch',
        ),
        (
            {"per_device_train_batch_size": "4"},
            "per_device_train_batch_size: whole numbers are required",
        ),
    ],
)
def test_two_names_that_disagree_are_refused(config: dict[str, Any], words: str) -> None:
    found = translate(SFT, config, 1)
    assert [problem.message for problem in found.problems] == [words]
