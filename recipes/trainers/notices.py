"""What a step has to tell people who look at no log: warnings, which the runner shows under the step's line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def other_tokens(inputs: Sequence[str]) -> list[str]:
    """Return the line that says which inputs are learned otherwise than by release 0.1.0, which learned them wrongly."""
    if not inputs:
        return []
    return [f"other tokens are learned than by release 0.1.0, because of {'; '.join(inputs)}: what was trained of them before is not continued"]


def warn(text: str, step: str = "data") -> None:
    """Print a warning, and hand it to the runner, which says it once where the step is shown."""
    print(f"{step}: warning: {text}", flush=True)
    if file := os.environ.get("RECIPE_METRICS"):
        with open(file, "a", encoding="utf-8") as metrics:
            metrics.write(json.dumps({"warning": text}) + "\n")
