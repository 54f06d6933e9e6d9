"""Use of a shared store: look up and download results of other machines, upload local ones.

Local results come first: only keys without a local trace are looked up, many at once. Traces are
enough for a cache hit. Contents are downloaded when a step needs them. Missing or damaged
contents count as deleted. An unreachable store produces one notice. It never fails a run, and
never delays one by more than `PATIENCE`.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ...errors import Infrastructure, RecipeError
from ...language.units import about
from ...logs import Log
from ...planning.judge import RUN, Verdict
from ...planning.plan import UNCACHED, Node, Plan
from ...planning.step import TEMPORARY
from ..buckets.bucket import BucketUnreachable
from ..content.files import Content
from ..content.objects import Objects
from .session import MissingObject

if TYPE_CHECKING:
    import queue
    import threading

    from ..content.seals import Seal
    from ..records.index import Trace
    from .layout import RemoteResult
    from .remote import Remote

PATIENCE: Final = 5.0
"""Timeout of a lookup during planning, in seconds."""
WORTH_SAYING: Final = 16 << 20
"""Minimum size of a download that is announced, in bytes."""
_A = TypeVar("_A")


class CachedParts(NamedTuple):
    """Parts of a workspace that the shared store uses.

    These are its objects, a test for local traces, and a function that adds traces from other
    machines.
    """

    objects: Objects
    knows: Callable[[str], bool]
    learn: Callable[[Sequence[Trace]], None]


class RemoteCache:
    """Connection of a workspace to a shared store.

    Belongs to its creating thread; slow operations run in other threads.
    """

    def __init__(
        self,
        ws: CachedParts,
        remote: Remote,
        name: str,
        *,
        push: bool,
        asked: bool,
        checkpoints: bool,
    ) -> None:
        self.remote, self.name, self.pushes, self.checkpoints = remote, name, push, checkpoints
        self.notices: list[str] = []
        self.found: set[str] = set()  # keys with a trace from the store
        self._ws = ws
        # the user named the store for this command, so its errors are errors
        self._asked_for = asked
        self._off = False
        self._looked_up: set[str] = set()
        self._there: dict[Content, bool] = {}
        self._sizes: dict[Content, int] = {}
        self._outbox: _UploadQueue | None = None

    # -- planning

    def learn(self, plan: Plan, verdicts: Sequence[Verdict]) -> bool:
        """Look up the results of steps that would run, and return True if the store has any.

        The plan must then be evaluated again.
        """
        keys: list[str] = []
        for n, verdict in enumerate(verdicts):
            keys += self.unknown(plan.nodes[n], verdict)
        return bool(keys) and self._ask_again(keys)

    def unknown(self, node: Node, verdict: Verdict) -> list[str]:
        """Return the cache keys to look up for a step that would run.

        Empty if a lookup is pointless.
        """
        if self._off or verdict.key is None or not _may_be_restored(node, verdict):
            return []
        if verdict.key in self._looked_up or self._ws.knows(verdict.key):
            return []
        if verdict.former is None:
            return [verdict.key]
        return [verdict.key, verdict.former]

    def answer(self, keys: Sequence[str]) -> tuple[Mapping[str, RemoteResult], set[Content]]:
        """Return the store's cached results of these keys, and the contents available for them.

        Callable from any thread.
        """
        found = self.remote.lookup(keys, patience=PATIENCE)
        contents: list[Content] = []
        for trace, _ in found.values():
            contents += [made.content for made in trace.outputs]
        return found, self.remote.holds(contents, patience=PATIENCE)

    def learn_answers(
        self, keys: Iterable[str], found: Mapping[str, RemoteResult], there: set[Content]
    ) -> bool:
        """Record the result of a lookup; return True if a cached result was found."""
        self._looked_up.update(keys)
        traces = []
        for key, (trace, sizes) in found.items():
            facts = json.dumps({**trace.facts, "store": self.name})
            traces.append(trace._replace(facts_json=facts))
            self.found.add(key)
            for made in trace.outputs:
                self._there[made.content] = made.content in there
                self._sizes[made.content] = sizes.get(made.name, 0)
        Log("storage").info("store %s has results of %d keys", self.name, len(traces))
        if traces:
            self._ws.learn(traces)
        return bool(traces)

    def give_up(self, keys: Iterable[str], error: RecipeError) -> None:
        """Continue without the store after a failed lookup.

        Raises the error if the user named the store.
        """
        self._looked_up.update(keys)
        self._stop(error)

    def look_again(self, key: str) -> bool:
        """Repeat the lookup of a cache key; return True if the store has a result."""
        return self._ask_again([key])

    def _ask_again(self, keys: Sequence[str]) -> bool:
        nothing: tuple[Mapping[str, RemoteResult], set[Content]] = ({}, set())
        return self.learn_answers(keys, *self._try(lambda: self.answer(keys), nothing))

    def has(self, content: Content) -> bool:
        """Return True if an earlier lookup found this content in the store."""
        return self._there.get(content, False) and not self._off

    def holds(self, content: Content) -> bool:
        """Return True if the store has this content, with a request if unknown."""
        if content not in self._there:
            self.expect([content])
        return self._there.get(content, False) and not self._off

    def expect(self, contents: Iterable[Content]) -> None:
        """Prefetch existence checks for these contents in one request."""
        unknown = [content for content in dict.fromkeys(contents) if content not in self._there]
        if unknown and not self._off:
            there: set[Content] = self._try(
                lambda: self.remote.holds(unknown, patience=PATIENCE), set()
            )
            self._there |= {content: content in there for content in unknown}

    def outline(self, content: Content) -> None:
        """Download the manifest of a tree without its files.

        Errors are left to the manifest's reader.
        """
        if not self._ws.objects.manifests.is_known(content) and self.holds(content):
            manifest = self._try(lambda: self.remote.manifest(content), None)
            if manifest is not None:
                self._ws.objects.manifests.put(content, manifest)

    # -- downloads

    def bring(
        self, contents: Iterable[Content], progress: Callable[[int], object] = lambda _count: None
    ) -> set[Content]:
        """Download missing contents, and return the unavailable ones.

        Blocks until finished.
        """
        distinct = dict.fromkeys(contents)
        wanted = [content for content in distinct if not self._ws.objects.has(content)]
        lost: set[Content] = set()
        for content in wanted:
            brought = self.fetcher([content])()
            self.note_fetched(brought)
            lost |= brought.lost
            progress(brought.size)
        return lost

    def fetcher(self, contents: Sequence[Content]) -> Callable[[], DownloadResult]:
        """Return a function that downloads contents in any thread.

        Pass its result to `note_fetched` in the cache's own thread.
        """
        # The other thread needs its own `Objects`, because the cache's objects belong to this
        # thread.
        objects, remote = Objects(self._ws.objects.root), self.remote

        def fetch() -> DownloadResult:
            brought = DownloadResult()
            for content in contents:
                try:
                    brought.size += remote.fetch(content, objects)
                except MissingObject as error:
                    brought.lost.add(content)
                    brought.trouble.append(str(error))
                except RecipeError as error:
                    brought.lost.add(content)
                    brought.failed = error
            brought.seals = objects.seals.changes()
            return brought

        return fetch

    def note_fetched(self, brought: DownloadResult) -> None:
        """Record the result of a download."""
        self._ws.objects.seals.learn(brought.seals)
        self._there |= dict.fromkeys(brought.lost, False)
        self.notices += brought.trouble
        if brought.failed is not None:
            self._stop(brought.failed)

    def size_of(self, contents: Iterable[Content]) -> int:
        """Return the total known size of contents in bytes."""
        return sum(self._sizes.get(content, 0) for content in contents)

    # -- uploads

    def push(self, trace: Trace, node: Node) -> None:
        """Queue the outputs of a step for upload in a background thread, in order."""
        if not self.pushes or self._off or not _may_be_shared(node, trace):
            return
        if self._outbox is None:
            self._outbox = _UploadQueue(self._ws.objects.root, self.remote)
        for made in trace.outputs:
            self._ws.objects.path(made.content)  # the upload thread reads only files
        kept = {output.name for output in node.outputs if output.flags & TEMPORARY}
        self._outbox.put(trace, frozenset(kept))

    def is_sending(self, key: str) -> bool:
        """Return True if the results of this cache key are queued for upload."""
        return self._outbox is not None and key in self._outbox.keys

    def finish(self, say: Callable[[str], object]) -> None:
        """Wait for all uploads to finish.

        Failed uploads become notices.
        """
        if self._outbox is None:
            return
        outbox, self._outbox = self._outbox, None
        if outbox.waiting and not outbox.idle(1.0):
            say(
                f"uploading results to the shared store {self.name} ({outbox.waiting} left; press Ctrl-C to skip)"
            )
        try:
            outbox.join()
        except KeyboardInterrupt:
            self.notices.append(
                f"some results were not uploaded to the shared store {self.name}; upload the rest with `recipe push`"
            )
        for problem in outbox.problems:
            self.notices.append(
                f"cannot upload to the shared store {self.name}: {problem}; try again with `recipe push`"
            )

    def indulge(self) -> None:
        """Report later errors of the store as notices, even if the user named the store.

        Called once a run has started.
        """
        self._asked_for = False

    def pop_notices(self) -> list[str]:
        """Return the new notices since the last call."""
        notices, self.notices = self.notices, []
        return list(dict.fromkeys(notices))

    # -- internals

    def _try(self, do: Callable[[], _A], otherwise: _A) -> _A:
        if self._off:
            return otherwise
        try:
            return do()
        except RecipeError as error:
            self._stop(error)
            return otherwise

    def _stop(self, error: RecipeError) -> None:
        self._off = True
        if self._asked_for and not isinstance(error, BucketUnreachable):
            raise error
        notice = f"continuing without the shared store {self.name}: {error}"
        if error.fix:
            notice += f" (fix: {error.fix})"
        self.notices.append(notice)


def _may_be_restored(node: Node, verdict: Verdict) -> bool:
    """Return True if a step would run, but may use a cached result instead."""
    if verdict.answer != RUN or verdict.forced:
        return False
    return bool(node.outputs) and not node.flags & UNCACHED


def _may_be_shared(node: Node, trace: Trace) -> bool:
    """Return True if a step's result may be uploaded, and did not come from a shared store."""
    if not trace.outputs or node.flags & UNCACHED:
        return False
    return "store" not in trace.facts


