"""Plan and Node: a recipe with bound inputs, as nodes in topological order, and their JSON form.

A Node holds the data for deciding whether a step must run.  Its commands, environment and template
names are in a StepSpec, which a run with nothing to do never reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ..digest import Digest
from .ids import inner_names, names
from .step import LateValue, OutputSpec, Publication, RunSettings, Source, StepSpec, Upstream

if TYPE_CHECKING:
    import networkx

    from ..language.values import Tree

Rows: TypeAlias = "list[list[Any]]"
COMPILER: Final = 18
"""Version of the compiler, which is part of a cached plan's name.

Raise the version if the same recipe and inputs now give another plan.  The fields of the plan's
rows are part of the name, too (`survey/plan_cache.py`), so a new field needs no new version.
"""

# Flags of a node.
SELECT, UNCACHED, SKIP, WHEN_LATE, ALLOW_FAILURE, STATEFUL, LOCAL, PAIRED = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
)


class Target(NamedTuple):
    """Required workspace path of an output."""

    output: str
    path: str


class Node(NamedTuple):
    """Plan node: data for deciding whether a step must run.

    Paths in `deps` are relative to the workspace, paths in `code` and `lock` to `plan.homes[home]`,
    and other paths to the attempt.
    """

    id: str
    author: Digest
    deps: list[str]
    code: list[str]
    home: int
    takes: list[Source]
    upstream: list[Upstream]
    late: list[LateValue]
    after: list[int]  # order only
    outputs: list[OutputSpec]
    prefix: str  # directory of its published outputs
    lock: str
    flags: int
    rule: str = ""  # digest of its metrics rule, or empty if the rule is part of the key
    tools: Sequence[str] = ()  # programs on PATH whose files are part of its key
    choices: Sequence[int] = ()
    """Steps among which conditional templates choose: skipping one alone does not skip the step."""


class Ahead(NamedTuple):
    """Known file dependencies of a step whose matrix is not known yet."""

    step: str
    home: int
    takes: list[Source]
    deps: list[str]
    code: list[str]


class PendingMatrix(NamedTuple):
    """Matrix step whose values come from files that another step creates."""

    step: str
    producer: str
    output: str
    pattern: str  # relative to the output


@dataclass(slots=True)
class Plan:
    """Compiled recipe with bound inputs.

    `nodes` are in topological order, and `specs` returns one entry per node.
    """

    recipe: str
    digest: Digest
    homes: list[str]
    nodes: list[Node]
    publish: list[Publication]
    pending: list[PendingMatrix]
    waiting: dict[
        str, list[str]
    ]  # steps without nodes until a pending matrix is expanded -> the steps that each needs
    inputs: dict[str, Tree]
    specs: Callable[[], list[StepSpec]]
    settings: RunSettings
    ahead: list[Ahead] = field(default_factory=list)  # one per waiting step
    empty: list[tuple[str, str]] = field(default_factory=list)
    """Step and pattern of each axis without a match, unless the recipe allows an empty axis."""
    globs: list[tuple[str, str, bool | None]] = field(default_factory=list)
    """Step, pattern and `allow_empty` of each glob in `deps` that no step output matches."""
    _index: dict[str, int] | None = None

    @property
    def index(self) -> dict[str, int]:
        """Node numbers by step id."""
        if self._index is None:
            self._index = {node.id: n for n, node in enumerate(self.nodes)}
        return self._index

    def spread(self, count: int) -> None:
        """Set the node count of `accelerate` steps that do not set `nodes`."""

        def spread(node: Node, spec: StepSpec) -> StepSpec:
            if spec.accelerate is None or node.flags & LOCAL:
                return spec
            return spec._replace(nodes=count) if spec.nodes is None else spec

        self._change(spread)

    def demand(self, asked: Mapping[str, Any]) -> None:
        """Override the requested resources of all steps.

        A GPU request leaves steps with `gpus: 0` unchanged.
        """
        of_gpu = any(asked.get(name) for name in ("gpus", "gpu", "gpu_memory"))
        fields = dict(asked)
        if asked.get("gpus") == 0:
            fields |= {"gpu": None, "gpu_memory": None}

        def demand(_: Node, spec: StepSpec) -> StepSpec:
            if of_gpu and spec.resources.gpus == 0:
                return spec
            return spec._replace(resources=spec.resources._replace(**fields))

        self._change(demand)

    def _change(self, change: Callable[[Node, StepSpec], StepSpec]) -> None:
        """Apply `change` to each StepSpec when the specs are read."""
        written, cell = self.specs, list[list[StepSpec]]()

        def specs() -> list[StepSpec]:
            if not cell:
                cell.append([change(*pair) for pair in zip(self.nodes, written(), strict=True)])
            return cell[0]

        self.specs = specs

    def swap(self, n: int, node: Node, spec: StepSpec) -> None:
        """Replace node `n` and its StepSpec, for different input values."""
        specs = list(self.specs())
        specs[n], self.nodes[n] = spec, node
        self.specs = lambda: specs

    def dependencies(self, n: int) -> set[int]:
        """Return the numbers of the nodes that node `n` depends on."""
        node = self.nodes[n]
        found = {each.producer for each in node.upstream}
        found.update([each.producer for each in node.late])
        found.update(node.after)
        return found

    def readers(self, n: int) -> Iterator[tuple[str, str]]:
        """Yield the id and metric name of each step that reads metrics of node `n`."""
        for node in self.nodes:
            for late in node.late:
                if late.producer == n:
                    yield node.id, late.metric

    def before(self, chosen: Iterable[int]) -> set[int]:
        """Return the given nodes with all their dependencies.

        This is one pass over the ordered nodes: a run with nothing to do calls it too, without
        networkx.
        """
        found = set(chosen)
        for n in range(max(found, default=-1), -1, -1):
            if n in found:
                found |= self.dependencies(n)
        return found

    def nodes_named(self, word: str) -> set[int]:
        """Return the numbers of the nodes that a typed step name selects.

        The name is that of a step, an instance, all instances, or all steps of a used recipe.

        If there are none, the name may be that of a step inside a used recipe.
        """
        named = {n for n, node in enumerate(self.nodes) if word in names(node.id)}
        if named:
            return named
        return {n for n, node in enumerate(self.nodes) if word in inner_names(node.id)}

    def resolve_words(self, words: Iterable[str]) -> set[str]:
        """Return the given step names, plus the ids of steps with these names in used recipes."""
        known: set[str] = set()
        for id in [*self.index, *self.waiting]:
            known |= names(id)
        resolved = set(words)
        inner = resolved - known
        if inner:
            resolved.update(id for id in self.index if not inner_names(id).isdisjoint(inner))
        return resolved

    def closure_of(self, word: str) -> tuple[set[int], set[str]]:
        """Return the nodes and unexpanded steps with a name, and all their dependencies."""
        found, words, waits = set[int](), [word], set[str]()
        while words:
            here = words.pop()
            found |= self.nodes_named(here)
            for id in self.waiting.keys() - waits:
                if here in names(id):
                    waits.add(id)
                    words += self.waiting[id]
        return self.before(found), waits

    def select_nodes(self, only: str | None, until: str | None) -> set[int]:
        """Return the nodes selected by `--only` or `--until`, or all nodes.

        `until` includes the dependencies of the step.
        """
        if only:
            return self.nodes_named(only)
        if not until:
            return set(range(len(self.nodes)))
        chosen, _ = self.closure_of(until)
        return chosen

    def after(self, chosen: Iterable[int]) -> set[int]:
        """Return the given nodes with all their downstream nodes."""
        found = set(chosen)
        for n in range(min(found, default=len(self.nodes)), len(self.nodes)):
            if not found.isdisjoint(self.dependencies(n)):
                found.add(n)
        return found

    @property
    def graph(self) -> networkx.DiGraph[str]:
        """Step graph with edges from dependencies to dependents.

        Graph nodes are step ids with the attribute `node`.
        """
        from .graph import dag

        dependencies: dict[str, list[str]] = {}
        for n, node in enumerate(self.nodes):
            dependencies[node.id] = [self.nodes[each].id for each in sorted(self.dependencies(n))]
        graph = dag(dependencies)
        graph.graph["recipe"] = self.recipe
        for node in self.nodes:
            graph.nodes[node.id]["node"] = node
        return graph

    def dump(self) -> Iterator[str]:
        """Yield the JSON form of the plan as two lines: nodes and settings, then the StepSpecs.

        The lines are yielded in parts.  Source files are not included.
        """
        head = [
            self.recipe,
            self.digest,
            self.homes,
            self.nodes,
            self.publish,
            [[p.step, p.producer, p.output, p.pattern] for p in self.pending],
            self.waiting,
            self.inputs,
            self.settings,
            self.ahead,
            self.empty,
            self.globs,
        ]
        encode = json.JSONEncoder(separators=(",", ":")).encode
        yield encode(head) + "\n["
        separator = ""
        for spec in self.specs():
            yield separator + encode(spec)
            separator = ","
        yield "]\n"

    @staticmethod
    def load(text: str) -> Plan:
        head, _, rest = text.partition("\n")
        (
            recipe,
            digest,
            homes,
            nodes,
            publish,
            pending,
            waiting,
            inputs,
            settings,
            ahead,
            empty,
            globs,
        ) = json.loads(head)
        cell: list[list[StepSpec]] = []

        def specs() -> list[StepSpec]:
            if not cell:
                cell.append([StepSpec.load(row) for row in json.loads(rest)])
            return cell[0]

        return Plan(
            recipe,
            digest,
            homes,
            [_node(*row) for row in nodes],
            list(map(Publication._make, publish)),
            list(map(PendingMatrix._make, pending)),
            waiting,
            inputs,
            specs,
            RunSettings.load(settings),
            [_ahead(*row) for row in ahead],
            list(map(tuple, empty)),
            list(map(tuple, globs)),
        )


def _node(
    id: str,
    author: Digest,
    deps: list[str],
    code: list[str],
    home: int,
    takes: Rows,
    upstream: Rows,
    late: Rows,
    after: list[int],
    outputs: Rows,
    *rest: Any,
) -> Node:
    """Build a node from its JSON array."""
    return Node(
        id,
        author,
        deps,
        code,
        home,
        list(map(Source._make, takes)),
        list(map(Upstream._make, upstream)),
        list(map(LateValue._make, late)),
        after,
        list(map(OutputSpec._make, outputs)),
        *rest,
    )


def _ahead(step: str, home: int, takes: Rows, deps: list[str], code: list[str]) -> Ahead:
    """Build the known dependencies of a waiting step from their JSON array."""
    return Ahead(step, home, list(map(Source._make, takes)), deps, code)
