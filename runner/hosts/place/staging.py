"""Make an attempt directory and take its results.

An attempt sees what its step declared, under the same relative names on every driver, as folders and files: code and small
files are copies, the rest are hard links to stored objects, in folders of the attempt's own.  Only what can be no object is a
link to the caller's own, or a folder of such links.  A directory that is only a model of one on a host has links in place of
folders and large files: the host's agent makes them real there.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import stat
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ...errors import CannotRun
from ...paths import escapes, heads
from ...planning.step import DIRECTORY, NONEMPTY, OPTIONAL, OutputSpec
from ...storage.content.digest_cache import DigestCache
from ...storage.content.disk import MODE, WRITABLE, delete, overwrite
from ...storage.content.files import Changed, Content, Unhashable, scan
from ...storage.content.giving import FULL
from ...storage.content.inputs import EACH_FILE, Source, StoredInputs
from ...storage.content.objects import Objects
from .overlays import CHANGES, Overlays
from .spare_dirs import Scrap, Spare

Mark: TypeAlias = tuple[int, int, int]
"""Inode, size, time of the last change."""
_LOOKED_AT = 10_000
"""Files of an attempt among which an output that was not made is looked for."""
SMALL = 64 << 10
"""Files up to this size are copied into an attempt, larger ones linked: bytes."""
LINKS = (
    "it is staged as symbolic links because {}. "
    "Use `tar -h` and `find -L`, or move the workspace to XFS, Btrfs, ZFS or APFS"
)
OVERLAY = ', or set `inputs = "overlay"` in recipe.toml'
MOUNTED = "it is mounted read-only because {}"
MANY_FILES = 50_000
MANY = (
    "it has {} files, and staging them takes about {:.0f} s for each step. "
    "Name fewer of them by a glob in `deps`, or pack them with `recipe pack`"
)
SECONDS_PER_FILE = 2e-5
HEAVY = 8 << 20
"""Bytes of an output from which on it is taken beside the loop."""


class OutputProblem(Exception):
    """What a command left is not what its step declares."""


class Workdir:
    """The directory of an attempt while it is filled: each folder is made once, and what an earlier attempt left is written over.

    At `path`, where nothing is before `begin`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: dict[str, None] = {}  # folders, each after the one it is in
        self._scrap: Scrap | None = None
        self._spare: list[str] = []  # files of an earlier attempt, to be written over
        self._aside = 0  # spare files that had a name which was wanted
        self._idle: dict[
            str, None
        ] = {}  # folders of an earlier attempt that were not asked for yet

    @property
    def begun(self) -> bool:
        return bool(self._made)

    @property
    def folders(self) -> tuple[str, ...]:
        """Those in it that were made here, each after the one it is in."""
        return tuple(folder[len(self._path) + 1 :] for folder in self._made if folder != self._path)

    def begin(self, scrap: Scrap | None = None) -> None:
        """Make it, or take one that an earlier attempt left."""
        self._scrap = scrap
        spare = scrap.take(self._path) if scrap is not None else None
        if spare is not None:
            self._made[self._path] = None
            self._idle = {f"{self._path}/{folder}": None for folder in spare.folders}
            self._spare = [f"{self._path}/{name}" for name in spare.files]
            return
        try:
            os.mkdir(self._path, 0o700)
        except FileNotFoundError:
            os.makedirs(self._path, 0o700, exist_ok=True)
        self._made[self._path] = None

    def target_of(self, name: str, whole: Sequence[Container[str]]) -> str:
        """The absolute path of `name`, whose parent exists afterwards.  Raises CannotRun for one outside, or in what is linked to: `whole`."""
        if ".." in name or name[0] == "/":
            if escapes(name):
                raise CannotRun(f'"{name}" leaves the attempt directory')
            name = posixpath.normpath(name)
        target = f"{self._path}/{name}"
        parent = target[: target.rindex("/")]
        if parent not in self._made:
            self._make(parent, whole)
        if target in self._spare:  # the name is wanted, the file is still spare
            self._set_aside(target)
        elif target in self._idle:
            for name in [name for name in self._spare if name.startswith(f"{target}/")]:
                self._set_aside(name)
            for folder in [
                folder for folder in reversed(self._idle) if f"{folder}/".startswith(f"{target}/")
            ]:
                os.rmdir(folder)
                del self._idle[folder]
        return target

    def _set_aside(self, spare: str) -> None:
        self._spare.remove(spare)
        self._aside += 1
        self._spare.append(f"{self._path}/.spare-{self._aside}")
        os.rename(spare, self._spare[-1])

    def _make(self, folder: str, whole: Sequence[Container[str]]) -> None:
        name = folder[len(self._path) + 1 :]
        if any(name in each for each in whole):
            raise CannotRun(
                f'something is to be put into "{name}", which the step is given as a whole: it would be mixed with the input',
                fix="write it elsewhere, or give the step single files instead of the folder",
            )
        above = folder[: folder.rindex("/")]
        if above not in self._made:
            self._make(above, whole)
        if folder in self._idle:
            del self._idle[folder]
        else:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        self._made[folder] = None

    def put(self, target: str, data: bytes, mode: int) -> Mark:
        """A small file of our own making."""
        if self._scrap is not None and not mode & stat.S_IXUSR:
            if self._spare:
                os.rename(self._spare.pop(), target)
                return _mark(overwrite(target, data, mode))
            if self._scrap.take_file(target):
                return _mark(overwrite(target, data, mode))
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            return _mark(os.fstat(handle))
        finally:
            os.close(handle)

    def ready(self) -> None:
        """Everything is staged: nothing of an earlier attempt may be left."""
        for name in self._spare:
            self._scrap.give_file(name) if self._scrap is not None else os.unlink(name)
        for folder in reversed(self._idle):
            os.rmdir(folder)
        self._spare, self._idle = [], {}


