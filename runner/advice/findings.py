"""Present findings of rules: locations, inputs to change, and lines to add."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, Location, Problem
from ..language import document
from ..language.document import Document
from . import rule_files
from .facts import contents
from .rules import Finding, RuleFindings
from .tool_settings import Origin

if TYPE_CHECKING:
    from ..survey.survey import Survey


def refuse(verdict: RuleFindings, found: Survey) -> None:
    """Raise Invalid with all findings of severity error, if there are any."""
    errors = [finding for finding in verdict.findings if finding.rule.severity == "error"]
    if errors:
        raise Invalid(problems(errors, found))


def problems(findings: Iterable[Finding], found: Survey) -> list[Problem]:
    """Return findings as problems with their locations in the recipe."""
    try:
        source: Document | None = document.read(found.source)
    except (Invalid, OSError):
        source = None
    shown = []
    for finding in findings:
        rule, remedy = finding.rule, finding.remedy
        if rule.severity == "error":
            remedy += f" (to skip this check, pass `--allow {rule.id}`)"
        where = _locate_finding(finding, source) if source is not None else None
        shown.append(Problem(rule.id, finding.message, where, remedy, rule.severity))
    return shown


def list_remedies(finding: Finding, found: Survey) -> tuple[dict[str, object], list[str]]:
    """Return a finding's fix as new input values by name, and as lines to add to files."""
    typed: dict[str, object] = {}
    written: list[str] = []
    step = _name_in_recipe(finding.step)
    names = rule_files.load(rule_files.find_homes(found)).names
    for name, value in finding.fix.get("settings", {}).items():
        # An unset setting gets the tool's name for it.
        called = next(iter(names.get(name, ())), name)
        origin = finding.origins.get(name) or _origin_of_unset(finding, called)
        if origin.kind == "input" and "/" in finding.step:
            written.append(f"in step {step}: with: {{{origin.name}: {json.dumps(value)}}}")
        elif origin.kind == "input" and origin.name in found.plan.inputs:
            typed[origin.name] = value
        else:
            for key, says in _spell_setting(origin.name, value):
                written.append(_describe_change(origin, step, key, says))
    variables = finding.fix.get("env")
    if variables:
        pairs = [f"{name}: {json.dumps(value)}" for name, value in variables.items()]
        written.append(f"in step {step}: env: {{{', '.join(pairs)}}}")
    resources = finding.fix.get("resources")
    if resources:
        pairs = [f"{name}: {value}" for name, value in resources.items()]
        written.append(f"in step {step}: resources: {{{', '.join(pairs)}}}")
    return typed, written


def _origin_of_unset(finding: Finding, name: str) -> Origin:
    """Return the place for a setting that is unset: the file of the others, or an argument."""
    for origin in finding.origins.values():
        if origin.kind == "file":
            return replace(origin, name=name)
    return Origin("argument", f"--{name}")


def _describe_change(origin: Origin, step: str, key: str, value: object) -> str:
    """Return the line to add to a configuration file or to the command of a step."""
    if origin.kind == "file":
        # A file in `files` of a step has no path of its own.
        owner = "" if origin.found_at else f" of step {step}"
        return f"in {origin.file}{owner}: {key}: {json.dumps(value)}"
    word = value if isinstance(value, str) else json.dumps(value)
    return f"in the command of step {step}: {key} {word}"


def _spell_setting(name: str, value: object) -> list[tuple[str, object]]:
    """Return the assignments that set a value in a tool's own form.

    Some tools have one switch per value: `bf16: true` sets a precision. A finding changes a
    precision to another one, and only ever turns flash attention off.
    """
    head, dot, switch = name.rpartition(".")
    plain = switch.lstrip("-")
    dashes = switch[: len(switch) - len(plain)]
    if plain in ("bf16", "fp16") and isinstance(value, str):
        return [(name, False), (f"{head}{dot}{dashes}{value}", True)]
    if plain in ("flash_attention", "flash_attn"):
        return [(name, False)]
    return [(name, value)]


def _locate_finding(finding: Finding, source: Document) -> Location | None:
    """Return the location of the first setting that can be located, or else of the step."""
    step = _name_in_recipe(finding.step)
    for origin in finding.origins.values():
        where = _locate_origin(origin, source, finding.step, step)
        if where is not None:
            return where
    path = ("steps", step) if step else ("recipe",)
    return source.locate(path, key=True)


