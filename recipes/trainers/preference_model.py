"""What models make of the pairs of step `data`: rows of `prompt_ids`, `chosen_ids`, `rejected_ids`.  Does not know training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import text_record
import torch
from datasets import Dataset
from splits import Splits

ANSWERS = ("chosen", "rejected")


def record(options: argparse.Namespace, pairs: Splits) -> None:
    """Say beside the weights what those who load them have to know."""
    made = {name: getattr(options, name) for name in ("init", "method", "precision", "seed", "beta") if hasattr(options, name)}
    text_record.write(options.out, {**made, "end_token": pairs.manifest["end_token"]})


def whole(rows: Dataset) -> Dataset:
    """The same rows with the prompt before each answer, as a reward model reads them."""

    def join(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        prompts = batch["prompt_ids"]
        return {f"{name}_ids": [prompt + ids for prompt, ids in zip(prompts, batch[f"{name}_ids"], strict=True)] for name in ANSWERS}

    return rows.with_transform(join)


@torch.no_grad()
def answers_logps(model: torch.nn.Module, pairs: Dataset, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each answer given its prompt, summed over its tokens, and the number of these tokens.  Shapes: pairs × 2, chosen before rejected."""
    sums, counts = [], []
    for ids, mask, learned in _batches(pairs, size, 0, device):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        told = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0]
        sums.append((told * learned[:, 1:]).sum(-1).cpu())
        counts.append(learned[:, 1:].sum(-1).cpu())
    return torch.cat(sums).view(-1, 2).double(), torch.cat(counts).view(-1, 2)


@torch.no_grad()
def answers_rewards(model: torch.nn.Module, pairs: Dataset, size: int, device: torch.device) -> torch.Tensor:
    """The head's number for each answer.  Shape: pairs × 2, chosen before rejected."""
    # Such a model finds the last token of a text by its not being the one that fills up.
    batches = _batches(pairs, size, model.config.get_text_config().pad_token_id, device)  # type: ignore[union-attr, operator]
    found = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().cpu() for ids, mask, _ in batches]
    return torch.cat(found).view(-1, 2).double()


def _batches(pairs: Dataset, size: int, fill: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, which of them are text, which of them are answer; `size` pairs at a time, each as two rows."""
    for at in range(0, len(pairs), size):
        rows = [(row["prompt_ids"], row[f"{name}_ids"]) for row in pairs.select(range(at, min(at + size, len(pairs)))) for name in ANSWERS]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, mask, learned = (torch.full((len(rows), width), value) for value in (fill, 0, 0))
        for number, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[number, :end] = torch.tensor(prompt + answer)
            mask[number, :end] = 1
            learned[number, len(prompt) : end] = 1
        yield ids.to(device), mask.to(device), learned.to(device)
