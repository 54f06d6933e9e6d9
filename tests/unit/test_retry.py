"""What may go right next time is tried again: as often and after as long as a policy says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from runner.retry import Policy, backoff, pause, retry, retry_async


def failing(*errors: Exception) -> Callable[[], str]:
    """Raises these, one a call, then answers."""
    left = list(errors)

    def do() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return do


@pytest.fixture(params=["retry", "retry_async"])
def tried(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[], str], Policy], tuple[str, list[float]]]:
    """The answer, and the seconds that were waited; nobody waits."""

    def run(do: Callable[[], str], policy: Policy) -> tuple[str, list[float]]:
        waited: list[float] = []
        if request.param == "retry":
            return retry(do, policy, waited.append), waited

        async def ask() -> str:
            return do()

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        return asyncio.run(retry_async(ask, policy, sleep)), waited

    return run


Tried = Callable[[Callable[[], str], Policy], tuple[str, list[float]]]


def test_what_works_is_done_once_without_a_wait(tried: Tried) -> None:
    assert tried(failing(), backoff(OSError, 3, 1.0, 9.0)) == ("done", [])


def test_pauses_double_up_to_the_longest(tried: Tried) -> None:
    assert tried(failing(*[OSError()] * 5), backoff(OSError, 6, 1.0, 5.0)) == (
        "done",
        [1.0, 2.0, 4.0, 5.0, 5.0],
    )


def test_the_last_error_is_raised_when_it_was_tried_often_enough(tried: Tried) -> None:
    first, last = OSError("first"), OSError("last")
    with pytest.raises(OSError, match="last"):
        tried(failing(first, last, OSError("never")), backoff(OSError, 2, 1.0, 5.0))


def test_an_error_of_another_kind_is_raised_at_once(tried: Tried) -> None:
    with pytest.raises(ValueError, match="other"):
        tried(failing(OSError(), ValueError("other")), backoff((OSError, KeyError), 9, 1.0, 5.0))


def test_a_policy_may_take_its_wait_from_the_error(tried: Tried) -> None:
    assert tried(failing(OSError(7), OSError(3)), lambda error, _: float(error.args[0])) == (
        "done",
        [7.0, 3.0],
    )


def test_each_further_try_is_reported_and_none_after_the_last() -> None:
    told: list[Exception] = []
    first, last = OSError("first"), OSError("last")
    with pytest.raises(OSError, match="last"):
        retry(failing(first, last), backoff(OSError, 2, 0.0, 0.0), on_retry=told.append)
    assert told == [first]


def test_chance_keeps_a_pause_between_half_and_all_of_it() -> None:
    waits = [
        backoff(OSError, 2, 8.0, 8.0, lambda chance=chance: chance)(OSError(), 1)
        for chance in (0.0, 0.5, 1.0)
    ]
    assert waits == [4.0, 6.0, 8.0]


def test_a_pause_is_finite_after_any_number_of_failures() -> None:
    assert pause(10**6, 0.5, 300.0) == 300.0
