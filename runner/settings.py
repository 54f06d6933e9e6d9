"""What settings are in force: `recipe.toml` of a workspace over the user's own `config.toml`.

Tables are taken whole: `[stores.team]` of a workspace replaces the user's of that name, so that no address of the one meets credentials of the other.
Credentials are in neither; they come from where the ecosystem keeps them.  Without files nothing is imported: two failed stats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from .errors import Invalid, Location, NotFound, Problem, did_you_mean
from .paths import settings_files, shipped
from .reading import whole

NAME: Final = "recipe.toml"
ANY: Final = "any"
"""In the place of a driver's name: the cheapest of several."""
_TABLES = ("stores", "drivers", "stacks")
_RECEIVERS = ("webhooks", "notify")
_LISTS = (
    ("recipes", "allow"),
    ("data", "roots"),
    ("data", "allow"),
    ("server", "hosts"),
    ("hooks", "spend"),
    ("drivers", "any"),
)
_FLAGS = (("steps", "sandbox"), ("server", "strict_jobs"), ("alerts", "silent_minutes"))
"""Settings of one value each."""
_PUBLIC = frozenset({"host_key", "keepalive", "secret"})  # the last is the name of a variable
_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One `[stores.NAME]`: where, and how it is asked.  `url` is as it was written."""

    name: str
    url: str
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    owner: str = ""
    anonymous: bool = False
    push: bool = False
    checkpoints: bool = False


@dataclass(frozen=True, slots=True)
class Receiver:
    """One `[[webhooks]]` or `[[notify]]`: who gets reports of runs.

    `url` of a webhook is its address; that of a `notify`, and every `secret`, is the name of an environment variable.
    """

    url: str
    events: tuple[str, ...] = ("*",)  # patterns of types: run.failed, alert.*
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The server that is node 0 of a stack's steps of several nodes; the others dial `address` at `port`."""

    driver: str
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.driver} {self.host}, which the other nodes dial at {self.address}:{self.port}; nothing is paid for it here"


@dataclass(frozen=True, slots=True)
class Stack:
    """One `[stacks.NAME]`: a driver, and how it is asked.  Texts are as they were written; empty where nothing is said.

    `file` is the one that it stands in: a stack of the user's own file is one for all workspaces.
    """

    name: str
    driver: str
    machine: str = ""
    gpu: str = ""
    nodes: int = 0
    market: str = ""
    zone: str = ""
    head: Head | None = None
    limits: Mapping[str, str] = field(default_factory=dict)  # `time` and `cost`
    keep: str = ""
    auto_stop: str = ""
    queue: bool = True
    store: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)  # further settings of the driver
    file: str = ""

    @property
    def id(self) -> str:
        """What the ledger calls it."""
        return f"{self.name} of {self.file}"

    @property
    def settings(self) -> dict[str, object]:
        """What it says of its driver, as the driver's settings."""
        named = {name: getattr(self, name) for name in _OF_DRIVER}
        return {**self.extra, **{name: value for name, value in named.items() if value}}


_OF_DRIVER: Final = ("machine", "gpu", "market", "zone")
"""Settings of a stack that are settings of its driver."""
_OF_ONE_DRIVER: Final = ("machine", "zone", "head", "nodes", "keep", "extra")
"""What a stack cannot say of the cheapest of several drivers."""


