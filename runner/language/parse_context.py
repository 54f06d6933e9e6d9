"""A document during parsing: its names, its problems, and parsers shared by sections."""

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


class ParseContext:
    """State of parsing one document.

    `raw` satisfies the schema. Of the other parts only the names are known.
    """

    def __init__(self, document: Document, raw: dict[str, Any]) -> None:
        self.document, self.raw = document, raw
        self.problems: list[Problem] = []
        self.steps = self._names("steps")
        self.inputs = self._names("inputs")

    def suggest(self, word: str, known: Iterable[str]) -> str:
        """Return a "did you mean" fix with the most similar known word, or "".

        After 20 problems nothing is compared, because each comparison covers all names.
        """
        if len(self.problems) >= 20:
            return ""
        return did_you_mean(word, islice(known, 5000))

    def problem(
        self, code: str, message: str, path: Where, fix: str = "", *, key: bool = False
    ) -> None:
        """Report a problem, up to `schema.MANY` problems."""
        if len(self.problems) < schema.MANY:
            self.problems.append(self.document.problem(code, message, path, fix=fix, key=key))

    def check_numbers(self, tree: Any, path: Where) -> None:
        """Report numbers that may be meant as text, for example the version `3.10`, read as 3.1."""
        for found in misread_numbers(self.document, tree, path):
            message = f"{found.written} is the number {found.read}"
            fix = f'quote it: "{found.written}", or write the number {found.read}'
            self.problem("ambiguous-number", message, found.where, fix)

    def _names(self, section: str) -> list[str]:
        """Return the keys of a document section, such as the names of all steps."""
        whole = self.document.value
        names = whole.get(section) if isinstance(whole, dict) else None
        return list(names) if isinstance(names, dict) else []

    def expression(self, pattern: str, path: Where) -> Any:
        """Compile a regex pattern, or report an invalid pattern and return None."""
        import regex

        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            message = f"invalid pattern: {error}"
            fix = "write a regular expression, in single quotes to keep its backslashes"
            self.problem("bad-pattern", message, path, fix)
            return None

    def type(self, name: str) -> object:
        """Return the declared type of an input, or None if invalid."""
        spec = self.raw.get("inputs", {}).get(name)
        return spec["type"] if spec else None

    def check_secret(self, name: str, path: Where) -> None:
        """Report a name in `secrets` that is not a secret input."""
        spec = f"{{type: secret, env: {name.upper()}}}"
        if name not in self.inputs:
            fix = self._secret_meant(name) or f"declare the secret: {name}: {spec}"
            self.problem("unknown-secret", f'there is no secret input "{name}"', path, fix)
        elif self.type(name) not in ("secret", None):
            message = f'the input "{name}" is not a secret'
            self.problem("unknown-secret", message, path, f"declare it as {spec}")

    def _secret_meant(self, name: str) -> str:
        """Return a fix with the secret that is probably meant, or ""."""
        secrets = [other for other in self.inputs if self.type(other) == "secret"]
        # `hf_token` may stand for the secret `token` that reads HF_TOKEN.
        for other in secrets:
            if self.raw["inputs"][other].get("env") == name.upper():
                return f'use the input "{other}", which reads ${name.upper()}'
        return self.suggest(name, secrets)

    def secrets(self, raw: Mapping[str, Any], path: Where) -> tuple[str, ...]:
        """Return the valid secret names under `secrets` of a recipe or step."""
        names = tuple(raw.get("secrets", ()))
        for index, name in enumerate(names):
            self.check_secret(name, (*path, "secrets", index))
        return names

    def python(self, raw: Any, path: Where) -> Python | None:
        """Parse the `python` setting of a recipe, preset or step, or return None if unset."""
        if not raw:
            return None
        lock = raw.get("lock", "")
        name = lock.rpartition("/")[2]
        fix = other_lock(name)
        if fix is not None:
            self.problem("unknown-lock", f"unsupported lock file: {name}", (*path, "lock"), fix)
        return Python(lock, raw.get("version", ""))

    def unit(
        self, parse: Callable[[str], _T], raw: Mapping[str, Any], word: str, path: Where
    ) -> _T | None:
        """Parse the quantity with unit at the key `word`.

        None if it is missing or invalid; an invalid one is reported.
        """
        text = raw.get(word)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.problem("bad-unit", str(error), (*path, word))
            return None

    def resources(self, raw: dict[str, Any], path: Where) -> Resources:
        """Parse the resource requirements of a recipe, preset or step."""
        if not raw:
            return _NO_RESOURCES
        gpus = raw.get("gpus")
        if gpus is not None:
            gpus = int(gpus)  # the schema takes 2.0 for an integer
        return Resources(
            cpus=raw.get("cpus"),
            memory=self.unit(units.size, raw, "memory", path),
            gpus=gpus,
            gpu=raw.get("gpu"),
            gpu_memory=self.unit(units.size, raw, "gpu_memory", path),
            disk=self.unit(units.size, raw, "disk", path),
            pools=raw.get("pools", {}),
            key=raw.get("key", False),
        )

    def limits(self, raw: dict[str, Any], path: Where) -> Limits:
        """Parse the limits of a recipe or preset."""
        return Limits(
            time=self.unit(units.duration, raw, "time", path),
            cost=self.unit(units.money, raw, "cost", path),
        )


_NO_RESOURCES = Resources()
_OTHER_LOCKS = (
    (
        r"(environment|conda).*\.ya?ml|conda-lock.*|pixi\.(lock|toml)",
        "list its Python packages in requirements.txt and use that file; "
        "provide other packages with an `image`",
    ),
    (
        r"poetry\.lock|pdm\.lock|Pipfile(\.lock)?",
        "use pyproject.toml, or export a requirements.txt with hashes",
    ),
)
"""File name patterns of unsupported locks, with the fix for each."""


def path_or_glob(item: Any) -> str | Glob:
    """Parse an item that is a path, or a mapping with a glob pattern."""
    if isinstance(item, str):
        return item
    return Glob(item["glob"], tuple(item.get("exclude", ())), item.get("allow_empty"))


def env_files(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Parse `env_file`, which is a path or a list of paths."""
    found = raw.get("env_file", ())
    return (found,) if isinstance(found, str) else tuple(found)


def code(raw: Sequence[Any] | str) -> tuple[str | Glob | GitCode | AutoCode, ...]:
    """Parse `code`, which is a list or `auto`."""
    if isinstance(raw, str):
        return (AutoCode(),)
    return tuple(map(_code_item, raw))


def _code_item(item: Any) -> str | Glob | GitCode:
    if isinstance(item, dict) and "git" in item:
        return GitCode(item["git"], item["commit"], item["at"])
    return path_or_glob(item)


def other_lock(name: str) -> str | None:
    """Return the fix for an unsupported lock file name, or None if it is supported."""
    for pattern, fix in _OTHER_LOCKS:
        if re.fullmatch(pattern, name):
            return fix
    return None
