"""Draws completions by seed, step and place in the batch, however the batch is shared and whatever came before.  Does not know what text is worth.

Token t of completion i is found by inverse transform sampling: the first token at which the cumulated probability exceeds u[i, t], a number of [0, 1)
from a table that is drawn anew for each step (Devroye, Non-Uniform Random Variate Generation, 1986, chapter III.2).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Draws(LogitsProcessor):
    """Leaves one token possible in each row of scores [rows, vocabulary]: the one drawn at `temperature`."""

    def __init__(self, table: torch.Tensor, temperature: float) -> None:
        self._table = table  # [rows, tokens], float64
        self._temperature = temperature
        self._at = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        likely = torch.softmax(scores.double() / self._temperature, dim=-1).cumsum(-1)
        # The sum may end a hair below 1.
        aim = self._table[:, self._at, None].to(likely) * likely[:, -1:]
        self._at += 1
        token = torch.searchsorted(likely, aim, right=True).clamp_(max=scores.shape[-1] - 1)
        only = torch.full_like(scores, float("-inf"))
        only.scatter_(1, token, 0.0)
        return only  # type: ignore[return-value]


def table(first: int, rows: int, tokens: int, *what: object) -> torch.Tensor:
    """Rows `first` to `first + rows` of the table of `what`, [rows, tokens]: the same ones for every caller, and for however many rows."""
    made = torch.empty(rows, tokens, dtype=torch.float64)
    generator = torch.Generator()
    for row in range(rows):
        generator.manual_seed(_number(*what, first + row))
        made[row] = torch.rand(tokens, generator=generator, dtype=torch.float64)
    return made


@contextmanager
def drawing(model: Any, draws: Draws) -> Iterator[None]:
    """Within it, whatever calls `model.generate` gets what is drawn here."""
    plain = model.generate
    model.generate = functools.partial(plain, logits_processor=LogitsProcessorList([draws]))
    try:
        yield
    finally:
        del model.generate


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], draws: torch.Tensor, temperature: float, batch: int
) -> list[list[int]]:
    """The tokens of one completion for each prompt, up to its end token and with it, `draws.shape[1]` at most."""
    ends = {tokenizer.eos_token_id, *_listed(getattr(model.generation_config, "eos_token_id", None))}
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    found: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        part = prompts[at : at + batch]
        width = max(map(len, part))
        ids = torch.tensor([[filler] * (width - len(prompt)) + prompt for prompt in part], device=model.device)
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part], device=model.device)
        with torch.no_grad(), drawing(model, Draws(draws[at : at + batch], temperature)):
            # Sampling parameters of the model's own generation_config would change the distribution; what is drawn here is the model's.
            told = model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=seen, max_new_tokens=draws.shape[1], do_sample=False, temperature=1.0, top_p=1.0, top_k=50,
                num_beams=1, repetition_penalty=1.0, eos_token_id=sorted(ends), pad_token_id=filler,
            )  # fmt: skip
        for row in told[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            found.append(row[: end + 1])
    return found


def log_probabilities(model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """log p of each token of the completion, [tokens], as it was sampled: at `temperature`."""
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    with torch.no_grad():
        scores = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(scores, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def _number(*what: object) -> int:
    return int.from_bytes(hashlib.sha256(":".join(map(str, what)).encode()).digest()[:8], "big") >> 1


def _listed(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