@dataclass(frozen=True, slots=True)
class Config:
    """Settings in force.  `said` has each as it is written, and where: (path of keys) -> its value, `file:line`."""

    store: str = ""
    inputs: str = ""  # `overlay`: steps may change what they are given, where the machine can
    stores: Mapping[str, StoreSettings] = field(default_factory=dict)
    drivers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prices: Mapping[str, str] = field(default_factory=dict)  # of an hour of a GPU, as written
    lists: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # `recipes.allow`, `data.roots`, `data.allow`, `server.hosts`, `hooks.spend`, `drivers.any`
    said: Mapping[tuple[str, ...], tuple[Any, str]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)  # of what is rented
    flags: Mapping[str, float] = field(
        default_factory=dict
    )  # `steps.sandbox`, `server.strict_jobs`, `alerts.silent_minutes`, as far as they are said
    webhooks: tuple[Receiver, ...] = ()
    notify: tuple[Receiver, ...] = ()
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    def stack(self, name: str) -> Stack:
        """The stack of that name.  Raises NotFound."""
        if name in self.stacks:
            return self.stacks[name]
        fix = (
            did_you_mean(name, self.stacks)
            or f"add [stacks.{name}] with a driver to {NAME}; `recipe config` shows those there are"
        )
        raise NotFound(f'there is no stack "{name}"', fix=fix)

    def on(self, name: str) -> Config:
        """These settings, with what a stack says of its driver.  Raises NotFound."""
        stack = self.stack(name)
        names = self.among(stack.driver) or (stack.driver,)
        said = {each: {**self.driver(each), **stack.settings} for each in names}
        return replace(self, drivers={**self.drivers, **said})

    def among(self, driver: str) -> tuple[str, ...]:
        """The drivers that `any` or `any:NAME,NAME` stands for, as they are named; empty for the name of one driver."""
        kind, _, listed = driver.partition(":")
        if kind != ANY:
            return ()
        return _listed(listed) if listed else self.lists.get("drivers.any", ())

    def store_named(self, name: str | None) -> StoreSettings | None:
        """The store that was asked for by name or as a URL, else the default one, else None.  Raises NotFound."""
        wanted = name or self.store
        if not wanted:
            return None
        if wanted in self.stores:
            return self.stores[wanted]
        if "/" in wanted:
            return next(
                (
                    each
                    for each in self.stores.values()
                    if each.url.rstrip("/") == wanted.rstrip("/")
                ),
                StoreSettings(wanted, wanted),
            )
        fix = did_you_mean(wanted, self.stores)
        raise NotFound(
            f'there is no store "{wanted}"',
            fix=fix
            or f"add [stores.{wanted}] with a url to {NAME}; `recipe config` shows those there are",
        )

    def store_of(self, address: str) -> StoreSettings | None:
        """The settings of a store in the bucket of `address`, which say how it is asked: of several, those of the nearest folder above."""
        there = {
            each.url.rstrip("/"): each
            for each in self.stores.values()
            if "://" in each.url and _bucket(each.url) == _bucket(address)
        }
        nearest = max(
            there,
            key=lambda url: len(url) if f"{address}/".startswith(f"{url}/") else 0,
            default="",
        )
        return there.get(nearest)

    def driver(self, name: str) -> dict[str, Any]:
        """The settings of a driver; none when nothing is said about it."""
        return dict(self.drivers.get(name, {}))


