"""What a training made, as a folder: saved in the same bytes each time, loaded as its record says.  Does not know how it was trained."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import text_record
import torch
from loop import draw, fail
from text_model import DTYPES, as_loaded, in_four_bits, load_base, nf4

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save(model: Any, folder: Path, *, state: dict[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None) -> None:
    """Write an adapter as peft reads it, or a whole model as transformers does, in bytes that depend on the training only.

    `state`: the weights, where the model holds a part of them.  `dtype`: what they are written as, where not as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if dtype is not None:
        state = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in (state or model.state_dict()).items()}
    model.save_pretrained(str(folder), **({} if state is None else {"state_dict": state}))
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, by peft
    if dtype is not None:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "dtype": str(dtype).removeprefix("torch.")}, indent=2, sort_keys=True) + "\n")
    file = folder / "adapter_config.json"
    if not file.exists():
        return
    config = json.loads(file.read_text())
    # A path in an attempt directory says nothing to anybody, and peft writes sets in the order of this process's hashes.
    config["base_model_name_or_path"] = None
    for name in ("target_modules", "modules_to_save"):
        if isinstance(config.get(name), list):
            config[name] = sorted(config[name])
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(base: Path, tuned: Path, *, judge: bool) -> torch.nn.Module:
    """What a training made, as its record says: a whole model, or an adapter on its base.

    `judge`: with a head of one number, or of one for each label of the record.
    """
    made = text_record.read(tuned)
    loads = partial(load_judge, labels=made.get("labels", [])) if judge else load_base
    adapter = (tuned / "adapter_config.json").exists()
    found = loads(base, made["init"], made["seed"], made["precision"]) if adapter else loads(tuned, "pretrained", made["seed"], made["precision"])
    if judge:
        from transformers import AutoTokenizer

        # It reads its number at the last token that does not fill up.
        found.config.get_text_config().pad_token_id = AutoTokenizer.from_pretrained(tuned, local_files_only=True).pad_token_id
    if not adapter:
        return found
    from peft import PeftModel

    adapted: torch.nn.Module = PeftModel.from_pretrained(found, str(tuned))
    return adapted


def load_judge(
    base: Path, init: str, seed: int, precision: str, *, labels: Sequence[str] = (), four_bits: bool = False, attention: str | None = None
) -> PreTrainedModel:
    """The model with a head of a number for each of `labels`, or of one number; with `init` random all of it is drawn.

    The head is drawn from the seed where the folder holds none of this size.  With `four_bits` its linear layers lie in memory as NF4.  `attention`
    is as for `load_base`.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging as told

    # A log keeps what people can act on; that the head is new, which is said at length, is what is wanted here.
    told.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    draw("init", seed)
    head: dict[str, Any] = {"num_labels": 1}
    if labels:
        named = dict(enumerate(labels))
        head = {"id2label": named, "label2id": {label: number for number, label in named.items()}, "problem_type": "single_label_classification"}
    if init == "random":
        config = AutoConfig.from_pretrained(base, local_files_only=True, **head)
        fresh: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=attention
        )
        return in_four_bits(fresh, base, partial(load_judge, labels=labels), precision) if four_bits else fresh.to(DTYPES[precision])
    if not any(base.glob("*.safetensors")) and not any(base.glob("*.bin")):
        fail(f"{base} holds no weights (*.safetensors); init=random would train from random ones")
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        base, dtype=DTYPES[precision], local_files_only=True, attn_implementation=attention, ignore_mismatched_sizes=bool(labels), **head,
        **(nf4(precision) if four_bits else {}),
    )  # fmt: skip
    return as_loaded(model)
