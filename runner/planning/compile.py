"""Compile a Recipe and its inputs into a Plan.  Pure: what the disk says (glob matches, other recipes) is handed in.

mention = edge      every `steps.x.y` in a step's leaves is an edge, taken or not: errors and the plan do not depend on values
reads = key         every named value that a leaf mentions is part of the author's half of the key
matrix              a step becomes one node per combination; an axis over files that a step makes stays pending until that step is done
globs               no match is a path that a step of the plan makes, holds or lies below one: compiled with all matches, then without those
uses                the other recipe's steps, ids `outer/inner`, keys as if it had been run alone; only publishing knows the prefix
"""

from __future__ import annotations

import itertools
import json
import math
import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from ..digest import Digest, of_value
from ..errors import Invalid, Problem
from ..language.recipe import GitCode, Resources
from ..paths import escapes, heads
from . import constants
from .assemble import assemble
from .drafts import Draft, Namespaces, PathValue, Results, Scope, Sketch, is_path_value, plain_value
from .mentions import Makes, Misnamed, Near, excluded, is_glob, may_make, ordered, reaches, selected, spelled, steps_of, templates, walk
from .path_rules import BELOW, WORKSPACE, misplaced, unfit
from .plan import ALLOW_FAILURE, LOCAL, SELECT, SKIP, STATEFUL, UNCACHED, WHEN_LATE, Pending, Plan
from .step import (
    DIRECTORY,
    NONEMPTY,
    NOTHING,
    OPTIONAL,
    TEMPORARY,
    Author,
    GitSpec,
    MetricAsked,
    MetricsSpec,
    Names,
    ResourceSpec,
    SecretSpec,
    SelectSpec,
    Source,
    StateSpec,
    StepSpec,
    SyncSpec,
)

if TYPE_CHECKING:
    from ..language.recipe import Glob, Input, Output, Preset, Recipe, State, Step, Uses
    from ..language.values import Tree, Where

MOST_STEPS: Final = 100_000
"""Steps of one plan."""
LATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("id", "recipe"),
    "step": ("id", "key"),
    "node": ("rank",),
    "nodes": ("count", "addresses"),
    "host": ("gpus", "cpus"),
}


def compile_plan(
    recipe: Recipe,
    values: Mapping[str, Tree],
    *,
    digest: Digest,
    used: Mapping[str, Recipe],
    globs: Mapping[str, tuple[str, ...]],
    bind: Callable[..., dict[str, Tree]],
    kind_of: Callable[[str], str],
    preset: str | None = None,
) -> Plan:
    """Bind `values` (one per declared input) and expand every step.

    `used` has each recipe named by a `uses`, by the name written there; `globs` the sorted matches of each workspace pattern (`pattern`) and of each
    pattern below an output (`step/output:pattern`) known so far; `bind` and `kind_of` are `language.inputs`'.  Raises Invalid with every problem.
    """
    left_out: dict[str, _Found] = {}
    while True:
        compiler = _Compiler(used, globs, bind, kind_of, left_out)
        compiler.add(recipe, values, prefix="", preset=preset)
        makes = compiler.makes()
        if not (more := {path: found for path, found in compiler.found.items() if makes.meets(path)}):
            break
        left_out |= more  # it only grows, and no output comes with a match that goes: this ends
    for path, (there, axis, where) in left_out.items():
        if not makes.meets(path):
            message = f'"{path}", which the axis "{axis}" matches, is or holds what its instance makes: it would not be the same before and after'
            compiler.sketch.problem(there, "matrix-axis", message, where, fix="make the output elsewhere, or leave the path out with `exclude`")
    return assemble(compiler.sketch, recipe, values, digest, recipe.presets[preset].limits if preset else None)


_NONE: Final[list[Any]] = []
_UNSAID: Final = Resources()


class _Found(NamedTuple):
    """Where a match comes from: an axis of a recipe, and the place of its pattern."""

    recipe: Recipe
    axis: str
    where: Where


class _Mentioned(NamedTuple):
    """What one step mentions of others, by their ids."""

    outputs: dict[str, dict[str, Tree]]
    metrics: dict[str, list[MetricAsked]]


