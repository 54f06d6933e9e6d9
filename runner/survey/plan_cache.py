"""Compile the plan of a request, or recall the plan that is kept.

A compiled plan is a pure function of the recipe's text, its inputs, the recipes it uses, the
matches of its globs and the version of this program. It is kept under the digest of the first two
with a note of the others, so it may be missing but is never stale. A run in which nothing is to be
done reads only this note, the plan's first line, the stats of the files and the traces.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..digest import Digest, of_bytes, of_value
from ..paths import VERSION, is_path
from ..planning.plan import COMPILER, Plan
from ..reading import parse_json, whole
from ..secrets import unusable
from ..storage.workspace import Workspace
from .caller_files import EarlierOutputs, GlobMatcher, WorkspaceGlobs
from .disk_names import as_disk
from .recipes import UsedRecipes, bind_inputs, read_and_bind, read_text, schema_mark
from .request import Request

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe
    from ..language.values import Tree
    from ..planning.beforehand import Trial


def compile_request(
    ws: Workspace, source: Path, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Plan:
    """Return the plan of a request, recalled if everything that it was made from is unchanged.

    `known` has the matches of its globs below outputs. Raises NotFound, Invalid.
    """
    text = read_text(source)
    digest = _request_digest(source, text, request, known)
    path = ws.home / "plans" / f"{digest}.json"
    plan = _recall(ws, path) if digest is not None else None
    if plan is None:
        compilation = _Compilation(ws, source, text, request, known)
        plan = compilation.plan
        # The credentials of addresses come with the request alone, and would be missing later.
        if digest is not None and not ws.read_only and not ws.addresses:
            ws.write(path, *compilation.dump())
            mark = schema_mark(ws, of_bytes(text))
            if not mark.exists():
                ws.write(mark)
    return _adjust(plan, request)


def _adjust(plan: Plan, request: Request) -> Plan:
    """Apply what a request says of nodes and resources, which is no part of the kept plan."""
    if request.nodes:
        plan.spread(request.nodes)
    if request.resources:
        plan.demand(request.resources)
    return plan


def _request_digest(
    source: Path, text: bytes, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Digest | None:
    """Return the digest that a plan is kept under.

    None if an input has no JSON form, which binding will refuse.
    """
    parts = [
        VERSION,
        COMPILER,
        str(source),
        of_bytes(text),
        dict(request.inputs),
        request.preset,
        {pattern: list(matches) for pattern, matches in known.items()},
        is_path(request.recipe),  # a recipe that is given by its path has its code at the root
        dict(request.typed_in),
    ]
    try:
        return of_value("request", parts)
    except (TypeError, ValueError):
        return None


def _recall(ws: Workspace, path: Path) -> Plan | None:
    """Return the kept plan; None if there is none, or what it was made from has changed."""
    try:
        note, _, rest = path.read_text().partition("\n")
        if not _is_current(ws, parse_json(note)):
            return None
        return Plan.load(rest)
    except (OSError, ValueError, KeyError):
        return None


def _is_current(ws: Workspace, note: Mapping[str, Any]) -> bool:
    """Whether everything that a kept plan was made from is as its note says."""
    for name, digest in note["sources"].items():
        if of_bytes(whole(Path(name))) != digest:
            return False
    matcher = GlobMatcher(ws.root)
    for pattern, matches in note["globs"].items():
        if matcher.matches(pattern) != matches:
            return False
    every_match = itertools.chain(*note["globs"].values())
    if sorted(EarlierOutputs(ws, note["recipe"]).among(every_match)) != note["left"]:
        return False
    if not ws.asks_secrets:
        return True
    # If a secret is missing, reading the recipe says where.
    return not any(
        unusable(name, ws.environ.get(name), required=required)
        for name, required in note["secrets"]
    )


class _Compilation:
    """A request compiled from its files, with everything that was read for it."""

    def __init__(
        self,
        ws: Workspace,
        source: Path,
        text: bytes,
        request: Request,
        known: Mapping[str, tuple[str, ...]],
        trial: Trial | None = None,
    ) -> None:
        self.globs = WorkspaceGlobs(ws.root, known, ws)
        self.used = UsedRecipes(ws.root)
        self._ws, self._source, self._text, self._request = ws, source, text, request
        # Reading makes many small values and no cycles: collecting in between is wasted time.
        gc.disable()
        try:
            self.recipe, values = read_and_bind(ws, source, text, request, self.used)
            self.plan = self._compile(values, trial)
        finally:
            gc.enable()

    def _compile(self, values: dict[str, Tree], trial: Trial | None) -> Plan:
        from ..language.inputs import kind_of
        from ..planning.compile import compile_plan

        self.globs.recipe = self.recipe.id
        sources = dict(sorted(self.used.sources.items()))
        parts = [
            self.recipe.id,
            of_bytes(self._text),
            sources,
            _with_json_form(values),
            self._request.preset,
        ]
        return compile_plan(
            self.recipe,
            values,
            digest=of_value("plan/1", parts),
            used=self.used.by_place,
            globs=self.globs,
            bind=partial(bind_inputs, self._ws),
            kind_of=kind_of,
            preset=self._request.preset,
            trial=trial,
            as_disk=as_disk(self._ws.root),
        )

    def dump(self) -> list[bytes]:
        """Return the parts of the file that keeps the plan: the note that `_is_current` reads first."""
        note = {
            "recipe": self.plan.recipe,
            "sources": self.used.sources,
            "globs": self.globs.looked,
            "left": sorted(self.globs.left),
            "secrets": _secret_variables(self.recipe),
        }
        return [part.encode() for part in (json.dumps(note), "\n", *self.plan.dump())]


def _with_json_form(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (str, int, float, bool, list, dict, type(None)))
    }


def _secret_variables(recipe: Recipe) -> list[tuple[str, bool]]:
    """Return the environment variables of secrets, and whether each is required."""
    return sorted(
        (spec.env, spec.required)
        for spec in recipe.inputs.values()
        if spec.type == "secret" and spec.env
    )


def compile_on_trial(
    ws: Workspace,
    source: Path,
    request: Request,
    known: Mapping[str, tuple[str, ...]],
    trial: Trial,
) -> None:
    """Compile a request so that `trial` sees its steps; nothing is recalled or kept.

    Raises Invalid, NotFound.
    """
    _Compilation(ws, source, read_text(source), request, known, trial)


class CompiledFromFiles(NamedTuple):
    """A plan that was compiled now, and all that was read for it."""

    asked: str
    """The recipe as the request names it."""
    source: Path
    plan: Plan
    sources: Mapping[str, Digest]
    """Files of the recipes that it uses."""
    looked: Mapping[str, Sequence[str]]
    """Matches of the globs over the workspace, by pattern."""
    paths: Mapping[str, Sequence[str]]
    """Inputs that are files or folders of this disk."""


def compile_from_files(ws: Workspace, request: Request) -> CompiledFromFiles:
    """Compile a request without recalling a kept plan. Raises Invalid, NotFound."""
    from ..language.library import find

    source = find(request.recipe, ws.root)
    compilation = _Compilation(ws, source, read_text(source), request, {})
    plan, globs = _adjust(compilation.plan, request), compilation.globs
    looked = {
        pattern: [match for match in matches if match not in globs.left]
        for pattern, matches in globs.looked.items()
    }
    paths = {
        name: found
        for name, spec in compilation.recipe.inputs.items()
        if (found := _local_paths(spec, plan.inputs.get(name)))
    }
    return CompiledFromFiles(request.recipe, source, plan, compilation.used.sources, looked, paths)


def _local_paths(spec: Input, value: object) -> list[str]:
    """Return the files and folders of this disk that an input names."""
    from ..language.inputs import kind_of

    if spec.stream or not {spec.type, spec.items} & {"file", "dataset", "model"}:
        return []
    given = value if isinstance(value, list) else [value]
    files = [spec.split_member(each)[0] for each in given if isinstance(each, str)]
    return [each for each in files if kind_of(each) == "path"]


def as_stored(ws: Workspace, plan: Plan, request: Request) -> Request:
    """Return the request without credentials of addresses, and with paths from the workspace."""
    if not ws.addresses and not request.typed_in:
        return request
    bound = {
        name
        for name, value in request.inputs.items()
        if any(address in str(value) for address in ws.addresses.values())
    }
    bound |= {name for name in request.typed_in if isinstance(plan.inputs.get(name), (str, list))}
    inputs = {**request.inputs, **{name: plan.inputs[name] for name in bound}}
    return replace(request, inputs=inputs, typed_in={})
