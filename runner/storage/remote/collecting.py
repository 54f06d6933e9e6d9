"""Garbage collection of a shared store.

Objects are deleted if two collections, `GRACE` seconds apart, find them unreferenced.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...errors import Corrupt
from ...reading import parse_json
from ..buckets.bucket import Stat
from ..content.files import Content
from . import layout
from .session import GRACE, Session

_UNREFERENCED: Final = "unreferenced.json"


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """Result of a garbage collection.

    `waiting` counts unreferenced objects within the grace period.
    """

    traces: tuple[str, ...]
    objects: tuple[str, ...]
    size: int
    waiting: int
    uploads: int


def collect(session: Session, keep_days: float, *, dry: bool) -> CollectionResult:
    """Delete unreferenced objects of a shared store, or only report them with `dry`."""
    now = session.now()
    keep = keep_days * 86_400
    # List objects before traces: a trace written during the collection names objects that are too
    # young for deletion.
    there = {stat.name: stat for stat in session.list_objects("objects/")}
    traces = session.list_objects("traces/")
    kept_traces, old_traces = _split_by_age(traces, now, keep)
    _, old_notes = _split_by_age(session.list_objects("states/"), now, keep)
    noted = _find_noted(session, now - keep)
    needed = _find_needed(session, [_key_of(name) for name in kept_traces], noted)
    unneeded = {name: stat for name, stat in there.items() if name not in needed}
    idle = _idle_since(session, unneeded, now)
    doomed = [name for name, since in idle.items() if now - since >= GRACE]
    if not dry:
        session.bucket.delete([*old_traces, *old_notes])
        doomed = _delete_unchanged(session, doomed, idle)
        _write_seen(session, idle, set(doomed))
    uploads = session.bucket.abandon(now - GRACE, dry=dry)
    return CollectionResult(
        tuple(map(_key_of, old_traces)),
        tuple(doomed),
        sum(there[name].size for name in doomed),
        len(idle) - len(doomed),
        uploads,
    )


def _split_by_age(stats: Iterable[Stat], now: float, keep: float) -> tuple[list[str], list[str]]:
    """Return the names of objects younger than `keep` seconds, and of the older ones."""
    young: list[str] = []
    old: list[str] = []
    for stat in stats:
        names = young if now - stat.at < keep else old
        names.append(stat.name)
    return young, old


def _key_of(trace: str) -> str:
    """Return the cache key of a trace from its object name."""
    return trace[-69:-5]


def _idle_since(session: Session, unneeded: Mapping[str, Stat], now: float) -> dict[str, float]:
    """Return the time since which each unneeded object has been unreferenced.

    A rewritten object starts over.
    """
    seen = _read_seen(session)
    idle: dict[str, float] = {}
    for name, stat in unneeded.items():
        since = seen.get(name, now)
        idle[name] = since if stat.at < since else now
    return idle


def _delete_unchanged(
    session: Session, names: Sequence[str], idle: Mapping[str, float]
) -> list[str]:
    """Delete the objects that were not rewritten, and return their names.

    Each object is checked again directly before the deletion.
    """
    heads = zip(names, session.map(session.bucket.head, names), strict=True)
    doomed = [name for name, stat in heads if stat is not None and stat.at < idle[name]]
    trees = [name for name in doomed if name.endswith(".t.json")]
    session.bucket.delete(trees)  # a tree does not exist without its manifest
    session.bucket.delete([name for name in doomed if not name.endswith(".t.json")])
    return doomed


def _find_noted(session: Session, since: float) -> set[str]:
    """Return the names of checkpoint objects with a note written since `since`."""
    names: set[str] = set()
    notes = [stat.name for stat in session.list_objects("states/") if stat.at >= since]
    for data in session.map(session.bucket.read, notes):
        with suppress(ValueError, TypeError, AttributeError, KeyError):  # ignore damaged notes
            names |= {
                layout.object_name(Content(content))
                for _, content in parse_json(data or b"")["states"].values()
            }
    return names


def _find_needed(session: Session, keys: Sequence[str], noted: set[str]) -> set[str]:
    """Return the names of all objects that these traces need, and those in `noted`.

    Raises Corrupt for an unreadable trace or parts list.
    """
    names = {*noted, *_find_outputs(session, keys)}
    trees = [name for name in names if name.endswith(".t.json")]
    return names | _find_parts(session, [layout.parts_name(name) for name in trees])


def _find_outputs(session: Session, keys: Sequence[str]) -> set[str]:
    """Return the object names of the outputs of these traces. Raises Corrupt."""
    names: set[str] = set()
    for key, found in zip(keys, session.map(session.trace, keys), strict=True):
        if found is None:
            if session.bucket.head(layout.trace_name(key)) is not None:
                raise Corrupt(
                    f"cannot read {session.url}/{layout.trace_name(key)}, so its objects are unknown",
                    fix="delete this object, then run `recipe gc --store` again",
                )
            continue
        names |= {layout.object_name(made.content) for made in found.trace.outputs}
    return names


def _find_parts(session: Session, parts_lists: Sequence[str]) -> set[str]:
    """Return the names of these parts lists and of the objects that they name. Raises Corrupt."""
    names = set(parts_lists)
    for name, listed in zip(
        parts_lists, session.map(session.bucket.read, parts_lists), strict=True
    ):
        parts = layout.parts_of(listed) if listed is not None else None
        if parts is not None:
            names |= {layout.object_name(Content(f"f:{sha256}")) for sha256, _ in parts.bundles}
            names |= {f"objects/{blob[:2]}/{blob}" for blob in parts.blobs}
        elif listed is not None:
            raise Corrupt(
                f"cannot read {session.url}/{name}, so its objects are unknown",
                fix="delete this object, then run `recipe gc --store` again",
            )
    return names


def _write_seen(session: Session, idle: Mapping[str, float], deleted: Collection[str]) -> None:
    """Store the names of unreferenced objects that were not deleted, for the next collection."""
    left = {name: since for name, since in idle.items() if name not in deleted}
    session.bucket.write(_UNREFERENCED, json.dumps(left, separators=(",", ":")).encode())


def _read_seen(session: Session) -> dict[str, float]:
    """Read the names of objects that earlier collections found unreferenced, with the times."""
    try:
        seen = parse_json(session.bucket.read(_UNREFERENCED) or b"{}")
        return {str(name): float(since) for name, since in seen.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
