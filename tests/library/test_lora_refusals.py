"""Which kinds of models peft puts no LoRA on: asked of peft with a small model of each configuration, and held against the preflight rule's list."""

from __future__ import annotations

import importlib
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from runner.language.document import read
from tests.library.siblings import siblings
from tests.shelf import ROOT

pytestmark = pytest.mark.xdist_group("text")
NEIGHBOURS = ("bamba", "granitemoehybrid", "jamba", "lfm2", "llama", "qwen3_next", "rwkv", "zamba2")
"""Kinds with state spaces, convolutions or an `out_proj`, which peft takes."""


@pytest.fixture(scope="module")
def modules() -> Iterator[Namespace]:
    with siblings():
        yield Namespace(**{name: importlib.import_module(name) for name in ("adapters", "packing")})


def listed() -> set[str]:
    """The kinds that the rule names."""
    rules = read(ROOT / "recipes" / "gotchas.yaml").value["rules"]
    (rule,) = (each for each in rules if each["id"] == "lora-refuses-base")
    return set(re.findall(r"'(\w+)'", rule["when"].partition("model.type in ")[2]))


def small(modules: Namespace, kind: str) -> Any:
    """A small model of a kind, without its weights; None if none can be made of its default configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind).get_text_config(decoder=True)
    for layers in dict.fromkeys((min(4, config.num_hidden_layers), config.num_hidden_layers)):
        for factor in modules.packing.FACTORS:
            shrunk = modules.packing.smaller(config.to_dict(), layers, factor)
            if shrunk is None:
                continue
            try:
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(type(config).from_dict(shrunk))
            except Exception:  # configurations are programs of others
                continue
    return None


def refused(modules: Namespace, kind: str) -> str:
    """Why peft puts no LoRA of ours on a kind; empty if it does, or if no small model can be made."""
    import torch
    from peft import get_peft_model

    options = Namespace(
        method="lora", rank=8, alpha=16.0, dropout=0.0, rank_stabilized=False, dora=False
    )
    model = small(modules, kind)
    try:
        with torch.device("meta"):
            if model is not None:
                get_peft_model(model, modules.adapters.lora(options, "CAUSAL_LM"), low_cpu_mem_usage=True)  # fmt: skip
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_peft_refuses_each_kind_that_the_rule_names_and_takes_those_like_them(
    modules: Namespace,
) -> None:
    assert {kind for kind in listed() if not refused(modules, kind)} == set()
    assert {kind: refused(modules, kind) for kind in NEIGHBOURS} == dict.fromkeys(NEIGHBOURS, "")


@pytest.mark.proof
def test_the_rule_names_each_kind_that_peft_refuses(modules: Namespace) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found |= {kind} if refused(modules, kind) else set()
        except Exception:  # a default configuration that is none
            continue
    assert found == listed()
