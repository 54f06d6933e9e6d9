"""Where outputs are published, and which files they may not replace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.errors import CannotRun, StoreUnavailable
from runner.execution.steps.publisher import Publisher
from runner.planning.judge import NOTHING, Facts, StepResult
from runner.planning.step import TEMPORARY

MADE = StepResult(True, {"o": "f-new"}, {})


class Desk:
    """A run whose step `a` has the output `o` at `out.txt`."""

    def __init__(self, root: Path, *, overwrite: bool = False, link: bool = False) -> None:
        self.root = root
        self.error: Exception | None = None
        self.published, self.noted = list[tuple[str, str, bool]](), list[tuple[str, str, str]]()
        traces: Any = {}
        self.facts = Facts(traces, {})
        self.targets = {0: [("o", "out.txt")]}
        self.outputs = [Of(name="o", flags=0)]
        listed: dict[str, Any] = {}
        ws: Any = Of(
            root=root,
            publish=self._publish,
            cache=Of(content_of=lambda path: f"f-{self._file(path).read_text()}"),
            store=Of(index=Of(list_published=lambda: listed)),
        )
        nodes = [Of(id="a", outputs=self.outputs), Of(id="b", outputs=[])]
        survey: Any = Of(targets=self.targets, facts=self.facts, plan=Of(nodes=nodes))
        commits: Any = Of(add_published=lambda *words: self.noted.append(words))
        scrap: Any = Of(take_file="spare files")
        self.publisher = Publisher(ws, survey, commits, scrap, overwrite=overwrite, link=link)

    def _file(self, path: str) -> Path:
        return self.root / path

    def _publish(self, content: str, path: str, *, link: bool, spare: Any) -> None:
        if self.error is not None:
            raise self.error
        assert spare == "spare files"
        self.published.append((path, content, link))

    def find(self, text: str, path: str = "out.txt") -> None:
        """Have a file that was there when the run was surveyed."""
        self._file(path).write_text(text)
        self.facts.there[path] = f"f-{text}"


@pytest.mark.parametrize("link", [False, True])
def test_an_output_is_published_noted_and_known_from_then_on(tmp_path: Path, link: bool) -> None:
    desk = Desk(tmp_path, link=link)
    desk.publisher.publish(0, MADE)
    assert desk.published == [("out.txt", "f-new", link)]
    assert desk.noted == [("out.txt", "f-new", "a")]
    desk.publisher.publish(0, MADE)
    assert len(desk.published) == len(desk.noted) == 1


def test_temporary_and_missing_outputs_are_not_published(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.find("old")
    desk.facts.ours["out.txt"] = "f-old"
    desk.publisher.publish(0, StepResult(True, {}, {}))
    desk.outputs[0].flags = TEMPORARY
    desk.publisher.publish(0, MADE)
    desk.publisher.publish(1, MADE)
    assert not desk.published and not desk.noted


def test_what_a_worker_published_before_it_died_is_noted_now(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.find("new")
    desk.publisher.publish(0, MADE)
    assert desk.published == [] and desk.noted == [("out.txt", "f-new", "a")]
    desk.publisher.publish(0, MADE)
    assert len(desk.noted) == 1


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.find("old")
    desk.facts.ours["out.txt"] = "f-old"
    desk.publisher.check_targets(0)
    desk.publisher.publish(0, MADE)
    assert desk.published == [("out.txt", "f-new", False)]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_file_of_somebody_else_is_replaced_only_if_asked(tmp_path: Path, absolute: bool) -> None:
    path = f"{tmp_path}/out.txt" if absolute else "out.txt"
    desk = Desk(tmp_path)
    desk.targets[0] = [("o", path)]
    desk.find("mine", path)
    with pytest.raises(CannotRun, match="which was not created by recipe"):
        desk.publisher.check_targets(0)
    with pytest.raises(CannotRun, match="created or edited while the step ran"):
        desk.publisher.publish(0, MADE)
    assert desk.published == []
    asked = Desk(tmp_path, overwrite=True)
    asked.targets[0] = [("o", path)]
    asked.find("mine", path)
    asked.publisher.check_targets(0)
    asked.publisher.publish(0, MADE)
    assert asked.published == [(path, "f-new", False)]


def test_what_is_at_the_path_counts_when_the_output_is_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.find("mine")
    (tmp_path / "out.txt").unlink()  # moved away while the step ran
    desk.publisher.publish(0, MADE)
    assert len(desk.published) == 1
    edited = Desk(tmp_path)
    edited.find("old")
    edited.facts.ours["out.txt"] = "f-old"
    (tmp_path / "out.txt").write_text("mine")
    error = edited.publisher.try_publish(0, MADE)
    assert isinstance(error, CannotRun) and "--overwrite" in error.fix and not edited.published


def test_a_step_without_published_outputs_may_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.find("mine")
    desk.publisher.check_targets(1)


def test_an_error_is_returned_unless_a_later_attempt_can_succeed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.publisher.try_publish(0, MADE) is None
    other = StepResult(True, {"o": "f-other"}, {})
    desk.facts.there["out.txt"] = desk.facts.ours["out.txt"] = "f-old"
    desk.error = CannotRun("no space")
    assert desk.publisher.try_publish(0, other) is desk.error
    desk.error = StoreUnavailable("no answer")
    with pytest.raises(StoreUnavailable):
        desk.publisher.try_publish(0, other)


def test_only_results_are_published_at_the_end_of_a_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.targets[1] = [("o", "b.txt")]
    desk.publisher.publish_all({0: MADE, 1: NOTHING._replace(outputs={"o": "f-half"})})
    assert desk.published == [("out.txt", "f-new", False)]
    desk.publisher.publish_all({})
    assert len(desk.published) == 1
