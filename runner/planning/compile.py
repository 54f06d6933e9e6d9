"""Compile a Recipe and its inputs into a Plan.  Pure: glob matches and used recipes are passed in.

Dependencies.  A step depends on each `steps.x.y` in the template branches that its values select.
Unknown names are errors in any branch.

Cache keys.  Every named value that a template mentions is part of the author half of the cache key,
except files of branches that are not selected.

Matrix.  A step becomes one node per combination.  An axis over a step's files stays pending until
that step is done.

Globs.  A path created by a step of the plan is not a match: the plan is compiled with all matches,
then without those paths.

Used recipes.  The steps of a used recipe have ids `outer/inner` and the same keys as when that
recipe runs alone.  Only published paths have the prefix.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from ..digest import Digest
from ..language import presets, shell
from ..language.imports import find_starts
from ..language.interpreters import EXPANDED
from ..language.recipe import (
    AutoCode,
    GitCode,
    Glob,
    Input,
    Output,
    Preset,
    Python,
    Recipe,
    Resources,
    StateDirectory,
    Step,
    pattern_of,
)
from ..language.template import TemplateError, evaluate
from ..language.unknowns import Unknown
from ..paths import escapes, heads
from .ahead import find_sample_problems, foresee
from .assemble import assemble
from .axes import Axes, GlobOrigin, instance_id
from .choices import (
    KnownResults,
    axis_leaves,
    choose_branches,
    known_names,
    needed_steps,
    results_of,
    wanted_steps,
)
from .drafts import (
    LATE_NAMES,
    UNKNOWN_PATH,
    Instance,
    Namespaces,
    NodeDraft,
    PathValue,
    Results,
    Scope,
    Sketch,
    output_flags,
    output_of,
    plain_value,
    resource_spec,
)
from .leaves import LeafReader, add_files
from .mentions import is_template, mentions_step, templates
from .path_rules import BELOW, WORKSPACE, explain_no_path, explain_unfit, find_misplaced_paths
from .patterns import (
    MadePaths,
    as_pattern,
    encode_automatic,
    encode_pattern,
    is_excluded,
    is_glob,
    python_path,
    reaches,
)
from .plan import ALLOW_FAILURE, LOCAL, SELECT, SKIP, STATEFUL, UNCACHED, WHEN_LATE, Plan
from .selection import add_select
from .step import (
    DIRECTORY,
    NOTHING,
    TEMPORARY,
    Author,
    GitSpec,
    MetricsSpec,
    Names,
    SecretSpec,
    StateSpec,
    StepSpec,
    SyncSpec,
)
from .step_order import PathIndex, may_make, order_steps
from .uses import UsesCompiler

if TYPE_CHECKING:
    from ..language.values import Leaf, Tree, Where
    from .beforehand import DryRun


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
    trial: DryRun | None = None,
    as_disk: Callable[[str], str] = str,
) -> Plan:
    """Compile a recipe and its bound inputs, one value per declared input, into a Plan.

    `used` maps `mentions.resolve_recipe` names to recipes.  `globs` maps workspace patterns, and
    patterns below an output (`step/output:pattern`), to their sorted matches.  `bind` and `kind_of`
    are functions of `language.inputs`.  `as_disk` returns the same text for two paths that are one
    file on the workspace disk.  `trial` collects templates that no attempt can render.  Raises
    Invalid with all other problems.
    """
    left_out: dict[str, GlobOrigin] = {}
    while True:
        compiler = _Compiler(used, globs, bind, kind_of, left_out, as_disk)
        compiler.add(recipe, values, prefix="", preset=preset)
        makes = compiler.makes()
        more = {path: found for path, found in compiler.axes.found.items() if makes.meets(path)}
        if not more:
            break
        # This ends: `left_out` only grows, and a match that is left out adds no output.
        left_out |= more
    sketch = compiler.sketch
    if trial is not None:
        trial.try_all(sketch)
    elif sketch.samples:
        sketch.problems += find_sample_problems(sketch)
    _report_own_outputs(sketch, left_out, makes)
    combined = presets.combine(recipe, preset)
    limits = combined.limits if combined else None
    return assemble(sketch, recipe, values, digest, limits)


def _report_own_outputs(
    sketch: Sketch, left_out: Mapping[str, GlobOrigin], makes: MadePaths
) -> None:
    """Report matrix axes that match an output of their own instances."""
    for path, (recipe, axis, where) in left_out.items():
        if not makes.meets(path):
            message = f'the axis "{axis}" matches "{path}", which is or contains an output of its own instance'
            fix = "move the output to another path, or exclude the path with `exclude`"
            sketch.problem(recipe, "matrix-axis", message, where, fix=fix)


# Most lists of a StepSpec are empty, and a plan may have 100,000 of them: they share this one.
_NONE: Final[list[Any]] = []
_UNSAID: Final = Resources()


class _Compiler:
    """Compiler of one plan for a fixed set of glob matches."""

    def __init__(
        self,
        used: Mapping[str, Recipe],
        globs: Mapping[str, tuple[str, ...]],
        bind: Callable[..., dict[str, Tree]],
        kind_of: Callable[[str], str],
        left_out: Collection[str],
        as_disk: Callable[[str], str],
    ) -> None:
        self.used, self.kind_of, self.left_out = used, kind_of, left_out
        self.sketch = Sketch(as_disk)
        self.axes = Axes(self.sketch, globs, left_out)
        self.depth: list[str] = []
        self._axis_steps: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        """Steps that a matrix needs, and steps that it may need, by prefix and step."""
        self.uses = UsesCompiler(self.sketch, self.axes, used, bind, self.depth, self.add)

    def makes(self) -> MadePaths:
        """Return all output paths of the plan, or none if no glob match could be an output."""
        if not self.axes.found and not self.left_out:
            return MadePaths(())
        paths = []
        for draft in self.sketch.drafts:
            for path, _ in draft.outputs.values():
                paths.append(draft.prefix + path)
        return MadePaths(paths)

    # -- one recipe --------------------------------------------------------------------------------

    def add(
        self, recipe: Recipe, values: Mapping[str, Tree], *, prefix: str, preset: str | None, variables: Mapping[str, str] | None = None,
        asked: Resources = _UNSAID, named: bool = False,
    ) -> Scope:  # fmt: skip
        """Add the steps of a recipe to the plan, and return its scope.

        Recipes of `uses` steps are added in turn.

        `values` are the input values, `prefix` begins all step IDs of a used recipe, and
        `variables` are the environment variables of its secrets.  `asked` are the resources of the
        `uses` step.  With `named`, the step names the preset itself, so that `asked` overrides the
        preset's resources.
        """
        home = recipe.home or posixpath.dirname(recipe.document.name) or "."
        if home not in self.sketch.homes:
            self.sketch.homes.append(home)
        scope = Scope(
            recipe,
            self._input_values(recipe, values),
            prefix,
            self.sketch.homes.index(home),
            asked,
            named,
            preset,
        )
        self.sketch.scopes.append(scope)
        scope.variables.update(variables or {})
        if self.sketch.top is None:
            self.sketch.top = scope
        chosen = presets.combine(recipe, preset)
        self.depth.append(recipe.id)
        # A recipe that two steps use is added twice, and its misplaced paths are reported once.
        known = self.sketch.problems
        known += [found for found in find_misplaced_paths(recipe) if found not in known]
        order, loops = order_steps(recipe)
        for loop in loops:
            self._report_cycle(recipe, loop)
        if not loops:
            begun = len(self.sketch.drafts)
            for id in order:
                self._add_step(scope, recipe.steps[id], chosen, preset)
            self._add_deps(scope, self.sketch.drafts[begun:])
        self.depth.pop()
        return scope

    def _report_cycle(self, recipe: Recipe, loop: list[str]) -> None:
        self.sketch.problem(
            recipe,
            "cycle",
            f"steps depend on each other: {' -> '.join(loop)}",
            recipe.steps[loop[0]].origin,
            fix="break the cycle: remove an entry of `needs`, or a template that uses another step's output",
            key=True,
        )

    def _input_values(self, recipe: Recipe, values: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the input values as templates see them.

        Files, datasets and models become paths in the attempt directory.
        """
        seen: dict[str, Tree] = {}
        for name, spec in recipe.inputs.items():
            if spec.type == "secret":
                continue
            value = values.get(name)
            if isinstance(value, list):
                items = []
                for n, item in enumerate(value):
                    folder = f"inputs/{name}/{n}"
                    items.append(self._name_path(item, folder, spec, spec.items or ""))
                seen[name] = items
            else:
                seen[name] = self._name_path(value, f"inputs/{name}", spec, spec.type)
        return seen

    def _name_path(self, value: Tree, folder: str, spec: Input, type: str) -> Tree:
        """Return an input value, with a file path replaced by its path in the attempt directory.

        The path keeps the file name, so that suffixes stay the same.
        """
        if isinstance(value, PathValue):
            base = _last_name(value.name) or spec.name
            address = value.address
            if spec.only and value.kind not in ("step", "below", "dep"):
                address = (address[0], spec.only)
            return PathValue(f"{folder}/{base}", value.kind, address, value.member)
        if type not in ("file", "dataset", "model") or not isinstance(value, str):
            return value
        value, member = spec.split_member(value)
        kind = self.kind_of(value)
        if kind != "path" and spec.stream:
            return PathValue(value, "stream", (value, ()))
        whole = value if kind == "path" else value.split("@")[0]
        base = _last_name(whole) or spec.name
        return PathValue(f"{folder}/{base}", kind, (value, spec.only), member)

    def _add_step(
        self, scope: Scope, step: Step, chosen: Preset | None, preset: str | None
    ) -> None:
        if step.uses:
            self.uses.add(scope, step, step.uses, preset)
        elif step.select:
            add_select(self.sketch, self.used, scope, step)
        else:
            self._add_command_step(scope, step, chosen)

    # -- steps with a command ----------------------------------------------------------------------

    def _add_command_step(self, scope: Scope, step: Step, chosen: Preset | None) -> None:
        recipe = scope.recipe
        known = self.sketch.mentions_known(scope, step)
        if isinstance(step.run, str):
            self._check_shell(scope, step, step.run)
            self._check_shell_variables(recipe, step)
        wanted = wanted_steps(self.sketch, scope, step)
        axes = self.axes.combinations(scope, step)
        written = [dep for dep in step.reads if not mentions_step(dep)]
        if axes is None or _needs_pending_steps(scope, wanted, written):
            self._wait_for(scope, step, wanted, written)
            self._add_sample(scope, step, chosen, known=known)
            return
        if not axes:
            makers = self._skipped_makers(scope, step)
            if makers:
                self._add_skipped_matrix(scope, step, chosen, makers, known=known)
                return
        drafts = []
        for combination in axes:
            drafts.append(self._add_instance(scope, step, combination, chosen, known=known))
        _record_results(scope, step, drafts)

    def _check_shell(self, scope: Scope, step: Step, run: str) -> None:
        if "{{" not in run:
            return

        for error in shell.errors(run, bash=step.shell == "bash"):
            self.sketch.template_problem(scope, error, (*step.origin, "run"))

    def _wait_for(self, scope: Scope, step: Step, wanted: list[str], deps: list[str]) -> None:
        """Mark a step as waiting for its dependencies, because its matrix is not known yet.

        They are the steps `wanted`, and those that may create the files of `deps` and of the
        matrix.
        """
        # A template in `deps` names the file of a matrix axis: `wanted` has its producer.
        patterns = [dep for dep in deps if not dep.startswith("{{")]
        patterns += [str(axis["glob"]) for axis in _glob_axes(step)]
        candidates = [*scope.groups, *scope.inner, *scope.pending]
        makers = _possible_makers(scope.recipe, candidates, patterns)
        self.sketch.wait(scope, step, [*wanted, *makers])

    def _add_instance(
        self,
        scope: Scope,
        step: Step,
        combination: dict[str, Tree],
        chosen: Preset | None,
        *,
        known: bool,
    ) -> NodeDraft:
        """Add and compile one matrix instance of a step."""
        draft = NodeDraft(
            instance_id(scope, step.id, combination),
            step,
            scope.recipe,
            scope.home,
            scope.prefix,
            scope.inputs,
            combination,
            order=len(self.sketch.drafts),
        )
        self.sketch.drafts.append(draft)
        self._set_output_paths(scope, draft)
        self._compile_draft(scope, draft, chosen, known=known)
        return draft

    def _add_sample(self, scope: Scope, step: Step, chosen: Preset | None, *, known: bool) -> None:
        """Compile a sample instance of a step with an unknown matrix, to report problems early."""
        matrix = self.axes.samples.get((scope.prefix, step.id), {})
        id = f"{scope.prefix}{step.id}"
        draft = NodeDraft(
            id, step, scope.recipe, scope.home, scope.prefix, scope.inputs, dict(matrix), order=-1
        )
        if step.matrix is not None:
            scope.many.add(step.id)
        self.sketch.samples.append(draft)
        self._set_output_paths(scope, draft)
        self._compile_draft(scope, draft, chosen, known=known)
        foresee(scope, draft)

    def _skipped_makers(self, scope: Scope, step: Step) -> list[NodeDraft]:
        """Return the skipped steps that should have provided the values of an empty matrix."""
        maker = self.axes.lost.get((scope.prefix, step.id))
        if maker is not None:
            return [maker]
        names = {"inputs": scope.inputs, "steps": KnownResults(self.sketch, scope)}
        certain, _ = needed_steps(axis_leaves(step), names)
        skipped: list[NodeDraft] = []
        for id in sorted(certain):
            group = scope.group(id)
            if self.sketch.skip_state(group).skipped:
                skipped += group
        return skipped

    def _add_skipped_matrix(
        self,
        scope: Scope,
        step: Step,
        chosen: Preset | None,
        makers: list[NodeDraft],
        *,
        known: bool,
    ) -> None:
        """Add one skipped node for a step whose matrix values come from skipped steps."""
        id = f"{scope.prefix}{step.id}"
        draft = NodeDraft(
            id, step, scope.recipe, scope.home, scope.prefix, scope.inputs, {},
            flags=SKIP, order=len(self.sketch.drafts), after=makers, required=[makers],
        )  # fmt: skip
        draft.spec = StepSpec(scope.recipe.id, step.id, draft.author)
        self.sketch.drafts.append(draft)
        scope.groups[step.id] = [draft]
        scope.results[step.id] = {output.name: [] for output in step.outputs}
        self._add_sample(scope, step, chosen, known=known)
        self.sketch.samples[-1].flags |= SKIP

    def _set_output_paths(self, scope: Scope, draft: NodeDraft) -> None:
        """Render the output paths of a step instance."""
        for n, output in enumerate(draft.step.outputs):
            path = self._output_path(scope, draft, output)
            if path is None:
                path = f"invalid/{draft.id}/{n}"
                draft.unsound.add(output.name)
            draft.outputs[output.name] = (path, output_flags(output))
            if path != UNKNOWN_PATH:
                scope.makers[path] = (draft.step.id, output.name)

    def _output_path(self, scope: Scope, draft: NodeDraft, output: Output) -> str | None:
        """Return the rendered path of an output of a step instance, or report why it is invalid."""
        step = draft.step
        where = (*step.origin, "outputs", output.name)
        if self._report_late_names(scope, output.path, where):
            return None
        names = {"inputs": draft.inputs, "matrix": draft.matrix}
        value, sound = self.sketch.try_render(scope, output.path, names, where)
        if isinstance(value, Unknown):
            return UNKNOWN_PATH
        if not sound:
            return None
        wrong = explain_no_path(value) or explain_unfit(str(value))
        if not wrong:
            return posixpath.normpath(str(value))
        if value != output.path:  # find_misplaced_paths reports literal paths
            message = f'output "{output.name}" of "{step.id}" {wrong}'
            self.sketch.problem(scope.recipe, "path-escape", message, where, fix=BELOW)
        return None

    def _report_late_names(self, scope: Scope, path: str, where: Where) -> bool:
        """Report names in an output path that have no value at compile time.

        Return whether there are any.
        """
        references = self.sketch.references(scope, path, where)
        late = [ref for ref in references if ref.path[0] in LATE_NAMES]
        for ref in late:
            name = ".".join(ref.path)
            message = (
                f'"{name}" is not known before an attempt, so an output path cannot depend on it'
            )
            self.sketch.reference_problem(scope, "late-name", message, where, ref)
        return bool(late)

    def _state_path(
        self, scope: Scope, step: Step, state: StateDirectory, places: Namespaces
    ) -> str:
        """Return the rendered path of a step's checkpoint directory."""
        where = (*step.origin, "state", state.name, "path")
        value, sound = self.sketch.try_render(scope, state.path, places, where)
        is_unknown = not sound or isinstance(value, Unknown)
        # find_misplaced_paths reports literal paths.
        if is_unknown or value == state.path:
            return state.path
        wrong = explain_no_path(value) or explain_unfit(str(value))
        if wrong:
            self.sketch.problem(
                scope.recipe,
                "path-escape",
                f'state "{state.name}" of "{step.id}" {wrong}',
                where,
                fix=BELOW,
            )
        return str(value)

    def _compile_draft(
        self, scope: Scope, draft: NodeDraft, chosen: Preset | None, *, known: bool
    ) -> None:
        """Compile a step instance: its dependencies, flags, cache key content and StepSpec."""
        step = draft.step
        own = _settle_step(scope, step, chosen)
        places: Namespaces = {"inputs": draft.inputs, "matrix": draft.matrix}
        states = {each.name: self._state_path(scope, step, each, places) for each in step.state}
        outputs = {name: path for name, (path, _) in draft.outputs.items()}
        names: Namespaces = {
            "inputs": draft.inputs,
            "steps": Results(scope),
            "outputs": outputs,
            "state": {name: {"latest": None} for name in states},
            "matrix": draft.matrix,
        }
        reader = self._read_templates(scope, draft, own, names, states)
        draft.author = self._author_half(scope, draft, own, reader.reads)
        for id in step.needs:
            draft.after.extend(scope.group(id))
        self._record_needs(scope, draft)
        draft.code = [_code_text(c, step, own.env) for c in own.code if not isinstance(c, GitCode)]
        draft.lock = own.python.lock if own.python else ""
        draft.tools = self._tools_in_key(scope, step, own)
        self._set_flags(scope, draft, names, known=known)
        nodes = self._node_count(scope, draft, names) if known else step.nodes
        draft.spec = _step_spec(scope, draft, own, reader, states, nodes)

    def _read_templates(
        self,
        scope: Scope,
        draft: NodeDraft,
        own: _Settled,
        names: Namespaces,
        states: Mapping[str, str],
    ) -> LeafReader:
        """Read all templates of a step instance, and record the files in its axis values."""
        given = {name: names[name] for name in ("inputs", "matrix", "outputs")}
        known_now = cache(lambda: known_names(self.sketch, scope, draft.step, given))
        reader = LeafReader(self.sketch, scope, draft, names, known_now, states)
        for where, leaf in templates(draft.step, own.env):
            reader.read(leaf, where)
        for value in draft.matrix.values():
            add_files(draft, value)
        return reader

    def _author_half(
        self, scope: Scope, draft: NodeDraft, own: _Settled, reads: Mapping[str, Tree]
    ) -> Author:
        """Return the part of the cache key that comes from the recipe text and input values."""
        author = _author(draft.step, scope.recipe, own)
        if not draft.step.outputs:
            # A step without outputs runs for its side effect, so equal steps must not share a key.
            assert self.sketch.top is not None
            author["id"] = [self.sketch.top.recipe.name, draft.id]
        keyed: dict[str, Tree] = {}
        for name, value in reads.items():
            if not _is_unkeyed(scope.recipe, name):
                keyed[name] = plain_value(value)
        author["reads"] = keyed
        return author

    def _set_flags(
        self, scope: Scope, draft: NodeDraft, names: Mapping[str, Any], *, known: bool
    ) -> None:
        """Set the flags of a step instance, and record whether the run may still skip it."""
        draft.flags |= _flags_of(draft.step)
        if any(self.sketch.skip_state(group).skipped for group in draft.required):
            draft.flags |= SKIP
        elif known:
            self._decide_when(scope, draft, names)
        draft.doubtful = self._may_be_skipped(draft)
        self.sketch.skips |= draft.doubtful or bool(draft.flags & SKIP)

    def _tools_in_key(self, scope: Scope, step: Step, own: _Settled) -> tuple[str, ...]:
        """Return the programs whose files are part of the cache key."""
        if not own.image:
            return scope.recipe.tools if step.tools is None else step.tools
        if step.tools:
            message = (
                f'"tools" has no effect on "{step.id}": it runs in an image with its own programs'
            )
            fix = "remove `tools`: the image is already part of the cache key"
            where = (*step.origin, "tools")
            self.sketch.problem(scope.recipe, "useless-key", message, where, fix=fix, key=True)
        return ()

    def _record_needs(self, scope: Scope, draft: NodeDraft) -> None:
        """Record the steps that a step instance depends on or may depend on."""
        step = draft.step
        axes = self._axis_steps.get((scope.prefix, step.id))
        if axes is None:
            names = {"inputs": scope.inputs, "steps": KnownResults(self.sketch, scope)}
            axes = needed_steps(axis_leaves(step), names)
            self._axis_steps[scope.prefix, step.id] = axes
        certain, possible = axes
        draft.required_ids |= certain | set(step.needs)
        draft.required = [*scope.groups_of(draft.required_ids), *draft.required_pairs]
        perhaps = (draft.asked_for | possible) - draft.required_ids
        choices = [*draft.choices, *scope.groups_of(perhaps)]
        draft.choices = [group for group in choices if not _is_among(group, draft.required)]

    def _may_be_skipped(self, draft: NodeDraft) -> bool:
        """Return whether the run may still skip a step instance.

        Dependencies from `deps` are not known yet.
        """
        if draft.flags & SKIP:
            return False
        if draft.flags & WHEN_LATE:
            return True
        if self.sketch.skips and draft.step.deps:
            return True
        if any(self.sketch.skip_state(group).doubtful for group in draft.required):
            return True
        return any(p.flags & SKIP or p.doubtful for p, _, _ in draft.upstream.values())

    def _check_shell_variables(self, recipe: Recipe, step: Step) -> None:
        """Report templates in environment variables that a shell would execute."""
        for origin, env in ((("env",), recipe.env), ((*step.origin, "env"), step.env)):
            for name, value in env.items():
                if name in EXPANDED and is_template(value):
                    message = f"{name} cannot contain a template: a shell would execute its value"
                    self.sketch.problem(
                        recipe,
                        "template",
                        message,
                        (*origin, name),
                        fix="use another variable name",
                    )

    def _add_deps(self, scope: Scope, drafts: list[NodeDraft]) -> None:
        """Convert the `deps` of all steps of a recipe to dependencies and workspace files.

        `drafts` are all step instances of the recipe and of the recipes it uses.
        """
        made = _MadeOutputs(drafts, scope.prefix)
        for draft in [*drafts, *self.sketch.samples]:
            if draft.recipe is scope.recipe and draft.prefix == scope.prefix:
                self._convert_deps(scope, draft, made)

    def _convert_deps(self, scope: Scope, draft: NodeDraft, made: _MadeOutputs) -> None:
        """Convert the `deps` of a step instance to dependencies on steps and workspace files."""
        step = draft.step
        given = set(map(as_pattern, draft.upstream)) if step.deps else set()
        for n, dep in enumerate(step.deps):
            where = (*step.origin, "deps", n)
            value, exclude = self._render_dep(scope, draft, dep, where)
            if _is_step_output(dep, value):
                add_files(draft, value)
                continue
            if isinstance(value, Unknown):
                continue
            text = self.sketch.path_text(scope, pattern_of(dep), value, where)
            if text is None:
                continue
            path = self._dep_path(scope, step, dep, text, where)
            # A file of an axis is an edge already: the step reads that file, not the whole output.
            if path is not None and path not in given:
                self._add_dep(scope, draft, made, _Dep(dep, path, exclude, where))

    def _dep_path(
        self, scope: Scope, step: Step, dep: str | Glob, value: str, where: Where
    ) -> str | None:
        """Return the workspace path of a `deps` entry, or report a path outside the workspace.

        In that case, return None.
        """
        path = posixpath.normpath(value)
        if escapes(path):
            raw = pattern_of(dep)
            if value != raw:  # find_misplaced_paths reports literal paths
                message = f'"{value}", as "{raw}" is here, leaves the workspace'
                self.sketch.problem(scope.recipe, "path-escape", message, where, fix=WORKSPACE)
            return None
        if scope is not self.sketch.top and not scope.recipe.home:
            self.sketch.problem(
                scope.recipe,
                "library-deps",
                f'"{step.id}" has `deps`; a recipe outside the workspace cannot have `deps` if another recipe uses it',
                where,
                fix="declare the file as an input",
            )
        return path

    def _add_dep(self, scope: Scope, draft: NodeDraft, made: _MadeOutputs, dep: _Dep) -> None:
        """Add the steps or workspace files of a `deps` entry as dependencies."""
        makers = self._find_makers(scope, draft.step, made, dep)
        for name in makers:
            draft.upstream[name] = (*made.outputs[name], "")
        if draft.is_sample and _possible_makers(scope.recipe, scope.pending, [dep.path]):
            return  # another waiting step will create the files
        self._add_dep_files(draft, dep, is_made=bool(makers))

    def _add_dep_files(self, draft: NodeDraft, dep: _Dep, *, is_made: bool) -> None:
        """Add the workspace files of a `deps` entry; if `is_made`, steps provide files, too."""
        pattern = encode_pattern(dep.path, dep.exclude)
        must_match_file = dep.requires_match and not is_made
        if must_match_file and not draft.flags & SKIP:
            self.sketch.globs[f"{draft.prefix}{draft.step.id}", pattern] = dep.allow_empty
        if draft.is_sample and dep.allow_empty:
            return
        if dep.is_pattern or not is_made:
            draft.deps.append(pattern)

    def _find_makers(
        self, scope: Scope, step: Step, made: _MadeOutputs, dep: _Dep
    ) -> Sequence[str]:
        """Return the paths of the step outputs that provide a `deps` entry."""
        if dep.is_pattern:
            return made.matches(dep.path, dep.exclude, step)
        self._report_output_inside(scope, made, dep)
        return made.heads_of(dep.path)

    def _report_output_inside(self, scope: Scope, made: _MadeOutputs, dep: _Dep) -> None:
        """Report a `deps` directory that contains a step output."""
        inner = made.inside.get(dep.path)
        if inner is None:
            return
        maker = made.outputs[inner][0].id
        self.sketch.problem(
            scope.recipe,
            "deps-hold-output",
            f'"{dep.path}" contains "{inner}", an output of "{maker}", so the dependency would change during the run',
            dep.where,
            fix="list only the required files, or move the output to another path",
        )

    def _render_dep(
        self, scope: Scope, draft: NodeDraft, dep: str | Glob, where: Where
    ) -> tuple[Any, list[str]]:
        """Return the rendered path or pattern of a `deps` entry, and its excluded patterns."""
        names: Mapping[str, Any] = {"inputs": draft.inputs, "matrix": _with_patterns(draft.matrix)}
        text = pattern_of(dep)
        if mentions_step(text):
            steps = results_of(scope, draft.matrix)
            choice = choose_branches(self.sketch, scope, text, {**names, "steps": steps})
            if choice.late:
                return None, []  # the reader has added an edge to each step of the choice
            names = choice.names
        if isinstance(dep, str):
            return self.sketch.evaluate(scope, dep, names, where), []
        exclude = self.sketch.exclusions(scope, dep.exclude, names, (*where, "exclude"))
        return self.sketch.evaluate(scope, dep.pattern, names, (*where, "glob")), exclude

    def _decide_when(self, scope: Scope, draft: NodeDraft, names: Mapping[str, Any]) -> None:
        """Evaluate `when`, or leave the decision to the run if it depends on step results."""
        step = draft.step
        if step.when is None:
            return
        names = {**names, "steps": KnownResults(self.sketch, scope, draft.matrix)}
        refs = self.sketch.references(scope, step.when, (*step.origin, "when"))
        of_steps = [ref for ref in refs if ref.path[0] == "steps"]
        # A condition on metrics may be invalid for some of their values only: the run reports that.
        if any(ref.path[2:3] == ("metrics",) for ref in of_steps):
            value = _condition_value(str(step.when), names)
        else:
            value = self.sketch.condition(scope, step, names)
        if value is False:
            draft.flags |= SKIP
        elif value is None and of_steps:
            draft.flags |= WHEN_LATE

    def _node_count(self, scope: Scope, draft: NodeDraft, names: Namespaces) -> int | str | None:
        """Return the node count of a step, its expression if it reads metrics, or None."""
        step, where = draft.step, (*draft.step.origin, "nodes")
        value: Any = step.nodes
        if isinstance(value, str):
            if any(ref.path[0] == "steps" for ref in self.sketch.references(scope, value, where)):
                return value
            value = self.sketch.evaluate(scope, value, names, where)
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            value = int(value)
        if value is None or isinstance(value, Unknown):
            return None
        if not _is_count(value):
            self.sketch.problem(
                scope.recipe,
                "nodes",
                f"`nodes` must be a whole number, 1 or greater, not {value!r}",
                where,
            )
            return None
        if value > 1 and step.local:
            fix = "remove `nodes` or `where: local`"
            self.sketch.problem(
                scope.recipe,
                "nodes",
                f"{step.id} requests {value} nodes, but `where: local` is one node",
                where,
                fix=fix,
            )
        return value


