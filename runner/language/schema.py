"""Check a document against the schema of the language, in our own words, every problem at once.

jsonschema finds what is wrong; nothing of its prose is shown, and nothing is ever fetched for a `$ref`.
What most steps consist of is recognised without it, because it costs half a millisecond a step and there may be 100,000 of them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from runner.errors import Problem, did_you_mean

from . import library
from .values import is_number

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

    from .document import Document

Where: TypeAlias = "tuple[str | int, ...]"

Schema = TypedDict(
    "Schema",
    {
        "$ref": str,
        "$defs": "dict[str, Schema]",
        "anyOf": "list[Schema]",
        "oneOf": "list[Schema]",
        "properties": "dict[str, Schema]",
        "required": "list[str]",
        "type": "str | list[str]",
        "title": str,
        "description": str,
        "pattern": str,
    },
    total=False,
)
"""What we read of a JSON Schema."""

MANY = 200  # a file with more problems than this is not a recipe


class Fault(NamedTuple):
    """A problem by its path in the value, before it has a line."""

    code: str
    message: str
    path: Where
    fix: str = ""
    key: bool = False  # it is the key that is wrong, not what it holds
    read: str = (
        ""  # the number or truth value that is wrong, in its own text: the file may have another
    )


def check(document: Document) -> list[Problem]:
    """Everything in which `document` is not what the schema says."""
    return [located(document, fault) for fault in faults(document.value)]


def located(document: Document, fault: Fault) -> Problem:
    message, fix = fault.message, fault.fix
    if fault.read and (written := document.written(fault.path)):
        message = message.replace(f"the number {fault.read}", f"the number {written}")
        fix = fix.replace(f'"{fault.read}"', f'"{written}"')
    return document.problem(fault.code, message, fault.path, fix=fix, key=fault.key)


@cache
def load() -> Schema:
    """The schema."""
    found: Schema = json.loads(library.schema_text())
    return found


def faults(value: object) -> list[Fault]:
    """As `check`, on a bare value."""
    if isinstance(value, dict) and isinstance(steps := value.get("steps"), dict):
        # Where no step is left, a sound one stands for them: the schema must not see a mapping that we emptied.
        suspects = _suspects(steps)
        if steps and not suspects and _is_bare(value):
            return []
        value = {**value, "steps": suspects or ({"s": {"run": "x"}} if steps else {})}
    found: dict[Fault, None] = {}
    for error in _validator().iter_errors(value):
        for fault in _explained(error, ()):
            found[fault] = None
        if len(found) > MANY:
            break
    return sorted(found, key=lambda fault: [str(part) for part in fault.path])[:MANY]


@cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(load(), registry=Registry())


@cache
def _step_validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(
        {"$ref": "#/$defs/step", "$defs": load()["$defs"]}, registry=Registry()
    )


# -- most steps are sound ---------------------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ID = re.compile(r"[a-z][a-z0-9_-]{0,80}@[1-9][0-9]{0,8}")


def _is_bare(value: Mapping[str, object]) -> bool:
    """Whether everything but the steps is known to be sound: a name and a summary, nothing else.  Then jsonschema need not even be imported."""
    name, summary = value.get("recipe"), value.get("summary")
    return (
        len(value) == 3
        and type(name) is str
        and _ID.fullmatch(name) is not None
        and type(summary) is str
        and 0 < len(summary) <= 100
    )


def _suspects(steps: Mapping[str, object]) -> dict[str, object]:
    """The steps that the schema may refuse.  One verdict holds for all steps that are the same but for parts known to be sound."""
    verdicts = {repr({"run": "x"}): True}
    rest = {}
    for id, step in steps.items():
        if type(step) is dict and _is_name(id):
            core = {key: value for key, value in step.items() if not _is_sound(key, value)}
            if "run" in step and "run" not in core:
                core["run"] = "x"  # which command it is does not matter; that there is one does
            shape = repr(core)
            if shape not in verdicts:
                verdicts[shape] = _step_validator().is_valid(core)
            if verdicts[shape]:
                continue
        rest[id] = step
    return rest


def _is_sound(key: str, value: object) -> bool:
    """Whether the schema is known to accept this for this key of a step: a command, lists of non-empty text.  False means: ask the schema."""
    if key == "run":
        return (type(value) is str and value != "") or (
            type(value) is list and bool(value) and all(type(item) is str for item in value)
        )
    if key == "outputs" and type(value) is dict:
        return all(_is_name(name) and type(path) is str and path for name, path in value.items())
    if key in ("deps", "outputs", "code", "needs") and type(value) is list:
        return all(type(item) is str and item for item in value) and (
            key != "needs" or _are_names(value)
        )
    return False


def _are_names(words: list[str]) -> bool:
    return all(map(_is_name, words)) and len(set(words)) == len(words)


def _is_name(word: object) -> bool:
    return type(word) is str and _NAME.fullmatch(word) is not None


# -- from jsonschema's errors to ours ---------------------------------------------------------------------------------------------------------------


def _explained(error: ValidationError, above: Where) -> Iterator[Fault]:
    """What to tell the author.  `above` is the path of the error's parent, when it is one of several alternatives."""
    path: Where = (*above, *error.relative_path)
    given: Any = error.schema
    schema: Schema = given
    found: Any = error.instance
    rule: Any = error.validator_value
    if "propertyNames" in error.relative_schema_path:
        yield Fault(
            "bad-name",
            f'"{_short(found)}" is not {_expected(schema)}',
            (*path, found),
            _name_fix(found, schema),
            key=True,
        )
        return
    match error.validator:
        case "additionalProperties":
            known = tuple(schema.get("properties", ()))
            for key in found:
                if key not in known:
                    fault = _unknown_key(key, known, path)
                    outside = (
                        not path
                        and isinstance(found[key], dict)
                        and not _COMMANDS.isdisjoint(found[key])
                    )
                    yield (
                        fault._replace(fix=f'a step belongs under "steps": indent "{_short(key)}"')
                        if outside
                        else fault
                    )
        case "required":
            for key in rule:
                if key not in found and not _misspelt(schema, found, [key]):
                    yield Fault(
                        "missing-key",
                        f'{_thing(path)} has no "{key}"',
                        path,
                        _about(schema, key),
                        key=True,
                    )
        case "anyOf":
            yield from _alternatives(error, path)
        case "oneOf":
            if isinstance(found, dict) and (
                kind := _one_of(schema, found, path)
            ):  # anything else is a wrong type already
                yield kind
        case "not":
            message = f'"{path[-1]}" is not in this version of the language'
            yield Fault(
                "reserved", message, path, "start and stop it in the script of the step", key=True
            )
        case "type":
            yield _wrong_type(path, _expected(schema), schema, found)
        case "enum":
            words = [str(word) for word in rule]
            near = ""
            if isinstance(found, str):
                near = (
                    f"write {_TYPES_ELSEWHERE[found]}"
                    if _TYPES_ELSEWHERE.get(found) in words
                    else did_you_mean(found, words)
                )
            yield Fault(
                "not-allowed",
                f"{_thing(path)} must be {_listed(words)}, not {_found(found)}",
                path,
                near,
            )
        case "pattern":
            yield Fault(
                "not-allowed",
                f"{_thing(path)} must be {_expected(schema)}, not {_found(found)}",
                path,
                _pattern_fix(schema, found, _beside(error)),
            )
        case "maxLength":
            yield Fault(
                "too-long",
                f"{_thing(path)} has {len(found)} characters; at most {rule} are allowed",
                path,
            )
        case "minLength" | "minItems" | "minProperties":
            fix = (
                "a recipe has at least one step"
                if path == ("steps",)
                else "write at least one, or leave the key out"
            )
            yield Fault(
                "empty",
                f"{_thing(path)} is empty",
                path,
                fix if error.validator != "minLength" else "",
                key=True,
            )
        case "uniqueItems":
            twice = next(item for n, item in enumerate(found) if item in found[:n])
            yield Fault(
                "twice", f"{_thing(path)} lists {_found(twice)} twice", path, "write it once"
            )
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            yield Fault(
                "not-allowed",
                f"{_thing(path)} must be {_BOUNDS[error.validator]} {rule}, not {_found(found)}",
                path,
            )
        case _:
            raise AssertionError(
                f"BUG: the schema uses {error.validator!r}, for which there are no words"
            )


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def _alternatives(error: ValidationError, path: Where) -> Iterator[Fault]:
    """The author meant the alternative whose kind is there, of mappings the one with most of the keys; where none is, say what all of them are."""
    branches: dict[int, list[ValidationError]] = {}
    for inner in error.context or ():
        branches.setdefault(int(inner.relative_schema_path[0]), []).append(inner)
    given: Any = error.schema
    schema: Schema = given
    found: Any = error.instance
    meant = [
        n for n, inners in branches.items() if not any(_another_kind(inner) for inner in inners)
    ]
    if meant:
        known = {
            n: _resolved(schema["anyOf"][n]).get("properties", {}).keys()
            if isinstance(found, dict)
            else ()
            for n in meant
        }
        for inner in branches[
            max(meant, key=lambda n: sum(key in known[n] for key in found) if known[n] else 0)
        ]:
            yield from _explained(inner, path)
        return
    kinds = [_expected(_resolved(branch)) for branch in schema["anyOf"]]
    yield _wrong_type(path, _listed(kinds), schema, error.instance)


