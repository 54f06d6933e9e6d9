"""Find the cause of a failed attempt from its output, and suggest a remedy.

Pure: works on text and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

REMEDIES: Final[Mapping[str, str]] = {
    "oom": "use a smaller micro batch (with the same global batch, the loss curve stays the same), shorter sequences or gradient checkpointing",
    "nan": "use a lower learning rate, more warmup steps, or bf16 instead of fp16, and check the data for broken rows",
    "stalled": "check the last lines with `recipe logs`: the usual causes are a stuck data loader, a lock, or another process of the training",
    "preempted": "allow more retries with `retries: {preemption: N}`; with a `state`, the next attempt resumes from a checkpoint",
    "disk": "free disk space: on this machine with `recipe gc`, on a host below its `root`; limit the checkpoints with `keep` of the `state`",
    "poison": "its workers died: check the last log lines with `recipe logs`; more memory for the worker, or fewer parallel steps, may help",
}
"""Remedy by cause.  Keys are stored as the failure reason."""

_MEMORY: Final = (
    r"OutOfMemoryError|(?:CUDA|HIP|XPU)\b.{0,20} out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|^MemoryError\b|Cannot allocate memory"
)
_NAN: Final = r"\bloss(?: is| was|=|:)? ?(?:nan|[-+]?inf(?:inity)?)\b|returned nan values in its|\bnan (?:loss|gradients?)\b"
LONG: Final = 20
"""Factor above the median training step time at which a training without output counts as stalled.
"""
FEW: Final = 5
"""Minimum number of training steps for a median."""
LEAST: Final = 60.0
"""Minimum time without output of a stalled training, in seconds."""


def find_exit_cause(reason: str, said: str) -> str:
    """Return `oom` or `nan` if the end of the command's output shows it, otherwise `reason`."""
    # Patterns are compiled only after a failure, because compiling takes longer than many runs.
    if reason in ("exit", "signal") and re.search(_MEMORY, said, re.MULTILINE):
        return "oom"
    if reason == "exit" and re.search(_NAN, said, re.IGNORECASE):
        return "nan"
    return reason


def is_stalled(steps: Sequence[float], silent: float) -> bool:
    """Return whether a training has reported no step for much longer than its step time.

    `steps` are the durations of its steps, and `silent` is the time since the last one, in seconds.
    """
    return len(steps) >= FEW and silent > max(LEAST, LONG * median(steps))


LONGEST_ERROR: Final = 500
"""Maximum length of a stored error message, in characters."""


def find_error(said: str) -> str:
    """Return the last error in a command's output, such as `ValueError: no rows`, or ""."""
    # Patterns are compiled only after a failure, as in `find_exit_cause`.
    memory = r"(?:CUDA|HIP|XPU) out of memory\.(?: Tried to allocate [\d.]+ \w+)?"
    if found := re.findall(memory, said):
        return str(found[-1]).removesuffix(".")
    raised = r"^(?:\[?rank\d+\]?:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?:: .*)?)$"
    # These errors only report that a process failed.  The process itself has printed the cause.
    echoes = ("ChildFailedError", "CalledProcessError", "SystemExit")
    lines = [line for line in re.findall(raised, said, re.MULTILINE) if _name(line) not in echoes]
    if not lines:
        of_compiler = r"^(?:\w[\w./-]*: )?(?:fatal )?error: .*$"
        lines = re.findall(of_compiler, said, re.MULTILINE | re.IGNORECASE)
    return str(lines[-1])[:LONGEST_ERROR] if lines else ""


def _name(line: str) -> str:
    """Return the class name of an exception without its module."""
    return line.partition(":")[0].rpartition(".")[2].strip()


def find_last_line(said: str) -> str:
    """Return the last non-empty line of a command's output.

    For a progress bar redrawn with carriage returns, this is its last state.
    """
    for line in reversed(said.split("\n")):
        text = line.rstrip("\r").rpartition("\r")[2].strip()
        if text:
            return text[:LONGEST_ERROR]
    return ""
