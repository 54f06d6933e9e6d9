"""Order the steps of a recipe before rendering, by the steps and paths in their templates."""

from __future__ import annotations

import bisect
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ..paths import heads
from .mentions import mentions_step, steps_of
from .patterns import is_glob, reaches

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step


T = TypeVar("T")


def order_steps(recipe: Recipe) -> tuple[list[str], list[list[str]]]:
    """Return step ids in dependency order and an empty list, or an empty list and the cycle.

    The producer of a dependency is certain only when all paths are rendered.  Possible edges are
    used if they form no cycle.
    """
    edges = _StepEdges(recipe)
    certain: dict[str, list[str]] = {}
    likely: dict[str, list[str]] = {}
    for step in recipe.steps.values():
        certain[step.id], perhaps = edges.of(step)
        likely[step.id] = [*certain[step.id], *perhaps]
    if is_in_order(likely):
        return list(likely), []
    from .graph import dag, find_cycle, order_needs_first

    for dependencies in (likely, certain):
        graph = dag(dependencies)
        loop = find_cycle(graph)
        if not loop:
            return order_needs_first(graph), []
    return [], [loop]


class _StepEdges:
    """Dependencies between a recipe's steps, judged by unrendered paths."""

    def __init__(self, recipe: Recipe) -> None:
        self._steps = recipe.steps
        self._literal: dict[str, str] = {}
        """Steps by output path."""
        self._templates: list[tuple[str, str]] = []
        """Output paths with a template, and their steps."""
        for step in recipe.steps.values():
            for output in step.outputs:
                path = posixpath.normpath(output.path)
                if "{{" in path:
                    self._templates.append((path, step.id))
                else:
                    self._literal[path] = step.id
        self._near = PathIndex(self._literal)

    def of(self, step: Step) -> tuple[list[str], list[str]]:
        """Return the steps that a step depends on, and the steps that it may depend on."""
        needed = [id for id in steps_of(step) if id in self._steps]
        perhaps: list[str] = []
        for dep in step.reads:
            if not mentions_step(dep):
                certain, uncertain = self._makers(dep, step.id)
                needed += certain
                perhaps += uncertain
        for axis in (step.matrix or {}).values():
            if isinstance(axis, dict):
                needed += self._makers_of_axis(str(axis.get("glob", "")))
        return needed, perhaps

    def _makers(self, dep: str, reader: str) -> tuple[list[str], list[str]]:
        """Return the steps that create a `deps` path, and the steps that may create it."""
        path = posixpath.normpath(dep)
        certain: list[str] = []
        perhaps = _find_makers(self._templates, path, reader)
        if is_glob(path) or "{{" in path:
            perhaps += self._makers_near(path, reader)
        else:
            certain += [self._literal[head] for head in heads(path) if head in self._literal]
        perhaps += self._used_recipe_at(path)
        return certain, perhaps

    def _used_recipe_at(self, path: str) -> list[str]:
        """Return the `uses` step with the name of the first directory in a path."""
        first, _, below = path.partition("/")
        step = self._steps.get(first) if below else None
        if step is None or not step.uses:
            return []
        return [step.id]

    def _makers_near(self, pattern: str, reader: str) -> list[str]:
        """Return the steps whose outputs a glob pattern may match."""
        near = ((made, self._literal[made]) for made in self._near.find_possible(pattern))
        return _find_makers(near, pattern, reader)

    def _makers_of_axis(self, pattern: str) -> list[str]:
        """Return the steps whose output directories contain the glob of a matrix axis."""
        return [id for path, id in self._literal.items() if pattern.startswith(f"{path}/")]


def _find_makers(outputs: Iterable[tuple[str, str]], dep: str, reader: str) -> list[str]:
    """Return the steps among pairs of output path and step that may make a `deps` path."""
    return [id for made, id in outputs if id != reader and may_make(made, dep)]


def is_in_order(dependencies: Mapping[T, Iterable[T]]) -> bool:
    """Return whether each key comes after all its dependencies, as in a topological order."""
    seen: set[T] = set()
    for key, wanted in dependencies.items():
        if not seen.issuperset(wanted):
            return False
        seen.add(key)
    return True


def may_make(output: str, dep: str) -> bool:
    """Return whether an output path may be or contain a `deps` path, judged by unrendered text."""
    output, dep = posixpath.normpath(output), posixpath.normpath(dep)
    if "{{" in dep or ("{{" in output and is_glob(dep)):
        one, other = _literal_start(output), _literal_start(dep)
        return one.startswith(other) or other.startswith(one)
    if "{{" in output:
        shape = ".+".join(map(re.escape, re.split(r"\{\{.*?\}\}", output)))
        return any(re.fullmatch(shape, head) for head in heads(dep))
    return reaches(dep, output, True) if is_glob(dep) else output in heads(dep)


def _literal_start(path: str) -> str:
    """Return the part of a path before its first template or wildcard."""
    return re.split(r"\{\{|[*?\[]", path, maxsplit=1)[0]


class PathIndex:
    """Index of paths by prefix, for finding paths that a pattern or template may match."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)
        self._all = set(self._sorted)

    def find_possible(self, pattern: str) -> Iterable[str]:
        """Yield the paths that may match, and directories that may contain a match."""
        fixed = _literal_start(pattern)
        for n in range(bisect.bisect_left(self._sorted, fixed), len(self._sorted)):
            if not self._sorted[n].startswith(fixed):
                break
            yield self._sorted[n]
        yield from (head for head in heads(posixpath.dirname(fixed)) if head in self._all)
