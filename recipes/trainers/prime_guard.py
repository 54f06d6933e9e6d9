"""Step `guard` of prime-rl@1: merge the caller's configuration with the recipe's, and refuse what would fail or teach nothing hours later.

Knows prime-rl's configuration as of its commit 559b447 (2026-08-21), not prime-rl: it works where that cannot be installed.  Each rule names its
source; paths are of that repository.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Config = dict[str, Any]

# prime_rl/configs/rl.py: RLConfig, which refuses other keys.
SECTIONS = (
    "trainer", "orchestrator", "inference", "env_vars", "run", "output_dir", "clean", "log", "ckpt", "resume", "monitors", "model", "tokenizer",
    "max_steps", "seq_len", "weight_broadcast", "rollout_transport", "deployment", "slurm", "dry_run",
)  # fmt: skip
SEQ_LEN = 2048  # trainer.py: ModelConfig.seq_len, orchestrator.py: OrchestratorConfig.seq_len
BATCH, GROUP = 128, 1  # orchestrator.py: resolve_batching
GPUS_PER_NODE = 8  # rl.py: BaseDeploymentConfig

# What the recipe decides itself, with what to do instead.
OURS = {
    "output_dir": "results go where the recipe says; leave it out",
    "run": "the run directory is the recipe's; leave it out",
    "resume": "the recipe resumes from the newest whole checkpoint by itself; leave it out",
    "clean": "it would delete the checkpoints to resume from; leave it out",
    "dry_run": "nothing would be trained; leave it out",
    "slurm": "the recipe runs the training on its own machine; leave it out, or give the file to prime-rl yourself",
    "ckpt.output_dir": "checkpoints lie where the recipe keeps them; leave it out",
    "trainer.ckpt": "checkpoints are the recipe's, on trainer and orchestrator alike: save_every=STEPS",
    "orchestrator.ckpt": "checkpoints are the recipe's, on trainer and orchestrator alike: save_every=STEPS",
}
STEPS_APART = "# max_steps is no part of this file: a greater number continues the same training.  Say --max-steps beside it.\n"
# Sections that have moved or gone, and what they are now.
MOVED = {
    "trainer.model.experimental.lora": "trainer.model.lora (pull request 1440)",
    "lora": "trainer.model.lora",
    "wandb": "monitors.wandb",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "orchestrator.env": "orchestrator.train.source",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.lora_name": "orchestrator.model.lora.name",
}

# Which of its values are what: what else is read here goes by them.
WHOLE = (
    "max_steps", "seq_len", "trainer.model.seq_len", "trainer.model.lora.rank", "orchestrator.seq_len", "orchestrator.batch_size",
    "orchestrator.token_batch_size", "orchestrator.group_size", "orchestrator.train.sampling.max_completion_tokens", "ckpt.interval",
    "deployment.num_train_gpus", "deployment.num_infer_gpus", "deployment.gpus_per_node",
)  # fmt: skip
TABLES = (
    "trainer", "trainer.model", "trainer.model.lora", "trainer.optim", "orchestrator", "orchestrator.train", "orchestrator.train.sampling",
    "inference", "ckpt", "monitors", "model", "weight_broadcast", "deployment",
)  # fmt: skip
# Asks prime-rl's own models, where that is installed, with the configuration as JSON on stdin: a line for each fault.
ASK = """
import json, sys
from prime_rl.configs.rl import RLConfig
from pydantic import ValidationError
try:
    RLConfig.model_validate(json.load(sys.stdin))
except ValidationError as error:
    for each in error.errors():
        print(".".join(map(str, each["loc"])) + ": " + each["msg"])
