"""Workspace: its directory, its `.recipe` store, its object cache and its digest cache."""

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
from ..settings import NOTHING, Config, Stack, StoreSettings, load
from .content.digest_cache import DigestCache
from .content.files import Content, no_space
from .content.objects import Objects
from .records.index import PublishedFile, Trace
from .records.runs import Reporter
from .records.store import Store, home

if TYPE_CHECKING:
    from .reach import Reach
    from .records.database import Data
    from .records.letters import Letters
    from .remote.cache import RemoteCache
    from .run_views import RunViews

PLATFORM: Final = ("METRICS_API_URL", "BACKEND_URL", "ALERT_API_URL")
"""Environment variables with the URLs of a training platform."""
MANY, FAR = 200, 12
"""Trace count that is always read in one query, and the factor per requested trace.

Reading one trace alone takes twelve times as long as reading it with others.
"""
NONE: Final = "none"
"""Store name that disables the shared store."""


def results_place(text: str | Path) -> Path | str:
    """Parse the destination of results: a directory path, or an upload URL as text.

    Raises Invalid for an unsupported address.
    """
    scheme = _SCHEME.match(str(text))
    if scheme is None:
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
        from .buckets import opening as buckets

        buckets.open(StoreSettings("", address), Path())
    return address.rstrip("/")


def local_folder(text: str | Path) -> Path:
    """Parse the path of a local directory.

    Raises Invalid for an address.
    """
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


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # `Path` collapses the two slashes into one


