"""Environment variables that a step inherits.

Most come from the login on its machine, and three have fixed values.

None of them is part of a cache key.  Variables that look like tokens are never inherited; those are
`secrets`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ..secrets import is_tokenlike

NAMES: Final = frozenset(
    {
        "HOME",
        "USER",
        "LOGNAME",
        "TMPDIR",
        "REQUESTS_CA_BUNDLE",
        "LD_LIBRARY_PATH",
        "HF_HOME",
        "HF_ENDPOINT",
        "TORCH_HOME",
        "CUDA_HOME",
    }
    | {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
)
BEGINNINGS: Final = ("SSL_CERT_", "HF_HUB_", "XDG_", "NCCL_")
ENDS: Final = ("_proxy", "_PROXY")
SAME: Final[Mapping[str, str]] = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
"""Fixed values: locale and time zone change results."""
SANDBOX_HOME: Final = "/tmp/home"  # noqa: S108  (a path in the sandbox)
"""An empty directory that `agent/sandbox.py` creates."""
_OWN_FOLDERS: Final = ("HOME", "TMPDIR", "HF_HOME", "TORCH_HOME")
_IN_CONTAINERS: Final = ("HF_HUB_", "HF_ENDPOINT", "NCCL_")


def inherit_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the login variables that a step on this machine inherits."""
    return {name: value for name, value in environ.items() if _is_inherited(name, value)}


def container_variables(login: Mapping[str, str]) -> dict[str, str]:
    """Return the login variables for a container on the same machine.

    GPU numbers and paths are left out, because they differ there.
    """
    return {name: value for name, value in login.items() if _is_for_containers(name, value)}


def sandbox_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a step in a sandbox, without paths to the login's own directories."""
    kept = {name: value for name, value in env.items() if not _is_own_folder(name)}
    return {**kept, "HOME": SANDBOX_HOME}


def fixed_variables(given: Collection[str]) -> dict[str, str]:
    """Return the fixed variables, except those that the step sets itself.

    Our LC_ALL must not overrule the step's locale.
    """
    fixed = {name: value for name, value in SAME.items() if name not in given}
    if any(name == "LANG" or name.startswith("LC_") for name in given):
        fixed.pop("LANG", None)
        fixed.pop("LC_ALL", None)
    return fixed


def _is_inherited(name: str, value: str) -> bool:
    is_listed = name in NAMES or name.startswith(BEGINNINGS) or name.endswith(ENDS)
    return is_listed and not is_tokenlike(name, value)


def _is_for_containers(name: str, value: str) -> bool:
    is_listed = name.startswith(_IN_CONTAINERS) or name.endswith(ENDS)
    return is_listed and not value.startswith("/")


def _is_own_folder(name: str) -> bool:
    return name in _OWN_FOLDERS or name.startswith("XDG_")
