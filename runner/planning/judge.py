"""Decide whether a step is up to date, restorable, must run or may run, with all reasons.

Learns about the disk and the store only from Facts, of which some parts read when first used.

`plan` and a run share this function.  Planning calls it with the known facts, and a run calls it
again once the upstream steps are final.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from ..digest import Digest
from ..errors import CannotRun
from . import fingerprint
from .ids import bare
from .patterns import code_name
from .plan import ALLOW_FAILURE, PAIRED, SELECT, SKIP, UNCACHED, WHEN_LATE, Node, Plan, Target
from .step import MetricAsked, MetricsSpec, StepSpec

FRESH, RESTORE, RUN, MAYBE, SKIPPED = "fresh", "restore", "run", "maybe", "skip"


class CacheEntry(Protocol):
    """Protocol of a cache entry, with the fields that the decision about a step needs."""

    @property
    def outputs(self) -> Sequence[Sequence[str]]: ...  # [name, path, content]

    @property
    def metrics(self) -> Mapping[str, Any]: ...  # by the metrics rule in the key

    @property
    def measured(
        self,
    ) -> Mapping[str, Mapping[str, Any]]: ...  # by the digest of a rule outside the key


class Traces(Protocol):
    def get(self, key: str) -> CacheEntry | None: ...


class Numbers(Protocol):
    def __call__(self, key: str, rule: MetricsSpec) -> Mapping[str, Any] | None: ...


def _not_kept(key: str, rule: MetricsSpec) -> None:
    return None


@dataclass(slots=True)
class Facts:
    """Surveyed state of the workspace, the store and the input sources.

    Most fields are plain values, collected before the decision.  Three fields read on demand:
    `traces` queries the database, `trees` may download from the shared store, and `numbers` reads
    a stored log or output and saves its metrics in the index.
    """

    traces: Traces
    trees: Mapping[str, Mapping[str, str]]  # content of a tree -> path in it -> content
    matches: dict[str, list[str]] = field(
        default_factory=dict
    )  # pattern among deps -> workspace paths; a literal path is not listed
    files: dict[str, str | None] = field(
        default_factory=dict
    )  # workspace path -> content, None if missing
    code: dict[tuple[int, str], list[tuple[str, str]]] = field(
        default_factory=dict
    )  # home, pattern -> [name, content]
    takes: dict[tuple[str, ...], str | None] = field(
        default_factory=dict
    )  # kind, address, *globs -> identity
    locks: dict[tuple[int, str], str | None] = field(
        default_factory=dict
    )  # home, lock file -> content
    tools: dict[str, str | None] = field(
        default_factory=dict
    )  # program -> content of its file, None if not on PATH
    current_python: str | None = (
        None  # with `--python current`: replaces the image and the lock in the key
    )
    there: dict[str, str | None] = field(default_factory=dict)  # published path -> content now
    ours: dict[str, str] = field(
        default_factory=dict
    )  # published path -> content that recipe last put there
    stored: Container[str] | None = (
        None  # contents that can be restored; read only if an output is missing
    )
    numbers: Numbers = (
        _not_kept  # reads metrics by a new rule from a stored attempt; None if nothing is stored
    )

    def strange(self, path: str) -> bool:
        """Return whether a published path has content that recipe neither wrote nor stores."""
        now = self.there.get(path)
        if now is None or self.ours.get(path) == now:
            return False
        return self.stored is None or now not in self.stored


class StepResult(NamedTuple):
    """Result of a finished step: output contents by name, and its last metrics.

    Missing optional outputs are left out.  `ok` is False for a failed or skipped step.
    """

    ok: bool
    outputs: Mapping[str, str]
    metrics: Mapping[str, Any]


NOTHING = StepResult(False, {}, {})


class Verdict(NamedTuple):
    answer: str
    key: Digest | None
    reasons: tuple[str, ...]
    made: StepResult | None  # result of the step, if known
    conflicts: tuple[str, ...] = ()  # target paths with foreign content
    former: Digest | None = (
        None  # key by the earlier version, with the metrics rule; None if the current key has a cache entry
    )
    forced: bool = False
    """Whether the caller forced the step to run."""


def judge(
    plan: Plan,
    n: int,
    facts: Facts,
    made: Mapping[int, StepResult],
    *,
    force: bool = False,
    targets: Mapping[int, Sequence[Target]] | None = None,
) -> Verdict:
    """Decide whether node `n` is up to date, restorable, must run, may run or is skipped.

    `made` holds the known results of its dependencies.  If one is missing, the verdict is `maybe`.
    `targets` maps nodes to the required places of their outputs.
    """
    node = plan.nodes[n]
    if node.flags & SKIP:
        return Verdict(SKIPPED, None, (_why_skipped(plan, n),), NOTHING)
    verdict = _judge_dependencies(plan, n, made)
    if verdict is not None:
        return verdict
    own = targets.get(n, ()) if targets else ()
    if node.flags & SELECT:
        return _judge_select(plan, n, facts, made, own)
    world, missing = world_of(node, facts, made)
    if missing:
        return Verdict(RUN, None, tuple(missing), None)
    try:
        key = fingerprint.key(node.author, world)
    except (TypeError, ValueError) as error:
        reason = f"cannot compute its cache key ({error}); the result will not be cached"
        return Verdict(RUN, None, (reason,), None)
    if node.flags & WHEN_LATE and not evaluate_when(plan.specs()[n], made, plan, n):
        return Verdict(SKIPPED, key, ("its `when` is false",), NOTHING)
    is_uncached = bool(node.flags & UNCACHED)
    trace, former = (None, None) if is_uncached else _find_trace(plan, n, key, world, facts)
    if force:
        return Verdict(
            RUN, key, ("forced",), None, _find_conflicts(own, facts), former, forced=True
        )
    if trace is None:
        reasons = ("`cache: false`: runs every time",) if is_uncached else ()
        return Verdict(RUN, key, reasons, None, _find_conflicts(own, facts), former)
    metrics = _metrics_of_trace(plan, n, key, trace, former, facts)
    if metrics is None:
        lost = _find_lost_metric(plan, n)
        if lost:
            return Verdict(RUN, key, (lost,), None, _find_conflicts(own, facts))
        metrics = {}
    outputs = {name: content for name, _, content in trace.outputs}
    result = StepResult(True, outputs, metrics)
    return _judge_targets(result, key, (), facts, own)._replace(former=former)


def _find_lost_metric(plan: Plan, n: int) -> str:
    """Return why a step whose metrics are no longer stored must run, or an empty string."""
    for reader, metric in plan.readers(n):
        return f"{reader} reads its metric {metric} by a new rule, and the earlier metrics are no longer stored"
    return ""


def _judge_dependencies(plan: Plan, n: int, made: Mapping[int, StepResult]) -> Verdict | None:
    """Return the verdict for a step with an unfinished or skipped dependency, or None."""
    node = plan.nodes[n]
    dependencies = plan.dependencies(n)
    unknown = [plan.nodes[each].id for each in sorted(dependencies) if each not in made]
    if unknown:
        return Verdict(MAYBE, None, (f"depends on the outputs of {_list_ids(unknown)}",), None)
    if all([made[each].ok for each in dependencies]):
        return None
    skipped = _find_skipped_need(plan, n, made)
    if not skipped and node.choices:
        skipped = _find_skipped_choice(plan, n, made)
    if not skipped:
        return None
    return Verdict(SKIPPED, None, (f"{skipped}, a dependency, is skipped",), NOTHING)


def _metrics_of_trace(
    plan: Plan, n: int, key: Digest, trace: CacheEntry, former: Digest | None, facts: Facts
) -> Mapping[str, Any] | None:
    """Return the metrics of a cached result, or None if they are no longer stored.

    They are read by the node's metrics rule.
    """
    rule = plan.nodes[n].rule
    metrics = trace.metrics if former is not None or not rule else trace.measured.get(rule)
    return facts.numbers(key, rule_of(plan, n)) if metrics is None else metrics


def _why_skipped(plan: Plan, n: int) -> str:
    """Return the reason why the plan skips a step."""
    for each in sorted(plan.dependencies(n)):
        dependency = plan.nodes[each]
        if dependency.flags & SKIP:
            return f"{bare(dependency.id)}, a dependency, is skipped"
    if "/" in plan.nodes[n].id:
        return "its `when`, or that of a step around it, is false"
    return "its `when` is false"


def rule_of(plan: Plan, n: int) -> MetricsSpec:
    """Return the metrics rule of a node."""
    rule = plan.specs()[n].metrics
    assert rule is not None
    return rule


def _find_trace(
    plan: Plan, n: int, key: Digest, world: fingerprint.World, facts: Facts
) -> tuple[CacheEntry | None, Digest | None]:
    """Return the cache entry of a step, and its former key if that was used.

    The former key, of an earlier version, included the metrics rule.
    """
    trace = facts.traces.get(key)
    if trace is not None or not plan.nodes[n].rule:
        return trace, None
    former = fingerprint.key(
        fingerprint.former_author_digest(plan.specs()[n].author, rule_of(plan, n)), world
    )
    return facts.traces.get(former), former


def _judge_targets(
    left: StepResult,
    key: Digest | None,
    why: tuple[str, ...],
    facts: Facts,
    targets: Sequence[Target],
) -> Verdict:
    """Return the verdict for a cached step: up to date, restore missing outputs, or run.

    `why` is the reason of a FRESH verdict.
    """
    gone: list[Target] = []
    for target in targets:
        # An optional output that the step did not make has no content to compare.
        content = left.outputs.get(target.output)
        if content is not None and facts.there.get(target.path) != content:
            gone.append(target)
    if not gone:
        return Verdict(FRESH, key, why, left)
    clashes = _find_conflicts(gone, facts)
    lost: list[str] = []
    for target in gone:
        if facts.stored is not None and left.outputs[target.output] not in facts.stored:
            lost.append(f"output {target.output} is no longer stored")
    if lost:
        return Verdict(RUN, key, tuple(lost), None, clashes)
    paths = [target.path for target in gone if target.path not in clashes]
    reasons = [f"{path} {_describe_state(path, facts)}" for path in paths]
    return Verdict(RESTORE, key, tuple(reasons), left, clashes)


def _find_skipped_need(plan: Plan, n: int, made: Mapping[int, StepResult]) -> str:
    """Return a required step without a successful instance, or an empty string.

    A step that may fail counts as successful.
    """
    node = plan.nodes[n]
    some_ran: dict[str, bool] = {}
    for number in plan.dependencies(n).difference(node.choices):
        step = _needed_step(plan, node, number)
        may_fail = bool(plan.nodes[number].flags & ALLOW_FAILURE) and not node.flags & PAIRED
        has_run = made[number].ok or may_fail
        some_ran[step] = some_ran.get(step, False) or has_run
    return next((step for step, ran in some_ran.items() if not ran), "")


def _needed_step(plan: Plan, node: Node, n: int) -> str:
    """Return the name of node `n` as a dependency of `node`.

    A step in `after` has the name that the node's recipe uses.
    """
    id = plan.nodes[n].id
    if n in node.after:
        id = node.prefix + id.removeprefix(node.prefix).partition("/")[0]
    return bare(id)


def _find_skipped_choice(plan: Plan, n: int, made: Mapping[int, StepResult]) -> str:
    """Return a skipped step that a conditional template selects, or an empty string."""
    from .choices import ANY_STATE, LATE, leaves_of, needed_steps

    node, spec = plan.nodes[n], plan.specs()[n]
    lost = _find_lost_choices(plan, node, made)
    if not lost:
        return ""
    names = {**LATE, **scope_of(spec, plan, n, made), "state": ANY_STATE}
    certain, _ = needed_steps(leaves_of(spec), names)
    return next((f"{node.prefix}{id}" for id in lost if id in certain), "")


def _find_lost_choices(plan: Plan, node: Node, made: Mapping[int, StepResult]) -> list[str]:
    """Return the skipped steps among the choices of a node's conditional templates.

    The result has the names that these templates use.
    """
    lost: dict[str, bool] = {}
    for number in node.choices:
        id = bare(plan.nodes[number].id.removeprefix(node.prefix)).partition("/")[0]
        lost[id] = lost.get(id, True) and _is_lost(plan, number, made)
    return [id for id, gone in lost.items() if gone]


def world_of(
    node: Node, facts: Facts, made: Mapping[int, StepResult]
) -> tuple[fingerprint.World, list[str]]:
    """Return the content digests for the cache key, and the reasons why some are unknown."""
    # One function for all parts: it is called for each step of a no-op, and a call per part would
    # slow it down by a tenth and more.
    world: fingerprint.World = []
    missing: list[str] = []
    for dep in node.deps:
        for path in facts.matches.get(dep, (dep,)):
            content = facts.files.get(path)
            if content is None:
                missing.append(f"{path} does not exist")
            world.append(["file", path, content])
    for pattern in node.code:
        found = facts.code.get((node.home, pattern), ())
        if not found:
            missing.append(f"no code matches {code_name(pattern)}")
        world.extend(["code", name, content] for name, content in found)
    for source in node.takes:
        name, kind, address = source.name, source.kind, source.address
        identity = facts.takes.get(source.lookup_key)
        if kind == "path":
            world.append(["file", name, identity])
            if identity is None:
                missing.append(f"{address} does not exist")
        else:
            world.append(["model", name, identity, *source.only])
            if identity is None:
                missing.append(f"{address} is not resolved yet")
    for producer, output, name, below in node.upstream:
        left = made[producer]
        content = left.outputs.get(output)
        if below and content is not None:
            content = facts.trees[content].get(below)
        if not left.ok:
            continue
        if content is None:
            world.append(["absent", name, ""])
        else:
            world.append(["file", name, content])
    for producer, metric, name in node.late:
        if name:  # metrics without a name are not part of the key
            world.append(["value", name, made[producer].metrics.get(metric)])
    for tool in node.tools:
        content = facts.tools.get(tool)
        if content is None:
            missing.append(f"{tool} is not on PATH")
        world.append(["tool", tool, content])
    if facts.current_python is not None:
        world.append(["lock", "of --python current", facts.current_python])
    elif node.lock:
        content = facts.locks.get((node.home, node.lock))
        if content is None:
            missing.append(f"{node.lock} does not exist")
        world.append(["lock", node.lock, content])
    return world, missing


def evaluate_when(spec: StepSpec, made: Mapping[int, StepResult], plan: Plan, n: int) -> bool:
    """Evaluate a `when` that reads metrics.

    Raises CannotRun if the value is not a boolean or a metric is missing.
    """
    from ..language.template import TemplateError, evaluate

    try:
        value = evaluate(str(spec.when), scope_of(spec, plan, n, made))
    except TemplateError as error:
        silent: list[str] = []
        for producer, metric, _ in plan.nodes[n].late:
            if made[producer].metrics.get(metric) is None:
                silent.append(f"; {plan.nodes[producer].id} reported no {metric}")
        raise CannotRun(f"`when` of {plan.nodes[n].id}: {error}{''.join(silent)}") from error
    if not isinstance(value, bool):
        raise CannotRun(f"`when` of {plan.nodes[n].id} is {value!r}, not true or false")
    return value


def scope_of(
    spec: StepSpec, plan: Plan, n: int, made: Mapping[int, StepResult]
) -> dict[str, object]:
    """Return the values for a step's templates that are known before an attempt.

    Metrics are filled in, and outputs of failed instances are left out.
    """
    node = plan.nodes[n]
    steps = _collect_known_outputs(spec, plan, node, made)
    for id, wanted in spec.asks.items():
        of = steps.setdefault(id, {})
        of["metrics"] = _collect_metrics(wanted, node, plan, made, id)
        paired = [each for each in wanted if each.same]
        if paired:
            outputs = cast("dict[str, object]", of.get("same") or {})
            of["same"] = {**outputs, "metrics": _collect_same_metrics(paired, node, plan, made)}
    return {**spec.names._asdict(), "steps": steps}


def _collect_known_outputs(
    spec: StepSpec, plan: Plan, node: Node, made: Mapping[int, StepResult]
) -> dict[str, dict[str, object]]:
    """Return the outputs of other steps, as the templates of a node see them."""
    lost: set[str] = set()
    for each in node.upstream:
        if each.producer in made and not made[each.producer].ok:
            lost.add(each.name)
    gone: set[str] = set()
    skipped: list[str] = []
    if node.choices:
        gone = _find_skipped_names(plan, node, made)
        skipped = _find_lost_choices(plan, node, made)
    steps: dict[str, dict[str, object]] = {}
    for id, names in spec.names.steps.items():
        if id in skipped:
            steps[id] = _replace_by_null(names)
            continue
        steps[id] = {name: _remove_lost(value, lost, gone) for name, value in names.items()}
        same = names.get("same")
        if isinstance(same, Mapping):
            left = {name: _remove_lost(value, lost, gone) for name, value in same.items()}
            steps[id]["same"] = left
    return steps


def _remove_lost(value: object, lost: Collection[str], gone: Collection[object]) -> object:
    """Remove outputs of failed instances from a template value.

    An output of a skipped step becomes null.
    """
    if isinstance(value, list):
        return _remove_lost_items(value, lost, gone)
    if isinstance(value, str) and value in gone:
        return None
    return value


def _remove_lost_items(
    items: list[object], lost: Collection[str], gone: Collection[object]
) -> list[object] | None:
    left = [item for item in items if item not in lost]
    if left or not items:
        return left
    is_skipped = all(item in gone for item in items)
    return None if is_skipped else left


def _replace_by_null(names: Mapping[str, object]) -> dict[str, object]:
    """Return a nested mapping with all values replaced by None."""
    nulls: dict[str, object] = {}
    for name, value in names.items():
        nulls[name] = _replace_by_null(value) if isinstance(value, Mapping) else None
    return nulls


def _find_skipped_names(plan: Plan, node: Node, made: Mapping[int, StepResult]) -> set[str]:
    """Return the output paths of skipped steps among the choices of conditional templates."""
    skipped: set[str] = set()
    for producer, _, name, _ in node.upstream:
        if producer in node.choices and _is_lost(plan, producer, made):
            skipped.add(name)
    return skipped


def _is_lost(plan: Plan, n: int, made: Mapping[int, StepResult]) -> bool:
    """Return whether node `n` was skipped or failed, and its failure is not allowed."""
    if n not in made or made[n].ok:
        return False
    return not plan.nodes[n].flags & ALLOW_FAILURE


def _collect_metrics(
    wanted: Sequence[MetricAsked], node: Node, plan: Plan, made: Mapping[int, StepResult], step: str
) -> dict[str, object]:
    found: dict[str, object] = {}
    id = node.prefix + step
    for metric, many, same in wanted:
        if same:
            continue
        values: list[object] = []
        for producer, name, _ in node.late:
            if name != metric or not _is_instance_of(plan.nodes[producer].id, id):
                continue
            if made[producer].ok:
                values.append(made[producer].metrics.get(metric))
        found[metric] = values if many else _first_or_none(values)
    return found


def _is_instance_of(id: str, step: str) -> bool:
    """Return whether an id is that of a step, or of one of its matrix instances."""
    return id == step or id.startswith(step + "[")


def _first_or_none(values: Sequence[object]) -> object:
    return values[0] if values else None


def _collect_same_metrics(
    wanted: Sequence[MetricAsked], node: Node, plan: Plan, made: Mapping[int, StepResult]
) -> dict[str, object]:
    """Return metrics of the other step's instances with the same axis values."""
    found: dict[str, object] = {}
    for metric, many, same in wanted:
        values: list[object] = []
        for producer, name, _ in node.late:
            if name != metric or plan.nodes[producer].id not in same:
                continue
            if made[producer].ok:
                values.append(made[producer].metrics.get(metric))
        found[metric] = values if many else _first_or_none(values)
    return found


