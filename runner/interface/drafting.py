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

from ..language.imports import Start
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
_YAML_WORDS: Final = frozenset({"yes", "no", "on", "off", "true", "false", "null", "y", "n"})


@dataclass(slots=True)
class Draft:
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
    start: Start | None = None,
    folders: Sequence[str] = (),
) -> Draft:
    """Return a recipe called `name` with one step that runs the script at `path`.

    All paths are relative to the workspace root. `code` lists the files that the step needs, and
    `shown` is the path of the recipe file in its comments. `kind` returns "file", "folder" or "",
    for a path. `start` is the script or module to run, `path` by default. `folders` go on
    PYTHONPATH.
    """
    script = replace(script, options=tuple(_as_data(option, kind) for option in script.options))
    made = Draft(look=list(script.notes))
    inputs: list[str] = []
    smoke: list[str] = []
    names = _names(script)
    for option in script.options:
        if option.role in ("value", "input"):
            inputs.append(
                f"  {names[option.name]}: {_input(option, names[option.name], script, kind)}"
            )
            default = _default(option, kind)
            if default is None and (option.required or (option.role == "input" and option.default)):
                made.needed.append(names[option.name])
            if _continues(option, script):
                made.look.append(
                    f"more {names[option.name]} resume from the last checkpoint: remove `continues` if the learning rate depends on it"
                )
            if (few := _fewer(option, default)) is not None:
                smoke.append(f"    {names[option.name]}: {few}")
                made.smaller.append(f"{names[option.name]}={few}")
    made.look += [_left_off(option, names) for option in script.options if option.role == "off"]
    made.look += [
        f"{path} is not written by default: if you enable it, add it to `outputs`"
        for path in script.unwritten
    ]
    state = [option for option in script.options if option.role == "state"]
    resume = [option for option in script.options if option.role == "resume" and _latest(script)]
    if any(option.role == "resume" for option in script.options) and not resume:
        made.look.append(
            "the script can resume, but no checkpoint directory with names such as step-10.pt was found: see docs/state.md"
        )
    elif not state:
        made.look.append(
            "no checkpointing found: an interrupted run starts over; see docs/state.md"
        )
    outputs = [*_outputs(script, names), *_literal_outputs(script, names)]
    if not outputs:
        made.look.append(
            "no written files were found: declare them under `outputs`, and pass the path as {{ outputs.NAME }}"
        )
    if not script.metrics:
        made.look.append(
            'no printed loss was found: append {"step": 10, "loss": 2.3} lines to $RECIPE_METRICS, and set `metrics: true`'
        )
    deps = [each for each in script.reads if kind(each.rstrip("/"))]
    lines = [
        f"# Written from {path}: what it takes, reads and writes was read from its text.  Look it over; `recipe validate {shown}` checks it.",
        *(f"# Look at: {line}" for line in made.look),
        f"recipe: {name}@1",
        f"summary: {_yaml(script.doc.rstrip('.') or f'What {path} trains')}",
        "",
    ]
    if inputs:
        lines += [
            f"# What a caller gives: `recipe run {shown} NAME=VALUE`.",
            "inputs:",
            *inputs,
            "",
        ]
    if smoke:
        lines += [
            "presets:",
            "  # The whole of it, for real, and little of it: what you run after every change.  A minute on two CPU cores is a good length.",
            "  smoke:",
            *smoke,
            "",
        ]
    lines += [
        "# What a machine must have, once it matters: resources: {gpus: 1, gpu_memory: 24GB, memory: 32GB, disk: 50GB}",
        "# The packages, exactly, so that it runs the same on any: python: {lock: requirements.lock}",
        "",
        "steps:",
        "  train:",
        *_command(start or Start("script", path), script, names, resume),
        f"    code: [{', '.join(_yaml(each) for each in code)}]",
    ]
    lines += (
        [f"    env: {{PYTHONPATH: {_yaml(':'.join(each or '.' for each in folders))}}}"]
        if folders
        else []
    )
    lines += [f"    deps: [{', '.join(_yaml(each.rstrip('/')) for each in deps)}]"] if deps else []
    lines += ["    state:", *(_state(option, names) for option in state)] if state else []
    lines += ["    outputs:", *outputs] if outputs else []
    if script.metrics:
        lines.append(
            "    metrics: true"
            if script.metrics is True
            else f"    metrics: {{pattern: {_single(str(script.metrics))}}}"
        )
    made.text = "\n".join(lines) + "\n"
    return made


