"""Results of a run: their paths, counts, and transfer to other machines."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import CannotRun, Corrupt, Infrastructure
from ..paths import temporary_name
from ..planning.judge import FRESH, SKIPPED, StepResult
from ..planning.plan import Plan
from ..storage.content.files import Content
from ..storage.records.exchange import SharedOutput
from ..storage.records.index import Changes, PublishedFile
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from ..survey.survey import Survey, out_dir
from .terms import Listener


def count_steps(found: Survey) -> tuple[int, int]:
    """Return the number of requested steps and the number of up-to-date ones."""
    answers = [verdict.answer for verdict in found.verdicts]
    return len(answers) - answers.count(SKIPPED), answers.count(FRESH)


def show_notices(ws: Workspace, listener: Listener) -> None:
    """Show the pending notices of the shared store to the listener."""
    for notice in ws.remote_cache.pop_notices() if ws.remote_cache is not None else ():
        listener.say(notice)


def show_warnings(ws: Workspace, found: Survey, listener: Listener) -> None:
    """Show the stored warnings of up-to-date steps again."""
    for line in warnings_of(ws, found, FRESH):
        listener.say(line)


def warnings_of(ws: Workspace, found: Survey, *answers: str) -> list[str]:
    """Return the stored warnings of steps with one of the given verdicts, one line each."""
    known = ws.store.index.warnings(found.plan.recipe)
    lines: list[str] = []
    if not known:
        return lines
    for number, verdict in enumerate(found.verdicts):
        if verdict.answer in answers and verdict.key is not None:
            id = found.plan.nodes[number].id
            lines += [f"{id}: warning: {text}" for text in known.get(verdict.key, ())]
    return lines


def list_results(ws: Workspace, found: Survey) -> list[tuple[str, str]]:
    """Return the name and path of each declared output that is published."""
    base = out_dir(ws, found.plan, found.library, found.request)
    shown = []
    for n, output, path, name in found.plan.publish:
        made = found.made.get(n)
        if name and (made is None or output in made.outputs) and os.path.lexists(base / path):
            shown.append((name, os.path.relpath(base / path, Path.cwd())))
    return shown


def deliver(
    ws: Workspace, run: str, fence: int, plan: Plan, made: Mapping[int, StepResult]
) -> None:
    """Upload the outputs of a run for download by another machine, and list them in its row.

    Raises Infrastructure, Stale.
    """
    if not ws.delivers or ws.remote_cache is None:
        return
    from ..storage.remote import states as remote_states

    ws.remote_cache.finish(lambda _words: None)
    remote = ws.remote_cache.remote
    outputs = []
    for n, output, path, name in plan.publish:
        content = made[n].outputs.get(output) if n in made else None
        if content is None:
            continue
        content, here = Content(content), ws.objects.has(Content(content))
        if here:
            remote_states.keep(
                remote, [run, output, path], {content: str(ws.objects.path(content))}
            )
        elif not ws.remote_cache.holds(content):
            continue  # a `temporary` output stays on its host
        size = ws.objects.size(content) if here else ws.remote_cache.size_of([content])
        outputs.append(SharedOutput(name or path, path, content, size, remote.address(content)))
    ws.store.runs.exchange.store_outputs(run, fence, outputs)


def collect(ws: Workspace, row: RunRow, out: Path, *, overwrite: bool) -> list[Path]:
    """Download the outputs of a run below `out` and return their paths.

    Without `overwrite`, files from elsewhere are not replaced.

    Raises CannotRun if such a file exists, Corrupt if an output path leaves `out`, and
    Infrastructure if the download fails.
    """
    cache = ws.remote_cache
    assert cache is not None
    targets = {each: Path(os.path.normpath(out / each.path)) for each in row.outputs}
    for each, target in targets.items():
        if not target.is_relative_to(out):
            raise Corrupt(
                f"run {row.id} has an output path outside its directory: {each.path}",
                fix="check who can write to the run database",
            )
    ours = ws.published_contents()
    head = f"{ws.root}/"
    places = {each: str(target).removeprefix(head) for each, target in targets.items()}
    if not overwrite:
        for each, place in places.items():
            if os.path.lexists(targets[each]):
                _refuse_foreign(ws, place, (each.content, ours.get(place)))
    if lost := cache.bring([Content(each.content) for each in row.outputs]):
        names = ", ".join(each.name for each in row.outputs if each.content in lost)
        raise Infrastructure(
            f"cannot download {names} from the shared store {cache.name}",
            fix=f"create the results again with `recipe retry {row.id}`",
        )
    for each, place in places.items():
        targets[each].parent.mkdir(parents=True, exist_ok=True)
        ws.publish(Content(each.content), place, link=False)
    published = [
        PublishedFile(places[each], Content(each.content), "", row.id, "", row.recipe)
        for each in row.outputs
    ]
    with ws.store.database.transaction() as db:
        ws.store.index.write(db, Changes(published=published))
    ws.save_cache()
    return list(targets.values())


def _refuse_foreign(ws: Workspace, place: str, known: Collection[str | None]) -> None:
    """Refuse to replace a file whose content is not `known`.  Raises CannotRun."""
    there = ws.cache.content_of(place)
    if there is not None and there not in known:
        raise CannotRun(
            f"{place} already exists and was not created by recipe",
            fix="move the file away, or pass `--overwrite` or `--out DIR`",
        )


def point_latest(ws: Workspace, found: Survey) -> None:
    """Point the `latest` symlink to the output directory of this run, if it exists."""
    base = out_dir(ws, found.plan, found.library, found.request)
    if found.request.out is None and base.is_dir():
        link = base.parent / "latest"
        fresh = link.with_name(temporary_name("latest"))
        fresh.symlink_to(base.name)
        fresh.replace(link)
