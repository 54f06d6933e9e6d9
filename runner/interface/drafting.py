"""Draft a one-step recipe from the facts about a training script.

Opens no files. A callback tells which paths exist.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ..language.imports import EntryPoint
from .scripts import Option, Script

_RESERVED: Final = frozenset({"inputs", "steps", "outputs", "state", "matrix", "fixtures", "run", "step", "node", "nodes", "host"}) | {
    "resources", "limits", "image", "python", "env", "preset"
}  # fmt: skip
_LENGTH: Final = re.compile(
    r"(max_|num_|n_|total_)?(train_)?(steps|iters|iterations|epochs)|num_train_epochs"
)
_HARMLESS: Final = frozenset(
    {
        "workers",
        "num_workers",
        "verbose",
        "quiet",
        "log_level",
        "progress",
        "log_every",
        "print_every",
    }
)
_PLAIN: Final = re.compile(r"[A-Za-z./][A-Za-z0-9._/-]*")
_PHRASE: Final = re.compile(r"[A-Za-z][A-Za-z0-9 ./()'-]*[A-Za-z0-9)]")
_YAML_WORDS: Final = frozenset({"yes", "no", "on", "off", "true", "false", "null", "y", "n"})


@dataclass(slots=True)
class RecipeDraft:
    """A drafted recipe file.

    `look` lists parts to review, and `needed` names inputs that the user must set. `smaller` has
    the training lengths of the smoke preset, as `NAME=VALUE`.
    """

    text: str = ""
    look: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    smaller: list[str] = field(default_factory=list)


def draft(
    name: str,
    path: str,
    script: Script,
    code: Sequence[str],
    shown: str,
    kind: Callable[[str], str],
    start: EntryPoint | None = None,
    folders: Sequence[str] = (),
) -> RecipeDraft:
    """Return a recipe called `name` with one step that runs the script at `path`.

    All paths are relative to the workspace root. `code` lists the files that the step needs, and
    `shown` is the path of the recipe file in its comments. `kind` returns "file", "folder" or "",
    for a path. `start` is the script or module to run, `path` by default. `folders` go on
    PYTHONPATH.
    """
    options = tuple(_correct_guess(option, kind) for option in script.options)
    script = replace(script, options=options)
    names = _names(script)
    made = RecipeDraft(look=list(script.notes))
    inputs = []
    for option in options:
        if option.role in ("value", "input"):
            inputs.append(_add_input(made, option, names[option.name], script, kind))
    outputs = [*_outputs(script, names), *_literal_outputs(script, names)]
    made.look += _review_notes(path, script, names, has_outputs=bool(outputs))
    lines = [
        *_header(name, path, script, shown, made.look),
        *_inputs_section(shown, inputs),
        *_presets_section(made.smaller),
        "# Requirements of the machine, if there are any: resources: {gpus: 1, gpu_memory: 24GB, memory: 32GB, disk: 50GB}",
        "# Pinned packages, for the same environment on every machine: python: {lock: requirements.lock}",
        "",
        "steps:",
        "  train:",
        *_command(start or EntryPoint("script", path), script, names),
        f"    code: [{', '.join(map(_yaml, code))}]",
        *_python_path(folders),
        *_files_and_metrics(script, names, kind, outputs),
    ]
    made.text = "\n".join(lines) + "\n"
    return made


def _header(
    name: str, path: str, script: Script, shown: str, notes: Sequence[str]
) -> Iterator[str]:
    """Yield the origin of the recipe, the review notes, the name and the summary."""
    yield f"# Drafted from {path}, by reading its source code.  Review the recipe, and check it with `recipe validate {shown}`."
    for note in notes:
        yield f"# Look at: {note}"
    yield f"recipe: {name}@1"
    summary = script.doc.rstrip(".") or f"What {path} trains"
    yield f"summary: {_yaml(summary)}"
    yield ""


def _inputs_section(shown: str, inputs: Sequence[str]) -> Iterator[str]:
    if inputs:
        yield f"# Set an input with `recipe run {shown} NAME=VALUE`."
        yield "inputs:"
        yield from inputs
        yield ""


def _presets_section(lengths: Sequence[str]) -> Iterator[str]:
    """Yield the smoke preset with short training lengths, given as `NAME=VALUE`."""
    if lengths:
        yield "presets:"
        yield "  # A short run of all steps, to test every change.  A minute on two CPU cores is a good length."
        yield "  smoke:"
        for length in lengths:
            yield f"    {length.replace('=', ': ')}"
        yield ""


def _python_path(folders: Sequence[str]) -> Iterator[str]:
    if folders:
        value = ":".join(folder or "." for folder in folders)
        yield f"    env: {{PYTHONPATH: {_yaml(value)}}}"


def _add_input(
    made: RecipeDraft, option: Option, name: str, script: Script, kind: Callable[[str], str]
) -> str:
    """Return the line of an input, and add its review notes and smoke value to the draft."""
    default = _default(option, kind)
    if default is None and _is_required(option):
        made.needed.append(name)
    if _continues_training(option, script):
        made.look.append(
            f"more {name} resume from the last checkpoint: remove `continues` if the learning rate depends on it"
        )
    few = _smoke_length(option, default)
    if few is not None:
        made.smaller.append(f"{name}={few}")
    return f"  {name}: {_input(option, default, script, kind)}"


def _review_notes(
    path: str, script: Script, names: dict[str, str], *, has_outputs: bool
) -> Iterator[str]:
    """Yield the notes on outputs, checkpoints and metrics that the user must add or check."""
    for option in script.options:
        if option.role == "off":
            yield _note_disabled_output(option, names)
    for unwritten in script.unwritten:
        yield f"{unwritten} is not written by default: if you enable it, add it to `outputs`"
    roles = {option.role for option in script.options}
    if "resume" in roles and not _resumable_state(script):
        yield "the script can resume, but no checkpoint directory with names such as step-10.pt was found: see docs/state.md"
    elif "state" not in roles:
        yield "no checkpointing found: an interrupted run starts over; see docs/state.md"
    if not has_outputs:
        yield "no written files were found: declare them under `outputs`, and pass the path as {{ outputs.NAME }}"
    if not script.metrics:
        yield 'no printed loss was found: append {"step": 10, "loss": 2.3} lines to $RECIPE_METRICS, and set `metrics: true`'


def _files_and_metrics(
    script: Script, names: dict[str, str], kind: Callable[[str], str], outputs: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of the step from `deps` to `metrics`."""
    read_paths = [path.rstrip("/") for path in script.reads]
    deps = [_yaml(path) for path in read_paths if kind(path)]
    if deps:
        yield f"    deps: [{', '.join(deps)}]"
    states = [option for option in script.options if option.role == "state"]
    yield from _section("state", [_state(option, names) for option in states])
    yield from _section("outputs", outputs)
    yield from _metrics(script)


