"""Object names and file formats of a shared store, without I/O.

Anyone may have written to the store, so all input is validated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ... import digest
from ...reading import parse_json
from ..content.files import Content, Entry
from ..content.manifests import HEX
from ..records.index import CachedOutput, Trace

SMALL: Final = 256 << 10
"""Maximum size in bytes of a tree's file that is sent in a bundle."""
BUNDLE: Final = 4 << 20
"""Size in bytes after which a bundle ends at the next file with a low digest."""
BUNDLE_MOST: Final = 16 << 20
"""Maximum size of a bundle before it ends, in bytes."""
PART: Final = 16 << 20
"""Size of one request for a large object, in bytes."""

OBJECT = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})(|\.x|\.t\.json|\.t\.parts)")
NOTE = re.compile(r"states/([0-9a-f]{2})/(\1[0-9a-f]{30})\.json")
TRACE = re.compile(r"traces/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json")
_CONTENT = re.compile(r"[fxt]:[0-9a-f]{64}")


class RemoteResult(NamedTuple):
    """Cached result from the store, with the size of each output in bytes."""

    trace: Trace
    sizes: Mapping[str, int]


def object_name(content: Content) -> str:
    return (
        f"objects/{content[2:4]}/{content[2:]}{ {'f': '', 'x': '.x', 't': '.t.json'}[content[0]] }"
    )


def parts_name(tree: str) -> str:
    """Return the name of a tree's parts list from the name of its manifest."""
    return tree[: -len("json")] + "parts"


def trace_name(key: str) -> str:
    return f"traces/{key[:2]}/{key}.json"


def note_name(key: str) -> str:
    return f"states/{key[:2]}/{key}.json"


def trace_text(trace: Trace, sizes: Mapping[str, int]) -> bytes:
    outputs = [
        [made.name, made.path, made.content, sizes.get(made.name, 0)] for made in trace.outputs
    ]
    body = {
        "key": trace.key,
        "recipe": trace.recipe,
        "step": trace.step,
        "run": trace.run,
        "made_at": trace.made_at,
        "seconds": trace.seconds,
        "outputs": outputs,
        "metrics": trace.metrics_json,
        "facts": trace.facts_json,
    }
    if trace.measured_json != "{}":
        body["measured"] = trace.measured_json
    signed = {**body, "sum": digest.of_value("trace/1", body)}
    return json.dumps(signed, separators=(",", ":")).encode()


def trace_of(data: bytes, key: str) -> RemoteResult | None:
    """Parse a cached result; return None if it is damaged or has another key."""
    try:
        body = parse_json(data)
        expected = body.pop("sum")
        if expected != digest.of_value("trace/1", body) or body["key"] != key:
            return None
        outputs, sizes = _parse_outputs(body["outputs"])
        metrics, facts = (_json_object(str(body[name])) for name in ("metrics", "facts"))
        measured = _json_object(str(body.get("measured", "{}")))
        if not all(isinstance(values, dict) for values in parse_json(measured).values()):
            return None
        recipe, step, run = (str(body[name]) for name in ("recipe", "step", "run"))
        made_at, seconds = float(body["made_at"]), float(body["seconds"])
        trace = Trace(key, recipe, step, run, made_at, seconds, outputs, metrics, facts, measured)
        return RemoteResult(trace, sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _parse_outputs(rows: Any) -> tuple[tuple[CachedOutput, ...], dict[str, int]]:
    """Return the outputs of a cached result and their sizes by name.

    Raises ValueError for an invalid content id, and TypeError for rows of another form.
    """
    outputs: list[CachedOutput] = []
    sizes: dict[str, int] = {}
    for name, path, content, size in rows:
        if not _CONTENT.fullmatch(str(content)):
            raise ValueError(content)
        outputs.append(CachedOutput(str(name), str(path), Content(str(content))))
        sizes[str(name)] = int(size)
    return tuple(outputs), sizes


def _json_object(text: str) -> str:
    """Return `text`; raise ValueError if it is no JSON object."""
    if not isinstance(parse_json(text), dict):
        raise ValueError(text)
    return text


class Parts(NamedTuple):
    small: int
    bundles: list[tuple[str, int]]
    blobs: list[str]


def parts_of(data: bytes) -> Parts | None:
    try:
        parsed = parse_json(data)
        bundles = [(str(sha256), int(count)) for sha256, count in parsed["bundles"]]
        blobs = [str(blob) for blob in parsed["blobs"]]
        if not all(HEX.fullmatch(sha256) and count > 0 for sha256, count in bundles):
            return None
        if not all(HEX.fullmatch(blob.removesuffix(".x")) for blob in blobs):
            return None
        return Parts(int(parsed["small"]), bundles, blobs)
    except (ValueError, KeyError, TypeError):
        return None


def manifest_of(data: bytes) -> list[Entry] | None:
    try:
        rows = parse_json(data.decode("utf-8", "surrogateescape"))
        return [
            Entry(str(path), str(kind), int(size), str(value)) for path, kind, size, value in rows
        ]
    except (ValueError, TypeError):
        return None


def split(manifest: Sequence[Entry], small: int) -> tuple[list[Entry], list[Entry]]:
    """Return a tree's files for bundles and the files sent alone.

    Each content occurs once, in manifest order.
    """
    seen: set[str] = set()
    parts: tuple[list[Entry], list[Entry]] = ([], [])
    for entry in manifest:
        if entry.kind in "fx" and entry.value not in seen:
            seen.add(entry.value)
            parts[entry.size > small].append(entry)
    return parts


def bundle_files(small: Sequence[Entry]) -> list[list[Entry]]:
    """Group small files into bundles for upload.

    Adding, removing or changing a file affects only one bundle.
    """
    bundles: list[list[Entry]] = []
    group: list[Entry] = []
    size = 0
    for entry in small:
        group.append(entry)
        size += entry.size
        if size >= BUNDLE_MOST or (size >= BUNDLE and int(entry.value[:2], 16) < 8):
            bundles.append(group)
            group, size = [], 0
    return [*bundles, group] if group else bundles
