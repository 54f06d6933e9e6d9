"""Judge rules about what goes wrong in training against facts about what is going to run.  Pure: who gathers the facts, and how, it does not know.

A rule is data (`recipes/gotchas.yaml`, or a `gotchas.yaml` beside somebody's own recipes): an expression in the language of templates over the
namespaces below, and what to say.  An unknown fact makes a rule *unchecked*: it is neither fired nor silent.
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
from .tool_settings import Origin, Settings, Unknown

Severity = Literal["error", "warning", "note"]

ALWAYS: Final = ("recipe", "inputs", "settings", "step", "item")
"""Namespaces that every check knows: a name that is not in them is null."""
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
"""Namespaces that may be unknown, and what they are known from."""


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
"""What each namespace has: a rule that asks for something else is mistyped.  Those of inputs, settings and environment are other people's names."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that goes wrong.  `when`, `each` and the values of `fix` are templates; `message` and `remedy` are text with templates in it."""

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
    """Of somebody's own file, which says itself what names mean."""


class Finding(NamedTuple):
    """A rule that fired.  `fix` is what would have to be set, by kind: settings, env, resources."""

    rule: Rule
    message: str
    remedy: str
    step: str
    fix: Mapping[str, Mapping[str, object]]
    origins: Mapping[str, Origin] = {}
    """Where the settings that the rule asks for, or would have otherwise, are said: where to point, and how to say it otherwise."""


class Unchecked(NamedTuple):
    """A rule that could not be asked, and why."""

    rule: Rule
    why: str
    step: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all rules say together."""

    findings: tuple[Finding, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()


class Facts(Mapping[str, object]):
    """One namespace.  What is not at hand is gathered at its first use; what even then is not there is null, or unknown where `needs` says why."""

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
            except Unknown as unknown:
                self._needs = str(unknown)
        if name in self._known:
            value = self._known[name]
            if isinstance(value, Unknown):
                raise value
            return value
        if self._needs:
            raise Unknown(self._needs)
        return None

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def rules(tree: Mapping[str, Any], *, own: bool = False) -> tuple[Rule, ...]:
    """The rules of a gotchas file that its schema has accepted.  `own`: it is not the library's."""
    return tuple(
        Rule(
            id=each["id"],
            severity=each["severity"],
            title=each["title"],
            about=each.get("about", "training"),
            when=each["when"],
            message=each["message"],
            remedy=each["remedy"],
            evidence=tuple(each["evidence"]),
            given=tuple(each.get("given", ())),
            each=each.get("each", ""),
            fix=each.get("fix", {}),
            own=own,
        )
        for each in tree.get("rules", ())
    )


def tools_of(
    command: Sequence[str], imports: Iterable[str], known: Mapping[str, Sequence[str]]
) -> list[str]:
    """Which tools a step uses: a pattern is like a word of its command, the last part of one, that and the next, or an imported module."""
    parts = [name.rpartition("/")[2] for name in command]
    heads = {*command, *parts, *map(" ".join, pairwise(parts))}
    heads |= {f"import {name.partition('.')[0]}" for name in imports}
    return [
        tool
        for tool, patterns in known.items()
        if any(fnmatch.filter(heads, pattern) for pattern in patterns)
    ]


