"""`ai-toolkit@1` checks clips, writes ai-toolkit's configuration and keeps its checkpoints; a stand-in for it shows what it is told and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.execution.terms import Settings
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
FORM = {"wan2.1": "wan21", "wan2.2-5b": "wan22_5b", "wan2.2-14b": "wan22_14b", "ltx-2": "ltx2"}

# Resumes from the newest adapter in its folder as ai-toolkit does, saves an adapter of its own name and one optimizer.pt, draws a bar on stderr.
STAND_IN = """
import json, os, pathlib, sys
config = json.load(open(sys.argv[1]))
name, process = config["config"]["name"], config["config"]["process"][0]
root = pathlib.Path(process["training_folder"], name)
found = max(root.glob(f"{name}*.safetensors"), key=os.path.getctime, default=None)
first = json.loads(found.read_text())["step"] if found else 0
assert not found or json.loads((root / "optimizer.pt").read_text())["step"] == first
clips = sorted(path.name for path in pathlib.Path(process["datasets"][0]["folder_path"]).iterdir())
steps, every = process["train"]["steps"], process["save"]["save_every"]

def save(step, number):
    (root / f"{name}{number}.safetensors").write_text(json.dumps({"step": step, "first": first, "clips": clips, "seed": os.environ["SEED"]}))
    (root / "optimizer.pt").write_text(json.dumps({"step": step}))
    print(f"Saved checkpoint to {root / name}{number}.safetensors")
    print(f"Saved optimizer to {root / 'optimizer.pt'}", flush=True)
    while not pathlib.Path(os.environ["KEPT"], f"step-{step:09d}").exists():  # its saves are minutes apart
        os.sched_yield()

for step in range(first + 1, steps + 1):
    print(f"\\r{name}:  50%|#####     | {step}/{steps} [00:01<00:02,  1.0s/it, lr: 1.0e-04 loss: {9 - step}.5e-01]", end="", file=sys.stderr, flush=True)
    if step % every == 0 and step < steps:
        print("", flush=True)
        save(step, f"_{step:09d}")
    if os.environ.get("ENDS_AT") == str(step):
        sys.exit(7)
print("")
(root / "samples").mkdir()
(root / "samples" / "1.webp").write_text("drawn")
save(steps, "")
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for name, head in (
        ("a.mp4", b"\0\0\0\x18ftypmp42"),
        ("b.png", b"\x89PNG\r\n\x1a\n"),
        ("more/c.webm", b"\x1a\x45\xdf\xa3"),
    ):
        (folder / name).write_bytes(head + bytes(20))
        (folder / name).with_suffix(".txt").write_text(f"a {Path(name).stem} turns\n")
    return folder


def program(name: str, cwd: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, TRAINERS / name, *map(str, words)]
    keep = {name: value for name, value in os.environ.items() if not name.startswith("RECIPE_")}
    return subprocess.run(
        argv, cwd=cwd, env={**keep, **env}, capture_output=True, text=True, check=False
    )


def looked(data: Path, frames: int = 41, *more: object) -> subprocess.CompletedProcess[str]:
    return program(
        "clip_data.py",
        data.parent,
        "--data",
        data,
        "--num-frames",
        frames,
        "--trigger",
        "zxq",
        "--out",
        "clips.jsonl",
        *more,
    )


