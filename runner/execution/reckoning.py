"""What a step's GPU memory and time are reckoned to be, from model configs, recipes/hardware.yaml and what earlier runs measured.  Starts nothing.

No network is asked, but by `fetched`.  Only steps that train (`accelerate`, or a state) and want a GPU are reckoned; what is not known is said,
and is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NotFound
from ..planning import hardware, trainings
from ..planning.hardware import Gpu, Hardware
from ..planning.memory import Estimate, Unknown, Verdict, calibrated, estimate, read

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from .workspace import Workspace

LOOKED_AT = 200
"""Earlier runs of a recipe that are looked at."""
_LARGE = 1 << 20  # bytes of a config.json


@dataclass(frozen=True, slots=True)
class Reckoned:
    """One step: what it takes of each GPU, what a GPU has, and how long the step may compute."""

    step: str
    found: Estimate | None
    unknown: str = ""  # why there is no estimate
    gpu: str = ""  # as shown: "rtx4090 (24 GB)", "24 GB"
    usable: int | None = None
    seconds: tuple[float, float] | None = None  # a guess, least and most
    basis: str = ""  # of that guess
    price: float | None = None  # US dollars for an hour of all its GPUs
    source: str = ""  # of a figure out of the table of diffusion trainings

    @property
    def verdict(self) -> Verdict | None:
        """FITS, TIGHT or NO; None where the training or the GPU is not known."""
        return self.found.verdict(self.usable) if self.found is not None and self.usable is not None else None

    def lines(self, took: float | None) -> list[str]:
        """As `recipe plan` shows it.  `took`: seconds by earlier runs, where there were any; then no guess is needed."""
        lines = [self.memory]
        if took is None and self.seconds is not None:
            low, high = (span(each) for each in self.seconds)
            lines.append(f"time: a guess from {self.basis}, {low} to {high} of training on {self.gpu}")
        if (cost := self.cost(took)) is not None:
            low, high = (f"{each:.2f}" for each in cost)
            lines.append(f"cost: about {low if low == high else f'{low} to {high}'} USD, at {self.price:g} USD an hour")
        return lines

    def cost(self, took: float | None) -> tuple[float, float] | None:
        """US dollars, least and most; None where the price or the time is not known."""
        span = self.seconds if took is None else (took, took)
        return None if self.price is None or span is None else (self.price * span[0] / 3600, self.price * span[1] / 3600)

    def as_json(self, took: float | None) -> dict[str, Any]:
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
            "guessed_seconds": list(self.seconds) if self.seconds else None,
            "guessed_from": self.basis,
            "usd_an_hour": self.price,
            "usd": list(cost) if (cost := self.cost(took)) is not None else None,
        }

    @property
    def memory(self) -> str:
        """One line about memory."""
        if self.found is None:
            return f"memory: not known ({self.unknown})"
        notes = [note for note in (self.found.measured, self.source and f"as published: {self.source}") if note]
        notes = notes or [", ".join(f"{name} {size / 1e9:.1f}" for name, size in largest(self.found))]
        on = f", {self.verdict} on {self.gpu}" if self.verdict is not None else ""
        return f"memory: {self.found}{on} ({'; '.join(notes)})"


def span(seconds: float) -> str:
    """A length of time as people say it, roughly."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(1, round(seconds))} s"


def largest(found: Estimate, count: int = 3) -> list[tuple[str, int]]:
    """The terms that matter most, greatest first."""
    return sorted(found.terms, key=lambda term: -abs(term[1]))[:count]


@lru_cache(maxsize=1)
def figures() -> Hardware:
    """recipes/hardware.yaml."""
    from ..language import document, library

    data: Any = document.read(library.home() / "recipes" / "hardware.yaml").value
    return hardware.read(data)


def of_plan(ws: Workspace, plan: Plan, numbers: Sequence[int]) -> dict[int, Reckoned]:
    """Those of the nodes `numbers` that train on GPUs."""
    found = {}
    for n in numbers:
        if (reckoned := of_step(ws, plan, n)) is not None:
            found[n] = reckoned
    return found


