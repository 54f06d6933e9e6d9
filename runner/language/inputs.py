"""Bind a recipe's inputs to typed values from the caller, presets and defaults.

All problems are collected. A given name `a.b` sets part `b` of the object input `a`, on top of its
other value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from runner.errors import Invalid, Problem, did_you_mean, nearest
from runner.secrets import describe_unusable

from . import library, presets
from .addresses import Kind, kind_of, split_secrets
from .bad_values import BadValue
from .input_references import (
    find_dependents,
    find_inputs,
    leaves,
    sort_dependencies,
    template_problem,
)
from .input_values import as_mapping, convert, number_of, set_parts
from .recipe import Input, Recipe
from .template import TemplateError, evaluate, has
from .values import Tree, Where

__all__ = [
    "NOWHERE",
    "BadValue",
    "Kind",
    "bind",
    "convert",
    "find_dependents",
    "find_inputs",
    "kind_of",
    "leaves",
    "number_of",
    "provenance",
    "sort_dependencies",
    "split_secrets",
    "template_problem",
    "try_bind",
]

_SECRET = re.compile(r"\{\{\s*inputs\.[a-z][a-z0-9_]*\s*\}\}")

NOWHERE: Mapping[str, str] = MappingProxyType({})


def bind(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    environment: Mapping[str, str] | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> dict[str, Tree]:
    """Return the value of every input except secrets, from given values, presets and defaults.

    Raises Invalid. `preset` may list several presets, `a,b`; later presets take precedence.
    `environment` holds the variables of secrets; without it, secrets are not checked. `origins`
    maps values to the files they were read from, for messages.
    """
    values, problems = try_bind(recipe, given, preset=preset, origins=origins)
    if environment is not None:
        for spec in recipe.inputs.values():
            if spec.type == "secret" and spec.name not in given:
                problems += _unusable_secret(recipe, spec, environment)
    if problems:
        raise Invalid(problems)
    return values


def try_bind(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> tuple[dict[str, Tree], list[Problem]]:
    """Return the valid input values, and the problems of invalid inputs."""
    problems: list[Problem] = []
    misspelt: set[str | None] = set()
    for name in given:
        problem = _unknown_input(recipe, name, origins.get(name, ""))
        if problem is not None:
            problems.append(problem)
        whole = _input_of(name)
        if whole not in recipe.inputs:
            misspelt.add(nearest(whole, recipe.inputs))
    for name in presets.split(preset):
        if name not in recipe.presets:
            problems.append(_unknown_preset(recipe, name))
    binder = _Binder(recipe, given, preset, origins, misspelt)
    values = binder.bind()
    return values, problems + binder.problems


def provenance(
    recipe: Recipe,
    given: Mapping[str, object],
    *,
    preset: str | None = None,
    origins: Mapping[str, str] = NOWHERE,
) -> dict[str, str]:
    """Return the source of each input value: `given`, a file, `preset NAME` or `default`.

    Parts of objects that were set are included.
    """
    found = {}
    for name, spec in recipe.inputs.items():
        if spec.type == "secret":
            continue
        chosen = presets.of_input(recipe, preset, name)
        if name in given:
            origin = origins.get(name, "given")
        else:
            origin = f"preset {chosen}" if chosen else "default"
        for part in given:
            if part != name and _input_of(part) == name:
                origin += f", {part} {origins.get(part, 'given')}"
        found[name] = origin
    return found


def _input_of(name: str) -> str:
    """Return the input name in `name` or `name.part`."""
    return name.partition(".")[0]


def _unknown_input(recipe: Recipe, name: str, origin: str) -> Problem | None:
    """Return the problem of an unknown input or part name, or None for a known name."""
    whole, dot, _ = name.partition(".")
    where = f" ({origin})" if origin else ""
    if whole not in recipe.inputs:
        fix = did_you_mean(whole, recipe.inputs)
        if not fix:
            names = " ".join(recipe.inputs)
            fix = f"its inputs are {names}" if names else "it has no inputs"
        words = f'{recipe.id} has no input "{whole}"{where}'
        return Problem("unknown-input", words, None, fix, input=whole)
    if not dot:
        return None
    kind = recipe.inputs[whole].type
    if kind != "object":
        message = f'"{whole}" is of type {kind} and has no parts: "{name}"{where}'
        fix = f"set the whole value: {whole}=…"
        return Problem("wrong-type", message, None, fix, input=whole)
    if not all(name.split(".")):
        message = f'"{name}" is not a part of "{whole}"{where}'
        return Problem("bad-input", message, None, f"write {whole}.NAME=VALUE", input=whole)
    return None


def _unknown_preset(recipe: Recipe, name: str) -> Problem:
    fix = did_you_mean(name, recipe.presets)
    if not fix:
        names = " ".join(recipe.presets)
        fix = f"its presets are {names}" if names else "it has no presets"
    return Problem("unknown-preset", f'{recipe.id} has no preset "{name}"', None, fix)


def _unusable_secret(recipe: Recipe, spec: Input, environment: Mapping[str, str]) -> list[Problem]:
    """Return the problem of a secret's environment variable, if any."""
    variable = spec.env or ""
    value = environment.get(variable)
    wrong = describe_unusable(variable, value, required=spec.required)
    if not wrong:
        return []
    code = "secret-too-short" if value else "secret-not-set"
    message = f'the secret "{spec.name}" {wrong}'
    fix = f"export {variable}=…; a secret comes from the environment, never from the command line"
    path = ("inputs", spec.name)
    problem = recipe.document.problem(code, message, path, fix=fix, key=True)
    return [problem._replace(input=spec.name)]


