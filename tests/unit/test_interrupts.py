"""What Ctrl-C says of the steps that run."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution import control


@pytest.mark.parametrize(("elsewhere", "words"), [("ssh me@gpu1", "keeps what it saved there"), ("", "starts over next time")])
def test_of_a_step_elsewhere_it_is_not_known_which_checkpoint_is_kept(elsewhere: str, words: str) -> None:
    running = Of(node=Of(id="train"), state=None, site=Of(elsewhere=elsewhere))
    work: Any = Of(running={"train": running}, spec=lambda _id: Of(state=[Of(name="kept", checkpoint="step-*")]))
    assert control._kept(work) == f" (train {words})"
