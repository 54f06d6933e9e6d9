"""Turn a document into a Recipe, or into every problem of shape and meaning that one file can show.  Knows no other file.

What needs a plan (edges, cycles of steps, output paths as rendered, names inside commands) is found where plans are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from runner.errors import Invalid, Problem, did_you_mean

from . import document as documents
from . import schema, units
from .document import Document
from .inputs import Wrong, converted, leaves, misread, ordered
from .recipe import AutoCode, GitCode, Glob, Health, Input, Limits, Metrics, Output, Preset, Python, Recipe, Resources, Select, State, Step, Uses
from .template import TemplateError, has, references
from .values import Where

_T = TypeVar("_T")

_SCOPE = frozenset(("inputs", "steps", "outputs", "state", "matrix", "fixtures", "run", "step", "node", "nodes", "host"))
_REPLACED = ("resources", "limits", "image", "python", "env")
_USES_KEYS = frozenset(("uses", "with", "preset", "needs", "when", "matrix", "where", "resources"))
_SELECT_KEYS = frozenset(("select", "min", "max", "needs", "when"))
_ADDRESSES = ("dataset", "model")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("minLength", "maxLength", "pattern")
_LISTS = ("minItems", "maxItems", "uniqueItems")
_LIMITS: Mapping[str, tuple[str, ...]] = {"integer": _NUMBERS, "number": _NUMBERS, "string": _TEXTS, "choice": ("choices",)}


def load(path: Path) -> Recipe:
    """The recipe in a file.  Raises Invalid with every problem, NotFound when there is no file."""
    return recipe(documents.read(path))


def recipe(document: Document) -> Recipe:
    """The recipe that `document` holds.  Raises Invalid with every problem."""
    value: object = document.value
    found = schema.faults(value)
    problems = [schema.located(document, fault) for fault in found]
    if found:
        value = _sound_part(value, found)
    reader = _Reader(document, value if isinstance(value, dict) else {})
    result = reader.recipe()
    problems += reader.problems
    if problems:
        raise Invalid(sorted(problems, key=_place))
    return result


def _place(problem: Problem) -> tuple[int, int]:
    return (problem.where.line, problem.where.column) if problem.where else (0, 0)


def _sound_part(value: Any, faults: list[schema.Fault]) -> object:
    """`value` without what is wrong in it, so that the meaning of the rest can be checked in the same breath."""
    value = _without(value, [fault.path for fault in faults if fault.path])
    if not isinstance(value, dict) or len(faults) >= schema.MANY:
        return {}
    while again := [fault for fault in schema.faults(value) if fault.path]:  # a fault of the whole is only a missing key
        value = _without(value, [fault.path[: 2 if fault.path[0] in ("steps", "inputs", "presets") else 1] for fault in again])
    return value


def _without(value: Any, paths: Iterable[Where]) -> Any:
    here = {path[0] for path in paths if len(path) == 1}
    below: dict[object, list[Where]] = {}
    for path in paths:
        if len(path) > 1:
            below.setdefault(path[0], []).append(path[1:])
    if isinstance(value, dict):
        return {key: _without(item, below[key]) if key in below else item for key, item in value.items() if key not in here}
    if isinstance(value, list):
        return [_without(item, below[n]) if n in below else item for n, item in enumerate(value) if n not in here]
    return value


class _Reader:
    """One reading.  `raw` satisfies the schema; the document may hold more, which is known by name."""

    def __init__(self, document: Document, raw: dict[str, Any]) -> None:
        self.document, self.raw = document, raw
        self.problems: list[Problem] = []
        self.steps = self._names("steps")
        self.inputs = self._names("inputs")

    def recipe(self) -> Recipe:
        raw = self.raw
        name, _, version = str(raw.get("recipe", "unnamed@1")).partition("@")
        self._check_file_name(name, version)
        inputs = {id: self._input(id, item) for id, item in raw.get("inputs", {}).items()}
        self._check_defaults(inputs)
        return Recipe(
            name=name,
            version=int(version),
            summary=raw.get("summary", ""),
            document=self.document,
            doc=raw.get("doc", ""),
            inputs=inputs,
            presets={id: self._preset(id, item, inputs) for id, item in raw.get("presets", {}).items()},
            steps={id: self._step(id, item) for id, item in raw.get("steps", {}).items()},
            outputs=raw.get("outputs"),
            resources=self._resources(raw.get("resources", {}), ("resources",)),
            limits=self._limits(raw.get("limits", {}), ("limits",)),
            image=raw.get("image"),
            python=self._python(raw.get("python"), ("python",)),
            setup=tuple(raw.get("setup", ())),
            health=self._health(raw["health"]) if "health" in raw else None,
            cleanup=tuple(raw.get("cleanup", ())),
            env=raw.get("env", {}),
            pass_env=tuple(raw.get("pass_env", ())),
            env_files=_env_files(raw),
            secrets=self._secrets(raw, ()),
            code=_code(raw.get("code", ())),
        )

    # -- problems --------------------------------------------------------------------------------------------------------------------------------

    def _near(self, word: str, known: Iterable[str]) -> str:
        """`did_you_mean`, for as many words as a person would read: it compares with every name there is."""
        return did_you_mean(word, islice(known, 5000)) if len(self.problems) < 20 else ""

    def _problem(self, code: str, message: str, path: Where, fix: str = "", *, key: bool = False) -> None:
        if len(self.problems) < schema.MANY:
            self.problems.append(self.document.problem(code, message, path, fix=fix, key=key))

    def _names(self, section: str) -> list[str]:
        whole = self.document.value
        names = whole.get(section) if isinstance(whole, dict) else None
        return list(names) if isinstance(names, dict) else []

    def _check_file_name(self, name: str, version: str) -> None:
        file = Path(self.document.name)
        if "@" in file.stem and file.stem != f"{name}@{version}" and "recipe" in self.raw:
            message = f'the recipe calls itself "{name}@{version}", and its file is {file.name}'
            self._problem("wrong-name", message, ("recipe",), "give both the same name and version")

    # -- inputs ----------------------------------------------------------------------------------------------------------------------------------

    def _input(self, name: str, raw: dict[str, Any]) -> Input:
        path: Where = ("inputs", name)
        kind = raw["type"]
        if name in _SCOPE or name in _REPLACED:
            why = "a word of templates" if name in _SCOPE else "what a preset may replace"
            self._problem(
                "reserved-name", f'an input cannot be called "{name}": it is {why}', path, f'call it "{name}_value", or say what it counts', key=True
            )
        items = raw.get("items")
        allowed = _LISTS + _LIMITS.get(items or "", ()) if kind == "list" else _LIMITS.get(kind, ())
        limits = {word: raw[word] for word in (*_NUMBERS, *_TEXTS, *_LISTS, "choices") if word in raw}
        for word in limits:
            if word not in allowed:
                fix = f"the items of a list have a type: {{type: list, items: {_limited(word)}}}" if kind == "list" else ""
                self._problem("useless-key", f'"{word}" says nothing about {_a(kind)}', (*path, word), fix, key=True)
        for wanted, there, says in (
            ((kind == "choice" or items == "choice"), "choices", "lists the values that it may take"),
            (kind == "secret", "env", "names the variable that holds it"),
        ):
            if wanted and there not in raw:
                self._problem("missing-key", f'input "{name}" has no "{there}"', path, f"{there}: {says}", key=True)
        for word, kinds in (
            ("items", ("list",)),
            ("env", ("secret",)),
            ("secret", _ADDRESSES),
            ("only", _ADDRESSES),
            ("stream", _ADDRESSES),
            ("continues", ("integer", "number")),
        ):
            if word in raw and kind not in kinds:
                self._problem("useless-key", f'"{word}" belongs to an input of type {" or ".join(kinds)}, not {kind}', (*path, word), key=True)
        if raw.get("continues") and raw.get("key") is False:
            message = f'input "{name}" cannot be both `key: false` and `continues: true`'
            self._problem("contradiction", message, (*path, "key"), "a number that says how long to train is part of the key", key=True)
        if kind == "secret":
            for word in ("default", "key"):
                if word in raw:
                    self._problem(
                        "useless-key",
                        f'a secret has no "{word}"',
                        (*path, word),
                        "its value comes from the environment, and is never in a key",
                        key=True,
                    )
        self._check_limits(name, limits)
        if (secret := raw.get("secret")) is not None:
            self._check_secret(secret, (*path, "secret"))
        return Input(
            name=name,
            type=kind,
            doc=raw.get("doc", ""),
            items=items,
            default=raw.get("default"),
            has_default="default" in raw,
            required=raw.get("required", True) and not ("default" in raw and raw["default"] is None),
            limits=limits,
            env=raw.get("env"),
            secret=secret,
            key=raw.get("key", True),
            continues=raw.get("continues", False),
            only=tuple(raw.get("only", ())),
            stream=raw.get("stream", False),
        )

    def _check_limits(self, name: str, limits: dict[str, Any]) -> None:
        for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
            if least in limits and most in limits and limits[least] > limits[most]:
                self._problem(
                    "contradiction", f'no value of "{name}" is at least {limits[least]} and at most {limits[most]}', ("inputs", name, most), key=True
                )
        if "pattern" in limits and self._expression(limits["pattern"], ("inputs", name, "pattern")) is None:
            del limits["pattern"]  # no default can be compared with it

    def _expression(self, pattern: str, path: Where) -> Any:
        import regex

        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            self._problem(
                "bad-pattern",
                f"the pattern cannot be read: {error}",
                path,
                "it is a regular expression; quote it with single quotes to keep its backslashes",
            )

    def _check_defaults(self, inputs: Mapping[str, Input]) -> None:
        """Defaults that are values have the right type; those that are templates name other inputs, and none needs itself."""
        needs: dict[str, set[str]] = {}
        for name, spec in inputs.items():
            path: Where = ("inputs", name, "default")
            needs[name] = self._check_template(spec.default, path) & inputs.keys()
            if spec.has_default and spec.default is not None and not any(leaves(spec.default)):
                self._check_value(spec, spec.default, path)
        _, circle = ordered(needs)
        if circle:
            message = f"these defaults need each other: {' -> '.join(circle)}"
            self._problem("cycle", message, ("inputs", circle[0], "default"), "give one of them a value of its own")

    def _check_value(self, spec: Input, value: Any, path: Where) -> None:
        if spec.type == "secret" or (spec.type == "choice" and "choices" not in spec.limits):
            return
        try:
            converted(spec, value)
        except Wrong as wrong:
            self._problem(wrong.code, f'"{spec.name}" {wrong.message}', path, wrong.fix)

    def _check_template(self, tree: Any, path: Where) -> set[str]:
        """The inputs that `tree` reads; only those and `fixtures` are known before there is a plan."""
        found: set[str] = set()
        for leaf, below in leaves(tree):
            place = (*path, *below)
            try:
                for reference in references(leaf):
                    root, name = reference.path[0], reference.path[1] if len(reference.path) > 1 else None
                    says = fix = ""
                    if root == "inputs" and name in self.inputs:
                        found.add(name)
                        if self._type(name) == "secret":
                            says, fix = f'"{name}" is a secret and cannot be part of a value', "list it under `secrets`"
                    elif root == "inputs" and name is not None:
                        says, fix = f'there is no input "{name}"', self._near(name, self.inputs)
                    elif root == "inputs":
                        says, fix = "a value cannot depend on all inputs at once", "name the input: {{ inputs.NAME }}"
                    elif root != "fixtures":
                        says, fix = (
                            f'"{root}" is not known here',
                            self._near(root, ("inputs", "fixtures")) or "a value may read {{ inputs.NAME }} and {{ fixtures }}",
                        )
                    if says:
                        self.problems.append(
                            self.document.problem("unknown-name", says, place, fix=fix, offset=reference.offset, length=reference.length)
                        )
            except TemplateError as error:
                self.problems.append(misread(self.document, place, error))
        return found

    def _type(self, name: str) -> object:
        spec = self.raw.get("inputs", {}).get(name)
        return spec["type"] if spec else None

    def _check_secret(self, name: str, path: Where) -> None:
        if name not in self.inputs:
            secrets = [other for other in self.inputs if self._type(other) == "secret"]
            fix = self._near(name, secrets) or f"declare it: {name}: {{type: secret, env: {name.upper()}}}"
            self._problem("unknown-secret", f'there is no secret input "{name}"', path, fix)
        elif self._type(name) not in ("secret", None):
            self._problem("unknown-secret", f'the input "{name}" is not a secret', path, f"give it {{type: secret, env: {name.upper()}}}")

    def _secrets(self, raw: Mapping[str, Any], path: Where) -> tuple[str, ...]:
        names = tuple(raw.get("secrets", ()))
        for n, name in enumerate(names):
            self._check_secret(name, (*path, "secrets", n))
        return names

    def _preset(self, id: str, raw: dict[str, Any], inputs: Mapping[str, Input]) -> Preset:
        path: Where = ("presets", id)
        values = {name: value for name, value in raw.items() if name not in _REPLACED}
        for name, value in values.items():
            if name not in self.inputs:
                self._problem("unknown-input", f'there is no input "{name}"', (*path, name), self._near(name, [*self.inputs, *_REPLACED]), key=True)
            elif (spec := inputs.get(name)) is not None:
                if spec.type == "secret":
                    self._problem(
                        "secret-given", f'"{name}" is a secret; a preset cannot hold it', (*path, name), f"set the variable {spec.env}", key=True
                    )
                else:
                    self._check_template(value, (*path, name))
                    if not any(leaves(value)):
                        self._check_value(spec, value, (*path, name))
        return Preset(
            name=id,
            inputs=values,
            resources=self._resources(raw["resources"], (*path, "resources")) if "resources" in raw else None,
            limits=self._limits(raw["limits"], (*path, "limits")) if "limits" in raw else None,
            image=raw.get("image"),
            python=self._python(raw.get("python"), (*path, "python")),
            env=raw.get("env"),
        )

    def _python(self, raw: Any, path: Where) -> Python | None:
        if not raw:
            return None
        lock = raw.get("lock", "")
        name = lock.rpartition("/")[2]
        if (fix := other_lock(name)) is not None:
            self._problem("unknown-lock", f"{name} cannot be installed here", (*path, "lock"), fix)
        return Python(lock, raw.get("version", ""))

    # -- quantities ------------------------------------------------------------------------------------------------------------------------------

    def _unit(self, parse: Callable[[str], _T], raw: Mapping[str, Any], word: str, path: Where) -> _T | None:
        text = raw.get(word)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self._problem("bad-unit", str(error), (*path, word))
            return None

    def _resources(self, raw: dict[str, Any], path: Where) -> Resources:
        if not raw:
            return _NO_RESOURCES
        gpus = raw.get("gpus")
        return Resources(
            cpus=raw.get("cpus"),
            memory=self._unit(units.size, raw, "memory", path),
            gpus=None if gpus is None else int(gpus),
            gpu=raw.get("gpu"),
            gpu_memory=self._unit(units.size, raw, "gpu_memory", path),
            disk=self._unit(units.size, raw, "disk", path),
            pools=raw.get("pools", {}),
            key=raw.get("key", False),
        )

    def _limits(self, raw: dict[str, Any], path: Where) -> Limits:
        return Limits(time=self._unit(units.duration, raw, "time", path), cost=self._unit(units.money, raw, "cost", path))

    def _health(self, raw: dict[str, Any]) -> Health:
        every = self._unit(units.duration, raw, "every", ("health",))
        return Health(raw["run"]) if every is None else Health(raw["run"], every)

    # -- steps -----------------------------------------------------------------------------------------------------------------------------------

    def _step(self, id: str, raw: dict[str, Any]) -> Step:
        path: Where = ("steps", id)
        for n, need in enumerate(raw.get("needs", ())):
            self._check_step_name(id, need, (*path, "needs", n))
        self._check_kind(id, raw, path)
        retries = raw.get("retries", 0)
        failure, preemption = (retries.get("failure", 0), retries.get("preemption", 10)) if isinstance(retries, dict) else (retries, 10)
        nodes = raw.get("nodes")
        return Step(
            id=id,
            origin=path,
            run=raw.get("run"),
            accelerate=raw.get("accelerate"),
            uses=Uses(raw["uses"], raw.get("with", {}), raw.get("preset")) if "uses" in raw else None,
            select=self._select(id, raw, path) if "select" in raw else None,
            shell=raw.get("shell", "sh"),
            needs=tuple(raw.get("needs", ())),
            deps=tuple(map(_path_or_glob, raw.get("deps", ()))),
            code=_code(raw["code"]) if "code" in raw else None,
            files=raw.get("files", {}),
            outputs=tuple(self._outputs(id, raw["outputs"], path)) if "outputs" in raw else (),
            state=tuple(self._state(name, item or {}, (*path, "state", name)) for name, item in raw["state"].items()) if "state" in raw else (),
            env=raw.get("env", {}),
            pass_env=tuple(raw.get("pass_env", ())),
            env_files=_env_files(raw),
            secrets=self._secrets(raw, path) if "secrets" in raw else None,
            image=raw.get("image"),
            python=self._python(raw.get("python"), (*path, "python")),
            resources=self._resources(raw.get("resources", {}), (*path, "resources")),
            nodes=int(nodes) if isinstance(nodes, float) else nodes,
            matrix=raw.get("matrix"),
            allow_failure=raw.get("allow_failure", False),
            when=raw.get("when"),
            retries=int(failure),
            preemptions=int(preemption),
            timeout=self._unit(units.duration, raw, "timeout", path),
            idle_timeout=self._unit(units.duration, raw, "idle_timeout", path),
            cache=raw.get("cache", True),
            metrics=self._metrics(raw["metrics"], path) if raw.get("metrics") else None,
            local=raw.get("where") == "local",
        )

    def _check_step_name(self, id: str, name: str, path: Where) -> None:
        if name == id:
            self._problem("cycle", f'step "{id}" needs itself: {id} -> {id}', path, "remove it")
        elif name not in self.steps:
            self._problem("unknown-step", f'there is no step "{name}"', path, self._near(name, (other for other in self.steps if other != id)))

    def _check_kind(self, id: str, raw: dict[str, Any], path: Where) -> None:
        """Keys that say nothing on this kind of step are mistakes."""
        if "uses" in raw or "select" in raw:
            kind, keys = ("uses", _USES_KEYS) if "uses" in raw else ("select", _SELECT_KEYS)
            for word in raw:
                if word not in keys:
                    fix = f"a step with `{kind}` takes only {' '.join(sorted(keys - {kind}))}"
                    self._problem("useless-key", f'"{word}" has no place beside `{kind}`', (*path, word), fix, key=True)
        for words, kind in ((("with", "preset"), "uses"), (("min", "max"), "select")):
            for word in words:
                if word in raw and kind not in raw and not ("uses" in raw or "select" in raw):
                    self._problem("useless-key", f'"{word}" says nothing without `{kind}`', (*path, word), key=True)
        if "shell" in raw and "run" in raw and not isinstance(raw["run"], str):
            message = f'step "{id}" runs a list of arguments, which no shell reads'
            self._problem("useless-key", message, (*path, "shell"), "remove it, or write the command as a script", key=True)
        if raw.get("allow_failure") and "matrix" not in raw:
            self._problem("useless-key", '"allow_failure" says nothing without `matrix`', (*path, "allow_failure"), key=True)

    def _select(self, id: str, raw: dict[str, Any], path: Where) -> Select:
        name = raw["select"]
        head, _, inside = name.partition("/")
        self._check_step_name(id, head, (*path, "select"))
        source = self.raw.get("steps", {}).get(head)
        if head != id and source is not None and "uses" not in source:  # what a recipe has inside is not known here
            if inside:
                self._problem("unknown-step", f'"{head}" has no steps inside', (*path, "select"), f"select: {head}")
            elif "matrix" not in source:
                self._problem("not-a-matrix", f'step "{name}" has no `matrix` to select from', (*path, "select"), "mention its outputs directly")
        best = [word for word in ("min", "max") if word in raw]
        if len(best) != 1:
            fix = "keep one" if best else "min: METRIC takes the least, max: METRIC the greatest"
            what = 'neither "min" nor "max"' if not best else 'both "min" and "max"'
            self._problem("missing-key" if not best else "one-of", f'step "{id}" has {what}', path, fix, key=True)
        return Select(name, raw.get("min", raw.get("max", "")), "min" if "min" in raw else "max")

    def _outputs(self, id: str, raw: Any, path: Where) -> Iterator[Output]:
        """A plain list names each output by its path."""
        named = raw.items() if isinstance(raw, dict) else [(item, item) for item in raw]
        seen: dict[str, str] = {}
        for n, (name, item) in enumerate(named):
            place: Where = (*path, "outputs", name if isinstance(raw, dict) else n)
            long = item if isinstance(item, dict) else {"path": item}
            text = long["path"]
            bare = text.rstrip("/") if text.endswith("/") else text
            if not bare:
                self._problem(
                    "bad-path", f'"{text}" is not the path of an output', place, "an output is below the attempt directory: models/, report.json"
                )
                continue
            if bare in seen and not has(bare):
                other = f'"{seen[bare]}" and "{name}"' if seen[bare] != name else "two outputs"
                self._problem("same-path", f'{other} of step "{id}" are one path, {text}', place, "give each a path of its own")
            seen[bare] = name
            yield Output(
                name=name,
                path=bare,
                directory=text.endswith("/"),
                optional=long.get("optional", False),
                nonempty=long.get("nonempty", False),
                temporary=long.get("temporary", False),
                sync=self._unit(units.duration, long, "sync", place),
                doc=long.get("doc", ""),
            )

    def _state(self, name: str, raw: dict[str, Any], path: Where) -> State:
        keep = raw.get("keep")
        if keep is not None and "checkpoint" not in raw:
            self._problem(
                "missing-key",
                f'"keep" of state "{name}" counts checkpoints, and no "checkpoint" says what one is',
                (*path, "keep"),
                "add checkpoint: step-*",
                key=True,
            )
        return State(
            name=name,
            path=raw.get("path", f"state/{name}").rstrip("/") or "/",
            checkpoint=raw.get("checkpoint"),
            every=self._unit(units.duration, raw, "every", path),
            keep=None if keep is None else int(keep),
            shared="to" in raw,
        )

    def _metrics(self, raw: Any, path: Where) -> Metrics:
        if raw is True:
            return Metrics()
        if "pattern" in raw:
            found = self._expression(raw["pattern"], (*path, "metrics", "pattern"))
            if found is not None and not found.groupindex:
                self._problem(
                    "bad-pattern",
                    "the pattern has no named group, and so no metric",
                    (*path, "metrics", "pattern"),
                    "name what it finds: loss (?P<loss>[0-9.]+)",
                )
        return Metrics(raw.get("file"), raw.get("pattern"))


_NO_RESOURCES = Resources()
_OTHER_LOCKS = (
    (
        r"(environment|conda).*\.ya?ml|conda-lock.*|pixi\.(lock|toml)",
        "put its Python packages into requirements.txt and name that; what is no Python package comes with an `image`",
    ),
    (r"poetry\.lock|pdm\.lock|Pipfile(\.lock)?", "name pyproject.toml, or export it: requirements.txt with hashes"),
)
"""Files that people name as locks and that are none of ours, and what to do."""


def _path_or_glob(item: Any) -> str | Glob:
    return item if isinstance(item, str) else Glob(item["glob"], tuple(item.get("exclude", ())))


def _env_files(raw: Mapping[str, Any]) -> tuple[str, ...]:
    found = raw.get("env_file", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _code(raw: Sequence[Any] | str) -> tuple[str | Glob | GitCode | AutoCode, ...]:
    if isinstance(raw, str):
        return (AutoCode(),)
    git = [isinstance(item, dict) and "git" in item for item in raw]
    return tuple(GitCode(item["git"], item["commit"], item["at"]) if is_git else _path_or_glob(item) for item, is_git in zip(raw, git, strict=True))


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _limited(word: str) -> str:
    return "number" if word in _NUMBERS else "string" if word in _TEXTS else "choice"


def other_lock(name: str) -> str | None:
    """What to do instead with a file of packages of this name, when it is of a kind that is not installed here."""
    return next((fix for pattern, fix in _OTHER_LOCKS if re.fullmatch(pattern, name)), None)