@pytest.fixture
def step(data: Path, tmp_path: Path) -> Path:
    """The folder in which the step runs."""
    assert looked(data).returncode == 0
    for name in ("base", "checkpoints", "model", "samples"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.py").write_text(STAND_IN)
    return tmp_path


def run(
    step: Path, *more: object, env: dict[str, str] | None = None, **told: object
) -> subprocess.CompletedProcess[str]:
    given: dict[str, object] = {
        "family": "wan2.1", "base": "base", "data": step / "clips.jsonl", "dataset": step / "data", "num-frames": 41,
        "resolution": "[512]", "max-steps": 5, "learning-rate": 1e-4, "rank": 4, "alpha": 8, "caption-dropout": 0.05, "global-batch": 4,
        "micro-batch": 2, "seed": 3, "save-every": 2, "sample-every": 0, "prompts": "[]", "set": "{}", "if-missing": "fail",
        "checkpoints": step / "checkpoints", "config-out": "used.json", "model": step / "model", "samples": step / "samples",
        "history": "history.jsonl", "report": "report.json",
    }  # fmt: skip
    given |= {name.replace("_", "-"): value for name, value in told.items()}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    launcher = ["--launcher", sys.executable, step / "run.py"]
    # An attempt has a folder of its own; what the state holds is elsewhere.
    attempt = step / f"attempt-{len(list(step.glob('attempt-*')))}"
    attempt.mkdir()
    return program(
        "ai_toolkit_run.py",
        attempt,
        *launcher,
        *words,
        *more,
        KEPT=str(step / "checkpoints"),
        **env or {},
    )


def attempt(step: Path) -> Path:
    return max(step.glob("attempt-*"))


def process(step: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((attempt(step) / "used.json").read_text())["config"][
        "process"
    ][0]
    return made


def test_the_smoke_preset_checks_clips_and_says_what_is_missing(tmp_path: Path) -> None:
    results = smoke("ai-toolkit@1", tmp_path)
    report = json.loads((results / "report.json").read_text())
    assert (
        report["trained"] is False
        and "ai-toolkit is not installed" in report["said"]
        and "git clone" in report["remedy"]
    )
    used = json.loads((results / "ai-toolkit-used.json").read_text())["config"]["process"][0]
    assert (used["model"]["arch"], used["train"]["steps"], used["datasets"][0]["num_frames"]) == (
        "wan21",
        4,
        1,
    )


def test_a_real_run_without_ai_toolkit_fails_and_says_how_to_get_it(tmp_path: Path) -> None:
    summary = runner.run(
        "ai-toolkit@1",
        {"if_missing": "fail"},
        preset="smoke",
        python="current",
        workspace=tmp_path,
        settings=Settings(),
    )
    assert (
        summary.state == "FAILED"
        and b"/opt/ai-toolkit/run.py is not there; git clone https://github.com/ostris/ai-toolkit"
        in summary.failed[0].tail
    )


def test_ai_toolkit_gets_clips_captions_and_settings(step: Path) -> None:
    done = run(
        step,
        set='{"train": {"timestep_type": "weighted"}, "datasets": {"fps": 12}, "logging": {"log_every": 5}}',
    )
    assert done.returncode == 0, done.stderr
    told = process(step)
    assert (
        told["train"]["steps"],
        told["train"]["batch_size"],
        told["train"]["gradient_accumulation"],
    ) == (5, 2, 2)
    assert told["network"] == {"type": "lora", "linear": 4, "linear_alpha": 8.0} and told["model"][
        "name_or_path"
    ].endswith("/base")
    assert (
        told["train"]["timestep_type"] == "weighted"
        and told["datasets"][0]["fps"] == 12
        and told["logging"] == {"log_every": 5}
    )
    made = json.loads((step / "model" / "adapter.safetensors").read_text())
    assert (
        made["clips"]
        == ["000000.mp4", "000000.txt", "000001.png", "000001.txt", "000002.txt", "000002.webm"]
        and made["seed"] == "3"
    )
    assert (attempt(step) / "clips" / "000002.txt").read_text() == "zxq, a c turns"


def test_what_ai_toolkit_made_is_gathered(step: Path) -> None:
    done = run(step, env={"RECIPE_METRICS": str(step / "metrics.jsonl")})
    assert done.returncode == 0 and "5/5 [00:01" in done.stdout
    history = [
        json.loads(line) for line in (attempt(step) / "history.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["loss"]) for line in history] == [
        (1, 0.85),
        (2, 0.75),
        (3, 0.65),
        (4, 0.55),
        (5, 0.45),
    ]
    assert [
        json.loads(line)["step"] for line in (step / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4, 5]
    assert (step / "samples" / "1.webp").read_text() == "drawn"
    assert json.loads((attempt(step) / "report.json").read_text()) == {
        "trained": True,
        "family": "wan2.1",
        "steps": 5,
        "files": ["adapter.safetensors"],
    }
    assert sorted(path.name for path in (step / "checkpoints").iterdir()) == [
        "step-000000004",
        "step-000000005",
    ]


def test_a_training_goes_on_from_its_checkpoint_with_its_optimizer(step: Path) -> None:
    done = run(step, env={"ENDS_AT": "3"})
    assert done.returncode == 1 and "ended with exit code 7" in done.stderr
    kept = step / "checkpoints" / "step-000000002"
    assert sorted(path.name for path in kept.iterdir()) == [
        "adapter_000000002.safetensors",
        "history.jsonl",
        "optimizer.pt",
    ]
    assert run(step, resume=kept).returncode == 0
    assert json.loads((step / "model" / "adapter.safetensors").read_text())["first"] == 2
    assert [
        json.loads(line)["step"]
        for line in (attempt(step) / "history.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4, 5]
    # More steps later resume from the last, which has no number in its name.
    assert run(step, resume=step / "checkpoints" / "step-000000005", max_steps=6).returncode == 0
    assert json.loads((step / "model" / "adapter.safetensors").read_text())["first"] == 5


@pytest.mark.parametrize("family", FORM)
def test_each_family_has_its_settings(family: str, step: Path) -> None:
    assert run(step, family=family).returncode == 0
    told = process(step)
    assert (
        told["model"]["arch"] == FORM[family]
        and told["train"]["noise_scheduler"] == "flowmatch"
        and told["datasets"][0]["fps"] in (16, 24)
    )
    assert ("switch_boundary_every" in told["train"]) == (family == "wan2.2-14b")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"set": '{"trainer": {"steps": 3}}'},
            "set names trainer, which ai-toolkit's trainer does not read; it reads network, train, model",
        ),
        (
            {"set": '{"train": {"steps": 3}}'},
            "set names train.steps, which this recipe decides itself; leave it out",
        ),
        ({"global-batch": 3}, "global_batch 3 is no multiple of micro_batch 2; change one of them"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(
    step: Path, told: dict[str, object], said: str
) -> None:
    done = run(step, **told)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.mp4", b"<html>not found</html>", "a.mp4: is no mp4 file, by its first bytes"),
        ("a.mp4", b"", "a.mp4: is empty"),
        ("a.txt", None, "a.mp4: has no caption: a.txt is not there"),
        ("a.txt", b" \n", "a.mp4: a.txt is empty"),
        ("a.txt", b"\xff\xfe", "a.mp4: a.txt is not UTF-8"),
    ],
)
def test_a_bad_clip_is_named(data: Path, file: str, content: bytes | None, said: str) -> None:
    (data / file).unlink()
    if content is not None:
        (data / file).write_bytes(content)
    done = looked(data)
    assert (
        done.returncode == 1
        and said in done.stderr
        and "max_bad_clips=1 would leave them out" in done.stderr
    )
    again = looked(data, 41, "--max-bad-clips", 1)
    assert (
        again.returncode == 0 and len((data.parent / "clips.jsonl").read_text().splitlines()) == 2
    )


def test_pictures_alone_are_no_clips(data: Path) -> None:
    for name in ("a.mp4", "more/c.webm"):
        (data / name).unlink()
    assert "1 images and no clip; num_frames=1 learns from images" in looked(data).stderr
    assert looked(data, 1).returncode == 0
    (data / "b.png").unlink()
    assert "nothing to learn from: none of 3 files ends in .jpg" in looked(data, 1).stderr
