"""Step `train` of flux-lora and sdxl-lora: learn a LoRA adapter from latents and text embeddings, one optimizer step after another.

What is trained depends on the settings and the global batch, not on how many processes share it: each image of a step draws its noise and its time
from the seed, the step and its place in the batch.  A training that was killed and resumed ends in the same bits as one that was not.  Knows latents
and embeddings, not pixels and words.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import descent
import precision
import torch
from control import Ending, every
from descent import CLIP, add_up, rate_at
from image_model import DTYPES, FAMILIES, INITS, STORAGES, Row, away, caption_file, digest, family, identity, orders, rows, stored
from loop import Checkpoints, draw, fail
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from telemetry import TRACKERS, Telemetry, require
from tokens import order

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

GLANCE = 64  # held-out images that a look at them takes
LOOKS = 4  # noise levels at which each of them is looked at
HELD = 2 * 10**9  # bytes of latents and embeddings that stay in memory; more are read again
SETTINGS = (
    "family", "init", "rank", "alpha", "learning_rate", "global_batch", "micro_batch", "seed", "objective", "guidance", "min_snr_gamma",
    "base_storage", "caption_dropout", "warmup_steps", "decay_steps", "schedule", "floor", "optimizer", "weight_decay", "beta1", "beta2",
    "tag_orders", "keep_tags", "regularisation_share", "regularisation_weight", "mask_floor", "ema", "compile",
)  # fmt: skip


def main() -> None:
    options = _options()
    require(options.tracker)
    ending = Ending()
    accelerator = precision.start(options.precision)
    world, me = accelerator.num_processes, accelerator.process_index
    if options.global_batch % world:
        fail(f"global_batch {options.global_batch} cannot be shared evenly by {world} processes")
    learned = Images(options, [row for row in rows(options.manifest) if not row.held_out])
    held_out = Images(options, [row for row in rows(options.manifest) if row.held_out])
    if all(row.regular for row in learned.rows):
        fail("all images are held out: lower eval_fraction, or add images")
    reading = Reading(learned.rows, options)

    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"data": digest(options.manifest), "base": identity(options.base), "precision": accelerator.mixed_precision, "world": world}
    training = Training(accelerator, options)
    checkpoints = Checkpoints(options.checkpoints, settings)
    history: list[str] = []
    done = 0
    if options.resume:
        done, found, history = checkpoints.load(options.resume)
        if done > options.max_steps:
            fail(f"cannot resume from {options.resume}: it is at step {done}, beyond max_steps {options.max_steps}")
        training.restore(found)
        _say(me, f"resumed at step {done}")

    def due(step: int) -> bool:
        return step == options.max_steps or bool(options.sample_every and step % options.sample_every == 0)

    telemetry = Telemetry(options.tensorboard, main=me == 0, history=history, tracker=options.tracker, settings=settings)
    save_every = every("CHECKPOINT_INTERVAL_STEPS", options.save_every)
    for step in range(done + 1, options.max_steps + 1):
        chosen = reading.chosen((step - 1) * options.global_batch, options.global_batch)
        rate = rate_at(step, options.learning_rate, options.warmup_steps, options.decay_steps, options.schedule, options.floor)
        loss, norm, stopping = training.step(step, learned, chosen, telemetry, ending.asked, rate)
        if not math.isfinite(loss):
            fail(f"the loss is {loss} at step {step}; a smaller learning_rate, or precision bf16 instead of fp16, may help")
        values = {"loss": loss, "lr": rate, "grad_norm": norm}
        if len(held_out) and due(step):
            with telemetry.phase("evaluation"), training.averaged():
                values["eval_loss"] = training.glance(held_out)
        epoch = step * options.global_batch / len(reading)
        told = telemetry.step(step, samples=options.global_batch, of=options.max_steps, epoch=epoch, **values)
        looked = f"  eval_loss {values['eval_loss']:.4f}" if "eval_loss" in values else ""
        _say(me, f"step {step}/{options.max_steps}  loss {loss:.4f}  {told.get('samples_per_second', 0):.2f} images/s{looked}")

        if me == 0 and due(step):
            options.snapshots.mkdir(parents=True, exist_ok=True)
            with training.averaged():
                training.export(options.snapshots / f"step-{step:06d}.safetensors")
        last = step == options.max_steps
        if last or stopping or step % save_every == 0:
            with telemetry.phase("checkpoint"):
                if me == 0:
                    checkpoints.save(step, training.tensors(), telemetry.history)
                accelerator.wait_for_everyone()
            ending.saved()
        elif me == 0 and ending.checkpoint:
            with telemetry.phase("checkpoint"):
                checkpoints.save(step, training.tensors(), telemetry.history)
            ending.saved()
        if stopping and not last:
            _say(me, f"asked to end; saved step {step}")
            ending.end()

    report: dict[str, Any] = {
        "steps": options.max_steps,
        "images": len({row.source for row in learned.rows if not row.regular}),
        "held_out": len(held_out),
    }
    if len(held_out):
        with training.averaged():
            after = training.glance(held_out)
        training.model.disable_adapters()
        before = training.glance(held_out)
        report |= {"eval_loss_before": before, "eval_loss_after": after, "lower_by": 1 - after / before}
        _say(me, f"loss on {min(GLANCE, len(held_out))} held-out images: {before:.4f} without the adapter, {after:.4f} with it")
        training.model.enable_adapters()
    if me == 0:
        # Of a training that went on beyond its first end: what one that was asked for all steps at once would not have.
        for file in options.snapshots.glob("step-*.safetensors"):
            if not due(int(file.stem.removeprefix("step-"))):
                file.unlink()
        with training.averaged():
            training.export(options.adapter)
        options.history.write_text("".join(telemetry.history))
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    telemetry.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()


class Example(NamedTuple):
    """An image to learn from, with its caption, in one of the orders of its tags, or with none."""

    index: int
    captioned: bool
    order: int = 0


class Reading:
    """Which images are learned, one after another without end: a function of the images and the seed, and nothing else.

    An epoch has each image as often as it repeats, and beside them images of the kind in general, the next ones in each epoch, which are
    `regularisation_share` of it.
    """

    def __init__(self, chosen: Sequence[Row], options: argparse.Namespace) -> None:
        self._seed = options.seed
        self._own = [index for index, row in enumerate(chosen) if not row.regular for _ in range(row.repeats)]
        self._regular = [index for index, row in enumerate(chosen) if row.regular]
        share = options.regularisation_share if self._regular else 0.0
        self._beside = round(len(self._own) * share / (1 - share))

    def __len__(self) -> int:
        """Images of an epoch."""
        return len(self._own) + self._beside

    def chosen(self, first: int, count: int) -> list[int]:
        """Images number `first` to `first + count`."""
        length = len(self)
        found = []
        for place, number in enumerate(order(length, self._seed, first, count), first):
            beside = number - len(self._own)
            found.append(self._own[number] if beside < 0 else self._regular[(place // length * self._beside + beside) % len(self._regular)])
        return found


class Files:
    """Files of tensors, read when they are first wanted, and kept while there is room."""

    def __init__(self) -> None:
        self._held: dict[Path, dict[str, torch.Tensor]] = {}
        self._room = HELD

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        """What a file has; not to be changed."""
        found = self._held.get(file)
        if found is None:
            found = load_file(file)
            size = sum(value.nbytes for value in found.values())
            if size <= self._room:
                self._held[file] = found
                self._room -= size
        return found


class Images:
    """Latents and embeddings of some images, read when they are wanted."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Row]) -> None:
        self._files = Files()
        self.rows = chosen
        # Made once: to put a path together and to hash it takes longer than to look up what it leads to.
        self._latents = [options.latents / f"{row.id}.safetensors" for row in chosen]
        self._orders = [orders(row.caption, 1 if row.held_out else options.tag_orders, options.keep_tags) for row in chosen]
        missing = [row.id for row, file in zip(chosen, self._latents, strict=True) if not file.is_file()]
        captions = {caption for each in self._orders for caption in each} | ({""} if options.caption_dropout else set())
        self._text = {caption: options.text / caption_file(caption) for caption in captions}
        missing += [caption for caption in sorted(captions) if not self._text[caption].is_file()]
        if missing:
            fail(f"latents or text do not belong to this manifest: they lack {', '.join(missing[:5])}")
        self._lengths: dict[str, int] = {}
        for caption in captions:
            with safe_open(self._text[caption], "pt") as read:
                self._lengths[caption] = read.get_slice("prompt").get_shape()[0]

    def __len__(self) -> int:
        return len(self.rows)

    def shape(self, example: Example) -> tuple[int, ...]:
        """What images have to agree in to be held at once: width, height, and how many tokens their captions have."""
        row = self.rows[example.index]
        return row.width, row.height, self._lengths[self._caption(example)]

    def _caption(self, example: Example) -> str:
        return self._orders[example.index][example.order] if example.captioned else ""

    def orders(self, index: int) -> int:
        """In how many orders of its tags an image's caption is there."""
        return len(self._orders[index])

    def latent(self, index: int) -> torch.Tensor:
        """(channels, height / 8, width / 8), 32 bits."""
        return self._files.read(self._latents[index])["latent"]

    def mask(self, index: int) -> torch.Tensor | None:
        """(1, height / 8, width / 8): how much of each place is to be learned, 0 to 1; None where that is all of it."""
        return self._files.read(self._latents[index]).get("mask")

    def conditions(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """What there is beside several latents, batch first: the embeddings of their captions, `sizes`, pixels, and `mask` where one of them has one.

        Sizes are heights and widths: of the original, of the corner where the crop begins, of the image as it is learned.
        """
        chosen = [self.rows[example.index] for example in examples]
        read = [self._files.read(self._text[self._caption(example)]) for example in examples]
        sizes = [(*row.original[::-1], *row.corner[::-1], row.height, row.width) for row in chosen]
        found = {name: torch.stack([one[name] for one in read]) for name in read[0]} | {"sizes": torch.tensor(sizes, dtype=torch.float32)}
        masks = [self.mask(example.index) for example in examples]
        if shape := next((mask.shape for mask in masks if mask is not None), None):
            found["mask"] = torch.stack([torch.ones(shape) if mask is None else mask for mask in masks])
        return found


class Training:
    """The model with its adapter, and what moves it."""

    def __init__(self, accelerator: Accelerator, options: argparse.Namespace) -> None:
        from peft import LoraConfig

        self._accelerator, self._options = accelerator, options
        self._family = family(options.family)
        arithmetic = accelerator.mixed_precision
        self._dtype = DTYPES[arithmetic]
        self.model = self._family.denoiser(options.base, options.init, self._dtype)
        self._objective = self._family.Objective(options.base, options.objective, options.min_snr_gamma)
        # The LoRA matrices are drawn on the CPU, hence the same on every kind of device.
        draw("adapter", options.seed)
        self.model.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=self._family.TARGETS))
        whole = sum(weight.numel() for weight in self.model.parameters())
        stored(self.model, options.base_storage, self._dtype)
        away(self.model, options.offload_blocks)
        if options.checkpoint_activations:
            self.model.enable_gradient_checkpointing()
        self.model.to(accelerator.device).train()
        if options.compile:
            # With one program for all shapes: which was made first would decide the last bits of the others, and a resume begins with another.
            self.model.compile_repeated_blocks(dynamic=True)
        self._learned = {name: weight for name, weight in sorted(self.model.named_parameters()) if weight.requires_grad}
        for weight in self._learned.values():
            weight.data = weight.data.float()
        groups = [{"params": list(self._learned.values()), "weight_decay": options.weight_decay}]
        self._optimizer = descent.made(options.optimizer, groups, options.learning_rate, (options.beta1, options.beta2))
        self._average = descent.Average(self._learned, options.ema) if options.ema else None
        self._scaler = torch.amp.GradScaler(accelerator.device.type, enabled=arithmetic == "fp16")
        told = "" if options.base_storage == "same" else f", the base in {options.base_storage}"
        count = sum(weight.numel() for weight in self._learned.values())
        _say(accelerator.process_index, f"{count:,} weights learned beside {whole - count:,}; "
             f"{accelerator.num_processes} × {accelerator.device.type}, precision {arithmetic}{told}")  # fmt: skip

    def step(self, step: int, images: Images, chosen: Sequence[int], telemetry: Telemetry, stop: bool, rate: float) -> tuple[float, float, bool]:
        """One optimizer step over `chosen` images, shared among the processes.  Its loss, its gradient's norm, and whether to stop."""
        world, me = self._accelerator.num_processes, self._accelerator.process_index
        summed = torch.zeros((), device=self._accelerator.device)
        examples = [Example(index, *self._captioned(step, place, images.orders(index))) for place, index in enumerate(chosen)]
        for batch in self._batches(images, examples, me, world):
            with telemetry.phase("data"):
                drawn = []
                for place, example in batch:
                    draw("noise", self._options.seed, step, place)
                    *told, weight = self._objective.noised(images.latent(example.index), None)
                    drawn.append((*told, weight * (self._options.regularisation_weight if images.rows[example.index].regular else 1.0)))
                conditions = images.conditions([example for _, example in batch])
            with telemetry.phase("model"):
                loss = self._loss(drawn, conditions) / len(chosen)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                summed += loss.detach()

        weights = list(self._learned.values())
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if world > 1:
            with telemetry.phase("communication"):
                stop = add_up(weights, summed, stop)
        with telemetry.phase("optimizer"):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._scaler.unscale_(self._optimizer)
            norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad()
            if self._average is not None:
                self._average.add(step)
        return float(summed), float(norm), stop

    def _captioned(self, step: int, place: int, orders: int) -> tuple[bool, int]:
        """Whether the image at this place of a step's batch has its caption, and in which of so many orders of its tags.

        A share of `caption_dropout` has none, so that the model learns what is drawn without a prompt, too, which guidance leads away from.
        """
        if not self._options.caption_dropout and orders == 1:
            return True, 0
        draw("caption", self._options.seed, step, place)
        return float(torch.rand(())) >= self._options.caption_dropout, int(torch.randint(orders, ()))

    def _batches(self, images: Images, chosen: Sequence[Example], me: int, world: int) -> Iterator[list[tuple[int, Example]]]:
        """What this process holds at once: (place in the global batch, image) of up to `micro_batch` images of one shape.

        Shapes are put together over the whole global batch before it is shared, so that as few of these are partly full as can be.
        """
        placed = sorted(enumerate(chosen), key=lambda item: (images.shape(item[1]), item[0]))
        share = len(placed) // world
        batch: list[tuple[int, Example]] = []
        for item in placed[me * share : (me + 1) * share]:
            if batch and (len(batch) == self._options.micro_batch or images.shape(item[1]) != images.shape(batch[0][1])):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _loss(self, drawn: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]], conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        """The sum over a batch of the weighted mean squared error of each of its latents.

        Of a latent with a mask it is the mean by the mask, where what is masked weighs `mask_floor`: however little is shown, an image counts as one.
        """
        where = self._accelerator.device
        noised, target, times = (torch.stack([one[part] for one in drawn]).to(where, non_blocking=True) for part in (0, 1, 2))  # type: ignore[misc]
        weights = torch.tensor([one[3] for one in drawn], device=where)
        with self._accelerator.autocast():
            there = {name: value.to(where, non_blocking=True) for name, value in conditions.items()}
            said = self._family.predict(self.model, noised, times, there, self._options.guidance, self._dtype)
        squared = (said - target).square()
        if "mask" not in there:
            return (squared.flatten(1).mean(1) * weights).sum()
        shown = self._options.mask_floor + (1 - self._options.mask_floor) * there["mask"]
        return ((squared * shown).flatten(1).mean(1) / shown.flatten(1).mean(1) * weights).sum()

    def glance(self, images: Images) -> float:
        """The mean unweighted loss over the first held-out images, each at the same LOOKS levels of the same noise every time: no luck in it."""
        me, world = self._accelerator.process_index, self._accelerator.num_processes
        both = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        self.model.eval()
        with torch.no_grad():
            for index in range(me, min(GLANCE, len(images)), world):
                latent, conditions = images.latent(index), images.conditions([Example(index, True)])
                for look in range(LOOKS):
                    draw("glance", self._options.seed, index, look)
                    both[0] += self._loss([self._objective.noised(latent, (look + 0.5) / LOOKS)], conditions)
                    both[1] += 1
        self.model.train()
        if world > 1:
            torch.distributed.all_reduce(both)
        return float(both[0] / both[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on, but for its number."""
        average = self._average.tensors() if self._average is not None else {}
        return descent.tensors(self._optimizer, self._learned, self._scaler) | average

    def restore(self, found: dict[str, torch.Tensor]) -> None:
        descent.restore(self._optimizer, self._learned, found, self._scaler)
        if self._average is not None:
            self._average.restore(found)

    def averaged(self) -> AbstractContextManager[None]:
        """While it lasts, the model is what comes out: with the average over steps, where one is kept."""
        return self._average.used() if self._average is not None else nullcontext()

    def export(self, file: Path) -> None:
        """Write the adapter as `load_lora_weights` reads it, in the precision of the training, in bytes that depend on the training only.

        alpha / rank is multiplied into the second matrix: readers look for alpha in different places, and take it for the rank where it is not.
        """
        scale = self._options.alpha / self._options.rank
        found = {}
        for name, weight in self._learned.items():
            value = weight.detach() * scale if ".lora_B." in name else weight.detach()
            found[f"{self._family.PREFIX}.{name.replace('.default.', '.')}"] = value.to(self._dtype).cpu().contiguous()
        unfinished = file.with_name(f".{file.name}.unfinished")
        save_file(found, unfinished, metadata={"format": "pt"})
        unfinished.rename(file)


def _say(me: int, line: str) -> None:
    if me == 0:
        print(f"train: {line}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    for name in ("manifest", "latents", "text", "base", "adapter", "snapshots", "history", "report", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard files")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder")
    parser.add_argument("--init", choices=INITS, default="pretrained")
    parser.add_argument("--precision", choices=precision.ASKED, required=True)
    parser.add_argument("--objective", required=True, help="flux: how times are drawn; sdxl: what is predicted")
    for name in ("max-steps", "rank", "global-batch", "micro-batch", "save-every", "sample-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--alpha", type=float, required=True)
    descent.add_options(parser)
    for name, usual in (("beta1", 0.9), ("beta2", 0.999)):
        parser.add_argument(f"--{name}", type=float, default=usual, help="of the optimizer")
    parser.add_argument("--guidance", type=float, default=1.0, help="flux: the guidance that the model is told it has")
    parser.add_argument("--min-snr-gamma", type=float, default=0.0, help="sdxl: 0 weighs all steps alike")
    parser.add_argument("--caption-dropout", type=float, default=0.0, help="share of the images that are learned without their caption")
    parser.add_argument("--tag-orders", type=int, default=1, help="orders of its tags in which each caption was embedded")
    parser.add_argument("--keep-tags", type=int, default=1, help="tags that stay in front")
    parser.add_argument("--regularisation-share", type=float, default=0.5, help="share of what is learned that images of the kind in general are")
    parser.add_argument("--regularisation-weight", type=float, default=1.0, help="of each of them in the loss")
    parser.add_argument("--mask-floor", type=float, default=0.0, help="weight of what a mask hides")
    parser.add_argument("--ema", type=float, default=0.0, help="how much of the average over steps a step keeps; 0: none is kept")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--base-storage", choices=STORAGES, default="same", help="what the frozen weights lie in memory as")
    parser.add_argument("--offload-blocks", type=int, default=0, help="transformer blocks whose frozen weights stay in main memory")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--tracker", choices=TRACKERS, default="none")
    options = parser.parse_args()
    if options.resume and not options.resume.is_dir():
        fail(f"cannot resume from {options.resume}: no such folder")
    descent.refuse(options)
    if options.base_storage == "fp8" and not options.checkpoint_activations:
        fail("base_storage fp8 saves memory only with checkpoint_activations=true: without, it takes more than base_storage=same")
    if options.offload_blocks and not options.checkpoint_activations:
        fail("offload_blocks saves memory only with checkpoint_activations=true: without, all that came stays for the backward")
    if options.offload_blocks and options.base_storage != "same":
        fail(f"offload_blocks leaves weights in main memory as they are computed with: base_storage=same, not {options.base_storage}")
    return options


if __name__ == "__main__":
    main()
