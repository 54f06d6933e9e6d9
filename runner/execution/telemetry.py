"""Upload of metrics and log lines to the training platform, in batches during a run, masked."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..errors import RecipeError
from ..language.values import is_number
from ..planning.training import find_training
from ..storage.metrics import parse, reader
from ..storage.records.exchange import Chunk
from ..storage.records.letters import NO_NUMBERS, Letters, ReportedNumbers, moment, point_of
from ..storage.workspace import Workspace
from ..survey.survey import Survey
from ..survey.trainings import reporting_steps, training_length
from .tasks import pattern_of

EVERY: Final = 5.0
"""Interval between batches, in seconds."""
BATCH: Final = 500
"""Maximum number of metric points or log lines in one message."""
LONGEST: Final = 4000
"""Maximum length of a log line, in characters."""
_OF_GPU: Final = {
    "gpu_utilization_percent": "gpu_utilization_percent",
    "gpu_memory_used_gb": "gpu_memory_allocated_gb",
}
"""Metric fields filled from host measurements, for trainers that do not report them."""


class Telemetry:
    """Sender of the metrics and logs of one run to a training platform.

    Create it with `reporting.telemetry`.
    """

    def __init__(
        self, ws: Workspace, letters: Letters, run: str, found: Survey, say: Callable[[str], None]
    ) -> None:
        self._ws, self._runs, self._letters, self._found, self._say = (
            ws,
            ws.store.runs,
            letters,
            found,
            say,
        )
        self._row = ws.store.runs.get(run)
        self._rest: dict[tuple[str, str], bytes] = {}  # incomplete last lines
        self._points: list[dict[str, object]] = []
        self._lines: list[dict[str, object]] = []
        self._sent, self._due = 0, 0.0
        self._training = ""  # the training step's ID
        self._others: set[str] = set()  # other steps that train
        self._due_here: set[str] = set()  # steps that this run executes
        self._gpu: dict[str, dict[str, object]] = {}  # latest host measurements by attempt
        self._highest = -1.0  # the highest training step sent
        self._said: set[str] = set()
        self._readers: dict[str, Callable[[bytes], Mapping[str, object]] | None] = {}
        job = self._row.data.get("job")
        every = job.get("every") if isinstance(job, dict) else None
        self._every = every if isinstance(every, int) else 1  # send every n-th step
        self._held: dict[str, object] | None = None  # the latest step, if not sent
        self._numbers = NO_NUMBERS  # the latest progress of the training
        self._memory = ws.home / "runs" / run / "reported.json"
        self._load_progress()

    def feed(self, rows: Sequence[Chunk]) -> None:
        """Read new output of attempts, in order, and send a batch if one is due."""
        for row in rows:
            whole, newline, rest = (
                self._rest.pop((row.attempt, row.stream), b"") + row.data
            ).rpartition(b"\n")
            self._rest[row.attempt, row.stream] = rest[-LONGEST:] if row.stream == "log" else rest
            for line in whole.split(b"\n") if newline else ():
                self._process(row.attempt, row.stream, line)
        if time.monotonic() >= self._due or len(self._points) + len(self._lines) >= BATCH:
            self.flush()

    def finish(self, attempt: str) -> None:
        """Send the remaining output of a finished attempt, including an incomplete last line."""
        for name, stream in list(self._rest):
            is_process = name.startswith(f"{attempt}.")  # a process of the attempt
            if name != attempt and not is_process:
                continue
            if rest := self._rest.pop((name, stream)):
                self._process(name, stream, rest)
        self._gpu.pop(attempt, None)
        # The last training step is always sent.
        if self._held is not None and self._step_of(attempt) == self._training:
            self._points.append(self._held)
            self._held = None
        self.flush()

    def flush(self) -> None:
        """Move the pending metric points and log lines into the outbox."""
        self._due = time.monotonic() + EVERY
        while self._points or self._lines:
            points, self._points = self._points[:BATCH], self._points[BATCH:]
            lines, self._lines = self._lines[:BATCH], self._lines[BATCH:]
            self._sent += 1
            id = f"{self._row.id}-{self._sent}"
            metrics = self._letters.metrics(self._row, points, f"{id}-metrics")
            self._runs.outbox.post(
                self._row.id, [*metrics, *self._letters.logs(self._row, lines, f"{id}-logs")]
            )
            if metrics and self._runs.outbox.thin(self._row.id, metrics[0].receiver):
                self._say_once(
                    "the platform does not accept the metrics: dropping every second waiting metric; the newest are kept"
                )
            if points:
                self._save_progress()

    def _process(self, attempt: str, stream: str, line: bytes) -> None:
        """Process one complete line of an attempt's log, metrics or host measurements."""
        if not line:
            if stream == "log":
                self._add_line(attempt, line)
        elif stream == "metrics":
            self._add_point(self._step_of(attempt), attempt, line)
        elif stream == "log":
            self._add_line(attempt, line)
            self._read_metrics(attempt, line)
        else:
            self._note_gpu(attempt, line)

    def _read_metrics(self, attempt: str, line: bytes) -> None:
        """Read metrics from a log line, if the step has a metrics pattern."""
        step = self._step_of(attempt)
        if step not in self._readers:
            pattern = pattern_of(self._found, step)
            self._readers[step] = reader(pattern) if pattern is not None else None
        if (read := self._readers[step]) is None:
            return
        try:
            told = read(line)
        except TimeoutError:  # reported at the end of the step
            self._readers[step] = None
            return
        if "step" in told:
            self._add_point(step, attempt, json.dumps(told).encode())
        elif told:
            self._say_once(
                f"the platform gets no metrics of {step}: add a group `step` to its `metrics` pattern"
            )

    def _step_of(self, attempt: str) -> str:
        """Return the step of an attempt or of its process, such as `train.1` or `train.1.3`."""
        step = attempt.rpartition(".")[0].replace("%2F", "/")
        return step if step in self._found.plan.index else step.rpartition(".")[0] or step

    def _note_gpu(self, attempt: str, line: bytes) -> None:
        sample = parse(line)
        self._gpu[attempt] = {
            field: sample[name] for name, field in _OF_GPU.items() if name in sample
        }

    def _add_point(self, step: str, attempt: str, line: bytes) -> None:
        told = _parse_object(line)
        point = point_of(told, time.time()) if told is not None else None
        if told is None or point is None:
            return
        point = {**self._gpu.get(attempt, {}), **point}
        if self._training_step() == step:
            self._advance(told, point)
        elif step in self._others:
            self._say_once(
                f"the platform gets the metrics of only one training step, {self._training}, not of {step}"
            )
            return
        elif self._training in self._due_here or self._numbers.training:
            # An evaluation before or after the training counts no training steps.
            point["step"] = self._numbers.step or 0
        at = _number(point["step"])
        if at < self._highest or (at == self._highest and step == self._training):
            self._say_once(
                f"{step} repeats earlier steps: the platform gets only metrics after step {self._highest:g}"
            )
            return
        self._highest = at
        if step == self._training and at % self._every:
            self._held = point
            return
        self._held = None
        self._points.append(point)

    def _advance(self, told: Mapping[str, object], point: Mapping[str, object]) -> None:
        """Update the progress of the training from a reported metric point."""
        step, loss = _number(point["step"]), point.get("train_loss")
        total = told.get("max_steps", told.get("total_steps"))
        if not is_number(total):
            total = training_length(self._found, self._training)
        self._numbers = ReportedNumbers(
            int(step),
            int(total) if total else None,
            float(loss) if is_number(loss) else self._numbers.loss,
            self._training,
        )

    def _training_step(self) -> str:
        """Return the ID of the training step, or "" if no known step reports metrics."""
        if not self._training:
            steps = reporting_steps(self._ws, self._found)
            self._training = find_training(steps)
            plan = self._found.plan
            metrics = plan.specs()[plan.index[self._training]].metrics if self._training else None
            if metrics is not None and metrics.file:
                self._say_once(
                    f"the platform gets no metrics of {self._training}: its `metrics` file {metrics.file} is read only when the step finishes"
                )
            self._others = {each.id for each in steps if each.trains} - {self._training}
            self._due_here = {self._found.plan.nodes[n].id for n in self._found.todo}
        return self._training

    def _load_progress(self) -> None:
        """Load the training progress that an earlier worker on this machine sent.

        If the training is not executed again, load its stored metrics instead.
        """
        training = self._training_step()
        if training and training not in self._due_here:
            key = self._found.verdicts[self._found.plan.index[training]].key
            trace = self._ws.store.index.traces([key]).get(key) if key is not None else None
            if trace is not None and (point := point_of(trace.numbers, 0.0)) is not None:
                self._advance(trace.numbers, point)
                self._highest = _number(point["step"])
            return
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = json.loads(self._memory.read_text("utf-8"))
            self._highest = float(found["highest"])
            self._numbers = ReportedNumbers(**found["numbers"])

    def _save_progress(self) -> None:
        found = {"highest": self._highest, "numbers": self._numbers._asdict()}
        with contextlib.suppress(RecipeError):  # on a full disk, points may be sent twice
            self._ws.write(self._memory, json.dumps(found).encode())

    def _add_line(self, attempt: str, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rpartition("\r")[2][:LONGEST]
        self._lines.append(
            {
                "timestamp": moment(time.time()),
                "step": self._step_of(attempt),
                "message": text,
            }
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def _parse_object(line: bytes) -> dict[str, object] | None:
    """Parse a line as a JSON object; return None for anything else."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