def _bucket(url: str) -> str:
    """Scheme and bucket of an address."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


NOTHING: Final = Config()


def load(root: Path, environ: Mapping[str, str]) -> Config:
    """The settings for the workspace at `root`.  Raises Invalid with every problem of both files."""
    problems: list[Problem] = []
    found = [_read(Path(path), problems) for path in settings_files(root, environ)]
    if problems:
        raise Invalid(problems)
    if not any(found):
        return NOTHING
    return _merged([file for file in found if file is not None])


def listed(config: Config) -> list[tuple[str, Any, str]]:
    """Every setting in force: its name, its value, and where it is from.  What looks like a credential is not shown."""
    return [
        (".".join(keys), _masked(keys[-1], value), origin)
        for keys, (value, origin) in sorted(config.said.items())
    ]


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(name, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked("", item) for item in value]
    return (
        "***"
        if _SECRET.search(key) and key not in _PUBLIC
        else list(value)
        if isinstance(value, tuple)
        else value
    )


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    text: str
    value: dict[str, Any]


def _read(path: Path, problems: list[Problem]) -> _File | None:
    try:
        data = whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problems.append(Problem("unreadable", f"{path} cannot be read: {error.strerror}"))
        return None
    import tomllib

    text = data.decode("utf-8", "replace")
    try:
        value = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        problems.append(
            Problem(
                "not-utf8",
                "this is not UTF-8 text",
                Location(str(path), data[: error.start].count(b"\n") + 1, 1),
            )
        )
        return None
    except tomllib.TOMLDecodeError as error:
        found = re.search(
            r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error)
        )
        line, column = (
            (int(found[2]), int(found[3])) if found and found[2] else (text.count("\n") + 1, 1)
        )
        problems.append(
            Problem(
                "not-toml",
                found[1] if found else str(error),
                _location(str(path), text, line, column),
            )
        )
        return None
    file = _File(str(path), text, value)
    problems += _faults(file)
    return file


def _merged(files: list[_File]) -> Config:
    """`files` in order of precedence."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    receivers: dict[str, list[Receiver]] = {kind: [] for kind in _RECEIVERS}
    said: dict[tuple[str, ...], tuple[Any, str]] = {}
    for file in reversed(files):
        for kind, known in receivers.items():
            for n, table in enumerate(file.value.get(kind, ())):
                said |= {
                    (kind, str(len(known)), key): (value, _origin(file, (kind, str(n), key)))
                    for key, value in table.items()
                }
                known.append(
                    Receiver(
                        **table | ({"events": tuple(table["events"])} if "events" in table else {})
                    )
                )
        for kind in _TABLES:
            for name, table in file.value.get(kind, {}).items():
                if (kind, name) in _LISTS:
                    continue
                tables[kind][name] = table
                said = {keys: each for keys, each in said.items() if keys[:2] != (kind, name)}
                said |= {
                    (kind, name, key): (value, _origin(file, (kind, name, key)))
                    for key, value in table.items()
                }
        single = [
            ("store",),
            ("inputs",),
            *_LISTS,
            *_FLAGS,
            *((kind, name) for kind in ("prices", "limits") for name in file.value.get(kind, ())),
        ]
        for keys in single:
            value = (
                file.value.get(keys[0])
                if len(keys) == 1
                else file.value.get(keys[0], {}).get(keys[1])
            )
            if value is not None and (keys[0] != "limits" or value <= said.get(keys, (value,))[0]):
                said[keys] = value, _origin(file, keys)
    prices, limits = (
        {keys[1]: value for keys, (value, _) in said.items() if keys[0] == kind}
        for kind in ("prices", "limits")
    )
    lists = {".".join(keys): tuple(said[keys][0]) for keys in _LISTS if keys in said}
    stores = {name: StoreSettings(name, **table) for name, table in tables["stores"].items()}
    webhooks, notify = (tuple(receivers[kind]) for kind in _RECEIVERS)
    stacks: dict[str, Stack] = {}
    for name, table in tables["stacks"].items():
        head = Head(**table["head"]) if "head" in table else None
        stacks[name] = Stack(
            name,
            **{**table, "head": head},
            file=said["stacks", name, "driver"][1].rpartition(":")[0],
        )
    return Config(
        said.get(("store",), ("",))[0],
        said.get(("inputs",), ("",))[0],
        stores,
        tables["drivers"],
        prices,
        lists,
        said,
        limits,
        {".".join(keys): said[keys][0] for keys in _FLAGS if keys in said},
        webhooks,
        notify,
        stacks,
    )


# -- what is wrong with a file ------------------------------------------------------------------------------------------------------------------


_Fault = tuple[str, str, tuple[str, ...], str]


def _faults(file: _File) -> list[Problem]:
    import json

    schema = json.loads((shipped() / "schemas" / "config.schema.json").read_text("utf-8"))
    faults = [*_check(schema, schema, file.value, ()), *_strange_extras(schema, file.value)]
    faults += (
        _strange_drivers(file.value)
        if faults
        else [*_strange_drivers(file.value), *_clashes(file.value)]
    )
    return [Problem(code, words, _where(file, keys), fix) for code, words, keys, fix in faults]


def _listed(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names.split(","))))


