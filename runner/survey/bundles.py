"""All that a worker of another machine needs of a request: the files that its plan reads as one archive, and what is large by its content.

What is below the workspace keeps its path, so that a recipe means there what it means here, and a glob finds what it found here and nothing else.
Recipes of the library lie in `.library` with their code and locks, inputs from elsewhere in `.inputs`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import CannotRun, Corrupt, Invalid, Problem
from ..language.library import find, fixtures
from ..paths import BUNDLED, is_path, temporary_name
from ..storage.content.disk import delete, total
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from . import locks
from .facts import collect_facts
from .plan_cache import CompiledFromFiles, compile_from_files
from .request import Request

if TYPE_CHECKING:
    from ..language.values import Tree
    from ..planning.judge import Facts

MOST: Final = 8 << 20
"""Bytes of an archive that the database of runs keeps; a larger one is in the shared store."""
INLINE: Final = 1 << 20
"""Bytes of a dependency that travels in the archive; a larger one travels by its content."""
_LISTED: Final = ".bundle.json"
_INPUTS: Final = ".inputs"
_PACK: Final = re.compile(r"pack:([0-9a-f]{64})")
"""An input that is named by its content, as `recipe pack` says it without its kind."""
_MADE: Final = 315532800
"""When every file of an archive was changed last: 1980."""


class Bundle(NamedTuple):
    """An archive and its SHA-256.  `bound`: inputs as the worker gives them.  `contents`: what has to be in the store, and where it is here."""

    digest: str
    data: bytes
    bound: Mapping[str, Tree]
    contents: Mapping[Content, str]


def pack(
    ws: Workspace,
    request: Request,
    holds: Callable[[list[Content]], set[Content]] = lambda _contents: set(),
) -> Bundle:
    """The bundle of a request; `holds` says which contents the shared store has, for inputs that are named by their content.

    Raises NotFound, and Invalid with every problem of its inputs and files.
    """
    anew = compile_from_files(ws, request)
    packing = _BundleBuilder(ws, anew, holds)
    packing.refuse(request)
    facts = collect_facts(ws, anew.plan, request)
    packing.recipes()
    packing.taken(facts)
    packing.declared(facts)
    packing.globs()
    if packing.problems:
        raise Invalid(list(dict.fromkeys(packing.problems)))
    return packing.bundle(facts)


def unpack(
    ws: Workspace, digest: str, data: bytes, bring: Callable[[list[Content]], set[Content]]
) -> Path:
    """The folder of a bundle below the worker's memory, made once.  `bring` fetches contents into its objects, and answers what cannot be had."""
    folder = ws.home / "bundles" / digest[:32]
    if folder.is_dir():
        os.utime(folder)
        return folder
    if hashlib.sha256(data).hexdigest() != digest:
        raise Corrupt(
            f"the bundle {digest[:12]} is not what its name says", fix="submit the run again"
        )
    new = folder.with_name(temporary_name(folder.name))
    new.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(new, filter="data")
        listed: list[tuple[str, str]] = json.loads((new / _LISTED).read_text("utf-8"))["inputs"]
        if lost := bring([Content(content) for _, content in listed]):
            names = ", ".join(path for path, content in listed if content in lost)
            raise CannotRun(
                f"the shared store does not have {names}",
                fix="submit the run again: that puts it there anew",
            )
        for path, content in listed:
            target = new / path
            target.parent.mkdir(parents=True, exist_ok=True)
            ws.objects.copy_to(Content(content), target, link=True)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker
                raise
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise Corrupt(
            f"the bundle {digest[:12]} cannot be unpacked: {error}", fix="submit the run again"
        ) from error
    finally:
        delete(new)
    return folder


def find_packed(ws: Workspace, address: str) -> Content | None:
    """The content that `pack:SHA256` names, where the shared store has it; None for any other address.  Raises CannotRun."""
    named = _PACK.fullmatch(address)
    if named is None:
        return None
    cache = ws.remote_cache
    if cache is None:
        raise CannotRun(
            f"{address} names what a shared store has, and there is none",
            fix='`store = "NAME"` in recipe.toml names one',
        )
    found = cache.remote.holds([Content(f"{kind}:{named[1]}") for kind in "tfx"])
    if not found:
        raise CannotRun(
            f"{address} is not in the shared store",
            fix="put it there: `recipe push`, or submit the folder itself once",
        )
    return min(found)


