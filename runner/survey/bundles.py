"""Bundles: the files that a worker on another machine needs for a run.

Small files are in one archive, large inputs in the shared store.

Files below the workspace keep their paths, so that the recipe and its globs find the same files on
the worker. Library recipes are in `.library` with their code and locks, and inputs from outside the
workspace in `.inputs`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import CannotRun, Corrupt, Invalid, Problem
from ..language.library import find, fixtures
from ..paths import BUNDLED, escapes, heads, is_path, temporary_name
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
"""Maximum bytes of an archive in the run database. A larger archive is in the shared store."""
INLINE: Final = 1 << 20
"""Maximum bytes of a dependency in the archive. A larger dependency is in the shared store."""
_LISTED: Final = ".bundle.json"
_INPUTS: Final = ".inputs"
_PACK: Final = re.compile(r"pack:([0-9a-f]{64})")
"""An input given by its content digest, as printed by `recipe pack`, without the kind."""
_MADE: Final = 315532800
"""Modification time of all files in an archive: 1980."""


class Bundle(NamedTuple):
    """A bundle archive and its SHA-256.

    `bound` has the inputs with their paths on the worker. `contents` maps contents for the shared
    store to local paths.
    """

    digest: str
    data: bytes
    bound: Mapping[str, Tree]
    contents: Mapping[Content, str]


def pack(
    ws: Workspace,
    request: Request,
    holds: Callable[[list[Content]], set[Content]] = lambda _contents: set(),
) -> Bundle:
    """Bundle the files that a run needs on a worker.

    `holds` returns which contents the shared store has, for inputs given by digest. Raises
    NotFound, and Invalid with all problems of the inputs and files.
    """
    compiled = compile_from_files(ws, request)
    builder = _BundleBuilder(ws, compiled, holds)
    builder.check_request(request)
    facts = collect_facts(ws, compiled.plan, request)
    builder.add_recipes()
    builder.add_inputs(facts)
    builder.add_dependencies(facts)
    builder.add_code(facts)
    builder.add_locks(facts)
    builder.check_repositories()
    builder.add_glob_matches()
    if builder.problems:
        raise Invalid(list(dict.fromkeys(builder.problems)))
    return builder.build(facts)


def unpack(
    ws: Workspace, digest: str, data: bytes, bring: Callable[[list[Content]], set[Content]]
) -> Path:
    """Unpack a bundle once into the worker's store, and return the bundle's directory.

    `bring` fetches contents into the workspace's objects, and returns the missing ones. Raises
    Corrupt, CannotRun.
    """
    folder = ws.home / "bundles" / digest[:32]
    if folder.is_dir():
        os.utime(folder)
        return folder
    if hashlib.sha256(data).hexdigest() != digest:
        raise Corrupt(
            f"the bundle {digest[:12]} is damaged: its content does not match its digest",
            fix="submit the run again",
        )
    new = folder.with_name(temporary_name(folder.name))
    new.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            _check_members(archive)
            archive.extractall(new)  # noqa: S202 - the members are checked
        _place_inputs(ws, new, bring)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise Corrupt(
            f"the bundle {digest[:12]} cannot be unpacked: {error}", fix="submit the run again"
        ) from error
    finally:
        delete(new)
    return folder


def _place_inputs(
    ws: Workspace, folder: Path, bring: Callable[[list[Content]], set[Content]]
) -> None:
    """Place the inputs of an unpacked bundle at their listed paths. Raises CannotRun."""
    listed: list[tuple[str, str]] = json.loads((folder / _LISTED).read_text("utf-8"))["inputs"]
    missing = bring([Content(content) for _, content in listed])
    if missing:
        names = ", ".join(path for path, content in listed if content in missing)
        raise CannotRun(
            f"the shared store is missing {names}",
            fix="submit the run again to upload them",
        )
    for path, content in listed:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        ws.objects.copy_to(Content(content), target, link=True)


def find_packed(ws: Workspace, address: str) -> Content | None:
    """Return the stored content for a `pack:SHA256` address, or None for any other address.

    Raises CannotRun if the shared store lacks the content.
    """
    named = _PACK.fullmatch(address)
    if named is None:
        return None
    cache = ws.remote_cache
    if cache is None:
        raise CannotRun(
            f"{address} is an address in a shared store, but no shared store is set",
            fix='set `store = "NAME"` in recipe.toml',
        )
    found = cache.remote.holds([Content(f"{kind}:{named[1]}") for kind in "tfx"])
    if not found:
        raise CannotRun(
            f"{address} is not in the shared store",
            fix="upload the data with `recipe push`, or submit the directory itself once",
        )
    return min(found)


def fetch_packed_inputs(ws: Workspace, request: Request) -> Request:
    """Replace `pack:SHA256` inputs of a request by local paths, downloading the contents.

    Raises CannotRun.
    """
    inputs = {name: _fetch_packed(ws, value) for name, value in request.inputs.items()}
    return request if inputs == request.inputs else replace(request, inputs=inputs)


def _fetch_packed(ws: Workspace, value: object) -> object:
    if isinstance(value, list):
        return [_fetch_packed(ws, each) for each in value]
    if not isinstance(value, str):
        return value
    content = find_packed(ws, value)
    if content is None:
        return value
    place = ws.home / "cache" / f"pack-{content[2:34]}" / "data"
    if not place.exists():
        if ws.remote_cache is None or ws.remote_cache.bring([content]):
            raise CannotRun(
                f"cannot fetch {value} from the shared store",
                fix="test the store with `recipe doctor`",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        ws.objects.copy_to(content, place, link=True)
    # `recipe gc` removes what was not written for some days; this input is in use.
    os.utime(place.parent)
    return str(place)


class _BundleBuilder:
    """Builder that collects a bundle's files by bundle path, and all problems."""

    def __init__(
        self,
        ws: Workspace,
        compiled: CompiledFromFiles,
        holds: Callable[[list[Content]], set[Content]],
    ) -> None:
        self._ws, self._compiled, self._holds = ws, compiled, holds
        self._files: dict[str, str] = {}  # path in the bundle -> local path
        self._inputs: dict[str, Content] = {}  # path in the bundle -> content
        self._sources: dict[Content, str] = {}  # content -> local path
        self._bound: dict[str, Tree] = {}
        self.problems: list[Problem] = []
        self._libraries = self._find_libraries()

    def _find_libraries(self) -> list[str]:
        """Return the directories of the library recipes that the run uses."""
        found: set[str] = set()
        for path in self._recipe_files():
            if self._below_root(str(path)) is None and not self._is_given_path(path):
                found.add(str(path.parent))
        return sorted(found)

    def check_request(self, request: Request) -> None:
        """Report options that only apply to this machine."""
        if request.current_python:
            self._report(
                "`--python current` means the Python of this machine, but workers run on other machines",
                "lock the packages, or pass `--here`",
            )

    def add_recipes(self) -> None:
        """Add the recipe and its used recipes."""
        for path in self._recipe_files():
            name = str(path)
            place = self._place(name)
            if place is None:
                self._report(
                    f"{name} is outside the workspace",
                    "move the file below the workspace, or select the workspace with `-C`",
                )
                continue
            self._files[place] = name
            word = path.stem.partition("@")[0]
            if place.startswith(f"{BUNDLED}/") and str(find(word, self._ws.root)) == name:
                # The recipe's bare name also selects this version.
                self._files[f"{BUNDLED}/{word}.yaml"] = name

    def add_inputs(self, facts: Facts) -> None:
        """Add local input files and directories, by content."""
        given: dict[str, str] = {}
        for name, values in self._compiled.paths.items():
            given |= dict.fromkeys(values, name)
        taken = {address for kind, address, *_ in facts.takes if kind == "path"}
        places = {}
        for address in sorted(taken | given.keys()):
            if _PACK.fullmatch(address):
                place = self._add_packed(address)
            else:
                place = self._add_input(address, given.get(address))
            if place is not None:
                places[address] = place
        for name, values in self._compiled.paths.items():
            self._bind_moved(name, values, places)

    def _add_packed(self, address: str) -> str | None:
        """Add an input given as `pack:SHA256`, and return its path in the bundle."""
        digest = address.removeprefix("pack:")
        found = self._holds([Content(f"{kind}:{digest}") for kind in "tfx"])
        if not found:
            self._report(
                f"{address} is not in the shared store",
                "submit the directory itself once, or upload the data with `recipe push`",
            )
            return None
        place = f"{_INPUTS}/{digest[:12]}/data"
        for content in found:
            self._inputs[place] = content
        return place

    def _add_input(self, address: str, input: str | None) -> str | None:
        """Add a local input file or directory, and return its path in the bundle.

        `input` is the name of the input, None for a path from the recipe.
        """
        real = os.path.realpath(self._ws.absolute(address))
        if input is None and Path(real).is_relative_to(os.path.realpath(fixtures())):
            return None  # the worker's installation has the file too
        if not os.path.exists(real):
            of_input = f" (the input {input})" if input is not None else ""
            self._report(f"{address} does not exist{of_input}", "correct the path")
            return None
        place = self._below_root(str(self._ws.absolute(address)))
        if place is None and input is None:
            self._report(
                f"the recipe uses {address}, which is outside the workspace",
                "pass the file as an input",
            )
            return None
        content = self._content_of(real)
        place = place or f"{_INPUTS}/{content[2:14]}/{os.path.basename(real)}"
        self._send(place, content, real)
        return place

    def _bind_moved(self, name: str, values: Sequence[str], places: Mapping[str, str]) -> None:
        """Set the new value of an input whose files move to another path in the bundle."""
        moved: dict[str, str] = {}
        for value in values:
            place = places.get(value)
            if place is not None and os.path.normpath(value) != place:
                moved[value] = f"./{place}"
        if not moved:
            return
        bound = self._compiled.plan.inputs[name]
        if isinstance(bound, list):
            self._bound[name] = [_relocate(str(each), moved) for each in bound]
        else:
            self._bound[name] = _relocate(str(bound), moved)

    def add_dependencies(self, facts: Facts) -> None:
        """Add the files of `deps`. Large files are added by content."""
        for dep, content in facts.files.items():
            path = str(self._ws.root / dep)
            if content is None:
                self._report(
                    f"{dep}, a dependency of a step, does not exist",
                    "create the file, or correct `deps`",
                )
            elif total(os.path.realpath(path)) > INLINE:
                self._send(dep, Content(content), os.path.realpath(path))
            else:
                self._files[dep] = path

    def add_code(self, facts: Facts) -> None:
        """Add the files of all `code` entries to the bundle."""
        homes = self._compiled.plan.homes
        for (home, _), found in facts.code.items():
            for name, _ in found:
                self._add_file(f"{os.path.realpath(homes[home])}/{name}")

    def add_locks(self, facts: Facts) -> None:
        """Add lock files and their requirements files."""
        for home, name in facts.locks:
            named = Path(self._compiled.plan.homes[home], name)
            for path in dict.fromkeys((named, locks.lock_file(named))):
                if path.exists():
                    self._add_file(str(path))

    def _add_file(self, path: str) -> None:
        place = self._place(path)
        if place is None:
            self._report(f"{path} is outside the workspace", "move the file below the workspace")
        else:
            self._files[place] = path

    def check_repositories(self) -> None:
        """Report `code` repositories on the local disk, which a worker elsewhere cannot read."""
        for spec in self._compiled.plan.specs():
            for url, _, _ in spec.git:
                if "://" not in url:
                    self._report(
                        f"the repository {url} is on this machine, out of reach of workers",
                        "use a repository URL that the worker can reach",
                    )

    def add_glob_matches(self) -> None:
        """Add all files matched by the recipe's globs, so that they match on the worker too."""
        for match in self._glob_matches():
            if match not in self._files and match not in self._inputs:
                self._files[match] = str(self._ws.root / match)

    def _glob_matches(self) -> set[str]:
        found: set[str] = set()
        for matches in self._compiled.looked.values():
            found.update(match.rstrip("/") for match in matches)
        return found

    def build(self, facts: Facts) -> Bundle:
        """Build the archive of the collected files."""
        inputs = {"inputs": sorted(self._inputs.items())}
        texts = {_LISTED: json.dumps(inputs, separators=(",", ":")).encode()}
        pinned = self._pinned_revisions(facts)
        if pinned:
            texts["recipe.lock"] = (json.dumps(pinned, indent=2, sort_keys=True) + "\n").encode()
        # A directory that only a glob matched is added empty.
        names_only = self._glob_matches() - facts.files.keys()
        members: dict[str, str] = {}
        for path, start in self._files.items():
            members.update(_walk(path, start, empty=path in names_only))
        members |= dict.fromkeys(texts, "")
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for place, source in sorted(members.items()):
                _add(archive, place, source, texts.get(place))
        data = out.getvalue()
        return Bundle(hashlib.sha256(data).hexdigest(), data, self._bound, self._sources)

    def _pinned_revisions(self, facts: Facts) -> dict[str, object]:
        """Return the plan's pinned revisions from recipe.lock."""
        from ..storage.sources import read_lock

        known = read_lock(self._ws)
        return {address: known[address] for _, address, *_ in facts.takes if address in known}

    def _send(self, place: str, content: Content, path: str) -> None:
        self._inputs[place] = content
        self._sources[content] = path

    def _content_of(self, path: str) -> Content:
        content = self._ws.cache.content_of(path)
        assert content is not None  # the caller has checked that the path exists
        return Content(content)

    def _recipe_files(self) -> list[Path]:
        return [self._compiled.source, *map(Path, self._compiled.sources)]

    def _is_given_path(self, path: Path) -> bool:
        return path == self._compiled.source and is_path(self._compiled.asked)

    def _below_root(self, path: str) -> str | None:
        """Return a path relative to the workspace, or None if it is outside."""
        for root in (str(self._ws.root), os.path.realpath(self._ws.root)):
            if path.startswith(f"{root}/"):
                return os.path.normpath(path.removeprefix(f"{root}/"))
        return None

    def _place(self, path: str) -> str | None:
        """Return a file's path in the bundle, or None if the file cannot be bundled."""
        below = self._below_root(path)
        if below is not None:
            return below
        for folder in self._libraries:
            for base in (folder, os.path.realpath(folder)):
                if path.startswith(f"{base}/"):
                    return f"{BUNDLED}/{os.path.normpath(path.removeprefix(f'{base}/'))}"
        return None

    def _report(self, words: str, fix: str) -> None:
        self.problems.append(Problem("not-portable", words, fix=fix))