class _MadeOutputs:
    """Outputs of a recipe and of the recipes it uses, by path.

    Paths are those of a run of the recipe alone.
    """

    def __init__(self, drafts: Iterable[NodeDraft], prefix: str) -> None:
        self.outputs: dict[str, tuple[NodeDraft, str]] = {}
        for draft in drafts:
            if draft.flags & SELECT:
                continue
            for output, (path, _) in draft.outputs.items():
                self.outputs[(draft.prefix + path)[len(prefix) :]] = (draft, output)
        self.inside: dict[str, str] = {}
        """One output in each directory."""
        for path in self.outputs:
            self.inside.update(dict.fromkeys(heads(path)[1:], path))
        self._index = PathIndex(self.outputs)

    def heads_of(self, path: str) -> list[str]:
        """Return the outputs at a path or at one of its parent directories."""
        return [head for head in heads(path) if head in self.outputs]

    def matches(self, pattern: str, exclude: list[str], reader: Step) -> list[str]:
        """Return the outputs that a pattern may match, without outputs of step `reader`."""
        found = []
        for path in self._index.find_possible(pattern):
            draft, output = self.outputs[path]
            is_directory = bool(draft.outputs[output][1] & DIRECTORY)
            if draft.step is reader or not reaches(pattern, path, is_directory):
                continue
            if not is_excluded(path, exclude):
                found.append(path)
        return found


