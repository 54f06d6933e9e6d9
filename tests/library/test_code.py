"""The steps of the library name the programs that they run and those that these import: a missing one fails, one too many runs steps again for nothing."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest

from runner.language.parse import load
from tests.shelf import RECIPES, ROOT

TRAINERS = ROOT / "recipes" / "trainers"
STEPS = [
    (name, step)
    for name, recipe in RECIPES.items()
    for step, spec in recipe["steps"].items()
    if "uses" not in spec
]
FAMILIES = {"flux": "image_flux.py", "sdxl": "image_sdxl.py"}  # loaded by the name of the family


def imported(program: str, found: set[str]) -> set[str]:
    """The programs beside it that it needs, at its beginning or later, itself among them."""
    if program not in found:
        found.add(program)
        for node in ast.walk(ast.parse((TRAINERS / program).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                if (TRAINERS / f"{name}.py").exists():
                    imported(f"{name}.py", found)
    return found


def started(spec: dict[str, Any]) -> list[str]:
    """The programs that a step's command names."""
    if "accelerate" in spec:
        return [Path(spec["accelerate"]["script"]).name]
    words = spec["run"] if isinstance(spec["run"], list) else spec["run"].split()
    return [
        Path(word).name for word in words if isinstance(word, str) and word.startswith("trainers/")
    ]


def needed(name: str, spec: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for program in started(spec):
        imported(program, found)
    if "image_model.py" in found and "family" in str(spec.get("run") or spec["accelerate"]["args"]):
        imported(FAMILIES[name.partition("-")[0]], found)
    if "axolotl_run.py" in found and "preprocess" not in str(spec.get("run")):
        imported("axolotl_points.py", found)  # a plugin, which axolotl loads when it trains
    return found


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_a_step_names_the_programs_that_it_needs_and_no_others(name: str, step: str) -> None:
    spec = RECIPES[name]["steps"][step]
    wanted, named = (
        needed(name, spec),
        {Path(path).name for path in spec.get("code", []) if isinstance(path, str)},
    )
    assert wanted <= named, f"not named: {', '.join(sorted(wanted - named))}"
    assert named <= wanted, f"named for nothing: {', '.join(sorted(named - wanted))}"


def test_every_program_is_of_use() -> None:
    used = {
        Path(path).name
        for recipe in RECIPES.values()
        for step in recipe["steps"].values()
        for path in step.get("code", [])
        if isinstance(path, str)
    }
    assert {file.name for file in TRAINERS.glob("*.py")} == used


def test_no_program_takes_what_another_keeps_to_itself() -> None:
    for file in sorted(TRAINERS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and (TRAINERS / f"{node.module}.py").exists()
            ):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{file.name} takes {', '.join(private)} from {node.module}.py"


OWN = [
    name
    for name in RECIPES
    if name not in {"ai-toolkit@1", "axolotl@1", "unsloth@1", "prime-rl@1", "export@1", "eval@1"}
]


HALVED = {"sft@1", "cpt@1", "dpo@1", "orpo@1", "reward@1", "classify@1", "embed@1"}
"""Whose smaller micro batch gives the same bits but for rounding: the others draw noise or answers for each batch."""


@pytest.mark.parametrize("name", OWN)
def test_a_recipe_with_a_trainer_of_ours_keeps_the_promises_of_the_house(name: str) -> None:
    """Started by accelerate, resumable, measured, watched with TensorBoard and trackers, pushed when asked, precise as the GPU can be."""
    recipe = RECIPES[name]
    inputs, (train,) = (
        recipe["inputs"],
        [step for step in recipe["steps"].values() if "accelerate" in step],
    )
    given = train["accelerate"]["args"]
    assert (
        train["state"]["checkpoints"]["checkpoint"]
        and given["resume"] == "{{ state.checkpoints.latest }}"
        and train["metrics"] is True
    )
    smaller = {"oom": {"micro_batch": "/2"}} if name in HALVED else {}
    assert (
        train["retries"] == {"failure": 1, "preemption": 10} | smaller
        and inputs["max_steps"]["continues"] is True
    )
    assert (
        "tensorboard" in train["outputs"]
        and given["tracker"] == "{{ inputs.tracker }}"
        and inputs["tracker"]["key"] is False
    )
    assert (
        inputs["precision"]["default"] == "auto"
        and train["accelerate"]["mixed_precision"].count("auto") == 1
    )
    assert {"global-batch", "micro-batch", "seed", "save-every"} <= given.keys()
    assert given["checkpoint-activations"] == "{{ inputs.checkpoint_activations }}"
    publish = recipe["steps"]["publish"]
    assert (
        publish["when"] == "{{ inputs.push_to != '' }}"
        and publish["secrets"] == ["hf_token"]
        and inputs["push_private"]["default"] is True
    )
    smoke = recipe["presets"]["smoke"]
    assert smoke["resources"]["gpus"] == 0 and smoke["env"]["OMP_NUM_THREADS"] == "1"
    assert any(
        preset.get("resources", {}).get("gpus", recipe["resources"]["gpus"])
        for preset in recipe["presets"].values()
        if preset is not smoke
    )


@functools.cache
def parts(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of a module by the name that they define; "" has those that run with the import."""
    found: dict[str, list[ast.stmt]] = {"": []}
    for part in ast.parse((TRAINERS / f"{module}.py").read_text()).body:
        named = isinstance(part, ast.FunctionDef | ast.ClassDef)
        found.setdefault(part.name if named else "", []).append(part)  # type: ignore[union-attr]
    return found


def on_gpu(program: str) -> bool:
    """Whether what a program runs mentions a GPU: its functions, and those of its siblings that these name."""
    # To seed a GPU that is in use needs none, and a base is loaded in 4 bits to be trained.
    seen = {("loop", "draw"), ("text_model", "nf4")}

    def reached(module: str, name: str) -> bool:
        if (module, name) in seen or not (TRAINERS / f"{module}.py").exists():
            return False
        seen.add((module, name))
        whole = parts(module)
        nodes = [node for part in whole.get(name, ()) for node in ast.walk(part)]
        if any(
            (isinstance(node, ast.Attribute) and node.attr == "cuda")
            or (isinstance(node, ast.Name) and node.id == "Accelerator")
            for node in nodes
        ):
            return True
        theirs: dict[str, tuple[str, str]] = {}
        for node in (node for every in whole.values() for part in every for node in ast.walk(part)):
            if isinstance(node, ast.ImportFrom):
                theirs |= {each.name: (str(node.module), each.name) for each in node.names}
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        pairs = [(module, each) for each in names if each in whole]
        pairs += [theirs[each] for each in names if each in theirs]
        pairs += [
            (node.value.id, node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        return any(reached(*pair) for pair in pairs)

    return reached(program, "")


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_a_step_has_a_gpu_if_its_program_uses_one_and_no_preset_gives_it_one_else(
    name: str, step: str
) -> None:
    recipe = load(ROOT / "recipes" / f"{name}.yaml")
    own = recipe.steps[step].resources
    machines = [recipe.resources, *(preset.resources for preset in recipe.presets.values())]
    found = [own.over(each.of_step(own, each.gpus)).gpus for each in machines if each]
    spec = RECIPES[name]["steps"][step]
    (program,) = (Path(each).stem for each in started(spec))
    # What ends with _run starts a tool of others.
    uses = "accelerate" in spec or program.endswith("_run") or on_gpu(program)
    assert any(found) is uses
