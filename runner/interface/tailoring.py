"""Write a recipe that uses a library recipe on one GPU model, with inputs that fit its memory.

Starts no run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ..advice import estimates, training_from_inputs
from ..errors import CannotRun
from ..language import inputs, presets
from ..language.units import duration_text, money_text, size_text

if TYPE_CHECKING:
    from ..advice.estimates import StepEstimate
    from ..advice.hardware import GpuModel
    from ..language.recipe import Input, Recipe
    from ..language.values import Tree
    from ..storage.workspace import Workspace

_PATHS: Final = ("file", "dataset", "model")


@dataclass(slots=True)
class TailoredRecipe:
    """A tailored recipe file and its resource estimate.

    `notes` explains the chosen inputs, and `needed` names the inputs that the user must set.
    """

    text: str
    estimated: StepEstimate
    notes: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)


def tailor(
    ws: Workspace,
    name: str,
    recipe: Recipe,
    gpu: GpuModel,
    given: Mapping[str, object],
    preset: str | None,
) -> TailoredRecipe:
    """Return a recipe called `name` that uses `recipe` on `gpu`, with inputs that fit.

    `given` inputs stay unchanged. Raises Invalid for invalid inputs. Raises CannotRun if no inputs
    fit, the memory use is unknown, or an input that affects the memory use is missing.
    """
    notes: list[str] = []
    if preset is None and any(
        _is_missing(recipe, spec, given, None)
        for spec in recipe.inputs.values()
        if spec.type == "model"
    ):
        preset = _nearest(recipe, gpu)
        notes += [f"starting from preset {preset}"] if preset else []
    needed = [
        spec.name for spec in recipe.inputs.values() if _is_missing(recipe, spec, given, preset)
    ]
    if wrong := [
        each for each in needed if recipe.inputs[each].type not in _PATHS or each == "base"
    ]:
        raise CannotRun(
            f"cannot choose settings until {', '.join(wrong)} is set",
            fix=f"pass {' '.join(f'{each}=…' for each in wrong)}, or a `--preset` that sets it",
        )
    # The estimate does not depend on the data, so any path will do.
    values = inputs.bind(recipe, {**given, **dict.fromkeys(needed, "./data")}, preset=preset)
    devices = recipe.resources.gpus or 1
    chosen, found = _choose_inputs(ws, recipe, values, gpu, devices, given, notes)
    shown = {
        each: values[each]
        for each in recipe.inputs
        if each in given or presets.of_input(recipe, preset, each)
    } | chosen
    return TailoredRecipe(
        _text(name, recipe, gpu, found, shown, needed, notes), found, notes, needed
    )


@dataclass(frozen=True, slots=True)
class _MemoryModel:
    """Resource estimates of a recipe with some input values on a GPU model."""

    ws: Workspace
    recipe: str
    values: Mapping[str, Tree]
    gpu: GpuModel
    devices: int

    def estimate(self, more: Mapping[str, Tree]) -> StepEstimate:
        """Return the estimate with further input values, which take precedence."""
        values = {**self.values, **more}
        return estimates.estimate_values(self.ws, self.recipe, values, self.gpu, self.devices)


def _choose_inputs(
    ws: Workspace,
    recipe: Recipe,
    values: Mapping[str, Tree],
    gpu: GpuModel,
    devices: int,
    given: Mapping[str, object],
    notes: list[str],
) -> tuple[dict[str, Tree], StepEstimate]:
    """Return the inputs to set in addition to `values`, and the estimate with these inputs.

    Adds the reasons to `notes`. Raises CannotRun if no inputs fit or the memory use is unknown.
    """
    chosen: dict[str, Tree] = {}
    if values.get("precision") == "bf16" and not gpu.bf16 and "precision" not in given:
        chosen["precision"] = "fp16"
        notes.append(f"precision=fp16: {gpu.name} has no bf16")
    model = _MemoryModel(ws, recipe.id, {**values, **chosen}, gpu, devices)
    found = model.estimate({})
    if found.found is None and estimates.fetch_config(values.get("base")):
        found = model.estimate({})
    if found.found is None:
        fix = (
            "choose another base model, or download its config.json to a local directory and pass that path"
            if "config.json" in found.unknown
            else "write the recipe yourself"
        )
        raise CannotRun(f"cannot choose settings: {found.unknown}", fix=fix)
    if found.verdict == "FITS":
        larger = training_from_inputs.list_larger_batches(values)
        more, found = _enlarge_batch(model, larger, given, found, notes)
        return {**chosen, **more}, found
    savings = training_from_inputs.list_memory_savings(recipe.id, values)
    saving = _save_memory(model, savings, given, found)
    if saving.estimate.verdict == "NO":
        raise CannotRun(
            f"{recipe.id} does not fit {gpu.name}, even with all options that save memory. With these options, {saving.least.memory}",
            fix=_others(ws, recipe, values, devices, gpu),
        )
    notes += saving.notes
    return {**chosen, **saving.inputs}, saving.estimate


def _enlarge_batch(
    model: _MemoryModel,
    larger_batches: Iterable[Mapping[str, Tree]],
    given: Mapping[str, object],
    found: StepEstimate,
    notes: list[str],
) -> tuple[Mapping[str, Tree], StepEstimate]:
    """Return the first inputs of `larger_batches` that fit, otherwise no inputs, and the estimate."""
    for more in larger_batches:
        if set(more) & set(given):
            continue
        larger = model.estimate(more)
        if larger.verdict == "FITS":
            (size,) = more.values()
            notes.append(f"micro_batch={size}: the largest that fits; same result, faster")
            return more, larger
    return {}, found


@dataclass(frozen=True, slots=True)
class _Saving:
    """Inputs that reduce the memory use, with the estimate and the reasons for them.

    `least` is the estimate with all savings that were tried.
    """

    inputs: Mapping[str, Tree]
    estimate: StepEstimate
    notes: Sequence[str]
    least: StepEstimate


def _save_memory(
    model: _MemoryModel,
    savings: Iterable[tuple[Mapping[str, Tree], str]],
    given: Mapping[str, object],
    found: StepEstimate,
) -> _Saving:
    """Return the fewest memory savings that fit, or otherwise the fewest with the verdict TIGHT.

    Without such savings, return no inputs with the estimate `found`.
    """
    best = _Saving({}, found, (), found)
    inputs: dict[str, Tree] = {}
    reasons: dict[str, str] = {}
    for more, cost in savings:
        if set(more) & set(given):
            continue
        inputs |= more
        for name, value in more.items():
            reasons[name] = f"{name}={json.dumps(value)}: {cost}"
        smaller = model.estimate(inputs)
        if smaller.verdict == "FITS":
            return _Saving(inputs, smaller, [*reasons.values()], smaller)
        if smaller.verdict == "TIGHT" and best.estimate.verdict == "NO":
            best = _Saving({**inputs}, smaller, [*reasons.values()], smaller)
        best = replace(best, least=smaller)
    return best


def _others(
    ws: Workspace, recipe: Recipe, values: Mapping[str, Tree], devices: int, gpu: GpuModel
) -> str:
    """Return a fix that names the larger GPUs with enough memory for the recipe, smallest first."""
    gpus = sorted(estimates.load_hardware().gpus, key=lambda each: (each.usable, each.tflops))
    fitting = []
    for larger in gpus:
        if larger.usable <= gpu.usable:
            continue
        model = _MemoryModel(ws, recipe.id, values, larger, devices)
        if model.estimate({}).verdict == "FITS":
            fitting.append(larger.name)
    if fitting:
        return f"choose a GPU that fits: {', '.join(fitting)}"
    return "choose a smaller base model: no known GPU is large enough"


def _is_missing(
    recipe: Recipe, spec: Input, given: Mapping[str, object], preset: str | None
) -> bool:
    said = spec.name in given or presets.of_input(recipe, preset, spec.name)
    return spec.type != "secret" and spec.required and not spec.has_default and not said


def _nearest(recipe: Recipe, gpu: GpuModel) -> str | None:
    """Return the preset with the largest `gpu_memory` that the GPU has.

    If all presets require more memory, return the preset with the smallest `gpu_memory`. None if no
    preset sets `gpu_memory`.
    """
    sizes = {
        name: each.resources.gpu_memory
        for name, each in recipe.presets.items()
        if each.resources and each.resources.gpu_memory
    }
    if not sizes:
        return None
    fitting = {name: size for name, size in sizes.items() if size <= gpu.memory * 1e9}
    if fitting:
        return max(fitting, key=lambda name: fitting[name])
    return min(sizes, key=lambda name: sizes[name])


# -- text ------------------------------------------------------------------------------------------


def _text(
    name: str,
    recipe: Recipe,
    gpu: GpuModel,
    found: StepEstimate,
    shown: Mapping[str, Tree],
    needed: list[str],
    notes: list[str],
) -> str:
    secrets = [spec.name for spec in recipe.inputs.values() if spec.type == "secret"]
    step = recipe.name.replace("-", "_")
    names = [*needed, *shown, *secrets]
    lines = [
        f"# {recipe.id} on {gpu.name}. {found.memory[0].upper()}{found.memory[1:]}",
        *(f"# {note}" for note in notes),
        f"recipe: {name}@1",
        f"summary: {json.dumps(f'{recipe.summary} (on {gpu.name})', ensure_ascii=False)}",
        "",
        "inputs:",
        *(
            f"  {each}: {_declare_input(recipe.inputs[each], shown.get(each), each in shown)}"
            for each in names
        ),
        "",
        *_presets_section(recipe, names),
        *_limits_section(recipe),
        "steps:",
        f"  {step}:",
        f"    uses: {recipe.id}",
        "    with:",
        *(f'      {each}: "{{{{ inputs.{each} }}}}"' for each in names),
        f"    resources: {_flow(_resources(recipe, gpu, f'{gpu.memory:g}GB'))}",
        *_outputs_section(recipe, step),
    ]
    return "\n".join(lines) + "\n"


def _presets_section(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """Return the lines of the smoke preset with the values of the inputs `names`."""
    if "smoke" not in recipe.presets:
        return []
    smoke = recipe.presets["smoke"].inputs
    values = {name: smoke.get(name, _default(recipe.inputs[name])) for name in names}
    small = {name: value for name, value in values.items() if value is not None}
    return ["presets:", f"  smoke: {_flow(small)}", ""]


def _limits_section(recipe: Recipe) -> list[str]:
    """Return the line of the time and cost limits, if the recipe has any."""
    limits = {}
    if recipe.limits.time:
        limits["time"] = duration_text(recipe.limits.time)
    if recipe.limits.cost:
        limits["cost"] = money_text(recipe.limits.cost)
    return [f"limits: {_flow(limits)}", ""] if limits else []


def _outputs_section(recipe: Recipe, step: str) -> list[str]:
    """Return the lines that pass on the recipe's outputs from its step."""
    if not recipe.outputs:
        return []
    outputs = [f'  {name}: "{{{{ steps.{step}.{name} }}}}"' for name in recipe.outputs]
    return ["", "outputs:", *outputs]