class _Dep(NamedTuple):
    """Entry of `deps` with its rendered path, for one step instance."""

    written: str | Glob
    path: str
    exclude: list[str]
    where: Where

    @property
    def is_pattern(self) -> bool:
        return is_glob(self.path) or not isinstance(self.written, str)

    @property
    def allow_empty(self) -> bool | None:
        return None if isinstance(self.written, str) else self.written.allow_empty

    @property
    def requires_match(self) -> bool:
        return self.is_pattern and not self.allow_empty


class _Settled(NamedTuple):
    """Effective settings of a step, merged from the step, its recipe and the chosen preset."""

    resources: Resources
    env: dict[str, Leaf]
    image: str | None
    python: Python | None
    secrets: Sequence[str]
    code: Sequence[str | Glob | AutoCode | GitCode]
    git: list[GitSpec]
    metrics: MetricsSpec | None


def _record_results(scope: Scope, step: Step, drafts: list[NodeDraft]) -> None:
    """Record the instances of a step and their outputs for later templates."""
    scope.groups[step.id] = drafts
    if step.matrix is None:
        scope.results[step.id] = _outputs_of(drafts[0])
        return
    scope.many.add(step.id)
    scope.made[step.id] = [Instance(d.matrix, _outputs_of(d), [d]) for d in drafts]
    present = [d for d in drafts if not d.flags & SKIP]
    lists: dict[str, Tree] = {}
    for output in step.outputs:
        lists[output.name] = [output_of(d, output.name) for d in present]
    scope.results[step.id] = lists


