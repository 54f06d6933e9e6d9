"""Claims about the trainers of `sft@1`, run as programs of their own: what they learn, what a kill leaves, what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.library import forks
from tests.library.siblings import siblings

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
BASE = ROOT / "fixtures" / "tiny-llama"
TOPICS = ROOT / "fixtures" / "python-topics" / "topics.jsonl"
STEPS = 30

pytestmark = pytest.mark.xdist_group("sft")


def program(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(TRAINERS / name), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RECIPE_", "ACCELERATE_"))
    }
    return {
        **keep,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def launched(argv: Sequence[str], processes: int = 1) -> list[str]:
    """A trainer's command line as the engine makes it from a recipe."""
    several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    return [argv[0], *launch, "--dynamo_backend", "no", *several, *argv[1:]]


def run(argv: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    return forks.run(argv, env=environment(**env), timeout=120)


def prepare(data: Path, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run(
        program(
            "sft_data.py", "--data", data, "--base", BASE, "--out", out, "--max-length", 128, *more
        )
    )


def training(
    tokens: Path, out: Path, *more: object, processes: int = 1, max_steps: int = STEPS
) -> list[str]:
    alone = program(
        "text_train.py", "--data", tokens, "--base", BASE, "--out", out / "weights", "--history", out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--init", "random", "--max-steps", max_steps, "--rank", 8, "--alpha", 16, "--global-batch", 16,
        "--micro-batch", 8, "--save-every", 10, "--learning-rate", 0.01, "--warmup-steps", 5, "--eval-every", 10, "--train-embeddings", *more,
    )  # fmt: skip
    return launched(alone, processes) if processes > 1 else alone


def signal_at(
    line: str,
    argv: Sequence[str],
    number: signal.Signals,
    gate: Path,
    *,
    whole: bool = True,
    **env: str,
) -> str:
    """Signal every process of it, or the launcher alone, when it has printed `line` and waits.  What it printed after that."""
    said, status = forks.signal_at(line, argv, number, gate, whole=whole, env=environment(**env))
    assert status == -number, said
    return said


def checkpoints(out: Path) -> list[Path]:
    return sorted(
        (out / "checkpoints").glob("checkpoint-*"),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sft") / "tokens"
    done = prepare(TOPICS, out, "--packing", "true", "--eval-fraction", "0.1")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training that nobody disturbed."""
    out = tmp_path_factory.mktemp("trained")
    done = run(
        launched(training(tokens, out)),
        RECIPE_WORLD_SIZE="1",
        RECIPE_METRICS=str(out / "metrics.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def sibling() -> Iterator[None]:
    """The trainers' modules, importable as they import each other."""
    with siblings():
        yield


def test_the_loss_falls_and_is_reported_once_a_step(trained: Path) -> None:
    told = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    assert all(line["tokens_per_second"] > 0 and line["lr"] > 0 for line in told)
    assert told[-1]["eval_loss"] < told[9]["eval_loss"] - 0.5  # 5.94 to 4.82 when this was written
    assert told[-1]["loss"] < told[0]["loss"] - 1.5  # 6.94 to 4.73


ROWS = {
    "text": {"text": "the assert statement is convenient"},
    "prompt-completion": {"prompt": "the assert statement", "completion": " is convenient"},
    "messages": {
        "messages": [
            {"role": "user", "content": "assert?"},
            {"role": "assistant", "content": "a statement"},
        ]
    },
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_format_train(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[kind]) + "\n")
    done = prepare(tmp_path / "rows.jsonl", tmp_path / "tokens")
    assert f"1 rows ({kind})" in done.stdout, done.stderr
    done = run(training(tmp_path / "tokens", tmp_path, max_steps=2))
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads(line)["loss"] for line in (tmp_path / "history.jsonl").read_text().splitlines()
    )
    assert second < first


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_what_is_exported_predicts_better_than_its_base(
    kind: str, tokens: Path, trained: Path, tmp_path: Path
) -> None:
    model, report = tmp_path / "model", tmp_path / "report"
    done = run(
        program(
            "text_export.py",
            "--trainer",
            "sft",
            "--kind",
            kind,
            "--base",
            BASE,
            "--weights",
            trained / "weights",
            "--out",
            model,
        )
    )
    assert done.returncode == 0, done.stderr
    done = run(
        program(
            "text_evaluate.py",
            "--data",
            tokens,
            "--base",
            BASE,
            "--model",
            model,
            "--micro-batch",
            8,
            "--report",
            report,
        )
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((report / "report.json").read_text())
    assert found["perplexity_before"] == pytest.approx(
        1037, rel=0.05
    )  # about the 1024 of a model that knows nothing
    assert found["times_better"] > 4  # 8.4 when this was written
    assert f"{found['perplexity_after']:.2f}" in (report / "report.md").read_text()


CHATS = [
    ("assert?", "a statement"),
    ("and del?", "it deletes"),
    ("what is if?", "a choice"),
    ("and while?", "a loop"),
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few answers learned by heart."""
    out = tmp_path_factory.mktemp("chats")
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in CHATS
    ]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare(out / "rows.jsonl", out / "tokens").returncode == 0
    done = run(
        training(
            out / "tokens",
            out,
            "--eval-every",
            0,
            "--save-every",
            1000,
            "--global-batch",
            4,
            "--micro-batch",
            4,
            max_steps=60,
        )
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.usefixtures("sibling")
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_model_that_learned_from_chats_stops(kind: str, chats: Path, tmp_path: Path) -> None:
    """As people load it: the folder's tokenizer and generation settings, and for an adapter the base beneath it."""
    from peft import PeftModel
    from text_model import load_base  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    done = run(
        program(
            "text_export.py",
            "--trainer",
            "sft",
            "--kind",
            kind,
            "--base",
            BASE,
            "--weights",
            chats / "weights",
            "--out",
            tmp_path,
        )
    )
    assert done.returncode == 0, done.stderr
    model: Any = (
        AutoModelForCausalLM.from_pretrained(tmp_path)
        if kind == "merged"
        else PeftModel.from_pretrained(load_base(BASE, "random", 0, "no"), tmp_path)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    ending = GenerationConfig.from_pretrained(tmp_path)
    for asked, answer in CHATS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(
            **prompt, generation_config=ending, max_new_tokens=64, do_sample=False
        )[0, prompt["input_ids"].shape[1] :]
        assert len(ids) < 64 and tokenizer.decode(ids, skip_special_tokens=True) == answer
        assert ids[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


COMMIT = "ab" * 20
CARD = "---\nlicense: apache-2.0\nlicense_link: https://licence\nlanguage: [en]\n---\n# Tiny\n"
LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
weights, out = Path(sys.argv[2]), sys.argv[3]
from runner.storage import sources
from runner.storage.workspace import Workspace
with Workspace.open(Path()) as ws:
    identity = sources.resolve(ws, "hf", "hf://acme/tiny@" + sys.argv[4], update=False)
    base = sources.fetch(ws, "hf", "hf://acme/tiny@" + sys.argv[4], identity, ["*.json", "*.safetensors"])
sys.argv = ["text_export.py", "--trainer", "sft", "--kind", "adapter", "--base", str(base), "--weights", str(weights), "--out", out]
import text_export
text_export.main()
line = next(line for line in Path(out, "README.md").read_text().splitlines() if "from_pretrained(folder)" in line)
from peft import AutoPeftModelForCausalLM
folder = out
exec(line)
from transformers import AutoTokenizer
prompt = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "assert?"}], add_generation_prompt=True, return_tensors="pt")
print(model.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist())
"""


def drawn(folder: Path, weights: Path) -> None:
    """The base with the weights that `init=random` draws, and what was trained on it as if they had been its own."""
    from text_model import load_base

    shutil.copytree(BASE, folder, dirs_exist_ok=True)
    load_base(BASE, "random", 0, "no").save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    record = json.loads((weights / "training.json").read_text())
    (weights / "training.json").write_text(json.dumps({**record, "init": "pretrained"}))


@pytest.mark.usefixtures("sibling")
def test_an_adapter_finds_its_base_of_the_hub_without_a_network(
    chats: Path, tmp_path: Path
) -> None:
    weights = Path(shutil.copytree(chats / "weights", tmp_path / "weights"))
    repo = tmp_path / "home" / "hub" / "models--acme--tiny"
    drawn(repo / "snapshots" / COMMIT, weights)
    (tmp_path / "load.py").write_text(LOAD)
    argv = [sys.executable, "load.py", str(TRAINERS), str(weights), str(tmp_path / "out"), COMMIT]
    env = environment(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout.splitlines()[-1])
    assert 2 in answered[-6:]  # it has learned to end
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("acme/tiny", COMMIT)
    header = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert header == {
        "base_model": "acme/tiny", "base_model_relation": "adapter", "library_name": "peft", "license": "apache-2.0",
        "license_link": "https://licence", "pipeline_tag": "text-generation", "tags": ["lora", "sft"],
    }  # fmt: skip


@pytest.mark.usefixtures("sibling")
def test_a_base_that_was_a_folder_is_named_without_its_place(chats: Path, tmp_path: Path) -> None:
    weights = Path(shutil.copytree(chats / "weights", tmp_path / "weights"))
    drawn(tmp_path / "mine", weights)
    for kind in ("adapter", "merged"):
        out = tmp_path / kind
        done = run(
            program(
                "text_export.py",
                "--trainer",
                "sft",
                "--kind",
                kind,
                "--base",
                tmp_path / "mine",
                "--weights",
                weights,
                "--out",
                out,
            )
        )
        assert done.returncode == 0, done.stderr
        assert not [
            file.name
            for file in out.iterdir()
            if file.suffix in (".json", ".md") and str(tmp_path) in file.read_text()
        ]
        assert "base_model:" not in (out / "README.md").read_text()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("./mine", None)
    assert "Run this where that folder is" in (tmp_path / "adapter" / "README.md").read_text()


def test_an_adapter_on_random_weights_names_no_base(chats: Path, tmp_path: Path) -> None:
    done = run(
        program(
            "text_export.py",
            "--trainer",
            "sft",
            "--kind",
            "adapter",
            "--base",
            BASE,
            "--weights",
            chats / "weights",
            "--out",
            tmp_path,
        )
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
        is None
    )
    assert "Nothing can be loaded beneath it" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(("had", "has"), [(None, 2), (0, 2), ([0, 2], [0, 2]), ([0, 1], 2)])
@pytest.mark.usefixtures("sibling")
def test_generation_stops_where_the_answers_end_and_where_else_it_did(
    had: object, has: object, tmp_path: Path
) -> None:
    from text_export import stop_at  # type: ignore[import-not-found]

    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": had, "temperature": 0.7})
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<|endoftext|>", "special": true}}'
    )
    stop_at(tmp_path, BASE, "<|im_end|>", 2)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": has,
        "temperature": 0.7,
    }
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "eos_token": {"content": "<|im_end|>", "special": True}
    }


def test_a_training_whose_launcher_dies_saves_and_ends(tokens: Path, tmp_path: Path) -> None:
    argv = launched(training(tokens, tmp_path, "--save-every", 1000))
    said = signal_at(
        "step 3/", argv, signal.SIGKILL, tmp_path / "gate", whole=False, RECIPE_WORLD_SIZE="1"
    )
    (saved,) = checkpoints(tmp_path)
    step = json.loads((saved / "recipe.json").read_text())["step"]
    assert 3 <= step < STEPS
    assert f"asked to end; saved step {step}" in said


@pytest.mark.parametrize("processes", [1, 2])
def test_fewer_processes_than_asked_for_are_refused(
    processes: int, tokens: Path, tmp_path: Path
) -> None:
    done = run(
        training(tokens, tmp_path, processes=processes), RECIPE_WORLD_SIZE=str(processes + 1)
    )
    assert done.returncode != 0
    complaint = f"{processes + 1} processes were asked for, {processes} came up"
    assert complaint in done.stderr
    if processes > 1:  # below all that the launcher has to say, where people look
        assert complaint in done.stderr.splitlines()[-2]
    assert not (tmp_path / "checkpoints").exists()


def test_half_precision_of_a_gpu_is_refused_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text("from loop import start; start()")
    done = run(
        [sys.executable, str(tmp_path / "start.py")],
        PYTHONPATH=str(TRAINERS),
        ACCELERATE_MIXED_PRECISION="fp16",
    )
    assert (done.returncode, done.stderr) == (
        1,
        "train: precision fp16 needs a GPU; on a CPU use bf16 or no\n",
    )


def test_a_loss_that_is_no_number_ends_the_training(tokens: Path, tmp_path: Path) -> None:
    done = run(training(tokens, tmp_path, "--learning-rate", 1e38))
    assert done.returncode == 1
    assert "the loss is nan at step 2; a smaller learning_rate" in done.stderr
    assert not checkpoints(tmp_path)


@pytest.fixture
def kept(sibling: None, tmp_path: Path) -> Any:
    """Checkpoints as the trainers that have a loop of their own keep them, with one in the folder."""
    import torch
    from loop import Checkpoints  # type: ignore[import-not-found]

    checkpoints = Checkpoints(tmp_path / "kept", {"world": 1, "data": "ab", "learning_rate": 0.01})
    checkpoints.save(10, {"weight": torch.ones(4)}, ["{}\n"])
    return checkpoints


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"world": 2}, "world was 1, is 2"),
        ({"data": "other"}, "data was"),
        ({"learning_rate": 1.0}, "learning_rate was 0.01, is 1.0"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    changed: dict[str, object], complaint: str, kept: Any
) -> None:
    checkpoint = kept.folder / "step-000010"
    step, tensors, history = kept.load(checkpoint)
    assert (step, history, tensors["weight"].sum()) == (10, ["{}\n"], 4)
    with pytest.raises(SystemExit, match=complaint):
        type(kept)(kept.folder, {**kept.settings, **changed}).load(checkpoint)


@pytest.mark.parametrize("damage", ["short", "flipped", "gone", "no record"])
def test_a_damaged_checkpoint_is_refused(damage: str, kept: Any) -> None:
    torn = kept.folder / "step-000010"
    state = torn / "state.safetensors"
    whole = state.read_bytes()
    if damage == "short":
        state.write_bytes(whole[:-4])
    elif damage == "flipped":
        state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        (state if damage == "gone" else torn / "checkpoint.json").unlink()
    with pytest.raises(SystemExit, match=r"cannot resume from .*step-000010"):
        kept.load(torn)


SAVE = """
import os, signal, sys
from pathlib import Path
import torch
from loop import Checkpoints
if len(sys.argv) > 2:
    def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
    import loop
    setattr(*{"sync": (loop, "_sync"), "rename": (Path, "rename")}[sys.argv[2]], killed)
Checkpoints(Path(sys.argv[1]), {}).save(10, {"weight": torch.ones(4)}, ["{}"])
"""


@pytest.mark.parametrize("at", ["sync", "rename"])
def test_a_save_that_was_killed_leaves_no_checkpoint(at: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (tmp_path / "save.py").write_text(SAVE)
    save = [sys.executable, str(tmp_path / "save.py"), str(folder)]
    assert run([*save, at], PYTHONPATH=str(TRAINERS)).returncode == -signal.SIGKILL
    assert list(folder.iterdir()) and not list(folder.glob("step-*"))
    for _ in range(2):  # over what the kill left, then over itself
        assert run(save, PYTHONPATH=str(TRAINERS)).returncode == 0
        assert [path.name for path in folder.iterdir()] == ["step-000010"]


@pytest.mark.usefixtures("sibling")
def test_a_line_torn_by_a_kill_is_sent_again(tmp_path: Path) -> None:
    from loop import Metrics

    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    metrics = Metrics(file)
    for step in (1, 2, 3):
        metrics.tell(step, loss=float(step))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0}
    ]  # fmt: skip


@pytest.mark.usefixtures("sibling")
def test_packed_documents_do_not_see_each_other(tokens: Path) -> None:
    import torch
    from text_model import batch_of, load_base, loss_of  # type: ignore[import-not-found]
    from tokens import Tokens  # type: ignore[import-not-found]

    class Apart(Tokens):  # type: ignore[misc]
        """Each document of sequence 0 as a sequence of its own."""

        def documents(self, sequence: int):  # type: ignore[no-untyped-def]
            return [super().documents(first)[sequence]]

    packed, apart = Tokens(tokens, "train"), Apart(tokens, "train")
    first = next(n for n in range(len(packed)) if len(packed.documents(n)) > 1)
    model = load_base(BASE, "random", 0, "no").eval()
    together = batch_of(packed, [first], torch.device("cpu"))
    alone = batch_of(apart, range(len(packed.documents(first))), torch.device("cpu"))
    with torch.no_grad():
        assert float(loss_of(model, together)) == pytest.approx(
            float(loss_of(model, alone)), rel=1e-5
        )
        seeing = torch.arange(together.tokens.shape[1])[None]
        blind = float(loss_of(model, together))
        together.positions.copy_(seeing)
        assert float(loss_of(model, together)) != pytest.approx(blind, rel=1e-5)


@pytest.mark.usefixtures("sibling")
@pytest.mark.parametrize("tied", [False, True])
def test_learned_embeddings_come_back_with_the_adapter(tied: bool, tmp_path: Path) -> None:
    import torch
    from adapters import adapted  # type: ignore[import-not-found]
    from peft import PeftModel
    from text_model import load_base

    for file in BASE.iterdir():
        (tmp_path / file.name).write_text(
            file.read_text().replace(
                '"tie_word_embeddings": false', f'"tie_word_embeddings": {str(tied).lower()}'
            )
        )
    options = Namespace(
        method="lora",
        rank=4,
        alpha=8.0,
        rank_stabilized=False,
        dora=False,
        dropout=0.0,
        train_embeddings=True,
        seed=0,
    )
    model = adapted(load_base(tmp_path, "random", 0, "no"), options)
    ids = torch.arange(32)[None]
    before = model(input_ids=ids, labels=ids).loss
    before.backward()
    whole = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and "lora" not in name
    ]
    assert len(whole) == (1 if tied else 2)
    torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=0.01
    ).step()
    model.save_pretrained(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(
        load_base(tmp_path, "random", 0, "no"), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        after = model(input_ids=ids, labels=ids).loss
        assert float(again(input_ids=ids, labels=ids).loss) == float(after) < float(before)
        assert float(again.merge_and_unload()(input_ids=ids, labels=ids).loss) == pytest.approx(
            float(after), rel=1e-4
        )


@pytest.mark.usefixtures("sibling")
def test_weights_are_never_made_up_unasked() -> None:
    from text_model import load_base

    with pytest.raises(
        SystemExit,
        match=r"tiny-llama holds no weights \(\*\.safetensors\); init=random would train from random ones",
    ):
        load_base(BASE, "pretrained", 0, "no")