def _locate_origin(origin: Origin, source: Document, instance: str, step: str) -> Location | None:
    if origin.kind == "file" and origin.found_at:
        return _locate_in_file(origin)
    if "/" in instance:
        return None  # the step is in a used recipe, not in this file
    tree = source.value if isinstance(source.value, dict) else {}
    if origin.kind == "input":
        return _locate_input(origin, source, tree)
    if origin.kind == "argument":
        return _locate_argument(origin, source, tree, step)
    return _locate_key(origin, source, tree, step)


def _locate_input(origin: Origin, source: Document, tree: Mapping[str, Any]) -> Location | None:
    inputs = tree.get("inputs")
    if isinstance(inputs, dict) and origin.name in inputs:
        return source.locate(("inputs", origin.name), key=True)
    return None


def _locate_key(
    origin: Origin, source: Document, tree: Mapping[str, Any], step: str
) -> Location | None:
    """Return the location of a key in a file below a step's `files`, or None."""
    keys = _find_keys(_find_block(tree, step, "files").get(origin.file), origin.name)
    if not keys:
        return None
    return source.locate(("steps", step, "files", origin.file, *keys), key=True)


def _find_block(tree: Mapping[str, Any], step: str, name: str) -> Any:
    return ((tree.get("steps") or {}).get(step) or {}).get(name) or {}


def _locate_argument(
    origin: Origin, source: Document, tree: Mapping[str, Any], step: str
) -> Location | None:
    """Return the location of an option in a step's command; None if it is not literal text."""
    option = origin.name.lstrip("-")
    for name in ("run", "accelerate"):
        written = _find_block(tree, step, name)
        if isinstance(written, str):
            if found := re.search(rf"(?<!\S)--?{re.escape(option)}(?![\w-])", written):
                start, end = found.span()
                return source.locate(("steps", step, name), offset=start, length=end - start)
            continue
        path = _find_option(written, option)
        if path is not None:
            return source.locate(("steps", step, name, *path), key=isinstance(path[-1], str))
    return None


def _find_keys(tree: object, name: str) -> tuple[str, ...]:
    """Return the path of keys that spell a setting name, or an empty path.

    Setting names are lower case, with underscores for dashes.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            plain = str(key).replace("-", "_").lower()
            if name == plain:
                return (str(key),)
            if name.startswith(plain + "."):
                rest = _find_keys(value, name[len(plain) + 1 :])
                if rest:
                    return (str(key), *rest)
    return ()


def _find_option(words: object, option: str) -> tuple[str | int, ...] | None:
    """Return the path to a command-line option among a command's words, or None.

    A command is a list, and the `args` of an `accelerate` step are a mapping.
    """
    if isinstance(words, str):
        is_option = words.startswith("-") and words.lstrip("-").partition("=")[0] == option
        return () if is_option else None
    items: Iterable[tuple[Any, object]] = ()
    if isinstance(words, Mapping):
        items = words.items()
    elif isinstance(words, list):
        items = enumerate(words)
    for key, value in items:
        if key == option:
            return (key,)
        path = _find_option(value, option)
        if path is not None:
            return (key, *path)
    return None


def _locate_in_file(origin: Origin) -> Location | None:
    """Return the location of a setting or section in an existing configuration file."""
    text = (contents(Path(origin.found_at)) or b"").decode("utf-8", "replace")
    if not origin.found_at.endswith(".toml"):
        try:
            read = document.parse(text, origin.file)
        except Invalid:
            return None
        path = _find_keys(read.value, origin.name)
        return read.locate(path, key=True) if path else None
    return _locate_in_toml(text, origin)


def _locate_in_toml(text: str, origin: Origin) -> Location | None:
    """Return the location of a section or key, read line by line: tomllib keeps no lines."""
    section = ""
    for n, line in enumerate(text.splitlines(), 1):
        head, key = _SECTION.match(line), _KEY.match(line)
        if head:
            found, section = head, _normalize(head[1])
            name = section
        elif key:
            found, name = key, ".".join(filter(None, (section, _normalize(key[1]))))
        else:
            continue
        if name == origin.name:
            return Location(origin.file, n, found.start(1) + 1, len(found[1]), line)
    return None


_SECTION: Final = re.compile(r"\s*\[{1,2}\s*([^\[\]#]+?)\s*\]")
_KEY: Final = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")


def _normalize(name: str) -> str:
    """Convert a dotted TOML name to a setting name."""
    return re.sub(r"[\"'\s]", "", name).replace("-", "_").lower()


def _name_in_recipe(step: str) -> str:
    """Return the step's name in the recipe, without matrix values and steps of a used recipe."""
    return re.split(r"[\[/]", step)[0]
