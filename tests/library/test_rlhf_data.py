"""Claims about the data, the rewards and the draws of `rlhf@1`: what is said of bad rows and functions, what a completion is worth, what is drawn."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings
from tests.system.test_sft_trainer import program, run

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "fixtures" / "tiny-llama"


@pytest.fixture(scope="module", autouse=True)
def sibling() -> Iterator[None]:
    """The trainers' modules, importable as they import each other."""
    with siblings():
        yield


def prepare(data: Path, out: Path, **more: Any) -> Any:
    from rlhf_data import prepare as prepared  # type: ignore[import-not-found]

    settings = {
        "columns": "{}",
        "chat": False,
        "chat_template": None,
        "eos_token": None,
        "need": [],
        "max_prompt_length": 64,
    }
    settings |= {"eval_fraction": 0.0, "max_bad_rows": 0}
    return prepared(
        argparse.Namespace(data=data, base=BASE, out=out, seed=0, **{**settings, **more})
    )


def rows_of(out: Path, split: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


def test_the_first_bad_rows_are_named_with_file_and_line(tmp_path: Path) -> None:
    from rows import BadData  # type: ignore[import-not-found]

    data = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "Why?", "answer": "4"}', '{"question": "Why?"}', '{"prompt": "  ", "answer": "1"}', '{"prompt": 3, "answer": "1"}', "{",
        '{"prompt": [{"role": "assistant", "content": "Hi"}], "answer": "1"}', '{"prompt": [{"role": "user"}], "answer": "1"}',
        json.dumps({"prompt": "many words " * 60, "answer": "1"}), '{"prompt": "Why?", "answer": null}',
    ]  # fmt: skip
    data.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadData) as found:
        prepare(data, tmp_path / "out", need=["answer"])
    said = str(found.value)
    assert said.startswith("8 bad rows beside 1 good ones; max_bad_rows=8 would leave them out")
    assert 'prompts.jsonl:2: no column "prompt"; it has: question' in said
    assert 'prompts.jsonl:3: "prompt" is empty' in said
    assert (
        'prompts.jsonl:4: "prompt" is a number, a string or a list of messages is expected' in said
    )
    assert "prompts.jsonl:5: not JSON" in said
    assert 'prompts.jsonl:6: "prompt" ends with a message of the assistant' in said
    assert 'prompts.jsonl:7: message 1 of "prompt" is not {"role": "…", "content": "…"}' in said
    assert re.search(
        r"prompts.jsonl:8: the prompt has \d+ tokens, more than max_prompt_length 64", said
    )
    assert 'prompts.jsonl:9: "answer" is null' in said
    assert "1 prompts (plain)" in prepare(data, tmp_path / "out", need=["answer"], max_bad_rows=8)


def test_plain_prompts_and_conversations_are_not_mixed_unless_chat_makes_all_conversations(
    tmp_path: Path,
) -> None:
    from rows import BadData

    data = tmp_path / "prompts.csv"
    conversation = json.dumps([{"role": "user", "content": "Why?"}]).replace('"', '""')
    data.write_text(f'question,level\nWhat?,1\n"{conversation}",2\n')
    with pytest.raises(
        BadData,
        match=r"prompts.csv:3: some prompts are plain text and others conversations; chat=true",
    ):
        prepare(data, tmp_path / "out", columns='{"prompt": "question"}')
    assert "2 prompts (conversations)" in prepare(
        data, tmp_path / "out", columns='{"prompt": "question"}', chat=True
    )
    first, second = rows_of(tmp_path / "out")
    assert first == {"prompt": [{"role": "user", "content": "What?"}], "level": "1"}
    assert second == {"prompt": [{"role": "user", "content": "Why?"}], "level": "2"}


def test_a_completion_of_a_conversation_ends_where_an_answer_does(tmp_path: Path) -> None:
    from rlhf_data import end_token, load_tokenizer

    (tmp_path / "p.jsonl").write_text('{"prompt": "What?"}\n')
    for chat, end in ((False, "<|endoftext|>"), (True, "<|im_end|>")):
        prepare(tmp_path / "p.jsonl", tmp_path / "out", chat=chat)
        assert load_tokenizer(BASE, None, end_token(tmp_path / "out")["text"]).eos_token == end


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"What is {number % 40}?"}) + "\n" for number in range(80))
    )
    said = prepare(data, tmp_path / "out", eval_fraction=0.25)
    train, held_out = (
        {row["prompt"] for row in rows_of(tmp_path / "out", split)}
        for split in ("train", "held_out")
    )
    assert train and held_out and not train & held_out and len(train | held_out) == 40
    assert "40 duplicates" in said


