"""Hardware probe for machines with a POSIX shell: the script and the parser of its output.

The answer is lines of `name=value` (a name may come several times), so that a tool that is missing
there is a line that is missing, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from .base import Argv, Need, Resources, Wish
from .devices import PATIENCE

_Amount = TypeVar("_Amount", int, float)

ENOUGH = 0.93
"""Drivers and error correction keep some of a card's memory: what was sold as 24 GB may show this
share of it.
"""
# Non-interactive logins often miss what administrators and NVIDIA install beside the system.
PATH = "PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/cuda/bin:/opt/conda/bin; export PATH"

# `smi PREFIX ARGUMENT…` prints what nvidia-smi answers, each line behind PREFIX, and `hung=…` where
# it does not end. No signal ends the nvidia-smi of a GPU whose driver is wedged, so the reader of
# its output is waited for, and ended.
SMI = r"""
smi() {
    [ -z "$hung" ] && command -v nvidia-smi >/dev/null 2>&1 || return 0
    prefix=$1
    shift
    patiently=$(command -v timeout >/dev/null 2>&1 && echo timeout -s KILL KILLED)
    { $patiently nvidia-smi "$@" </dev/null 2>/dev/null & } 2>/dev/null | while read -r line; do echo "$prefix$line"; done &
    reader=$!
    (sleep PATIENCE & trap "kill $!; exit" TERM; wait $!; kill $reader) >/dev/null 2>&1 &
    clock=$!
    wait $reader 2>/dev/null
    [ $? -le 128 ] || { hung=nvidia-smi; echo "hung=$hung"; }
    kill $clock 2>/dev/null
    return 0
}
""".replace("PATIENCE", f"{PATIENCE:g}").replace("KILLED", f"{PATIENCE + 2:g}")

# $1: our root there, relative to the login's home or absolute.
SCRIPT = (
    PATH
    + SMI
    + r"""
case $1 in /*) root=$1 ;; '~') root=$HOME ;; '~/'*) root=$HOME/${1#??} ;; *) root=$HOME/$1 ;; esac
echo "root=$root"
echo "home=$HOME"
cpus=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null) && echo "cpus=$cpus"
{ read -r quota period </sys/fs/cgroup/cpu.max && [ "$quota" != max ] && echo "cpu_quota=$quota/$period"; } 2>/dev/null
quota=/sys/fs/cgroup/cpu/cpu.cfs
{ read -r most <${quota}_quota_us && read -r period <${quota}_period_us && [ "$most" -gt 0 ] && echo "cpu_quota=$most/$period"; } 2>/dev/null
{ while read -r name size _; do [ "$name" = MemTotal: ] && echo "memory=$((size * 1024))"; done </proc/meminfo; } 2>/dev/null
for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    { read -r size <"$limit" && [ "$size" != max ] && echo "memory=$size"; } 2>/dev/null
done
at=$root
while [ ! -d "$at" ] && [ "$at" != / ] && [ -n "$at" ]; do at=${at%/*}; done
df -Pk "${at:-/}" 2>/dev/null | { read -r _; read -r _ total _ free _ && echo "disk=$((free * 1024))" && echo "disk_total=$((total * 1024))"; }
smi gpu= --query-gpu=name,memory.total --format=csv,noheader,nounits
echo "now=$(date +%s)"
"""
)

Facts = Mapping[str, Sequence[str]]


CUDA = r"""
smi '' | sed -n 's/^hung=/&/p; s/.*CUDA Version: *\([0-9.]*\).*/cuda=\1/p'
"""
"""More of a question: the newest CUDA that the driver runs."""
GPUS = f"command -v nvidia-smi >/dev/null 2>&1 && echo smi=yes\n{CUDA}"
"""More of a question: whether a machine can say which GPUs it has, and the newest CUDA that its
driver runs.
"""
HUNG = f"nvidia-smi did not answer within {PATIENCE:g} s"
WEDGED = (
    "reboot the machine; if nvidia-smi is only slow, keep the driver loaded with `nvidia-smi -pm 1`"
)


def question(root: str, more: str = "") -> Argv:
    """Return the command that prints a machine's hardware facts.

    `more` is the caller's script, which finds the absolute root in `$root`.
    """
    return ("/bin/sh", "-c", f"{SCRIPT}{more}\n:", "sh", root)


def facts(said: bytes) -> Facts:
    """Parse the hardware script's output to names and values, ignoring unrelated lines."""
    told: dict[str, list[str]] = {}
    for line in said.decode("utf-8", "surrogateescape").splitlines():
        name, equals, value = line.partition("=")
        if equals and name.isidentifier():
            told.setdefault(name, []).append(value.strip())
    return told