def _resources(recipe: Recipe, gpu: GpuModel, size: str) -> dict[str, Tree]:
    wants = recipe.resources
    found: dict[str, Tree] = {"gpus": wants.gpus or 1, "gpu": gpu.asked, "gpu_memory": size}
    found |= {
        each: size_text(value)
        for each in ("memory", "disk")
        if (value := getattr(wants, each)) is not None
    }
    return found


def _declare_input(spec: Input, value: Tree, has_value: bool) -> str:
    """Return a library input's YAML declaration, with `value` as the default if `has_value`."""
    is_secret_type = spec.type == "secret"
    found: dict[str, object] = {"type": spec.type}
    if spec.items:
        found["items"] = spec.items
    if has_value:
        found["default"] = value
    found |= spec.limits
    if is_secret_type:
        found |= {"env": spec.env, "required": spec.required}
    if spec.secret:
        found["secret"] = spec.secret
    if spec.only:
        found["only"] = list(spec.only)
    for name in ("continues", "stream", "member"):
        if getattr(spec, name):
            found[name] = True
    if not spec.key:
        found["key"] = False
    if not spec.required and not is_secret_type:
        found["required"] = False
    if spec.doc:
        found["doc"] = spec.doc
    return _flow(found)


def _default(spec: Input) -> Tree:
    """Return the default of an input that the library's smoke preset does not set.

    None for a default with a template, which only the library recipe itself can evaluate.
    """
    return None if isinstance(spec.default, str) and "{{" in spec.default else spec.default


def _flow(value: object) -> str:
    """Return YAML on one line, in JSON syntax with unquoted keys."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
