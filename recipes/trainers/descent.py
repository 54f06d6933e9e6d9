"""What a step of training is made of: its rate, gradients added up over processes, the optimizer and its state.  Knows no models and no data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from loop import fail, needs

CLIP = 1.0  # the norm that the gradient of a step may have
BUCKET = 1 << 26  # numbers added up over the processes at a time: 256 MB of them
Learned = Mapping[str, torch.nn.Parameter]


SCHEDULES = ("cosine", "linear", "sqrt")
"""The ways down: along half a period of a cosine; at one slope; by one over the square root of the step, which never ends."""
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "prodigy")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What decides how far a step goes."""
    parser.add_argument("--learning-rate", type=float, required=True)
    for name in ("warmup-steps", "decay-steps"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="how the rate falls until decay-steps")
    parser.add_argument("--floor", type=float, default=0.1, help="the share of the learning rate that it falls to")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--weight-decay", type=float, default=0.0)


def refuse(options: argparse.Namespace) -> None:
    """End with a message where such options cannot be, or want a package that is not installed."""
    refuse_no_peak(options.warmup_steps, options.decay_steps)
    if options.optimizer == "prodigy":
        needs("prodigyopt", "optimizer prodigy", "optimizer=adamw")
    elif "8bit" in options.optimizer or "paged" in options.optimizer:
        needs("bitsandbytes", f"optimizer {options.optimizer}", "optimizer=adamw")


def made(name: str, groups: Iterable[dict[str, Any]], rate: float, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Optimizer:
    """The optimizer of that name over groups of weights, each with its `weight_decay`.

    adafactor (Shazeer & Stern 2018, arXiv 1804.04235) steps by the rate that is given, as AdamW does, and has no use for `betas`.  prodigy
    (Mishchenko & Defazio 2023, arXiv 2306.06101) finds the rate itself, and multiplies it by the one that is given.
    """
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]
    if name == "prodigy":
        from prodigyopt import Prodigy  # type: ignore[import-untyped]

        # As its authors advise for diffusion: else the first steps, or a warm-up, lead its search for the rate astray.
        prodigy: torch.optim.Optimizer = Prodigy(groups, lr=rate, betas=betas, use_bias_correction=True, safeguard_warmup=True)
        return prodigy
    from bitsandbytes.optim import AdamW  # type: ignore[import-untyped]

    eight: torch.optim.Optimizer = AdamW(groups, lr=rate, betas=betas, optim_bits=8 if "8bit" in name else 32, is_paged="paged" in name)
    return eight


class Average:
    """A moving average, over steps, of what is learned: smoother than the weights of any one step (Polyak & Juditsky 1992).

    Each step it keeps `decay` of itself, in the beginning less: (1 + step) / (10 + step), or the first weights would be in it for long.
    """

    def __init__(self, learned: Learned, decay: float) -> None:
        self._learned, self._decay = learned, decay
        self._held = {name: weight.detach().clone() for name, weight in learned.items()}

    def add(self, step: int) -> None:
        """The weights as they are after this step, from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for name, weight in self._learned.items():
            self._held[name].lerp_(weight.detach(), share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """While it lasts the model has the average in the place of its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"average.{name}": value for name, value in self._held.items()}

    def restore(self, found: Mapping[str, torch.Tensor]) -> None:
        """Put back what `tensors` took."""
        for name, value in self._held.items():
            value.copy_(found[f"average.{name}"])

    def _swap(self) -> None:
        for name, weight in self._learned.items():
            weight.data, self._held[name] = self._held[name], weight.data


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


def tensors(optimizer: torch.optim.Optimizer, learned: Learned, scaler: torch.amp.GradScaler | None = None) -> dict[str, torch.Tensor]:
    """All that the next step depends on, but for its number: weights, the optimizer's state, the scaler of fp16.  The tensors are those in use.

    `state.KEY.NAME` is what the optimizer keeps for a weight, `group.KEY.N` a number that it keeps for a group: 64 bits are a number of Python's.
    """
    found: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, weight in learned.items():
        found[f"weight.{name}"] = weight.detach()
        for key, value in optimizer.state.get(weight, {}).items():
            held = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=_wide(value))
            # bitsandbytes has one table of levels for all weights, and a file of safetensors has no tensor twice.
            found[f"state.{key}.{name}"] = held.clone() if held.data_ptr() in places else held
            places.add(held.data_ptr())
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            # The rate is a function of the step.
            if type(value) in (int, float) and key not in ("lr", "initial_lr"):
                found[f"group.{key}.{number}"] = torch.tensor(value, dtype=_wide(value))
    # With fp16 a step whose gradient overflowed is left out, so the optimizer's count is not ours.
    if scaler is not None and scaler.is_enabled():
        state = scaler.state_dict()
        found["scaler"] = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)
    return found


def restore(
    optimizer: torch.optim.Optimizer, learned: Learned, found: Mapping[str, torch.Tensor], scaler: torch.amp.GradScaler | None = None
) -> None:  # fmt: skip
    """Put back what `tensors` took."""
    optimizer.state.clear()
    for whole, value in found.items():
        part, _, rest = whole.partition(".")
        key, _, name = rest.partition(".")
        if part == "weight":
            with torch.no_grad():
                learned[rest].copy_(value)
        elif part == "state":
            weight = learned[name]
            # AdamW counts its steps on the CPU.
            where = weight.device if value.dim() else "cpu"
            optimizer.state[weight][key] = value.item() if value.dtype in (torch.int64, torch.float64) else value.to(where, copy=True)
        elif part == "group":
            optimizer.param_groups[int(name)][key] = value.item()
    if scaler is not None and scaler.is_enabled():
        scale, growth = found["scaler"].tolist()
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})


def _wide(value: float) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64
