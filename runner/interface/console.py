"""Listeners that display a run: a live display on a terminal, plain lines in a pipe, JSON for
programs.

Each is an `execution.terms.Listener` and receives the same events.  Progress goes to stderr,
results to stdout.  A listener never stops a run: after a failed write, it stops writing to the
stream.

With `--json`, stdout has one object per line.  The first is `{"subject": "plan", …}`, the last
`{"subject": "summary", …}`.  Between them are the events as stored, `{"seq", "at", "subject", "id",
"before", "after", "reason", "data"}`, and notes for the user, `{"subject": "note", "text"}`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, TextIO, TypeAlias

from ..language.units import count_text
from ..planning.run_view import WEIGHED, Progress, ProgressInput, TrainingReport, progress_of
from ..planning.schedule import FINAL, State
from ..secrets import Masker
from .tail import MaskedTail, MetricsTail, canvas, fit, lines, safe_ids, safe_line, span, width

if TYPE_CHECKING:
    from runner.execution.terms import Listener, Overview, Summary
    from runner.storage.records.runs import Event
    from runner.storage.workspace import Workspace

    from ..execution.steps.failing import FailureDetails

Line: TypeAlias = tuple[str, str]  # text and style
Clock: TypeAlias = Callable[[], float]

_STYLES: Final = {
    "": "",
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "bad": "\x1b[31m",
    "good": "\x1b[32m",
    "odd": "\x1b[33m",
}
_LOG_LINES = 20
_LONGEST = 2000  # maximum characters of a log line
_REPORTS = 10  # maximum failures shown with their logs
_FEW = 200  # up to this number of steps, each step gets a line; with more, lines are rate-limited
_A_SECOND = 20.0  # maximum lines per second about successful steps in large runs
_POLL = 0.1
_REDRAW = 0.5
_BAR = 30
_SLACK = 1e-6  # tolerance for float rounding in clock comparisons


def for_stream(
    stdout: TextIO, stderr: TextIO, *, json: bool, quiet: int, verbose: int, commands: bool
) -> Listener:
    """Return the listener for these streams and flags."""
    if json:
        return JsonLines(stdout)
    if quiet or not _can_redraw(stderr):
        return Plain(stderr, stdout, quiet=quiet, verbose=verbose, commands=commands)
    return Live(
        stderr, stdout, verbose=verbose, commands=commands, color=not os.environ.get("NO_COLOR")
    )


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _ListenerDefaults:
    """Default methods of the listeners in this module."""

    def tick(self) -> None: ...

    def page(self, ws: Workspace, run: str) -> str:
        from .page import of_run

        return of_run(ws, run)


class Plain(_ListenerDefaults):
    """A listener for pipes and files: a line per finished step, failures with the end of their log,
    and a summary.
    """

    def __init__(
        self,
        err: TextIO,
        out: TextIO,
        *,
        quiet: int = 0,
        verbose: int = 0,
        commands: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._err = _Stream(err)
        self._out = _Stream(out)
        self._quiet = quiet
        self._run_text = _RunText(verbose, commands, clock)

    def begin(self, overview: Overview) -> None:
        self._run_text.begin(overview)

    def events(self, batch: Sequence[Event]) -> None:
        lines = self._run_text.event_lines(batch)
        if lines and not self._quiet:
            self._write(lines)

    def say(self, text: str) -> None:
        self._write([(safe_ids(text), "")])

    def end(self, summary: Summary) -> None:
        lines = self._run_text.failure_lines(summary)
        if self._quiet:
            self._write(lines)
            return
        self._write([*lines, *self._run_text.summary_lines(summary)])
        _write_results(self._out, summary)

    def _write(self, lines: Iterable[Line]) -> None:
        self._err.write("".join(f"{text}\n" for text, _ in lines))


class JsonLines(_ListenerDefaults):
    """A listener that writes each event as one line of JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out = _Stream(out)
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str).encode

    def begin(self, overview: Overview) -> None:
        told = ("run", "recipe", "workspace", "total", "fresh", "to_run", "expected", "jobs")
        self._put({"subject": "plan", **{name: getattr(overview, name) for name in told}})

    def events(self, batch: Sequence[Event]) -> None:
        objects = []
        for event in batch:
            fields = event._asdict()
            del fields["run"]  # the first object names the run
            objects.append(fields)
        self._put(*objects)

    def say(self, text: str) -> None:
        self._put({"subject": "note", "text": text})

    def end(self, summary: Summary) -> None:
        failed = [
            {
                "id": f.id,
                "reason": f.reason,
                "tail": f.tail.decode(errors="replace"),
                "log": f.log,
                "hint": f.hint,
            }
            for f in summary.failed
        ]
        self._put(
            {
                "subject": "summary",
                "run": summary.run,
                "state": summary.state,
                "interrupted": summary.interrupted,
                "counts": dict(summary.counts),
                "seconds": round(summary.seconds, 3),
                "failed": failed,
                "left_running": list(summary.left_running),
                "warnings": list(summary.warnings),
                "results": [{"name": name, "path": path} for name, path in summary.results],
            }
        )

    def _put(self, *objects: object) -> None:
        self._out.write("".join(f"{self._text(object)}\n" for object in objects))

    def _text(self, object: object) -> str:
        try:
            return self._encode(object)
        except ValueError:
            return self._encode(_finite(object))


