"""Step `gguf` of export@1: have llama.cpp's converter write a model folder as one GGUF file, and read that back.  Converts nothing itself."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What the converter's last words mean to who chose the model: a part of them, and what to say.
MEANINGS = (
    (
        "pre-tokenizer was not recognized",
        "llama.cpp does not know this tokenizer: it tells byte-pair tokenizers by what they make of one text, and knows those of published models."
        "  A vocabulary of one's own can be no GGUF of this kind",
    ),
    ("is not supported", "llama.cpp has no such architecture at the commit that this recipe pins"),
    ("sentencepiece", "the converter needs the package sentencepiece: pip install sentencepiece"),
)


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.name}-{options.type}.gguf"
    done = subprocess.run(command(options.converter, options.model, file, options.type, options.name), capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, end="")
    if done.returncode:
        sys.exit(f"gguf: {why(done.stdout + done.stderr, done.returncode)}")
    told = read(file)
    if wrong := compare(told, json.loads((options.model / "config.json").read_text())):
        sys.exit(f"gguf: {file.name} is not the model: {'; '.join(wrong)}")
    options.report.write_text(json.dumps(told, indent=2) + "\n")
    print(f"gguf: {file.name}, {file.stat().st_size / 1e6:.1f} MB, {told['architecture']}, {told['tensors']} tensors, {told['vocabulary']} tokens")


def command(converter: Path, model: Path, file: Path, kind: str, name: str) -> list[str]:
    """The words that start llama.cpp's convert_hf_to_gguf.py."""
    return [sys.executable, str(converter), str(model), "--outfile", str(file), "--outtype", kind, "--model-name", name]


def why(said: str, code: int) -> str:
    """What the converter's failure means, with its own last line."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"exit code {code}")
    meant = next((meaning for part, meaning in MEANINGS if part in said), "llama.cpp's converter failed; what it said stands above")
    return f"{meant} ({last})"


def read(file: Path) -> dict[str, Any]:
    """What a GGUF file says of itself: its metadata but the vocabulary, and the numbers of its tensors, weights and tokens."""
    from gguf import GGUFReader

    found = GGUFReader(str(file))
    values = {name: field.contents() for name, field in found.fields.items() if not name.startswith(("GGUF.", "tokenizer.ggml.tokens"))}
    return {
        "file": file.name,
        "bytes": file.stat().st_size,
        "architecture": values["general.architecture"],
        "tensors": len(found.tensors),
        "parameters": sum(int(tensor.n_elements) for tensor in found.tensors),
        "vocabulary": len(found.fields["tokenizer.ggml.tokens"].data),
        "metadata": {name: value for name, value in values.items() if not isinstance(value, Sequence) or isinstance(value, str)},
    }


def compare(told: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Where a GGUF file says other than the model's configuration."""
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(inner, dict)
    metadata, kind = told["metadata"], told["architecture"]
    pairs = (
        ("layers", inner.get("num_hidden_layers"), metadata.get(f"{kind}.block_count")),
        ("width", inner.get("hidden_size"), metadata.get(f"{kind}.embedding_length")),
        ("heads", inner.get("num_attention_heads"), metadata.get(f"{kind}.attention.head_count")),
    )
    return [
        f"{wanted} {what} in config.json, {there} in the file" for what, wanted, there in pairs if None not in (wanted, there) and wanted != there
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--converter", type=Path, required=True, help="llama.cpp's convert_hf_to_gguf.py, with what is beside it")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--type", required=True, help="how weights are stored, by the converter's name")
    parser.add_argument("--name", required=True, help="the model's name, in the file and of the file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    # The converter reads the folder alone.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
