"""Write a recipe that uses a library recipe on one GPU model, with inputs that fit its memory.

Starts no run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    if preset is None and _is_model_missing(recipe, given):
        preset = _nearest(recipe, gpu)
        if preset:
            notes.append(f"starting from preset {preset}")
    needed = _list_missing(recipe, given, preset)
    _require_settings(recipe, needed)
    # The estimate does not depend on the data, so any path will do.
    values = inputs.bind(recipe, {**given, **dict.fromkeys(needed, "./data")}, preset=preset)
    devices = recipe.resources.gpus or 1
    chosen, found = _choose_inputs(ws, recipe, values, gpu, devices, given, notes)
    shown: dict[str, Tree] = {}
    for each in recipe.inputs:
        if each in given or presets.of_input(recipe, preset, each):
            shown[each] = values[each]
    shown |= chosen
    text = _text(name, recipe, gpu, found, shown, needed, notes)
    return TailoredRecipe(text, found, notes, needed)


def _require_settings(recipe: Recipe, needed: Sequence[str]) -> None:
    """Raise CannotRun if one of the inputs `needed` may affect the memory use.

    The user can set paths of data in the recipe later, but not the base model.
    """
    wrong = []
    for name in needed:
        if name == "base" or recipe.inputs[name].type not in _PATHS:
            wrong.append(name)
    if wrong:
        settings = " ".join(f"{name}=…" for name in wrong)
        raise CannotRun(
            f"cannot choose settings until {', '.join(wrong)} is set",
            fix=f"pass {settings}, or a `--preset` that sets it",
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
    lacks_bf16 = values.get("precision") == "bf16" and not gpu.bf16
    if lacks_bf16 and "precision" not in given:
        chosen["precision"] = "fp16"
        notes.append(f"precision=fp16: {gpu.name} has no bf16")
    model = _MemoryModel(ws, recipe.id, {**values, **chosen}, gpu, devices)
    found = model.estimate({})
    if found.found is None and estimates.fetch_config(values.get("base")):
        # The estimate reads the model's config.json from the cache.
        found = model.estimate({})
    if found.found is None:
        fix = "write the recipe yourself"
        if "config.json" in found.unknown:
            fix = "choose another base model, or download its config.json to a local directory and pass that path"
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


def _is_model_missing(recipe: Recipe, given: Mapping[str, object]) -> bool:
    models = [spec for spec in recipe.inputs.values() if spec.type == "model"]
    return any(_is_missing(recipe, spec, given, None) for spec in models)


def _list_missing(recipe: Recipe, given: Mapping[str, object], preset: str | None) -> list[str]:
    """Return the names of the required inputs without a value."""
    specs = recipe.inputs.values()
    return [spec.name for spec in specs if _is_missing(recipe, spec, given, preset)]


def _is_missing(
    recipe: Recipe, spec: Input, given: Mapping[str, object], preset: str | None
) -> bool:
    is_optional = not spec.required or spec.has_default
    if is_optional or spec.type == "secret":
        return False
    return spec.name not in given and not presets.of_input(recipe, preset, spec.name)


def _nearest(recipe: Recipe, gpu: GpuModel) -> str | None:
    """Return the preset with the largest `gpu_memory` that the GPU has.

    If all presets require more memory, return the preset with the smallest `gpu_memory`. None if no
    preset sets `gpu_memory`.
    """
    sizes: dict[str, float] = {}
    for name, each in recipe.presets.items():
        if each.resources and each.resources.gpu_memory:
            sizes[name] = each.resources.gpu_memory
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
    summary = f"{recipe.summary} (on {gpu.name})"
    lines = [
        f"# {recipe.id} on {gpu.name}. {found.memory[0].upper()}{found.memory[1:]}",
        *[f"# {note}" for note in notes],
        f"recipe: {name}@1",
        f"summary: {json.dumps(summary, ensure_ascii=False)}",
        "",
        *_inputs_section(recipe, names, shown),
        *_presets_section(recipe, names),
        *_limits_section(recipe),
        *_steps_section(recipe, step, names, gpu),
        *_outputs_section(recipe, step),
    ]
    return "\n".join(lines) + "\n"


def _inputs_section(
    recipe: Recipe, names: Sequence[str], shown: Mapping[str, Tree]
) -> Iterator[str]:
    """Yield the declarations of the inputs `names`, with the values in `shown` as defaults."""
    yield "inputs:"
    for name in names:
        declared = _declare_input(recipe.inputs[name], shown.get(name), name in shown)
        yield f"  {name}: {declared}"
    yield ""


def _steps_section(recipe: Recipe, step: str, names: Sequence[str], gpu: GpuModel) -> Iterator[str]:
    """Yield the lines of the step that uses the recipe and passes on the inputs `names`."""
    yield "steps:"
    yield f"  {step}:"
    yield f"    uses: {recipe.id}"
    yield "    with:"
    for name in names:
        yield f'      {name}: "{{{{ inputs.{name} }}}}"'
    resources = _resources(recipe, gpu, f"{gpu.memory:g}GB")
    yield f"    resources: {_flow(resources)}"


def _presets_section(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """Return the lines of the smoke preset with the values of the inputs `names`."""
    if "smoke" not in recipe.presets:
        return []
    smoke = recipe.presets["smoke"].inputs
    small: dict[str, Tree] = {}
    for name in names:
        value = smoke.get(name, _default(recipe.inputs[name]))
        if value is not None:
            small[name] = value
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
    if wants.memory is not None:
        found["memory"] = size_text(wants.memory)
    if wants.disk is not None:
        found["disk"] = size_text(wants.disk)
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
    if isinstance(spec.default, str) and "{{" in spec.default:
        return None
    return spec.default


def _flow(value: object) -> str:
    """Return YAML on one line, in JSON syntax with unquoted keys."""
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    items = [f"{name}: {_flow(inner)}" for name, inner in value.items()]
    return f"{{{', '.join(items)}}}"
