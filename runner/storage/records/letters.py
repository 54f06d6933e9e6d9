"""Webhook deliveries for run events: endpoints and message bodies.

Reads runs and settings, and sends nothing.

Endpoints come from the settings (`[[webhooks]]`, `[[notify]]`, `[hooks]`), from the run, or from
the environment (a training platform). The platform's bodies follow its contract, see
fixtures/server.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from ...failures import RunFailure, StepFailure
from ...language.values import is_number
from .ledger import Ledger, of_user
from .links import stored_links
from .outbox import Letter
from .runs import FINAL, Event, RunRow, Runs

if TYPE_CHECKING:
    from ...planning.run_view import Progress, RunView
    from ...settings import Config

STATUS: Final = {
    "QUEUED": "queued",
    "ACTIVE": "running",
    "PAUSED": "paused",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
}
"""Run states in the platform's names."""
_ALERTS: Final = {
    "COMPLETED": "job_completed",
    "FAILED": "job_failed",
    "CANCELLED": "job_cancelled",
}
_TOLD: Final = {
    "job_completed": "completed",
    "job_failed": "failed",
    "job_cancelled": "failed",
    "gpu_oom": "failed",
}
POINT: Final = (
    "step", "epoch", "train_loss", "eval_loss", "learning_rate", "grad_norm", "samples_per_second", "gpu_memory_allocated_gb",
    "gpu_utilization_percent", "perplexity", "timestamp",
)  # fmt: skip
"""Fields of a metric point, in the platform's names."""
_ALSO: Final = {
    "train_loss": ("loss",),
    "learning_rate": ("lr",),
}
"""Alternative metric names used by trainers."""
_LOSSES: Final = ("loss", "train_loss")
LOCAL: Final = "/api/training/local"
_SOON: Final = 1e11
"""Largest plausible time in seconds since the epoch (year 5138)."""
_LATEST: Final = 1e20
"""Largest plausible time in nanoseconds."""


class PlatformJob(NamedTuple):
    """Run as a job of the training platform."""

    id: str
    user: str
    model: str


class ReportedNumbers(NamedTuple):
    """Progress of a training from the last reported metrics."""

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    training: str = ""
    """ID of the training step."""


NO_NUMBERS: Final = ReportedNumbers()


class ReportedFailure(NamedTuple):
    """Failure of a run: its kind, its message, and the failed step, if any."""

    kind: str = ""
    words: str = ""
    step: str = ""


NO_FAILURE: Final = ReportedFailure()


def failure_of(event: Event) -> ReportedFailure:
    """Return the failure recorded in the event that ended a run."""
    kind, step = (str(event.data.get(name, "")) for name in ("failure", "step"))
    return ReportedFailure(kind, event.reason, step)


