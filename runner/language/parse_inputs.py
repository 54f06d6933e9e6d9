"""Parse the inputs and presets of a document: types, limits, defaults.

Also checks the references in their values that are available before planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .bad_values import BadValue
from .input_references import leaves, sort_dependencies, template_problem
from .input_values import convert
from .parse_context import ParseContext
from .recipe import Input, Preset
from .spelling import as_written, value_as_written
from .template import Reference, TemplateError, references
from .values import Where
from .yaml_mistakes import quote

_TEMPLATE_NAMES = frozenset(
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
_REPLACED_BY_PRESETS = ("resources", "limits", "image", "python", "env")
_ADDRESSES = ("dataset", "model")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("minLength", "maxLength", "pattern")
_LISTS = ("minItems", "maxItems", "uniqueItems")
_ALL_LIMITS = (*_NUMBERS, *_TEXTS, *_LISTS, "choices")
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": _TEXTS,
    "choice": ("choices",),
}
"""The limits of each type; others have none."""
_TYPES_OF_KEY: Mapping[str, tuple[str, ...]] = {
    "items": ("list",),
    "env": ("secret",),
    "secret": _ADDRESSES,
    "only": _ADDRESSES,
    "stream": _ADDRESSES,
    "continues": ("integer", "number"),
}
_RANGES = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))


class InputsReader:
    """Parser of a document's inputs and presets. Problems are added to its context."""

    def __init__(self, context: ParseContext) -> None:
        self._context = context

    # -- inputs --

    def input(self, name: str, raw: dict[str, Any]) -> Input:
        """Parse the input `name`."""
        path: Where = ("inputs", name)
        limits = {word: raw[word] for word in _ALL_LIMITS if word in raw}
        self._check_name(name, path)
        self._check_limits_of_type(raw, limits, path)
        self._check_needed_keys(name, raw, path)
        self._check_keys_of_type(raw, path)
        self._check_key(name, raw, path)
        self._check_range(name, limits)
        self._check_pattern(name, limits)
        secret = raw.get("secret")
        if secret is not None:
            self._context.check_secret(secret, (*path, "secret"))
        self._context.check_numbers(limits.get("choices"), (*path, "choices"))
        is_null_by_default = "default" in raw and raw["default"] is None
        found = Input(
            name=name,
            type=raw["type"],
            doc=raw.get("doc", ""),
            items=raw.get("items"),
            default=raw.get("default"),
            has_default="default" in raw,
            required=raw.get("required", True) and not is_null_by_default,
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
        default = value_as_written(self._context.document, found, found.default, where)
        return replace(found, default=default)

    def _check_name(self, name: str, path: Where) -> None:
        if name in _TEMPLATE_NAMES:
            reason = "a template variable"
        elif name in _REPLACED_BY_PRESETS:
            reason = "a section that presets can override"
        else:
            return
        message = f'invalid input name "{name}": this is the name of {reason}'
        fix = f'rename the input, for example to "{name}_value"'
        self._context.problem("reserved-name", message, path, fix, key=True)

    def _check_limits_of_type(
        self, raw: Mapping[str, Any], limits: Mapping[str, Any], path: Where
    ) -> None:
        """Report limits that do not apply to an input's type. Lists accept their items' limits."""
        kind = raw["type"]
        if kind == "list":
            allowed = _LISTS + _LIMITS.get(raw.get("items") or "", ())
        else:
            allowed = _LIMITS.get(kind, ())
        for word in limits:
            if word in allowed:
                continue
            fix = ""
            if kind == "list":
                items = _type_with_limit(word)
                fix = f"set the type of the items: {{type: list, items: {items}}}"
            self._report_useless(f'"{word}" has no effect on {_a(kind)}', (*path, word), fix)

    def _check_needed_keys(self, name: str, raw: Mapping[str, Any], path: Where) -> None:
        kind = raw["type"]
        # Check the document, not `raw`: an invalid key has been reported already.
        written: Any = self._context.document.value
        keys = written["inputs"][name]
        needs_choices = "choice" in (kind, raw.get("items"))
        if needs_choices and "choices" not in keys:
            fix = "add `choices`, the list of allowed values"
            self._report_missing(f'input "{name}" has no "choices"', path, fix)
        if kind == "secret" and "env" not in keys:
            fix = "add `env`, the environment variable with the secret"
            self._report_missing(f'input "{name}" has no "env"', path, fix)

    def _check_keys_of_type(self, raw: Mapping[str, Any], path: Where) -> None:
        """Report keys that only apply to other input types."""
        kind = raw["type"]
        for word, kinds in _TYPES_OF_KEY.items():
            if word in raw and kind not in kinds:
                owners = " or ".join(kinds)
                message = f'"{word}" requires an input of type {owners}, not {kind}'
                self._report_useless(message, (*path, word))
        if "member" in raw and "file" not in (kind, raw.get("items")):
            message = f'"member" requires an input of type file or a list of files, not {kind}'
            self._report_useless(message, (*path, "member"))

    def _check_key(self, name: str, raw: Mapping[str, Any], path: Where) -> None:
        """Report an input whose `key` setting contradicts its type or its other keys."""
        if raw.get("continues") and raw.get("key") is False:
            message = f'input "{name}" cannot be both `key: false` and `continues: true`'
            fix = "remove `key: false`: the training length is part of the cache key"
            self._context.problem("contradiction", message, (*path, "key"), fix, key=True)
        if raw["type"] == "secret":
            fix = "remove the key: a secret comes from the environment and is never part of a cache key"
            for word in ("default", "key"):
                if word in raw:
                    self._report_useless(f'a secret cannot have "{word}"', (*path, word), fix)

    def _check_range(self, name: str, limits: Mapping[str, Any]) -> None:
        for least, most in _RANGES:
            has_both = least in limits and most in limits
            if has_both and limits[least] > limits[most]:
                bounds = f"at least {limits[least]} and at most {limits[most]}"
                message = f'no value of "{name}" can be {bounds}'
                self._context.problem("contradiction", message, ("inputs", name, most), key=True)

    def _check_pattern(self, name: str, limits: dict[str, Any]) -> None:
        """Report and drop an invalid regex pattern, because defaults cannot be matched with it."""
        if "pattern" in limits:
            path = ("inputs", name, "pattern")
            if self._context.expression(limits["pattern"], path) is None:
                del limits["pattern"]

    def _report_useless(self, message: str, path: Where, fix: str = "") -> None:
        self._context.problem("useless-key", message, path, fix, key=True)

    def _report_missing(self, message: str, path: Where, fix: str) -> None:
        self._context.problem("missing-key", message, path, fix, key=True)

    # -- values --

    def check_defaults(self, inputs: Mapping[str, Input]) -> None:
        """Check the types of input defaults, and that no default depends on itself."""
        needs: dict[str, set[str]] = {}
        for name, spec in inputs.items():
            path: Where = ("inputs", name, "default")
            needs[name] = self._check_templates(spec.default, path) & inputs.keys()
            if spec.has_default and spec.default is not None:
                self._check_value(spec, spec.default, path)
        _, circle = sort_dependencies(needs)
        if circle:
            message = f"these defaults depend on each other: {' -> '.join(circle)}"
            path = ("inputs", circle[0], "default")
            self._context.problem(
                "cycle", message, path, "set one of these defaults to a fixed value"
            )

    def _check_value(self, spec: Input, value: Any, path: Where) -> None:
        """Report a default or preset value of the wrong type. Template values are checked later."""
        has_no_choices = spec.type == "choice" and "choices" not in spec.limits
        is_reported = spec.type == "secret" or has_no_choices
        if is_reported or any(leaves(value)):
            return
        try:
            convert(spec, value)
        except BadValue as wrong:
            fix = wrong.fix
            if spec.type == "string" and isinstance(value, bool):
                fix = f"quote it: {quote(self._context.document.source_text(path))}"
            self._context.problem(wrong.code, f'"{spec.name}" {wrong.message}', path, fix)

    def _check_templates(self, tree: Any, path: Where) -> set[str]:
        """Return the inputs read by templates in `tree`, and report unavailable names."""
        found: set[str] = set()
        document, problems = self._context.document, self._context.problems
        for leaf, below in leaves(tree):
            place = (*path, *below)
            try:
                for reference in references(leaf):
                    name = _input_of(reference)
                    if name is not None and name in self._context.inputs:
                        found.add(name)
                    self._check_reference(reference, place)
            except TemplateError as error:
                problems.append(template_problem(document, place, error))
        return found

    def _check_reference(self, reference: Reference, place: Where) -> None:
        """Report a template name other than `inputs` and `fixtures`.

        No other name exists before planning.
        """
        message, fix = self._describe_reference(reference)
        if message:
            problem = self._context.document.problem(
                "unknown-name",
                message,
                place,
                fix=fix,
                offset=reference.offset,
                length=reference.length,
            )
            self._context.problems.append(problem)

    def _describe_reference(self, reference: Reference) -> tuple[str, str]:
        """Return the message and the fix for an invalid reference, or two empty texts."""
        root = reference.path[0]
        if root == "fixtures":
            return "", ""
        if root != "inputs":
            fix = self._context.suggest(root, ("inputs", "fixtures"))
            fix = fix or "use {{ inputs.NAME }} or {{ fixtures }}"
            return f'"{root}" is not available here', fix
        name = _input_of(reference)
        if name is None:
            fix = "name one input: {{ inputs.NAME }}"
            return "a value cannot depend on all inputs at once", fix
        if name not in self._context.inputs:
            return f'there is no input "{name}"', self._context.suggest(name, self._context.inputs)
        if self._context.type(name) == "secret":
            message = f'the secret "{name}" cannot be part of a value'
            return message, "list the secret under `secrets`"
        return "", ""

    # -- presets --

    def preset(self, id: str, raw: dict[str, Any], inputs: Mapping[str, Input]) -> Preset:
        """Parse the preset `id`."""
        path: Where = ("presets", id)
        context, document = self._context, self._context.document
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name in _REPLACED_BY_PRESETS:
                continue
            if name in inputs:
                value = value_as_written(document, inputs[name], value, (*path, name))
            values[name] = value
        for name, value in values.items():
            self._check_preset_value(name, value, inputs.get(name), (*path, name))
        resources = limits = None
        if "resources" in raw:
            resources = context.resources(raw["resources"], (*path, "resources"))
        if "limits" in raw:
            limits = context.limits(raw["limits"], (*path, "limits"))
        return Preset(
            name=id,
            inputs=values,
            resources=resources,
            limits=limits,
            image=raw.get("image"),
            python=context.python(raw.get("python"), (*path, "python")),
            env=as_written(document, raw.get("env"), (*path, "env")),
        )

    def _check_preset_value(self, name: str, value: Any, spec: Input | None, path: Where) -> None:
        """Check a value in a preset; `spec` is None for an unreadable input."""
        if name not in self._context.inputs:
            near = self._context.suggest(name, [*self._context.inputs, *_REPLACED_BY_PRESETS])
            message = f'there is no input "{name}"'
            self._context.problem("unknown-input", message, path, near, key=True)
        elif spec is None:
            return
        elif spec.type == "secret":
            message = f'a preset cannot set the secret "{name}"'
            fix = f"set the environment variable {spec.env}"
            self._context.problem("secret-given", message, path, fix, key=True)
        else:
            self._check_templates(value, path)
            self._check_value(spec, value, path)


def _input_of(reference: Reference) -> str | None:
    """Return the input read by a reference, or None for other names or for all inputs at once."""
    root, *rest = reference.path
    if root != "inputs" or not rest:
        return None
    return rest[0]


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _type_with_limit(word: str) -> str:
    """Return an item type to which this limit applies."""
    if word in _NUMBERS:
        return "number"
    return "string" if word in _TEXTS else "choice"
