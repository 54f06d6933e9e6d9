"""Globs over the workspace that match only the caller's files.

Outputs of the plan are excluded, and so are unchanged outputs of earlier runs of the recipe.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob
import itertools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from ..errors import RecipeError
from ..paths import heads
from ..planning.patterns import MadePaths, decode_pattern, is_excluded
from ..planning.plan import Plan
from ..storage.workspace import Workspace


class GlobMatcher:
    """Matcher of glob patterns below a directory.

    Each directory is listed once and must not change meanwhile.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[str, list[str]] = {}

    def matches(self, pattern: str) -> list[str]:
        """Return the sorted paths that match the glob `pattern`.

        `**` matches any number of directories.
        """
        folder, name = os.path.split(pattern)
        is_below_one_folder = glob.has_magic(name) and not glob.has_magic(folder)
        if name == "**" or not is_below_one_folder:
            return self._search(pattern)
        found = fnmatch.filter(self._candidates(folder, name), name)
        # As in a shell, `*` matches no hidden file.
        if name[0] != ".":
            found = [each for each in found if each[0] != "."]
        return [os.path.join(folder, each) for each in found]

    def _search(self, pattern: str) -> list[str]:
        matches = glob.glob(pattern, root_dir=self._root, recursive=True)
        found = []
        for path in matches:
            # `nope/**` matches `nope/` even if the directory does not exist.
            if path[-1] != "/" or os.path.isdir(self._root / path):
                found.append(path)
        return sorted(found)

    def _candidates(self, folder: str, name: str) -> list[str]:
        """Return the directory entries that start with the literal prefix of a glob pattern."""
        names = self._list(folder)
        start = re.split(r"[*?[]", name, maxsplit=1)[0]
        if not start:
            return names
        first = bisect.bisect_left(names, start)
        tail = itertools.islice(names, first, None)
        return list(itertools.takewhile(lambda each: each.startswith(start), tail))

    def _list(self, folder: str) -> list[str]:
        if folder not in self._names:
            try:
                self._names[folder] = sorted(os.listdir(self._root / folder))
            except OSError:
                self._names[folder] = []
        return self._names[folder]


class EarlierOutputs:
    """Outputs of a recipe's earlier runs in the workspace.

    An adopted or edited output counts as the caller's file.
    """

    def __init__(self, ws: Workspace, recipe: str) -> None:
        self._ws, self._recipe = ws, recipe

    @cached_property
    def _rows(self) -> dict[str, tuple[str, str]]:
        """Stored path and published content of each published path in the workspace."""
        head = f"{self._ws.root}/"
        rows: dict[str, tuple[str, str]] = {}
        for path, row in self._ws.store.index.list_published(self._recipe).items():
            if row.run:  # an adopted output has no run
                rows[path.removeprefix(head)] = path, row.content
        return rows

    @cached_property
    def _parents(self) -> set[str]:
        parents: set[str] = set()
        for path in self._rows:
            parents.update(heads(path)[1:])
        return parents

    def among(self, paths: Iterable[str]) -> set[str]:
        """Return those of `paths` that are unchanged outputs of earlier runs.

        This includes paths inside such an output, and directories with only such outputs.
        """
        plain = {path: posixpath.normpath(path) for path in paths}
        if not plain or not self._rows:
            return set()
        found = self._inside_unchanged(plain)
        for path, at in plain.items():
            if path in found or at not in self._parents:
                continue
            if self._holds_only_outputs(at):
                found.add(path)
        return found

    def _inside_unchanged(self, plain: Mapping[str, str]) -> set[str]:
        """Return the paths at or below an unchanged output. `plain` has their normalized form."""
        output_of: dict[str, str] = {}
        for path, at in plain.items():
            output = self._output_above(at)
            if output is not None:
                output_of[path] = output
        outputs = dict.fromkeys(output_of.values())
        unchanged = set(filter(self._is_unchanged, outputs))
        return {path for path, output in output_of.items() if output in unchanged}

    def _output_above(self, path: str) -> str | None:
        """Return the topmost published path at or above `path`, or None."""
        for head in reversed(heads(path)):
            if head in self._rows:
                return head
        return None

    def _is_unchanged(self, path: str) -> bool:
        spelled, content = self._rows[path]
        if os.path.islink(self._ws.root / path):
            return False
        try:
            return self._ws.cache.content_of(spelled) == content
        except RecipeError:  # a pipe, or a link out of the workspace: never published by a run
            return False

    def _holds_only_outputs(self, folder: str) -> bool:
        found: list[str] = []
        for at, _, names in os.walk(self._ws.root / folder):
            found += [os.path.relpath(os.path.join(at, name), self._ws.root) for name in names]
        return len(self.among(found)) == len(found)


class WorkspaceGlobs(Mapping[str, tuple[str, ...]]):
    """Glob matcher for the recipe compiler that excludes outputs of earlier runs.

    `known` has the matches of globs below step outputs. `looked` records the matches of each
    pattern in the workspace, and `left` the excluded outputs of earlier runs.
    """

    def __init__(
        self, root: Path, known: Mapping[str, tuple[str, ...]], ws: Workspace | None = None
    ) -> None:
        self.looked: dict[str, list[str]] = {}
        self.left: set[str] = set()
        self.recipe = ""
        self._matcher, self._known, self._ws = GlobMatcher(root), known, ws

    def __getitem__(self, pattern: str) -> tuple[str, ...]:
        if pattern in self._known:
            return self._known[pattern]
        if ":" in pattern:
            raise KeyError(pattern)
        found = self._matcher.matches(pattern)
        self.looked[pattern] = found
        left: set[str] = set()
        if self._ws is not None:
            left = EarlierOutputs(self._ws, self.recipe).among(found)
        self.left |= left
        return tuple(match.rstrip("/") for match in found if match not in left)

    def __iter__(self) -> Iterator[str]:
        return iter(self.looked)

    def __len__(self) -> int:
        return len(self.looked)


class CallerFiles:
    """The caller's files that a plan's globs match, without outputs of the plan or of earlier runs."""

    def __init__(self, ws: Workspace, plan: Plan) -> None:
        self._plan = plan
        self._matcher, self._earlier = GlobMatcher(ws.root), EarlierOutputs(ws, plan.recipe)

    @cached_property
    def _outputs(self) -> MadePaths:
        paths = []
        for node in self._plan.nodes:
            for output in node.outputs:
                paths.append(node.prefix + output.path)
        return MadePaths(paths)

    def matches(self, dep: str) -> list[str]:
        """Return the sorted caller's files matching a glob of `deps`."""
        pattern, exclude = decode_pattern(dep)
        matches = self._matcher.matches(pattern)
        kept = [match.rstrip("/") for match in matches if not is_excluded(match, exclude)]
        return self.among(kept)

    def among(self, paths: list[str]) -> list[str]:
        """Return the caller's own files among `paths`, in order."""
        others = [path for path in paths if not self._outputs.meets(path)]
        earlier = self._earlier.among(others)
        return [path for path in others if path not in earlier]
