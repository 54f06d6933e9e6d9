"""The estimate of GPU memory, held against transformers itself, against autograd, and against what others measured."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from docs import published
from runner.advice import memory
from runner.advice.memory import TrainingSetup, UnknownConfig, estimate, layer_bytes, read
from runner.language import library
from runner.paths import shipped

TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"head_dim": 32}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2", {}),
    (
        "qwen2_moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 2,
        },
    ),
    ("qwen3", {"head_dim": 16}),
    (
        "qwen3_moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0]},
    ),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("phi3", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("granite", {}),
    ("smollm3", {}),
    ("starcoder2", {}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("gpt_neox", {}),
    ("bloom", {"n_layer": 3, "n_head": 4}),
]
LARGE = {  # what the models' own pages say, in weights
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512, "bloom-7b1": 7_069_016_064,
}  # fmt: skip


def _made(kind: str, **settings: Any) -> tuple[Any, Any]:
    """A model of transformers without its weights, and its configuration."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[kind](**{**TINY, **settings})
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config), config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), SHAPES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(SHAPES)]
)
def test_the_weights_of_a_family_are_counted_as_transformers_makes_them(
    kind: str, settings: dict[str, Any]
) -> None:
    made, config = _made(kind, **settings)
    assert read(json.loads(config.to_json_string(use_diff=False))).parameters == sum(
        weight.numel() for weight in made.parameters()
    )


def test_every_family_that_is_said_to_be_known_is_counted_by_a_test() -> None:
    assert {kind for kind, _ in SHAPES} | {"gemma3"} == set(
        memory.FAMILIES
    )  # gemma3 is gemma3_text with eyes


@pytest.mark.parametrize("name", LARGE)
def test_well_known_models_have_as_many_weights_as_their_pages_say(name: str) -> None:
    models = _fixture()["models"]
    assert read(models[name]).parameters == LARGE[name]


