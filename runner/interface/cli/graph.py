"""`recipe graph`: print the step graph as a tree, Mermaid, DOT or JSON, with plan verdicts.

Read-only.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...execution.session import preview
from ...planning.ids import names, readable
from ..tail import safe_ids, safe_line
from .targets import (
    add_request_words,
    describe_request,
    open_for_reading,
    pending_as_json,
    resolve_requests,
)

if TYPE_CHECKING:
    from ...survey.survey import Survey, WaitingStep

COLLAPSED: Final = 10
"""Maximum number of matrix instances that are drawn as separate nodes."""

DEEPEST: Final = 100
"""Maximum depth of the printed tree; a chain of thousands of steps would be mostly indentation."""

_COLOURS: Final = {
    "fresh": "#d5f0d5",
    "run": "#ffe0b3",
    "maybe": "#fff5cc",
    "restore": "#d6e6ff",
    "skip": "#eeeeee",
    "mixed": "#fff5cc",
}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_request_words(parser)
    parser.add_argument(
        "--format",
        choices=["tree", "mermaid", "dot", "json"],
        default="tree",
        help="Output format (default: tree)",
    )
    parser.epilog = "Examples:\n  recipe graph\n  recipe graph ./pipeline.yaml --format dot | dot -Tsvg > pipeline.svg"


def run(args: argparse.Namespace) -> int:
    with open_for_reading(args.workspace) as ws:
        surveys = [preview(ws, request) for request in resolve_requests(ws, args)]
    if args.format == "json":
        print(json.dumps([as_json(found) for found in surveys], indent=2))
        return 0
    for found in surveys:
        drawing = draw(found)
        if args.format == "tree":
            lines = [describe_request(found), *tree(drawing)]
        elif args.format == "mermaid":
            lines = mermaid(drawing)
        else:
            lines = dot(drawing, found.plan.recipe)
        print("\n".join(lines))
    return 0


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A graph node: a step, or a collapsed group of matrix instances."""

    label: str
    answer: str
    needs: tuple[str, ...]


def draw(found: Survey) -> dict[str, GraphNode]:
    """Return the plan's boxes by id, in plan order, followed by the steps that are not expanded
    yet.

    A matrix of more than COLLAPSED instances becomes one box.
    """
    steps = found.plan.graph
    answer = dict(zip(steps, (verdict.answer for verdict in found.verdicts), strict=True))
    box_of = _boxes_of_steps(steps)
    members: dict[str, list[str]] = {}
    for id in steps:
        members.setdefault(box_of[id], []).append(id)
    boxes = {}
    for box, ids in members.items():
        needs: dict[str, None] = {}
        for id in ids:
            needs.update(dict.fromkeys(box_of[need] for need in steps.pred[id]))
        needs.pop(box, None)  # no arrow from a box to itself
        answers = Counter(answer[id] for id in ids)
        boxes[box] = _node_of(answers, tuple(needs))
    for step in found.later:
        boxes[step.shown] = GraphNode(step.why, "maybe", _needs_of_later(found, step, box_of))
    return boxes


def _boxes_of_steps(steps: Iterable[str]) -> dict[str, str]:
    """Return the box of each step: the step itself, or its matrix if that is large."""
    families = {id: _family(id) for id in steps}
    instances = Counter(families.values())
    boxes = {}
    for id, family in families.items():
        boxes[id] = id if instances[family] <= COLLAPSED else f"{family}[…]"
    return boxes


def _node_of(answers: Counter[str], needs: tuple[str, ...]) -> GraphNode:
    """Return the box of steps with these verdicts."""
    answer = next(iter(answers)) if len(answers) == 1 else "mixed"
    if answers.total() == 1:
        return GraphNode(answer, answer, needs)
    counts = ", ".join(f"{count} {each}" for each, count in answers.items())
    return GraphNode(f"{answers.total()} instances: {counts}", answer, needs)


def _needs_of_later(found: Survey, step: WaitingStep, box_of: Mapping[str, str]) -> tuple[str, ...]:
    """Return the boxes on which a step depends that is not expanded yet."""
    known: list[str] = []
    others: list[str] = []
    for need in step.needs:
        known += [box_of[found.plan.nodes[n].id] for n in sorted(found.plan.nodes_named(need))]
        others += [other.shown for other in found.later if need in names(other.id)]
    return tuple(dict.fromkeys([*known, *others]))