def _section(key: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a key of the step; nothing for a section without lines."""
    if lines:
        yield f"    {key}:"
        yield from lines


def _metrics(script: Script) -> Iterator[str]:
    """Yield the line of `metrics`, if the script reports or prints metrics."""
    if script.metrics is True:
        yield "    metrics: true"
    elif script.metrics:
        yield f"    metrics: {{pattern: {_single_quoted(str(script.metrics))}}}"


def _correct_guess(option: Option, kind: Callable[[str], str]) -> Option:
    """Return the option as a plain value if its default is a word and not an existing path.

    Applies only to options guessed to be data by their name. Other options are unchanged.
    """
    if not option.guessed or not option.default:
        return option
    value = ast.literal_eval(option.default)
    is_word = isinstance(value, str) and re.fullmatch(r"[\w-]+", value) is not None
    return replace(option, role="value") if is_word and not kind(value) else option


def _note_disabled_output(option: Option, names: dict[str, str]) -> str:
    """Return a note on how to enable an output option that is off by default."""
    flag, name = option.flag or option.name, names[option.name]
    return (
        f"{flag} is off by default; to enable it and keep its output, add "
        f'`- [{flag}, "{{{{ outputs.{name} }}}}"]` to run and `{name}: PATH` to outputs'
    )


# -- names -----------------------------------------------------------------------------------------


def _names(script: Script) -> dict[str, str]:
    """Map each option to its name in the recipe."""
    found: dict[str, str] = {}
    for option in script.options:
        name = _recipe_name(option)
        while name in found.values():
            name += "_2"
        found[option.name] = name
    return found


def _recipe_name(option: Option) -> str:
    """Return an option's name in the recipe, without a suffix such as `_dir` for written paths."""
    word = option.name
    if option.role in ("output", "state", "off"):
        word = re.sub(r"_(dir|path|file|folder)$", "", word.lower())
    name = plain_name(word)
    if name == "steps_value":
        return "max_steps"
    if name == "outputs_value" and option.role == "output":
        return "model"
    return name


def plain_name(word: str) -> str:
    """Convert a word to a valid name for an input, step or output."""
    name = re.sub(r"[^a-z0-9_]+", "_", word.lower()).strip("_") or "value"
    if name in _RESERVED:
        return f"{name}_value"
    return name if name[0].isalpha() else f"n{name}"


# -- inputs ----------------------------------------------------------------------------------------


def _input(option: Option, default: str | None, script: Script, kind: Callable[[str], str]) -> str:
    """Return the declaration of an input as a YAML mapping."""
    words = _type_words(option, kind)
    if default is not None:
        words.append(f"default: {default}")
    elif not _is_required(option):
        words.append("required: false")
    if _continues_training(option, script):
        words.append("continues: true")
    if option.name in _HARMLESS:
        words.append("key: false")
    if option.help:
        words.append(f"doc: {json.dumps(option.help, ensure_ascii=False)}")
    return f"{{{', '.join(words)}}}"


def _is_required(option: Option) -> bool:
    """Return True if the recipe cannot leave the option out without a default of its own."""
    # The script would read its own default path, which does not exist.
    has_own_path = option.role == "input" and bool(option.default)
    return option.required or has_own_path


def _type_words(option: Option, kind: Callable[[str], str]) -> list[str]:
    """Return the keys for the type of an input."""
    if option.choices:
        return ["type: choice", f"choices: [{', '.join(map(_text, option.choices))}]"]
    if option.role == "input" and not _hub_word(option, kind):
        if option.model:
            return ["type: model"]
        if option.folder:
            return ["type: dataset"]
        return ["type: file"]
    if option.many:
        return ["type: list", f"items: {option.type}"]
    return [f"type: {option.type}"]


def _default(option: Option, kind: Callable[[str], str]) -> str | None:
    """Return the default as YAML; None without a default that a recipe can express."""
    if not option.default:
        return None
    value = ast.literal_eval(option.default)
    is_hub_name = option.model and not kind(str(value))
    if option.role == "input" and not is_hub_name:
        return _default_path(value, kind)
    return _default_value(option, value)


def _default_value(option: Option, value: object) -> str:
    """Return a default that is not a path as YAML."""
    if option.choices:
        return _text(str(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if option.many and isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_list_item, value))}]"
    if option.type in ("integer", "number"):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    return _text(json.dumps(value))


