"""Plan and Node: a recipe with its inputs bound, as flat nodes in topological order.  Knows their shape and their JSON, not how they are compiled.

A Node is what judging needs; what doing needs (commands, environment, names of its templates) is in its StepSpec, kept apart so that a run with
nothing to do never reads it.
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
COMPILER: Final = 17
"""Version of the compiled form; part of the name under which a plan is kept."""

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
    """Where an output must lie in the workspace."""

    output: str
    path: str


class Node(NamedTuple):
    """What judging one step needs.  Paths are relative: deps to the workspace, code and lock to `plan.homes[home]`, the rest to the attempt."""

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
    prefix: str  # outputs are published below it
    lock: str
    flags: int
    rule: str = ""  # the digest of its metrics rule, where that is no part of its key
    tools: Sequence[str] = ()  # programs on PATH whose files are part of its key
    choices: Sequence[int] = ()
    """Producers whose skip alone does not skip it: its templates choose among them."""


class Ahead(NamedTuple):
    """What is known of a step that waits for an expansion: what it reads of this disk."""

    step: str
    home: int
    takes: list[Source]
    deps: list[str]
    code: list[str]


@dataclass(frozen=True, slots=True)
class Pending:
    """A matrix step that cannot be expanded before another step is done."""

    step: str
    producer: str
    output: str
    pattern: str  # below the output


@dataclass(slots=True)
class Plan:
    """A recipe with its inputs bound.  `nodes` are in topological order; `specs` has one entry per node."""

    recipe: str
    digest: Digest
    homes: list[str]
    nodes: list[Node]
    publish: list[Publication]
    pending: list[Pending]
    waiting: dict[
        str, list[str]
    ]  # the steps that are no nodes before these matrices are expanded, theirs among them, and the steps that each needs
    inputs: dict[str, Tree]
    specs: Callable[[], list[StepSpec]]
    settings: RunSettings
    ahead: list[Ahead] = field(default_factory=list)  # one for each step that waits
    empty: list[tuple[str, str]] = field(default_factory=list)
    """Step and pattern of each axis that nothing matches, unless that is allowed."""
    globs: list[tuple[str, str, bool | None]] = field(default_factory=list)
    """Step, pattern and `allow_empty` of each glob of `deps` that no step makes a match of."""
    _index: dict[str, int] | None = None

    @property
    def index(self) -> dict[str, int]:
        """Node number by id."""
        if self._index is None:
            self._index = {node.id: n for n, node in enumerate(self.nodes)}
        return self._index

    def spread(self, count: int) -> None:
        """Have `accelerate` steps that do not say it run on so many nodes."""

        def spread(node: Node, spec: StepSpec) -> StepSpec:
            asks = spec.accelerate is not None and spec.nodes is None and not node.flags & LOCAL
            return spec._replace(nodes=count) if asks else spec

        self._change(spread)

    def demand(self, asked: Mapping[str, Any]) -> None:
        """Have steps ask for these resources instead of what their recipe says; for a GPU only those that have one."""
        of_gpu = bool(asked.get("gpus") or asked.get("gpu") or asked.get("gpu_memory"))
        without = {"gpu": None, "gpu_memory": None} if asked.get("gpus") == 0 else {}

        def demand(_: Node, spec: StepSpec) -> StepSpec:
            if of_gpu and spec.resources.gpus == 0:
                return spec
            return spec._replace(resources=spec.resources._replace(**{**asked, **without}))

        self._change(demand)

    def _change(self, change: Callable[[Node, StepSpec], StepSpec]) -> None:
        """Change what doing each step needs, when it is read."""
        written, cell = self.specs, list[list[StepSpec]]()

        def specs() -> list[StepSpec]:
            if not cell:
                cell.append([change(*pair) for pair in zip(self.nodes, written(), strict=True)])
            return cell[0]

        self.specs = specs

    def swap(self, n: int, node: Node, spec: StepSpec) -> None:
        """Have node `n` do the same under other values of its inputs."""
        specs = list(self.specs())
        specs[n], self.nodes[n] = spec, node
        self.specs = lambda: specs

    def needs(self, n: int) -> set[int]:
        """The nodes that must be final before node `n` can be judged."""
        node = self.nodes[n]
        return (
            {each.producer for each in node.upstream}
            | {each.producer for each in node.late}
            | set(node.after)
        )

    def readers(self, n: int) -> Iterator[tuple[str, str]]:
        """The steps that read metrics of node `n`, by id, each with the name of one."""
        return (
            (node.id, late.metric)
            for node in self.nodes
            for late in node.late
            if late.producer == n
        )

    def before(self, chosen: Iterable[int]) -> set[int]:
        """These nodes and all that they need, directly or not.

        One pass along `nodes`, which are in order: a run with nothing to do asks this, too, and imports no networkx.
        """
        found = set(chosen)
        for n in range(max(found, default=-1), -1, -1):
            if n in found:
                found |= self.needs(n)
        return found

    def nodes_named(self, word: str) -> set[int]:
        """The nodes that a word means: a step, all instances of one, or all steps of a recipe that is used; else those it means inside of that."""
        named = {n for n, node in enumerate(self.nodes) if word in names(node.id)}
        return named or {n for n, node in enumerate(self.nodes) if word in inner_names(node.id)}

    def resolve_words(self, words: Iterable[str]) -> set[str]:
        """These words, and the ids of the steps that each means only inside of a recipe that is used."""
        known = {name for id in [*self.index, *self.waiting] for name in names(id)}
        inner = [word for word in words if word not in known]
        found = (
            {id for id in self.index if not inner_names(id).isdisjoint(inner)} if inner else set()
        )
        return {*words, *found}

    def closure_of(self, word: str) -> tuple[set[int], set[str]]:
        """What a word means, and all that it needs, directly or not: nodes, and steps that are waiting."""
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
        """The nodes of a request: all, one step's, or those that lead to one."""
        if only:
            return self.nodes_named(only)
        return self.closure_of(until)[0] if until else set(range(len(self.nodes)))

    def after(self, chosen: Iterable[int]) -> set[int]:
        """These nodes and all that need them, directly or not."""
        found = set(chosen)
        for n in range(min(found, default=len(self.nodes)), len(self.nodes)):
            if not found.isdisjoint(self.needs(n)):
                found.add(n)
        return found

    @property
    def graph(self) -> networkx.DiGraph[str]:
        """The DAG: nodes are step ids (attribute `node`), an edge points from what is needed to what needs it."""
        from .graph import dag

        graph = dag(
            {
                node.id: [self.nodes[need].id for need in sorted(self.needs(n))]
                for n, node in enumerate(self.nodes)
            }
        )
        graph.graph["recipe"] = self.recipe
        for node in self.nodes:
            graph.nodes[node.id]["node"] = node
        return graph

    def dump(self) -> Iterator[str]:
        """Two lines of JSON, in parts: what judging needs, then the StepSpecs.  Source files are the caller's to remember."""
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
        for n, spec in enumerate(self.specs()):
            yield ("," if n else "") + encode(spec)
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

        published = [Publication._make(row) for row in publish]
        axes = [Pending(*row) for row in pending]
        return Plan(
            recipe,
            digest,
            homes,
            [_node(*row) for row in nodes],
            published,
            axes,
            waiting,
            inputs,
            specs,
            RunSettings.load(settings),
            [
                Ahead(step, home, [Source._make(row) for row in takes], deps, code)
                for step, home, takes, deps, code in ahead
            ],
            [(step, pattern) for step, pattern in empty],
            [(step, pattern, allowed) for step, pattern, allowed in globs],
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
    """A node from its JSON array."""
    return Node(
        id,
        author,
        deps,
        code,
        home,
        [Source._make(row) for row in takes],
        [Upstream._make(row) for row in upstream],
        [LateValue._make(row) for row in late],
        after,
        [OutputSpec._make(row) for row in outputs],
        *rest,
    )
