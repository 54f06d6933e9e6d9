"""Convert a Snakefile to a recipe, with the help of Snakemake's own parser.

Snakemake executes a Snakefile to parse it. `rules_of` does this in a subprocess, with the Python
that has Snakemake installed. No rule is run.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import string
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CannotRun
from .drafting import plain_name
from .importing import ImportedRecipe, Table, Value, unused_name

PATIENCE: Final = 120.0
"""Timeout for parsing a Snakefile, in seconds."""
_WILDCARD: Final = re.compile(r"\{\s*(\w+)\s*(?:,\s*([^{}]+(?:\{\d+(?:,\d*)?\}[^{}]*)*))?\}")
_CODE: Final = (".py", ".sh", ".R", ".pl", ".jl")
_PROGRAM: Final = r"""
import json, os, sys
from pathlib import Path
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # programs that the Snakefile starts write to stderr, too
sys.stdout = sys.stderr
from snakemake.api import SnakemakeApi
from snakemake.settings.types import OutputSettings, ResourceSettings

def items(found):
    named = {}
    for name, (start, end) in getattr(found, "_names", {}).items():
        for n in range(start, start + 1 if end is None else end):
            named[n] = name
    def text(each):
        if callable(each):
            return None
        flags = getattr(each, "flags", None) or {}
        return str(each).rstrip("/") + ("/" if flags.get("directory") else "")
    return [[named.get(n, ""), text(each)] for n, each in enumerate(found)]

def other(rule):
    words = ("script", "notebook", "wrapper", "conda_env", "container_img")
    return [word for word in words if getattr(rule, word, None)]

with SnakemakeApi(OutputSettings()) as api:
    workflow = api.workflow(ResourceSettings(cores=1), snakefile=Path(sys.argv[1]))._workflow
    rules = [
        {"name": rule.name, "input": items(rule.input), "output": items(rule.output), "log": items(rule.log),
         "params": items(rule.params), "shell": rule.shellcmd, "other": other(rule)}
        for rule in workflow.rules
    ]
    print(json.dumps({"rules": rules, "target": workflow.default_target}), file=said, flush=True)
