"""The families of `image-lora@1` as tiny models without weights, laid out as diffusers lays out the real ones.  Weights are drawn by who loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
VAE = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": [16] * 4, "layers_per_block": 1, "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "norm_num_groups": 4, "act_fn": "silu", "sample_size": 64, "latent_channels": 4,
}  # fmt: skip
# As many layers as FLUX.2 [klein]'s, which takes what it reads from the 9th, 18th and 27th.
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 28, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "dtype": "float32",
}  # fmt: skip
QWEN_VL = {
    "model_type": "qwen2_5_vl", "dtype": "float32",
    "text_config": {
        "model_type": "qwen2_5_vl_text", "vocab_size": 1024, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16},
}  # fmt: skip
PARTS: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "flux2-klein": {
        "transformer": ("diffusers", "Flux2Transformer2DModel", {
            "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
            "joint_attention_dim": 48, "axes_dims_rope": [4, 4, 4, 4], "guidance_embeds": False,
        }),
        "vae": ("diffusers", "AutoencoderKLFlux2", VAE),
        "text_encoder": ("transformers", "Qwen3ForCausalLM", QWEN3),
    },
    "z-image": {
        "transformer": ("diffusers", "ZImageTransformer2DModel", {
            "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
        }),
        "vae": ("diffusers", "AutoencoderKL", {**VAE, "scaling_factor": 0.36, "shift_factor": 0.1}),
        "text_encoder": ("transformers", "Qwen3Model", QWEN3),
    },
    "qwen-image": {
        "transformer": ("diffusers", "QwenImageTransformer2DModel", {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
            "joint_attention_dim": 16, "axes_dims_rope": [8, 4, 4],
        }),
        "vae": ("diffusers", "AutoencoderKLQwenImage", {
            "base_dim": 8, "z_dim": 4, "dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True],
            "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
        }),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", QWEN_VL),
    },
    "sd3.5": {
        "transformer": ("diffusers", "SD3Transformer2DModel", {
            "sample_size": 32, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8,
            "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 64,
        }),
        "vae": ("diffusers", "AutoencoderKL", {**VAE, "scaling_factor": 1.5, "shift_factor": 0.06}),
    },
}  # fmt: skip
PIPELINES = {
    "flux2-klein": "Flux2KleinPipeline",
    "z-image": "ZImagePipeline",
    "qwen-image": "QwenImagePipeline",
    "sd3.5": "StableDiffusion3Pipeline",
}
# Of SD 3.5, from the other fixtures: two CLIPs and a T5.
TAKEN = {
    "text_encoder": ("tiny-sdxl/text_encoder_2", "CLIPTextModelWithProjection"), "tokenizer": ("tiny-sdxl/tokenizer", "CLIPTokenizer"),
    "text_encoder_2": ("tiny-sdxl/text_encoder_2", "CLIPTextModelWithProjection"), "tokenizer_2": ("tiny-sdxl/tokenizer", "CLIPTokenizer"),
    "text_encoder_3": ("tiny-flux/text_encoder_2", "T5EncoderModel"), "tokenizer_3": ("tiny-flux/tokenizer_2", "PreTrainedTokenizerFast"),
}  # fmt: skip


def tiny(family: str, home: Path) -> Path:
    """The folder of a family but Kontext, which is fixtures/tiny-flux."""
    index: dict[str, object] = {
        "_class_name": PIPELINES[family],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    _json(
        home / "scheduler" / "scheduler_config.json",
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": 3.0,
        },
    )
    for name, (library, kind, config) in PARTS[family].items():
        index[name] = [library, kind]
        _json(
            home / name / "config.json",
            {
                **config,
                **({"_class_name": kind} if library == "diffusers" else {"architectures": [kind]}),
            },
        )
    if family == "sd3.5":
        for name, (source, kind) in TAKEN.items():
            index[name] = ["transformers", kind]
            shutil.copytree(FIXTURES / source, home / name)
    else:
        index["tokenizer"] = ["transformers", "Qwen2Tokenizer"]
        shutil.copytree(
            FIXTURES / "tiny-llama",
            home / "tokenizer",
            ignore=shutil.ignore_patterns("config.json"),
        )
    _json(home / "model_index.json", index)
    return home


def _json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