def _list_item(value: object) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _default_path(value: object, kind: Callable[[str], str]) -> str | None:
    """Return a default path as YAML, relative paths with `./`; None for a missing path."""
    if not isinstance(value, str) or not kind(value):
        return None
    # Without `./`, the path of a model may look like the name of a model on the Hub.
    return _yaml(value) if value.startswith(("./", "/")) else _yaml(f"./{value}")


def _continues_training(option: Option, script: Script) -> bool:
    return _is_length(option) and _resumable_state(script) != ""


def _is_length(option: Option) -> bool:
    """Return True for the training length, such as `max_steps` or `epochs`."""
    return option.type == "integer" and _LENGTH.fullmatch(option.name) is not None


def _hub_word(option: Option, kind: Callable[[str], str]) -> bool:
    """Return True if the default model is one word, such as gpt2, and not an existing path.

    Such a word is no URL, so the script itself must find the model.
    """
    if not option.model or not option.default:
        return False
    value = ast.literal_eval(option.default)
    is_word = isinstance(value, str) and "/" not in value
    return is_word and not kind(value)


def _smoke_length(option: Option, default: str | None) -> int | None:
    """Return the smoke preset's value for a training length: at most 20 steps or 2 epochs.

    Returns None for options other than a training length.
    """
    if not _is_length(option):
        return None
    few = 2 if "epoch" in option.name else 20
    if default is not None and default.isdecimal():
        return min(few, int(default))
    return few


# -- the step --------------------------------------------------------------------------------------


