"""One workspace and what is remembered about it: its folder, `.recipe`, store, objects and digests, opened together.  Decides nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import Invalid, NotFound, Problem, Unusable
from ..paths import settings_files, temporary_name
from .content.digest_cache import DigestCache
from .content.files import Content, no_space
from .content.objects import Objects
from .records.index import Trace
from .records.runs import Reporter
from .records.store import Store, home

if TYPE_CHECKING:
    from ..settings import Config, Stack
    from .reach import Reach
    from .records.database import Data
    from .records.index import Published
    from .records.letters import Letters
    from .remote.cache import RemoteCache
    from .run_views import RunViews

PLATFORM: Final = ("METRICS_API_URL", "BACKEND_URL", "ALERT_API_URL")
"""Variables with the addresses of a training platform."""
MANY, FAR = 200, 12
"""Traces that are read in one go, and for each that will be asked for: one by one each takes twelve times as long."""
NONE: Final = "none"
"""The name that stands for no store."""


def results_place(text: str | Path) -> Path | str:
    """Where results go, as the caller names it: a folder, or the address that they are uploaded to.  Raises Invalid for any other address."""
    if (scheme := _SCHEME.match(str(text))) is None:
        return Path(text)
    address = str(text) if "://" in str(text) else str(text).replace(":/", "://", 1)
    if scheme[1] not in ("s3", "gs", "hf"):
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    f"--out {address}: uploading to this kind of address is not supported",
                    None,
                    "use s3://, gs://, hf://ORG/NAME or a directory",
                )
            ]
        )
    if scheme[1] == "hf":
        from .buckets import hub

        hub.parse_repository(address)
    else:
        from ..settings import StoreSettings
        from .buckets import opening as buckets

        buckets.open(StoreSettings("", address), Path())
    return address.rstrip("/")


def local_folder(text: str | Path) -> Path:
    """A folder of this machine, as the caller names it.  Raises Invalid for an address."""
    place = results_place(text)
    if isinstance(place, str):
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    f"--out {place} is an address; only a local directory is allowed here",
                    None,
                    "pass a local directory",
                )
            ]
        )
    return place


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a Path has lost one of the two slashes


class Workspace:
    """Make one with `Workspace.open`; close it when done."""

    def __init__(
        self, root: Path, store: Store, environ: Mapping[str, str], *, read_only: bool
    ) -> None:
        self.root, self.store, self.read_only = root, store, read_only
        self.environ = environ
        """What secrets, `pass_env` and settings are read from: the only door to it for code in here."""
        self.own = root
        """The folder whose settings and files of variables count: that of a worker, who works in the files of another."""
        self.asks_secrets = True
        """Whether the secrets of a recipe have to be set here: not where a run is only submitted for other machines."""
        self.delivers = False
        """Whether what a run makes here is for somebody elsewhere, and goes to the shared store."""
        self._top = str(root)
        self.home = store.root
        self.locks = store.locks
        self.objects = Objects(store.root, store.index.seal, store.index)
        self.cache = DigestCache(root, store.index.files(), store.root / "listings")
        self.traces = _Traces(store)
        self.stored = _Stored(self)
        self.remote_cache: RemoteCache | None = None  # a store that is used beside this one
        store.runs.reporter = Reporter(
            self._listened_to, lambda events: (self.letters or self._letters())(events)
        )
        self.addresses: dict[
            str, str
        ] = {}  # https addresses with what opens them, by what is stored of them; in memory only
        self.hooked: dict[str, bool] = {}  # whether a run brought receivers along
        self.reach: Reach | None = (
            None  # the hosts and buckets that a run may read which a server took; None for one of the caller's own
        )

    @classmethod
    def open(
        cls, root: Path, *, read_only: bool = False, environ: Mapping[str, str] = os.environ
    ) -> Workspace:
        """The workspace at `root`, for a caller with this environment.  Raises Unusable when it cannot be read, or written to."""
        if not root.is_dir():
            raise NotFound(f"{root} is not a directory", fix="pass an existing directory with `-C`")
        real = Path(os.path.abspath(root))
        folder = home(real, environ)
        try:
            store = Store.open(
                folder,
                read_only=read_only,
                shared=environ.get("RECIPE_RUNS", ""),
                workspace=str(real),
            )
        except PermissionError as error:
            raise Unusable(
                f"cannot write to {folder}: {error.strerror}",
                fix="make it writable, or set RECIPE_HOME to a writable directory",
            ) from error
        return cls(real, store, environ, read_only=read_only)

    def within(self, root: Path) -> Workspace:
        """The files of another workspace, with the memory, settings and variables of this one."""
        other = Workspace(root, self.store, self.environ, read_only=self.read_only)
        other.own = self.own
        other.addresses, other.reach = self.addresses, self.reach
        return other

    def close(self) -> None:
        self.store.close()

    def share(self, name: str | None, *, push: bool | None = None) -> RemoteCache | None:
        """Use the store called `name` beside this one, or the default one of the settings; None when there is none.  Raises Invalid, NotFound.

        `push` says whether what runs make is uploaded; by default as the store's settings say.
        """
        if name == NONE or (name is None and not self.has_settings):
            return None
        settings = self.config.store_named(name)
        if settings is None:
            return None
        from .buckets import opening as buckets
        from .remote.cache import RemoteCache, Uses
        from .remote.remote import Remote

        remote = Remote(buckets.open(settings, self.own))
        push = settings.push if push is None else push
        self.remote_cache = RemoteCache(
            Uses(self.objects, self.knows, self.learn),
            remote,
            settings.name,
            push=push,
            asked=name is not None,
            checkpoints=settings.checkpoints,
        )
        return self.remote_cache

    @cached_property
    def config(self) -> Config:
        """The settings in force here.  Raises Invalid."""
        from ..settings import load

        return load(self.own, self.environ)

    def on(self, name: str) -> Stack:
        """Have what a stack says of its driver count here.  Raises NotFound, Invalid."""
        self.config = self.config.on(name)
        return self.config.stacks[name]

    @property
    def has_settings(self) -> bool:
        """Whether there is a file of settings."""
        return any(map(os.path.exists, settings_files(self.own, self.environ)))

    @cached_property
    def run_views(self) -> RunViews:
        """How the runs of this workspace stand."""
        from .run_views import RunViews

        return RunViews(self.store, self.environ)

    @cached_property
    def letters(self) -> Letters | None:
        """The messages to receivers of runs; None where the settings and the environment name none."""
        named = self.has_settings and (self.config.webhooks or self.config.notify or self.spend)
        if not named and not any(self.environ.get(name) for name in PLATFORM):
            return None
        return self._letters()

    def _letters(self) -> Letters:
        from ..settings import NOTHING
        from .records.letters import Letters

        config = self.config if self.has_settings else NOTHING
        return Letters(self.store.runs, config, self.environ, self.run_views.of)

    @property
    def spend(self) -> tuple[str, ...]:
        """The program of `[hooks] spend`; none: empty."""
        return self.config.lists.get("hooks.spend", ()) if self.has_settings else ()

    def _listened_to(self, run: str, data: Data | None) -> bool:
        """Whether a run has receivers."""
        if self.letters is None and run not in self.hooked:
            self.hooked[run] = "webhooks" in (
                self.store.runs.get(run).data if data is None else data
            )
        return self.letters is not None or self.hooked[run]

    def kept_path(self, run: str, step: str, number: int, suffix: str) -> Path:
        """Where what an attempt printed (`.log`) or measured (`.metrics`) is kept, if it is."""
        return self.home / "runs" / run / f"{step.replace('/', '%2F')}.{number}{suffix}"

    def knows(self, key: str) -> bool:
        """Whether a trace of this key is here."""
        return self.traces.get(key) is not None

    def learn(self, traces: Sequence[Trace]) -> None:
        """Remember what was made elsewhere."""
        self.traces.learn(traces)
        if not self.read_only:
            self.store.index.learn(traces)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def absolute(self, address: str) -> Path:
        """A path as the caller gave it: below the workspace unless absolute or `~`."""
        return Path(os.path.normpath(self.root / Path(address).expanduser()))

    def write(self, path: Path, *parts: bytes) -> None:
        """Write a whole file or none."""
        temporary = path.with_name(temporary_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.writelines(parts)
            temporary.replace(path)
        except OSError as error:
            raise no_space(error, str(path)) from error

    def save_cache(self) -> None:
        """Keep what was learned of files and of earlier attempts while looking at them."""
        if self.read_only:
            return
        files, seals = self.cache.changes(), self.objects.seals.changes()
        if files or seals:
            self.store.index.remember(files, seals)
        if traces := self.traces.changes():
            self.store.index.learn(traces)

    def published(self) -> dict[str, str]:
        """Content that we put at each path last."""
        rows: dict[str, Published] = self.store.index.list_published()
        return {path: row[1] for path, row in rows.items()}

    def publish(
        self,
        content: Content,
        path: str,
        *,
        link: bool,
        spare: Callable[[str], bool] = lambda _path: False,
    ) -> None:
        """Make `path` (below the workspace, or absolute) hold `content`: see `Objects.copy_to`."""
        self.objects.copy_to(
            content, path if path[0] == "/" else f"{self._top}/{path}", link=link, spare=spare
        )
        if content[0] == "t":
            self.cache.note_tree(path, self.objects.manifests.entries(content))
        else:
            self.cache.note(path, content)

    def machine(self) -> Mapping[str, float]:
        """What this process may have of this machine: cpus, maybe a part of one, and memory in bytes."""
        from ..agent import cgroups

        return {"cpus": cgroups.processors()[0], "memory": float(cgroups.memory()[0])}


class _Outputs(NamedTuple):
    """The part of a trace that says what was made; a step that reported metrics has its whole trace instead."""

    outputs: Sequence[Sequence[str]]
    metrics: Mapping[str, object] = MappingProxyType({})
    measured: Mapping[str, Mapping[str, object]] = MappingProxyType({})


class _Traces:
    """Traces by key, read when they are asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, Trace | _Outputs] = {}
        self._kept: set[str] = set()  # keys whose trace is there, to be read when it is asked for
        self._changed: dict[str, Trace] = {}
        self._complete: Callable[[], bool] = bool  # whether a key that is not here has no trace
        self._whole = ""  # the recipe of which all traces were read

    def expect(self, recipe: str, count: int) -> None:
        """So many keys of this recipe will be asked for: read what all of its keys gave in one go, unless those are a small part of them."""
        self._whole = ""
        if self._store.index.more_than(recipe, MANY + FAR * count):
            return
        self._whole = recipe
        for key, (items, measured) in self._store.index.outputs(recipe).items():
            if measured:
                self._kept.add(key)
            else:
                self._found[key] = _Outputs(items)

    def rely(self, recipe: str, alone: Callable[[], bool]) -> None:
        """While we are `alone`, only we store traces: what was read at the beginning, and is added, is all that there is."""
        if self._whole == recipe and not self._store.index.traces_of_others(recipe):
            self._complete = alone

    def add(self, key: str) -> None:
        """Its trace has just been stored, perhaps instead of another."""
        self._found.pop(key, None)
        self._changed.pop(key, None)
        self._kept.add(key)

    def learn(self, traces: Iterable[Trace]) -> None:
        """These were made elsewhere; a trace that is here stays."""
        for trace in traces:
            if self.get(trace.key) is None:
                self._found[trace.key] = trace

    def measure(self, key: str, rule: str, metrics: Mapping[str, object]) -> None:
        """These are the metrics of a key by another rule than it was made under: read anew from what is kept of its attempt."""
        if (trace := self.whole(key)) is not None:
            self._change(
                trace._replace(measured_json=json.dumps({**trace.measured, rule: metrics}))
            )

    def rename(self, former: str, key: str, rule: str) -> None:
        """What is known under the key that a step had while its metrics rule was part of it is known under its key."""
        if (trace := self.whole(former)) is not None:
            self._change(
                trace._replace(
                    key=key, metrics_json="{}", measured_json=json.dumps({rule: trace.metrics})
                )
            )

    def _change(self, trace: Trace) -> None:
        self._found[trace.key] = self._changed[trace.key] = trace

    def changes(self) -> list[Trace]:
        """What is known by now and was not stored, once."""
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def whole(self, key: str) -> Trace | None:
        """The trace of a key with all that is known of its attempt."""
        found = self._found.get(key)
        return found if isinstance(found, Trace) else self._store.index.trace(key)

    def get(self, key: str) -> Trace | _Outputs | None:
        found = self._found.get(key)
        if found is None and (key in self._kept or not self._complete()):
            found = self._store.index.trace(key)
            if found is not None:
                self._found[key] = found
        return found


class _Stored:
    """Contents that can be given out, by asking the disk, and then the store that is shared."""

    def __init__(self, ws: Workspace) -> None:
        self._ws, self._objects = ws, ws.objects

    def __contains__(self, content: object) -> bool:
        if not isinstance(content, str):
            return False
        return self._objects.intact(Content(content)) or (
            self._ws.remote_cache is not None and self._ws.remote_cache.holds(Content(content))
        )
