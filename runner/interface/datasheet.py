"""Describe a recipe as a datasheet in text or JSON, without I/O.

A datasheet has the outputs, inputs, hardware, run times and limits of the recipe.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..language.inputs import leaves
from ..language.recipe import GitCode, Input, Limits, Output, Preset, Recipe, Resources, Step
from ..language.template import TemplateError, references
from ..language.units import count_text, duration_text, money_text, size_text
from ..language.values import Tree
from .tail import span

UNKNOWN: Final = "unknown until a first complete run"


@dataclass(frozen=True, slots=True)
class RunDurations:
    """Durations of complete uncached runs in seconds, oldest first, and the peak memory of one
    process in bytes.
    """

    seconds: tuple[float, ...]
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    """A bundled dataset, with its folder below the fixtures and its licence."""

    folder: str
    licence: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """The facts of a datasheet.

    Keys of `took` are preset names, None for runs without a preset.
    """

    recipe: Recipe
    took: Mapping[str | None, RunDurations]
    data: Sequence[Data] = ()
    locks: Mapping[str, str] = field(default_factory=dict)
    """A short description of each lock that the recipe names."""
    estimated: Mapping[str | None, Sequence[str]] = field(default_factory=dict)
    """Lines with the estimated training time per GPU model, by preset."""


# -- the facts -------------------------------------------------------------------------------------


def results(recipe: Recipe) -> list[tuple[str, str, Output | None]]:
    """Return the name, the step and the declaration of each recipe output.

    The declaration is None if the step does not declare the output itself.
    """
    found: list[tuple[str, str, Output | None]] = []
    if recipe.outputs is None:
        for each in recipe.steps.values():
            for declared in each.outputs:
                found.append((f"{each.id}.{declared.name}", each.id, declared))
        return found
    for name, leaf in recipe.outputs.items():
        step, output = _first_step_output(leaf)
        found.append((name, step, _declaration(recipe, step, output)))
    return found


def _first_step_output(leaf: object) -> tuple[str, str]:
    """Return the step and the name of the first step output in a template; empty without one."""
    for path in _mentions(leaf):
        if path[0] == "steps" and len(path) > 2:
            return path[1], path[2]
    return "", ""


def _declaration(recipe: Recipe, step: str, output: str) -> Output | None:
    """Return an output of a step, or for a `select` step, of the step from which it selects."""
    producer = recipe.steps.get(step)
    if producer is not None and producer.select is not None:
        producer = recipe.steps.get(producer.select.step)
    if producer is None:
        return None
    for each in producer.outputs:
        if each.name == output:
            return each
    return None


def choices(recipe: Recipe) -> list[tuple[str | None, Preset | None]]:
    """Return the presets to describe by name, after (None, None) for runs without a preset."""
    return [(None, None), *recipe.presets.items()]


def machine(recipe: Recipe, preset: Preset | None) -> Resources:
    """Return the maximum of each resource request over all steps, with the preset applied."""
    override = preset.resources if preset is not None else None
    most = recipe.resources if override is None else override.over(recipe.resources)
    for step in recipe.steps.values():
        own, gpus = step.resources, recipe.resources.gpus
        wants = own.over(recipe.resources.of_step(own, gpus))
        if override is not None:
            gpus = gpus if override.gpus is None else override.gpus
            wants = override.of_step(own, gpus).over(wants)
        most = _greater(most, wants)
    return most


def fixtures(recipe: Recipe) -> list[str]:
    """Return the fixture paths in presets and input defaults, relative to the fixtures folder."""
    values: list[Tree] = []
    for preset in recipe.presets.values():
        values += preset.inputs.values()
    values += [spec.default for spec in recipe.inputs.values()]
    paths: list[str] = []
    for value in values:
        paths += _fixtures_in(value)
    return list(dict.fromkeys(paths))


def _fixtures_in(value: Tree) -> Iterator[str]:
    """Yield the paths after `{{ fixtures }}/` in a value."""
    for leaf, _ in leaves(value):
        if ("fixtures",) in _mentions(leaf):
            path = leaf.partition("}}")[2].lstrip("/")
            if path:
                yield path


def needs(recipe: Recipe, step: Step) -> list[str]:
    """Return the ids of a step's dependencies, from its references and the outputs it reads."""
    producers = _producers_by_path(recipe)
    found = list(step.needs)
    if step.select:
        found.append(step.select.source)
    found += [producers[path] for path in step.reads if path in producers]
    found += _referenced_steps(_source_of(recipe, step))
    # A source of `select` or a reference may name a step that does not exist: `recipe validate`
    # reports it.
    return [id for id in dict.fromkeys(found) if id in recipe.steps]


