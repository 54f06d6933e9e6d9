"""Create attempt directories and collect their outputs.

An attempt sees its declared inputs as files and directories under the same relative names on every
driver.  Code and small files are copies, other inputs are hard links to stored objects.  An input
that cannot be stored as an object is a symbolic link to the original, or a directory of such links.
For a host with a disk of its own, the local directory has symbolic links instead of directories and
large files, and the host's agent replaces them there.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import stat
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...agent.outputs import find_changed_copies, find_mark, look_at_output, mark_of
from ...errors import CannotRun
from ...paths import escapes, heads
from ...planning.step import DIRECTORY, MISSING, NONEMPTY, OPTIONAL, OutputSpec
from ...storage.content.digest_cache import DigestCache
from ...storage.content.disk import MODE, WRITABLE, delete, overwrite
from ...storage.content.files import Changed, Content, Unhashable, scan
from ...storage.content.giving import FULL
from ...storage.content.inputs import EACH_FILE, InputSource, StoredInputs
from ...storage.content.objects import Objects
from .outputs import find_output_problem, is_in_state
from .overlays import CHANGES, Overlays
from .spare_dirs import SpareFolder, SparePool

if TYPE_CHECKING:
    from ...agent.outputs import Mark

_LOOKED_AT = 10_000
"""Files of an attempt to search for a missing output."""
SMALL = 64 << 10
"""Size in bytes up to which files are copied into an attempt; larger files are linked."""
LINKS = (
    "it is staged as symbolic links because {}. "
    "Use `tar -h` and `find -L`, or move the workspace to XFS, Btrfs, ZFS or APFS"
)
OVERLAY = ', or set `inputs = "overlay"` in recipe.toml'
MOUNTED = "it is mounted read-only because {}"
MANY_FILES = 50_000
MANY = (
    "it has {} files, and staging them takes about {:.0f} s for each step. "
    "Select fewer files by a glob in `deps`, or pack them with `recipe pack`"
)
SECONDS_PER_FILE = 2e-5
HEAVY = 8 << 20
"""Size in bytes of an output from which a thread collects it instead of the event loop."""


class OutputProblem(Exception):
    """The outputs do not match the step's declaration."""


