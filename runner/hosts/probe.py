"""Check the capabilities of a host for steps, for `recipe doctor`.

The output of one shell script is parsed into findings.

The script needs only `Host.call`.  Its output is untrusted: invalid lines are ignored, and shown
text is made printable.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from drivers import machine
from drivers.base import (
    Driver,
    DriverError,
    Host,
    Need,
    NoCapacity,
    Offer,
    Unreachable,
    Wish,
)

from .engines import ENGINES
from .link.stream import OWN, PYTHONS

_LITTLE: Final = 10 * 10**9  # bytes of disk for a small training
_OLDEST: Final = (3, 11)  # oldest Python that can create environments of recipes
_SHOWN: Final = 120  # maximum characters of shown host output
_CLOCKS_APART: Final = 60  # seconds of clock difference

# Creates user, mount, process and network namespaces; only a mount proves that they work.
_NAMESPACES: Final = (
    "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); "
    'made = not c.unshare(0x70020000) and not c.mount(b"/", b"/", None, 0x5000, None); '
    'print("ok" if made else os.strerror(ctypes.get_errno()))'
)
# Runs after the script of `drivers.machine`, which sets $root.
_SCRIPT: Final = (
    r"""
echo "system=$(uname -srm 2>/dev/null)"
echo "login=$(id -un 2>/dev/null || id -u)"
for tool in bash cat chmod date docker env git ln mkdir mv nvidia-smi podman python3 rm sed uv; do
    where=$(command -v "$tool" 2>/dev/null) && echo "tool=$tool $where"
done
line() { { "$@" 2>&1 || :; } | head -n 1; }
echo "python3=$(line python3 -c 'import sys; print(".".join(map(str, sys.version_info[:3])))')"
for python in PYTHONS "$root/OWN"; do
    command -v "$python" >/dev/null 2>&1 || continue
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9) or sys.implementation.name != "cpython")' 2>/dev/null || continue
    echo "agent=$python"
    echo "sandbox=$("$python" -I -S -c 'NAMESPACES' 2>&1 | tail -n 1)"
    break
done
{ python3 -c 'import venv, ensurepip' || python3 -c 'import venv, pip'; } 2>/dev/null && echo venv=yes
patiently=$(command -v timeout >/dev/null 2>&1 && echo timeout 10)
engine() { # name, how it is asked for its version: it must answer, and not only be installed
    command -v "$1" >/dev/null 2>&1 || return
    if said=$($patiently "$@" 2>&1); then
        echo "$1=ok $(echo "$said" | tail -n 1)"
    else
        echo "$1=no $(echo "$said" | tail -n 1)"
    fi
}
engine docker info --format '{{.ServerVersion}}'
engine podman info --format '{{.Version.Version}}'
engine apptainer --version
engine singularity --version
engine enroot version
command -v nvidia-ctk >/dev/null 2>&1 && echo "container_gpus=nvidia-ctk"
command -v nvidia-container-runtime >/dev/null 2>&1 && echo "container_gpus=nvidia-container-runtime"
smi gpu_driver= --query-gpu=driver_version --format=csv,noheader
CUDA
for card in /dev/nvidia[0-9]*; do [ -e "$card" ] && echo "card=$card"; done
mkdir -p "$root" 2>/dev/null
probe=$root/.probe.$$
if (umask 077; printf '#!/bin/sh\necho yes\n' >"$probe") 2>/dev/null && chmod 700 "$probe"; then
    echo writable=yes
    [ "$("$probe" 2>/dev/null)" = yes ] && echo executable=yes
    ln -s x "$probe.l" 2>/dev/null && echo links=yes
