"""Links to experiment trackers, found in a step's log and outputs.

W&B, trackio and programs that print `recipe-link: NAME ADDRESS` announce their links. TensorBoard
has event files in an output.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from .runs import AttemptRow

HEAD: Final = 1 << 18
"""Maximum bytes searched for links at each end of a log.

Trackers print their links there.
"""
MOST: Final = 8
"""Maximum number of links of a step."""
LONGEST: Final = 1000
"""Maximum length of a link in characters."""
EVENTS: Final = "events.out.tfevents."
"""Name prefix of TensorBoard's event files."""
_SPEAKERS: Final = (b"wandb: ", b"rackio ", b"recipe-link: ")


class TrackerLink(NamedTuple):
    """Link from a step to an experiment tracker or dashboard.

    `to` is an http(s) address without query, a path in an output (`train.tensorboard/run`), or a
    command.
    """

    step: str
    name: str
    to: str


@functools.cache
def _patterns() -> tuple[tuple[str, re.Pattern[bytes]], ...]:
    # Compiled only if a log mentions a tracker.
    return (
        ("W&B", re.compile(rb"(?m)^wandb: [^\n]*?View run\b[^\n]*?\bat:? +(https?://\S+)")),
        ("W&B offline", re.compile(rb"(?m)^wandb: [^\n]*?(?:saved locally in|wandb sync) +(\S*/offline-run-[\w.-]+)")),
        ("trackio", re.compile(rb"(?m)^\* (?:Found existing space|Creating new space|Trackio metrics will be sent to self-hosted server): (https?://\S+)")),
        ("trackio", re.compile(rb'(?m)^(trackio show --project "[^"\n]{1,200}")')),
        ("", re.compile(rb"(?m)^recipe-link: +([\w&. +-]{1,40}?) +(https?://\S+)[ \r]*$")),
    )  # fmt: skip


def find_links(step: str, log: bytes, outputs: Mapping[str, str]) -> list[TrackerLink]:
    """Return the tracker links in the start and end of a masked log.

    `outputs` maps output names to paths. Tracker files outside the outputs are not linked, because
    they are deleted after the step.
    """
    if not any(word in log for word in _SPEAKERS):
        return []
    log = re.sub(rb"\x1b\[[0-9;]*m", b"", log)
    found: dict[TrackerLink, None] = {}
    for name, pattern in _patterns():
        for match in pattern.finditer(log):
            *own, to = (part.decode(errors="replace") for part in match.groups())
            if name == "W&B offline":
                place = _in_output(step, to, outputs)
            elif to.startswith("trackio "):
                place = to
            else:
                place = _address(to)
            if not place or len(place) > LONGEST:
                continue
            if len(found) < MOST:
                found[TrackerLink(step, name or own[0].strip(), place)] = None
    return list(found)


def _address(text: str) -> str:
    """Remove the query from an http(s) URL.

    Return "" for a URL with credentials or without a host.
    """
    try:
        parts = urlsplit(text)
        if not parts.hostname or "@" in parts.netloc:
            return ""
        return parts._replace(query="").geturl()
    except ValueError:
        return ""


def _in_output(step: str, path: str, outputs: Mapping[str, str]) -> str:
    for name, output in outputs.items():
        _, inside, rest = f"/{path.lstrip('/')}".rpartition(f"/{output.strip('/')}/")
        if inside and ".." not in rest.split("/"):
            return f"{step}.{name}/{rest}"
    return ""


def stored_links(attempts: Iterable[AttemptRow]) -> list[TrackerLink]:
    """Return the distinct links stored with the attempts of a run."""
    links: dict[TrackerLink, None] = {}
    for attempt in attempts:
        for name, to in _rows(attempt.exit.get("links")):
            links[TrackerLink(attempt.step, name, to)] = None
    return list(links)


def _rows(stored: object) -> list[tuple[str, str]]:
    if not isinstance(stored, list):
        return []
    pairs = []
    for row in stored:
        if isinstance(row, list) and len(row) == 2:
            pairs.append((str(row[0]), str(row[1])))
    return pairs
