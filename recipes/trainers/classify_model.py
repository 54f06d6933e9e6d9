"""How well a classifier tells labels: what its answers come to, and the answers of a model to rows of tokens.  Does not know training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def figures(answers: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """What answers come to, both as numbers of labels.  Shapes: rows.

    `macro_f1` is the mean of the labels' F1, of those that are in the rows or in the answers: each counts the same, however rare.  `accuracy_of_most`
    is what always saying the most frequent label would get.
    """
    table = np.zeros((len(names), len(names)), dtype=np.int64)  # rows: what is true; columns: what was said
    np.add.at(table, (labels, answers), 1)
    right, there, said = np.diag(table), table.sum(1), table.sum(0)
    precision = np.divide(right, said, out=np.zeros(len(names)), where=said > 0)
    recall = np.divide(right, there, out=np.zeros(len(names)), where=there > 0)
    both = precision + recall
    f1 = np.divide(2 * precision * recall, both, out=np.zeros(len(names)), where=both > 0)
    return {
        "rows": len(labels),
        "accuracy": float(right.sum() / len(labels)),
        "macro_f1": float(f1[(there + said) > 0].mean()),
        "accuracy_of_most": float(there.max() / len(labels)),
        "labels": {
            name: {"rows": int(there[n]), "precision": float(precision[n]), "recall": float(recall[n]), "f1": float(f1[n])}
            for n, name in enumerate(names)
        },
        "confusion": table.tolist(),
    }


@torch.no_grad()
def logits(
    model: torch.nn.Module, rows: Dataset, tokenizer: PreTrainedTokenizerBase, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's numbers for each row, and its label.  Shapes: rows × labels, rows."""
    from transformers import DataCollatorWithPadding

    collate = DataCollatorWithPadding(tokenizer)
    found, labels = [], []
    for at in range(0, len(rows), size):
        batch = collate([rows[number] for number in range(at, min(at + size, len(rows)))]).to(device)
        labels.append(batch.pop("labels").cpu())
        found.append(model(**batch).logits.float().cpu())
    return torch.cat(found), torch.cat(labels)
