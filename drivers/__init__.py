"""The table of drivers, and the commands that install their extras.

Drivers are imported on demand.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .base import Driver


def install_line(*extras: str) -> str:
    """Return the shell command that installs extras into this copy of recipe.

    The command depends on the original installation: a checkout, an address or an index.
    """
    from .installing import install_command

    return install_command(extras)


DRIVERS = {
    "local": ("drivers.local:LocalHost", ""),
    "ssh": ("drivers.ssh:Ssh", "ssh"),
    "vastai": ("drivers.vastai:Vastai", "vastai"),
    "gcp": ("drivers.gcp:Gcp", "gcp"),
    "runpod": ("drivers.runpod:Runpod", "runpod"),
    "prime": ("drivers.prime:Prime", "prime"),
    "slurm": ("drivers.slurm:Slurm", ""),
    "ray": ("drivers.ray:Ray", "ray"),
    "loopback": ("drivers.loopback:Loopback", ""),
}
"""Import path and extra of each driver by name.  The entry of `local` is a Host class."""
ACCOUNT_VARIABLES = {
    "vastai": ("VAST_API_KEY",),
    "runpod": ("RUNPOD_API_KEY",),
    "prime": ("PRIME_API_KEY",),
    "gcp": (
        "CLOUDSDK_AUTH_ACCESS_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "CLOUDSDK_CORE_PROJECT",
        "GOOGLE_CLOUD_PROJECT",
    ),
}
"""Environment variables with credentials, by driver name.

Reading them needs no import of a driver.
"""
FREE = ("local", "ssh")
"""Names of drivers whose machines are always free.  Reading them needs no import of a driver."""


def load(name: str, known: Mapping[str, tuple[str, str]] = DRIVERS) -> Callable[..., Driver]:
    """Load the driver class called `name` from a table like DRIVERS.

    In an extension's table, installation advice stands in place of the extra. Raises Rejected with
    the most similar name if the name is unknown, and Denied if a package must be installed first.
    """
    from .base import Denied, Rejected

    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        hint = f', did you mean "{near[0]}"?' if near else ""
        raise Rejected(f'unknown driver "{name}"{hint} (known: {", ".join(sorted(known))})')
    target, advice = known[name]
    module, _, attribute = target.partition(":")
    try:
        made: Callable[..., Driver] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise Denied(
            f'the driver "{name}" requires {error.name}: {_install(name, advice)}'
        ) from error
    except (ImportError, AttributeError) as error:
        raise Denied(
            f'cannot import {target} of the driver "{name}" ({error}): {_install(name, advice)}'
        ) from error
    return made


def _install(name: str, advice: str) -> str:
    """Return the installation command of a driver: our extra, or an extension's own advice."""
    return install_line(advice) if name in DRIVERS and advice else advice
