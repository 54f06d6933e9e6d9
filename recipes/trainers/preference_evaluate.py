"""Step `evaluate` of dpo and orpo: how much likelier held-out chosen answers are than rejected ones, before and after.  Knows no training."""

from __future__ import annotations

import math

import reports
import text_record
import torch
import tuned
from loop import fail
from precision import autocast
from preference_model import answers_logps
from splits import Splits
from text_model import load_base


def main() -> None:
    options = reports.parser(__doc__).parse_args()
    pairs = Splits(options.data)
    if not len(pairs.held_out):
        fail("no pair is held out: a greater eval_fraction, or eval_fraction=0 for no report")
    made = text_record.read(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def judge(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast(made["precision"], device.type):
            return answers_logps(model.to(device).eval(), pairs.held_out, options.micro_batch, device)

    # One after the other: two models need not fit side by side.
    before, tokens = judge(load_base(options.base, made["init"], made["seed"], made["precision"]))
    after, _ = judge(tuned.load(options.base, options.model, judge=False))
    found = figures(before, after, tokens, made["beta"])
    likelier, loss = ((found[f"{name}_before"], found[f"{name}_after"]) for name in ("accuracy", "loss_chosen"))
    report: dict[str, object] = {**found, "conclusion": conclusion(len(before), found["reward_accuracy"], likelier, loss)}
    report["data"] = {name: pairs.manifest[name] for name in ("rows", "pairs", "prompts_held_out", "truncated_rows", "duplicate_rows", "bad_rows")}
    reports.write(options.report, report, _page(report), {name: value for name, value in report.items() if isinstance(value, float)})
    print(
        f"evaluate: chosen over rejected by {report['margin_before']:.2f} nats before, {report['margin_after']:.2f} after; moved the right way in "
        f"{report['reward_accuracy']:.0%} of {report['pairs']} held-out pairs"
    )


def figures(before: torch.Tensor, after: torch.Tensor, tokens: torch.Tensor, beta: float) -> dict[str, float]:
    """What is told of log p of answers, in nats.  Shapes: pairs × 2, chosen before rejected; `tokens` how many each answer has.

    `reward` is β(log π − log π₀), what DPO's model pays for an answer (arXiv:2305.18290, eq. 5 without its constant), so its margin is 0 before.
    `log_odds` is log odds(chosen) − log odds(rejected) with p the mean probability of a token (arXiv:2403.07691, eq. 4 and 5).
    """
    rewards = beta * (after - before)
    found: dict[str, float] = {"pairs": len(before), "beta": beta}
    for name, logps in (("before", before), ("after", after)):
        mean = logps / tokens
        odds = mean - torch.log1p(-mean.exp())
        found[f"margin_{name}"] = float((logps[:, 0] - logps[:, 1]).mean())
        found[f"accuracy_{name}"] = float((logps[:, 0] > logps[:, 1]).double().mean())
        found[f"log_odds_{name}"] = float((odds[:, 0] - odds[:, 1]).mean())
        found[f"loss_chosen_{name}"] = float(-(logps[:, 0].sum() / tokens[:, 0].sum()))
        found[f"loss_rejected_{name}"] = float(-(logps[:, 1].sum() / tokens[:, 1].sum()))
    found["reward_margin"] = float((rewards[:, 0] - rewards[:, 1]).mean())
    found["reward_accuracy"] = float((rewards[:, 0] > rewards[:, 1]).double().mean())
    return found


def conclusion(pairs: int, gained: float, likelier: tuple[float, float], loss: tuple[float, float]) -> str:
    """What the figures say, in sentences.

    `gained`: the share of pairs in which the chosen answer gained on the rejected one.  Before and after: `likelier`, the share in which it is the
    likelier one; `loss`, of a token of chosen answers.
    """
    chance = 1 / math.sqrt(pairs)  # two standard deviations of the share that a coin would get
    shown = f"chosen answers gained on rejected ones in {gained:.1%} of {pairs} pairs"
    if abs(gained - 0.5) < chance:
        said = f"Nothing can be concluded: {shown}, and a coin comes as far. Train longer, or hold out more pairs."
    elif gained < 0.5:
        said = f"It learned the opposite: {shown}. Check whether the columns chosen and rejected are swapped."
    else:
        said = f"It learned the preference: {shown}."
        if likelier[1] - likelier[0] < chance:
            said += (
                f" The chosen answer is the likelier one in {likelier[0]:.1%} of the pairs before and in {likelier[1]:.1%} after:"
                " the model leans the right way, by less than the answers were apart. More steps or a higher learning_rate move it further."
            )
    if loss[1] > 1.05 * loss[0]:
        said += (
            f" Chosen answers became less likely, too (loss per token {loss[0]:.2f} before, {loss[1]:.2f} after). Read what the model writes;"
            " a smaller learning_rate holds it back."
        )
    return said


def _page(report: dict[str, object]) -> str:
    facts = report["data"]
    assert isinstance(facts, dict)
    rows = "\n".join(
        f"| {words} | {report[f'{name}_before']:.4f} | {report[f'{name}_after']:.4f} |"
        for name, words in (
            ("margin", "log p(chosen) − log p(rejected), nats"),
            ("accuracy", "pairs in which the chosen answer is likelier"),
            ("log_odds", "log odds ratio per token, chosen over rejected"),
            ("loss_chosen", "loss per token of chosen answers"),
            ("loss_rejected", "loss per token of rejected answers"),
        )
    )
    return f"""# Preference report

Judged on {report["pairs"]} pairs of {facts["prompts_held_out"]} prompts that were kept from training, of {facts["rows"]} rows in all.

| | base model | trained |
|---|---|---|
{rows}

**{report["conclusion"]}**

Against the base model, chosen answers gained on rejected ones in {report["reward_accuracy"]:.1%} of the pairs, by {report["reward_margin"]:.3f} on
average, counted as reward with β = {report["beta"]}.  Longer answers are less likely as a whole, whatever is preferred: the odds are per token.

Data: {facts["truncated_rows"]} rows truncated, {facts["duplicate_rows"]} duplicates, {facts["bad_rows"]} bad rows left out.
"""


if __name__ == "__main__":
    main()