class _Binder:
    """Binding of a recipe's inputs to values, in dependency order."""

    def __init__(
        self,
        recipe: Recipe,
        given: Mapping[str, object],
        preset: str | None,
        origins: Mapping[str, str],
        misspelt: Collection[str | None],
    ) -> None:
        self.recipe, self.given, self.preset, self.origins = recipe, given, preset, origins
        # Inputs that are probably meant by an unknown name, which is a problem already.
        self.misspelt = misspelt
        # Given parts of an object input, by their path of keys.
        self.parts: dict[str, list[tuple[list[str], object]]] = {}
        for name, value in given.items():
            whole, *keys = name.split(".")
            if keys:
                self.parts.setdefault(whole, []).append((keys, value))
        self.problems: list[Problem] = []
        self.values: dict[str, Tree] = {}

    def bind(self) -> dict[str, Tree]:
        """Return all values that can be bound, in recipe order."""
        inputs: dict[str, Input] = {}
        secrets: list[Input] = []
        for name, spec in self.recipe.inputs.items():
            if spec.type == "secret":
                secrets.append(spec)
            else:
                inputs[name] = spec
        self._bind_inputs(inputs)
        for spec in secrets:
            if spec.name in self.given:
                self._check_secret(spec)
        return {name: self.values[name] for name in inputs if name in self.values}

    def _bind_inputs(self, inputs: Mapping[str, Input]) -> None:
        """Bind each input whose dependencies are bound, and report a circle of dependencies."""
        needs = {name: self._needs(name) & inputs.keys() for name in inputs}
        names, circle = sort_dependencies(needs)
        for name in names:
            if needs[name] <= self.values.keys():
                self._bind_input(inputs[name])
        if circle:
            self._report_circle(circle)

    def _needs(self, name: str) -> set[str]:
        """Return the inputs on which an input's value depends, or none for a given value."""
        if name in self.given:
            return set()
        tree, _ = self._value_in_recipe(name)
        try:
            return set(find_inputs(tree))
        except TemplateError:
            return set()  # reported when the value is made

    def _value_in_recipe(self, name: str) -> tuple[Tree, Where]:
        """Return an input's preset value or else its default, with the path in the recipe."""
        chosen = presets.of_input(self.recipe, self.preset, name)
        if chosen:
            return self.recipe.presets[chosen].inputs[name], ("presets", chosen, name)
        return self.recipe.inputs[name].default, ("inputs", name, "default")

    def _bind_input(self, spec: Input) -> None:
        if spec.name in self.given:
            self._convert(spec, self.given[spec.name], ())
            return
        tree, path = self._value_in_recipe(spec.name)
        # Parts alone make an object; the rest of it is empty.
        has_parts = spec.name in self.parts
        has_own_value = path[0] == "presets" or spec.has_default
        if has_own_value or has_parts:
            self._convert(spec, tree, path)
        elif not spec.required:
            self.values[spec.name] = None
        elif spec.name not in self.misspelt:
            self._report_missing(spec)

    def _convert(self, spec: Input, value: object, path: Where) -> None:
        """Bind an input to a value at `path` of the recipe; `path` is empty for given values."""
        try:
            if path:
                value = self._render(value, path)  # type: ignore[arg-type]  # a recipe's tree
            if spec.type == "object" and spec.name in self.parts:
                whole = {} if value is None else as_mapping(value)
                value = set_parts(spec.name, whole, self.parts[spec.name])
            self.values[spec.name] = convert(spec, value)
        except BadValue as wrong:
            self._report_bad_value(spec, wrong, path)
        except Invalid as error:
            for problem in error.problems:
                self._report(spec.name, problem)

    def _render(self, tree: Tree, path: Where) -> Tree:
        """Evaluate the templates in `tree`. Raises Invalid for the first error."""
        match tree:
            case str() if has(tree):
                scope = {"inputs": self.values, "fixtures": str(library.fixtures())}
                try:
                    return evaluate(tree, scope)  # type: ignore[return-value]
                except TemplateError as error:
                    raise Invalid([template_problem(self.recipe.document, path, error)]) from error
            case list():
                return [self._render(item, (*path, index)) for index, item in enumerate(tree)]
            case dict():
                return {key: self._render(item, (*path, key)) for key, item in tree.items()}
        return tree

    def _check_secret(self, spec: Input) -> None:
        """Report a secret given by value, unless `with` passes on another secret by name.

        A value in a command line is no longer secret.
        """
        value = self.given[spec.name]
        if not isinstance(value, str) or not _SECRET.fullmatch(value):
            message = f'the secret "{spec.name}" cannot be set as an input value'
            fix = f"set the environment variable {spec.env} instead"
            self._report(spec.name, Problem("secret-given", message, None, fix))

    # -- problems --

    def _report_missing(self, spec: Input) -> None:
        message = f'the input "{spec.name}" has no value'
        fix = f"{spec.name}=…  {spec.doc}" if spec.doc else f"{spec.name}=…"
        path = ("inputs", spec.name)
        problem = self.recipe.document.problem("missing-input", message, path, fix=fix, key=True)
        self._report(spec.name, problem)

    def _report_bad_value(self, spec: Input, wrong: BadValue, path: Where) -> None:
        message = f'"{spec.name}" {wrong.message}'
        if path:
            problem = self.recipe.document.problem(wrong.code, message, path, fix=wrong.fix)
        else:
            if spec.name in self.origins:
                message += f" ({self.origins[spec.name]})"
            problem = Problem(wrong.code, message, None, wrong.fix)
        self._report(spec.name, problem)

    def _report_circle(self, names: tuple[str, ...]) -> None:
        _, path = self._value_in_recipe(names[0])
        message = f"the inputs depend on each other: {' -> '.join(names)}"
        fix = "set one of these inputs to a fixed value"
        self._report(names[0], self.recipe.document.problem("cycle", message, path, fix=fix))

    def _report(self, name: str, problem: Problem) -> None:
        self.problems.append(problem._replace(input=name))
