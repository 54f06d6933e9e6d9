"""A plan's results in a shared store: describe, download, and list results to upload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..language.units import about
from ..planning.judge import FRESH, RESTORE
from ..planning.plan import UNCACHED, Node
from ..planning.step import TEMPORARY
from ..storage.content.files import Content
from ..storage.records.index import Trace
from ..storage.remote.cache import RemoteCache, Tally
from ..storage.workspace import Workspace
from .survey import Survey


def local_traces(ws: Workspace, found: Survey) -> list[tuple[Trace, frozenset[str]]]:
    """Return the local results of a plan's steps, with the names of their temporary outputs."""
    answer = []
    for n, node in enumerate(found.plan.nodes):
        key = found.verdicts[n].key
        if key is None or node.flags & UNCACHED:
            continue
        trace = ws.store.index.trace(key)
        if trace is not None:
            answer.append((trace, _temporary_outputs(node)))
    return answer


def _temporary_outputs(node: Node) -> frozenset[str]:
    return frozenset(output.name for output in node.outputs if output.flags & TEMPORARY)


def pull(
    ws: Workspace, remote_cache: RemoteCache, found: Survey, progress: Callable[[str, int], object]
) -> Tally:
    """Download the outputs of every finished step from the shared store. Raises Infrastructure."""
    tally = Tally()
    for n, node in enumerate(found.plan.nodes):
        made = found.made.get(n)
        if made is None or not made.ok:
            continue
        if found.verdicts[n].key is None:
            continue
        # The shared store has no temporary outputs.
        temporary = _temporary_outputs(node)
        kept = [content for name, content in made.outputs.items() if name not in temporary]
        wanted = _find_absent(ws, kept)
        if wanted:
            begun = remote_cache.remote.received
            lost = remote_cache.bring(wanted)
            for content in sorted(lost):
                tally.problems.append(f"{node.id}: cannot download {content[:14]}…")
            tally.contents += len(wanted) - len(lost)
            tally.bytes += remote_cache.remote.received - begun
            progress(node.id, remote_cache.remote.received - begun)
        tally.steps += 1
    return tally


def explain_remote(ws: Workspace, remote_cache: RemoteCache, found: Survey) -> None:
    """Add notes to verdicts about cache hits in the shared store and pending downloads."""
    for n, verdict in enumerate(found.verdicts):
        if verdict.answer not in (FRESH, RESTORE) or verdict.made is None:
            continue
        words = []
        if verdict.key in remote_cache.found:
            words.append(f"cached in the shared store {remote_cache.name}")
        absent = _find_absent(ws, verdict.made.outputs.values())
        if verdict.answer == RESTORE and absent:
            words.append(_describe_download(remote_cache, absent))
        if words:
            found.verdicts[n] = verdict._replace(reasons=(*verdict.reasons, *words))


def _find_absent(ws: Workspace, contents: Iterable[str]) -> list[Content]:
    """Return the contents that are not stored on this machine."""
    return [content for content in map(Content, contents) if not ws.objects.has(content)]


def _describe_download(remote_cache: RemoteCache, contents: Sequence[Content]) -> str:
    words = f"outputs will be downloaded from the shared store {remote_cache.name}"
    size = remote_cache.size_of(contents)
    return f"{words}, {about(size)}" if size else words
