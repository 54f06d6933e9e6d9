"""What a step's GPU memory and time are estimated to be, from model configs, recipes/hardware.yaml and what earlier runs measured.  Starts nothing.

No network is asked, but by `fetched`.  Only steps that train (`accelerate`, or a state) and want a GPU are estimated; what is not known is said,
and is no error.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import Invalid, NotFound
from ..language.values import is_number
from ..paths import config_folder, shipped
from ..planning.step import ResourceSpec
from ..storage import metrics
from ..storage.buckets.hub import offline, snapshots
from . import hardware, prime_rl, training_from_inputs
from .hardware import Gpu, Hardware
from .memory import CONTEXT, Estimate, Model, Training, Unknown, Verdict, calibrated, estimate, read

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..storage.workspace import Workspace

LOOKED_AT = 200
"""Earlier runs of a recipe that are looked at."""
COUNTED = "the counted figure"
"""Name of a figure of the table of diffusion trainings that is not published."""
LEARNED_FROM = 20
"""Of those, the latest whose speed counts."""
SPREAD = 0.15
"""How far from the mean speed of its steps a training may be, as a share: it also begins and ends, and no two are alike."""
GUESS: Final = "a guess from"
"""How the basis of a time begins that no run measured."""
_LARGE = 1 << 20  # bytes of a config.json


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step: what it takes of each GPU, what a GPU has, and how long the step may compute."""

    step: str
    found: Estimate | None
    unknown: str = ""  # why there is no estimate
    gpu: str = ""  # as shown: "rtx4090 (24 GB)", "24 GB"
    usable: int | None = None
    seconds: tuple[float, float] | None = None  # least and most
    basis: str = ""  # what `seconds` are from
    price: float | None = None  # US dollars for an hour of all its GPUs
    source: str = ""  # of a figure out of the table of diffusion trainings
    choices: tuple[
        StepEstimate, ...
    ] = ()  # the same on kinds of GPU that would do, where none is meant

    @property
    def verdict(self) -> Verdict | None:
        """FITS, TIGHT or NO; None where the training or the GPU is not known."""
        return (
            self.found.verdict(self.usable)
            if self.found is not None and self.usable is not None
            else None
        )

    @property
    def lines(self) -> list[str]:
        """As `recipe plan` shows it."""
        lines = [self.memory]
        if self.seconds is not None:
            lines.append(
                f"time: {_between(*map(span, self.seconds))} of training on {self.gpu} ({self.basis})"
            )
        if self.usd is not None:
            lines.append(
                f"cost: about {_between(*(f'{each:.2f}' for each in self.usd))} USD, at {self.price:g} USD an hour"
            )
        return [*lines, *(f"on {each.brief}" for each in self.choices)]

    @property
    def brief(self) -> str:
        """One line about one kind of GPU: whether it fits there, how long it takes and what it costs, as far as that is known."""
        parts: list[str] = [self.verdict or "memory not known"]
        if self.seconds is not None:
            parts.append(f"{_between(*map(span, self.seconds))} of training")
        if self.usd is not None:
            parts.append(f"{_between(*(f'{each:.2f}' for each in self.usd))} USD")
        return f"{self.gpu}: {', '.join(parts)}" + (
            f" ({self.basis})" if self.seconds is not None else ""
        )

    @property
    def guessed(self) -> bool:
        """Whether the time is a guess, and not what runs measured."""
        return self.basis.startswith(GUESS)

    @property
    def usd(self) -> tuple[float, float] | None:
        """US dollars, least and most; None where the price or the time is not known."""
        return (
            None
            if self.price is None or self.seconds is None
            else (self.price * self.seconds[0] / 3600, self.price * self.seconds[1] / 3600)
        )

    def as_json(self) -> Mapping[str, object]:
        """As `recipe plan --json` tells it; sizes in bytes."""
        found = self.found
        return {
            "bytes": found.bytes if found else None,
            "low": found.low if found else None,
            "high": found.high if found else None,
            "terms": dict(found.terms) if found else {},
            "measured": found.measured if found else "",
            "source": self.source,
            "gpu": self.gpu,
            "usable": self.usable,
            "verdict": self.verdict,
            "unknown": self.unknown,
            "seconds": list(self.seconds) if self.seconds else None,
            "seconds_from": self.basis,
            "usd_an_hour": self.price,
            "usd": list(self.usd) if self.usd else None,
            "choices": [each.as_json() for each in self.choices],
        }

    @property
    def memory(self) -> str:
        """One line about memory."""
        if self.found is None:
            return f"memory: not known ({self.unknown})"
        notes = [
            note
            for note in (self.found.measured, self.source and f"as published: {self.source}")
            if note
        ]
        if not notes and COUNTED in dict(self.found.terms):
            notes = ["counted, not measured: docs/memory.md"]
        notes = notes or [
            ", ".join(f"{name} {size / 1e9:.1f}" for name, size in largest(self.found))
        ]
        on = f", {self.verdict} on {self.gpu}" if self.verdict is not None else ""
        return f"memory: {self.found}{on} ({'; '.join(notes)})"


