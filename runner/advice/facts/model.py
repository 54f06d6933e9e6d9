"""Tell what a model is from its own small files: those of a folder here, of the Hub's cache, or of the Hub.  Reads no weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from . import GB, contents

_PATIENCE: Final = 5.0  # seconds for an answer of the Hub


def facts(folder: Path, address: str) -> dict[str, object]:
    """What a model's own files say: those of a folder here, of the Hub's cache, or of the Hub.  What is not to be had is left out: unknown."""
    name = bare(address)
    if folder.is_dir():
        known: dict[str, object] = {"exists": True, "hub": False, "gated": False, "access": "granted"}
        weights = [path.stat().st_size for path in folder.glob("**/*") if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()]
        known["size"] = round(sum(weights) / GB, 3)
        return known | _read_model(lambda file: contents(folder / file))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return {"exists": False, "hub": False} if not address.startswith("hf://") else {}
    hub = {"hub": True} | _ask_hub(name)
    snapshot = _cached(name)
    if snapshot is not None:
        return {"exists": True} | hub | _read_model(lambda file: contents(snapshot / file))
    return hub | (_read_model(partial(_fetched, name)) if hub.get("access") == "granted" else {})


def _read_model(read: Callable[[str], bytes | None]) -> dict[str, object]:
    config, pipeline, tokens = (_mapping(read(name)) for name in ("config.json", "model_index.json", "tokenizer_config.json"))
    found: dict[str, object] = {"pipeline": pipeline.get("_class_name") if pipeline else None}
    if config:
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        architectures = config.get("architectures") or [None]
        found |= {
            "config": config,
            "architecture": architectures[0],
            "type": config.get("model_type"),
            "vision": "vision_config" in config or "visual" in config or str(architectures[0]).endswith("VisionModel"),
            "vocabulary": text.get("vocab_size"),
            "positions": text.get("max_position_embeddings"),
        }
    elif pipeline:
        found |= dict.fromkeys(("architecture", "type", "vocabulary", "positions")) | {"vision": False}
    if tokens:
        template = tokens.get("chat_template") or (read("chat_template.jinja") or b"").decode(errors="replace")
        begin = _token(tokens.get("bos_token"))
        found |= {
            "pad": _token(tokens.get("pad_token")),
            "eos": _token(tokens.get("eos_token")),
            "chat_template": bool(template),
            "template_bos": bool(begin) and ("bos_token" in str(template) or str(begin) in str(template)),
            "adds_bos": bool(tokens.get("add_bos_token", False)) or _adds(read("tokenizer.json"), begin),
        }
    return found


def _token(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _adds(data: bytes | None, begin: str | None) -> bool:
    """Whether the tokenizer's own post-processor puts the beginning token in front."""
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


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the Hub's cache here."""
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub")
    folder = Path(home) / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        return max(folder.iterdir(), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _ask_hub(name: str) -> dict[str, object]:
    """Whether there is such a model, and whether it may be read.  Nothing where the Hub may not, or cannot, be asked."""
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True", "ON"):
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
    except Exception as error:  # its HTTP client has its own ways to say that there is no network
        refused = getattr(getattr(error, "response", None), "status_code", None) == 401
        return {"access": "unknown token"} if refused and _has_token() else {}
    found: dict[str, object] = {"exists": True, "gated": bool(info.gated), "access": "granted"}
    sizes = [each.size for each in info.siblings or () if each.size and each.rfilename.endswith((".safetensors", ".bin"))]
    if sizes:
        found["size"] = round(sum(sizes) / GB, 1)
    if info.gated:
        try:
            api.auth_check(name)
        except GatedRepoError:
            found["access"] = "refused" if _has_token() else "no token"
        except Exception:  # as above: not known
            del found["access"]
    return found


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _fetched(name: str, file: str) -> bytes | None:
    """A small file of a model of the Hub, by way of its cache."""
    from huggingface_hub import hf_hub_download

    try:
        return contents(Path(hf_hub_download(name, file, etag_timeout=_PATIENCE)))
    except Exception:  # not there, or not to be had: the fact is unknown
        return None


def bare(address: str) -> str:
    return address.removeprefix("hf://").partition("@")[0] if address.startswith("hf://") else address
