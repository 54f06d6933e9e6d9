"""Outputs of a run: names, sizes, directory listings and file contents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ..agent.regular import open_regular
from ..errors import NotFound
from ..planning.ids import bare
from ..storage.content.files import Content, Entry
from ..storage.records.index import CachedOutput
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.run_graph import RunGraph
from ..storage.workspace import Workspace
from . import media
from .values import Facts, whole


def list_outputs(ws: Workspace, row: RunRow) -> list[Facts]:
    """Return the outputs of a run as `STEP.OUTPUT` entries, including outputs of cached steps.

    For a run that another machine executed, return its published results under their own names.
    """
    return outputs_of(ws, row, ws.run_views.graph(row), ws.store.runs.attempts(row.id))


def outputs_of(
    ws: Workspace, row: RunRow, graph: RunGraph | None, attempts: Sequence[AttemptRow]
) -> list[Facts]:
    """Return the outputs of a run as in `list_outputs`, from its loaded graph and attempts."""
    outputs = _outputs_of_steps(ws, graph, attempts)
    if not outputs:
        for each in row.outputs:
            outputs[each.name] = CachedOutput(each.name, "", Content(each.content))
        outputs = dict(sorted(outputs.items()))
    sizes = {each.name: each.size for each in row.outputs}
    tiny = ws.store.index.tiny([each.content for each in outputs.values()])
    return [
        {
            "name": name,
            "path": whole(each.path),
            "content": each.content,
            "bytes": _size(ws, each.content, tiny, sizes.get(name)),
            "folder": each.content[0] == "t",
        }
        for name, each in outputs.items()
    ]


def _outputs_of_steps(
    ws: Workspace, graph: RunGraph | None, attempts: Sequence[AttemptRow]
) -> dict[str, CachedOutput]:
    """Return the outputs of a run's steps as `STEP.OUTPUT`, in the order of the graph."""
    places: dict[str, int] = {}
    keys: dict[str, str] = {}
    if graph is not None:
        places = {step: n for n, step in enumerate(graph.needs)}
        keys = dict(graph.fresh)
    for attempt in attempts:
        if attempt.outcome == "done" and attempt.key:
            keys[attempt.step] = attempt.key

    def place(step: str) -> tuple[int, str]:
        return places.get(bare(step), len(places)), step

    traces = ws.store.index.traces(list(keys.values()))
    outputs: dict[str, CachedOutput] = {}
    for step in sorted(keys, key=place):
        trace = traces.get(keys[step])
        if trace is not None:
            outputs |= {f"{step}.{each.name}": each for each in trace.outputs}
    return outputs


def _size(
    ws: Workspace, content: Content, tiny: Mapping[Content, bytes], said: int | None
) -> int | None:
    """Return the stored size of an output in bytes, or `said` if it is not stored."""
    if content in tiny:
        return len(tiny[content])
    seal = ws.store.index.seal(content)
    if seal is not None:
        return seal.size
    if said is not None or content[0] == "t":
        return said
    return ws.objects.size(content) if ws.objects.has(content) else None


FILES: Final = 1000
"""Maximum number of directory entries in one answer."""
FOLDER: Final = "inode/directory"
"""Media type of a directory, as used by desktop environments."""


def list_artifacts(ws: Workspace, row: RunRow, name: str = "", after: str = "") -> list[Facts]:
    """Return a run's outputs with sizes and media types, or only the output `name`.

    `stored` tells whether the content is in this workspace. `type` is the media type, and `step`
    the training step in the path, if any. For a directory, `files` holds the first `FILES` entries
    whose paths sort after `after`.
    """
    found: list[Facts] = []
    for each in list_outputs(ws, row):
        if name and each["name"] != name:
            continue
        content = Content(each["content"])
        stored = ws.objects.has(content)
        if not each["folder"]:
            path = each["path"] or each["name"]
            head = _head(ws, content) if stored else b""
            told = {"type": media.type_of(path, head), "step": media.step_of(path)}
            found.append({**each, **told, "stored": stored, "files": []})
            continue
        entries = ws.objects.manifests.entries(content) if stored else ()
        size = each["bytes"]
        if stored:
            size = sum(entry.size for entry in entries)
        told = {"type": FOLDER, "step": media.step_of(each["path"])}
        files = _files(ws, content, entries, after)
        found.append({**each, **told, "bytes": size, "stored": stored, "files": files})
    return found


