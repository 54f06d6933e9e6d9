"""A document while it is read: the names in it, the problems that were found, and the parts that recipes, presets and steps all have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from runner.errors import Problem, did_you_mean

from . import schema, units
from .document import Document
from .recipe import AutoCode, GitCode, Glob, Limits, Python, Resources
from .spelling import misread_numbers
from .values import Where

_T = TypeVar("_T")


class Source:
    """One reading.  `raw` satisfies the schema; the document may hold more, which is known by name."""

    def __init__(self, document: Document, raw: dict[str, Any]) -> None:
        self.document, self.raw = document, raw
        self.problems: list[Problem] = []
        self.steps = self._names("steps")
        self.inputs = self._names("inputs")

    def near(self, word: str, known: Iterable[str]) -> str:
        """`did_you_mean`, for as many words as a person would read: it compares with every name there is."""
        return did_you_mean(word, islice(known, 5000)) if len(self.problems) < 20 else ""

    def problem(
        self, code: str, message: str, path: Where, fix: str = "", *, key: bool = False
    ) -> None:
        """Note a problem, up to as many as a person would read."""
        if len(self.problems) < schema.MANY:
            self.problems.append(self.document.problem(code, message, path, fix=fix, key=key))

    def check_numbers(self, tree: Any, path: Where) -> None:
        """That no number which names something, here or below, means something else as text: `3.10` would be 3.1."""
        for found in misread_numbers(self.document, tree, path):
            self.problem(
                "ambiguous-number",
                f"{found.written} is the number {found.read}",
                found.where,
                f'quote it: "{found.written}", or write the number {found.read}',
            )

    def _names(self, section: str) -> list[str]:
        whole = self.document.value
        names = whole.get(section) if isinstance(whole, dict) else None
        return list(names) if isinstance(names, dict) else []

    def expression(self, pattern: str, path: Where) -> Any:
        """A pattern, compiled; None where it cannot be read."""
        import regex

        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            self.problem(
                "bad-pattern",
                f"the pattern cannot be read: {error}",
                path,
                "it is a regular expression; quote it with single quotes to keep its backslashes",
            )

    def type(self, name: str) -> object:
        """Of an input, as it is written."""
        spec = self.raw.get("inputs", {}).get(name)
        return spec["type"] if spec else None

    def check_secret(self, name: str, path: Where) -> None:
        """That an input is a secret."""
        if name not in self.inputs:
            secrets = [other for other in self.inputs if self.type(other) == "secret"]
            holds = next(
                (
                    other
                    for other in secrets
                    if self.raw["inputs"][other].get("env") == name.upper()
                ),
                "",
            )
            fix = (
                f'${name.upper()} is the input "{holds}": write that'
                if holds
                else self.near(name, secrets)
            )
            fix = fix or f"declare it: {name}: {{type: secret, env: {name.upper()}}}"
            self.problem("unknown-secret", f'there is no secret input "{name}"', path, fix)
        elif self.type(name) not in ("secret", None):
            self.problem(
                "unknown-secret",
                f'the input "{name}" is not a secret',
                path,
                f"give it {{type: secret, env: {name.upper()}}}",
            )

    def secrets(self, raw: Mapping[str, Any], path: Where) -> tuple[str, ...]:
        names = tuple(raw.get("secrets", ()))
        for n, name in enumerate(names):
            self.check_secret(name, (*path, "secrets", n))
        return names

    def python(self, raw: Any, path: Where) -> Python | None:
        if not raw:
            return None
        lock = raw.get("lock", "")
        name = lock.rpartition("/")[2]
        if (fix := other_lock(name)) is not None:
            self.problem("unknown-lock", f"{name} cannot be installed here", (*path, "lock"), fix)
        return Python(lock, raw.get("version", ""))

    def unit(
        self, parse: Callable[[str], _T], raw: Mapping[str, Any], word: str, path: Where
    ) -> _T | None:
        """A quantity that is written with its unit."""
        text = raw.get(word)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.problem("bad-unit", str(error), (*path, word))
            return None

    def resources(self, raw: dict[str, Any], path: Where) -> Resources:
        if not raw:
            return _NO_RESOURCES
        gpus = raw.get("gpus")
        return Resources(
            cpus=raw.get("cpus"),
            memory=self.unit(units.size, raw, "memory", path),
            gpus=None if gpus is None else int(gpus),
            gpu=raw.get("gpu"),
            gpu_memory=self.unit(units.size, raw, "gpu_memory", path),
            disk=self.unit(units.size, raw, "disk", path),
            pools=raw.get("pools", {}),
            key=raw.get("key", False),
        )

    def limits(self, raw: dict[str, Any], path: Where) -> Limits:
        return Limits(
            time=self.unit(units.duration, raw, "time", path),
            cost=self.unit(units.money, raw, "cost", path),
        )


_NO_RESOURCES = Resources()
_OTHER_LOCKS = (
    (
        r"(environment|conda).*\.ya?ml|conda-lock.*|pixi\.(lock|toml)",
        "put its Python packages into requirements.txt and name that; what is no Python package comes with an `image`",
    ),
    (
        r"poetry\.lock|pdm\.lock|Pipfile(\.lock)?",
        "name pyproject.toml, or export it: requirements.txt with hashes",
    ),
)
"""Files that people name as locks and that are none of ours, and what to do."""


def path_or_glob(item: Any) -> str | Glob:
    if isinstance(item, str):
        return item
    return Glob(item["glob"], tuple(item.get("exclude", ())), item.get("allow_empty"))


def env_files(raw: Mapping[str, Any]) -> tuple[str, ...]:
    found = raw.get("env_file", ())
    return (found,) if isinstance(found, str) else tuple(found)


def code(raw: Sequence[Any] | str) -> tuple[str | Glob | GitCode | AutoCode, ...]:
    if isinstance(raw, str):
        return (AutoCode(),)
    git = [isinstance(item, dict) and "git" in item for item in raw]
    return tuple(
        GitCode(item["git"], item["commit"], item["at"]) if is_git else path_or_glob(item)
        for item, is_git in zip(raw, git, strict=True)
    )


def other_lock(name: str) -> str | None:
    """What to do instead with a file of packages of this name, when it is of a kind that is not installed here."""
    return next((fix for pattern, fix in _OTHER_LOCKS if re.fullmatch(pattern, name)), None)
