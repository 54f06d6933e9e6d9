"""Checkpoints are uploaded while their training runs, once each and only when they are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.errors import Infrastructure
from runner.execution.steps.checkpoint_sender import FIRST, CheckpointSender
from runner.hosts.place.checkpoint_sync import SETTLE
from runner.planning.step import StateSpec, StepSpec
from runner.storage import checkpoints
from runner.storage.remote import states as remote_states
from tests.virtual import virtual


class Training:
    """The checkpoint directory of a training, and the shared store."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *more: StateSpec, **state: Any
    ) -> None:
        self.root, self.marks, self.words = root, 0, list[str]()
        self.uploads = list[dict[str, str]]()
        self.refuses: Exception | None = None
        words: dict[str, Any] = {"checkpoint": "step-*", "every": 10.0, "keep": None}
        spec = StateSpec("state", "state", **words | state)
        cache: Any = Of(name="s3://b", remote=Of(mark=self._mark))
        commits: Any = Of(say=self.words.append)
        generation: Any = Of(path=root, folder=lambda name: root / name)
        monkeypatch.setattr(remote_states, "save", self._save)
        monkeypatch.setattr(checkpoints, "key", lambda *_words: "key")
        (root / "state").mkdir()
        world: Any = None
        self.sender = CheckpointSender(
            cache, commits, "train", generation, [spec, *more], world, StepSpec("r@1", "train", {})
        )

    def _mark(self) -> None:
        self.marks += 1

    def _save(self, _remote: Any, key: str, generation: Path, names: dict[str, str]) -> None:
        assert key == "key" and generation == self.root
        if self.refuses is not None:
            raise self.refuses
        self.uploads.append(dict(names))

    def write(self, name: str, text: str = "weights") -> None:
        (self.root / "state" / name).mkdir(exist_ok=True)
        (self.root / "state" / name / "model.bin").write_text(text)

    def run(self, *events: tuple[float, Callable[[], None]]) -> list[str]:
        """Run the sender while things happen after a time each; return the uploaded names."""

        async def happen() -> None:
            sending = asyncio.ensure_future(self.sender.run())
            for seconds, event in events:
                await asyncio.sleep(seconds)
                event()
            sending.cancel()

        with virtual() as loop:
            loop.run_until_complete(happen())
        return [upload["state"] for upload in self.uploads]


@pytest.fixture(autouse=True)
def _threads_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(do: Callable[..., Any], *words: Any) -> Any:
        return do(*words)

    monkeypatch.setattr(asyncio, "to_thread", call)


def nothing() -> None:
    pass


def test_each_new_checkpoint_is_uploaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.write("step-10")
    uploaded = training.run((25, lambda: training.write("step-20")), (40, nothing))
    assert uploaded == ["step-10", "step-20"] and training.marks == 1


def test_a_checkpoint_from_before_is_uploaded_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, every=600.0)
    training.write("step-10")
    assert training.run((FIRST + SETTLE + 0.5, nothing)) == ["step-10"]


def test_a_checkpoint_that_is_being_written_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.write("step-10", "half")
    grows = [(FIRST + SETTLE / 2, lambda: training.write("step-10", "half and half"))]
    grows += [(SETTLE, lambda: training.write("step-10", "all of the weights"))]
    assert training.run(*grows, (0.9, nothing)) == []
    training.uploads.clear()
    assert training.run((FIRST + SETTLE + 0.5, nothing)) == ["step-10"]


def test_checkpoints_between_the_steps_to_upload_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, every_steps=100)
    training.write("step-100")
    later = [(20.0, lambda: training.write("step-150")), (20.0, lambda: training.write("step-200"))]
    assert training.run(*later, (20.0, nothing)) == ["step-100", "step-200"]


def test_the_last_checkpoint_is_uploaded_at_the_end_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, every_steps=100)
    training.write("step-100")
    training.run((20.0, lambda: training.write("step-150")))
    asyncio.run(training.sender.finish())
    asyncio.run(training.sender.finish())
    assert [upload["state"] for upload in training.uploads] == ["step-100", "step-150"]


def test_the_shortest_interval_of_a_step_counts_for_all_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = StateSpec("best", "best", "step-*", 10.0, None)
    training = Training(tmp_path, monkeypatch, best, every=600.0)
    training.write("step-10")
    assert training.run((25, lambda: training.write("step-20")), (20, nothing)) == [
        "step-10",
        "step-20",
    ]


def test_an_upload_does_not_delay_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.write("step-10")
    later = FIRST + 10 + SETTLE + 0.5
    uploaded = training.run((5, lambda: training.write("step-20")), (later - 5, nothing))
    assert uploaded == ["step-10", "step-20"]


def test_a_check_never_takes_longer_than_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, every=0.5)
    training.write("step-10")
    assert training.run((1.25, nothing)) == ["step-10"]


def test_a_state_without_single_checkpoints_is_uploaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, checkpoint=None)
    training.write("")
    assert training.run((30, nothing)) == [""]


def test_a_store_that_fails_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.write("step-10")
    training.refuses = Infrastructure("no answer")

    def recovers() -> None:
        training.refuses = None

    assert training.run((5, recovers), (20, nothing)) == ["step-10"]
    assert training.words == [
        "train: cannot upload its checkpoint to the shared store s3://b: no answer"
    ]


def test_without_a_complete_checkpoint_nothing_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch)
    (tmp_path / "state" / "other").mkdir()
    assert training.run((30, nothing)) == []
    asyncio.run(training.sender.finish())
    assert not training.uploads and not training.words
