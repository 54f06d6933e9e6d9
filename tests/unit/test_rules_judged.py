"""Promise: every rule of the library fires on its case and is silent on the other; what is unknown is neither; what is said is whole sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from docs import rulebook
from runner.advice import rule_files, rules
from runner.advice.rules import RuleFindings
from runner.errors import Invalid
from runner.language import document
from runner.paths import shipped

HOME = shipped()
RULES = {rule.id: rule for rule in rule_files.load().rules}
ASKED = ("recipe", "inputs", "settings", "step", "item")


def world(facts: Mapping[str, object]) -> dict[str, object]:
    """Every namespace: those that `facts` has, the others empty or unknown as a whole."""
    found: dict[str, object] = {}
    for name in (*rules.ALWAYS, *rules.NEEDS):
        given = facts.get(name)
        if given is None or type(given) is dict:
            found[name] = rules.RuleFacts(
                {key: _inner(value) for key, value in (given or {}).items()},
                rules.NEEDS.get(name, ""),
            )
        else:
            found[name] = given
    return found


def _inner(value: object) -> object:
    """Mappings inside a namespace are as forgiving as those that gathering makes: what is not in them is null."""
    return (
        rules.RuleFacts({key: _inner(item) for key, item in value.items()})
        if isinstance(value, dict)
        else value
    )


@cache
def cases() -> dict[str, Any]:
    value = document.read(HOME / "fixtures" / "gotchas" / "cases.yaml").value
    assert isinstance(value, dict)
    return value


def judged(id: str, facts: dict[str, Any]) -> RuleFindings:
    return rules.judge([RULES[id]], world(facts), "train")


def test_every_rule_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert set(cases()) == set(RULES)
    assert all(set(case) == {"fires", "silent"} for case in cases().values())


@pytest.mark.parametrize("id", RULES)
def test_the_rule_fires_on_its_case_and_says_what_to_do(id: str) -> None:
    verdict = judged(id, cases()[id]["fires"])
    assert [finding.rule.id for finding in verdict.findings] == [id] and verdict.unchecked == ()
    finding = verdict.findings[0]
    assert finding.message != RULES[id].title, (
        "the message reads a fact that its case does not tell"
    )
    for text in (finding.message, finding.remedy):
        assert len(text) > 10 and "None" not in text and "null" not in text
    for values in finding.fix.values():
        assert all(value is not None for value in values.values())


@pytest.mark.parametrize("id", RULES)
def test_the_rule_is_silent_on_the_other_case(id: str) -> None:
    assert judged(id, cases()[id]["silent"]) == RuleFindings()


@pytest.mark.parametrize(
    "id", [id for id in RULES if set(cases().get(id, {}).get("fires", {})) - set(ASKED)]
)
def test_without_what_is_hard_to_know_the_rule_is_not_checked_and_says_what_it_needs(
    id: str,
) -> None:
    known = {name: value for name, value in cases()[id]["fires"].items() if name in ASKED}
    verdict = judged(id, known)
    assert verdict.findings == ()
    assert next(each.why for each in verdict.unchecked).startswith("needs ")


@pytest.mark.parametrize("id", RULES)
def test_a_setting_of_another_kind_is_no_crash(id: str) -> None:
    facts = cases()[id]["fires"]
    odd = {
        name: "odd" if isinstance(value, (int, float)) else 3
        for name, value in facts.get("settings", {}).items()
    }
    judged(id, {**facts, "settings": odd})


def test_the_rules_are_what_the_schema_says() -> None:
    assert rule_files.faults(document.read(HOME / "recipes" / "gotchas.yaml")) == []
    assert len(RULES) >= 52


def test_every_key_of_the_schema_is_described_and_used() -> None:
    import json

    schema = json.loads((HOME / "schemas" / "gotchas.schema.json").read_text())
    properties = {**schema["properties"], **schema["$defs"]["rule"]["properties"]}
    properties |= schema["$defs"]["rule"]["properties"]["fix"]["properties"]
    assert all(part.get("description") for part in properties.values())
    text = (HOME / "recipes" / "gotchas.yaml").read_text()
    assert [name for name in properties if not re.search(rf"\b{name}:", text)] == []


def test_the_page_of_rules_is_what_the_rules_say() -> None:
    page = (HOME / "docs" / "preflight.md").read_text("utf-8")
    assert rulebook.refreshed(page) == page, "write it anew: python -m docs.generate"


def test_the_page_tells_every_name_that_a_rule_may_ask_for() -> None:
    page = (HOME / "docs" / "preflight.md").read_text("utf-8")
    for namespace, fields in rules.FIELDS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{namespace}` |"))
        assert [name for name in fields if f"`{name}`" not in row] == [], namespace


def test_a_finding_of_several_steps_is_said_once() -> None:
    one = judged("rendezvous-ports", {"step": {"nodes": 2}})
    assert len(rules.merge([one, one]).findings) == 1
    errors_first = rules.merge([one, judged("resume-true", cases()["resume-true"]["fires"])])
    assert [finding.rule.severity for finding in errors_first.findings] == ["error", "note"]


def test_a_rule_that_fired_for_one_step_is_not_unchecked_because_of_another() -> None:
    fired = judged("small-shm", cases()["small-shm"]["fires"])
    asked = judged("small-shm", {"step": {"processes": 2}})
    assert rules.merge([asked, fired]).unchecked == ()


FILE = """\
rules:
  - id: no-mondays
    severity: error
    title: A run that begins on a Monday
    when: "{{ settings.day == 'monday' }}"
    message: it is {{ settings.day }}
    remedy: wait for a day
    evidence: ["everybody knows"]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "severity: error",
            "severity: fatal",
            "rules.0.severity must be one of error, warning, note",
        ),
        ("    remedy: wait for a day\n", "", "rules.0 has no remedy"),
        ("settings.day == 'monday'", "setting.day == 'monday'", "there is no `setting`"),
        ("settings.day == 'monday'", "settings.day ==", "not an expression"),
        ("settings.day == 'monday'", "step.gpu_count == 1", "`step` has no `gpu_count`"),
        ("    remedy:", "    given: [setting.day]\n    remedy:", "there is no `setting`"),
        ("    remedy:", "    given: [model.vocab]\n    remedy:", "`model` has no `vocab`"),
        (
            "    remedy:",
            "    fix: {settings: {day: '{{ data.colums }}'}}\n    remedy:",
            "`data` has no `colums`",
        ),
        ("settings.day == 'monday' }}", "settings.day }} x", "the value must be one expression"),
        ("    evidence: [", "    proof: [", 'has no key "proof"'),
        ("no-mondays", "No Mondays", "rules.0.id has an invalid value"),
        ("rules:", "rule:", 'the file has no key "rule"'),
    ],
)
def test_what_is_wrong_with_a_file_of_rules_is_reported_with_its_line(
    old: str, new: str, words: str
) -> None:
    assert rule_files.faults(document.parse(FILE, "gotchas.yaml")) == []
    found = rule_files.faults(document.parse(FILE.replace(old, new), "gotchas.yaml"))
    assert any(words in problem.message for problem in found), [str(problem) for problem in found]
    assert all(problem.where is not None for problem in found)