class _Compiler:
    def __init__(
        self,
        used: Mapping[str, Recipe],
        globs: Mapping[str, tuple[str, ...]],
        bind: Callable[..., dict[str, Tree]],
        kind_of: Callable[[str], str],
        left_out: Collection[str],
    ) -> None:
        self.used, self.globs, self.bind, self.kind_of, self.left_out = used, globs, bind, kind_of, left_out
        self.full = False  # there are more steps than a plan may have
        self.found: dict[str, _Found] = {}  # workspace paths that became values of an axis
        self.sketch = Sketch()
        self.depth: list[str] = []

    def makes(self) -> Makes:
        """Every path that a step makes, if there is a match that may be one."""
        return Makes(d.prefix + path for d in self.sketch.drafts for path, _ in d.outputs.values()) if self.found or self.left_out else Makes(())

    # -- one recipe ------------------------------------------------------------------------------------------------------------------------------

    def add(
        self, recipe: Recipe, values: Mapping[str, Tree], *, prefix: str, preset: str | None, variables: Mapping[str, str] | None = None,
        asked: Resources = _UNSAID, named: bool = False,
    ) -> Scope:  # fmt: skip
        home = posixpath.dirname(recipe.document.name) or "."
        if home not in self.sketch.homes:
            self.sketch.homes.append(home)
        scope = Scope(recipe, self._take(recipe, values), prefix, self.sketch.homes.index(home), asked, named)
        scope.variables.update(variables or {})
        if self.sketch.top is None:
            self.sketch.top = scope
        chosen = recipe.presets.get(preset) if preset else None
        self.depth.append(recipe.id)
        self.sketch.problems += [found for found in misplaced(recipe) if found not in self.sketch.problems]
        order, loops = ordered(recipe)
        for loop in loops:
            path = " -> ".join(loop)
            self.sketch.problem(
                recipe,
                "cycle",
                f"steps need each other: {path}",
                recipe.steps[loop[0]].origin,
                fix="remove one of these mentions or `needs`",
                key=True,
            )
        if not loops:
            begun = len(self.sketch.drafts)
            for id in order:
                self._step(scope, recipe.steps[id], chosen, preset)
            made = {d.prefix + path: (d, output) for d in self.sketch.drafts if not d.flags & SELECT for output, (path, _) in d.outputs.items()}
            inside = {folder: path for path in made for folder in heads(path)[1:]}
            near = Near(made)
            for draft in self.sketch.drafts[begun:]:
                if draft.recipe is recipe and draft.prefix == prefix:
                    self._deps(scope, draft, made, inside, near)
        self.depth.pop()
        return scope

    def _take(self, recipe: Recipe, values: Mapping[str, Tree]) -> dict[str, Tree]:
        """Input values as templates see them: files, datasets and models become the names under which an attempt finds them."""
        seen: dict[str, Tree] = {}
        for name, spec in recipe.inputs.items():
            if spec.type == "secret":
                continue
            value = values.get(name)
            if isinstance(value, list):
                kind = spec.items or ""
                seen[name] = [self._named(item, f"inputs/{name}/{n}", spec, kind) for n, item in enumerate(value)]
            else:
                seen[name] = self._named(value, f"inputs/{name}", spec, spec.type)
        return seen

    def _named(self, value: Tree, folder: str, spec: Input, type: str) -> Tree:
        """One value; a path gets the name under which an attempt finds it, which keeps its last part: programs go by suffixes."""
        if isinstance(value, PathValue):
            base = _last(value.name) or spec.name
            given = value.kind in ("step", "below", "dep") or not spec.only
            return PathValue(f"{folder}/{base}", value.kind, value.address if given else (value.address[0], spec.only))
        if type not in ("file", "dataset", "model") or not isinstance(value, str):
            return value
        kind = self.kind_of(value)
        if kind != "path" and spec.stream:
            return PathValue(value, "stream", (value, ()))
        whole = value if kind == "path" else value.split("@")[0]
        return PathValue(f"{folder}/{_last(whole) or spec.name}", kind, (value, spec.only))

    def _step(self, scope: Scope, step: Step, chosen: Preset | None, preset: str | None) -> None:
        if step.uses:
            self._uses(scope, step, step.uses, preset)
        elif step.select:
            self._select(scope, step)
        else:
            self._plain(scope, step, chosen)

    # -- steps with a command --------------------------------------------------------------------------------------------------------------------

    def _plain(self, scope: Scope, step: Step, chosen: Preset | None) -> None:
        recipe = scope.recipe
        known = self.sketch.mentions_known(scope, step)
        if isinstance(step.run, str) and "{{" in step.run:
            from ..language import shell

            for error in shell.errors(step.run, bash=step.shell == "bash"):
                self.sketch.template_problem(scope, error, (*step.origin, "run"))
        if isinstance(step.run, str):
            self._shell_variables(recipe, step)
        waits = [name for name in steps_of(step) if name in scope.pending]
        waits += [id for id in scope.pending for o in recipe.steps[id].outputs if any(may_make(o.path, dep) for dep in step.reads)]
        axes = self._combinations(scope, step)
        if waits or axes is None:
            scope.pending.add(step.id)
            return
        drafts = []
        for combination in axes:
            draft = Draft(
                self._name(scope, step.id, combination),
                step,
                recipe,
                scope.home,
                scope.prefix,
                scope.inputs,
                combination,
                order=len(self.sketch.drafts),
            )
            self.sketch.drafts.append(draft)
            drafts.append(draft)
            self._outputs(scope, draft)
            self._fill(scope, draft, chosen, known=known)
        scope.groups[step.id] = drafts
        if step.matrix is not None:
            scope.many.add(step.id)
            scope.results[step.id] = {o.name: [self._made(d, o.name) for d in drafts if not d.flags & SKIP] for o in step.outputs}
        else:
            scope.results[step.id] = {o.name: self._made(drafts[0], o.name) for o in step.outputs}

    def _name(self, scope: Scope, id: str, combination: Mapping[str, Tree]) -> str:
        return f"{scope.prefix}{id}" + (f"[{','.join(f'{k}={_encoded(v)}' for k, v in combination.items())}]" if combination else "")

    def _made(self, draft: Draft, output: str) -> PathValue:
        return PathValue(draft.outputs[output][0], "step", (draft, output))

    def _combinations(self, scope: Scope, step: Step) -> list[dict[str, Tree]] | None:
        """Every combination of the matrix, one empty one without; None while an axis is not known, or when there are too many."""
        axes = self._axes(scope, step)
        return None if axes is None else [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    def _axes(self, scope: Scope, step: Step) -> Mapping[str, Sequence[Tree]] | None:
        """The values of each axis; one without any where there is a problem."""
        axes: dict[str, list[Tree]] = {}
        for name, axis in (step.matrix or {}).items():
            where = (*step.origin, "matrix", name)
            if isinstance(axis, dict):
                values = self._glob(scope, step, name, axis, where)
                if values is None:
                    return None
            else:
                unread = len(self.sketch.problems)
                value = self.sketch.evaluate(scope, axis, {"inputs": scope.inputs, "steps": Results(scope)}, where)
                if not isinstance(value, list):
                    if len(self.sketch.problems) > unread:
                        return {name: []}
                    self.sketch.problem(
                        scope.recipe,
                        "matrix-axis",
                        f'axis "{name}" of "{step.id}" is not a list',
                        where,
                        fix="give a list, or an expression that is one",
                    )
                    return {name: []}
                values = value
            if len({_encoded(v) for v in values}) < len(values):
                self.sketch.problem(
                    scope.recipe, "matrix-axis", f'axis "{name}" of "{step.id}" has the same value twice', where, fix="values must differ as text"
                )
                return {name: []}
            axes[name] = values
        return axes if self._fits(scope, step, axes) else None

    def _fits(self, scope: Scope, step: Step, axes: Mapping[str, Sequence[Tree]]) -> bool:
        """Whether a plan can hold all instances of a step; a problem, the first time that it cannot."""
        if len(self.sketch.drafts) + math.prod(map(len, axes.values())) <= MOST_STEPS:
            return True
        if not self.full:
            self.full = True
            product = " × ".join(f"{len(values):,}" for values in axes.values())
            message = f"the plan would have more than {MOST_STEPS:,} steps" + (f': the matrix of "{step.id}" has {product}' if axes else "")
            where = (*step.origin, "matrix") if axes else step.origin
            fix = "try fewer values, or let one step work through many of them"
            self.sketch.problem(scope.recipe, "too-many-steps", message, where, fix=fix, key=True)
        return False

    def _glob(self, scope: Scope, step: Step, axis: str, given: Mapping[str, Tree], where: Where) -> list[Tree] | None:
        maker = None
        names = {"inputs": scope.inputs, "steps": Results(scope)}
        exclude = [str(each) for each in self.sketch.evaluate(scope, given.get("exclude", []), names, (*where, "exclude"))]
        where = (*where, "glob")
        value = self.sketch.evaluate(scope, given["glob"], names, where)
        text = str(value) if value is not None else ""
        for path, (id, output) in scope.makers.items():
            if text.startswith(path + "/"):
                maker = (id, output, text[len(path) + 1 :], path)
        if maker is None:
            if escapes(text):
                if text != given["glob"]:
                    self.sketch.problem(scope.recipe, "path-escape", f'"{text}" leaves the workspace', where, fix=WORKSPACE)
                return []
            matches = [match for match in self.globs.get(text, ()) if match not in self.left_out and not excluded(match, exclude)]
            self.found |= dict.fromkeys(matches, _Found(scope.recipe, axis, where))
            return [PathValue(match, "dep", match) for match in matches]
        id, output, below, path = maker
        if id in scope.pending or len(scope.groups.get(id, ())) != 1:
            self.sketch.problem(
                scope.recipe,
                "matrix-axis",
                f'the axis "{axis}" looks below an output of "{id}", which is itself a matrix',
                where,
                fix="look below the output of a step without a matrix",
            )
            return []
        producer = scope.groups[id][0]
        known = self.globs.get(f"{producer.id}/{output}:{below}")
        if known is None:
            self.sketch.pending.append(Pending(f"{scope.prefix}{step.id}", producer.id, output, below))
            return None
        return [PathValue(f"{path}/{match}", "below", (producer, output, match)) for match in known if not excluded(f"{path}/{match}", exclude)]

    def _outputs(self, scope: Scope, draft: Draft) -> None:
        step = draft.step
        names = {"inputs": draft.inputs, "matrix": draft.matrix}
        for n, output in enumerate(step.outputs):
            where = (*step.origin, "outputs", output.name)
            raw = output.path
            unread = len(self.sketch.problems)
            late = [ref for ref in self.sketch.references(scope, raw, where) if ref.path[0] in LATE_NAMES]
            for ref in late:
                self.sketch.problem(
                    scope.recipe,
                    "late-name",
                    f'"{".".join(ref.path)}" is not known before an attempt; an output path may not depend on it',
                    where,
                    offset=ref.offset,
                    length=ref.length,
                )
            value = self.sketch.evaluate(scope, raw, names, where) if "{{" in raw and not late else raw
            path = posixpath.normpath(str(value)) if value else ""
            if len(self.sketch.problems) > unread:
                path = f"invalid/{step.id}/{n}"
            elif wrong := unfit(str(value)):
                if value != raw:  # as it is written it was looked at already
                    self.sketch.problem(scope.recipe, "path-escape", f'output "{output.name}" of "{step.id}" {wrong}', where, fix=BELOW)
                path = f"invalid/{step.id}/{n}"
            draft.outputs[output.name] = (path, _output_flags(output))
            scope.makers[path] = (step.id, output.name)

    def _state(self, scope: Scope, step: Step, state: State, places: Namespaces) -> str:
        """The path of a state."""
        where = (*step.origin, "state", state.name, "path")
        value = self.sketch.evaluate(scope, state.path, places, where)
        if value not in (None, state.path) and (wrong := unfit(str(value))):
            self.sketch.problem(scope.recipe, "path-escape", f'state "{state.name}" of "{step.id}" {wrong}', where, fix=BELOW)
        return str(value)

    def _fill(self, scope: Scope, draft: Draft, chosen: Preset | None, *, known: bool) -> None:
        step, recipe = draft.step, scope.recipe
        resources = step.resources.over(recipe.resources)
        preset = chosen.resources if chosen is not None and chosen.resources else _UNSAID
        resources = scope.asked.over(preset.over(resources)) if scope.named else preset.over(scope.asked.over(resources))
        env = {**recipe.env, **step.env}
        image, python = step.image or recipe.image, step.python or recipe.python
        if chosen is not None:
            env = {**env, **(chosen.env or {})}
            image, python = chosen.image or image, chosen.python or python
        secrets = step.secrets if step.secrets is not None else recipe.secrets
        code = step.code if step.code is not None else recipe.code
        author: Author = {"outputs": {o.name: [o.path, _output_flags(o) & ~TEMPORARY] for o in step.outputs}}
        if isinstance(step.run, list):
            author["run"] = step.run
        elif step.run is not None:
            author["script"], author["shell"] = step.run, step.shell
        else:
            author["accelerate"] = dict(step.accelerate or {})
        if step.files:
            author["files"] = dict(step.files)
        if env:
            author["env"] = env
        if secrets:
            author["secrets"] = list(secrets)
        if image:
            author["image"] = image
        if recipe.setup:
            author["setup"] = list(recipe.setup)
        if step.metrics:
            author["metrics"] = [step.metrics.file, step.metrics.pattern]
        if resources.key:
            author["resources"] = _resources(resources).asked
        if not step.outputs:
            # Whoever has no outputs is there for its effect: two steps that say the same are two effects.
            assert self.sketch.top is not None
            author["id"] = [self.sketch.top.recipe.name, draft.id]
        places = {"inputs": draft.inputs, "matrix": draft.matrix}
        state = {s.name: self._state(scope, step, s, places) for s in step.state}
        git = [GitSpec(c.url, c.commit, c.at) for c in code if isinstance(c, GitCode)]
        if git:
            author["git"] = [list(each) for each in git]

        outputs = {n: p for n, (p, _) in draft.outputs.items()}
        names: Namespaces = {
            "inputs": draft.inputs,
            "steps": Results(scope),
            "outputs": outputs,
            "state": {n: {"latest": None} for n in state},
            "matrix": draft.matrix,
        }
        reads: dict[str, Tree] = {}
        mentioned = _Mentioned({}, {})
        late = False
        leaves = templates(step, env)
        for where, leaf in leaves:
            late |= self._read(scope, draft, leaf, where, names, reads, mentioned, state)
        for where, error in constants.faults(step, env):
            self.sketch.template_problem(scope, error, where)
        for value in draft.matrix.values():
            self._world(draft, value)
        author["reads"] = {name: plain_value(value) for name, value in reads.items() if not self._unkeyed(recipe, name)}
        draft.author = author

        for id in step.needs:
            draft.after.extend(scope.groups.get(id) or scope.inner.get(id) or [])
        draft.wants = [found for name in steps_of(step) if (found := scope.groups.get(name) or scope.inner.get(name))]
        draft.code = [c if isinstance(c, str) else spelled(c.pattern, c.exclude) for c in code if not isinstance(c, GitCode)]
        draft.lock = python.lock if python else ""
        if step.metrics or step.state:
            draft.flags |= STATEFUL if step.state else 0
        draft.flags |= (0 if step.cache else UNCACHED) | (ALLOW_FAILURE if step.allow_failure else 0) | (LOCAL if step.local else 0)
        if known:
            self._when(scope, draft, names)
            if leaves and not draft.flags & (SKIP | WHEN_LATE):
                self._nulls(scope, draft, names, leaves)
        draft.spec = StepSpec(
            recipe=recipe.id,
            step=step.id,
            author=author,
            resources=_resources(resources),
            run=step.run,
            accelerate=dict(step.accelerate) if step.accelerate is not None else None,
            shell=step.shell,
            files=dict(step.files) or NOTHING,
            env=env or NOTHING,
            pass_env=sorted({*recipe.pass_env, *step.pass_env}) or _NONE,
            secrets=[SecretSpec(s, str(recipe.inputs[s].env), scope.variables[s], recipe.inputs[s].required) for s in secrets] or _NONE,
            image=image,
            git=git or _NONE,
            names=Names(
                inputs={k: plain_value(v) for k, v in draft.inputs.items()} or NOTHING,
                steps=mentioned.outputs or NOTHING,
                outputs=outputs or NOTHING,
                matrix={k: plain_value(v) for k, v in draft.matrix.items()} or NOTHING,
            ),
            sync=[SyncSpec(output.name, output.sync) for output in step.outputs if output.sync is not None] or _NONE,
            state=[StateSpec(s.name, state[s.name], s.checkpoint, s.every, s.keep) for s in step.state] or _NONE,
            continues={n: draft.inputs[n] for n, spec in recipe.inputs.items() if spec.continues and f"inputs.{n}" in reads} or NOTHING,
            retries=step.retries,
            preemptions=step.preemptions,
            timeout=step.timeout,
            idle_timeout=step.idle_timeout,
            asks=mentioned.metrics or NOTHING,
            metrics=MetricsSpec(step.metrics.file, step.metrics.pattern) if step.metrics else None,
            when=step.when if draft.flags & WHEN_LATE else None,
            nodes=step.nodes,
        )

    def _read(
        self,
        scope: Scope,
        draft: Draft,
        leaf: str,
        where: Where,
        names: Namespaces,
        reads: dict[str, Tree],
        mentioned: _Mentioned,
        state: Mapping[str, str],
    ) -> bool:
        """Note what a leaf mentions and reads.  True when it can only be rendered in an attempt."""
        from ..language.template import TemplateError, references

        late = False
        # What decides whether, and on how many nodes, does not decide what is made.
        keyed = where[len(draft.step.origin)] not in ("when", "nodes")
        try:
            found = references(leaf)
        except TemplateError as error:
            self.sketch.template_problem(scope, error, where)
            return False
        for ref in found:
            root, rest = ref.path[0], ref.path[1:]
            if root in LATE_NAMES:
                late = True
                if len(rest) != 1 or rest[0] not in LATE_NAMES[root]:
                    self.sketch.unknown(scope, ".".join(ref.path), [f"{root}.{n}" for n in LATE_NAMES[root]], where, ref)
            elif root == "steps" and len(rest) >= 2:
                late |= self._mention(scope, draft, rest, reads, mentioned, keyed=keyed)
            elif root == "state":
                if not rest or rest[0] not in state:
                    self.sketch.unknown(scope, ".".join(ref.path), [f"state.{n}" for n in state], where, ref)
                elif rest[1:] == ("latest",):
                    late = True
                elif rest[1:]:
                    self.sketch.unknown(scope, ".".join(ref.path), [f"state.{rest[0]}.latest"], where, ref)
                else:
                    reads[f"state.{rest[0]}"] = state[rest[0]]
            elif root in ("inputs", "outputs", "matrix"):
                known = names[root]
                if root == "inputs" and rest and (spec := scope.recipe.inputs.get(rest[0])) is not None and spec.type == "secret":
                    self.sketch.problem(
                        scope.recipe,
                        "secret",
                        f'"{rest[0]}" is a secret and may not be mentioned',
                        where,
                        offset=ref.offset,
                        length=ref.length,
                        fix=f"list it: `secrets: [{rest[0]}]`; the command finds it as ${spec.env}",
                    )
                elif rest and rest[0] not in known:
                    self.sketch.unknown(scope, ".".join(ref.path), [f"{root}.{n}" for n in known], where, ref)
                elif not keyed:
                    continue
                elif rest:
                    value = known[rest[0]]
                    reads.setdefault(f"{root}.{rest[0]}", value)
                    self._world(draft, value)
                else:
                    for name, value in known.items():
                        reads.setdefault(f"{root}.{name}", value)
                        self._world(draft, value)
            elif root not in ("steps",):
                self.sketch.unknown(scope, root, ["inputs", "steps", "outputs", "state", "matrix", *LATE_NAMES], where, ref)
        return late

    def _shell_variables(self, recipe: Recipe, step: Step) -> None:
        """A shell expands what some variables hold: a value there would be source."""
        for origin, env in ((("env",), recipe.env), ((*step.origin, "env"), step.env)):
            for name, value in env.items():
                if isinstance(value, str) and "{{" in value:
                    from ..language.interpreters import EXPANDED

                    if name in EXPANDED:
                        message = f"a shell reads {name} as source: no value can stand there"
                        self.sketch.problem(recipe, "template", message, (*origin, name), fix="give it another name")

    def _nulls(self, scope: Scope, draft: Draft, names: Namespaces, leaves: Iterable[tuple[Where, str]]) -> None:
        """A value that is null here, or a state's `latest` on the first attempt, in a text that cannot hold one: said now, not when it runs."""
        from ..language import shell
        from ..language.template import Place, TemplateError, evaluate

        step = draft.step
        absent = {"inputs": {n for n, v in draft.inputs.items() if v is None}, "matrix": {n for n, v in draft.matrix.items() if v is None}}
        if not step.state and not any(absent.values()):
            return
        scene = {**names, "state": {s.name: Place(s.path or s.name, {"latest": None}) for s in step.state}}
        for where, leaf in leaves:
            if where[len(step.origin)] not in ("run", "accelerate", "files", "env"):
                continue
            found = self.sketch.references(scope, leaf, where)
            if any(ref.path[0] not in scene or ref.path[2:3] == ("metrics",) for ref in found):
                continue
            nulls = [ref for ref in found if ref.path[2:] == ("latest",) or (len(ref.path) > 1 and ref.path[1] in absent.get(ref.path[0], ()))]
            if not nulls:
                continue
            try:
                if where == (*step.origin, "run"):
                    shell.script(leaf, scene, bash=step.shell == "bash")
                else:
                    evaluate(leaf, scene)
            except TemplateError as error:
                name = ".".join(nulls[0].path)
                message = f"{name} {'is null on the first attempt' if nulls[0].path[0] == 'state' else 'is null here'}: {error}"
                self.sketch.problem(scope.recipe, "template", message, where, fix=error.fix, offset=error.offset, length=error.length)

    def _mention(
        self,
        scope: Scope,
        draft: Draft,
        rest: tuple[str, ...],
        reads: dict[str, Tree],
        mentioned: _Mentioned,
        *,
        keyed: bool,
    ) -> bool:
        id, name = rest[0], rest[1]
        if name == "metrics":
            metric = ".".join(rest[2:])
            producers = scope.groups.get(id, ())
            for producer in producers:
                (draft.late if keyed else draft.asked)[(producer.id, metric)] = producer
            if keyed and id in scope.many:
                reads[f"steps.{id}.metrics.{metric}"] = [producer.id[len(scope.prefix) :] for producer in producers]
            mentioned.metrics.setdefault(id, []).append(MetricAsked(metric, id in scope.many))
            return True
        value = scope.results.get(id, {}).get(name)
        if value is not None:
            mentioned.outputs.setdefault(id, {})[name] = plain_value(value)
            if keyed:
                # Which of the files an attempt holds this name stands for, and in which order: contents alone do not say.
                reads[f"steps.{id}.{name}"] = value
                self._world(draft, value)
            else:
                draft.after.extend(scope.groups.get(id) or scope.inner.get(id) or [])
        return False

    def _world(self, draft: Draft, value: Tree) -> None:
        if isinstance(value, list):
            for item in value:
                self._world(draft, item)
        elif isinstance(value, PathValue):
            if value.kind == "step":
                draft.upstream[value.name] = (*value.address, "")
            elif value.kind == "below":
                producer, output, match = value.address
                draft.upstream[value.name] = (producer, output, match)
            elif value.kind == "dep":
                if value.name not in draft.deps:
                    draft.deps.append(value.name)
            else:
                draft.takes[value.name] = Source(value.name, value.kind, *value.address)

    def _deps(self, scope: Scope, draft: Draft, made: Mapping[str, tuple[Draft, str]], inside: Mapping[str, str], near: Near) -> None:
        """Turn `deps` into edges and files of the workspace.

        `made` is every output there is, by its path below the workspace; `inside` names one output below each folder that holds any, and `near` those
        that a pattern may reach.
        """
        step = draft.step
        for n, dep in enumerate(step.deps):
            where = (*step.origin, "deps", n)
            value, exclude = self._dep(scope, draft, dep, where)
            if value is None:
                continue
            path = posixpath.normpath(str(value))
            if escapes(path):
                if value != (raw := dep if isinstance(dep, str) else dep.pattern):
                    self.sketch.problem(scope.recipe, "path-escape", f'"{value}", as "{raw}" is here, leaves the workspace', where, fix=WORKSPACE)
                continue
            if scope.prefix or scope is not self.sketch.top:
                self.sketch.problem(
                    scope.recipe,
                    "library-deps",
                    f'"{step.id}" has deps, which a recipe used by another may not have',
                    where,
                    fix="take it as an input",
                )
            if path in draft.upstream:
                continue  # the file that a glob below an output found for this instance: it, and not the whole output
            pattern = is_glob(path) or not isinstance(dep, str)
            if pattern:
                others = [(name, d.outputs[output][1]) for name in near.to(path) for d, output in (made[name],) if d.step is not step]
                makers = [name for name, flags in others if reaches(path, name, bool(flags & DIRECTORY)) and not excluded(name, exclude)]
            else:
                makers = [head for head in heads(path) if head in made]
                if path in inside:
                    maker = made[inside[path]][0].id
                    self.sketch.problem(
                        scope.recipe,
                        "deps-hold-output",
                        f'"{path}" holds "{inside[path]}", which "{maker}" makes: it would not be the same before and after',
                        where,
                        fix="name the files that are needed, or make the output elsewhere",
                    )
            for name in makers:
                draft.upstream[name] = (*made[name], "")
            if not makers or pattern:
                draft.deps.append(spelled(path, exclude))

    def _dep(self, scope: Scope, draft: Draft, dep: str | Glob, where: Where) -> tuple[Any, list[str]]:
        """A path or pattern as it is for one instance, and what it excludes."""
        names = {"inputs": draft.inputs, "matrix": draft.matrix}
        if isinstance(dep, str):
            return self.sketch.evaluate(scope, dep, names, where), []
        exclude = self.sketch.evaluate(scope, list(dep.exclude), names, (*where, "exclude"))
        return self.sketch.evaluate(scope, dep.pattern, names, (*where, "glob")), [str(each) for each in exclude]

    def _when(self, scope: Scope, draft: Draft, names: Namespaces) -> None:
        step = draft.step
        if step.when is None:
            return
        where = (*step.origin, "when")
        if any(ref.path[0] == "steps" and ref.path[2:3] == ("metrics",) for ref in self.sketch.references(scope, step.when, where)):
            draft.flags |= WHEN_LATE
            return
        if self._condition(scope, step, names) is False:
            draft.flags |= SKIP

    def _condition(self, scope: Scope, step: Step, names: Namespaces) -> bool | None:
        """The value of a `when` that is known by now; None with a problem."""
        where = (*step.origin, "when")
        unread = len(self.sketch.problems)
        value = self.sketch.evaluate(scope, step.when, names, where) if isinstance(step.when, str) else step.when
        if isinstance(value, bool):
            return value
        if len(self.sketch.problems) == unread:
            self.sketch.problem(
                scope.recipe,
                "when",
                f'`when` of "{step.id}" is {json.dumps(plain_value(value))}, not true or false',
                where,
                fix='write an expression that is a boolean, such as "{{ inputs.steps > 10 }}"',
            )
        return None

    def _unkeyed(self, recipe: Recipe, name: str) -> bool:
        root, _, rest = name.partition(".")
        spec = recipe.inputs.get(rest) if root == "inputs" else None
        return spec is not None and not spec.key

    # -- select and uses -------------------------------------------------------------------------------------------------------------------------

    def _select(self, scope: Scope, step: Step) -> None:
        assert step.select is not None
        if step.select.source in scope.pending:
            scope.pending.add(step.id)
            return
        scope.results[step.id] = {}
        compared = selected(scope.recipe, self.used, step.select.step)
        if isinstance(compared, Misnamed):
            self.sketch.problem(scope.recipe, compared.code, compared.message, (*step.origin, "select"), fix=compared.fix)
        if compared is None or isinstance(compared, Misnamed):
            return
        source = scope.instances(step.select.step)
        draft = Draft(
            f"{scope.prefix}{step.id}", step, scope.recipe, scope.home, scope.prefix, scope.inputs, {}, flags=SELECT, order=len(self.sketch.drafts)
        )
        self.sketch.drafts.append(draft)
        scope.groups[step.id] = [draft]
        made = {name: flags for name, (_, flags) in source[0].outputs.items()} if source else {o.name: _output_flags(o) for o in compared.outputs}
        for name, flags in made.items():
            suffixes = {posixpath.splitext(d.outputs[name][0])[1] for d in source}
            suffix = suffixes.pop() if len(suffixes) == 1 else ""
            draft.outputs[name] = (f"{step.id}/{name}{suffix}", flags)
            for d in source:
                if not d.flags & SKIP:
                    draft.upstream[f"{d.id}/{name}"] = (d, name, "")
        for d in source:
            if not d.flags & SKIP:
                draft.late[(d.id, step.select.metric)] = d
        draft.after = [d for id in step.needs for d in (scope.groups.get(id) or scope.inner.get(id) or [])]
        draft.wants = [*([source] if source else ()), *([d] for d in draft.after)]
        if step.when is not None and self._condition(scope, step, {"inputs": scope.inputs, "steps": Results(scope)}) is False:
            draft.flags |= SKIP
        draft.author = {"select": [step.select.metric, step.select.best]}
        draft.spec = StepSpec(
            recipe=scope.recipe.id,
            step=step.id,
            author=draft.author,
            resources=_resources(step.resources),
            select=SelectSpec(step.select.metric, step.select.best),
        )
        scope.results[step.id] = {name: self._made(draft, name) for name in draft.outputs}

    def _uses(self, scope: Scope, step: Step, uses: Uses, preset: str | None) -> None:
        recipe = scope.recipe
        other = self.used.get(uses.recipe)
        where = (*step.origin, "uses")
        scope.results[step.id] = {}
        if other is None:
            return  # reported by whoever looked for it
        if other.id in self.depth:
            self.sketch.problem(recipe, "cycle", f"recipes use each other: {' -> '.join([*self.depth, other.id])}", where)
            return
        if not self.sketch.mentions_known(scope, step):
            return
        axes = self._combinations(scope, step)
        if axes is None or any(name in scope.pending for name in steps_of(step)):
            scope.pending.add(step.id)
            return
        inner_preset = uses.preset or (preset if preset in other.presets else None)
        results: list[dict[str, Tree]] = []
        below: list[Draft] = []
        for combination in axes:
            names: Namespaces = {"inputs": scope.inputs, "steps": Results(scope), "matrix": combination}
            given: dict[str, Tree] = {}
            variables: dict[str, str] = {}
            for name, leaf in uses.given.items():
                spec = other.inputs.get(name)
                place = (*step.origin, "with", name)
                if spec is not None and spec.type == "secret":
                    variables |= self._handed(scope, name, leaf, place)
                    continue
                for ref in self.sketch.references(scope, leaf, place):
                    if (ref.path[0] == "steps" and ref.path[2:3] == ("metrics",)) or ref.path[0] in LATE_NAMES:
                        self.sketch.problem(
                            recipe,
                            "late-name",
                            f'"{".".join(ref.path)}" is not known when "{step.id}" is planned',
                            place,
                            offset=ref.offset,
                            length=ref.length,
                            fix="use it in a step of this recipe",
                        )
                given[name] = value = self.sketch.evaluate(scope, leaf, names, place)
                addresses = spec is not None and bool({spec.type, spec.items} & {"file", "dataset", "model"})
                if addresses and not is_path_value(value) and self._names_paths(scope, leaf, names, place):
                    self.sketch.problem(
                        recipe,
                        "path-in-text",
                        f'"{name}" takes a whole output or input, not a place inside one',
                        place,
                        fix="hand on the whole, and let a step of that recipe look inside; or make this an output of its own",
                    )
            when: bool | None = True
            if step.when is not None:
                late = [
                    r
                    for r in self.sketch.references(scope, step.when, (*step.origin, "when"))
                    if r.path[0] == "steps" and r.path[2:3] == ("metrics",)
                ]
                for ref in late:
                    self.sketch.problem(
                        recipe,
                        "late-name",
                        f'"{".".join(ref.path)}" is not known when "{step.id}" is planned',
                        (*step.origin, "when"),
                        offset=ref.offset,
                        length=ref.length,
                        fix="use it in the `when` of a step with a command",
                    )
                when = None if late else self._condition(scope, step, names)
            if self.sketch.problems:
                return
            try:
                values = self.bind(other, given, preset=inner_preset)
            except Invalid as error:
                self.sketch.problems += [
                    Problem(p.code, f'in `with` of "{step.id}": {p.message}', p.where or recipe.document.locate((*step.origin, "with")), p.fix)
                    for p in error.problems
                ]
                return
            start = len(self.sketch.drafts)
            inner = self.add(
                other,
                {**values, **{k: v for k, v in given.items() if is_path_value(v)}},
                prefix=self._name(scope, step.id, combination) + "/",
                preset=inner_preset,
                variables=variables,
                asked=step.resources.over(scope.asked),
                named=uses.preset is not None,
            )
            mine = self.sketch.drafts[start:]
            below += mine
            for draft in mine:
                if when is False:
                    draft.flags |= SKIP
                draft.after += [d for id in step.needs for d in (scope.groups.get(id) or scope.inner.get(id) or [])]
                draft.wants += [found for id in steps_of(step) if (found := scope.groups.get(id) or scope.inner.get(id))]
            if inner.pending:
                scope.pending.add(step.id)
            results.append(self._exported(inner, other, inner.prefix[len(scope.prefix) :]))
        scope.inner[step.id] = below
        if step.matrix is None:
            scope.results[step.id] = results[0] if results else {}
        else:
            scope.many.add(step.id)
            scope.results[step.id] = {name: [r[name] for r in results] for name in (results[0] if results else {})}

    def _names_paths(self, scope: Scope, leaf: Tree, names: Namespaces, where: Where) -> bool:
        """Whether a leaf mentions a path in the attempt directory."""
        for _, text in walk(leaf, where):
            for ref in self.sketch.references(scope, text, where):
                value: object = names
                for part in ref.path:
                    value = value.get(part) if isinstance(value, Mapping) else None
                if is_path_value(value):
                    return True
        return False

    def _handed(self, scope: Scope, name: str, leaf: Tree, where: Where) -> dict[str, str]:
        """A secret handed on by `with`: the inner input's variable gets the value of the outer one's."""
        refs = self.sketch.references(scope, leaf, where)
        if len(refs) == 1 and refs[0].path[0] == "inputs" and len(refs[0].path) == 2 and refs[0].path[1] in scope.variables:
            return {name: scope.variables[refs[0].path[1]]}
        self.sketch.problem(scope.recipe, "secret", f'"{name}" takes a secret', where, fix='hand one on: "{{ inputs.token }}"')
        return {}

    def _exported(self, inner: Scope, other: Recipe, prefix: str) -> dict[str, Tree]:
        """A used recipe's outputs, found by the outer recipe below `prefix`."""
        found: dict[str, Tree] = {}
        if other.outputs is None:
            for made in inner.results.values():
                found |= made
        else:
            for name, leaf in other.outputs.items():
                value = self.sketch.evaluate(inner, leaf, {"inputs": inner.inputs, "steps": Results(inner)}, ("outputs", name))
                if value is not None:
                    found[name] = value
        moved: dict[str, Tree] = {}
        for name, value in found.items():
            if isinstance(value, PathValue):
                moved[name] = PathValue(prefix + value.name, value.kind, value.address)
            elif isinstance(value, list):
                moved[name] = [PathValue(prefix + v.name, v.kind, v.address) for v in value if isinstance(v, PathValue)]
        return moved


def _last(path: str) -> str:
    """The last name in a path; empty where it has none."""
    name = posixpath.basename(posixpath.normpath(path))
    return "" if name in (".", "..") else name


def _output_flags(output: Output) -> int:
    return (
        (OPTIONAL if output.optional else 0)
        | (NONEMPTY if output.nonempty else 0)
        | (TEMPORARY if output.temporary else 0)
        | (DIRECTORY if output.directory else 0)
    )


def _resources(asked: Resources) -> ResourceSpec:
    return ResourceSpec(asked.cpus, asked.memory, asked.gpus, asked.gpu, asked.gpu_memory, asked.disk, dict(asked.pools) or NOTHING)


def _encoded(value: Tree) -> str:
    """One axis value in a step id: percent-encoded, long ones cut with a hash of the whole."""
    from ..language.template import text_of

    plain = plain_value(value)
    text = quote(text_of(plain) if isinstance(plain, (str, int, float, bool)) else json.dumps(plain, sort_keys=True), safe="")
    return text if len(text) <= 80 else f"{text[:64]}~{of_value('axis', plain)[:12]}"