"""


def main() -> None:
    options = _options()
    try:
        config, notes = merge(json.loads(options.settings.read_text(encoding="utf-8")), options.config, json.loads(options.set))
    except ValueError as error:
        sys.exit(f"guard: {error}")
    wrong = mistyped(config) or [*faults(config), *_not_text_only(config, options.base)]
    if not wrong:
        wrong = refused(config, options.launcher)
    notes += near_misses(config)
    notes += doubts(config)
    options.report.write_text(json.dumps({"faults": wrong, "warnings": notes}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for note in notes:
        print(f"guard: warning: {note}")
    if wrong:
        told = "\n  ".join(wrong)
        sys.exit(f"guard: {len(wrong)} {'thing' if len(wrong) == 1 else 'things'} to put right before anything is rented or trained\n  {told}")
    options.out.write_text(STEPS_APART + toml(_for_train(config, options)), encoding="utf-8")
    print(f"guard: {options.out}, a checkpoint every {options.save_every} of {config['max_steps']} steps")


def merge(settings: Config, file: Path | None, more: Config) -> tuple[Config, list[str]]:
    """What prime-rl is to be told, and what is worth a word.  `defaults` of the recipe, then the caller's file, then `given` inputs, then `set`.

    Raises ValueError when the file is not TOML, or a value is of another kind than prime-rl takes.
    """
    config: Config = {}
    notes: list[str] = []
    _lay(config, _without_null(settings["defaults"]))
    if file:
        try:
            theirs = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file.name} is not TOML: {error}") from error
        if wrong := mistyped(theirs):
            raise ValueError(f"{file.name}: {'; '.join(wrong)}")
        _lay(config, theirs)
        for path, value in _leaves(settings["always"]):
            if (said := _at(theirs, path)) is not None and said != value:
                notes.append(f"{file.name} says {path} = {said!r}; the recipe's input goes over it: {value!r}")
        if named := _at(theirs, "model.name"):
            notes.append(f"{file.name} says model.name = {named!r}; the recipe's input base goes over it")
    _lay(config, _without_null(settings["given"]))
    if wrong := mistyped(more):
        raise ValueError(f"set: {'; '.join(wrong)}")
    _lay(config, more)
    _lay(config, settings["always"])
    if name := settings.get("environment"):
        sources = config.setdefault("orchestrator", {}).setdefault("train", {}).setdefault("source", [])
        if not sources:
            sources.append({"name": name, "env": {"taskset": {"id": name}}})
    return config, notes


def mistyped(config: Config) -> list[str]:
    """Values that are not of the kind that prime-rl takes, of those that are read here."""
    wrong = []
    for path in TABLES:
        if (value := _at(config, path)) is not None and not isinstance(value, dict):
            wrong.append(f"{path} is a section, not {value!r}: [{path}]")
    for path in WHOLE:
        value = _at(config, path)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            wrong.append(f"{path} is a whole number from 1 on, not {value!r}")
    source = _at(config, "orchestrator.train.source")
    if source is not None and not (source == [] or _is_tables(source)):
        wrong.append(f"orchestrator.train.source is a list of environments, not {source!r}: [[orchestrator.train.source]]")
    return wrong


def near_misses(config: Config) -> list[str]:
    """Names below trainer and orchestrator that look like a slip of one that is known here.  prime-rl refuses names that it does not have."""
    known = {
        path for path in (*WHOLE, *TABLES, "orchestrator.train.source", "orchestrator.algo", "orchestrator.eval", "trainer.data", "trainer.loss")
    }
    told = []
    for path in sorted(_paths(config)):
        above, _, name = path.rpartition(".")
        beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == above]
        close = difflib.get_close_matches(name, beside, 1, 0.85)
        if above and path not in known and close:
            told.append(f"{path}: is it {close[0]}?  prime-rl refuses names that it does not have")
    return told


def _paths(config: Config, above: str = "") -> Iterator[str]:
    for name, value in config.items():
        path = f"{above}.{name}" if above else name
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)


def refused(config: Config, launcher: list[str]) -> list[str]:
    """What prime-rl's own models refuse, asked of the Python beside the launcher; nothing where prime-rl is not installed."""
    python = _python_of(launcher)
    if python is None:
        return []
    try:
        told = subprocess.run([*python, "-c", ASK], input=json.dumps(config), capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"guard: prime-rl's models could not be asked: {error}")
        return []
    if told.returncode:
        print("guard: prime-rl is not installed here: names and types below its sections are checked when it starts")
        return []
    return told.stdout.splitlines()


