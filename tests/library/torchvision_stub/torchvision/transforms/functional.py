from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image


def resize(image: Any, size: Sequence[int], interpolation: object = None) -> Any:
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR)


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    return image.crop((left, top, left + width, top + height))


def center_crop(image: Any, size: Sequence[int]) -> Any:
    return crop(
        image,
        round((image.height - size[0]) / 2),
        round((image.width - size[1]) / 2),
        size[0],
        size[1],
    )


def hflip(image: Any) -> Any:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def pil_to_tensor(image: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def to_tensor(image: Any) -> Any:
    return pil_to_tensor(image).float() / 255


def normalize(tensor: Any, mean: Sequence[float], std: Sequence[float]) -> Any:
    return (tensor - mean[0]) / std[0]
