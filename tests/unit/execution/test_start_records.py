"""The name of an attempt, and what is recorded of its start."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps.start_records import StartRecords
from runner.planning.step import MetricsSpec, SecretSpec, StepSpec

KEY = "k" * 64
SPEC = StepSpec("r@1", "train", {}, run=["true"])


class Run:
    """The journal and the schedule of a run, as far as a start needs them."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.run, self.fence, self.number = "r1", 3, dict[str, int]()
        self.words, self.begun = list[str](), list[tuple[str, dict[str, object]]]()
        me: Any = self
        self.records = StartRecords(me, me, environ or {}, "/w/attempts")

    def tries(self, id: str) -> int:
        return self.number.get(id, 0)

    def next_attempt(self, id: str) -> None:
        self.number[id] = self.tries(id) + 1

    def say(self, text: str) -> None:
        self.words.append(text)

    def start(self, id: str, data: dict[str, object]) -> None:
        self.begun.append((id, data))

    def record(self, attempt: Any) -> dict[str, object]:
        self.records.record("train", attempt)
        return self.begun[-1][1]


def attempt(spec: StepSpec = SPEC, **more: Any) -> Any:
    words: dict[str, Any] = {
        "key": KEY, "id": "train", "number": 7, "name": "n1", "spec": spec, "state": None,
        "is_reattached": False, "restored": {}, "place": Of(elsewhere=""),
    }  # fmt: skip
    return Of(**words | more)


def test_each_attempt_of_a_key_has_another_name_that_starts_with_it() -> None:
    records = Run().records
    first, second = records.name_of(attempt()), records.name_of(attempt())
    assert (first, second) == (f"{'k' * 24}-r1-3-1", f"{'k' * 24}-r1-3-2")
    assert records.name_of(attempt(key=None)) == "r1-7-3-1"
    assert records.name_of(attempt(key=None, id="other", number=8)) == "r1-8-3-1"


def test_a_start_has_its_log_and_its_number() -> None:
    run = Run()
    assert run.record(attempt()) == {"log": "/w/attempts/n1.log", "attempt": 1}
    assert run.record(attempt(name="n2")) == {"log": "/w/attempts/n2.log", "attempt": 2}


def test_an_attempt_of_an_earlier_worker_keeps_its_number() -> None:
    run = Run()
    run.number["train"] = 2
    again = run.record(attempt(is_reattached=True))
    assert again == {"log": "/w/attempts/n1.log", "attempt": 2, "taken_up": True}
    assert Run().record(attempt(is_reattached=True))["attempt"] == 1  # of an earlier run


@pytest.mark.parametrize(
    ("metrics", "facts"),
    [
        (None, {}),
        (MetricsSpec(None, None), {"metrics": "/w/attempts/n1.metrics"}),
        (MetricsSpec(None, "loss=(.*)"), {"pattern": "loss=(.*)"}),
        (MetricsSpec("m.json", None), {}),
    ],
)
def test_a_start_says_where_its_metrics_come_from(
    metrics: MetricsSpec | None, facts: dict[str, object]
) -> None:
    found = Run().record(attempt(SPEC._replace(metrics=metrics)))
    assert {name: found[name] for name in found if name not in ("log", "attempt")} == facts


def test_what_readers_of_the_raw_log_have_to_mask_is_named_but_not_shown() -> None:
    spec = SPEC._replace(
        secrets=[
            SecretSpec("key", "KEY", "MY_KEY", True),
            SecretSpec("unset", "U", "UNSET", False),
        ],
        pass_env=["HF_TOKEN", "LANG"],
        env_files=[".env"],
    )
    token = "hf_abcdefghijklmnopqrstuvwxyz012345"
    run = Run({"MY_KEY": "secret", "HF_TOKEN": token, "LANG": "C"})
    found = run.record(attempt(spec))
    assert found["secrets"] == ["MY_KEY", "HF_TOKEN"] and found["env_files"] == [".env"]
    assert "secret" not in str(found["log"]) and token not in str(found)
    found = Run().record(attempt(SPEC._replace(env_files=[".env"])))
    assert found["env_files"] == [".env"] and "secrets" not in found


def test_a_training_says_from_which_checkpoint_it_goes_on() -> None:
    good = Of(name="step-20", passed=["step-30"], words="from step 20")
    bad = Of(name=None, passed=["step-10"], words="step-10 is incomplete")
    none = Of(name=None, passed=[], words="")
    run = Run()
    state = Of(note="from run r0", id="g1")
    found = run.record(attempt(state=state, restored={"a": good, "b": bad, "c": none}))
    assert found["note"] == "from run r0; from step 20; step-10 is incomplete"
    assert run.words == ["train: step-10 is incomplete"]  # and only that is also said at once
    assert "generation" not in found
    again = run.record(attempt(is_reattached=True, state=state, restored={"b": bad}))
    assert "note" not in again and len(run.words) == 1  # its start has said so


def test_a_start_on_another_machine_has_its_site_and_its_generation() -> None:
    state = Of(note="", id="g1")
    found = Run().record(attempt(place=Of(elsewhere="gpu-1"), state=state))
    assert found["site"] == "gpu-1" and found["generation"] == "g1" and "note" not in found
    assert "generation" not in Run().record(attempt(place=Of(elsewhere="gpu-1")))
