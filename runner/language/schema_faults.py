"""Turn jsonschema's errors into messages and fixes for the author."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import did_you_mean

from .bad_values import shorten
from .schema_file import Schema, describe_expected, describe_key, join, load, resolve, types_of
from .values import Where, is_number

if TYPE_CHECKING:
    from jsonschema import ValidationError


class SchemaFault(NamedTuple):
    """A schema violation with its path in the document, before its line is known."""

    code: str
    message: str
    path: Where
    fix: str = ""
    key: bool = False  # the key is wrong, not its value
    # The wrong number or truth value in its own text; the file may have another.
    read: str = ""


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """A jsonschema error: the invalid value and the violated schema rule."""

    error: ValidationError
    path: Where  # of the value in the document
    schema: Schema
    value: Any
    rule: Any  # value of the keyword in the schema


def explain(error: ValidationError, above: Where = ()) -> Iterator[SchemaFault]:
    """Convert a jsonschema error to readable faults.

    `above` is the path of the parent error, if this error belongs to one of several alternatives.
    """
    schema: Any = error.schema
    path: Where = (*above, *error.relative_path)
    mismatch = _Mismatch(error, path, schema, error.instance, error.validator_value)
    if "propertyNames" in error.relative_schema_path:
        yield _bad_name(mismatch)
        return
    keyword = str(error.validator)
    if keyword not in _EXPLAIN:
        raise AssertionError(f"BUG: the schema uses {keyword!r}, for which there are no words")
    yield from _EXPLAIN[keyword](mismatch)


# -- one keyword of the schema each --


def _bad_name(mismatch: _Mismatch) -> SchemaFault:
    name, path = mismatch.value, mismatch.path
    message = f'"{shorten(name)}" is not {describe_expected(mismatch.schema)}'
    return SchemaFault(
        "bad-name", message, (*path, name), _better_name(name, mismatch.schema), key=True
    )


def _explain_unknown_keys(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    known = tuple(mismatch.schema.get("properties", ()))
    for key, value in mismatch.value.items():
        if key in known:
            continue
        fault = _unknown_key(key, known, mismatch.path)
        is_step = isinstance(value, dict) and not _COMMANDS.isdisjoint(value)
        if is_step and not mismatch.path:
            fault = fault._replace(fix=f'a step belongs under "steps": indent "{shorten(key)}"')
        yield fault


def _explain_missing_keys(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    schema, value, path = mismatch.schema, mismatch.value, mismatch.path
    for key in mismatch.rule:
        if key not in value and not _is_misspelt(schema, value, [key]):
            message = f'{_describe(path)} has no "{key}"'
            yield SchemaFault(
                "missing-key", message, path, f"add {describe_key(schema, key)}", key=True
            )


def _explain_any_of(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    """Yield the faults of the probably intended `anyOf` alternative, or one fault naming all.

    The intended alternative accepts the value's type, and for mappings has the most keys in common.
    """
    path = mismatch.path
    errors_of: dict[int, list[ValidationError]] = {}
    for error in mismatch.error.context or ():
        errors_of.setdefault(int(error.relative_schema_path[0]), []).append(error)
    branches = [resolve(branch) for branch in mismatch.schema["anyOf"]]
    meant = [n for n, errors in errors_of.items() if not any(map(_is_of_another_kind, errors))]
    if not meant:
        kinds = join([describe_expected(branch) for branch in branches])
        yield _wrong_type(path, kinds, mismatch.schema, mismatch.value)
        return
    closest = max(meant, key=lambda n: _count_known_keys(branches[n], mismatch.value))
    for error in errors_of[closest]:
        yield from explain(error, path)


def _is_of_another_kind(error: ValidationError) -> bool:
    """Return True if a value's type does not match an `anyOf` alternative.

    An alternative with a single allowed word matches only that word.
    """
    if error.relative_path:
        return False
    words = error.validator_value
    is_word = error.validator == "enum" and isinstance(words, list) and len(words) == 1
    return error.validator == "type" or is_word


def _count_known_keys(schema: Schema, value: object) -> int:
    """Count the keys of a mapping that exist in a schema."""
    if not isinstance(value, dict):
        return 0
    known = schema.get("properties", {})
    return sum(key in known for key in value)


def _explain_one_of(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    """Yield the fault of a mapping with none or several of its mutually exclusive keys.

    No fault if one of them is misspelt, because the unknown key is reported itself.
    """
    schema, value, path = mismatch.schema, mismatch.value, mismatch.path
    if not isinstance(value, dict):
        return  # reported as a wrong type
    keys = [branch["required"][0] for branch in schema["oneOf"]]
    present = [key for key in value if key in keys]
    if present:
        both = "both " if len(present) == 2 else ""
        *first, last = map(_quote, present)
        names = f"{', '.join(first)} and {last}"
        message = f"{_describe(path)} has {both}{names}; it can have only one of them"
        yield SchemaFault("one-of", message, (*path, present[1]), "keep one", key=True)
    elif not _is_misspelt(schema, value, keys):
        names = join([_quote(key) for key in keys], "and")
        fix = _fix_indentation(path) or f"add one of them, for example `{keys[0]}`"
        message = f"{_describe(path)} has none of {names}"
        yield SchemaFault("missing-key", message, path, fix, key=True)


def _explain_reserved(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    message = f'"{mismatch.path[-1]}" is not in this version of the language'
    fix = "start and stop the service in the step's script"
    yield SchemaFault("reserved", message, mismatch.path, fix, key=True)


def _explain_type(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    schema = mismatch.schema
    yield _wrong_type(mismatch.path, describe_expected(schema), schema, mismatch.value)


def _explain_enum(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    words = [str(word) for word in mismatch.rule]
    value = mismatch.value
    fix = ""
    if isinstance(value, str):
        ours = _TYPES_ELSEWHERE.get(value)
        fix = f"write {ours}" if ours in words else did_you_mean(value, words)
    yield _not_allowed(mismatch, join(words), fix)


def _explain_pattern(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    fix = _fix_of_pattern(mismatch.schema, mismatch.value, _mapping_around(mismatch.error))
    yield _not_allowed(mismatch, describe_expected(mismatch.schema), fix)


def _explain_bound(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    yield _not_allowed(mismatch, f"{_BOUNDS[str(mismatch.error.validator)]} {mismatch.rule}")


def _not_allowed(mismatch: _Mismatch, wanted: str, fix: str = "") -> SchemaFault:
    path = mismatch.path
    message = f"{_describe(path)} must be {wanted}, not {_describe_value(mismatch.value)}"
    return SchemaFault("not-allowed", message, path, fix)


def _explain_length(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    length = f"{len(mismatch.value)} characters; at most {mismatch.rule} are allowed"
    yield SchemaFault("too-long", f"{_describe(mismatch.path)} has {length}", mismatch.path)


def _explain_empty_text(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    yield _empty(mismatch.path, "")


def _explain_empty_collection(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    if mismatch.path == ("steps",):
        yield _empty(mismatch.path, "a recipe has at least one step")
    else:
        yield _empty(mismatch.path, "add at least one entry, or remove the key")


def _empty(path: Where, fix: str) -> SchemaFault:
    return SchemaFault("empty", f"{_describe(path)} is empty", path, fix, key=True)


def _explain_repeated_item(mismatch: _Mismatch) -> Iterator[SchemaFault]:
    items, path = mismatch.value, mismatch.path
    twice = next(item for n, item in enumerate(items) if item in items[:n])
    message = f"{_describe(path)} lists {_describe_value(twice)} twice"
    yield SchemaFault("twice", message, path, "remove the duplicate")


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}

_EXPLAIN: Mapping[str, Callable[[_Mismatch], Iterator[SchemaFault]]] = {
    "additionalProperties": _explain_unknown_keys,
    "required": _explain_missing_keys,
    "anyOf": _explain_any_of,
    "oneOf": _explain_one_of,
    "not": _explain_reserved,
    "type": _explain_type,
    "enum": _explain_enum,
    "pattern": _explain_pattern,
    "maxLength": _explain_length,
    "minLength": _explain_empty_text,
    "minItems": _explain_empty_collection,
    "minProperties": _explain_empty_collection,
    "uniqueItems": _explain_repeated_item,
    **dict.fromkeys(_BOUNDS, _explain_bound),
}


# -- keys of other tools, and misspelt ones --

_COMMANDS = frozenset(("run", "accelerate", "uses", "select"))
_PLACES = ("host", "hosts", "driver", "machine", "server", "runs_on", "runs-on")
_PLACE_FIX = (
    "choose the machine when you start a run: `recipe run --driver ssh --host YOU@HOST`; "
    "`where: local` keeps a step on the machine that starts it"
)
_TYPES_ELSEWHERE = {
    **dict.fromkeys(("float", "double", "real"), "number"),
    **dict.fromkeys(("folder", "directory", "dir"), "dataset"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("array", "tuple"), "list"),
    **dict.fromkeys(("password", "token"), "secret"),
    "int": "integer",
    "bool": "boolean",
    "str": "string",
    "text": "string",
    "enum": "choice",
    "path": "file",
}
_KEYS_ELSEWHERE = {
    **dict.fromkeys(("command", "cmd", "script", "shell_command", "entrypoint"), "run"),
    **dict.fromkeys(("depends_on", "after", "requires", "dependencies"), "needs"),
    **dict.fromkeys(("inputs", "input", "deps_files", "sources"), "deps"),
    **dict.fromkeys(("outs", "output", "products", "artifacts", "targets"), "outputs"),
    **dict.fromkeys(("params", "parameters", "args", "variables"), "inputs"),
    **dict.fromkeys(("environment", "envs", "vars"), "env"),
    **dict.fromkeys(("description", "help"), "doc"),
    **dict.fromkeys(("container", "docker"), "image"),
    **dict.fromkeys(("if", "condition"), "when"),
    **dict.fromkeys(("retry", "max_retries"), "retries"),
    **dict.fromkeys(("strategy", "foreach", "for_each"), "matrix"),
    **dict.fromkeys(("checkpoints", "checkpoint"), "state"),
    **dict.fromkeys(("bootstrap", "before"), "setup"),
    **dict.fromkeys(("finally", "after_script"), "cleanup"),
    **dict.fromkeys(("jobs", "stages", "tasks", "rules"), "steps"),
    **dict.fromkeys(("options", "enum", "values"), "choices"),
    **dict.fromkeys(("gpu_count", "num_gpus", "accelerators"), "gpus"),
    **dict.fromkeys(("ram", "mem"), "memory"),
    **dict.fromkeys(("cpu", "cores"), "cpus"),
    **dict.fromkeys(("hours", "max_time"), "time"),
    "name": "recipe",
    "num_nodes": "nodes",
    "min": "minimum",
    "max": "maximum",
    "extends": "continues",
}
"""Words of other tools for our keys."""


def _unknown_key(key: str, known: tuple[str, ...], path: Where) -> SchemaFault:
    message = f'{_describe(path)} has no key "{shorten(key)}"'
    return SchemaFault(
        "unknown-key", message, (*path, key), _fix_of_key(key, known, path), key=True
    )


def _fix_of_key(key: str, known: tuple[str, ...], path: Where) -> str:
    """Return a suggested fix for an unknown key."""
    if key in _PLACES and path[:1] in ((), ("steps",)):
        return _PLACE_FIX
    near = _nearest_key(key, known)
    fix = ""
    if near in known:
        fix = did_you_mean(key, [near])
    elif near:
        fix = f'use "{_KEYS_ELSEWHERE[near]}" instead'
    if not fix and 0 < len(known) <= 12:
        fix = "available keys: " + " ".join(known)
    return fix


@lru_cache(1000)
def _nearest_key(key: str, known: tuple[str, ...]) -> str:
    """Return the known key, or known alias from another tool, most similar to a key."""
    elsewhere: list[str] = []
    for word, ours in _KEYS_ELSEWHERE.items():
        if ours in known and word not in known:
            elsewhere.append(word)
    # Another tool's key must match closely: "doc" is not "docker".
    theirs = get_close_matches(key, elsewhere, n=len(elsewhere) or 1, cutoff=0.8)
    nearest = get_close_matches(key, [*known, *theirs], n=1, cutoff=0.6)
    return nearest[0] if nearest else ""


def _is_misspelt(schema: Schema, value: Mapping[str, object], keys: Sequence[str]) -> bool:
    """Return True if an unknown key of a mapping is probably a misspelling of one of `keys`."""
    known = tuple(schema.get("properties", ()))
    near = [_nearest_key(key, known) for key in value if key not in known]
    return any(word in keys or _KEYS_ELSEWHERE.get(word) in keys for word in near)


def _fix_indentation(path: Where) -> str:
    """Return the indentation fix for a step whose name is a key of steps."""
    if len(path) != 2 or path[0] != "steps":
        return ""
    if path[1] not in load()["$defs"]["step"]["properties"]:
        return ""
    return f'indent it further, if it is "{path[1]}" of the step above'


# -- values of a wrong type --

_TRUTH_WORDS = frozenset(("yes", "no", "on", "off", "true", "false"))
_FIXES_OF_ENTRY: Mapping[str | int, str] = {
    "steps": "write the command under `run:`",
    "inputs": "write {type: string}, for instance",
}
"""Fix of a text in the place of an entry, by section of the recipe."""


def _wrong_type(path: Where, wanted: str, schema: Schema, value: object) -> SchemaFault:
    if value is None:
        message = f"{_describe(path)} has no value; it must be {wanted}"
        return SchemaFault("null", message, path, _fix_of_null(path, wanted), key=True)
    if is_number(value):
        fix = _fix_of_number(value, wanted, schema)
    elif isinstance(value, bool):
        fix = _fix_of_boolean(value, schema)
    elif isinstance(value, str):
        fix = _fix_of_text(value, path, schema)
    else:
        fix = ""
    message = f"{_describe(path)} must be {wanted}, not {_describe_value(value)}"
    read = shorten(value).lower() if isinstance(value, (bool, int, float)) else ""
    return SchemaFault("wrong-type", message, path, _fix_indentation(path) or fix, read=read)


def _fix_of_null(path: Where, wanted: str) -> str:
    if "outputs" in path:
        return 'inside { } a comma starts a new key; quote text that contains a comma: "x,y"'
    if len(path) == 1 and wanted == "a mapping":
        return f'indent the lines below "{path[0]}"'
    return "add a value, or remove the key"


def _fix_of_number(value: float, wanted: str, schema: Schema) -> str:
    if "duration" in wanted:
        return f"add a unit, such as {value}s"
    if "a size" in wanted:
        return f"add a unit, such as {value}GB"
    if "an amount" in wanted:
        return f"write {value} USD"
    if "expression" not in wanted and "string" in types_of(schema):
        return f'if this is text, quote it: "{value}"'
    return ""


def _fix_of_boolean(value: bool, schema: Schema) -> str:
    if "string" in types_of(schema):
        return f'if this is text, quote it: "{str(value).lower()}"'
    return ""


def _fix_of_text(value: str, path: Where, schema: Schema) -> str:
    types = types_of(schema)
    if types & {"integer", "number"}:
        return "write it without quotes" if re.fullmatch(r"[-+]?[0-9.]+", value) else ""
    if "boolean" in types:
        return "write true or false" if value.lower() in _TRUTH_WORDS else ""
    if "array" in types:
        return f"write a list, [{shorten(value)}]"
    if len(path) == 2:
        return _FIXES_OF_ENTRY.get(path[0], "")
    return ""


# -- values that do not match a pattern --


def _better_name(name: str, schema: Schema) -> str:
    """Suggest a valid name derived from an invalid name."""
    if "A-Z" in schema.get("pattern", ""):
        return ""
    lower = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    better = re.sub(r"[^a-z0-9_]+", "_", lower).strip("_")[:64]
    if better and not better[0].isalpha():
        better = f"n_{better}"
    if not better or better == name:
        return ""
    return f'write "{better}"'


def _mapping_around(error: ValidationError) -> Mapping[str, object]:
    """Return the mapping around an invalid value, if the schema allows alternatives there."""
    found: Any = error.parent.instance if error.parent is not None else None
    return found if isinstance(found, dict) else {}


def _fix_of_pattern(schema: Schema, value: str, around: Mapping[str, object]) -> str:
    title = schema.get("title", "")
    if "commit id" in title:
        name, source = shlex.quote(shorten(value)), shlex.quote(str(around.get("git", "URL")))
        return (
            f"to find the commit id of a branch or tag, run `git ls-remote {source} {name}`; "
            f"in a clone `git rev-parse {name}` does"
        )
    if any(word in title for word in ("duration", "size", "amount")):
        return "use a number and a unit" if re.fullmatch(r"[0-9.]+", value) else ""
    if "version" in title and "@" not in value:
        return f'write "{shorten(value)}@1"'
    return ""


# -- words --

_SECTIONS = {"steps": "step", "inputs": "input", "presets": "preset"}


def _describe(path: Where) -> str:
    """Describe a document path for messages, such as `"deps[0]" of step "train"`."""
    owner, rest = "the recipe", path
    if len(path) > 1 and path[0] in _SECTIONS:
        owner, rest = f'{_SECTIONS[str(path[0])]} "{shorten(path[1])}"', path[2:]
    if not rest:
        return owner
    name = ""
    for part in rest:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    name = shorten(name.lstrip("."))
    return f'"{name}"' if owner == "the recipe" else f'"{name}" of {owner}'


def _describe_value(value: object) -> str:
    """Format a value briefly for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {value}" if abs(value) < 1e30 else "a number far too large"
    if isinstance(value, str):
        return f'the text "{shorten(value)}"' if value else "an empty text"
    noun = "list" if isinstance(value, list) else "mapping"
    return f"a {noun}" if value else f"an empty {noun}"


def _quote(word: str) -> str:
    return f'"{word}"'
