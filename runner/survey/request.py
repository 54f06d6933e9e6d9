"""A request to run a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request to run a recipe: path or name, inputs (typed or text), and results directory."""

    recipe: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    out: Path | None = None
    current_python: bool = False
    update: bool = False
    # Workspace directories in which inputs were typed. Relative paths start there.
    typed_in: Mapping[str, str] = field(default_factory=dict)
    # Source files of inputs, for messages.
    origins: Mapping[str, str] = field(default_factory=dict)
    # The node count of `accelerate` steps that do not set one; 0 means one node.
    nodes: int = 0
    # Resources that replace those of the recipe, with the fields of `ResourceSpec`.
    resources: Mapping[str, Any] = field(default_factory=dict)
