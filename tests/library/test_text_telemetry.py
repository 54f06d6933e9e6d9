"""Claims about what every trainer tells of its steps, about the choice of arithmetic, and about pushing to the Hub (a small one, on this machine)."""

from __future__ import annotations

import base64
import importlib
import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings

TRAINERS = Path(__file__).resolve().parents[2] / "recipes" / "trainers"
MODULES = ("loop", "telemetry", "precision", "hub_push")


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The trainers' modules, imported as they import each other."""
    monkeypatch.delenv("RECIPE_METRICS", raising=False)
    with siblings():
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


class Clock:
    """Time passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def works(self, seconds: float) -> None:
        self.now += seconds


def train(telemetry: Any, clock: Clock, first: int, last: int) -> None:
    for step in range(first, last + 1):
        with telemetry.phase("data"):
            clock.works(0.25)
        with telemetry.phase("model"):
            clock.works(1.5)
        clock.works(0.25)
        telemetry.step(
            step, samples=8, of=6, epoch=step / 4, loss=3.0 / step, lr=0.1, grad_norm=1.0
        )


def test_a_line_says_where_the_time_of_its_step_went(
    trainers: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_METRICS", str(tmp_path / "metrics.jsonl"))
    clock = Clock(monkeypatch, trainers.telemetry)
    train(trainers.telemetry.Telemetry(None), clock, 1, 2)
    first, second = (
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert first.pop("memory_gb") > 0.01
    assert first == {
        "step": 1, "max_steps": 6, "epoch": 0.25, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0, "samples_per_second": 4.0, "time_step": 2.0, "time_data": 0.25, "time_model": 1.5,
    }  # fmt: skip
    assert (second["step"], second["loss"], second["time_step"]) == (2, 1.5, 2.0)


def test_the_memory_of_a_gpu_is_what_tensors_take_and_what_is_held(
    trainers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trainers.telemetry.gpu_memory() == {}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        max_memory_allocated=lambda: 1_500_000_000,
        max_memory_reserved=lambda: 2 * 10**9,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert trainers.telemetry.gpu_memory() == {
        "gpu_memory_allocated_gb": 1.5,
        "gpu_memory_reserved_gb": 2.0,
    }


def test_a_phase_within_another_is_counted_once(
    trainers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, trainers.telemetry)
    telemetry = trainers.telemetry.Telemetry(None)
    with telemetry.phase("generation"):
        clock.works(1)
        with telemetry.phase("tool"):
            clock.works(4)
        clock.works(2)
    told = telemetry.step(1, samples=1, loss=1.0)
    assert (told["time_generation"], told["time_tool"], told["time_step"]) == (3, 4, 7)


def test_a_phase_that_fails_is_over(
    trainers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, trainers.telemetry)
    telemetry = trainers.telemetry.Telemetry(None)
    with pytest.raises(KeyError), telemetry.phase("tool"):
        clock.works(1)
        raise KeyError
    clock.works(5)
    assert telemetry.step(1, samples=1, loss=1.0)["time_tool"] == 1


def test_the_history_of_a_resumed_training_is_that_of_one_undisturbed(
    trainers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, trainers.telemetry)
    whole, killed = trainers.telemetry.Telemetry(None), trainers.telemetry.Telemetry(None)
    train(whole, clock, 1, 6)
    train(killed, clock, 1, 4)
    clock.works(1000)
    resumed = trainers.telemetry.Telemetry(None, history=killed.history[:3])
    train(resumed, clock, 4, 6)
    assert resumed.history == whole.history
    assert not any(
        word in line
        for line in whole.history
        for word in ("time_", "samples", "memory", "epoch", "max_steps")
    )


def test_tensorboard_reads_every_number_and_the_curves_of_a_resumed_training_are_whole(
    trainers: types.SimpleNamespace, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    telemetry = trainers.telemetry.Telemetry(
        tmp_path, history=['{"step": 1, "loss": 9.0}\n', '{"step": 2, "loss": 8.0}\n']
    )
    telemetry.step(3, samples=1, loss=7.0, lr=0.5)
    telemetry.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss")] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
    ]
    assert {"loss", "lr", "samples_per_second", "memory_gb", "time_step"} <= set(
        found.Tags()["scalars"]
    )


def test_what_is_not_finite_is_left_out_and_the_line_stays_json(
    trainers: types.SimpleNamespace,
) -> None:
    telemetry = trainers.telemetry.Telemetry(None)
    telemetry.step(1, samples=1, loss=2.0, grad_norm=float("inf"))
    assert telemetry.history == ['{"step": 1, "loss": 2.0}\n']


def test_the_other_processes_tell_nothing(
    trainers: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_METRICS", str(tmp_path / "metrics.jsonl"))
    telemetry = trainers.telemetry.Telemetry(tmp_path / "board", main=False, tracker="wandb")
    with telemetry.phase("model"):
        assert telemetry.step(1, samples=1, loss=2.0) == {}
    telemetry.close()
    assert telemetry.history == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_there_is_said_so(
    name: str, trainers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(TRAINERS)])
    with pytest.raises(
        SystemExit,
        match=f"tracker {name} is not installed in this step's Python: add it to the lock, or say tracker=none",
    ):
        trainers.telemetry.Telemetry(None, tracker=name)


class Tracker(types.ModuleType):
    """What wandb was told."""

    began: dict[str, object]
    lines: list[tuple[int, dict[str, float]]]

    def init(self, **words: object) -> None:
        self.began, self.lines = words, []

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.lines.append((0, {}))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """Stands in for wandb in the step `sft/train` of run r7."""
    tracker = Tracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("RECIPE_RUN", "r7")
    monkeypatch.setenv("RECIPE_STEP", "sft/train")
    return tracker


def test_a_tracker_gets_every_number_and_resumes_its_run(
    trainers: types.SimpleNamespace, tracker: Tracker
) -> None:
    telemetry = trainers.telemetry.Telemetry(
        None, tracker="wandb", project="sft", settings={"rank": 8}
    )
    telemetry.step(4, samples=2, loss=1.5)
    telemetry.close()
    assert tracker.began == {
        "project": "sft",
        "name": "r7",
        "config": {"rank": 8},
        "resume": "allow",
        "id": "r7-sft-train",
    }
    assert [step for step, _ in tracker.lines] == [4, 0]
    assert tracker.lines[0][1]["loss"] == 1.5 and "time_step" in tracker.lines[0][1]


def test_what_wandb_writes_offline_is_kept_and_is_whole_after_a_resume(
    trainers: types.SimpleNamespace,
    tracker: Tracker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    board = tmp_path / "tensorboard"
    history = ['{"step": 1, "loss": 2.0}\n']
    telemetry = trainers.telemetry.Telemetry(board, tracker="wandb", history=history)
    telemetry.step(2, samples=1, loss=1.5)
    (board / "debug-core.log").symlink_to(
        "/var/log/wandb.log"
    )  # as wandb does: an output with it would be refused
    telemetry.close()
    assert (
        tracker.began["dir"] == str(board)
        and board.is_dir()
        and not (board / "debug-core.log").is_symlink()
    )
    assert [(step, values.get("loss")) for step, values in tracker.lines[:2]] == [
        (1, 2.0),
        (2, 1.5),
    ]


@pytest.mark.parametrize(
    ("gpu", "bf16", "asked", "chosen"),
    [
        (False, False, "auto", "no"),
        (True, True, "auto", "bf16"),
        (True, False, "auto", "fp16"),
        (True, True, "fp16", "fp16"),
        (False, False, "bf16", "bf16"),
    ],
)
def test_auto_is_what_the_device_does_best(
    gpu: bool,
    bf16: bool,
    asked: str,
    chosen: str,
    trainers: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    # An older card is asked for its own arithmetic, not for what torch can feign on it.
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: bf16 or including_emulation,
    )
    assert trainers.precision.chosen(asked) == chosen


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """As much of the Hub as one upload of small files needs; `refuse` is a status it answers with instead."""
    state = types.SimpleNamespace(files={}, asked=[], refuse=None, made={})

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.asked.append((self.path, self.headers.get("Authorization")))
            if state.refuse:
                return self.answer({"error": "no"}, state.refuse)
            if self.path == "/api/repos/create":
                state.made = json.loads(body)
                return self.answer({"url": f"{state.url}/me/model", "name": "me/model"})
            if "/preupload/" in self.path:
                files = json.loads(body)["files"]
                return self.answer(
                    {
                        "files": [
                            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for file in files
                        ]
                    }
                )
            for line in body.splitlines():
                if (item := json.loads(line))["key"] == "file":
                    state.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            return self.answer(
                {
                    "success": True,
                    "commitOid": "c" * 40,
                    "commitUrl": f"{state.url}/me/model/commit/{'c' * 40}",
                }
            )

        def do_GET(self) -> None:
            self.answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

        def answer(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "more" / "adapter.safetensors").write_bytes(b"weights")
    return folder


def pushing(
    hub: types.SimpleNamespace, model: Path, tmp_path: Path, to: str = "me/model", **more: str
) -> Any:
    import os
    import subprocess

    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    words = [
        "--folder",
        model,
        "--to",
        to,
        "--private",
        "true",
        "--receipt",
        tmp_path / "receipt.json",
    ]
    return subprocess.run(
        [sys.executable, str(TRAINERS / "hub_push.py"), *map(str, words)], capture_output=True, text=True, timeout=60, check=False,
        env={**env, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_abc", "HF_HUB_DISABLE_XET": "1", "HOME": str(tmp_path), **more},
    )  # fmt: skip


def test_a_folder_is_pushed_whole_and_privately(
    hub: types.SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    done = pushing(hub, model, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.files == {"config.json": b"{}", "more/adapter.safetensors": b"weights"}
    assert hub.made["visibility"] == "private" and {token for _, token in hub.asked} == {
        "Bearer hf_abc"
    }
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["repo"], receipt["commit"], receipt["files"], receipt["bytes"]) == (
        "me/model",
        "c" * 40,
        2,
        9,
    )
    assert "hf_abc" not in done.stdout + done.stderr + json.dumps(receipt)


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "is HF_TOKEN set, and a token that may write?"),
        (403, "may this token write to me/model?"),
    ],
)
def test_a_hub_that_refuses_is_quoted(
    status: int, hint: str, hub: types.SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    hub.refuse = status
    done = pushing(hub, model, tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("publish: the Hub refused me/model: ")
    assert (
        hint in done.stderr
        and "Traceback" not in done.stderr
        and not (tmp_path / "receipt.json").exists()
    )


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set here"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the upload to me/model failed: ConnectError"),
    ],
)
def test_a_hub_out_of_reach_is_said_so(
    env: dict[str, str], complaint: str, hub: types.SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    done = pushing(hub, model, tmp_path, **env)
    assert done.returncode == 1 and done.stderr.startswith(f"publish: {complaint}"), done.stderr


@pytest.mark.parametrize("to", ["model", "me/model/more", "../x", "me/ model"])
def test_what_is_no_name_of_a_repository_is_refused_before_anything_is_sent(
    to: str, hub: types.SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    done = pushing(hub, model, tmp_path, to=to)
    assert f'publish: push_to "{to}" is no name of a repository' in done.stderr and hub.asked == []


def test_an_empty_folder_is_not_pushed(hub: types.SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert (
        "nothing holds no file to push" in pushing(hub, tmp_path / "nothing", tmp_path).stderr
        and hub.asked == []
    )
