"""`recipe sweep --stop-early`: what falls behind is stopped and not failed, keeps its state, and resumes from there when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support import Space

# The worse one waits after its first four reports, until it is stopped or has a checkpoint to resume from.
FIT = """
recipe: mine@1
summary: A training
inputs: {x: {type: number}}
steps:
  fit:
    run: |
      if test -e {{ state.c }}/step-4.txt; then echo again; else
        for n in 1 2 3 4; do printf '{"step": %s, "loss": %s}\\n' $n {{ inputs.x }} >> "$RECIPE_METRICS"; done
        echo half > {{ state.c }}/step-4.txt
        if test {{ inputs.x }} != 1; then exec sleep 60; fi
      fi
      printf '{"step": 8, "loss": %s}\\n' {{ inputs.x }} >> "$RECIPE_METRICS"
      echo model > {{ outputs.m }}
    state: {c: {checkpoint: "step-*.txt"}}
    outputs: {m: m.txt}
    metrics: true
  card:
    run: cp {{ steps.fit.m }} {{ outputs.card }}
    outputs: {card: card.txt}
"""
WORDS = ("sweep", "mine.yaml", "x=1,2", "--min", "loss", "-j2")


class Sweeps(NamedTuple):
    space: Space
    stopped: tuple[int, str, str]
    why: str
    runs: str
    left: tuple[int, str, str]
    whole: tuple[int, str, str]


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    """A sweep in which one is stopped, the same again, and then without --stop-early."""
    space = Space(tmp_path_factory.mktemp("space"))
    space.write("mine.yaml", FIT)
    stopped = space.command(*WORDS, "--stop-early")
    why, runs = space.command("why", "mine[x=2]/fit")[1], space.command("runs", "--json")[1]
    yield Sweeps(
        space, stopped, why, runs, space.command(*WORDS, "--stop-early"), space.command(*WORDS)
    )


def test_what_falls_behind_is_stopped_and_the_sweep_completes(sweeps: Sweeps) -> None:
    code, out, said = sweeps.stopped
    assert code == 0 and "0 failed" in said, said
    assert re.search(
        r"mine\[x=2\]/fit  stopped early \(loss 2 at step [24] is below the better half of 2 instances\)",
        said,
    ), said
    assert re.search(r"^\*  1 +1  DONE", out, re.MULTILINE) and re.search(
        r"^   2 +2  STOPPED", out, re.MULTILINE
    ), out
    assert (
        '"state": "COMPLETED"' in sweeps.runs
        and "it was stopped early: loss 2 at step" in sweeps.why
    )


def test_what_mentions_it_is_skipped(sweeps: Sweeps) -> None:
    assert "mine[x=2]/card  skipped" in sweeps.stopped[2] and re.search(
        r"mine\[x=1\]/card  \d", sweeps.stopped[2]
    )


def test_the_same_sweep_again_leaves_it_stopped(sweeps: Sweeps) -> None:
    code, out, said = sweeps.left
    assert code == 0 and "STOPPED" in out and not re.search(r"/fit  \d", said)
    assert (
        "1 instances that an earlier sweep stopped early are skipped; to continue them, omit `--stop-early`"
        in said
    )


def test_without_the_flag_it_goes_on_from_its_state(sweeps: Sweeps) -> None:
    code, out, said = sweeps.whole
    assert code == 0 and "mine[x=2]/fit: resumes from step-4.txt" in said, said
    assert "STOPPED" not in out and "again" in sweeps.space.command("logs", "mine[x=2]/fit")[1]


def test_stopping_early_needs_a_metric(space: Space) -> None:
    space.write("mine.yaml", FIT)
    code, _, said = space.command("sweep", "mine.yaml", "x=1,2", "--stop-early")
    assert code == 3 and "--stop-early requires --min or --max" in said
