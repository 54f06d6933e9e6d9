"""Effective settings: the workspace's `recipe.toml` over the user's `config.toml`.

Tables are not merged: `[stores.team]` of a workspace replaces the user's table, so that an address
never meets other credentials. Credentials are not in settings files, but in their usual places.
Without settings files, no parser is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from .errors import Invalid, Location, NotFound, Problem, did_you_mean
from .paths import settings_files, shipped
from .reading import whole

NAME: Final = "recipe.toml"
ANY: Final = "any"
"""Driver name that selects the cheapest of several drivers."""
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
"""Settings with a single value."""
_PUBLIC = frozenset({"host_key", "keepalive", "secret"})  # `secret` is the name of a variable
_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)


class StoreSettings(NamedTuple):
    """A `[stores.NAME]` table: the URL as written, and client options."""

    name: str
    url: str
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    owner: str = ""
    anonymous: bool = False
    push: bool = False
    checkpoints: bool = False


class Receiver(NamedTuple):
    """A `[[webhooks]]` or `[[notify]]` table: a receiver of run messages.

    A webhook's `url` is its address. The `url` of a `notify` table, and every `secret`, is the name
    of an environment variable.
    """

    url: str
    events: tuple[str, ...] = ("*",)  # patterns of event types: run.failed, alert.*
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The head node of a stack's multi-node steps. Other nodes connect to `address` at `port`."""

    driver: str
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.driver} {self.host}, reached by the other nodes at {self.address}:{self.port}; not part of the cost"


@dataclass(frozen=True, slots=True)
class Stack:
    """A `[stacks.NAME]` table: a driver and its settings, as written; empty if not set.

    `file` is the settings file: a stack in the user's file is shared by all workspaces.
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
    extra: Mapping[str, object] = field(default_factory=dict)  # other driver settings
    file: str = ""

    @property
    def id(self) -> str:
        """The stack's name in the ledger."""
        return f"{self.name} of {self.file}"

    @property
    def settings(self) -> dict[str, object]:
        """Driver settings of the stack."""
        settings = dict(self.extra)
        for name in _OF_DRIVER:
            value = getattr(self, name)
            if value:
                settings[name] = value
        return settings


_OF_DRIVER: Final = ("machine", "gpu", "market", "zone")
"""Stack settings that are driver settings."""
_OF_ONE_DRIVER: Final = ("machine", "zone", "head", "nodes", "keep", "extra")
"""Stack settings that require a single driver."""


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings. `said` maps key paths to (value as written, `file:line`)."""

    store: str = ""
    inputs: str = ""  # `overlay`: steps may modify their inputs, if the machine supports it
    stores: Mapping[str, StoreSettings] = field(default_factory=dict)
    drivers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prices: Mapping[str, str] = field(default_factory=dict)  # per GPU hour, as written
    lists: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # `recipes.allow`, `data.roots`, `data.allow`, `server.hosts`, `hooks.spend`, `drivers.any`
    said: Mapping[tuple[str, ...], tuple[Any, str]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)  # limits on rentals
    flags: Mapping[str, float] = field(
        default_factory=dict
    )  # `steps.sandbox`, `server.strict_jobs`, `alerts.silent_minutes`, if set
    webhooks: tuple[Receiver, ...] = ()
    notify: tuple[Receiver, ...] = ()
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    def stack(self, name: str) -> Stack:
        """Return the stack with this name. Raises NotFound."""
        if name in self.stacks:
            return self.stacks[name]
        fix = (
            did_you_mean(name, self.stacks)
            or f"add [stacks.{name}] with a `driver` to {NAME}; `recipe config` lists the existing stacks"
        )
        raise NotFound(f'unknown stack "{name}"', fix=fix)

    def on(self, name: str) -> Config:
        """Return a copy with the driver settings of a stack applied. Raises NotFound."""
        stack = self.stack(name)
        names = self.among(stack.driver) or (stack.driver,)
        said = {each: {**self.driver(each), **stack.settings} for each in names}
        return replace(self, drivers={**self.drivers, **said})

    def among(self, driver: str) -> tuple[str, ...]:
        """Return the drivers selected by `any` or `any:NAME,NAME`; empty for a single driver."""
        kind, _, listed = driver.partition(":")
        if kind != ANY:
            return ()
        return _split_names(listed) if listed else self.lists.get("drivers.any", ())

    def store_named(self, name: str | None) -> StoreSettings | None:
        """Return the store with this name or URL, else the default store, else None.

        Raises NotFound.
        """
        wanted = name or self.store
        if not wanted:
            return None
        if wanted in self.stores:
            return self.stores[wanted]
        if "/" in wanted:
            for store in self.stores.values():
                if store.url.rstrip("/") == wanted.rstrip("/"):
                    return store
            return StoreSettings(wanted, wanted)
        fix = did_you_mean(wanted, self.stores)
        raise NotFound(
            f'unknown store "{wanted}"',
            fix=fix
            or f"add [stores.{wanted}] with a `url` to {NAME}; `recipe config` lists the existing stores",
        )

    def store_of(self, address: str) -> StoreSettings | None:
        """Return the store settings for the bucket of `address`, of several those with the longest
        matching prefix.
        """
        there = {}
        for store in self.stores.values():
            if "://" in store.url and _bucket(store.url) == _bucket(address):
                there[store.url.rstrip("/")] = store

        def count_matching(url: str) -> int:
            return len(url) if f"{address}/".startswith(f"{url}/") else 0

        nearest = max(there, key=count_matching, default="")
        return there.get(nearest)

    def driver(self, name: str) -> dict[str, Any]:
        """Return the settings of a driver; empty if not set."""
        return dict(self.drivers.get(name, {}))


def _bucket(url: str) -> str:
    """Return the scheme and bucket of a URL."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


