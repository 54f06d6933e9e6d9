"""Step `evaluate` of sft: perplexity on the held-out part, of the base model and of the exported folder.  Does not know how it was trained."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from pathlib import Path

import torch
from loop import Metrics
from peft import PeftModel
from sft_model import load_base, surprise
from tokens import Tokens


def main() -> None:
    options = _options()
    tokens = Tokens(options.data, "held_out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = options.precision != "no"
    autocast = torch.autocast(device.type, torch.bfloat16 if options.precision == "bf16" else torch.float16) if half else contextlib.nullcontext()

    def judge(model: torch.nn.Module) -> tuple[float, int]:
        with autocast:
            return surprise(model, tokens, range(len(tokens)), options.micro_batch, device)

    base: torch.nn.Module = load_base(options.base, options.init, options.seed, options.precision)
    base.to(device)
    total, count = judge(base)
    if (options.model / "adapter_config.json").exists():
        tuned: torch.nn.Module = PeftModel.from_pretrained(base, str(options.model))
    else:
        del base
        tuned = load_base(options.model, "pretrained", options.seed, options.precision)
    tuned.to(device)
    after, _ = judge(tuned)
    before_after = math.exp(total / count), math.exp(after / count)

    report = {
        "tokens": count,
        "sequences": len(tokens),
        "loss_before": total / count,
        "loss_after": after / count,
        "perplexity_before": before_after[0],
        "perplexity_after": before_after[1],
        "times_better": math.exp((total - after) / count),
        "data": {name: tokens.manifest[name] for name in ("format_of_rows", "rows", "rows_held_out", "truncated_rows", "duplicate_rows", "bad_rows")},
    }
    options.report.mkdir(parents=True, exist_ok=True)
    (options.report / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.report / "report.md").write_text(_page(report, tokens))
    if told := os.environ.get("RECIPE_METRICS"):
        Metrics(Path(told)).tell(1, perplexity_before=before_after[0], perplexity=before_after[1])
    print(f"evaluate: perplexity {before_after[0]:.2f} before, {before_after[1]:.2f} after, on {count} held-out tokens")


def _page(report: dict[str, object], tokens: Tokens) -> str:
    facts = tokens.manifest
    return f"""# Fine-tuning report

Judged on {report["tokens"]:,} tokens of {facts["rows_held_out"]} rows that were kept from training, of {facts["rows"]} in all.

| | loss | perplexity |
|---|---|---|
| base model | {report["loss_before"]:.4f} | {report["perplexity_before"]:.2f} |
| fine-tuned | {report["loss_after"]:.4f} | {report["perplexity_after"]:.2f} |

Perplexity is {report["times_better"]:.2f} times lower.

Data: {facts["format_of_rows"]} rows, {facts["tokens"]:,} tokens, sequences of at most {facts["max_length"]} tokens.
{facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["bad_rows"]} bad rows left out.
"""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "model", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--init", choices=["pretrained", "random"], required=True)
    parser.add_argument("--precision", choices=["bf16", "fp16", "no"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