def _python_of(launcher: list[str]) -> list[str] | None:
    """The words that start the Python of prime-rl, from those that start its `rl`."""
    *before, program = launcher
    if Path(program).name != "rl":
        return None
    if before:
        return [*before, "python"] if shutil.which(before[0]) else None
    found = shutil.which(program)
    python = Path(found).parent / "python" if found else None
    return [str(python)] if python is not None and python.exists() else None


def faults(config: Config) -> list[str]:
    """Everything in it that makes the training fail, or teach something else than was meant; each with what to do."""
    wrong = [f"{path}: {remedy}" for path, remedy in OURS.items() if _at(config, path) is not None]
    wrong += [f"{old} is not read any more; it is {new} now" for old, new in MOVED.items() if _at(config, old) is not None]
    for section in sorted(set(config) - set(SECTIONS) - set(MOVED)):
        close = difflib.get_close_matches(section, SECTIONS, 1)
        hint = f"; is it {close[0]}?" if close else f"; it has {', '.join(SECTIONS)}"
        wrong.append(f"prime-rl has no section {section}{hint}")

    # prime_rl/utils/validation.py: validate_shared_seq_len; the shared value fills in where a part names none.
    shared = config.get("seq_len") or SEQ_LEN
    trainer, orchestrator = _at(config, "trainer.model.seq_len") or shared, _at(config, "orchestrator.seq_len") or shared
    if trainer < orchestrator:
        wrong.append(
            f"trainer.model.seq_len {trainer} is less than orchestrator.seq_len {orchestrator}: longer rollouts could not be trained on; "
            "raise it, or say seq_len once at the top"
        )
    # orchestrator.py: TrainSamplingConfig sends top_p = 1.0; a cut distribution has other log-probabilities than those that the trainer computes.
    for path, _ in _leaves(config):
        name = path.rsplit(".", 1)[-1]
        if name == "mask_truncated_completions":
            wrong.append(
                f"{path}: prime-rl has no such parameter any more, and completions that are masked would teach with a wrong advantage; remove it"
            )
        elif name in ("top_p", "top_k", "min_p") and path.startswith("orchestrator.") and ".eval." not in path:
            wrong.append(f"{path}: rollouts of a cut distribution are not those that the trainer learns from; remove it, temperature may be set")
    lora = _at(config, "trainer.model.lora")
    broadcast = _at(config, "weight_broadcast.type")
    # rl.py: auto_setup_weight_broadcast, trainer.py: validate_lora_broadcast.
    if lora is not None and broadcast in ("nccl", "nixl"):
        wrong.append(f'weight_broadcast.type {broadcast} does not know LoRA; weight_broadcast.type = "filesystem"')
    # trainer.py: cpu_offload_mutual_exclusion; the optimizer is offloaded unless said otherwise.
    if _at(config, "trainer.model.fsdp_cpu_offload") and _at(config, "trainer.model.optim_cpu_offload") is not False:
        wrong.append("trainer.model.fsdp_cpu_offload and optim_cpu_offload exclude each other: trainer.model.optim_cpu_offload = false")
    # orchestrator.py: resolve_batching, one_env_or_more.
    batch, group = _at(config, "orchestrator.batch_size") or BATCH, _at(config, "orchestrator.group_size") or GROUP
    if _at(config, "orchestrator.token_batch_size") is None and batch % group:
        wrong.append(f"orchestrator.batch_size {batch} is no multiple of group_size {group}; change one of them")
    if not _at(config, "orchestrator.train.source") and not _at(config, "trainer.data.fake"):
        wrong.append("no environment to learn in: environment=ID, or [[orchestrator.train.source]] in the configuration")
    # rl.py: validate_deployment, validate_gpu_count.
    if _at(config, "deployment.type") == "multi_node":
        wrong.append("deployment.type multi_node needs SLURM, which this recipe does not start; single_node, or prime-rl's own way")
    train, infer, most = (_at(config, f"deployment.{name}") for name in ("num_train_gpus", "num_infer_gpus", "gpus_per_node"))
    if (train or 1) + (infer or 1) > (most or GPUS_PER_NODE):
        wrong.append(f"{train or 1} GPUs to train and {infer or 1} to generate are more than deployment.gpus_per_node {most or GPUS_PER_NODE}")
    return wrong


