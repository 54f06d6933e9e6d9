"""Why an attempt failed, by what is left of it, and what to do about each cause.  Pure: text and numbers are handed in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

REMEDIES: Final[Mapping[str, str]] = {
    "oom": "use a smaller micro batch (with the same global batch, the loss curve stays the same), shorter sequences or gradient checkpointing",
    "nan": "use a lower learning rate, more warmup steps, or bf16 instead of fp16, and check the data for broken rows",
    "stalled": "check the last lines with `recipe logs`: the usual causes are a stuck data loader, a lock, or another process of the training",
    "preempted": "`retries: {preemption: N}` allows more of them, and with a `state` the next attempt resumes from a checkpoint",
    "disk": "`recipe gc` frees what is no longer needed here, on a host free some below its `root`; `keep` of a state bounds its checkpoints",
    "poison": "its workers died of it: `recipe logs` shows its end; more memory for the worker, or fewer steps at once, may help",
}
"""What to do about a cause, by the word that is stored as the reason."""

_MEMORY: Final = (
    r"OutOfMemoryError|(?:CUDA|HIP|XPU)\b.{0,20} out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|^MemoryError\b|Cannot allocate memory"
)
_NAN: Final = r"\bloss(?: is| was|=|:)? ?(?:nan|[-+]?inf(?:inity)?)\b|returned nan values in its|\bnan (?:loss|gradients?)\b"
LONG: Final = 20
"""So many times the median step without a step is a training that stands still."""
FEW: Final = 5
"""Steps from which there is a median."""
LEAST: Final = 60.0
"""Seconds without a step that mean nothing."""


def of_exit(reason: str, said: str) -> str:
    """A closer reason for a bad exit, from the end of what the command printed; the one that is given where that shows none."""
    # No pattern is compiled before a step fails: that takes longer than many a run.
    if reason in ("exit", "signal") and re.search(_MEMORY, said, re.MULTILINE):
        return "oom"
    if reason == "exit" and re.search(_NAN, said, re.IGNORECASE):
        return "nan"
    return reason


def is_stalled(steps: Sequence[float], silent: float) -> bool:
    """Whether a training whose `steps` took so many seconds stands still, when the last was reported `silent` seconds ago."""
    return len(steps) >= FEW and silent > max(LEAST, LONG * median(steps))


LONGEST_ERROR: Final = 500
"""Characters of an error that are stored with its step."""


def error_in(said: str) -> str:
    """Return the error that a command printed last, such as `ValueError: no rows`; empty where there is none."""
    # Compiled when a step fails, as above.
    memory = r"(?:CUDA|HIP|XPU) out of memory\.(?: Tried to allocate [\d.]+ \w+)?"
    if found := re.findall(memory, said):
        return str(found[-1]).removesuffix(".")
    raised = r"^(?:\[?rank\d+\]?:? ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?:: .*)?)$"
    # `ChildFailedError` and its like tell that a process failed, and the process itself has said why.
    echoes = ("ChildFailedError", "CalledProcessError", "SystemExit")
    lines = [line for line in re.findall(raised, said, re.MULTILINE) if _name(line) not in echoes]
    if not lines:
        lines = re.findall(
            r"^(?:\w[\w./-]*: )?(?:fatal )?error: .*$", said, re.MULTILINE | re.IGNORECASE
        )
    return str(lines[-1])[:LONGEST_ERROR] if lines else ""


def _name(line: str) -> str:
    """The class of an exception, without its module."""
    return line.partition(":")[0].rpartition(".")[2].strip()


def last_line(said: str) -> str:
    """Return the last line with something in it; of a line that is drawn again and again the last drawing."""
    for line in reversed(said.split("\n")):
        if text := line.rstrip("\r").rpartition("\r")[2].strip():
            return text[:LONGEST_ERROR]
    return ""