def _producers_by_path(recipe: Recipe) -> dict[str, str]:
    """Return the id of the step that writes each output path."""
    producers: dict[str, str] = {}
    for step in recipe.steps.values():
        for output in step.outputs:
            producers[output.path.rstrip("/")] = step.id
    return producers


def _source_of(recipe: Recipe, step: Step) -> Tree:
    """Return the content of a step in the recipe file."""
    content: Any = recipe.document.value
    for part in step.origin:
        content = content[part]
    source: Tree = content
    return source


def _referenced_steps(content: Tree) -> list[str]:
    """Return the ids after `steps.` in the templates of a tree."""
    found: list[str] = []
    for leaf, _ in leaves(content):
        for path in _mentions(leaf):
            if path[0] == "steps" and len(path) > 1:
                found.append(path[1])
    return found


def _mentions(leaf: object) -> list[tuple[str, ...]]:
    """Return the paths of the references in a template; empty for other values."""
    if not isinstance(leaf, str):
        return []
    try:
        return [tuple(map(str, reference.path)) for reference in references(leaf)]
    except TemplateError:
        return []  # `recipe validate` reports the error


def _greater(a: Resources, b: Resources) -> Resources:
    """Return the maximum of each request; the GPU model of `a` if set, otherwise of `b`."""
    pick: dict[str, Any] = {}
    for name in ("cpus", "memory", "gpus", "gpu_memory", "disk"):
        first, second = getattr(a, name), getattr(b, name)
        if first is None or second is None:
            pick[name] = second if first is None else first
        else:
            pick[name] = max(first, second)
    pools: dict[str, float] = {}
    for name in {**a.pools, **b.pools}:
        pools[name] = max(a.pools.get(name, 0), b.pools.get(name, 0))
    return Resources(**pick, gpu=a.gpu or b.gpu, pools=pools)


# -- as JSON ---------------------------------------------------------------------------------------


def describe_sheet(sheet: Sheet) -> Mapping[str, object]:
    """Return the datasheet as a JSON object."""
    recipe = sheet.recipe
    inputs = {spec.name: _input_facts(spec) for spec in recipe.inputs.values()}
    presets = {preset.name: dict(preset.inputs) for preset in recipe.presets.values()}
    steps = {step.id: _step_facts(recipe, step) for step in recipe.steps.values()}
    outputs = dict(recipe.outputs) if recipe.outputs is not None else None
    described = {name: _result_facts(step, output) for name, step, output in results(recipe)}
    # JSON has no key None: an empty name is for runs without a preset.
    machines = {name or "": _resources(machine(recipe, preset)) for name, preset in choices(recipe)}
    estimated = {name or "": list(lines) for name, lines in sheet.estimated.items()}
    took = {name or "": _durations_json(durations) for name, durations in sheet.took.items()}
    data = [{"folder": each.folder, "licence": each.licence} for each in sheet.data]
    return {
        "recipe": recipe.id,
        "summary": recipe.summary,
        "doc": recipe.doc,
        "path": recipe.document.name,
        "inputs": inputs,
        "presets": presets,
        "steps": steps,
        "outputs": outputs,
        "results": described,
        "resources": _resources(recipe.resources),
        "machines": machines,
        "limits": _limits_json(_limits(recipe, None)),
        "estimated": estimated,
        "took": took,
        "environment": dict(_environment(sheet)),
        "data": data,
    }


