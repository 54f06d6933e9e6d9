"""Gather the hardware facts of a machine, and the abilities of its GPU.

Sends a read-only script along with the probe of `drivers.machine`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from drivers import machine as driven
from drivers.base import DriverError

from ...errors import NotFound
from ...hosts.probe import visit
from .. import estimates
from ..rules import RuleFacts
from ..tool_settings import UnknownSetting
from . import GB

PATIENCE: Final = 20.0
"""Timeout for the probe of this machine, in seconds."""
SCRIPT: Final = (
    r"""
df -Pk /dev/shm 2>/dev/null | { read -r _; read -r _ total _ && echo "shm=$((total * 1024))"; }
smi capability= --query-gpu=compute_cap --format=csv,noheader
smi gpu_driver= --query-gpu=driver_version --format=csv,noheader
"""
    + driven.CUDA
    + r"""
{ env; tr '\000' '\n' </proc/1/environ; } 2>/dev/null | sed -n 's/^VAST_CONTAINERLABEL=.*/rented=vast/p; s/^RUNPOD_POD_ID=.*/rented=runpod/p'
[ -e "$HOME/.no_auto_tmux" ] && echo no_tmux=yes
"""
)
"""Shell script appended to the probe of `drivers.machine`, for the other facts of rules."""


def facts(name: str, said: bytes) -> dict[str, object]:
    """Return the known hardware facts of a host, read from its probe output."""
    facts = driven.facts(said)
    have = driven.parse_resources(facts)
    found: dict[str, object] = {"name": name, "gpus": have.gpus or 0, "gpu": have.gpu}
    if have.memory:
        found["memory"] = round(have.memory / GB, 1)
    if have.disk:
        found["disk"] = round(have.disk / GB, 1)
    if have.gpu_memory:
        found["gpu_memory"] = round(have.gpu_memory / GB, 3)
    first = {key: texts[0] for key, texts in facts.items() if texts}
    shm = first.get("shm", "")
    if shm.isdecimal():
        found["shm"] = round(int(shm) / GB, 3)
    for key in ("capability", "cuda"):
        if re.fullmatch(r"\d+(\.\d+)?", first.get(key, "")):
            found[key] = float(first[key])
    driver = re.findall(r"\d+", first.get("gpu_driver", ""))
    if driver:
        found["driver"] = [int(part) for part in driver]
    found["rented"] = _provider(name, facts.get("rented", ()))
    found["auto_tmux"] = found["rented"] == "vast" and not facts.get("no_tmux")
    return found


def _provider(name: str, said: Iterable[str]) -> str | None:
    """Return the provider of a rented host, or None if the host is not rented.

    The provider is recognized by the host's own report or by its address.
    """
    for provider in said:
        if provider in _PROVIDERS:
            return provider
    for provider, address in _PROVIDERS.items():
        if address in name:
            return provider
    return None


_PROVIDERS: Final = {"vast": ".vast.ai", "runpod": ".runpod.io"}
"""Provider -> domain of its SSH proxies.  Directly reached machines report their provider."""


def offer(host: RuleFacts) -> dict[str, object]:
    """Return the facts of a rental offer that the rented machine itself shows.

    Only the provider knows the remaining hours and the verification.
    """
    provider = host["rented"]
    if provider is None:
        return dict.fromkeys(("provider", "ssh", "auto_tmux", "hours_left", "verified"))
    ssh = "proxy" if "@ssh.runpod.io" in str(host["name"]) else "direct"
    return {"provider": provider, "ssh": ssh, "auto_tmux": host["auto_tmux"]}


def here(root: Path) -> dict[str, object]:
    """Return the hardware facts of this machine. `root` selects the disk.

    Raises UnknownSetting after a timeout.
    """
    question = driven.question(str(root), SCRIPT)
    try:
        said = subprocess.run(question, capture_output=True, timeout=PATIENCE).stdout
    except subprocess.TimeoutExpired:
        raise UnknownSetting(
            f"this machine did not report its hardware within {PATIENCE:g} s"
        ) from None
    return facts("this machine", said)


async def ask(driver: Any) -> dict[str, object]:
    """Return the hardware facts of a driver's first host that answers. Raises DriverError."""
    failed: DriverError | None = None
    async with aclosing(visit(driver)) as hosts:
        async for name, host in hosts:
            if isinstance(host, DriverError):
                failed = failed or host
                continue
            try:
                said = b"".join(
                    [data async for data in host.call(driven.question(host.root, SCRIPT))]
                )
                return facts(name, said)
            except DriverError as error:
                failed = failed or error
            finally:
                await host.aclose()
    if failed is not None:
        raise failed
    return {}


def gpu(step: RuleFacts, host: RuleFacts) -> dict[str, object]:
    """Return the facts of the step's GPU, from the probed host or else from the step's resources."""
    found: dict[str, object] = {}
    try:
        if (host["gpus"] or 0) > 0:  # type: ignore[operator]
            found["name"] = host["gpu"]
            for name, key in (
                ("capability", "capability"),
                ("cuda_max", "cuda"),
                ("memory", "gpu_memory"),
            ):
                try:
                    found[name] = host[key]
                except UnknownSetting:
                    pass
            return found
    except UnknownSetting:
        pass
    wanted = step["gpu"]
    if isinstance(wanted, str):
        found["name"] = wanted
        kind = kind_of(wanted)
        if kind is not None:
            found["capability"] = kind.capability
    if step["gpu_memory"] is not None:
        found["memory"] = step["gpu_memory"]
    return found


def kind_of(name: object) -> Any:
    """Return the GPU model with this name from recipes/hardware.yaml, or None if it is unknown."""
    try:
        return estimates.load_hardware().find(str(name))
    except NotFound:
        return None
