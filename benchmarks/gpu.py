"""What `sft@1` and `flux-lora@1` take on a GPU, beside plain scripts of TRL and diffusers: speed, MFU, and memory beside the estimate.

    python benchmarks/gpu.py wheels FOLDER [--python 3.12]      here: the packages that a machine without a network may lack, at most 60 MB
    python benchmarks/gpu.py run STATE.json --wheels FOLDER     there, until it says that all is measured: at most 8 minutes a call, 25 in all
    python benchmarks/gpu.py page STATE.json > docs/gpu.md      here

A call of `run` goes on where the last ended, also where that was killed: each piece, one training by one program, is in STATE.json once it is over.
Models have the configs of real ones and drawn weights, made there.  A piece that lacks a package is "not run".  `--device cpu --tiny` tries all of it
in minutes, on models of no size.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ROOT / "recipes" / "trainers"
sys.path.insert(0, str(ROOT))

from runner.advice import hardware, training_from_inputs  # noqa: E402
from runner.advice.memory import CUDA_CONTEXT, FRAGMENTATION, estimate, read  # noqa: E402

CARRIED = 60_000_000  # bytes of wheels, at most
PACKAGES = ("trl", "peft", "diffusers", "datasets", "bitsandbytes", "pyarrow", "pandas", "dill", "multiprocess", "xxhash", "zipp",
            "importlib-metadata", "pillow", "requests", "urllib3", "charset-normalizer", "python-dateutil", "six")  # fmt: skip
NEVER_READ = re.compile(
    r"/tests?/|\.(pyx|pxd|pxi|h)$|pyarrow/(include|src)/|pyarrow/(lib)?arrow_(python_flight|flight|s3)"
    r"|bitsandbytes/libbitsandbytes_(rocm|xpu|cuda1(18|21|24|25|27|29|32))"
)
"""Of those wheels: what no training here loads.  Of bitsandbytes' builds, those for the CUDAs that wheels of torch come with stay."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
ATTEMPTS = 2
WARM = 2  # steps that are not counted
SHOWN = 400  # letters of what a program complained about
LEAST = 150  # seconds that must be left for a piece to begin

# The config.json of Qwen/Qwen2.5-7B and Qwen/Qwen2.5-3B, and of black-forest-labs/FLUX.1-dev.
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768, "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 0,
        "bos_token_id": None, "pad_token_id": None}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": QWEN | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                          "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    "qwen2.5-3b": QWEN | {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
                          "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
    "flux.1-dev": {"patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
                   "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
                   "axes_dims_rope": [16, 56, 56]},
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
                   "vocab_size": 1024},
    "qwen2.5-3b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
                   "vocab_size": 1024},
    "flux.1-dev": {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4,
                   "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]},
}  # fmt: skip
TEXT, IMAGES = ("peft", "trl", "datasets", "accelerate"), ("peft", "diffusers", "accelerate")


@dataclass(frozen=True, slots=True)
class Row:
    """One training: a preset, and what is different from it."""

    name: str
    recipe: str
    preset: str
    model: str
    inputs: Mapping[str, Any]
    needs: tuple[str, ...]
    fills: bool = (
        False  # micro_batch is the most that is estimated to fit, and a plain script does the same
    )
    steps: int = 6


# What is wanted most stands first: a machine may be gone before the last.
ROWS = (
    Row("sft LoRA, 7B", "sft", "7b-24gb", "qwen2.5-7b", {}, TEXT, fills=True),
    Row("sft, preset 7b-24gb", "sft", "7b-24gb", "qwen2.5-7b", {"global_batch": 4}, TEXT),
    Row("flux-lora", "flux-lora", "80gb", "flux.1-dev", {"micro_batch": 12}, IMAGES, fills=True),
    Row("flux-lora, preset 24gb", "flux-lora", "24gb", "flux.1-dev", {"global_batch": 2}, IMAGES),
    Row("sft full, 3B", "sft", "3b-full-80gb", "qwen2.5-3b", {}, TEXT, fills=True, steps=10),
    Row(
        "sft QLoRA, 7B",
        "sft",
        "7b-qlora-12gb",
        "qwen2.5-7b",
        {},
        (*TEXT, "bitsandbytes"),
        fills=True,
    ),
    Row(
        "sft, preset 7b-qlora-12gb",
        "sft",
        "7b-qlora-12gb",
        "qwen2.5-7b",
        {"global_batch": 4},
        (*TEXT, "bitsandbytes"),
    ),
    Row("flux-lora, preset 80gb", "flux-lora", "80gb", "flux.1-dev", {}, IMAGES),
)
OURS, PLAIN = "recipe", "plain"
PIECES = [(row, who) for row in ROWS for who in ((OURS, PLAIN) if row.fills else (OURS,))]


