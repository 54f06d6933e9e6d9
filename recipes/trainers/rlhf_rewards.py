"""What a completion is worth: built-in rewards, functions of yours, a reward model.  Each gives one number per completion; none knows training.

A reward is called with prompts (strings or lists of messages, as the data has them), completions (always strings) and the rows' columns, all lists of
the same length, and returns a list of that length; None says that it has no opinion on that one.  What a completion gets is the weighted sum.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loop import fail

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUILT_IN = ("answer", "format", "length", "share")
NAMES = ("model", "function", *BUILT_IN)
Function = Callable[..., Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Reward:
    name: str
    weight: float
    phase: str  # what its time counts as: "model", or "tool" for a function that may call anything
    function: Function
    yours: bool = False  # a function of the user's file

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[float | None]:
        """One number per completion, or None.  Ends with a message where the function fails or returns something else."""
        try:
            given = list(self.function(prompts=list(prompts), completions=list(completions), **columns))
            worth = [None if value is None else float(value) for value in given]
        except Exception as error:
            if not self.yours:
                raise
            which = "" if self.name == "function" else f" {self.name}"
            fail(f"the reward function{which} failed{_line_of(error)}: {type(error).__name__}: {error}")
        if len(worth) != len(completions):
            fail(f"reward {self.name} returned {len(worth)} numbers for {len(completions)} completions; it has to return one for each")
        if wrong := [value for value in worth if value is not None and not math.isfinite(value)]:
            fail(f"reward {self.name} returned {wrong[0]}, which is no number to learn from; None says that it has no opinion")
        return worth


def chosen(
    weights: Mapping[str, float], pattern: str | None, target: int, function: Path | None, model: Callable[[], Function] | None
) -> list[Reward]:
    """The rewards that somebody asked for.  A function or model that is given counts once unless `weights` says otherwise; `model` loads it.

    A name in `weights` that is none of NAMES is a function of that name in the file `function`, which may have several; then its `reward` counts only
    where `weights` says so.
    """
    theirs = sorted(set(weights) - set(NAMES))
    if theirs and not function:
        fail(f"rewards: {theirs[0]} is none of {', '.join(NAMES)}; what has no name here is written as a function of that name in reward_function")
    wanted = {**({"model": 1.0} if model else {}), **({"function": 1.0} if function and not theirs else {}), **weights}
    if not wanted:
        fail("nothing says what a completion is worth: give reward_model, reward_function, or rewards={length: 1} with names of built-in ones")
    if "model" in wanted and model is None:
        fail("rewards names model, and there is no reward_model")
    if "function" in wanted and function is None:
        fail("rewards names function, and there is no reward_function")
    if not pattern and (missing := [name for name in ("format", "share") if name in wanted]):
        fail(f"reward {missing[0]} compares with reward_pattern, and there is none")
    own = {name: "reward" if name == "function" else name for name in wanted if name == "function" or name in theirs}
    written = load_functions(function, sorted(own.values())) if function and own else {}
    return [
        Reward(name, float(weight), "tool", written[own[name]], yours=True)
        if name in own
        else Reward(name, float(weight), *_made(name, pattern, target, model))
        for name, weight in sorted(wanted.items())
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options from which `asked` makes rewards."""
    parser.add_argument("--rewards", type=json.loads, default={}, help="JSON: names and weights")
    parser.add_argument("--reward-pattern", help="a regular expression")
    parser.add_argument("--reward-length", type=int, default=200, help="characters")
    parser.add_argument("--reward-function", type=Path)
    parser.add_argument("--reward-model", type=Path)
    parser.add_argument("--reward-init", choices=["pretrained", "random"], default="pretrained")


def asked(options: argparse.Namespace, device: torch.device) -> list[Reward]:
    """The rewards that the options name, with `options.seed`, `.precision` and `.micro_batch` for those that need them."""
    loads = None
    if folder := options.reward_model:
        loads = functools.partial(load_model, folder, options.reward_init, options.seed, options.precision, device, options.micro_batch)
    return chosen(options.rewards, options.reward_pattern, options.reward_length, options.reward_function, loads)


def _made(name: str, pattern: str | None, target: int, model: Callable[[], Function] | None) -> tuple[str, Function]:
    if name == "model" and model:
        return "model", model()
    try:
        compiled = re.compile(pattern or "", re.DOTALL)
    except re.error as error:
        fail(f"reward_pattern is no regular expression: {error}")
    built_in: dict[str, Function] = {
        "length": lambda completions, **_: [length(text, target) for text in completions],
        "format": lambda completions, **_: [float(bool(compiled.fullmatch(text.strip()))) for text in completions],
        "share": lambda completions, **_: [share(text, compiled) for text in completions],
        "answer": lambda completions, answer, **_: [
            exact(text, str(wanted), compiled if pattern else None) for text, wanted in zip(completions, answer, strict=True)
        ],
    }
    return "tool", built_in[name]