NOTHING: Final = Config()


def load(root: Path, environ: Mapping[str, str]) -> Config:
    """Load the settings of the workspace at `root`.

    Raises Invalid with all problems of both files.
    """
    problems: list[Problem] = []
    found = [_read(Path(path), problems) for path in settings_files(root, environ)]
    if problems:
        raise Invalid(problems)
    if not any(found):
        return NOTHING
    return _merge([file for file in found if file is not None])


def list_settings(config: Config) -> list[tuple[str, Any, str]]:
    """Return all effective settings with name, value and origin. Likely credentials are masked."""
    return [
        (".".join(keys), _mask(keys[-1], value), origin)
        for keys, (value, origin) in sorted(config.said.items())
    ]


def _mask(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _mask(name, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mask("", item) for item in value]
    if _SECRET.search(key) and key not in _PUBLIC:
        return "***"
    return list(value) if isinstance(value, tuple) else value


class _File(NamedTuple):
    path: str
    text: str
    value: dict[str, Any]


def _read(path: Path, problems: list[Problem]) -> _File | None:
    try:
        data = whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problems.append(Problem("unreadable", f"cannot read {path}: {error.strerror}"))
        return None
    import tomllib

    text = data.decode("utf-8", "replace")
    try:
        value = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        problems.append(
            Problem(
                "not-utf8",
                "the file is not UTF-8 text",
                Location(str(path), data[: error.start].count(b"\n") + 1, 1),
            )
        )
        return None
    except tomllib.TOMLDecodeError as error:
        found = re.search(
            r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error)
        )
        line, column = text.count("\n") + 1, 1
        if found and found[2]:
            line, column = int(found[2]), int(found[3])
        words = found[1] if found else str(error)
        problems.append(Problem("not-toml", words, _location(str(path), text, line, column)))
        return None
    file = _File(str(path), text, value)
    problems += _faults(file)
    return file


def _merge(files: list[_File]) -> Config:
    """Merge the settings of several files, given in order of precedence."""
    collected = _CollectedSettings()
    for file in reversed(files):
        collected.add(file)
    return collected.build()


