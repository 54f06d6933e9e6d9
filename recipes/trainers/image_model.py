"""The parts of a text-to-image model from a folder as diffusers lays it out, and a prepared set of images.  Does not know any one kind of model.

What differs between kinds is in a module each, image_flux.py and image_sdxl.py, which have the same names: TARGETS, PREFIX, ARCHITECTURE, OBJECTIVES,
TextEncoder, denoiser, Objective, predict, pipeline, drawn.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from loop import draw, needs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}
FAMILIES = ("flux", "sdxl")
INITS = ("pretrained", "random")
STORAGES = ("same", "fp8", "nf4")
BLOCK = re.compile(r"(.*transformer_blocks\.\d+)\.")
"""The name of a part begins with that of the transformer block that it is in."""


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a prepared set: pixels are multiples of what the model wants, the caption has the trigger word in it."""

    id: str
    caption: str
    width: int
    height: int
    original: tuple[int, int]  # width, height before it was resized
    corner: tuple[int, int]  # pixels on the left and above that the crop took, after it was resized
    source: str  # the file that it was prepared from, as several may be at several resolutions
    held_out: bool
    repeats: int  # how often an epoch has it
    regular: bool  # of the kind in general, which is to stay as it is


def family(name: str) -> ModuleType:
    """The module of a kind of model."""
    quiet()
    return importlib.import_module(f"image_{name}")


def quiet() -> None:
    """A log keeps what people can act on: no bars of a load that takes a second, no news of names that others have to change."""
    from diffusers.utils import logging as diffusers
    from transformers.utils import logging as transformers

    diffusers.disable_progress_bar()
    diffusers.set_verbosity_error()
    transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|diffusers|peft)\.")


def rows(manifest: Path) -> list[Row]:
    """The images of a prepared set, in its order."""
    read = [json.loads(line) for line in manifest.read_text().splitlines()]
    return [Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items() if name in Row.__slots__}) for row in read]


def orders(caption: str, count: int, keep: int) -> list[str]:
    """A caption of tags, which commas part, in up to `count` different orders: the first as it is written, each with the same `keep` tags in front.

    A function of the caption alone: what is embedded and what is learned from are the same, whatever the seed.
    """
    tags = [tag.strip() for tag in caption.split(",")]

    def place(number: int, tag: str) -> bytes:
        return hashlib.sha256(f"{number}:{caption}:{tag}".encode()).digest()

    others = (sorted(tags[keep:], key=lambda tag: place(number, tag)) for number in range(1, count))
    return list(dict.fromkeys([caption, *(", ".join([*tags[:keep], *rest]) for rest in others)]))


def part(kind: Any, folder: Path, name: str, init: str, dtype: torch.dtype) -> Any:
    """A part of the model, a class of diffusers or transformers: with its own weights, or, where `init` is random, with weights drawn from its name.

    Comes in `dtype`, on the CPU, not to be trained.  Ends with a message where the folder holds no such part.
    """
    if not (folder / "config.json").is_file():
        sys.exit(f"base: {folder.parent} is no model folder as diffusers lays it out: it has no {folder.name}/config.json")
    if init == "random":
        # The name and not the order: each program loads only the parts that it needs, and they have to be the same in all of them.
        draw("init", name)
        if hasattr(kind, "load_config"):
            model = kind.from_config(kind.load_config(folder))
        else:
            model = kind._from_config(kind.config_class.from_pretrained(folder))
        return model.to(dtype).eval().requires_grad_(False)
    if not any(folder.glob("*.safetensors")):
        sys.exit(f"base: {folder} holds no weights (*.safetensors); init=random would draw random ones, for tests of the machinery")
    words = {"torch_dtype": dtype} if hasattr(kind, "load_config") else {"dtype": dtype}
    return kind.from_pretrained(folder, local_files_only=True, **words).eval().requires_grad_(False)


def stored(model: Any, storage: str, computed: torch.dtype) -> None:
    """Keep frozen weights of a denoiser in fewer bits; adapters that are there already keep theirs.  Its layers compute with `computed`.

    fp8: linear layers and convolutions in 8 bits (float8 e4m3fn), but for norms and what modulates them.  A layer's weights are cast while it works.
    The backward needs them as they were computed with, and autograd holds on to them: only with checkpointing of activations, where a block is
    computed again right before its backward, are these few at a time.

    nf4: the linear layers of the transformer blocks in 4 bits, their scales quantised too (Dettmers and others 2023, arXiv 2305.14314, sections 3 and
    A).  They are made so on the way to the device.  What is computed with is made anew in the backward.
    """
    if storage == "fp8":
        model.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=computed)
    elif storage == "nf4":
        needs("bitsandbytes", "base_storage nf4", "base_storage=fp8")
        for name, layer in linear(model):
            model.set_submodule(name, _in_four_bits(layer, computed))