def _another_kind(error: ValidationError) -> bool:
    """Whether what is there is not of the kind of an alternative at all; one that is a single word is of no kind but itself."""
    words = error.validator_value
    return not error.relative_path and (
        error.validator == "type"
        or (error.validator == "enum" and isinstance(words, list) and len(words) == 1)
    )


def _one_of(schema: Schema, found: dict[str, object], path: Where) -> Fault | None:
    """What is wrong; nothing where one of them is there by another name, which is a fault of its own."""
    keys = [branch["required"][0] for branch in schema["oneOf"]]
    there = [key for key in found if key in keys]
    if there:
        both = "both " if len(there) == 2 else ""
        listed = ", ".join(f'"{key}"' for key in there[:-1]) + f' and "{there[-1]}"'
        return Fault(
            "one-of",
            f"{_thing(path)} has {both}{listed}; it can have only one of them",
            (*path, there[1]),
            "keep one",
            key=True,
        )
    if _misspelt(schema, found, keys):
        return None
    message = f"{_thing(path)} has none of {_listed([_quoted(key) for key in keys], 'and')}"
    return Fault(
        "missing-key", message, path, _too_far_out(path) or f"add one, such as {keys[0]}", key=True
    )


_COMMANDS = frozenset(("run", "accelerate", "uses", "select"))