def _files(
    ws: Workspace, content: Content, entries: Sequence[Entry], after: str
) -> list[Mapping[str, Any]]:
    """Return a page of `FILES` entries of an output directory, after the path `after`."""
    folder = ws.objects.path(content)
    listed = [entry for entry in entries if entry.path > after]
    listed.sort(key=lambda entry: entry.path)
    return [
        {
            "path": entry.path,
            "bytes": entry.size,
            "content": f"{entry.kind}:{entry.value}",
            "type": _type(ws, folder, entry),
            "step": media.step_of(entry.path),
        }
        for entry in listed[:FILES]
    ]


def _type(ws: Workspace, folder: Path, entry: Entry) -> str:
    """Return a file's media type by its name.

    Files named like images are also checked by content.
    """
    named = media.type_of(entry.path)
    if named not in media.PICTURES or entry.kind not in "fx":
        return named
    try:
        with open_stored(ws, folder / entry.path) as file:
            return media.type_of(entry.path, file.read(media.HEAD) or b"\0")
    except NotStored:
        return named


def _head(ws: Workspace, content: Content) -> bytes:
    """Return the first bytes of a stored file for media type detection, or b"" if unreadable."""
    data = ws.objects.tiny.row(content)
    if data is not None:
        return data[: media.HEAD]
    try:
        with open_stored(ws, ws.objects.path(content)) as file:
            return file.read(media.HEAD)
    except NotStored:
        return b""


class StoredFile(NamedTuple):
    """A stored output file: its location in the store, its digest, and its original path."""

    place: Path
    digest: str
    path: str


def find_file(ws: Workspace, row: RunRow, name: str, path: str = "") -> StoredFile:
    """Return a file of a run: the output `name`, or the file at `path` in an output directory.

    Raises NotFound if the run has no such file, and NotStored if the content was deleted.
    """
    found = _find_output(ws, row, name)
    content = Content(found["content"])
    if not ws.objects.has(content):
        raise NotStored
    if content[0] == "t":
        return _find_in_directory(ws, content, path)
    if path:
        raise NotFound(
            "the output is a file, not a directory", fix="repeat the request without `path`"
        )
    return StoredFile(ws.objects.path(content), content, found["path"] or name)


def _find_output(ws: Workspace, row: RunRow, name: str) -> Facts:
    """Return the listed output `name` of a run. Raises NotFound."""
    outputs = list_outputs(ws, row)
    for output in outputs:
        if output["name"] == name:
            return output
    names = ", ".join(output["name"] for output in outputs[:10])
    raise NotFound("unknown output of the run", fix=f"available outputs: {names or 'none yet'}")


def _find_in_directory(ws: Workspace, content: Content, path: str) -> StoredFile:
    """Return the file at `path` in a stored directory. Raises NotFound."""
    for entry in ws.objects.manifests.entries(content):
        # A client knows a path that is not UTF-8 only as the listing shows it.
        if path in (entry.path, whole(entry.path)) and entry.kind in "fx":
            return StoredFile(ws.objects.path(content) / entry.path, entry.value, entry.path)
    fix = "pass one of the listed `files` as `path`"
    raise NotFound("the output is a directory without this file", fix=fix)


def open_stored(ws: Workspace, place: Path) -> BinaryIO:
    """Open a file of the object store for reading.

    Raises NotStored if the file is missing, is not a regular file, or is a link out of the store.
    """
    objects = os.path.join(os.path.realpath(ws.objects.root), "")
    try:
        if not os.path.realpath(place).startswith(objects):
            raise NotStored
        return open_regular(place)
    except OSError:
        raise NotStored from None


class NotStored(NotFound):
    """Error for an output whose content is no longer stored in this workspace."""

    def __init__(self) -> None:
        super().__init__(
            "the output is no longer stored in this workspace", fix="run the recipe again"
        )
