"""Translate Hugging Face trainer arguments to recipe inputs, for the `config` of a platform job.

`NAMES` maps arguments to inputs. docs/server.md contains the table of each library recipe. Pure
functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..errors import Problem
from ..language.recipe import Recipe


def _keep(value: object) -> object:
    return value


class _Untranslatable(Exception):
    """Raised for an argument value without an equivalent input value."""


def _optimizer(value: object) -> object:
    names = {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_32bit": "paged_adamw",
    }
    return names.get(value, value) if isinstance(value, str) else value


def _precision(word: str) -> Callable[[object], object]:
    """Return a converter for a precision flag: `true` selects `word`, `false` is untranslatable."""

    def precision(value: object) -> object:
        if value is False:
            raise _Untranslatable("false leaves the precision to the recipe")
        return word if value is True else value

    return precision


def _quantization(value: object) -> object:
    if value is False:
        raise _Untranslatable("false leaves the method to the recipe")
    return "qlora" if value is True else value


def _tracker(value: object) -> object:
    if isinstance(value, list):
        if len(value) > 1:
            raise _Untranslatable("a run has one tracker")
        value = value[0] if value else "none"
    return value


class InputName(NamedTuple):
    """The recipe input that corresponds to a Hugging Face argument."""

    input: str
    read: Callable[[object], object] = _keep
    not_in: tuple[str, ...] = ()
    """Recipes in which this input has another meaning."""
    words: str = ""
    """Conversion of values, for the table in the docs. Empty if values are unchanged."""


NAMES: Final[Mapping[str, InputName]] = {
    "num_train_epochs": InputName("epochs", not_in=("ppo",)),
    "num_ppo_epochs": InputName("epochs", not_in=("sft", "cpt", "dpo", "orpo", "reward", "rlhf")),
    "max_train_steps": InputName("max_steps"),
    "per_device_train_batch_size": InputName("micro_batch"),
    "train_batch_size": InputName("micro_batch"),
    "save_steps": InputName("save_every"),
    "checkpointing_steps": InputName("save_every"),
    "eval_steps": InputName("eval_every"),
    "optim": InputName("optimizer", _optimizer, words="`adamw_torch` is `adamw`"),
    "bf16": InputName("precision", _precision("bf16"), words="`true` is `bf16`"),
    "fp16": InputName("precision", _precision("fp16"), words="`true` is `fp16`"),
    "mixed_precision": InputName("precision"),
    "gradient_checkpointing": InputName("checkpoint_activations"),
    "activation_checkpointing": InputName("checkpoint_activations"),
    "max_seq_length": InputName("max_length"),
    "model_max_length": InputName("max_length"),
    "lora_r": InputName("rank"),
    "r": InputName("rank"),
    "lora_alpha": InputName("alpha"),
    "lora_dropout": InputName("dropout"),
    "use_dora": InputName("dora"),
    "use_rslora": InputName("rank_stabilized"),
    "load_in_4bit": InputName("method", _quantization, words="`true` is `qlora`"),
    "neftune_noise_alpha": InputName("neftune"),
    "attn_implementation": InputName("attention"),
    "early_stopping_patience": InputName("early_stopping"),
    "load_best_model_at_end": InputName("keep_best"),
    "dataset_num_proc": InputName("workers"),
    "report_to": InputName("tracker", _tracker, words="a list has one name"),
    "hub_model_id": InputName("push_to"),
    "hub_private_repo": InputName("push_private"),
    "model_name_or_path": InputName("base"),
    "pretrained_model_name_or_path": InputName("base"),
    "max_new_tokens": InputName("max_completion_length"),
    "response_length": InputName("max_completion_length"),
    "vllm_gpu_memory_utilization": InputName("vllm_memory"),
    "guidance_scale": InputName("guidance"),
    "snr_gamma": InputName("min_snr_gamma"),
    "adam_beta1": InputName("beta1"),
    "adam_beta2": InputName("beta2"),
}
ACCUMULATED: Final = "gradient_accumulation_steps"
BATCHES: Final = ("per_device_train_batch_size", "train_batch_size")
EVERY: Final = "logging_steps"
NO_COUNTERPART: Final[Mapping[str, str]] = {
    "output_dir": "results are published below OUTPUT_DIR",
    "overwrite_output_dir": "results are published below OUTPUT_DIR",
    "logging_dir": "the recipe's outputs have TensorBoard's files",
    "run_name": "the job ID is the name of the run",
    "do_train": "the recipe determines the steps",
    "do_eval": "use `eval_fraction` for the validation split",
    "eval_strategy": "use `eval_every`",
    "evaluation_strategy": "use `eval_every`",
    "save_strategy": "use `save_every`",
    "logging_strategy": "use `logging_steps`",
    "logging_first_step": "use `logging_steps`",
    "save_total_limit": "the recipe keeps the checkpoints that a resume needs",
    "warmup_ratio": "use `warmup_steps`, a number of steps",
    "lr_scheduler_type": "use `schedule` and `decay_steps`",
    "per_device_eval_batch_size": "evaluation uses the training batch size",
    "max_grad_norm": "the recipe clips gradients to norm 1",
    "adam_epsilon": "the recipe's optimizer sets epsilon",
    "push_to_hub": "use `push_to` with the name of the repository",
    "target_modules": "the recipe chooses the layers",
    "lora_target_modules": "the recipe chooses the layers",
    "task_type": "the recipe determines the task type",
    "bias": "the recipe trains no biases",
    "remove_unused_columns": "use `columns` to select columns",
    "dataloader_num_workers": "the recipe has its own data loading",
    "dataloader_pin_memory": "the recipe has its own data loading",
    "group_by_length": "use `packing`",
    "ddp_find_unused_parameters": "the recipe determines this setting",
    "deepspeed": "use `sharding`",
    "fsdp": "use `sharding`",
    "instance_prompt": "use `trigger` and captions",
    "tf32": "use `precision`",
    "disable_tqdm": "logs contain no progress bars",
    "hub_token": "secrets come from the worker's environment",
    "resume_from_checkpoint": "a run resumes from its newest checkpoint",
}
"""Arguments without an input in any recipe, with the alternative."""


NO_PRESET: Final[Mapping[str, Any]] = {}


class TranslatedConfig(NamedTuple):
    """Recipe inputs translated from Hugging Face arguments."""

    inputs: Mapping[str, Any]
    ignored: Mapping[str, str]
    """Ignored arguments, each with the reason."""
    every: int = 1
    """Reporting interval of metrics to the platform, in training steps."""
    problems: tuple[Problem, ...] = ()


def input_of(recipe: Recipe, name: str) -> str:
    """Return the recipe input for a Hugging Face argument, or "" if the recipe has none."""
    known = NAMES.get(name)
    if name in recipe.inputs or known is None or recipe.id.partition("@")[0] in known.not_in:
        return ""
    return known.input if known.input in recipe.inputs else ""


def translate(
    recipe: Recipe, config: Mapping[str, Any], gpus: int, preset: Mapping[str, Any] = NO_PRESET
) -> TranslatedConfig:
    """Translate Hugging Face arguments to recipe inputs.

    `gpus` is the number of GPUs of the training, a factor of the global batch size. `preset` holds
    the inputs set by the preset. Unknown names stay unchanged, and the check of inputs reports
    them.
    """
    draft = _Draft(recipe)
    for name, value in config.items():
        draft.add(name, value)
    if "global_batch" in recipe.inputs:
        draft.add_global_batch(config, gpus, preset)
    return TranslatedConfig(draft.inputs, draft.ignored, draft.every, tuple(draft.problems))


class _Draft:
    """A translation of Hugging Face arguments in progress."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._sources: dict[str, str] = {}
        self.inputs: dict[str, Any] = {}
        self.ignored: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.every = 1

    def add(self, name: str, value: object) -> None:
        """Translate one Hugging Face argument."""
        recipe = self._recipe
        if name == "max_steps" and value == -1:
            self.ignored[name] = "-1 leaves the number of steps to the epochs, or to the recipe"
        elif name in recipe.inputs:
            self._put(name, name, value)
        elif name == EVERY:
            self._set_every(value)
        elif name == ACCUMULATED and "global_batch" in recipe.inputs:
            pass  # a factor in `add_global_batch`
        elif input := input_of(recipe, name):
            try:
                self._put(name, input, NAMES[name].read(value))
            except _Untranslatable as error:
                self.ignored[name] = str(error)
        elif name in NO_COUNTERPART:
            self.ignored[name] = NO_COUNTERPART[name]
        elif name in NAMES or name == ACCUMULATED:
            self.ignored[name] = f"{recipe.id} has no such input"
        else:
            self._put(name, name, value)

    def add_global_batch(
        self, config: Mapping[str, Any], gpus: int, preset: Mapping[str, Any]
    ) -> None:
        """Set the global batch size: batch size per device × accumulation steps × GPUs."""
        micro = next((config[name] for name in BATCHES if name in config), None)
        if micro is None and ACCUMULATED not in config:
            return
        if micro is None:
            micro = self._micro_batch(preset)
        processes = max(1, gpus)
        factors = [micro, config.get(ACCUMULATED, 1), processes]
        product = " × ".join(name for name in (*BATCHES, ACCUMULATED) if name in config)
        if all(type(each) is int for each in factors):
            self._put(f"{product} × {processes} GPUs", "global_batch", math.prod(factors))
            return
        words = f"{product}: whole numbers are required"
        self.problems.append(Problem("bad-value", words, None, "write 1, 2, …"))

    def _micro_batch(self, preset: Mapping[str, Any]) -> Any:
        """Return the recipe's micro batch: of the inputs, otherwise of the preset or the default."""
        for values in (self.inputs, preset):
            if "micro_batch" in values:
                return values["micro_batch"]
        return self._recipe.inputs["micro_batch"].default

    def _set_every(self, value: object) -> None:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            self.every = value
            return
        words = f'"{EVERY}" must be a whole number above 0'
        self.problems.append(Problem("bad-value", words, None, "use 1 for every step"))

    def _put(self, name: str, input: str, value: object) -> None:
        """Set an input, and report a problem if another argument set a different value."""
        if input in self.inputs and self.inputs[input] != value:
            words = f'"{self._sources[input]}" and "{name}" set different values for {input}'
            self.problems.append(Problem("clash", words, None, "remove one of the two"))
        self.inputs[input], self._sources[input] = value, name
