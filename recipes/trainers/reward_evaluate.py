"""Step `evaluate` of reward: how often the model gives held-out chosen answers more than rejected ones.  Does not know how it was trained."""

from __future__ import annotations

import reports
import text_record
import torch
import tuned
from loop import fail
from precision import autocast
from preference_model import answers_rewards
from splits import Splits


def main() -> None:
    options = reports.parser(__doc__).parse_args()
    pairs = Splits(options.data)
    if not len(pairs.held_out):
        fail("no pair is held out: a greater eval_fraction, or eval_fraction=0 for no report")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = tuned.load(options.base, options.model, judge=True).to(device).eval()
    with autocast(text_record.read(options.model)["precision"], device.type):
        rewards = answers_rewards(model, pairs.held_out, options.micro_batch, device)
    report = figures(rewards, torch.tensor([[len(row["chosen_ids"]), len(row["rejected_ids"])] for row in pairs.held_out]))
    report["data"] = {name: pairs.manifest[name] for name in ("rows", "pairs", "prompts_held_out", "truncated_rows", "duplicate_rows", "bad_rows")}
    reports.write(options.report, report, _page(report), {name: value for name, value in report.items() if isinstance(value, float)})
    print(
        f"evaluate: the chosen answer gets more in {report['accuracy']:.1%} of {report['pairs']} held-out pairs (chance 50 %, by length "
        f"{report['accuracy_of_length']:.1%})"
    )


def figures(rewards: torch.Tensor, tokens: torch.Tensor) -> dict[str, object]:
    """What is told of rewards.  Shapes: pairs × 2, chosen before rejected; `tokens` how long each answer is.

    `loss` is −log σ(margin), 0.693 for who knows nothing.  `accuracy_of_length` is what preferring the longer answer, or the shorter, would get.
    """
    margins = rewards[:, 0] - rewards[:, 1]
    longer = float((tokens[:, 0] > tokens[:, 1]).double().mean())
    shorter = float((tokens[:, 0] < tokens[:, 1]).double().mean())
    return {
        "pairs": len(rewards),
        "accuracy": float((margins > 0).double().mean()),
        "accuracy_of_length": max(longer, shorter),
        "margin": float(margins.mean()),
        "loss": float(-torch.nn.functional.logsigmoid(margins).mean()),
        "mean_chosen": float(rewards[:, 0].mean()),
        "mean_rejected": float(rewards[:, 1].mean()),
        "spread": float(rewards.std()),
    }


def _page(report: dict[str, object]) -> str:
    facts = report["data"]
    assert isinstance(facts, dict)
    return f"""# Reward model report

Judged on {report["pairs"]} pairs of {facts["prompts_held_out"]} prompts that were kept from training, of {facts["rows"]} rows in all.

| | |
|---|---|
| pairs in which the chosen answer gets more | {report["accuracy"]:.1%} |
| … for one who only looks at length | {report["accuracy_of_length"]:.1%} |
| margin, chosen over rejected | {report["margin"]:.3f} |
| loss, −log σ(margin); 0.693 knows nothing | {report["loss"]:.4f} |
| mean reward of chosen, of rejected | {report["mean_chosen"]:.3f}, {report["mean_rejected"]:.3f} |
| standard deviation over all answers | {report["spread"]:.3f} |

Data: {facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["bad_rows"]} bad rows left out.
"""


if __name__ == "__main__":
    main()
