"""Whether documents that share a sequence see each other in a model: asked of the model itself, not of a list of names.

`probe` asks a small model of the base's own configuration before anything is rented; `difference` asks any model, with the kernels that it has.
`asking` does the first in a process of its own, once for each configuration on a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-3
"""By how much the logits of a document may differ, in standard deviations of theirs, where it shares a sequence and where it is alone, in 32 bits.

Rounding makes some 1e-6.  Architectures that leak differ by 0.05 and more.
"""
HALF_TOLERANCE = 0.02  # … in 16 bits, between two sequences of equal shape, where rounding is equal too
SCALES = (1.0, 4.0, 16.0)  # of the weights as drawn: small ones hide a leak behind the residual stream
FACTORS = (32, 16, 8, 4, 2, 1)  # by which the widths of the base are divided, the first that makes a model
VOCABULARY = 128
MOST = 30_000_000  # weights of the small model
LONGEST = 12  # tokens of a document of the probe
EXPERTS, FEW_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 16
CHUNKS = ("chunk_size", "mamba_chunk_size")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
WIDTHS = re.compile(r"size|dim|rank|d_model|n_embd|n_inner|width|d_ff|d_head|d_inner|channels")
NO_SHAPE = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}  # of a configuration: they make no other model
COUNTS = re.compile(r"vocab|window|kernel|chunk|block|conv|patch|batch|group|position|num_|state|clip|token")


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probe found.  `difference` None: the base could not be asked, for the reason `why`."""

    difference: float | None
    layers: int = 0  # of the small model
    why: str = ""

    @property
    def leaks(self) -> bool:
        return self.difference is not None and self.difference > TOLERANCE

    def facts(self) -> dict[str, object]:
        """For a manifest, equal on every machine: rounding is no fact."""
        known = self.difference is not None
        return {
            "documents_see_each_other": self.leaks if known else None,
            "difference": float(f"{self.difference:.1g}") if self.leaks else 0.0 if known else None,
            "tolerance": TOLERANCE,
            "layers": self.layers,
            "why": self.why,
        }


@contextmanager
def asking(base: Path) -> Iterator[Callable[[], Finding]]:
    """Have `probe` asked while tokens are made, and yield what waits for its answer.

    To import torch takes longer than to make the tokens of a small data set, so it is another process that does, and what was found of a
    configuration is kept for the next time: in `$XDG_CACHE_HOME/recipe/packing`, or `~/.cache/recipe/packing`.
    """
    kept, found = _kept(base), None
    with suppress(OSError, ValueError, TypeError):
        found = Finding(**json.loads(kept.read_text()))
    if found is None and sys.modules.get("torch"):  # it is imported already
        found = probe(base)
        _keep(found, kept)
    if found is not None:
        yield lambda: found
        return
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads wait for each other longer than so small a model computes
    with subprocess.Popen([sys.executable, __file__, str(base)], stdout=subprocess.PIPE, text=True, env=alone) as job:
        try:
            yield lambda: _answer(job, kept)
        finally:
            job.kill()


def _kept(base: Path) -> Path:
    """Where the answer for a configuration is kept, by all that decides it."""
    config = {name: value for name, value in json.loads((base / "config.json").read_text()).items() if name not in NO_SHAPE}
    decides = json.dumps([config, version("torch"), version("transformers"), Path(__file__).read_text()], sort_keys=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "recipe" / "packing" / f"{hashlib.sha256(decides.encode()).hexdigest()}.json"


def _answer(job: subprocess.Popen[str], kept: Path) -> Finding:
    said, _ = job.communicate()
    if job.returncode:
        return Finding(None, why=f"the program that asks it ended with {job.returncode}")
    found = Finding(**json.loads(said))
    _keep(found, kept)
    return found


def _keep(found: Finding, kept: Path) -> None:
    """What is not known may be so for want of memory, and is asked again."""
    if found.difference is None:
        return
    with suppress(OSError):  # a disk without room costs a second the next time, and no more
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(found)))
        unfinished.replace(kept)


def probe(base: Path) -> Finding:
    """Ask a small model with a layer of each kind that the base has, in weights of several scales."""
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    why = ""
    try:
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        text = config.get_text_config(decoder=True)
        layers = _layers_of_each_kind(text)
    except Exception as error:  # configurations and models are programs of others
        return Finding(None, why=_short(error))
    for count in dict.fromkeys((layers, text.num_hidden_layers)):
        for factor in FACTORS:
            if (small := smaller(text.to_dict(), count, factor)) is None:
                continue
            try:
                with torch.random.fork_rng(devices=[]):
                    found = [_difference_at(type(text).from_dict(small), scale) for scale in SCALES]
            except Exception as error:
                why = why or _short(error)
                continue
            if finite := [each for each in found if each == each and each != float("inf")]:
                return Finding(max(finite), count)
    return Finding(None, why=why or "no small model of its configuration can be made")


