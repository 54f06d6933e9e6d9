"""`recipe path`: print the paths of a step's outputs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CannotRun, NotFound, did_you_mean
from ...execution.session import preview
from ...paths import beside
from ...planning.ids import bare, inner_names, names, readable, stored_form
from ...storage.content.files import Content
from ..tail import safe_line
from .flags import JSON_HELP
from .targets import add_request_words, open_for_reading, resolve_request

if TYPE_CHECKING:
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "output",
        type=stored_form,
        metavar="STEP.OUTPUT",
        help="Output of a step, or a step for all its outputs",
    )
    add_request_words(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = "Examples:\n  recipe path train.model\n  cp \"$(recipe path 'train[lr=0.1].model')\" best.pt"


def run(args: argparse.Namespace) -> int:
    with open_for_reading(args.workspace) as ws:
        found = preview(ws, resolve_request(ws, args))
        outputs = _find_outputs(found, args.output)
        executed = [each for each in outputs if found.verdicts[each.node].answer != "skip"]
        rows = [(each, _find_path(ws, found, each)) for each in executed or outputs]
    if args.json:
        facts = [{"step": each.step, "output": each.name, "path": path} for each, path in rows]
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(safe_line(path) for _, path in rows))
    return 0


class _NodeOutput(NamedTuple):
    """An output of a plan node: the number and id of the node, and the name of the output."""

    node: int
    step: str
    name: str


def _find_outputs(found: Survey, word: str) -> list[_NodeOutput]:
    """Return the outputs for STEP.OUTPUT or STEP.  Raises NotFound."""
    every: list[_NodeOutput] = []
    for n, node in enumerate(found.plan.nodes):
        every += [_NodeOutput(n, node.id, output.name) for output in node.outputs]
    # Steps of nested recipes are found by their inner names if no step has the whole name.
    for step_names in (names, inner_names):
        matches = [each for each in every if word in _spellings(each, step_names)]
        if not matches:
            matches = [each for each in every if word in step_names(each.step)]
        if matches:
            return matches
    raise _no_output(found, word, every)


def _spellings(each: _NodeOutput, step_names: Callable[[str], Collection[str]]) -> set[str]:
    """Return the spellings of an output: `STEP.OUTPUT` for each name of its step."""
    return {f"{step}.{each.name}" for step in step_names(each.step)}


def _no_output(found: Survey, word: str, every: Sequence[_NodeOutput]) -> NotFound:
    """Return the error for a word that names no output."""
    recipe = found.plan.recipe
    if found.plan.nodes_named(word):
        fix = "declare `outputs` in the step; for checkpoints, run `recipe checkpoints`"
        return NotFound(f'the step "{readable(word)}" of {recipe} declares no outputs', fix=fix)
    known = list(dict.fromkeys(f"{bare(each.step)}.{each.name}" for each in every))
    if not known:
        fix = "no step of the recipe declares `outputs`"
    else:
        fix = did_you_mean(word, known) or f"available outputs: {', '.join(known[:10])}"
    return NotFound(f'{recipe} has no output "{readable(word)}"', fix=fix)


def _find_path(ws: Workspace, found: Survey, output: _NodeOutput) -> str:
    """Return an output's path: the published path if it is up to date, otherwise the stored copy.

    Raises CannotRun if the output is neither published nor stored.
    """
    fix = f"run `recipe run --until {readable(output.step)}`"
    result = found.made.get(output.node)
    content = result.outputs.get(output.name) if result is not None else None
    if content is None:
        message = f"{output.step} has not produced {output.name} with these inputs"
        raise CannotRun(message, fix=fix)
    for target in found.targets.get(output.node, ()):
        is_current = found.facts.there.get(target.path) == content
        if target.output == output.name and is_current:
            return beside(os.path.join(ws.root, target.path))
    if ws.objects.has(Content(content)):
        return str(ws.objects.path(Content(content)))
    message = f"{output.name} of {output.step} is no longer stored in this workspace"
    raise CannotRun(message, fix=fix)
