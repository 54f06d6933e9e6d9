"""Alerts about a run in progress, for webhooks, chats and the console."""

from __future__ import annotations

import time

from ...storage.workspace import Workspace
from .commit import GroupCommit


def raise_alert(
    ws: Workspace, commits: GroupCommit, name: str, words: str, about: str = ""
) -> None:
    """Send the alert `alert.NAME` to the webhooks and print its text.

    `about` distinguishes alerts with the same name in the same second. Raises Infrastructure if
    the database does not answer.
    """
    runs, run, now = ws.store.runs, commits.run, time.time()
    if (letters := ws.letters) is not None:
        id = "-".join(filter(None, (run, name, about, f"{now:.0f}")))
        runs.outbox.post(run, letters.alert(runs.get(run), name, id, now, words))
    commits.say(words)
