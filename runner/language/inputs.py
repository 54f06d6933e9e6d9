"""Bind a recipe's inputs: typed values from what the caller gave, presets and defaults, or every problem at once.

`a.b` as the name of what was given sets a part of the object `a`, whatever gives the rest of it.

Text is converted by the type of the input, as on a command line; values of Python's types are taken as they are.  A number that is whole is the same
value however it was written (`1000`, `1e3`, `1000.0`), because a value's text and its key depend on the value alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from runner.errors import Invalid, Problem, did_you_mean, nearest
from runner.secrets import unusable

from . import library, presets
from .recipe import Input, InputType, Recipe
from .spelling import plain_number, takes_text, written_of
from .template import TemplateError, evaluate, has, references
from .values import Tree, Where, is_finite, is_number

if TYPE_CHECKING:
    from .document import Document

Kind: TypeAlias = Literal["path", "hf", "s3", "gs", "https"]

_SCHEMES: tuple[Kind, ...] = ("hf", "s3", "gs", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB = re.compile(rf"(?:hf://(?:datasets/)?)?{_PART}/{_PART}(?:@[A-Za-z0-9][A-Za-z0-9._/-]*)?")
_SECRET = re.compile(r"\{\{\s*inputs\.[a-z][a-z0-9_]*\s*\}\}")
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,60})?|\.[0-9]{1,60})(?:[eE][-+]?[0-9]{1,4})?"
)
_HTTPS = re.compile(r"https://(?:([^/?#@]*)@)?([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
_SIGNATURE = 16  # characters
_PATIENCE = 0.25  # seconds for one `pattern`: a recipe's expression must not be able to hang


NOWHERE: Mapping[str, str] = MappingProxyType({})


class BadValue(Exception):
    """A value that its input does not take: a code, a sentence that follows the input's name, and what to do."""

    def __init__(self, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.fix = code, message, fix


def bind(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    environment: Mapping[str, str] | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> dict[str, Tree]:
    """One value for every input but the secrets, which have none here.  Raises Invalid.

    `preset` may be several, `a,b`: later ones win.  `environment` is where secrets are set; without it they are not asked for.  `origins`: the files
    that values were read from, for messages.
    """
    values, problems = tried(recipe, given, preset=preset, origins=origins)
    if environment is not None:
        for spec in recipe.inputs.values():
            if spec.type == "secret" and spec.name not in given:
                problems += _unusable(recipe, spec, environment)
    if problems:
        raise Invalid(problems)
    return values


def tried(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> tuple[dict[str, Tree], list[Problem]]:
    """The values that can be had, and what is wrong with the others."""
    misspelt = {
        nearest(name.partition(".")[0], recipe.inputs)
        for name in given
        if name.partition(".")[0] not in recipe.inputs
    }
    binder = _Binder(recipe, given, preset, origins, misspelt)
    problems = [
        problem
        for name in given
        if (problem := _unknown_input(recipe, name, origins.get(name, ""))) is not None
    ]
    problems += [
        _unknown_preset(recipe, name)
        for name in presets.split(preset)
        if name not in recipe.presets
    ]
    values = binder.bind()
    return values, problems + binder.problems


def provenance(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> dict[str, str]:
    """Where the value of each input comes from: `given` or its file, `preset NAME`, `default`, and which parts of an object were set."""
    found = {}
    for name, spec in recipe.inputs.items():
        if spec.type == "secret":
            continue
        of_preset = presets.of_input(recipe, preset, name)
        found[name] = (
            origins.get(name, "given")
            if name in given
            else f"preset {of_preset}"
            if of_preset
            else "default"
        )
        for part in (part for part in given if part.partition(".")[0] == name and part != name):
            found[name] += f", {part} {origins.get(part, 'given')}"
    return found


def kind_of(address: str) -> Kind:
    """What a bound model, dataset or file is: its scheme, or a path."""
    found = _SCHEME.match(address)
    return next((scheme for scheme in _SCHEMES if found and found[1] == scheme), "path")


def divided(address: str) -> tuple[str, tuple[str, ...]]:
    """An https address as it may be stored and shown, which is host and path, and the parts of it that open it: its query, and a login.

    Of the query's values, those that are long enough to be a signature are parts of their own.
    """
    found = _HTTPS.fullmatch(address)
    if found is None:
        return address, ()
    login, place, query = found[1] or "", found[2], found[3] or ""
    values = (pair.partition("=")[2] for pair in query.split("&"))
    return f"https://{place}", tuple(
        part
        for part in (login, query, *(value for value in values if len(value) >= _SIGNATURE))
        if part
    )


def converted(spec: Input, value: object) -> Tree:
    """`value` as a value of this input, within its limits.  Raises BadValue."""
    if value is None or (value == "null" and spec.type not in ("string", "choice")):
        if spec.required and not (spec.has_default and spec.default is None):
            raise BadValue(
                "missing-input",
                "must have a value, not null",
                "say `required: false` in the recipe if it may be null",
            )
        return None
    result = _as_type(spec.type, spec, value)
    for item in result if isinstance(result, list) else [result]:
        _within(spec, item)
    if isinstance(result, list):
        _list_within(spec, result)
    return result


# -- which value ------------------------------------------------------------------------------------------------------------------------------------


def _unknown_input(recipe: Recipe, name: str, origin: str) -> Problem | None:
    """What is wrong with the name of a value, or of a part of one; None when nothing is."""
    whole, dot, _ = name.partition(".")
    where = f" ({origin})" if origin else ""
    if whole not in recipe.inputs:
        fix = did_you_mean(whole, recipe.inputs) or (
            "its inputs are " + " ".join(recipe.inputs) if recipe.inputs else "it has no inputs"
        )
        return Problem("unknown-input", f'{recipe.id} has no input "{whole}"{where}', None, fix)
    if dot and recipe.inputs[whole].type != "object":
        what = f'"{whole}" is of type {recipe.inputs[whole].type} and has no parts: "{name}"{where}'
        return Problem("wrong-type", what, None, f"give the whole value: {whole}=…")
    if dot and not all(name.split(".")):
        return Problem(
            "bad-input",
            f'"{name}" names no part of "{whole}"{where}',
            None,
            f"write {whole}.NAME=VALUE",
        )
    return None


def _unknown_preset(recipe: Recipe, name: str) -> Problem:
    fix = did_you_mean(name, recipe.presets) or (
        "its presets are " + " ".join(recipe.presets) if recipe.presets else "it has no presets"
    )
    return Problem("unknown-preset", f'{recipe.id} has no preset "{name}"', None, fix)


def _unusable(recipe: Recipe, spec: Input, environment: Mapping[str, str]) -> list[Problem]:
    variable = spec.env or ""
    value = environment.get(variable)
    if not (wrong := unusable(variable, value, required=spec.required)):
        return []
    fix = f"export {variable}=…; a secret comes from the environment, never from the command line"
    code = "secret-too-short" if value else "secret-not-set"
    return [
        recipe.document.problem(
            code, f'the secret "{spec.name}" {wrong}', ("inputs", spec.name), fix=fix, key=True
        )
    ]


class _Binder:
    """One binding: values are found in the order in which their templates need each other."""

    def __init__(
        self,
        recipe: Recipe,
        given: Mapping[str, object],
        preset: str | None,
        origins: Mapping[str, str],
        misspelt: Collection[str],
    ) -> None:
        self.recipe, self.given, self.preset, self.origins = recipe, given, preset, origins
        self.misspelt = misspelt  # inputs that were given by a name that is nearly theirs, which is a problem already
        self.parts: dict[
            str, list[tuple[list[str], object]]
        ] = {}  # of an object: what was given, by the keys that lead to it
        for name, value in given.items():
            whole, *keys = name.split(".")
            if keys:
                self.parts.setdefault(whole, []).append((keys, value))
        self.problems: list[Problem] = []
        self.values: dict[str, Tree] = {}

    def bind(self) -> dict[str, Tree]:
        inputs = {name: spec for name, spec in self.recipe.inputs.items() if spec.type != "secret"}
        needs: dict[str, set[str]] = {}
        for name in inputs:
            tree, path = self._written(name)
            try:
                needs[name] = set(mentioned(tree)) & inputs.keys() if path else set()
            except TemplateError:
                needs[name] = set()  # an error when the value is made
        names, circle = ordered(needs)
        for name in names:
            if needs[name] <= self.values.keys():
                self._one(inputs[name])
        if circle:
            self._loop(circle)
        for spec in self.recipe.inputs.values():
            if spec.type == "secret" and spec.name in self.given:
                self._secret(spec)
        return {name: self.values[name] for name in inputs if name in self.values}

    def _written(self, name: str) -> tuple[Any, Where]:
        """What the recipe says about an input that the caller did not give, and where."""
        if name in self.given:
            return None, ()
        if of_preset := presets.of_input(self.recipe, self.preset, name):
            return self.recipe.presets[of_preset].inputs[name], ("presets", of_preset, name)
        return self.recipe.inputs[name].default, ("inputs", name, "default")

    def _one(self, spec: Input) -> None:
        document = self.recipe.document
        tree, path = self._written(spec.name)
        if not path:
            tree = self.given[spec.name]
        elif path[0] == "inputs" and not spec.has_default and spec.name not in self.parts:
            if spec.required and spec.name in self.misspelt:
                return
            if spec.required:
                fix = f"{spec.name}=…" + (f"  {spec.doc}" if spec.doc else "")
                message = f'the input "{spec.name}" has no value'
                self.problems.append(
                    document.problem(
                        "missing-input", message, ("inputs", spec.name), fix=fix, key=True
                    )
                )
            else:
                self.values[spec.name] = None
            return
        try:
            if path:
                tree = self._rendered(tree, path)
            if parts := self.parts.get(spec.name) if spec.type == "object" else None:
                tree = _with_parts(spec.name, {} if tree is None else _object(tree), parts)
            self.values[spec.name] = converted(spec, tree)
        except BadValue as wrong:
            message = f'"{spec.name}" {wrong.message}' + (
                f" ({self.origins[spec.name]})" if not path and spec.name in self.origins else ""
            )
            self.problems.append(
                document.problem(wrong.code, message, path, fix=wrong.fix)
                if path
                else Problem(wrong.code, message, None, wrong.fix),
            )
        except Invalid as error:
            self.problems += error.problems

    def _rendered(self, tree: Tree, path: Where) -> Tree:
        match tree:
            case str() if has(tree):
                try:
                    return evaluate(
                        tree, {"inputs": self.values, "fixtures": str(library.fixtures())}
                    )  # type: ignore[return-value]
                except TemplateError as error:
                    raise Invalid([misread(self.recipe.document, path, error)]) from error
            case list():
                return [self._rendered(item, (*path, n)) for n, item in enumerate(tree)]
            case dict():
                return {key: self._rendered(item, (*path, key)) for key, item in tree.items()}
        return tree

    def _loop(self, names: tuple[str, ...]) -> None:
        _, path = self._written(names[0])
        message = f"the values of these inputs need each other: {' -> '.join(names)}"
        self.problems.append(
            self.recipe.document.problem(
                "cycle", message, path, fix="give one of them a value of its own"
            )
        )

    def _secret(self, spec: Input) -> None:
        """A secret is handed on by name in `with`; a value that stands in a command is a secret no more."""
        value = self.given[spec.name]
        if not isinstance(value, str) or not _SECRET.fullmatch(value):
            message = f'"{spec.name}" is a secret and cannot be given like this'
            self.problems.append(
                Problem("secret-given", message, None, f"set the variable {spec.env} instead")
            )


def misread(document: Document, path: Where, error: TemplateError) -> Problem:
    """What is wrong with the template at `path`, where in it."""
    return document.problem(
        "template", str(error), path, fix=error.fix, offset=error.offset, length=error.length
    )


def mentioned(tree: Tree) -> Iterator[str]:
    """The inputs that the templates in `tree` read.  Raises TemplateError."""
    for leaf, _ in leaves(tree):
        for reference in references(leaf):
            if reference.path[0] == "inputs" and len(reference.path) > 1:
                yield reference.path[1]


def derived(
    recipe: Recipe, given: Collection[str], preset: str | None, names: Collection[str]
) -> set[str]:
    """These inputs, and those whose presets or defaults read them."""
    found = set(names)
    while True:
        more = set()
        for name, spec in recipe.inputs.items():
            if name in given or name in found:
                continue
            of_preset = presets.of_input(recipe, preset, name)
            tree = recipe.presets[of_preset].inputs[name] if of_preset else spec.default
            try:
                if not found.isdisjoint(mentioned(tree)):
                    more.add(name)
            except TemplateError:
                continue  # an error where the value is made
        if not more:
            return found
        found |= more


def leaves(tree: Tree, path: Where = ()) -> Iterator[tuple[str, Where]]:
    """Every text in `tree` that has a template, with its path."""
    match tree:
        case str() if has(tree):
            yield tree, path
        case list():
            for n, item in enumerate(tree):
                yield from leaves(item, (*path, n))
        case dict():
            for key, item in tree.items():
                yield from leaves(item, (*path, key))


def ordered(needs: Mapping[str, set[str]]) -> tuple[list[str], tuple[str, ...]]:
    """The names, each after those it needs, and a circle of needs that ends where it began.  What it keeps back is left out."""
    from graphlib import CycleError, TopologicalSorter

    sorter, circle, found = TopologicalSorter(needs), tuple[str, ...](), list[str]()
    try:
        sorter.prepare()
    except CycleError as error:
        circle = tuple(reversed(error.args[1]))
    while ready := sorter.get_ready():
        found += ready
        sorter.done(*ready)
    return found, circle


# -- one value --------------------------------------------------------------------------------------------------------------------------------------

_WORDS: dict[str, str] = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "list": "a list",
    "object": "a mapping",
    "file": "the path of a file",
    "dataset": "the address of a dataset",
    "model": "the address of a model",
}


def _as_type(type_: InputType, spec: Input, value: object) -> Tree:
    if takes_text(spec, type_):
        value = written_of(value) or value
    match type_:
        case "string" if isinstance(value, str):
            return value
        case "integer" | "number":
            number = number_of(value)
            if number is not None and (type_ == "number" or isinstance(number, int)):
                return number
        case "boolean":
            if isinstance(value, bool):
                return value
            if value in ("true", "false"):
                return value == "true"
        case "choice":
            return _choice(spec, value)
        case "list":
            return _list(spec, value)
        case "object":
            return _object(value)
        case "file" | "dataset" | "model":
            if spec.member and isinstance(value, str) and not spec.parted(value)[1]:
                raise BadValue(
                    "wrong-type",
                    f"must be FILE.py:NAME, a Python file and a class or function in it, not {_shown(value)}",
                )
            return _address(type_, value)
    fix = ""
    if type_ == "string" and not isinstance(value, (list, dict)):
        fix = _in_quotes(value)
    elif type_ == "boolean":
        fix = "write true or false"
    elif type_ == "integer" and number_of(value) is not None:
        fix = "it has to be whole"
    raise BadValue("wrong-type", f"must be {_WORDS[type_]}, not {_shown(value)}", fix)


def _in_quotes(value: object) -> str:
    """What to do about a value that is meant as text.  A number that JSON brought may have been written in other digits."""
    if isinstance(value, float):
        return "write it as text, in quotes"
    return f'quote it: "{_text(value)}"'


def number_of(value: object) -> int | float | None:
    """The number that `value` is or spells: an int whenever it is whole."""
    if isinstance(value, str):
        if _INTEGER.fullmatch(value):
            return int(value)
        if not _NUMBER.fullmatch(value):
            return None
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else plain_number(value)


def _choice(spec: Input, value: object) -> Tree:
    choices = spec.limits.get("choices")
    known = choices if isinstance(choices, list) else []
    value = plain_number(value)
    for choice in known:
        if type(choice) is type(value) and choice == value:
            return choice
    for choice in known:
        if isinstance(value, str) and (
            _text(choice) == value or (is_number(choice) and number_of(value) == choice)
        ):
            return choice
    words = [_text(choice) for choice in known]
    raise BadValue(
        "not-allowed",
        f"must be {_or(words)}, not {_shown(value)}",
        did_you_mean(_text(value), words) if isinstance(value, str) else "",
    )


def _list(spec: Input, value: object) -> Tree:
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            value = _json(value, "a list")
        else:
            value = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise BadValue(
            "wrong-type", f"must be a list, not {_shown(value)}", "write a,b,c or [a, b, c]"
        )
    items: list[Tree] = []
    for n, item in enumerate(value, 1):
        try:
            items.append(_as_type(spec.items, spec, item) if spec.items else _tree(item))
        except BadValue as wrong:
            raise BadValue(wrong.code, f"{wrong.message} (item {n})", wrong.fix) from None
    return items


def _object(value: object) -> Tree:
    if isinstance(value, str):
        value = _json(value, "a mapping")
    if not isinstance(value, Mapping):
        raise BadValue(
            "wrong-type", f"must be a mapping, not {_shown(value)}", 'write JSON, such as {"a": 1}'
        )
    return _tree(value)


def _with_parts(name: str, tree: Tree, parts: list[tuple[list[str], object]]) -> Tree:
    """A mapping with these parts of it set.  Text that is JSON is the value that it spells."""
    for keys, value in parts:
        at = tree
        for n, key in enumerate(keys, 1):
            if not isinstance(at, dict):
                raise BadValue(
                    "wrong-type",
                    f"has no parts at {'.'.join(keys[: n - 1])}, which is {_shown(at)}",
                    f"set {name} as a whole",
                )
            if n == len(keys):
                at[key] = _tree(_spelled(value))
            at = at.setdefault(key, {})
    return tree


def _spelled(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return _json(value, "a value")
    except BadValue:
        return value


def _json(text: str, wanted: str) -> object:
    def refuse(word: str) -> object:
        raise ValueError(f"{word} is not a number that JSON has")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadValue("wrong-type", f"must be {wanted} in JSON: {error}") from None


def _tree(value: object) -> Tree:
    """`value` as plain JSON-like values."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if is_finite(value):
            return plain_number(value)
        case list() | tuple():
            return [_tree(item) for item in value]
        case Mapping() if all(isinstance(key, str) for key in value):
            return {str(key): _tree(item) for key, item in value.items()}
    raise BadValue("wrong-type", f"has a part that is not a plain value: {_shown(value)}")


def _address(type_: InputType, value: object) -> Tree:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise BadValue("wrong-type", f"must be {_WORDS[type_]}, not {_shown(value)}")
    if type(value) is not str:
        return value  # the output of another step, which says itself what it is
    if not value or "\0" in value:
        raise BadValue("wrong-type", f"must be {_WORDS[type_]}, not {_shown(value)}")
    scheme = _SCHEME.match(value)
    if scheme is None:
        # Only a model's bare name is the Hub's; `./org/name` is a folder.
        return (
            f"hf://{value}"
            if type_ == "model" and _HUB.fullmatch(value) and value[0] not in "./~"
            else value
        )
    if type_ == "file" and scheme[1] == "hf":
        raise BadValue(
            "wrong-type",
            "is a file, which the Hub's hf:// cannot name",
            "use an input of type dataset or model",
        )
    if scheme[1] not in _SCHEMES:
        near = did_you_mean(scheme[1], _SCHEMES)
        fix = near or "write a path, or an address that begins hf:// s3:// gs:// or https://"
        raise BadValue("not-allowed", f'has the scheme "{scheme[1]}://", which is not known', fix)
    if scheme[1] == "hf":
        if not _HUB.fullmatch(value) or (type_ == "model" and value.startswith("hf://datasets/")):
            raise BadValue(
                "not-allowed",
                f"must be hf://org/name or hf://org/name@revision, not {_shown(value)}",
            )
        if type_ == "dataset":  # the Hub keeps its datasets apart from its models
            value = f"hf://datasets/{value.removeprefix('hf://').removeprefix('datasets/')}"
    if "::" in value:
        raise BadValue(
            "not-allowed",
            f"is an address within an address: {_shown(value)}",
            "name the file or folder itself",
        )
    if len(value) == scheme.end() or re.search(r"[\s\x00-\x1f]", value):
        raise BadValue("not-allowed", f"is not a whole address: {_shown(value)}")
    return value


# -- limits -----------------------------------------------------------------------------------------------------------------------------------------


def _within(spec: Input, value: Tree) -> None:
    limits: Mapping[str, Any] = spec.limits
    if isinstance(value, (int, float)) and is_number(value):
        for word, says, holds in (
            ("minimum", "at least", lambda bound: value >= bound),
            ("maximum", "at most", lambda bound: value <= bound),
            ("exclusiveMinimum", "more than", lambda bound: value > bound),
            ("exclusiveMaximum", "less than", lambda bound: value < bound),
            ("multipleOf", "a multiple of", lambda bound: _is_multiple(value, bound)),
        ):
            if word in limits and not holds(limits[word]):
                raise BadValue(
                    "out-of-range", f"must be {says} {_text(limits[word])}, not {_text(value)}"
                )
    elif isinstance(value, str):
        if len(value) < limits.get("minLength", 0):
            raise BadValue(
                "too-short",
                f"must have at least {_count(limits['minLength'], 'character')}, not {len(value)}",
            )
        if len(value) > limits.get("maxLength", len(value)):
            raise BadValue(
                "too-long",
                f"must have at most {_count(limits['maxLength'], 'character')}, not {len(value)}",
            )
        if "pattern" in limits:
            _matches(limits["pattern"], value)


def _is_multiple(value: float, step: float) -> bool:
    from fractions import Fraction  # of the decimals as written: 0.3 is three times 0.1

    return Fraction(repr(value)) % Fraction(repr(step)) == 0


def _matches(pattern: str, value: str) -> None:
    import regex

    try:
        found = regex.search(pattern, value, timeout=_PATIENCE)
    except TimeoutError:
        message = f'took too long to compare with the pattern "{pattern}"'
        raise BadValue(
            "pattern-too-slow", message, "the recipe's pattern backtracks without end"
        ) from None
    if not found:
        raise BadValue("not-allowed", f'must match the pattern "{pattern}", unlike {_shown(value)}')


def _list_within(spec: Input, value: list[Tree]) -> None:
    limits: Mapping[str, Any] = spec.limits
    if len(value) < limits.get("minItems", 0):
        raise BadValue(
            "too-short",
            f"must have at least {_count(limits['minItems'], 'item')}, not {len(value)}",
        )
    if len(value) > limits.get("maxItems", len(value)):
        raise BadValue(
            "too-long", f"must have at most {_count(limits['maxItems'], 'item')}, not {len(value)}"
        )
    if limits.get("uniqueItems"):
        seen: set[str] = set()
        for item in value:
            text = json.dumps(item, sort_keys=True)
            if text in seen:
                raise BadValue("twice", f"lists {_shown(item)} twice", "write it once")
            seen.add(text)


# -- words ------------------------------------------------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, str):
        line = value.partition("\n")[0]
        return f'"{line if len(line) <= 60 else line[:57] + "..."}"'
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    return (
        "null"
        if value is None
        else _text(value)
        if isinstance(value, (bool, int, float))
        else f"a {type(value).__name__}"
    )


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
