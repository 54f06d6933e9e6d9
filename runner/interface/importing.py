"""Convert a DVC pipeline or a SkyPilot task to a recipe, without reading files.

Formats: https://doc.dvc.org/user-guide/project-structure/dvcyaml-files,
https://docs.skypilot.co/en/latest/reference/yaml-spec.html
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
_SCALARS: Final = (str, int, float)
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


# -- DVC -------------------------------------------------------------------------------------------


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
    steps: Table = {}
    for stage, body in _mapping(pipeline.get("stages")).items():
        if isinstance(body, Mapping):
            name_of_step = unused_name(plain_name(str(stage)), steps)
            steps[name_of_step] = draft.step(str(stage), body)
        else:
            made.look.append(f"stage {stage} is not a mapping and was not converted")
    for key in pipeline:
        if key not in ("stages", "params", "metrics"):
            made.look.append(f"`{key}` in dvc.yaml was not converted")
    if draft.inputs:
        made.recipe["inputs"] = draft.inputs
    made.recipe["steps"] = steps
    return made


def parameter_files(pipeline: Value) -> set[str]:
    """Return the paths of the parameter files that a `dvc.yaml` reads, relative to it."""
    files = {"params.yaml"}
    for file in _several(pipeline.get("vars")):
        if isinstance(file, str):
            files.add(file)
    for body in _mapping(pipeline.get("stages")).values():
        stage = _mapping(body)
        files |= _parameter_files_of_stage(_mapping(stage.get("do", stage)))
    return files


def _parameter_files_of_stage(stage: Value) -> set[str]:
    """Return the default parameter file of a stage, and the files that its `params` name."""
    folder = _Section(stage, "", []).text("wdir")
    named = ["params.yaml"]
    for each in _several(stage.get("params")):
        named += map(str, _mapping(each))
    return {posixpath.join(folder, file) for file in named}


def folders_of_lock(lock: Value) -> set[str]:
    """Return the outputs that are directories, according to a `dvc.lock`."""
    folders = set()
    for stage in _mapping(lock.get("stages")).values():
        for row in _several(_mapping(stage).get("outs")):
            output = _mapping(row)
            if "path" in output and str(output.get("md5", "")).endswith(".dir"):
                folders.add(str(output["path"]))
    return folders


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
        self._look = made.look
        self._base = base
        self._params = params
        self._is_folder = is_folder
        self._kind = kind

    def step(self, stage: str, body: Value) -> Table:
        """Convert a stage to a step. `foreach` and `matrix` become a step matrix."""
        step: Table = {}
        axes = self._axes(stage, body)
        if axes:
            step["matrix"] = axes
        if "foreach" in body:
            body = _mapping(body.get("do"))
        section = _Section(body, stage, self._look)
        names = _names_of_axes(axes)
        folder = _join(self._base, section.text("wdir"))
        step["run"] = _inside(folder, self._text(self._command(stage, section), names))

        def at(path: str) -> str:
            return self._text(_join(folder, path), names)

        converted = self._code_and_deps(section, at)
        converted["files"] = self._files(stage, section, folder)
        converted["outputs"] = self._outputs(stage, section, at)
        for key, value in converted.items():
            if value:
                step[key] = value
        if body.get("always_changed"):
            step["cache"] = False
        if body.get("frozen"):
            self._look.append(
                f"{stage} is frozen, which recipes do not support; choose steps with `recipe run --only` or `--until`"
            )
        return step

    def _axes(self, stage: str, body: Value) -> Table:
        """Return the axes of the step matrix; empty for a stage without a loop."""
        if "foreach" in body:
            return self._foreach(stage, body["foreach"])
        axes: Table = {}
        matrix = _Section(body, stage, self._look).mapping("matrix")
        for axis, values in matrix.items():
            if isinstance(values, list):
                axes[plain_name(str(axis))] = list(values)
            elif isinstance(values, _SCALARS):
                axes[plain_name(str(axis))] = self._text(str(values), {})
            else:
                self._look.append(_describe_unconverted(axis, f"the matrix of {stage}", "a list"))
        return axes

    def _command(self, stage: str, section: _Section) -> str:
        """Return the `cmd` of a stage, a text or a list, as one text."""
        if section.values.get("cmd") is None:
            self._look.append(f"{stage} has no `cmd`: write the command into `run`")
            return ""
        return "\n".join(section.texts("cmd", "a text"))

    def _code_and_deps(self, section: _Section, at: Callable[[str], str]) -> Table:
        """Return the dependencies of a stage: Python files and folders under `code`, others under
        `deps`.
        """
        code: list[str] = []
        deps: list[str] = []
        for bare, _ in section.paths("deps"):
            path = at(bare)
            kind = self._kind(path)
            shown = f"{path}/" if kind in ("code", "folder") else path
            if path.endswith(".py") or kind == "code":
                code.append(shown)
            else:
                deps.append(shown)
        return {"code": code, "deps": deps}

    def _foreach(self, stage: str, values: Any) -> Table:
        if isinstance(values, str):
            return {"item": self._text(values, {})}
        if not isinstance(values, list | Mapping):
            self._look.append(_describe_unconverted("foreach", stage, "a list or a mapping"))
            return {}
        if isinstance(values, list) and all(isinstance(each, _SCALARS) for each in values):
            return {"item": list(values)}
        self._look.append(
            f"{stage}: the values of `foreach` are mappings; write each of their fields as an axis of `matrix`"
        )
        if isinstance(values, Mapping):
            return {"item": list(values)}
        return {"item": [str(each) for each in values]}

    def _files(self, stage: str, section: _Section, folder: str) -> Table:
        """Return the step's `files`: each parameter file, with the parameters of the stage only.

        Each parameter becomes an input.
        """
        files: Table = {}
        for file, wanted in section.parameters():
            path = _join(folder, file)
            read = self._params.get(path)
            if read is None:
                self._look.append(f"{stage} reads parameters from {file}, which does not exist")
                continue
            target = files.setdefault(path, {})
            for dotted in wanted or map(str, read):
                self._fill(stage, file, dotted, read, target)
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
        """Add an input for a parameter, and return the input's name."""
        name = plain_name(dotted)
        if isinstance(value, list):
            self.inputs[name] = {"type": "list", "items": _type_of_items(value), "default": value}
        elif value is None:
            self.inputs[name] = {"type": "string", "required": False}
        else:
            self.inputs[name] = {"type": _PLAIN.get(type(value), "string"), "default": value}
        return name

    def _outputs(self, stage: str, section: _Section, at: Callable[[str], str]) -> Table:
        """Return the outputs, metrics and plots of a stage as outputs of the step."""
        outputs: Table = {}
        for key in ("outs", "metrics", "plots"):
            for bare, options in section.paths(key):
                path = at(bare)
                is_folder = self._is_folder(path) or bare.endswith("/")
                name = unused_name(_name_of_file(bare), outputs)
                outputs[name] = f"{path}/" if is_folder else path
                if options.get("persist"):
                    self._look.append(
                        f"{stage}: {bare} stays between runs (`persist`): declare it as `state` if the program resumes from its content"
                    )
                if key == "metrics":
                    self._look.append(
                        f"{stage}: {bare} is an output; to record its metrics, append JSON lines to $RECIPE_METRICS and set `metrics: true`"
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
            value = self._parameter(dotted)
            if value is not None:
                return f"{{{{ inputs.{self._input(dotted, value)} }}}}"
            self._look.append(f"${{{dotted}}} is not a parameter: replace it by a value")
            return found[0]

        return _VALUE.sub(put, text)

    def _parameter(self, dotted: str) -> Any:
        """Return a single value or a list from the parameter files; None if it is missing."""
        for content in self._params.values():
            value: Any = content
            for part in dotted.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None and not isinstance(value, Mapping):
                return value
        return None


def _names_of_axes(axes: Table) -> dict[str, str]:
    """Return recipe's name of each loop variable of DVC, such as `item` or `item.lr`."""
    names = {}
    for axis in axes:
        # The axis of a `foreach` over plain values is the loop variable itself.
        loop_variable = "item" if axis == "item" else f"item.{axis}"
        names[loop_variable] = f"matrix.{axis}"
    return names


def _type_of_items(values: Sequence[object]) -> str:
    """Return the type of the items of a list; `string` for an empty list or mixed types."""
    types = {_PLAIN.get(type(each), "object") for each in values} or {"string"}
    if len(types) == 1:
        return types.pop()
    return "number" if types == {"integer", "number"} else "string"


def _name_of_file(path: str) -> str:
    """Return a name for an output from its file name without the extension."""
    stem, _ = posixpath.splitext(posixpath.basename(path.rstrip("/")))
    return plain_name(stem)


# -- SkyPilot --------------------------------------------------------------------------------------


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
    made = ImportedRecipe({"recipe": f"{name}@1", "summary": ""})
    section = _Section(task, "the task", made.look)
    task_name = section.text("name")
    made.recipe["summary"] = f"What the task {task_name or name} of SkyPilot runs"
    script = _sky_script(section.text("run"), made.look)
    workdir = section.text("workdir")
    step: Table = {"run": _inside(_join(base, workdir), script)}
    inputs: Table = {}
    if workdir:
        step["code"] = list(code)
        made.look.append(
            "`code` lists all files of `workdir`: keep only the files that the step needs, because each change of a listed file reruns the step"
        )
    _add_environment(section.section("envs"), step)
    _add_secrets(section.names("secrets"), step, inputs)
    _add_mounts(section.mapping("file_mounts"), base, step, inputs, made.look)
    resources = _sky_resources(section.section("resources"), made.look, set(gpus))
    if resources:
        step["resources"] = resources
    nodes = section.number("num_nodes")
    if nodes is not None and nodes > 1:
        step["nodes"] = nodes
    setup = section.text("setup")
    if setup:
        made.recipe["setup"] = [setup]
        made.look.append(
            "`setup` runs once on each host; to install exact package versions once, use `python: {lock: …}` instead"
        )
    for key in task:
        if key not in _SKY_KEYS:
            made.look.append(f"`{key}` of the task was not converted")
    made.look.append(
        "declare the task's results under `outputs`; otherwise no results are copied back and no step is ever up to date"
    )
    if inputs:
        made.recipe["inputs"] = inputs
    made.recipe["steps"] = {plain_name(task_name or "run"): step}
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


def _add_environment(variables: _Section, step: Table) -> None:
    """Add the environment variables of a task to the step."""
    fixed = {}
    passed = []
    for key, value in variables.values.items():
        if value is None:
            passed.append(str(key))
        elif variables.has_text(key):
            fixed[str(key)] = str(value)
    if fixed:
        step["env"] = fixed
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
        if isinstance(source, Mapping):
            source = source.get("source")
        if not isinstance(source, str) or not source:
            look.append(f"`{target}` of `file_mounts` has no source and was not converted")
            continue
        address = source
        if "://" in address:
            stem = posixpath.basename(str(target).rstrip("/"))
            input_name = unused_name(plain_name(stem), inputs)
            inputs[input_name] = {"type": "dataset", "default": address}
            look.append(
                f"{target} was a mount of {address}: write {{{{ inputs.{input_name} }}}} instead of {target} in the command"
            )
        else:
            step.setdefault("deps", []).append(_join(base, address))
            look.append(
                f"{target} was a copy of {address}: a step finds this file at that path below its working directory"
            )


def _sky_resources(asked: _Section, look: list[str], gpus: set[str]) -> Table:
    """Convert the `resources` of a task.

    Append notes on the parts without a counterpart to `look`.
    """
    found: Table = {}
    accelerators = _list_accelerators(asked.values.get("accelerators"))
    if accelerators:
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
        number = asked.number(theirs)
        if number is not None:
            found[ours] = f"{number}{unit}" if unit else number
    if asked.values.get("use_spot"):
        look.append('to use spot machines, set market = "spot" in [drivers.NAME]')
    for key in _SKY_PLACES:
        if key in asked.values:
            look.append(
                f"`resources.{key}` was not converted: choose the machine with `--driver NAME` and `--where`"
            )
    image = asked.text("image_id")
    if image:
        name = image.removeprefix("docker:")
        look.append(f"the image {image}: if the step requires it, write `image: {name}`")
    return found


def _list_accelerators(accelerators: object) -> list[str]:
    """Return the accelerators as MODEL or MODEL:COUNT, in the order of the file."""
    found: list[str] = []
    if isinstance(accelerators, Mapping):
        for model, count in accelerators.items():
            # A set such as {A100:8, H100:8} is a mapping without values.
            accelerator = str(model) if count is None else f"{model}:{count}"
            found.append(accelerator)
    elif isinstance(accelerators, list):
        for part in accelerators:
            found += _list_accelerators(part)
    elif accelerators:
        found.append(str(accelerators))
    return found


def _sky_gpus(accelerator: str, look: list[str], gpus: set[str]) -> Table:
    """Return the GPU resources for an accelerator such as `A100-80GB:8`.

    A known GPU with the whole name of the model comes before a GPU of the family.
    """
    model, _, count = accelerator.partition(":")
    if count and not re.fullmatch(r"\d{1,6}(\.\d+)?", count):
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


# -- words -----------------------------------------------------------------------------------------


class _Section:
    """A mapping in the file of another tool. Values of a wrong type are skipped with a note.

    A missing value and null are the same, without a note: an empty text, list or mapping.
    """

    def __init__(self, values: Value, name: str, look: list[str]) -> None:
        self.values = values
        self._name = name
        self._look = look

    def has_text(self, key: str) -> bool:
        """Return True for a text, number or boolean. Another value adds a note."""
        if isinstance(self.values[key], _SCALARS):
            return True
        self._note(key, "a text")
        return False

    def text(self, key: str) -> str:
        """Return a text, number or boolean as text."""
        if self.values.get(key) is None or not self.has_text(key):
            return ""
        return str(self.values[key])

    def texts(self, key: str, expected: str) -> list[str]:
        """Return the texts of a list, or the only text."""
        found = _several(self.values.get(key))
        if not all(isinstance(each, _SCALARS) for each in found):
            self._note(key, expected)
            return []
        return [str(each) for each in found]

    def number(self, key: str) -> int | None:
        """Return the whole number at the start of a value such as `8` or `16+`."""
        value = self.values.get(key)
        if value is None:
            return None
        number = re.match(r"\d{1,15}(?!\d)", str(value))
        if number is None:
            self._note(key, "a number")
            return None
        return int(number[0])

    def mapping(self, key: str) -> Value:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._note(key, "a mapping")
        return _mapping(value)

    def section(self, key: str) -> _Section:
        return _Section(self.mapping(key), f"`{key}`", self._look)

    def names(self, key: str) -> list[str]:
        """Return the keys of a mapping, or the texts of a list."""
        value = self.values.get(key)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return value
        return [str(name) for name in self.mapping(key)]

    def paths(self, key: str) -> list[tuple[str, Value]]:
        """Return paths and their options, of a list of `PATH` and `PATH: {OPTION: VALUE}`."""
        found: list[tuple[str, Value]] = []
        for each in _several(self.values.get(key)):
            if isinstance(each, Mapping):
                found += [(str(path), _mapping(options)) for path, options in each.items()]
            elif isinstance(each, _SCALARS):
                found.append((str(each), {}))
            else:
                self._note(key, "a list of paths")
        return found

    def parameters(self) -> list[tuple[str, list[str]]]:
        """Return parameter files with the names of their parameters; no names for a whole file."""
        found: list[tuple[str, list[str]]] = []
        for each in _several(self.values.get("params")):
            if isinstance(each, Mapping):
                by_file = _Section(each, self._name, self._look)
                found += [(str(file), by_file.texts(file, "a list of names")) for file in each]
            elif isinstance(each, _SCALARS):
                found.append(("params.yaml", [str(each)]))
            else:
                self._note("params", "a list of names")
        return found

    def _note(self, key: str, expected: str) -> None:
        self._look.append(_describe_unconverted(key, self._name, expected))


def _describe_unconverted(key: str, of: str, expected: str) -> str:
    return f"`{key}` of {of} is not {expected} and was not converted"


def _mapping(value: object) -> Value:
    return value if isinstance(value, Mapping) else {}


def _several(value: object) -> Sequence[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _join(folder: str, path: str) -> str:
    joined = posixpath.normpath(posixpath.join(folder, path))
    return "" if joined == "." else joined


def _inside(folder: str, command: str) -> str:
    """Return a shell command that runs `command` in a subfolder of the attempt directory."""
    return f"(cd {folder}\n{command.rstrip()}\n)\n" if folder else command


def unused_name(name: str, taken: Iterable[str]) -> str:
    """Return a name, with a number if it is taken."""
    there = set(taken)
    if name not in there:
        return name
    numbered = (f"{name}_{n}" for n in range(2, 1000))
    return next(each for each in numbered if each not in there)