class Workspace:
    """Open workspace, opened with `Workspace.open` and closed after use."""

    def __init__(
        self, root: Path, store: Store, environ: Mapping[str, str], *, read_only: bool
    ) -> None:
        self.root, self.store, self.read_only = root, store, read_only
        self.environ = environ
        """Environment for secrets, `pass_env` and settings.

        Code of this package reads variables only from here.
        """
        self.own = root
        """Directory with the settings and env files.

        A worker's own directory, even when the worker runs in another workspace's files.
        """
        self.asks_secrets = True
        """Whether the recipe's secrets must be set on this machine.

        False if the run is only submitted for other machines.
        """
        self.delivers = False
        """Whether the run's results are uploaded to the shared store for another machine."""
        self._top = str(root)
        self.home = store.root
        self.locks = store.locks
        self.objects = Objects(store.root, store.index.seal, store.index)
        self.cache = DigestCache(root, store.index.files(), store.root / "listings")
        self.traces = _Traces(store)
        self.stored = _Stored(self)
        self.remote_cache: RemoteCache | None = None  # The shared store in use, if any.
        store.runs.reporter = Reporter(
            self._listened_to, lambda events: (self.letters or self._letters())(events)
        )
        self.addresses: dict[
            str, str
        ] = {}  # Full https addresses with their credentials, by redacted address. In memory only.
        self.hooked: dict[str, bool] = {}  # whether a run has its own webhooks, by run id
        self.reach: Reach | None = (
            # hosts and buckets that a run accepted by a server may read; None for the caller's own
            # runs
            None
        )

    @classmethod
    def open(
        cls, root: Path, *, read_only: bool = False, environ: Mapping[str, str] = os.environ
    ) -> Workspace:
        """Open the workspace at `root` with the environment `environ`.

        Raises NotFound for a missing directory, and Unusable if the store cannot be read or
        written.
        """
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
        """Open the files of another workspace with this one's store, settings and environment."""
        other = Workspace(root, self.store, self.environ, read_only=self.read_only)
        other.own = self.own
        other.addresses, other.reach = self.addresses, self.reach
        return other

    def close(self) -> None:
        self.store.close()

    def share(self, name: str | None, *, push: bool | None = None) -> RemoteCache | None:
        """Connect a shared store, by name or by the settings' default, and return its cache.

        Returns None without such a store. Raises Invalid, NotFound.

        `push` decides whether results are uploaded. The default is the store's own setting.
        """
        if name == NONE or (name is None and not self.has_settings):
            return None
        settings = self.config.store_named(name)
        if settings is None:
            return None
        from .buckets import opening as buckets
        from .remote.cache import CachedParts, RemoteCache
        from .remote.remote import Remote

        remote = Remote(buckets.open(settings, self.own))
        push = settings.push if push is None else push
        self.remote_cache = RemoteCache(
            CachedParts(self.objects, self.knows, self.learn),
            remote,
            settings.name,
            push=push,
            asked=name is not None,
            checkpoints=settings.checkpoints,
        )
        return self.remote_cache

    @cached_property
    def config(self) -> Config:
        """Effective settings of the workspace.

        Raises Invalid.
        """
        return load(self.own, self.environ)

    def on(self, name: str) -> Stack:
        """Apply the driver settings of a stack to this workspace, and return the stack.

        Raises NotFound, Invalid.
        """
        self.config = self.config.on(name)
        return self.config.stacks[name]

    @property
    def has_settings(self) -> bool:
        """Whether a settings file exists for the workspace."""
        return any(map(os.path.exists, settings_files(self.own, self.environ)))

    @cached_property
    def run_views(self) -> RunViews:
        """Views of the workspace's runs."""
        from .run_views import RunViews

        return RunViews(self.store, self.environ)

    @cached_property
    def letters(self) -> Letters | None:
        """Builder of webhook deliveries for runs; None if no endpoint is configured."""
        if self._has_receivers() or any(self.environ.get(name) for name in PLATFORM):
            return self._letters()
        return None

    def _has_receivers(self) -> bool:
        """Return True if the settings name a webhook, a chat or a spend program."""
        if not self.has_settings:
            return False
        return bool(self.config.webhooks or self.config.notify or self.spend)

    def _letters(self) -> Letters:
        from .records.letters import Letters

        config = self.config if self.has_settings else NOTHING
        return Letters(self.store.runs, config, self.environ, self.run_views.of)

    @property
    def spend(self) -> tuple[str, ...]:
        """Command line of the `[hooks] spend` program; empty if unset."""
        return self.config.lists.get("hooks.spend", ()) if self.has_settings else ()

    def _listened_to(self, run: str, data: Data | None) -> bool:
        """Return True if the run has webhook endpoints."""
        if self.letters is None and run not in self.hooked:
            if data is None:
                data = self.store.runs.get(run).data
            self.hooked[run] = "webhooks" in data
        return self.letters is not None or self.hooked[run]

    def kept_path(self, run: str, step: str, number: int, suffix: str) -> Path:
        """Return the path of an attempt's stored log (`.log`) or metrics (`.metrics`).

        The file may not exist.
        """
        return self.home / "runs" / run / f"{step.replace('/', '%2F')}.{number}{suffix}"

    def knows(self, key: str) -> bool:
        """Return True if a cached result with this key exists locally."""
        return self.traces.get(key) is not None

    def learn(self, traces: Sequence[Trace]) -> None:
        """Store cached results that another machine produced."""
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
        """Resolve a path from the caller against the workspace.

        Absolute paths and `~` are kept.
        """
        return Path(os.path.normpath(self.root / Path(address).expanduser()))

    def write(self, path: Path, *parts: bytes) -> None:
        """Write a file atomically."""
        temporary = path.with_name(temporary_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.writelines(parts)
            temporary.replace(path)
        except OSError as error:
            raise no_space(error, str(path)) from error

    def save_costly_digests(self) -> None:
        """Store the changes as `save_cache` does, unless all are digests that are cheap to repeat.

        The first group of a run stores these digests without a transaction of their own.
        """
        if self.cache.is_costly_to_repeat or self.traces.has_changes:
            self.save_cache()

    def save_cache(self) -> None:
        """Store the new file digests, seals and traces in the index."""
        if self.read_only:
            return
        files, seals = self.cache.changes(), self.objects.seals.changes()
        if files or seals:
            self.store.index.remember(files, seals)
        traces = self.traces.changes()
        if traces:
            self.store.index.learn(traces)

    def published_contents(self) -> dict[str, str]:
        """Return the last published content of each path."""
        rows: dict[str, PublishedFile] = self.store.index.list_published()
        return {path: row[1] for path, row in rows.items()}

    def publish(
        self,
        content: Content,
        path: str,
        *,
        link: bool,
        spare: Callable[[str], bool] = lambda _path: False,
    ) -> None:
        """Publish the object `content` at `path` (below the workspace, or absolute).

        See `Objects.copy_to`.
        """
        self.objects.copy_to(
            content, path if path[0] == "/" else f"{self._top}/{path}", link=link, spare=spare
        )
        if content[0] == "t":
            self.cache.note_tree(path, self.objects.manifests.entries(content))
        else:
            self.cache.note(path, content)

    def machine(self) -> Mapping[str, float]:
        """Return the CPUs (possibly fractional) and memory in bytes available to this process."""
        from ..agent import cgroups

        return {"cpus": cgroups.processors()[0], "memory": float(cgroups.memory()[0])}


class _TraceOutputs(NamedTuple):
    """Outputs of a cached result without metrics, in place of the full trace."""

    outputs: Sequence[Sequence[str]]
    metrics: Mapping[str, object] = MappingProxyType({})
    measured: Mapping[str, Mapping[str, object]] = MappingProxyType({})


class _Traces:
    """Cached results by key, loaded on demand."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, Trace | _TraceOutputs] = {}
        self._kept: set[str] = set()  # keys with a stored trace that is not loaded yet
        self._changed: dict[str, Trace] = {}
        # returns True if a key without a loaded trace has no trace at all
        self._complete: Callable[[], bool] = bool
        self._whole = ""  # recipe with all traces loaded

    def expect(self, recipe: str, count: int) -> None:
        """Prepare for `count` lookups of a recipe's cached results.

        Loads all of its traces in one query, unless the recipe has far more traces than lookups.
        """
        self._whole = ""
        if self._store.index.more_than(recipe, MANY + FAR * count):
            return
        self._whole = recipe
        for key, (items, measured) in self._store.index.outputs(recipe).items():
            if measured:
                self._kept.add(key)
            else:
                self._found[key] = _TraceOutputs(items)

    def rely(self, recipe: str, alone: Callable[[], bool]) -> None:
        """Skip the database for unknown cache keys while `alone` returns True.

        No other process can add traces then.
        """
        if self._whole == recipe and not self._store.index.traces_of_others(recipe):
            self._complete = alone

    def add(self, key: str) -> None:
        """Record that the cached result of `key` was just stored, or replaced."""
        self._found.pop(key, None)
        self._changed.pop(key, None)
        self._kept.add(key)

    def learn(self, traces: Iterable[Trace]) -> None:
        """Add cached results from another machine; existing ones stay."""
        for trace in traces:
            if self.get(trace.key) is None:
                self._found[trace.key] = trace

    def measure(self, key: str, rule: str, metrics: Mapping[str, object]) -> None:
        """Add the metrics of a cached result under another metrics rule.

        They were read again from the stored attempt.
        """
        trace = self.whole(key)
        if trace is not None:
            measured = json.dumps({**trace.measured, rule: metrics})
            self._change(trace._replace(measured_json=measured))

    def rename(self, former: str, key: str, rule: str) -> None:
        """Move a cached result to the step's current key from a `former` key.

        The former key still included the metrics rule.
        """
        trace = self.whole(former)
        if trace is not None:
            measured = json.dumps({rule: trace.metrics})
            self._change(trace._replace(key=key, metrics_json="{}", measured_json=measured))

    def _change(self, trace: Trace) -> None:
        self._found[trace.key] = self._changed[trace.key] = trace

    @property
    def has_changes(self) -> bool:
        """Return True if cached results have changed since the last call of `changes`."""
        return bool(self._changed)

    def changes(self) -> list[Trace]:
        """Return the changed cached results since the last call."""
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def whole(self, key: str) -> Trace | None:
        """Return the complete cached result of a key, or None."""
        found = self._found.get(key)
        return found if isinstance(found, Trace) else self._store.index.trace(key)

    def get(self, key: str) -> Trace | _TraceOutputs | None:
        found = self._found.get(key)
        if found is None and (key in self._kept or not self._complete()):
            found = self._store.index.trace(key)
            if found is not None:
                self._found[key] = found
        return found


class _Stored:
    """Membership test for available contents: first the local objects, then the shared store."""

    def __init__(self, ws: Workspace) -> None:
        self._ws, self._objects = ws, ws.objects

    def __contains__(self, content: object) -> bool:
        if not isinstance(content, str):
            return False
        return self._objects.intact(Content(content)) or (
            self._ws.remote_cache is not None and self._ws.remote_cache.holds(Content(content))
        )
