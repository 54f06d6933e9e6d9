"""Describe a model from its small files in a local folder, in the Hub's cache or on the Hub."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ...storage.buckets.hub import offline, snapshots
from . import GB, LARGE, contents

_PATIENCE: Final = 5.0  # timeout for the Hub, in seconds


def facts(
    folder: Path, address: str, template: Path | None = None, adapter: Path | None = None
) -> dict[str, object]:
    """Return the known facts of a model, read from its files.

    `template` is a chat template that replaces the model's own. `adapter` is a local folder with a
    LoRA adapter for the model.
    """
    found = _read_facts(folder, address, template)
    if adapter is None:
        return found | {"misfit": None}
    config = found.get("config")
    return found | {"misfit": _misfit(adapter, config)} if isinstance(config, dict) else found


def _read_facts(folder: Path, address: str, template: Path | None) -> dict[str, object]:
    given = (
        (contents(template, LARGE) or b"").decode(errors="replace")
        if template is not None
        else None
    )
    name = bare(address)
    if folder.is_dir():
        known: dict[str, object] = {
            "exists": True,
            "hub": False,
            "gated": False,
            "access": "granted",
        }
        weights = [
            path.stat().st_size
            for path in folder.glob("**/*")
            if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
        ]
        known["size"] = round(sum(weights) / GB, 3)
        known["weights"] = bool(weights)
        return known | _modules(folder) | _read_model(lambda file: contents(folder / file), given)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return {"exists": False, "hub": False} if not address.startswith("hf://") else {}
    hub = {"hub": True} | _ask_hub(name)
    snapshot = _find_snapshot(name)
    if snapshot is not None:
        return (
            {"exists": True}
            | hub
            | _modules(snapshot)
            | _read_model(lambda file: contents(snapshot / file), given)
        )
    return hub | (
        _read_model(partial(_download, name), given) if hub.get("access") == "granted" else {}
    )


def _read_model(read: Callable[[str], bytes | None], given: str | None) -> dict[str, object]:
    config, pipeline, tokens = (
        _mapping(read(name))
        for name in ("config.json", "model_index.json", "tokenizer_config.json")
    )
    found: dict[str, object] = {
        "pipeline": pipeline.get("_class_name") if pipeline else None,
        "adapter": _mapping(read(_ADAPTER)) or None,
    }
    if config:
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        architectures = config.get("architectures") or [None]
        found |= {
            "config": config,
            "architecture": architectures[0],
            "type": config.get("model_type"),
            "vision": "vision_config" in config
            or "visual" in config
            or str(architectures[0]).endswith("VisionModel"),
            "vocabulary": text.get("vocab_size"),
            "positions": text.get("max_position_embeddings"),
        }
    elif pipeline:
        found |= dict.fromkeys(("architecture", "type", "vocabulary", "positions")) | {
            "vision": False
        }
    if tokens:
        template = (
            given
            if given is not None
            else _template(tokens.get("chat_template"))
            or (read("chat_template.jinja") or b"").decode(errors="replace")
        )
        begin = _token(tokens.get("bos_token"))
        found |= {
            "pad": _token(tokens.get("pad_token")),
            "eos": _token(tokens.get("eos_token")),
            "chat_template": bool(template),
            "template_bos": bool(begin) and ("bos_token" in template or str(begin) in template),
            "adds_bos": bool(tokens.get("add_bos_token", False))
            or _adds_token(read("tokenizer.json"), begin),
        }
        if (
            template or given is None
        ):  # a template given by a tool's own template name cannot be read here
            found |= _find_turn_ends(template, tokens, config, read)
    return found


_ANSWER: Final = "the-answer-of-recipe"
_PIECES: Final = 10_000  # maximum parts of a rendered template
_MARKS: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def _find_turn_ends(
    template: str,
    tokens: Mapping[str, Any],
    config: Mapping[str, Any],
    read: Callable[[str], bytes | None],
) -> dict[str, object]:
    """Return the end-of-turn text of a chat template, and the stop tokens, if known."""
    added = {
        int(id): _token(each)
        for id, each in (tokens.get("added_tokens_decoder") or {}).items()
        if str(id).isdecimal()
    }
    if not added:
        added = {
            each["id"]: each["content"]
            for each in _mapping(read("tokenizer.json")).get("added_tokens") or ()
            if {"id", "content"} <= set(each)
        }
    found: dict[str, object] = {}
    ids = (_mapping(read("generation_config.json")) or config).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if all(id in added for id in listed):
        found["stops"] = [
            text
            for text in dict.fromkeys(
                (_token(tokens.get("eos_token")), *(added[id] for id in listed))
            )
            if text
        ]
    special = {
        name: _token(tokens.get(name))
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    if not template:
        found["turn_end"] = None
    elif (behind := _text_after_answer(template, special)) is not None:
        ends = [
            text
            for text in (*added.values(), special["eos_token"])
            if text and behind.startswith(text)
        ]
        found["turn_end"] = max(
            ends, key=len, default=behind.split()[0] if behind.startswith("<") else ""
        )
    return found


def _text_after_answer(template: str, special: Mapping[str, str | None]) -> str | None:
    """Return the text that a chat template writes after an assistant's answer.

    None if the template fails on a plain conversation.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": _ANSWER},
    ]
    names = {name: text for name, text in special.items() if text is not None}
    try:
        made = environment.from_string(_MARKS.sub("", template)).generate(
            messages=messages, add_generation_prompt=False, **names
        )
        _, answer, behind = "".join(islice(made, _PIECES)).rpartition(_ANSWER)
    except Exception:  # a template may raise any exception
        return None
    return behind.strip() if answer else None


