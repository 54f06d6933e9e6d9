"""One small script of each style in which trainings take their options: what `recipe new --script` drafts of it, and that the draft runs to its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner.interface import drafting, scripts
from runner.interface.cli.new import _draft_script
from runner.language import document, parse
from runner.paths import CallerLocation
from tests.support import Space

ARGPARSE = """
import argparse, sys
p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--save", default="model.pt")
p.add_argument("--onnx-export", default="")
p.add_argument("--log-file", default=None)
p.add_argument("--save-model", action="store_true", default=False)
args = p.parse_args()

def export(path):
    open("graph.onnx", "w").write("x")
    open(path, "w").write("x")

for epoch in range(args.epochs):
    print("| epoch {:3d} | {:5d}/{:5d} batches | loss {:5.2f}".format(epoch, 1, 9, 0.5))
    if epoch == 1:
        open(args.save, "w").write("x")
if args.save_model:
    open("mnist_cnn.pt", "w").write("x")
if len(args.onnx_export) > 0:
    export(args.onnx_export)
if args.log_file is not None and epoch:
    open(args.log_file, "w").write("x")
"""
CONFIGURATOR = """
import os
out_dir = 'out'
init_from = 'scratch'
dataset = 'tiny'
learning_rate = 6e-4
max_iters = 30
grad_clip = 1.0
compile = True
betas = (0.9, 0.95)
config_keys = [k for k, v in globals().items() if isinstance(v, (int, float, bool, str))]
exec(open('configurator.py').read())
os.makedirs(out_dir, exist_ok=True)
data_dir = os.path.join('data', dataset)
data = open(os.path.join(data_dir, 'train.bin')).read()
for iter_num in range(max_iters):
    print(f"iter {iter_num}: loss {1 / (1 + iter_num):.4f}")
open(os.path.join(out_dir, 'ckpt.pt'), 'w').write('x')
"""
SETS = """
import sys
from ast import literal_eval
for arg in sys.argv[1:]:
    key, val = arg[2:].split('=')
    try:
        val = literal_eval(val)
    except (SyntaxError, ValueError):
        pass
    assert type(val) == type(globals()[key]), key
    globals()[key] = val
"""


def drafted(source: str) -> Any:
    """The draft of a script as a value, its notes, and its text."""
    made = drafting.draft(
        "mine", "train.py", scripts.read(source), ["train.py"], "./mine.yaml", lambda path: ""
    )
    read = document.parse(made.text.encode(), "mine.yaml")
    parse.recipe(read)
    value: Any = read.value
    return value, " ".join(made.look), made.text


def words(source: str) -> list[Any]:
    run: list[Any] = drafted(source)[0]["steps"]["train"]["run"]
    return run


@pytest.fixture
def tried(space: Space) -> Any:
    """Write a script beside the workspace's recipe, draft, and run the draft."""

    def go(source: str) -> tuple[dict[str, Any], str]:
        space.write("train.py", source)
        made = _draft_script(
            CallerLocation(space.root), Path("recipe.yaml"), "mine", Path("train.py")
        )
        space.write("recipe.yaml", made.text)
        space.run()
        return document.parse(made.text.encode(), "mine.yaml").value, made.text  # type: ignore[return-value]

    return go


def test_what_argparse_leaves_off_stays_off_and_the_draft_runs(tried: Any, space: Space) -> None:
    value, text = tried(ARGPARSE)
    step = value["steps"]["train"]
    assert step["outputs"] == {"save": "model.pt"}
    flags = [each[0] for each in step["run"] if isinstance(each, list)]
    assert flags == ["python", "--epochs", "--save"]
    assert "# Look at: --onnx-export is off by default" in text
    assert "# Look at: --log-file is off by default" in text
    assert "# Look at: mnist_cnn.pt is not written by default" in text
    assert "# Look at: graph.onnx is not written by default" in text
    assert (space.root / "model.pt").exists()
    code, out, _ = space.command("results")
    assert code == 0 and "0.5" in out


def test_the_globals_that_a_configurator_sets_are_options_and_the_draft_runs(
    tried: Any, space: Space
) -> None:
    space.write("configurator.py", SETS)
    space.write("data/tiny/train.bin", "x")
    value, text = tried(CONFIGURATOR)
    assert value["inputs"]["init_from"] == {"type": "string", "default": "scratch"}
    assert value["inputs"]["dataset"] == {"type": "string", "default": "tiny"}
    assert value["presets"] == {"smoke": {"max_iters": 20}}
    assert "# Look at: betas keeps its value from the script" in text and "config_keys" not in text
    assert (space.root / "out" / "ckpt.pt").exists()


def test_hf_argument_parser_with_training_arguments_names_a_folder_for_its_output() -> None:
    source = """
from dataclasses import dataclass
from transformers import HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Data:
    dataset_name: str = "glue"
args, training = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
Trainer(args=training).train()
"""
    value, notes, _ = drafted(source)
    step = value["steps"]["train"]
    assert ["--output_dir", "{{ outputs.output }}"] in step["run"]
    assert step["outputs"] == {"output": "output/"}
    assert "only --output_dir of the options" in notes
    assert re.search(step["metrics"]["pattern"], "{'loss': 0.25, 'epoch': 1}")
    assert re.search(step["metrics"]["pattern"], "{'loss': '0.25', 'epoch': '1'}")


