"""Assemble compiled steps into a Plan: topological order, collisions and published outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..digest import Digest
from ..errors import Invalid, Location, Problem
from ..paths import heads
from .choices import choose_branches
from .drafts import (
    UNKNOWN_PATH,
    NodeDraft,
    PathValue,
    Results,
    Scope,
    Sketch,
    plain_value,
    producers,
)
from .fingerprint import author_digest
from .plan import SELECT, SKIP, Ahead, Node, Plan
from .step import (
    TEMPORARY,
    HealthSpec,
    LateValue,
    LimitSpec,
    OutputSpec,
    Publication,
    RunSettings,
    Upstream,
)
from .step_order import is_in_order

if TYPE_CHECKING:
    from ..language.recipe import Limits, Recipe
    from ..language.values import Tree


def assemble(
    sketch: Sketch,
    recipe: Recipe,
    values: Mapping[str, Tree],
    digest: Digest,
    replaced: Limits | None,
) -> Plan:
    """Build the plan of `recipe` from its compiled steps.

    Values in `replaced` override the recipe's limits.  Raises Invalid with all problems of the
    sketch and of the assembly.
    """
    _report_collisions(sketch)
    publish = _find_published(sketch, recipe)
    if sketch.problems:
        raise Invalid(drop_echoes(sketch.problems))
    drafts = _sort_drafts(sketch)
    _skip_dependents(drafts)
    published: list[Publication] = []
    for draft, output, path, name in publish:
        if not draft.flags & SKIP:
            published.append(Publication(draft.number, output, path, name))
    nodes = [_node(draft) for draft in drafts]
    specs = [draft.spec for draft in drafts]
    shown = {k: plain_value(v) for k, v in values.items() if recipe.inputs[k].type != "secret"}
    ahead = [_ahead(sample) for sample in sketch.samples if not sample.flags & SKIP]
    globs = [(step, pattern, allowed) for (step, pattern), allowed in sketch.globs.items()]
    return Plan(
        recipe.id,
        digest,
        sketch.homes,
        nodes,
        published,
        sketch.pending,
        sketch.waiting,
        shown,
        lambda: specs,
        run_settings(recipe, replaced),
        ahead=ahead,
        empty=sketch.empty,
        globs=globs,
    )


def _node(draft: NodeDraft) -> Node:
    """Convert a numbered Draft to a plan node."""
    upstream = []
    for name, (producer, output, below) in _drop_files_of_wholes(draft.upstream).items():
        upstream.append(Upstream(producer.number, output, name, below))
    after = sorted({producer.number for producer in draft.after})
    outputs = [OutputSpec(name, path, flags) for name, (path, flags) in draft.outputs.items()]
    metrics = draft.spec.metrics
    rule = metrics.rule if metrics is not None else ""
    return Node(
        draft.id,
        author_digest(draft.author),
        list(dict.fromkeys(draft.deps)),
        draft.code,
        draft.home,
        list(draft.takes.values()),
        upstream,
        _late_values(draft),
        after,
        outputs,
        draft.prefix,
        draft.lock,
        draft.flags,
        rule,
        list(draft.tools),
        _choices(draft),
    )


def _late_values(draft: NodeDraft) -> list[LateValue]:
    """Return the metrics of other steps that a step reads.

    Metrics outside the cache key have an empty name.
    """
    found = []
    for (_, metric), producer in draft.late.items():
        step = producer.id[len(draft.prefix) :]
        found.append(LateValue(producer.number, metric, f"steps.{step}.metrics.{metric}"))
    for read, producer in draft.asked.items():
        if read not in draft.late:
            found.append(LateValue(producer.number, read[1], ""))
    return found


def _ahead(sample: NodeDraft) -> Ahead:
    return Ahead(sample.id, sample.home, list(sample.takes.values()), sample.deps, sample.code)


def _choices(draft: NodeDraft) -> list[int]:
    """Return the numbers of the steps that conditional templates choose among.

    If only one of them is skipped, the reading step still runs.
    """
    if not draft.choices:
        return []
    numbers: set[int] = set()
    for group in draft.choices:
        numbers.update(each.number for each in group)
    return sorted(numbers & {producer.number for producer in producers(draft)})


def run_settings(recipe: Recipe, replaced: Limits | None = None) -> RunSettings:
    """Return the run-wide settings of a recipe; values in `replaced` override its limits."""
    time, cost = recipe.limits.time, recipe.limits.cost
    if replaced is not None and replaced.time is not None:
        time = replaced.time
    if replaced is not None and replaced.cost is not None:
        cost = replaced.cost
    health = HealthSpec(recipe.health.run, recipe.health.every) if recipe.health else None
    return RunSettings(list(recipe.setup), list(recipe.cleanup), LimitSpec(time, cost), health)


def _find_published(sketch: Sketch, recipe: Recipe) -> list[tuple[NodeDraft, str, str, str]]:
    """Return the published outputs of a plan as (producer, output, path, name).

    The name is the one in the recipe's `outputs`, or empty if the recipe declares none.
    """
    assert sketch.top is not None
    found: list[tuple[NodeDraft, str, str, str]] = []
    if recipe.outputs is None:
        return _all_outputs(sketch)
    for name, leaf in recipe.outputs.items():
        for draft, output, path in _named_output(sketch, sketch.top, recipe, name, leaf):
            is_temporary = output in draft.outputs and draft.outputs[output][1] & TEMPORARY
            if not draft.flags & SKIP and not is_temporary:
                found.append((draft, output, path, name))
    return found


def _all_outputs(sketch: Sketch) -> list[tuple[NodeDraft, str, str, str]]:
    """Return all outputs of a plan except temporary ones, for a recipe without `outputs`."""
    found = []
    for draft in sketch.drafts:
        if draft.flags & (SELECT | SKIP):
            continue
        for name, (path, flags) in draft.outputs.items():
            if not flags & TEMPORARY:
                found.append((draft, name, draft.prefix + path, ""))
    return found


def _named_output(
    sketch: Sketch, top: Scope, recipe: Recipe, name: str, leaf: Tree
) -> Iterator[tuple[NodeDraft, str, str]]:
    """Yield the producer, output name and path of each step output in one entry of `outputs`."""
    where = ("outputs", name)
    refs = sketch.references(top, leaf, where)
    known = [sketch.step_name(top, ref, where) for ref in refs]
    if top.awaits(refs) or not all(known):
        return
    names = {"inputs": top.inputs, "steps": Results(top)}
    choice = choose_branches(sketch, top, leaf, names)
    if choice.late:
        message = f'the step of the output "{name}" is not known before the run'
        fix = "choose in a step with a command, and use that step's output"
        sketch.problem(recipe, "late-name", message, where, fix=fix)
    value = sketch.evaluate(top, leaf, choice.names, where)
    if value is None and choice.names is not names:
        return  # the chosen step is skipped
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, PathValue) and item.kind == "step":
            draft, output = item.address
            yield draft, output, item.name
        else:
            message = f'output "{name}" does not name a step output'
            fix = 'use a step output, for example "{{ steps.train.model }}"'
            sketch.problem(recipe, "output", message, where, fix=fix)


def _report_collisions(sketch: Sketch) -> None:
    """Report outputs with the same path, and outputs inside other outputs.

    Paths are compared as on the workspace disk.
    """
    seen: dict[str, tuple[NodeDraft, str, str]] = {}
    reported: set[tuple[int, str]] = set()
    for draft in [*sketch.drafts, *sketch.samples]:
        if draft.flags & SELECT:
            continue
        for output, (path, _) in draft.outputs.items():
            if path == UNKNOWN_PATH or output in draft.unsound:
                continue
            if draft.several:
                _report_same_path(sketch, draft, output, path, draft, path)
                continue
            whole = sketch.as_disk(draft.prefix + path)
            other = seen.get(whole)
            if other is not None:
                if (id(draft.step), output) not in reported:
                    _report_same_path(sketch, draft, output, path, other[0], other[2])
                reported.add((id(draft.step), output))
            else:
                seen[whole] = (draft, output, path)
    _report_nested(sketch, seen)
    _report_samples_inside(sketch, seen)


def _report_nested(sketch: Sketch, seen: Mapping[str, tuple[NodeDraft, str, str]]) -> None:
    """Report outputs inside other outputs."""
    for whole, (draft, output, path) in seen.items():
        at = whole.rfind("/")
        while at > 0:
            other = seen.get(whole[:at])
            if other is not None:
                _report_inside(sketch, draft, output, path, other)
            at = whole.rfind("/", 0, at)


def _report_samples_inside(sketch: Sketch, seen: Mapping[str, tuple[NodeDraft, str, str]]) -> None:
    """Report unknown output paths that start inside another step's output.

    These are paths of steps whose matrix is not known yet.
    """
    for draft in sketch.samples:
        for made in draft.step.outputs:
            if draft.outputs[made.name][0] != UNKNOWN_PATH:
                continue
            folder = made.path.partition("{{")[0].rpartition("/")[0]
            if not folder:
                continue
            for head in heads(sketch.as_disk(draft.prefix + folder)):
                if head in seen:
                    _report_inside(sketch, draft, made.name, made.path, seen[head])


def _report_inside(
    sketch: Sketch, draft: NodeDraft, output: str, path: str, other: tuple[NodeDraft, str, str]
) -> None:
    sketch.problem(
        draft.recipe,
        "two-makers",
        f'"{path}" of "{draft.id}" is inside "{other[2]}", an output of "{other[0].id}"',
        (*draft.step.origin, "outputs", output),
        fix="use a different path for one of the two outputs",
    )


def _report_same_path(
    sketch: Sketch, draft: NodeDraft, output: str, path: str, other: NodeDraft, others_path: str
) -> None:
    where = (*draft.step.origin, "outputs", output)
    if draft.prefix + path != other.prefix + others_path:
        message = f'"{others_path}" of "{other.id}" and "{path}" of "{draft.id}" differ only in case and are the same file on this disk'
        fix = "use a different path for one of the two outputs; to sweep over such values, use a case-sensitive disk"
        sketch.problem(draft.recipe, "two-makers", message, where, fix=fix)
    elif other.step is draft.step and draft.matrix:
        missing = _find_unused_axes(draft, output)
        if missing:
            names = " and ".join(f"{{{{ matrix.{axis} }}}}" for axis in missing)
            fix = f"use {names} in the path"
        else:
            fix = f"make the axes differ in the path: {other.id} and {draft.id} share one"
        sketch.problem(
            draft.recipe,
            "two-makers",
            f'several instances of "{draft.step.id}" have the same output path "{path}"',
            where,
            fix=fix,
        )
    else:
        sketch.problem(
            draft.recipe,
            "two-makers",
            f'"{path}" is an output of both "{other.id}" and "{draft.id}"',
            where,
            fix="use a different path for one of the two outputs",
        )


def _find_unused_axes(draft: NodeDraft, output: str) -> list[str]:
    """Return the matrix axes that the recipe's path of an output does not mention."""
    written = next(each.path for each in draft.step.outputs if each.name == output)
    return [axis for axis in draft.matrix if not re.search(rf"matrix\.{axis}\b", written)]