def span(seconds: float) -> str:
    """A length of time as people say it, roughly."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(1, round(seconds))} s"


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def largest(found: Estimate, count: int = 3) -> list[tuple[str, int]]:
    """The terms that matter most, greatest first."""
    return sorted(found.terms, key=lambda term: -abs(term[1]))[:count]


GPU_KEYS: Final = (
    "write {memory: 24, capability: 8.9, tflops: 165, names: [what nvidia-smi calls it]}"
)


def figures() -> Hardware:
    """recipes/hardware.yaml, with the GPUs of hardware.yaml in the user's settings folder.  Raises Invalid with every problem of that file."""
    own = Path(config_folder(os.environ)) / "hardware.yaml"
    try:
        stat = own.stat()
    except OSError:
        return _figures(None)
    return _figures((own, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=2)
def _figures(own: tuple[Path, int, int] | None) -> Hardware:
    from ..language import document

    data: Any = document.read(shipped() / "recipes" / "hardware.yaml").value
    if own is None:
        return hardware.read(data)
    from .schema_faults import faults

    read = document.read(own[0])
    if wrong := faults(read, "own-hardware.schema.json", "bad-hardware"):
        raise Invalid(wrong)
    theirs: Any = read.value
    for name in theirs["gpus"].keys() - data["gpus"].keys():
        for key in hardware.NEEDED:
            if key not in theirs["gpus"][name]:
                wrong.append(
                    read.problem(
                        "bad-hardware",
                        f"unknown GPU {name}: add its {key}",
                        ("gpus", name),
                        fix=GPU_KEYS,
                    )
                )
    if wrong:
        raise Invalid(wrong)
    return hardware.read(data, theirs["gpus"])


def of_plan(ws: Workspace, plan: Plan, numbers: Sequence[int]) -> dict[int, StepEstimate]:
    """Those of the nodes `numbers` that train on GPUs."""
    found = {}
    for n in numbers:
        if (estimated := of_step(ws, plan, n)) is not None:
            found[n] = estimated
    return found


def of_step(ws: Workspace, plan: Plan, n: int, *, gpu: Gpu | None = None) -> StepEstimate | None:
    """One node, on `gpu` or on what its resources ask for; None where it does not train on GPUs, which with `gpu` given is taken for granted."""
    spec, node = plan.specs()[n], plan.nodes[n]
    wants = spec.resources
    if not (spec.accelerate or spec.state) or not (wants.gpus or gpu is not None):
        return None
    inputs = spec.names.inputs
    takes = {source.name: (source.kind, source.address) for source in node.takes}
    gpu, shown, usable = _gpu(gpu, wants)
    recipe = str(spec.recipe)

    def place(name: str) -> tuple[str, str]:
        return takes.get(str(inputs.get(name)), ("", ""))

    devices = int(wants.gpus or 1) * spec.node_count
    if recipe.partition("@")[0] == prime_rl.NAME:
        config = _toml(ws, plan, n, str(inputs.get("config")))
        devices = prime_rl.training_gpus(inputs, config, devices)
        inputs = prime_rl.training_inputs(inputs, config)
    found = _estimated(ws, node.id, recipe, inputs, place, devices, gpu, shown, usable)
    prices = _prices(ws)
    if gpu is not None:
        return _priced(found, prices, gpu, devices)
    # Where only a size is asked for, those that have a price are what one would take.
    kinds = [
        kind
        for kind in figures().gpus
        if kind.name in prices and kind.memory * 1e9 >= 0.97 * (wants.gpu_memory or 0)
    ]
    others = (
        _priced(
            _estimated(ws, node.id, recipe, inputs, place, devices, *_gpu(kind, ResourceSpec())),
            prices,
            kind,
            devices,
        )
        for kind in kinds
    )
    return replace(found, choices=tuple(others))


def _toml(ws: Workspace, plan: Plan, n: int, name: str) -> Mapping[str, Any]:
    """The TOML file that a recipe takes as an input; empty where it is not here, or cannot be read."""
    prefix = plan.nodes[n].prefix
    taken = (each for node in plan.nodes if node.prefix == prefix for each in node.takes)
    source = next((each for each in taken if each.name == name and each.kind == "path"), None)
    if source is None:
        return {}
    try:
        return tomllib.loads(ws.absolute(source.address).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _priced(
    found: StepEstimate, prices: Mapping[str, float], gpu: Gpu, devices: int
) -> StepEstimate:
    return replace(found, price=prices[gpu.name] * devices) if gpu.name in prices else found


def of_values(
    ws: Workspace, recipe: str, values: Mapping[str, Any], gpu: Gpu, devices: int
) -> StepEstimate:
    """A training of `recipe` with these input values, which no plan was made for, on one kind of GPU."""

    def place(name: str) -> tuple[str, str]:
        from ..language.inputs import kind_of

        address = values.get(name)
        return (kind_of(address), address) if isinstance(address, str) else ("", "")

    return _priced(
        _estimated(ws, "train", recipe, values, place, devices, *_gpu(gpu, ResourceSpec())),
        _prices(ws),
        gpu,
        devices,
    )


def suiting(asked: str | None, memory: int | None) -> list[Gpu]:
    """The kinds of GPU that resources mean: by a word, else those of that size on the box."""
    if asked:
        kind = figures().meant(asked, memory)
        return [kind] if kind is not None else []
    return [
        kind
        for kind in figures().gpus
        if memory is not None and abs(kind.memory * 1e9 - memory) <= 0.03 * memory
    ]


def _estimated(
    ws: Workspace, step: str, recipe: str, inputs: Mapping[str, Any], place: Callable[[str], tuple[str, str]], devices: int, gpu: Gpu | None,
    shown: str, usable: int | None,
) -> StepEstimate:  # fmt: skip
    kind, address = place("base")
    seen = training_from_inputs.picture(recipe, inputs, address)
    if seen is not None:
        return _of_images(ws, step, recipe, inputs, seen, address, devices, gpu, shown, usable)
    config = config_of(ws, kind, address)
    if config is None:
        where = (
            f"the config.json of {address} is not in the local cache yet"
            if address
            else "the recipe has no input `base` with a model"
        )
        return StepEstimate(step, None, where, shown, usable)
    try:
        model = read(config)
        other = config_of(ws, *place("reward_model"))
        training = training_from_inputs.text(
            recipe,
            inputs,
            model,
            devices=devices,
            reward=read(other) if other is not None else None,
        )
        if training is None:
            return StepEstimate(
                step, None, "the inputs do not set the sequence length", shown, usable
            )
        found = estimate(model, training)
    except Unknown as error:
        return StepEstimate(step, None, str(error), shown, usable)
    if usable is not None and inputs.get("use_vllm"):
        usable = round(
            usable * (1 - float(inputs.get("vllm_memory", 0)))
        )  # vLLM takes its share first
    past = _past(ws, recipe, step, gpu)
    tokens = training_from_inputs.tokens(inputs, training)
    work = hardware.operations(model, training, tokens) if tokens is not None else None
    seconds, basis = _by_speed(ws, recipe, past, work, devices) or (None, "")
    if seconds is None and gpu is not None and work is not None and not training.generating:
        seconds = hardware.seconds(figures(), gpu, work, devices)
        basis = _guess("its arithmetic", gpu)
    return StepEstimate(step, _learned(ws, found, recipe, past), "", shown, usable, seconds, basis)


def _of_images(
    ws: Workspace, step: str, recipe: str, inputs: Mapping[str, Any], seen: training_from_inputs.Picture, address: str, devices: int, gpu: Gpu | None,
    shown: str, usable: int | None,
) -> StepEstimate:  # fmt: skip
    """A diffusion training: what runs measured of the same case, else what the table says of it."""
    past = _past(ws, recipe, step, gpu)
    count = training_from_inputs.samples(inputs)
    pixels = seen.resolution**2
    seconds, basis = _by_speed(
        ws, recipe, past, float(count) * pixels if count is not None else None, devices
    ) or (None, "")
    # How long weights are on their way from main memory is not known of any machine.
    if seconds is None and gpu is not None and count is not None and not seen.away:
        each = hardware.image_seconds(
            figures(), gpu, family=seen.family, method=seen.method, pixels=pixels, devices=devices
        )
        seconds = (count * each[0], count * each[1]) if each is not None else None
        basis = _guess("what others published", gpu) if seconds is not None else ""
    measured = _measured(recipe, past, seen, address)
    if measured is not None:
        return StepEstimate(step, measured, "", shown, usable, seconds, basis)
    row = hardware.fitting(figures().diffusion, seen)
    if row is None:
        return StepEstimate(
            step,
            None,
            f"there is no published measurement of {seen}",
            shown,
            usable,
            seconds,
            basis,
        )
    terms = {
        "as published" if row.source else COUNTED: round(row.gb * 1e9),
        "a larger adapter": hardware.adapter_more(row, seen),
    }
    terms["blocks offloaded to CPU memory"] = -hardware.left_away(seen)
    size = sum(terms.values())
    # A peak that was published is of settings made to be small: less is not to be expected, and more where a case asks for less than its row.
    found = Estimate(
        size,
        round(size * 0.98),
        round(size * 1.1),
        tuple((name, each) for name, each in terms.items() if each),
    )
    return StepEstimate(step, found, "", shown, usable, seconds, basis, source=row.source)


def _measured(
    recipe: str, past: Sequence[_Past], seen: training_from_inputs.Picture, address: str
) -> Estimate | None:
    """What trainings of this very case took, on a base of the same name; None where there was none."""
    alike = [
        each
        for each in past
        if os.path.basename(str(each.inputs.get("base", ""))) == os.path.basename(address)
    ]
    alike = [
        each for each in alike if training_from_inputs.picture(recipe, each.inputs, address) == seen
    ]
    sizes = [
        size for each in alike if (size := each.number("gpu_memory_gb", "memory_gb")) is not None
    ]
    if not sizes:
        return None
    held = round(max(sizes) * 1e9)
    size = held + CONTEXT
    return Estimate(
        size,
        round(size * 0.95),
        round(size * 1.05),
        (("as measured", held), ("CUDA", CONTEXT)),
        _measured_on(sizes, alike[-1].kind),
    )


def _guess(what: str, gpu: Gpu) -> str:
    doubt = f"; not measured: the speed of {gpu.name}" if "tflops" in gpu.unchecked else ""
    return f"{GUESS} {what}{doubt}"


def _gpu(gpu: Gpu | None, wants: ResourceSpec) -> tuple[Gpu | None, str, int | None]:
    """The GPU that is meant, how it is shown, and bytes that can be used of it: by its kind, else by the memory that is asked for."""
    if gpu is None and wants.gpu:
        gpu = figures().meant(str(wants.gpu), wants.gpu_memory)
    if gpu is not None:
        return gpu, f"{gpu.name} ({gpu.memory:g} GB)", gpu.usable
    size = wants.gpu_memory
    return (None, f"{size / 1e9:g} GB", figures().of_memory(size)) if size else (None, "", None)


def _prices(ws: Workspace) -> dict[str, float]:
    """US dollars for an hour of one GPU, by its name, as recipe.toml says.  Raises NotFound for a GPU without figures."""
    from ..language.units import money

    return {figures().find(name).name: money(price) for name, price in ws.config.prices.items()}


# -- models ------------------------------------------------------------------------------------------------------------------------------------------


def config_of(ws: Workspace, kind: str, address: str) -> dict[str, Any] | None:
    """The config.json of a model: of a folder here, of what was fetched before, or of the Hub's own cache.  None where it is not to be had."""
    if kind == "path":
        return _config(ws.absolute(address))
    if kind != "hf":
        return None
    name, _, revision = address.removeprefix("hf://").partition("@")
    there = snapshots(name)
    try:
        commit = (there.parent / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    folders = (
        [there / commit]
        if commit and (there / commit).is_dir()
        else sorted(there.glob("*"), key=os.path.getmtime, reverse=True)
    )
    folders += sorted(
        ws.home.glob(f"cache/*/{os.path.basename(name)}"), key=os.path.getmtime, reverse=True
    )
    return next((config for folder in folders if (config := _config(folder)) is not None), None)


def fetched(address: object) -> bool:
    """Whether the config.json of a model of the Hub, a few kilobytes, is now in the Hub's cache, where it was not; offline nothing is asked."""
    if not isinstance(address, str) or not address.startswith("hf://") or offline(os.environ):
        return False
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        name, _, revision = address.removeprefix("hf://").partition("@")
        # Asked once and in silence: a download tries again for half a minute where there is no network, and tells each time.
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision or None), timeout=5)
        hf_hub_download(name, "config.json", revision=revision or None, etag_timeout=5)
    except Exception:  # whatever the network, the Hub and its client raise: the config is not here
        return False
    return True


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_LARGE))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# -- what runs measured ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Past:
    """An earlier training on a GPU: its inputs, its last reported metrics, the name of its GPU, and where all its metrics are kept."""

    inputs: Mapping[str, Any]
    numbers: Mapping[str, Any]
    kind: str
    kept: Path

    def number(self, *names: str) -> float | None:
        """The first of these that was reported as a number above 0."""
        for name in names:
            value = self.numbers.get(name)
            if is_number(value) and value > 0:
                return float(value)
        return None

    def speed(self) -> float | None:
        """Samples a second: the mean over its steps, or of the last where no more is kept."""
        return metrics.mean_rate(metrics.points(self.kept), "samples_per_second") or self.number(
            "samples_per_second"
        )


