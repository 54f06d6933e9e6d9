"""Verbs about runs that a server keeps (`--to https://…`, or `RECIPE_SERVER`): the same words and output, by handles of runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import Busy, CannotAsk, Invalid, NotFound, Problem
from ...language.units import about
from ...paths import beside
from ...planning.ids import stored
from ...storage.records.runs import FINAL
from ..handle.far import Server, is_server
from ..handle.shells import Run, Transport, runs_of
from ..logs import for_stdout, head
from ..tables import aligned
from ..tail import named, shown, span
from .chosen import moment
from .control import ENDS, PATIENCE, answer_of

if TYPE_CHECKING:
    from ...api.values import Failed, Status, StepStatus

HERE: Final = "here"
"""The value of `--to` that means this workspace, whatever RECIPE_SERVER says."""
LISTED: Final = 200
"""Runs among which a part of an id, or `last~N`, is looked for."""
SHOWN: Final = ("loss", "train_loss", "eval_loss")
"""Numbers of a training that are shown beside how far it is."""
LOOK: Final = 0.2
"""Seconds between two looks whether what was asked is done."""
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "submit": frozenset(
        {
            "recipe",
            "inputs",
            "values_files",
            "parts",
            "preset",
            "driver",
            "priority",
            "not_before",
            "key",
            "label",
            "user",
            "file",
            "json",
        }
    ),
    "runs": frozenset({"last", "recipe", "failed", "json"}),
    "show": frozenset({"recipe", "json"}),
    "status": frozenset({"json"}),
    "logs": frozenset({"run", "follow", "attempt"}),
    "diff": frozenset({"a", "b", "json"}),
    "cancel": frozenset({"run", "no_wait"}),
    "pause": frozenset({"run", "no_wait"}),
    "resume": frozenset({"run", "queue"}),
    "retry": frozenset({"run", "begin", "queue"}),
    "fetch": frozenset({"run", "out", "overwrite", "json"}),
}
"""What of each verb's command line means something to a server."""
_ALWAYS: Final = frozenset({"to", "quiet", "verbose", "workspace", "help"})


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do a verb at the server that `args.to` names.  Raises RecipeError."""
    refuse(args, parser)
    transport = Server(args.to)
    try:
        return _VERBS[args.verb](transport, args)
    finally:
        transport.close()


def chosen(args: argparse.Namespace) -> bool:
    """Whether a verb is to be done at a server; a database becomes the one that runs are kept in.  Raises Invalid."""
    args.to = args.to or os.environ.get("RECIPE_SERVER", "")
    if not args.to or args.to == HERE:
        return False
    if is_server(args.to):
        return True
    if not args.to.startswith(("postgresql://", "postgres://")):
        fix = "write https://HOST:PORT of a server, postgresql://USER@HOST/DATABASE, or `here`"
        raise Invalid([Problem("bad-address", "--to is neither a server nor a database", fix=fix)])
    os.environ["RECIPE_RUNS"] = args.to
    return False


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what was given and a server would not heed.  Raises Invalid with all of it."""
    given = [
        action
        for action in parser._actions
        if action.dest not in ALLOWED[args.verb] | _ALWAYS
        and getattr(args, action.dest, action.default) not in (action.default, [], None)
    ]
    if given:
        fix = "leave it out, or give --to here or --to postgresql://…"
        words = [
            action.option_strings[-1]
            if action.option_strings
            else str(action.metavar or action.dest)
            for action in given
        ]
        raise Invalid(
            [Problem("only-here", f"{word} means nothing to a server", fix=fix) for word in words]
        )


def find(transport: Transport, word: str) -> Run:
    """The run that a word names: its id, a part of it that no other recent one has, `last`, `last~1`.  Raises NotFound."""
    name, tilde, back = word.partition("~")
    if name == "last" and (not tilde or back.isdecimal()):
        number = int(back) if tilde else 0
        rows = runs_of(transport, {}, number + 1)
        if number >= len(rows):
            raise NotFound(
                f"{word}: the oldest run at {transport.name} is last~{len(rows) - 1}",
                fix="`recipe runs` lists them",
            )
        return Run(transport, rows[number].id)
    matching = [row.id for row in runs_of(transport, {}, LISTED) if word and word in row.id]
    if len(matching) > 1 and word not in matching:
        raise NotFound(
            f'"{word}" may be any of {len(matching)} runs: {", ".join(matching[:3])}, …',
            fix="give more of it",
        )
    run = Run(transport, matching[0] if len(matching) == 1 else word)
    try:
        run.status()
    except NotFound:
        raise NotFound(
            f'there is no run "{word}" at {transport.name}', fix="`recipe runs` lists them"
        ) from None
    return run


