"""Convert a DVC pipeline or a SkyPilot task to a recipe, without reading files.

Formats: https://doc.dvc.org/user-guide/project-structure/dvcyaml-files, https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ..language import yaml_text
from .drafting import plain_name

Value: TypeAlias = "Mapping[str, Any]"
Table: TypeAlias = "dict[str, Any]"
"""A YAML mapping."""
Kind: TypeAlias = Callable[[str], str]
"""Function that returns the kind of a path, or "" for a missing path.

Kinds are "file", "folder" and "code", for a folder with Python files.
"""

_VALUE: Final = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")
_PLAIN: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}
_SKY_NAMES: Final = {"SKYPILOT_NODE_RANK": "NODE_RANK", "SKYPILOT_NUM_NODES": "NNODES"}


@dataclass(slots=True)
class ImportedRecipe:
    """A recipe, with notes about unconverted parts and parts to review."""

    recipe: Table
    look: list[str] = field(default_factory=list)


def text_of(made: ImportedRecipe, origin: str) -> str:
    """Return the text of the recipe file, with the notes as comments."""
    head = [f"# Written from {origin}.", *(f"# Look at: {line}" for line in made.look), ""]
    return "\n".join(head) + yaml_text.block(made.recipe, indented=True, width=140)


# -- DVC ------------------------------------------------------------------------------------------------------------------------------------------


def from_dvc(
    name: str,
    pipeline: Value,
    base: str,
    params: Mapping[str, Value],
    is_folder: Callable[[str], bool],
    kind: Kind,
) -> ImportedRecipe:
    """Convert the contents of a `dvc.yaml` in the folder `base` to a recipe.

    All paths are relative to the workspace root. `params` maps the path of each parameter file to
    its contents. `is_folder` returns True for an output that is a directory.
    """
    made = ImportedRecipe({"recipe": f"{name}@1", "summary": "What dvc.yaml makes"})
    draft = _Dvc(made, base, params, is_folder, kind)
    steps = {
        plain_name(stage): draft.step(stage, body)
        for stage, body in _mapping(pipeline.get("stages")).items()
    }
    made.look += [
        f"`{key}` in dvc.yaml was not converted"
        for key in pipeline
        if key not in ("stages", "params", "metrics")
    ]
    if draft.inputs:
        made.recipe["inputs"] = draft.inputs
    made.recipe["steps"] = steps
    return made


class _Dvc:
    """A converter for a DVC pipeline. `inputs` grows as stages are converted."""

    def __init__(
        self,
        made: ImportedRecipe,
        base: str,
        params: Mapping[str, Value],
        is_folder: Callable[[str], bool],
        kind: Kind,
    ) -> None:
        self.inputs: Table = {}
        self._look, self._base, self._params, self._is_folder, self._kind = (
            made.look,
            base,
            params,
            is_folder,
            kind,
        )

    def step(self, stage: str, body: Value) -> Table:
        """Convert a stage to a step. `foreach` and `matrix` become a step matrix."""
        step: Table = {}
        axes: Table = {}
        if "foreach" in body:
            axes, body = self._foreach(stage, body["foreach"]), _mapping(body.get("do"))
        elif "matrix" in body:
            axes = {plain_name(axis): list(values) if isinstance(values, Sequence) and not isinstance(values, str) else self._text(str(values), {})
                    for axis, values in _mapping(body["matrix"]).items()}  # fmt: skip
        names = {"item": "matrix.item"} if "foreach" in body or "item" in axes else {}
        names |= {f"item.{axis}": f"matrix.{axis}" for axis in axes if axis != "item"}
        if axes:
            step["matrix"] = axes
        folder = _join(self._base, str(body.get("wdir", "")))
        commands = body.get("cmd", "")
        lines = [commands] if isinstance(commands, str) else [str(line) for line in commands]
        command = self._text("\n".join(lines), names)
        step["run"] = _inside(folder, command)

        def at(path: str) -> str:
            return self._text(_join(folder, path), names)

        code, deps = list[str](), list[str]()
        for path in (at(_path(each)) for each in _several(body.get("deps"))):
            is_code = path.endswith(".py") or self._kind(path) == "code"
            (code if is_code else deps).append(
                f"{path}/" if self._kind(path) in ("code", "folder") else path
            )
        if code:
            step["code"] = code
        if deps:
            step["deps"] = deps
        if files := self._files(stage, body, folder):
            step["files"] = files
        outputs = self._make_stage(stage, body, at)
        if outputs:
            step["outputs"] = outputs
        if body.get("always_changed"):
            step["cache"] = False
        if body.get("frozen"):
            self._look.append(
                f"{stage} is frozen, which recipes do not support; choose steps with `recipe run --only` or `--until`"
            )
        return step

    def _foreach(self, stage: str, values: Any) -> Table:
        if isinstance(values, Sequence) and all(
            isinstance(each, (str, int, float)) for each in values
        ):
            return {"item": self._text(values, {}) if isinstance(values, str) else list(values)}
        self._look.append(
            f"{stage}: the values of `foreach` are mappings; write each of their fields as an axis of `matrix`"
        )
        return {
            "item": list(values) if isinstance(values, Mapping) else [str(each) for each in values]
        }

    def _files(self, stage: str, body: Value, folder: str) -> Table:
        """Return the step's `files`: each parameter file, with the parameters of the stage only.

        Each parameter becomes an input.
        """
        files: Table = {}
        for each in _several(body.get("params")):
            for file, wanted in (
                each.items() if isinstance(each, Mapping) else (("params.yaml", [each]),)
            ):
                read = self._params.get(_join(folder, file))
                if read is None:
                    self._look.append(f"{stage} reads parameters from {file}, which does not exist")
                    continue
                target = files.setdefault(_join(folder, file), {})
                for dotted in wanted or list(read):
                    self._fill(stage, file, str(dotted), read, target)
        return files

    def _fill(self, stage: str, file: str, dotted: str, read: Value, target: Table) -> None:
        value: Any = read
        for part in dotted.split("."):
            if not isinstance(value, Mapping) or part not in value:
                self._look.append(f"{stage} reads {dotted} from {file}, which does not contain it")
                return
            value = value[part]
        if isinstance(value, Mapping):
            for part in value:
                self._fill(stage, file, f"{dotted}.{part}", read, target)
            return
        *above, last = dotted.split(".")
        for part in above:
            target = target.setdefault(part, {})
        target[last] = f"{{{{ inputs.{self._input(dotted, value)} }}}}"

    def _input(self, dotted: str, value: Any) -> str:
        name = plain_name(dotted)
        if isinstance(value, list):
            kinds = {_PLAIN.get(type(each), "object") for each in value} or {"string"}
            items = (
                kinds.pop()
                if len(kinds) == 1
                else "number"
                if kinds <= {"integer", "number"}
                else "string"
            )
            self.inputs[name] = {"type": "list", "items": items, "default": value}
        else:
            self.inputs[name] = {
                "type": _PLAIN.get(type(value), "string"),
                **({"required": False} if value is None else {"default": value}),
            }
        return name

    def _make_stage(self, stage: str, body: Value, at: Callable[[str], str]) -> Table:
        outputs: Table = {}
        for section in ("outs", "metrics", "plots"):
            for each in _several(body.get(section)):
                bare, how = (
                    _path(each),
                    _mapping(next(iter(each.values()), None)) if isinstance(each, Mapping) else {},
                )
                path = at(bare)
                folder = self._is_folder(path) or bare.endswith("/")
                outputs[
                    _unused_name(
                        plain_name(posixpath.splitext(posixpath.basename(bare.rstrip("/")))[0]),
                        outputs,
                    )
                ] = f"{path}/" if folder else path
                if how.get("persist"):
                    self._look.append(
                        f"{stage}: {bare} stays between runs (`persist`): make it a `state` if the program resumes from what is in it"
                    )
                if section == "metrics":
                    self._look.append(
                        f"{stage}: {bare} is an output; for its numbers append JSON lines to $RECIPE_METRICS and say `metrics: true`"
                    )
        return outputs

    def _text(self, text: str, names: Mapping[str, str]) -> str:
        """Replace each `${…}` in a text by a recipe template.

        Unknown names stay unchanged and add a note.
        """

        def put(found: re.Match[str]) -> str:
            dotted = found[1]
            if dotted in names:
                return f"{{{{ {names[dotted]} }}}}"
            for read in self._params.values():
                value: Any = read
                for part in dotted.split("."):
                    value = value.get(part) if isinstance(value, Mapping) else None
                if value is not None and not isinstance(value, Mapping):
                    return f"{{{{ inputs.{self._input(dotted, value)} }}}}"
            self._look.append(f"${{{dotted}}} is none of the parameters: put a value in its place")
            return found[0]

        return _VALUE.sub(put, text)


# -- SkyPilot -------------------------------------------------------------------------------------------------------------------------------------


_SKY_KEYS: Final = frozenset(
    {
        "name",
        "run",
        "workdir",
        "envs",
        "secrets",
        "file_mounts",
        "resources",
        "num_nodes",
        "setup",
    }
)
"""Keys of a SkyPilot task that are converted."""
_SKY_PLACES: Final = (
    "cloud",
    "infra",
    "region",
    "zone",
    "instance_type",
    "any_of",
    "ordered",
    "ports",
)
"""Keys of `resources` that choose a machine, which a recipe leaves to the command line."""


def from_sky(
    name: str, task: Value, base: str, code: Sequence[str], gpus: Iterable[str]
) -> ImportedRecipe:
    """Convert a SkyPilot task in the folder `base` to a recipe.

    `code` lists the code in its `workdir`, and `gpus` the known GPU models.
    """
    summary = f"What the task {task.get('name', name)} of SkyPilot runs"
    made = ImportedRecipe({"recipe": f"{name}@1", "summary": summary})
    script = _sky_script(str(task.get("run") or ""), made.look)
    step: Table = {"run": _inside(_join(base, str(task.get("workdir") or "")), script)}
    inputs: Table = {}
    if "workdir" in task:
        step["code"] = list(code)
        made.look.append(
            "`code` lists what `workdir` holds; keep what the step needs: each change of it runs the step again"
        )
    _add_environment(_mapping(task.get("envs")), step)
    _add_secrets(task.get("secrets") or (), step, inputs)
    _add_mounts(_mapping(task.get("file_mounts")), base, step, inputs, made.look)
    if resources := _sky_resources(_mapping(task.get("resources")), made.look, set(gpus)):
        step["resources"] = resources
    if int(task.get("num_nodes") or 1) > 1:
        step["nodes"] = int(task["num_nodes"])
    if task.get("setup"):
        made.recipe["setup"] = [str(task["setup"])]
        made.look.append(
            "`setup` runs once on each host; `python: {lock: …}` installs packages exactly, and is kept"
        )
    made.look += [f"`{key}` of the task was not converted" for key in task if key not in _SKY_KEYS]
    made.look.append(
        "declare the task's results under `outputs`; otherwise no results are copied back and no step is ever up to date"
    )
    if inputs:
        made.recipe["inputs"] = inputs
    made.recipe["steps"] = {plain_name(str(task.get("name") or "run")): step}
    return made


def _sky_script(script: str, look: list[str]) -> str:
    """Return the command with recipe's names of the environment variables of SkyPilot."""
    for theirs, ours in _SKY_NAMES.items():
        script = re.sub(rf"\b{theirs}\b", ours, script)
    for word in sorted(set(re.findall(r"\bSKYPILOT_\w+", script))):
        look.append(
            f"${word} is not set: see `nodes` and NODE_RANK, NNODES, RECIPE_NODES in docs/multi-node.md"
        )
    return script


