"""Providers that cost nothing, for trials and tests: each a World, served over HTTP by `serve`.  Loads none of them until it is asked for one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import World

WORLDS: Final = {
    "vastai": "drivers.fakes.vastai:Vastai",
    "runpod": "drivers.fakes.runpod:Runpod",
    "gcp": "drivers.fakes.gcp:Gcp",
    "prime": "drivers.fakes.prime:Prime",
}
"""name -> module:class"""


def kind(name: str) -> type[World[Any]]:
    """The class of a fake provider.  Raises KeyError when there is none of that name."""
    module, _, attribute = WORLDS[name].partition(":")
    found: type[World[Any]] = getattr(import_module(module), attribute)
    return found


def serve(
    name: str,
    port: int,
    faults: str,
    seed: int,
    virtual: bool,
    real: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve a fake provider on loopback until SIGINT or SIGTERM.  `ready` is called with the lines to export once it listens.

    `real`: its machines can be logged in to.  Raises ValueError for faults that cannot be read,
    ModuleNotFoundError without the extra, OSError where the port cannot be had.
    """
    from .app import run

    run(kind(name), port, faults, seed, virtual, real, ready)
