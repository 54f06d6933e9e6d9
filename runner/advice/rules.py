"""Judge preflight rules against facts about the steps.  Pure: the caller gathers the facts.

Rules are data from `recipes/gotchas.yaml` or from a `gotchas.yaml` beside a user's recipes: a
template expression over the namespaces below, and a message. A rule that reads an unknown fact is
reported as unchecked.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

from ..errors import did_you_mean
from ..language.template import TemplateError, evaluate, expressions, has, references
from ..language.template_chains import Reference
from .tool_settings import Origin, ToolSettings, UnknownSetting

Severity = Literal["error", "warning", "note"]

ALWAYS: Final = ("recipe", "inputs", "settings", "step", "item")
"""Namespaces that are always known: a name without a value is null."""
NEEDS: Final[Mapping[str, str]] = {
    "model": "the model's files, locally or on the Hub",
    "data": "data that this machine can read",
    "gpu": "the GPU model: choose a host, or set `gpu` in the step's resources",
    "host": "the host: pass `--driver` or `--host`",
    "environment": "the step's installed packages",
    "offer": "a provider's offer",
    "kept": "results of earlier runs",
    "memory": "the model's config.json and the GPU memory",
}
"""Namespaces that may be unknown, and the information that each of them needs."""


FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "recipe": ("id", "hours"),
    "step": (
        *(
            "id",
            "tools",
            "launcher",
            "method",
            "gpus",
            "gpu",
            "gpu_memory",
            "processes",
            "nodes",
            "state",
            "retries",
            "env",
            "secrets",
            "image",
            "git",
            "to_fetch",
        ),
        *(
            "logins",
            "remote",
            "imports",
            "keywords",
            "config_sections",
            "config_mistyped",
            "config_slips",
            "config_kind",
            "config_faults",
            "missing",
            "members",
        ),
    ),
    "model": (
        *(
            "address",
            "exists",
            "hub",
            "gated",
            "access",
            "size",
            "config",
            "architecture",
            "type",
            "vision",
            "vocabulary",
            "positions",
            "pipeline",
        ),
        *(
            "pad",
            "eos",
            "stops",
            "chat_template",
            "turn_end",
            "template_bos",
            "adds_bos",
            "modules",
            "adapter",
            "misfit",
            "weights",
        ),
    ),
    "data": (
        *(
            "size",
            "rows",
            "sampled",
            "columns",
            "conversational",
            "truncated",
            "longest",
            "longest_text",
            "limit",
            "images",
            "captions_missing",
            "alpha",
        ),
        *(
            "stems_twice",
            "odd_formats",
            "tool_rows",
            "layout",
            "called",
            "tasks",
            "values",
            "scores",
        ),
    ),
    "gpu": ("name", "capability", "cuda_max", "memory"),
    "host": (
        "name",
        "gpus",
        "gpu",
        "gpu_memory",
        "memory",
        "disk",
        "shm",
        "driver",
        "cuda",
        "capability",
        "rented",
        "auto_tmux",
    ),
    "offer": ("provider", "ssh", "auto_tmux", "hours_left", "verified"),
    "kept": ("checkpoint", "newest", "processes", "max_steps", "torch", "said"),
    "memory": ("verdict", "low", "high", "usable", "gpu", "terms"),
}
"""Fields of each namespace; other fields in a rule are errors.  inputs, settings and environment
have arbitrary names.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A preflight rule for one known problem.

    `when`, `each` and the values of `fix` are expressions; `message` and `remedy` are text with
    templates.
    """

    id: str
    severity: Severity
    title: str
    about: Literal["training", "step", "recipe"]
    when: str
    message: str
    remedy: str
    evidence: tuple[str, ...]
    given: tuple[str, ...] = ()
    each: str = ""
    fix: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: bool = False
    """Whether the rule is from a user's gotchas.yaml, which defines its own setting names."""


class Finding(NamedTuple):
    """The result of a rule that fired, with its rendered message, remedy and fix.

    `fix` holds the proposed values by kind: settings, env, resources.
    """

    rule: Rule
    message: str
    remedy: str
    step: str
    fix: Mapping[str, Mapping[str, object]]
    origins: Mapping[str, Origin] = {}
    """Sources of the settings that the rule reads or changes, for the location and the proposed
    fix.
    """


class UncheckedRule(NamedTuple):
    """A preflight rule that could not be evaluated, and the reason."""

    rule: Rule
    why: str
    step: str


@dataclass(frozen=True, slots=True)
class RuleFindings:
    """Findings and unchecked rules of one or several steps."""

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[UncheckedRule, ...] = ()


