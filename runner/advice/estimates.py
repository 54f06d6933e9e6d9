"""Estimate the GPU memory, time and cost of training steps.

Sources are the model's config.json, recipes/hardware.yaml and the metrics of earlier runs. Only
`fetch_config` uses the network. Steps that do not train on GPUs get no estimate, and a missing fact
is reported in `unknown`, not raised.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, NotFound
from ..language import document
from ..language.addresses import kind_of
from ..language.units import count_text, money
from ..language.values import is_number
from ..paths import config_folder, shipped
from ..planning.step import ResourceSpec
from ..storage import metrics
from ..storage.buckets.hub import offline, snapshots
from . import hardware, prime_rl, training_from_inputs
from .hardware import GpuModel, Hardware
from .memory import (
    CUDA_CONTEXT,
    MemoryEstimate,
    Model,
    TrainingSetup,
    UnknownConfig,
    Verdict,
    calibrate,
    estimate,
    read,
)
from .schema_faults import faults

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..storage.records.runs import AttemptRow
    from ..storage.workspace import Workspace

MAX_RUNS = 200
"""Number of a recipe's latest runs to read."""
COMPUTED_TERM = "the counted figure"
"""Term name for a computed, unpublished figure in the table of diffusion trainings."""
MAX_SPEEDS = 20
"""Number of the latest trainings whose speed counts."""
SPREAD = 0.15
"""Relative tolerance around the measured time, for startup, shutdown and variation."""
GUESS: Final = "a guess from"
"""Prefix of `StepEstimate.basis` for a time that no run measured."""
_LARGE = 1 << 20  # bytes of a config.json


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimate of one step: memory per GPU, training time and cost."""

    step: str
    found: MemoryEstimate | None
    unknown: str = ""  # why there is no estimate
    missing_config: str = ""  # address of the model whose config.json is not in the local cache
    gpu: str = ""  # as shown: "rtx4090 (24 GB)", "24 GB"
    usable: int | None = None
    seconds: tuple[float, float] | None = None  # lowest and highest
    basis: str = ""  # source of `seconds`
    price: float | None = None  # US dollars per hour for all GPUs
    source: str = ""  # source of the published figure
    choices: tuple[
        StepEstimate, ...
    ] = ()  # estimates for suitable GPU models if the step names none

    @property
    def verdict(self) -> Verdict | None:
        """Memory verdict: FITS, TIGHT or NO. None if the training or the GPU is unknown."""
        if self.found is None or self.usable is None:
            return None
        return self.found.verdict(self.usable)

    @property
    def lines(self) -> list[str]:
        """Format the estimate as lines for `recipe plan`."""
        lines = [self.memory]
        if self.seconds is not None:
            lines.append(
                f"time: {_format_range(*map(format_duration, self.seconds))} of training on {self.gpu} ({self.basis})"
            )
        if self.usd is not None:
            lines.append(
                f"cost: about {_format_range(*(f'{each:.2f}' for each in self.usd))} USD, at {self.price:g} USD an hour"
            )
        return [*lines, *(f"on {each.brief}" for each in self.choices)]

    @property
    def brief(self) -> str:
        """One-line summary for a GPU model: memory verdict, training time and cost, if known."""
        parts: list[str] = [self.verdict or "memory not known"]
        if self.seconds is not None:
            parts.append(f"{_format_range(*map(format_duration, self.seconds))} of training")
        if self.usd is not None:
            parts.append(f"{_format_range(*(f'{each:.2f}' for each in self.usd))} USD")
        text = f"{self.gpu}: {', '.join(parts)}"
        return text if self.seconds is None else f"{text} ({self.basis})"

    @property
    def is_guess(self) -> bool:
        """True if the time comes from formulas instead of measured runs."""
        return self.basis.startswith(GUESS)

    @property
    def usd(self) -> tuple[float, float] | None:
        """The lowest and highest cost in US dollars; None if the price or the time is unknown."""
        if self.price is None or self.seconds is None:
            return None
        shortest, longest = self.seconds
        return self.price * shortest / 3600, self.price * longest / 3600

    def as_json(self) -> Mapping[str, object]:
        """Return the estimate for `recipe plan --json`; sizes are in bytes."""
        seconds = list(self.seconds) if self.seconds else None
        usd = list(self.usd) if self.usd else None
        return {
            **_memory_as_json(self.found),
            "source": self.source,
            "gpu": self.gpu,
            "usable": self.usable,
            "verdict": self.verdict,
            "unknown": self.unknown,
            "seconds": seconds,
            "seconds_from": self.basis,
            "usd_an_hour": self.price,
            "usd": usd,
            "choices": [each.as_json() for each in self.choices],
        }

    @property
    def memory(self) -> str:
        """The memory estimate as one line of text."""
        if self.found is None:
            return f"memory: not known ({self.unknown})"
        on = f", {self.verdict} on {self.gpu}" if self.verdict is not None else ""
        return f"memory: {self.found}{on} ({self._explain_memory(self.found)})"

    def _explain_memory(self, found: MemoryEstimate) -> str:
        """Return the evidence of a memory estimate, or else the largest terms of its sum."""
        evidence = [found.measured] if found.measured else []
        if self.source:
            evidence.append(f"as published: {self.source}")
        if evidence:
            return "; ".join(evidence)
        if COMPUTED_TERM in dict(found.terms):
            return "counted, not measured: docs/memory.md"
        largest = find_largest_terms(found)
        return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in largest)


def _memory_as_json(found: MemoryEstimate | None) -> dict[str, object]:
    if found is None:
        return {"bytes": None, "low": None, "high": None, "terms": {}, "measured": ""}
    return {
        "bytes": found.bytes,
        "low": found.low,
        "high": found.high,
        "terms": dict(found.terms),
        "measured": found.measured,
    }


def format_duration(seconds: float) -> str:
    """Return a rounded duration with its unit, for example `3 h`."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(1, round(seconds))} s"


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def find_largest_terms(found: MemoryEstimate, count: int = 3) -> list[tuple[str, int]]:
    """Return the largest terms of a memory estimate, largest first."""
    return sorted(found.terms, key=lambda term: -abs(term[1]))[:count]


