"""What of a model is learned, and at which rate: LoRA on all linear layers, embeddings whole, or every weight.  Does not know training."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from loop import draw

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


class Group(NamedTuple):
    """Weights that are learned alike."""

    weights: list[torch.nn.Parameter]
    times: float  # what the learning rate is multiplied by
    decay: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """What decides an adapter."""
    parser.add_argument("--method", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rank-stabilized", action="store_true", help="scale by alpha / sqrt(rank)")
    parser.add_argument("--dora", action="store_true", help="learn direction and size of each column apart")
    parser.add_argument("--train-embeddings", action="store_true")
    parser.add_argument("--embedding-rate", type=float, default=1.0, help="what the learning rate is multiplied by for the embeddings")


def lora(options: argparse.Namespace, task: str, base: PreTrainedModel | None = None) -> LoraConfig | None:
    """LoRA on all linear layers of a model for `task` (peft's name: CAUSAL_LM, SEQ_CLS), None where all weights are learned.

    `base` is what it goes on, for those who may ask for learned embeddings.
    """
    if options.method == "full":
        return None
    from peft import LoraConfig

    whole, tied = None, False
    if base is not None and options.train_embeddings:
        tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
        # One matrix used twice is learned once: peft keeps the other use on it.
        kept = [base.get_input_embeddings(), *([] if tied else [base.get_output_embeddings()])]  # type: ignore[no-untyped-call]
        whole = [name.rpartition(".")[2] for name, module in base.named_modules() if module in kept]
    return LoraConfig(
        task_type=task,
        r=options.rank,
        lora_alpha=options.alpha,
        # Kalajdzievski, 2023 (rsLoRA): alpha / sqrt(rank) keeps the size of what is learned as the rank grows; alpha / rank makes it vanish.
        use_rslora=options.rank_stabilized,
        use_dora=options.dora,  # Liu and others, 2024, arXiv:2402.09353
        lora_dropout=options.dropout,
        target_modules="all-linear",
        modules_to_save=whole,
        ensure_weight_tying=tied,
    )


def adapted(base: PreTrainedModel, options: argparse.Namespace, task: str = "CAUSAL_LM") -> Any:
    """The base with its adapter for `task`, drawn from the seed, or the base itself where all of it is learned."""
    config = lora(options, task, base)
    if config is None:
        return base
    from peft import get_peft_model

    # Drawn on the CPU, hence the same on every kind of device.
    draw("adapter", options.seed)
    return get_peft_model(base, config)


def noise(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Let the adapter's dropout, and the noise on the embeddings, act where gradients are taken, and nowhere else.

    What a model writes, and what it is compared with, is then without: TRL has it in training mode there, too.  And where TRL takes the base's own
    dropout away it takes the adapter's with it, which is given back.
    """
    adapters = [module for name, module in model.named_modules() if ".lora_dropout." in name and isinstance(module, torch.nn.Dropout)]
    for module in adapters:
        module.p = options.dropout
    for module in [*adapters, *([model.get_input_embeddings()] if options.neftune else [])]:  # type: ignore[operator]
        module.register_forward_pre_hook(_as_gradients)


def _as_gradients(module: torch.nn.Module, _: object) -> None:
    module.train(torch.is_grad_enabled())


def groups(model: Any, options: argparse.Namespace) -> list[Group]:
    """The learned weights: embeddings have a rate of their own, and only matrices decay."""
    inner = getattr(model, "transformers_model", model)  # what sentence-transformers has one of among its modules
    both = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    embeddings = {id(weight) for module in both if module is not None for weight in module.parameters()}
    found: dict[tuple[float, float], Group] = {}
    for _, weight in learned(model):
        times, decay = options.embedding_rate if id(weight) in embeddings else 1.0, options.weight_decay if weight.dim() > 1 else 0.0
        found.setdefault((times, decay), Group([], times, decay)).weights.append(weight)
    return list(found.values())


def learned(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """The weights that are learned, in the order of their names."""
    return sorted((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
