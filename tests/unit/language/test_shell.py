"""Where values stand in a shell script, and what reads them: what can be said without a shell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.language.shell import errors, script, warnings
from runner.language.template import TemplateError


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("echo {{ s }}", 'echo "${_recipe_1}"'),
        ('echo "a {{ s }}"', 'echo "a ${_recipe_1}"'),
        ("cat <<E\n{{ s }}\nE\necho {{ s }}", 'cat <<E\n${_recipe_1}\nE\necho "${_recipe_2}"'),
        (
            "cat <<A <<-B; echo {{ s }}\n{{ s }}\nA\n\t{{ s }}\n\tB\n{{ s }}",
            'cat <<A <<-B; echo "${_recipe_1}"\n${_recipe_2}\nA\n\t${_recipe_3}\n\tB\n"${_recipe_4}"',
        ),
        ("echo $(( {{ n }} * 4 ))", "echo $(( ${_recipe_1} * 4 ))"),
        (
            "x=$(case a in a) echo {{ s }};; esac); echo {{ s }}",
            'x=$(case a in a) echo "${_recipe_1}";; esac); echo "${_recipe_2}"',
        ),
        (
            'echo "$(basename "{{ s }}" {{ s }})"',
            'echo "$(basename "${_recipe_1}" "${_recipe_2}")"',
        ),
        ('echo ${a#{{ s }}} "${a%{{ s }}}"', 'echo ${a#"${_recipe_1}"} "${a%"${_recipe_2}"}"'),
        (
            "echo a#{{ s }} # {{ gone }} '\necho {{ s }}",
            'echo a#"${_recipe_1}" # ${_recipe_2} \'\necho "${_recipe_3}"',
        ),
        ("echo \\\"{{ s }}\\'", 'echo \\""${_recipe_1}"\\\''),
        ("_recipe_1=2; echo {{ s }}", '_recipe_1=2; echo "${_recipe___1}"'),
    ],
)
def test_an_expression_becomes_a_variable(text: str, body: str) -> None:
    assert script(text, {"s": "it's", "n": 3}).endswith("\n" + body)


@pytest.mark.parametrize(
    "text",
    [
        "echo 'a {{ s }}'",
        "cat <<'E'\n{{ s }}\nE",
        "echo $'{{ s }}'",
        "cat <<{{ s }}\n",
        "eval {{ s }}",
        "'eval' {{ s }}",
        'trap "rm {{ s }}" EXIT',
        "echo ${{ s }}",
        'echo "${{{ s }}"',
    ],
)
def test_a_place_where_no_value_can_stand_is_an_error_before_anything_runs(text: str) -> None:
    try:
        assert errors(text)
    except TemplateError:
        pass
    with pytest.raises(TemplateError):
        script(text, {"s": "x"})


@pytest.mark.parametrize(
    ("text", "pipes"),
    [
        ("a | b", 1),
        ("a || b", 0),
        ("echo 'a | b' \"c | d\" \\| # |", 0),
        ("case x in a|b) c | d;; esac", 1),
        ("x=$(a | b) | c", 2),
        ("a >| b", 0),
        ("cat <<E\na | b\nE", 0),
        ("echo $((1 | 2))", 0),
    ],
)
def test_a_pipe_is_a_warning_without_bash(text: str, pipes: int) -> None:
    found = warnings(text)
    assert [
        text[each.offset : each.offset + each.length] for each in found if each.code == "pipe"
    ] == ["|"] * pipes
    assert not warnings(text, True)


@pytest.mark.parametrize(
    "text",
    [
        "python -c \"print('{{ x }}')\"",
        "bash -ce {{ x }}",
        "echo {{ x }} | sh",
        "cat <<E | sh\n{{ x }}\nE",
        "ssh a {{ x }}",
        "xargs sh -c {{ x }}",
        ". {{ x }}",
    ],
)
def test_a_value_that_is_source_for_another_interpreter_is_a_warning_with_the_env_way(
    text: str,
) -> None:
    (doubt,) = warnings(text, True)
    assert (doubt.code, text[doubt.offset : doubt.offset + doubt.length]) == (
        "template-in-code",
        "{{ x }}",
    )
    assert "env:" in doubt.fix


@pytest.mark.parametrize(
    "text",
    [
        "python train.py {{ x }}",
        "python -m train --n {{ x }}",
        "CUDA_VISIBLE_DEVICES=0 env A={{ x }} nice -n 5 timeout {{ x }} python -u train.py {{ x }} > {{ x }}",
        "bash run.sh {{ x }}",
        "sh -c 'echo \"$1\"' sh {{ x }}",
        "awk -F, '{ print $1 }' {{ x }}",
        "mkdir {{ x }}\necho a | sh",
        "x={{ x }}; { echo a; } | bash",
        "echo {{ x }} | python train.py",
        "echo {{ x }} | xargs rm",
        "echo {{ x }} # | sh",
    ],
)
def test_an_argument_of_a_fixed_program_is_no_warning(text: str) -> None:
    assert not warnings(text, True)


@given(st.text(st.sampled_from("'\"\\$`(){}<>#|;& \n\tEab{}x=[]!"), max_size=40))
def test_any_script_is_read_without_a_crash(text: str) -> None:
    try:
        warnings(text + "{{ a }}" + text[::-1], True)
        warnings(text + "{{ a }}" + text[::-1])
    except TemplateError:
        pass
