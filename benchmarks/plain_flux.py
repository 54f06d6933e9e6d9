"""A plain script over diffusers on the latents, the weights and the order of `flux-lora@1`: what its losses, times and memory are held against.

    PYTHONPATH=recipes/trainers python benchmarks/plain_flux.py --manifest FILE --latents FOLDER --text FOLDER --base BASE --max-steps STEPS …

As diffusers' own example script for Flux trains with cached latents and captions: its scheduler, its packing, its draw of noise levels, all data in
memory before the first step.  Prints what plain_sft.py prints.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from image_flux import TARGETS, denoiser  # type: ignore[import-not-found, unused-ignore]
from image_model import DTYPES, caption_file, rows  # type: ignore[import-not-found, unused-ignore]
from image_train import Reading  # type: ignore[import-not-found, unused-ignore]
from loop import draw  # type: ignore[import-not-found, unused-ignore]
from peft import LoraConfig
from safetensors.torch import load_file
from telemetry import gpu_memory, memory  # type: ignore[import-not-found, unused-ignore]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("manifest", "latents", "text", "base"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("max-steps", "global-batch", "micro-batch", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("alpha", "learning-rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--init", default="pretrained")
    parser.add_argument("--precision", choices=["bf16", "no"], default="no")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(regularisation_share=0.0)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    accelerator = Accelerator(
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.global_batch // options.micro_batch,
        cpu=not torch.cuda.is_available(),
    )
    where, dtype = accelerator.device, DTYPES[options.precision]
    scheduler = copy.deepcopy(
        FlowMatchEulerDiscreteScheduler.from_pretrained(
            options.base / "scheduler", use_dynamic_shifting=False, shift=1.0
        )
    )
    transformer = denoiser(options.base, options.init, dtype)
    draw("adapter", options.seed)
    transformer.add_adapter(
        LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=TARGETS)
    )
    transformer.to(where)
    if options.checkpoint_activations:
        transformer.enable_gradient_checkpointing()
    cast_training_params([transformer], dtype=torch.float32)
    learned = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=options.learning_rate, weight_decay=0.0)
    transformer, optimizer = accelerator.prepare(transformer, optimizer)
    transformer.train()

    images = [row for row in rows(options.manifest) if not row.held_out]
    latents = [load_file(options.latents / f"{row.id}.safetensors")["latent"] for row in images]
    captions = [
        {
            name: value.to(where)
            for name, value in load_file(options.text / caption_file(row.caption)).items()
        }
        for row in images
    ]
    reading = Reading(images, options)
    losses, ends = [], []
    for step in range(1, options.max_steps + 1):
        chosen = reading.chosen((step - 1) * options.global_batch, options.global_batch)
        summed = 0.0
        for first in range(0, len(chosen), options.micro_batch):
            part = list(enumerate(chosen))[first : first + options.micro_batch]
            with accelerator.accumulate(transformer):
                noises, drawn = [], []
                for place, index in part:
                    # The same luck as the recipe's: one step's noise and noise levels would else differ by more than what is looked for.
                    draw("noise", options.seed, step, place)
                    drawn.append(
                        1 - compute_density_for_timestep_sampling("logit_normal", 1, 0.0, 1.0)
                    )
                    noises.append(torch.randn_like(latents[index]))
                loss = loss_of(transformer, scheduler, torch.stack([latents[index] for _, index in part]).to(where), torch.stack(noises).to(where),
                               torch.cat(drawn), [captions[index] for _, index in part], dtype)  # fmt: skip
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(learned, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                summed += float(loss.detach()) * len(part) / len(chosen)
        losses.append(summed)
        ends.append(time.perf_counter())
    seconds = [end - begin for begin, end in pairwise(ends)]
    print(
        json.dumps(
            {"losses": losses, "seconds": seconds, "memory_gb": memory() / 1e9, **gpu_memory()}
        )
    )


def loss_of(
    transformer: Any, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, drawn: torch.Tensor, captions: list[dict[str, torch.Tensor]],
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The mean squared error of the velocity, at the noise levels of the scheduler that were drawn."""
    where = latents.device
    batch, channels, height, width = latents.shape
    numbers = (
        (drawn * scheduler.config.num_train_timesteps)
        .long()
        .clamp(max=scheduler.config.num_train_timesteps - 1)
    )
    sigmas = scheduler.sigmas[numbers].to(where).view(-1, 1, 1, 1)
    noisy = ((1.0 - sigmas) * latents + sigmas * noise).to(dtype)
    packed = FluxPipeline._pack_latents(noisy, batch, channels, height, width)
    guidance = (
        torch.ones(batch, device=where)
        if getattr(transformer, "module", transformer).config.guidance_embeds
        else None
    )
    said = transformer(
        hidden_states=packed, timestep=scheduler.timesteps[numbers].to(where) / 1000, guidance=guidance,
        pooled_projections=torch.stack([each["pooled"] for each in captions]).to(dtype),
        encoder_hidden_states=torch.stack([each["prompt"] for each in captions]).to(dtype),
        txt_ids=torch.zeros(captions[0]["prompt"].shape[0], 3, device=where, dtype=dtype),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, where, dtype), return_dict=False,
    )[0]  # fmt: skip
    said = FluxPipeline._unpack_latents(said, height * 8, width * 8, 8)
    return ((said.float() - (noise - latents).float()) ** 2).reshape(batch, -1).mean(1).mean()


if __name__ == "__main__":
    main()