def _template(value: object) -> str:
    """Return the chat template of a tokenizer_config.json, or the default of several templates."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _modules(folder: Path) -> dict[str, object]:
    """Return the names of all modules with weights, or nothing without local weight headers."""
    names = set(_mapping(contents(folder / "model.safetensors.index.json")).get("weight_map") or ())
    if not names and (folder / "model.safetensors").is_file():
        names = set(_tensors(folder / "model.safetensors"))
    return (
        {
            "modules": sorted(
                {
                    name.split(".")[-2]
                    for name in names
                    if name.endswith(".weight") and "." in name[:-7]
                }
            )
        }
        if names
        else {}
    )


_ADAPTER: Final = "adapter_config.json"
_READS: Final = re.compile(r"\.(\d+)\.\w+\.(?:[qkv]|gate|up)_proj\.lora_A\.")
"""A LoRA matrix on a linear layer with the hidden state as input; group 1 is the layer number."""


def _misfit(adapter: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a LoRA adapter does not fit the model, or None if no mismatch is found."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    width, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    for name, tensor in _tensors(adapter / "adapter_model.safetensors").items():
        if (found := _READS.search(name)) is None:
            continue
        reads = tensor["shape"][-1]
        if width is not None and reads != width:
            return (
                f"the adapter requires a model of width {reads}, but this model has width {width}"
            )
        if layers is not None and int(found[1]) >= layers:
            return (
                f"the adapter changes layer {int(found[1]) + 1}, but this model has {layers} layers"
            )
    return None


def _tensors(path: Path) -> dict[str, Any]:
    """Return the `dtype` and `shape` of each tensor from the header of a safetensors file."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            return (
                _mapping(file.read(min(struct.unpack("<Q", head)[0], 64 * LARGE)))
                if len(head) == 8
                else {}
            )
    except OSError:
        return {}


def _token(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _adds_token(data: bytes | None, begin: str | None) -> bool:
    """Return True if the tokenizer's post-processor adds the beginning-of-sequence token."""
    if not begin or not data:
        return False
    after = _mapping(data).get("post_processor")
    return begin in json.dumps(after, ensure_ascii=False) if after else False


def _mapping(data: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(data) if data else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _find_snapshot(name: str) -> Path | None:
    """Return the newest snapshot of a model in the local Hub cache; None if there is none."""
    try:
        return max(snapshots(name).iterdir(), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _ask_hub(name: str) -> dict[str, object]:
    """Return whether a model exists on the Hub, and the user's access to it.

    Empty if the Hub is offline or cannot be reached.
    """
    if offline(os.environ):
        return {}
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        return {}
    api: Any = HfApi()
    try:
        info = api.model_info(name, timeout=_PATIENCE, files_metadata=True)
    except GatedRepoError:
        return {"exists": True, "gated": True, "access": "refused" if _has_token() else "no token"}
    except RepositoryNotFoundError:
        return {"exists": False}
    except Exception as error:  # the HTTP client raises various errors without a network
        refused = getattr(getattr(error, "response", None), "status_code", None) == 401
        return {"access": "unknown token"} if refused and _has_token() else {}
    found: dict[str, object] = {"exists": True, "gated": bool(info.gated), "access": "granted"}
    sizes = [
        each.size
        for each in info.siblings or ()
        if each.size and each.rfilename.endswith((".safetensors", ".bin"))
    ]
    if info.siblings:
        found["weights"] = bool(sizes)
    if sizes:
        found["size"] = round(sum(sizes) / GB, 1)
    if info.gated:
        try:
            api.auth_check(name)
        except GatedRepoError:
            found["access"] = "refused" if _has_token() else "no token"
        except Exception:  # as above: unknown access
            del found["access"]
    return found


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _download(name: str, file: str) -> bytes | None:
    """Return a small file of a Hub model through the Hub's cache; None if it cannot be read."""
    from huggingface_hub import hf_hub_download

    try:
        return contents(Path(hf_hub_download(name, file, etag_timeout=_PATIENCE)))
    except Exception:  # a missing or unreachable file: the fact is unknown
        return None


def bare(address: str) -> str:
    return (
        address.removeprefix("hf://").partition("@")[0] if address.startswith("hf://") else address
    )
