"""Instances that fall behind are stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

from drivers.base import Exit
from runner.execution.steps.assembly import Options
from runner.planning.halving import Goal
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob

RECIPE = """
steps:
  fit: {matrix: {x: [1, 2]}, run: "echo {{ matrix.x }}", metrics: %s}
"""


def reports(loss: float, *, ends: bool) -> Program:
    async def program(job: StartedJob) -> Exit:
        for step in (1, 2, 4):
            job.report(f'{{"step": {step}, "loss": {loss}}}\n')
        if ends:
            return Exit(0)
        await job.stopping.wait()
        return Exit(None, reason="stopped")

    return program


def prints(loss: float, *, ends: bool) -> Program:
    async def program(job: StartedJob) -> Exit:
        for step in (1, 2, 4):
            job.print(f"step={step} loss={loss}\n")
        if ends:
            return Exit(0)
        await job.stopping.wait()
        return Exit(None, reason="stopped")

    return program


def test_the_worse_instance_is_stopped_and_the_better_one_completes(tmp_path: Path) -> None:
    programs = {"fit[x=1]": reports(1.0, ends=True), "fit[x=2]": reports(2.0, ends=False)}
    options = Options(jobs=2, stop_early=Goal("loss", least=True))
    run = SimulatedRun(tmp_path, RECIPE % "true", programs, options=options)
    report = run.run()
    assert report.counts == {"DONE": 1, "SKIPPED": 1} and not report.failures
    words = "loss 2 at step 4 is below the better half of 2 instances"
    assert f"fit[x=2] stopped early: {words}" in run.heard.words
    assert run.agents[""].stopped == ["fit[x=2]"] and run.last_of("fit[x=2]").after == "SKIPPED"
    assert run.last_of("fit[x=2]").data["detail"] == words


def test_an_instance_that_takes_its_time_to_save_is_told_once(tmp_path: Path) -> None:
    async def saves(job: StartedJob) -> Exit:
        await reports(2.0, ends=True)(job)
        await job.stopping.wait()
        await asyncio.sleep(10.0)
        return Exit(None, reason="stopped")

    programs = {"fit[x=1]": reports(1.0, ends=True), "fit[x=2]": saves}
    options = Options(jobs=2, stop_early=Goal("loss", least=True))
    run = SimulatedRun(tmp_path, RECIPE % "true", programs, options=options)
    assert run.run().counts == {"DONE": 1, "SKIPPED": 1}
    assert len([words for words in run.heard.words if "stopped early" in words]) == 1
    assert run.agents[""].stopped == ["fit[x=2]"]


def test_numbers_in_the_log_are_compared_too(tmp_path: Path) -> None:
    programs = {"fit[x=1]": prints(1.0, ends=True), "fit[x=2]": prints(2.0, ends=False)}
    options = Options(jobs=2, stop_early=Goal("loss", least=True))
    pattern = r"""'step=(?P<step>\d+) loss=(?P<loss>[\d.]+)'"""
    run = SimulatedRun(tmp_path, RECIPE % f"{{pattern: {pattern}}}", programs, options=options)
    assert run.run().counts == {"DONE": 1, "SKIPPED": 1}


def test_without_a_goal_none_is_stopped(tmp_path: Path) -> None:
    programs = {"fit[x=1]": reports(1.0, ends=True), "fit[x=2]": reports(2.0, ends=True)}
    run = SimulatedRun(tmp_path, RECIPE % "true", programs)
    assert run.run().counts == {"DONE": 2} and not run.agents[""].stopped
