"""Make the locks of the library's environments: for each family every package at one version, and the SHA-256 of the files that a machine may take.

    python recipes/locks/make.py [FAMILY ...]      # needs uv on the PATH, and packaging; asks the package index

`FAMILY.in` says what a family's programs import.  One environment cannot serve all: ppo, axolotl and unsloth each want other versions of the rest.
What constraints.txt pins is taken where the family says no version of its own, so what the tests ran with is what is locked.  Kept are files for
Linux on x86_64 and aarch64, for the Pythons that are said below.  Hashes are those that the index states: from whatever index a host takes its files,
it gets these.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
# Of each family the Pythons, and whether constraints.txt holds for it: tools of others bring versions that they were made for.
FAMILIES = {
    "text": (("3.11", "3.12", "3.13"), True),
    "images": (("3.11", "3.12", "3.13"), True),
    "diffusers": (("3.11", "3.12", "3.13"), True),
    "embed": (("3.11", "3.12", "3.13"), True),
    "ppo": (("3.11", "3.12", "3.13"), True),
    "axolotl": (("3.12", "3.13"), False),
    "unsloth": (("3.11", "3.12", "3.13"), False),
}
MACHINES = ("x86_64", "aarch64")


def main(families: list[str]) -> None:
    for family in families or list(FAMILIES):
        pythons, constrained = FAMILIES[family]
        lines = [line for package in _resolved(family, pythons[0], constrained) for line in _lines(package, pythons)]
        head = f"# Made by make.py from {family}.in: Linux, {' and '.join(MACHINES)}, CPython {', '.join(pythons)}."
        (HERE / f"{family}.txt").write_text("\n".join([head, *lines]) + "\n")
        print(f"{family}.txt: {sum('==' in line for line in lines)} packages")


def _resolved(family: str, python: str, constrained: bool) -> list[dict[str, Any]]:
    source = HERE / f"{family}.in"
    own = {re.split(r"[^\w.-]", line)[0].lower() for line in source.read_text().splitlines() if re.match(r"[\w.-]+[=<>]", line)}
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if constrained and re.split(r"[^\w.-]", line)[0].lower() not in own]
    with tempfile.TemporaryDirectory() as folder:
        constraints, out = Path(folder) / "constraints.txt", Path(folder) / "pylock.toml"
        constraints.write_text("\n".join(pins) + "\n")
        words = ["--no-config", "--universal", "--python-version", python, "--constraints", str(constraints), "--output-file", str(out)]
        subprocess.run(["uv", "--quiet", "pip", "compile", *words, str(source)], check=True, stdout=subprocess.DEVNULL)
        packages: list[dict[str, Any]] = tomllib.loads(out.read_text())["packages"]
    return packages


def _lines(package: dict[str, Any], pythons: tuple[str, ...]) -> Iterator[str]:
    marker = package.get("marker")
    holds = {Marker(marker).evaluate(_machine(python, machine)) for python in pythons for machine in MACHINES} if marker else {True}
    if holds == {False}:
        return  # of another system
    wheels = [wheel for wheel in package.get("wheels", ()) if _fits(wheel["url"].rsplit("/", 1)[-1], pythons)]
    files = wheels or [package["sdist"]]
    hashes = sorted({file["hashes"]["sha256"] for file in files})
    yield f"{package['name']}=={package['version']}{f' ; {marker}' if False in holds else ''} \\"
    for number, digest in enumerate(hashes, 1):
        yield f"    --hash=sha256:{digest}" + (" \\" if number < len(hashes) else "")


def _fits(file: str, pythons: tuple[str, ...]) -> bool:
    """Whether the wheel can be taken by one of the machines; one for an older CPython only where its interface is the stable one."""
    newest = max(int(python.partition(".")[2]) for python in pythons)
    for tag in parse_wheel_filename(file.replace("%2B", "+"))[3]:
        ours = tag.interpreter.startswith("py") or tag.interpreter in {f"cp{python.replace('.', '')}" for python in pythons}
        stable = tag.abi == "abi3" and tag.interpreter.startswith("cp3") and int(tag.interpreter[3:] or 0) <= newest
        there = tag.platform == "any" or ("linux" in tag.platform and tag.platform.endswith(MACHINES))
        if (stable or (ours and (tag.abi in ("none", tag.interpreter, "abi3")))) and there and "musllinux" not in tag.platform:
            return True
    return False


def _machine(python: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
