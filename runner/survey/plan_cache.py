"""Compile the plan of a request, or load the cached plan.

A compiled plan depends only on the recipe's text, its inputs, the recipes it uses, the matches of
its globs, and the version of this program. It is cached under the digest of the first two, with a
note of the others, so it may be missing but is never stale. A no-op run reads only this note, the
plan's first line, the file stats and the traces.
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
from ..language.library import find
from ..paths import VERSION, is_path
from ..planning import plan as plan_rows
from ..planning import step as step_rows
from ..planning.plan import COMPILER, Plan
from ..reading import parse_json, whole
from ..secrets import describe_unusable
from ..storage.workspace import Workspace
from .caller_files import EarlierOutputs, GlobMatcher, WorkspaceGlobs
from .disk_names import as_disk
from .recipes import UsedRecipes, bind_inputs, read_and_bind, read_text, schema_mark, takes_path
from .request import Request

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe
    from ..language.values import Tree
    from ..planning.beforehand import DryRun


_JSON_TYPES = (str, int, float, bool, list, dict, type(None))


def compile_request(
    ws: Workspace, source: Path, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Plan:
    """Compile a request to a plan, or load the cached plan if its sources are unchanged.

    `known` has the matches of globs below outputs. Raises NotFound, Invalid.
    """
    text = read_text(source)
    digest = _request_digest(source, text, request, known)
    path = ws.home / "plans" / f"{digest}.json"
    plan = _recall(ws, path) if digest is not None else None
    if plan is None:
        compilation = _Compilation(ws, source, text, request, known)
        plan = compilation.plan
        # Address credentials come only with the request, and would be missing later.
        may_store = not ws.read_only and not ws.addresses
        if digest is not None and may_store:
            ws.write(path, *compilation.dump())
            mark = schema_mark(ws, of_bytes(text))
            if not mark.exists():
                ws.write(mark)
    return _adjust(plan, request)


def _adjust(plan: Plan, request: Request) -> Plan:
    """Apply the request's node count and resources, which are not part of the cached plan."""
    if request.nodes:
        plan.spread(request.nodes)
    if request.resources:
        plan.demand(request.resources)
    return plan


def _request_digest(
    source: Path, text: bytes, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Digest | None:
    """Return the cache key of a request's plan.

    None if an input has no JSON form; binding rejects it later.
    """
    parts = [
        VERSION,
        COMPILER,
        _row_fields(),
        str(source),
        of_bytes(text),
        dict(request.inputs),
        request.preset,
        {pattern: list(matches) for pattern, matches in known.items()},
        is_path(request.recipe),  # a recipe given by path has its code at the root
        dict(request.typed_in),
    ]
    try:
        return of_value("request", parts)
    except (TypeError, ValueError):
        return None


def _row_fields() -> dict[str, tuple[str, ...]]:
    """Return the fields of a stored plan's rows, by row type.

    A plan with other fields has another name, so its rows are never read as rows of this version.
    """
    types = {**vars(plan_rows), **vars(step_rows)}
    return {name: type._fields for name, type in types.items() if hasattr(type, "_fields")}


def _recall(ws: Workspace, path: Path) -> Plan | None:
    """Load a cached plan, or return None if it is missing, damaged or outdated."""
    try:
        note, _, rest = path.read_text().partition("\n")
        if not _is_current(ws, parse_json(note)):
            return None
        return Plan.load(rest)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_current(ws: Workspace, note: Mapping[str, Any]) -> bool:
    """Return True if the sources listed in a cached plan's header are unchanged."""
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
    # If a secret is missing, parsing the recipe reports its location.
    return not any(
        describe_unusable(name, ws.environ.get(name), required=required)
        for name, required in note["secrets"]
    )


class _Compilation:
    """Compilation of a request, with everything read for it."""

    def __init__(
        self,
        ws: Workspace,
        source: Path,
        text: bytes,
        request: Request,
        known: Mapping[str, tuple[str, ...]],
        trial: DryRun | None = None,
    ) -> None:
        self.globs = WorkspaceGlobs(ws.root, known, ws)
        self.used = UsedRecipes(ws.root)
        self._ws, self._source, self._text, self._request = ws, source, text, request
        # Parsing creates many small values without cycles, so garbage collection would waste time.
        gc.disable()
        try:
            self.recipe, values = read_and_bind(ws, source, text, request, self.used)
            self.plan = self._compile(values, trial)
        finally:
            gc.enable()

    def _compile(self, values: dict[str, Tree], trial: DryRun | None) -> Plan:
        from ..language.addresses import kind_of
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
            used=self.used.by_name,
            globs=self.globs,
            bind=partial(bind_inputs, self._ws),
            kind_of=kind_of,
            preset=self._request.preset,
            trial=trial,
            as_disk=as_disk(self._ws.root),
        )

    def dump(self) -> list[bytes]:
        """Return the parts of the plan cache file, starting with the header for `_is_current`."""
        note = {
            "recipe": self.plan.recipe,
            "sources": self.used.sources,
            "globs": self.globs.looked,
            "left": sorted(self.globs.left),
            "secrets": _secret_variables(self.recipe),
        }
        return [part.encode() for part in (json.dumps(note), "\n", *self.plan.dump())]


