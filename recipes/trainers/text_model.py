"""Batches from a token store, and how well a model predicts a split of it.  Does not know training.

In place of those of `sft_model`, which is released and stays as it is: there, tokens that are only read (a prompt, a question) get the target 65436
or 4294967196 instead of −100, since numpy takes −100 for one of the store's unsigned integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sft_model import Batch, loss_of
from tokens import Tokens

NOBODY = -100  # the target that nobody learns


def batch_of(tokens: Tokens, sequences: Sequence[int], device: torch.device) -> Batch:
    """Sequences side by side: tokens, positions and targets, each of `len(sequences)` × the length of the longest."""
    read = [tokens.documents(sequence) for sequence in sequences]
    width = max(sum(len(ids) for ids, _ in documents) for documents in read)
    shape = (len(sequences), width)
    ids, positions, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, NOBODY, np.int64)
    for row, documents in enumerate(read):
        at = 0
        for document, learned in documents:
            end = at + len(document)
            ids[row, at:end] = document
            # To the end of the row: padding goes on counting, so that it does not look like documents of one token.
            positions[row, at:] = np.arange(width - at)
            targets[row, at : end - 1] = np.where(learned[1:], document[1:].astype(np.int64), NOBODY)
            at = end
    return Batch(*(torch.from_numpy(array).to(device) for array in (ids, positions, targets)))


def surprise(model: torch.nn.Module, tokens: Tokens, sequences: Sequence[int], size: int, device: torch.device) -> tuple[float, int]:
    """The sum of −ln p over the learned tokens of many sequences, `size` at a time, and the number of those tokens."""
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for at in range(0, len(sequences), size):
            batch = batch_of(tokens, sequences[at : at + size], device)
            total += float(loss_of(model, batch))
            count += int((batch.targets != NOBODY).sum())
    model.train(was_training)
    return total, count