def _as_data(option: Option, kind: Callable[[str], str]) -> Option:
    """Return the option as a plain value if its default is a word and not an existing path.

    Applies only to options guessed to be data by their name. Other options are unchanged.
    """
    value = ast.literal_eval(option.default) if option.guessed and option.default else ""
    word = isinstance(value, str) and re.fullmatch(r"[\w-]+", value) and not kind(value)
    return replace(option, role="value") if word else option


def _left_off(option: Option, names: dict[str, str]) -> str:
    """Return a note on how to enable an output option that is off by default."""
    flag, name = option.flag or option.name, names[option.name]
    return (
        f"{flag} is off by default; to enable it and keep its output, add "
        f'`- [{flag}, "{{{{ outputs.{name} }}}}"]` to run and `{name}: PATH` to outputs'
    )


# -- names ------------------------------------------------------------------------------------------------------------------------------------------


def _names(script: Script) -> dict[str, str]:
    """Map each option to its name in the recipe."""
    found: dict[str, str] = {}
    for option in script.options:
        made = option.role in ("output", "state", "off")
        name = plain_name(
            re.sub(r"_(dir|path|file|folder)$", "", option.name.lower()) if made else option.name
        )
        name = (
            "max_steps"
            if name == "steps_value"
            else "model"
            if name == "outputs_value" and option.role == "output"
            else name
        )
        while name in found.values():
            name += "_2"
        found[option.name] = name
    return found


def plain_name(word: str) -> str:
    """Convert a word to a valid name for an input, step or output."""
    name = re.sub(r"[^a-z0-9_]+", "_", word.lower()).strip("_") or "value"
    return f"{name}_value" if name in _RESERVED else name if name[0].isalpha() else f"n{name}"


# -- inputs -----------------------------------------------------------------------------------------------------------------------------------------


def _input(option: Option, name: str, script: Script, kind: Callable[[str], str]) -> str:
    if option.choices:
        words = [
            "type: choice",
            f"choices: [{', '.join(_text(choice) for choice in option.choices)}]",
        ]
    elif option.role == "input" and not _hub_word(option, kind):
        words = [f"type: {'model' if option.model else 'dataset' if option.folder else 'file'}"]
    elif option.many:
        words = ["type: list", f"items: {option.type}"]
    else:
        words = [f"type: {option.type}"]
    default = _default(option, kind)
    if default is not None:
        words.append(f"default: {default}")
    elif not option.required and not (
        option.role == "input" and option.default
    ):  # if the default path is missing, the input is required
        words.append("required: false")
    words += ["continues: true"] if _continues(option, script) else []
    words += ["key: false"] if option.name in _HARMLESS else []
    words += [f"doc: {json.dumps(option.help, ensure_ascii=False)}"] if option.help else []
    return f"{{{', '.join(words)}}}"


def _default(option: Option, kind: Callable[[str], str]) -> str | None:
    """Return the default as YAML; None without a default that a recipe can express."""
    if not option.default:
        return None
    value = ast.literal_eval(option.default)
    if option.role == "input" and (not option.model or kind(str(value))):
        return (
            _yaml(value if value.startswith(("./", "/")) else f"./{value}")
            if isinstance(value, str) and kind(value)
            else None
        )
    if option.choices:
        return _text(str(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if option.many and isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) if isinstance(item, str) else json.dumps(item) for item in value)}]"
    if option.type in ("integer", "number"):
        return str(value)
    return _text(value if isinstance(value, str) else json.dumps(value))


def _continues(option: Option, script: Script) -> bool:
    return (
        option.type == "integer"
        and _LENGTH.fullmatch(option.name) is not None
        and _latest(script) != ""
    )


def _hub_word(option: Option, kind: Callable[[str], str]) -> bool:
    """Return True if the default model is one word, such as gpt2, and not an existing path.

    Such a word is no URL, so the script itself must find the model.
    """
    value = ast.literal_eval(option.default) if option.model and option.default else None
    return isinstance(value, str) and "/" not in value and not kind(value)


def _fewer(option: Option, default: str | None) -> int | None:
    """Return the smoke preset's value for a training length: at most 20 steps or 2 epochs.

    Returns None for options other than a training length.
    """
    if option.type != "integer" or not _LENGTH.fullmatch(option.name):
        return None
    few = 2 if "epoch" in option.name else 20
    return min(few, int(default)) if default is not None and default.isdecimal() else few


# -- the step ---------------------------------------------------------------------------------------------------------------------------------------