def doubts(config: Config) -> list[str]:
    """What may be meant."""
    told = []
    for source in _at(config, "orchestrator.train.source") or []:
        runtime, harness = _at(source, "env.agent.runtime.type"), _at(source, "env.agent.harness.id")
        if runtime not in (None, "subprocess") and harness not in (None, "null"):
            name = source.get("name") or _at(source, "env.taskset.id")
            told.append(f"environment {name} calls tools in a runtime of its own ({runtime}): every call waits for that machine; watch time_tool")
    if _at(config, "orchestrator.group_size") in (None, 1) and _at(config, "orchestrator.algo.type") in (None, "grpo", "max_rl"):
        told.append("orchestrator.group_size is 1: an advantage relative to a group of one is always zero, and nothing is learned; 8 or 16 is usual")
    return told


def toml(config: Config) -> str:
    """The configuration as TOML, which has no null: what is None is left out."""
    return "\n".join(_table(config, "")).lstrip("\n") + "\n"


def _table(table: Config, name: str) -> Iterator[str]:
    below = {key: value for key, value in table.items() if isinstance(value, dict) or _is_tables(value)}
    for key, value in table.items():
        if key not in below and value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in below.items():
        path = f"{name}.{_key(key)}" if name else _key(key)
        for item in value if isinstance(value, list) else [value]:
            yield f"\n[[{path}]]" if isinstance(value, list) else f"\n[{path}]"
            yield from _table(item, path)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return _text(str(value))


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for this one, which JSON writes as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if key and all(letter.isascii() and (letter.isalnum() or letter in "_-") for letter in key) else _text(key)


def _for_train(config: Config, options: argparse.Namespace) -> Config:
    """With what the recipe needs: checkpoints that it keeps, numbers in a file, a server to generate with.

    Without the number of steps, which step `train` says itself: what it is given is a part of its state, which a greater number continues.
    """
    config = {name: value for name, value in config.items() if name != "max_steps"}
    config.setdefault("ckpt", {}).update(interval=options.save_every, keep_last=options.keep)
    config.setdefault("monitors", {}).setdefault("file", {})
    config.setdefault("inference", {})
    config.get("model", {}).pop("name", None)  # where it is only the step that trains knows
    return config


def _not_text_only(config: Config, base: Path) -> list[str]:
    """prime_rl/configs/shared.py: a model with a vision part wants [model.vlm]; without it the trainer takes the text model to be all of it."""
    file = base / "config.json"
    if not file.exists():
        return [f"{base} is no model folder: it has no config.json"]
    known = json.loads(file.read_text(encoding="utf-8"))
    vision = next((name for name in ("vision_config", "vision_tower", "visual") if known.get(name)), None)
    if vision is None or _at(config, "model.vlm") or _at(config, "trainer.model.vlm"):
        return []
    return [
        f"the model ({', '.join(known.get('architectures') or ['?'])}) has a vision part: take the text-only one of its family, or say [model.vlm]"
    ]


def _at(config: object, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _leaves(config: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    elif _is_tables(config):
        assert isinstance(config, list)
        for number, item in enumerate(config):
            yield from _leaves(item, f"{path}.{number}")
    else:
        yield path, config


def _lay(config: Config, over: Config) -> None:
    """Deep, as prime-rl lays one file over another; lists are replaced whole."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            _lay(config[name], value)
        else:
            config[name] = json.loads(json.dumps(value, default=str))


def _without_null(config: Config) -> Config:
    inner = {name: _without_null(value) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: value for name, value in inner.items() if value is not None and value != {}}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the recipe's inputs as prime-rl names them, JSON")
    parser.add_argument("--config", type=Path, help="the caller's own TOML")
    parser.add_argument("--set", default="{}", help="anything else, JSON, merged last")
    parser.add_argument("--launcher", nargs="+", default=["rl"], help="the words that start prime-rl's `rl`")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