def _add_environment(variables: Value, step: Table) -> None:
    """Add the environment variables of a task to the step."""
    fixed = {key: str(value) for key, value in variables.items() if value is not None}
    if fixed:
        step["env"] = fixed
    passed = [key for key, value in variables.items() if value is None]
    if passed:
        step["pass_env"] = passed


def _add_secrets(keys: Iterable[str], step: Table, inputs: Table) -> None:
    """Add the secrets of a task to the inputs and to the step."""
    names = []
    for key in keys:
        name = plain_name(key)
        inputs[name] = {"type": "secret", "env": key}
        names.append(name)
    if names:
        step["secrets"] = names


def _add_mounts(mounts: Value, base: str, step: Table, inputs: Table, look: list[str]) -> None:
    """Add mounted buckets to the inputs, and copied files to the dependencies of the step."""
    for target, source in mounts.items():
        address = str(source.get("source", "") if isinstance(source, Mapping) else source)
        if "://" in address:
            stem = posixpath.basename(str(target).rstrip("/"))
            input_name = _unused_name(plain_name(stem), inputs)
            inputs[input_name] = {"type": "dataset", "default": address}
            look.append(
                f"{target} was a mount of {address}: write {{{{ inputs.{input_name} }}}} in its place in the command"
            )
        elif address:
            step.setdefault("deps", []).append(_join(base, address))
            look.append(
                f"{target} was a copy of {address}, which a step finds at that path from its own folder"
            )