def _outputs_of(draft: NodeDraft) -> dict[str, Tree]:
    """Return the outputs of a step instance by name, for the templates of later steps."""
    return {output.name: output_of(draft, output.name) for output in draft.step.outputs}


def _flags_of(step: Step) -> int:
    """Return the flags for the settings of a recipe step."""
    flags = 0
    if step.state:
        flags |= STATEFUL
    if not step.cache:
        flags |= UNCACHED
    if step.allow_failure:
        flags |= ALLOW_FAILURE
    if step.local:
        flags |= LOCAL
    return flags


def _is_step_output(dep: str | Glob, value: object) -> bool:
    """Return whether a `deps` entry names an output of another step, or a list of outputs."""
    if isinstance(value, list):
        return isinstance(dep, str) and mentions_step(dep)
    return isinstance(value, PathValue) and value.kind in ("step", "below")


def _is_unkeyed(recipe: Recipe, name: str) -> bool:
    """Return whether a name refers to an input with `key: false`."""
    root, _, rest = name.partition(".")
    spec = recipe.inputs.get(rest) if root == "inputs" else None
    return spec is not None and not spec.key


def _step_spec(
    scope: Scope,
    draft: NodeDraft,
    own: _Settled,
    reader: LeafReader,
    states: Mapping[str, str],
    nodes: int | str | None,
) -> StepSpec:
    """Build the StepSpec of a compiled step instance."""
    step, recipe = draft.step, scope.recipe
    accelerate = dict(step.accelerate) if step.accelerate is not None else None
    when = step.when if draft.flags & WHEN_LATE else None
    python = own.python.version if own.python else ""
    return StepSpec(
        recipe=recipe.id,
        step=step.id,
        author=draft.author,
        resources=resource_spec(own.resources),
        run=step.run,
        accelerate=accelerate,
        shell=step.shell,
        files=dict(step.files) or NOTHING,
        env=own.env or NOTHING,
        pass_env=sorted({*recipe.pass_env, *step.pass_env}) or _NONE,
        env_files=[*dict.fromkeys((*recipe.env_files, *step.env_files))] or _NONE,
        secrets=_secret_specs(scope, own) or _NONE,
        image=own.image,
        git=own.git or _NONE,
        names=_spec_names(draft, reader),
        sync=_sync_specs(step) or _NONE,
        state=_state_specs(step, states) or _NONE,
        continues=_continued_inputs(recipe, draft, reader) or NOTHING,
        options=step.options,
        asks=reader.metrics or NOTHING,
        metrics=own.metrics,
        when=when,
        nodes=nodes,
        python=python,
        unlisted=_unlisted_secrets(scope, own) or NOTHING,
    )


