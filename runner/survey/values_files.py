"""Input values from files: mappings of names in YAML, JSON or TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Invalid, NotFound, Problem
from ..language.inputs import number_of
from ..language.spelling import keep_spelling, written_of
from ..reading import whole

if TYPE_CHECKING:
    from ..language.document import Document
    from ..language.values import Tree


def read_values(paths: Sequence[tuple[str, Path]]) -> tuple[dict[str, object], dict[str, str]]:
    """Read input values from files, and return them with each value's file.

    Files are pairs of the typed name and the path.

    Raises Invalid with the problems of all files, NotFound.
    """
    found: dict[str, object] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for name, path in paths:
        try:
            read = _read_file(name, path)
        except Invalid as error:
            problems += error.problems
            continue
        found |= read
        origins |= dict.fromkeys(read, name)
    if problems:
        raise Invalid(problems)
    return found, origins


def _with_spelling(document: Document, value: Tree, key: str) -> object:
    """Return a value with its original number spelling, for use in text inputs.

    A single number counts as typed text, also on a server.
    """
    if "." in key:
        return value  # part of an object, which has no type
    found = keep_spelling(document, value, (key,))
    written = written_of(found)
    return found if written is None or number_of(written) is None else written


def _read_file(name: str, path: Path) -> dict[str, object]:
    try:
        data = whole(path)
    except OSError as error:
        raise NotFound(
            f"cannot read {name}: {error.strerror}",
            fix="pass a YAML, JSON or TOML file with input values",
        ) from error
    read: object
    if path.suffix in (".json", ".toml"):
        try:
            read = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise Invalid(
                [Problem("syntax", f"{name} is not valid {path.suffix[1:].upper()}: {error}")]
            ) from error
    else:
        from ..language import document

        parsed = document.parse(data, name)
        read = parsed.value
        if isinstance(read, dict):
            read = {key: _with_spelling(parsed, value, key) for key, value in read.items()}
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise Invalid(
            [
                Problem(
                    "wrong-type",
                    f"{name} is not a mapping of inputs to values",
                    fix="write one input per line: `learning_rate: 1e-4`",
                )
            ]
        )
    return read
