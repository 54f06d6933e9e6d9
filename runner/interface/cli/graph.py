"""`recipe graph`: print the step graph as a tree, Mermaid, DOT or JSON, with plan verdicts.

Read-only.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...execution.session import preview
from ...planning.ids import names, readable
from ..tail import safe_ids, safe_line
from .targets import add_request_words, describe_request, open_for_reading, resolve_requests

if TYPE_CHECKING:
    from ...survey.survey import Survey

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
            print("\n".join([describe_request(found), *tree(drawing)]))
        else:
            print(
                "\n".join(
                    mermaid(drawing)
                    if args.format == "mermaid"
                    else dot(drawing, found.plan.recipe)
                )
            )
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
    instances = Counter(map(_family, steps))
    name = {id: id if instances[_family(id)] <= COLLAPSED else f"{_family(id)}[…]" for id in steps}
    members: dict[str, list[str]] = {}
    for id in steps:
        members.setdefault(name[id], []).append(id)
    boxes = {}
    for id, ids in members.items():
        answers = Counter(answer[each] for each in ids)
        needs = dict.fromkeys(
            name[need] for each in ids for need in steps.pred[each] if name[need] != id
        )
        words = (
            next(iter(answers))
            if len(ids) == 1
            else f"{len(ids)} instances: {', '.join(f'{c} {a}' for a, c in answers.items())}"
        )
        boxes[id] = GraphNode(
            words, next(iter(answers)) if len(answers) == 1 else "mixed", tuple(needs)
        )
    for step in found.later:
        known = [
            name[found.plan.nodes[n].id]
            for need in step.needs
            for n in sorted(found.plan.nodes_named(need))
        ]
        others = [
            other.shown for need in step.needs for other in found.later if need in names(other.id)
        ]
        boxes[step.shown] = GraphNode(step.why, "maybe", tuple(dict.fromkeys([*known, *others])))
    return boxes


def tree(boxes: Mapping[str, GraphNode]) -> list[str]:
    """Return the lines of a dependency tree, from the steps on which no step depends.

    `…` marks a step whose dependencies are left out: it is printed above, or too deep.
    """
    needed = {need for box in boxes.values() for need in box.needs}
    tops = [id for id in boxes if id not in needed]
    lines: list[str] = []
    drawn: set[str] = set()
    # A stack instead of recursion: id, prefix of its line, prefix of its dependencies' lines,
    # depth.
    waiting = [(id, "", "", 0) for id in reversed(tops)]
    while waiting:
        id, head, below, depth = waiting.pop()
        box = boxes[id]
        again = id in drawn and bool(box.needs)
        deep = depth >= DEEPEST and bool(box.needs)
        lines.append(
            f"{head}{safe_ids(id)}  {safe_ids(box.label)}" + ("  …" if again or deep else "")
        )
        if id in drawn or deep:
            continue
        drawn.add(id)
        last = len(box.needs) - 1
        for n, need in reversed(list(enumerate(box.needs))):
            waiting.append(
                (
                    need,
                    below + ("└─ " if n == last else "├─ "),
                    below + ("   " if n == last else "│  "),
                    depth + 1,
                )
            )
    return lines


def mermaid(boxes: Mapping[str, GraphNode]) -> list[str]:
    """Return the lines of a Mermaid flowchart, with arrows from dependencies to dependents."""
    number = {id: f"s{n}" for n, id in enumerate(boxes)}
    lines = ["flowchart LR"]
    lines += [
        f'  {number[id]}["{_entities(readable(id))}<br/>{_entities(box.label)}"]:::{box.answer}'
        for id, box in boxes.items()
    ]
    lines += [f"  {number[need]} --> {number[id]}" for id, need in _edges(boxes)]
    lines += [
        f"  classDef {answer} fill:{colour},color:#222"
        for answer, colour in _COLOURS.items()
        if any(b.answer == answer for b in boxes.values())
    ]
    return lines


def dot(boxes: Mapping[str, GraphNode], name: str) -> list[str]:
    """Return the lines of a Graphviz graph, with arrows from dependencies to dependents."""
    lines = [
        f"digraph {_quote(name)} {{",
        "  rankdir=LR; node [shape=box, style=filled, fontname=sans];",
    ]
    lines += [
        f"  {_quote(id)} [label={_quote(readable(id), box.label)}, fillcolor={_quote(_COLOURS[box.answer])}];"
        for id, box in boxes.items()
    ]
    lines += [f"  {_quote(need)} -> {_quote(id)};" for id, need in _edges(boxes)]
    return [*lines, "}"]


def as_json(found: Survey) -> Mapping[str, object]:
    """Return all nodes and edges for JSON output, without collapsing matrices."""
    plan = found.plan
    nodes = [
        {
            "id": node.id,
            "answer": found.verdicts[n].answer,
            "key": found.verdicts[n].key,
            "outputs": {output.name: output.path for output in node.outputs},
        }
        for n, node in enumerate(plan.nodes)
    ]
    edges = [[need, id] for id, needs in plan.graph.pred.items() for need in needs]
    pending = [
        {"step": p.step, "producer": p.producer, "output": p.output, "pattern": p.pattern}
        for p in plan.pending
    ]
    return {"recipe": plan.recipe, "nodes": nodes, "edges": edges, "pending": pending}


def _edges(boxes: Mapping[str, GraphNode]) -> Iterable[tuple[str, str]]:
    return ((id, need) for id, box in boxes.items() for need in box.needs)


def _family(id: str) -> str:
    """Return a node id without its matrix values: `sft[lr=1]/train[seed=2]` belongs to
    `sft[]/train`.
    """
    parts: Sequence[str] = id.split("/") if "[" in id else (id,)
    heads = [
        part.partition("[")[0] + ("[]" if "[" in part and n < len(parts) - 1 else "")
        for n, part in enumerate(parts)
    ]
    return "/".join(heads)


def _entities(text: str) -> str:
    return "".join(
        char if char.isalnum() or char in " ._/-=,:…" else f"#{ord(char)};"
        for char in safe_line(text)
    )


def _quote(*lines: str) -> str:
    return (
        '"'
        + "\\n".join(safe_line(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
        + '"'
    )
