"""Pre-train a byte-level transformer with accelerate, on as many processes as there are.

Step n draws the same sequences whatever the number of processes: each takes its share of one global batch.
"""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

parser = argparse.ArgumentParser()
for name, kind in [
    ("data", Path),
    ("steps", int),
    ("global-batch", int),
    ("width", int),
    ("layers", int),
    ("context", int),
    ("lr", float),
]:
    parser.add_argument(f"--{name}", type=kind, required=True)
for name, kind in [("seed", int), ("save-every", int), ("checkpoints", Path), ("model", Path)]:
    parser.add_argument(f"--{name}", type=kind, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols, self.places = (
            nn.Embedding(256, args.width),
            nn.Embedding(args.context, args.width),
        )
        layer = nn.TransformerEncoderLayer(
            args.width,
            max(1, args.width // 16),
            4 * args.width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, 256)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.symbols(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.body(hidden, mask=mask, is_causal=True))


accelerator = Accelerator()
if args.global_batch % accelerator.num_processes:
    raise SystemExit(
        f"a global batch of {args.global_batch} cannot be shared by {accelerator.num_processes} processes"
    )
share = args.global_batch // accelerator.num_processes

torch.manual_seed(args.seed)
model = Model()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
first = 0
if args.resume:
    accelerator.load_state(args.resume)
    first = int(args.resume.name.removeprefix("step-"))
    accelerator.print(f"continued from step {first}")

data = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)
if len(data) <= args.context:
    raise SystemExit(f"{len(data)} bytes of text are too few for a context of {args.context}")
for step in range(first + 1, args.steps + 1):
    rng = random.Random(
        f"{args.seed}/{step}"
    )  # of the step, not of the process: a continued training draws what an unbroken one would have
    starts = [rng.randrange(len(data) - args.context) for _ in range(args.global_batch)]
    mine = starts[accelerator.process_index * share :][:share]
    batch = (
        torch.stack([data[start : start + args.context + 1] for start in mine])
        .long()
        .to(accelerator.device)
    )
    with accelerator.autocast():
        loss = nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten()
        )
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
    if accelerator.is_main_process:
        with open(os.environ["RECIPE_METRICS"], "a") as metrics:
            print(json.dumps({"step": step, "loss": mean}), file=metrics)
    if step % args.save_every == 0 or step == args.steps:
        half = args.checkpoints / f"half-{step}"
        accelerator.save_state(half)
        accelerator.wait_for_everyone()
        if (
            accelerator.is_local_main_process
        ):  # a checkpoint appears under its name when it is complete
            shutil.rmtree(args.checkpoints / f"step-{step}", ignore_errors=True)
            half.rename(args.checkpoints / f"step-{step}")
        accelerator.wait_for_everyone()

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), args.model)
accelerator.end_training()
