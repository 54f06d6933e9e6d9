"""Step `evaluate` of sft@1 and cpt: perplexity on held-out text, of the base model and of the exported folder.  Does not know how it was trained.

Perplexity is exp of the mean of −ln p over learned tokens (Jelinek and others, 1977), in the arithmetic that the training chose.
"""

from __future__ import annotations

import math
from typing import Any

import reports
import text_record
import torch
from precision import autocast
from text_model import load_base, surprise
from tokens import Tokens

COUNTS = ("format_of_rows", "rows", "rows_held_out", "truncated_rows", "duplicate_rows", "bad_rows")


def main() -> None:
    options = reports.parser(__doc__).parse_args()
    made = text_record.read(options.model)
    tokens = Tokens(options.data, "held_out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def judge(model: torch.nn.Module) -> tuple[float, int]:
        with autocast(made["precision"], device.type):
            return surprise(model.to(device), tokens, range(len(tokens)), options.micro_batch, device)

    base: torch.nn.Module = load_base(options.base, made["init"], made["seed"], made["precision"])
    before, count = judge(base)
    if (options.model / "adapter_config.json").exists():
        from peft import PeftModel

        trained: torch.nn.Module = PeftModel.from_pretrained(base, str(options.model))  # type: ignore[arg-type]
    else:
        del base
        trained = load_base(options.model, "pretrained", made["seed"], made["precision"])
    after, _ = judge(trained)

    report = {
        "tokens": count,
        "sequences": len(tokens),
        "loss_before": before / count,
        "loss_after": after / count,
        "perplexity_before": math.exp(before / count),
        "perplexity_after": math.exp(after / count),
        "times_better": math.exp((before - after) / count),
        "data": {name: tokens.manifest[name] for name in COUNTS},
        "training": made,
    }
    told = {"perplexity_before": report["perplexity_before"], "perplexity": report["perplexity_after"]}
    reports.write(options.report, report, _page(report, tokens), told)
    print(f"evaluate: perplexity {report['perplexity_before']:.2f} before, {report['perplexity_after']:.2f} after, on {count} held-out tokens")


def _page(report: dict[str, Any], tokens: Tokens) -> str:
    facts, made = tokens.manifest, report["training"]
    times = report["times_better"]
    verdict = f"Perplexity is {times:.2f} times lower." if times >= 1 else f"Perplexity is {1 / times:.2f} times HIGHER: it got worse."
    first = "the first " if "stream" in facts else ""
    how = "every weight" if made["method"] == "full" else f"{made['method'].replace('lora', 'LoRA')} of rank {made['rank']}"
    return f"""# What was learned

Judged on {report["tokens"]:,} tokens of {facts["rows_held_out"]} rows that were kept from training, of {first}{facts["rows"]}.

| | loss per token | perplexity |
|---|---|---|
| base model | {report["loss_before"]:.4f} | {report["perplexity_before"]:.2f} |
| trained | {report["loss_after"]:.4f} | {report["perplexity_after"]:.2f} |

{verdict}

Training: {how}, {made["max_steps"]} steps of {made["global_batch"]} sequences, rate {made["learning_rate"]:g}, precision {made["precision"]}.
Data: {facts["format_of_rows"]} rows, {facts["tokens"]:,} tokens, sequences of at most {facts["max_length"]} tokens.
{facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["bad_rows"]} bad rows left out.
"""


if __name__ == "__main__":
    main()