def _too_far_out(path: Where) -> str:
    """What to do about a step that is called as a key of steps is."""
    if len(path) == 2 and path[0] == "steps" and path[1] in load()["$defs"]["step"]["properties"]:
        return f'indent it further, if it is "{path[1]}" of the step above'
    return ""


@lru_cache(1000)
def _near(key: str, known: tuple[str, ...]) -> str:
    """The key, or the word of another tool for one, that an unknown key is nearest to."""
    elsewhere = [word for word, ours in _ELSEWHERE.items() if ours in known and word not in known]
    # A word of another tool is taken for ours only where it is nearly that: "doc" is no "docker".
    theirs = get_close_matches(key, elsewhere, n=len(elsewhere) or 1, cutoff=0.8)
    return next(iter(get_close_matches(key, [*known, *theirs], n=1, cutoff=0.6)), "")


def _misspelt(schema: Schema, found: Mapping[str, object], keys: Sequence[str]) -> bool:
    """Whether an unknown key is meant for one of these."""
    known = tuple(schema.get("properties", ()))
    near = [_near(key, known) for key in found if key not in known]
    return any(word in keys or _ELSEWHERE.get(word) in keys for word in near)


def _unknown_key(key: str, known: tuple[str, ...], path: Where) -> Fault:
    near = _near(key, known)
    fix = _PLACE if key in _PLACES and path[:1] in ((), ("steps",)) else ""
    if near and not fix:
        fix = (
            did_you_mean(key, [near])
            if near in known
            else f'it is called "{_ELSEWHERE[near]}" here'
        )
    if not fix and known:
        fix = "the keys here are " + " ".join(known) if len(known) <= 12 else ""
    return Fault(
        "unknown-key", f'{_thing(path)} has no key "{_short(key)}"', (*path, key), fix, key=True
    )


_PLACES = ("host", "hosts", "driver", "machine", "server", "runs_on", "runs-on")
_PLACE = "who starts a run says where: `recipe run --driver ssh --host YOU@HOST`; `where: local` keeps a step on the machine that starts it"
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
_ELSEWHERE = {
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


def _wrong_type(path: Where, expected: str, schema: Schema, found: object) -> Fault:
    if found is None:
        fix = "write a value, or leave the key out"
        if "outputs" in path:
            fix = 'in { } a comma begins a new key; quote a text that has one: "x,y"'
        elif len(path) == 1 and expected == "a mapping":
            fix = f'indent what belongs to "{path[0]}"'
        return Fault(
            "null", f"{_thing(path)} has no value; it must be {expected}", path, fix, key=True
        )
    fix = ""
    if is_number(found):
        if "duration" in expected:
            fix = f"write its unit, such as {found}s"
        elif "a size" in expected:
            fix = f"write its unit, such as {found}GB"
        elif "an amount" in expected:
            fix = f"write {found} USD"
        elif "expression" not in expected:
            fix = (
                f'quote it, if it is meant as text: "{found}"' if "string" in _types(schema) else ""
            )
    elif isinstance(found, bool) and "string" in _types(schema):
        fix = f'quote it, "{str(found).lower()}", if it is meant as text'
    elif isinstance(found, str):
        types = _types(schema)
        if types & {"integer", "number"}:
            fix = "write it without quotes" if re.fullmatch(r"[-+]?[0-9.]+", found) else ""
        elif "boolean" in types:
            fix = (
                "write true or false"
                if found.lower() in ("yes", "no", "on", "off", "true", "false")
                else ""
            )
        elif "array" in types:
            fix = f"write a list, [{_short(found)}]"
        elif path[:1] == ("steps",) and len(path) == 2:
            fix = "write the command under `run:`"
        elif path[:1] == ("inputs",) and len(path) == 2:
            fix = "write {type: string}, for instance"
    return Fault(
        "wrong-type",
        f"{_thing(path)} must be {expected}, not {_found(found)}",
        path,
        _too_far_out(path) or fix,
        read=_short(found).lower() if isinstance(found, (bool, int, float)) else "",
    )


# -- words ------------------------------------------------------------------------------------------------------------------------------------------

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}


