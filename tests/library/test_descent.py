"""Claims about what the trainers share of a step, a folder and a report: the rate, the optimizer's state, a folder that appears whole."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with siblings():
        yield


def test_the_rate_rises_falls_along_a_cosine_from_its_peak_and_stays_at_a_tenth() -> None:
    rate_at = importlib.import_module("descent").rate_at
    assert [round(rate_at(step, 2.0, 2, 10), 4) for step in (1, 2, 6, 10, 20)] == [
        1.0,
        2.0,
        1.1,
        0.2,
        0.2,
    ]
    assert [rate_at(step, 2.0, 0, 0) for step in (1, 100)] == [2.0, 2.0]


def test_a_rate_that_falls_before_it_has_risen_is_refused() -> None:
    descent: Any = importlib.import_module("descent")
    with pytest.raises(
        SystemExit,
        match="decay_steps 20 is not beyond warmup_steps 20: the rate would never be at its peak",
    ):
        descent.refuse_no_peak(20, 20)
    descent.refuse_no_peak(20, 0)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "prodigy"])
def test_an_optimizer_goes_on_where_its_state_was_taken_with_the_scale_of_half_precision(
    name: str, tmp_path: Path
) -> None:
    """As a file has it: what an optimizer keeps for a weight, for a group, as a tensor or as a number of Python's."""
    import torch
    from safetensors.torch import load_file, save_file

    descent: Any = importlib.import_module("descent")

    def fresh() -> tuple[Any, Any, Any]:
        # 8 bits are taken for matrices of 4,096 numbers and more; a B of LoRA begins with zeros.
        learned = {
            "a.b": torch.nn.Parameter(torch.linspace(1, 2, 8192).view(64, 128)),
            "c": torch.nn.Parameter(torch.zeros(2)),
        }
        optimizer = descent.made(
            name, [{"params": list(learned.values()), "weight_decay": 0.01}], 0.1
        )
        return optimizer, learned, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def go(optimizer: Any, learned: Any, scaler: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(
                sum(((weight - 3) ** 2).sum() for weight in learned.values()) * (step + 1)
            ).backward()
            scaler.step(optimizer)
            scaler.update()

    whole, first, second = fresh(), fresh(), fresh()
    go(*whole, range(5))
    go(*first, range(3))
    taken = descent.tensors(*first)
    assert (
        not {"group.lr.0", "group.initial_lr.0"} & taken.keys()
    )  # a schedule begins with the rate that an optimizer was made with
    save_file(taken, tmp_path / "state.safetensors")
    descent.restore(*second[:2], load_file(tmp_path / "state.safetensors"), second[2])
    go(*second, range(3, 5))
    assert (
        all(torch.equal(whole[1][name], second[1][name]) for name in whole[1])
        and whole[2].get_scale() == second[2].get_scale() == 32.0
    )
    assert not torch.equal(whole[1]["a.b"], first[1]["a.b"])
    assert any(
        value.dtype == torch.uint8 for value in load_file(tmp_path / "state.safetensors").values()
    ) == (name == "adamw_8bit")


def test_a_folder_takes_the_place_of_another_whole(tmp_path: Path) -> None:
    disk: Any = importlib.import_module("disk")
    for number in (1, 2):
        unfinished = tmp_path / ".unfinished"
        (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / f"{number}.txt").write_text("x" * number)
        disk.appear(unfinished, tmp_path / "step-1")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "step-1",
        "step-1/inner",
        "step-1/inner/2.txt",
    ]
    assert disk.sha256(tmp_path / "step-1" / "inner" / "2.txt") == hashlib.sha256(b"xx").hexdigest()


def test_a_report_is_numbers_a_page_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: Any = importlib.import_module("reports")
    monkeypatch.setenv("RECIPE_METRICS", str(tmp_path / "metrics.jsonl"))
    reports.write(tmp_path / "report", {"loss": 0.5, "pairs": 3}, "# Größe\n", {"loss": 0.5})
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == {
        "loss": 0.5,
        "pairs": 3,
    }
    assert (tmp_path / "report" / "report.md").read_text(encoding="utf-8") == "# Größe\n"
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_what_is_drawn_follows_from_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.manual_seed would have it, and on a GPU that is in use, too."""
    import torch

    loop: Any = importlib.import_module("loop")
    loop.draw("noise", 0, 3)
    once = torch.rand(3)
    torch.manual_seed(int.from_bytes(hashlib.sha256(b"noise:0:3").digest()[:8], "big") >> 1)
    assert torch.equal(once, torch.rand(3))
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    loop.draw("noise", 0, 4)
    assert len(seeded) == 1 and not torch.equal(once, torch.rand(3))
