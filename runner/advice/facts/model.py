"""Describe a model from its small files in a local folder, in the Hub's cache or on the Hub."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
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
    if not isinstance(config, dict):
        return found
    return found | {"misfit": _misfit(adapter, config)}


def _read_facts(folder: Path, address: str, template: Path | None) -> dict[str, object]:
    given = None if template is None else _decode(contents(template, LARGE))
    name = bare(address)
    if folder.is_dir():
        return (
            {"exists": True, "hub": False, "gated": False, "access": "granted"}
            | _measure_weights(folder)
            | _modules(folder)
            | _read_model(lambda file: contents(folder / file), given)
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return {} if address.startswith("hf://") else {"exists": False, "hub": False}
    hub = {"hub": True} | _ask_hub(name)
    snapshot = _find_snapshot(name)
    if snapshot is not None:
        return (
            {"exists": True}
            | hub
            | _modules(snapshot)
            | _read_model(lambda file: contents(snapshot / file), given)
        )
    if hub.get("access") != "granted":
        return hub
    return hub | _read_model(partial(_download, name), given)


def _measure_weights(folder: Path) -> dict[str, object]:
    """Return the size of a local model's weights in GB, and whether it has any."""
    sizes: list[int] = []
    for path in folder.glob("**/*"):
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file():
            sizes.append(path.stat().st_size)
    return {"size": round(sum(sizes) / GB, 3), "weights": bool(sizes)}


def _read_model(read: Callable[[str], bytes | None], given: str | None) -> dict[str, object]:
    config = _mapping(read("config.json"))
    pipeline = _mapping(read("model_index.json"))
    tokens = _mapping(read("tokenizer_config.json"))
    found: dict[str, object] = {
        "pipeline": pipeline.get("_class_name") if pipeline else None,
        "adapter": _mapping(read(_ADAPTER)) or None,
    }
    if config:
        found |= _describe_config(config)
    elif pipeline:
        found |= dict.fromkeys(("architecture", "type", "vocabulary", "positions"))
        found["vision"] = False
    if tokens:
        found |= _describe_tokens(tokens, config, read, given)
    return found


def _describe_config(config: Mapping[str, Any]) -> dict[str, object]:
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    architectures = config.get("architectures") or [None]
    has_vision = "vision_config" in config or "visual" in config
    return {
        "config": config,
        "architecture": architectures[0],
        "type": config.get("model_type"),
        "vision": has_vision or str(architectures[0]).endswith("VisionModel"),
        "vocabulary": text.get("vocab_size"),
        "positions": text.get("max_position_embeddings"),
    }


def _describe_tokens(
    tokens: Mapping[str, Any],
    config: Mapping[str, Any],
    read: Callable[[str], bytes | None],
    given: str | None,
) -> dict[str, object]:
    """Return the facts of a tokenizer_config.json and of the chat template, `given` or its own."""
    template = given
    if template is None:
        own = _template(tokens.get("chat_template"))
        template = own or _decode(read("chat_template.jinja"))
    begin = _token(tokens.get("bos_token"))
    has_setting = bool(tokens.get("add_bos_token", False))
    found: dict[str, object] = {
        "pad": _token(tokens.get("pad_token")),
        "eos": _token(tokens.get("eos_token")),
        "chat_template": bool(template),
        "template_bos": _writes_begin(template, begin),
        "adds_bos": has_setting or _adds_token(read("tokenizer.json"), begin),
    }
    # The template of a tool's own template name is no file that can be read here.
    if template or given is None:
        found |= _find_turn_ends(template, tokens, config, read)
    return found


def _writes_begin(template: str, begin: str | None) -> bool:
    """Return True if a chat template writes the beginning-of-sequence token."""
    if not begin:
        return False
    return "bos_token" in template or begin in template


