"""Turn what rules found into what people see: the place it is about, what to type instead, what to write.  Finds nothing itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import Invalid, Problem
from ..planning.preflight import Finding, Verdict

if TYPE_CHECKING:
    from ..language.document import Document
    from .survey import Survey


def refuse(verdict: Verdict, found: Survey) -> None:
    """Raise Invalid with the findings that are errors, if there are any."""
    if any(finding.rule.severity == "error" for finding in verdict.findings):
        raise Invalid(problems([each for each in verdict.findings if each.rule.severity == "error"], found))


def problems(findings: Iterable[Finding], found: Survey) -> list[Problem]:
    """Findings as they are shown, each with the place in the recipe that it is about."""
    from ..language import document

    try:
        source: Document | None = document.read(found.source)
    except (Invalid, OSError):
        source = None
    shown = []
    for finding in findings:
        remedy = finding.remedy + (f" (to run all the same: --allow {finding.rule.id})" if finding.rule.severity == "error" else "")
        where = source.locate(_place(finding, source), key=True) if source is not None else None
        shown.append(Problem(finding.rule.id, finding.message, where, remedy, finding.rule.severity))
    return shown


def remedies(finding: Finding, found: Survey) -> tuple[dict[str, object], list[str]]:
    """What a finding's fix amounts to in this recipe: inputs to type, by name; and lines to write into it."""
    typed: dict[str, object] = {}
    written: list[str] = []
    step = _written_as(finding.step)
    used = "/" in finding.step
    for name, value in finding.fix.get("settings", {}).items():
        origin = finding.origins.get(name)
        if origin is not None and origin.kind == "input" and used:
            written.append(f"in step {step}: with: {{{origin.name}: {json.dumps(value)}}}")
        elif origin is not None and origin.kind == "input" and origin.name in found.plan.inputs:
            typed[origin.name] = value
        elif origin is not None and origin.kind == "file":
            written.append(f"in {origin.file} of step {step}: {origin.name}: {json.dumps(value)}")
        else:
            option = origin.name if origin is not None else f"--{name}"
            written.append(f"in the command of step {step}: {option} {value if isinstance(value, str) else json.dumps(value)}")
    for kind in ("env", "resources"):
        if values := finding.fix.get(kind):
            said = ", ".join(f"{name}: {json.dumps(value) if kind == 'env' else value}" for name, value in values.items())
            written.append(f"in step {step}: {kind}: {{{said}}}")
    return typed, written


def _place(finding: Finding, source: Document) -> tuple[str, ...]:
    """The input that says what is wrong, where there is one in this file; else the step."""
    inputs = source.value.get("inputs", {}) if isinstance(source.value, dict) else {}
    if "/" not in finding.step:  # else they are the inputs of the recipe that it uses
        for origin in finding.origins.values():
            if origin.kind == "input" and isinstance(inputs, dict) and origin.name in inputs:
                return ("inputs", origin.name)
    return ("steps", _written_as(finding.step)) if finding.step else ("recipe",)


def _written_as(step: str) -> str:
    """The name of a step as the recipe has it: that of a matrix for one of its instances, that of a `uses` for a step of what it uses."""
    return re.split(r"[\[/]", step)[0]