def _relocate(value: str, places: Mapping[str, str]) -> str:
    """Return an input value with the new path of its file, keeping suffixes such as `:NAME`."""
    for file in (value, value.rpartition(":")[0]):
        if file in places:
            return places[file] + value.removeprefix(file)
    return value


def _walk(place: str, path: str, *, empty: bool) -> Iterator[tuple[str, str]]:
    """Yield a file, or a directory with its contents. With `empty`, yield only the path itself."""
    yield place, path
    if not os.path.isdir(path) or empty:
        return
    for at, folders, names in os.walk(path):
        below = os.path.normpath(f"{place}/{os.path.relpath(at, path)}")
        for name in (*folders, *names):
            yield f"{below}/{name}", f"{at}/{name}"


def _check_members(archive: tarfile.TarFile) -> None:
    """Refuse members that would be extracted outside of the target directory.

    Python has filters for this from 3.11.4 on; earlier versions extract everything. Raises
    tarfile.TarError.
    """
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    links = set[str]()
    for member in archive:
        below_link = not links.isdisjoint(heads(posixpath.normpath(member.name))[1:])
        if escapes(member.name) or below_link:
            raise tarfile.TarError(f'"{member.name}" is outside of the bundle')
        if member.issym():
            links.add(posixpath.normpath(member.name))
            if escapes(posixpath.join(posixpath.dirname(member.name), member.linkname)):
                raise tarfile.TarError(f'"{member.name}" links outside of the bundle')
        elif not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f'"{member.name}" is not a file')


def _add(archive: tarfile.TarFile, place: str, source: str, text: bytes | None) -> None:
    """Add a file to an archive without owners or times, so that the archive is reproducible."""
    info = tarfile.TarInfo(place)
    info.mtime, info.mode = _MADE, 0o644
    if text is None:
        text = _read_member(info, source)
    if text is None:
        archive.addfile(info)
        return
    info.size = len(text)
    archive.addfile(info, io.BytesIO(text))


def _read_member(info: tarfile.TarInfo, source: str) -> bytes | None:
    """Set the type and mode of a member, and return its text: None for links and directories."""
    # An absolute link would dangle on the worker.
    if os.path.islink(source) and not os.path.isabs(os.readlink(source)):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)
        return None
    if os.path.isdir(source):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        return None
    info.mode = 0o755 if os.access(source, os.X_OK) else 0o644
    return Path(source).read_bytes()