def test_rules_beside_a_recipe_join_those_of_the_library_and_replace_what_they_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "gotchas.yaml").write_text(
        FILE + FILE.replace("rules:\n", "").replace("no-mondays", "model-missing")
    )
    found = {rule.id: rule for rule in rule_files.load((str(tmp_path),)).rules}
    assert set(found) == set(RULES) | {"no-mondays"}
    assert found["model-missing"].title == "A run that begins on a Monday"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "gotchas.yaml").write_text("rules: [{id: x}]\n")
    with pytest.raises(Invalid):
        rule_files.load((str(tmp_path / "b"),))


USUAL = [
    (["trains-text"], None, {"rank": 16, "method": "lora"}, 2e-4),  # sft
    (["trains-text"], None, {"rank": 128, "method": "lora"}, 5e-5),  # cpt
    (["trains-text"], None, {"rank": 16, "method": "full"}, 2e-5),
    (["trains-text"], "sft", {}, 2e-5),
    (["trains-text"], "dpo", {"rank": 16, "method": "lora"}, 5e-6),
    (["trains-text"], "dpo", {"rank": 16, "method": "full"}, 5e-7),
    (["trains-text"], "orpo", {"rank": 16, "method": "lora"}, 5e-5),
    (["trains-text"], "orpo", {"rank": 16, "method": "full"}, 5e-6),
    (["trains-text"], "reward", {"rank": 16, "method": "lora"}, 1e-4),
    (["trains-text"], "reward", {"rank": 16, "method": "full"}, 1e-5),
    (["trains-text", "trains-by-reward"], None, {"rank": 16, "method": "lora"}, 1e-5),  # rlhf
    (["trains-by-reward"], None, {}, 1e-6),  # prime-rl
    (["trains-images"], None, {"rank": 16}, 1e-4),
    (["trains-images"], None, {}, 1e-5),
]