class _CollectedSettings:
    """Collects the settings of several files, added from the lowest to the highest precedence."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, Any]] = {kind: {} for kind in _TABLES}
        self._receivers: dict[str, list[Receiver]] = {kind: [] for kind in _RECEIVERS}
        self._said: dict[tuple[str, ...], tuple[Any, str]] = {}

    def add(self, file: _File) -> None:
        for kind in _RECEIVERS:
            self._add_receivers(file, kind)
        for kind in _TABLES:
            for name, table in file.value.get(kind, {}).items():
                if (kind, name) not in _LISTS:
                    self._replace_table(file, kind, name, table)
        for keys in (("store",), ("inputs",), *_LISTS, *_FLAGS):
            self._add_value(file, keys)
        for kind in ("prices", "limits"):
            for name in file.value.get(kind, ()):
                self._add_value(file, (kind, name))

    def _add_receivers(self, file: _File, kind: str) -> None:
        """Add the receivers of a file to those of the other files."""
        known = self._receivers[kind]
        for n, table in enumerate(file.value.get(kind, ())):
            for key, value in table.items():
                origin = _origin(file, (kind, str(n), key))
                self._said[kind, str(len(known)), key] = value, origin
            fields = dict(table)
            if "events" in table:
                fields["events"] = tuple(table["events"])
            known.append(Receiver(**fields))

    def _replace_table(self, file: _File, kind: str, name: str, table: Mapping[str, Any]) -> None:
        """Replace a table of an earlier file as a whole."""
        self._tables[kind][name] = table
        earlier = [keys for keys in self._said if keys[:2] == (kind, name)]
        for keys in earlier:
            del self._said[keys]
        for key, value in table.items():
            self._said[kind, name, key] = value, _origin(file, (kind, name, key))

    def _add_value(self, file: _File, keys: tuple[str, ...]) -> None:
        """Set a value from a file, if present. Of two limits, the lower one applies."""
        value = file.value.get(keys[0])
        if len(keys) > 1:
            value = file.value.get(keys[0], {}).get(keys[1])
        if value is None:
            return
        if keys[0] == "limits" and keys in self._said and value > self._said[keys][0]:
            return
        self._said[keys] = value, _origin(file, keys)

    def build(self) -> Config:
        stores = self._tables["stores"]
        stacks = self._tables["stacks"]
        lists = {".".join(keys): tuple(self._said[keys][0]) for keys in self._present(_LISTS)}
        flags = {".".join(keys): self._said[keys][0] for keys in self._present(_FLAGS)}
        return Config(
            store=self._said.get(("store",), ("",))[0],
            inputs=self._said.get(("inputs",), ("",))[0],
            stores={name: StoreSettings(name, **table) for name, table in stores.items()},
            drivers=self._tables["drivers"],
            prices=self._values_of("prices"),
            lists=lists,
            said=self._said,
            limits=self._values_of("limits"),
            flags=flags,
            webhooks=tuple(self._receivers["webhooks"]),
            notify=tuple(self._receivers["notify"]),
            stacks={name: self._stack(name, table) for name, table in stacks.items()},
        )

    def _values_of(self, kind: str) -> dict[str, Any]:
        return {keys[1]: value for keys, (value, _) in self._said.items() if keys[0] == kind}

    def _present(self, every: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [keys for keys in every if keys in self._said]

    def _stack(self, name: str, table: Mapping[str, Any]) -> Stack:
        head = Head(**table["head"]) if "head" in table else None
        _, origin = self._said["stacks", name, "driver"]
        return Stack(name, **{**table, "head": head}, file=origin.rpartition(":")[0])


# -- validation


_Fault = tuple[str, str, tuple[str, ...], str]


def _faults(file: _File) -> list[Problem]:
    schema = json.loads((shipped() / "schemas" / "config.schema.json").read_text("utf-8"))
    faults = [*_check(schema, schema, file.value, ()), *_strange_extras(schema, file.value)]
    has_valid_types = not faults
    faults += _strange_drivers(file.value)
    if has_valid_types:
        faults += _clashes(file.value)
    return [Problem(code, words, _where(file, keys), fix) for code, words, keys, fix in faults]


def _split_names(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, names.split(","))))


def _strange_drivers(value: Mapping[str, Any]) -> list[_Fault]:
    """Report unknown driver names in the settings, because they are probably typing errors."""
    named = [*_driver_tables(value), *_stack_drivers(value), *_any_drivers(value)]
    if not named:
        return []
    from .extensions import drivers

    found: list[_Fault] = []
    for keys, name in named:
        if name == "local":
            continue
        known = drivers(name)
        if name not in known:
            fix = did_you_mean(name, known) or _drivers_fix(known)
            found.append(("unknown-driver", f'unknown driver "{name}"', keys, fix))
    return found


_Named = tuple[tuple[str, ...], str]
"""The path of a key, and the driver that it names."""


def _table(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of the settings before their types are known to be valid."""
    table = value.get(name)
    return table if isinstance(table, dict) else {}


