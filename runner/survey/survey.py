"""All the I/O that a plan needs: read the recipe, compile or recall its plan, look at the disk, judge every step.  Changes nothing but caches.

A compiled plan is a pure function of the recipe's text, its inputs, the recipes it uses, the matches of its globs and our version.  It is kept under
the digest of the first two with a note of the others, so it may be absent but is never stale; a run in which nothing is to be done reads only this
note, the plan's first line, the stats of the files and the traces.

A glob over the workspace finds files of its caller's: no path that a step of the plan makes, and none that an earlier run of the recipe put there, as
long as it is as that run left it.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob
import itertools
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..digest import Digest, of_bytes, of_value
from ..errors import CannotRun, Invalid, NotFound, Problem, RecipeError
from ..paths import VERSION, Location, heads, is_path, shipped
from ..planning.ids import names
from ..planning.judge import RUN, Facts, Made, Verdict, judge
from ..planning.mentions import AUTO, Makes, excluded, is_glob, parts_of_automatic, unspelled
from ..planning.plan import COMPILER, Plan, Target
from ..planning.step import MetricsSpec
from ..reading import parse_json, unfit, whole
from ..secrets import unusable
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from . import code_files, locks
from .imports import ImportCache, followed

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe
    from ..language.values import Tree
    from ..planning.beforehand import Trial


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants run: a recipe by path or name, inputs as typed or as text, and where results go."""

    recipe: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    out: Path | None = None
    current_python: bool = False
    update: bool = False
    typed_in: Mapping[str, str] = field(
        default_factory=dict
    )  # folders of the workspace in which inputs were typed: paths among them begin there
    origins: Mapping[str, str] = field(
        default_factory=dict
    )  # the files that inputs were read from, for messages
    nodes: int = 0  # for `accelerate` steps that do not say on how many they run; 0: on one
    resources: Mapping[str, Any] = field(
        default_factory=dict
    )  # instead of those of the recipe, as a `ResourceSpec` has them


class Later(NamedTuple):
    """A step that is no node before others have run."""

    id: str
    shown: str
    why: str
    needs: Sequence[str]


@dataclass(slots=True)
class Survey:
    """A plan and what was found about it.  `targets`: where outputs must lie, node -> (output, path below the workspace or absolute)."""

    request: Request
    source: Path
    library: bool
    plan: Plan
    facts: Facts
    verdicts: list[Verdict]
    made: dict[int, Made]
    targets: dict[int, list[Target]]
    globs: dict[str, tuple[str, ...]]
    forced: frozenset[str] = frozenset()
    all: bool = False  # every step is forced
    begin: str = ""  # this step and what comes after it are forced
    only: str = ""  # the one step that was asked for
    until: str = ""  # the last step that was asked for
    aside: set[str] = field(default_factory=set)  # steps that were not asked for

    def forces(self, id: str) -> bool:
        """Whether a step was asked to run whatever is remembered."""
        return _forces(self.forced, self.all, id)

    def wanted(self, plan: Plan) -> set[int]:
        """The nodes of a plan of this request that were asked for, with what they need."""
        return plan.chosen(self.only, self.until)

    @property
    def later(self) -> list[Later]:
        """The steps that are no nodes yet, of those that were asked for."""
        waiting = self.plan.waiting
        asked = (
            set()
            if self.only
            else self.plan.leading(self.until)[1]
            if self.until
            else waiting.keys()
        )
        axes = {
            pending.step: f"one for each {pending.pattern} that {pending.producer} makes"
            for pending in self.plan.pending
        }
        return [
            Later(id, f"{id}[…]", axes[id], needs)
            if id in axes
            else Later(
                id,
                id,
                f"depends on what {', '.join(need for need in needs if need in waiting) or needs[0]} will make",
                needs,
            )
            for id, needs in waiting.items()
            if id in asked
        ]

    @property
    def todo(self) -> list[int]:
        """Nodes that are not settled: to run, perhaps to run, or to restore."""
        return [
            n
            for n, verdict in enumerate(self.verdicts)
            if verdict.answer in ("run", "maybe", "restore")
        ]

    def targets_of(self, ws: Workspace, plan: Plan) -> dict[int, list[Target]]:
        """The targets of another plan of the same request: one that has grown."""
        return _targets(ws, plan, self.library, self.request)

    @property
    def conflicts(self) -> list[str]:
        return [path for verdict in self.verdicts for path in verdict.conflicts]


