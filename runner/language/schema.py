"""Check a document against the schema of the language, and report every fault.

jsonschema finds the faults; a `$ref` never causes a download. jsonschema takes 0.5 ms per step, and
a recipe may have 100,000 steps, so common valid parts are recognised without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING

from runner.errors import Problem

from .schema_faults import SchemaFault, explain
from .schema_file import Schema, load

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

    from .document import Document

__all__ = ["MANY", "Schema", "SchemaFault", "check", "find_faults", "load", "locate_fault"]

MANY = 200
"""Maximum number of reported problems."""


def check(document: Document) -> list[Problem]:
    """Return every schema violation of a document as a problem."""
    return [locate_fault(document, fault) for fault in find_faults(document.value)]


def locate_fault(document: Document, fault: SchemaFault) -> Problem:
    """Convert a schema fault to a problem with location and original number spelling."""
    message, fix = fault.message, fault.fix
    written = document.source_text(fault.path) if fault.read else ""
    if written:
        message = message.replace(f"the number {fault.read}", f"the number {written}")
        fix = fix.replace(f'"{fault.read}"', f'"{written}"')
    return document.problem(fault.code, message, fault.path, fix=fix, key=fault.key)


def find_faults(value: object) -> list[SchemaFault]:
    """Return schema violations of a plain value, at most MANY."""
    if isinstance(value, dict):
        steps = value.get("steps")
        if isinstance(steps, dict) and steps:
            suspects = _suspects(steps)
            if not suspects and _is_bare(value):
                return []
            # Without suspects, a valid step replaces all: the schema refuses an empty mapping.
            value = {**value, "steps": suspects or {"s": {"run": "x"}}}
    found = _collect_faults(value)
    return sorted(found, key=_path_as_text)[:MANY]


def _path_as_text(fault: SchemaFault) -> list[str]:
    # Names and indices have no order among each other.
    return [str(part) for part in fault.path]


def _collect_faults(value: object) -> Collection[SchemaFault]:
    """Return the distinct faults that jsonschema finds. The search ends after more than MANY."""
    found: dict[SchemaFault, None] = {}
    for error in _validator().iter_errors(value):
        found.update(dict.fromkeys(explain(error)))
        if len(found) > MANY:
            break
    return found.keys()


@cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(load(), registry=Registry())


@cache
def _step_validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    schema = {"$ref": "#/$defs/step", "$defs": load()["$defs"]}
    return Draft202012Validator(schema, registry=Registry())


# -- fast check of common steps --

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ID = re.compile(r"[a-z][a-z0-9_-]{0,80}@[1-9][0-9]{0,8}")


def _is_bare(value: Mapping[str, object]) -> bool:
    """Return True if a recipe consists of a valid name, a valid summary and steps only.

    Then the import of jsonschema is skipped.
    """
    name, summary = value.get("recipe"), value.get("summary")
    if type(name) is not str or type(summary) is not str:
        return False
    if len(value) != 3:
        return False
    return _ID.fullmatch(name) is not None and 0 < len(summary) <= 100


def _suspects(steps: Mapping[str, object]) -> dict[str, object]:
    """Return the steps that need full schema validation.

    Steps that differ only in parts known to be valid share one check.
    """
    verdicts = {repr({"run": "x"}): True}
    suspects = {}
    for id, step in steps.items():
        if type(step) is not dict or not _is_name(id):
            suspects[id] = step
            continue
        core = _doubtful_part(step)
        shape = repr(core)
        if shape not in verdicts:
            verdicts[shape] = _step_validator().is_valid(core)
        if not verdicts[shape]:
            suspects[id] = step
    return suspects


def _doubtful_part(step: Mapping[str, object]) -> dict[str, object]:
    """Return the parts of a step that still need schema validation.

    A valid command is replaced by a constant, so that such steps share one check.
    """
    core = {key: value for key, value in step.items() if not _is_sound(key, value)}
    if "run" in step and "run" not in core:
        core["run"] = "x"
    return core


def _is_sound(key: str, value: object) -> bool:
    """Return True if a step key's value is certainly valid, so that the schema check is skipped."""
    if key == "run":
        return _is_command(value)
    if key == "outputs" and type(value) is dict:
        return all(map(_is_name, value)) and all(map(_is_text, value.values()))
    if key == "needs" and type(value) is list:
        return _are_names(value)
    if key in ("deps", "outputs", "code") and type(value) is list:
        return all(map(_is_text, value))
    return False


def _is_text(value: object) -> bool:
    return type(value) is str and value != ""


def _is_command(value: object) -> bool:
    if type(value) is list:
        return bool(value) and all(type(item) is str for item in value)
    return _is_text(value)


def _are_names(words: list[str]) -> bool:
    return all(map(_is_name, words)) and len(set(words)) == len(words)


def _is_name(word: object) -> bool:
    return type(word) is str and _NAME.fullmatch(word) is not None