def of_step(ws: Workspace, plan: Plan, n: int, *, gpu: Gpu | None = None) -> Reckoned | None:
    """One node, on `gpu` or on what its resources ask for; None where it does not train on GPUs, which with `gpu` given is taken for granted."""
    detail, node = plan.details()[n], plan.nodes[n]
    wants = detail.get("resources", {})
    if not (detail.get("accelerate") or detail.get("state")) or not (wants.get("gpus") or gpu is not None):
        return None
    inputs = detail["scope"]["inputs"]
    takes = {name: (kind, address) for name, kind, address, *_ in node.takes}
    gpu, shown, usable = _gpu(gpu, wants)
    recipe = str(detail["recipe"])

    def place(name: str) -> tuple[str, str]:
        return takes.get(str(inputs.get(name)), ("", ""))

    devices = int(wants.get("gpus") or 1) * (detail["nodes"] if isinstance(detail.get("nodes"), int) else 1)
    found = _reckoned(ws, node.id, recipe, inputs, place, devices, gpu, shown, usable)
    price = _prices(ws).get(gpu.name) if gpu is not None else None
    return replace(found, price=price * devices) if price is not None else found


def of_values(ws: Workspace, recipe: str, values: Mapping[str, Any], gpu: Gpu, devices: int) -> Reckoned:
    """A training of `recipe` with these input values, which no plan was made for, on one kind of GPU."""

    def place(name: str) -> tuple[str, str]:
        from ..language.inputs import kind_of

        address = values.get(name)
        return (kind_of(address), address) if isinstance(address, str) else ("", "")

    return _reckoned(ws, "train", recipe, values, place, devices, *_gpu(gpu, {}))


def _reckoned(
    ws: Workspace, step: str, recipe: str, inputs: Mapping[str, Any], place: Callable[[str], tuple[str, str]], devices: int, gpu: Gpu | None,
    shown: str, usable: int | None,
) -> Reckoned:  # fmt: skip
    kind, address = place("base")
    seen = trainings.picture(recipe, inputs, address)
    if seen is not None:
        return _from_table(step, inputs, seen, devices, gpu, shown, usable)
    config = config_of(ws, kind, address)
    if config is None:
        where = f"the config.json of {address} is not here yet" if address else "no input `base` names a model"
        return Reckoned(step, None, where, shown, usable)
    try:
        model = read(config)
        other = config_of(ws, *place("reward_model"))
        training = trainings.text(recipe, inputs, model, devices=devices, reward=read(other) if other is not None else None)
        if training is None:
            return Reckoned(step, None, "the inputs do not say how long a sequence is", shown, usable)
        found = estimate(model, training)
    except Unknown as error:
        return Reckoned(step, None, str(error), shown, usable)
    seconds, basis = None, ""
    tokens = trainings.tokens(inputs, training)
    if gpu is not None and tokens is not None and not training.generating:
        seconds = hardware.seconds(figures(), gpu, hardware.operations(model, training, tokens), devices)
        basis = _basis("its arithmetic", gpu)
    return Reckoned(step, _learned(ws, found, recipe, step, gpu), "", shown, usable, seconds, basis)


def _from_table(
    step: str, inputs: Mapping[str, Any], seen: trainings.Picture, devices: int, gpu: Gpu | None, shown: str, usable: int | None
) -> Reckoned:
    seconds, basis = None, ""
    count = trainings.samples(inputs)
    if gpu is not None and count is not None:
        each = hardware.image_seconds(figures(), gpu, family=seen.family, method=seen.method, pixels=seen.resolution**2, devices=devices)
        seconds = (count * each[0], count * each[1]) if each is not None else None
        basis = _basis("what others published", gpu) if seconds is not None else ""
    row = hardware.fitting(
        figures().diffusion, family=seen.family, method=seen.method, resolution=seen.resolution, batch=seen.batch, rank=seen.rank,
        checkpointing=seen.checkpointing,
    )  # fmt: skip
    if row is None:
        case = f"{seen.family} {seen.method} at {seen.resolution} pixels, batch {seen.batch}, rank {seen.rank}"
        return Reckoned(step, None, f"nobody has published {case}", shown, usable, seconds, basis)
    size = round(row.gb * 1e9)
    # A peak that was published is of settings made to be small: less is not to be expected, and more where a case asks for less than its row.
    found = Estimate(size, round(size * 0.98), round(size * 1.1), (("as published", size),))
    return Reckoned(step, found, "", shown, usable, seconds, basis, source=row.source)


