"""The inputs and presets of a document, read: types, limits, defaults, and what values may mention before there is a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .bad_values import BadValue
from .input_references import leaves, misread, ordered
from .input_values import converted
from .recipe import Input, Preset
from .source import Source
from .spelling import as_written, value_as_written
from .template import TemplateError, references
from .values import Where
from .yaml_mistakes import quoted

_SCOPE = frozenset(
    (
        "inputs",
        "steps",
        "outputs",
        "state",
        "matrix",
        "fixtures",
        "run",
        "step",
        "node",
        "nodes",
        "host",
    )
)
_REPLACED = ("resources", "limits", "image", "python", "env")
_ADDRESSES = ("dataset", "model")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("minLength", "maxLength", "pattern")
_LISTS = ("minItems", "maxItems", "uniqueItems")
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": _TEXTS,
    "choice": ("choices",),
}


class InputsReader:
    """Of one document."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def input(self, name: str, raw: dict[str, Any]) -> Input:
        path: Where = ("inputs", name)
        kind = raw["type"]
        if name in _SCOPE or name in _REPLACED:
            why = "a word of templates" if name in _SCOPE else "what a preset may replace"
            self._source.problem(
                "reserved-name",
                f'an input cannot be called "{name}": it is {why}',
                path,
                f'call it "{name}_value", or say what it counts',
                key=True,
            )
        items = raw.get("items")
        allowed = _LISTS + _LIMITS.get(items or "", ()) if kind == "list" else _LIMITS.get(kind, ())
        limits = {
            word: raw[word] for word in (*_NUMBERS, *_TEXTS, *_LISTS, "choices") if word in raw
        }
        for word in limits:
            if word not in allowed:
                fix = (
                    f"the items of a list have a type: {{type: list, items: {_limited(word)}}}"
                    if kind == "list"
                    else ""
                )
                self._source.problem(
                    "useless-key",
                    f'"{word}" says nothing about {_a(kind)}',
                    (*path, word),
                    fix,
                    key=True,
                )
        written: Any = self._source.document.value
        for wanted, there, says in (
            (
                (kind == "choice" or items == "choice"),
                "choices",
                "lists the values that it may take",
            ),
            (kind == "secret", "env", "names the variable that holds it"),
        ):
            if wanted and there not in written["inputs"][name]:
                self._source.problem(
                    "missing-key",
                    f'input "{name}" has no "{there}"',
                    path,
                    f"{there}: {says}",
                    key=True,
                )
        for word, kinds in (
            ("items", ("list",)),
            ("env", ("secret",)),
            ("secret", _ADDRESSES),
            ("only", _ADDRESSES),
            ("stream", _ADDRESSES),
            ("continues", ("integer", "number")),
        ):
            if word in raw and kind not in kinds:
                self._source.problem(
                    "useless-key",
                    f'"{word}" belongs to an input of type {" or ".join(kinds)}, not {kind}',
                    (*path, word),
                    key=True,
                )
        if "member" in raw and "file" not in (kind, items):
            message = f'"member" belongs to an input of type file, or to a list of them, not {kind}'
            self._source.problem("useless-key", message, (*path, "member"), key=True)
        if raw.get("continues") and raw.get("key") is False:
            message = f'input "{name}" cannot be both `key: false` and `continues: true`'
            self._source.problem(
                "contradiction",
                message,
                (*path, "key"),
                "a number that says how long to train is part of the key",
                key=True,
            )
        if kind == "secret":
            for word in ("default", "key"):
                if word in raw:
                    self._source.problem(
                        "useless-key",
                        f'a secret has no "{word}"',
                        (*path, word),
                        "its value comes from the environment, and is never in a key",
                        key=True,
                    )
        self._check_limits(name, limits)
        if (secret := raw.get("secret")) is not None:
            self._source.check_secret(secret, (*path, "secret"))
        self._source.check_numbers(limits.get("choices"), (*path, "choices"))
        found = Input(
            name=name,
            type=kind,
            doc=raw.get("doc", ""),
            items=items,
            default=raw.get("default"),
            has_default="default" in raw,
            required=raw.get("required", True)
            and not ("default" in raw and raw["default"] is None),
            limits=limits,
            env=raw.get("env"),
            secret=secret,
            key=raw.get("key", True),
            continues=raw.get("continues", False),
            only=tuple(raw.get("only", ())),
            stream=raw.get("stream", False),
            member=raw.get("member", False),
        )
        where = (*path, "default")
        return replace(
            found, default=value_as_written(self._source.document, found, found.default, where)
        )

    def _check_limits(self, name: str, limits: dict[str, Any]) -> None:
        for least, most in (
            ("minimum", "maximum"),
            ("minLength", "maxLength"),
            ("minItems", "maxItems"),
        ):
            if least in limits and most in limits and limits[least] > limits[most]:
                self._source.problem(
                    "contradiction",
                    f'no value of "{name}" is at least {limits[least]} and at most {limits[most]}',
                    ("inputs", name, most),
                    key=True,
                )
        if (
            "pattern" in limits
            and self._source.expression(limits["pattern"], ("inputs", name, "pattern")) is None
        ):
            del limits["pattern"]  # no default can be compared with it

    def check_defaults(self, inputs: Mapping[str, Input]) -> None:
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
            self._source.problem(
                "cycle",
                message,
                ("inputs", circle[0], "default"),
                "give one of them a value of its own",
            )

    def _check_value(self, spec: Input, value: Any, path: Where) -> None:
        if spec.type == "secret" or (spec.type == "choice" and "choices" not in spec.limits):
            return
        document = self._source.document
        try:
            converted(spec, value)
        except BadValue as wrong:
            fix = wrong.fix
            if spec.type == "string" and isinstance(value, bool):
                fix = f"quote it: {quoted(document.written(path))}"
            self._source.problem(wrong.code, f'"{spec.name}" {wrong.message}', path, fix)

    def _check_template(self, tree: Any, path: Where) -> set[str]:
        """The inputs that `tree` reads; only those and `fixtures` are known before there is a plan."""
        found: set[str] = set()
        for leaf, below in leaves(tree):
            place = (*path, *below)
            try:
                for reference in references(leaf):
                    root, name = (
                        reference.path[0],
                        reference.path[1] if len(reference.path) > 1 else None,
                    )
                    says = fix = ""
                    if root == "inputs" and name in self._source.inputs:
                        found.add(name)
                        if self._source.type(name) == "secret":
                            says, fix = (
                                f'"{name}" is a secret and cannot be part of a value',
                                "list it under `secrets`",
                            )
                    elif root == "inputs" and name is not None:
                        says, fix = (
                            f'there is no input "{name}"',
                            self._source.near(name, self._source.inputs),
                        )
                    elif root == "inputs":
                        says, fix = (
                            "a value cannot depend on all inputs at once",
                            "name the input: {{ inputs.NAME }}",
                        )
                    elif root != "fixtures":
                        says, fix = (
                            f'"{root}" is not known here',
                            self._source.near(root, ("inputs", "fixtures"))
                            or "a value may read {{ inputs.NAME }} and {{ fixtures }}",
                        )
                    if says:
                        self._source.problems.append(
                            self._source.document.problem(
                                "unknown-name",
                                says,
                                place,
                                fix=fix,
                                offset=reference.offset,
                                length=reference.length,
                            )
                        )
            except TemplateError as error:
                self._source.problems.append(misread(self._source.document, place, error))
        return found

    def preset(self, id: str, raw: dict[str, Any], inputs: Mapping[str, Input]) -> Preset:
        path: Where = ("presets", id)
        document = self._source.document
        values = {
            name: value_as_written(document, inputs[name], value, (*path, name))
            if name in inputs
            else value
            for name, value in raw.items()
            if name not in _REPLACED
        }
        for name, value in values.items():
            if name not in self._source.inputs:
                self._source.problem(
                    "unknown-input",
                    f'there is no input "{name}"',
                    (*path, name),
                    self._source.near(name, [*self._source.inputs, *_REPLACED]),
                    key=True,
                )
            elif (spec := inputs.get(name)) is not None:
                if spec.type == "secret":
                    self._source.problem(
                        "secret-given",
                        f'"{name}" is a secret; a preset cannot hold it',
                        (*path, name),
                        f"set the variable {spec.env}",
                        key=True,
                    )
                else:
                    self._check_template(value, (*path, name))
                    if not any(leaves(value)):
                        self._check_value(spec, value, (*path, name))
        return Preset(
            name=id,
            inputs=values,
            resources=self._source.resources(raw["resources"], (*path, "resources"))
            if "resources" in raw
            else None,
            limits=self._source.limits(raw["limits"], (*path, "limits"))
            if "limits" in raw
            else None,
            image=raw.get("image"),
            python=self._source.python(raw.get("python"), (*path, "python")),
            env=as_written(document, raw.get("env"), (*path, "env")),
        )


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _limited(word: str) -> str:
    return "number" if word in _NUMBERS else "string" if word in _TEXTS else "choice"
