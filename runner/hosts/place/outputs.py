"""The rules for declared outputs, for this machine and for hosts with a disk of their own."""

from __future__ import annotations

from collections.abc import Iterable

from ...planning.step import OutputSpec, unfit_output


def find_output_problem(output: OutputSpec, kind: str, *, is_empty: bool) -> str:
    """Return how a path of this kind differs from the declared output; empty if it does not."""
    _, path, flags = output
    why = unfit_output(kind, flags, is_empty=is_empty)
    return f"declared output {path} {why}" if why else ""


def is_in_state(path: str, states: Iterable[str]) -> bool:
    """Return whether an output is a state or below a state.

    Such an output is copied, because the state still needs the files.
    """
    return any(path == state or path.startswith(f"{state}/") for state in states)