@pytest.mark.slow
def test_what_lora_adapts_is_what_peft_adapts() -> None:
    peft = pytest.importorskip("peft")
    made, config = _made("llama")
    adapted = peft.get_peft_model(
        made, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert memory.count_trained_weights(read(config.to_dict()), TrainingSetup(rank=4)) == trained


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_a_layer_keeps_is_what_autograd_saves(method: str, attention: str) -> None:
    length, batch, shape = (
        128,
        2,
        {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "head_dim": 64},
    )
    one, two = (_saved(method, attention, layers, length, batch, shape) for layers in (1, 2))
    model = read({**TINY, **shape, "model_type": "llama"})
    training = TrainingSetup(
        method=method, length=length, attention="eager" if attention == "eager" else "flash"
    )  # type: ignore[arg-type]
    assert layer_bytes(model, training) * length * batch == pytest.approx(two - one, rel=0.05)


def _saved(
    method: str,
    attention: str,
    layers: int,
    length: int,
    batch: int,
    shape: dict[str, Any],
    dropout: float = 0,
) -> int:
    """Bytes that autograd saves in a forward pass, each storage once, weights left out."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = {**TINY, **shape, "num_hidden_layers": layers, "attn_implementation": attention}
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**settings), dtype=torch.bfloat16
    )
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(
            made,
            LoraConfig(
                r=1, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        ).base_model.model
    made.train()
    weights = {weight.untyped_storage()._cdata for weight in made.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage()._cdata not in weights:
            saved[tensor.untyped_storage()._cdata] = (
                tensor  # held, so that no other takes its place
            )
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=method == "lora"),
    ):
        made.model(input_ids=torch.zeros((batch, length), dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.slow
def test_dropout_keeps_a_mask_of_what_each_adapted_layer_reads() -> None:
    # On a GPU the mask is of bytes; the processor's dropout, counted here, keeps a factor in 32 bits for each element.
    length, batch, shape = (
        64,
        2,
        {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "head_dim": 64},
    )
    plain, dropped = (
        _saved("lora", "sdpa", 2, length, batch, shape, rate)
        - _saved("lora", "sdpa", 1, length, batch, shape, rate)
        for rate in (0, 0.1)
    )
    model = read({**TINY, **shape, "model_type": "llama"})
    masks = layer_bytes(model, TrainingSetup(dropout=True)) - layer_bytes(model, TrainingSetup())
    assert dropped - plain == pytest.approx(4 * masks * length * batch, rel=0.02)


ROWS = published.rows()


def test_published_measurements_with_a_known_configuration_are_met_within_a_fifth() -> None:
    print(published.table())
    known = [row for row in ROWS if row.known]
    assert len(known) >= 24
    assert {row.id: round(row.error, 2) for row in known if abs(row.error) > 0.20} == {}


def test_the_formula_is_nearer_than_a_rule_by_the_weight_on_each_of_them() -> None:
    assert [row.id for row in ROWS if row.known and abs(row.error) > abs(row.error_of_rule)] == []


def test_a_row_whose_configuration_is_not_known_says_what_is_assumed_or_why_it_is_out() -> None:
    assert [row.id for row in ROWS if not row.known and not row.said] == []
    assert [row.id for row in ROWS if row.known and row.said] == []


def test_what_pytorch_allocated_is_met_within_ten_percent_and_mostly_within_five() -> None:
    errors = [abs(row.error) for row in ROWS if row.known and row.counts == "allocated"]
    assert (
        len(errors) >= 14
        and max(errors) < 0.10
        and sum(error < 0.05 for error in errors) >= len(errors) - 1
    )


def test_each_of_the_published_points_has_its_row() -> None:
    assert {int("".join(c for c in row.id if c.isdigit())) for row in ROWS} == set(range(1, 20))


def test_the_page_shows_the_table_of_today() -> None:
    page = (shipped() / "docs" / "memory.md").read_text("utf-8")
    assert published.refreshed(page) == page, "run python -m docs.generate"


MODEL = read({**TINY, "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "vocab_size": 128256})  # fmt: skip


def gb(**settings: Any) -> float:
    return estimate(MODEL, TrainingSetup(**settings)).bytes / 1e9


def test_terms_go_the_way_that_they_should() -> None:
    assert gb(length=4096) > gb(length=1024)
    assert gb(batch=4) > gb(batch=1)
    assert gb(batch=4, length=1024) == pytest.approx(gb(batch=1, length=4096), rel=1e-6)
    assert gb(pairs=True) > gb()
    assert gb(checkpointing=False) > gb()
    assert gb(attention="eager", checkpointing=False) > gb(checkpointing=False)
    assert gb(logits="fused") < gb(logits="chunked") < gb()
    assert (
        gb(method="qlora") < gb(method="lora") < gb(method="full") < gb(method="full", master=True)
    )
    assert (
        gb(method="full", optimizer="adamw_8bit")
        < gb(method="full", optimizer="adamw_fused")
        < gb(method="full")
    )
    assert gb(dropout=True, checkpointing=False) > gb(checkpointing=False)
    stages = [gb(method="full", stage=stage, devices=8) for stage in (1, 2, 3)]
    assert (
        stages == sorted(stages, reverse=True)
        and gb(method="full", stage=3, devices=8, offload=True) < stages[-1]
    )
    sharded = gb(method="lora", stage=3, devices=2)
    offloaded = gb(method="lora", stage=3, devices=2, offload=True)
    assert sharded - offloaded > MODEL.parameters * 2 / 2 / 1e9, "the frozen weights are away, too"
    assert gb(generating=64, length=4096) > gb(generating=0, length=4096)
    assert gb(embeddings=True) > gb() and gb(others=MODEL.parameters) > gb() + 15


def test_a_verdict_is_by_the_range() -> None:
    found = estimate(MODEL, TrainingSetup(length=2048))
    assert found.low < found.bytes < found.high
    assert found.verdict(found.high) == "FITS"
    assert found.verdict(found.bytes) == "TIGHT"
    assert found.verdict(found.low - 1) == "NO"
    assert found.bytes == sum(size for _, size in found.terms)


def test_what_runs_measured_corrects_and_narrows() -> None:
    found = estimate(MODEL, TrainingSetup())
    once, often = (memory.calibrate(found, 1.1, runs, f"{runs} runs") for runs in (1, 9))
    assert (
        once.bytes
        == often.bytes
        == pytest.approx((found.bytes - memory.CUDA_CONTEXT) * 1.1 + memory.CUDA_CONTEXT, rel=1e-6)
    )
    assert found.high - found.low > once.high - once.low > often.high - often.low
    assert once.measured == "1 runs" and sum(size for _, size in once.terms) == once.bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, 'cannot count the weights of the model family "t5"'),
        ({}, 'cannot count the weights of the model family ""'),
        ({"model_type": "llama", "hidden_size": 64}, "has no num_hidden_layers"),
        ({**TINY, "model_type": "llama", "hidden_size": "64"}, "has no hidden_size"),
        ({**TINY, "model_type": "llama", "num_attention_heads": 0}, "no number of attention heads"),
    ],
)
def test_a_config_that_does_not_say_enough_is_reported(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownConfig, match=words):
        read(config)


def test_the_language_half_of_a_model_that_sees_is_what_counts() -> None:
    text = {**TINY, "model_type": "gemma3_text", "head_dim": 32}
    assert (
        read({"model_type": "gemma3", "text_config": text, "vision_config": {}}).parameters
        == read(text).parameters
    )


def test_an_optimizer_without_figures_is_reported() -> None:
    with pytest.raises(UnknownConfig, match="prodigy"):
        estimate(MODEL, TrainingSetup(optimizer="prodigy"))


def _fixture() -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(
        Path(library.fixtures() / "memory" / "published.yaml").read_text("utf-8")
    )
    return found