def _driver_tables(value: Mapping[str, Any]) -> Iterator[_Named]:
    """Yield the drivers with a `[drivers.NAME]` table."""
    for name in _table(value, "drivers"):
        if ("drivers", name) not in _LISTS:
            yield ("drivers", name), name


def _stack_drivers(value: Mapping[str, Any]) -> Iterator[_Named]:
    """Yield the driver names in the settings of stacks."""
    for name, stack in _table(value, "stacks").items():
        if isinstance(stack, dict) and "driver" in stack:
            driver = str(stack["driver"])
            kind, _, several = driver.partition(":")
            names = _split_names(several) if kind == ANY else (driver,)
            for each in names:
                yield ("stacks", name, "driver"), each


def _any_drivers(value: Mapping[str, Any]) -> Iterator[_Named]:
    """Yield the drivers listed by `any` under [drivers]."""
    listed = _table(value, "drivers").get("any")
    if isinstance(listed, list):
        for each in listed:
            yield ("drivers", "any"), str(each)


def _strange_extras(schema: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[_Fault]:
    """Report invalid `extra` driver settings of stacks, as under [drivers.NAME]."""
    drivers = schema["properties"]["drivers"]["properties"]
    for name, stack in _table(value, "stacks").items():
        if not isinstance(stack, dict):
            continue
        driver, extra = stack.get("driver"), stack.get("extra")
        if isinstance(driver, str) and isinstance(extra, dict):
            # `_clashes` reports the stack's own settings.
            others = {key: inner for key, inner in extra.items() if key not in Stack.__slots__}
            yield from _check(schema, drivers.get(driver, {}), others, ("stacks", name, "extra"))


def _clashes(value: Mapping[str, Any]) -> list[_Fault]:
    """Report conflicting settings of stacks."""
    found: list[_Fault] = []
    for name, stack in value.get("stacks", {}).items():
        found += _clashes_of_extra(name, stack)
        if "auto_stop" in stack and "keep" not in stack:
            message = f"stacks.{name}.auto_stop requires `keep`: it stops a persistent machine"
            fix = 'add `keep = "stopped"`, or remove `auto_stop`'
            found.append(("clash", message, ("stacks", name, "auto_stop"), fix))
        if stack["driver"].partition(":")[0] == ANY:
            found += _clashes_with_any(name, stack)
        if "head" in stack:
            for message, fix in _clashes_of_head(f"stacks.{name}", stack):
                found.append(("clash", message, ("stacks", name, "head"), fix))
    return found


def _clashes_of_extra(name: str, stack: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield a fault for each setting in `extra` that is a setting of the stack itself."""
    for key in stack.get("extra", {}):
        if key not in Stack.__slots__:
            continue
        fix = "remove this setting"
        if key in stack or key in _OF_DRIVER:
            fix = f"move `{key} = …` next to `driver`"
        message = f"stacks.{name}.extra.{key} is a setting of the stack, not of its `extra`"
        yield "clash", message, ("stacks", name, "extra"), fix


def _clashes_with_any(name: str, stack: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield a fault for each setting of a multi-driver stack that requires a single driver."""
    for key in _OF_ONE_DRIVER:
        if key in stack:
            driver = stack["driver"]
            message = (
                f"stacks.{name}.{key} requires a single driver, but the stack's driver is {driver}"
            )
            fix = f"set a single driver, or remove `{key}`"
            yield "clash", message, ("stacks", name, key), fix


def _clashes_of_head(name: str, stack: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield conflicts between a stack's head and its other settings, with fixes."""
    if stack["head"]["port"] > 65535:
        yield (
            f"{name}.head.port is out of range: {stack['head']['port']}",
            "use a number from 1 to 65535",
        )
    if stack["driver"] == "local":
        yield (
            f"{name} has a head, but the driver local provides no workers",
            "use a driver with other machines, such as vastai",
        )
    if "nodes" in stack:
        words = f"{name}.nodes applies only to steps with `accelerate`, which do not use a head"
        yield (
            words,
            "remove `nodes`; set it in each step with `run`, counting the head as one node",
        )
    if "keep" in stack:
        yield (
            f"{name} cannot have both `keep` (one persistent machine) and `head` (several workers)",
            "remove `keep` or `head`",
        )


def _drivers_fix(known: Mapping[str, object]) -> str:
    return f"known drivers: {', '.join(sorted(known))}; install the package with this driver, or remove the table"


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
    """Validate `value` against the schema.

    Supports only the schema's own keywords: importing a validator takes longer than a no-op run.
    """
    if "$ref" in part:
        return _check(root, root["$defs"][part["$ref"].removeprefix("#/$defs/")], value, keys)
    if "anyOf" in part:
        tried = [_check(root, branch, value, keys) for branch in part["anyOf"]]
        return min(tried, key=_distance)
    kind = part.get("type")
    if kind is not None and not _is_of_kind(value, kind):
        return [("wrong-type", f"{'.'.join(keys)} must be {_KINDS[kind][1]}", keys, "")]
    if isinstance(value, str):
        return _check_text(part, value, keys)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _check_minimum(part, value, keys)
    if isinstance(value, list):
        item_part = part.get("items", {})
        faults: list[_Fault] = []
        for n, item in enumerate(value):
            faults += _check(root, item_part, item, (*keys, str(n)))
        return faults
    if isinstance(value, dict):
        return _check_table(root, part, value, keys)
    return []


def _distance(faults: list[_Fault]) -> tuple[int, bool]:
    """Return how far a value is from an alternative: fewer faults are nearer, then other types."""
    return len(faults), bool(faults) and faults[0][0] == "wrong-type"


def _is_of_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind][0])


def _check_text(part: Mapping[str, Any], value: str, keys: tuple[str, ...]) -> list[_Fault]:
    if re.search(part.get("pattern", ""), value) and len(value) >= part.get("minLength", 0):
        return []
    shown = "***" if _SECRET.search(keys[-1]) or keys[0] == "notify" else value
    message = f'{".".join(keys)} has an invalid value "{shown}"'
    return [("bad-value", message, keys, str(part.get("description", "")))]


def _check_minimum(part: Mapping[str, Any], value: float, keys: tuple[str, ...]) -> list[_Fault]:
    if not value < part.get("minimum", value):  # true for NaN
        return []
    return [("bad-value", f"{'.'.join(keys)} must be at least {part['minimum']}", keys, "")]


def _check_table(
    root: Mapping[str, Any],
    part: Mapping[str, Any],
    table: Mapping[str, Any],
    keys: tuple[str, ...],
) -> list[_Fault]:
    known = part.get("properties", {})
    others = part.get("additionalProperties", True)
    found: list[_Fault] = []
    for missing in part.get("required", ()):
        if missing not in table:
            fix = f"add `{missing}`: {known[missing].get('description', '')}"
            found.append(("missing-key", f"{'.'.join(keys)} has no {missing}", keys, fix))
    for key, inner in table.items():
        path = (*keys, key)
        if key in known:
            found += _check(root, known[key], inner, path)
        elif isinstance(others, dict):
            found += _check(root, others, inner, path)
        elif not others:
            message = f'unknown setting "{".".join(path)}"'
            found.append(("unknown-key", message, path, _advice(key, known)))
    return found


def _advice(key: str, known: Mapping[str, Any]) -> str:
    hint = did_you_mean(key, known)
    if hint:
        return hint
    if _SECRET.search(key):
        return "remove the credentials from this file; use a profile in ~/.aws, AWS_* variables, or `gcloud auth application-default login`"
    return f"known settings: {', '.join(sorted(known))}"


# -- locations


def _origin(file: _File, keys: tuple[str, ...]) -> str:
    where = _where(file, keys)
    return f"{where.path}:{where.line}"


def _where(file: _File, keys: tuple[str, ...]) -> Location:
    """Return the location of a key by a line scan; else its table's, else the first line's."""
    lines = file.text.splitlines() or [""]
    table: tuple[str, ...] = ()
    best, depth = 1, 0
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            table = _split_key(header[1])
            here = table
        elif assigned := re.match(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=", line):
            here = (*table, *_split_key(assigned[1]))
        else:
            continue
        if here == keys[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    line = lines[best - 1]
    begin = len(line) - len(line.lstrip())
    return Location(
        file.path, best, begin + 1, max(1, len(line.split("=")[0].rstrip()) - begin), line
    )


def _split_key(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _location(path: str, text: str, line: int, column: int) -> Location:
    lines = text.splitlines()
    return Location(path, line, column, 1, lines[line - 1] if 0 < line <= len(lines) else "")