def moment(at: float) -> str:
    """Format a time as RFC 3339."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def job_of(run: RunRow, environ: Mapping[str, str]) -> PlatformJob | None:
    """Return the run's job on the training platform; None if it has no job.

    The source is its submission or the pod's environment.
    """
    found = run.data.get("job")
    if isinstance(found, dict):
        return PlatformJob(
            str(found.get("id", "")), str(found.get("user", "")), str(found.get("model", ""))
        )
    id = environ.get("JOB_ID", "")
    return (
        PlatformJob(id, environ.get("USER_ID", ""), environ.get("MODEL_NAME", "")) if id else None
    )


def is_wanted(events: Iterable[str], type: str) -> bool:
    """Return True if the event type matches a pattern such as `run.*`."""
    return any(fnmatchcase(type, pattern) for pattern in events)


class Letters:
    """Builder of webhook messages about the runs of one store."""

    def __init__(
        self,
        runs: Runs,
        config: Config,
        environ: Mapping[str, str],
        view: Callable[[RunRow], RunView],
    ) -> None:
        self._runs, self._config, self._environ, self._view = runs, config, environ, view
        self._began: dict[str, float] = {}
        self.spend = config.lists.get("hooks.spend", ())
        self.metrics_url, self.backend, self.alerts_url = (
            environ.get(name, "") for name in ("METRICS_API_URL", "BACKEND_URL", "ALERT_API_URL")
        )

    def __call__(self, events: Sequence[Event]) -> list[Letter]:
        """Return the webhook deliveries for the events of one run."""
        letters: list[Letter] = []
        for event in events:
            letters += self._of(self._runs.get(event.run), event)
        return letters

    def _of(self, run: RunRow, event: Event) -> list[Letter]:
        failed = failure_of(event) if event.after == "FAILED" else NO_FAILURE
        view = self._view(run)
        if event.after == "ACTIVE":
            self._began.setdefault(run.id, event.at)
        data: dict[str, object] = {
            "before": event.before,
            "state": event.after,
            "reason": event.reason,
            "seq": event.seq,
            "progress": view.progress._asdict(),
        }
        if event.after == "FAILED":
            error = f"{failed.step}: {failed.words}" if failed.step else failed.words
            data |= {"failure": failed.kind, "error": error}
            if view.failed is not None:
                data["failed"] = view.failed._asdict()
        if event.after in FINAL:
            links = stored_links(self._runs.attempts(run.id))
            if links:
                data["links"] = [each._asdict() for each in links]
        letters = self.generic(
            run, f"run.{event.after.lower()}", f"{run.id}-{event.seq}", event.at, data
        )
        if self.spend:
            letters += self._points(run, event)
        if failed.kind == RunFailure.POISON:
            id = f"{run.id}-{failed.kind}"
            letters += self.alert(run, failed.kind, id, event.at, failed.words)
        job = job_of(run, self._environ)
        if job is not None:
            letters += self._platform(run, job, event, failed, view)
        return letters

    def generic(
        self, run: RunRow, type: str, id: str, at: float, data: Mapping[str, object]
    ) -> list[Letter]:
        """Return a delivery for each matching webhook endpoint other than the training platform."""
        labels = run.data.get("labels")
        if not isinstance(labels, dict):
            labels = {}
        facts = {
            "run": run.id,
            "recipe": run.recipe,
            "user": run.user,
            "labels": labels,
            **data,
        }
        body = json.dumps({"type": type, "timestamp": moment(at), "data": facts})
        return [Letter(receiver, id, type, body) for receiver in self._receivers(run, type)]

    def _receivers(self, run: RunRow, type: str) -> list[str]:
        """Return the webhooks and chats of the settings, then the run's own webhooks."""
        receivers = []
        for webhook in self._config.webhooks:
            if is_wanted(webhook.events, type):
                receivers.append(f"webhook POST {webhook.url}")
        for chat in self._config.notify:
            if is_wanted(chat.events, type):
                receivers.append(f"notify {chat.url}")
        own = run.data.get("webhooks")
        if isinstance(own, list):
            for hook in own:
                if is_wanted(hook["events"], type):
                    receivers.append(f"hook POST {hook['url']}")
        return receivers

    def _points(self, run: RunRow, event: Event) -> list[Letter]:
        """Return the message for the `[hooks] spend` program about an amount in US dollars.

        The message reserves the run's cost limit, charges the run's cost, or refunds the rest of
        the reservation.  Other events have no message.
        """
        what = _spend_call(event)
        if not what or event.data.get("failure") == RunFailure.POINTS:
            return []
        limits = run.data.get("limits")
        usd = float(limits.get("cost", 0.0)) if isinstance(limits, dict) else 0.0
        if what != "reserve":
            cost = self._cost(run.id)
            usd = cost if what == "charge" else max(0.0, usd - cost)
        id = f"{run.id}-{what}"
        body = json.dumps(
            {"event": what, "id": id, "run": run.id, "lease": None, "usd": round(usd, 6)}
        )
        # A reservation is not sent with the other deliveries: `reports.points` asks the program
        # before the run starts.
        kind = "reserve" if what == "reserve" else "spend"
        return [Letter(f"{kind} {shlex.join(self.spend)}", id, f"points.{what}", body)]

    def _cost(self, run: str) -> float:
        """Return the cost of a run's machines so far, in US dollars."""
        with Ledger.open(of_user(self._environ), read_only=True) as ledger:
            costs = ledger.costs([lease.key for lease in ledger.of_run(run)])
            return sum((spent.usd for spent in costs.values()), 0.0)

    # -- training platform

    def _platform(
        self, run: RunRow, job: PlatformJob, event: Event, failed: ReportedFailure, view: RunView
    ) -> list[Letter]:
        """Return the deliveries for a new state: the job's status, and an alert if it has one."""
        alert = _alert_of(event, failed)
        numbers = NO_NUMBERS
        progress: dict[str, object] = {}
        if alert != "job_started":
            numbers = numbers_of(view)
            progress = _progress(numbers, view.progress)
        error = failed.words
        if not error and event.after == "CANCELLED":
            error = event.reason
        id = f"{run.id}-{event.seq}"
        letters = []
        if self.backend:
            letters.append(self._status(job, id, event, progress, error))
        if not alert:
            return letters

        facts: dict[str, object] = {"status": _TOLD.get(alert, "running"), **progress}
        if numbers.loss is not None:
            facts["loss"] = numbers.loss
        if event.after in FINAL:
            facts["duration"] = round(1000 * self._seconds(run, event, numbers.training))
        if error:
            facts["error_message"] = error
            facts["error_type"] = _error_type(failed.kind, event.after)
        letters += self._alert(job, alert, id, facts)
        if alert == "gpu_oom":
            letters += self.generic(
                run, "alert.gpu_oom", f"{id}-gpu_oom", event.at, {"reason": error}
            )
        return letters

    def _status(
        self, job: PlatformJob, id: str, event: Event, progress: Mapping[str, object], error: str
    ) -> Letter:
        facts = {
            "job_id": job.id,
            "status": STATUS[event.after],
            **progress,
            "timestamp": moment(event.at),
        }
        if error:
            facts["error_message"] = error
        receiver = f"status PATCH {self._local(job, 'status')}"
        return Letter(receiver, id, f"run.{event.after.lower()}", json.dumps(facts))

    def _seconds(self, run: RunRow, event: Event, training: str) -> float:
        """Return the training time over all attempts in seconds, otherwise the run's duration.

        The duration is used without a training step.
        """
        began = self._began.pop(run.id, run.created)
        trained = []
        for attempt in self._runs.attempts(run.id):
            if attempt.step == training and attempt.started and attempt.ended:
                trained.append(attempt.ended - attempt.started)
        return sum(trained) if trained else event.at - began

    def alert(self, run: RunRow, name: str, id: str, at: float, words: str) -> list[Letter]:
        """Return the deliveries for an alert.

        The platform receives only `timeout_warning`.
        """
        letters = self.generic(run, f"alert.{name}", id, at, {"alert": name, "message": words})
        job = job_of(run, self._environ)
        if job is not None and name == "timeout_warning":
            view = self._view(run)
            letters += self._alert(
                job,
                name,
                id,
                {
                    "status": "running",
                    "error_message": words,
                    **_progress(numbers_of(view), view.progress),
                },
            )
        return letters

    def _alert(
        self, job: PlatformJob, name: str, id: str, about: Mapping[str, object]
    ) -> list[Letter]:
        if not (self.alerts_url and job.id and job.user):
            return []
        facts: dict[str, object] = {"type": name, "job_id": job.id, "user_id": job.user}
        if job.model:
            facts["model_name"] = job.model
        facts |= about
        return [Letter(f"alert POST {self.alerts_url}", id, f"alert.{name}", json.dumps(facts))]

    def metrics(self, run: RunRow, points: Sequence[Mapping[str, object]], id: str) -> list[Letter]:
        """Return the delivery of one batch of metric points to the training platform."""
        job = job_of(run, self._environ)
        if job is None or not points or not (self.metrics_url or self.backend):
            return []
        if self.metrics_url:
            receiver = f"metrics POST {self.metrics_url}"
        else:
            receiver = f"metrics PUT {self._local(job, 'metrics')}"
        body = json.dumps({"job_id": job.id, "metrics": list(points)})
        return [Letter(receiver, id, "metrics", body, len(points))]

    def logs(self, run: RunRow, lines: Sequence[Mapping[str, object]], id: str) -> list[Letter]:
        """Return the delivery of log lines to the training platform."""
        job = job_of(run, self._environ)
        if job is None or not lines or not self.backend:
            return []
        body = json.dumps({"job_id": job.id, "logs": list(lines)})
        return [Letter(f"logs POST {self._local(job, 'logs')}", id, "logs", body)]

    def _local(self, job: PlatformJob, what: str) -> str:
        return f"{self.backend.rstrip('/')}{LOCAL}/{quote(job.id, safe='')}/{what}"


