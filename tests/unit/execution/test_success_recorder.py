"""What is stored of an attempt that succeeded, and what still fails it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from runner.errors import Infrastructure, Invalid, Problem
from runner.execution.session import preview
from runner.execution.steps import success_recorder
from runner.execution.steps.diverging import DivergedLosses
from runner.execution.terms import Choice
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, runs_for, writes

RECIPE = "steps: {a: {run: 'true', deps: [in.txt], outputs: {o: a.txt}}}"


@pytest.fixture(autouse=True)
def _input(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("given")


def test_a_success_has_its_duration_and_is_up_to_date_in_the_next_run(tmp_path: Path) -> None:
    async def takes_two_seconds(job: StartedJob) -> Exit:
        await writes(a="1")(job)
        return Exit(0, started=100.0, ended=102.25)

    run = SimulatedRun(tmp_path, RECIPE, {"a": takes_two_seconds})
    assert run.run().state == "COMPLETED" and run.last_of("a").data["seconds"] == 2.25
    assert (tmp_path / "a.txt").read_text() == "1"
    again = SimulatedRun(tmp_path, RECIPE, {"a": exits(1)})
    assert again.run().state == "COMPLETED" and not again.started


def test_the_duration_without_times_of_the_agent_counts_from_the_start_of_the_attempt(
    tmp_path: Path,
) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"a": runs_for(100.0, writes(a="1"))})
    run.run()
    assert 100.0 <= float(str(run.last_of("a").data["seconds"])) < 110.0


def test_outputs_of_a_library_recipe_are_not_published_before_the_end_of_the_run(
    tmp_path: Path,
) -> None:
    async def belongs_to_the_library(run: SimulatedRun) -> None:
        await run.until(lambda: run.loop)
        run.own.steps.survey.library = True

    program = runs_for(100.0, writes(a="1"))
    run = SimulatedRun(tmp_path, RECIPE, {"a": program}, then=belongs_to_the_library)
    assert run.run().state == "COMPLETED" and not (tmp_path / "a.txt").exists()


def test_the_result_of_an_input_that_changed_meanwhile_is_used_but_not_cached(
    tmp_path: Path,
) -> None:
    async def program(job: StartedJob) -> Exit:
        (tmp_path / "in.txt").write_text("edited")
        return await writes(a="1")(job)

    run = SimulatedRun(tmp_path, RECIPE, {"a": program})
    assert run.run().state == "COMPLETED"
    note = str(run.last_of("a").data["note"])
    assert note.startswith("in.txt changed during the step") and "the next run repeats" in note
    (tmp_path / "in.txt").write_text("given")
    again = SimulatedRun(tmp_path, RECIPE, {"a": writes(a="2")})
    again.run()
    assert again.started == ["a"]


@pytest.mark.parametrize(
    ("declared", "reported", "warnings"),
    [
        ("{file: gone.json}", "", ["no metrics: there is no file `gone.json`"]),
        (
            "{file: a.txt}",
            "",
            ["no metrics: `a.txt` has no line that is a JSON object with numbers"],
        ),
        (
            "{pattern: 'loss=(?P<loss>[0-9]+)'}",
            "",
            ["no metrics: the pattern `loss=(?P<loss>[0-9]+)` matches no line of the log"],
        ),
        (
            "true",
            "loss 0.5",
            ["no metrics: no line in $RECIPE_METRICS is a JSON object with numbers"],
        ),
        ("true", '{"warning": "few rows"}', ["few rows"]),
        ("true", "", None),
    ],
)
def test_metrics_that_are_declared_but_not_found_are_a_warning(
    tmp_path: Path, declared: str, reported: str, warnings: list[str] | None
) -> None:
    async def program(job: StartedJob) -> Exit:
        if reported:
            job.report(f"{reported}\n")
        return await writes(a="no JSON")(job)

    recipe = RECIPE.replace("outputs", f"metrics: {declared}, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": program})
    assert run.run().state == "COMPLETED"
    data = run.last_of("a").data
    assert "metrics" not in data and data.get("warnings") == warnings


def test_metrics_that_cannot_be_read_are_said_and_do_not_fail_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> dict[str, object]:
        raise Invalid([Problem("pattern-too-slow", "the pattern takes too long")])

    monkeypatch.setattr(success_recorder.attempt_result, "read_metrics", refuse)
    recipe = RECIPE.replace("outputs", "metrics: {pattern: 'loss=(?P<loss>.*)'}, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": writes(a="1")})
    assert run.run().state == "COMPLETED" and "warnings" not in run.last_of("a").data
    assert "a: cannot read its metrics: the pattern takes too long" in run.heard.words


@pytest.mark.parametrize(("policy", "state"), [("", "COMPLETED"), ("on_nan: stop, ", "FAILED")])
def test_a_loss_that_is_no_number_is_a_warning_or_a_failure_as_asked(
    tmp_path: Path, policy: str, state: str
) -> None:
    async def diverges(job: StartedJob) -> Exit:
        job.report('{"step": 1, "loss": NaN}\n')
        return await writes(a="1")(job)

    recipe = RECIPE.replace("outputs", f"metrics: true, {policy}outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": diverges})
    assert run.run().state == state
    if state == "COMPLETED":
        assert run.last_of("a").data["warnings"] == ["loss is nan at step 1"]
    else:
        assert not (tmp_path / "a.txt").exists()


def test_a_loss_that_is_no_number_is_told_at_once_and_stored_though_nobody_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def tell(_self: object, _id: str, _attempt: object, words: str) -> None:
        told.append(words)
        raise Infrastructure("the database does not answer")

    async def diverges(job: StartedJob) -> Exit:
        job.report('{"step": 1, "loss": NaN}\n')
        return await writes(a="1")(job)

    monkeypatch.setattr(DivergedLosses, "tell", tell)
    recipe = RECIPE.replace("outputs", "metrics: true, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": diverges})
    assert run.run().state == "COMPLETED"
    assert told == ["loss is nan at step 1"] == run.last_of("a").data["warnings"]


def test_warnings_numbers_and_left_processes_are_stored_with_the_end(tmp_path: Path) -> None:
    async def program(job: StartedJob) -> Exit:
        job.report('{"warning": "few rows"}\n{"loss": 0.5}\n')
        await writes(a="1")(job)
        return Exit(0, strays=2)

    recipe = RECIPE.replace("outputs", "metrics: true, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": program})
    assert run.run().state == "COMPLETED"
    data = run.last_of("a").data
    assert (data["metrics"], data["warnings"], data["strays"]) == ({"loss": 0.5}, ["few rows"], 2)
    with Workspace.open(tmp_path) as ws:
        (row,) = ws.store.runs.attempts(run.run_id)
        survey = preview(ws, Request("./recipe.yaml", {}), Choice())
        trace = survey.facts.traces.get(row.key)
    assert trace is not None and trace.facts["warnings"] == ["few rows"]


def test_numbers_of_a_file_are_those_of_the_step_from_its_end_on(tmp_path: Path) -> None:
    async def program(job: StartedJob) -> Exit:
        (job.folder / "scores.json").write_text('{"loss": 7}')
        return await writes(a="1")(job)

    recipe = RECIPE.replace("outputs", "metrics: {file: scores.json}, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": program})
    assert run.run().state == "COMPLETED"
    with Workspace.open(tmp_path) as ws:
        assert "7" in ws.store.runs.steps(run.run_id)["a"].numbers


def test_the_result_of_a_forced_step_replaces_the_one_before(tmp_path: Path) -> None:
    SimulatedRun(tmp_path, RECIPE, {"a": writes(a="1")}).run()
    forced = Choice(again=("a",))
    SimulatedRun(tmp_path, RECIPE, {"a": writes(a="2")}, choice=forced).run()
    (tmp_path / "a.txt").unlink()
    again = SimulatedRun(tmp_path, RECIPE, {"a": exits(1)})
    assert again.run().state == "COMPLETED" and not again.started
    assert (tmp_path / "a.txt").read_text() == "2"


def test_a_resumed_training_that_repeats_finished_steps_is_told(tmp_path: Path) -> None:
    async def resumes(run: SimulatedRun) -> None:
        await run.until(lambda: run.agents and run.agents[""].started)
        run.attempt_of("a").resumed_step = 20

    async def trains(job: StartedJob) -> Exit:
        job.report('{"step": 5, "loss": 1.0}\n')
        return await writes(a="1")(job)

    recipe = RECIPE.replace("outputs", "metrics: true, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": runs_for(10.0, trains)}, then=resumes)
    assert run.run().state == "COMPLETED"
    (words,) = [words for words in run.heard.words if "resume from step 20" in words]
    assert words.startswith("a: ") and "its first report is of step 5" in words


def test_an_output_that_cannot_be_published_fails_the_step_but_is_cached(tmp_path: Path) -> None:
    async def program(job: StartedJob) -> Exit:
        (tmp_path / "a.txt").write_text("mine")
        return await writes(a="1")(job)

    run = SimulatedRun(tmp_path, RECIPE, {"a": program})
    (failure,) = run.run().failures
    assert failure.kind == "publish" and (tmp_path / "a.txt").read_text() == "mine"
    (tmp_path / "a.txt").unlink()
    again = SimulatedRun(tmp_path, RECIPE, {"a": exits(1)})
    assert again.run().state == "COMPLETED" and not again.started
    assert (tmp_path / "a.txt").read_text() == "1"


def test_files_of_a_success_are_deleted_once_it_is_stored(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"a": writes(a="1", b="more")})
    assert run.run().state == "COMPLETED"
    assert not [path for path in (tmp_path / ".recipe/attempts").rglob("*") if path.name == "b.txt"]
    with Workspace.open(tmp_path) as ws:
        assert [row.outcome for row in ws.store.runs.attempts(run.run_id)] == ["done"]
