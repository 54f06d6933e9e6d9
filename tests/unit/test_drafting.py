"""A recipe is drafted from what a script says: its options, what it does with each path, and what it prints."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from runner.interface import drafting, scripts
from runner.language import document
from runner.language.imports import EntryPoint
from runner.paths import shipped
from runner.secrets import Masker
from runner.survey import validation
from runner.survey.imports import follow_imports, read_imports

HEAD = "import argparse\np = argparse.ArgumentParser()\n"


def option(line: str, rest: str = "") -> scripts.Option:
    (found,) = scripts.read(f"{HEAD}{line}\nargs = p.parse_args()\n{textwrap.dedent(rest)}").options
    return found


def recipe(source: str, there: dict[str, str] | None = None) -> Any:
    text = drafting.draft(
        "mine",
        "train.py",
        scripts.read(source),
        ["train.py"],
        "./mine.yaml",
        lambda path: (there or {}).get(path, ""),
    ).text
    return document.parse(text.encode(), "mine.yaml").value


@pytest.mark.parametrize(
    ("line", "written"),
    [
        (
            "p.add_argument('--lr', type=float, default=1e-4, help='How fast')",
            {"type": "number", "default": 0.0001, "doc": "How fast"},
        ),
        ("p.add_argument('-n', '--count', type=int, required=True)", {"type": "integer"}),
        (
            "p.add_argument('--count', type=int, default=None)",
            {"type": "integer", "required": False},
        ),
        (
            "p.add_argument('--count', type=int, default=os.cpu_count())",
            {"type": "integer", "required": False},
        ),
        ("p.add_argument('--word', default='yes')", {"type": "string", "default": "yes"}),
        (
            "p.add_argument('--kind', choices=['a', 'b'], default='a')",
            {"type": "choice", "choices": ["a", "b"], "default": "a"},
        ),
        (
            "p.add_argument('--bits', type=int, choices=[4, 8], default=8)",
            {"type": "choice", "choices": ["4", "8"], "default": "8"},
        ),
        ("p.add_argument('--kind', choices=KINDS)", {"type": "string", "required": False}),
        ("p.add_argument('--fast', action='store_true')", {"type": "boolean", "default": False}),
        (
            "p.add_argument('--ema', action=argparse.BooleanOptionalAction, default=True)",
            {"type": "boolean", "default": True},
        ),
        (
            "p.add_argument('--pack', type=truth, default=False)",
            {"type": "boolean", "default": False},
        ),
        (
            "p.add_argument('--sizes', type=int, nargs='+', default=[1, 2])",
            {"type": "list", "items": "integer", "default": [1, 2]},
        ),
        (
            "p.add_argument('--num-workers', type=int, default=4)",
            {"type": "integer", "default": 4, "key": False},
        ),
        ("p.add_argument('--model', default='gpt2')", {"type": "string", "default": "gpt2"}),
        ("p.add_argument('--model', default='org/gpt2')", {"type": "model", "default": "org/gpt2"}),
        ("p.add_argument('--data-dir', default='./gone')", {"type": "dataset"}),
        ("p.add_argument('--data-dir')", {"type": "dataset", "required": False}),
    ],
)
def test_an_option_becomes_an_input_of_its_type(line: str, written: dict[str, Any]) -> None:
    (found,) = recipe(f"{HEAD}{line}\n")["inputs"].values()
    assert found == written


@pytest.mark.parametrize(
    ("line", "rest", "role", "folder"),
    [
        ("p.add_argument('--x')", "open(args.x)", "input", False),
        ("p.add_argument('--x')", "pd.read_csv(args.x)", "input", False),
        ("p.add_argument('--x')", "for f in Path(args.x).glob('*.txt'): pass", "input", True),
        ("p.add_argument('--x')", "open(os.path.join(args.x, 'a.txt'))", "input", True),
        ("p.add_argument('--x')", "open(args.x, 'w')", "output", False),
        ("p.add_argument('--x')", "with args.x.open(mode='a') as f: pass", "output", False),
        ("p.add_argument('--x')", "torch.save(model.state_dict(), args.x)", "output", False),
        (
            "p.add_argument('--x')",
            "args.x.mkdir()\n(args.x / 'a').write_text('words')",
            "output",
            True,
        ),
        (
            "p.add_argument('--x')",
            "place = Path(args.x)\nmodel.save_pretrained(place)",
            "output",
            True,
        ),
        ("p.add_argument('--x')", "torch.save(model, f'{args.x}/model.pt')", "output", True),
        (
            "p.add_argument('--x')",
            "place: Path = Path(args.x).resolve()\ntorch.save(model, place / 'model.pt')",
            "output",
            True,
        ),
        (
            "p.add_argument('--x')",
            "self.place = Path(args.x)\nbest = self.place.joinpath('best.pt')\ntorch.save(model, best)",
            "output",
            True,
        ),
        ("p.add_argument('--output-dir')", "", "output", True),
        (
            "p.add_argument('--ckpt-dir')",
            "torch.save(m, args.ckpt_dir / f'step-{n}.pt')",
            "state",
            True,
        ),
        (
            "p.add_argument('--out')",
            "d = os.path.join(args.out, f'checkpoint-{n}')\nos.makedirs(d)",
            "state",
            True,
        ),
        ("p.add_argument('--resume-from')", "torch.load(args.resume_from)", "resume", False),
        ("p.add_argument('--save-every', type=int)", "", "value", False),
        ("p.add_argument('--x')", "name.replace(args.y, 'b')", "value", False),
        ("p.add_argument('--train-batch')", "", "value", False),
    ],
)
def test_what_is_done_with_a_path_says_what_it_is_for(
    line: str, rest: str, role: str, folder: bool
) -> None:
    found = option(line, rest)
    assert (found.role, found.folder) == (role, folder)


TRAIN = '''\
"""Fit a line.