def fetch_packed_inputs(ws: Workspace, request: Request) -> Request:
    """A request whose inputs `pack:SHA256` are paths of what the shared store has, fetched.  Raises CannotRun."""

    def of(value: object) -> object:
        if isinstance(value, list):
            return [of(each) for each in value]
        content = find_packed(ws, value) if isinstance(value, str) else None
        if content is None:
            return value
        place = ws.home / "cache" / f"pack-{content[2:34]}" / "data"
        if not place.exists():
            if ws.remote_cache is None or ws.remote_cache.bring([content]):
                raise CannotRun(
                    f"{value} cannot be fetched from the shared store",
                    fix="`recipe doctor` looks at the store",
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            ws.objects.copy_to(content, place, link=True)
        os.utime(place.parent)
        return str(place)

    inputs = {name: of(value) for name, value in request.inputs.items()}
    return request if inputs == request.inputs else replace(request, inputs=inputs)


class _BundleBuilder:
    """What goes into a bundle, by its path there."""

    def __init__(
        self, ws: Workspace, anew: CompiledFromFiles, holds: Callable[[list[Content]], set[Content]]
    ) -> None:
        self._ws, self._anew, self._holds = ws, anew, holds
        self._files: dict[str, str] = {}  # path in the bundle -> path here
        self._inputs: dict[str, Content] = {}
        self._at: dict[Content, str] = {}
        self._bound: dict[str, Tree] = {}
        self.problems: list[Problem] = []
        names = [Path(name) for name in (str(anew.source), *anew.sources)]
        self._libraries = sorted(
            {
                str(path.parent)
                for path in names
                if self._below(str(path)) is None and not self._typed(path)
            }
        )

    def refuse(self, request: Request) -> None:
        """What can only mean something on this machine."""
        if request.current_python:
            self._wrong(
                "--python current is the Python of this machine, and a worker has its own",
                "lock the packages, or give --here",
            )

    def recipes(self) -> None:
        """The recipe and those that it uses."""
        for name in (str(self._anew.source), *self._anew.sources):
            place = self._place(name)
            if place is None:
                self._wrong(
                    f"{name} is outside the workspace",
                    "keep it below the workspace, or name the workspace with -C",
                )
                continue
            self._files[place] = name
            word = Path(name).stem.partition("@")[0]
            if (
                place.startswith(f"{BUNDLED}/") and str(find(word, self._ws.root)) == name
            ):  # it is what the bare name means, too
                self._files[f"{BUNDLED}/{word}.yaml"] = name

    def taken(self, facts: Facts) -> None:
        """Inputs that are files or folders here: by content."""
        paths = {asked[1] for asked in facts.takes if asked[0] == "path"}
        typed = {value: name for name, values in self._anew.paths.items() for value in values}
        places = {}
        for address in sorted(paths | typed.keys()):
            if named := _PACK.fullmatch(address):
                found = self._holds([Content(f"{kind}:{named[1]}") for kind in "tfx"])
                if not found:
                    self._wrong(
                        f"{address} is not in the shared store",
                        "submit the folder itself once, or put it there with `recipe push`",
                    )
                for content in found:
                    places[address] = f"{_INPUTS}/{content[2:14]}/data"
                    self._inputs[places[address]] = content
                continue
            real = os.path.realpath(self._ws.absolute(address))
            if address not in typed and Path(real).is_relative_to(os.path.realpath(fixtures())):
                continue  # the program of the worker has it, too
            if not os.path.exists(real):
                self._wrong(
                    f"{address} is not there"
                    + (f" (the input {typed[address]})" if address in typed else ""),
                    "correct the path",
                )
                continue
            place = self._below(str(self._ws.absolute(address)))
            if place is None and address not in typed:
                self._wrong(
                    f"{address}, which the recipe names, is outside the workspace",
                    "take it as an input",
                )
                continue
            content = self._content(real)
            places[address] = place or f"{_INPUTS}/{content[2:14]}/{os.path.basename(real)}"
            self._send(places[address], content, real)
        for name, values in self._anew.paths.items():
            moved = {
                value: f"./{places[value]}"
                for value in values
                if value in places and os.path.normpath(value) != places[value]
            }
            whole = self._anew.plan.inputs[name]
            if moved:
                self._bound[name] = (
                    [_relocate(str(each), moved) for each in whole]
                    if isinstance(whole, list)
                    else _relocate(str(whole), moved)
                )

    def declared(self, facts: Facts) -> None:
        """Dependencies, code and locks."""
        for dep, content in facts.files.items():
            path = str(self._ws.root / dep)
            if content is None:
                self._wrong(
                    f"{dep}, which a step depends on, is not there", "make it, or correct `deps`"
                )
            elif total(os.path.realpath(path)) > INLINE:
                self._send(dep, Content(content), os.path.realpath(path))
            else:
                self._files[dep] = path
        homes = self._anew.plan.homes
        wanted = [
            f"{os.path.realpath(homes[home])}/{name}"
            for (home, _), found in facts.code.items()
            for name, _ in found
        ]
        for home, name in facts.locks:
            named = Path(homes[home], name)
            wanted += [
                str(each)
                for each in dict.fromkeys((named, locks.lock_file(named)))
                if each.exists()
            ]
        for path in wanted:
            place = self._place(path)
            if place is None:
                self._wrong(f"{path} is outside the workspace", "keep it below the workspace")
            else:
                self._files[place] = path
        for spec in self._anew.plan.specs():
            for url, _, _ in spec.git:
                if "://" not in url:
                    self._wrong(
                        f"{url} is a repository of this disk",
                        "name it by an address that the worker reaches",
                    )

    def globs(self) -> None:
        """What the recipe's globs match, so that they match it there, too."""
        for match in (
            each.rstrip("/") for matches in self._anew.looked.values() for each in matches
        ):
            if match not in self._files and match not in self._inputs:
                self._files.setdefault(match, str(self._ws.root / match))

    def bundle(self, facts: Facts) -> Bundle:
        from ..storage.sources import locked

        listed = json.dumps(
            {"inputs": sorted(self._inputs.items())}, separators=(",", ":")
        ).encode()
        known = locked(self._ws)
        pinned = {asked[1]: known[asked[1]] for asked in facts.takes if asked[1] in known}
        texts = {_LISTED: listed} | (
            {"recipe.lock": (json.dumps(pinned, indent=2, sort_keys=True) + "\n").encode()}
            if pinned
            else {}
        )
        whole = {
            match.rstrip("/") for matches in self._anew.looked.values() for match in matches
        } - facts.files.keys()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            members = {
                place: each
                for path, source in self._files.items()
                for place, each in _walk(path, source, empty=path in whole)
            }
            for place, source in sorted({**members, **dict.fromkeys(texts, "")}.items()):
                _add(archive, place, source, texts.get(place))
        data = out.getvalue()
        return Bundle(hashlib.sha256(data).hexdigest(), data, self._bound, self._at)

    def _send(self, place: str, content: Content, path: str) -> None:
        self._inputs[place] = content
        self._at[content] = path

    def _content(self, path: str) -> Content:
        content = self._ws.cache.content_of(path)
        assert content is not None  # it is there
        return Content(content)

    def _typed(self, path: Path) -> bool:
        return path == self._anew.source and is_path(self._anew.asked)

    def _below(self, path: str) -> str | None:
        """A path from the workspace, if it is there."""
        for root in (str(self._ws.root), os.path.realpath(self._ws.root)):
            if path.startswith(f"{root}/"):
                return os.path.normpath(path.removeprefix(f"{root}/"))
        return None

    def _place(self, path: str) -> str | None:
        """A path in the bundle."""
        if (below := self._below(path)) is not None:
            return below
        for folder in self._libraries:
            for base in (folder, os.path.realpath(folder)):
                if path.startswith(f"{base}/"):
                    return f"{BUNDLED}/{os.path.normpath(path.removeprefix(f'{base}/'))}"
        return None

    def _wrong(self, words: str, fix: str) -> None:
        self.problems.append(Problem("not-portable", words, fix=fix))


def _relocate(value: str, places: Mapping[str, str]) -> str:
    """A value of an input, where its file is in another place; what is behind a file's name, as in `FILE.py:NAME`, stays."""
    for file in (value, value.rpartition(":")[0]):
        if file in places:
            return places[file] + value.removeprefix(file)
    return value


def _walk(place: str, path: str, *, empty: bool) -> Iterator[tuple[str, str]]:
    """What is at a path: a file, or a folder with all that is in it, unless only its name is wanted."""
    yield place, path
    if not os.path.isdir(path) or empty:
        return
    for at, folders, names in os.walk(path):
        below = os.path.normpath(f"{place}/{os.path.relpath(at, path)}")
        for name in (*folders, *names):
            yield f"{below}/{name}", f"{at}/{name}"


def _add(archive: tarfile.TarFile, place: str, source: str, text: bytes | None) -> None:
    """Add a member that says nothing of this machine or of the time."""
    info = tarfile.TarInfo(place)
    info.mtime, info.mode = _MADE, 0o644
    nested = text is None and os.path.islink(source)
    if nested and not os.path.isabs(os.readlink(source)):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)
    elif text is None and os.path.isdir(source):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        if text is None:
            text = Path(source).read_bytes()
            info.mode = 0o755 if os.access(source, os.X_OK) else 0o644
        info.size = len(text)
    archive.addfile(info, io.BytesIO(text) if text is not None else None)