def _step_facts(recipe: Recipe, step: Step) -> Mapping[str, object]:
    shared = recipe.resources.of_step(step.resources, recipe.resources.gpus)
    uses = step.uses.recipe if step.uses else None
    outputs = {output.name: output_path(output) for output in step.outputs}
    state = {each.name: each.path for each in step.state}
    return {
        "needs": needs(recipe, step),
        "uses": uses,
        "outputs": outputs,
        "state": state,
        "matrix": list(step.matrix or ()),
        "resources": _resources(step.resources.over(shared)),
    }


def _result_facts(step: str, output: Output | None) -> Mapping[str, object]:
    if output is None:
        return {"step": step, "path": None, "doc": ""}
    return {"step": step, "path": output_path(output), "doc": output.doc}


def _durations_json(took: RunDurations) -> Mapping[str, object]:
    return {"seconds": list(took.seconds), "memory": took.memory}


def _input_facts(spec: Input) -> Mapping[str, object]:
    return {
        "type": spec.type,
        "items": spec.items,
        "doc": spec.doc,
        "default": spec.default,
        "env": spec.env,
        "key": spec.key,
        "continues": spec.continues,
        "stream": spec.stream,
        "member": spec.member,
        "required": spec.required and not spec.has_default,
        "limits": dict(spec.limits),
        "only": list(spec.only),
    }


# -- as text ---------------------------------------------------------------------------------------


def text(sheet: Sheet, width: int) -> list[str]:
    """Return the datasheet as lines of at most `width` columns.  Longer words are not split."""
    recipe = sheet.recipe
    title = f"{recipe.id}: {recipe.summary}" if recipe.summary else recipe.id
    lines = _wrap(title, width, "", "")
    if recipe.doc:
        lines.append("")
        for each in recipe.doc.rstrip().splitlines():
            lines += _wrap(each, width, "", "") or [""]
    for heading, rows in _sections(sheet):
        lines += ["", heading]
        name_width = min(16, max((len(name) for name, *_ in rows), default=0))
        for name, head, *more in rows:
            lines += _row(name, head, more, name_width, width)
    return lines


def _row(name: str, head: str, more: Sequence[str], name_width: int, width: int) -> list[str]:
    """Return the lines of a row, with the wrapped description and the further texts beside the
    name.
    """
    indent = " " * (name_width + 4)
    lines = _wrap(head, width, indent, indent) or [""]
    if len(name) > name_width:
        lines.insert(0, "")
    lines[0] = f"  {name:{name_width}}  {lines[0].lstrip()}".rstrip()
    for text in more:
        lines += _wrap(text, width, indent, indent)
    return lines