def away(model: Any, blocks: int) -> None:
    """Leave the frozen linear layers of the first so many transformer blocks in main memory, from where they come whenever they compute.

    To be called before the model goes to its device.  Autograd holds on to what came: only with checkpointing of activations is it few at a time.
    """
    layers = linear(model)
    first = set(list(dict.fromkeys(_block(name) for name, _ in layers))[:blocks])
    for name, layer in layers:
        if _block(name) in first:
            model.set_submodule(name, Coming(layer))


class Coming(torch.nn.Module):
    """A frozen linear layer that stays where it is, in main memory, wherever its model goes."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = (_pinned(part) if part is not None else None for part in (layer.weight, layer.bias))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        weight, bias = (part.to(given.device, non_blocking=True) if part is not None else None for part in (self.weight, self.bias))
        assert weight is not None
        return torch.nn.functional.linear(given, weight, bias)

    def _apply(self, *_: Any, **__: Any) -> Coming:
        return self


def _pinned(part: torch.Tensor) -> torch.nn.Parameter:
    """Where there is a GPU, memory from which it fetches without a copy on the way."""
    there = part.detach()
    return torch.nn.Parameter(there.pin_memory() if torch.cuda.is_available() else there, requires_grad=False)


def linear(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    """The linear layers of the transformer blocks that are not an adapter's, by name, block after block."""
    return [(name, part) for name, part in model.named_modules() if type(part) is torch.nn.Linear and BLOCK.match(name) and ".lora_" not in name]


def _block(name: str) -> str:
    found = BLOCK.match(name)
    assert found is not None
    return found[1]


def _in_four_bits(layer: torch.nn.Linear, computed: torch.dtype) -> torch.nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit  # type: ignore[import-untyped]

    kind: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
    made: torch.nn.Module = Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, computed, device="meta", **kind)
    made.weight = Params4bit(layer.weight.detach(), requires_grad=False, module=made, **kind)
    made.bias = layer.bias
    # Some CPUs get weights packed anew at the first look without gradients, and nothing is learned over those.
    made.support_avx512bf16_for_cpu = False
    return made


def vae_of(folder: Path, init: str, dtype: torch.dtype) -> Any:
    """The autoencoder: images in [-1, 1], (batch, 3, height, width), to and from latents, (batch, channels, height / 8, width / 8) for most."""
    from diffusers import AutoencoderKL

    return part(AutoencoderKL, folder, "vae", init, dtype)


def encoded(vae: Any, image: torch.Tensor) -> torch.Tensor:
    """The latent of one image (1, 3, height, width): (channels, height / 8, width / 8), 32 bits, on the CPU."""
    with torch.no_grad():
        mode = vae.encode(image).latent_dist.mode()[0].float()
    return ((mode - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor).cpu()


def decoded(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """The image of such a latent: (height, width, 3), whole numbers 0 to 255."""
    with torch.no_grad():
        raw = latent[None].to(vae.device) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        image = vae.decode(raw.to(vae.dtype)).sample[0].float()
    return ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu()


def scheduler_of(kind: Any, base: Path) -> Any:
    return kind.from_config(kind.load_config(base / "scheduler"))


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def caption_file(caption: str) -> str:
    """The file of a caption's embeddings: a caption that many images have is embedded once."""
    return f"{hashlib.sha256(caption.encode()).hexdigest()[:32]}.safetensors"


def digest(*files: Path) -> str:
    """SHA-256 over names and contents."""
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            whole.update(f"{file.name}:{hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def identity(base: Path) -> str:
    """A name for the base model's files that is quick to take: what the configs say, and how long each file is."""
    files = sorted((file.relative_to(base).as_posix(), file.stat().st_size) for file in base.rglob("*") if file.is_file())
    configs = sorted(file for file in base.rglob("config.json"))
    return hashlib.sha256(repr(files).encode() + b"".join(file.read_bytes() for file in configs)).hexdigest()
