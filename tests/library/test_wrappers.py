"""Claims about the recipes that wrap a tool: what is said before anything is rented, and that a checkpoint every so often resumes from the last."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import RECIPE

ROOT = Path(__file__).resolve().parents[2]
WRAPPERS = ("ai-toolkit@1", "axolotl@1", "unsloth@1", "prime-rl@1")


def check(recipe: str, folder: Path, *inputs: str) -> tuple[int, dict[str, str]]:
    """The exit code of `recipe check`, 3 where something is wrong, and each rule that fired with its message."""
    argv = [
        *RECIPE,
        "check",
        recipe,
        "-C",
        folder,
        "--preset",
        "smoke",
        "--python",
        "current",
        "--format",
        "json",
        *inputs,
    ]
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, {
        finding["code"]: finding["message"] for finding in json.loads(done.stdout)
    }


@pytest.mark.parametrize("recipe", ["axolotl@1", "unsloth@1"])
def test_a_tool_that_is_missing_is_said_before_the_run(recipe: str, tmp_path: Path) -> None:
    code, found = check(recipe, tmp_path, "if_missing=fail")
    assert (
        code == 3
        and f"the environment has no {recipe.partition('@')[0]}" in found["wrapped-tool-missing"]
    )
    code, found = check(recipe, tmp_path)
    assert code == 0 and "wrapped-tool-missing" not in found


def test_a_prime_rl_configuration_that_would_fail_hours_later_is_refused_before_the_run(
    tmp_path: Path,
) -> None:
    assert check("prime-rl@1", tmp_path) == (0, {})
    (tmp_path / "rl.toml").write_text(
        "[trainer.model]\nseq_len = 1024\n[orchestrator]\nseq_len = 2048\nbatch_size = 32\n[orchestrator.train.sampling]\ntop_p = 0.9\n"
    )
    code, found = check("prime-rl@1", tmp_path, "config=rl.toml")
    assert code == 3 and set(found) == {"prime-rl-seq-len", "forbidden-sampling"}


@pytest.mark.parametrize("recipe", WRAPPERS)
def test_a_wrapper_keeps_what_its_tool_can_go_on_from_and_claims_no_more(recipe: str) -> None:
    """unsloth's command cannot go on: it has no state, and more steps are another training."""
    read: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    goes_on = recipe != "unsloth@1"
    assert (
        ("state" in read["steps"]["train"])
        == read["inputs"]["max_steps"].get("continues", False)
        == goes_on
    )
    assert ("save_every" in read["inputs"]) == goes_on and read["steps"]["train"]["retries"][
        "preemption"
    ] == (10 if goes_on else 2)
