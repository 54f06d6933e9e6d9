"""Which trainer wrote a checkpoint, with how many processes, at which step, and what of it is missing.

Each layout lists what its trainer needs to go on in the same bits.  A folder in no known layout misses nothing that could be named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TEMPORARY = re.compile(
    r"^(?:\.?tmp[-_.].*|.*\.(?:tmp|temp|incomplete|unfinished|part|partial)|checkpoint-is-incomplete\.txt)$"
)
"""Names of what is still being written."""
RANKED = re.compile(r"^(?:rng_state_(\d+)\.pth|random_states_(\d+)\.pkl)$")
SHARDED = re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$")
ZERO = re.compile(r"(?:^|/)(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
ENGINE = re.compile(r"(?:^|/)(?:\w*zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt$")
"""What DeepSpeed writes instead of weights and optimizer, in a folder that the file `latest` names."""
PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})(\.\w+)$")
STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration)s?[-_=.]?(\d+)", re.IGNORECASE)
WEIGHTS = re.compile(
    r"^(?:model|pytorch_model|adapter_model|pytorch_lora_weights|diffusion_pytorch_model)(?:_\d+)?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)$"
    r"|^[^/]+/(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)$"
    r"|^pytorch_model_fsdp(?:_\d+)?(?:\.bin$|/)"
)
OPTIMIZER = re.compile(
    r"^(?:optimizer(?:_\d+)?\.(?:pt|bin)$|optimizer_\d+/|rank\d+-of-\d+-optimizer\.pt$)"
)
OPTIMIZER_SHARD = re.compile(r"^rank(\d+)-of-(\d+)-optimizer\.pt$")
OF_TRANSFORMERS = {
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
}
OF_ACCELERATE = {"optimizer.bin", "scheduler.bin", "sampler.bin"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint is laid out.  `world` is the number of processes that wrote it, None where its files do not tell."""

    kind: str
    world: int | None = None
    missing: tuple[str, ...] = ()


def layout(names: Collection[str], *, folder: str = "") -> Layout:
    """The layout of a checkpoint with these files (paths below it), in a folder of that name."""
    ranks = {int(match[1] or match[2]) for name in names if (match := RANKED.match(name))}
    missing = [*_parts(names), *_metadata(names)]
    if ranks and ranks != set(range(max(ranks) + 1)):
        missing.append(f"the random state of rank {min(set(range(max(ranks) + 1)) - ranks)}")
    shards = {
        int(match[1])
        for name in names
        for match in (ZERO.search(name) or SHARDED.search(name),)
        if match
    }
    world = len(ranks) or ("rng_state.pth" in names and 1) or (max(shards) + 1 if shards else None)
    if any(ZERO.search(name) for name in names) and shards != set(range(max(shards) + 1)):
        missing.append(f"the optimizer shard of rank {min(set(range(max(shards) + 1)) - shards)}")
    if parts := [
        (int(match[1]), int(match[2])) for name in names if (match := OPTIMIZER_SHARD.match(name))
    ]:
        world = max(of for _, of in parts)
        missing += [
            f"rank{rank}-of-{world}-optimizer.pt"
            for rank in range(world)
            if (rank, world) not in parts
        ]
    if OF_TRANSFORMERS & set(names) or any(name.startswith("rng_state_") for name in names):
        # rng_state_0.pth alone: with one process the file would have no number.
        if ranks == {0} and any(name.startswith("rng_state_") for name in names):
            missing.append("the random state of rank 1")
        return Layout(
            "transformers", world or None, (*missing, *_of_transformers(names, bool(ranks)))
        )
    if OF_ACCELERATE & set(names) or any(name.startswith("random_states_") for name in names):
        return Layout("accelerate", world or None, (*missing, *_of_accelerate(names, bool(ranks))))
    if re.fullmatch(r"checkpoint-\d+", folder) and any(WEIGHTS.match(name) for name in names):
        # Their name, their weights, and nothing of what comes after the weights: a trainer that was killed there.
        return Layout("transformers", None, (*missing, "trainer_state.json"))
    return Layout(
        "deepspeed"
        if any(ENGINE.search(name) for name in names)
        else "sharded"
        if shards
        else "files",
        world or None,
        tuple(missing),
    )


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None when its number counts something else, epochs say."""
    found = STEP.findall(name)
    return int(found[-1]) if found else None


def shape(names: Iterable[str]) -> set[str]:
    """The names with their numbers left out: what checkpoints of one training have in common."""
    return {re.sub(r"\d+", "0", name) for name in names}


def _of_transformers(names: Collection[str], ranked: bool) -> list[str]:
    missing = _model(names, "optimizer.pt")
    if "scheduler.pt" not in names and not any(ENGINE.search(name) for name in names):
        missing.append("scheduler.pt")
    if not ranked and "rng_state.pth" not in names:
        missing.append("rng_state.pth")
    if (
        any(name.startswith("adapter_model.") for name in names)
        and "adapter_config.json" not in names
    ):
        missing.append("adapter_config.json")
    return missing + [
        name for name in ("training_args.bin", "trainer_state.json") if name not in names
    ]


def _of_accelerate(names: Collection[str], ranked: bool) -> list[str]:
    missing = _model(names, "optimizer.bin")
    return missing if ranked else [*missing, "random_states_0.pkl"]


def _model(names: Collection[str], optimizer: str) -> list[str]:
    if any(ENGINE.search(name) for name in names):
        return [] if "latest" in names else ["latest"]
    missing = [] if any(WEIGHTS.match(name) for name in names) else ["its weights"]
    return missing if any(OPTIMIZER.match(name) for name in names) else [*missing, optimizer]


def _parts(names: Collection[str]) -> list[str]:
    """Parts of a split file that are not there."""
    missing = []
    for head, last, suffix in sorted(
        {(match[1], match[3], match[4]) for name in names if (match := PART.match(name))}
    ):
        wanted = [f"{head}-{part:05}-of-{last}{suffix}" for part in range(1, int(last) + 1)]
        missing += [name for name in (*wanted, f"{head}{suffix}.index.json") if name not in names][
            :3
        ]
    return missing


def _metadata(names: Collection[str]) -> list[str]:
    """Folders of torch's distributed checkpoints without the file that is written last."""
    folders = sorted({name.rpartition("/")[0] for name in names if SHARDED.search(name)})
    return [
        wanted for folder in folders if (wanted := f"{folder}/.metadata".lstrip("/")) not in names
    ]