def difference(model: torch.nn.Module, *, flat: bool = False) -> float:
    """By how much the logits of documents differ, in standard deviations, where others precede them in their sequence.

    `flat`: all documents in one row, as some kernels take them.
    """
    import torch

    device = next(model.parameters()).device
    one, other, alone = _documents(model, device, 0), _documents(model, device, 1), _documents(model, device, 2)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = [_second(model, first, alone, flat=flat) for first in (one, other)]
    finally:
        model.train(was_training)
    return _apart(*logits)


def difference_from_alone(model: torch.nn.Module) -> float:
    """By how much the logits of documents differ, in standard deviations, where they share a sequence and where they are alone."""
    import torch

    device = next(model.parameters()).device
    first, second = _documents(model, device, 0), _documents(model, device, 2)
    model.eval()
    with torch.no_grad():
        positions = torch.arange(LONGEST, device=device).expand_as(second)
        alone = model(input_ids=second, position_ids=positions, use_cache=False).logits.float()
        return _apart(_second(model, first, second, flat=False), alone)


def _difference_at(config: Any, scale: float) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    config._experts_implementation = "eager"  # the fast products of experts want wide ones
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"a small model of it would have {size} weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    return max(difference(model), difference_from_alone(model))


def _documents(model: torch.nn.Module, device: Any, seed: int) -> torch.Tensor:
    """Two documents, one for each of two rows."""
    import torch

    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(2, min(vocabulary, VOCABULARY), (2, LONGEST), generator=drawn).to(device)


def _second(model: torch.nn.Module, first: torch.Tensor, second: torch.Tensor, *, flat: bool) -> torch.Tensor:
    """The logits of the second document of each row, behind the first."""
    import torch

    tokens = torch.cat([first, second], 1)
    positions = torch.arange(LONGEST, device=tokens.device).repeat(2).expand_as(tokens)
    if flat:
        tokens, positions = tokens.reshape(1, -1), positions.reshape(1, -1)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits.reshape(2, 2 * LONGEST, -1)[:, LONGEST:].float()  # type: ignore[no-any-return]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.std().clamp_min(1e-30))


def _layers_of_each_kind(config: Any) -> int:
    """How many of the first layers have one of each kind."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == config.num_hidden_layers]
    if not lists:
        return int(config.num_hidden_layers)
    kinds = [json.dumps(list(_traits(layer))) for layer in lists[0]]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _traits(layer: torch.nn.Module) -> Iterator[object]:
    """What a layer is made of, but for its weights."""
    for name, part in layer.named_modules():
        said = {key: value for key, value in vars(part).items() if isinstance(value, str | bool | None)}
        yield [name, type(part).__name__, {key: said[key] for key in sorted(said)}]


def smaller(config: dict[str, Any], layers: int, factor: int) -> dict[str, Any] | None:
    """The configuration with its first layers alone, and its widths divided; None where they cannot be."""
    every = config.get("num_hidden_layers")
    made: dict[str, Any] = {}
    for name, value in config.items():
        if "vocab_size" in name and isinstance(value, int):
            made[name] = VOCABULARY
        elif name.endswith("token_id"):
            # The documents have other tokens than this one, and some configurations refuse to have none.
            made[name] = 0 if isinstance(value, int) else [0] if value else value
        elif _is_width(name, value):
            if value % factor or value // factor < 4:
                return None
            made[name] = value // factor
        elif name in EXPERTS and isinstance(value, int) and value > FEW_EXPERTS and value % FEW_EXPERTS == 0:
            made[name] = FEW_EXPERTS
        elif name in CHUNKS and isinstance(value, int):
            made[name] = min(value, 16)  # how much a kernel of a state space takes at once changes no result
        elif name in CHOSEN and isinstance(value, int):
            made[name] = min(value, 4)
        elif isinstance(value, list | str) and every and len(value) == every:
            made[name] = value[:layers]  # a kind for each layer
        elif isinstance(value, list) and re.search(r"layer|idx|ids", name) and all(isinstance(each, int) for each in value):
            made[name] = [each for each in value if each < layers]  # the layers of a kind
        else:
            made[name] = value
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(made.get(name), int):
            made[name] = layers
    return made


def _is_width(name: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 32 and bool(WIDTHS.search(name)) and not COUNTS.search(name)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]


if __name__ == "__main__":
    print(json.dumps(asdict(probe(Path(sys.argv[1])))))
