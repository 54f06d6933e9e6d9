"""Why an attempt failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit, HostLost, Unreachable
from runner.errors import CannotRun
from runner.execution.steps.diagnosis import Diagnosis, error_of
from runner.execution.steps.failing import Cause
from runner.language.step_options import StepOptions
from runner.planning.schedule import EARLY
from runner.planning.step import StepSpec
from runner.secrets import Masker

ROOM = (1 << 30, 1000)


class Situation:
    """What was asked of a run, and where its attempt ran."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.limit, self.is_stopping, self.early, self.diverged = "", False, "", ""
        self.image, self.node = "", 0
        self.spec = StepSpec("", "s", {})
        self.sick = self.preemptible = False
        self.elsewhere, self.leaving, self.nodes = "", "", 1
        self.log, self.room, self.problem, self.words = "", ROOM, "", ""
        self.reattached = self.stop_asked = False
        self.result, self.told = True, list[str]()
        vars(self).update(more)
        (root / "name.log").write_text(self.log)
        self.root = root

    def cause_of(self, end: Any, times: int = 1) -> Cause | None:
        async def free() -> tuple[int, int | None]:
            return self.room

        member = Of(elsewhere=self.elsewhere, leaving=self.leaving, name="h1")
        member.folder = Of(find_free_space=free)
        place: Any = Of(members=[member] * self.nodes, name="h1", record_end=self.told.append)
        log = str(self.root / "name.log")
        attempt: Any = Of(place=place, last_log=log, spec=self.spec, is_reattached=self.reattached)
        attempt.metrics_file, attempt.stop_asked = str(self.root / "name.metrics"), self.stop_asked
        attempt.result = Of(problem=self.problem, words=self.words, node=self.node)
        parts: list[Any] = [
            Of(spot=Of(is_preemptible=lambda _place: self.preemptible), name="vastai"),
            Of(container_image=lambda _spec, _place: self.image),
            Of(limit=self.limit, is_stopping=self.is_stopping),
            Of(reason_for=lambda _id: self.early),
            Of(take_sick=lambda _id: self.sick),
            Of(words_of=lambda _attempt: self.diverged),
        ]
        diagnosis = Diagnosis(*parts, Masker())
        found = None
        for _ in range(times):
            found = asyncio.run(diagnosis.cause_of("a", attempt, end))
        return found


ON_NAN = StepSpec("", "s", {}, options=StepOptions(ends_on_nan=True))
STOPPED = Exit(None, reason="stopped")


@pytest.mark.parametrize(
    ("end", "more", "cause"),
    [
        (Exit(0), {}, None),
        (CannotRun("no", fix="do"), {}, Cause("error", "no", "do")),
        (CannotRun("no"), {"limit": "60 s"}, Cause("limit", "stopped: 60 s")),
        (HostLost("gone"), {}, Cause("lost", "gone")),
        (HostLost("gone"), {"preemptible": True}, Cause("preempted", "gone")),
        (Unreachable("far"), {}, Cause("driver", "far")),
        (STOPPED, {"early": "loss is behind"}, Cause(EARLY, "loss is behind")),
        (STOPPED, {"limit": "60 s"}, Cause("limit", "stopped: 60 s")),
        (STOPPED, {"diverged": "loss is nan", "spec": ON_NAN}, Cause("nan", "loss is nan")),
        (STOPPED, {"diverged": "loss is nan"}, Cause("stopped", "stopped")),
        (STOPPED, {"spec": ON_NAN}, Cause("stopped", "stopped")),
        (STOPPED, {"leaving": "its lease ends"}, Cause("preempted", "h1: its lease ends")),
        (STOPPED, {}, Cause("stopped", "stopped")),
        (STOPPED, {"early": "x", "is_stopping": True}, Cause("stopped", "stopped")),
        (STOPPED, {"leaving": "x", "is_stopping": True}, Cause("stopped", "stopped")),
        (STOPPED, {"reattached": True, "is_stopping": True}, Cause("stopped", "stopped")),
        (
            STOPPED,
            {"sick": True},
            Cause("health", "the recipe's health check failed 3 times in a row"),
        ),
        (STOPPED._replace(detail="quota"), {}, Cause("lost", "h1 stopped the step: quota")),
        (
            STOPPED,
            {"reattached": True},
            Cause("lost", "an earlier run had stopped the step and then exited"),
        ),
        (
            Exit(0),
            {"problem": "input", "words": "x changed"},
            Cause("input", "x changed; inputs are read-only"),
        ),
        (Exit(0), {"problem": "output", "words": "no o"}, Cause("output", "no o (exit 0)")),
        (
            Exit(0),
            {"problem": "output", "words": "no o", "reattached": True},
            Cause("lost", "no o (exit 0)"),
        ),
        (Exit(0), {"problem": "full", "words": "full"}, Cause("disk", "full")),
        (Exit(0), {"problem": "disk", "words": "bad"}, Cause("disk", "bad")),
        (Exit(2), {}, Cause("exit", "exit 2")),
        (Exit(0, reason="oom"), {}, Cause("oom", "killed by the kernel: out of memory (SIGKILL)")),
        (Exit(2), {"nodes": 2, "elsewhere": "h1"}, Cause("exit", "exit 2 on node 0 (h1)")),
        (
            Exit(None, reason="lost"),
            {"elsewhere": "h1"},
            Cause(
                "lost",
                "the exit status is unknown: the agent was killed"
                " (h1 was restarted, or the process was killed there)",
            ),
        ),
        (
            Exit(None, reason="lost"),
            {},
            Cause("lost", "the exit status is unknown: the agent was killed"),
        ),
        (
            Exit(143, signal=15, reason="signal"),
            {"elsewhere": "h1", "preemptible": True},
            Cause("preempted", "killed by SIGTERM: h1 is being preempted"),
        ),
        (
            Exit(143, signal=15, reason="signal"),
            {"elsewhere": "h1", "preemptible": True, "stop_asked": True},
            Cause("signal", "killed by SIGTERM"),
        ),
        (
            Exit(143, signal=15, reason="signal"),
            {"preemptible": True},
            Cause("signal", "killed by SIGTERM"),
        ),
        (
            Exit(137, signal=9, reason="signal"),
            {"elsewhere": "h1", "preemptible": True},
            Cause("signal", "killed by SIGKILL, possibly out of memory"),
        ),
    ],
)
def test_the_cause_of_a_failure_is_told_by_its_end_and_by_what_was_asked(
    tmp_path: Path, end: Any, more: dict[str, Any], cause: Cause | None
) -> None:
    assert Situation(tmp_path, **more).cause_of(end) == cause


