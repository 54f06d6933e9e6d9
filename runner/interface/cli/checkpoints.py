"""`recipe checkpoints`: list and export checkpoints, and select the checkpoint to resume from."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import NotFound
from ...execution.session import preview
from ...language.units import about
from ...paths import beside, is_path
from ...planning.ids import readable, stored_form
from ...planning.judge import FRESH
from ...survey import kept_state
from ..tables import align
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP
from .targets import (
    add_request_words,
    find_nodes,
    open_for_changes,
    open_for_reading,
    resolve_request,
)

if TYPE_CHECKING:
    from ...storage.workspace import Workspace
    from ...survey.kept_state import Checkpoint, StepState
    from ...survey.request import Request
    from ...survey.survey import Survey


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "step",
        nargs="?",
        type=stored_form,
        metavar="STEP",
        help="Step with checkpoints (default: all)",
    )
    add_request_words(parser)
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
    if args.step is not None and _is_request_word(args.step):
        args.words.insert(0, args.step)
        args.step = None
    open_workspace = open_for_changes if args.resume else open_for_reading
    with open_workspace(args.workspace) as ws:
        request = resolve_request(ws, args)
        found = preview(ws, request)
        states = _find_states(ws, found, args.step)
        if args.resume:
            return _resume(ws, states, args, request)
    if args.export is not None:
        checkpoint = _only(states).find_numbered(args.number)
        exported = kept_state.export(checkpoint, Path(args.export))
        print(safe_line(beside(str(exported))))
    elif args.path or args.number is not None:
        for state in states:
            print(safe_line(str(state.find_numbered(args.number).path)))
    elif args.json:
        print(json.dumps([_as_json(state) for state in states], indent=2))
    else:
        lines = list(chain.from_iterable(map(_as_text, states)))
        if any(state.newest() for state in states):
            lines += _resume_hints(found, states, request)
        print("\n".join(lines))
    return 0


def _is_request_word(word: str) -> bool:
    """Return True for an input value or the path of a recipe; False for a step."""
    return "=" in word.partition("[")[0] or is_path(word)


def _find_states(ws: Workspace, found: Survey, step: str | None) -> list[StepState]:
    """Return the checkpoint directories of a step; of all steps for None.  Raises NotFound."""
    if step is None:
        nodes: Sequence[int] = range(len(found.plan.nodes))
        subject = f"the steps of {found.plan.recipe} keep"
    else:
        nodes = find_nodes(found, step)
        subject = f"{readable(step)} keeps"
    states = kept_state.find_states(ws, found, nodes)
    if not states:
        raise NotFound(
            f"{subject} no checkpoints",
            fix='declare checkpoints in the step: `state: {checkpoints: {checkpoint: "step-*"}}`',
        )
    return states


def _resume_hints(found: Survey, states: Sequence[StepState], request: Request) -> list[str]:
    """Return lines with the commands that resume from the newest or an earlier checkpoint."""
    reruns: dict[str, None] = {}
    for state in states:
        # A step that is up to date would not run, and so would not resume.
        if found.verdicts[found.plan.index[state.step]].answer == FRESH:
            reruns[f" -R {shlex.quote(readable(state.step))}"] = None
    return [
        f"to resume from the newest complete checkpoint: {_command_of(request)}{''.join(reruns)}",
        "to resume from an earlier one: recipe checkpoints STEP --number N --resume",
    ]


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
    words = [request.recipe]
    if request.preset:
        words += ["--preset", request.preset]
    for name, value in request.inputs.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{name}={text}")
    return f"recipe run {shlex.join(words)}"


def _as_text(state: StepState) -> list[str]:
    lines = [f"{safe_ids(state.step)}  {safe_line(beside(str(state.folder)))}"]
    if state.note:
        lines.append(f"  {safe_line(state.note)}")
    if state.checkpoints:
        newest, best = state.newest(), state.best()
        table = [_row(each, newest, best) for each in state.checkpoints]
        return lines + align(table, (2, 3))
    if state.pattern:
        return [*lines, "  no checkpoint yet"]
    return [*lines, "  `checkpoint:` is not set, so checkpoints cannot be listed"]


def _row(each: Checkpoint, newest: Checkpoint | None, best: Checkpoint | None) -> list[str]:
    """Return a table row: an empty cell, name, size, age and remark of a checkpoint."""
    age = span(max(0.0, time.time() - each.made))
    remark = each.why
    if not remark and each.aside:
        remark = "set aside"
    elif not remark and each is newest:
        remark = "the next run resumes here"
    if each is best:
        remark = f"{remark}, the best" if remark else "the best"
    return ["", safe_line(each.path.name), about(each.size), f"{age} ago", safe_line(remark)]


def _as_json(state: StepState) -> dict[str, object]:
    newest, best = state.newest(), state.best()
    return {
        "step": state.step,
        "state": state.state,
        "folder": str(state.folder),
        "note": state.note,
        "checkpoints": [_checkpoint_as_json(each, newest, best) for each in state.checkpoints],
    }


def _checkpoint_as_json(
    each: Checkpoint, newest: Checkpoint | None, best: Checkpoint | None
) -> dict[str, object]:
    return {
        "path": str(each.path),
        "number": each.number,
        "step": each.step,
        "bytes": each.size,
        "made": each.made,
        "whole": not each.why,
        "why": each.why,
        "aside": each.aside,
        "newest": each is newest,
        "best": each is best,
    }