def _basis(what: str, gpu: Gpu) -> str:
    return f"{what} (nobody has checked the speed of {gpu.name})" if "tflops" in gpu.unchecked else what


def _gpu(gpu: Gpu | None, wants: Mapping[str, Any]) -> tuple[Gpu | None, str, int | None]:
    """The GPU that is meant, how it is shown, and bytes that can be used of it: by its kind, else by the memory that is asked for."""
    if gpu is None and wants.get("gpu"):
        gpu = figures().meant(str(wants["gpu"]), wants.get("gpu_memory"))
    if gpu is not None:
        return gpu, f"{gpu.name} ({gpu.memory:g} GB)", gpu.usable
    size = wants.get("gpu_memory")
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
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub")
    snapshots = Path(home) / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        commit = (snapshots.parent / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    folders = [snapshots / commit] if commit and (snapshots / commit).is_dir() else sorted(snapshots.glob("*"), key=os.path.getmtime, reverse=True)
    folders += sorted(ws.home.glob(f"cache/*/{os.path.basename(name)}"), key=os.path.getmtime, reverse=True)
    return next((config for folder in folders if (config := _config(folder)) is not None), None)


def fetched(address: object) -> bool:
    """Whether the config.json of a model of the Hub, a few kilobytes, is now in the Hub's cache, where it was not; offline nothing is asked."""
    if not isinstance(address, str) or not address.startswith("hf://") or os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    try:
        from huggingface_hub import hf_hub_download

        name, _, revision = address.removeprefix("hf://").partition("@")
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


def _learned(ws: Workspace, found: Estimate, recipe: str, step: str, gpu: Gpu | None) -> Estimate:
    """`found`, corrected by the mean of measured over reckoned in earlier runs of this step of `recipe`, on this kind of GPU where one is meant."""
    ratios, sizes, kinds = [], [], []
    for inputs, metrics in _attempts(ws, recipe, step):
        kind, size = metrics.get("gpu"), metrics.get("gpu_memory_gb", metrics.get("memory_gb"))
        if not isinstance(kind, str) or (gpu is not None and not _same(kind, gpu)):
            continue  # without a GPU the same name means main memory
        if not isinstance(size, (int, float)) or isinstance(size, bool) or size <= 0:
            continue
        base = str(inputs.get("base", ""))
        config = config_of(ws, "path", base) or config_of(ws, "hf", base)
        try:
            if config is None:
                continue
            model = read(config)
            training = trainings.text(recipe, inputs, model)
            if training is None:
                continue
            earlier = estimate(model, training)
        except Unknown:
            continue
        reckoned = earlier.bytes - dict(earlier.terms).get("CUDA", 0)
        ratios.append(size * 1e9 / reckoned)
        sizes.append(float(size))
        kinds.append(kind)
    if not ratios:
        return found
    count = len(ratios)
    span = f"{min(sizes):.1f}" if max(sizes) - min(sizes) < 0.05 else f"{min(sizes):.1f}-{max(sizes):.1f}"
    return calibrated(found, sum(ratios) / count, count, f"measured {span} GB on {kinds[-1]} in {count} run{'s' if count > 1 else ''}")


def _attempts(ws: Workspace, recipe: str, step: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Inputs and last metrics of earlier runs of a recipe in which `step` was done.  A step of a recipe that uses this one is not among them."""
    rows = ws.store.runs(recipe=recipe, last=LOOKED_AT)
    done = {row.id: [each.key for each in ws.store.attempts(row.id, step.rpartition("/")[2]) if each.outcome == "done" and each.key] for row in rows}
    traces = ws.store.traces([key for keys in done.values() for key in keys])
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for row in reversed(rows):
        for key in done[row.id]:
            if key in traces:
                found[key] = (row.inputs, traces[key].metrics)
    return list(found.values())


def _same(kind: str, gpu: Gpu) -> bool:
    try:
        return figures().find(kind) == gpu
    except NotFound:
        return False