@dataclass(slots=True)
class DownloadResult:
    """Result of a download."""

    size: int = 0
    seals: list[Seal] = field(default_factory=list)
    lost: set[Content] = field(default_factory=set)
    trouble: list[str] = field(default_factory=list)
    failed: RecipeError | None = None  # an error of the store itself, not of one content


class Downloads:
    """Lookups and downloads that steps of a run wait for.

    `wake` is called after each.
    """

    def __init__(
        self, remote_cache: RemoteCache, wake: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._sharing, self._wake, self._say = remote_cache, wake, say
        self._under_way: set[str] = set()
        self._bug: BaseException | None = None
        remote_cache.indulge()

    def is_awaited(self, id: str) -> bool:
        if self._bug is not None:
            raise self._bug
        return id in self._under_way

    def ask(self, id: str, node: Node, verdict: Verdict, missing: Sequence[Content]) -> bool:
        """Start the lookup or download that a step needs, and return True if the step must wait."""
        remote_cache = self._sharing
        keys = remote_cache.unknown(node, verdict)
        if keys:

            def lookup() -> Callable[[], object]:
                try:
                    return partial(remote_cache.learn_answers, keys, *remote_cache.answer(keys))
                except RecipeError as error:
                    return partial(remote_cache.give_up, keys, error)

            self._begin(id, lookup)
            return True
        there = [content for content in dict.fromkeys(missing) if remote_cache.holds(content)]
        if not there:
            return False
        fetch = remote_cache.fetcher(there)
        size = remote_cache.size_of(there)
        if size >= WORTH_SAYING:
            self._say(f"{id}: downloading {about(size)} from the shared store {remote_cache.name}")

        def bring() -> Callable[[], object]:
            brought = fetch()
            return lambda: remote_cache.note_fetched(brought)

        self._begin(id, bring)
        return True

    def _begin(self, id: str, do: Callable[[], Callable[[], object]]) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        self._under_way.add(id)

        def done(note: Callable[[], object]) -> None:
            self._under_way.discard(id)
            note()
            for notice in self._sharing.pop_notices():
                self._say(notice)
            self._wake()

        def work() -> None:
            try:
                note = do()
            except BaseException as error:
                # re-raised in the run's thread: here the error would be lost
                self._bug, note = error, bool
            try:
                loop.call_soon_threadsafe(done, note)
            except RuntimeError:
                pass  # the run has finished and no longer waits

        _run_in_background(work)


class _UploadQueue:
    """Thread that uploads cached results one by one."""

    def __init__(self, home: Path, remote: Remote) -> None:
        self.problems: list[str] = []
        self._remote, self._objects = remote, Objects(home)
        self._queue: queue.SimpleQueue[tuple[Trace, frozenset[str]] | None] = queue.SimpleQueue()
        self.waiting = 0
        self.keys: set[str] = set()
        """Keys of traces that are not uploaded yet."""
        self._marked = False
        self._thread = _run_in_background(self._work)

    def put(self, trace: Trace, kept: frozenset[str]) -> None:
        self.waiting += 1
        self.keys.add(trace.key)
        self._queue.put((trace, kept))

    def idle(self, patience: float) -> bool:
        """Wait up to `patience` seconds for the uploads; return True if all are finished."""
        deadline = time.monotonic() + patience
        while self.waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.waiting

    def join(self) -> None:
        self._queue.put(None)
        while self._thread.is_alive():  # in short waits, so that Ctrl-C works
            self._thread.join(0.2)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if not self._marked:
                    self._remote.mark()
                    self._marked = True
                upload_result(self._remote, self._objects, *item)
            except RecipeError as error:
                self.problems.append(f"{item[0].step}: {error}")
                if isinstance(error, Infrastructure) and not self._marked:
                    while (
                        self._queue.get() is not None
                    ):  # the store is unusable: one warning is enough
                        self.waiting -= 1
                    self.waiting = 0
                    self.keys.clear()
                    return
            self.keys.discard(item[0].key)
            self.waiting -= 1


def upload_result(
    remote: Remote,
    objects: Objects,
    trace: Trace,
    kept: frozenset[str],
    progress: Callable[[int], object] = lambda _count: None,
) -> Trace:
    """Upload the outputs of a cached result except `kept` (temporary outputs), then its trace.

    Returns the store's trace of the key.
    """
    sizes = {}
    for made in trace.outputs:
        if made.name not in kept:
            progress(remote.put(made.content, objects))
        sizes[made.name] = objects.size(made.content)
    return remote.tell(trace, sizes)


def _run_in_background(do: Callable[[], None]) -> threading.Thread:
    """Start a function in a daemon thread."""
    thread = threading.Thread(target=do, name="store", daemon=True)
    thread.start()
    return thread


# -- whole recipes


@dataclass(slots=True)
class Tally:
    """Result of a push or pull.

    `problems` are the failed contents and traces.
    """

    steps: int = 0
    contents: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        return Tally(
            self.steps + other.steps,
            self.contents + other.contents,
            self.bytes + other.bytes,
            [*self.problems, *other.problems],
        )


def push(
    objects: Objects,
    remote_cache: RemoteCache,
    traces: Sequence[tuple[Trace, frozenset[str]]],
    progress: Callable[[str, int], object],
) -> Tally:
    """Upload cached results and their outputs to a shared store.

    `progress` receives each step and its uploaded bytes. Raises Infrastructure.
    """
    tally = Tally()
    remote_cache.remote.mark()
    for trace, kept in traces:
        if not trace.outputs:
            continue
        missing = _missing_outputs(objects, trace, kept)
        if missing:
            tally.problems.append(
                f"{trace.step}: {', '.join(missing)} is no longer stored in this workspace"
            )
            continue
        before = remote_cache.remote.sent
        upload_result(remote_cache.remote, objects, trace, kept)
        sent = remote_cache.remote.sent - before
        tally.steps += 1
        tally.contents += len(trace.outputs) - len(kept)
        tally.bytes += sent
        progress(trace.step, sent)
    return tally


def _missing_outputs(objects: Objects, trace: Trace, kept: Collection[str]) -> list[str]:
    """Return the paths of outputs to upload that are not stored locally."""
    to_send = [made for made in trace.outputs if made.name not in kept]
    return [made.path for made in to_send if not objects.has(made.content)]
