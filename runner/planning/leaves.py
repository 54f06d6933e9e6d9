"""Read the templates of one step: its dependencies, the values in its cache key, and unknown names.

The templates of `when` and `nodes` do not change the outputs and are not part of the key.  Files in
`deps` are keyed by content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..language.template import Reference, TemplateError, references
from .choices import chooses, needs
from .drafts import (
    LATE_NAMES,
    Namespaces,
    NodeDraft,
    PathValue,
    Scope,
    Sketch,
    is_path_value,
    plain_value,
)
from .ids import encode_value
from .pairs import SAME, Pair, find_pair, is_same, shared_axes
from .patterns import as_pattern
from .plan import PAIRED
from .step import MetricAsked, Source

if TYPE_CHECKING:
    from ..language.template_choices import ReferencedNames
    from ..language.values import Tree, Where


class _Mention(NamedTuple):
    """Name that a template reads, with its location.

    `asks` tells whether its value is only possibly needed.
    """

    ref: Reference
    where: Where
    part: str  # of the step: run, env, when, deps
    asks: bool

    @property
    def in_key(self) -> bool:
        """Return whether the value is part of the cache key."""
        return self.part not in ("when", "nodes", "deps")

    @property
    def name(self) -> str:
        return ".".join(self.ref.path)


class LeafReader:
    """Reader of the templates of one step instance.

    `names` are the available values, `known_now` returns the known values of all names, and `state`
    maps states to their paths.
    """

    def __init__(
        self,
        sketch: Sketch,
        scope: Scope,
        draft: NodeDraft,
        names: Namespaces,
        known_now: Callable[[], Mapping[str, Any]],
        state: Mapping[str, str],
    ) -> None:
        self._sketch, self._scope, self._draft = sketch, scope, draft
        self._names, self._known_now, self._state = names, known_now, state
        self.reads: dict[str, Tree] = {}
        """Values that are part of the key, by name."""
        self.outputs: dict[str, dict[str, Any]] = {}
        """Outputs of other steps that the step reads, by step."""
        self.metrics: dict[str, list[MetricAsked]] = {}
        """Metrics of other steps that the step reads, by step."""

    def read(self, leaf: str, where: Where) -> None:
        """Record all names that a template reads."""
        part = str(where[len(self._draft.step.origin)])
        try:
            found = references(leaf)
            choice = needs(leaf, self._known_now()) if chooses(leaf) else None
        except TemplateError as error:
            self._sketch.template_problem(self._scope, error, where)
            return
        for ref in found:
            if part == "deps" and ref.path[0] != "steps":
                continue  # files in `deps` are keyed by content
            if choice is None or not _is_left_out(ref, choice, self._names):
                asks = choice is not None and ref.path not in choice.certain
                self._note(_Mention(ref, where, part, asks))

    def _note(self, mention: _Mention) -> None:
        root, rest = mention.ref.path[0], mention.ref.path[1:]
        if root in LATE_NAMES:
            if len(rest) != 1 or rest[0] not in LATE_NAMES[root]:
                self._unknown(mention, mention.name, [f"{root}.{n}" for n in LATE_NAMES[root]])
        elif root == "steps":
            if len(rest) >= 2:
                self._note_step(mention)
        elif root == "state":
            self._note_state(mention, rest)
        elif root == "inputs":
            self._note_input(mention, rest)
        elif root in ("outputs", "matrix"):
            self._note_value(mention, root, rest)
        else:
            known = ["inputs", "steps", "outputs", "state", "matrix", *LATE_NAMES]
            self._unknown(mention, root, known)

    def _unknown(self, mention: _Mention, name: str, known: list[str]) -> None:
        self._sketch.unknown(self._scope, name, known, mention.where, mention.ref)

    def _problem(self, mention: _Mention, code: str, message: str, fix: str) -> None:
        self._sketch.reference_problem(self._scope, code, message, mention.where, mention.ref, fix)

    def _note_state(self, mention: _Mention, rest: tuple[str, ...]) -> None:
        if not rest or rest[0] not in self._state:
            self._unknown(mention, mention.name, [f"state.{name}" for name in self._state])
        elif rest[1:] and rest[1:] != ("latest",):
            self._unknown(mention, mention.name, [f"state.{rest[0]}.latest"])
        elif not rest[1:]:  # `latest` is found when an attempt starts, so no key has it
            self.reads[f"state.{rest[0]}"] = self._state[rest[0]]

    def _note_input(self, mention: _Mention, rest: tuple[str, ...]) -> None:
        if rest and self._is_secret(rest[0]):
            self._report_secret(mention, rest[0])
        else:
            self._note_value(mention, "inputs", rest)

    def _note_value(self, mention: _Mention, root: str, rest: tuple[str, ...]) -> None:
        """Record a template's use of an input, output or axis.

        A namespace alone means all its names.
        """
        known = self._names[root]
        if rest and rest[0] not in known:
            self._unknown(mention, mention.name, [f"{root}.{name}" for name in known])
        elif mention.in_key:
            mentioned = rest[:1] or known
            self._read_values(root, {name: known[name] for name in mentioned})

    def _read_values(self, root: str, values: Mapping[str, Tree]) -> None:
        for name, value in values.items():
            self.reads.setdefault(f"{root}.{name}", value)
            add_files(self._draft, value)

    def _is_secret(self, name: str) -> bool:
        spec = self._scope.recipe.inputs.get(name)
        return spec is not None and spec.type == "secret"

    def _report_secret(self, mention: _Mention, name: str) -> None:
        variable = self._scope.recipe.inputs[name].env
        message = f'"{name}" is a secret and cannot be used in a template'
        fix = f"list the secret in `secrets: [{name}]`; the command gets its value as ${variable}"
        self._problem(mention, "secret", message, fix)

    # -- other steps --

    def _note_step(self, mention: _Mention) -> None:
        id, name = mention.ref.path[1:3]
        if is_same(mention.ref.path) and SAME not in self._scope.results.get(id, {}):
            self._note_same(mention)
            return
        draft, group = self._draft, self._scope.group(id)
        if mention.asks:
            draft.asked_for.add(id)
        else:
            draft.required_ids.add(id)
        skipped = self._sketch.skip_state(group).skipped
        if skipped and not mention.asks:
            draft.after.extend(group)
        if name != "metrics":
            self._note_output(mention, skipped)
        elif mention.part == "deps":
            message = f'"{mention.name}" is not known yet when `deps` are resolved'
            self._problem(mention, "late-name", message, "use a file output of the step")
        else:
            producers = [] if skipped else list(self._scope.groups.get(id, ()))
            self._note_metric(mention, producers)

    def _note_metric(self, mention: _Mention, producers: list[NodeDraft]) -> None:
        id, metric = mention.ref.path[1], ".".join(mention.ref.path[3:])
        many = id in self._scope.many
        self._add_metric_edges(mention, metric, producers)
        if mention.in_key and many:
            self.reads[f"steps.{id}.metrics.{metric}"] = self._local_ids(producers)
        self.metrics.setdefault(id, []).append(MetricAsked(metric, many))

    def _add_metric_edges(self, mention: _Mention, metric: str, producers: list[NodeDraft]) -> None:
        late = self._draft.late if mention.in_key else self._draft.asked
        for producer in producers:
            late[producer.id, metric] = producer

    def _local_ids(self, producers: list[NodeDraft]) -> list[Tree]:
        return [producer.id[len(self._scope.prefix) :] for producer in producers]

    def _note_output(self, mention: _Mention, skipped: bool) -> None:
        id, name = mention.ref.path[1:3]
        value = self._scope.results.get(id, {}).get(name)
        if value is None:
            return
        if skipped and mention.asks:
            value = None
        self.outputs.setdefault(id, {})[name] = plain_value(value)
        if mention.in_key:
            # The key includes the paths and their order, because contents alone do not tell which
            # file is which.
            self.reads[f"steps.{id}.{name}"] = value
            add_files(self._draft, value)
        elif value is not None:
            self._draft.after.extend(self._scope.group(id))
            if mention.part == "deps" and mention.asks:
                add_files(self._draft, value)

    def _note_same(self, mention: _Mention) -> None:
        """Record a template's use of `steps.ID.same.NAME`, a result of the matching instance."""
        _, id, _, name, *rest = mention.ref.path
        draft = self._draft
        has_name = name == "metrics" or name in self._scope.results.get(id, {})
        if draft.is_sample or not has_name:
            return  # the step waits, or its problem is reported elsewhere
        found = find_pair(self._scope, id, draft.matrix)
        if found is None:
            self._report_no_pair(mention, id)
            return
        if mention.asks:
            draft.choices.append(found.drafts)
        else:
            draft.required_pairs.append(found.drafts)
        if found.one:
            draft.flags |= PAIRED
        if name != "metrics":
            self._note_same_output(mention, id, name, found)
            return
        metric = ".".join(rest)
        self._add_metric_edges(mention, metric, found.drafts)
        if mention.in_key and not found.one:
            self.reads[f"steps.{id}.same.metrics.{metric}"] = self._local_ids(found.drafts)
        ids = [producer.id for producer in found.drafts]
        self.metrics.setdefault(id, []).append(MetricAsked(metric, not found.one, ids))

    def _note_same_output(self, mention: _Mention, id: str, name: str, found: Pair) -> None:
        skipped = mention.asks and self._sketch.skip_state(found.drafts).skipped
        value = None if skipped else found.output(name)
        self.outputs.setdefault(id, {}).setdefault(SAME, {})[name] = plain_value(value)
        if mention.in_key:
            self.reads[f"steps.{id}.same.{name}"] = value
            add_files(self._draft, value)
        else:
            self._draft.after.extend(found.drafts)

    def _report_no_pair(self, mention: _Mention, id: str) -> None:
        draft = self._draft
        shared = shared_axes(draft.step, self._scope.recipe.steps[id])
        axes = ", ".join(f"{axis}={encode_value(draft.matrix[axis])}" for axis in shared)
        message = f'no instance of "{id}" has {axes}, as {draft.id} has'
        self._problem(
            mention, "same-instance", message, "use the same values for this axis in both steps"
        )


def add_files(draft: NodeDraft, value: Tree) -> None:
    """Add the files in a template value to the dependencies or sources of a step instance."""
    if isinstance(value, list):
        for item in value:
            add_files(draft, item)
    elif isinstance(value, PathValue):
        if value.kind == "step":
            draft.upstream[value.name] = (*value.address, "")
        elif value.kind == "below":
            producer, output, match = value.address
            draft.upstream[value.name] = (producer, output, match)
        elif value.kind == "dep":
            draft.deps.append(as_pattern(value.name))  # assembly removes duplicates
        else:
            draft.takes[value.name] = Source(value.name, value.kind, *value.address)


def _is_left_out(ref: Reference, choice: ReferencedNames, names: Mapping[str, Any]) -> bool:
    """Return whether a name occurs only in an unselected branch and would add files to the key."""
    if ref.path in choice.certain or ref.path in choice.possible:
        return False
    value: Any = names
    for part in ref.path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return ref.path[0] == "steps" or is_path_value(value)