def _with_json_form(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, _JSON_TYPES)}


def _secret_variables(recipe: Recipe) -> list[tuple[str, bool]]:
    """Return the environment variables of secrets, and whether each is required."""
    found = []
    for spec in recipe.inputs.values():
        if spec.type == "secret" and spec.env:
            found.append((spec.env, spec.required))
    return sorted(found)


def compile_on_trial(
    ws: Workspace,
    source: Path,
    request: Request,
    known: Mapping[str, tuple[str, ...]],
    trial: DryRun,
) -> None:
    """Compile a request for a trial rendering, without the cache.

    Raises Invalid, NotFound.
    """
    _Compilation(ws, source, read_text(source), request, known, trial)


class CompiledFromFiles(NamedTuple):
    """A freshly compiled plan, with all recipes and inputs read for it."""

    asked: str
    """Recipe as named in the request."""
    source: Path
    plan: Plan
    sources: Mapping[str, Digest]
    """Files of the recipes that it uses."""
    looked: Mapping[str, Sequence[str]]
    """Matches of the globs over the workspace, by pattern."""
    paths: Mapping[str, Sequence[str]]
    """Inputs that are local files or directories."""


def compile_from_files(ws: Workspace, request: Request) -> CompiledFromFiles:
    """Compile the plan of a request without the plan cache. Raises Invalid, NotFound."""
    source = find(request.recipe, ws.root)
    compilation = _Compilation(ws, source, read_text(source), request, {})
    plan, globs = _adjust(compilation.plan, request), compilation.globs
    looked: dict[str, list[str]] = {}
    for pattern, matches in globs.looked.items():
        looked[pattern] = [match for match in matches if match not in globs.left]
    paths: dict[str, list[str]] = {}
    for name, spec in compilation.recipe.inputs.items():
        found = _local_paths(spec, plan.inputs.get(name))
        if found:
            paths[name] = found
    return CompiledFromFiles(request.recipe, source, plan, compilation.used.sources, looked, paths)


def _local_paths(spec: Input, value: object) -> list[str]:
    """Return the local files and directories to which an input value refers."""
    from ..language.addresses import kind_of

    # A streamed input is an address that the step's own program reads.
    if spec.stream or not takes_path(spec):
        return []
    given = value if isinstance(value, list) else [value]
    found = []
    for each in given:
        if isinstance(each, str):
            file, _ = spec.split_member(each)
            if kind_of(file) == "path":
                found.append(file)
    return found


def as_stored(ws: Workspace, plan: Plan, request: Request) -> Request:
    """Return the request to store: no credentials in addresses, paths relative to the workspace."""
    if not ws.addresses and not request.typed_in:
        return request
    bound: set[str] = set()
    for name, value in request.inputs.items():
        if any(address in str(value) for address in ws.addresses.values()):
            bound.add(name)
    for name in request.typed_in:
        if isinstance(plan.inputs.get(name), (str, list)):
            bound.add(name)
    inputs = {**request.inputs, **{name: plan.inputs[name] for name in bound}}
    return replace(request, inputs=inputs, typed_in={})
