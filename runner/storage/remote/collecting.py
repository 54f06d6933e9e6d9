"""Unreferenced objects of a shared store: deleted when two collections, `GRACE` apart, have seen it so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...errors import Corrupt
from ...reading import parse_json
from ..content.files import Content
from . import layout
from .session import GRACE, Session

_UNREFERENCED: Final = "unreferenced.json"


@dataclass(frozen=True, slots=True)
class Garbage:
    """What a collection would do.  `waiting` are unreferenced objects that are still inside the grace period."""

    traces: tuple[str, ...]
    objects: tuple[str, ...]
    size: int
    waiting: int
    uploads: int


def collect(session: Session, keep_days: float, *, dry: bool) -> Garbage:
    """Delete what may go; `dry`: only say what that is."""
    now = session.now()
    # Objects first: a trace that is written while we look names objects younger than any that may go.
    there = {stat.name: stat for stat in session.listed("objects/")}
    kept: list[str] = []
    going: list[str] = []
    for stat in session.listed("traces/"):
        (kept if now - stat.at < keep_days * 86_400 else going).append(stat.name)
    notes = [stat.name for stat in session.listed("states/") if now - stat.at >= keep_days * 86_400]
    needed = _needed(
        session, [name[-69:-5] for name in kept], _noted(session, now - keep_days * 86_400)
    )
    seen = _seen(session)
    idle = {name: seen.get(name, now) for name in there if name not in needed}
    # Written since it was first seen idle: somebody has put it again.
    idle = {name: since if there[name].at < since else now for name, since in idle.items()}
    doomed = [name for name, since in idle.items() if now - since >= GRACE]
    if not dry:
        session.bucket.delete([*going, *notes])
        # The young are looked at once more: what was written while we looked stays.
        doomed = [
            name
            for name, stat in zip(doomed, session.map(session.bucket.head, doomed), strict=True)
            if stat is not None and stat.at < idle[name]
        ]
        session.bucket.delete(
            [name for name in doomed if name.endswith(".t.json")]
        )  # a tree without its manifest is none
        session.bucket.delete([name for name in doomed if not name.endswith(".t.json")])
        left = {name: since for name, since in idle.items() if name not in set(doomed)}
        session.bucket.write(_UNREFERENCED, json.dumps(left, separators=(",", ":")).encode())
    uploads = session.bucket.abandon(now - GRACE, dry=dry)
    return Garbage(
        tuple(name[-69:-5] for name in going),
        tuple(doomed),
        sum(there[name].size for name in doomed),
        len(idle) - len(doomed),
        uploads,
    )


def _noted(session: Session, since: float) -> set[str]:
    """The objects that notes of checkpoints name which were written since then."""
    names: set[str] = set()
    for data in session.map(
        session.bucket.read, [stat.name for stat in session.listed("states/") if stat.at >= since]
    ):
        with suppress(ValueError, TypeError, AttributeError, KeyError):  # a damaged one is none
            names |= {
                layout.object_name(Content(content))
                for _, content in parse_json(data or b"")["states"].values()
            }
    return names


def _needed(session: Session, keys: Sequence[str], noted: set[str]) -> set[str]:
    """The names of all objects that these traces rely on, and those of `noted`.  Raises Corrupt rather than to guess."""
    names = set(noted)
    for key, found in zip(keys, session.map(session.trace, keys), strict=True):
        if found is None:
            if session.bucket.head(layout.trace_name(key)) is not None:
                raise Corrupt(
                    f"cannot read {session.url}/{layout.trace_name(key)}, so its objects are unknown",
                    fix="delete this object, then run `recipe gc --store` again",
                )
            continue
        names |= {layout.object_name(made.content) for made in found.trace.outputs}
    trees = [name for name in names if name.endswith(".t.json")]
    for name, listed in zip(
        trees,
        session.map(session.bucket.read, [name[: -len("json")] + "parts" for name in trees]),
        strict=True,
    ):
        names.add(name[: -len("json")] + "parts")
        parts = layout.parts_of(listed) if listed is not None else None
        if parts is not None:
            names |= {layout.object_name(Content(f"f:{sha256}")) for sha256, _ in parts.bundles}
            names |= {f"objects/{blob[:2]}/{blob}" for blob in parts.blobs}
        elif listed is not None:
            raise Corrupt(
                f"cannot read {session.url}/{name[:-4]}parts, so its objects are unknown",
                fix="delete this object, then run `recipe gc --store` again",
            )
    return names


def _seen(session: Session) -> dict[str, float]:
    """Objects that an earlier collection saw unreferenced, and since when."""
    try:
        seen = parse_json(session.bucket.read(_UNREFERENCED) or b"{}")
        return {str(name): float(since) for name, since in seen.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
