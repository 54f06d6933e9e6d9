"""Step `merge` of export@1: an adapter and its base, or a whole model, as one folder of safetensors shards, which is read back and compared.

Trains and judges nothing.  What is compared: the logits of the adapter on its base and those of the folder, over the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import model_card
import model_folder
import text_record
from text_export import TOKENIZER, stop_at

# Of the largest difference of two logits, as a share of the deviation of all.  In 16 bits each merged weight is rounded once more, to 8 or 11 bits.
TOLERANCE = {"no": 1e-3, "fp16": 0.05, "bf16": 0.3}
NAMES = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}
SEEN = 64  # tokens that are compared


def main() -> None:
    options = _options()
    try:
        folder = model_folder.read(options.model, options.base)
        model_folder.mergeable(folder)
        precision = options.precision if options.precision != "auto" else _kept(folder.base or folder.model)
        told = export(folder, precision, options.shard_size, options.out)
    except model_folder.Unfit as unfit:
        sys.exit(f"merge: {unfit}")
    _describe(folder, options.out, options.recipe, told)
    options.report.write_text(json.dumps(told, indent=2) + "\n")
    kind = "merged" if folder.base else "as it was"
    print(f"merge: {kind}, {told['shards']} shards, {told['bytes'] / 1e6:.1f} MB; logits differ by {told['difference']:.1e} of their deviation")
    if told["effect"] is not None and told["difference"] > told["effect"] / 2:
        hint = "" if told["precision"] == "no" else "; precision=no merges in 32 bits"
        print(f"merge: the adapter moves them by no more than {told['effect']:.1e}: rounding loses much of it{hint}")


def export(folder: model_folder.Folder, precision: str, shard_size: str, out: Path) -> dict[str, Any]:
    """Write the model to `out` and read it back.  What was written and how near it is comes back.  Raises Unfit where it is not near enough."""
    model = model_folder.load(folder, precision)
    before = _logits(model)
    effect = _apart(_alone(model), before) if folder.base else None
    shared = _shared(model)
    whole: Any = model.merge_and_unload() if folder.base else model  # type: ignore[operator]
    out.mkdir(parents=True, exist_ok=True)
    whole.save_pretrained(str(out), max_shard_size=shard_size)
    _tokenizer(folder, out)
    del model, whole
    gc.collect()  # two such models at once are more than most machines hold
    again = model_folder.load(model_folder.read(out, None), precision)
    difference = _apart(_logits(again), before)
    if not difference <= TOLERANCE[precision]:
        why = (
            f"the base uses one matrix for {shared[0]} and {shared[1]}, and the adapter changes it in one of these uses: no merged model can. Load"
            " the adapter on its base"
            if shared
            else "precision=no merges in 32 bits"
            if precision != "no"
            else "this was in 32 bits: what peft merges is not what it computes with such an adapter. Load the adapter on its base"
        )
        apart = f"the logits of what was written differ from those before by {difference:.2g} of their deviation"
        raise model_folder.Unfit(f"{apart}, more than {TOLERANCE[precision]:g}: {why}")
    files = sorted(out.glob("*.safetensors"))
    return {
        "merged": folder.base is not None,
        "precision": precision,
        "parameters": again.num_parameters(),
        "shards": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "difference": difference,
        "effect": effect,
        "tolerance": TOLERANCE[precision],
        "tokens_compared": SEEN,
    }


def _logits(model: Any) -> Any:
    import torch

    model.eval()
    size = model.config.get_text_config().vocab_size
    # Any tokens do: what is compared is arithmetic, and these are the same for every model of this vocabulary.
    ids = torch.randint(size, (1, SEEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def _alone(adapted: Any) -> Any:
    """The logits of the base below an adapter."""
    with adapted.disable_adapter():
        return _logits(adapted)


def _shared(adapted: Any) -> list[str]:
    """The two uses of one matrix that the adapter changes in one of them only; empty where there are none."""
    uses = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    layers = [getattr(module, "base_layer", module) for module in uses]
    if None in uses or layers[0].weight is not layers[1].weight or all(module is layer for module, layer in zip(uses, layers, strict=True)):
        return []
    return [name.rpartition(".")[2] for module in uses for name, each in adapted.named_modules() if each is module]


def _apart(one: Any, other: Any) -> float:
    """The largest difference, as a share of the deviation of the second."""
    return float((one - other).abs().max() / other.std())


def _kept(folder: Path) -> str:
    """The precision in which a model's weights lie."""
    config = json.loads((folder / "config.json").read_text())
    return NAMES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), "no")


def _tokenizer(folder: model_folder.Folder, out: Path) -> None:
    """The tokenizer of the adapter where it has one, else that of the base; the token at which generation ends, as the training decided."""
    own = folder.model if (folder.model / "tokenizer_config.json").exists() else folder.base or folder.model
    for name in TOKENIZER:
        if (own / name).exists():
            shutil.copyfile(own / name, out / name)
    for place in (folder.model, folder.base):
        if place is not None and (place / "generation_config.json").exists():
            shutil.copyfile(place / "generation_config.json", out / "generation_config.json")
            break
    if "end_token" in folder.made:
        stop_at(out, folder.base or folder.model, folder.made["end_token"]["text"], folder.made["end_token"]["number"])


def _describe(folder: model_folder.Folder, out: Path, recipe: str, told: dict[str, Any]) -> None:
    """README.md, which names the base, its licence and this recipe; the record of the training, where there is one."""
    if folder.made:
        text_record.write(out, folder.made)
    base = model_card.base_of(folder.base or folder.model)
    export = model_card.Export(adapter=False, outputs=0, trainer="export", random=folder.made.get("init") == "random")
    name = folder.model.name
    what = f"The adapter `{name}` was merged into its base" if told["merged"] else f"The weights of `{name}` were written anew"
    made = f"{what} by the recipe `{recipe}`, in {told['shards']} files of safetensors."
    near = f"Over {SEEN} tokens its logits differ\nfrom those before by at most {told['difference']:.1e} of their standard deviation."
    (out / "README.md").write_text(f"{model_card.text(base, export, folder.made)}\n## How it was made\n\n{made}  {near}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an adapter, or a whole model")
    parser.add_argument("--base", type=Path, help="what the adapter belongs to")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp16", "no"], required=True, help="auto: as the base has it")
    parser.add_argument("--shard-size", required=True, help="the most that one file holds: 5GB")
    parser.add_argument("--recipe", required=True, help="the recipe's name, for the README")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