"""


def rules_of(python: str, snakefile: Path, root: Path) -> Table:
    """Return the rules and the default target of a Snakefile, parsed by Snakemake.

    This executes the Snakefile in the directory `root`. `python` is the interpreter with Snakemake.
    Raises CannotRun if Snakemake fails or takes longer than `PATIENCE` seconds.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, str(snakefile)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(
            f"cannot read {snakefile.name}: {error}",
            fix="check that Snakemake itself can read the file",
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise CannotRun(
            f"Snakemake cannot read {snakefile.name}: {last}",
            fix="check the file with `snakemake -n`; version 8 or newer is required",
        )
    try:
        found: Table = json.loads(done.stdout)
    except ValueError as error:
        raise CannotRun(
            f"Snakemake cannot read {snakefile.name}: its answer is not JSON",
            fix="check the file with `snakemake -n`; version 8 or newer is required",
        ) from error
    return found


class _Rule(NamedTuple):
    name: str
    inputs: Sequence[tuple[str, str | None]]
    outputs: Sequence[tuple[str, str | None]]
    logs: Sequence[tuple[str, str | None]]
    params: Sequence[tuple[str, str | None]]
    shell: str | None
    other: Sequence[str]

    @property
    def outputs_of_rule(self) -> list[tuple[str, str]]:
        return [(name, path) for name, path in (*self.outputs, *self.logs) if path]


def _rule(read: Value) -> _Rule:
    def items(section: str) -> list[tuple[str, str | None]]:
        return [(str(word), path) for word, path in read[section]]

    return _Rule(
        read["name"],
        items("input"),
        items("output"),
        items("log"),
        items("params"),
        read["shell"],
        read["other"],
    )


def from_snakemake(name: str, read: Value, kind: Callable[[str], str]) -> ImportedRecipe:
    """Convert the rules required for the default target to a recipe.

    `read` is the result of `rules_of`. `kind` returns "file", "folder" or "code" for a path.
    """
    made = ImportedRecipe({"recipe": f"{name}@1", "summary": "What the Snakefile makes"})
    rules = {each["name"]: _rule(each) for each in read["rules"]}
    needed = _NeededRules(rules, made.look)
    target = rules.get(read["target"])
    if target is None:
        made.look.append("the Snakefile has no rule as its target")
    else:
        needed.add_target(target)
    wanted = {name: needed.instances[name] for name in needed.order}
    steps: Table = {}
    for rule, instances in wanted.items():
        steps[unused_name(plain_name(rule), steps)] = _step(rules[rule], instances, kind, made.look)
    made.recipe["steps"] = steps
    for rule in rules:
        # The target is often a rule that only lists the files to create.
        if rule not in wanted and rule != read["target"]:
            made.look.append(f"rule {rule} is not required for {read['target']} and was skipped")
    return made


class _NeededRules:
    """The rules required for a target: the wildcard values of each, and their execution order."""

    def __init__(self, rules: Mapping[str, _Rule], look: list[str]) -> None:
        self.instances: dict[str, list[dict[str, str]]] = {}
        self.order: list[str] = []
        self._rules = rules
        self._look = look

    def add_target(self, rule: _Rule) -> None:
        """Add a rule that is the target; if it executes nothing, the rules for its inputs."""
        executes = rule.shell or rule.other
        if rule.outputs or executes:
            self._add(rule, {}, ())
        else:
            for _, path in rule.inputs:
                self._add_path(path or "", ())

    def _add(self, rule: _Rule, values: dict[str, str], above: tuple[str, ...]) -> None:
        """Add a rule with wildcard values, after the rules for its inputs.

        `above` are the rules that need it, which ends circular dependencies.
        """
        known = self.instances.setdefault(rule.name, [])
        if values in known or rule.name in above:
            return
        known.append(values)
        for _, path in rule.inputs:
            if path is None:
                self._look.append(
                    f"an input of rule {rule.name} is a function: add its results to `deps`"
                )
            else:
                self._add_path(_fill(path, values), (*above, rule.name))
        if rule.name not in self.order:
            self.order.append(rule.name)

    def _add_path(self, path: str, above: tuple[str, ...]) -> None:
        """Add the first rule with an output that matches the path; none for a source file."""
        for rule in self._rules.values():
            for _, pattern in rule.outputs:
                match = _pattern(pattern).fullmatch(path) if pattern else None
                if match:
                    self._add(rule, match.groupdict(), above)
                    return


def _pattern(path: str) -> re.Pattern[str]:
    """Return a regular expression that matches the paths of an output with wildcards."""
    parts, end, seen = "", 0, set[str]()
    for match in _WILDCARD.finditer(path):
        parts += re.escape(path[end : match.start()])
        name, constraint = match[1], match[2]
        parts += f"(?P={name})" if name in seen else f"(?P<{name}>{constraint or '.+'})"
        seen.add(name)
        end = match.end()
    return re.compile(parts + re.escape(path[end:]))


def _fill(path: str, values: Mapping[str, str]) -> str:
    return _WILDCARD.sub(lambda match: values.get(match[1], match[0]), path)


def _as_template(path: str) -> str:
    return _WILDCARD.sub(lambda match: f"{{{{ matrix.{plain_name(match[1])} }}}}", path)


def _step(
    rule: _Rule,
    instances: Sequence[Mapping[str, str]],
    kind: Callable[[str], str],
    look: list[str],
) -> Table:
    """Convert a rule to a step, with a matrix of its wildcards."""
    step = _matrix(rule.name, instances, look)
    names = _names(rule)
    if any(path is None for _, path in (*rule.outputs, *rule.logs)):
        look.append(f"an output of rule {rule.name} is a function: add its paths to `outputs`")
    if rule.shell is None:
        how = ", ".join(rule.other) or "Python of the Snakefile"
        look.append(f"rule {rule.name} has no shell command ({how}): write its command into `run`")
        step["run"] = f"echo 'write the command of rule {rule.name} here' >&2; exit 1"
    else:
        step["run"] = _command(rule, rule.shell, names, look).strip()
    environments = [word for word in rule.other if word in ("conda_env", "container_img")]
    if environments:
        look.append(
            f"rule {rule.name} has its own environment ({', '.join(environments)}): declare it as `python` or `image`"
        )
    code, deps = _code_and_deps(rule, kind)
    if code:
        step["code"] = code
    if deps:
        step["deps"] = list(dict.fromkeys(deps))
    if names:
        paths = [_as_template(path) for _, path in rule.outputs_of_rule]
        step["outputs"] = dict(zip(names, paths, strict=True))
    return step


def _matrix(rule: str, instances: Sequence[Mapping[str, str]], look: list[str]) -> Table:
    """Return the `matrix` of the wildcards, and `when` if only some combinations are required."""
    whole = _select_whole(rule, instances, look)
    words = list(whole[0])
    if not words:
        return {}
    axes = {word: _distinct_values(word, whole) for word in words}
    step: Table = {"matrix": {plain_name(word): values for word, values in axes.items()}}
    combinations = math.prod(len(values) for values in axes.values())
    if combinations > len(whole):
        chosen = json.dumps([[each[word] for word in words] for each in whole], ensure_ascii=False)
        named = ", ".join(f"matrix.{plain_name(word)}" for word in words)
        step["when"] = f"{{{{ [{named}] in {chosen} }}}}"
    return step


def _select_whole(
    rule: str, instances: Sequence[Mapping[str, str]], look: list[str]
) -> list[Mapping[str, str]]:
    """Return the instances with all wildcards of the rule; add a note for the others."""
    fullest = max(instances, key=len)
    whole = []
    others = []
    for values in instances:
        if values.keys() == fullest.keys():
            whole.append(values)
        else:
            others.append(" and ".join(values))
    for wildcards in dict.fromkeys(others):
        given = f"only the wildcards {wildcards}" if wildcards else "no wildcards"
        look.append(f"rule {rule} is also required with {given}: add a step for it")
    return whole


def _distinct_values(word: str, instances: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(each[word] for each in instances))


def _code_and_deps(rule: _Rule, kind: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """Return the inputs of a rule that are scripts, and its other inputs, as templates."""
    code: list[str] = []
    deps: list[str] = []
    for _, path in rule.inputs:
        if path is None:
            continue
        template = _as_template(path)
        if kind(path) in ("code", "folder") and not path.endswith("/"):
            template += "/"
        if path.endswith(_CODE) and not _WILDCARD.search(path):
            code.append(template)
        else:
            deps.append(template)
    return code, deps


def _names(rule: _Rule) -> list[str]:
    """Return distinct names for the outputs of a rule, followed by its logs."""
    found: list[str] = []
    for word, path in rule.outputs_of_rule:
        base = posixpath.basename(_WILDCARD.sub("", path).rstrip("/"))
        stem = posixpath.splitext(base)[0].strip("._-")
        default = "log" if (word, path) in rule.logs else "made"
        name = plain_name(word or stem or default)
        while name in found:
            name += "_2"
        found.append(name)
    return found


_Fields = Mapping[str, Sequence[tuple[str, str]]]
"""Names and replacements of the items of `input`, `output`, `log` and `params`."""


def _command(rule: _Rule, shell: str, names: Sequence[str], look: list[str]) -> str:
    """Return the shell command of a rule with recipe templates instead of Snakemake fields."""
    fields = _fields(rule, names)
    parts: list[str] = []
    try:
        parsed = list(string.Formatter().parse(shell))
    except ValueError:
        look.append(
            f"rule {rule.name}: its command has unmatched braces: replace its fields by values"
        )
        return shell
    for before, field, _, _ in parsed:
        parts.append(before)
        if field is not None:
            parts.append(_replacement(field, fields, rule, look))
    return "".join(parts)


def _fields(rule: _Rule, names: Sequence[str]) -> _Fields:
    """Return the replacements of a rule's fields; `names` has its outputs, followed by its logs."""
    templates = (f"{{{{ outputs.{name} }}}}" for name in names)
    outputs = _replace_paths(rule.outputs, templates)
    logs = _replace_paths(rule.logs, templates)
    inputs = [(word, _as_template(path or "")) for word, path in rule.inputs]
    params = [(word, value or "") for word, value in rule.params]
    return {
        "input": inputs,
        "output": outputs,
        "log": logs,
        "params": params,
    }


def _replace_paths(
    items: Sequence[tuple[str, str | None]], templates: Iterator[str]
) -> list[tuple[str, str]]:
    """Return the items with the next templates instead of their paths.

    An item without a path has no template. It keeps its position as an empty text.
    """
    return [(name, next(templates) if path else "") for name, path in items]


def _replacement(field: str, fields: _Fields, rule: _Rule, look: list[str]) -> str:
    """Return the template for a field such as `input[0]`; the field itself if unknown."""
    head, _, rest = re.sub(r"\[(\w+)\]", r".\1", field.strip()).partition(".")
    if head == "wildcards" and rest:
        return f"{{{{ matrix.{plain_name(rest)} }}}}"
    if head == "threads":
        look.append(
            f"rule {rule.name} uses {{threads}}, which is now 1: to use more, set `resources: {{cpus: N}}` and change the command"
        )
        return "1"
    items = _select_items(fields.get(head, ()), rest)
    is_section = head in fields and not rest  # may be empty
    if items or is_section:
        return " ".join(items)
    look.append(f"rule {rule.name}: {{{field}}} is unknown: replace it by a value")
    return f"{{{field}}}"


def _select_items(items: Sequence[tuple[str, str]], word: str) -> list[str]:
    """Return the item with a number, or the items with a name; all items for an empty word."""
    if not word:
        return [text for _, text in items]
    if word.isdecimal() and int(word) < len(items):
        return [items[int(word)][1]]
    return [text for name, text in items if name == word]
