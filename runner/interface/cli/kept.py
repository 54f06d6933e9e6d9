"""`recipe checkpoints` and `recipe path`: locate checkpoints and outputs, and resume from a checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CannotRun, NotFound, did_you_mean
from ...execution.session import preview
from ...language.units import about
from ...paths import beside, is_path
from ...planning.ids import bare, inner_names, names, readable, stored_form
from ...planning.judge import FRESH
from ...storage.content.files import Content
from ...survey import kept_state
from ..tables import align
from ..tail import safe_ids, safe_line, span
from .chosen import add_words, find_nodes, one_request, open_existing, open_to_look
from .flags import JSON_HELP

if TYPE_CHECKING:
    from ...storage.workspace import Workspace
    from ...survey.kept_state import StepState
    from ...survey.request import Request
    from ...survey.survey import Survey


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "path":
        parser.add_argument(
            "output",
            type=stored_form,
            metavar="STEP.OUTPUT",
            help="Output of a step, or a step for all its outputs",
        )
        add_words(parser)
        parser.add_argument("--json", action="store_true", help=JSON_HELP)
        parser.epilog = "Examples:\n  recipe path train.model\n  cp \"$(recipe path 'train[lr=0.1].model')\" best.pt"
        return
    parser.add_argument(
        "step",
        nargs="?",
        type=stored_form,
        metavar="STEP",
        help="Step with checkpoints (default: all)",
    )
    add_words(parser)
    parser.add_argument(
        "--number",
        type=int,
        metavar="N",
        help="Select checkpoint N (default: the newest complete checkpoint)",
    )
    parser.add_argument("--path", action="store_true", help="Print only the path of the checkpoint")
    parser.add_argument(
        "--export", metavar="DIR", help="Copy the checkpoint to DIR, without overwriting"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Resume the next run from checkpoint --number; newer checkpoints are set aside",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "Examples:\n  recipe checkpoints\n  recipe checkpoints train --path\n  recipe checkpoints train --export ./checkpoint\n"
        "  recipe checkpoints train --number 500 --resume"
    )


def run(args: argparse.Namespace) -> int:
    if args.verb == "path":
        return _path(args)
    if args.step is not None and (
        "=" in args.step.partition("[")[0] or is_path(args.step)
    ):  # a recipe or an input, not a step
        args.words.insert(0, args.step)
        args.step = None
    with (open_existing if args.resume else open_to_look)(args.workspace) as ws:
        request = one_request(ws, args)
        found = preview(ws, request)
        chosen = (
            find_nodes(found, args.step) if args.step is not None else range(len(found.plan.nodes))
        )
        states = kept_state.find_states(ws, found, chosen)
        if not states:
            what = (
                f"{readable(args.step)} keeps"
                if args.step is not None
                else f"the steps of {found.plan.recipe} keep"
            )
            raise NotFound(
                f"{what} no checkpoints",
                fix='declare checkpoints in the step: `state: {checkpoints: {checkpoint: "step-*"}}`',
            )
        if args.resume:
            return _resume(ws, states, args, request)
    if args.export is not None:
        print(
            safe_line(
                beside(
                    str(
                        kept_state.export(
                            _only(states).find_numbered(args.number), Path(args.export)
                        )
                    )
                )
            )
        )
    elif args.path or args.number is not None:
        print("\n".join(safe_line(str(state.find_numbered(args.number).path)) for state in states))
    elif args.json:
        print(json.dumps([_as_json(state) for state in states], indent=2))
    else:
        print("\n".join(line for state in states for line in _as_text(state)))
        if any(state.newest() for state in states):
            again = [
                f" -R {shlex.quote(readable(each.step))}"
                for each in states
                if found.verdicts[found.plan.index[each.step]].answer == FRESH
            ]
            print(
                f"to resume from the newest complete checkpoint: {_command_of(request)}{''.join(dict.fromkeys(again))}"
            )
            print("to resume from an earlier one: recipe checkpoints STEP --number N --resume")
    return 0


def _only(states: list[StepState]) -> StepState:
    if len(states) > 1:
        raise NotFound(
            f"{len(states)} checkpoint directories match",
            fix=f"name one step: {', '.join(readable(each.step) for each in states[:5])}",
        )
    return states[0]


def _resume(
    ws: Workspace, states: list[StepState], args: argparse.Namespace, request: Request
) -> int:
    if args.number is None:
        raise NotFound(
            "--resume requires --number",
            fix="add `--number N`, from the list of `recipe checkpoints`",
        )
    state = _only(states)
    chosen = kept_state.go_back(ws, state, args.number)
    print(
        f"{safe_ids(state.step)} resumes from {safe_line(chosen.path.name)}: {_command_of(request)} -R {shlex.quote(readable(state.step))}"
    )
    return 0


def _command_of(request: Request) -> str:
    """Return the `recipe run` command line of a request."""
    given = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in request.inputs.items()
    ]
    words = [request.recipe, *(["--preset", request.preset] if request.preset else []), *given]
    return f"recipe run {shlex.join(words)}"


def _as_text(state: StepState) -> list[str]:
    text = [f"{safe_ids(state.step)}  {safe_line(beside(str(state.folder)))}"]
    text += [f"  {safe_line(state.note)}"] if state.note else []
    if not state.checkpoints:
        return [
            *text,
            "  no checkpoint yet"
            if state.pattern
            else "  `checkpoint:` is not set, so checkpoints cannot be listed",
        ]
    newest, best = state.newest(), state.best()
    table = []
    for each in state.checkpoints:
        word = each.why or (
            "set aside" if each.aside else "the next run resumes here" if each is newest else ""
        )
        word += (", the best" if word else "the best") if each is best else ""
        table.append(
            [
                "",
                safe_line(each.path.name),
                about(each.size),
                f"{span(max(0.0, time.time() - each.made))} ago",
                safe_line(word),
            ]
        )
    return [*text, *align(table, (2, 3))]


def _as_json(state: StepState) -> dict[str, object]:
    newest, best = state.newest(), state.best()
    return {
        "step": state.step, "state": state.state, "folder": str(state.folder), "note": state.note,
        "checkpoints": [
            {"path": str(each.path), "number": each.number, "step": each.step, "bytes": each.size, "made": each.made, "whole": not each.why,
             "why": each.why, "aside": each.aside, "newest": each is newest, "best": each is best}
            for each in state.checkpoints
        ],
    }  # fmt: skip


# -- path --------------------------------------------------------------------------------------------------------------------------------------------


def _path(args: argparse.Namespace) -> int:
    with open_to_look(args.workspace) as ws:
        found = preview(ws, one_request(ws, args))
        chosen = _outputs(found, args.output)
        some = [each for each in chosen if found.verdicts[each[0]].answer != "skip"]
        paths = [
            (found.plan.nodes[n].id, output, place(ws, found, n, output))
            for n, output in some or chosen
        ]
    if args.json:
        print(
            json.dumps(
                [{"step": step, "output": output, "path": path} for step, output, path in paths],
                indent=2,
            )
        )
    else:
        print("\n".join(safe_line(path) for _, _, path in paths))
    return 0


def _outputs(found: Survey, word: str) -> list[tuple[int, str]]:
    """Return node number and name of the outputs for STEP.OUTPUT or STEP.  Raises NotFound."""
    every = [
        (n, node.id, output.name)
        for n, node in enumerate(found.plan.nodes)
        for output in node.outputs
    ]
    for means in (names, inner_names):
        exact = [
            (n, name) for n, id, name in every if word in {f"{each}.{name}" for each in means(id)}
        ]
        if chosen := exact or [(n, name) for n, id, name in every if word in means(id)]:
            return chosen
    known = dict.fromkeys(f"{bare(id)}.{name}" for _, id, name in every)
    if found.plan.nodes_named(word):
        fix = "declare `outputs` in the step; for checkpoints, run `recipe checkpoints`"
        raise NotFound(
            f'the step "{readable(word)}" of {found.plan.recipe} declares no outputs', fix=fix
        )
    there = (
        f"available outputs: {', '.join(list(known)[:10])}"
        if known
        else "no step of the recipe declares `outputs`"
    )
    raise NotFound(
        f'{found.plan.recipe} has no output "{readable(word)}"',
        fix=did_you_mean(word, known) or there,
    )


def place(ws: Workspace, found: Survey, n: int, output: str) -> str:
    """Return an output's path: the published path if it is up to date, otherwise the stored copy.

    Raises CannotRun if the output is neither published nor stored.
    """
    node, made = found.plan.nodes[n], found.made.get(n)
    content = made.outputs.get(output) if made is not None else None
    if content is None:
        raise CannotRun(
            f"{node.id} has not produced {output} with these inputs",
            fix=f"run `recipe run --until {readable(node.id)}`",
        )
    for each in found.targets.get(n, ()):
        if each.output == output and found.facts.there.get(each.path) == content:
            return beside(os.path.join(ws.root, each.path))
    if ws.objects.has(Content(content)):
        return str(ws.objects.path(Content(content)))
    raise CannotRun(
        f"{output} of {node.id} is no longer stored in this workspace",
        fix=f"run `recipe run --until {readable(node.id)}`",
    )
