"""What a training tells of each of its steps, and where a step's time went.  Does not know what is trained.

One JSON object for each optimizer step, appended to the file that $RECIPE_METRICS names (`recipe metrics`, `recipe report` read it):

    step                which optimizer step, from 1
    loss lr grad_norm   the step's mean loss, its learning rate, the norm of its gradient before clipping; and whatever else the trainer gives
    max_steps epoch     of how many steps, and how many readings of all the data are behind, where the trainer knows
    samples_per_second  samples of the step, over all devices, by the wall time of the step; and tokens_per_second, where the trainer gives `tokens`
    memory_gb           10⁹ bytes: the most that was reserved on this process's GPU so far; without a GPU, the most that this process held of RAM
    gpu_memory_allocated_gb gpu_memory_reserved_gb
                        10⁹ bytes of that GPU at the most so far: in tensors, and held by torch's allocator; without a GPU they are not there
    gpu gpus            what that GPU is called, and how many there are in the training; without one they are not there
    time_step           seconds from the end of the step before to the end of this one
    time_data           … of these, getting and preparing a batch             time_communication  … adding up gradients over processes
    time_model          … forward and backward                               time_checkpoint     … saving state, of the step before this line
    time_optimizer      … clipping, the update, zeroing                      time_evaluation     … looking at held-out data, drawing samples
    time_generation     … sampling answers to learn from                     time_tool           … tools, rewards and environments of such answers

GPU_MEMORY_FRACTION=0.5 leaves the other half of the GPU's memory to others.

METRICS_REPORT_INTERVAL_STEPS=10 has only every tenth step and the last one told there, in TensorBoard files and in trackers.

A time that a trainer does not have is not there.  The rest of time_step is what the trainer did not name.  A value that is not finite is left out.

The history (history.jsonl) has the same lines without max_steps, epoch, speeds, memory and times: those differ from run to run, and the history of a
training that was killed and resumed is equal to that of one that was not, byte for byte.  TensorBoard files and trackers get every number.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from control import every
from loop import Metrics, fail

PHASES = ("data", "model", "optimizer", "communication", "generation", "tool", "checkpoint", "evaluation")
TRACKERS = ("none", "wandb", "trackio")


class Telemetry:
    """Measures the steps of one training and tells them.  Make it when all is on its device and the first step is next.

    with telemetry.phase("data"): …       phases may lie in each other: the time of the inner one is not the outer one's
    told = telemetry.step(12, samples=16, loss=2.3, lr=1e-4, grad_norm=0.8)
    telemetry.history                     the lines so far, for the checkpoint and for history.jsonl
    """

    def __init__(
        self, tensorboard: Path | None, *, main: bool = True, history: Iterable[str] = (), tracker: str = "none", project: str = "recipe",
        settings: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """`main` false, on every process but one: phases and steps cost nothing and tell nothing.  `history`: the lines of a resumed checkpoint.

        Ends with a message where the tracker is not installed, or does not let us in.
        """
        self.history = list(history)
        self._main = main
        self._open: list[str] = []
        self._spans: list[tuple[str, Any, Any]] = []
        self._cuda = _cuda_is_used()
        self._gpu = _gpu()
        _take_part()
        self._metrics = self._board = self._tracker = self._offline = None
        self._every = every("METRICS_REPORT_INTERVAL_STEPS", 1)
        self._held: tuple[int, dict[str, float]] | None = None  # the last step, if it was not reported
        if not main:
            return
        told = os.environ.get("RECIPE_METRICS")
        self._metrics = Metrics(Path(told) if told else None)
        self._tracker, alone = _tracker(tracker, project, settings or {}, tensorboard)
        self._offline = tensorboard if alone else None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(tensorboard), flush_secs=10)  # type: ignore[no-untyped-call]
            # The files of an attempt that was killed are gone with it: a resumed one draws the curves from their beginning.
            for line in self.history:
                self._draw(json.loads(line))
        for line in self.history if alone else ():
            values = json.loads(line)
            self._tracker.log(values, step=values.pop("step"))
        self._since = self._mark()
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time until the end of this block is `time_<name>`.  On a GPU it is taken on the GPU's own clock, and nothing waits for it."""
        assert name in PHASES, f"BUG: no phase is called {name}"
        if not self._main:
            yield
            return
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def step(self, step: int, *, samples: int, of: int = 0, epoch: float | None = None, **values: float) -> dict[str, float]:
        """The optimizer step `step` is over, of so many: what is told of it comes back.

        `values` go into the history, so they are functions of data, settings and seed, and no times.
        """
        if not self._main:
            return {}
        values = {name: float(value) if not isinstance(value, int) else value for name, value in values.items() if math.isfinite(value)}
        self.history.append(json.dumps({"step": step, **values}) + "\n")
        times = self._times()
        speed = {"samples_per_second": round(samples / times["time_step"], 3), "memory_gb": round(memory() / 1e9, 3), **gpu_memory()}
        if "tokens" in values:
            speed["tokens_per_second"] = round(values["tokens"] / times["time_step"], 1)
        behind = {"max_steps": of} if of else {}
        if epoch is not None:
            behind["epoch"] = round(epoch, 4)
        told = {**values, **behind, **speed, **times}
        self._held = (step, told)
        if step % self._every == 0:
            self._report()
        return told

    def _report(self) -> None:
        if self._held is None or self._metrics is None:
            return
        (step, told), self._held = self._held, None
        self._metrics.tell(step, **told, **self._gpu)  # type: ignore[arg-type]
        self._draw({"step": step, **told})
        if self._tracker is not None:
            self._tracker.log(told, step=step)

    def close(self) -> None:
        """Nothing more is told; files and trackers are brought to an end.  The last step is always told."""
        self._report()
        if self._board is not None:
            self._board.close()  # type: ignore[no-untyped-call]
        if self._tracker is not None:
            self._tracker.finish()
        # wandb's folder has a link to its own log in the home folder; what a step makes has none that leads out of it.
        for path in self._offline.rglob("*") if self._offline is not None else ():
            if path.is_symlink():
                path.unlink()

    def _draw(self, line: Mapping[str, Any]) -> None:
        if self._board is not None:
            for name, value in line.items():
                if name != "step":
                    self._board.add_scalar(name, value, line["step"])  # type: ignore[no-untyped-call]

    def _mark(self) -> Any:
        """A moment: on a GPU, when it gets here with its work; else now."""
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _turn(self) -> None:
        now = self._mark()
        if self._open:
            self._spans.append((self._open[-1], self._since, now))
        self._since = now

    def _times(self) -> dict[str, float]:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for name, begin, end in self._spans:
            seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            totals[f"time_{name}"] = totals.get(f"time_{name}", 0.0) + seconds
        now = time.perf_counter()
        whole, self._began = now - self._began, now
        self._spans = []
        return {name: round(seconds, 6) for name, seconds in {"time_step": max(whole, 1e-9), **totals}.items()}


