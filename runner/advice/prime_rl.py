"""What prime-rl's configuration says of the memory that its trainer takes.  Pure: the parsed TOML is handed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "prime-rl"
SEQ_LEN: Final = 2048  # trainer.py: ModelConfig.seq_len
RANK: Final = 16


def training_inputs(inputs: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of prime-rl@1, and beside them what its configuration and prime-rl's defaults say in the names that inputs of the library have.

    The trainer shards its weights over the GPUs that train, and keeps the state of its optimizer in main memory unless that is off.
    """
    model = _at(config, "trainer", "model")
    lora = model.get("lora")
    own = {
        "max_length": model.get("seq_len") or config.get("seq_len") or SEQ_LEN,
        "rank": (lora.get("rank") or RANK) if isinstance(lora, Mapping) else None,
    }
    given = {"max_length": inputs.get("seq_len"), "rank": inputs.get("rank")}
    told = {name: value for name, value in given.items() if value is not None}
    in_main_memory = model.get("optim_cpu_offload", True)
    return {
        **inputs,
        **own,
        **told,
        "optimizer": "paged_adamw" if in_main_memory else "adamw",
        "sharding": "fsdp",
    }


def training_gpus(inputs: Mapping[str, Any], config: Mapping[str, Any], devices: int) -> int:
    """How many of a step's GPUs train; the others generate."""
    told = inputs.get("train_gpus") or _at(config, "deployment").get("num_train_gpus") or 1
    return min(devices, told) if isinstance(told, int) else devices


def _at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The table at a path; an empty one where there is none."""
    for name in path:
        found = config.get(name)
        config = found if isinstance(found, Mapping) else {}
    return config
