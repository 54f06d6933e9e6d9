"""What the text of steps says about their order, before anything is rendered: the steps that templates name, and paths that meet."""

from __future__ import annotations

import bisect
import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ..errors import did_you_mean
from ..language.imports import Start
from ..paths import escapes, heads, is_path

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step, Uses
    from ..language.values import Where

T = TypeVar("T")


def templates(step: Step, env: Mapping[str, Any]) -> list[tuple[Where, str]]:
    """Every leaf of a step that is a template, and where it stands."""
    origin = step.origin
    found: list[tuple[Where, str]] = []
    run = step.run
    if isinstance(run, str):
        if "{{" in run:
            found.append(((*origin, "run"), run))
    elif run:
        found += [leaf for leaf in walk(run, (*origin, "run")) if is_template(leaf[1])]
    if step.accelerate:
        found += [
            leaf for leaf in walk(step.accelerate, (*origin, "accelerate")) if is_template(leaf[1])
        ]
    if step.files:
        found += [leaf for leaf in walk(step.files, (*origin, "files")) if is_template(leaf[1])]
    if env:
        found += [leaf for leaf in walk(env, (*origin, "env")) if is_template(leaf[1])]
    if step.uses:
        found += [leaf for leaf in walk(step.uses.given, (*origin, "with")) if is_template(leaf[1])]
    for name, value in (("when", step.when), ("nodes", step.nodes)):
        if isinstance(value, str) and "{{" in value:
            found.append(((*origin, name), value))
    for output in step.outputs:
        if "{{" in output.path:
            found.append(((*origin, "outputs", output.name), output.path))
    for n, dep in enumerate(step.reads):
        if "{{" in dep:
            whole = isinstance(step.deps[n], str)
            found.append(((*origin, "deps", n, *(() if whole else ("glob",))), dep))
    return found


def is_template(leaf: object) -> bool:
    return isinstance(leaf, str) and "{{" in leaf


def walk(tree: Any, where: Where) -> Iterable[tuple[Where, Any]]:
    if isinstance(tree, Mapping):
        for name, inner in tree.items():
            yield from walk(inner, (*where, name))
    elif isinstance(tree, (list, tuple)):
        for n, inner in enumerate(tree):
            yield from walk(inner, (*where, n))
    else:
        yield where, tree


def mentions_step(leaf: str) -> bool:
    """Whether a template may read what another step made."""
    return "{{" in leaf and "steps" in leaf


def steps_of(step: Step) -> list[str]:
    """Ids of the steps that this one mentions, needs or selects from.  Templates that cannot be read are reported elsewhere."""
    found = list(step.needs)
    if step.select:
        found.append(step.select.source)
    leaves = [leaf for _, leaf in templates(step, step.env)]
    for axis in (step.matrix or {}).values():
        leaves += [leaf for _, leaf in walk(axis, ()) if is_template(leaf)]
    if leaves:
        from ..language.template import TemplateError, references

        for leaf in leaves:
            try:
                found += [
                    ref.path[1]
                    for ref in references(leaf)
                    if ref.path[0] == "steps" and len(ref.path) > 1
                ]
            except TemplateError:
                continue
    return found


class Misnamed(NamedTuple):
    """Why a `select` names nothing that can be compared, and what to write."""

    code: str
    message: str
    fix: str


def which(recipe: Recipe, uses: Uses) -> str:
    """Which recipe a step of `recipe` uses: its name in the library, or its file, found from the folder of the recipe that names it."""
    return (
        posixpath.normpath(f"{posixpath.dirname(recipe.document.name) or '.'}/{uses.recipe}")
        if is_path(uses.recipe)
        else uses.recipe
    )


def selected(recipe: Recipe, used: Mapping[str, Recipe], path: str) -> Step | Misnamed | None:
    """The step that `select: path` names, here or inside a recipe that is used; None where that recipe is unknown, another problem."""
    above, many = "", False
    for id in path.split("/"):
        if id not in recipe.steps:
            fix = did_you_mean(id, recipe.steps) or _choices(recipe, used, above)
            return Misnamed(
                "unknown-step", f'{recipe.id}, which "{above}" uses, has no step "{id}"', fix
            )
        step, here = recipe.steps[id], f"{above}/{id}" if above else id
        many |= step.matrix is not None
        if here == path and not step.uses:
            return (
                step
                if many
                else Misnamed(
                    "not-a-matrix",
                    f'step "{path}" has no `matrix` to select from',
                    "mention its outputs directly",
                )
            )
        if not step.uses:
            return Misnamed("unknown-step", f'"{here}" has no steps inside', f"select: {here}")
        if (place := which(recipe, step.uses)) not in used:
            return None
        recipe, above = used[place], here
    return Misnamed(
        "not-a-step",
        f'"{path}" is a recipe, {recipe.id}: which of its steps?',
        _choices(recipe, used, path),
    )