def _spec_names(draft: NodeDraft, reader: LeafReader) -> Names:
    """Return the template values of a step instance that are known before an attempt."""
    inputs = {name: plain_value(value) for name, value in draft.inputs.items()}
    outputs = {name: path for name, (path, _) in draft.outputs.items()}
    matrix = {axis: plain_value(value) for axis, value in draft.matrix.items()}
    return Names(
        inputs=inputs or NOTHING,
        steps=reader.outputs or NOTHING,
        outputs=outputs or NOTHING,
        matrix=matrix or NOTHING,
    )


def _secret_specs(scope: Scope, own: _Settled) -> list[SecretSpec]:
    specs = []
    for name in own.secrets:
        spec = scope.recipe.inputs[name]
        specs.append(SecretSpec(name, str(spec.env), scope.variables[name], spec.required))
    return specs


def _unlisted_secrets(scope: Scope, own: _Settled) -> dict[str, str]:
    """Return the secrets that a step does not receive, by environment variable."""
    unlisted = [name for name in scope.variables if name not in own.secrets]
    return {str(scope.recipe.inputs[name].env): name for name in unlisted}


def _sync_specs(step: Step) -> list[SyncSpec]:
    synced = []
    for output in step.outputs:
        if output.sync is not None:
            synced.append(SyncSpec(output.name, output.sync))
    return synced


