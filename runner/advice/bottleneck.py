"""Find the bottleneck of a training from its step times.

Trainers report seconds per optimizer step: `time_step` for the whole step, and `time_data`,
`time_model` and so on for its phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..language.values import is_number

Word = Literal["LATENCY-BOUND", "DATA-BOUND", "THROUGHPUT-BOUND", "BALANCED"]

PARTS: Final = {
    "data": "loading and preparing batches",
    "generation": "generating answers",
    "tool": "tool calls, rewards and environments",
    "rollouts": "waiting for rollouts",
    "model": "forward and backward",
    "optimizer": "optimizer update",
    "communication": "gradient synchronization between processes",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluation",
    "other": "time that the trainer did not report",
}
OF_PRIME: Final = {
    "step": "time/step",
    "rollouts": "time/wait_for_batch",
    "data": "time/load_data",
    "model": "time/forward_backward",
    "communication": "time/broadcast_weights",
    "checkpoint": "time/save_ckpt",
}
"""Metric names of prime-rl's trainer for the same phases."""
OF_ORCHESTRATOR: Final = ("time/wait_for_policy", "time/wait_for_ckpt", "time/generate_completions")
"""Times that only prime-rl's orchestrator reports; its steps overlap with the trainer's."""
TRAINING: Final = ("model", "optimizer", "communication")
TOOL, DATA, WORK = 0.50, 0.30, 0.80
"""Thresholds as fractions of a step: tools above TOOL are LATENCY-BOUND, data above DATA is
DATA-BOUND, generation plus training above WORK is THROUGHPUT-BOUND.
"""

_LOCAL_EXECUTOR: Final = 'switch to a local executor if tools run on other machines (`executor_backend = "local"`, runtime `subprocess`)'


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Mean seconds of a training step and of its phases, over `steps` steps."""

    steps: int
    seconds: float
    parts: Mapping[str, float]

    def share(self, *names: str) -> float:
        return sum(self.parts.get(name, 0.0) for name in names) / self.seconds


@dataclass(frozen=True, slots=True)
class Judgement:
    """The diagnosed bottleneck, its reason, and advice in order of benefit."""

    word: Word
    why: str
    advice: tuple[str, ...]


def is_timed(line: Mapping[str, Any]) -> bool:
    """Return True if a metrics line contains the phase times of a trainer's step."""
    has_times = any(_seconds(line, name) is not None for name in PARTS)
    return has_times and not any(name in line for name in OF_ORCHESTRATOR)


def average_phases(lines: Iterable[Mapping[str, Any]]) -> Breakdown | None:
    """Return the mean phase times from metrics lines, one line per step; None without times.

    The first step is skipped if more follow, because it includes compilation and memory allocation.
    """
    timed = [line for line in lines if is_timed(line)]
    if len(timed) > 1:
        timed = timed[1:]
    totals: dict[str, float] = {}
    whole = 0.0
    for line in timed:
        parts: dict[str, float] = {}
        for name in PARTS:
            reported = _seconds(line, name)
            if reported is not None:
                parts[name] = reported
        named = sum(parts.values())
        step = max(_seconds(line, "step") or 0.0, named)
        parts["other"] = parts.get("other", 0.0) + step - named
        whole += step
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    if not whole:
        return None
    count = len(timed)
    means = {name: totals[name] / count for name in PARTS if totals.get(name)}
    return Breakdown(count, whole / count, means)


def judge(found: Breakdown, inputs: Mapping[str, Any], *, gpu: bool) -> Judgement:
    """Diagnose the bottleneck by the first rule that applies.

    `inputs` are the recipe's inputs, which the advice names. `gpu`: the step ran on a GPU.
    """
    return (
        _judge_tools(found, inputs)
        or _judge_rollouts(found, inputs)
        or _judge_data(found, inputs)
        or _judge_work(found, inputs, gpu)
        or _describe_balance(found, inputs)
    )


# -- rules, in the order in which they apply --


def _judge_tools(found: Breakdown, inputs: Mapping[str, Any]) -> Judgement | None:
    tools = found.share("tool")
    if tools <= TOOL:
        return None
    why = f"tools, rewards and environments take {tools:.0%} of a step (more than {TOOL:.0%})"
    advice = (
        _LOCAL_EXECUTOR,
        "run the tool calls of a step in parallel",
        "generate the next step's answers while this step's tools run (asynchronous rollouts)",
        *_raise(inputs, "num_generations", "more answers per prompt share the waiting time"),
        "a faster GPU would not help",
    )
    return Judgement("LATENCY-BOUND", why, advice)