def tree(boxes: Mapping[str, GraphNode]) -> list[str]:
    """Return the lines of a dependency tree, from the steps on which no step depends.

    `…` marks a step whose dependencies are left out: it is printed above, or too deep.
    """
    needed = {need for _, need in _edges(boxes)}
    tops = [id for id in boxes if id not in needed]
    lines: list[str] = []
    drawn: set[str] = set()
    # A stack instead of recursion: id, prefix of its line, prefix of its dependencies' lines,
    # depth.
    waiting = [(id, "", "", 0) for id in reversed(tops)]
    while waiting:
        id, head, below, depth = waiting.pop()
        box = boxes[id]
        is_cut = bool(box.needs) and (id in drawn or depth >= DEEPEST)
        more = "  …" if is_cut else ""
        lines.append(f"{head}{safe_ids(id)}  {safe_ids(box.label)}{more}")
        if is_cut:
            continue
        drawn.add(id)
        branch, stem = "└─ ", "   "
        # The last dependency comes first, as the stack turns the order around.
        for need in reversed(box.needs):
            waiting.append((need, below + branch, below + stem, depth + 1))
            branch, stem = "├─ ", "│  "
    return lines


def mermaid(boxes: Mapping[str, GraphNode]) -> list[str]:
    """Return the lines of a Mermaid flowchart, with arrows from dependencies to dependents."""
    number = {id: f"s{n}" for n, id in enumerate(boxes)}
    lines = ["flowchart LR"]
    for id, box in boxes.items():
        label = f"{_entities(readable(id))}<br/>{_entities(box.label)}"
        lines.append(f'  {number[id]}["{label}"]:::{box.answer}')
    lines += [f"  {number[need]} --> {number[id]}" for id, need in _edges(boxes)]
    answers = {box.answer for box in boxes.values()}
    for answer, colour in _COLOURS.items():
        if answer in answers:
            lines.append(f"  classDef {answer} fill:{colour},color:#222")
    return lines


def dot(boxes: Mapping[str, GraphNode], name: str) -> list[str]:
    """Return the lines of a Graphviz graph, with arrows from dependencies to dependents."""
    lines = [
        f"digraph {_quote(name)} {{",
        "  rankdir=LR; node [shape=box, style=filled, fontname=sans];",
    ]
    for id, box in boxes.items():
        label, colour = _quote(readable(id), box.label), _quote(_COLOURS[box.answer])
        lines.append(f"  {_quote(id)} [label={label}, fillcolor={colour}];")
    lines += [f"  {_quote(need)} -> {_quote(id)};" for id, need in _edges(boxes)]
    return [*lines, "}"]


def as_json(found: Survey) -> Mapping[str, object]:
    """Return all nodes and edges for JSON output, without collapsing matrices."""
    plan = found.plan
    nodes = []
    for node, verdict in zip(plan.nodes, found.verdicts, strict=True):
        outputs = {output.name: output.path for output in node.outputs}
        facts = {"id": node.id, "answer": verdict.answer, "key": verdict.key, "outputs": outputs}
        nodes.append(facts)
    edges = []
    for id, needs in plan.graph.pred.items():
        edges += [[need, id] for need in needs]
    pending = pending_as_json(found)
    return {"recipe": plan.recipe, "nodes": nodes, "edges": edges, "pending": pending}


def _edges(boxes: Mapping[str, GraphNode]) -> Iterator[tuple[str, str]]:
    """Yield each box with each of the boxes on which it depends."""
    for id, box in boxes.items():
        for need in box.needs:
            yield id, need


def _family(id: str) -> str:
    """Return a node id without its matrix values: `sft[lr=1]/train[seed=2]` belongs to
    `sft[]/train`.
    """
    if "[" not in id:
        return id
    *parents, last = id.split("/")
    heads = []
    for part in parents:
        head, bracket, _ = part.partition("[")
        if bracket:
            head += "[]"
        heads.append(head)
    return "/".join([*heads, last.partition("[")[0]])


def _entities(text: str) -> str:
    return "".join(map(_entity, safe_line(text)))


def _entity(char: str) -> str:
    """Return a character of a Mermaid label, as an entity if it may have a meaning there."""
    return char if char.isalnum() or char in " ._/-=,:…" else f"#{ord(char)};"


def _quote(*lines: str) -> str:
    """Return the lines as one string in DOT."""
    escaped = [safe_line(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(escaped) + '"'