def _submit(transport: Transport, args: argparse.Namespace) -> int:
    from ...api.submitting import Ticket
    from ...execution.terms import Settings
    from ...survey.request import Request
    from ..handle.opening import New, submitted
    from .flags import split_words, values_of

    names, typed = split_words([*([args.recipe] if args.recipe is not None else []), *args.inputs])
    names += [str(args.file)] if args.file is not None else []
    if len(names) != 1:
        fix = f"name one of its catalog: recipe submit NAME INPUT=VALUE --to {args.to}"
        raise Invalid(
            [
                Problem(
                    "no-recipe",
                    f"a server runs one recipe by its name, and {len(names)} are named",
                    fix=fix,
                )
            ]
        )
    given, _ = values_of(args, typed)
    ticket = Ticket(args.priority, args.not_before, args.key, dict(args.label), args.user)
    run = submitted(
        New(Request(names[0], given, args.preset), settings=Settings(args.driver), ticket=ticket),
        args.to,
        args.workspace,
    )
    run.close()
    print(run.id)
    if not args.quiet:
        print(
            f"recipe: run {run.id} is stored at {transport.name}; `recipe logs -f {run.id} --to {transport.name}` follows it",
            file=sys.stderr,
        )
    return 0


def _runs(transport: Transport, args: argparse.Namespace) -> int:
    query = {"recipe": args.recipe} if args.recipe is not None else {}
    rows = [
        row
        for row in runs_of(transport, query, LISTED if args.failed else args.last)
        if not args.failed or row.state == "FAILED"
    ][: args.last]
    if args.json:
        print(json.dumps([_plain(row) for row in rows], indent=2))
    elif not rows:
        print(f"there is no such run at {transport.name}", file=sys.stderr)
    else:
        table = [("RUN", "BEGAN", "STATE", "TIME", "RECIPE", "INPUTS", "USER")]
        table += [
            (
                row.id,
                _moment(row.created),
                row.word,
                _took(row),
                shown(row.recipe),
                shown(_given(row)),
                shown(row.user),
            )
            for row in rows
        ]
        print("\n".join(aligned(table, range(3, 4))))
    return 0


def _show(transport: Transport, args: argparse.Namespace) -> int:
    return show(find(transport, args.recipe or "last").status(), args)


def show(found: Status, args: argparse.Namespace) -> int:
    """Print one run: how it stands, its steps and outputs."""
    if args.json:
        print(json.dumps(_plain(found), indent=2))
        return 0
    percent = (
        f" {found.progress.percent:.0f}%"
        if found.progress.percent is not None and not found.over
        else ""
    )
    eta = f", {span(found.progress.eta)} left" if found.progress.eta and not found.over else ""
    took = _took(found)
    print(
        shown(
            f"{found.id}  {found.recipe}  {_moment(found.created)}  {found.word}{percent}{eta}{f' in {took}' if took and found.over else ''}"
        )
    )
    facts = [
        ("reason", found.reason),
        ("asked", found.request),
        ("inputs", _given(found)),
        ("driver", found.driver if found.driver != "local" else ""),
    ]
    facts += [
        ("user", found.user),
        ("cost", f"${found.cost:.2f}" if found.cost else ""),
        *sorted(found.labels.items()),
    ]
    for name, value in facts:
        if value:
            print(f"{name}: {shown(value)}")
    steps = [
        (
            named(each.id),
            each.state,
            str(each.attempts or ""),
            span(each.seconds) if each.seconds is not None else "",
            shown(each.host),
            _doing(each),
        )
        for each in found.steps
    ]
    if steps:
        head = ("STEP", "STATE", "ATTEMPTS", "TIME", "HOST", "WHY")
        print("\n".join(aligned([head, *steps], range(2, 4))))
    if found.failed is not None:
        print("\n".join(_failure(found.failed)))
    for warning in found.warnings:
        print(f"warning: {named(warning)}")
    for link in found.links:
        print(f"{shown(link.name)}: {shown(link.to)}  ({named(link.step)})")
    for output in found.outputs:
        print(
            f"{named(output.name)}  {about(output.bytes) if output.bytes is not None else ''}{' (folder)' if output.folder else ''}"
        )
    return 0


