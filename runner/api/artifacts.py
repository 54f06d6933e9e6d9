"""What the steps of a run made: outputs, the files in them, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import NotFound
from ..planning.ids import bare
from ..storage.content.files import Content
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.run_graph import RunGraph
from ..storage.workspace import Workspace
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
    contents = {
        f"{step}.{each[0]}": each[2]
        for step, key in made.items()
        if key in traces
        for each in traces[key].outputs
    }
    sizes = {each.name: each.size for each in row.outputs}
    if not contents:
        contents = {each.name: Content(each.content) for each in sorted(row.outputs)}
    tiny = ws.store.index.tiny(list(contents.values()))
    found: list[Facts] = []
    for name, content in contents.items():
        seal = ws.store.index.seal(content) if content not in tiny else None
        size = (
            len(tiny[content])
            if content in tiny
            else seal.size
            if seal is not None
            else sizes.get(name)
        )
        found.append({"name": name, "content": content, "bytes": size, "folder": content[0] == "t"})
    return found


FILES: Final = 1000
"""Files of a folder that are listed at once."""


def list_artifacts(ws: Workspace, row: RunRow, name: str = "", after: str = "") -> list[Facts]:
    """Return the outputs of a run, or the one of that name, each with `stored`: whether its bytes are here.

    Of a folder the `files` are the first `FILES` whose paths are greater than `after`, sorted.
    """
    found: list[Facts] = []
    for each in list_outputs(ws, row):
        if name and each["name"] != name:
            continue
        content = Content(each["content"])
        stored = ws.objects.has(content)
        entries = ws.objects.manifests.entries(content) if stored and each["folder"] else ()
        files: list[Facts] = [
            {"path": entry.path, "bytes": entry.size, "content": f"{entry.kind}:{entry.value}"}
            for entry in entries
        ]
        files.sort(key=lambda file: file["path"])
        size = sum(file["bytes"] for file in files) if stored and each["folder"] else each["bytes"]
        listed = [file for file in files if file["path"] > after][:FILES]
        found.append({**each, "bytes": size, "stored": stored, "files": listed})
    return found


class StoredFile(NamedTuple):
    """A file of an output: where its bytes are, and the digest that they have."""

    place: Path
    digest: str


def find_file(ws: Workspace, row: RunRow, name: str, path: str = "") -> StoredFile:
    """Return a file of a run: the output `name`, or of one that is a folder the file at `path` in it.

    Raises NotFound, and NotStored where the run had it and its bytes are not here any more.
    """
    outputs = list_outputs(ws, row)
    content = next((Content(each["content"]) for each in outputs if each["name"] == name), None)
    if content is None:
        names = ", ".join(each["name"] for each in outputs[:10])
        raise NotFound("the run has no such output", fix=f"it has {names or 'none yet'}")
    if not ws.objects.has(content):
        raise NotStored
    place = ws.objects.path(content)
    if content[0] != "t":
        if path:
            raise NotFound("the output is a file, not a folder", fix="ask for it without `path`")
        return StoredFile(place, content)
    for entry in ws.objects.manifests.entries(content):
        if path in (entry.path, whole(entry.path)) and entry.kind in "fx":
            return StoredFile(place / entry.path, entry.value)
    fix = "its `files` are listed; give one as `path`"
    raise NotFound("the output is a folder and has no such file", fix=fix)


class NotStored(NotFound):
    """The bytes of an output are not stored here any more."""

    def __init__(self) -> None:
        super().__init__("the output is not stored here any more", fix="run it again")
