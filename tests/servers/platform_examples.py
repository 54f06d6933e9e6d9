"""The bodies that a training platform gets, from runs of a real command line.  `python -m tests.servers.platform_examples` writes them to fixtures/server.

A training of 60 steps reports each of them: it ends well, raises an error, runs out of memory, or is cancelled halfway.  One that ends well is
evaluated by a step that counts its own.  Both platforms of `tests.servers.platforms` hear of it, and take only what their contract says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.servers.platforms import Platform
from tests.support import Space, until

FIXTURES: Final = Path(__file__).parents[2] / "fixtures" / "server"
MOMENT: Final = "2026-11-18T11:06:40.000Z"
DURATION: Final = 600_000
"""What stands for the time of a run and for its milliseconds, which no two runs share."""
OOM: Final = "CUDA out of memory. Tried to allocate 2.00 GiB"
SAID_BY_TORCH: Final = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.57 GiB"
    " of which 1.31 GiB is free."
)
PROGRAM: Final = """\
import json, os, pathlib, sys, time

ends, total = sys.argv[1], int(sys.argv[2])
last = total if sys.argv[1] == "completed" else total // 2
print("epoch 1 of 2", flush=True)
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for step in range(1, last + 1):
        metrics.write(json.dumps({"step": step, "epoch": step / total, "loss": 1.25, "memory_gb": 0.6}) + "\\n")
pathlib.Path("reported").touch()
if ends == "failed":
    raise ValueError("no rows are left after filtering")
if ends == "oom":
    class OutOfMemoryError(RuntimeError):
        __module__ = "torch"
    raise OutOfMemoryError("MESSAGE")
while ends == "cancelled":
    time.sleep(0.02)
pathlib.Path("out.txt").write_text("done")
""".replace("MESSAGE", SAID_BY_TORCH.partition(": ")[2])
RECIPE: Final = """\
recipe: learn@1
summary: Trains for 60 steps, and evaluates.
inputs:
  ends: {type: string}
  max_steps: {type: integer, default: 60}
steps:
  train:
    run: 'exec PYTHON train.py {{ inputs.ends }} {{ inputs.max_steps }}'
    deps: [train.py]
    metrics: true
    state: {checkpoints: {checkpoint: "step-*"}}
    outputs: {o: out.txt}
  evaluate:
    run: 'sleep 0.3; cat {{ steps.train.o }}; echo "{\\"step\\": 1, \\"perplexity\\": 4.48}" >> $RECIPE_METRICS; echo good > {{ outputs.o }}'
    metrics: true
    outputs: {o: evaluated.txt}
"""
NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "completed": ("status_completed", "alert_job_completed"),
    "failed": ("status_failed", "alert_job_failed"),
    "oom": ("status_failed_of_memory", "alert_gpu_oom"),
    "cancelled": ("status_cancelled", "alert_job_cancelled"),
}
"""By how the training ends, the names of the status and the alert that follow."""


class Heard(NamedTuple):
    """What the two platforms heard of a run."""

    service: Platform
    backend: Platform


def runs(root: Path) -> dict[str, Heard]:
    """Carry out a run for each end, by its name."""
    return {ends: _run(Space(root / ends), ends) for ends in NAMES}


def examples(heard: Mapping[str, Heard]) -> dict[str, Any]:
    """Return each body by the name of its file, with `MOMENT` and `DURATION` for times."""
    found: dict[str, Any] = {}
    for ends, (status, alert) in NAMES.items():
        statuses = heard[ends].backend.bodies("status")
        alerts = heard[ends].service.bodies("alert")
        found[status] = _timeless(statuses[-1])
        found[alert] = _timeless(alerts[-1])
        if ends == "completed":
            found["status_running"] = _timeless(statuses[1])
            found["alert_job_started"] = _timeless(alerts[0])
            found["logs"] = _timeless(heard[ends].backend.bodies("logs")[0])
    return found


def _run(space: Space, ends: str) -> Heard:
    space.write("train.py", PROGRAM)
    space.write("learn.yaml", RECIPE.replace("PYTHON", sys.executable))
    with Platform.service() as service, Platform.backend() as backend:
        job = {"JOB_ID": "job-1", "MODEL_NAME": "acme/tiny"}
        # The backend gets no metrics where METRICS_API_URL is set: of each kind there is one address.
        environ = service.environ(**job) | backend.environ(**job)
        run = space.start("run", "./learn.yaml", f"ends={ends}", "-q", env=environ)
        if ends == "cancelled":
            until(service.points)
            assert space.command("cancel", env=environ)[0] == 0
        run.communicate(timeout=120)
        assert space.command("outbox", "deliver", env=environ)[0] == 0
        return Heard(service, backend)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(_still(name, each)) for name, each in value.items()}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _still(name: str, value: Any) -> Any:
    return {"timestamp": MOMENT, "duration": DURATION}.get(name, value)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RECIPE_LEDGER"] = f"{folder}/ledger.db"
        for name, body in examples(runs(Path(folder))).items():
            (FIXTURES / f"{name}.json").write_text(json.dumps(body, indent=2) + "\n", "utf-8")