def _command(start: EntryPoint, script: Script, names: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the step's command."""
    options = _passed_options(script)
    has_accelerate = any(name.partition(".")[0] == "accelerate" for name in script.imports)
    if has_accelerate and all(_fits_accelerate(option) for option in options):
        yield "    # Started by accelerate on all devices.  A flag whose value is null or false is omitted."
        yield f"    accelerate:\n      {start.kind}: {_yaml(start.name)}"
        if options:
            yield "      args:"
        for option in options:
            yield f"        {option.flag[2:]}: {_quote(_value(option, names, script))}"
        return
    program = ["python"]
    if start.kind == "module":
        program.append("-m")
    program += [_yaml(start.name), *script.words]
    yield "    # A nested list is dropped if an item in it is null: an optional flag."
    yield "    run:"
    yield f"      - [{', '.join(program)}]"
    # Positional arguments come first, because an option with several values would consume them.
    for option in sorted(options, key=lambda each: bool(each.flag)):
        yield f"      - {_argument(option, names, script)}"


def _passed_options(script: Script) -> list[Option]:
    """Return the options of the step's command."""
    left_out = {"off"}
    if not _resumable_state(script):
        left_out.add("resume")
    return [option for option in script.options if option.role not in left_out]


def _fits_accelerate(option: Option) -> bool:
    """Return True if `accelerate` args can express the option: a long flag without a negative."""
    return option.flag.startswith("--") and not option.negative


def _argument(option: Option, names: dict[str, str], script: Script) -> str:
    """Return an option's item of `run` as YAML."""
    value = _value(option, names, script)
    input_name = f"inputs.{names[option.name]}"
    has_equals_sign = re.fullmatch("--.*=", option.flag) is not None
    if option.type == "boolean" and has_equals_sign:
        return _quote(f"{option.flag}{{{{ 'True' if {input_name} else 'False' }}}}")
    if option.type == "number" and has_equals_sign:
        # The division writes 1 as 1.0, because such scripts accept only floats.
        return _quote(f"{option.flag}{{{{ {input_name} / 1 }}}}")
    if option.flag.endswith("="):
        return _quote(option.flag + value)
    if option.type == "boolean":
        negative = f"'{option.negative}'" if option.negative else "none"
        return _quote(f"{{{{ '{option.flag}' if {input_name} else {negative} }}}}")
    if option.flag:
        return f"[{option.flag}, {_quote(value)}]"
    return _quote(value)


def _value(option: Option, names: dict[str, str], script: Script) -> str:
    if option.role == "resume":
        return f"{{{{ state.{_resumable_state(script, names)}.latest }}}}"
    head = {"output": "outputs", "state": "state"}.get(option.role, "inputs")
    return f"{{{{ {head}.{names[option.name]} }}}}"


def _resumable_state(script: Script, names: dict[str, str] | None = None) -> str:
    """Return the name of the state option with a checkpoint file pattern, as in `names` if given.

    Returns an empty text without such an option, or if the script cannot resume.
    """
    if not any(option.role == "resume" for option in script.options):
        return ""
    for option in script.options:
        if option.role == "state" and option.pattern:
            return names[option.name] if names else option.name
    return ""


def _state(option: Option, names: dict[str, str]) -> str:
    if not option.pattern:
        return f"      {names[option.name]}: {{every: 5m}}"
    return f"      {names[option.name]}: {{checkpoint: {json.dumps(option.pattern)}, every: 5m, keep: 2}}"


def _outputs(script: Script, names: dict[str, str]) -> Iterator[str]:
    for option in script.options:
        if option.role != "output":
            continue
        value = ast.literal_eval(option.default) if option.default else None
        # An output is a path in the attempt directory: a default such as `../out` becomes `out`.
        place = posixpath.normpath(value).lstrip("/.") if isinstance(value, str) else ""
        name = names[option.name]
        yield _output_line(name, place or name, is_folder=option.folder)


def _literal_outputs(script: Script, names: dict[str, str]) -> Iterator[str]:
    """Yield the output lines of literal paths inside the workspace."""
    taken = set(names.values())
    for path in script.writes:
        if not _is_output_path(path, script.writes):
            continue
        place = posixpath.normpath(path)
        name = _output_name(place)
        if not name[:1].isalpha() or name in taken:
            name = f"file_{name}"
        taken.add(name)
        yield _output_line(name, place, is_folder=path.endswith("/"))


def _is_output_path(path: str, written: Sequence[str]) -> bool:
    """Return True for a path inside the workspace and outside all other written directories."""
    place = posixpath.normpath(path)
    if place.startswith(("/", "..")):
        return False
    other_folders = [each for each in written if each.endswith("/") and each != path]
    return not place.startswith(tuple(other_folders))


def _output_line(name: str, place: str, *, is_folder: bool) -> str:
    path = f"{place}/" if is_folder else place
    return f"      {name}: {_yaml(path)}"


def _output_name(path: str) -> str:
    """Return the file name without its extension, in the characters of an output name."""
    base = posixpath.basename(path).lower()
    return re.sub(r"[^a-z0-9_]+", "_", base.rpartition(".")[0] or base).strip("_")


# -- YAML ------------------------------------------------------------------------------------------


def _yaml(text: str) -> str:
    """Return a YAML scalar for a text, unquoted if that is safe."""
    is_safe = _PLAIN.fullmatch(text) or _PHRASE.fullmatch(text)
    return text if is_safe and text.lower() not in _YAML_WORDS else _quote(text)


def _text(text: str) -> str:
    """Return a YAML text; only a single word is unquoted."""
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text)
    return text if is_word and text.lower() not in _YAML_WORDS else _quote(text)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _single_quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
