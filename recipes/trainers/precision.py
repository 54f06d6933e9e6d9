"""Decides the arithmetic of a training: what was asked for, or what the device at hand does best.  Does not know what is trained.

In a recipe: `precision: {type: choice, default: auto, choices: [auto, bf16, fp16, "no"]}`.  accelerate's launcher does not know `auto`, so it gets
`mixed_precision: "{{ 'no' if inputs.precision == 'auto' else inputs.precision }}"`, and the program `precision: "{{ inputs.precision }}"` among its
arguments: it chooses once it sees its device.  Arithmetic decides results, so a checkpoint names what was chosen and not what was asked for.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import loop

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

ASKED = ("auto", "bf16", "fp16", "no")


def chosen(asked: str) -> str:
    """`bf16`, `fp16` or `no` (32 bits).  For `auto`: bf16 where the GPU itself computes it (NVIDIA from Ampere on), fp16 on others, `no` on a CPU.

    fp16 has no more than 65504: it wants a GradScaler, which Hugging Face's trainers and those here use.
    """
    if asked != "auto":
        return asked
    import torch

    if not torch.cuda.is_available():
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: str, kind: str) -> AbstractContextManager[object]:
    """The arithmetic of a training, for judging what it made.  `kind` of device: cuda, cpu."""
    if precision == "no":
        return nullcontext()
    import torch

    return torch.autocast(kind, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])


def start(asked: str) -> Accelerator:
    """`loop.start` with the precision chosen, whatever accelerate was launched with."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = chosen(asked)
    return loop.start()
