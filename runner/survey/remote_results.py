"""A plan's results in a shared store: describe, download, and list results to upload."""

from __future__ import annotations

from collections.abc import Callable

from ..language.units import about
from ..planning.judge import FRESH, RESTORE
from ..planning.plan import UNCACHED
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
            answer.append(
                (
                    trace,
                    frozenset(output.name for output in node.outputs if output.flags & TEMPORARY),
                )
            )
    return answer


def pull(
    ws: Workspace, remote_cache: RemoteCache, found: Survey, progress: Callable[[str, int], object]
) -> Tally:
    """Download the outputs of every finished step from the shared store. Raises Infrastructure."""
    tally = Tally()
    for n, node in enumerate(found.plan.nodes):
        made = found.made.get(n)
        if made is None or not made.ok or found.verdicts[n].key is None:
            continue
        temporary = {output.name for output in node.outputs if output.flags & TEMPORARY}
        wanted = [
            Content(content)
            for name, content in made.outputs.items()
            if name not in temporary and not ws.objects.has(Content(content))
        ]
        if wanted:
            begun = remote_cache.remote.received
            lost = remote_cache.bring(wanted)
            tally.problems += [
                f"{node.id}: cannot download {content[:14]}…" for content in sorted(lost)
            ]
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
        words = (
            [f"cached in the shared store {remote_cache.name}"]
            if verdict.key in remote_cache.found
            else []
        )
        missing = [
            Content(content)
            for content in verdict.made.outputs.values()
            if not ws.objects.has(Content(content))
        ]
        if verdict.answer == RESTORE and missing:
            size = remote_cache.size_of(missing)
            words.append(
                f"outputs will be downloaded from the shared store {remote_cache.name}"
                + (f", {about(size)}" if size else "")
            )
        if words:
            found.verdicts[n] = verdict._replace(reasons=(*verdict.reasons, *words))