def judge(all: Iterable[Rule], facts: Mapping[str, object], step: str = "") -> Verdict:
    """What the rules say of these facts: each namespace by its name, those that are unknown too."""
    findings: list[Finding] = []
    unchecked: list[Unchecked] = []
    for rule in all:
        try:
            if any(_value("{{ " + name + " }}", facts) is None for name in rule.given):
                continue
            for item in _items(rule, facts):
                scope = {**facts, "item": item}
                read: dict[str, object] = {}
                if _value(rule.when, scope, read):
                    findings.append(_finding(rule, scope, step, read))
        except Unknown as unknown:
            unchecked.append(Unchecked(rule, f"needs {unknown}", step))
        except TemplateError as error:
            unchecked.append(Unchecked(rule, f"cannot evaluate the rule: {error}", step))
    return Verdict(tuple(findings), tuple(unchecked))


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Several verdicts as one; what is said of several steps in the same words is said once, of the first."""
    findings: dict[tuple[str, str], Finding] = {}
    unchecked: dict[tuple[str, str], Unchecked] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            findings.setdefault((finding.rule.id, finding.message), finding)
        for each in verdict.unchecked:
            unchecked.setdefault((each.rule.id, each.why), each)
    order = {"error": 0, "warning": 1, "note": 2}
    fired = {rule for rule, _ in findings}
    first = {
        each.rule.id: each for each in reversed(unchecked.values()) if each.rule.id not in fired
    }
    return Verdict(
        tuple(sorted(findings.values(), key=lambda each: order[each.rule.severity])),
        tuple(sorted(first.values(), key=lambda each: each.rule.id)),
    )


def faults(rule: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], TemplateError]]:
    """Every template of a rule that cannot be read, with its place below the rule."""
    places: list[tuple[tuple[str | int, ...], object]] = [
        ((name,), rule.get(name)) for name in ("when", "each", "message", "remedy")
    ]
    places += [(("given", n), "{{ " + name + " }}") for n, name in enumerate(rule.get("given", ()))]
    places += [
        (("fix", kind, name), value)
        for kind, values in rule.get("fix", {}).items()
        for name, value in values.items()
    ]
    for where, text in places:
        if isinstance(text, str):
            try:
                found = expressions(text)
                for expression in found:
                    for reference in expression.references:
                        if reference.path[0] not in (*ALWAYS, *NEEDS):
                            names = ", ".join((*ALWAYS, *NEEDS))
                            raise TemplateError(
                                f"there is no `{reference.path[0]}`",
                                reference.offset,
                                reference.length,
                                f"available: {names}",
                            )
                        fields = FIELDS.get(reference.path[0])
                        if (
                            fields is not None
                            and reference.path[1:]
                            and str(reference.path[1]) not in fields
                        ):
                            known = (
                                did_you_mean(str(reference.path[1]), fields)
                                or f"available: {', '.join(fields)}"
                            )
                            raise TemplateError(
                                f"`{reference.path[0]}` has no `{reference.path[1]}`",
                                reference.offset,
                                reference.length,
                                known,
                            )
                if where[0] in ("when", "each") and (
                    len(found) != 1 or found[0].length != len(text)
                ):
                    raise TemplateError(
                        "the value must be one expression",
                        0,
                        len(text),
                        'write "{{ … }}" and nothing else',
                    )
            except TemplateError as error:
                yield (
                    where,
                    TemplateError(str(error), 0, len(text) - 6, error.fix)
                    if where[0] == "given"
                    else error,
                )


_SETTING: Final = re.compile(r'settings(?:\.(\w+)|\["(.+)"\])')
"""A setting as the reader of an expression names what it read."""


def _items(rule: Rule, facts: Mapping[str, object]) -> Sequence[object]:
    """Return what a rule is judged for, one after the other; once if it has no `each`."""
    if not rule.each:
        return (None,)
    items = _value(rule.each, facts)
    if isinstance(items, (list, tuple)):
        return items
    return list(items) if isinstance(items, Mapping) else ()


def _finding(
    rule: Rule, scope: Mapping[str, object], step: str, found: Mapping[str, object]
) -> Finding:
    """Return the finding of a rule that fired; `found` are the values that its condition read."""
    remedy = _render(rule.remedy, scope, "")
    origins: dict[str, Origin] = {}
    settings = scope.get("settings")
    if isinstance(settings, Settings):
        names = _settings_named(rule, scope, found)
        origins = _origins(settings, names, scope.get("item"))
        judged = [name for name in names if name not in rule.fix.get("settings", {})]
        guess = _guessed_name(settings, judged)
        if guess and not rule.own and rule.severity != "note":
            rule = replace(rule, severity="note")
            remedy = f"{remedy} (a guess from the name `{guess}`)".strip()
    message = _render(rule.message, scope, rule.title)
    return Finding(rule, message, remedy, step, _evaluate_fix(rule, scope), origins)


def _evaluate_fix(rule: Rule, scope: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the settings, variables and resources that a rule proposes, without empty ones."""
    fix = {}
    for kind, templates in rule.fix.items():
        values = {name: _value(template, scope) for name, template in templates.items()}
        proposed = {name: value for name, value in values.items() if value is not None}
        if proposed:
            fix[kind] = proposed
    return fix


def _settings_named(
    rule: Rule, scope: Mapping[str, object], found: Mapping[str, object]
) -> list[str]:
    """Return the names of the settings that a rule is about, those that it changes first."""
    given = [
        reference.path for name in rule.given for reference in references("{{ " + name + " }}")
    ]
    asked = [reference.path for reference in references(rule.when)]
    read = (_SETTING.fullmatch(key) for key, value in found.items() if value is not None)
    item = scope.get("item")
    return [
        *rule.fix.get("settings", {}),
        *_of_settings(given),
        *(_SUBJECTS[path[0]] for path in asked if path[0] in _SUBJECTS),
        *(match[1] or match[2] for match in read if match),
        *_of_settings(asked),
        *([item] if isinstance(item, str) else []),
    ]


def _of_settings(paths: Iterable[Sequence[str]]) -> list[str]:
    return [path[1] for path in paths if path[0] == "settings" and len(path) > 1]


def _origins(settings: Settings, names: Iterable[str], item: object) -> dict[str, Origin]:
    """Return where settings are said, by name; `item` may be a value that one of them has."""
    places = {name: settings.place(name) for name in names}
    if isinstance(item, str):
        places[item] = places.get(item) or settings.saying(item)
    return {name: place for name, place in places.items() if place is not None}


_SUBJECTS: Final = {"model": "base", "data": "dataset", "memory": "base"}
"""The setting that says what each of these namespaces is about."""


def _guessed_name(settings: Settings, names: Iterable[str]) -> str:
    """The name of a setting that is taken for one of these by its name alone; empty where none is."""
    for name in names:
        found = settings.setting(name)
        if found is not None and not found.declared:
            return found.origin.name
    return ""


def _value(
    text: object, scope: Mapping[str, object], read: dict[str, object] | None = None
) -> object:
    return evaluate(text, scope, read) if isinstance(text, str) and has(text) else text


def _render(text: str, scope: Mapping[str, object], otherwise: str) -> str:
    try:
        return str(evaluate(text, scope)).strip()
    except (Unknown, TemplateError):
        return otherwise