def parse_resources(told: Facts) -> Resources:
    """Convert hardware facts to resources.

    Missing or senseless facts are unknown (None).  GPUs that cannot be asked about count as none.
    """
    names, sizes = [], []
    # Before it hung, nvidia-smi may have printed some of the GPUs.
    rows = () if "hung" in told else told.get("gpu", ())
    for row in rows:
        name, _, size = row.rpartition(",")
        if name:  # a line of the tool's without a comma is its complaint
            names.append(name.strip())
            with suppress(ValueError):
                sizes.append(int(size) << 20)
    cpus: float | None = min(_parse_numbers(told, "cpus"), default=None)
    for text in told.get("cpu_quota", ()):
        quota, _, period = text.partition("/")
        with suppress(ValueError, ZeroDivisionError):
            cpus = min(cpus or float("inf"), int(quota) / int(period))
    gpu = names[0] if names else None
    return Resources(
        cpus=float(cpus) if cpus else None,
        memory=min(_parse_numbers(told, "memory"), default=None),
        gpus=len(names),
        gpu=gpu,
        gpu_memory=min(sizes, default=None),
        disk=min(_parse_numbers(told, "disk"), default=None),
    )


def satisfies(have: Resources, wish: Wish) -> bool:
    """Return True if a machine with resources `have` satisfies `wish`.

    Unknown resources count as absent.
    """
    need = wish.need
    if need.nodes != 1 or need.market == "spot":
        return False
    if need.gpu and not _is_model(have.gpu, need.gpu):
        return False
    amounts = (
        (need.cpus, have.cpus),
        (need.memory, have.memory),
        (need.gpus, have.gpus),
        (need.gpu_memory, have.gpu_memory),
        (max(need.disk or 0, wish.disk or 0), have.disk),
    )
    return all(_is_met(wanted, there) for wanted, there in amounts)


def _is_met(wanted: float | None, there: float | None) -> bool:
    return wanted is None or wanted <= (there or 0)


def _is_model(gpu: str | None, wanted: str) -> bool:
    """Return True if the name of a GPU contains the wanted model."""
    return gpu is not None and wanted.lower() in gpu.lower()


def limit(have: _Amount | None, wanted: _Amount | None) -> _Amount | None:
    """Return the wanted amount of a resource, up to the available amount.

    Without a wanted amount, return all that is available.
    """
    return min(have, wanted) if have and wanted else have


def find_cuda_version(image: str) -> tuple[int, int] | None:
    """Return the CUDA version in an image name, such as 12.4 for `nvidia/cuda:12.4.1-base`.

    None if the name has no version. Short forms such as `cu1281` (12.8) count too.
    """
    if found := re.search(r"cuda[-_:]?(\d{1,2})(?:[._](\d{1,2}))?(?!\d)", image):
        return int(found[1]), int(found[2] or 0)
    found = re.search(r"(?<![a-z])cu(\d\d)(\d)", image)
    return (int(found[1]), int(found[2])) if found else None


def describe_shortfall(
    sold: Resources, need: Need, told: Facts, image: str = "", least: str = ""
) -> str:
    """Describe how a machine falls short of the sold or needed resources, or return "".

    These are the sold GPUs, the needed memory and disk, and the image's CUDA version.  Resources
    that cannot be measured count as present.  `least` is the CUDA version for images without one
    in their name.
    """
    of_image = find_cuda_version(image)
    needs = of_image or find_cuda_version(f"cuda{least}")
    of_driver = next(iter(told.get("cuda", ())), "")
    runs = find_cuda_version(f"cuda{of_driver}")
    if needs and runs and runs < needs:
        who = f"{image} needs" if of_image else "the setting `cuda` requires"
        return f"its driver runs CUDA {runs[0]}.{runs[1]} (nvidia-smi: CUDA Version), but {who} {needs[0]}.{needs[1]}"
    if sold.gpus and "hung" in told:
        return HUNG
    have = parse_resources(told)
    # Without nvidia-smi, the machine's GPUs cannot be counted.
    sold_gpus = sold.gpus if "smi" in told else None
    tests = (
        ("GPUs", sold_gpus, have.gpus, 1.0, 1.0),
        ("GB of GPU memory", sold.gpu_memory, have.gpu_memory, ENOUGH, 1e9),
        ("GB of memory", need.memory, have.memory, ENOUGH, 1e9),
        ("GB of disk", need.disk, have.disk, 1.0, 1e9),
    )
    for what, wanted, there, share, unit in tests:
        if not wanted or there is None:
            continue
        if there < wanted * share:
            return f"it has {there / unit:.0f} {what}, but {wanted / unit:.0f} were expected"
    return ""


def _parse_numbers(told: Facts, name: str) -> list[int]:
    return [int(text) for text in told.get(name, ()) if text.isascii() and text.isdecimal()]