def _doing(step: StepStatus) -> str:
    """How far a running step is, or why it is in its state."""
    at, total, percent, eta = step.progress
    if step.state != "RUNNING":
        return shown(step.reason)
    said = [step.reason]
    if at is not None:
        said.append(f"step {at:.0f}" + (f"/{total:.0f}" if total else ""))
    if percent is not None:
        said.append(f"{percent:.0f}%")
    if eta:
        said.append(f"{span(eta)} left")
    said += [f"{name} {value:.4g}" for name, value in step.values.items() if name in SHOWN]
    return shown("  ".join(filter(None, said)))


def _failure(failed: Failed) -> list[str]:
    """The failure of a run, with the last lines that its step printed, which begin with the name of the step."""
    name = named(failed.step)
    text = [f"{name}: failed: {named(failed.words)}" if name else f"failed: {named(failed.words)}"]
    text += [f"  {name} | {shown(line)}" for line in failed.lines]
    return [*text, f"  fix: {named(failed.fix)}"] if failed.fix else text


def _status(transport: Transport, args: argparse.Namespace) -> int:
    """What is under way, and what waits."""
    rows = [
        row
        for state in ("ACTIVE", "QUEUED", "PAUSED")
        for row in runs_of(transport, {"state": state}, LISTED)
    ]
    if args.json:
        print(json.dumps([_plain(row) for row in rows], indent=2))
    elif not args.quiet:
        for row in rows:
            print(shown(f"{row.word.lower()}: {row.id} {row.recipe}, since {_moment(row.created)}"))
        if not rows:
            print("no run is under way or waits")
    return 0


def _logs(transport: Transport, args: argparse.Namespace) -> int:
    name, _, step = stored(args.run).partition("/")
    run = find(transport, name)
    writer, last = for_stdout(), ""
    for line in run.logs(follow=args.follow, step=step, attempt=args.attempt or 0):
        if not step and (now := head(line.step, line.attempt)) != last:
            writer.head(now)
            last = now
        writer.write(f"{line.text}\n".encode())
    writer.end()
    return 0


def _diff(transport: Transport, args: argparse.Namespace) -> int:
    from ..differences import Ran
    from .history import Compared, tell

    second = find(transport, args.b or "last").status()
    if args.a is None or (args.b is None and find(transport, args.a).id == second.id):
        before = [
            row
            for row in runs_of(transport, {"recipe": second.recipe}, LISTED)
            if row.id < second.id
        ]
        if not before:
            raise NotFound(
                f"{second.id} is the only run of {second.recipe} at {transport.name}",
                fix="name two runs; `recipe runs` lists them",
            )
        first = Run(transport, before[0].id).status()
    else:
        first = find(transport, args.a).status()

    def ran(found: Status) -> dict[str, Ran]:
        outputs: dict[str, dict[str, str]] = {}
        for each in found.outputs:
            step, _, output = each.name.rpartition(".")
            outputs.setdefault(step, {})[output] = each.content
        metrics: dict[str, dict[str, Any]] = {}
        for point in Run(transport, found.id).metrics():
            metrics.setdefault(point.step, {}).update(point.values)
        return {
            each.id: Ran(each.state, None, outputs.get(each.id), metrics.get(each.id, {}))
            for each in found.steps
        }

    def compared(found: Status) -> Compared:
        counts = {
            state: sum(each.state == state for each in found.steps)
            for state in ("DONE", "FRESH", "FAILED")
        }
        head = f"{found.id}  {shown(found.recipe)}  {_moment(found.created)}  {found.word}{f' in {_took(found)}' if _took(found) else ''}"
        tally = f"{counts['DONE']} ran, {counts['FRESH']} fresh, {counts['FAILED']} failed"
        return Compared(f"{head}: {tally}", found.inputs, ran(found), _plain(found))

    tell(compared(first), compared(second), lambda _content: None, args)
    return 0