def _wrap(words: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        words,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- sections: a title and rows of a name, a description and further texts -------------------------

_LONG: Final = "time and cost"
BARE: Final = "no preset"


def _sections(sheet: Sheet) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
    """Yield the title and rows of each section. Sections without rows are left out."""
    recipe = sheet.recipe
    sections: dict[str, Sequence[tuple[str, ...]]] = {
        "outputs": _list_outputs(recipe),
        "hardware": _list_machines(recipe),
        _LONG: [*_list_durations(sheet), *_list_limits(recipe)],
        "inputs": _list_inputs(recipe),
        "presets": [(each.name, preset_text(each)) for each in recipe.presets.values()],
        "steps": [_step(recipe, step) for step in recipe.steps.values()],
        "environment": list(_environment(sheet)),
        "included data": [(data.folder, data.licence) for data in sheet.data],
    }
    for title, rows in sections.items():
        if rows:
            yield title, rows


def _list_outputs(recipe: Recipe) -> Sequence[tuple[str, ...]]:
    outputs = [_result(recipe, name, step, output) for name, step, output in results(recipe)]
    return outputs or [("nothing", "no step has outputs")]


def _list_machines(recipe: Recipe) -> Sequence[tuple[str, ...]]:
    return [(name or BARE, machine_text(recipe, preset)) for name, preset in choices(recipe)]


def _list_inputs(recipe: Recipe) -> Sequence[tuple[str, ...]]:
    return [(spec.name, input_text(spec), spec.doc) for spec in recipe.inputs.values()]


def _list_durations(sheet: Sheet) -> Iterator[tuple[str, ...]]:
    """Yield a row for each preset: its measured run time, then the estimates."""
    for name, _ in choices(sheet.recipe):
        yield (name or BARE, _took(sheet.took.get(name)), *sheet.estimated.get(name, ()))


def _result(recipe: Recipe, name: str, step: str, output: Output | None) -> tuple[str, ...]:
    """Return a row of the outputs section: the name, the path and origin, and the doc text."""
    notes = []
    if step:
        notes.append(f"from step {step}")
    when = recipe.steps[step].when if step in recipe.steps else None
    if when is not None:
        notes.append(f"when {' '.join(str(when).strip('{} ').split())}")
    if output is None:
        return (name, ", ".join(notes))
    if output.directory:
        notes.insert(0, "a folder")
    if output.optional:
        notes.append("optional")
    return (name, f"{output_path(output)} ({', '.join(notes)})", output.doc)


def machine_text(recipe: Recipe, preset: Preset | None) -> str:
    """Describe the resources of the recipe's most demanding step."""
    parts = _resource_parts(machine(recipe, preset))
    # A node count may also be a template, which is shown as it is.
    nodes = {str(step.nodes) for step in recipe.steps.values() if step.nodes not in (None, 1)}
    if nodes:
        parts.append(f"on {' or '.join(sorted(nodes))} nodes")
    inner = dict.fromkeys(step.uses.recipe for step in recipe.steps.values() if step.uses)
    if inner:
        parts.append(f"plus the resources of {', '.join(inner)}")
    return ", ".join(parts) or "any"


def _resource_parts(wants: Resources) -> list[str]:
    """Describe each resource request."""
    parts = []
    gpus = _gpu_text(wants)
    if gpus:
        parts.append(gpus)
    if wants.cpus:
        parts.append(count_text(wants.cpus, "CPU", form="g"))
    if wants.memory:
        parts.append(f"{size_text(wants.memory)} memory")
    if wants.disk:
        parts.append(f"{size_text(wants.disk)} disk")
    return parts + [f"{count:g} of the pool {name}" for name, count in wants.pools.items()]


def _gpu_text(wants: Resources) -> str:
    """Describe the GPUs, "no GPU" for 0, or return an empty text without any GPU setting."""
    if wants.gpus == 0:
        return "no GPU"
    is_asked = wants.gpus or wants.gpu or wants.gpu_memory
    if not is_asked:
        return ""
    count = wants.gpus or 1
    unnamed = "GPUs" if count > 1 else "GPU"
    text = f"{count} {wants.gpu or unnamed}"
    return f"{text} of {size_text(wants.gpu_memory)}" if wants.gpu_memory else text


def _took(took: RunDurations | None) -> str:
    if took is None or not took.seconds:
        return UNKNOWN
    least, most = span(min(took.seconds)), span(max(took.seconds))
    times = least if least == most else f"{least} to {most}"
    runs = f"{len(took.seconds)} runs" if len(took.seconds) > 1 else "a run"
    text = f"{times} in {runs} on this machine"
    if took.memory < 5e7:  # rounds to 0.0 GB, or was not measured
        return text
    return f"{text}, {took.memory / 1e9:.1f} GB peak memory"


def _list_limits(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """Yield rows for the limits of a run, and for presets with other limits."""
    bare = _limits(recipe, None)
    if bare.time is not None:
        yield "at most", f"{duration_text(bare.time)}; then the run stops and can be resumed"
    if bare.cost is not None:
        yield "at most", money_text(bare.cost)
    for name, preset in recipe.presets.items():
        own = _limits(recipe, preset)
        if own.time is not None and own.time != bare.time:
            yield "at most", f"{duration_text(own.time)} with {name}"
        if own.cost is not None and own.cost != bare.cost:
            yield "at most", f"{money_text(own.cost)} with {name}"


def input_text(spec: Input) -> str:
    """Describe an input's type, default and bounds, and the effect of a change on the cache."""
    if spec.type == "secret":
        optional = "" if spec.required else ", optional"
        return f"secret, from ${spec.env}{optional}"
    notes = [_type_and_default(spec), *_bounds(spec.limits), *_input_notes(spec)]
    return "; ".join(filter(None, notes))


def _input_notes(spec: Input) -> Iterator[str]:
    """Describe how an input is used, apart from its type and bounds."""
    if spec.continues:
        yield "raising it continues training"
    if not spec.key:
        yield "not part of the cache key"
    if spec.member and spec.items:
        yield "each FILE.py:NAME"
    elif spec.member:
        yield "FILE.py:NAME"
    if spec.stream:
        yield "streamed"
    if spec.only:
        yield f"only {' '.join(spec.only)}"


def _type_and_default(spec: Input) -> str:
    is_typed_list = spec.type == "list" and spec.items
    kind = f"list of {spec.items}" if is_typed_list else spec.type
    if not spec.has_default:
        return f"{kind}, required" if spec.required else f"{kind}, optional"
    if isinstance(spec.default, str) and spec.default:
        return f"{kind} = {spec.default}"
    return f"{kind} = {json.dumps(spec.default, ensure_ascii=False)}"


_RANGES: Final = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
)
"""Keys of a lower and an upper limit, with the unit of both."""
_OTHER_LIMITS: Final = {
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
    "pattern": "like",
}


def _bounds(limits: Mapping[str, Tree]) -> Iterator[str]:
    """Describe the limits of an input."""
    choices = limits.get("choices")
    if isinstance(choices, list):
        yield " | ".join(str(choice) for choice in choices)
    for low, high, unit in _RANGES:
        yield from _describe_range(limits, low, high, unit)
    for word, value in limits.items():
        if word in _OTHER_LIMITS:
            yield f"{_OTHER_LIMITS[word]} {_plain(value)}"
    if limits.get("uniqueItems"):
        yield "no duplicates"


def _describe_range(limits: Mapping[str, Tree], low: str, high: str, unit: str) -> Iterator[str]:
    """Describe the lower limit `low` and the upper limit `high` of an input."""
    has_low = low in limits
    has_high = high in limits
    if has_low and has_high:
        yield f"{json.dumps(limits[low])} to {json.dumps(limits[high])}{unit}"
    elif has_low:
        yield f"at least {json.dumps(limits[low])}{unit}"
    if low == "minimum" and "exclusiveMinimum" in limits:
        yield f"above {json.dumps(limits['exclusiveMinimum'])}"
    if has_high and not has_low:
        yield f"at most {json.dumps(limits[high])}{unit}"


def _plain(value: Tree) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def preset_text(preset: Preset) -> str:
    """Return the input values of a preset in one line."""
    words = " ".join(f"{name}={_plain(value)}" for name, value in preset.inputs.items())
    return words.replace("{{ fixtures }}/", "fixtures/") or "same inputs, other hardware"


def _step(recipe: Recipe, step: Step) -> tuple[str, ...]:
    """Return a row of the steps section: the id, then the kind, dependencies and outputs."""
    parts = []
    kind = _step_kind(step)
    if kind:
        parts.append(kind)
    if step.matrix:
        parts.append(f"for each {', '.join(step.matrix)}")
    if step.when is not None:
        parts.append(f"when {step.when}")
    wanted = needs(recipe, step)
    if wanted:
        parts.append(f"<- {', '.join(wanted)}")
    products = [output_path(output) for output in step.outputs]
    products += [f"{state.path}/ (state)" for state in step.state]
    if products:
        parts.append(f"-> {', '.join(products)}")
    return (step.id, "  ".join(parts))


def _step_kind(step: Step) -> str:
    """Describe a step that uses a recipe, selects a result or starts accelerate; empty for others."""
    if step.accelerate:
        return f"accelerate {step.accelerate.get('script') or step.accelerate.get('module')}"
    if step.uses:
        return f"uses {step.uses.recipe}"
    if step.select:
        return f"the best of {step.select.step} by {step.select.metric}"
    return ""


def locks(recipe: Recipe) -> list[str]:
    """Return the locks named by the recipe, its steps and its presets."""
    parts: list[Recipe | Step | Preset] = [recipe, *recipe.steps.values(), *recipe.presets.values()]
    found: dict[str, None] = {}
    for part in parts:
        if part.python and part.python.lock:
            found[part.python.lock] = None
    return list(found)


def _environment(sheet: Sheet) -> Iterator[tuple[str, str]]:
    """Yield a name and a description for each part of the environment that the recipe sets."""
    recipe = sheet.recipe
    own: list[Recipe | Step] = [recipe, *recipe.steps.values()]
    all_parts: list[Recipe | Step | Preset] = [*own, *recipe.presets.values()]
    setup = f"{len(recipe.setup)} commands on each host" if recipe.setup else ""
    rows = [
        ("python", _describe_locks(sheet)),
        ("python version", _join_distinct(_python_versions(all_parts))),
        ("image", _join_distinct(part.image for part in all_parts)),
        ("passed on", _describe_pass_env(own)),
        ("env_file", _join_distinct(_env_files(own))),
        ("setup", setup),
        ("code", _join_distinct(_checkouts(own))),
    ]
    for name, text in rows:
        if text:
            yield name, text


def _describe_locks(sheet: Sheet) -> str:
    """Return the names of the locks, with their short descriptions if known."""
    texts = []
    for name in locks(sheet.recipe):
        if name in sheet.locks:
            texts.append(f"{name}: {sheet.locks[name]}")
        else:
            texts.append(name)
    return "; ".join(texts)


def _describe_pass_env(parts: Iterable[Recipe | Step]) -> str:
    """Return the environment variables that steps get from the caller; empty without any."""
    names: list[str] = []
    for part in parts:
        names += part.pass_env
    passed = _join_distinct(names)
    return f"{passed}: from your environment" if passed else ""


def _env_files(parts: Iterable[Recipe | Step]) -> Iterator[str]:
    for part in parts:
        yield from part.env_files


def _join_distinct(texts: Iterable[str | None]) -> str:
    """Join the texts in order, without duplicates and empty texts."""
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _python_versions(parts: Iterable[Recipe | Step | Preset]) -> Iterator[str | None]:
    """Yield the Python version of each part with a `python` key; None for the default version."""
    for part in parts:
        if part.python:
            yield part.python.version


def _checkouts(parts: Iterable[Recipe | Step]) -> Iterator[str]:
    """Yield the URL and the short commit of each Git repository."""
    for part in parts:
        for code in part.code or ():
            if isinstance(code, GitCode):
                yield f"{code.url} at {code.commit[:12]}"


def output_path(output: Output) -> str:
    """Return the declared path, with a final slash for a directory."""
    return f"{output.path}/" if output.directory else output.path


def _resources(resources: Resources) -> Mapping[str, str | float]:
    """Return the resource requests that are set, with sizes as texts."""
    found: dict[str, str | float | None] = {
        "gpus": resources.gpus,
        "gpu": resources.gpu,
        "cpus": resources.cpus,
    }
    for name in ("gpu_memory", "memory", "disk"):
        size = getattr(resources, name)
        found[name] = None if size is None else size_text(size)
    found.update(resources.pools)
    return {name: value for name, value in found.items() if value is not None}


def _limits(recipe: Recipe, preset: Preset | None) -> Limits:
    """Return the limits of the recipe, with those that a preset sets."""
    if preset is None or preset.limits is None:
        return recipe.limits
    own = preset.limits
    time = recipe.limits.time if own.time is None else own.time
    cost = recipe.limits.cost if own.cost is None else own.cost
    return Limits(time, cost)


def _limits_json(limits: Limits) -> dict[str, str]:
    found: dict[str, str] = {}
    if limits.time is not None:
        found["time"] = duration_text(limits.time)
    if limits.cost is not None:
        found["cost"] = money_text(limits.cost)
    return found