fi
rm -f "$probe" "$probe.l" 2>/dev/null
rmdir "$root" 2>/dev/null
echo "boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
[ -r /proc/self/environ ] && echo proc=yes
""".replace("PYTHONS", " ".join(PYTHONS))
    .replace("NAMESPACES", _NAMESPACES)
    .replace("OWN", OWN)
    .replace("CUDA\n", machine.CUDA)
)

_NEEDED: Final = ("cat", "chmod", "date", "env", "ln", "mkdir", "mv", "rm", "sed")
"""Programs that are necessary to use a host."""
_WANTED: Final = {
    "python3": "install python3 for steps that run Python, or set `python` in the settings",
    "git": "install git for recipes whose `code` comes from a repository",
    "bash": "install bash for steps with `shell: bash`",
}
"""Programs that some recipes need."""


class ProbeLine(NamedTuple):
    """One line of the report.

    `missing` means that something does not work without it.  `host` is empty for this machine.
    """

    state: Literal["ok", "note", "missing"]
    what: str
    found: str
    advice: str = ""
    host: str = ""


async def examine(driver: Driver) -> list[ProbeLine]:
    """Check all hosts of `driver`.

    An unreachable host and a driver without hosts are findings too.
    """
    findings: list[ProbeLine] = []
    if driver.console:
        return await _examine_account(driver)
    findings += [ProbeLine("note", "settings", line) for line in driver.notices]
    try:
        findings += [ProbeLine("ok", what, words) for what, words in await driver.about()]
        async for name, host in visit(driver):
            if isinstance(host, DriverError):
                findings.append(_refusal(host)._replace(host=name))
                continue
            try:
                output = b"".join(
                    [data async for data in host.call(machine.question(host.root, _SCRIPT))]
                )
                findings += [finding._replace(host=name) for finding in parse_findings(output)]
            except DriverError as error:
                findings.append(_refusal(error)._replace(host=name))
            finally:
                await host.aclose()
    except DriverError as error:
        findings.append(_refusal(error))
    return findings


async def _examine_account(driver: Driver) -> list[ProbeLine]:
    """Check the provider account and its offers.  Rents nothing."""
    try:
        lines = [ProbeLine("ok", what, fact) for what, fact in await driver.account()]
        lines += [ProbeLine("missing", what, why) for what, why in await driver.unusable()]
        lines.append(_describe_offers(await driver.offers(Wish(Need(gpus=1)))))
        lines.append(_describe_machines(len(await driver.leases())))
        return lines
    except DriverError as error:
        return [_refusal(error)]
    finally:
        await driver.aclose()


def _describe_offers(offers: Sequence[Offer]) -> ProbeLine:
    if not offers:
        return ProbeLine("note", "offers", "no offer passes the filters", "relax the filters")
    cheapest = f"{len(offers)} machines with a GPU, from ${offers[0].price:.2f} an hour"
    return ProbeLine("ok", "offers", cheapest)


def _describe_machines(count: int) -> ProbeLine:
    machines = f"{count} of this installation"
    if not count:
        return ProbeLine("ok", "machines", machines, "")
    return ProbeLine("note", "machines", machines, "list their runs with `recipe reap -n`")


async def visit(driver: Driver) -> AsyncGenerator[tuple[str, Host | DriverError], None]:
    """Yield each host with its name, or the error that prevents the check.  Rents nothing."""
    if driver.traits.visits:
        async for name, host in driver.visit():
            yield name, host
        return
    for offer in await driver.offers(Wish()):
        yield offer.id, NoCapacity("offered; details are visible only after renting")


def _refusal(error: DriverError) -> ProbeLine:
    if isinstance(error, NoCapacity):
        return ProbeLine("note", "offer", str(error))
    advice = ""
    if isinstance(error, Unreachable):
        advice = "check that the host is on and the address is correct; `ssh` with the same user, name and port shows more"
    return ProbeLine("missing", "connection", str(error), advice)


# --- parsing


def parse_findings(output: bytes) -> list[ProbeLine]:
    """Parse a host's answer into findings, the most important first."""
    facts = machine.facts(output)
    tools: dict[str, str] = {}
    for line in facts.get("tool", ()):
        name, _, path = line.partition(" ")
        tools[name] = path
    return [
        *_login(facts),
        *_programs(facts, tools),
        *_sizes(facts),
        *_gpus(facts),
        *_containers(facts, tools),
    ]


