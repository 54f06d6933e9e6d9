"""Promise: a run on machines of Compute Engine brings home what a run here makes, and gives every machine back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_provider import Provider, provider
from tests.rented import alive, ours, rents, same_as_here
from tests.support import Space


@pytest.fixture(scope="module")
def real() -> Iterator[Provider]:
    with provider(
        "gcp",
        "--hosts",
        "real",
        "--clock",
        "real",
        "--faults",
        "boot=0.1,takes=0.1,foreign=3,taken@create=once",
    ) as found:
        yield found


def test_a_run_on_compute_engine_makes_what_a_run_here_makes(
    space: Space, real: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first zone has no room: it costs nothing, and the next is asked."""
    rents(space, real, monkeypatch, "gcp")
    same_as_here(space, "gcp")
    assert ours(real) == ["created", "started", "destroyed"] and len(alive(real, foreign=True)) == 3
