"""Fake providers for trials and tests at no cost.

Each one is a `World`, served over HTTP by `serve`, and is imported on first use.
"""

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
"""Provider name -> `module:class`."""


def kind(name: str) -> type[World[Any]]:
    """Return the class of a fake provider.  Raises KeyError for an unknown name."""
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
    """Serve a fake provider on loopback until SIGINT or SIGTERM.

    `ready` receives the lines to export once the server listens.  If `real`, the machines accept
    SSH logins. Raises ValueError for invalid faults, ModuleNotFoundError if an extra is missing,
    OSError if the port is unavailable.
    """
    from .app import run

    run(kind(name), port, faults, seed, virtual, real, ready)