@pytest.mark.parametrize(("tools", "method", "settings", "rate"), USUAL)
def test_a_rate_that_is_usual_is_right_and_a_hundredth_or_a_hundred_times_of_it_is_not(
    tools: list[str], method: str | None, settings: dict[str, Any], rate: float
) -> None:
    def findings(learning_rate: float, **more: Any) -> int:
        said = {**settings, "learning_rate": learning_rate, **more}
        return len(
            judged(
                "learning-rate-off", {"step": {"tools": tools, "method": method}, "settings": said}
            ).findings
        )

    assert [findings(rate * factor) for factor in (0.01, 0.3, 1, 3, 100)] == [1, 0, 0, 0, 1]
    assert findings(1.0, optimizer="Prodigy") == findings(0.5, init="random") == 0


def test_a_rate_of_a_program_that_no_rule_knows_is_its_own_affair() -> None:
    assert (
        judged("learning-rate-off", {"step": {"tools": []}, "settings": {"learning_rate": 0.1}})
        == RuleFindings()
    )


@pytest.mark.parametrize(
    ("rank", "alpha", "stabilized", "off"),
    [
        (16, 16, False, 0),
        (16, 32, False, 0),
        (128, 16, False, 0),
        (256, 1, False, 1),
        (8, 256, False, 1),
        (128, 32, True, 0),
        (256, 1, True, 0),
        (4096, 1, True, 1),
    ],
)
def test_alpha_goes_with_rank_or_with_its_root(
    rank: int, alpha: int, stabilized: bool, off: int
) -> None:
    said = {"rank": rank, "alpha": alpha, "rank_stabilized": stabilized}
    assert len(judged("lora-scale-off", {"settings": said}).findings) == off


def test_a_token_that_ends_a_turn_is_put_right_where_the_recipe_can() -> None:
    case = cases()["turn-end-is-no-stop"]["fires"]
    assert judged("turn-end-is-no-stop", case).findings[0].fix == {}
    assert judged("turn-end-is-no-stop", {**case, "inputs": {"eos_token": None}}).findings == (), (
        "by default the recipe sets it"
    )
    wrong = {
        **case,
        "inputs": {"eos_token": "<|endoftext|>"},
        "settings": {"eos_token": "<|endoftext|>"},
    }
    assert judged("turn-end-is-no-stop", wrong).findings[0].fix == {
        "settings": {"eos_token": "<|im_end|>"}
    }
    right = {**case, "inputs": {"eos_token": "<|im_end|>"}, "settings": {"eos_token": "<|im_end|>"}}
    assert judged("turn-end-is-no-stop", right).findings == ()


def test_columns_of_other_names_are_given_their_names_by_fix() -> None:
    called = {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}
    data = {
        "rows": 3,
        "columns": ["question", "chosen", "rejected"],
        "called": called,
        "conversational": False,
    }
    case = {"step": {"tools": ["recipe-pairs"]}, "data": data}
    assert [finding.fix for finding in judged("missing-column", case).findings] == [
        {"settings": {"columns": {"prompt": "question"}}}
    ]
    unlike = {**data, "columns": ["a", "chosen", "rejected"], "called": called | {"prompt": None}}
    finding = judged("missing-column", {**case, "data": unlike}).findings[0]
    assert finding.fix == {} and '\'columns={"prompt": "NAME"}\'' in finding.remedy