class Workdir:
    """An attempt directory while it is filled.

    Directories are created once, and files of a spare directory are overwritten.

    `path` must not exist before `begin`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: dict[str, None] = {}  # created directories, parents first
        self._scrap: SparePool | None = None
        self._spare: list[str] = []  # spare files, to be overwritten
        self._aside = 0  # number of spare files renamed because their name was needed
        self._idle: dict[str, None] = {}  # spare directories that are not used yet

    @property
    def is_begun(self) -> bool:
        return bool(self._made)

    @property
    def folders(self) -> tuple[str, ...]:
        """The created subdirectories, parents first."""
        subfolders = [folder for folder in self._made if folder != self._path]
        return tuple(folder[len(self._path) + 1 :] for folder in subfolders)

    def begin(self, scrap: SparePool | None = None) -> None:
        """Create the directory, or reuse a spare one."""
        self._scrap = scrap
        spare = scrap.take_folder(self._path) if scrap is not None else None
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
        """Return the absolute path of `name` and create its parent.

        Raises CannotRun if it is outside, or below an input in `whole`.
        """
        if ".." in name or name[0] == "/":
            if escapes(name):
                raise CannotRun(f'"{name}" leaves the attempt directory')
            name = posixpath.normpath(name)
        target = f"{self._path}/{name}"
        parent = target[: target.rindex("/")]
        if parent not in self._made:
            self._make_folder(parent, whole)
        if target in self._spare:
            self._set_aside(target)
        elif target in self._idle:
            self._remove_spare_folder(target)
        return target

    def _set_aside(self, spare: str) -> None:
        """Rename a spare file whose name is needed."""
        self._spare.remove(spare)
        self._aside += 1
        self._spare.append(f"{self._path}/.spare-{self._aside}")
        os.rename(spare, self._spare[-1])

    def _remove_spare_folder(self, path: str) -> None:
        """Remove an unused spare directory whose name is needed; its spare files stay in the attempt."""
        inside = [spare for spare in self._spare if spare.startswith(f"{path}/")]
        for spare in inside:
            self._set_aside(spare)
        folders = [folder for folder in self._idle if f"{folder}/".startswith(f"{path}/")]
        for folder in reversed(folders):  # subdirectories first
            os.rmdir(folder)
        for folder in folders:
            del self._idle[folder]

    def _make_folder(self, folder: str, whole: Sequence[Container[str]]) -> None:
        name = folder[len(self._path) + 1 :]
        if any(name in each for each in whole):
            raise CannotRun(
                f'cannot write into "{name}": the step gets this whole directory as an input',
                fix="write to another path, or pass single files instead of the directory",
            )
        above = folder[: folder.rindex("/")]
        if above not in self._made:
            self._make_folder(above, whole)
        if folder in self._idle:
            del self._idle[folder]
        else:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        self._made[folder] = None

    def write_file(self, target: str, data: bytes, mode: int) -> Mark:
        """Write a small file; return its mark."""
        if self._scrap is not None and not mode & stat.S_IXUSR:
            if self._spare:
                os.rename(self._spare.pop(), target)
                return mark_of(overwrite(target, data, mode))
            if self._scrap.take_file(target):
                return mark_of(overwrite(target, data, mode))
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            return mark_of(os.fstat(handle))
        finally:
            os.close(handle)

    def remove_unused(self) -> None:
        """Remove the unused files and directories of a spare directory after staging."""
        for name in self._spare:
            if self._scrap is not None:
                self._scrap.add_file(name)
            else:
                os.unlink(name)
        for folder in reversed(self._idle):
            os.rmdir(folder)
        self._spare, self._idle = [], {}


@dataclass(slots=True)
class AttemptDirectory:
    """One attempt directory and its staged inputs."""

    path: str
    called: str = ""  # its name on another host, if different
    staged: dict[str, Mark] = field(default_factory=dict)  # name -> mark of our copy
    links: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # name -> the user's file or tree that is read in place, and its content
    mounted: dict[str, str] = field(
        default_factory=dict
    )  # name -> the user's path that a mount shows there
    objects: dict[str, str] = field(
        default_factory=dict
    )  # name -> the stored object that it is hard-linked to
    notices: dict[str, str] = field(
        default_factory=dict
    )  # name -> message about an input that is not staged as our files
    sources: dict[str, str] = field(
        default_factory=dict
    )  # user's file that was copied -> its content in the key
    doubtful: list[str] = field(
        default_factory=list
    )  # user's files that differed from the key when they were staged
    boxed: bool = False  # runs in a container, which can mount a path under another name
    overlays: Overlays | None = None  # set if the command may change its inputs
    _origins: dict[str, str] = field(
        default_factory=dict
    )  # name -> the user's path that was staged as a whole
    _waiting: dict[str, list[tuple[str, str | None, str, str]]] = field(
        default_factory=dict
    )  # group -> large files declared together: name in the digest cache, content, source path, name in the attempt
    _recorded: Mapping[str, Mapping[str, str]] | None = None
    _tiny: list[str] = field(
        default_factory=list
    )  # outputs that are stored inline, so their files remain
    _taken: dict[str, Content] = field(
        default_factory=dict
    )  # outputs whose files are now links to stored objects
    _damages: dict[str, int] = field(
        default_factory=dict
    )  # name -> how often its object had been found damaged before it was staged
    folder: Workdir = field(init=False)
    """The directory while it is filled."""

    def __post_init__(self) -> None:
        self.folder = Workdir(self.path)

    def target_of(self, name: str) -> str:
        """Return the absolute path of `name` and create its parent.

        Raises CannotRun if it is outside, or below a linked input.
        """
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
        """Stage a file or directory of the user.

        `at` is its name in the digest cache, `content` its content in the key, None for any.

        With `copy`, it is code and is copied at any size; the copy is writable, but a step that
        changes it fails. Without `inputs`, directories and large files become symbolic links, which
        a remote host replaces by its own copies. Large files of one `group` are staged by
        `stage_queued_files`.
        """
        if name in self.staged or self._is_in_given(source, name):
            return  # two patterns name the same file, or one names its directory
        target = self.target_of(name)
        status = os.stat(source)
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and (copy or status.st_size <= SMALL):
            data = _read_whole(source, status.st_size)
            executable = bool(status.st_mode & stat.S_IXUSR)
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
            self._stage_whole(cache, inputs, (at, content, source, name))

    def _put_small(
        self, name: str, target: str, data: bytes, executable: bool, *, writable: bool = False
    ) -> None:
        """Write a small file, read-only unless `writable`."""
        mode = MODE["x"] if executable else MODE["f"]
        if writable or self.overlays is not None:
            mode |= stat.S_IWUSR
        self.staged[name] = self.folder.write_file(target, data, mode)

    def stage_queued_files(self, cache: DigestCache, inputs: StoredInputs) -> None:
        """Stage the large files that `add_path` has queued."""
        for waiting in self._waiting.values():
            together = sum(os.stat(source).st_size + EACH_FILE for _, _, source, _ in waiting)
            for each in waiting:
                self._stage_whole(cache, inputs, each, together)
        self._waiting = {}

    def _stage_whole(
        self,
        cache: DigestCache,
        inputs: StoredInputs,
        given: tuple[str, str | None, str, str],
        together: int = 0,
    ) -> None:
        """Stage a directory or a large file of the user as an object, otherwise as a mount or a
        link.
        """
        at, content, source, name = given
        path = os.path.realpath(source)
        known = Content(content or cache.content_of(at) or "")
        why = "it no longer exists"
        if known:
            why = inputs.keep(InputSource(at, path, known), together)
        if why:
            overlays = self.overlays
            is_overlaid = overlays is not None and not overlays.refusal(path)
            if self.boxed or is_overlaid:
                self._mount(path, name)
                if self.boxed:
                    self.notices[name] = MOUNTED.format(why)
            else:
                notice = LINKS.format(why)
                if overlays is None:
                    notice += OVERLAY
                self.notices[name] = notice
                self._link(inputs, InputSource(at, path, known), name)
            self._note_link(cache, at, content, name)
            return
        self._add_files(inputs.objects, known, name)

    def _add_files(self, objects: Objects, content: Content, name: str, below: str = "") -> None:
        self._damages[name] = objects.count_damages(content)
        why = objects.give(content, f"{self.path}/{name}", below)
        if why:
            self.notices[name] = why if why == FULL else LINKS.format(why)
        elif content[0] == "t":
            count = len(objects.entries(content))
            if count > MANY_FILES:
                self.notices[name] = MANY.format(f"{count:,}", count * SECONDS_PER_FILE)
        self.objects[name] = content

    def _link(self, inputs: StoredInputs, source: InputSource, name: str) -> None:
        """Link to the user's file, or create a directory of such links."""
        target = f"{self.path}/{name}"
        if not os.path.isdir(source.path):
            os.symlink(source.path, target)
            return
        count = inputs.link_to(source, target)
        if count > MANY_FILES:
            notice = MANY.format(f"{count:,}", count * SECONDS_PER_FILE)
            self.notices[name] += f". I{notice[1:]}"

    def _mount(self, path: str, name: str) -> None:
        """Prepare the mount of a user's file or directory, which happens when the command starts."""
        self.mounted[name] = path
        if os.path.isdir(path):
            os.mkdir(f"{self.path}/{name}")
        else:
            self.add_bytes(b"", name)

    @property
    def mountable_inputs(self) -> dict[str, str]:
        """Inputs staged as a whole: name -> the path that a mount shows, in the attempt or of the
        user.
        """
        return {name: f"{self.path}/{name}" for name in self.objects} | self.mounted

    def _note_link(self, cache: DigestCache, at: str, content: str | None, name: str) -> None:
        now = cache.content_of(at)
        if now is None or now != (content or now):
            self.doubtful.append(at)
        self.links[name] = (at, now or "")

    def _is_in_given(self, source: str, name: str) -> bool:
        """Return whether a user's file is already staged, alone or in a directory."""
        if not self._origins:
            return False
        for head in heads(name):
            origin = self._origins.get(head)
            if origin is not None and origin + name[len(head) :] == source:
                return True
        return False

    def add_object(
        self, objects: Objects, content: str, name: str, *, by_link: bool = False
    ) -> None:
        """Stage an output of an earlier step.

        With `by_link`, use a symbolic link, which a remote host replaces by its own copy.
        """
        target, known = self.target_of(name), Content(content)
        small = objects.small(known)
        if small is not None:
            self._put_small(name, target, small, content[0] == "x")
            return
        objects.demand(known)
        if by_link:
            self._damages[name] = objects.count_damages(known)
            os.symlink(objects.path(known), target)
            self.objects[name] = content
        else:
            self._add_files(objects, known, name)

    def add_part(self, objects: Objects, content: str, below: str, name: str) -> None:
        """Stage a file or subdirectory of an earlier step's output directory."""
        target, source = self.target_of(name), f"{objects.path(Content(content))}/{below}"
        objects.demand(Content(content))
        status = os.stat(source)
        if stat.S_ISREG(status.st_mode) and status.st_size <= SMALL:
            data = Path(source).read_bytes()
            executable = bool(status.st_mode & stat.S_IXUSR)
            self._put_small(name, target, data, executable)
        else:
            self._add_files(objects, Content(content), name, below)

    # -- after a worker was killed

    def record_inputs(self) -> None:
        """Write the staged objects and links to a file beside the attempt, for a later worker."""
        if self.objects or self.links:
            given = {
                "objects": self.objects,
                "links": {name: content for name, (_, content) in self.links.items()},
            }
            with open(f"{self.path}.given", "w", encoding="utf-8") as file:
                json.dump(given, file)

    def delete_record(self) -> None:
        """Delete the record of the staged inputs, and the overlay of the command's changes."""
        if self.overlays is not None:
            delete(Path(self.path + CHANGES))
        if self.objects or self.links:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}.given")

    @property
    def _earlier_inputs(self) -> Mapping[str, Mapping[str, str]]:
        """The inputs recorded by an earlier worker: objects and links, each name -> content."""
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
        """Restore the record of `add_path` by an earlier worker.

        Returns whether the input and its source still match the key.
        """
        if name in self.staged or self._is_in_given(source, name):
            return True
        known = self._earlier_inputs["objects"].get(name)
        if known is not None:
            self._origins[name] = source
            return known == content  # later changes of the source do not matter
        known = self._earlier_inputs["links"].get(name)
        if known is not None:
            self._origins[name] = source
            self.links[name] = (at, known)
            return known == content == _content_now(cache, at)
        self.sources[at] = content
        return self._recall_copy(content, name) and _content_now(cache, at) == content

    def recall_object(self, content: str, name: str) -> bool:
        """Restore the record of `add_object` by an earlier worker.

        Returns whether the input still matches the key.
        """
        known = self._earlier_inputs["objects"].get(name)
        if known is not None:
            return known == content
        return self._recall_copy(content, name)

    def _recall_copy(self, content: str, name: str) -> bool:
        target = f"{self.path}/{name}"
        self.staged[name] = find_mark(target) or (0, 0, 0)
        return os.path.isfile(target) and scan(target) == content

    def is_staged(self, name: str, mode: int) -> bool:
        """Return whether a file or directory of this mode was staged, not created by the command."""
        if name in self.staged or stat.S_ISLNK(mode):
            return True
        # Files of a staged directory are read-only, so the command created a writable one.
        if mode & WRITABLE and not stat.S_ISDIR(mode):
            return False
        return any(head in self.objects or head in self.links for head in heads(name))

    def add_bytes(self, data: bytes, name: str) -> None:
        """Write a file of the recipe, also in place of an input, which stays unchanged."""
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

    def find_changed_input(self, cache: DigestCache, objects: Objects) -> str:
        """Return a message that names a changed input; empty if none changed.

        Only the step can change a copy or an object.  An input read in place may be changed by
        other processes.
        """
        changed = find_changed_copies(self.staged, self.path) if self.overlays is None else []
        changed += [name for name in self.objects if self._is_damaged(objects, name)]
        if changed:
            return f"the step changed its input {changed[0]}"
        changed = [name for name, link in self.links.items() if _has_changed(cache, *link)]
        if changed:
            return f"the step or another process changed its input {changed[0]}"
        return ""

    def _is_damaged(self, objects: Objects, name: str) -> bool:
        """Return whether the stored object of an input has changed since it was staged."""
        known = Content(self.objects[name])
        # The staging of another step may have replaced a damaged object by an intact one.
        if objects.count_damages(known) > self._damages.get(name, 0):
            return True
        # An object may exist on its host only, or may be deleted by `gc`.
        return objects.has(known) and not objects.intact(known)

    def find_stale_sources(self, cache: DigestCache) -> list[str]:
        """Return the sources with another content than in the key, so that the step may have read
        other data.
        """
        try:
            contents = cache.contents(self.sources)
        except Changed as error:
            return [*self.doubtful, error.path]
        changed = [at for at, now in contents.items() if now != self.sources[at]]
        return self.doubtful + changed

    def is_slow_to_collect(self, outputs: Sequence[OutputSpec]) -> bool:
        """Return whether collecting the outputs would block the event loop."""
        for _, path, _flags in outputs:
            try:
                status = os.stat(f"{self.path}/{path}")
            except OSError:
                continue
            if status.st_size > HEAVY or stat.S_ISDIR(status.st_mode):
                return True
        return False

    def collect(
        self, outputs: Sequence[OutputSpec], objects: Objects, states: Mapping[str, str]
    ) -> dict[str, str]:
        """Store every output: output name -> content.

        `states` are the states of the attempt: path -> local directory.

        Raises OutputProblem with all problems.  The files stay in the attempt until `retire`, so a
        worker after a kill can repeat this.
        """
        problems: list[str] = []
        contents: dict[str, str] = {}
        for output in outputs:
            name, path, flags = output
            kind, status = look_at_output(self.path, path, states.values())
            is_empty = bool(flags & NONEMPTY) and _is_empty(f"{self.path}/{path}", kind)
            problem = find_output_problem(output, kind, is_empty=is_empty)
            if problem:
                hint = self._find_elsewhere(path) if kind == MISSING else ""
                problems.append(problem + hint)
            elif status is not None:
                try:
                    contents[name] = self._store_output(path, status, objects, states)
                except Unhashable as error:
                    problems.append(str(error).replace(self.path + "/", ""))
        if problems:
            raise OutputProblem("; ".join(problems))
        return contents

    def _store_output(
        self, path: str, status: os.stat_result, objects: Objects, states: Iterable[str]
    ) -> Content:
        """Store an output and return its content."""
        target = f"{self.path}/{path}"
        if stat.S_ISLNK(status.st_mode) or is_in_state(path, states):
            content = scan(target)
            objects.put(Path(os.path.realpath(target)), content, move=False)
            return content
        is_file = stat.S_ISREG(status.st_mode)
        if is_file:
            tiny = objects.tiny.remember(target, status)
            if tiny is not None:
                self._tiny.append(path)
                return tiny
        content = objects.take(target, status if is_file else None)
        self._taken[path] = content
        return content

    def _find_elsewhere(self, path: str) -> str:
        """Return a hint if the command created a file of this name at another path."""
        name, looked = posixpath.basename(path), 0
        for at, folders, files in os.walk(self.path):
            other = os.path.relpath(f"{at}/{name}", self.path)
            if name in files or name in folders:
                mode = os.lstat(f"{self.path}/{other}").st_mode
                if not self.is_staged(other, mode):
                    return f"; {other} was created instead; check whether the script changes its directory"
            looked += len(files)
            if looked > _LOOKED_AT:
                break
        return ""

    def has_outputs(self, outputs: Sequence[OutputSpec]) -> bool:
        """Return whether every required output exists."""
        required = [path for _, path, flags in outputs if not flags & OPTIONAL]
        return all(os.path.lexists(f"{self.path}/{path}") for path in required)

    def read_moved_outputs(self) -> dict[str, str]:
        """Return the outputs that a host was moving into its store when a worker died: name ->
        content.
        """
        try:
            with open(f"{self.path}.taken", encoding="utf-8") as file:
                # A worker that was killed may have left a part of the last line.
                lines = [line.rstrip("\n") for line in file if line.endswith("\n")]
            return dict(line.split("\t") for line in lines)
        except FileNotFoundError:
            return {}

    def record_moved_output(self, name: str, content: str) -> None:
        """Record the content of an output that its host is about to move, for `read_moved_outputs`."""
        with open(f"{self.path}.taken", "a", encoding="utf-8") as file:
            file.write(f"{name}\t{content}\n")

    def retire(self, scrap: SparePool) -> Callable[[], None] | None:
        """Turn a finished directory into a spare if it contains only known files, otherwise delete
        it.

        The directory is renamed first, so that no worker after a kill takes its remains for
        complete outputs. Returns the deletion as a function if it may be slow.
        """
        try:
            gone = scrap.rename_to_spare(self.path)
        except FileNotFoundError:
            return None
        self.delete_record()
        trees = (*self._taken.values(), *self.objects.values())
        if any(content[0] == "t" for content in trees) or self.links:
            return partial(delete, Path(gone))
        if self.folder.is_begun and not self.objects:
            for path in self._taken:
                delete(Path(gone, path))
            spare = SpareFolder(gone, self.folder.folders, (*self.staged, *self._tiny))
            with contextlib.suppress(OSError):  # a part of the directory is missing or unreadable
                if scrap.add_folder(spare):
                    return None
        delete(Path(gone))
        return None