GPU_KEYS: Final = "write {memory: 24, capability: 8.9, tflops: 165, names: [name in nvidia-smi]}"


def load_hardware() -> Hardware:
    """Return the GPU data of recipes/hardware.yaml and the user's own hardware.yaml.

    Raises Invalid with every problem of the user's file.
    """
    own = Path(config_folder(os.environ)) / "hardware.yaml"
    try:
        stat = own.stat()
    except OSError:
        return _load_hardware(None)
    return _load_hardware((own, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=2)
def _load_hardware(own: tuple[Path, int, int] | None) -> Hardware:
    data: Any = document.read(shipped() / "recipes" / "hardware.yaml").value
    if own is None:
        return hardware.read(data)
    read = document.read(own[0])
    wrong = faults(read, "own-hardware.schema.json", "bad-hardware")
    if wrong:
        raise Invalid(wrong)
    theirs: Any = read.value
    for name in theirs["gpus"].keys() - data["gpus"].keys():
        for key in hardware.REQUIRED_FIELDS:
            if key not in theirs["gpus"][name]:
                message = f"unknown GPU {name}: add its {key}"
                path = ("gpus", name)
                wrong.append(read.problem("bad-hardware", message, path, fix=GPU_KEYS))
    if wrong:
        raise Invalid(wrong)
    return hardware.read(data, theirs["gpus"])


def estimate_plan(ws: Workspace, plan: Plan, numbers: Sequence[int]) -> dict[int, StepEstimate]:
    """Return the estimates of those plan nodes in `numbers` that train on GPUs."""
    found = {}
    for n in numbers:
        estimated = estimate_step(ws, plan, n)
        if estimated is not None:
            found[n] = estimated
    return found


def fetch_and_estimate_plan(
    ws: Workspace, plan: Plan, numbers: Sequence[int]
) -> dict[int, StepEstimate]:
    """Return estimates like `estimate_plan`, after a download of the missing configs of Hub models."""
    found = estimate_plan(ws, plan, numbers)
    missing = {each.missing_config for each in found.values() if each.missing_config}
    fetched = [fetch_config(address) for address in sorted(missing)]
    if any(fetched):
        return estimate_plan(ws, plan, numbers)
    return found


def estimate_step(
    ws: Workspace, plan: Plan, n: int, *, gpu: GpuModel | None = None
) -> StepEstimate | None:
    """Return the estimate of node `n`; None if it does not train on GPUs.

    The GPU is `gpu`, or else the one in the step's resources. If `gpu` is given, the step need not
    request GPUs itself.
    """
    spec, node = plan.specs()[n], plan.nodes[n]
    wants = spec.resources
    trains = spec.accelerate or spec.state
    has_gpus = wants.gpus or gpu is not None
    if not trains or not has_gpus:
        return None
    inputs = spec.names.inputs
    takes = {source.name: (source.kind, source.address) for source in node.takes}
    gpu, label, usable = _select_gpu(gpu, wants)
    recipe = str(spec.recipe)

    def find_address(name: str) -> tuple[str, str]:
        return takes.get(str(inputs.get(name)), ("", ""))

    devices = int(wants.gpus or 1) * spec.node_count
    if recipe.partition("@")[0] == prime_rl.NAME:
        config = _read_toml_input(ws, plan, n, str(inputs.get("config")))
        devices = prime_rl.training_gpus(inputs, config, devices)
        inputs = prime_rl.training_inputs(inputs, config)
    case = _Case(ws, node.id, recipe, inputs, find_address, devices, gpu, label, usable)
    found = _estimate(case)
    prices = _read_prices(ws)
    if gpu is not None:
        return _add_price(found, prices, gpu, devices)
    return replace(found, choices=_estimate_choices(case, wants.gpu_memory or 0, prices))


def _estimate_choices(
    case: _Case, memory: int, prices: Mapping[str, float]
) -> tuple[StepEstimate, ...]:
    """Return the estimates on each GPU model that has a price and about `memory` bytes or more."""
    least = 0.97 * memory
    choices: list[StepEstimate] = []
    for kind in load_hardware().gpus:
        if kind.name in prices and kind.memory * 1e9 >= least:
            estimated = _estimate(case.on(kind))
            choices.append(_add_price(estimated, prices, kind, case.devices))
    return tuple(choices)


def _read_toml_input(ws: Workspace, plan: Plan, n: int, name: str) -> Mapping[str, Any]:
    """Return the parsed TOML file of the input `name`; empty if the file cannot be read."""
    address = _find_local_input(plan, plan.nodes[n].prefix, name)
    if address is None:
        return {}
    try:
        return tomllib.loads(ws.absolute(address).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _find_local_input(plan: Plan, prefix: str, name: str) -> str | None:
    """Return the path of a local input of one recipe; None if no step reads it."""
    for node in plan.nodes:
        if node.prefix != prefix:
            continue
        for source in node.takes:
            if source.name == name and source.kind == "path":
                return source.address
    return None


def _add_price(
    found: StepEstimate, prices: Mapping[str, float], gpu: GpuModel, devices: int
) -> StepEstimate:
    if gpu.name not in prices:
        return found
    return replace(found, price=prices[gpu.name] * devices)


def estimate_values(
    ws: Workspace, recipe: str, values: Mapping[str, Any], gpu: GpuModel, devices: int
) -> StepEstimate:
    """Return the estimate of a training with these input values, without a plan."""

    def find_address(name: str) -> tuple[str, str]:
        address = values.get(name)
        if not isinstance(address, str):
            return "", ""
        return kind_of(address), address

    label, usable = _describe_gpu(gpu)
    case = _Case(ws, "train", recipe, values, find_address, devices, gpu, label, usable)
    return _add_price(_estimate(case), _read_prices(ws), gpu, devices)


def find_gpus(asked: str | None, memory: int | None) -> list[GpuModel]:
    """Return the GPU models that match the resources `gpu` and `gpu_memory`.

    A name selects at most one model; without a name, the memory size decides.
    """
    if asked:
        kind = load_hardware().find_requested(asked, memory)
        return [kind] if kind is not None else []
    if memory is None:
        return []
    return [gpu for gpu in load_hardware().gpus if gpu.has_memory(memory)]


@dataclass(frozen=True, slots=True)
class _Case:
    """One training to estimate: its recipe, its inputs and its GPUs."""

    ws: Workspace
    step: str
    recipe: str
    inputs: Mapping[str, Any]
    find_address: Callable[[str], tuple[str, str]]  # input -> kind and address of its file
    devices: int
    gpu: GpuModel | None
    label: str
    usable: int | None

    @property
    def blank(self) -> StepEstimate:
        """An estimate of this training without memory and time."""
        return StepEstimate(self.step, None, gpu=self.label, usable=self.usable)

    def on(self, gpu: GpuModel) -> _Case:
        """Return the same training on another GPU model."""
        label, usable = _describe_gpu(gpu)
        return replace(self, gpu=gpu, label=label, usable=usable)


def _estimate(case: _Case) -> StepEstimate:
    kind, address = case.find_address("base")
    seen = training_from_inputs.read_diffusion_training(case.recipe, case.inputs, address)
    if seen is not None:
        return _estimate_diffusion(case, seen, address)
    config = read_model_config(case.ws, kind, address)
    if config is not None:
        return _estimate_text(case, config)
    if not address:
        return replace(case.blank, unknown="the recipe has no input `base` with a model")
    unknown = f"the config.json of {address} is not in the local cache yet"
    return replace(case.blank, unknown=unknown, missing_config=address)


def _estimate_text(case: _Case, config: Mapping[str, Any]) -> StepEstimate:
    """Return the estimate of a language-model training."""
    try:
        model = read(config)
        training = _read_text_training(case, model)
        if training is None:
            return replace(case.blank, unknown="the inputs do not set the sequence length")
        found = estimate(model, training)
    except UnknownConfig as error:
        return replace(case.blank, unknown=str(error))
    past = _find_past_trainings(case.ws, case.recipe, case.step, case.gpu)
    seconds, basis = _estimate_text_time(case, model, training, past)
    return replace(
        case.blank,
        found=_calibrate(case.ws, found, case.recipe, past),
        usable=_subtract_vllm(case),
        seconds=seconds,
        basis=basis,
    )


def _read_text_training(case: _Case, model: Model) -> TrainingSetup | None:
    """Read the setup of a text training, and of the reward model that it may use."""
    config = read_model_config(case.ws, *case.find_address("reward_model"))
    reward = None if config is None else read(config)
    return training_from_inputs.read_text_training(
        case.recipe,
        case.inputs,
        model,
        devices=case.devices,
        reward=reward,
    )


def _subtract_vllm(case: _Case) -> int | None:
    """Return a GPU's usable bytes minus the fraction that vLLM reserves."""
    if case.usable is None or not case.inputs.get("use_vllm"):
        return case.usable
    return round(case.usable * (1 - float(case.inputs.get("vllm_memory", 0))))


def _estimate_text_time(
    case: _Case, model: Model, training: TrainingSetup, past: Sequence[_PastTraining]
) -> tuple[tuple[float, float] | None, str]:
    """Return the seconds of a training and their source: earlier runs, or else the GPU's speed."""
    tokens = training_from_inputs.count_tokens(case.inputs, training)
    work = hardware.count_operations(model, training, tokens) if tokens is not None else None
    measured = _estimate_seconds(case.ws, case.recipe, past, work, case.devices)
    if measured is not None:
        return measured
    if case.gpu is None or work is None or training.generating:
        return None, ""
    seconds = hardware.estimate_seconds(load_hardware(), case.gpu, work, case.devices)
    return seconds, _describe_guess("its arithmetic", case.gpu)


def _estimate_diffusion(
    case: _Case, seen: training_from_inputs.DiffusionTraining, address: str
) -> StepEstimate:
    """Return the estimate of a diffusion training.

    The memory comes from earlier runs of the same training, or else from the published table.
    """
    past = _find_past_trainings(case.ws, case.recipe, case.step, case.gpu)
    seconds, basis = _estimate_diffusion_time(case, seen, past)
    timed = replace(case.blank, seconds=seconds, basis=basis)
    measured = _find_measured_peak(case.recipe, past, seen, address)
    if measured is not None:
        return replace(timed, found=measured)
    row = hardware.find_row(load_hardware().diffusion, seen)
    if row is None:
        return replace(timed, unknown=f"there is no published measurement of {seen}")
    return replace(timed, found=_adapt_published_peak(row, seen), source=row.source)


def _estimate_diffusion_time(
    case: _Case, seen: training_from_inputs.DiffusionTraining, past: Sequence[_PastTraining]
) -> tuple[tuple[float, float] | None, str]:
    """Return the seconds of a training and their source: earlier runs, or else published ones."""
    count = training_from_inputs.count_samples(case.inputs)
    pixels = seen.resolution**2
    work = float(count) * pixels if count is not None else None
    measured = _estimate_seconds(case.ws, case.recipe, past, work, case.devices)
    if measured is not None:
        return measured
    # The transfer time of offloaded weights is unknown for every machine.
    if case.gpu is None or count is None or seen.away:
        return None, ""
    each = hardware.estimate_image_seconds(
        load_hardware(),
        case.gpu,
        family=seen.family,
        method=seen.method,
        pixels=pixels,
        devices=case.devices,
    )
    if each is None:
        return None, ""
    seconds = (count * each[0], count * each[1])
    return seconds, _describe_guess("what others published", case.gpu)


def _adapt_published_peak(
    row: hardware.DiffusionPeak, seen: training_from_inputs.DiffusionTraining
) -> MemoryEstimate:
    """Return the estimate of a training from the row of a similar one."""
    origin = "as published" if row.source else COMPUTED_TERM
    terms = {
        origin: round(row.gb * 1e9),
        "a larger adapter": hardware.count_extra_adapter_bytes(row, seen),
        "blocks offloaded to CPU memory": -hardware.count_offloaded_bytes(seen),
    }
    size = sum(terms.values())
    parts = tuple((name, each) for name, each in terms.items() if each)
    # Published peaks come from memory-saving settings, so only a little less is plausible.
    return MemoryEstimate(size, round(size * 0.98), round(size * 1.1), parts)


def _find_measured_peak(
    recipe: str,
    past: Sequence[_PastTraining],
    seen: training_from_inputs.DiffusionTraining,
    address: str,
) -> MemoryEstimate | None:
    """Return the memory that earlier runs of the same training used; None without such runs."""
    alike: list[_PastTraining] = []
    for each in past:
        # The same model may have been in another folder.
        base = os.path.basename(str(each.inputs.get("base", "")))
        if base != os.path.basename(address):
            continue
        if training_from_inputs.read_diffusion_training(recipe, each.inputs, address) == seen:
            alike.append(each)
    measured = [each.memory() for each in alike]
    sizes = [size for size in measured if size is not None]
    if not sizes:
        return None
    held = round(max(sizes) * 1e9)
    size = held + CUDA_CONTEXT
    return MemoryEstimate(
        size,
        round(size * 0.95),
        round(size * 1.05),
        (("as measured", held), ("CUDA", CUDA_CONTEXT)),
        _describe_measurement(sizes, alike[-1].kind),
    )


def _describe_guess(what: str, gpu: GpuModel) -> str:
    doubt = f"; not measured: the speed of {gpu.name}" if "tflops" in gpu.unchecked else ""
    return f"{GUESS} {what}{doubt}"


def _select_gpu(
    gpu: GpuModel | None, wants: ResourceSpec
) -> tuple[GpuModel | None, str, int | None]:
    """Return the requested GPU model, its label and its usable bytes, as far as they are known."""
    if gpu is None and wants.gpu:
        gpu = load_hardware().find_requested(str(wants.gpu), wants.gpu_memory)
    if gpu is not None:
        return gpu, *_describe_gpu(gpu)
    size = wants.gpu_memory
    if not size:
        return None, "", None
    return None, f"{size / 1e9:g} GB", load_hardware().estimate_usable(size)


def _describe_gpu(gpu: GpuModel) -> tuple[str, int]:
    """Return the label and the usable bytes of a GPU model."""
    return f"{gpu.name} ({gpu.memory:g} GB)", gpu.usable


def _read_prices(ws: Workspace) -> dict[str, float]:
    """Return the hourly price of each GPU in recipe.toml, in US dollars.

    Raises NotFound for an unknown GPU.
    """
    prices: dict[str, float] = {}
    for name, price in ws.config.prices.items():
        gpu = load_hardware().find(name)
        prices[gpu.name] = money(price)
    return prices


# -- models --


def read_model_config(ws: Workspace, kind: str, address: str) -> dict[str, Any] | None:
    """Return the config.json of a model from a local folder or cache; None if there is no copy."""
    if kind == "path":
        return _read_config(ws.absolute(address))
    if kind != "hf":
        return None
    name, _, revision = address.removeprefix("hf://").partition("@")
    there = snapshots(name)
    try:
        commit = (there.parent / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    if commit and (there / commit).is_dir():
        folders = [there / commit]
    else:
        folders = _newest_first(there.glob("*"))
    folders += _newest_first(ws.home.glob(f"cache/*/{os.path.basename(name)}"))
    for folder in folders:
        config = _read_config(folder)
        if config is not None:
            return config
    return None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=os.path.getmtime, reverse=True)


def fetch_config(address: object) -> bool:
    """Download a Hub model's config.json into the Hub's cache; return whether that succeeded.

    Returns False without a request if the Hub is offline.
    """
    if not isinstance(address, str) or not address.startswith("hf://"):
        return False
    if offline(os.environ):
        return False
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        name, _, revision = address.removeprefix("hf://").partition("@")
        # Without a network, a download retries and logs for 30 s. One request avoids that.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision or None), timeout=5)
        hf_hub_download(name, "config.json", revision=revision or None, etag_timeout=5)
    except Exception:  # whatever the network, the Hub and its client raise: the config is not here
        return False
    return True


def _read_config(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_LARGE))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# -- measurements of runs --


@dataclass(frozen=True, slots=True)
class _PastTraining:
    """An earlier training on a GPU."""

    inputs: Mapping[str, Any]
    numbers: Mapping[str, Any]
    kind: str
    kept: Path

    def number(self, *names: str) -> float | None:
        """Return the first positive value among the metrics `names`."""
        for name in names:
            value = self.numbers.get(name)
            if is_number(value) and value > 0:
                return float(value)
        return None

    def memory(self) -> float | None:
        """Return the peak GPU memory in 10⁹ bytes."""
        return self.number("gpu_memory_gb", "memory_gb")

    def speed(self) -> float | None:
        """Return the mean samples per second over all steps, or else the last reported value."""
        mean = metrics.mean_rate(metrics.points(self.kept), "samples_per_second")
        return mean or self.number("samples_per_second")


def _find_past_trainings(
    ws: Workspace, recipe: str, step: str, gpu: GpuModel | None
) -> list[_PastTraining]:
    """Return earlier trainings of this step, on this GPU model or on any.

    Attempts that reported no GPU are ignored, for example a smoke test on a CPU. Steps of recipes
    that use this recipe are not included.
    """
    rows = ws.store.runs.latest(recipe=recipe, last=MAX_RUNS)
    name = step.rpartition("/")[2]
    done = {row.id: _list_done_attempts(ws, row.id, name) for row in rows}
    keys = [each.key for each in chain.from_iterable(done.values())]
    traces = ws.store.index.traces(keys)
    found: dict[str, _PastTraining] = {}
    for row in reversed(rows):
        for each in done[row.id]:
            numbers = traces[each.key].numbers if each.key in traces else {}
            kind = numbers.get("gpu")
            if not isinstance(kind, str):
                continue
            if gpu is None or _is_same_gpu(kind, gpu):
                kept = ws.kept_path(row.id, each.step, each.n, ".metrics")
                found[each.key] = _PastTraining(row.inputs, numbers, kind, kept)
    return list(found.values())


def _list_done_attempts(ws: Workspace, run: str, step: str) -> list[AttemptRow]:
    attempts = ws.store.runs.attempts(run, step)
    return [each for each in attempts if each.outcome == "done" and each.key]


def _rebuild_training(
    ws: Workspace, recipe: str, inputs: Mapping[str, Any]
) -> tuple[Model, TrainingSetup] | None:
    """Return the model and settings of an earlier training; None if its config.json is missing."""
    base = str(inputs.get("base", ""))
    config = read_model_config(ws, "path", base) or read_model_config(ws, "hf", base)
    if config is None:
        return None
    try:
        model = read(config)
        training = training_from_inputs.read_text_training(recipe, inputs, model)
    except UnknownConfig:
        return None
    return None if training is None else (model, training)


def _calibrate(
    ws: Workspace, found: MemoryEstimate, recipe: str, past: Sequence[_PastTraining]
) -> MemoryEstimate:
    """Return the estimate scaled by the mean ratio of measured to estimated memory in `past`."""
    ratios, sizes, kinds = [], [], []
    for each in past:
        size = each.memory()
        trained = _rebuild_training(ws, recipe, each.inputs)
        if size is None or trained is None:
            continue
        try:
            earlier = estimate(*trained)
        except UnknownConfig:
            continue
        ratios.append(size * 1e9 / (earlier.bytes - dict(earlier.terms).get("CUDA", 0)))
        sizes.append(size)
        kinds.append(each.kind)
    if not ratios:
        return found
    factor = sum(ratios) / len(ratios)
    return calibrate(found, factor, len(ratios), _describe_measurement(sizes, kinds[-1]))


def _describe_measurement(sizes: Sequence[float], kind: str) -> str:
    low, high = min(sizes), max(sizes)
    held = f"{low:.1f}" if high - low < 0.05 else f"{low:.1f}-{high:.1f}"
    return f"measured {held} GB on {kind} in {count_text(len(sizes), 'run')}"


def _work_per_sample(ws: Workspace, recipe: str, inputs: Mapping[str, Any]) -> float | None:
    """Return the work per sample: pixels for images, operations for text; None if unknown."""
    resolution = inputs.get("resolution")
    if isinstance(resolution, int):
        return float(resolution) ** 2
    trained = _rebuild_training(ws, recipe, inputs)
    if trained is None:
        return None
    model, training = trained
    tokens = training_from_inputs.count_tokens({"max_steps": 1, "global_batch": 1}, training)
    if tokens is None:
        return None
    return hardware.count_operations(model, training, tokens)


def _estimate_seconds(
    ws: Workspace, recipe: str, past: Sequence[_PastTraining], work: float | None, devices: int
) -> tuple[tuple[float, float], str] | None:
    """Return the seconds for `work` at the speed of earlier runs, and a description of those runs.

    None without measured speeds. Assumes constant time per operation or pixel, and linear scaling
    over GPUs.
    """
    speeds: list[float] = []  # work per second and GPU
    for each in past[-MAX_SPEEDS:]:
        samples = each.speed()
        if samples is None:
            continue
        per_sample = _work_per_sample(ws, recipe, each.inputs)
        if per_sample is not None:
            speeds.append(samples * per_sample / (each.number("gpus") or 1))
    if work is None or not speeds:
        return None
    low = work / devices / max(speeds)
    high = work / devices / min(speeds)
    seconds = (low * (1 - SPREAD), high * (1 + SPREAD))
    return seconds, f"by {count_text(len(speeds), 'run')} on {past[-1].kind}"


def _is_same_gpu(kind: str, gpu: GpuModel) -> bool:
    try:
        return load_hardware().find(kind) == gpu
    except NotFound:
        return False