@dataclass(slots=True)
class AttemptDirectory:
    """One attempt directory and what was put there."""

    path: str
    called: str = ""  # its name on the host that it runs on, where that is another
    staged: dict[str, Mark] = field(
        default_factory=dict
    )  # name -> what the file system says of our copy
    links: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # name -> the caller's file or tree that is read in place, and its content
    mounted: dict[str, str] = field(
        default_factory=dict
    )  # name -> the path of one of them that a container is shown under that name
    objects: dict[str, str] = field(
        default_factory=dict
    )  # name -> the stored object that its files are other names of
    notices: dict[str, str] = field(
        default_factory=dict
    )  # name -> how an input is given, and why, where that is not as files of ours
    sources: dict[str, str] = field(
        default_factory=dict
    )  # caller's file that was copied -> the content that stands in the key
    doubtful: list[str] = field(
        default_factory=list
    )  # caller's files that were not what the key says when they were staged
    boxed: bool = False  # it runs in a container, which can be shown a path under another name
    overlays: Overlays | None = None  # its command may change what it is given
    _origins: dict[str, str] = field(
        default_factory=dict
    )  # name -> the path of the caller's that was given as a whole
    _waiting: dict[str, list[tuple[str, str | None, str, str]]] = field(
        default_factory=dict
    )  # large files that are declared together: the cache's name, content, path and name there of each
    _recorded: Mapping[str, Mapping[str, str]] | None = None
    _tiny: list[str] = field(default_factory=list)  # outputs that the store has a copy of
    _taken: dict[str, Content] = field(
        default_factory=dict
    )  # outputs whose files are links to stored objects
    folder: Workdir = field(init=False)
    """It, while it is filled."""

    def __post_init__(self) -> None:
        self.folder = Workdir(self.path)

    def target_of(self, name: str) -> str:
        """The absolute path of `name`, whose parent exists afterwards.  Raises CannotRun for one outside, or in what is linked to."""
        return self.folder.target_of(name, (self.links, self.objects))

    def add_path(
        self,
        cache: DigestCache,
        at: str,
        content: str | None,
        source: str,
        name: str,
        *,
        inputs: StoredInputs | None = None,
        copy: bool = False,
        group: str = "",
    ) -> None:
        """A file or folder of the caller's, which the cache knows as `at`; `content` is what stands for it in the key, None for anything.

        `copy`: it is code, a copy of any size that may be written to, though a step that does so fails.
        Without `inputs` a folder or a large file is a link, for a host to make of it what it is.  Large files of one `group`
        are there after `give_files`.
        """
        if name in self.staged or self._is_in_given(source, name):
            return  # two patterns of the recipe name one file, or one names the folder that it is in
        target = self.target_of(name)
        found = os.stat(source)
        is_file = stat.S_ISREG(found.st_mode)
        if is_file and (copy or found.st_size <= SMALL):
            with open(source, "rb", buffering=0) as file:
                data = file.read(found.st_size + 1)
                if len(data) != found.st_size:
                    data += file.readall()
            executable = bool(found.st_mode & stat.S_IXUSR)
            self._put_small(name, target, data, executable, writable=copy)
            if content is not None:
                self.sources[at] = content
            return
        self._origins[name] = source
        if inputs is None:
            os.symlink(os.path.realpath(source), target)
            self._note_link(cache, at, content, name)
        elif is_file:
            self._waiting.setdefault(group or name, []).append((at, content, source, name))
        else:
            self._give(cache, inputs, (at, content, source, name))

    def _put_small(
        self, name: str, target: str, data: bytes, executable: bool, *, writable: bool = False
    ) -> None:
        """Put a small file there, read-only unless it may be written to."""
        mode = MODE["x" if executable else "f"]
        if writable or self.overlays is not None:
            mode |= stat.S_IWUSR
        self.staged[name] = self.folder.put(target, data, mode)

    def give_files(self, cache: DigestCache, inputs: StoredInputs) -> None:
        """Put the large files of the caller's there that `add_path` was told of."""
        for waiting in self._waiting.values():
            together = sum(os.stat(source).st_size + EACH_FILE for _, _, source, _ in waiting)
            for each in waiting:
                self._give(cache, inputs, each, together)
        self._waiting = {}

    def _give(
        self,
        cache: DigestCache,
        inputs: StoredInputs,
        given: tuple[str, str | None, str, str],
        together: int = 0,
    ) -> None:
        """Put a folder or a large file of the caller's there as an object, or else as what leads to it."""
        at, content, source, name = given
        path = os.path.realpath(source)
        known = Content(content or cache.content_of(at) or "")
        why = inputs.keep(Source(at, path, known), together) if known else "it is gone"
        if why:
            overlays = self.overlays
            is_overlaid = overlays is not None and not overlays.refusal(path)
            if self.boxed or is_overlaid:
                self._mount(path, name)
                if self.boxed:
                    self.notices[name] = MOUNTED.format(why)
            else:
                self.notices[name] = LINKS.format(why) + (OVERLAY if overlays is None else "")
                self._link(inputs, Source(at, path, known), name)
            self._note_link(cache, at, content, name)
            return
        self._add_files(inputs.objects, known, name)

    def _add_files(self, objects: Objects, content: Content, name: str, below: str = "") -> None:
        if why := objects.give(content, f"{self.path}/{name}", below):
            self.notices[name] = why if why == FULL else LINKS.format(why)
        elif content[0] == "t" and (count := len(objects.entries(content))) > MANY_FILES:
            self.notices[name] = MANY.format(f"{count:,}", count * SECONDS_PER_FILE)
        self.objects[name] = content

    def _link(self, inputs: StoredInputs, source: Source, name: str) -> None:
        """Have a link to the caller's own file under a name, or a folder of such links."""
        target = f"{self.path}/{name}"
        if not os.path.isdir(source.path):
            os.symlink(source.path, target)
            return
        count = inputs.link_to(source, target)
        if count > MANY_FILES:
            words = MANY.format(f"{count:,}", count * SECONDS_PER_FILE)
            self.notices[name] += f". I{words[1:]}"

    def _mount(self, path: str, name: str) -> None:
        """Have the caller's own file or folder shown under a name when the command begins."""
        self.mounted[name] = path
        if os.path.isdir(path):
            os.mkdir(f"{self.path}/{name}")
        else:
            self.add_bytes(b"", name)

    @property
    def shown(self) -> dict[str, str]:
        """Folders and files that it was given as a whole, and the path of what each shows, its own or the caller's."""
        return {name: f"{self.path}/{name}" for name in self.objects} | self.mounted

    def _note_link(self, cache: DigestCache, at: str, content: str | None, name: str) -> None:
        now = cache.content_of(at)
        if now is None or now != (content or now):
            self.doubtful.append(at)
        self.links[name] = (at, now or "")

    def _is_in_given(self, source: str, name: str) -> bool:
        """Whether a file of the caller's is there already, or in a folder that was given as a whole."""
        return any(
            self._origins[head] + name[len(head) :] == source
            for head in (heads(name) if self._origins else ())
            if head in self._origins
        )

    def add_object(
        self, objects: Objects, content: str, name: str, *, by_link: bool = False
    ) -> None:
        """An output of an earlier step.  `by_link`: for a host to make of it what it is."""
        target, known = self.target_of(name), Content(content)
        small = objects.small(known)
        if small is not None:
            self._put_small(name, target, small, content[0] == "x")
            return
        objects.demand(known)
        if by_link:
            os.symlink(objects.path(known), target)
            self.objects[name] = content
        else:
            self._add_files(objects, known, name)

    def add_part(self, objects: Objects, content: str, below: str, name: str) -> None:
        """A file or folder in a folder that an earlier step made."""
        target, source = self.target_of(name), f"{objects.path(Content(content))}/{below}"
        objects.demand(Content(content))
        found = os.stat(source)
        if stat.S_ISREG(found.st_mode) and found.st_size <= SMALL:
            data = Path(source).read_bytes()
            executable = bool(found.st_mode & stat.S_IXUSR)
            self._put_small(name, target, data, executable)
        else:
            self._add_files(objects, Content(content), name, below)

    # -- after a worker was killed

    def note_given(self) -> None:
        """Write down, beside the attempt, what it was given of objects and of the caller's own: a worker that comes after this one looks there."""
        if self.objects or self.links:
            given = {
                "objects": self.objects,
                "links": {name: content for name, (_, content) in self.links.items()},
            }
            with open(f"{self.path}.given", "w", encoding="utf-8") as file:
                json.dump(given, file)

    def forget_given(self) -> None:
        """Delete that, and what the command changed of its inputs."""
        if self.overlays is not None:
            delete(Path(self.path + CHANGES))
        if self.objects or self.links:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}.given")

    @property
    def _given(self) -> Mapping[str, Mapping[str, str]]:
        """What an earlier worker wrote down."""
        if self._recorded is None:
            try:
                with open(f"{self.path}.given", encoding="utf-8") as file:
                    self._recorded = json.load(file)
            except (FileNotFoundError, ValueError):
                self._recorded = {"objects": {}, "links": {}}
            self.objects.update(self._recorded["objects"])
        return self._recorded

    def recall_path(
        self, cache: DigestCache, at: str, content: str, source: str, name: str
    ) -> bool:
        """What `add_path` of an earlier worker put there: whether it is what stands in the key, and its source, too."""
        if name in self.staged or self._is_in_given(source, name):
            return True
        if (known := self._given["objects"].get(name)) is not None:
            self._origins[name] = source
            return known == content  # whatever happened to the source since
        if (known := self._given["links"].get(name)) is not None:
            self._origins[name] = source
            self.links[name] = (at, known)
            return known == content == _content_now(cache, at)
        self.sources[at] = content
        return self._recall_copy(content, name) and _content_now(cache, at) == content

    def recall_object(self, content: str, name: str) -> bool:
        """The same of what `add_object` put there."""
        known = self._given["objects"].get(name)
        return known == content if known is not None else self._recall_copy(content, name)

    def _recall_copy(self, content: str, name: str) -> bool:
        target = f"{self.path}/{name}"
        self.staged[name] = _look(target) or (0, 0, 0)
        return os.path.isfile(target) and scan(target) == content

    def was_given(self, name: str, mode: int) -> bool:
        """Whether a file or folder of the attempt, of that mode, is one that it was given, and none that the command made."""
        if name in self.staged or stat.S_ISLNK(mode):
            return True
        return (stat.S_ISDIR(mode) or not mode & WRITABLE) and any(
            head in self.objects or head in self.links for head in heads(name)
        )

    def add_bytes(self, data: bytes, name: str) -> None:
        """A file of the recipe's, also in place of an input: that one is never written to."""
        target = self.target_of(name)
        if name in self.objects or name in self.links or name in self.staged:
            os.unlink(target)
            self.staged.pop(name, None)
        with open(target, "wb") as file:
            file.write(data)

    def prepare_outputs(self, outputs: Sequence[OutputSpec]) -> None:
        for _, path, flags in outputs:
            target = self.target_of(path)
            if flags & DIRECTORY:
                os.makedirs(target, exist_ok=True)

    def tampered(self, cache: DigestCache, objects: Objects) -> str:
        """Which input is not what the step was given, in words; empty when all are.

        It alone can have changed a copy or an object, and it or its caller what it read in place.
        """
        changed = [
            name
            for name, mark in self.staged.items()
            if self.overlays is None and _look(f"{self.path}/{name}") != mark
        ]
        changed += [
            name
            for name, content in self.objects.items()
            # one may be at its host alone, and a `gc` may have deleted it since
            if objects.has(Content(content)) and not objects.intact(Content(content))
        ]
        if changed:
            return f"it changed its input {changed[0]}"
        changed = [
            name for name, (at, content) in self.links.items() if _content_now(cache, at) != content
        ]
        return (
            f"it, or another process meanwhile, changed its input {changed[0]}" if changed else ""
        )

    def stale(self, cache: DigestCache) -> list[str]:
        """Sources that are no longer, or were not, what the key says: what the step read is not certain."""
        try:
            return self.doubtful + [
                at for at, now in cache.contents(self.sources).items() if now != self.sources[at]
            ]
        except Changed as error:
            return [*self.doubtful, error.path]

    def heavy(self, outputs: Sequence[OutputSpec]) -> bool:
        """Whether taking the outputs would hold up the caller that waits for it."""
        for _, path, _flags in outputs:
            try:
                found = os.stat(f"{self.path}/{path}")
            except OSError:
                continue
            if found.st_size > HEAVY or stat.S_ISDIR(found.st_mode):
                return True
        return False

    def collect(
        self, outputs: Sequence[OutputSpec], objects: Objects, below_state: Iterable[str] = ()
    ) -> dict[str, str]:
        """Take every output into the store: output name -> content.  Raises OutputProblem naming all that is wrong.

        All of it stays here until `retire`, so that a worker that comes after a kill can do the same again.
        """
        wrong: list[str] = []
        found: dict[str, str] = {}
        kept = tuple(below_state)
        for name, path, flags in outputs:
            target = f"{self.path}/{path}"
            try:
                here = os.lstat(target)
            except OSError:
                if not flags & OPTIONAL:
                    wrong.append(f"declared output {path} was not made{self._elsewhere(path)}")
                continue
            if self._leads_out(path, kept):
                wrong.append(
                    f"declared output {path} is behind a link that leads out of the attempt directory"
                )
                continue
            plain = stat.S_ISREG(here.st_mode)
            if flags & NONEMPTY and (here.st_size == 0 if plain else _empty(target)):
                wrong.append(f"declared output {path} is empty, which the recipe forbids")
                continue
            if flags & DIRECTORY and (plain or not os.path.isdir(target)):
                wrong.append(f"declared output {path}/ is not a directory")
                continue
            try:
                if stat.S_ISLNK(here.st_mode) or (
                    kept and any(path == k or path.startswith(k + "/") for k in kept)
                ):
                    content = scan(target)
                    objects.put(Path(os.path.realpath(target)), content, move=False)
                elif plain and (tiny := objects.tiny.remember(target, here)) is not None:
                    content = tiny
                    self._tiny.append(path)
                else:
                    content = self._taken[path] = objects.take(target, here if plain else None)
            except Unhashable as error:
                wrong.append(str(error).replace(self.path + "/", ""))
                continue
            found[name] = content
        if wrong:
            raise OutputProblem("; ".join(wrong))
        return found

    def _elsewhere(self, path: str) -> str:
        """Where the command made a file of this name instead."""
        name, looked = posixpath.basename(path), 0
        for at, folders, files in os.walk(self.path):
            found = os.path.relpath(f"{at}/{name}", self.path)
            if name in files or name in folders:
                mode = os.lstat(f"{self.path}/{found}").st_mode
                if not self.was_given(found, mode):
                    return f"; {found} was made: did the script cd?"
            looked += len(files)
            if looked > _LOOKED_AT:
                break
        return ""

    def whole(self, outputs: Sequence[OutputSpec]) -> bool:
        """Whether every output that has to be there is."""
        return all(
            os.path.lexists(f"{self.path}/{path}")
            for _, path, flags in outputs
            if not flags & OPTIONAL
        )

    def _leads_out(self, path: str, kept: Iterable[str]) -> bool:
        """Whether a folder above an output is a link to somewhere else; a state, where outputs may lie, is one of ours."""
        links = [
            head
            for head in heads(path)[1:]
            if os.path.islink(f"{self.path}/{head}") and head not in kept
        ]
        root = f"{os.path.realpath(self.path)}/"
        return any(
            not f"{os.path.realpath(f'{self.path}/{head}')}/".startswith(root) for head in links
        )

    def taken(self) -> dict[str, str]:
        """Outputs that a host was moving among its objects when a worker died: name -> content."""
        try:
            with open(f"{self.path}.taken", encoding="utf-8") as file:
                return dict(line.rstrip("\n").split("\t") for line in file if line.endswith("\n"))
        except FileNotFoundError:
            return {}

    def note(self, name: str, content: str) -> None:
        """Write down, beside the attempt, what an output is that its host is about to move: see `taken`."""
        with open(f"{self.path}.taken", "a", encoding="utf-8") as file:
            file.write(f"{name}\t{content}\n")

    def retire(self, scrap: Scrap) -> Callable[[], None] | None:
        """The directory is done with: a spare for the next attempt if it holds what we put there and nothing else, or else to be deleted.

        First it loses its name, so that no worker that comes after a kill takes what is left of it for all that the command made.  Answers what
        remains to be done when that may take a while.
        """
        try:
            gone = scrap.named(self.path)
        except FileNotFoundError:
            return None
        self.forget_given()
        trees = (*self._taken.values(), *self.objects.values())
        if any(content[0] == "t" for content in trees) or self.links:
            return partial(delete, Path(gone))
        if self.folder.begun and not self.objects:
            for path in self._taken:
                delete(Path(gone, path))
            with contextlib.suppress(OSError):  # something of it is gone, or cannot be read
                if scrap.give(Spare(gone, self.folder.folders, (*self.staged, *self._tiny))):
                    return None
        delete(Path(gone))
        return None