def _resolved(schema: Schema) -> Schema:
    """The schema itself, or the definition it refers to."""
    return load()["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema


def _types(schema: Schema) -> set[str]:
    """Every type that `schema` accepts at its top."""
    schema = _resolved(schema)
    if "anyOf" in schema:
        return set().union(*(_types(branch) for branch in schema["anyOf"]))
    types = schema.get("type", [])
    return {types} if isinstance(types, str) else set(types)


def _expected(schema: Schema) -> str:
    """What a value must be, in words."""
    if "title" in schema:
        return str(schema["title"])
    types = schema.get("type", [])
    return _listed([_TYPES[word] for word in ([types] if isinstance(types, str) else types)])


def _about(schema: Schema, key: str) -> str:
    """What a missing key would say: the first sentence of its description."""
    text = str(schema.get("properties", {}).get(key, {}).get("description", ""))
    sentence = re.split(r"(?<=[.:]) ", text, maxsplit=1)[0].rstrip(".:")
    return f"{key}: {sentence[:1].lower()}{sentence[1:]}" if sentence else ""


def _thing(path: Where) -> str:
    """What stands at `path`, as a person would call it."""
    kind = (
        {"steps": "step", "inputs": "input", "presets": "preset"}.get(str(path[0]))
        if path
        else None
    )
    if kind and len(path) > 1:
        owner, rest = f'{kind} "{_short(path[1])}"', path[2:]
    else:
        owner, rest = "the recipe", path
    if not rest:
        return owner
    name = _short(
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest).lstrip(".")
    )
    return f'"{name}"' if owner == "the recipe" else f'"{name}" of {owner}'


def _found(value: object) -> str:
    """A value as the author sees it, cut to a length that fits in a sentence."""
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case str():
            return f'the text "{_short(value)}"' if value else "an empty text"
        case int() | float():
            return f"the number {value}" if abs(value) < 1e30 else "a number far too large"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "a mapping" if value else "an empty mapping"


def _short(value: object) -> str:
    text = str(value).partition("\n")[0]
    return text if len(text) <= 60 else text[:57] + "..."


def _quoted(word: str) -> str:
    return f'"{word}"'


def _listed(words: Sequence[str], joint: str = "or") -> str:
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"


def _name_fix(found: str, schema: Schema) -> str:
    if "A-Z" in schema.get("pattern", ""):
        return ""
    better = re.sub(
        r"[^a-z0-9_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found).lower()
    ).strip("_")[:64]
    better = better if better[:1].isalpha() else f"n_{better}" if better else ""
    return f'write "{better}"' if better and better != found else ""


def _beside(error: ValidationError) -> Mapping[str, object]:
    """The mapping that a wrong value stands in, where that is one of several alternatives."""
    found: Any = error.parent.instance if error.parent is not None else None
    return found if isinstance(found, dict) else {}


def _pattern_fix(schema: Schema, found: str, beside: Mapping[str, object]) -> str:
    title = schema.get("title", "")
    if "commit id" in title:
        name, source = shlex.quote(_short(found)), shlex.quote(str(beside.get("git", "URL")))
        return f"`git ls-remote {source} {name}` prints the id of a branch or tag; in a clone `git rev-parse {name}` does"
    if "duration" in title or "size" in title or "amount" in title:
        return "write a number and a unit" if re.fullmatch(r"[0-9.]+", found) else ""
    if "version" in title and "@" not in found:
        return f'write "{_short(found)}@1"'
    return ""