def _past(ws: Workspace, recipe: str, step: str, gpu: Gpu | None) -> list[_Past]:
    """Earlier trainings of this step of `recipe` on this kind of GPU, or, where none is meant, on any.

    Those that name no GPU had none, so that a `smoke` on two cores says nothing here.  A step of a recipe that uses this one is not among them.
    """
    rows = ws.store.runs.latest(recipe=recipe, last=LOOKED_AT)
    done = {
        row.id: [
            each
            for each in ws.store.runs.attempts(row.id, step.rpartition("/")[2])
            if each.outcome == "done" and each.key
        ]
        for row in rows
    }
    traces = ws.store.index.traces([each.key for attempts in done.values() for each in attempts])
    found: dict[str, _Past] = {}
    for row in reversed(rows):
        for each in done[row.id]:
            numbers = traces[each.key].numbers if each.key in traces else {}
            kind = numbers.get("gpu")
            if isinstance(kind, str) and (gpu is None or _same(kind, gpu)):
                kept = ws.kept_path(row.id, each.step, each.n, ".metrics")
                found[each.key] = _Past(row.inputs, numbers, kind, kept)
    return list(found.values())


def _trained(
    ws: Workspace, recipe: str, inputs: Mapping[str, Any]
) -> tuple[Model, Training] | None:
    """What an earlier training was, as far as its model's config.json is still to be had."""
    base = str(inputs.get("base", ""))
    config = config_of(ws, "path", base) or config_of(ws, "hf", base)
    try:
        model = read(config) if config is not None else None
        training = training_from_inputs.text(recipe, inputs, model) if model is not None else None
    except Unknown:
        return None
    return (model, training) if model is not None and training is not None else None


