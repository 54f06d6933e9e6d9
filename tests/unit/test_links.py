"""What a log says of where else the numbers of a step can be looked at."""

from __future__ import annotations

import pytest

from runner.storage.records.links import MOST, TrackerLink, find_links, stored_links
from runner.storage.records.runs import AttemptRow

ONLINE = """\
wandb: Tracking run with wandb version 0.31.0
wandb: Run data is saved locally in /job/wandb/run-20261123_082741-abc
wandb: Run `wandb offline` to turn off syncing.
wandb: Syncing run r1
wandb: \x1b[33m⭐️ View project at \x1b[34m\x1b[4mhttps://wandb.ai/ann/recipe\x1b[0m
wandb: 🚀 View run at \x1b[34m\x1b[4mhttps://wandb.ai/ann/recipe/runs/r1?apiKey=0123456789\x1b[0m
loss 3
wandb: 🚀 View run r1 at: https://wandb.ai/ann/recipe/runs/r1
"""
OFFLINE = """\
wandb: Run data is saved locally in /job/attempts/7f/out/board/wandb/offline-run-20261123_082741-r1
wandb: You can sync this run to the cloud by running:
wandb: wandb sync /job/attempts/7f/out/board/wandb/offline-run-20261123_082741-r1
"""
TRACKIO = """\
* Trackio project initialized: recipe
* Trackio metrics logged to: /home/ann/.cache/huggingface/trackio
* View dashboard by running in your terminal:
\x1b[1m\x1b[38;5;208mtrackio show --project "recipe"\x1b[0m
"""
SPACE = "* Trackio project initialized: recipe\n* Found existing space: \x1b[1mhttps://huggingface.co/spaces/ann/curves\x1b[0m\n"


@pytest.mark.parametrize(
    ("log", "links"),
    [
        (ONLINE, [("W&B", "https://wandb.ai/ann/recipe/runs/r1")]),
        (OFFLINE, [("W&B offline", "train.board/wandb/offline-run-20261123_082741-r1")]),
        (
            OFFLINE.replace("/job/attempts/7f/", ""),
            [("W&B offline", "train.board/wandb/offline-run-20261123_082741-r1")],
        ),
        (OFFLINE.replace("/out/board/", "/elsewhere/"), []),
        (OFFLINE.replace("wandb/offline", "../../wandb/offline"), []),
        (TRACKIO, [("trackio", 'trackio show --project "recipe"')]),
        (SPACE, [("trackio", "https://huggingface.co/spaces/ann/curves")]),
        (
            "recipe-link: my curves  https://curves.example:8/#/runs/7?x=1\n",
            [("my curves", "https://curves.example:8/#/runs/7?x=1")],
        ),
        ("recipe-link: a https://a.example/x?token=abc\r\n", [("a", "https://a.example/x")]),
        (
            "recipe-link: a https://ann:secret@a.example/x\nrecipe-link: b https://[::1\nrecipe-link: c https:///x\n",
            [],
        ),
        (
            "recipe-link: a javascript:alert(1)\nrecipe-link: a file:///etc/passwd\nrecipe-link: /x\n recipe-link: a https://a.example\n",
            [],
        ),
        (
            "recipe-link: <b> https://a.example\nrecipe-link: a https://a.example/"
            + "x" * 2000
            + "\n",
            [],
        ),
        ("I said wandb: View run at https://a.example once\n", []),
        ("", []),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_link_is_what_a_tracker_says_in_a_line_of_its_own(
    log: str, links: list[tuple[str, str]]
) -> None:
    assert find_links("train", log.encode(), {"board": "out/board"}) == [
        TrackerLink("train", *each) for each in links
    ]


def test_a_step_has_few_links_and_a_run_has_each_once() -> None:
    many = "".join(f"recipe-link: a https://a.example/{n}\n" for n in range(50))
    assert len(find_links("train", many.encode(), {})) == MOST
    rows = [
        AttemptRow(str(n), "r", "train", n, exit={"links": [["W&B", "https://a.example"]]})
        for n in (1, 2)
    ]
    assert stored_links(
        [*rows, AttemptRow("3", "r", "after", 1, exit={"links": "none", "code": 0})]
    ) == [TrackerLink("train", "W&B", "https://a.example")]