def test_the_parameters_of_fire_are_options() -> None:
    source = """
import fire
def main(data: str, lr=0.1, steps: int = 10, bf16: bool = False, out: str = "m.pt"):
    open(data); open(out, "w")
fire.Fire(main)
"""
    value, _, _ = drafted(source)
    assert value["steps"]["train"]["run"] == [
        ["python", "train.py"],
        "--data={{ inputs.data }}",
        "--lr={{ inputs.lr / 1 }}",
        "--steps={{ inputs.max_steps }}",
        "--bf16={{ 'True' if inputs.bf16 else 'False' }}",
        "--out={{ outputs.out }}",
    ]
    _, notes, _ = drafted("import fire\nclass A: pass\nfire.Fire(A)")
    assert (
        "fire turns functions of the script into commands" in notes
        and "the script takes no options" not in notes
    )


def test_flags_of_absl_are_options() -> None:
    source = """
from absl import app, flags
FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "where to")
flags.DEFINE_float("lr", 0.1, "how fast")
flags.DEFINE_bool("bf16", True, "")
flags.DEFINE_enum("opt", "adam", ["adam", "sgd"], "which")
flags.DEFINE_list("layers", [], "several")
flags.mark_flag_as_required("workdir")
def main(_):
    open(FLAGS.workdir + "/m", "w"); os.makedirs(FLAGS.workdir)
app.run(main)
"""
    value, notes, _ = drafted(source)
    assert value["steps"]["train"]["run"][1:] == [
        ["--workdir", "{{ outputs.workdir }}"],
        ["--lr", "{{ inputs.lr }}"],
        "{{ '--bf16' if inputs.bf16 else '--nobf16' }}",
        ["--opt", "{{ inputs.opt }}"],
    ]
    assert value["inputs"]["opt"]["choices"] == ["adam", "sgd"]
    assert "layers keeps its default, because `recipe new` cannot read DEFINE_list" in notes


def test_lightning_cli_is_fit_with_the_parameters_of_its_classes() -> None:
    source = """
from lightning.pytorch.cli import LightningCLI
class Net(LightningModule):
    def __init__(self, width: int = 8, lr: float = 1e-3): ...
LightningCLI(Net, Elsewhere)
"""
    value, notes, _ = drafted(source)
    assert value["steps"]["train"]["run"] == [
        ["python", "train.py", "fit"],
        "--trainer.default_root_dir={{ outputs.output }}",
        "--trainer.max_epochs={{ inputs.max_epochs }}",
        "--model.width={{ inputs.model_width }}",
        "--model.lr={{ inputs.model_lr / 1 }}",
    ]
    assert "the options of Elsewhere are declared elsewhere" in notes


def test_modules_that_a_configuration_of_hydra_names_are_code(tmp_path: Path) -> None:
    for name, text in {
        "src/train.py": "import hydra\n@hydra.main(config_path='../configs', config_name='train')\ndef main(cfg): ...\n",
        "configs/train.yaml": "defaults: [{model: mnist}]\nlr: 0.1\n",
        "configs/model/mnist.yaml": "_target_: src.models.net.Net\noptimizer: {_target_: torch.optim.Adam}\n",
        "src/models/net.py": "from src.models.parts import x\nclass Net: ...\n",
        "src/models/parts.py": "x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made = _draft_script(CallerLocation(tmp_path), Path("mine.yaml"), "mine", Path("src/train.py"))
    value: Any = document.parse(made.text.encode(), "mine.yaml").value
    code = value["steps"]["train"]["code"]
    assert {"src/models/net.py", "src/models/parts.py"} <= set(code) or "src/" in code


@pytest.mark.parametrize(
    ("source", "line", "found"),
    [
        (
            "print('Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(epoch, n, m, p, loss.item()))",
            "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.25",
            {"epoch": "1", "loss": "2.25"},
        ),
        (
            "print('step %d: loss %.4f, time %.2fms' % (step, loss, dt))",
            "step 12: loss 2.1, time 3ms",
            {"step": "12", "loss": "2.1", "dt": "3"},
        ),
        (
            "logger.info('epoch %d val_loss %.4f', epoch, v)",
            "INFO:x:epoch 3 val_loss 0.25",
            {"epoch": "3", "val_loss": "0.25"},
        ),
        (
            "bar.set_postfix(loss=loss.item(), lr=x)",
            " 50%|#  | 3/6 [00:01, 3it/s, loss=0.25, lr=0.001]",
            {"loss": "0.25", "lr": "0.001"},
        ),
        ("bar.set_postfix({'loss': f'{x:.3f}'})", " 3/6 [3it/s, loss=0.25]", {"loss": "0.25"}),
        ("bar.set_description(f'loss {loss:.3f}')", "loss 0.125: 50%|", {"loss": "0.125"}),
        (
            "line = f'epoch {e} loss {l}'\nprint(line)",
            "epoch 4 loss 0.5",
            {"epoch": "4", "loss": "0.5"},
        ),
        ("print('loss: ' + str(loss.item()))", "loss: 0.75", {"loss": "0.75"}),
        (
            "print('Average loss: {:.4f}, Accuracy: {}/{}'.format(test_loss, correct, n))",
            "Average loss: 0.03, Accuracy: 99/100",
            {"loss": "0.03"},
        ),
    ],
)
def test_a_loss_is_found_however_it_is_printed(
    source: str, line: str, found: dict[str, str]
) -> None:
    pattern = scripts.read(source).metrics
    assert isinstance(pattern, str)
    match = re.search(pattern, line)
    assert match is not None and match.groupdict() == found


def test_the_files_that_are_not_written_by_default_are_noted_in_the_order_of_the_script() -> None:
    names = [f"part{n}.pt" for n in range(8)]
    saves = "\n".join(f"    torch.save(model, '{name}')" for name in names)
    source = (
        "import argparse, torch\np = argparse.ArgumentParser()\n"
        f"p.add_argument('--save', action='store_true')\nargs = p.parse_args()\nif args.save:\n{saves}\n"
    )
    assert list(scripts.read(source).unwritten) == names
