"""Promise: what a step tells its program is found under one name, whatever the way it is told and whatever the tool calls it."""

from __future__ import annotations

from typing import Any

import pytest

from runner.advice.tool_settings import (
    Origin,
    ToolSettings,
    UnknownSetting,
    of_inputs,
    of_tree,
    of_words,
    scalar,
    words,
)
from runner.language.template import StatePath
from runner.planning.step import StepSpec

NAMES = {
    "save_every": ["save_steps", "checkpointing_steps", "save.save_every"],
    "max_steps": ["max_train_steps"],
}


def step(run: Any = None, accelerate: Any = None) -> StepSpec:
    return StepSpec("r@1", "s", {}, run=run, accelerate=accelerate)


def scope(**inputs: Any) -> dict[str, Any]:
    return {
        "inputs": inputs,
        "outputs": {"o": "out"},
        "steps": {},
        "state": {"c": StatePath("state/c", {"latest": None})},
    }


def told(spec: StepSpec, **inputs: Any) -> ToolSettings:
    return ToolSettings(of_words(words(spec, scope(**inputs))), NAMES)


@pytest.mark.parametrize(
    "run",
    [
        ["trl", "sft", "--save-steps", "100"],
        ["trl", "sft", "--save_steps=100", "--packing"],
        ["trl", "sft", ["--checkpointing_steps", "{{ inputs.often }}"]],
        "trl sft \\\n  --save_steps 100 # --save_steps 5\n",
        'python -m x --save_steps "{{ inputs.often }}"',
        "python -m x --save_steps={{ inputs.often }} 'quoted words'",
        ["tool", "save_steps=100"],
        ["accelerate", "launch", "--save_steps", "100", "train.py", "positional"],
        ["tool", "--set", '{"save": {"save_every": 100}}'],
    ],
)
def test_an_option_is_found_however_it_is_written(run: Any) -> None:
    assert told(step(run), often=100)["save_every"] == 100


def test_an_accelerate_block_is_read_as_it_is_started() -> None:
    args = {
        "save-steps": "{{ inputs.often }}",
        "resume": "{{ state.c.latest }}",
        "use-ema": True,
        "quiet": False,
    }
    found = told(step(accelerate={"script": "train.py", "args": args}), often=7)
    assert (found["save_every"], found["resume"], found["use_ema"], found["quiet"]) == (
        7,
        None,
        True,
        None,
    )
    assert found.setting("save_every").origin == Origin("input", "often")  # type: ignore[union-attr]


def test_what_an_accelerate_block_says_of_precision_is_reported() -> None:
    found = told(
        step(
            accelerate={
                "module": "a.train",
                "mixed_precision": "{{ inputs.kind }}",
                "args": ["--lr", "1"],
            }
        ),
        kind="fp16",
    )
    assert (found["mixed_precision"], found["lr"]) == ("fp16", 1)
    assert found.setting("mixed_precision").origin == Origin("input", "kind")  # type: ignore[union-attr]


def test_an_input_that_is_a_mapping_is_found_below_its_name_and_without() -> None:
    found = ToolSettings(of_inputs({"columns": {"prompt": "question"}}), {})
    assert found["columns.prompt"] == found["prompt"] == "question"


def test_an_optional_argument_that_is_null_is_not_there() -> None:
    assert told(step(["t", ["--resume", "{{ state.c.latest }}"], "--lr", "1e-4"]))["resume"] is None
    assert told(step(["t", ["--resume", "{{ state.c.latest }}"], "--lr", "1e-4"]))["lr"] == 1e-4


def test_what_a_step_writes_is_no_setting() -> None:
    assert told(step(["t", "--data", "{{ outputs.o }}", "--lr", "2"]))["data"] is None


def test_what_only_the_running_step_knows_is_unknown() -> None:
    found = told(step(["t", "--gpus", "{{ host.gpus }}"]))
    with pytest.raises(UnknownSetting, match="the value of --gpus, known only to the running step"):
        found["gpus"]


def test_a_configuration_is_found_by_its_path_its_end_and_our_name() -> None:
    tree = {
        "save": {"save_every": "{{ inputs.often }}"},
        "datasets": [{"path": "a"}, {"path": "b"}],
        "model": {"lora": {"rank": 8}},
        "off": None,
    }
    found = ToolSettings(of_tree(tree, scope(often=5), "config.yaml"), NAMES)
    assert found["save_every"] == 5 and found["datasets.path"] == "a"
    assert found["model.lora"] == {"rank": None} and found["lora.rank"] == 8 and found["rank"] == 8
    assert found["off"] is None and found["nothing"] is None
    assert found.setting("save_every").origin == Origin("input", "often")  # type: ignore[union-attr]
    assert found.setting("lora.rank").origin == Origin("file", "model.lora.rank", "config.yaml")  # type: ignore[union-attr]


def test_what_the_program_is_given_wins_over_what_an_input_is_called() -> None:
    line = of_words(words(step(["t", "--max_train_steps", "10"]), scope()))
    found = ToolSettings(
        [*line, *of_inputs({"max_steps": 99, "save_steps": 3, "vae": None, "set": {"a.b": 1}})],
        NAMES,
    )
    assert found["max_steps"] == 99, "our own name is looked up first"
    assert found["save_every"] == 3 and found["vae"] is None and found["a.b"] == 1
    assert (
        found.find_origin("vae") == Origin("input", "vae") and found.find_origin("nothing") is None
    )
    line = of_words(words(step(["t", "--max_steps", "10"]), scope()))
    assert ToolSettings([*line, *of_inputs({"max_steps": 99})], NAMES)["max_steps"] == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("16", 16), ("16.0", 16.0), ("true", True), ("None", None), ("bf16", "bf16"), ("[1, 2]", [1, 2]), ("[x", "[x"), ("-3", -3), ("1" * 40, "1" * 40)],
)  # fmt: skip
def test_a_word_is_the_value_that_it_most_likely_is(text: str, value: object) -> None:
    assert scalar(text) == value and type(scalar(text)) is type(value)


@pytest.mark.parametrize(
    "run",
    [
        "echo 'unclosed\nt --lr 3",
        "{{ nonsense",
        "cat <<E\n{{ inputs.often }}\nE\n",
        "",
        "$(x) `y` \\",
    ],
)
def test_a_script_that_cannot_be_read_is_no_error(run: str) -> None:
    told(step(run), often=1)