def _command(
    start: Start, script: Script, names: dict[str, str], resume: list[Option]
) -> Iterator[str]:
    options = [
        option
        for option in script.options
        if option.role != "off" and (option.role != "resume" or option in resume)
    ]
    accelerate = any(name.partition(".")[0] == "accelerate" for name in script.imports)
    if accelerate and not any(
        not option.flag or option.negative or not option.flag.startswith("--") for option in options
    ):
        yield "    # Started by accelerate, on as many devices as there are; null and false are no flag."
        yield f"    accelerate:\n      {start.kind}: {_yaml(start.name)}"
        if options:
            yield "      args:"
            yield from (
                f"        {option.flag[2:]}: {_quote(_value(option, names, script))}"
                for option in options
            )
        return
    yield "    # A nested list is dropped if an item in it is null: an optional flag."
    yield "    run:"
    yield f"      - [{', '.join(['python', *(['-m'] if start.kind == 'module' else []), _yaml(start.name), *script.words])}]"
    # Positional arguments come first, because an option with several values would consume them.
    for option in sorted(options, key=lambda each: bool(each.flag)):
        value = _value(option, names, script)
        if option.type == "boolean" and re.fullmatch("--.*=", option.flag):
            chosen = f"{{{{ 'True' if inputs.{names[option.name]} else 'False' }}}}"
            yield f"      - {_quote(option.flag + chosen)}"
        elif option.type == "number" and re.fullmatch("--.*=", option.flag):
            # The division writes 1 as 1.0, because such scripts accept only floats.
            divided = f"{{{{ inputs.{names[option.name]} / 1 }}}}"
            yield f"      - {_quote(option.flag + divided)}"
        elif option.flag.endswith("="):
            yield f"      - {_quote(option.flag + value)}"
        elif option.type == "boolean":
            no = f"'{option.negative}'" if option.negative else "none"
            chosen = f"'{option.flag}' if inputs.{names[option.name]} else {no}"
            yield f"      - {_quote('{{ ' + chosen + ' }}')}"
        elif option.flag:
            yield f"      - [{option.flag}, {_quote(value)}]"
        else:
            yield f"      - {_quote(value)}"


def _value(option: Option, names: dict[str, str], script: Script) -> str:
    if option.role == "resume":
        return f"{{{{ state.{_latest(script, names)}.latest }}}}"
    head = {"output": "outputs", "state": "state"}.get(option.role, "inputs")
    return f"{{{{ {head}.{names[option.name]} }}}}"


def _latest(script: Script, names: dict[str, str] | None = None) -> str:
    """Return the name of the state option with a checkpoint file pattern, as in `names` if given.

    Returns an empty text without such an option, or if the script cannot resume.
    """
    if not any(option.role == "resume" for option in script.options):
        return ""
    state = next(
        (option.name for option in script.options if option.role == "state" and option.pattern), ""
    )
    return names[state] if names and state else state


def _state(option: Option, names: dict[str, str]) -> str:
    if not option.pattern:
        return f"      {names[option.name]}: {{every: 5m}}"
    return f"      {names[option.name]}: {{checkpoint: {json.dumps(option.pattern)}, every: 5m, keep: 2}}"


def _outputs(script: Script, names: dict[str, str]) -> Iterator[str]:
    for option in script.options:
        if option.role != "output":
            continue
        value = ast.literal_eval(option.default) if option.default else None
        place = posixpath.normpath(value).lstrip("/.") if isinstance(value, str) else ""
        place = place or names[option.name]
        yield f"      {names[option.name]}: {_yaml(place + ('/' if option.folder else ''))}"


def _literal_outputs(script: Script, names: dict[str, str]) -> Iterator[str]:
    taken = set(names.values())
    for path in script.writes:
        bare = posixpath.normpath(path)
        if bare.startswith(("/", "..")) or any(
            bare.startswith(other)
            for other in script.writes
            if other.endswith("/") and other != path
        ):
            continue
        name = re.sub(
            r"[^a-z0-9_]+",
            "_",
            posixpath.basename(bare).rpartition(".")[0].lower() or posixpath.basename(bare).lower(),
        ).strip("_")
        name = name if name and name[0].isalpha() and name not in taken else f"file_{name}"
        taken.add(name)
        yield f"      {name}: {_yaml(bare + ('/' if path.endswith('/') else ''))}"


# -- YAML -------------------------------------------------------------------------------------------------------------------------------------------


def _yaml(text: str) -> str:
    """Return a YAML scalar for a text, unquoted if that is safe."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS
    words = (
        re.fullmatch(r"[A-Za-z][A-Za-z0-9 ,./()'-]*[A-Za-z0-9)]", text)
        and "{" not in text
        and "," not in text
        and text.lower() not in _YAML_WORDS
    )
    return text if plain or words else json.dumps(text, ensure_ascii=False)


def _text(text: str) -> str:
    return (
        text
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text) and text.lower() not in _YAML_WORDS
        else json.dumps(text, ensure_ascii=False)
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _single(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