class State:
    """What is measured so far, on the disk after each change."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.told: dict[str, Any] = (
            json.loads(file.read_text()) if file.exists() else {"spent": 0.0, "pieces": {}}
        )

    def put(self, name: str, **values: object) -> None:
        """Say this of a piece, too."""
        self.told["pieces"][name] = self.of(name) | values
        self.write()

    def of(self, name: str) -> dict[str, Any]:
        """What is said of a piece."""
        found: dict[str, Any] = self.told["pieces"].get(name, {})
        return found

    def over(self, name: str) -> bool:
        return bool({"seconds", "not_run"} & set(self.of(name)))

    def write(self) -> None:
        unfinished = self._file.with_name(f".{self._file.name}")
        unfinished.write_text(json.dumps(self.told, indent=1) + "\n")
        unfinished.rename(self._file)


# -- here: what is carried ---------------------------------------------------------------------------------------------------------------------------


def wheels(folder: Path, python: str) -> None:
    """Download what a machine may lack, in the versions that are installed here, without what is never read; ends if that is too much to carry."""
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        *platforms,
    ]
    subprocess.run([*words, "--dest", str(raw), *wanted], check=True)
    for wheel in sorted(raw.glob("*.whl")):
        # LZMA, which zipfile reads as it does the usual, makes libraries a third smaller.
        with (
            zipfile.ZipFile(wheel) as old,
            zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_LZMA) as new,
        ):
            for each in old.infolist():
                if not each.is_dir() and not NEVER_READ.search(each.filename):
                    new.writestr(each.filename, old.read(each))
    shutil.rmtree(raw)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(wanted)} wheels for Python {python} in {folder}: {size / 1e6:.1f} MB")
    if size > CARRIED:
        sys.exit(f"that is more than {CARRIED / 1e6:.0f} MB")


def unpacked(folder: Path | None, work: Path) -> Path:
    """Lay out those wheels of which the machine has nothing; the folder that Python is to look in."""
    # By that name dill, with which datasets makes fingerprints, knows what is installed and not part of a function.
    target = work / "site-packages"
    target.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(folder.glob("*.whl")) if folder is not None else ():
        kind = wheel.stem.split("-")[2]
        if not kind.startswith("py") and kind != f"cp3{sys.version_info.minor}":
            continue
        with zipfile.ZipFile(wheel) as read_from:
            tops = {
                name.split("/")[0].removesuffix(".py")
                for name in read_from.namelist()
                if ".dist-info/" not in name
            }
            done = target / f".{wheel.name}"
            if done.exists() or any(
                importlib.util.find_spec(top) for top in tops if top.isidentifier()
            ):
                continue
            read_from.extractall(target)
            done.touch()
    return target


# -- there: one piece after the other ----------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Measure until all is over, or the time of this call or of all calls is."""
    began, state = time.monotonic(), State(options.state)
    before = float(state.told["spent"])
    work = options.work.resolve()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TRAINERS), str(ROOT), str(unpacked(options.wheels, work))]
    )
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    machine = Machine(options, work, environment)
    state.told["machine"] = machine.told

    def left() -> float:
        state.told["spent"] = before + time.monotonic() - began
        return min(options.minutes * 60, options.total * 60 - before) - (time.monotonic() - began)

    for row, who in PIECES:
        name = f"{row.name}/{who}"
        while not state.over(name):
            if lacking := [package for package in row.needs if not machine.has(package)]:
                state.put(name, not_run=f"not run: no {', '.join(lacking)}")
            elif state.of(name).get("begun", 0) >= ATTEMPTS:
                state.put(name, not_run="not run: it did not end in two attempts")
            elif left() < (0 if options.tiny else LEAST):
                state.write()
                if state.told["spent"] > options.total * 60 - LEAST:
                    state.put(name, not_run="not run: the time was over")
                    continue
                print(
                    f"{sum(map(state.over, NAMES))} of {len(PIECES)} pieces are over: the same command goes on"
                )
                return
            else:
                state.put(name, begun=state.of(name).get("begun", 0) + 1)
                print(f"{name} …", flush=True)
                machine.measure(state, row, who, max(left(), 1))
                print(f"  {json.dumps(state.of(name))}", flush=True)
    left()
    state.write()
    shutil.rmtree(work, ignore_errors=True)
    print("all is measured")


