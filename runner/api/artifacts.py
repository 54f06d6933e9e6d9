"""What the steps of a run made: outputs, the files in them, and their bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ..agent.regular import open_regular
from ..errors import NotFound
from ..planning.ids import bare
from ..storage.content.files import Content, Entry
from ..storage.records.index import Made
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.run_graph import RunGraph
from ..storage.workspace import Workspace
from . import media
from .values import Facts, whole


def list_outputs(ws: Workspace, row: RunRow) -> list[Facts]:
    """Return what the steps of a run made, or found made, by STEP.OUTPUT.

    Of a run that another machine carried out they are its results, by their names.
    """
    return outputs_of(ws, row, ws.run_views.graph(row), ws.store.runs.attempts(row.id))


def outputs_of(
    ws: Workspace, row: RunRow, graph: RunGraph | None, attempts: Sequence[AttemptRow]
) -> list[Facts]:
    """Return the same of a run whose graph and attempts are known."""
    keys = dict(graph.fresh) if graph is not None else {}
    keys |= {each.step: each.key for each in attempts if each.outcome == "done" and each.key}
    places = {step: n for n, step in enumerate(graph.needs)} if graph is not None else {}
    made = dict(
        sorted(keys.items(), key=lambda item: (places.get(bare(item[0]), len(places)), item[0]))
    )
    traces = ws.store.index.traces(list(made.values()))
    outputs = {
        f"{step}.{each.name}": each
        for step, key in made.items()
        if key in traces
        for each in traces[key].outputs
    }
    if not outputs:
        outputs = {each.name: Made(each.name, "", Content(each.content)) for each in row.outputs}
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


def _size(
    ws: Workspace, content: Content, tiny: Mapping[Content, bytes], said: int | None
) -> int | None:
    """The bytes of an output: those that are stored, else what was said of them."""
    if content in tiny:
        return len(tiny[content])
    seal = ws.store.index.seal(content)
    if seal is not None:
        return seal.size
    if said is None and content[0] != "t" and ws.objects.has(content):
        return ws.objects.size(content)
    return said


FILES: Final = 1000
"""Files of a folder that are listed at once."""
FOLDER: Final = "inode/directory"
"""The type of a folder, as desktops call it."""


def list_artifacts(ws: Workspace, row: RunRow, name: str = "", after: str = "") -> list[Facts]:
    """Return the outputs of a run, or the one of that name, each with `stored`: whether its bytes are here.

    Each has its media `type`, and the `step` of a training that its path tells. Of a folder the
    `files` are the first `FILES` whose paths are greater than `after`, sorted.
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
        size = sum(entry.size for entry in entries) if stored else each["bytes"]
        told = {"type": FOLDER, "step": media.step_of(each["path"])}
        files = _files(ws, content, entries, after)
        found.append({**each, **told, "bytes": size, "stored": stored, "files": files})
    return found


def _files(
    ws: Workspace, content: Content, entries: Sequence[Entry], after: str
) -> list[Mapping[str, Any]]:
    """The first `FILES` of a folder whose paths are greater than `after`, sorted."""
    folder = ws.objects.path(content)
    listed = sorted(
        (entry for entry in entries if entry.path > after), key=lambda entry: entry.path
    )
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
    """The type of a file by its name; of one that is called a picture, by its first bytes."""
    named = media.type_of(entry.path)
    if named not in media.PICTURES or entry.kind not in "fx":
        return named
    try:
        with open_stored(ws, folder / entry.path) as file:
            return media.type_of(entry.path, file.read(media.HEAD) or b"\0")
    except NotStored:
        return named


def _head(ws: Workspace, content: Content) -> bytes:
    """The first bytes of a stored file; none where it cannot be read."""
    data = ws.objects.tiny.row(content)
    if data is not None:
        return data[: media.HEAD]
    try:
        with open_stored(ws, ws.objects.path(content)) as file:
            return file.read(media.HEAD)
    except NotStored:
        return b""


class StoredFile(NamedTuple):
    """A file of an output: where its bytes are, the digest that they have, and what it was called."""

    place: Path
    digest: str
    path: str


def find_file(ws: Workspace, row: RunRow, name: str, path: str = "") -> StoredFile:
    """Return a file of a run: the output `name`, or of one that is a folder the file at `path` in it.

    Raises NotFound, and NotStored where the run had it and its bytes are not here any more.
    """
    outputs = list_outputs(ws, row)
    found = next((each for each in outputs if each["name"] == name), None)
    if found is None:
        names = ", ".join(each["name"] for each in outputs[:10])
        raise NotFound("unknown output of the run", fix=f"available outputs: {names or 'none yet'}")
    content = Content(found["content"])
    if not ws.objects.has(content):
        raise NotStored
    place = ws.objects.path(content)
    if content[0] != "t":
        if path:
            raise NotFound(
                "the output is a file, not a directory", fix="repeat the request without `path`"
            )
        return StoredFile(place, content, found["path"] or name)
    for entry in ws.objects.manifests.entries(content):
        if path in (entry.path, whole(entry.path)) and entry.kind in "fx":
            return StoredFile(place / entry.path, entry.value, entry.path)
    fix = "pass one of the listed `files` as `path`"
    raise NotFound("the output is a directory without this file", fix=fix)


def open_stored(ws: Workspace, place: Path) -> BinaryIO:
    """Open a file of the store for reading.

    Raises NotStored, also where something else has been put in its place: a pipe, or a link that
    leads out of the store.
    """
    objects = os.path.join(os.path.realpath(ws.objects.root), "")
    try:
        if not os.path.realpath(place).startswith(objects):
            raise NotStored
        return open_regular(place)
    except OSError:
        raise NotStored from None


class NotStored(NotFound):
    """The bytes of an output are not stored here any more."""

    def __init__(self) -> None:
        super().__init__(
            "the output is no longer stored in this workspace", fix="run the recipe again"
        )
