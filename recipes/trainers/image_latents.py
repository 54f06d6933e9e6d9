"""Step `latents`: put every prepared image through the autoencoder, once.  Knows pixels, not captions: a caption that is edited changes nothing here.

One file for each image, `<id>.safetensors` with `latent` (channels, height / 8, width / 8), 32 bits, shifted and scaled as the denoiser wants it.  It
is the mode of the encoder's distribution, so that the same image has the same latent whenever and in whatever company it is encoded.  Where
the prepared image has a mask, as its alpha channel, the file has `mask`, too: (1, height / 8, width / 8), 0 to 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from image_model import DTYPES, INITS, device, encoded, quiet, vae_of
from precision import ASKED, chosen
from safetensors.torch import save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("images", "vae", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--init", choices=INITS, required=True)
    parser.add_argument("--precision", choices=ASKED, required=True, help="of the autoencoder")
    options = parser.parse_args()

    quiet()
    where, precision = device(), chosen(options.precision)
    # Two runs are equal, on a GPU too.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    vae = vae_of(options.vae, options.init, DTYPES[precision]).to(where)
    options.out.mkdir(parents=True, exist_ok=True)
    files = sorted(options.images.glob("*.png"))
    for file in files:
        latent = encoded(vae, pixels(file).to(where, DTYPES[precision]))
        if not latent.isfinite().all():
            sys.exit(f"latents: {file.name}: the autoencoder gives numbers that are none in precision {precision}; SDXL's own does in fp16. "
                     "Take vae=madebyollin/sdxl-vae-fp16-fix, or vae_precision=no")  # fmt: skip
        save_file({"latent": latent.contiguous()} | mask(file, latent), options.out / f"{file.stem}.safetensors")
    print(f"latents: {len(files)} images on {where.type}, precision {precision}, {sum(f.stat().st_size for f in options.out.iterdir()) / 1e6:.1f} MB")


def pixels(file: Path) -> torch.Tensor:
    """An image as (1, 3, height, width) in [-1, 1]."""
    import numpy as np
    from PIL import Image

    with Image.open(file) as image:
        read = np.array(image.convert("RGB"))
    return torch.from_numpy(read).permute(2, 0, 1)[None].float() / 127.5 - 1


def mask(file: Path, latent: torch.Tensor) -> dict[str, torch.Tensor]:
    """`mask`, how much of each place of the latent is to be learned, where the image has such a channel."""
    import numpy as np
    from PIL import Image

    with Image.open(file) as image:
        if image.mode != "RGBA":
            return {}
        shown = torch.from_numpy(np.array(image.getchannel("A"))).float()[None] / 255
    return {"mask": torch.nn.functional.adaptive_avg_pool2d(shown, latent.shape[-2:])}


if __name__ == "__main__":
    main()
