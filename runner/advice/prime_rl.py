"""Read prime-rl's configuration for memory estimates, and find invalid values.  Pure.

`recipes/trainers/prime_guard.py` checks the same values of `prime-rl@1` at run time, and does not
import this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

NAME: Final = "prime-rl"
SEQ_LEN: Final = 2048  # trainer.py: ModelConfig.seq_len
RANK: Final = 16
_WHOLE: Final = (
    "max_steps",
    "seq_len",
    "trainer.model.seq_len",
    "trainer.model.lora.rank",
    "orchestrator.seq_len",
    "orchestrator.batch_size",
    "orchestrator.token_batch_size",
    "orchestrator.group_size",
    "orchestrator.train.sampling.max_completion_tokens",
    "ckpt.interval",
    "deployment.num_train_gpus",
    "deployment.num_infer_gpus",
    "deployment.gpus_per_node",
)
_TABLES: Final = (
    "trainer",
    "trainer.model",
    "trainer.model.lora",
    "trainer.optim",
    "trainer.data",
    "trainer.loss",
    "orchestrator",
    "orchestrator.train",
    "orchestrator.train.sampling",
    "orchestrator.algo",
    "orchestrator.eval",
    "inference",
    "ckpt",
    "monitors",
    "model",
    "weight_broadcast",
    "deployment",
)
_SOURCE: Final = "orchestrator.train.source"
_ALIKE: Final = 0.85
"""Similarity, 0 to 1, from which an unknown key counts as a misspelt known key."""


def training_inputs(inputs: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of prime-rl@1 plus its configuration under the library's input names.

    The trainer shards weights over its GPUs, and offloads optimizer state to CPU memory by default.
    """
    model = _at(config, "trainer", "model")
    lora = model.get("lora")
    rank = None
    if isinstance(lora, Mapping):
        rank = lora.get("rank") or RANK
    length = model.get("seq_len") or config.get("seq_len") or SEQ_LEN
    own = {"max_length": length, "rank": rank}
    given = {"max_length": inputs.get("seq_len"), "rank": inputs.get("rank")}
    told = {name: value for name, value in given.items() if value is not None}
    in_main_memory = model.get("optim_cpu_offload", True)
    optimizer = "paged_adamw" if in_main_memory else "adamw"
    return {
        **inputs,
        **own,
        **told,
        "optimizer": optimizer,
        "sharding": "fsdp",
    }


def training_gpus(inputs: Mapping[str, Any], config: Mapping[str, Any], devices: int) -> int:
    """Return the number of a step's GPUs used for training. The others run inference."""
    told = inputs.get("train_gpus") or _at(config, "deployment").get("num_train_gpus") or 1
    return min(devices, told) if isinstance(told, int) else devices


def find_mistyped(config: Mapping[str, Any]) -> list[str]:
    """Return a message for each configuration value with a wrong type."""
    found = dict(_values(config))
    wrong: list[str] = []
    for path in _TABLES:
        if path in found and not isinstance(found[path], Mapping):
            wrong.append(f"{path} must be a section, not {found[path]!r}")
    for path in _WHOLE:
        if path in found and not _is_count(found[path]):
            wrong.append(f"{path} must be a whole number, 1 or greater, not {found[path]!r}")
    if not isinstance(found.get(_SOURCE, []), list):
        wrong.append(f"{_SOURCE} must be a list of environments: [[{_SOURCE}]]")
    return wrong


def find_near_misses(config: Mapping[str, Any]) -> list[str]:
    """Return a message for each key that looks like a misspelt known key."""
    known = {*_WHOLE, *_TABLES, _SOURCE}
    names_below: dict[str, list[str]] = {}
    for path in known:
        above, _, name = path.rpartition(".")
        names_below.setdefault(above, []).append(name)
    told: list[str] = []
    for path, _ in _values(config):
        above, _, name = path.rpartition(".")
        if not above or path in known:
            continue
        close = difflib.get_close_matches(name, names_below.get(above, ()), 1, _ALIKE)
        if close:
            told.append(f"{path}: did you mean {close[0]}?")
    return told


def _is_count(value: object) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= 1


def _values(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every configuration path with its value, including tables."""
    for name, value in config.items():
        path = f"{above}.{name}" if above else name
        yield path, value
        if isinstance(value, Mapping):
            yield from _values(value, path)


def _at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the table at a configuration path, or an empty table."""
    for name in path:
        found = config.get(name)
        config = found if isinstance(found, Mapping) else {}
    return config