def _choices(recipe: Recipe, used: Mapping[str, Recipe], prefix: str) -> str:
    """What `select` may name inside a recipe: its steps that report metrics, and those of recipes that it uses."""

    def inside(recipe: Recipe, prefix: str, above: tuple[str, ...]) -> Iterator[str]:
        for step in recipe.steps.values():
            if step.metrics or step.select:
                yield f"select: {prefix}/{step.id}"
            elif (
                step.uses
                and (other := used.get(which(recipe, step.uses)))
                and other.id not in above
            ):
                yield from inside(other, f"{prefix}/{step.id}", (*above, recipe.id))

    return (
        " or ".join(list(inside(recipe, prefix, ()))[:8])
        or "none of them reports metrics: give one `metrics: true`"
    )


def ordered(recipe: Recipe) -> tuple[list[str], list[list[str]]]:
    """Step ids, each after what it mentions, or a cycle if there are any.

    Which step makes what a dep names is certain only when every path is rendered: edges that may be are followed where they close no circle.
    """
    makers = [
        (posixpath.normpath(output.path), step.id)
        for step in recipe.steps.values()
        for output in step.outputs
    ]
    literal = {path: id for path, id in makers if "{{" not in path}
    rendered = [(path, id) for path, id in makers if "{{" in path]
    near = Near(literal)
    edges: dict[str, list[str]] = {}
    likely: dict[str, list[str]] = {}
    for step in recipe.steps.values():
        found = [id for id in steps_of(step) if id in recipe.steps]
        maybe: list[str] = []
        for dep in step.reads:
            if mentions_step(dep):
                continue
            path = posixpath.normpath(dep)
            above = heads(path)
            maybe += [id for made, id in rendered if id != step.id and may_make(made, path)]
            if is_glob(path) or "{{" in path:
                maybe += [
                    literal[made]
                    for made in near.to(path)
                    if literal[made] != step.id and may_make(made, path)
                ]
            else:
                found += [literal[head] for head in above if head in literal]
            if len(above) > 1 and above[-1] in recipe.steps and recipe.steps[above[-1]].uses:
                maybe.append(above[-1])
        for axis in (step.matrix or {}).values():
            if isinstance(axis, dict):
                found += [
                    id
                    for path, id in literal.items()
                    if str(axis.get("glob", "")).startswith(path + "/")
                ]
        edges[step.id] = found
        likely[step.id] = [*found, *maybe]
    if in_order(likely):
        return list(likely), []
    from .graph import circle, dag, needs_first

    for needs in (likely, edges):
        graph = dag(needs)
        loop = circle(graph)
        if not loop:
            return needs_first(graph), []
    return [], [loop]


def in_order(needs: Mapping[T, Iterable[T]]) -> bool:
    """Whether each key stands after all that it needs: then the order as written is the order to take, and no graph has to be made."""
    seen: set[T] = set()
    for key, wanted in needs.items():
        if not seen.issuperset(wanted):
            return False
        seen.add(key)
    return True


def may_make(output: str, dep: str) -> bool:
    """Whether an output path may be what a dep names, or hold it, as far as text tells before either is rendered."""
    output, dep = posixpath.normpath(output), posixpath.normpath(dep)
    if "{{" in dep or ("{{" in output and is_glob(dep)):
        one, other = (re.split(r"\{\{|[*?\[]", path, maxsplit=1)[0] for path in (output, dep))
        return one.startswith(other) or other.startswith(one)
    if "{{" in output:
        shape = ".+".join(map(re.escape, re.split(r"\{\{.*?\}\}", output)))
        return any(re.fullmatch(shape, head) for head in heads(dep))
    return reaches(dep, output, True) if is_glob(dep) else output in heads(dep)