def _control(transport: Transport, args: argparse.Namespace) -> int:
    run = find(transport, args.run)
    try:
        if args.verb == "retry":
            print(run.retry(args.begin).id)
            return 0
        outcome = {"cancel": run.cancel, "pause": run.pause, "resume": run.resume}[args.verb]()
    except CannotAsk as error:
        # As for a run of this workspace: Python words the fix for itself.
        raise CannotAsk(error.code, error.message, error.run) from None
    for text in outcome.said:
        print(shown(f"recipe: {text}"), file=sys.stderr)
    if args.verb in ENDS and not outcome.done and not args.no_wait:
        return _wait_for_end(run, args.verb)
    print(answer_of(outcome, args.verb))
    return 0 if outcome.done or outcome.state not in FINAL else 1


def _wait_for_end(run: Run, verb: str) -> int:
    """Wait until a run is cancelled or paused.  Raises Busy."""
    deadline = time.monotonic() + PATIENCE[verb]
    while True:
        now = run.status()
        if now.over or now.state == ENDS[verb]:
            print(f"run {run.id} is {now.state}")
            return 0 if now.state == ENDS[verb] else 1
        if time.monotonic() > deadline:
            to = f"--to {run.transport.name}"
            fix = (
                f"`recipe logs {run.id} -f {to}` shows its output; "
                f"if the worker hangs, kill it, and run `recipe {verb} {run.id} {to}` again"
            )
            words = f"its worker has not done it in {PATIENCE[verb]:.0f} s"
            raise Busy(f"run {run.id} was asked to {verb}, and {words}", fix=fix)
        time.sleep(LOOK)


def _fetch(transport: Transport, args: argparse.Namespace) -> int:
    run = find(transport, args.run)
    now = run.status()
    folder = (
        Path(args.location.typed(str(args.out)))
        if args.out is not None
        else Path("out") / now.recipe / run.id
    )
    folder = args.workspace / folder
    paths = run.download(folder, overwrite=args.overwrite)
    names = {path: path.relative_to(os.path.abspath(folder)).as_posix() for path in paths}
    if args.json:
        files = [
            {"name": names[path], "path": beside(str(path)), "bytes": path.lstat().st_size}
            for path in paths
        ]
        print(
            json.dumps(
                {"run": run.id, "server": transport.name, "state": now.state, "files": files},
                indent=2,
            )
        )
    elif not args.quiet:
        for path in paths:
            print(shown(f"{names[path]}  {beside(str(path))}  {about(path.lstat().st_size)}"))
    if now.state not in FINAL and not args.quiet:
        print(f"recipe: run {run.id} is not over: there may be more later", file=sys.stderr)
    return 0


_VERBS: Final[Mapping[str, Callable[[Transport, argparse.Namespace], int]]] = {
    "submit": _submit, "runs": _runs, "show": _show, "status": _status, "logs": _logs, "diff": _diff, "cancel": _control, "pause": _control,
    "resume": _control, "retry": _control, "fetch": _fetch,
}  # fmt: skip


def _plain(found: Status) -> dict[str, object]:
    """A run for programs."""
    return {name: _named(value) for name, value in found._asdict().items()}


def _named(value: object) -> object:
    """A value as JSON has it, with the names of the fields of tuples."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _named(inner) for name, inner in value._asdict().items()}
    return [_named(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _given(found: Status) -> str:
    words: Sequence[str] = [f"--preset {found.preset}"] if found.preset else []
    return " ".join([*words, *(f"{name}={value}" for name, value in found.inputs.items())])


def _moment(text: str) -> str:
    return moment(datetime.fromisoformat(text).timestamp()) if text else ""


def _took(found: Status) -> str:
    if not found.ended or not found.created:
        return ""
    return span(
        (
            datetime.fromisoformat(found.ended) - datetime.fromisoformat(found.created)
        ).total_seconds()
    )