At length."""
import argparse, json
from pathlib import Path
import model, accelerated, package.part
p = argparse.ArgumentParser()
p.add_argument("data")
p.add_argument("--steps", type=int, default=1000)
p.add_argument("--flip", action="store_true")
p.add_argument("--tags", action="append")
p.add_argument("--out", type=Path, default=Path("runs/model"))
p.add_argument("--ckpt-dir", type=Path, required=True)
p.add_argument("--resume", type=Path)
args = p.parse_args()
names = json.load(open("names.json"))
rows = open(args.data).read().replace("a.txt", "b.txt")
for step in range(args.steps):
    half = args.ckpt_dir / "half"
    half.write_text("x.y")
    half.rename(args.ckpt_dir / f"step-{step}.pt")
    print(f"step {step:4d} | loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]}")
(args.out / "w.json").write_text("x.y")
with open("log.txt", "w") as file:
    pass
'''


@pytest.mark.parametrize(
    ("source", "writes"),
    [
        ("open('my out.txt', 'w')", ("my out.txt",)),
        (
            "out = Path('results')\ntorch.save(m, out / 'model.pt')\n(out / 'best' / 'log.json').write_text(x)",
            ("results/model.pt", "results/best/log.json"),
        ),
        (
            "OUT = 'results'\ntorch.save(m, os.path.join(OUT, 'a.pt'))\nopen(f'{OUT}/b.txt', 'w')",
            ("results/a.pt", "results/b.txt"),
        ),
        ("out = Path('results')\nfor n in range(3): torch.save(m, out / f'{n}.pt')", ("results/",)),
        ("out = Path('a')\nout = Path('b')\ntorch.save(m, out / 'model.pt')", ()),
        ("path = 'a.txt'\ndef save(m, path):\n    torch.save(m, path)", ()),
        ("name = 'model'\nopen(f'{name}-x.pt', 'w')", ()),
        ("OLD = 'a.txt'\ntext.replace(OLD, 'b.txt')", ()),
    ],
)
def test_a_path_that_is_put_together_from_texts_is_written(
    source: str, writes: tuple[str, ...]
) -> None:
    assert scripts.read(source).writes == writes


def test_a_whole_script_becomes_a_recipe() -> None:
    there = {
        "names.json": "file",
        "model.py": "file",
        "package/__init__.py": "file",
        "train.py": "file",
    }
    found = recipe(TRAIN, there)
    step = found["steps"]["train"]
    assert found["summary"] == "Fit a line"
    assert list(found["inputs"]) == ["data", "max_steps", "flip"]
    assert found["inputs"]["max_steps"] == {"type": "integer", "default": 1000, "continues": True}
    assert found["presets"] == {"smoke": {"max_steps": 20}}
    assert step["run"] == [
        ["python", "train.py"],
        "{{ inputs.data }}",
        ["--steps", "{{ inputs.max_steps }}"],
        "{{ '--flip' if inputs.flip else none }}",
        ["--out", "{{ outputs.out }}"],
        ["--ckpt-dir", "{{ state.ckpt }}"],
        ["--resume", "{{ state.ckpt.latest }}"],
    ]
    assert step["code"] == ["train.py"]
    assert step["deps"] == ["names.json"]
    assert step["state"] == {"ckpt": {"checkpoint": "step-*.pt", "every": "5m", "keep": 2}}
    assert step["outputs"] == {"out": "runs/model/", "log": "log.txt"}


def test_the_line_with_the_loss_is_read_by_the_pattern(tmp_path: Path) -> None:
    from runner.storage import metrics

    log = tmp_path / "log"
    log.write_text(
        "warming up\nstep   12 | loss 0.2500, lr 1e-04\nstep   13 | loss nan, lr 1e-04\n"
    )
    pattern = scripts.read(TRAIN).metrics
    assert isinstance(pattern, str)
    assert metrics.match(log, pattern, Masker()) == {"step": 13, "loss": "nan", "lr": 0.0001}
    for line, shown in (
        ('print("epoch", epoch, "loss", loss)', b"epoch 3 loss 0.5"),
        (
            'log.info(f"{epoch}: train_loss={float(loss):.3f} (best)")',
            b"3: train_loss=0.500 (best)",
        ),
    ):
        log.write_bytes(shown)
        pattern = scripts.read(line).metrics
        assert (
            isinstance(pattern, str)
            and {"epoch": 3}.items() <= metrics.match(log, pattern, Masker()).items()
        )
        assert 0.5 in metrics.match(log, pattern, Masker()).values()


def test_a_count_is_called_as_it_is_printed() -> None:
    pattern = scripts.read('print(f"step {epoch} loss {loss}")').metrics
    assert isinstance(pattern, str) and "<step>" in pattern and "<epoch>" not in pattern


def test_what_stands_before_a_number_is_its_name_and_not_the_variable() -> None:
    pattern = scripts.read('print(f"step {n} of {total} val_loss {val:.4f} accuracy {a}")').metrics
    assert isinstance(pattern, str) and [
        name for name in ("val_loss", "accuracy", "total", "val", "of") if f"<{name}>" in pattern
    ] == [
        "val_loss",
        "accuracy",
        "total",
    ]


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("import sys\nprint(sys.argv[1])", "sys.argv"),
        ("import fire\nfire.Fire(print)", "fire"),
        ("print(1)", "the script takes no options"),
        (
            f"{HEAD}p.add_argument('--tags', action='append')",
            "line 3: --tags keeps its default, because its action is append",
        ),
        (
            f"{HEAD}s = p.add_subparsers()\ns.add_parser('train')\ns.add_parser('eval')",
            "the script has subcommands (train, eval)",
        ),
        (
            f"{HEAD}for flag in FLAGS: p.add_argument(flag)",
            "line 3: the option name is computed, so it was skipped",
        ),
    ],
)
def test_what_is_not_understood_is_said(source: str, note: str) -> None:
    assert any(note in each for each in scripts.read(source).notes)


def test_names_that_a_recipe_cannot_have_are_others() -> None:
    flags = ["--steps", "--max-steps", "--env", "--Rate", "--2d", "--run"]
    source = HEAD + "".join(f"p.add_argument('{flag}', default='a')\n" for flag in flags)
    found = recipe(source)
    assert list(found["inputs"]) == [
        "max_steps",
        "max_steps_2",
        "env_value",
        "rate",
        "n2d",
        "run_value",
    ]


SCRIPTS = sorted(
    path.relative_to(shipped()).as_posix()
    for pattern in ("recipes/trainers/*.py", "examples/*/*.py", "recipes/scaffold/*/*.py")
    for path in shipped().glob(pattern)
)


@pytest.mark.parametrize("path", SCRIPTS)
def test_every_script_of_ours_becomes_a_recipe_without_a_fault(path: str) -> None:
    source = shipped() / path

    def kind(place: str) -> str:
        there = source.parent / place
        return "file" if there.is_file() else "folder" if there.is_dir() else ""

    code = follow_imports(
        str(source.parent), [EntryPoint("script", source.name)], (), read_imports
    ).files
    made = drafting.draft(
        "mine", source.name, scripts.read(source.read_text()), list(code), "./mine.yaml", kind
    )
    found = validation.check_bytes(
        made.text.encode(), str(source.parent / "mine.yaml"), source.parent, {}
    )
    # Options that a loop or another file declares are no part of a draft: the check names them.
    assert [str(each) for each in found if "needs the option" not in each.message] == []
