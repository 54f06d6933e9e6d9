"""What a run leaves for people: where its results lie, how many steps were fresh, what they should know of a shared store."""

from __future__ import annotations

import os
from pathlib import Path

from ..planning.judge import FRESH, SKIPPED
from ..storage.workspace import Workspace
from ..survey.survey import Survey, out_dir
from .terms import Listener


def sizes(found: Survey) -> tuple[int, int]:
    """How many steps are asked for, and how many of them are fresh."""
    answers = [verdict.answer for verdict in found.verdicts]
    return len(answers) - answers.count(SKIPPED), answers.count(FRESH)


def tell(ws: Workspace, listener: Listener) -> None:
    """What a person should know of the store that is shared."""
    for notice in ws.remote_cache.told() if ws.remote_cache is not None else ():
        listener.say(notice)


def results(ws: Workspace, found: Survey) -> list[tuple[str, str]]:
    """The outputs that the recipe declares, and where they lie; a recipe that declares none has its steps' files where they say."""
    base = out_dir(ws, found.plan, found.library, found.request)
    shown = []
    for n, output, path, name in found.plan.publish:
        made = found.made.get(n)
        if name and (made is None or output in made.outputs) and os.path.lexists(base / path):
            shown.append((name, os.path.relpath(base / path, Path.cwd())))
    return shown


def point_latest(ws: Workspace, found: Survey) -> None:
    """Link `latest` to the folder of this run's results, if it published any."""
    base = out_dir(ws, found.plan, found.library, found.request)
    if found.request.out is None and base.is_dir():
        link = base.parent / "latest"
        fresh = link.with_name(f"latest.{os.getpid()}")
        fresh.symlink_to(base.name)
        fresh.replace(link)
