"""Training metrics of running steps, stored in the database so that readers need no files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ...agent.regular import open_regular
from ...language.values import is_number
from ...planning.run_view import LARGEST, training_from
from ...planning.step import MetricsSpec
from ...secrets import Masker
from ...storage import metrics
from ...survey.survey import Survey
from ...survey.trainings import training_length
from .attempt import Attempt
from .groups import Groups

EVERY: Final = 1.0
"""Interval between reads of the metrics files, in seconds."""
MOST: Final = 1 << 18
"""Maximum number of bytes per read, from the end of the new data."""


class TrainingNumbers:
    """Latest training metrics of one run's running steps."""

    def __init__(self, found: Survey, groups: Groups, running: Mapping[str, Attempt]) -> None:
        self._found, self._groups, self._running = found, groups, running
        self._steps: dict[str, _Reports] = {}
        self._due = 0.0

    def tick(self) -> Mapping[str, str]:
        """Read and store new metrics of running steps, at most once a second.

        Returns descriptions of losses that are NaN or infinite, by step ID.
        """
        now = time.monotonic()
        if now < self._due:
            return {}
        self._due = now + EVERY
        for id, attempt in self._running.items():
            self._look(id, attempt)
        found = {id: self._steps[id].diverged for id in self._running if id in self._steps}
        return {id: words for id, words in found.items() if words}

    def finish(self, id: str, attempt: Attempt, last: Mapping[str, object]) -> str:
        """Store the final metrics of an attempt, from `last` or from its metrics file.

        Returns a description of a loss that is NaN or infinite; empty if there was none.
        """
        self._look(id, attempt)
        if last:
            self._reports_of(id, attempt).take([last])
            self._store(id)
        reports = self._steps.pop(id, None)
        return reports.diverged if reports is not None else ""

    def _look(self, id: str, attempt: Attempt) -> None:
        if self._metrics_spec(id) is not None and self._reports_of(id, attempt).read():
            self._store(id)

    def _store(self, id: str) -> None:
        if text := self._steps[id].text():
            self._groups.report(id, text)

    def _metrics_spec(self, id: str) -> MetricsSpec | None:
        plan = self._found.plan
        return plan.specs()[plan.index[id]].metrics

    def _reports_of(self, id: str, attempt: Attempt) -> _Reports:
        reports = self._steps.get(id)
        if reports is None or reports.attempt != attempt.name:
            how = self._metrics_spec(id)
            pattern = how.pattern if how is not None else None
            path = attempt.log if pattern else attempt.metrics_file
            if how is not None and how.file and not attempt.place.elsewhere:
                path = f"{attempt.directory.path}/{how.file}"
            masker = self._groups.commits.masker
            total = training_length(self._found, id)
            reports = self._steps[id] = _Reports(attempt.name, path, masker, total, pattern)
        return reports


class _Reports:
    """Incremental reader of one attempt's metrics file, with the latest values."""

    def __init__(
        self, attempt: str, path: str, masker: Masker, total: float | None, pattern: str | None
    ) -> None:
        self.attempt, self._path, self._masker, self._total = attempt, path, masker, total
        self._parse: Callable[[bytes], Mapping[str, object]] | None = None
        self._pattern = pattern
        self._read = 0
        self._values: dict[str, float] = {}
        self._warnings: dict[str, None] = {}
        self.diverged = ""
        """Description of the first loss that is not finite."""
        self._first: tuple[float, float] | None = None  # a training step and its time
        self._last: tuple[float, float] | None = None

    def read(self) -> bool:
        """Read new lines of the metrics file; return True if there are new values or warnings."""
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                start = self._read if self._read <= size else 0
                begin = max(start, size - MOST)
                if begin == size:
                    return False
                file.seek(begin)
                data = file.read(MOST)
        except OSError:
            return False
        if self._pattern is not None:
            data = data.replace(b"\r", b"\n")  # tqdm separates its lines by carriage returns
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            # Skip a line that is too long for metrics.
            self._read = begin if len(data) < MOST else begin + len(data)
            return False
        self._read = begin + len(whole) + 1
        lines = whole.split(b"\n")
        try:
            return self.take(self._points(lines[1:] if begin > start else lines))
        except TimeoutError:
            self._path = os.devnull  # the pattern is too slow; the end of the step reports it
            return False

    def _points(self, lines: Iterable[bytes]) -> Iterable[Mapping[str, object]]:
        if self._pattern is None:
            for line in lines:
                if warning := metrics.warning_of(line):
                    self._warn(warning)
                yield metrics.parse(line)
            return
        if self._parse is None:
            self._parse = metrics.reader(self._pattern)
        for line in lines:
            yield self._parse(self._masker.mask(line))

    def _warn(self, text: str) -> None:
        if len(self._warnings) < metrics.MOST_WARNINGS:
            self._warnings[metrics.on_one_line(self._masker.text(text))] = None

    def take(self, points: Iterable[Mapping[str, object]]) -> bool:
        """Add reported metrics; return True if they change a value or add a warning."""
        before, warned = dict(self._values), len(self._warnings)
        for point in points:
            shown = self._masker.value(point) if self._masker else point
            self._check_divergence(shown)
            for name, value in shown.items():
                if is_number(value) and abs(value) < LARGEST:
                    self._values[name] = value
        self._record_step_time()
        return self._values != before or len(self._warnings) > warned

    def _check_divergence(self, point: Mapping[str, object]) -> None:
        """Warn about the attempt's first loss that is not finite."""
        if self.diverged:
            return
        self.diverged = metrics.find_divergence(point)
        if self.diverged:
            self._warn(self.diverged)

    def _record_step_time(self) -> None:
        """Record the time of a new training step, for the pace."""
        step = self._values.get("step")
        if step is None or (self._last is not None and step == self._last[0]):
            return
        self._last = (step, time.time())
        if self._first is None:
            self._first = self._last

    def text(self) -> str:
        """Return the latest metrics as JSON for the step's database row; "" if there are none."""
        known = training_from(self._values, self._total, at=round(time.time(), 3))
        if known.total is not None and (eta := self._seconds_left(known.total)) is not None:
            known = known._replace(eta=round(eta, 1))
        return known.text(list(self._warnings))

    def _seconds_left(self, total: float) -> float | None:
        """Return the estimated seconds until the last training step, at the measured pace."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max(0.0, (total - self._last[0]) * pace)
