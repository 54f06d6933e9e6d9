"""Checkpoint layouts: find the trainer, process count, step and missing files of a checkpoint.

Each layout lists the files that its trainer needs for an exact resume. A directory without a known
layout has no missing files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TEMPORARY = re.compile(
    r"^(?:\.?tmp[-_.].*|.*\.(?:tmp|temp|incomplete|unfinished|part|partial)|checkpoint-is-incomplete\.txt)$"
)
"""Name pattern of temporary files during a checkpoint save."""
RANKED = re.compile(r"^(?:rng_state_(\d+)\.pth|random_states_(\d+)\.pkl)$")
SHARDED = re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$")
ZERO = re.compile(r"(?:^|/)(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
ENGINE = re.compile(r"(?:^|/)(?:\w*zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt$")
"""Name pattern of DeepSpeed's files for weights and optimizer state.

They are in the directory named by the file `latest`.
"""
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
    """Layout of a checkpoint: trainer, process count and missing files.

    `processes` is the number of training processes that wrote the checkpoint, None if unknown.
    """

    kind: str
    processes: int | None = None
    missing: tuple[str, ...] = ()


def recognize_layout(names: Collection[str], *, folder: str = "") -> Layout:
    """Return the layout of a checkpoint, from its relative file names and its directory name.

    The files of the outermost library decide.  The transformers trainer uses accelerate, so that
    its checkpoint may also have files of accelerate, and both may have the shards of DeepSpeed or
    torch.
    """
    ranks = _numbers(RANKED, names)
    zero_shards = _numbers(ZERO, names)
    shards = zero_shards | _numbers(SHARDED, names)
    optimizer_shards = _optimizer_shards(names)
    missing = [*_missing_parts(names), *_missing_metadata(names)]
    missing += _missing_rank(ranks, "the random state")
    if zero_shards:
        missing += _missing_rank(shards, "the optimizer shard")
    processes = _process_count(names, ranks, shards)
    if optimizer_shards:
        processes = max(count for _, count in optimizer_shards)
        missing += _missing_optimizer_shards(optimizer_shards, processes)
    if OF_TRANSFORMERS & set(names) or _any_starts(names, "rng_state_"):
        # rng_state_0.pth alone: a single process would write a file without a number.
        if ranks == {0} and _any_starts(names, "rng_state_"):
            missing.append("the random state of rank 1")
        return Layout(
            "transformers", processes, (*missing, *_missing_of_transformers(names, bool(ranks)))
        )
    if OF_ACCELERATE & set(names) or _any_starts(names, "random_states_"):
        return Layout(
            "accelerate", processes, (*missing, *_missing_of_accelerate(names, bool(ranks)))
        )
    if re.fullmatch(r"checkpoint-\d+", folder) and any(WEIGHTS.match(name) for name in names):
        # The directory name and the weights are the trainer's, but every file that it writes after
        # the weights is missing: the trainer was killed during the save.
        return Layout("transformers", None, (*missing, "trainer_state.json"))
    return Layout(_kind_of_shards(names, shards), processes, tuple(missing))


def _missing_optimizer_shards(shards: Collection[tuple[int, int]], processes: int) -> list[str]:
    """List the missing optimizer shards; `shards` are the ranks and counts of those there."""
    missing = []
    for rank in range(processes):
        if (rank, processes) not in shards:
            missing.append(f"rank{rank}-of-{processes}-optimizer.pt")
    return missing


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    """Return the numbers that a pattern finds in file names."""
    numbers = set()
    for name in names:
        if match := pattern.search(name):
            # Each alternative of the pattern has a group, and only one of them has matched.
            numbers.add(int(next(filter(None, match.groups()))))
    return numbers


def _optimizer_shards(names: Iterable[str]) -> set[tuple[int, int]]:
    """Return the rank and the number of ranks of each optimizer shard that accelerate wrote."""
    shards = set()
    for name in names:
        if match := OPTIMIZER_SHARD.match(name):
            shards.add((int(match[1]), int(match[2])))
    return shards


def _any_starts(names: Iterable[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _missing_rank(ranks: Collection[int], what: str) -> list[str]:
    """Describe the lowest missing rank below the highest existing rank, as a list."""
    absent = set(range(max(ranks, default=-1) + 1)) - set(ranks)
    return [f"{what} of rank {min(absent)}"] if absent else []


def _process_count(
    names: Collection[str], ranks: Collection[int], shards: Collection[int]
) -> int | None:
    if ranks:
        return len(ranks)
    if "rng_state.pth" in names:
        return 1
    return max(shards) + 1 if shards else None


def _is_deepspeed(names: Iterable[str]) -> bool:
    """Return True if a checkpoint has files of a DeepSpeed engine."""
    return any(ENGINE.search(name) for name in names)


def _kind_of_shards(names: Collection[str], shards: Collection[int]) -> str:
    if _is_deepspeed(names):
        return "deepspeed"
    return "sharded" if shards else "files"


def step_of(name: str) -> int | None:
    """Return the training step in a checkpoint's name; None without a step.

    A name may have another number, for example of an epoch.
    """
    found = STEP.findall(name)
    return int(found[-1]) if found else None


def shape(names: Iterable[str]) -> set[str]:
    """Replace the numbers in file names by 0, to compare the checkpoints of one training run."""
    return {re.sub(r"\d+", "0", name) for name in names}


def _missing_of_transformers(names: Collection[str], ranked: bool) -> list[str]:
    needed = []
    if not _is_deepspeed(names):
        needed.append("scheduler.pt")
    if not ranked:
        needed.append("rng_state.pth")
    if _any_starts(names, "adapter_model."):
        needed.append("adapter_config.json")
    needed += ["training_args.bin", "trainer_state.json"]
    return [*_missing_model(names, "optimizer.pt"), *_find_missing(needed, names)]


def _missing_of_accelerate(names: Collection[str], ranked: bool) -> list[str]:
    missing = _missing_model(names, "optimizer.bin")
    return missing if ranked else [*missing, "random_states_0.pkl"]


def _missing_model(names: Collection[str], optimizer: str) -> list[str]:
    """List missing weights and a missing optimizer file of a checkpoint."""
    if _is_deepspeed(names):
        return [] if "latest" in names else ["latest"]
    missing = []
    if not any(WEIGHTS.match(name) for name in names):
        missing.append("its weights")
    if not any(OPTIMIZER.match(name) for name in names):
        missing.append(optimizer)
    return missing


def _missing_parts(names: Collection[str]) -> list[str]:
    """List the missing parts of split files in a checkpoint, at most three per file."""
    split_files = set()
    for name in names:
        if match := PART.match(name):
            split_files.add((match[1], match[3], match[4]))
    missing = []
    for head, last, suffix in sorted(split_files):
        wanted = [f"{head}-{part:05}-of-{last}{suffix}" for part in range(1, int(last) + 1)]
        wanted.append(f"{head}{suffix}.index.json")
        missing += _find_missing(wanted, names)[:3]
    return missing


def _missing_metadata(names: Collection[str]) -> list[str]:
    """List missing `.metadata` files, which torch's distributed checkpoints write last."""
    folders = sorted({name.rpartition("/")[0] for name in names if SHARDED.search(name)})
    wanted = [f"{folder}/.metadata".lstrip("/") for folder in folders]
    return _find_missing(wanted, names)


def _find_missing(wanted: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the wanted names that are not in `names`."""
    return [name for name in wanted if name not in names]