def drop_echoes(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield the problems without template errors at a location that has a more specific problem."""
    mentions: list[Location] = []
    for found in problems:
        if found.code != "template" and found.where is not None:
            mentions.append(found.where)
    for found in problems:
        is_echo = found.code == "template" and found.where is not None
        if not is_echo or not any(_covers(mention, found.where) for mention in mentions):
            yield found


def _covers(mention: Location, place: Location | None) -> bool:
    """Return whether location `place` lies inside location `mention`."""
    if place is None or mention[:2] != place[:2]:
        return False
    return 0 <= place.column - mention.column < mention.length


def _sort_drafts(sketch: Sketch) -> list[NodeDraft]:
    """Sort steps topologically, keeping the recipe's order where possible.

    Raises Invalid for a cycle.
    """
    dependencies: dict[int, list[int]] = {}
    for draft in sketch.drafts:
        dependencies[draft.order] = [producer.order for producer in producers(draft)]
    if is_in_order(dependencies):
        return _number_drafts(sketch.drafts)
    from .graph import as_written, dag, find_cycle

    graph = dag(dependencies)
    loop = [sketch.drafts[place] for place in find_cycle(graph)]
    if loop:
        sketch.problem(
            loop[0].recipe,
            "cycle",
            f"steps depend on each other: {' -> '.join(draft.id for draft in loop)}",
            loop[0].step.origin,
            fix="break the cycle: remove an entry of `deps` or `needs`, or a template that uses another step's output",
            key=True,
        )
        raise Invalid(sketch.problems)
    return _number_drafts([sketch.drafts[place] for place in as_written(graph)])


def _number_drafts(drafts: list[NodeDraft]) -> list[NodeDraft]:
    for number, draft in enumerate(drafts):
        draft.number = number
    return drafts


def _skip_dependents(drafts: Iterable[NodeDraft]) -> None:
    """Skip each step that depends on a step whose instances are all skipped.

    `drafts` are in topological order.
    """
    skipped: dict[int, bool] = {}  # by the id of a list of drafts: instances share these lists

    def is_skipped(group: list[NodeDraft]) -> bool:
        known = skipped.get(id(group))
        if known is None:
            known = skipped[id(group)] = _are_skipped(group)
        return known

    for draft in drafts:
        if draft.flags & SKIP:
            continue
        lacks_input = any(map(_are_skipped, _required_producers(draft)))
        if lacks_input or any(map(is_skipped, draft.required)):
            draft.flags |= SKIP


def _are_skipped(drafts: Iterable[NodeDraft]) -> bool:
    return all(draft.flags & SKIP for draft in drafts)


def _required_producers(draft: NodeDraft) -> Iterable[list[NodeDraft]]:
    """Return the required dependencies of a step instance, grouped by step.

    Steps that conditional templates choose among are left out.
    """
    optional: set[int] = set()
    for group in draft.choices:
        optional.update(map(id, group))
    groups: dict[int, list[NodeDraft]] = {}
    for producer, _, _ in draft.upstream.values():
        if id(producer) not in optional:
            groups.setdefault(id(producer.step), []).append(producer)
    return groups.values()


def _drop_files_of_wholes(
    upstream: dict[str, tuple[NodeDraft, str, str]],
) -> dict[str, tuple[NodeDraft, str, str]]:
    """Drop single files of an output if the step also reads the entire output."""
    if not any(below for _, _, below in upstream.values()):
        return upstream
    whole = {name for name, (_, _, below) in upstream.items() if not below}
    left: dict[str, tuple[NodeDraft, str, str]] = {}
    for name, (producer, output, below) in upstream.items():
        if not below or whole.isdisjoint(heads(name)):
            left[name] = (producer, output, below)
    return left