def length(text: str, target: int) -> float:
    """1 at `target` characters, falling on a line to 0 at none and at twice as many."""
    return max(0.0, 1 - abs(len(text) - target) / target)


def share(text: str, pattern: re.Pattern[str]) -> float:
    """Which part of the characters the pattern's matches cover, 0 to 1; an empty text is worth 0."""
    return sum(len(match.group()) for match in pattern.finditer(text)) / len(text) if text else 0.0


def exact(text: str, wanted: str, pattern: re.Pattern[str] | None) -> float:
    """1 where the answer found in the text is the wanted one.

    The answer is the first group of the last match of `pattern`, or all of that match; without a pattern, what `\\boxed{}` holds or what follows
    `####`, as data sets of mathematics write it, else the whole text.  Compared without case, outer white space, and commas within numbers.
    """
    found = text
    for shape in [pattern] if pattern else [re.compile(r"\\boxed\{([^{}]*)\}"), re.compile(r"####\s*(.+)")]:
        if matches := list(shape.finditer(text)):
            found = matches[-1].group(1 if shape.groups else 0) or ""
            break
    else:
        if pattern:
            return 0.0
    return float(_plain(found) == _plain(wanted))


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().casefold())


def load_functions(file: Path, names: Sequence[str]) -> dict[str, Function]:
    """Functions of a Python file by their names.  Ends with a message where one is not there, or cannot be called as it will be."""
    module = types.ModuleType("reward_function")
    module.__file__ = str(file)
    # Beside it may lie what it imports.
    sys.path.append(str(file.resolve().parent))
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except Exception as error:
        fail(f"{file.name} cannot be loaded{_line_of(error)}: {type(error).__name__}: {error}")
    found: dict[str, Function] = {}
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            fail(f"{file.name} has no function {name}(prompts, completions, **columns)")
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()) or not {"prompts", "completions"} <= set(parameters):
            fail(
                f"{file.name}: {name}({', '.join(parameters)}) does not take every column of the data; write {name}(prompts, completions, **columns)"
            )
        found[name] = function
    return found


def _line_of(error: BaseException) -> str:
    frame, found = error.__traceback__, ""
    while frame:
        if (name := frame.tb_frame.f_code.co_filename) != __file__:
            found = found or f" at {Path(name).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


class ModelReward:
    """A sequence classifier with one output, as reward@1 makes it: its number for the prompt with the completion and the end token after it."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, batch: int) -> None:
        self._model = model.to(device).eval()  # type: ignore[arg-type]
        self._tokenizer = tokenizer
        self._device = device
        self._batch = batch
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model scores its last token that is no padding: both must agree which that is.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)

    def __call__(self, prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
        import torch

        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        found: list[float] = []
        with torch.no_grad():
            for at in range(0, len(texts), self._batch):
                cut = {"truncation": True, "max_length": self._limit} if self._limit else {}
                inputs = self._tokenizer(
                    text=texts[at : at + self._batch], return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False, **cut
                ).to(self._device)
                found += self._model(**inputs).logits[:, 0].float().tolist()
        return found

    def _text(self, prompt: Any, completion: str) -> str:
        if not isinstance(prompt, str):
            rendered = self._tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": completion}], tokenize=False)
            return str(rendered)
        end = str(self._tokenizer.eos_token or "")
        return prompt + completion + ("" if completion.endswith(end) else end)


def classifier(folder: Path, init: str, seed: int, precision: str) -> PreTrainedModel:
    """The sequence classifier with one output in a folder; weights drawn from the seed if `init` is random.  Ends with a message if it is none."""
    import torch
    from loop import draw
    from text_model import DTYPES
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        if init == "random":
            draw("reward", seed)
            config = AutoConfig.from_pretrained(folder, local_files_only=True, num_labels=1)
            drawn: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            torch.nn.Module.to(drawn, DTYPES[precision])
            return drawn
        model, told = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=DTYPES[precision], local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        fail(f"{folder}: no usable reward model: {str(error).splitlines()[0]}")
    if missing := sorted(told["missing_keys"]):
        fail(f"{folder.name} is no reward model: it has no weights for {missing[0]}; reward@1 trains one")
    found: PreTrainedModel = model
    return found


def load_model(folder: Path, init: str, seed: int, precision: str, device: torch.device, batch: int) -> ModelReward:
    """The reward model in a folder, with its tokenizer.  Ends with a message where it is none."""
    from transformers import AutoTokenizer

    model = classifier(folder, init, seed, precision)
    try:
        return ModelReward(model, AutoTokenizer.from_pretrained(folder, local_files_only=True), device, batch)
    except (OSError, ValueError) as error:
        fail(f"{folder}: no usable tokenizer of the reward model: {str(error).splitlines()[0]}")
