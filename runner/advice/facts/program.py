"""Describe the program of a step: launcher, tool, imports and configuration.  Runs nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import Invalid
from ...language import document
from ...language.python_reader import last_name, of_tree
from ..tool_settings import Setting
from . import LARGE, contents

if TYPE_CHECKING:
    from ...survey.survey import Survey

CONFIGS: Final = (".yaml", ".yml", ".toml", ".json")


def derive_settings(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield common settings that tools express in other ways.

    For example, `bf16: true` sets the precision, and a LoRA module means that adapters are used.
    """
    for each in settings:
        if each.key in ("bf16", "fp16") and each.value is True:
            yield each._replace(key="precision", value=each.key)
        elif each.key == "network_module" and "lora" in str(each.value):
            yield each._replace(key="use_peft", value=True)
        elif (each.key, each.value) in (("flash_attention", True), ("flash_attn", "fa2")):
            yield each._replace(key="attention", value="flash_attention_2")
        elif each.key == "seq_len":
            yield each._replace(key="config_seq_len")


_OF_PRIME: Final = ("rl", "prime-rl")
"""Commands that take a configuration file after `@`."""
_METHODS: Final = ("sft", "dpo", "orpo", "kto", "cpo", "grpo", "rloo", "ppo", "reward", "cpt")


def find_method(line: Sequence[str]) -> str | None:
    """Return the training method found in the names of the started programs, or None."""
    for word in line[:12]:
        if not word.startswith("-"):
            for part in _split_name(word):
                if part in _METHODS:
                    return part
    return None


def _split_name(path: str) -> list[str]:
    """Split the last part of a path into words: `run_sft.py` has `run`, `sft` and `py`."""
    return re.split(r"[^a-z]+", path.rpartition("/")[2].lower())


def is_named_training(names: Sequence[str]) -> bool:
    """Return True if a step's or program's name suggests a training.

    For example `train`, `my_train.py`, `trl sft` or `rl @ rl.toml`.
    """
    if _starts_prime_rl(names):
        return True
    if any("train" in _split_name(name) for name in names):
        return True
    return _has_method(names[1:])


def _starts_prime_rl(names: Sequence[str]) -> bool:
    """Return True if words start a program of prime-rl with its configuration, as `rl @ rl.toml`."""
    heads = (name.rpartition("/")[2] for name in names)
    return any(head in _OF_PRIME and after.startswith("@") for head, after in pairwise(heads))


def _has_method(words: Sequence[str]) -> bool:
    """Return True if the name of a training method comes before the first option."""
    for word in words:
        if word.startswith("-"):
            return False  # the next word may be the option's value
        if word in _METHODS:
            return True
    return False


def find_launcher(line: Sequence[str], tools: Sequence[str]) -> str:
    heads = [word.rpartition("/")[2] for word in line[:4]]
    for word in heads:
        if word.startswith("accelerate"):
            return "accelerate"
        if word in ("torchrun", "deepspeed", "uv", "srun", "mpirun"):
            return word
        if word in ("trl", "axolotl", "llamafactory-cli", "simpletuner", "unsloth"):
            return word
    first = heads[0] if heads else ""
    is_python = first.startswith("python") or first.endswith(".py")
    return "python" if is_python else "other"


def find_logins() -> list[str]:
    """Return the services with stored credentials of this user: `wandb`, `huggingface`."""
    home = Path.home()
    hub = Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface") / "token"
    found: list[str] = []
    if b"wandb" in (contents(home / ".netrc", LARGE) or b""):
        found.append("wandb")
    if hub.is_file():
        found.append("huggingface")
    return found


def parse_config(name: str, data: bytes) -> object:
    """Return the content of a configuration file.

    Raises ValueError with a message for the user.
    """
    if name.endswith(".toml"):
        return tomllib.loads(data.decode("utf-8"))
    if name.endswith(".json"):
        return json.loads(data)

    try:
        return document.parse(data, name).value
    except Invalid as error:
        first = error.problems[0]
        line = f", line {first.where.line}" if first.where else ""
        raise ValueError(first.message + line) from None


def read_code(found: Survey, n: int) -> tuple[list[str], list[str]]:
    """Return the modules imported by a step's Python files, and keywords of configuration objects.

    Keywords are collected from calls of names that end with Config or Arguments.
    """
    node = found.plan.nodes[n]
    imports: dict[str, None] = {}
    keywords: dict[str, None] = {}
    home = Path(found.plan.homes[node.home])
    for pattern in node.code:
        for name, content in found.facts.code.get((node.home, pattern)) or ():
            if name.endswith(".py"):
                one, two = _read_module(str(home / name), content)
                imports.update(dict.fromkeys(one))
                keywords.update(dict.fromkeys(two))
    return list(imports), list(keywords)


@lru_cache(maxsize=256)
def _read_module(path: str, content: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the imports and configuration keywords of one file. `content` is for the cache key."""
    try:
        data = Path(path).read_bytes()
        tree = ast.parse(data[:LARGE], path) if len(data) <= LARGE else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return (), ()
    keywords = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func).endswith(("Arguments", "Config")):
            keywords += [word.arg for word in node.keywords if word.arg]
    return of_tree(tree).module_names, tuple(keywords)
