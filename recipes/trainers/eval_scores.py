"""Steps `before` and `after` of eval@1: what one model scores in tasks of lm-evaluation-harness, in all and by document.  Compares nothing."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import model_folder
from precision import ASKED, chosen

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

SAMPLED = 1000  # redrawings of documents, for errors that have no formula; lm-evaluation-harness itself makes a hundred times as many


class CannotEvaluate(Exception):
    """A task that is not there, or whose data is not."""


def main() -> None:
    options = _options()
    if options.model is None:
        print("evaluate: no base to compare with")
        return
    try:
        folder = model_folder.read(options.model, options.base)
        where, out = options.task_files and options.task_files.resolve(), options.out.resolve()
        manager = tasks(options.tasks, where)
        model = _model(folder, options)
        if where:
            os.chdir(where)  # data files of a task are named as they lie beside it
        found = scores(model, options, manager)
    except (model_folder.Unfit, CannotEvaluate) as error:
        sys.exit(f"evaluate: {error}")
    write(found, out, options.model.name)


def tasks(names: list[str], folder: Path | None) -> TaskManager:
    """The tasks by name: those of `folder`, and lm-evaluation-harness's own where one of them is wanted.  Raises CannotEvaluate."""
    from lm_eval.tasks import TaskManager

    if strange := [name for name in names if name.endswith((".yaml", ".yml"))]:
        raise CannotEvaluate(f"{strange[0]} is a file, and tasks are named by what it says as `task:`; its folder is given as task_files")
    local = TaskManager(include_path=str(folder), include_defaults=False) if folder else None
    if folder and not (local and local.all_tasks):
        raise CannotEvaluate(f"{folder.name} holds no task: no .yaml file in it says `task: NAME`")
    if local and set(names) <= set(local.all_tasks):
        return local
    everything = TaskManager(include_path=str(folder) if folder else None)
    for name in names:
        if not everything.match_tasks([name]):
            near = difflib.get_close_matches(name, [*(local.all_tasks if local else ()), *everything.all_tasks], 3)
            own = (
                f"; {folder.name} has {', '.join(local.all_tasks[:5])}" if folder and local else "; a task of your own is given by task_files=FOLDER"
            )
            raise CannotEvaluate(f'there is no task "{name}"' + (f": did you mean {' or '.join(near)}?" if near else own))
    return everything


def scores(model: Any, options: argparse.Namespace, manager: TaskManager) -> dict[str, Any]:
    """What lm-evaluation-harness says of the model.  Raises CannotEvaluate where a task's data is not to be had."""
    import lm_eval  # type: ignore[import-untyped]

    try:
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=options.tasks,
            task_manager=manager,
            num_fewshot=options.fewshot if options.fewshot >= 0 else None,
            limit=options.limit or None,
            apply_chat_template=options.chat,
            system_instruction=options.system or None,
            bootstrap_iters=SAMPLED,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except (FileNotFoundError, ConnectionError) as error:
        said = " ".join(str(error).split())
        offline = "; HF_HUB_OFFLINE is set, and the Hub's cache here does not have it" if os.environ.get("HF_HUB_OFFLINE") in ("1", "true") else ""
        raise CannotEvaluate(f"the data of {', '.join(options.tasks)} cannot be had: {said}{offline}") from error
    return found


def write(found: dict[str, Any], out: Path, name: str) -> None:
    """scores.json, the numbers of each task, and samples.jsonl, what each document gave."""
    out.mkdir(parents=True, exist_ok=True)
    kept = {
        "model": name,
        "results": {name: {key: value for key, value in each.items() if "," in key} for name, each in found["results"].items()},
        "higher_is_better": found["higher_is_better"],
        "documents": {name: counts["effective"] for name, counts in found["n-samples"].items()},
        "fewshot": found["n-shot"],
        "lm_eval": importlib.metadata.version("lm-eval"),
    }
    (out / "scores.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    with (out / "samples.jsonl").open("w") as file:
        for task, samples in found["samples"].items():
            for sample in samples:
                numbers = {name: sample[name] for name in sample["metrics"]}
                told = {
                    "task": task,
                    "filter": sample["filter"],
                    "document": sample["doc_hash"],
                    "answer": sample["filtered_resps"],
                    "metrics": numbers,
                }
                file.write(json.dumps(told, default=_plain) + "\n")
    for name, each in kept["results"].items():
        shown = ", ".join(f"{key.partition(',')[0]} {value:.4g}" for key, value in each.items() if "_stderr" not in key and isinstance(value, float))
        print(f"evaluate: {name}: {shown} of {kept['documents'].get(name, 'all its')} documents")


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python's; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _model(folder: model_folder.Folder, options: argparse.Namespace) -> Any:
    import torch
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
    from transformers import AutoTokenizer

    precision = chosen(options.precision)
    loaded: Any = model_folder.load(folder, precision, init=options.init, seed=options.seed)
    loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    own = folder.model if (folder.model / "tokenizer_config.json").exists() else folder.base
    tokenizer = AutoTokenizer.from_pretrained(own, local_files_only=True)
    if options.chat and not tokenizer.chat_template:
        raise CannotEvaluate(f"{folder.model.name} has no chat template: chat=false, or a model whose tokenizer has one")
    return HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=options.batch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a whole model, or an adapter; none: there is nothing to do")
    parser.add_argument("--base", type=Path, help="what the adapter belongs to")
    parser.add_argument("--tasks", type=json.loads, required=True, help="their names, a list in JSON")
    parser.add_argument("--task-files", type=Path, help="a folder of task files of the caller's")
    parser.add_argument("--fewshot", type=int, required=True, help="examples before each question; -1: as the task says")
    parser.add_argument("--limit", type=int, required=True, help="documents of each task, at most; 0: all")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--chat", type=lambda word: word == "true", required=True, help="by the tokenizer's chat template")
    parser.add_argument("--system", help="what the system says, for chats")
    parser.add_argument("--precision", choices=ASKED, required=True)
    parser.add_argument("--init", choices=["pretrained", "random"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    # A log keeps what people can act on.
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
