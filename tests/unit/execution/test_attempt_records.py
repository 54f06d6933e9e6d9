"""What is stored of an attempt that is over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps.attempt_records import AttemptRecords
from runner.secrets import Masker
from runner.storage.records.links import TrackerLink


def records(**more: Any) -> AttemptRecords:
    environments = Of(
        container_image=lambda _spec, _place: more.get("container", ""),
        image=lambda _spec: more.get("image", ""),
        interpreter=lambda *_words: more.get("python", ""),
        containers_of=lambda _place: Of(digest_of=lambda image: f"{image}@sha"),
    )
    objects = Of(manifests=Of(mentions=lambda content, _name: content == "t1"))
    parts: list[Any] = [objects, Of(masker=Masker()), environments, None, None, None]
    return AttemptRecords(*parts)


def attempt(log: str = "/nowhere", **more: Any) -> Any:
    outputs = [Of(name="logs", path="out/logs"), Of(name="model", path="m.bin")]
    place = Of(elsewhere=more.get("host", ""))
    place.members = [place]
    return Of(
        place=place,
        spec=None,
        node=Of(outputs=outputs),
        log=log,
        resumed_step=more.get("resumed"),
        checkpoint_bytes=more.get("size", 0),
    )


@pytest.mark.parametrize(
    ("where", "what", "facts"),
    [
        ({}, {}, {}),
        ({"host": "h1"}, {}, {"host": "h1"}),
        ({}, {"container": "torch:2", "image": "torch:2"}, {"image": "torch:2@sha"}),
        ({}, {"image": "torch:2"}, {"image": "torch:2"}),
        ({}, {"python": "3.11"}, {"python": "3.11"}),
        ({"resumed": 0}, {}, {"continued_from": 0}),
        ({"size": 5}, {}, {"checkpoint_bytes": 5}),
    ],
)
def test_what_happened_to_be_so_is_stored_where_it_was(
    where: dict[str, Any], what: dict[str, Any], facts: dict[str, Any]
) -> None:
    assert records(**what).facts_of(attempt(**where)) == facts


def test_folders_with_events_are_boards_and_printed_addresses_are_links(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("wandb: View run at https://wandb.ai/me/p/runs/1\n")
    outputs = {"logs": "t1", "model": "f2"}
    found = records().links_of("a", attempt(str(log)), outputs)
    assert TrackerLink("a", "TensorBoard", "a.logs") in found
    assert any(each.to == "https://wandb.ai/me/p/runs/1" for each in found) and len(found) == 2
    assert records().links_of("a", attempt(), {"logs": "t2", "model": "f2"}) == []
    assert records().links_of("a", attempt(), {"model": "t1"})[0].to == "a.model"