def test_what_a_completion_is_worth() -> None:
    from rlhf_rewards import exact, length, share  # type: ignore[import-not-found]

    assert [length("x" * count, 10) for count in (0, 5, 10, 15, 20, 99)] == [0, 0.5, 1, 0.5, 0, 0]
    assert (
        share("abcde", re.compile("[aeiou]")) == pytest.approx(0.4)
        and share("", re.compile(".")) == 0
    )
    assert exact("so it is \\boxed{ 1,024 }.", "1024", None) == 1
    assert exact("two and two\n#### 4", "4", None) == 1 and exact("#### 5", "4", None) == 0
    assert exact(" Paris ", "paris", None) == 1
    assert (
        exact("I think: 7. No: 8.", "8", re.compile(r": (\d)")) == 1
        and exact("I do not know", "8", re.compile(r": (\d)")) == 0
    )


def test_rewards_are_asked_for_by_name_and_weighed(tmp_path: Path) -> None:
    from rlhf_rewards import chosen

    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(prompts, completions, **columns):\n    return [None if not text else len(text) for text in completions]\n"
    )
    mine, form = chosen({"format": 0.2}, r"<a>.*</a>", 200, file, None)[::-1]
    assert (form.name, form.weight, form(["?"], ["<a>x</a>"], {})) == ("format", 0.2, [1.0])
    assert (mine.name, mine.weight, mine(["?", "?"], ["", "four"], {})) == (
        "function",
        1.0,
        [None, 4.0],
    )


def test_several_functions_of_one_file_are_weighed_by_their_names(tmp_path: Path) -> None:
    from rlhf_rewards import chosen

    file = tmp_path / "mine.py"
    file.write_text(
        "def correct(prompts, completions, answer, **columns):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"
        "def brief(prompts, completions, **columns):\n    return [-len(text) / 10 for text in completions]\n"
        "def reward(prompts, completions, **columns):\n    return [1 / 0 for _ in completions]\n"
    )
    found = chosen({"correct": 1, "brief": 0.5, "length": 0.1}, None, 2, file, None)
    assert [(each.name, each.weight) for each in found] == [
        ("brief", 0.5),
        ("correct", 1.0),
        ("length", 0.1),
    ]
    assert [each(["?", "?"], ["4", "55"], {"answer": ["4", "5"]}) for each in found] == [
        [-0.1, -0.2],
        [1.0, 0.0],
        [0.5, 1.0],
    ]
    both = chosen({"brief": 1, "function": 2}, None, 2, file, None)
    with pytest.raises(
        SystemExit, match=r"the reward function failed at mine.py:6: ZeroDivisionError"
    ):
        both[1](["?"], ["4"], {})
    with pytest.raises(
        SystemExit, match=r"mine.py has no function corect\(prompts, completions, \*\*columns\)"
    ):
        chosen({"corect": 1}, None, 2, file, None)


@pytest.mark.parametrize(
    ("weights", "pattern", "complaint"),
    [
        (
            {},
            None,
            "nothing says what a completion is worth: give reward_model, reward_function, or rewards=",
        ),
        (
            {"lenght": 1},
            None,
            "rewards: lenght is none of model, function, answer, format, length, share; what has no name here is written as a function",
        ),
        ({"share": 1}, None, "reward share compares with reward_pattern, and there is none"),
        ({"share": 1}, "[a", "reward_pattern is no regular expression"),
        ({"model": 1}, None, "rewards names model, and there is no reward_model"),
    ],
)
def test_rewards_that_cannot_be_are_refused(
    weights: dict[str, float], pattern: str | None, complaint: str
) -> None:
    from rlhf_rewards import chosen

    with pytest.raises(SystemExit, match=re.escape(complaint)):
        chosen(weights, pattern, 200, None, None)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("x = 1\n", r"mine.py has no function reward\(prompts, completions, \*\*columns\)"),
        (
            "def reward(prompts, completions):\n    return []\n",
            r"mine.py: reward\(prompts, completions\) does not take every column",
        ),
        (
            "\nimport nothing_of_that_name\n",
            r"mine.py cannot be loaded at mine.py:2: ModuleNotFoundError",
        ),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused(
    code: str, complaint: str, tmp_path: Path
) -> None:
    from rlhf_rewards import chosen

    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(SystemExit, match=complaint):
        chosen({}, None, 200, tmp_path / "mine.py", None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("return [1.0]", "reward function returned 1 numbers for 2 completions"),
        (
            "return [1 / 0 for _ in completions]",
            "the reward function failed at mine.py:2: ZeroDivisionError: division by zero",
        ),
        (
            "return [float('nan'), 1]",
            "reward function returned nan, which is no number to learn from",
        ),
        (
            "return ['good', 'bad']",
            "the reward function failed: ValueError: could not convert string to float: 'good'",
        ),
    ],
)
def test_a_reward_function_that_fails_ends_the_training_with_its_line(
    line: str, complaint: str, tmp_path: Path
) -> None:
    from rlhf_rewards import chosen

    (tmp_path / "mine.py").write_text(f"def reward(prompts, completions, **columns):\n    {line}\n")
    (reward,) = chosen({}, None, 200, tmp_path / "mine.py", None)
    with pytest.raises(SystemExit, match=re.escape(complaint)):
        reward(["?", "?"], ["a", "b"], {})