def test_a_step_that_kills_the_agent_three_times_has_failed(tmp_path: Path) -> None:
    lost = Exit(None, reason="lost")
    assert (cause := Situation(tmp_path).cause_of(lost, 3)) and cause.reason == "unwatched"
    assert (cause := Situation(tmp_path).cause_of(lost, 2)) and cause.reason == "lost"
    away = Situation(tmp_path, elsewhere="h1").cause_of(lost, 3)
    assert away is not None and away.reason == "lost"


def test_a_program_that_is_not_on_a_host_is_said_with_the_host(tmp_path: Path) -> None:
    cause = Situation(tmp_path, elsewhere="h1").cause_of(Exit(127))
    assert cause is not None
    assert cause.words.endswith(
        "on h1; run `recipe doctor --driver vastai` to see the installed programs"
    )
    assert "doctor" not in str(Situation(tmp_path).cause_of(Exit(127)))
    in_image = Situation(tmp_path, elsewhere="h1", image="pytorch").cause_of(Exit(127))
    assert in_image is not None and "doctor" not in in_image.words


def test_steps_that_end_otherwise_do_not_count_as_kills_of_the_agent(tmp_path: Path) -> None:
    cause = Situation(tmp_path).cause_of(Exit(2), 3)
    assert cause is not None and cause.reason == "exit"


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_training_that_makes_no_progress_is_told_from_one_without_output(
    tmp_path: Path, is_stalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.planning.causes.is_stalled", lambda *_pace: is_stalled)
    spec = StepSpec("", "s", {}, options=StepOptions(timeout=9.0, idle_timeout=8.0))
    found = [
        Situation(tmp_path, spec=spec).cause_of(end)
        for end in (Exit(1, reason="idle"), Exit(1, reason="timeout"), Exit(1))
    ]
    reasons = ["stalled", "stalled"] if is_stalled else ["idle", "timeout"]
    assert [cause.reason for cause in found if cause is not None] == [*reasons, "exit"]


def test_the_node_that_ended_first_is_said(tmp_path: Path) -> None:
    cause = Situation(tmp_path, nodes=2, elsewhere="h1", node=1).cause_of(Exit(2))
    assert cause == Cause("exit", "exit 2 on node 1 (h1)")


@pytest.mark.parametrize(("room", "reason"), [((100, 5), "disk"), (ROOM, "exit")])
def test_a_step_that_ends_badly_on_a_full_disk_has_failed_for_the_disk(
    tmp_path: Path, room: tuple[int, int], reason: str
) -> None:
    cause = Situation(tmp_path, room=room).cause_of(Exit(1))
    assert cause is not None and cause.reason == reason


def test_what_the_host_says_of_its_end_is_noted(tmp_path: Path) -> None:
    situation = Situation(tmp_path)
    situation.cause_of(STOPPED._replace(detail="quota"))
    assert situation.told == ["quota"]


@pytest.mark.parametrize(
    ("reason", "tail", "error"),
    [
        ("exit", b"x\nValueError: no rows\n", "ValueError: no rows"),
        ("exit", b"cannot go on\n", "exit 1: cannot go on"),
        ("signal", b"cannot go on\n", ""),
        ("timeout", b"ValueError: no rows\n", ""),
        ("disk", b"OSError: No space left on device\n", "OSError: No space left on device"),
        ("exit", b"", ""),
    ],
)
def test_the_error_of_a_command_is_read_from_the_end_of_its_log(
    reason: str, tail: bytes, error: str
) -> None:
    assert error_of(Cause(reason, "exit 1"), tail) == error
