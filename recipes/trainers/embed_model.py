"""Embeddings of texts: the model around a base, the loss of pairs and triplets, how well queries find their documents.  Does not know training."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import embed_base
import torch
from loop import draw, fail
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
    TripletDistanceMetric,
    TripletLoss,
)
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from text_model import DTYPES, fill_up

if TYPE_CHECKING:
    from datasets import Dataset

POOLINGS = ("auto", "mean", "cls", "lasttoken")
TEXT_ALONE = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""What the model is given.  sentence-transformers would put each text into the chat template of a base that has one."""


class Embedder(SentenceTransformer):
    """sentence-transformers' model.  The recipe writes the card."""

    def save_pretrained(self, path: str, *args: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **settings: Any) -> None:
        """Save a folder, with the weights of `state_dict` if that is given."""
        weights = dict(self.named_parameters()) if state_dict is not None else {}
        kept = {name: weight.data for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.data = (state_dict or {})[name]
            super().save_pretrained(path, *args, **settings)
        finally:
            for name, weight in weights.items():
                weight.data = kept[name]

    def _create_model_card(self, path: str, model_name: str | None = None, train_datasets: list[str] | None = None) -> None:
        pass


def load(
    base: Path, init: str, seed: int, precision: str, *, pooling: str, prompts: Mapping[str, str], max_length: int, attention: str | None = None
) -> Embedder:
    """Return the base as a model of embeddings: with its own modules if sentence-transformers saved it, else with pooling and normalization."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    described = embed_base.described(base)
    settings = {"dtype": DTYPES[precision], "attn_implementation": attention}
    if init == "random":
        model = _drawn(base, seed, settings, pooling)
    elif not any(base.glob("*.safetensors")) and not any(base.glob("*.bin")):
        fail(f"{base} holds no weights (*.safetensors); init=random would train from random ones")
    elif described.saved:
        model = Embedder(str(base), device="cpu", local_files_only=True, model_kwargs=settings)
    else:
        model = _around(base, settings, pooling)
    model.prompts = dict(prompts)
    model.default_prompt_name = None
    model.similarity_fn_name = "cosine"
    model.max_seq_length = max_length
    return model


def _drawn(base: Path, seed: int, settings: Mapping[str, Any], pooling: str) -> Embedder:
    """Return a model whose weights are drawn from the seed, and saved, because sentence-transformers loads files only."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    draw("init", seed)
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    fresh = AutoModel.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        fresh.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(folder)
        return _around(Path(folder), settings, pooling)


def _around(folder: Path, settings: Mapping[str, Any], pooling: str) -> Embedder:
    transformer = Transformer(
        str(folder),
        model_kwargs=dict(settings),
        processor_kwargs={"local_files_only": True},
        config_kwargs={"local_files_only": True},
        modality_config=TEXT_ALONE,
        module_output_name="token_embeddings",
    )
    transformer.processor.chat_template = None
    fill_up(transformer.processor, transformer.model.get_input_embeddings().num_embeddings)
    mode = pooled_by(transformer.model.config.model_type) if pooling == "auto" else pooling
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), mode), Normalize()]
    return Embedder(modules=modules, device="cpu")


def pooled_by(model_type: str) -> str:
    """Return the pooling that fits a kind of model: the last token of models that read forwards only, else the mean of all."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return "lasttoken" if model_type in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) else "mean"


def loss_of(model: SentenceTransformer, options: argparse.Namespace, rows: int) -> torch.nn.Module:
    """Return the loss of batches of so many rows on a device.

    All texts of a batch are negatives for each other, on all devices.  If `micro_batch` is smaller, gradients go through the embeddings of parts
    (GradCache; Gao and others, 2021, arXiv:2101.06983), so that memory is limited and the loss is the same.
    """
    if options.loss == "triplet":
        loss: torch.nn.Module = TripletLoss(model, distance_metric=TripletDistanceMetric.COSINE, triplet_margin=options.margin)
    else:
        settings: dict[str, Any] = {"scale": 1 / options.temperature, "gather_across_devices": torch.distributed.is_initialized()}
        if options.micro_batch < rows:
            loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=options.micro_batch, **settings)
        else:
            loss = MultipleNegativesRankingLoss(model, **settings)
    return MatryoshkaLoss(model, loss, options.matryoshka) if options.matryoshka else loss


def retrieval(rows: Dataset, prompts: Mapping[str, str], size: int, dimension: int | None = None, name: str = "") -> InformationRetrievalEvaluator:
    """Return sentence-transformers' judge of how well the anchors of rows find their positives among all other texts of the rows.

    `dimension`: how many numbers of an embedding are compared, if not all.
    """
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    relevant: dict[str, set[str]] = {}
    for row in rows:
        anchor, positive, *negative = row.values()
        query = queries.setdefault(anchor, str(len(queries)))
        found = [documents.setdefault(text, str(len(documents))) for text in (positive, *negative)]
        relevant.setdefault(query, set()).add(found[0])
    return InformationRetrievalEvaluator(
        queries=_by_id(queries),
        corpus=_by_id(documents),
        relevant_docs=relevant,
        batch_size=size,
        name=name,
        write_csv=False,
        truncate_dim=dimension,
        main_score_function="cosine",
        query_prompt=prompts[embed_base.QUERY],
        corpus_prompt=prompts[embed_base.DOCUMENT],
    )


def _by_id(ids: Mapping[str, str]) -> dict[str, str]:
    return {number: text for text, number in ids.items()}


def dimensions(matryoshka: Sequence[int], whole: int) -> list[int]:
    """Return the numbers of embeddings that are judged, the most first."""
    return sorted({whole, *matryoshka}, reverse=True)
