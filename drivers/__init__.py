"""Where hosts come from: the table of drivers that exist.  Loads none of them until it is asked for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Driver

DRIVERS = {
    "local": ("drivers.local:Local", ""),
    "ssh": ("drivers.ssh:Ssh", "pip install 'recipe[ssh]'"),
    "loopback": ("drivers.loopback:Loopback", ""),
}
"""name -> (module:class, what to install for it)"""


def load(name: str) -> Callable[..., Driver]:
    """The driver class called `name`.  Raises Rejected, naming the nearest, when there is none; Denied when something must be installed first."""
    from importlib import import_module

    from .base import Denied, Rejected

    if name not in DRIVERS:
        from difflib import get_close_matches

        near = get_close_matches(name, DRIVERS, n=1)
        raise Rejected(f'there is no driver "{name}"' + (f', did you mean "{near[0]}"?' if near else "") + f" (known: {', '.join(sorted(DRIVERS))})")
    target, install = DRIVERS[name]
    module, _, attribute = target.partition(":")
    try:
        made: Callable[..., Driver] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise Denied(f'the driver "{name}" needs {error.name}: {install}') from error
    return made