class Live(_ListenerDefaults):
    """A listener with a display that is redrawn in place: a progress bar and a line per running
    step.  Finished steps scroll above the display.

    After each write, the cursor is visible and below the display, and lines wrap.  So the terminal
    stays usable if this process is killed.
    """

    def __init__(
        self,
        err: TextIO,
        out: TextIO,
        *,
        verbose: int = 0,
        commands: bool = False,
        color: bool = True,
        clock: Clock = time.monotonic,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._err = _Stream(err)
        self._out = _Stream(out)
        self._color = color
        self._clock = clock
        self._size = size or (lambda: _terminal_size(err))
        encoding = getattr(err, "encoding", None) or ""
        self._bars = encoding.lower().replace("-", "").startswith("utf")
        self._run_text = _RunText(verbose, commands, clock)
        self._rows: dict[str, _Row] = {}
        self._above: list[Line] = []
        self._logged: deque[str] = deque()  # log lines, appended by any thread
        self._drawn: list[int] = []  # width of each display line on the screen, in columns
        self._frame = ""
        self._dirty = False
        self._polled = self._redrawn = self._begun = clock()

    def begin(self, overview: Overview) -> None:
        self._run_text.begin(overview)
        self._polled = self._redrawn = self._begun = self._clock()
        self._dirty = True

    def events(self, batch: Sequence[Event]) -> None:
        self._above += self._run_text.event_lines(batch)
        now = self._clock()
        for event in batch:
            if event.subject != "step":
                continue
            if event.after != "RUNNING":
                self._rows.pop(event.id, None)
            elif event.before != "RUNNING":
                expected = self._run_text.run.expected.get(event.id)
                self._rows[event.id] = _Row(event, self._run_text, expected, now)
        self._dirty = True
        self._refresh(now)

    def log(self, text: str) -> None:
        """Show a log line above the display at the next redraw.  Thread-safe."""
        self._logged.append(text)

    def tick(self) -> None:
        self._dirty |= bool(self._logged)
        self._refresh(self._clock())

    def _take_logs(self) -> None:
        while self._logged:
            self._above += [(safe_ids(line), "dim") for line in self._logged.popleft().splitlines()]

    def say(self, text: str) -> None:
        self._above.append((safe_ids(text), "bold"))
        self._draw(self._clock())

    def end(self, summary: Summary) -> None:
        columns, _ = self._size()
        self._take_logs()
        lines = [
            *self._above,
            *self._run_text.failure_lines(summary),
            *self._run_text.summary_lines(summary),
        ]
        erase = "\x1b[J" if self._drawn else ""
        text = "".join(self._paint(text, style) + "\r\n" for text, style in lines)
        self._err.write(self._home(columns) + erase + text)
        self._above, self._drawn = [], []
        _write_results(self._out, summary)

    def _refresh(self, now: float) -> None:
        since = now - self._polled
        if since < _POLL - _SLACK:
            return
        self._polled = now
        _, height = self._size()
        changed = self._dirty
        for row in islice(self._rows.values(), max(height, 1)):
            changed |= row.poll(now)
        if changed or now - self._redrawn >= _REDRAW - _SLACK:
            self._draw(now)

    def _draw(self, now: float) -> None:
        columns, height = self._size()
        self._take_logs()
        room = max(columns - 1, 1)  # after a full line, the cursor position depends on the terminal
        rows = [self._paint_row(segments, room) for segments in self._display(now, room, height)]
        frame = "".join(f"{text}\x1b[K\r\n" for text, _ in rows)
        used = [cells for _, cells in rows]
        self._dirty, self._redrawn = False, now
        is_same = frame == self._frame and used == self._drawn
        # In a terminal that has become narrower, lines of the last frame have wrapped.
        if is_same and not self._above and max(used) < columns:
            return
        above = "".join(self._paint(text, style) + "\r\n" for text, style in self._above)
        if above:
            above = "\x1b[J" + above
        # Disable wrapping, so that a character with a wrong assumed width cannot break the display.
        self._err.write(
            f"\x1b[?25l{self._home(columns)}{above}\x1b[?7l{frame}\x1b[J\x1b[?7h\x1b[?25h"
        )
        self._above, self._drawn, self._frame = [], used, frame

    def _home(self, columns: int) -> str:
        """Return the escape sequence that moves the cursor to the top of the display, allowing for
        lines wrapped by a narrower terminal.
        """
        up = sum(max(1, -(-cells // max(columns, 1))) for cells in self._drawn)
        return f"\r\x1b[{up}A" if up else ""

    def _display(self, now: float, room: int, height: int) -> list[list[Line]]:
        rows = list(self._rows.values())
        space = max(height - 2, 0)  # without the lines of the bar and the cursor
        listed = rows if len(rows) <= space else rows[: max(space - 1, 0)]
        names = min(max((width(row.name) for row in listed), default=0), 32, max(room // 3, 8))
        display = [self._bar(now, room), *(row.segments(names, now, self._bars) for row in listed)]
        if len(listed) < len(rows) and space:
            display.append([(f"  … and {len(rows) - len(listed)} more", "dim")])
        return display

    def _bar(self, now: float, room: int) -> list[Line]:
        run, running = self._run_text.run, len(self._rows)
        total, ended = max(run.total, 1), run.ended
        texts = [f"{ended}/{run.total}", f"{running} running"]
        marks: list[Line] = [("  ".join(texts), "bold")]
        if run.failed:
            marks.append((f"  {run.failed} failed", "bad"))
        marks.append((f"  {span(now - self._begun)}", ""))
        _, _, percent, left = run.progress(self._rows, now)
        if percent is not None and percent >= 1:
            marks.append((f"  {percent:.0f}%", "good"))
        if left is not None and left >= 1:
            marks.append((f"  ETA {span(left)}", "good"))
        size = min(_BAR, room - sum(width(text) for text, _ in marks) - 3)
        if size < 5:
            return marks
        under_way = sum(row.share(now) for row in self._rows.values())
        done = int(size * (ended + under_way) // total)
        doing = min(-(-size * running // total), size - done)
        return [
            ("[", ""),
            ("=" * done, "good"),
            ("-" * doing, "odd"),
            (" " * (size - done - doing) + "] ", ""),
            *marks,
        ]

    def _paint_row(self, segments: Iterable[Line], room: int) -> tuple[str, int]:
        painted, used = "", 0
        for text, style in segments:
            text = fit(text, room - used)
            used += width(text)
            if not self._bars:
                text = text.encode("ascii", "replace").decode()
            painted += self._paint(text, style)
        return painted, used

    def _paint(self, text: str, style: str) -> str:
        is_styled = style != "" and self._color
        if not text or not is_styled:
            return text
        return f"{_STYLES[style]}{text}\x1b[0m"


class _Row:
    """A running step on the live display."""

    __slots__ = ("_host", "_log", "_metrics", "_started", "expected", "name")

    def __init__(
        self, event: Event, run_text: _RunText, expected: float | None, now: float
    ) -> None:
        self.name = safe_ids(event.id)
        self._started = now
        self.expected = expected
        # Relative paths start at the workspace root.
        log = os.path.join(run_text.workspace, str(event.data.get("log") or ""))
        self._log = MaskedTail(log, run_text.masker)
        self._host = MetricsTail(f"{log.removesuffix('.log')}.host", run_text.masker)
        metrics, pattern = event.data.get("metrics"), run_text.pattern(event.id)
        path = os.path.join(run_text.workspace, str(metrics)) if metrics else log
        self._metrics: MetricsTail | None = None
        if metrics or pattern:
            steps = run_text.steps(event.id)
            self._metrics = MetricsTail(path, run_text.masker, steps, pattern)

    def poll(self, now: float) -> bool:
        """Read the log and the metrics again.  Return True if a line of the display changes."""
        changed = self._log.poll() | self._host.poll(now)
        if self._metrics is not None:
            changed |= self._metrics.poll(now)
        return changed

    def seconds_since(self, now: float) -> float:
        """Return the seconds since the step started."""
        return now - self._started

    def training(self, now: float) -> TrainingReport:
        """Return the training progress from the metrics of the step."""
        tail = self._metrics
        if tail is None:
            return TrainingReport()
        return TrainingReport(tail.values.get("step"), tail.total, tail.left(now))

    def left(self, now: float) -> float | None:
        """Return the seconds until the step ends, estimated from its metrics, else from its earlier duration; None if unknown."""
        left = self._metrics.left(now) if self._metrics else None
        if left is None and self.expected is not None:
            return max(0.0, self.expected - (now - self._started))
        return left

    def share(self, now: float) -> float:
        """Return the finished fraction of the step, from 0 to 1; 0 if unknown."""
        left = self.left(now)
        passed = now - self._started
        return passed / (passed + left) if left is not None and passed + left > 0 else 0.0

    def segments(self, names: int, now: float, bars: bool) -> list[Line]:
        name = fit(self.name, names)
        said: list[Line] = [
            (f"  {name}{' ' * (names - width(name))}", "bold"),
            (f"  {span(now - self._started):>6}", ""),
        ]
        if self._metrics is not None:
            text = self._metrics.text(bars)
            if text:
                said.append((f"  {text}", ""))
        if "gpu_utilization_percent" in self._host.values:
            said.append((f"  GPU {self._host.values['gpu_utilization_percent']:.0f}%", ""))
        left = self.left(now)
        if left is not None and left >= 1:
            said.append((self._describe_left(left, now), "good"))
        said.append((f"  {self._log.line}", "dim"))
        return said

    def _describe_left(self, left: float, now: float) -> str:
        """Return the remaining time, with an approximate percentage if estimated from the earlier
        duration.
        """
        if self._metrics is not None and self._metrics.left(now) is not None:
            return f"  ETA {span(left)}"
        passed = now - self._started
        return f"  ~{passed / (passed + left):.0%}  ETA {span(left)}"


class _RunProgress:
    """The progress of a run, from the events of its steps and the metrics of its running steps."""

    def __init__(self, overview: Overview | None = None) -> None:
        to_run = overview.to_run if overview is not None else ()
        self.states: dict[str, str] = dict.fromkeys(to_run, State.WAITING)
        self.expected = overview.expected if overview is not None else {}
        self.total = overview.total if overview is not None else 0
        self._fresh = self.ended = overview.fresh if overview is not None else 0
        self.failed = self.restored = 0
        self._trains = overview.trains if overview is not None else ""
        self._found = Progress(0, None, None, None)
        self._due = 0.0

    def expand(self, instances: int) -> None:
        """Add the instances of an expanded matrix to the number of steps."""
        self.total += instances

    def apply(self, event: Event) -> None:
        """Record an event of a step."""
        after, known = event.after, self.states.get(event.id)
        before = event.before if known is None else known
        self.states[event.id] = after
        if before in FINAL:
            self.ended -= 1
            self.failed -= before == State.FAILED
            self._fresh -= known is None  # the step was counted as up to date
        if after in FINAL:
            self.ended += 1
            self.failed += after == State.FAILED
            self.restored += after == State.FRESH and bool(event.data.get("restored"))
            # A step that counted as up to date had to run after all.
            self.total = max(self.total, self.ended)

    def progress(self, rows: Mapping[str, _Row], now: float) -> Progress:
        """Return the progress of the run.  For a large run, the result is cached for one second."""
        if len(self.states) > WEIGHED and now < self._due:
            return self._found
        self._due = now + 1.0
        run_times = {id: row.seconds_since(now) for id, row in rows.items()}
        training = {id: row.training(now) for id, row in rows.items()}
        # `states` does not have the steps that were fresh at the start.
        unseen = {"FRESH": self._fresh} if self._fresh > 0 else {}
        self._found = progress_of(
            ProgressInput(
                "ACTIVE",
                self.states,
                (),
                self.total,
                self.expected,
                run_times,
                training,
                unseen,
                self._trains,
            )
        )
        return self._found


def _warnings(event: Event) -> list[Line]:
    """Return a line for each warning of a step."""
    said = event.data.get("warnings")
    texts = said if isinstance(said, list) else []
    return [(f"{safe_ids(event.id)}: warning: {safe_line(str(text))}", "odd") for text in texts]


class _RunText:
    """The lines to print about a run."""

    def __init__(self, verbose: int, commands: bool, clock: Clock) -> None:
        self._verbose = verbose
        self._commands = commands
        self._clock = clock
        self.workspace = ""
        self.masker = Masker()
        self._command: Callable[[str], str] = lambda id: ""
        self.steps: Callable[[str], float | None] = lambda id: None
        self.pattern: Callable[[str], str | None] = lambda id: None
        self.run = _RunProgress()
        self._tries: dict[str, int] = {}
        self._recipe = ""
        self._compares = False  # whether a matrix instance reported metrics
        self._many = False
        self._allowed = _A_SECOND
        self._allowed_at = 0.0

    def begin(self, overview: Overview) -> None:
        self.workspace, self.masker, self._command = (
            overview.workspace,
            overview.masker,
            overview.command,
        )
        self.steps, self.pattern = overview.steps, overview.pattern
        self.run, self._recipe = _RunProgress(overview), overview.recipe
        self._many = len(overview.to_run) > _FEW
        self._allowed_at = self._clock()

    def event_lines(self, batch: Sequence[Event]) -> list[Line]:
        """Return the lines for some events.

        Lines about successful steps are rate-limited in large runs; failures always get a line.
        """
        self._refill_allowance()
        lines: list[Line] = []
        for event in batch:
            if event.subject != "step":
                more = event.data.get("steps")
                if event.reason == "expanded" and isinstance(more, int):
                    self.run.expand(more)
                continue
            self.run.apply(event)
            is_instance = "[" in event.id
            if is_instance and event.after == "DONE" and event.data.get("metrics"):
                self._compares = True
            if event.after in FINAL:
                lines += self._end_lines(event)
            elif event.after in ("QUEUED", "RUNNING"):
                lines += self._on_move(event)
        return lines

    def _refill_allowance(self) -> None:
        """Raise the number of lines that may be printed now, up to those of one second."""
        if not self._many:
            return
        now = self._clock()
        self._allowed = min(_A_SECOND, self._allowed + (now - self._allowed_at) * _A_SECOND)
        self._allowed_at = now

    def _end_lines(self, event: Event) -> list[Line]:
        """Return the lines for a finished step; none beyond the rate limit."""
        is_over_limit = self._many and self._allowed < 1
        if is_over_limit and event.after != "FAILED":
            return []
        line = self._on_end(event)
        if line is None:
            return _warnings(event)
        self._allowed -= 1
        return [line, *_warnings(event)]

    def _on_end(self, event: Event) -> Line | None:
        """Return the line for a finished step; None for steps that are shown only if verbose."""
        end = self._describe_end(event)
        if end is None:
            return None
        text, style = end
        return f"[{self.run.ended}/{self.run.total}] {safe_ids(event.id)}  {text}", style

    def _describe_end(self, event: Event) -> Line | None:
        """Return the result of a step and its style; None to hide the result."""
        if event.after == "DONE":
            return self._describe_success(event.data), ""
        if event.after == "FAILED":
            return f"failed: {_why(event)}", "bad"
        if event.after != "FRESH":
            return self._describe_unfinished(event)
        if event.data.get("restored"):
            return "restored", ""
        return ("fresh", "dim") if self._verbose else None

    def _describe_unfinished(self, event: Event) -> Line | None:
        """Return the state and the reason of a step that ended without a result."""
        was_running = event.before == "RUNNING"
        why = _why(event)
        if event.after == "SKIPPED" and was_running:
            return f"stopped early ({why})", "odd"
        # The summary counts the steps that were blocked or cancelled before they started.
        is_noteworthy = was_running or event.after == "SKIPPED"
        if not is_noteworthy and not self._verbose:
            return None
        reason = f" ({why})" if why else ""
        return event.after.lower() + reason, "odd"

    def _describe_success(self, data: Mapping[str, object]) -> str:
        """Return the duration of a successful step, and its metrics if verbose."""
        seconds, metrics = data.get("seconds"), data.get("metrics")
        text = span(seconds) if isinstance(seconds, (int, float)) else "done"
        if self._verbose and isinstance(metrics, Mapping):
            for name, value in metrics.items():
                text += f"  {safe_line(str(name))} {safe_line(str(value))}"
        return text

    def _on_move(self, event: Event) -> list[Line]:
        """Return the lines for a step that was queued, started, or queued again."""
        before = event.before
        if event.after == "RUNNING":
            return self._on_start(event)
        if before == "RUNNING":
            return self._on_requeue(event)
        name, why = safe_ids(event.id), _why(event)
        if before in FINAL:
            return [(f"{name}: runs again ({why})", "odd")]
        has_reason = before == "READY" and why != ""
        if self._verbose and has_reason:
            return [(f"{name}: runs because {why}", "dim")]
        return []

    def _on_start(self, event: Event) -> list[Line]:
        name, data = safe_ids(event.id), event.data
        lines: list[Line] = []
        note = data.get("note")
        if note:
            lines.append((f"{name}: {safe_ids(str(note))}", "odd"))
        if data.get("adopted"):
            lines.append((f"{name}: still running from an earlier run, continues", "odd"))
        if self._verbose:
            place = data.get("site")
            where = f" on {safe_line(str(place))}" if place else ""
            lines.append((f"{name}: started{where}", "dim"))
        if self._commands:
            commands = self._command(event.id).splitlines()
            lines += [(f"{name}: $ {safe_line(line)}", "dim") for line in commands]
        return lines

    def _on_requeue(self, event: Event) -> list[Line]:
        name = safe_ids(event.id)
        if event.reason == "stopped":
            return [(f"{name}: stopped, resumes later", "odd")]
        if event.reason in ("busy", "orphaned"):  # never started, or its process is lost
            return []
        number = self._tries[event.id] = self._tries.get(event.id, 0) + 1
        limit = event.data.get("retries")
        most = f" of {limit}" if isinstance(limit, int) else ""
        return [(f"{name}: retry {number}{most} ({_why(event)})", "odd")]

    def failure_lines(self, summary: Summary) -> list[Line]:
        """Return the failures with the end of their logs.

        Log lines start with the step's name, so output cannot imitate recipe's messages.
        """
        lines: list[Line] = []
        for failure in islice(summary.failed, _REPORTS):
            lines += self._failure(failure)
        more = [safe_ids(failure.id) for failure in islice(summary.failed, _REPORTS, None)]
        if more:
            rest = " …" if len(more) > _REPORTS else ""
            text = f"{len(more)} more failed: {', '.join(more[:_REPORTS])}{rest}"
            lines.append((text, "bad"))
        return lines

    def _failure(self, failure: FailureDetails) -> list[Line]:
        name = safe_ids(failure.id)
        report: list[Line] = [(f"{name}: failed: {safe_ids(failure.reason)}", "bad")]
        said = lines(failure.tail)
        if any(said):
            for line in said[-_LOG_LINES:]:
                rest = "…" if len(line) > _LONGEST else ""
                report.append((f"  {name} | {line[:_LONGEST]}{rest}", ""))
        if failure.log:
            report.append((f"  log: {safe_line(failure.log)}", "dim"))
        if failure.left:
            report.append((f"  kept for debugging: {safe_line(failure.left)}", "dim"))
        if failure.hint:
            report.append((f"  fix: {safe_ids(failure.hint)}", "good"))
        return report

    def summary_lines(self, summary: Summary) -> list[Line]:
        """Return the summary, such as `12 steps: 3 ran, 9 fresh, 0 failed in 4.3s`, and the command
        that compares the instances of a matrix.
        """
        counts = summary.counts
        total = sum(counts.values()) or self.run.total
        steps = count_text(total, "step")
        lines: list[Line] = [(f"warning: {safe_ids(each)}", "odd") for each in summary.warnings]
        if summary.left_running:
            left = ", ".join(map(safe_ids, islice(summary.left_running, _REPORTS)))
            lines.append((f"still running: {left} (the next run collects their results)", "odd"))
        left_out = self._list_skipped(summary)
        idle = self._idle_summary(summary, total, steps)
        if idle is not None:
            return [*lines, idle, *left_out]
        head = _head_of(summary)
        if summary.state == "COMPLETED":
            style = "good"
        else:
            style = "odd" if head else "bad"
        parts = ", ".join(self._list_counts(counts))
        lines += [(f"{head}{steps}: {parts} in {span(summary.seconds)}", style), *left_out]
        if self._compares:
            lines.append((f"compare them: recipe results {self._recipe}", "dim"))
        return lines

    def _idle_summary(self, summary: Summary, total: int, steps: str) -> Line | None:
        """Return the summary of a completed run that executed and restored nothing; None for any other run."""
        if summary.state != "COMPLETED":
            return None
        fresh, skipped = summary.counts.get("FRESH", 0), summary.counts.get("SKIPPED", 0)
        is_idle = fresh + skipped == total and not self.run.restored
        if fresh and is_idle:
            also = f", {skipped} skipped" if skipped else ""
            return f"everything is fresh ({steps}{also})", "good"
        if sum(summary.counts.values()) == skipped:
            return "nothing to run: every step is skipped", "good"
        return None

    def _list_counts(self, counts: Mapping[str, int]) -> list[str]:
        """Return the counts of steps by state, such as `3 ran`; rare states only if not 0."""
        restored = f" ({self.run.restored} restored)" if self.run.restored else ""
        parts = [
            f"{counts.get('DONE', 0)} ran",
            f"{counts.get('FRESH', 0)} fresh{restored}",
            f"{counts.get('FAILED', 0)} failed",
        ]
        for state in ("SKIPPED", "BLOCKED", "CANCELLED"):
            if counts.get(state):
                parts.append(f"{counts[state]} {state.lower()}")
        return parts

    def _list_skipped(self, summary: Summary) -> list[Line]:
        """Return the skipped steps with reasons; at most `_REPORTS`."""
        lines: list[Line] = [
            (f"  skipped {safe_ids(each)}", "dim") for each in islice(summary.skipped, _REPORTS)
        ]
        more = len(summary.skipped) - len(lines)
        if more:
            lines.append((f"  and {more} more steps; `recipe plan` shows them", "dim"))
        return lines


class _Stream:
    """An output stream that ignores writes after its first failure."""

    __slots__ = ("_gone", "_stream")

    def __init__(self, stream: TextIO) -> None:
        self._stream = canvas(stream)
        self._gone = False

    @property
    def terminal(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> None:
        if self._gone or not text:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            self._gone = True


def _head_of(summary: Summary) -> str:
    """Return the prefix of the summary of a run that was stopped; empty for other runs."""
    if summary.state == "PAUSED":
        return "paused: "
    if summary.interrupted and summary.state != "COMPLETED":
        return "interrupted: "
    return "cancelled: " if summary.state == "CANCELLED" else ""


def _write_results(out: _Stream, summary: Summary) -> None:
    """Write a line `name  path` for each result.

    Paths are escaped on a terminal and raw in a pipe.
    """
    wide = max((len(name) for name, _ in summary.results), default=0)
    rows = []
    for name, path in summary.results:
        shown = safe_line(path) if out.terminal else path
        rows.append(f"{name:{wide}}  {shown}\n")
    out.write("".join(rows))


def _why(event: Event) -> str:
    detail = event.data.get("detail")
    return safe_ids(str(detail or event.reason))


def _finite(value: object) -> object:
    """Replace NaN and infinities, which JSON cannot represent, by strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _terminal_size(stream: TextIO) -> tuple[int, int]:
    try:
        columns, height = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = height = 0
    return columns or 80, height or 24  # some pseudo-terminals report 0