def _judge_rollouts(found: Breakdown, inputs: Mapping[str, Any]) -> Judgement | None:
    waits = found.share("tool", "rollouts")
    if waits <= TOOL:
        return None
    why = f"the trainer waits {waits:.0%} of a step (more than {TOOL:.0%}) for rollouts"
    busy = "if the inference GPUs are busy, generation is the bottleneck"
    advice = (
        _LOCAL_EXECUTOR,
        "run more rollouts in parallel, so that tool calls and generation overlap",
        *_raise(inputs, "infer_gpus", busy),
        "a faster GPU for the trainer would not help",
    )
    return Judgement("LATENCY-BOUND", why, advice)


def _judge_data(found: Breakdown, inputs: Mapping[str, Any]) -> Judgement | None:
    data = found.share("data")
    if data <= DATA:
        return None
    why = f"the model waits for data {data:.0%} of a step (more than {DATA:.0%})"
    advice = (
        *_raise(inputs, "workers", "more data-loading workers"),
        "cache tokens, latents and text embeddings in a separate step that runs once",
        "keep the data on a local disk of the training machine, in few large files",
    )
    return Judgement("DATA-BOUND", why, advice)


def _judge_work(found: Breakdown, inputs: Mapping[str, Any], gpu: bool) -> Judgement | None:
    work = found.share("generation", *TRAINING)
    if work <= WORK:
        return None
    why = f"generation and training take {work:.0%} of a step (more than {WORK:.0%})"
    return Judgement("THROUGHPUT-BOUND", why, _throughput(found, inputs, gpu))


def _describe_balance(found: Breakdown, inputs: Mapping[str, Any]) -> Judgement:
    """Return the judgement of a step without a bottleneck, with advice for its large phases."""
    largest = max(found.parts, key=lambda name: found.parts[name])
    advice = [f"the largest part is {PARTS[largest]}, {found.share(largest):.0%}"]
    for part, limit, name, remedy in (
        ("checkpoint", 0.1, "save_every", "save less often"),
        ("evaluation", 0.2, "eval_every", "evaluate less often"),
    ):
        share = found.share(part)
        if share > limit:
            advice.append(f"{PARTS[part]} takes {share:.0%}: {remedy}{_now(inputs, name)}")
    other = found.share("other")
    if other > 0.2:
        advice.append(f"the trainer did not report the phase of {other:.0%} of a step")
    return Judgement("BALANCED", "no phase stands out", tuple(advice))


def _throughput(found: Breakdown, inputs: Mapping[str, Any], gpu: bool) -> tuple[str, ...]:
    """Return advice for a computation-bound step, for its largest phase."""
    if not gpu:
        return ("use a GPU: the step ran on the CPU, which is many times slower",)
    if found.share("generation") > found.share(*TRAINING):
        return (
            "generate answers with vLLM, on separate GPUs or the same ones",
            *_lower(inputs, "max_completion_length", "shorter answers"),
            "a GPU with more memory bandwidth: generation reads every weight for each token",
        )
    if found.share("communication") > 0.25:
        return (
            f"gradient synchronization takes {found.share('communication'):.0%}: fewer, larger GPUs, or a faster link between them",
            *_raise(inputs, "global_batch", "fewer optimizer updates for the same data"),
        )
    advice: list[str] = []
    batch = inputs.get("micro_batch")
    # A micro batch cannot be larger than the global batch.
    is_largest = batch is not None and batch == inputs.get("global_batch")
    if not is_largest:
        why = "larger batches use the GPU better, if memory allows"
        advice += _raise(inputs, "micro_batch", why)
    if inputs.get("checkpoint_activations") is True:
        advice.append("checkpoint_activations=false, if memory allows: a quarter less computation")
    advice.append("a faster GPU, or more GPUs: the step is limited by computation")
    return tuple(advice)


def _raise(inputs: Mapping[str, Any], name: str, why: str) -> tuple[str, ...]:
    return (f"raise {name}{_now(inputs, name)}: {why}",) if name in inputs else ()


def _lower(inputs: Mapping[str, Any], name: str, why: str) -> tuple[str, ...]:
    return (f"lower {name}{_now(inputs, name)}: {why}",) if name in inputs else ()


def _now(inputs: Mapping[str, Any], name: str) -> str:
    return f" ({name} is {inputs[name]})" if inputs.get(name) is not None else ""


def _seconds(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(f"time_{name}", line.get(OF_PRIME.get(name, "")))
    return float(value) if is_number(value) and value >= 0 else None