def _sky_resources(asked: Value, look: list[str], gpus: set[str]) -> Table:
    """Convert the `resources` of a task.  Append notes on the parts without a counterpart to `look`."""
    found: Table = {}
    if accelerators := _list_accelerators(asked.get("accelerators")):
        first, *others = accelerators
        if others:
            look.append(
                f"requesting {first}, the first of the accelerators {', '.join(accelerators)}"
            )
        found |= _sky_gpus(first, look, gpus)
    for theirs, ours, unit in (
        ("cpus", "cpus", ""),
        ("memory", "memory", "GB"),
        ("disk_size", "disk", "GB"),
    ):
        if number := re.match(r"\d+", str(asked.get(theirs, ""))):
            found[ours] = f"{number[0]}{unit}" if unit else int(number[0])
    if asked.get("use_spot"):
        look.append('to use spot machines, set market = "spot" in [drivers.NAME]')
    look += [
        f"`resources.{key}` was not converted: choose the machine with `--driver NAME` and `--where`"
        for key in _SKY_PLACES
        if key in asked
    ]
    if image := asked.get("image_id"):
        look.append(
            f"the image {image}: if the step requires it, write `image: {str(image).removeprefix('docker:')}`"
        )
    return found


def _list_accelerators(accelerators: object) -> list[str]:
    """Return the accelerators as MODEL or MODEL:COUNT, in the order of the file."""
    if isinstance(accelerators, Mapping):  # a set such as {A100:8, H100:8} has no values
        counted = accelerators.items()
        return [str(model) if count is None else f"{model}:{count}" for model, count in counted]
    if isinstance(accelerators, list):
        return [each for part in accelerators for each in _list_accelerators(part)]
    return [str(accelerators)] if accelerators else []


