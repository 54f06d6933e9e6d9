"""What is special about Flux: its text encoders, rectified flow as what is learned, how its transformer is asked, how it draws.  Does not know files.

Shapes: B images of H × W pixels have latents (B, C, H/8, W/8), which the transformer sees as (H/16 · W/16) patches of 4·C numbers each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from image_model import part, scheduler_of, tokenizer_of

# All linear layers of the blocks, image side and text side; embeddings, norms and the first and last layer stay as they are.
TARGETS = (
    r"(single_)?transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)
PREFIX = "transformer"
ARCHITECTURE = "flux-1-dev/lora"  # as modelspec calls it
OBJECTIVES = ("flux_shift", "logit_normal", "uniform")

Tensors = Mapping[str, torch.Tensor]


class TextEncoder:
    """Captions to what the transformer reads: `prompt` (T, 4096) by T5 and `pooled` (768) by CLIP, for Flux's own encoders."""

    def __init__(self, base: Path, init: str, dtype: torch.dtype, device: torch.device) -> None:
        from diffusers import FluxPipeline
        from transformers import CLIPTextModel, T5EncoderModel

        # The pipeline's own words about how text is read: what is learned from and what is drawn from are the same numbers.
        self._pipeline = FluxPipeline(
            scheduler=None, vae=None, transformer=None,
            text_encoder=part(CLIPTextModel, base / "text_encoder", "text_encoder", init, dtype).to(device),
            text_encoder_2=part(T5EncoderModel, base / "text_encoder_2", "text_encoder_2", init, dtype).to(device),
            tokenizer=tokenizer_of(base / "tokenizer"), tokenizer_2=tokenizer_of(base / "tokenizer_2"),
        )  # fmt: skip
        self._device = device
        # 512 is how long FLUX.1-dev was trained to read.
        self._longest = min(512, self._pipeline.tokenizer_2.model_max_length)

    def cut(self, text: str) -> list[str]:
        """What reads only the beginning of a text."""
        found = []
        if len(self._pipeline.tokenizer_2(text).input_ids) > self._longest:
            found.append(f"T5 reads only the first {self._longest} tokens")
        if len(self._pipeline.tokenizer(text).input_ids) > (most := self._pipeline.tokenizer.model_max_length):
            found.append(f"CLIP, of which Flux takes the summary, reads only the first {most} tokens")
        return found

    def encode(self, text: str) -> dict[str, torch.Tensor]:
        prompt, pooled, _ = self._pipeline.encode_prompt(text, device=self._device, max_sequence_length=self._longest)
        return {"prompt": prompt[0], "pooled": pooled[0]}


def denoiser(base: Path, init: str, dtype: torch.dtype) -> Any:
    from diffusers import FluxTransformer2DModel

    return part(FluxTransformer2DModel, base / "transformer", "denoiser", init, dtype)


class Objective:
    """Rectified flow (Liu et al. 2022, arXiv 2209.03003): a straight line from image to noise, x_t = (1 − t) x + t ε.

    What is learned is its velocity ε − x.
    """

    def __init__(self, base: Path, timesteps: str, min_snr_gamma: float) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        self._timesteps = timesteps
        self._scheduler = scheduler_of(FlowMatchEulerDiscreteScheduler, base).config if timesteps == "flux_shift" else {}

    def noised(self, latent: torch.Tensor, at: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """A noised latent, what is to be predicted for it, its t in (0, 1), and its weight in the loss.

        `at`: this t, instead of one that is drawn.
        """
        height, width = latent.shape[-2:]
        alpha = shift(self._scheduler, (height // 2) * (width // 2)) if self._scheduler else 1.0
        t = times(self._timesteps, alpha) if at is None else torch.tensor(at)
        noise = torch.randn_like(latent)
        return (1 - t) * latent + t * noise, noise - latent, t, 1.0


def shift(scheduler: Mapping[str, Any], patches: int) -> float:
    """The factor by which a base shifts noise levels for an image of so many patches: a larger image takes more noise to hide.

    With `use_dynamic_shifting` it is e^μ, where μ is on a line from `base_shift` to `max_shift`, as diffusers' `calculate_shift` has it: for
    FLUX.1-dev from 0.5 at 256 patches to 1.15 at 4,096.  Else it is `shift`, whatever the size: 1 for FLUX.1-schnell, which was trained without.
    """
    if not scheduler["use_dynamic_shifting"]:
        return float(scheduler["shift"])
    low, high = scheduler["base_image_seq_len"], scheduler["max_image_seq_len"]
    return math.exp(scheduler["base_shift"] + (patches - low) * (scheduler["max_shift"] - scheduler["base_shift"]) / (high - low))


def times(timesteps: str, alpha: float, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Draw noise levels t.

    `uniform`: evenly.  `logit_normal`: t = sigmoid(n) with n ~ N(0, 1) (Esser et al. 2024, arXiv 2403.03206, section 3.1).  `flux_shift`: the same,
    shifted as the base was trained, by `alpha` of section 5.3.2 there: t' = α / (α + 1/t − 1).
    """
    if timesteps == "uniform":
        return torch.rand(shape)
    t = torch.sigmoid(torch.randn(shape))
    return t if timesteps == "logit_normal" else alpha / (alpha + 1 / t - 1)


def predict(model: Any, noised: torch.Tensor, t: torch.Tensor, conditions: Tensors, guidance: float, dtype: torch.dtype) -> torch.Tensor:
    """What the model says for noised latents (B, C, h, w) at times (B,), with conditions that have B first.  The same shape, 32 bits.

    `dtype` is the model's: to ask the model walks through all of its modules, at every step.
    """
    batch, channels, height, width = noised.shape
    where = noised.device
    patches = noised.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)
    # Place of a patch: (0, row, column); text has none.
    places = torch.zeros(height // 2, width // 2, 3, device=where)
    places[..., 1] = torch.arange(height // 2, device=where)[:, None]
    places[..., 2] = torch.arange(width // 2, device=where)[None]
    said = model(
        hidden_states=patches.to(dtype),
        timestep=t.to(dtype),
        guidance=torch.full((batch,), guidance, device=where) if model.config.guidance_embeds else None,
        encoder_hidden_states=conditions["prompt"].to(dtype),
        pooled_projections=conditions["pooled"].to(dtype),
        img_ids=places.view(-1, 3).to(dtype),
        txt_ids=torch.zeros(conditions["prompt"].shape[1], 3, device=where, dtype=dtype),
        return_dict=False,
    )[0]
    return _unpatched(said.float(), height, width)


def pipeline(base: Path, init: str, dtype: torch.dtype, objective: str) -> Any:
    """What draws, without text encoders and autoencoder: it is given embeddings and gives latents."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    return FluxPipeline(
        scheduler=scheduler_of(FlowMatchEulerDiscreteScheduler, base), transformer=denoiser(base, init, dtype), vae=None, text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip


def drawn(pipeline: Any, text: Tensors, guidance: float, steps: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """The latent (C, size / 8, size / 8) of one image, 32 bits, that begins with the generator's noise."""
    patches = pipeline(
        prompt_embeds=text["prompt"][None], pooled_prompt_embeds=text["pooled"][None], guidance_scale=guidance, num_inference_steps=steps,
        height=size,
        width=size, generator=generator, output_type="latent",
    ).images  # fmt: skip
    return _unpatched(patches.float(), size // 8, size // 8)[0]


def _unpatched(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(B, height / 2 · width / 2, 4 C) as latents (B, C, height, width)."""
    batch, _, numbers = patches.shape
    cut = patches.view(batch, height // 2, width // 2, numbers // 4, 2, 2)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, numbers // 4, height, width)