def _strange_drivers(value: Mapping[str, Any]) -> list[_Fault]:
    """Tables of drivers that neither we nor an installed package have: a driver that is never used would hide a slip of the pen."""
    tables, stacks = value.get("drivers"), value.get("stacks")
    named: list[tuple[tuple[str, ...], str]] = (
        [(("drivers", name), name) for name in tables if ("drivers", name) not in _LISTS]
        if isinstance(tables, dict)
        else []
    )
    for name, stack in stacks.items() if isinstance(stacks, dict) else ():
        if isinstance(stack, dict) and "driver" in stack:
            kind, _, several = f"{stack['driver']}".partition(":")
            for each in _listed(several) if kind == ANY else [f"{stack['driver']}"]:
                named.append((("stacks", name, "driver"), each))
    listed = tables.get("any") if isinstance(tables, dict) else None
    if isinstance(listed, list):
        named += [(("drivers", "any"), f"{each}") for each in listed]
    if not named:
        return []
    from .extensions import drivers

    return [
        (
            "unknown-driver",
            f'there is no driver "{name}"',
            keys,
            did_you_mean(name, there) or _drivers_fix(there),
        )
        for keys, name in named
        if name != "local" and name not in (there := drivers(name))
    ]


def _strange_extras(schema: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[_Fault]:
    """Further settings of a stack's driver that are none, or are wrong, as they would be under [drivers.NAME]."""
    stacks = value.get("stacks")
    for name, stack in stacks.items() if isinstance(stacks, dict) else ():
        if (
            isinstance(stack, dict)
            and isinstance(stack.get("driver"), str)
            and isinstance(stack.get("extra"), dict)
        ):
            part = schema["properties"]["drivers"]["properties"].get(stack["driver"], {})
            others = {
                key: inner for key, inner in stack["extra"].items() if key not in Stack.__slots__
            }  # of the stack itself: see _clashes
            yield from _check(schema, part, others, ("stacks", name, "extra"))


def _clashes(value: Mapping[str, Any]) -> list[_Fault]:
    """What the parts of a stack say against each other."""
    found: list[_Fault] = []
    for name, stack in value.get("stacks", {}).items():
        for key in (key for key in stack.get("extra", {}) if key in Stack.__slots__):
            fix = (
                f"write `{key} = …` beside `driver`"
                if key in stack or key in _OF_DRIVER
                else "take it out"
            )
            found.append(
                (
                    "clash",
                    f"stacks.{name}.extra.{key} is a setting of the stack itself",
                    ("stacks", name, "extra"),
                    fix,
                )
            )
        if "auto_stop" in stack and "keep" not in stack:
            words = f"stacks.{name}.auto_stop says when a kept machine stops, and none is kept"
            found.append(
                (
                    "clash",
                    words,
                    ("stacks", name, "auto_stop"),
                    'add keep = "stopped", or take it out',
                )
            )
        if stack["driver"].partition(":")[0] == ANY:
            found += [
                (
                    "clash",
                    f"stacks.{name}.{key} is about one driver, and its driver is {stack['driver']}",
                    ("stacks", name, key),
                    "name one driver, or take it out; [drivers.NAME] has settings of each",
                )
                for key in _OF_ONE_DRIVER
                if key in stack
            ]
        if "head" in stack:
            found += [
                ("clash", words, ("stacks", name, "head"), fix)
                for words, fix in _clashes_of_head(f"stacks.{name}", stack)
            ]
    return found


def _clashes_of_head(name: str, stack: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the head of a stack and its other settings say against each other, and what to do."""
    if stack["head"]["port"] > 65535:
        yield (
            f"{name}.head.port cannot be {stack['head']['port']}",
            "write a number from 1 to 65535",
        )
    if stack["driver"] == "local":
        yield (
            f"{name} has a head, and the driver local has no workers for it",
            "name a driver that has other machines, such as vastai",
        )
    if "nodes" in stack:
        words = f"{name}.nodes is for steps with `accelerate`, which take no head"
        yield (
            words,
            "take `nodes` out: a step with `run` says itself on how many nodes it runs, the head among them",
        )
    if "keep" in stack:
        yield (
            f"{name} keeps one machine, and a head has as many workers as a step says",
            "take `keep` or `head` out",
        )


def _drivers_fix(known: Mapping[str, object]) -> str:
    return f"known: {', '.join(sorted(known))}; install the package that brings it, or take the table away"


_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "object": ((dict,), "a table"),
    "array": ((list,), "a list"),
    "string": ((str,), "a text"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
}


def _check(
    root: Mapping[str, Any], part: Mapping[str, Any], value: Any, keys: tuple[str, ...]
) -> list[_Fault]:
    """Where `value` is not what the schema says.  Only the words that our own schema uses: importing a validator costs more than a no-op run."""
    if "$ref" in part:
        return _check(root, root["$defs"][part["$ref"].removeprefix("#/$defs/")], value, keys)
    name = ".".join(keys)
    if "anyOf" in part:
        tried = [_check(root, branch, value, keys) for branch in part["anyOf"]]
        return min(
            tried, key=lambda faults: (len(faults), faults[:1] and faults[0][0] == "wrong-type")
        )
    kind = part.get("type")
    if kind is not None and (
        not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [("wrong-type", f"{name} must be {_KINDS[kind][1]}", keys, "")]
    if isinstance(value, str):
        if not re.search(part.get("pattern", ""), value) or len(value) < part.get("minLength", 0):
            shown = "***" if _SECRET.search(keys[-1]) or keys[0] == "notify" else value
            return [
                ("bad-value", f'{name} cannot be "{shown}"', keys, str(part.get("description", "")))
            ]
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value < part.get("minimum", value)
    ):
        return [("bad-value", f"{name} must be at least {part['minimum']}", keys, "")]
    elif isinstance(value, list):
        return [
            fault
            for n, item in enumerate(value)
            for fault in _check(root, part.get("items", {}), item, (*keys, str(n)))
        ]
    if not isinstance(value, dict):
        return []
    known = part.get("properties", {})
    others = part.get("additionalProperties", True)
    found: list[_Fault] = []
    for missing in part.get("required", ()):
        if missing not in value:
            found.append(
                (
                    "missing-key",
                    f"{name} says no {missing}",
                    keys,
                    str(known[missing].get("description", "")),
                )
            )
    for key, inner in value.items():
        if key in known:
            found += _check(root, known[key], inner, (*keys, key))
        elif isinstance(others, dict):
            found += _check(root, others, inner, (*keys, key))
        elif not others:
            found.append(
                (
                    "unknown-key",
                    f'there is no setting "{".".join((*keys, key))}"',
                    (*keys, key),
                    _advice(key, known),
                )
            )
    return found


def _advice(key: str, known: Mapping[str, Any]) -> str:
    if hint := did_you_mean(key, known):
        return hint
    if _SECRET.search(key):
        return "credentials do not belong in this file: use a profile of ~/.aws, AWS_* variables, or `gcloud auth application-default login`"
    return f"known: {', '.join(sorted(known))}"


# -- where something stands ---------------------------------------------------------------------------------------------------------------------


def _origin(file: _File, keys: tuple[str, ...]) -> str:
    where = _where(file, keys)
    return f"{where.path}:{where.line}"


def _where(file: _File, keys: tuple[str, ...]) -> Location:
    """Where a key is written, as far as a look at headers and beginnings of lines can tell; else its table, else the first line."""
    lines = file.text.splitlines() or [""]
    table: tuple[str, ...] = ()
    best, depth = 1, 0
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            table = _dotted(header[1])
            here = table
        elif assigned := re.match(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=", line):
            here = (*table, *_dotted(assigned[1]))
        else:
            continue
        if here == keys[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    line = lines[best - 1]
    begin = len(line) - len(line.lstrip())
    return Location(
        file.path, best, begin + 1, max(1, len(line.split("=")[0].rstrip()) - begin), line
    )


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _location(path: str, text: str, line: int, column: int) -> Location:
    lines = text.splitlines()
    return Location(path, line, column, 1, lines[line - 1] if 0 < line <= len(lines) else "")
