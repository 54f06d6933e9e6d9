"""Which environment variables steps inherit, and which look like secrets."""

from __future__ import annotations

import pytest

from runner.hosts.variables import container_variables, fixed_variables, inherit_variables
from runner.secrets import find_passwords, is_tokenlike

LOGIN = {
    "HOME": "/h",
    "NO_PROXY": "x",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_CACHE": "/data",
    "NCCL_DEBUG": "INFO",
    "PYTHONPATH": "/p",
    "HF_TOKEN": "t" * 9,
}


def test_paths_of_the_host_and_its_home_do_not_go_into_a_container() -> None:
    assert inherit_variables(LOGIN).keys() == LOGIN.keys() - {"PYTHONPATH", "HF_TOKEN"}
    assert container_variables(inherit_variables(LOGIN)).keys() == {
        "NO_PROXY",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
    }


def test_a_locale_of_the_steps_own_is_not_overruled() -> None:
    assert fixed_variables(["LC_NUMERIC"]) == {"TZ": "UTC"} and fixed_variables(["TZ"]).keys() == {
        "LANG",
        "LC_ALL",
    }


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "0123456789", True),
        ("DB_PASSWORD", "hunter2", True),
        ("THING", "hf_0123456789abcdef", True),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1", False),
        ("TOKENIZER_PATH", "/data/tokenizer", False),
        ("WANDB_PROJECT", "my-project", False),
    ],
)
def test_what_looks_like_a_token(name: str, value: str, secret: bool) -> None:
    assert is_tokenlike(name, value) is secret


def test_the_password_of_a_proxy_is_known_for_masking() -> None:
    assert [
        secret.reveal
        for secret in find_passwords(
            {"https_proxy": "http://me:hunter2@proxy:3128", "no_proxy": "a@b"}
        )
    ] == ["hunter2"]