def _state_specs(step: Step, states: Mapping[str, str]) -> list[StateSpec]:
    return [
        StateSpec(
            each.name,
            states[each.name],
            each.checkpoint,
            each.every,
            each.keep,
            each.shared,
            each.every_steps,
        )
        for each in step.state
    ]


def _continued_inputs(recipe: Recipe, draft: NodeDraft, reader: LeafReader) -> dict[str, Tree]:
    """Return the inputs with `continues` that the step reads, with their values."""
    continued: dict[str, Tree] = {}
    for name, spec in recipe.inputs.items():
        if spec.continues and f"inputs.{name}" in reader.reads:
            continued[name] = draft.inputs[name]
    return continued


def _settle_step(scope: Scope, step: Step, chosen: Preset | None) -> _Settled:
    recipe = scope.recipe
    env = {**recipe.env, **step.env}
    image, python = step.image or recipe.image, step.python or recipe.python
    if chosen is not None:
        env.update(chosen.env or {})
        image, python = chosen.image or image, chosen.python or python
    secrets = recipe.secrets if step.secrets is None else step.secrets
    code = recipe.code if step.code is None else step.code
    git = [GitSpec(each.url, each.commit, each.at) for each in code if isinstance(each, GitCode)]
    metrics = None
    if step.metrics:
        metrics = MetricsSpec(step.metrics.file, step.metrics.pattern)
    return _Settled(
        _settle_resources(scope, step, chosen),
        env,
        image,
        python,
        secrets,
        code,
        git,
        metrics,
    )


