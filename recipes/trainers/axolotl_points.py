"""A plugin of axolotl that tells the runner how far its training is.  axolotl loads it, by its own hook for callbacks."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
from tool_points import Points
from transformers import TrainerCallback  # type: ignore[import-untyped]


class Told(TrainerCallback):
    """Tells each point that the trainer logs."""

    def __init__(self) -> None:
        self._points: Points | None = None

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        # At its end it logs a summary of the whole training, which is no step of it.
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        self._points = self._points or Points(state.max_steps)
        self._points.tell(state.global_step, logs)


class PointsPlugin(BasePlugin):
    """Adds the callback to axolotl's trainer."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        return [Told()]