def _decode(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
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
    added = _read_added_tokens(tokens, read)
    special = {name: _token(tokens.get(name)) for name in _SPECIAL_TOKENS}
    found: dict[str, object] = {}
    ids = (_mapping(read("generation_config.json")) or config).get("eos_token_id")
    if not isinstance(ids, list):
        ids = [] if ids is None else [ids]
    if all(id in added for id in ids):
        stops = dict.fromkeys([special["eos_token"], *(added[id] for id in ids)])
        found["stops"] = [text for text in stops if text]
    if not template:
        found["turn_end"] = None
        return found
    behind = _text_after_answer(template, special)
    if behind is not None:
        found["turn_end"] = _find_turn_end(behind, (*added.values(), special["eos_token"]))
    return found


def _read_added_tokens(
    tokens: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[int, str | None]:
    """Return the texts of a tokenizer's added tokens by their ids."""
    added: dict[int, str | None] = {}
    for id, each in (tokens.get("added_tokens_decoder") or {}).items():
        if str(id).isdecimal():
            added[int(id)] = _token(each)
    if added:
        return added
    for each in _mapping(read("tokenizer.json")).get("added_tokens") or ():
        if {"id", "content"} <= set(each):
            added[each["id"]] = each["content"]
    return added


def _find_turn_end(behind: str, tokens: Iterable[str | None]) -> str:
    """Return the longest token at the start of a text, or else a first word in angle brackets."""
    ends = [text for text in tokens if text and behind.startswith(text)]
    if ends:
        return max(ends, key=len)
    return behind.split()[0] if behind.startswith("<") else ""


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
    if not names:
        return {}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    # An adapter names the modules that it changes by the last part of their paths.
    inner = {module.rpartition(".")[2] for module in modules if "." in module}
    return {"modules": sorted(inner)}


_ADAPTER: Final = "adapter_config.json"
_READS: Final = re.compile(r"\.(\d+)\.\w+\.(?:[qkv]|gate|up)_proj\.lora_A\.")
"""A LoRA matrix on a linear layer with the hidden state as input; group 1 is the layer number."""


def _misfit(adapter: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a LoRA adapter does not fit the model, or None if no mismatch is found."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    width, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    for name, tensor in _tensors(adapter / "adapter_model.safetensors").items():
        found = _READS.search(name)
        if found is None:
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
            if len(head) < 8:
                return {}
            (size,) = struct.unpack("<Q", head)
            return _mapping(file.read(min(size, 64 * LARGE)))
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
    if not after:
        return False
    return begin in json.dumps(after, ensure_ascii=False)


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
        return {"exists": True, "gated": True, "access": _refused_access()}
    except RepositoryNotFoundError:
        return {"exists": False}
    except Exception as error:  # the HTTP client raises various errors without a network
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401 and _has_token():
            return {"access": "unknown token"}
        return {}
    access = _check_access(api, name) if info.gated else "granted"
    found: dict[str, object] = {"exists": True, "gated": bool(info.gated)}
    if access is not None:
        found["access"] = access
    if info.siblings:
        found |= _measure_hub_weights(info.siblings)
    return found


def _check_access(api: Any, name: str) -> str | None:
    """Return the user's access to a gated model; None if the Hub does not say."""
    from huggingface_hub.errors import GatedRepoError

    try:
        api.auth_check(name)
    except GatedRepoError:
        return _refused_access()
    except Exception:  # as in _ask_hub
        return None
    return "granted"


def _measure_hub_weights(files: Iterable[Any]) -> dict[str, object]:
    """Return whether files on the Hub have weights, and their size in GB."""
    weights = [each for each in files if each.rfilename.endswith((".safetensors", ".bin"))]
    sizes = [each.size for each in weights if each.size]
    if not sizes:
        return {"weights": False}
    return {"weights": True, "size": round(sum(sizes) / GB, 1)}


def _refused_access() -> str:
    """Return the access of a user whom a gated model refuses."""
    return "refused" if _has_token() else "no token"


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
    """Return the name of a model on the Hub without its revision, or a path unchanged."""
    if not address.startswith("hf://"):
        return address
    return address.removeprefix("hf://").partition("@")[0]