def _settle_resources(scope: Scope, step: Step, chosen: Preset | None) -> Resources:
    """Return the effective resource requests of a step.

    Step values override recipe values.  Values of `uses` and of the preset override both.
    """
    recipe = scope.recipe
    preset = _UNSAID
    if chosen is not None and chosen.resources:
        preset = chosen.resources
    # A preset in `uses` has lower precedence than the resources of the `uses` step.
    layers = (preset, scope.asked) if scope.named else (scope.asked, preset)
    gpus = recipe.resources.gpus
    resources = step.resources.over(recipe.resources.of_step(step.resources, gpus))
    for layer in layers:
        if layer.gpus is not None:
            gpus = layer.gpus
        resources = layer.of_step(step.resources, gpus).over(resources)
    return resources


def _author(step: Step, recipe: Recipe, own: _Settled) -> Author:
    """Return the recipe's part of the cache key, without the values that its templates read."""
    author: Author = {
        "outputs": {o.name: [o.path, output_flags(o) & ~TEMPORARY] for o in step.outputs}
    }
    if isinstance(step.run, list):
        author["run"] = step.run
    elif step.run is not None:
        author["script"], author["shell"] = step.run, step.shell
    else:
        author["accelerate"] = dict(step.accelerate or {})
    if step.files:
        author["files"] = dict(step.files)
    if own.env:
        author["env"] = own.env
    if own.secrets:
        author["secrets"] = list(own.secrets)
    if own.image:
        author["image"] = own.image
    if own.python and own.python.version:
        author["python"] = own.python.version
    if recipe.setup:
        author["setup"] = list(recipe.setup)
    if own.metrics is not None and own.metrics.in_environment:
        author["metrics"] = list(own.metrics)
    if own.resources.key:
        author["resources"] = resource_spec(own.resources).as_key
    if own.git:
        author["git"] = [list(each) for each in own.git]
    return author


