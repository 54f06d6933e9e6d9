"""What is special about SDXL: its text encoders, noise as what is learned (or v), how its UNet is asked, how it draws.  Does not know files.

Shapes: B images of H × W pixels have latents (B, 4, H/8, W/8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from image_model import part, scheduler_of, tokenizer_of

# The linear layers of attention and feed-forward of each transformer block; the convolutions stay as they are.
TARGETS = r".*\.transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
PREFIX = "unet"
ARCHITECTURE = "stable-diffusion-xl-v1-base/lora"  # as modelspec calls it
OBJECTIVES = ("epsilon", "v")

Tensors = Mapping[str, torch.Tensor]


class TextEncoder:
    """Captions to what the UNet reads: `prompt` (77 n, 768 + 1280) by both CLIPs and `pooled` (1280) by the larger, for SDXL's own encoders.

    A CLIP reads 75 tokens between its first and last.  A longer caption is read in n parts, each with a first and last token of its own, and their
    embeddings are put one behind the other; `pooled` is of the first part.  ComfyUI and A1111 read long prompts in this way.
    """

    def __init__(self, base: Path, init: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        self._encoders = (
            part(CLIPTextModel, base / "text_encoder", "text_encoder", init, dtype).to(device),
            part(CLIPTextModelWithProjection, base / "text_encoder_2", "text_encoder_2", init, dtype).to(device),
        )
        self._tokenizers = tokenizer_of(base / "tokenizer"), tokenizer_of(base / "tokenizer_2")
        self._device = device

    def cut(self, text: str) -> list[str]:
        """What reads only the beginning of a text: nothing does."""
        return []

    def encode(self, text: str) -> dict[str, torch.Tensor]:
        tokens = [tokenizer(text, add_special_tokens=False).input_ids for tokenizer in self._tokenizers]
        parts = max(1, *(-(-len(ids) // _room(tokenizer)) for ids, tokenizer in zip(tokens, self._tokenizers, strict=True)))
        read = [
            encoder(_in_parts(tokenizer, ids, parts).to(self._device), output_hidden_states=True)
            for encoder, tokenizer, ids in zip(self._encoders, self._tokenizers, tokens, strict=True)
        ]
        # The last layer but one: what SDXL was trained with.
        return {"prompt": torch.cat([each.hidden_states[-2].flatten(0, 1) for each in read], dim=-1), "pooled": read[1].text_embeds[0]}


def _room(tokenizer: Any) -> int:
    """How many tokens fit between the first and the last."""
    return int(tokenizer.model_max_length) - 2


def _in_parts(tokenizer: Any, ids: Sequence[int], parts: int) -> torch.Tensor:
    """Tokens as so many rows that a CLIP can read, the last ones filled up."""
    room = _room(tokenizer)
    rows = [[tokenizer.bos_token_id, *ids[room * n : room * (n + 1)], tokenizer.eos_token_id] for n in range(parts)]
    return torch.tensor([row + [tokenizer.pad_token_id] * (room + 2 - len(row)) for row in rows])


def denoiser(base: Path, init: str, dtype: torch.dtype) -> Any:
    from diffusers import UNet2DConditionModel

    return part(UNet2DConditionModel, base / "unet", "denoiser", init, dtype)


class Objective:
    """Denoising diffusion: x_t = √ā_t x + √(1 − ā_t) ε (Ho et al. 2020, arXiv 2006.11239, equation 4); learned is ε, or v = √ā_t ε − √(1 − ā_t) x
    (Salimans & Ho 2022, arXiv 2202.00512, section 4).

    min_snr_gamma above 0 weighs a step of signal-to-noise ratio s = ā / (1 − ā) with min(s, γ) / s for ε and min(s, γ) / (s + 1) for v
    (Hang et al. 2023, arXiv 2303.09556, section 3.4).
    """

    def __init__(self, base: Path, prediction: str, min_snr_gamma: float) -> None:
        from diffusers import DDPMScheduler

        self._alphas: torch.Tensor = scheduler_of(DDPMScheduler, base).alphas_cumprod
        self._prediction, self._gamma = prediction, min_snr_gamma

    def noised(self, latent: torch.Tensor, at: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """A noised latent, what is to be predicted for it, its step t (whole, 0 to 999), and its weight in the loss.

        `at`: the step at this share of them all, 0 to 1, instead of one that is drawn.
        """
        count = len(self._alphas)
        t = torch.randint(count, ()) if at is None else torch.tensor(int(at * count))
        signal, noise = self._alphas[t], torch.randn_like(latent)
        noised = signal.sqrt() * latent + (1 - signal).sqrt() * noise
        target = noise if self._prediction == "epsilon" else signal.sqrt() * noise - (1 - signal).sqrt() * latent
        return noised, target, t, self._weight(float(signal / (1 - signal))) if at is None else 1.0

    def _weight(self, ratio: float) -> float:
        if not self._gamma:
            return 1.0
        if self._prediction == "v":
            return min(ratio, self._gamma) / (ratio + 1)
        # Not min(…) / ratio: of pure noise, which bases with rescaled noise levels learn from, the ratio is 0.
        return 1.0 if ratio <= self._gamma else self._gamma / ratio


def predict(model: Any, noised: torch.Tensor, t: torch.Tensor, conditions: Tensors, guidance: float, dtype: torch.dtype) -> torch.Tensor:
    """What the model says for noised latents (B, 4, h, w) at steps (B,), with conditions that have B first.  The same shape, 32 bits.

    `sizes` (B, 6) has the original's height and width, the crop's upper and left corner, the height and width that are aimed at (Podell et al. 2023,
    arXiv 2307.01952, section 2.2).  They stay in 32 bits: bf16 has no odd numbers above 256.
    `dtype` is the model's.
    """
    said = model(
        noised.to(dtype), t, encoder_hidden_states=conditions["prompt"].to(dtype),
        added_cond_kwargs={"text_embeds": conditions["pooled"].to(dtype), "time_ids": conditions["sizes"]}, return_dict=False,
    )[0]  # fmt: skip
    return said.float()  # type: ignore[no-any-return]


def pipeline(base: Path, init: str, dtype: torch.dtype, objective: str) -> Any:
    """What draws, without text encoders and autoencoder: it is given embeddings and gives latents."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    scheduler = scheduler_of(EulerDiscreteScheduler, base)
    scheduler.register_to_config(prediction_type="epsilon" if objective == "epsilon" else "v_prediction")
    return StableDiffusionXLPipeline(
        scheduler=scheduler, unet=denoiser(base, init, dtype), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
        tokenizer_2=None,
        add_watermarker=False,
    )  # fmt: skip


def drawn(pipeline: Any, text: Tensors, guidance: float, steps: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """The latent (4, size / 8, size / 8) of one image, 32 bits, that begins with the generator's noise.

    It is drawn away from zeros, as SDXL was trained to be (`force_zeros_for_empty_prompt`).
    """
    prompt, pooled = text["prompt"][None], text["pooled"][None]
    latents = pipeline(
        prompt_embeds=prompt, pooled_prompt_embeds=pooled, negative_prompt_embeds=torch.zeros_like(prompt),
        negative_pooled_prompt_embeds=torch.zeros_like(pooled), guidance_scale=guidance, num_inference_steps=steps, height=size, width=size,
        generator=generator, output_type="latent",
    ).images  # fmt: skip
    return latents[0].float()  # type: ignore[no-any-return]