def _login(facts: machine.Facts) -> Iterator[ProbeLine]:
    yield ProbeLine(
        "ok",
        "shell",
        f"POSIX, on {_first_fact(facts, 'system') or 'an unknown system'}, as {_first_fact(facts, 'login') or 'an unknown user'}",
    )
    root = _first_fact(facts, "root")
    if "writable" not in facts:
        yield ProbeLine(
            "missing",
            "root",
            f"{root} is not writable",
            "set another `root` in the settings, or free disk space",
        )
    elif "executable" not in facts:
        yield ProbeLine(
            "note",
            "root",
            f"{root} is writable, but mounted noexec",
            "set `root` to another disk for steps that run their own programs",
        )
    elif "links" not in facts:
        yield ProbeLine(
            "missing",
            "root",
            f"{root} does not support symbolic links",
            "set `root` to another disk",
        )
    else:
        yield ProbeLine("ok", "root", f"{root}, writable")
    if "proc" not in facts:
        yield ProbeLine("note", "/proc", "missing", "leftover processes of a step cannot be found")


def _programs(facts: machine.Facts, tools: Mapping[str, str]) -> Iterator[ProbeLine]:
    lacking = [name for name in _NEEDED if name not in tools]
    if not lacking:
        yield ProbeLine("ok", "coreutils", f"{len(_NEEDED)} of {len(_NEEDED)} programs")
    for name in lacking:
        yield ProbeLine("missing", name, "not found", f"install {name} on the host")
    agent = _first_fact(facts, "agent")
    if agent:
        yield ProbeLine("ok", "agent", f"runs on {agent}")
    else:
        root = _first_fact(facts, "root")
        fix = f"install CPython 3.9 or later, set `python` in the settings, or unpack a Python to {root}/python (docs/remote-hosts.md)"
        yield ProbeLine("missing", "agent", "no CPython 3.9 or later", fix)
    yield from _sandbox(facts)
    for name, advice in _WANTED.items():
        if name not in tools:
            yield ProbeLine("note", name, "not found", advice)
        elif name != "python3":
            yield ProbeLine("ok", name, _printable(tools[name]))
        else:
            yield from _python(facts, tools)


def _sandbox(facts: machine.Facts) -> Iterator[ProbeLine]:
    answer = _first_fact(facts, "sandbox")
    if answer == "ok":
        yield ProbeLine("ok", "sandbox", "user, mount, process and network namespaces")
    elif answer:
        advice = "allow user namespaces for steps with `sandbox`"
        yield ProbeLine("note", "sandbox", _printable(answer), advice)


def _python(facts: machine.Facts, tools: Mapping[str, str]) -> Iterator[ProbeLine]:
    version = _first_fact(facts, "python3")
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        yield ProbeLine(
            "note",
            "python3",
            f"{_printable(tools['python3'])} does not work: {version}",
            "repair this Python, or set another `python` in the settings",
        )
    elif (int(numbers[1]), int(numbers[2])) < _OLDEST:
        yield ProbeLine(
            "note",
            "python3",
            f"{version} is old",
            "recipes with packages require 3.11 or newer: set `python` in the settings",
        )
    else:
        yield ProbeLine("ok", "python3", f"{version}, {_printable(tools['python3'])}")
    if "venv" not in facts:
        yield ProbeLine(
            "note",
            "venv",
            "this Python cannot create virtual environments",
            "install python3-venv for recipes that declare packages",
        )
    if "uv" in tools:
        yield ProbeLine("ok", "uv", _printable(tools["uv"]))


