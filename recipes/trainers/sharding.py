"""How the processes of a training share one model: FSDP 2 of torch, or ZeRO of DeepSpeed, by accelerate.  Composes settings; starts nothing."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loop import fail, needs
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from transformers import TrainingArguments

KINDS = ("none", "fsdp", "zero2", "zero3")


def arguments(options: argparse.Namespace, world: int) -> dict[str, Any]:
    """What a Trainer's settings get.  Ends with a message where one process has nothing to share, or DeepSpeed is not installed."""
    kind = options.sharding
    if kind == "none":
        return {}
    if world == 1:
        fail(f"sharding {kind} shares a model among processes, and one came up: more GPUs, or sharding=none")
    if options.keep_best:
        fail(f"keep_best writes the whole model while it trains, which sharding {kind} does not do: keep_best=false, or sharding=none")
    if kind == "fsdp":
        return {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}}
    needs("deepspeed", f"sharding {kind}", "sharding=fsdp")
    return {"deepspeed": zero(int(kind[-1]))}


def begin(made: TrainingArguments) -> None:
    """Have accelerate shard on CPUs, too, which it does on GPUs alone: what is trained there is what GPUs would, and can be looked at."""
    if made.fsdp and made.device.type == "cpu":
        from accelerate import DistributedType, PartialState

        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def generating(model: Any) -> Iterator[None]:
    """While it lasts `model.generate` works where FSDP shares the weights: each token is computed by all processes, as long as any of them writes.

    An adapter's `generate` calls the model inside of it; it is led through the outermost, which gathers the weights that belong to no layer.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner._is_fsdp_managed_module = True  # what transformers asks for, and sets where it shards itself
    plain = inner.forward

    @functools.wraps(plain)
    def through(*given: Any, **named: Any) -> Any:
        inner.forward = plain
        try:
            return model(*given, **named)
        finally:
            inner.forward = through

    if inner is not model:
        inner.forward = through
    try:
        yield
    finally:
        inner.forward = plain


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's settings; `auto` is what the Trainer's own say."""
    shared: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if stage == 3:
        shared["stage3_gather_16bit_weights_on_model_save"] = True
        shared |= {name: "auto" for name in ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_bucket_size")}
    return {
        "zero_optimization": shared,
        # The optimizer is ours: ZeRO warns of any that is not its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
