from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from typing import Any

from . import functional
from .functional import center_crop, crop, hflip, normalize, resize, to_tensor

__all__ = [
    "CenterCrop",
    "Compose",
    "InterpolationMode",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "Resize",
    "ToTensor",
    "functional",
]


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Compose:
    def __init__(self, parts: Sequence[Callable[[Any], Any]]) -> None:
        self._parts = parts

    def __call__(self, image: Any) -> Any:
        for part in self._parts:
            image = part(image)
        return image


class Resize:
    """The shorter side to `size` pixels."""

    def __init__(self, size: int, interpolation: object = None) -> None:
        self._size = size

    def __call__(self, image: Any) -> Any:
        scale = self._size / min(image.size)
        return resize(image, [round(image.height * scale), round(image.width * scale)])


class CenterCrop:
    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Any) -> Any:
        return center_crop(image, (self._size, self._size))


class RandomCrop:
    def __init__(self, size: int) -> None:
        self._size = size

    @staticmethod
    def get_params(image: Any, output_size: tuple[int, int]) -> tuple[int, int, int, int]:
        height, width = output_size
        return (
            random.randint(0, image.height - height),
            random.randint(0, image.width - width),
            height,
            width,
        )

    def __call__(self, image: Any) -> Any:
        return crop(image, *self.get_params(image, (self._size, self._size)))


class RandomHorizontalFlip:
    def __init__(self, p: float) -> None:
        self._p = p

    def __call__(self, image: Any) -> Any:
        return hflip(image) if random.random() < self._p else image


class ToTensor:
    def __call__(self, image: Any) -> Any:
        return to_tensor(image)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = mean, std

    def __call__(self, tensor: Any) -> Any:
        return normalize(tensor, self._mean, self._std)
