"""The environment variables that a step gets without asking: from the login on the machine that it runs on, and three that are always the same.

None of them is part of a key.  What looks like a token is never among them: those are `secrets`.
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
"""What changes results: how texts are sorted and read, and what time it is."""
SANDBOX_HOME: Final = "/tmp/home"  # noqa: S108  (a path in the sandbox)
"""An empty folder that `agent/closed.py` makes."""
_OWN_FOLDERS: Final = ("HOME", "TMPDIR", "HF_HOME", "TORCH_HOME")
_IN_CONTAINERS: Final = ("HF_HUB_", "HF_ENDPOINT", "NCCL_")


def inherit_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a step on this machine gets of a login's variables."""
    return {
        name: value
        for name, value in environ.items()
        if _is_listed(name) and not is_tokenlike(name, value)
    }


def in_container(login: Mapping[str, str]) -> dict[str, str]:
    """The part of `inherited` that makes sense in a container on the same machine: no GPU is numbered alike there, and no path leads anywhere."""
    return {
        name: value
        for name, value in login.items()
        if (name.startswith(_IN_CONTAINERS) or name.endswith(ENDS)) and not value.startswith("/")
    }


def in_sandbox(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a step that sees none of the login's own folders."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in _OWN_FOLDERS and not name.startswith("XDG_")
    }
    return {**kept, "HOME": SANDBOX_HOME}


def settled_variables(given: Collection[str]) -> dict[str, str]:
    """What is always the same, but for the names that a step sets or has passed on: a locale of its own is not overruled by our LC_ALL."""
    own = any(name == "LANG" or name.startswith("LC_") for name in given)
    return {
        name: value
        for name, value in SAME.items()
        if name not in given and not (own and name != "TZ")
    }


def _is_listed(name: str) -> bool:
    return name in NAMES or name.startswith(BEGINNINGS) or name.endswith(ENDS)