def survey(
    ws: Workspace, request: Request, *, forced: frozenset[str] = frozenset(), all: bool = False
) -> Survey:
    """Find out what running `request` would do.  `forced` steps run whatever is remembered; with `all` every step does."""
    from ..language.library import find

    source = find(request.recipe, ws.root)
    library = not is_path(request.recipe)
    known: dict[str, tuple[str, ...]] = {}
    while True:
        plan = compiled(ws, source, request, known)
        request = storable(ws, plan, request)
        ws.traces.expect(plan.recipe, len(plan.nodes))
        facts = look(ws, plan, request)
        targets = _targets(ws, plan, library, request)
        facts.there = dict(
            ws.cache.contents(target.path for each in targets.values() for target in each)
        )
        facts.ours = ws.published()
        verdicts, made = judge_all(plan, facts, targets, forced=forced, all=all)
        while ws.remote_cache is not None and ws.remote_cache.learn(plan, verdicts):
            verdicts, made = judge_all(plan, facts, targets, forced=forced, all=all)
        for n, verdict in enumerate(verdicts):
            if verdict.former is not None and verdict.key is not None and verdict.made is not None:
                ws.traces.rename(verdict.former, verdict.key, plan.nodes[n].rule)
        grown = expansions(ws, plan, made)
        if not grown:
            ws.save_cache()
            return Survey(
                request, source, library, plan, facts, verdicts, made, targets, known, forced, all
            )
        known.update(grown)


def judge_all(
    plan: Plan,
    facts: Facts,
    targets: Mapping[int, list[Target]],
    *,
    forced: frozenset[str],
    all: bool,
) -> tuple[list[Verdict], dict[int, Made]]:
    """One verdict per node, from what is known before anything runs."""
    made: dict[int, Made] = {}
    verdicts = []
    for n, node in enumerate(plan.nodes):
        try:
            verdict = judge(
                plan, n, facts, made, force=_forces(forced, all, node.id), targets=targets
            )
        except CannotRun as error:  # it fails when it is its turn
            verdict = Verdict(RUN, None, (str(error),), None)
        if verdict.made is not None:
            made[n] = verdict.made
        verdicts.append(verdict)
    return verdicts, made


def expansions(ws: Workspace, plan: Plan, made: Mapping[int, Made]) -> dict[str, tuple[str, ...]]:
    """Matches of the globs below outputs that are known by now, in the compiler's spelling."""
    found = {}
    for pending in plan.pending:
        left = made.get(plan.index[pending.producer])
        if left is not None and left.ok and pending.output in left.outputs:
            if ws.remote_cache is not None:
                ws.remote_cache.outline(Content(left.outputs[pending.output]))
            matches = ws.objects.manifests.matching(
                Content(left.outputs[pending.output]), pending.pattern
            )
            found[f"{pending.producer}/{pending.output}:{pending.pattern}"] = tuple(
                entry.path for entry in matches
            )
    return found


# -- the compiled plan -----------------------------------------------------------------------------------------------------------------------------