def test_vllm_is_asked_for_in_words_that_trl_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not installed it is refused with the line that installs it; so is what it cannot be given."""
    import importlib.util

    import trl
    from rlhf_train import vllm  # type: ignore[import-not-found]

    asked = {
        "use_vllm": True,
        "vllm_memory": 0.4,
        "method": "lora",
        "init": "pretrained",
        "max_prompt_length": 100,
        "max_completion_length": 28,
    }
    assert vllm(argparse.Namespace(**asked | {"use_vllm": False})) == {}
    with pytest.raises(
        SystemExit,
        match="use_vllm needs vllm, which is not installed in this step's Python: pip install vllm, or use_vllm=false",
    ):
        vllm(argparse.Namespace(**asked))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm")
    words = vllm(argparse.Namespace(**asked))
    monkeypatch.undo()
    for kind in (trl.RLOOConfig, trl.GRPOConfig):
        made = kind(output_dir=str(tmp_path), use_cpu=True, report_to="none", **words)
        assert (
            made.use_vllm,
            made.vllm_mode,
            made.vllm_gpu_memory_utilization,
            made.vllm_max_model_length,
        ) == (True, "colocate", 0.4, 128)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    for name, other in (("method", "qlora"), ("init", "random")):
        with pytest.raises(SystemExit, match=f"use_vllm .*: {name}="):
            vllm(argparse.Namespace(**asked | {name: other}))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    import torch
    from rlhf_sampling import Draws, table  # type: ignore[import-not-found]

    rows, temperature = 20_000, 0.7
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    draws = torch.rand(rows, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = Draws(draws, temperature)(None, scores.expand(rows, -1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=5) / rows
    assert torch.allclose(
        shares, torch.softmax(scores / temperature, 0), atol=0.012
    )  # 3.4 standard deviations of a share of one half
    assert shares[4] == 0
    whole = table(0, 8, 5, "completion", 0, 3)
    assert torch.equal(
        torch.cat([table(0, 3, 5, "completion", 0, 3), table(3, 5, 5, "completion", 0, 3)]), whole
    )
    assert not torch.equal(table(0, 8, 5, "completion", 0, 4), whole) and float(whole.max()) < 1


def test_what_is_drawn_does_not_depend_on_who_shares_the_batch() -> None:
    from rlhf_data import load_tokenizer, prompt_ids
    from rlhf_sampling import log_probabilities, sample, table
    from text_model import load_base  # type: ignore[import-not-found]

    tokenizer, model = load_tokenizer(BASE, None), load_base(BASE, "random", 0, "no").eval()
    prompts = [
        prompt_ids(text, tokenizer)
        for text in (
            "Why?",
            "What does math.gcd do?",
            "And that?",
            "What is the meaning of a longer prompt?",
        )
    ]
    draws = table(0, 4, 6, "test")
    together = sample(model, tokenizer, prompts, draws, 1.0, 4)
    assert together == sample(model, tokenizer, prompts, draws, 1.0, 1)
    assert (
        all(1 <= len(completion) <= 6 for completion in together)
        and len({tuple(completion) for completion in together}) == 4
    )
    likely = log_probabilities(model, prompts[0], together[0], 1.0)
    assert likely.shape == (len(together[0]),) and float(likely.max()) < 0


def test_the_program_ends_with_one_sentence_on_a_base_that_cannot_stop(tmp_path: Path) -> None:
    for file in BASE.iterdir():
        (tmp_path / file.name).write_text(
            file.read_text().replace('"eos_token": "<|endoftext|>",', "")
        )
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Why?"}\n')
    done = run(
        program(
            "rlhf_data.py",
            "--data",
            data,
            "--base",
            tmp_path,
            "--out",
            tmp_path / "out",
            "--max-prompt-length",
            8,
        )
    )
    assert done.returncode == 1 and "names no end-of-text token" in done.stderr.splitlines()[-1]
