"""Links from a training platform's CHECKPOINTS_DIR and LOGS_DIR to the files of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..storage.workspace import Workspace


def link_folders(
    ws: Workspace, run: str, step: str, states: Mapping[str, Path], say: Callable[[str], None]
) -> None:
    """Link a step's checkpoints below CHECKPOINTS_DIR and the run's logs below LOGS_DIR.

    The links are CHECKPOINTS_DIR/JOB/STEP/STATE and LOGS_DIR/JOB. Does nothing if the run belongs
    to no job. Passes a message to `say` if a link cannot be created; the run continues.
    """
    folders = {name: ws.environ.get(name, "") for name in ("CHECKPOINTS_DIR", "LOGS_DIR")}
    if not any(folders.values()):
        return
    from ..storage.records.letters import job_of

    if (job := job_of(ws.store.runs.get(run), ws.environ)) is None:
        return
    links = {}
    if folder := folders["LOGS_DIR"]:
        links[_below(ws, folder) / job.id] = ws.home / "runs" / run
    if folder := folders["CHECKPOINTS_DIR"]:
        place = _below(ws, folder) / job.id / step.replace("/", "%2F")
        links |= {place / name: path for name, path in states.items()}
    for link, target in links.items():
        try:
            _link(link, target)
        except OSError as error:
            say(f"cannot link {link} to {target}: {error.strerror}")


def _below(ws: Workspace, folder: str) -> Path:
    return ws.root / Path(folder).expanduser()


def _link(link: Path, target: Path) -> None:
    """Create a symlink, or replace an old symlink.

    Raises OSError, also if a file that is not a symlink has its name.
    """
    if link.is_symlink():
        if os.readlink(link) == str(target):
            return
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
