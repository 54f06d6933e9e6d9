"""Turn what rules found into what people see: the place it is about, what to type instead, what to write.  Finds nothing itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, Location, Problem
from . import rule_files
from .facts import contents
from .rules import Finding, Verdict
from .tool_settings import Origin

if TYPE_CHECKING:
    from ..language.document import Document
    from ..survey.survey import Survey


def refuse(verdict: Verdict, found: Survey) -> None:
    """Raise Invalid with the findings that are errors, if there are any."""
    if any(finding.rule.severity == "error" for finding in verdict.findings):
        raise Invalid(
            problems([each for each in verdict.findings if each.rule.severity == "error"], found)
        )


def problems(findings: Iterable[Finding], found: Survey) -> list[Problem]:
    """Findings as they are shown, each with the place that it is about."""
    from ..language import document

    try:
        source: Document | None = document.read(found.source)
    except (Invalid, OSError):
        source = None
    shown = []
    for finding in findings:
        remedy = finding.remedy + (
            f" (to skip this check, pass `--allow {finding.rule.id}`)"
            if finding.rule.severity == "error"
            else ""
        )
        where = _where(finding, source) if source is not None else None
        shown.append(
            Problem(finding.rule.id, finding.message, where, remedy, finding.rule.severity)
        )
    return shown


def remedies(finding: Finding, found: Survey) -> tuple[dict[str, object], list[str]]:
    """What a finding's fix amounts to in this recipe: inputs to type, by name; and lines to write into it."""
    typed: dict[str, object] = {}
    written: list[str] = []
    step = _written_as(finding.step)
    names = rule_files.load(rule_files.beside(found)).names
    file = next((origin for origin in finding.origins.values() if origin.kind == "file"), None)
    for name, value in finding.fix.get("settings", {}).items():
        # What is not set yet is said as tools call it, where the rest is said.
        called = next(iter(names.get(name, ())), name)
        origin = finding.origins.get(name) or (
            replace(file, name=called) if file else Origin("argument", f"--{called}")
        )
        if origin.kind == "input" and "/" in finding.step:
            written.append(f"in step {step}: with: {{{origin.name}: {json.dumps(value)}}}")
        elif origin.kind == "input" and origin.name in found.plan.inputs:
            typed[origin.name] = value
        else:
            for key, says in _said(origin.name, value):
                if origin.kind == "file":
                    written.append(
                        f"in {origin.file}{'' if origin.found_at else f' of step {step}'}: {key}: {json.dumps(says)}"
                    )
                else:
                    written.append(
                        f"in the command of step {step}: {key} {says if isinstance(says, str) else json.dumps(says)}"
                    )
    for kind in ("env", "resources"):
        if values := finding.fix.get(kind):
            said = ", ".join(
                f"{name}: {json.dumps(value) if kind == 'env' else value}"
                for name, value in values.items()
            )
            written.append(f"in step {step}: {kind}: {{{said}}}")
    return typed, written


def _said(name: str, value: object) -> list[tuple[str, object]]:
    """A setting as a tool says it that has a switch for each of its values: `bf16: true` is a precision."""
    head, dot, switch = name.rpartition(".")
    plain = switch.lstrip("-")
    dashes = switch[: len(switch) - len(plain)]
    if plain in ("bf16", "fp16") and isinstance(value, str):
        return [(name, False), (f"{head}{dot}{dashes}{value}", True)]
    return [(name, False)] if plain in ("flash_attention", "flash_attn") else [(name, value)]


def _where(finding: Finding, source: Document) -> Location | None:
    """Return the place that says what is wrong.

    It is an input, a word of the command or a line of a configuration, or else the step.
    """
    step = _written_as(finding.step)
    for origin in finding.origins.values():
        if (where := _place_of(origin, source, finding.step, step)) is not None:
            return where
    return source.locate(("steps", step) if step else ("recipe",), key=True)


def _place_of(origin: Origin, source: Document, instance: str, step: str) -> Location | None:
    if origin.kind == "file" and origin.found_at:
        return _line(origin)
    if "/" in instance:
        return None  # what is written there is in the recipe that this one uses
    tree = source.value if isinstance(source.value, dict) else {}
    if origin.kind == "input":
        inputs = tree.get("inputs")
        if isinstance(inputs, dict) and origin.name in inputs:
            return source.locate(("inputs", origin.name), key=True)
        return None
    if origin.kind == "argument":
        return _argument(origin, source, tree, step)
    keys = _keys(_block(tree, step, "files").get(origin.file), origin.name)
    return source.locate(("steps", step, "files", origin.file, *keys), key=True) if keys else None


def _block(tree: Mapping[str, Any], step: str, name: str) -> Any:
    return ((tree.get("steps") or {}).get(step) or {}).get(name) or {}


def _argument(
    origin: Origin, source: Document, tree: Mapping[str, Any], step: str
) -> Location | None:
    """The place of an option in the command of a step; None where it is not written out."""
    option = origin.name.lstrip("-")
    for name in ("run", "accelerate"):
        written = _block(tree, step, name)
        if isinstance(written, str):
            if found := re.search(rf"(?<!\S)--?{re.escape(option)}(?![\w-])", written):
                return source.locate(
                    ("steps", step, name), offset=found.start(), length=found.end() - found.start()
                )
        elif (path := _word(written, option)) is not None:
            return source.locate(("steps", step, name, *path), key=isinstance(path[-1], str))
    return None


def _keys(tree: object, name: str) -> tuple[str, ...]:
    """`a.b_c` as the keys that say so in this tree: names of settings are in small letters, and without dashes."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            plain = str(key).replace("-", "_").lower()
            if name == plain:
                return (str(key),)
            if name.startswith(plain + ".") and (rest := _keys(value, name[len(plain) + 1 :])):
                return (str(key), *rest)
    return ()


def _word(words: object, option: str) -> tuple[str | int, ...] | None:
    """Return the path of the word that is this option; None if there is none.

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
        if (path := _word(value, option)) is not None:
            return (key, *path)
    return None


def _line(origin: Origin) -> Location | None:
    """The line of a configuration file that is here, where the setting or the section is said."""
    text = (contents(Path(origin.found_at)) or b"").decode("utf-8", "replace")
    if not origin.found_at.endswith(".toml"):
        from ..language import document

        try:
            read = document.parse(text, origin.file)
        except Invalid:
            return None
        path = _keys(read.value, origin.name)
        return read.locate(path, key=True) if path else None
    section = ""
    for n, line in enumerate(text.splitlines(), 1):
        if head := _SECTION.match(line):
            section = _plain(head[1])
            if section == origin.name:
                return Location(origin.file, n, head.start(1) + 1, len(head[1]), line)
        elif (key := _KEY.match(line)) and ".".join(
            filter(None, (section, _plain(key[1])))
        ) == origin.name:
            return Location(origin.file, n, key.start(1) + 1, len(key[1]), line)
    return None


_SECTION: Final = re.compile(r"\s*\[{1,2}\s*([^\[\]#]+?)\s*\]")
_KEY: Final = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")


def _plain(name: str) -> str:
    """A dotted name of TOML as settings are called."""
    return re.sub(r"[\"'\s]", "", name).replace("-", "_").lower()


def _written_as(step: str) -> str:
    """The name of a step as the recipe has it: that of a matrix for one of its instances, that of a `uses` for a step of what it uses."""
    return re.split(r"[\[/]", step)[0]