def _judge_select(
    plan: Plan, n: int, facts: Facts, made: Mapping[int, StepResult], targets: Sequence[Target]
) -> Verdict:
    node = plan.nodes[n]
    chosen = plan.specs()[n].select
    assert chosen is not None
    metric, best = chosen
    if not node.late:
        return Verdict(RUN, None, ("no instance to select from",), None)
    scores: dict[int, float] = {}
    for producer, _, _ in node.late:
        result = made[producer]
        value = result.metrics.get(metric) if result.ok else None
        # NaN is left out, since it is neither better nor worse than a number.
        if isinstance(value, (int, float)) and value == value:
            scores[producer] = float(value)
    if not scores:
        return Verdict(RUN, None, (f"no instance reported the metric {metric}",), None)
    # Of equal instances, both take the first one in the order of the matrix.
    if best == "min":
        winner, word = min(scores, key=scores.__getitem__), "lowest"
    else:
        winner, word = max(scores, key=scores.__getitem__), "highest"
    why = f"{plan.nodes[winner].id} has the {word} {metric}, {scores[winner]:g}"
    return _judge_targets(made[winner]._replace(ok=True), None, (why,), facts, targets)


def _find_conflicts(targets: Sequence[Target], facts: Facts) -> tuple[str, ...]:
    """Return the target paths with content that recipe did not write and does not store.

    Stored content is never foreign: a worker may have died before it recorded the publication.
    """
    return tuple(target.path for target in targets if facts.strange(target.path))


def _describe_state(path: str, facts: Facts) -> str:
    return "is missing" if facts.there.get(path) is None else "is an earlier version"


def _list_ids(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:3])
    return f"{shown} and {len(ids) - 3} more" if len(ids) > 3 else shown
