"""The memory of prime-rl's trainer is estimated from its TOML, its inputs and its defaults."""

from __future__ import annotations

from runner.advice.memory import Model, estimate, read
from runner.advice.prime_rl import training_gpus, training_inputs
from runner.advice.training_from_inputs import read_text_training

EIGHT = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def needs(inputs: dict[str, object], config: dict[str, object], devices: int = 1) -> float:
    model: Model = read(EIGHT)
    training = read_text_training(
        "prime-rl@1", training_inputs(inputs, config), model, devices=devices
    )
    assert training is not None
    return estimate(model, training).bytes / 1e9


def test_a_full_training_of_8b_does_not_fit_two_cards_of_24_gb() -> None:
    assert needs({"seq_len": None}, {}) > 48


def test_sequences_lora_and_the_place_of_the_optimizer_are_read_from_the_toml() -> None:
    lora = {"trainer": {"model": {"lora": {"rank": 8}}}}
    assert needs({}, lora) < needs({}, {}) / 2
    assert needs({"rank": 8}, {}) == needs({}, lora)
    on_gpu = {"trainer": {"model": {"optim_cpu_offload": False}}}
    assert needs({}, on_gpu) > needs({}, {}) + 50
    long = {"trainer": {"model": {"seq_len": 32768}}}
    assert needs({}, long) > needs({}, {"seq_len": 1024})
    assert needs({"seq_len": 1024}, long) == needs({}, {"seq_len": 1024}), "an input goes over"


def test_only_the_gpus_that_train_share_the_weights() -> None:
    assert training_gpus({"train_gpus": 2}, {}, 8) == 2
    assert training_gpus({}, {"deployment": {"num_train_gpus": 4}}, 8) == 4
    assert training_gpus({}, {}, 8) == 1
    assert needs({}, {}, devices=4) < needs({}, {}) / 2
