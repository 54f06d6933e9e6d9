"""Tell what a machine has for a training, and what the GPU there can: one more script after that of `drivers.machine`.  Changes nothing there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from drivers import machine as driven
from drivers.base import DriverError

from ..rules import Facts
from ..tool_settings import Unknown
from . import GB

PATIENCE: Final = 20.0
"""Seconds in which this machine says what it has."""
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
"""Follows the question of `drivers.machine`: what rules ask of a host besides its sizes."""


def facts(name: str, said: bytes) -> dict[str, object]:
    """Return the facts of a host from its answer. What it did not tell is left out, as unknown."""
    facts = driven.facts(said)
    have = driven.resources(facts)
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
    """Return who rents out a host, as it says or as its address tells; None if it is not rented."""
    for provider in said:
        if provider in _PROVIDERS:
            return provider
    for provider, address in _PROVIDERS.items():
        if address in name:
            return provider
    return None


_PROVIDERS: Final = {"vast": ".vast.ai", "runpod": ".runpod.io"}
"""Who rents machines out, and how the addresses of their proxies end; a machine that is reached directly tells itself whose it is."""


def offer(host: Facts) -> dict[str, object]:
    """What is known of a rented machine by looking at it.  How long it may be had, and whose it is, only its provider can tell."""
    if (provider := host["rented"]) is None:
        return dict.fromkeys(("provider", "ssh", "auto_tmux", "hours_left", "verified"))
    return {
        "provider": provider,
        "ssh": "proxy" if "@ssh.runpod.io" in str(host["name"]) else "direct",
        "auto_tmux": host["auto_tmux"],
    }


def here(root: Path) -> dict[str, object]:
    """The facts of this machine; `root` is where its disk is looked at."""
    import subprocess

    question = driven.question(str(root), SCRIPT)
    try:
        said = subprocess.run(question, capture_output=True, timeout=PATIENCE).stdout
    except subprocess.TimeoutExpired:
        raise Unknown(f"this machine did not report its hardware within {PATIENCE:g} s") from None
    return facts("this machine", said)


async def ask(driver: Any) -> dict[str, object]:
    """The facts of the first host of a driver that answers.  Raises DriverError."""
    from ...hosts.probe import visit

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


def gpu(step: Facts, host: Facts) -> dict[str, object]:
    """The GPU that the step will have: that of the host that was asked, else the kind that it asks for."""
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
                except Unknown:
                    pass
            return found
    except Unknown:
        pass
    if isinstance(wanted := step["gpu"], str):
        found["name"] = wanted
        if (kind := kind_of(wanted)) is not None:
            found["capability"] = kind.capability
    if step["gpu_memory"] is not None:
        found["memory"] = step["gpu_memory"]
    return found


def kind_of(name: object) -> Any:
    """The GPU of that name as recipes/hardware.yaml has it; None for one that it has not."""
    from ...errors import NotFound
    from .. import estimates

    try:
        return estimates.figures().find(str(name))
    except NotFound:
        return None
