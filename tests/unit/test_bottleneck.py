"""Where the time of a step went decides one verdict, by rules that are stated, and the advice names inputs that there are."""

from __future__ import annotations

from typing import Any

import pytest

from runner.advice.bottleneck import PARTS, average_phases, judge


def steps(count: int = 3, **seconds: float) -> list[dict[str, float]]:
    return [
        {"step": n + 1, **{f"time_{name}": value for name, value in seconds.items()}}
        for n in range(count)
    ]


def verdict(
    inputs: dict[str, Any] | None = None, gpu: bool = True, **seconds: float
) -> tuple[str, str]:
    found = average_phases(steps(**seconds))
    assert found is not None
    said = judge(found, inputs or {}, gpu=gpu)
    return said.word, "\n".join((said.why, *said.advice))


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("LATENCY-BOUND", {"step": 10, "tool": 5.1, "model": 4.9}),
        ("BALANCED", {"step": 10, "tool": 5.0, "model": 5.0}),
        ("DATA-BOUND", {"step": 10, "data": 3.1, "model": 6.9}),
        ("BALANCED", {"step": 10, "data": 2.5, "model": 7.5}),
        ("THROUGHPUT-BOUND", {"step": 10, "generation": 4, "model": 4, "optimizer": 0.1}),
        ("THROUGHPUT-BOUND", {"step": 10, "communication": 4, "model": 4.1}),
        ("BALANCED", {"step": 10, "generation": 4, "model": 4}),
        ("BALANCED", {"step": 10, "model": 5, "checkpoint": 5}),
        (
            "LATENCY-BOUND",
            {"step": 10, "tool": 5.5, "data": 3.5, "model": 1},
        ),  # both hold: the greater comes first
    ],
)
def test_a_verdict_is_by_shares_of_a_step(word: str, seconds: dict[str, float]) -> None:
    assert verdict(**seconds)[0] == word


def test_what_is_not_named_is_other_and_all_parts_are_the_whole() -> None:
    found = average_phases(steps(step=10, data=1, model=6))
    assert (
        found is not None
        and found.seconds == 10
        and found.parts == {"data": 1, "model": 6, "other": 3}
    )
    assert found.share(*PARTS) == pytest.approx(1)


def test_parts_that_are_more_than_the_step_are_the_step() -> None:
    found = average_phases(steps(step=1, model=6, data=2))
    assert found is not None and found.seconds == 8


def test_the_first_step_is_left_out_where_more_follow() -> None:
    lines = [*steps(1, step=100, model=100), *steps(2, step=1, model=1)]
    found = average_phases(lines)
    assert found is not None and found.seconds == 1 and found.steps == 2
    alone = average_phases(lines[:1])
    assert alone is not None and alone.seconds == 100


def test_lines_without_times_are_no_breakdown() -> None:
    assert average_phases([]) is None
    assert average_phases([{"step": 1, "loss": 2.0}]) is None
    assert (
        average_phases([{"step": 1, "time_model": "long"}, {"step": 2, "time_model": True}]) is None
    )
    assert average_phases([{"step": 1, "time_model": 0}]) is None


def test_a_line_between_without_times_changes_nothing() -> None:
    lines = steps(step=10, model=9)
    found = average_phases([lines[0], {"eval_loss": 2.0}, *lines[1:]])
    assert found is not None and found.seconds == 10 and found.steps == 2


def test_advice_is_in_the_names_and_values_of_the_recipes_inputs() -> None:
    assert (
        "raise micro_batch (micro_batch is 2)" in verdict({"micro_batch": 2}, step=10, model=9)[1]
    )
    assert "micro_batch" not in verdict(step=10, model=9)[1]
    assert (
        "checkpoint_activations=false"
        in verdict({"checkpoint_activations": True}, step=10, model=9)[1]
    )
    assert "raise workers (workers is 4)" in verdict({"workers": 4}, step=10, data=9)[1]
    assert (
        "lower max_completion_length (max_completion_length is 256)"
        in verdict({"max_completion_length": 256}, step=10, generation=9)[1]
    )
    assert "save_every is 5" in verdict({"save_every": 5}, step=10, model=5, checkpoint=5)[1]
    assert (
        "fewer optimizer updates"
        in verdict({"global_batch": 8}, step=10, model=6, communication=3)[1]
    )
    assert "asynchronous" in verdict(step=10, tool=9)[1]
    assert "did not report the phase of 70%" in verdict(step=10, model=3)[1]


def test_a_batch_that_is_whole_is_not_raised_and_without_a_gpu_one_is_what_helps() -> None:
    assert "micro_batch" not in verdict({"micro_batch": 8, "global_batch": 8}, step=10, model=9)[1]
    assert (
        "raise micro_batch" in verdict({"micro_batch": 4, "global_batch": 8}, step=10, model=9)[1]
    )
    word, said = verdict({"micro_batch": 4, "global_batch": 8}, gpu=False, step=10, model=9)
    assert (
        word == "THROUGHPUT-BOUND"
        and "the step ran on the CPU" in said
        and "micro_batch" not in said
    )


def test_the_times_of_prime_rl_are_read_and_those_of_its_orchestrator_are_not_mixed_in() -> None:
    lines: list[dict[str, Any]] = []
    for step in range(4):
        lines += [
            {"step": step, "loss/mean": 0.1},
            {
                "step": step,
                "time/step": 10.0,
                "time/wait_for_batch": 6.0,
                "time/load_data": 0.1,
                "time/forward_backward": 3.0,
                "time/broadcast_weights": 0.5,
                "time/save_ckpt": 0.0,
            },
            {"step": step, "time/step": 40.0, "time/wait_for_policy": 1.0, "time/save_ckpt": 30.0},
            {"step": step, "system/disk": 1.0},
        ]
    found = average_phases(lines)
    assert found is not None and (found.steps, found.seconds) == (3, 10.0)
    assert found.parts["rollouts"] == 6.0 and "checkpoint" not in found.parts
    said = judge(found, {"infer_gpus": 1}, gpu=True)
    assert said.word == "LATENCY-BOUND" and "60% of a step" in said.why
    assert said.advice[0].startswith("switch to a local executor")
    assert any("infer_gpus is 1" in each for each in said.advice)
