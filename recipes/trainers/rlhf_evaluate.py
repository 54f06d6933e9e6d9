"""Step `evaluate` of rlhf and ppo: what completions of held-out prompts are worth, the base model's and the trained one's.  Does not know training.

Both draw with the same numbers, so that the difference is the training's and not luck's.  The KL is that of the trained model to the base, in nats a
token of its own completions: the mean of log p − log p₀ (the estimator k1 of Schulman 2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reports
import rlhf_rewards
import torch
from loop import fail
from peft import PeftModel
from precision import ASKED, chosen
from rlhf_data import end_token, load, load_tokenizer, prompt_ids
from rlhf_rewards import Reward
from rlhf_sampling import log_probabilities, sample, table
from rows import BadData
from text_model import load_base

SHOWN = 5  # prompts of the report, with a completion of each model


def main() -> None:
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = load_tokenizer(options.base, options.chat_template, end_token(options.data)["text"])
    except BadData as error:
        fail(str(error))
    rewards = rlhf_rewards.asked(options, device)
    rows = load(options.data, "held_out")[: options.prompts]
    asked = [row for row in rows for _ in range(options.samples)]
    prompts = [prompt_ids(row["prompt"], tokenizer) for row in asked]
    draws = table(0, len(asked), options.max_completion_length, "evaluate", options.seed)

    def completed(model: Any) -> list[list[int]]:
        return sample(model, tokenizer, prompts, draws, options.temperature, options.micro_batch)

    base: Any = load_base(options.base, options.init, options.seed, options.precision).to(device).eval()  # type: ignore[arg-type]
    before = completed(base)
    adapter = (options.model / "adapter_config.json").exists()
    if adapter:
        tuned: Any = PeftModel.from_pretrained(base, str(options.model)).eval()
    else:
        tuned = load_base(options.model, "pretrained", options.seed, options.precision).to(device).eval()  # type: ignore[arg-type]
    after = completed(tuned)
    apart, tokens = 0.0, 0
    for prompt, completion in zip(prompts, after, strict=True):
        now = log_probabilities(tuned, prompt, completion, options.temperature)
        if adapter:
            with tuned.disable_adapter():
                then = log_probabilities(tuned, prompt, completion, options.temperature)
        else:
            then = log_probabilities(base, prompt, completion, options.temperature)
        apart += float((now - then).sum())
        tokens += len(completion)

    texts = [tokenizer.batch_decode(part, skip_special_tokens=True) for part in (before, after)]
    worth = [_worth(rewards, asked, part) for part in texts]
    parts = {
        reward.name: {"weight": reward.weight, "before": _mean(then), "after": _mean(now)}
        for reward, then, now in zip(rewards, worth[0], worth[1], strict=True)
    }
    total = [sum(part["weight"] * (part[side] or 0.0) for part in parts.values()) for side in ("before", "after")]
    report: dict[str, Any] = {
        "prompts": len(rows), "samples": len(asked), "reward_before": total[0], "reward_after": total[1], "rewards": parts,
        "kl_per_token": apart / tokens, "tokens_before": sum(map(len, before)) / len(asked), "tokens_after": tokens / len(asked),
    }  # fmt: skip
    pairs = [{"prompt": row["prompt"], "before": then, "after": now} for row, then, now in zip(asked, *texts, strict=True)]
    told = {"reward_before": total[0], "reward": total[1], "kl": report["kl_per_token"]}
    reports.write(options.report, report, _page(report, pairs[:: options.samples][:SHOWN]), told)
    (options.report / "samples.jsonl").write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8")
    print(
        f"evaluate: reward {total[0]:.4g} before, {total[1]:.4g} after, KL {report['kl_per_token']:.3g} nats a token, on {len(rows)} held-out prompts"
    )


def _worth(rewards: list[Reward], rows: list[dict[str, Any]], texts: list[str]) -> list[list[float | None]]:
    names = sorted({name for row in rows for name in row} - {"prompt"})
    columns = {name: [row.get(name) for row in rows] for name in names}
    return [reward([row["prompt"] for row in rows], texts, columns) for reward in rewards]


def _mean(values: Sequence[float | None]) -> float | None:
    """Over those that have an opinion; None where none has."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _page(report: dict[str, Any], pairs: list[dict[str, Any]]) -> str:
    lines = [
        "# Rewards on held-out prompts",
        "",
        f"{report['samples']} completions of {report['prompts']} prompts that were kept from training, drawn by both models with the same numbers.",
        "",
        "| | base model | trained |",
        "|---|---|---|",
        f"| **reward** | {report['reward_before']:.4f} | {report['reward_after']:.4f} |",
    ]
    for name, part in report["rewards"].items():
        shown = ["none" if part[side] is None else f"{part[side]:.4f}" for side in ("before", "after")]
        lines.append(f"| {name}, × {part['weight']:g} | {shown[0]} | {shown[1]} |")
    lines += [
        f"| tokens of a completion | {report['tokens_before']:.1f} | {report['tokens_after']:.1f} |",
        "",
        f"KL to the base model: {report['kl_per_token']:.4f} nats per token.  A reward that rises while the KL grows without end is being exploited:",
        "read the samples, and raise `beta` if they got worse in ways that the reward does not see.",
        "",
    ]
    for pair in pairs:
        prompt = pair["prompt"] if isinstance(pair["prompt"], str) else pair["prompt"][-1]["content"]
        for title, text in (("Prompt", prompt), ("base", pair["before"]), ("trained", pair["after"])):
            lines += [f"{title}:", "", *(f"    {line}" for line in text.splitlines() or [""]), ""]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    rlhf_rewards.add_options(parser)
    parser.add_argument("--init", choices=["pretrained", "random"], default="pretrained")
    parser.add_argument("--prompts", type=int, required=True, help="held-out prompts that are completed, at most")
    parser.add_argument("--samples", type=int, required=True, help="completions of each")
    parser.add_argument("--max-completion-length", type=int, required=True, help="tokens")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--precision", choices=ASKED, default="auto")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.precision = chosen(options.precision)
    return options


if __name__ == "__main__":
    main()
