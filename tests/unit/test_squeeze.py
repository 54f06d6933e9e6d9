"""What travels is compressed while there is processor time to spare, and always comes out as it went in."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.agent import squeeze
from runner.agent.squeeze import Squeezer, bytes_of

TEXT = b"one line of many that are alike\n" * 4000
NOISE = random.Random(5).randbytes(len(TEXT))


class Time:
    """A clock, and what this process used of it."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def passes(self, seconds: float, busy: float) -> None:
        self.now += seconds
        self.used += seconds * busy

    def squeezer(self) -> Squeezer:
        return Squeezer(lambda: self.now, lambda: self.used)


@given(st.lists(st.binary(max_size=2000) | st.sampled_from([TEXT, NOISE]), min_size=1, max_size=20))
def test_what_is_squeezed_comes_out_as_it_went_in(blocks: list[bytes]) -> None:
    squeezer = Squeezer()
    assert [
        bytes_of(b"".join(squeezer.payload([block[:7], memoryview(block)[7:]]))) for block in blocks
    ] == blocks


def test_text_shrinks_and_noise_is_not_tried_again_and_again() -> None:
    squeezer = Time().squeezer()
    assert len(b"".join(squeezer.payload([TEXT]))) < len(TEXT) / 10
    assert squeezer.payload([NOISE])[0] == b"d"
    assert [squeezer.payload([TEXT])[0] for _ in range(squeeze.SKIPPED + 1)] == [
        b"d"
    ] * squeeze.SKIPPED + [b"z"]


def test_a_processor_that_is_busy_is_left_alone_until_it_is_idle() -> None:
    time = Time()
    squeezer = time.squeezer()
    kinds = []
    for busy in (0.5, 0.9, 0.5, 0.3, 0.5):
        time.passes(squeeze.WINDOW, busy)
        kinds.append(squeezer.payload([TEXT])[0])
    assert kinds == [b"z", b"d", b"d", b"z", b"z"]


@pytest.mark.parametrize(
    "payload",
    [
        b"z" + zlib.compress(bytes(squeeze.MOST + 1)),
        b"z" + zlib.compress(TEXT)[:-1],
        b"zno",
        b"r[]",
        b"",
    ],
)
def test_what_grows_too_large_or_is_cut_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        bytes_of(payload)
