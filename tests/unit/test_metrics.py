"""The last value of every metric, from JSON lines or a pattern in a log."""

from __future__ import annotations

from pathlib import Path

from runner.secrets import Masker, Secret
from runner.storage import metrics


def test_the_last_value_counts_and_what_is_not_an_object_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"loss": 2, "eval": {"acc": 0.5}}\nnoise\n[1]\n{"loss": 1.5}\n{"loss": 0.')
    assert metrics.read(path) == {"loss": 1.5, "eval.acc": 0.5}
    assert metrics.read(tmp_path / "absent") == {}


def test_values_without_a_form_in_a_key_become_words(tmp_path: Path) -> None:
    assert metrics.parse(b'{"loss": NaN, "top": Infinity}') == {"loss": "nan", "top": "inf"}


def test_a_pattern_finds_its_named_groups_in_the_last_line_that_matches(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"step 1 loss=3\n\xff\nstep 20 loss=2.5 name=abc\n")
    assert metrics.match(
        log, r"step (?P<step>\d+) loss=(?P<loss>[\d.]+)(?: name=(?P<name>\w+))?", Masker()
    ) == {
        "step": 20,
        "loss": 2.5,
        "name": "abc",
    }


def test_the_first_step_that_was_reported_is_found_behind_lines_without_one(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"eval_loss": 3}\nnoise\n{"step": 7, "loss": 2}\n{"step": 8}\n')
    assert metrics.first_step(path) == 7
    assert metrics.first_step(tmp_path / "absent") is None


def test_what_a_pattern_takes_out_of_a_log_is_masked_before_it_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1\ntoken=hunter2-hunter2-hunter2\nstep 2\n")
    masker = Masker([Secret("t", "hunter2-hunter2-hunter2")])
    assert metrics.match(log, r"token=(?P<word>.{1,9})|step (?P<step>\d+)", masker) == {
        "step": 2,
        "word": "***",
    }
