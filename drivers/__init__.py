"""Where hosts come from: the table of drivers that exist, and what installs the rest.  Loads none of them until it is asked for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .base import Driver


def install_line(*extras: str) -> str:
    """The command that installs what an extra brings.  The distribution is called recipe-runner: `recipe` on PyPI is another project."""
    return f"pip install 'recipe-runner[{','.join(extras)}]'"


DRIVERS = {
    "local": ("drivers.local:LocalHost", ""),
    "ssh": ("drivers.ssh:Ssh", install_line("ssh")),
    "vastai": ("drivers.vastai:Vastai", install_line("vastai")),
    "gcp": ("drivers.gcp:Gcp", install_line("gcp")),
    "runpod": ("drivers.runpod:Runpod", install_line("runpod")),
    "prime": ("drivers.prime:Prime", install_line("prime")),
    "slurm": ("drivers.slurm:Slurm", ""),
    "ray": ("drivers.ray:Ray", install_line("ray")),
    "loopback": ("drivers.loopback:Loopback", ""),
}
"""name -> (module:class, what to install for it); of this machine, on which nothing is taken, the class of its host"""
FREE = ("local", "ssh")
"""Those whose machines cost nothing, whatever the settings say: to know that, none is loaded."""


def load(name: str, known: Mapping[str, tuple[str, str]] = DRIVERS) -> Callable[..., Driver]:
    """The driver class called `name` in a table such as ours.

    Raises Rejected, naming the nearest, when there is none; Denied when something must be installed first.
    """
    from importlib import import_module

    from .base import Denied, Rejected

    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        raise Rejected(
            f'there is no driver "{name}"'
            + (f', did you mean "{near[0]}"?' if near else "")
            + f" (known: {', '.join(sorted(known))})"
        )
    target, install = known[name]
    module, _, attribute = target.partition(":")
    try:
        made: Callable[..., Driver] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise Denied(f'the driver "{name}" needs {error.name}: {install}') from error
    except (ImportError, AttributeError) as error:
        raise Denied(
            f'the driver "{name}" is {target}, which cannot be imported ({error}): {install}'
        ) from error
    return made
