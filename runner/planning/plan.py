"""Plan and Node: a recipe with its inputs bound, as flat nodes in topological order.  Knows their shape and their JSON, not how they are compiled.

A Node is what judging needs; what doing needs (commands, environment, scope of its templates) is in its Detail, kept apart so that a run in which
nothing is to be done never reads it.  `host`, `node`, `run` and other late names stay unrendered until an attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..digest import Digest

if TYPE_CHECKING:
    import networkx

COMPILER: Final = 6
"""Version of the compiled form; part of the name under which a plan is kept."""

# Flags of a node.
SELECT, UNCACHED, SKIP, WHEN_LATE, ALLOW_FAILURE, STATEFUL, LOCAL = 1, 2, 4, 8, 16, 32, 64
# Flags of an output.
OPTIONAL, NONEMPTY, TEMPORARY, DIRECTORY = 1, 2, 4, 8


class Node(NamedTuple):
    """What judging one step needs.  Paths are relative: deps to the workspace, code and lock to `plan.homes[home]`, the rest to the attempt."""

    id: str
    author: Digest
    deps: list[str]
    code: list[str]
    home: int
    takes: list[list[str]]  # [name in the attempt, kind: path|hf|s3|gs|https|stream, address, *globs of the files wanted]
    upstream: list[list[Any]]  # [index of the producer, output name, name in the attempt, path below the output or ""]
    late: list[list[Any]]  # [index of the producer, metric, name in the key or "" if it is no part of it]
    after: list[int]  # order only
    outputs: list[list[Any]]  # [name, path, flags]
    prefix: str  # outputs are published below it
    lock: str
    flags: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A matrix step that cannot be expanded before another step is done."""

    step: str
    producer: str
    output: str
    pattern: str  # below the output


@dataclass(slots=True)
class Plan:
    """A recipe with its inputs bound.  `nodes` are in topological order; `details` has one entry per node."""

    recipe: str
    digest: Digest
    homes: list[str]
    nodes: list[Node]
    publish: list[list[Any]]  # [index, output of the step, path, name among the recipe's outputs or ""]
    pending: list[Pending]
    inputs: dict[str, Any]
    details: Callable[[], list[dict[str, Any]]]
    settings: dict[str, Any] = field(default_factory=dict)  # setup, cleanup, health, limits
    _index: dict[str, int] | None = None

    @property
    def index(self) -> dict[str, int]:
        """Node number by id."""
        if self._index is None:
            self._index = {node.id: n for n, node in enumerate(self.nodes)}
        return self._index

    def needs(self, n: int) -> set[int]:
        """The nodes that must be final before node `n` can be judged."""
        node = self.nodes[n]
        return {u[0] for u in node.upstream} | {m[0] for m in node.late} | set(node.after)

    @property
    def graph(self) -> networkx.DiGraph[str]:
        """The DAG: nodes are step ids (attribute `node`), an edge points from what is needed to what needs it."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph(recipe=self.recipe)
        for node in self.nodes:
            graph.add_node(node.id, node=node)
        for n, node in enumerate(self.nodes):
            for need in self.needs(n):
                graph.add_edge(self.nodes[need].id, node.id)
        return graph

    def dump(self) -> Iterator[str]:
        """Two lines of JSON, in parts: what judging needs, then the details.  Source files are the caller's to remember."""
        head = [
            self.recipe,
            self.digest,
            self.homes,
            self.nodes,
            self.publish,
            [[p.step, p.producer, p.output, p.pattern] for p in self.pending],
            self.inputs,
            self.settings,
        ]
        encode = json.JSONEncoder(separators=(",", ":")).encode
        yield encode(head) + "\n["
        for n, detail in enumerate(self.details()):
            yield ("," if n else "") + encode(detail)
        yield "]\n"

    @staticmethod
    def load(text: str) -> Plan:
        head, _, rest = text.partition("\n")
        recipe, digest, homes, nodes, publish, pending, inputs, settings = json.loads(head)
        cell: list[list[dict[str, Any]]] = []

        def details() -> list[dict[str, Any]]:
            if not cell:
                cell.append(json.loads(rest))
            return cell[0]

        make = Node._make
        return Plan(recipe, digest, homes, [make(n) for n in nodes], publish, [Pending(*p) for p in pending], inputs, details, settings=settings)