def _read_whole(path: str, size: int) -> bytes:
    """Read a file of about `size` bytes, which may have grown or shrunk since."""
    with open(path, "rb", buffering=0) as file:
        data = file.read(size + 1)
        if len(data) != size:
            data += file.readall()
    return data


def find_undeclared_file(
    log_tail: str, workspace: Path, attempt: str, declared: Iterable[str]
) -> str | None:
    """Find a workspace file that a failed command named in its log and that its step does not
    declare.
    """
    declared = set(declared)
    for word in re.findall(
        r"[\w./+@-]*[\w+-]\.\w+|[\w+-]*(?:/[\w.+-]+)+", log_tail.replace(f"{attempt}/", "")
    ):
        name: str = posixpath.normpath(word.removeprefix(f"{workspace}/"))
        if name == "." or name.startswith(("/", "..", ".recipe")):
            continue
        if not _is_declared(name, declared) and (workspace / name).exists():
            return name
    return None


def _is_declared(name: str, declared: set[str]) -> bool:
    """Return whether a step declares a file, or a directory with it, as an input."""
    if name in declared:
        return True
    # A program may use the last name of its input: inputs/dataset/rows.csv appears as rows.csv.
    return any(name.startswith(f"{path}/") or posixpath.basename(path) == name for path in declared)


def _has_changed(cache: DigestCache, at: str, content: str) -> bool:
    return _content_now(cache, at) != content


def _content_now(cache: DigestCache, at: str) -> str:
    """Return the content of a user's path; empty if it is missing or changing."""
    try:
        return cache.content_of(at) or ""
    except Changed:
        return ""


def _is_empty(path: str, kind: str) -> bool:
    """Return whether a file or directory of this kind is empty."""
    if kind == "d":
        with os.scandir(path) as items:
            return next(items, None) is None
    return kind in "fx" and os.path.getsize(path) == 0