def _code_text(item: str | Glob | AutoCode, step: Step, env: Mapping[str, object]) -> str:
    """Return a `code` item in the text form that a plan node stores."""
    if isinstance(item, AutoCode):
        return encode_automatic(find_starts(step.run, step.accelerate), python_path(env))
    return item if isinstance(item, str) else encode_pattern(item.pattern, item.exclude)


def _condition_value(leaf: str, names: Mapping[str, Any]) -> bool | None:
    """Evaluate a condition, and return None if its value is unknown."""
    try:
        value = evaluate(leaf, names)
    except TemplateError:
        return None
    return value if isinstance(value, bool) else None


def _glob_axes(step: Step) -> list[Mapping[str, Any]]:
    """Return the matrix axes of a step that are globs."""
    axes = (step.matrix or {}).values()
    return [axis for axis in axes if isinstance(axis, dict)]


def _possible_makers(recipe: Recipe, among: Iterable[str], reads: Sequence[str]) -> list[str]:
    """Return the steps in `among` whose outputs the paths `reads` may match, without rendering."""
    return [id for id in among if _may_make_any(recipe.steps[id], reads)]


def _may_make_any(step: Step, reads: Sequence[str]) -> bool:
    """Return whether an output of a step may match one of the paths `reads`."""
    return any(may_make(output.path, dep) for output in step.outputs for dep in reads)


def _needs_pending_steps(scope: Scope, wanted: Sequence[str], written: Sequence[str]) -> bool:
    """Return whether a step needs a step that waits for an expansion.

    `wanted` are the steps in its templates and `needs`, and `written` are the files in its `deps`.
    """
    if not scope.pending.isdisjoint(wanted):
        return True
    return bool(_possible_makers(scope.recipe, scope.pending, written))


def _is_among(group: list[NodeDraft], groups: Iterable[list[NodeDraft]]) -> bool:
    """Return whether a group of instances is one of `groups`."""
    # Compared by identity, since `==` would compare all fields of all drafts: instances of a step
    # share one list.
    return any(group is each for each in groups)


def _with_patterns(matrix: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return axis values in which files are patterns that match only themselves."""
    # A glob match is a literal file name, even if it contains wildcard characters.
    values = dict(matrix)
    for axis, value in matrix.items():
        if isinstance(value, PathValue):
            values[axis] = as_pattern(value)
    return values


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, 1 or greater; a bool is no number here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _last_name(path: str) -> str:
    """Return the last component of a path, or an empty string."""
    name = posixpath.basename(posixpath.normpath(path))
    return "" if name in (".", "..") else name