def _sky_gpus(accelerator: str, look: list[str], gpus: set[str]) -> Table:
    """Return the GPU resources for an accelerator such as `A100-80GB:8`.

    A known GPU with the whole name of the model comes before a GPU of the family.
    """
    model, _, count = accelerator.partition(":")
    if count and not re.fullmatch(r"\d+(\.\d+)?", count):
        look.append(f"{accelerator} has no valid number of GPUs: requesting 1")
        count = ""
    family, _, size = model.upper().partition("-")
    known = {each.upper().replace("RTX ", "RTX"): each for each in sorted(gpus)}
    name = known.get(model.upper().replace("-", " ")) or known.get(family)
    found: Table = {"gpus": max(1, math.ceil(float(count or 1))), "gpu": name or model}
    if re.fullmatch(r"\d+GB", size):
        found["gpu_memory"] = size
    if name is None:
        look.append(f"unknown GPU {model}: see the names in `recipe offers`")
    return found


# -- words ----------------------------------------------------------------------------------------------------------------------------------------


def _mapping(value: object) -> Value:
    return value if isinstance(value, Mapping) else {}


def _several(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _path(each: object) -> str:
    return str(next(iter(each))) if isinstance(each, Mapping) else str(each)


def _join(folder: str, path: str) -> str:
    joined = posixpath.normpath(posixpath.join(folder, path))
    return "" if joined == "." else joined


def _inside(folder: str, command: str) -> str:
    """Return a shell command that runs `command` in a subfolder of the attempt directory."""
    return f"(cd {folder}\n{command.rstrip()}\n)\n" if folder else command


def _unused_name(name: str, taken: Iterable[str]) -> str:
    there = set(taken)
    return next(
        each for each in (name, *(f"{name}_{n}" for n in range(2, 1000))) if each not in there
    )