def _learned(ws: Workspace, found: Estimate, recipe: str, past: Sequence[_Past]) -> Estimate:
    """`found`, corrected by the mean of measured over estimated in `past`."""
    ratios, sizes, kinds = [], [], []
    for each in past:
        size, trained = each.number("gpu_memory_gb", "memory_gb"), _trained(ws, recipe, each.inputs)
        if size is None or trained is None:
            continue
        try:
            earlier = estimate(*trained)
        except Unknown:
            continue
        ratios.append(size * 1e9 / (earlier.bytes - dict(earlier.terms).get("CUDA", 0)))
        sizes.append(size)
        kinds.append(each.kind)
    if not ratios:
        return found
    return calibrated(found, sum(ratios) / len(ratios), len(ratios), _measured_on(sizes, kinds[-1]))


def _measured_on(sizes: Sequence[float], kind: str) -> str:
    held = (
        f"{min(sizes):.1f}"
        if max(sizes) - min(sizes) < 0.05
        else f"{min(sizes):.1f}-{max(sizes):.1f}"
    )
    return f"measured {held} GB on {kind} in {_runs(len(sizes))}"


def _work(ws: Workspace, recipe: str, inputs: Mapping[str, Any]) -> float | None:
    """What one sample of an earlier training took: pixels where it has a resolution, else operations.  None where it is unknown."""
    resolution = inputs.get("resolution")
    if isinstance(resolution, int):
        return float(resolution) ** 2
    trained = _trained(ws, recipe, inputs)
    tokens = (
        training_from_inputs.tokens({"max_steps": 1, "global_batch": 1}, trained[1])
        if trained is not None
        else None
    )
    return (
        hardware.operations(*trained, tokens)
        if trained is not None and tokens is not None
        else None
    )


def _by_speed(
    ws: Workspace, recipe: str, past: Sequence[_Past], work: float | None, devices: int
) -> tuple[tuple[float, float], str] | None:
    """Seconds for `work`, least and most, at the speed of trainings in `past`, and which those were; None where none tell theirs.

    The speed of a GPU is taken to be the same for each operation, or pixel, and GPUs to add up.
    """
    speeds = [
        speed * done / (each.number("gpus") or 1)
        for each in past[-LEARNED_FROM:]
        if (speed := each.speed()) is not None
        and (done := _work(ws, recipe, each.inputs)) is not None
    ]
    if work is None or not speeds:
        return None
    low, high = (work / devices / speed for speed in (max(speeds), min(speeds)))
    return (low * (1 - SPREAD), high * (1 + SPREAD)), f"by {_runs(len(speeds))} on {past[-1].kind}"


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"


def _same(kind: str, gpu: Gpu) -> bool:
    try:
        return figures().find(kind) == gpu
    except NotFound:
        return False