NAMES = [f"{row.name}/{who}" for row, who in PIECES]


class Machine:
    """Programs on this machine, and what is known of it."""

    def __init__(
        self, options: argparse.Namespace, work: Path, environment: Mapping[str, str]
    ) -> None:
        self._tiny, self._work, self._environment = options.tiny, work, environment
        self._there: dict[str, bool] = {}
        look = (
            "import json, torch, transformers as t; p = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None;"
            "print(json.dumps({'gpu': p and p.name, 'bytes': p.total_memory if p else 0, 'torch': torch.__version__, 'transformers': t.__version__}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", look],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        self.told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) | {
            "python": platform.python_version(),
            "tiny": options.tiny,
        }
        work.mkdir(parents=True, exist_ok=True)

    def has(self, package: str) -> bool:
        """Whether a package can be imported: one that is there and was built for another torch cannot."""
        if package not in self._there:
            done = subprocess.run(
                [sys.executable, "-c", f"import {package}"],
                env=self._environment,
                capture_output=True,
                check=False,
            )
            self._there[package] = done.returncode == 0
        return self._there[package]

    def measure(self, state: State, row: Row, who: str, limit: float) -> None:
        """Run one piece, and put what it measured; nothing where the time was over first."""
        name, end = f"{row.name}/{who}", time.monotonic() + limit
        model = self._work / row.model
        if not (model / "whole").exists():
            shutil.rmtree(model, ignore_errors=True)
            made = self._call([__file__, "make", model, json.dumps(self._config(row))], end)
            if made is not None and made.returncode:
                state.put(name, not_run="failed: " + made.stderr.strip()[-SHOWN:])
            if made is None or made.returncode:
                return
        inputs = self.inputs(row, state.of(f"{row.name}/{OURS}").get("micro_batch"))
        state.put(name, micro_batch=inputs["micro_batch"])
        out = self._work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        command = _command(row, who, inputs, model, self._data(row, inputs), out)
        done = self._call(command, end, RECIPE_METRICS=str(out / "metrics.jsonl"))
        if done is None:
            return
        if done.returncode:
            self._failed(state, name, inputs, row.fills, done.stderr)
            return
        if who == OURS:
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            seconds, last = [line["time_step"] for line in lines[WARM:]], lines[-1]
        else:
            last = json.loads(done.stdout.splitlines()[-1])
            seconds = last["seconds"][WARM - 1 :]  # its first step has no time
        held = {
            each: last[each]
            for each in ("gpu_memory_allocated_gb", "gpu_memory_reserved_gb", "memory_gb")
            if each in last
        }
        state.put(
            name,
            seconds=round(median(seconds), 4),
            **held,
            **self._meaning(row, inputs, median(seconds)),
        )

    def _failed(
        self, state: State, name: str, inputs: Mapping[str, Any], fills: bool, said: str
    ) -> None:
        """Too little memory: half as much at once, where that is ours to choose.  Anything else is no figure."""
        if "out of memory" not in said.lower():
            state.put(name, not_run="failed: " + said.strip()[-SHOWN:])
        elif name.endswith(OURS) and fills and inputs["micro_batch"] > 1:
            state.put(
                name,
                micro_batch=inputs["micro_batch"] // 2,
                begun=0,
                out_of_memory_at=inputs["micro_batch"],
            )
        else:
            state.put(name, not_run=f"out of memory at {inputs['micro_batch']} at once")

    def inputs(self, row: Row, micro_batch: int | None) -> dict[str, Any]:
        """What the training is given: defaults of the recipe, the preset, and what this measurement changes."""
        import yaml

        recipe = yaml.safe_load((ROOT / "recipes" / f"{row.recipe}@1.yaml").read_text())
        found: dict[str, Any] = {
            name: each.get("default") for name, each in recipe["inputs"].items()
        }
        found |= recipe["presets"][row.preset] | dict(row.inputs)
        found |= {"learning_rate": 1e-5, "max_steps": row.steps, "precision": "bf16"}
        if self._tiny:
            found |= {
                "max_length": 64,
                "resolution": 64,
                "micro_batch": min(found["micro_batch"], 4),
                "rank": 4,
                "alpha": 4,
            }
        if micro_batch:
            found["micro_batch"] = micro_batch
        elif row.fills and row.recipe == "sft":
            found["micro_batch"] = 2 if self._tiny else self._most(row, found)
        if row.fills or row.name.endswith("80gb"):
            found["global_batch"] = found["micro_batch"]
        return found

    def _most(self, row: Row, inputs: dict[str, Any]) -> int:
        """The most sequences at once that are estimated to fit."""
        usable = self.told["bytes"] - CUDA_CONTEXT - hardware.RESERVED
        fit = [
            size
            for size in range(1, 33)
            if _estimated(row, inputs | {"micro_batch": size}) * (1 + FRAGMENTATION) <= 0.9 * usable
        ]
        return max(fit, default=1)

    def _meaning(
        self, row: Row, inputs: Mapping[str, Any], seconds: float
    ) -> dict[str, float | str]:
        """Speed, the share of the GPU's arithmetic that the model needed (MFU: nothing that is computed again), and the memory that was estimated."""
        count = inputs["global_batch"]
        found: dict[str, float | str] = {}
        if row.recipe == "sft":
            found["tokens_per_second"] = round(count * inputs["max_length"] / seconds, 1)
            model = read(self._config(row))
            training = training_from_inputs.read_text_training("sft@1", inputs, model)
            assert training is not None
            work = hardware.count_operations(
                model, replace(training, checkpointing=False), count * training.length
            )
        else:
            found["images_per_second"] = round(count / seconds, 4)
            work = count * json.loads((self._work / row.model / "work.json").read_text())
        figures = _figures()
        if self.told["gpu"] and (
            kind := next((each for each in figures.gpus if _alike(self.told["gpu"], each)), None)
        ):
            found["mfu"] = round(work / seconds / (kind.tflops * 1e12), 4)
        if not self._tiny and (estimated := _estimated(row, inputs)):
            found["estimated_gb"] = round(estimated / 1e9, 3)
        return found

    def _config(self, row: Row) -> dict[str, Any]:
        return MODELS[row.model] | (TINY[row.model] if self._tiny else {})

    def _data(self, row: Row, inputs: Mapping[str, Any]) -> Path:
        """Drawn data of the size that the inputs say."""
        folder = (
            self._work
            / f"data-{row.recipe}-{inputs.get('max_length', 0)}-{inputs.get('resolution', 0)}"
        )
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            wanted = {name: inputs.get(name) for name in ("max_length", "resolution")} | {
                "model": self._config(row)
            }
            done = self._call([__file__, "draw", folder, json.dumps(wanted)], None)
            assert done is not None and done.returncode == 0, done and done.stderr
        return folder

    def _call(
        self, words: list[Any], end: float | None, **more: str
    ) -> subprocess.CompletedProcess[str] | None:
        """A program to its end, with what it printed; None where it took too long."""
        limit = max(end - time.monotonic(), 1) if end is not None else None
        try:
            there = {**self._environment, **more}
            return subprocess.run(
                [sys.executable, *map(str, words)],
                env=there,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None


def _command(
    row: Row, who: str, inputs: Mapping[str, Any], base: Path, data: Path, out: Path
) -> list[Any]:
    """A training: our trainer, or the plain script with the same options."""
    same = [
        "rank",
        "alpha",
        "global_batch",
        "micro_batch",
        "max_steps",
        "learning_rate",
        "precision",
    ]
    if row.recipe == "sft":
        words: list[Any] = [
            TRAINERS / "text_train.py" if who == OURS else ROOT / "benchmarks" / "plain_sft.py",
            "--data",
            data,
        ]
        words += [
            "--out",
            out / "weights",
            "--method",
            inputs["method"],
            "--weight-decay",
            inputs["weight_decay"],
        ]
        more: list[Any] = ["--optimizer", inputs["optimizer"]]
    else:
        words = [
            TRAINERS / "image_train.py" if who == OURS else ROOT / "benchmarks" / "plain_flux.py"
        ]
        words += [
            word for name in ("manifest", "latents", "text") for word in (f"--{name}", data / name)
        ]
        more = [
            "--family",
            "flux",
            "--objective",
            "logit_normal",
            "--base-storage",
            inputs["base_storage"],
            "--seed",
            0,
            "--sample-every",
            0,
        ]
        more += [
            word
            for name in ("adapter", "snapshots", "report")
            for word in (f"--{name}", out / name)
        ]
    words += [
        "--base",
        base,
        *(word for name in same for word in (f"--{name.replace('_', '-')}", inputs[name])),
    ]
    if inputs["checkpoint_activations"]:
        words.append("--checkpoint-activations")
    if who == OURS:
        words += [
            *more,
            "--history",
            out / "history.jsonl",
            "--checkpoints",
            out / "checkpoints",
            "--save-every",
            1000000,
        ]
    return words


def _figures() -> hardware.Hardware:
    import yaml

    return hardware.read(yaml.safe_load((ROOT / "recipes" / "hardware.yaml").read_text()))


def _alike(name: str, gpu: hardware.GpuModel) -> bool:
    try:
        return _figures().find(name) == gpu
    except Exception:  # a GPU without figures
        return False


def _estimated(row: Row, inputs: Mapping[str, Any]) -> float:
    """Bytes that tensors are estimated to take at the most, which is what torch says is allocated; 0 where the estimator does not know."""
    if row.recipe == "sft":
        model = read(MODELS[row.model])
        training = training_from_inputs.read_text_training("sft@1", inputs, model)
        assert training is not None
        terms = dict(estimate(model, replace(training, context=False)).terms)
        return float(sum(size for name, size in terms.items() if name != "lost between tensors"))
    seen = training_from_inputs.read_diffusion_training("flux-lora@1", inputs, row.model)
    found = hardware.find_row(_figures().diffusion, seen) if seen is not None else None
    return (found.gb * 1e9 - CUDA_CONTEXT) / (1 + FRAGMENTATION) if found is not None else 0.0


# -- there: models and data, drawn -------------------------------------------------------------------------------------------------------------------


def make(folder: Path, config: dict[str, Any]) -> None:
    """A model of this config with drawn weights in bf16, made on the GPU where there is one."""
    import torch

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    folder.mkdir(parents=True)
    if "model_type" in config:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(where):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=torch.bfloat16
            )
        model.save_pretrained(folder)
        for file in (ROOT / "fixtures" / "tiny-llama").glob("tokenizer*"):
            shutil.copy(file, folder)
    else:
        from diffusers import FluxTransformer2DModel

        with torch.device(where):
            model = FluxTransformer2DModel(**config)
        model.save_pretrained(folder / "transformer")
        shutil.copytree(ROOT / "fixtures" / "tiny-flux" / "scheduler", folder / "scheduler")
        (folder / "work.json").write_text(json.dumps(_operations(config)))
    (folder / "whole").touch()