def require(tracker: str) -> None:
    """End with a message where the tracker is not installed: to be called before anything that takes long."""
    if tracker != "none" and tracker not in sys.modules and importlib.util.find_spec(tracker) is None:
        fail(f"tracker {tracker} is not installed in this step's Python: add it to the lock, or say tracker=none")


def memory() -> int:
    """Bytes, at the most so far: reserved on this process's GPU, or, without one, of RAM."""
    if _cuda_is_used():
        import torch

        return int(torch.cuda.max_memory_reserved())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere else


def gpu_memory() -> dict[str, float]:
    """10⁹ bytes of this process's GPU, at the most so far; nothing without one."""
    if not _cuda_is_used():
        return {}
    import torch

    found = {"gpu_memory_allocated_gb": torch.cuda.max_memory_allocated(), "gpu_memory_reserved_gb": torch.cuda.max_memory_reserved()}
    return {name: round(count / 1e9, 3) for name, count in found.items()}


def _gpu() -> dict[str, str | int]:
    """What the GPU is called, and how many train.  What was measured says something about another training only on the same kind."""
    if not _cuda_is_used():
        return {}
    import torch

    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {"gpu": torch.cuda.get_device_name(), "gpus": torch.distributed.get_world_size() if together else 1}


def _take_part() -> None:
    """Take no more of the GPU's memory than the part of it that $GPU_MEMORY_FRACTION says, between 0 and 1."""
    told = os.environ.get("GPU_MEMORY_FRACTION", "")
    if not told or not _cuda_is_used():
        return
    import torch

    try:
        torch.cuda.set_per_process_memory_fraction(float(told))
    except ValueError:
        fail(f"GPU_MEMORY_FRACTION is {told}; it is a number between 0 and 1")


def _cuda_is_used() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _tracker(name: str, project: str, settings: Mapping[str, object], folder: Path | None) -> tuple[Any, bool]:
    """wandb or trackio, which have the same face, and whether it knows nothing of what an attempt before us told it.

    One run of ours is one of theirs, however often it was resumed.  Offline, wandb writes files for `wandb sync`: into `folder`, which is kept.
    """
    if name == "none":
        return None, False
    require(name)
    tracker = importlib.import_module(name)
    run = os.environ.get("RECIPE_RUN")
    words = {"id": f"{run}-{os.environ.get('RECIPE_STEP', 'train').replace('/', '-')}"} if run and name == "wandb" else {}
    alone = name == "wandb" and os.environ.get("WANDB_MODE") in ("offline", "dryrun")
    if alone and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        words["dir"] = str(folder)
    try:
        tracker.init(project=project, name=run, config=dict(settings), resume="allow", **words)
    except Exception as error:  # whatever a service and its client may raise; the user's remedy is one
        fail(f"tracker {name} did not start: {error}; check its key (WANDB_API_KEY for wandb), or say tracker=none")
    return tracker, alone