def compiled(
    ws: Workspace, source: Path, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Plan:
    """The plan of a request, from where it is kept if what it was made from is unchanged."""
    plan = _compiled(ws, source, request, known)
    if request.nodes:
        plan.spread(request.nodes)
    if request.resources:
        plan.demand(request.resources)
    return plan


def _compiled(
    ws: Workspace, source: Path, request: Request, known: Mapping[str, tuple[str, ...]]
) -> Plan:
    text = _text(source)
    asked = [
        VERSION,
        COMPILER,
        str(source),
        of_bytes(text),
        dict(request.inputs),
        request.preset,
        {k: list(v) for k, v in known.items()},
    ]
    asked += [
        is_path(request.recipe),
        dict(request.typed_in),
    ]  # what is given by its path has its code at the root
    try:
        digest = of_value("request", asked)
    except (TypeError, ValueError):
        digest = None  # an input without a JSON form, which binding will refuse
    kept = ws.home / "plans" / f"{digest}.json"
    if digest is not None:
        plan = _recall(ws, kept)
        if plan is not None:
            return plan
    globs = Globs(ws.root, known, ws)
    sources: dict[str, Digest] = {}
    recipe, plan = _compile(ws, source, text, request, globs, sources)
    if (
        digest is not None and not ws.read_only and not ws.addresses
    ):  # what opens an address is known from the request alone
        secrets = sorted(
            (spec.env, spec.required)
            for spec in recipe.inputs.values()
            if spec.type == "secret" and spec.env
        )
        note = json.dumps(
            {
                "recipe": plan.recipe,
                "sources": sources,
                "globs": globs.looked,
                "left": sorted(globs.left),
                "secrets": secrets,
            }
        )
        ws.write(kept, *(part.encode() for part in (note, "\n", *plan.dump())))
        if not (sound := _sound(ws, of_bytes(text))).exists():
            ws.write(sound)
    return plan


def _recall(ws: Workspace, kept: Path) -> Plan | None:
    try:
        note, _, rest = kept.read_text().partition("\n")
        made_from = parse_json(note)
        for name, digest in made_from["sources"].items():
            if of_bytes(whole(Path(name))) != digest:
                return None
        folders = Folders(ws.root)
        for pattern, matches in made_from["globs"].items():
            if folders.matches(pattern) != matches:
                return None
        if (
            sorted(
                Earlier(ws, made_from["recipe"]).among(
                    itertools.chain(*made_from["globs"].values())
                )
            )
            != made_from["left"]
        ):
            return None
        if ws.asks_secrets and any(
            unusable(name, ws.environ.get(name), required=required)
            for name, required in made_from["secrets"]
        ):
            return None  # reading the recipe says where
        return Plan.load(rest)
    except (OSError, ValueError, KeyError):
        return None


def _compile(
    ws: Workspace,
    source: Path,
    text: bytes,
    request: Request,
    globs: Globs,
    sources: dict[str, Digest],
    trial: Trial | None = None,
) -> tuple[Recipe, Plan]:
    import gc

    # Reading makes a great many small values and no cycles; the collector would walk them again and again.
    gc.disable()
    try:
        return _compile_now(ws, source, text, request, globs, sources, trial)
    finally:
        gc.enable()


def compiled_on_trial(
    ws: Workspace, source: Path, request: Request, globs: Globs, trial: Trial
) -> None:
    """Compile a request anew so that `trial` sees its steps.  Raises Invalid, NotFound."""
    _compile(ws, source, _text(source), request, globs, {}, trial)


def read(ws: Workspace, request: Request) -> tuple[Recipe, dict[str, Tree]]:
    """The recipe that is asked for, and a value for each of its inputs.  Raises NotFound, Invalid."""
    from ..language.library import find

    source = find(request.recipe, ws.root)
    return _read(ws, source, _text(source), request, {}, {})


def input_types(ws: Workspace, found: Survey) -> dict[str, dict[str, str]]:
    """The types of the inputs of a recipe, and of those that it uses, by the ids of recipes.  Raises NotFound, Invalid."""
    recipe = _parsed(ws, _text(found.source), str(found.source))
    if is_path(found.request.recipe):
        recipe = placed(recipe, found.source, ws.root)
    used: dict[str, Recipe] = {}
    load_used(ws.root, recipe, used, {})
    return {
        each.id: {name: spec.type for name, spec in each.inputs.items()}
        for each in (*used.values(), recipe)
    }


def _text(source: Path) -> bytes:
    try:
        return whole(source)
    except OSError as error:
        raise NotFound(f"{source} cannot be read: {error.strerror}") from error


def _sound(ws: Workspace, text: Digest) -> Path:
    """A file that is there if the schema has found nothing in the recipe of this text: looking takes longer than all other reading."""
    from ..language.library import schema_text

    try:
        schema = schema_text()
    except FileNotFoundError:  # of a shelf with recipes alone
        schema = ""
    return ws.home / "plans" / f"{of_value('sound', [VERSION, schema, text])}.sound"


def _parsed(ws: Workspace, text: bytes, name: str) -> Recipe:
    return _parsed_once(text, name, _sound(ws, of_bytes(text)).exists())


@lru_cache(
    maxsize=1
)  # a first run reads its recipe before there is a workspace, and then compiles it
def _parsed_once(text: bytes, name: str, sound: bool) -> Recipe:
    from ..language import document, parse

    return parse.recipe(document.parse(text, name), sound=sound)


def _read(
    ws: Workspace,
    source: Path,
    text: bytes,
    request: Request,
    used: dict[str, Recipe],
    sources: dict[str, Digest],
) -> tuple[Recipe, dict[str, Tree]]:
    from ..language import unread

    recipe = _parsed(ws, text, str(source))
    if is_path(request.recipe):
        recipe = placed(recipe, source, ws.root)
    load_used(ws.root, recipe, used, sources)
    values = _bind(
        ws,
        recipe,
        request.inputs,
        preset=request.preset,
        environment=ws.environ if ws.asks_secrets else None,
        origins=request.origins,
    )
    if wrong := unread.refused(recipe, request.inputs, request.preset, request.origins):
        raise Invalid(wrong)
    for name in request.typed_in.keys() & values.keys():
        values[name] = _from_root(
            recipe.inputs[name], values[name], Location(ws.root, request.typed_in[name])
        )
    return recipe, values


def _compile_now(
    ws: Workspace,
    source: Path,
    text: bytes,
    request: Request,
    globs: Globs,
    sources: dict[str, Digest],
    trial: Trial | None,
) -> tuple[Recipe, Plan]:
    from ..language import inputs
    from ..planning.compile import compile_plan

    used: dict[str, Recipe] = {}
    recipe, values = _read(ws, source, text, request, used, sources)
    globs.recipe = recipe.id
    bind = partial(_bind, ws)
    digest = of_value(
        "plan/1",
        [
            recipe.id,
            of_bytes(text),
            dict(sorted(sources.items())),
            _identity_of(values),
            request.preset,
        ],
    )
    plan = compile_plan(
        recipe,
        values,
        digest=digest,
        used=used,
        globs=globs,
        bind=bind,
        kind_of=inputs.kind_of,
        preset=request.preset,
        trial=trial,
    )
    return recipe, plan


def _bind(ws: Workspace, recipe: Recipe, given: Mapping[str, Any], **how: Any) -> dict[str, Tree]:
    """`inputs.bind`, with addresses as they may be stored: what opens one is kept in `ws.addresses`.  Raises Invalid."""
    from ..language import inputs

    def stored(name: str, value: Tree) -> Tree:
        if not isinstance(value, str):
            return value
        address, private = inputs.divided(value)
        if not private:
            return value
        if recipe.inputs[name].stream:
            words, fix = (
                "is streamed, so that its address stands in the command, and what opens it would, too",
                "say `stream: false` in the recipe",
            )
            raise Invalid(
                [
                    recipe.document.problem(
                        "streamed-secret", f'"{name}" {words}', ("inputs", name), fix=fix, key=True
                    )._replace(input=name)
                ]
            )
        if ws.addresses.setdefault(address, value) != value:
            words = f"two inputs are {address} with different queries; a query opens a file and is no part of its name"
            raise Invalid(
                [Problem("two-queries", words, fix="fetch them into files, and give these")]
            )
        return address

    values = inputs.bind(recipe, given, **how)
    for name, value in values.items():
        if {recipe.inputs[name].type, recipe.inputs[name].items} & {"file", "dataset", "model"}:
            values[name] = (
                [stored(name, item) for item in value]
                if isinstance(value, list)
                else stored(name, value)
            )
    return values


def _from_root(spec: Input, value: Tree, location: Location) -> Tree:
    """A value that was typed there: a path in it begins there."""
    from ..language.inputs import kind_of

    if isinstance(value, list):
        return [_from_root(spec, item, location) for item in value]
    if (
        not isinstance(value, str)
        or not {spec.type, spec.items} & {"file", "dataset", "model"}
        or kind_of(value) != "path"
        or value[:1] in "/~"
    ):
        return value
    path = location.typed(value)
    return (
        f"./{path}" if "model" in (spec.type, spec.items) else path
    )  # a model's bare name is the Hub's


def storable(ws: Workspace, plan: Plan, request: Request) -> Request:
    """The request without what opens its addresses, and with paths that begin at the workspace."""
    if not ws.addresses and not request.typed_in:
        return request
    bound = {
        name
        for name, value in request.inputs.items()
        if any(address in str(value) for address in ws.addresses.values())
    }
    bound |= {name for name in request.typed_in if isinstance(plan.inputs.get(name), (str, list))}
    return replace(
        request,
        inputs={**request.inputs, **{name: plan.inputs[name] for name in bound}},
        typed_in={},
    )


def placed(recipe: Recipe, source: Path, root: Path) -> Recipe:
    """A recipe that is given by its path: below the workspace its own paths begin there; one of the library keeps its folder."""
    from ..planning.roots import rooted

    return (
        recipe
        if source.is_relative_to(shipped() / "recipes")
        else rooted(recipe, os.path.abspath(source), os.path.abspath(root))
    )


def load_used(
    root: Path, recipe: Recipe, used: dict[str, Recipe], sources: dict[str, Digest]
) -> None:
    """Read every recipe that `recipe` uses, and those that they use.  Raises Invalid."""
    from ..language import document, parse
    from ..language.library import find
    from ..planning.mentions import which

    problems = []
    for step in recipe.steps.values():
        if step.uses is None or (place := which(recipe, step.uses)) in used:
            continue
        name = step.uses.recipe
        try:
            path = Path(recipe.document.name).parent / name if is_path(name) else find(name, root)
            text = whole(path)
        except (NotFound, OSError) as error:
            absent = isinstance(error, (NotFound, FileNotFoundError))
            message = (
                f'there is no recipe "{name}"'
                if absent
                else f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
            )
            fix = (
                error.fix
                if isinstance(error, NotFound)
                else "name the file of a recipe, or a recipe of the library"
            )
            problems.append(
                recipe.document.problem("unknown-recipe", message, (*step.origin, "uses"), fix=fix)
            )
            continue
        sources[str(path)] = of_bytes(text)
        other = parse.recipe(document.parse(text, str(path)))
        if recipe.home and is_path(name):
            other = placed(other, path, root)
        used[place] = other
        load_used(root, other, used, sources)
    if problems:
        raise Invalid(problems)


class Globs(Mapping[str, tuple[str, ...]]):
    """Matches as the compiler asks for them, without what earlier runs of `recipe` left; what it looked at is remembered."""

    def __init__(
        self, root: Path, known: Mapping[str, tuple[str, ...]], ws: Workspace | None = None
    ) -> None:
        self.looked: dict[str, list[str]] = {}
        self.left: set[str] = set()
        self.recipe = ""
        self._folders, self._known, self._ws = Folders(root), known, ws

    def __getitem__(self, pattern: str) -> tuple[str, ...]:
        if pattern in self._known:
            return self._known[pattern]
        if ":" in pattern:
            raise KeyError(pattern)
        self.looked[pattern] = found = self._folders.matches(pattern)
        left = Earlier(self._ws, self.recipe).among(found) if self._ws is not None else set()
        self.left |= left
        return tuple(match.rstrip("/") for match in found if match not in left)

    def __iter__(self) -> Iterator[str]:
        return iter(self.looked)

    def __len__(self) -> int:
        return len(self.looked)


class Folders:
    """Matches of patterns below a folder.  A folder that many patterns look into is listed once, and is not expected to change meanwhile."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[str, list[str]] = {}

    def matches(self, pattern: str) -> list[str]:
        """What `glob` finds, `**` included, sorted."""
        folder, name = os.path.split(pattern)
        if glob.has_magic(folder) or not glob.has_magic(name) or name == "**":
            matches = glob.glob(pattern, root_dir=self._root, recursive=True)
            # `nope/**` matches `nope/`, whether that is there or not.
            return sorted(
                each for each in matches if each[-1] != "/" or os.path.isdir(self._root / each)
            )
        if folder not in self._names:
            try:
                self._names[folder] = sorted(os.listdir(self._root / folder))
            except OSError:
                self._names[folder] = []
        names = self._names[folder]
        if start := re.split(r"[*?[]", name, maxsplit=1)[0]:
            begin = bisect.bisect_left(names, start)
            names = list(
                itertools.takewhile(
                    lambda each: each.startswith(start), itertools.islice(names, begin, None)
                )
            )
        found = fnmatch.filter(names, name)
        return [os.path.join(folder, each) for each in found if each[0] != "." or name[0] == "."]


class Earlier:
    """What runs of a recipe put below the workspace.  What its caller adopted, or changed since, is a file of the caller's again."""

    def __init__(self, ws: Workspace, recipe: str) -> None:
        self._ws, self._recipe = ws, recipe

    @cached_property
    def _rows(self) -> dict[str, tuple[str, str]]:
        """Paths below the workspace: how the store spells each, and the content that it was left with."""
        head = f"{self._ws.root}/"
        return {
            path.removeprefix(head): (path, row.content)
            for path, row in self._ws.store.index.published(self._recipe).items()
            if row.run
        }

    @cached_property
    def _above(self) -> set[str]:
        return {above for path in self._rows for above in heads(path)[1:]}

    def among(self, paths: Iterable[str]) -> set[str]:
        """Those of `paths` that a run left, that lie below what one left, or that are folders of such files and hold nothing else."""
        at = {path: posixpath.normpath(path) for path in paths}
        if not at or not self._rows:
            return set()
        made = {
            path: head for path, plain in at.items() for head in heads(plain) if head in self._rows
        }
        same = {head for head in dict.fromkeys(made.values()) if self._untouched(head)}
        return {
            path
            for path, plain in at.items()
            if made.get(path) in same or (plain in self._above and self._nothing_else(plain))
        }

    def _untouched(self, path: str) -> bool:
        spelled, content = self._rows[path]
        try:
            return (
                not os.path.islink(self._ws.root / path)
                and self._ws.cache.content_of(spelled) == content
            )
        except (
            RecipeError
        ):  # a pipe, or a link that leads out: nothing that we would have put there
            return False

    def _nothing_else(self, folder: str) -> bool:
        found = [
            os.path.relpath(os.path.join(at, name), self._ws.root)
            for at, _, names in os.walk(self._ws.root / folder)
            for name in names
        ]
        return len(self.among(found)) == len(found)


# -- the world -------------------------------------------------------------------------------------------------------------------------------------


class Anew(NamedTuple):
    """A request compiled without what is kept of earlier plans, and all that was read for it."""

    asked: str
    source: Path
    plan: Plan
    sources: Mapping[str, Digest]
    """Recipes that it uses, by path."""
    looked: Mapping[str, Sequence[str]]
    """Matches of the globs over the workspace, by pattern."""
    paths: Mapping[str, Sequence[str]]
    """Inputs that are files or folders of this disk."""


def compiled_anew(ws: Workspace, request: Request) -> Anew:
    """The same plan with what it was made from.  Raises Invalid, NotFound."""
    from ..language.inputs import kind_of
    from ..language.library import find

    source = find(request.recipe, ws.root)
    globs, sources = Globs(ws.root, {}, ws), dict[str, Digest]()
    recipe, plan = _compile(ws, source, _text(source), request, globs, sources)
    if request.nodes:
        plan.spread(request.nodes)
    if request.resources:
        plan.demand(request.resources)
    paths = {}
    for name, spec in recipe.inputs.items():
        value = (
            plan.inputs.get(name)
            if {spec.type, spec.items} & {"file", "dataset", "model"} and not spec.stream
            else None
        )
        given = value if isinstance(value, list) else [value]
        files = [spec.parted(each)[0] for each in given if isinstance(each, str)]
        paths[name] = [each for each in files if kind_of(each) == "path"]
    looked = {
        pattern: [match for match in found if match not in globs.left]
        for pattern, found in globs.looked.items()
    }
    return Anew(
        request.recipe,
        source,
        plan,
        sources,
        looked,
        {name: values for name, values in paths.items() if values},
    )


def look(ws: Workspace, plan: Plan, request: Request) -> Facts:
    """Contents of everything that the plan's nodes refer to."""
    facts = Facts(ws.traces, _Trees(ws), stored=ws.stored, numbers=partial(_numbers, ws, plan))
    wanted: dict[str, None] = {}
    theirs, reader = _Theirs(ws, plan), ImportCache(ws)
    for node in plan.nodes:
        for dep in node.deps:
            if is_glob(dep):
                if dep not in facts.matches:
                    facts.matches[dep] = theirs.matches(dep)
                for match in facts.matches[dep]:
                    wanted[match] = None
            else:
                wanted[dep] = None
        for pattern in node.code:
            if (node.home, pattern) not in facts.code:
                facts.code[node.home, pattern] = _code(
                    ws, plan.homes[node.home], pattern, theirs, reader
                )
        for source in node.takes:
            if source.asked not in facts.takes:
                facts.takes[source.asked] = _identity(
                    ws, source.kind, source.address, source.only, update=request.update
                )
        if node.lock and not request.current_python and (node.home, node.lock) not in facts.locks:
            facts.locks[node.home, node.lock] = _lock(ws, Path(plan.homes[node.home], node.lock))
    reader.save()
    facts.files = dict(ws.cache.contents(wanted))
    if request.current_python:
        from ..extensions import packages

        facts.current_python = of_value("packages/1", packages())
    return facts


def _numbers(ws: Workspace, plan: Plan, key: str, rule: MetricsSpec) -> Mapping[str, Any] | None:
    """The metrics of a key by a rule that is new, read from what is kept of its attempt; None where nothing is."""
    from .numbers import read

    return read(ws, plan, key, rule)


class _Theirs:
    """Matches of globs that are files of the caller's: not what the plan makes, nor what an earlier run of it left."""

    def __init__(self, ws: Workspace, plan: Plan) -> None:
        self._plan, self._folders, self._earlier = plan, Folders(ws.root), Earlier(ws, plan.recipe)

    @cached_property
    def _makes(self) -> Makes:
        return Makes(
            node.prefix + output.path for node in self._plan.nodes for output in node.outputs
        )

    def matches(self, dep: str) -> list[str]:
        """What a glob of `deps` matches, sorted."""
        pattern, exclude = unspelled(dep)
        return self.among(
            [
                match.rstrip("/")
                for match in self._folders.matches(pattern)
                if not excluded(match, exclude)
            ]
        )

    def among(self, paths: list[str]) -> list[str]:
        left = [path for path in paths if not self._makes.meets(path)]
        ours = self._earlier.among(left)
        return [path for path in left if path not in ours]


def _identity(
    ws: Workspace, kind: str, address: str, only: Sequence[str], *, update: bool
) -> str | None:
    if kind == "path":
        source = str(ws.absolute(address))
        if only and os.path.isdir(source):
            from ..storage.sources import chosen

            return chosen(ws.cache, source, only)[0]
        return ws.cache.content_of(str(ws.absolute(address)))
    from ..storage.sources import resolve

    return resolve(ws, kind, address, update=update)


def _lock(ws: Workspace, path: Path) -> Content | None:
    """The content of the lock for what a recipe names, which is made first where that pins nothing; None where it is not there.  Raises CannotRun."""
    if not locks.is_current(path) and not ws.read_only:
        locks.make(path, ws.environ)
    path = locks.file_of(path)
    try:
        wrong = unfit(path.stat())
    except OSError:
        return None
    if wrong:
        raise CannotRun(
            f"{path} cannot be read as a lock: {wrong}",
            fix="make it with the tool that locks packages",
        )
    return ws.cache.content_of(str(path.resolve()))


def _code(
    ws: Workspace, home: str, text: str, theirs: _Theirs, reader: ImportCache
) -> list[tuple[str, str]]:
    base = os.path.realpath(home)
    auto = unspelled(text)[0] == AUTO
    names = (
        sorted(followed(base, *parts_of_automatic(text), reader.read).files)
        if auto
        else code_files.matches(base, text)
    )
    root = f"{os.path.realpath(ws.root)}/"
    if f"{base}/".startswith(root) and (auto or is_glob(text) or code_files.is_folder(base, text)):
        at = {f"{base}/{name}".removeprefix(root): name for name in names}
        names = [at[path] for path in theirs.among(list(at))]
    contents = ws.cache.contents(f"{base}/{name}" for name in names)
    return [
        (name, content) for name in names if (content := contents[f"{base}/{name}"]) is not None
    ]


class _Trees(dict[str, Mapping[str, str]]):
    """Manifests of stored trees, read when a step takes a file below one."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __missing__(self, content: str) -> Mapping[str, str]:
        if self._ws.remote_cache is not None:
            self._ws.remote_cache.outline(Content(content))
        entries = self._ws.objects.manifests.entries(Content(content))
        self[content] = {
            entry.path: f"{entry.kind}:{entry.value}" for entry in entries if entry.kind in "fx"
        }
        return self[content]


def _targets(ws: Workspace, plan: Plan, library: bool, request: Request) -> dict[int, list[Target]]:
    """Where each published output must lie."""
    base = out_dir(ws, plan, library, request)
    head = "" if base == ws.root else f"{base}/"
    targets: dict[int, list[Target]] = {}
    for n, output, path, _name in plan.publish:
        targets.setdefault(n, []).append(Target(output, head + path))
    return targets


def out_dir(ws: Workspace, plan: Plan, library: bool, request: Request) -> Path:
    """The folder that results are published below: the workspace for a recipe given by path, `out/NAME@VERSION/DIGEST` for one of the library."""
    if request.out is not None:
        return ws.absolute(str(request.out))
    return ws.root / "out" / plan.recipe / plan.digest[:12] if library else ws.root


def _forces(forced: frozenset[str], all: bool, id: str) -> bool:
    return all or (bool(forced) and not forced.isdisjoint(names(id)))


def _identity_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (str, int, float, bool, list, dict, type(None)))
    }