def _operations(config: dict[str, Any]) -> float:
    """Floating-point operations to learn from one image: of the forward, counted, and as many back to the activations; weights are frozen."""
    import torch
    from diffusers import FluxTransformer2DModel
    from image_flux import predict  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.flop_counter import FlopCounterMode

    pixels = 64 if config["num_layers"] == 1 else 1024
    channels, side = config["in_channels"] // 4, pixels // 8
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counted:
        model = FluxTransformer2DModel(**config)
        there = {
            "prompt": torch.zeros(1, 512, config["joint_attention_dim"]),
            "pooled": torch.zeros(1, config["pooled_projection_dim"]),
        }
        predict(
            model, torch.zeros(1, channels, side, side), torch.zeros(1), there, 1.0, torch.float32
        )
    return 2.0 * counted.get_total_flops()


def draw(folder: Path, wanted: dict[str, Any]) -> None:
    """Full sequences of drawn tokens, or latents and embeddings of drawn images, as steps `data`, `latents` and `text` write them."""
    folder.mkdir(parents=True)
    config, count = wanted["model"], 64
    if "model_type" in config:
        import numpy
        from tokens import SPLITS, Writer  # type: ignore[import-not-found, unused-ignore]

        luck = numpy.random.RandomState(0)
        store = Writer(folder, wide=config["vocab_size"] > 1 << 16)
        documents = [
            store.add(luck.randint(1, config["vocab_size"], wanted["max_length"]).tolist(), None)
            for _ in range(count)
        ]
        store.close(
            {SPLITS[0]: [[number] for number in documents], SPLITS[1]: []}, {"end_token": None}
        )
    else:
        import torch
        from image_model import caption_file  # type: ignore[import-not-found, unused-ignore]
        from safetensors.torch import save_file

        torch.manual_seed(0)
        side = wanted["resolution"] // 8
        rows = []
        for name in ("latents", "text"):
            (folder / name).mkdir()
        for number in range(count):
            size = wanted["resolution"]
            rows.append({"id": str(number), "caption": str(number), "width": size, "height": size, "original": [size, size], "corner": [0, 0],
                         "source": f"{number}.png", "held_out": False, "repeats": 1, "regular": False})  # fmt: skip
            save_file(
                {"latent": torch.randn(config["in_channels"] // 4, side, side)},
                folder / "latents" / f"{number}.safetensors",
            )
            text = {
                "prompt": torch.randn(512, config["joint_attention_dim"]),
                "pooled": torch.randn(config["pooled_projection_dim"]),
            }
            save_file(
                {name: value.bfloat16() for name, value in text.items()},
                folder / "text" / caption_file(str(number)),
            )
        (folder / "manifest").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "whole").touch()


# -- here: the page ----------------------------------------------------------------------------------------------------------------------------------


def page(told: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    machine, pieces = told["machine"], told["pieces"]
    lines = [
        "# On a GPU", "",
        f"`python benchmarks/gpu.py`, {told['spent'] / 60:.0f} minutes on {machine['gpu'] or 'a CPU'}: Python {machine['python']}, torch",
        f"{machine['torch']}, transformers {machine['transformers']}. Models have the configs of real ones and drawn weights, arithmetic is bf16,",
        "and both programs have the same options. Speed is by the median of steps. MFU is what the model needs of the GPU's arithmetic, and nothing",
        "that is computed again. Memory is 10⁹ bytes: in tensors at the most, as estimated, and held by torch.", "",
        "| training | at once | recipe | plain script | × | MFU | in tensors | estimated | error | held | plain: in tensors |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in ROWS:
        ours, plain = (
            pieces.get(f"{row.name}/{who}", {"not_run": "not run"}) for who in (OURS, PLAIN)
        )
        if "not_run" in ours or "seconds" not in ours:
            lines.append(f"| {row.name} | | {ours.get('not_run', 'not run')} |" + " |" * 8)
            continue
        unit, name = (
            ("tokens/s", "tokens_per_second")
            if row.recipe == "sft"
            else ("images/s", "images_per_second")
        )
        beside = (
            [f"{plain[name]:g} {unit}", f"{plain['seconds'] / ours['seconds']:.2f}"]
            if "seconds" in plain
            else [_without(row, plain), ""]
        )
        held, estimated = ours.get("gpu_memory_allocated_gb"), ours.get("estimated_gb")
        memory = [
            f"{held:.1f}" if held else "",
            f"{estimated:.1f}" if held and estimated else "",
            f"{estimated / held - 1:+.0%}" if held and estimated else "",
        ]
        memory += [
            f"{ours['gpu_memory_reserved_gb']:.1f}" if held else "",
            f"{plain['gpu_memory_allocated_gb']:.1f}" if held and "seconds" in plain else "",
        ]
        mfu = f"{ours['mfu']:.0%}" if "mfu" in ours else ""
        lines.append(
            "| "
            + " | ".join(
                [
                    row.name,
                    str(ours["micro_batch"]),
                    f"{ours[name]:g} {unit}",
                    *beside,
                    mfu,
                    *memory,
                ]
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def _without(row: Row, plain: Mapping[str, Any]) -> str:
    return str(plain.get("not_run", "not run")) if row.fills else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("wheels")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--python", default="3.12", help="of the machine")
    verb = verbs.add_parser("run")
    verb.add_argument("state", type=Path)
    verb.add_argument("--wheels", type=Path)
    verb.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "gpu",
        help="where models lie until all is measured: 46 GB",
    )
    verb.add_argument("--minutes", type=float, default=8, help="of this call")
    verb.add_argument("--total", type=float, default=25, help="minutes of all calls")
    verb.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    verb.add_argument("--tiny", action="store_true")
    verbs.add_parser("page").add_argument("state", type=Path)
    for name in ("make", "draw"):  # what `run` starts
        verb = verbs.add_parser(name)
        verb.add_argument("folder", type=Path)
        verb.add_argument("config", type=json.loads)
    options = parser.parse_args()
    if options.verb == "wheels":
        wheels(options.folder, options.python)
    elif options.verb == "run":
        run(options)
    elif options.verb == "page":
        print(page(json.loads(options.state.read_text())), end="")
    else:
        {"make": make, "draw": draw}[options.verb](options.folder, options.config)


if __name__ == "__main__":
    main()
