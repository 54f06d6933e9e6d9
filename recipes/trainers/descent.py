"""What a step of training is made of: its rate, gradients added up over processes, the optimizer's state by name.  Knows no models and no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from loop import fail

CLIP = 1.0  # the norm that the gradient of a step may have
BUCKET = 1 << 26  # numbers added up over the processes at a time: 256 MB of them
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as torch calls them
Learned = Mapping[str, torch.nn.Parameter]


SCHEDULES = ("cosine", "linear", "sqrt")
"""The ways down: along half a period of a cosine; at one slope; by one over the square root of the step, which never ends."""


def rate_at(step: int, peak: float, warmup_steps: int, decay_steps: int, schedule: str = "cosine", floor: float = 0.1) -> float:
    """The learning rate of a step, from 1: up over the warm-up, then level, or down to `floor` of `peak` at `decay_steps`.

    Not a function of max_steps: a training continued with more steps is the one that was asked for more at once.
    """
    warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    fall = 1.0
    if decay_steps:
        # From the top of the warm-up.  The cosine is that of Loshchilov and Hutter, 2017 (SGDR, arXiv:1608.03983), equation 5, with one period.
        part = min(1.0, max(0, step - warmup_steps) / max(1, decay_steps - warmup_steps))
        if schedule == "sqrt":
            height = math.sqrt(max(1, warmup_steps) / max(1, warmup_steps, step))
            fall = max(floor, height)
        else:
            fall = floor + (1 - floor) * (0.5 * (1 + math.cos(math.pi * part)) if schedule == "cosine" else 1 - part)
    return peak * warm * fall


def refuse_no_peak(warmup_steps: int, decay_steps: int) -> None:
    """End with a message where such a rate would fall before it has risen."""
    if decay_steps and decay_steps <= warmup_steps:
        fail(f"decay_steps {decay_steps} is not beyond warmup_steps {warmup_steps}: the rate would never be at its peak")


def add_up(weights: Sequence[torch.nn.Parameter], loss: torch.Tensor, stop: bool) -> bool:
    """The gradients and the loss (a number), over all processes, in place; whether any of them was asked to stop.

    In the same order at every step, and not by DistributedDataParallel, whose buckets are laid out anew after its first: a resumed training adds up
    as one that was not disturbed does.
    """
    told = torch.stack([loss, torch.full_like(loss, float(stop))])
    torch.distributed.all_reduce(told)
    loss.copy_(told[0])
    bucket: list[torch.nn.Parameter] = []
    for number, weight in enumerate(weights, 1):
        bucket.append(weight)
        if number < len(weights) and sum(held.numel() for held in bucket) + weights[number].numel() <= BUCKET:
            continue
        flat = torch.cat([held.grad.reshape(-1) for held in bucket if held.grad is not None])
        torch.distributed.all_reduce(flat)
        at = 0
        for held in bucket:
            held.grad = flat[at : at + held.numel()].view_as(held)
            at += held.numel()
        bucket = []
    return bool(told[1] > 0)


def in_any(mine: bool, device: torch.device) -> bool:
    """Whether it is true in any process."""
    if not torch.distributed.is_initialized():
        return mine
    told = torch.tensor([float(mine)], device=device)
    torch.distributed.all_reduce(told)
    return bool(told.item() > 0)


def begin(optimizer: torch.optim.Optimizer, learned: Learned) -> None:
    """Give AdamW its state now and not at its first step, which a scaler may leave out: a checkpoint always has the same parts."""
    for weight in learned.values():
        optimizer.state[weight] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(weight) for key in MOMENTS}}


def tensors(optimizer: torch.optim.Optimizer, learned: Learned, scaler: torch.amp.GradScaler | None = None) -> dict[str, torch.Tensor]:
    """All that the next step depends on, but for its number: weights, moments, the scaler of fp16.  The tensors are those in use."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in learned.items():
        found[f"weight.{name}"] = weight.detach()
        for key in MOMENTS:
            found[f"{key}.{name}"] = optimizer.state[weight][key]
    # With fp16 a step whose gradient overflowed is left out, so the optimizer's count is not ours.
    found["optimizer.step"] = next(iter(optimizer.state.values()))["step"]
    if scaler is not None and scaler.is_enabled():
        state = scaler.state_dict()
        found["scaler"] = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)
    return found


def restore(
    optimizer: torch.optim.Optimizer, learned: Learned, found: Mapping[str, torch.Tensor], scaler: torch.amp.GradScaler | None = None
) -> None:  # fmt: skip
    """Put back what `tensors` took."""
    with torch.no_grad():
        for name, weight in learned.items():
            weight.copy_(found[f"weight.{name}"])
            optimizer.state[weight]["step"].copy_(found["optimizer.step"])
            for key in MOMENTS:
                optimizer.state[weight][key].copy_(found[f"{key}.{name}"])
    if scaler is not None and scaler.is_enabled():
        scale, growth = found["scaler"].tolist()
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})