class Near:
    """Paths that a pattern or template may name, lie below, or hold: found by what stands before its first unknown."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)
        self._all = set(self._sorted)

    def to(self, pattern: str) -> Iterable[str]:
        fixed = re.split(r"\{\{|[*?\[]", pattern, maxsplit=1)[0]
        for n in range(bisect.bisect_left(self._sorted, fixed), len(self._sorted)):
            if not self._sorted[n].startswith(fixed):
                break
            yield self._sorted[n]
        yield from (head for head in heads(posixpath.dirname(fixed)) if head in self._all)


def is_glob(path: str) -> bool:
    return "*" in path or "?" in path or "[" in path or "\0" in path


def as_pattern(path: str) -> str:
    """The pattern that means this path alone."""
    return re.sub(r"[*?[]", r"[\g<0>]", path)


def spelled(pattern: str, exclude: Iterable[str]) -> str:
    """A glob as one text, which is how a node holds it."""
    return "\0".join((pattern, *exclude))


def fixed_folder(pattern: str) -> str:
    """The folder of a pattern in front of its first wildcard; empty where it begins with one."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def unspelled(text: str) -> tuple[str, list[str]]:
    """The pattern of a glob and what it excludes."""
    pattern, *exclude = text.split("\0")
    return pattern, exclude


AUTO: Final = "/auto"
"""In the place of a pattern: `code: auto`.  No path of a recipe begins with a slash."""


def automatic(starts: Iterable[Start], path: Iterable[str]) -> str:
    """`code: auto` as one text: what a command starts, and the folders of its PYTHONPATH."""
    return spelled(
        AUTO, [*(f"{kind} {name}" for kind, name in starts), *(f"path {folder}" for folder in path)]
    )


def parts_of_automatic(text: str) -> tuple[list[Start], list[str]]:
    """What `automatic` was given."""
    parts = [part.partition(" ") for part in unspelled(text)[1]]
    starts = [
        Start("script" if kind == "script" else "module", name)
        for kind, _, name in parts
        if kind != "path"
    ]
    return starts, [name for kind, _, name in parts if kind == "path"]


def code_name(text: str) -> str:
    """An entry of `code` as people call it."""
    pattern = unspelled(text)[0]
    return "auto" if pattern == AUTO else pattern


def python_path(env: Mapping[str, object]) -> list[str]:
    """The folders of a PYTHONPATH that is written out, from the folder in which a step runs; those outside of it are left out."""
    value = env.get("PYTHONPATH")
    folders = value.split(":") if isinstance(value, str) and "{{" not in value else []
    plain = [posixpath.normpath(folder) for folder in folders if folder and not escapes(folder)]
    return ["" if folder == "." else folder for folder in plain]


def excluded(path: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern names this path or a folder above it: one without a slash its last name, one with a slash all of it."""
    if not exclude:
        return False
    above = [head.split("/") for head in heads(posixpath.normpath(path))]
    return any(
        _fits(pattern.strip("/").split("/"), names if "/" in pattern else names[-1:])
        for pattern in exclude
        for names in above
    )


def _fits(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _fits(parts[1:], names) or _fits(parts, names[1:])
    return fnmatch.fnmatchcase(names[0], parts[0]) and _fits(parts[1:], names[1:])


class Makes:
    """Paths that are made.  What is one of them, is below one or holds one is not the same before and after, and so no match of a glob."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._all = set(paths)
        self._above = {head for path in self._all for head in heads(path)[1:]}

    def meets(self, path: str) -> bool:
        path = posixpath.normpath(path)
        return path in self._above or any(head in self._all for head in heads(path))


def reaches(pattern: str, path: str, directory: bool) -> bool:
    """Whether a workspace pattern matches a path, or something below it."""
    parts, names = pattern.split("/"), path.split("/")

    def matches(p: int, n: int, deep: bool) -> bool:
        if n == len(names):
            below = any(part != "**" for part in parts[p:])
            return not below or (directory or not deep)
        if p == len(parts):
            return False
        if parts[p] == "**":
            return matches(p + 1, n, True) or matches(p, n + 1, True)
        return fnmatch.fnmatchcase(names[n], parts[p]) and matches(p + 1, n + 1, deep)

    return matches(0, 0, False)