def numbers_of(view: RunView) -> ReportedNumbers:
    """Return the training progress from the view of a run."""
    training = view.training
    if training is None or training.step is None:
        return NO_NUMBERS
    loss = next((training.values[name] for name in _LOSSES if name in training.values), None)
    total = int(training.total) if training.total else None
    return ReportedNumbers(int(training.step), total, loss, view.trains)


def _alert_of(event: Event, failed: ReportedFailure) -> str:
    """Return the platform's alert for a new state, or ""."""
    if event.after == "ACTIVE" and not event.data.get("resumed"):
        return "job_started"
    if event.after == "FAILED" and failed.kind == StepFailure.OOM:
        return "gpu_oom"
    return _ALERTS.get(event.after, "")


def _spend_call(event: Event) -> str:
    """Return what a run's new state asks of the spend program; "" for nothing."""
    if not event.before:
        return "reserve"
    if event.after == "COMPLETED":
        return "charge"
    if event.after in FINAL:
        return "refund"
    return ""


def _progress(numbers: ReportedNumbers, progress: Progress) -> dict[str, object]:
    """Return the known progress fields of a message."""
    known: dict[str, object] = {}
    if progress.percent is not None:
        known["progress"] = progress.percent
    if numbers.step is not None:
        known["current_step"] = numbers.step
    if numbers.total is not None:
        known["total_steps"] = numbers.total
    return known


