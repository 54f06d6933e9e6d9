"""Points of trainers that write none at $RECIPE_METRICS: read from what they print, or from files of their own.  Does not know what is trained."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from loop import Metrics

# Their names for what the library's own trainers tell.
NAMES = {"learning_rate": "lr", "loss/mean": "loss"}
BAR = re.compile(r"\b(\d+)/(\d+) \[")
LOSSES = re.compile(r"\{'loss': .*?\}")
LOOK = 1.0  # seconds between two looks at the files of a trainer


class Points:
    """Tells the runner how far a training is, and its numbers."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        told = os.environ.get("RECIPE_METRICS")
        self._metrics = Metrics(Path(told) if told else None)

    def tell(self, step: int, values: Mapping[str, object]) -> None:
        """Tell the numbers of a step; text that is a number counts, what is not finite is left out."""
        read = {NAMES.get(name, name): number for name, value in values.items() if (number := _number(value)) is not None}
        read = {name: number for name, number in read.items() if name not in ("step", "max_steps")}
        if read:
            self._metrics.tell(step, max_steps=self._max_steps, **read)


class Printed:
    """Reads what transformers' trainer prints: a bar with its steps, and a line of losses, behind which the bar is drawn anew."""

    def __init__(self, points: Points, max_steps: int) -> None:
        self._points, self._max_steps = points, max_steps
        self._step = 0
        self._held: Mapping[str, object] = {}

    def on_line(self, line: str) -> None:
        if losses := LOSSES.search(line):
            self.end()
            self._held = _mapping(losses[0])
        elif (bar := BAR.search(line)) and int(bar[2]) == self._max_steps and self._held:
            self._tell(int(bar[1]))

    def end(self) -> None:
        """Tell losses behind which no bar came: those of the step behind the last."""
        if self._held:
            self._tell(self._step + 1)

    def _tell(self, step: int) -> None:
        self._step = max(step, self._step)
        self._points.tell(self._step, self._held)
        self._held = {}


class Files:
    """Follows files to which a trainer writes a JSON object for each step, in a thread, for as long as a `with` lasts."""

    def __init__(self, points: Points, folder: Path, pattern: str) -> None:
        self._points, self._folder, self._pattern = points, folder, pattern
        self._read: dict[Path, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _follow(self) -> None:
        while not self._over.wait(LOOK):
            self.look()

    def look(self) -> None:
        """Tell the lines that are new and whole."""
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            lines = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(lines)
            for line in lines.splitlines():
                self._tell(line)

    def _tell(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            return
        if isinstance(values, dict) and isinstance(step := values.get("step"), int):
            self._points.tell(step, values)


def _mapping(text: str) -> Mapping[str, object]:
    """What a mapping of Python says; nothing of text that is none."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # such as {'loss': nan}
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return value if isinstance(value, int) else number
