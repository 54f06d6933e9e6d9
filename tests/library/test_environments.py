"""The environments of the library are locked: every package at one version, by the hash of its files, and with all that the programs import."""

from __future__ import annotations

import ast
import functools
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.shelf import RECIPES, ROOT

LOCKS = {file.stem: file for file in sorted((ROOT / "recipes" / "locks").glob("*.txt"))}
TRAINERS = ROOT / "recipes" / "trainers"
WITHOUT = {
    "ai-toolkit@1": "ai-toolkit is on no index; what checks and starts it needs Python alone, and its launcher names an environment of its own",
    "prime-rl@1": "prime-rl is on no index; its guard needs Python alone, and its launcher names an environment of its own",
}
# Named differently where they are imported; what is installed here knows the rest.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "axolotl": "axolotl",
    "unsloth_cli": "unsloth",
    "wandb": "wandb",
    "trackio": "trackio",
}
# Wished for by an input, and said clearly where it is missing; or an optimizer that no input of these recipes names (`descent` makes them for all).
OPTIONAL = {
    "images": {"trackio"},
    "text": {"prodigyopt"},
    "embed": {"prodigyopt"},
    "ppo": {"bitsandbytes", "prodigyopt"},
}
LINE = re.compile(r"([a-z0-9][a-z0-9.-]*)==(\S+)(?: ; ([^\\]+))? \\")


def requirements(family: str) -> dict[str, list[tuple[str, int]]]:
    """By package: each version that is pinned, with the number of its hashes."""
    found: dict[str, list[tuple[str, int]]] = {}
    for block in re.split(r"\n(?=\S)", LOCKS[family].read_text().strip()):
        if block.startswith("#"):
            continue
        head, *hashes = block.splitlines()
        match = LINE.fullmatch(head)
        assert match, head
        assert all(
            re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes
        ), head
        found.setdefault(match[1], []).append((match[2], len(hashes)))
    return found


def imports(program: Path, seen: set[Path]) -> set[str]:
    """What a program imports of others, itself or by the programs beside it."""
    if program in seen:
        return set()
    seen.add(program)
    names: set[str] = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    beside = {name for name in names if (TRAINERS / f"{name}.py").exists()}
    inner = (
        set().union(*(imports(TRAINERS / f"{name}.py", seen) for name in beside))
        if beside
        else set()
    )
    return (names - beside - set(sys.stdlib_module_names)) | inner


installed = functools.cache(packages_distributions)  # it reads the records of all packages


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module) or installed()[module][0].lower().replace("_", "-")


def programs(recipe: dict[str, Any]) -> set[Path]:
    return {
        ROOT / "recipes" / path
        for step in recipe["steps"].values()
        for path in step.get("code", recipe.get("code", []))
        if isinstance(path, str)
    }


@pytest.mark.parametrize("family", LOCKS)
def test_every_package_is_pinned_by_hash_and_from_nowhere_in_particular(family: str) -> None:
    text = LOCKS[family].read_text()
    assert (
        "://" not in text
        and "--index" not in text
        and "--find-links" not in text
        and "+cpu" not in text
    )
    pinned = requirements(family)
    assert len(pinned) > 50
    assert all(hashes >= 1 for versions in pinned.values() for _, hashes in versions)
    assert all(
        len(versions) == 1 or len({version for version, _ in versions}) == len(versions)
        for versions in pinned.values()
    )


@pytest.mark.parametrize("family", ["text", "images", "ppo"])
def test_what_the_tests_run_with_is_what_is_locked(family: str) -> None:
    source = (ROOT / "recipes" / "locks" / f"{family}.in").read_text()
    own = {
        re.split(r"[^\w.-]", line)[0]
        for line in source.splitlines()
        if re.match(r"[\w.-]+[=<>]", line)
    }
    wanted = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pinned = requirements(family)
    assert {
        name: versions[0][0]
        for name, versions in pinned.items()
        if name in wanted and name not in own
    } == {name: version for name, version in wanted.items() if name in pinned and name not in own}
    assert pinned["torch"][0][0] == "2.13.0" and pinned["torch"][0][1] == 6, (
        "three Pythons on two kinds of machine"
    )


@pytest.mark.parametrize("family", LOCKS)
def test_each_lock_is_made_of_a_list_of_what_is_imported(family: str) -> None:
    lines = [
        line.partition("#")[0].strip()
        for line in (LOCKS[family].with_suffix(".in")).read_text().splitlines()
    ]
    wanted = {re.split(r"[\[=<>]", line)[0] for line in lines if line}
    assert wanted <= set(requirements(family))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_the_lock_of_its_family(name: str) -> None:
    lock = (RECIPES[name].get("python") or {}).get("lock")
    if name in WITHOUT:
        assert lock is None, f"{name} has a lock now: take it out of WITHOUT"
        return
    assert lock, f"{name} names no lock: python: {{lock: locks/FAMILY.txt}}"
    assert lock.startswith("locks/") and (ROOT / "recipes" / lock).exists()


@pytest.mark.parametrize("name", [name for name in RECIPES if "python" in RECIPES[name]])
def test_all_that_a_recipes_programs_import_is_in_its_lock(name: str) -> None:
    family = Path(RECIPES[name]["python"]["lock"]).stem
    seen: set[Path] = set()
    modules = set().union(*(imports(program, seen) for program in programs(RECIPES[name])))
    needed = {distribution(module) for module in modules}
    if any("accelerate" in step for step in RECIPES[name]["steps"].values()):
        needed.add("accelerate")
    missing = needed - set(requirements(family)) - OPTIONAL.get(family, set())
    assert not missing, f"{family}.in misses {', '.join(sorted(missing))}"
    assert seen, "the programs of a recipe are read"