def _error_type(kind: str, state: str) -> str:
    if kind == StepFailure.OOM:
        return "CUDA_OOM"
    if state == "CANCELLED":
        return "CANCELLED"
    return (kind or "FAILED").upper().replace("-", "_")


def point_of(line: Mapping[str, object], at: float) -> dict[str, object] | None:
    """Convert reported metrics to a metric point of the training platform.

    Returns None without a valid step and another number.
    """
    point: dict[str, object] = {}
    for name in POINT[:-1]:
        value = _reported_value(line, name)
        if is_number(value) and value == value and abs(value) != float("inf"):
            point[name] = value
    step = point.get("step")
    if not is_number(step) or step < 0 or len(point) < 2:
        return None
    point["step"] = int(step)
    point["timestamp"] = _timestamp(line.get("timestamp"), at)
    return point


def _reported_value(line: Mapping[str, object], name: str) -> object:
    """Return a metric by the platform's name or a trainer's alternative name, or None."""
    for spelling in (name, *_ALSO.get(name, ())):
        if spelling in line:
            return line[spelling]
    return None


def _timestamp(reported: object, at: float) -> str:
    """Return the reported time of a metric point, otherwise the time `at`.

    `at` is in seconds since the epoch.
    """
    if isinstance(reported, str):
        return reported
    if is_number(reported) and abs(reported) < _LATEST:
        return moment(_seconds(reported))
    return moment(at)


def _seconds(when: float) -> float:
    """Convert a trainer's time to seconds since the epoch.

    Some trainers use milliseconds or finer units.
    """
    while abs(when) > _SOON:
        when /= 1000
    return when