def _sizes(facts: machine.Facts) -> Iterator[ProbeLine]:
    have = machine.parse_resources(facts)
    if have.cpus:
        yield ProbeLine("ok", "cores", f"{have.cpus:g}")
    else:
        yield ProbeLine("note", "cores", "unknown", "")
    if have.memory:
        yield ProbeLine("ok", "memory", f"{have.memory / 1e9:.1f} GB")
    else:
        yield ProbeLine("note", "memory", "unknown", "")
    if have.disk is None:
        yield ProbeLine("note", "disk", "unknown", "a full disk is noticed only when a step fails")
    elif have.disk < _LITTLE:
        yield ProbeLine(
            "note",
            "disk",
            f"{have.disk / 1e9:.1f} GB free",
            "too little for most models: free disk space, or set `root` to another disk",
        )
    else:
        yield ProbeLine("ok", "disk", f"{have.disk / 1e9:.1f} GB free")
    now = _first_fact(facts, "now")
    if now.isdecimal() and len(now) < 12 and abs(int(now) - time.time()) > _CLOCKS_APART:
        yield ProbeLine(
            "note",
            "clock",
            f"{int(now) - time.time():+.0f} s off from this machine's clock",
            "set the clock, otherwise times in logs and reports do not match",
        )


def _gpus(facts: machine.Facts) -> Iterator[ProbeLine]:
    have = machine.parse_resources(facts)
    cards = len(facts.get("card", ()))
    if "hung" in facts:
        yield ProbeLine("missing", "gpus", machine.HUNG, machine.WEDGED)
    elif have.gpus:
        driver = _first_fact(facts, "gpu_driver") or "unknown"
        cuda = _first_fact(facts, "cuda") or "unknown"
        memory = f" with {have.gpu_memory / 1e9:.0f} GB" if have.gpu_memory else ""
        yield ProbeLine(
            "ok",
            "gpus",
            f"{have.gpus} x {_printable(have.gpu or '')}{memory} (driver {driver}, CUDA {cuda})",
        )
    elif cards or _names_nvidia(facts.get("gpu", ())):
        reason = _printable(next(iter(facts.get("gpu", ())), "nvidia-smi is not installed"))
        yield ProbeLine(
            "note",
            "gpus",
            f"{cards} in /dev, but they cannot be used: {reason}",
            "install the NVIDIA driver and nvidia-smi, or reboot after an update of it",
        )
    else:
        yield ProbeLine(
            "note",
            "gpus",
            "none",
            "for recipes that need a GPU, use another machine or a preset for CPUs (`--preset smoke`)",
        )


def _names_nvidia(rows: Iterable[str]) -> bool:
    """Return whether the output of nvidia-smi, or an error in it, is about its driver."""
    return any("NVIDIA" in row or "nvidia" in row for row in rows)


def _containers(facts: machine.Facts, tools: Mapping[str, str]) -> Iterator[ProbeLine]:
    usable = []
    for name in ENGINES:
        state, _, words = _first_fact(facts, name).partition(" ")
        if state == "ok":
            usable.append(name)
            yield ProbeLine("ok", name, _printable(words) or _printable(tools.get(name, "")))
        elif state == "no":
            yield ProbeLine(
                "note",
                name,
                f"cannot be used: {_printable(words)}",
                f"start its service, or allow this login to use it (`{name} info` must work)",
            )
    if not usable and not any(_first_fact(facts, name) for name in ENGINES):
        yield ProbeLine(
            "note",
            "containers",
            f"none of {', '.join(ENGINES)}",
            "install one for recipes with an `image`",
        )
    # Apptainer passes GPUs without the toolkit.
    needs_toolkit = set(usable) - {"apptainer", "singularity"}
    has_toolkit = "container_gpus" in facts
    if needs_toolkit and not has_toolkit and machine.parse_resources(facts).gpus:
        yield ProbeLine(
            "note",
            "gpus in containers",
            "no NVIDIA container toolkit",
            "install nvidia-container-toolkit, so that steps with an `image` can use GPUs",
        )


def _first_fact(facts: machine.Facts, name: str) -> str:
    return _printable(next(iter(facts.get(name, ())), ""))


def _printable(text: str) -> str:
    """Return untrusted text, printable and shortened."""
    return "".join(map(_mask_control, text))[:_SHOWN].strip()


def _mask_control(character: str) -> str:
    return character if character.isprintable() else "?"
