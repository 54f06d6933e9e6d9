"""Host samples of an attempt, one line every few seconds (`agent/sampler.py`), from the stored file
or a growing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ..language.values import is_number
from ..storage import metrics
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace
from . import rows

ENDING: Final = ".host"
"""Suffix of the samples file next to an attempt's log."""
_MEANS: Final = ("gpu_utilization_percent", "gpu_power_w", "cpu_percent")
_PEAKS: Final = ("gpu_memory_used_gb", "gpu_temperature_c", "ram_used_gb")


def samples_path(log: str) -> Path:
    """Return the path of the machine samples file for an attempt's log file."""
    return Path(log.removesuffix(".log") + ENDING)


def load_samples(ws: Workspace, attempt: AttemptRow) -> Sequence[Mapping[str, metrics.Value]]:
    """Load the machine samples of a finished attempt. Attempts under 5 seconds have none."""
    return metrics.points(rows.keep_file(ws, attempt, ENDING))


def latest_sample(ws: Workspace, run: str, step: str, number: int, log: str) -> Mapping[str, float]:
    """Return the last machine sample of a running attempt, or nothing before the first sample."""
    found = rows.read_points(ws, run, step, number, samples_path(log))
    return _numbers(found[-1]) if found else {}


def summarize_samples(samples: Iterable[Mapping[str, metrics.Value]]) -> dict[str, float]:
    """Summarize machine samples: mean utilization, maximum memory and temperature."""
    columns: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in _numbers(sample).items():
            columns.setdefault(name, []).append(value)
    summary: dict[str, float] = {}
    for name in _MEANS:
        if name in columns:
            summary[name] = round(sum(columns[name]) / len(columns[name]), 1)
    for name in _PEAKS:
        if name in columns:
            summary[name] = max(columns[name])
    return summary


def describe_samples(found: Mapping[str, float]) -> str:
    """Format a machine sample for display, omitting unknown values.

    For example `GPU 87%, 22.1 GB, 71 °C, 300 W; processors 35%, 12.3 GB of memory in use`.
    """
    gpu = []
    for name, places, unit in _GPU:
        if name in found:
            gpu.append(f"{found[name]:.{places}f}{unit}")
    host = []
    if "cpu_percent" in found:
        host.append(f"processors {found['cpu_percent']:.0f}%")
    if "ram_used_gb" in found:
        host.append(f"{found['ram_used_gb']:.1f} GB of memory in use")
    parts = []
    if gpu:
        parts.append(f"GPU {', '.join(gpu)}")
    if host:
        parts.append(", ".join(host))
    return "; ".join(parts)


_GPU: Final = (
    ("gpu_utilization_percent", 0, "%"),
    ("gpu_memory_used_gb", 1, " GB"),
    ("gpu_temperature_c", 0, " °C"),
    ("gpu_power_w", 0, " W"),
)


def _numbers(sample: Mapping[str, metrics.Value]) -> dict[str, float]:
    return {name: value for name, value in sample.items() if is_number(value)}