def undeclared_file(
    log_tail: str, workspace: Path, attempt: str, declared: Iterable[str]
) -> str | None:
    """A workspace file whose name a failed command printed, also as a path in its attempt directory, and that its step did not declare."""
    import re

    have = set(declared)
    for word in re.findall(
        r"[\w./+@-]*[\w+-]\.\w+|[\w+-]*(?:/[\w.+-]+)+", log_tail.replace(f"{attempt}/", "")
    ):
        name: str = posixpath.normpath(word.removeprefix(f"{workspace}/"))
        # A program may call what it was given by its last name: inputs/dataset/rows.csv is rows.csv to it.
        inside = any(
            name.startswith(f"{folder}/") or posixpath.basename(folder) == name for folder in have
        )
        if (
            not name.startswith(("/", "..", ".recipe"))
            and name != "."
            and name not in have
            and not inside
            and (workspace / name).exists()
        ):
            return name
    return None


def _mark(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _look(path: str) -> Mark | None:
    try:
        return _mark(os.stat(path))
    except OSError:
        return None


def _content_now(cache: DigestCache, at: str) -> str:
    """What a caller's path holds; empty when there is nothing, or nothing that holds still."""
    try:
        return cache.content_of(at) or ""
    except Changed:
        return ""


def _empty(path: str) -> bool:
    if os.path.isdir(path):
        with os.scandir(path) as items:
            return next(items, None) is None
    return os.path.getsize(path) == 0