class RuleFacts(Mapping[str, object]):
    """One namespace of facts. Missing facts are collected at their first use.

    A fact that is still missing is null, or UnknownSetting with the text `needs`.
    """

    def __init__(
        self,
        known: Mapping[str, object],
        needs: str = "",
        gather: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        self._known, self._needs, self._gather = dict(known), needs, gather

    def __getitem__(self, name: str) -> object:
        if name not in self._known and self._gather is not None:
            gather, self._gather = self._gather, None
            try:
                self._known = {**gather(), **self._known}
            except UnknownSetting as unknown:
                self._needs = str(unknown)
        if name in self._known:
            value = self._known[name]
            if isinstance(value, UnknownSetting):
                raise value
            return value
        if self._needs:
            raise UnknownSetting(self._needs)
        return None

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def rules(tree: Mapping[str, Any], *, own: bool = False) -> tuple[Rule, ...]:
    """Return the preflight rules in a valid gotchas file.

    `own`: the file is a user's, not the library's.
    """
    return tuple(_read_rule(each, own) for each in tree.get("rules", ()))


def _read_rule(raw: Mapping[str, Any], own: bool) -> Rule:
    return Rule(
        id=raw["id"],
        severity=raw["severity"],
        title=raw["title"],
        about=raw.get("about", "training"),
        when=raw["when"],
        message=raw["message"],
        remedy=raw["remedy"],
        evidence=tuple(raw["evidence"]),
        given=tuple(raw.get("given", ())),
        each=raw.get("each", ""),
        fix=raw.get("fix", {}),
        own=own,
    )


def find_tools(
    command: Sequence[str], imports: Iterable[str], known: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the known tools used by a step.

    Patterns are matched with the command's words, with the last path component of each word, with
    pairs of these, and with `import MODULE` for imported modules.
    """
    parts = [name.rpartition("/")[2] for name in command]
    heads = {*command, *parts, *map(" ".join, pairwise(parts))}
    heads |= {f"import {name.partition('.')[0]}" for name in imports}
    found: list[str] = []
    for tool, patterns in known.items():
        if any(fnmatch.filter(heads, pattern) for pattern in patterns):
            found.append(tool)
    return found


def judge(all: Iterable[Rule], facts: Mapping[str, object], step: str = "") -> RuleFindings:
    """Evaluate preflight rules for one step. `facts` maps each namespace to its facts."""
    findings: list[Finding] = []
    unchecked: list[UncheckedRule] = []
    for rule in all:
        try:
            if any(_evaluate_template("{{ " + name + " }}", facts) is None for name in rule.given):
                continue
            for item in _list_items(rule, facts):
                scope = {**facts, "item": item}
                read: dict[str, object] = {}
                if _evaluate_template(rule.when, scope, read):
                    findings.append(_make_finding(rule, scope, step, read))
        except UnknownSetting as unknown:
            unchecked.append(UncheckedRule(rule, f"needs {unknown}", step))
        except TemplateError as error:
            unchecked.append(UncheckedRule(rule, f"cannot evaluate the rule: {error}", step))
    return RuleFindings(tuple(findings), tuple(unchecked))


def merge(verdicts: Iterable[RuleFindings]) -> RuleFindings:
    """Merge verdicts.

    Each rule and message is kept once, for the first step, in order of severity.
    """
    findings: dict[tuple[str, str], Finding] = {}
    unchecked: dict[tuple[str, str], UncheckedRule] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            findings.setdefault((finding.rule.id, finding.message), finding)
        for each in verdict.unchecked:
            unchecked.setdefault((each.rule.id, each.why), each)
    fired = {rule for rule, _ in findings}
    # A rule that could not be checked for one step may have fired for another.
    first: dict[str, UncheckedRule] = {}
    for each in unchecked.values():
        if each.rule.id not in fired:
            first.setdefault(each.rule.id, each)
    order = {"error": 0, "warning": 1, "note": 2}
    by_severity = sorted(findings.values(), key=lambda finding: order[finding.rule.severity])
    by_id = sorted(first.values(), key=lambda each: each.rule.id)
    return RuleFindings(tuple(by_severity), tuple(by_id))


def faults(rule: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], TemplateError]]:
    """Yield each invalid template of a rule, with its path below the rule."""
    for path, text in _list_templates(rule):
        try:
            found = expressions(text)
            for expression in found:
                for reference in expression.references:
                    _check_reference(reference)
            is_alone = len(found) == 1 and found[0].length == len(text)
            if path[0] in ("when", "each") and not is_alone:
                message = "the value must be one expression"
                raise TemplateError(message, 0, len(text), 'write "{{ … }}" and nothing else')
        except TemplateError as error:
            if path[0] == "given":
                # The rule has the name without the braces.
                error = TemplateError(str(error), 0, len(text) - len("{{  }}"), error.fix)
            yield path, error


def _list_templates(rule: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield every text in a rule that may hold templates, with its path."""
    for name in ("when", "each", "message", "remedy"):
        if isinstance(rule.get(name), str):
            yield (name,), rule[name]
    for n, name in enumerate(rule.get("given", ())):
        yield ("given", n), "{{ " + name + " }}"
    for kind, values in rule.get("fix", {}).items():
        for name, value in values.items():
            if isinstance(value, str):
                yield ("fix", kind, name), value


def _check_reference(reference: Reference) -> None:
    """Raise TemplateError for an unknown namespace or field."""
    root, *parts = reference.path
    namespaces = (*ALWAYS, *NEEDS)
    if root not in namespaces:
        message, fix = f"there is no `{root}`", f"available: {', '.join(namespaces)}"
        raise TemplateError(message, reference.offset, reference.length, fix)
    fields = FIELDS.get(root)
    if fields is None or not parts:
        return
    if str(parts[0]) in fields:
        return
    message = f"`{root}` has no `{parts[0]}`"
    fix = did_you_mean(str(parts[0]), fields) or f"available: {', '.join(fields)}"
    raise TemplateError(message, reference.offset, reference.length, fix)


_SETTING: Final = re.compile(r'settings(?:\.(\w+)|\["(.+)"\])')
"""A setting in the form in which `evaluate` records the names that it read."""


def _list_items(rule: Rule, facts: Mapping[str, object]) -> Sequence[object]:
    """Return the items over which a rule is evaluated, or one None without `each`."""
    if not rule.each:
        return (None,)
    items = _evaluate_template(rule.each, facts)
    if isinstance(items, (list, tuple)):
        return items
    return list(items) if isinstance(items, Mapping) else ()


def _make_finding(
    rule: Rule, scope: Mapping[str, object], step: str, found: Mapping[str, object]
) -> Finding:
    """Return the finding of a rule that fired. `found` holds the values read by its condition."""
    remedy = _render(rule.remedy, scope, "")
    origins: dict[str, Origin] = {}
    settings = scope.get("settings")
    if isinstance(settings, ToolSettings):
        names = _name_settings(rule, scope, found)
        origins = _find_origins(settings, names, scope.get("item"))
        judged = [name for name in names if name not in rule.fix.get("settings", {})]
        guess = _find_guess(settings, judged)
        # A user's own rule keeps its severity.
        is_too_sure = not rule.own and rule.severity != "note"
        if guess and is_too_sure:
            rule = replace(rule, severity="note")
            remedy = f"{remedy} (a guess from the name `{guess}`)".strip()
    message = _render(rule.message, scope, rule.title)
    return Finding(rule, message, remedy, step, _evaluate_fix(rule, scope), origins)


def _evaluate_fix(rule: Rule, scope: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the non-empty settings, variables and resources that a rule proposes."""
    fix = {}
    for kind, templates in rule.fix.items():
        values = {name: _evaluate_template(template, scope) for name, template in templates.items()}
        proposed = {name: value for name, value in values.items() if value is not None}
        if proposed:
            fix[kind] = proposed
    return fix


def _name_settings(
    rule: Rule, scope: Mapping[str, object], found: Mapping[str, object]
) -> list[str]:
    """Return the names of a rule's settings, changed settings first."""
    given: list[tuple[str, ...]] = []
    for name in rule.given:
        given += _list_paths("{{ " + name + " }}")
    asked = _list_paths(rule.when)
    names = [*rule.fix.get("settings", {})]
    names += _list_setting_names(given)
    names += [_SUBJECTS[path[0]] for path in asked if path[0] in _SUBJECTS]
    names += _list_known_settings(found)
    names += _list_setting_names(asked)
    item = scope.get("item")
    if isinstance(item, str):
        names.append(item)
    return names


def _list_known_settings(found: Mapping[str, object]) -> list[str]:
    """Return the names of the settings whose values a condition read."""
    names: list[str] = []
    for key, value in found.items():
        match = _SETTING.fullmatch(key)
        if match and value is not None:
            names.append(match[1] or match[2])
    return names


def _list_paths(template: str) -> list[tuple[str, ...]]:
    return [reference.path for reference in references(template)]


def _list_setting_names(paths: Iterable[Sequence[str]]) -> list[str]:
    return [path[1] for path in paths if len(path) > 1 and path[0] == "settings"]


def _find_origins(settings: ToolSettings, names: Iterable[str], item: object) -> dict[str, Origin]:
    """Return the source of each setting by name; `item` may be the value of a setting."""
    places = {name: settings.find_origin(name) for name in names}
    if isinstance(item, str):
        places[item] = places.get(item) or settings.find_value(item)
    return {name: place for name, place in places.items() if place is not None}


_SUBJECTS: Final = {"model": "base", "data": "dataset", "memory": "base"}
"""The setting with the address of each namespace's subject."""


def _find_guess(settings: ToolSettings, names: Iterable[str]) -> str:
    """Return the first setting among `names` that is only a guess, or ""."""
    for name in names:
        found = settings.setting(name)
        if found is not None and not found.declared:
            return found.origin.name
    return ""


def _evaluate_template(
    text: object, scope: Mapping[str, object], read: dict[str, object] | None = None
) -> object:
    if not isinstance(text, str) or not has(text):
        return text
    return evaluate(text, scope, read)


def _render(text: str, scope: Mapping[str, object], otherwise: str) -> str:
    try:
        return str(evaluate(text, scope)).strip()
    except (UnknownSetting, TemplateError):
        return otherwise
