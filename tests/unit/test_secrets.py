"""A masker shows everything but secrets, in whatever form they are written and in however many pieces a text comes."""

from __future__ import annotations

import base64
import html
import json
import shlex
import subprocess
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runner.secrets import STARS, Masker, Secret, describe_unusable

VALUES = ("correct-horse", "correct-horse-battery", "aaaaaaab")
ODD = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters="\0"), st.sampled_from("\"'\\/&<> $`%é\n")
    ),
    min_size=6,
    max_size=60,
)
FORMS: dict[str, Callable[[str], str]] = {
    "itself": str,
    "hex": lambda text: text.encode().hex(),
    "HEX": lambda text: text.encode().hex().upper(),
    "URL": lambda text: quote(text, safe=""),
    "URL, for a path": quote,
    "URL, of a form": quote_plus,
    "JSON": lambda text: json.dumps(text)[1:-1],
    "JSON that is not ASCII": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON in JSON": lambda text: json.dumps(json.dumps(text))[3:-3],
    "JSON of both kinds": lambda text: json.dumps(json.dumps(text), ensure_ascii=False)[3:-3],
    "Python": lambda text: repr(text)[1:-1],
    "Python's bytes": lambda text: repr(text.encode())[2:-1],
    "shell": shlex.quote,
    "HTML": html.escape,
    "HTML in JSON": lambda text: json.dumps(html.escape(text))[1:-1],
    "URL twice": lambda text: quote(quote(text)),
}


def flat(data: bytes) -> bytes:
    return data.replace(b"\n", b"").replace(b"\r", b"")


@settings(max_examples=40)
@given(ODD, st.text("ab'\" \n", max_size=4))
def test_no_form_of_a_secret_is_shown(value: str, before: str) -> None:
    assume("***" not in value and len(flat(value.encode())) >= 6)
    masker = Masker([Secret("t", value)])
    for form, write in FORMS.items():
        masked = masker.mask(f"{before}{write(value)} :)".encode())
        assert flat(write(value).encode()) not in flat(masked) and masked.endswith(b" :)"), form


@settings(max_examples=60)
@given(
    ODD,
    st.binary(max_size=100),
    st.binary(max_size=10),
    st.sampled_from([0, 60, 64, 76]),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_a_secret_is_found_anywhere_in_base64_however_it_is_wrapped(
    value: str, before: bytes, after: bytes, width: int, url: bool, end: bytes
) -> None:
    raw = value.encode()
    text = (base64.urlsafe_b64encode if url else base64.b64encode)(before + raw + after)
    # The characters all of whose bits are the secret's.
    first, last = -(-8 * len(before) // 6), 8 * (len(before) + len(raw)) // 6
    wrapped = (
        end.join(text[at : at + width] for at in range(0, len(text), width)) if width else text
    )
    masked = Masker([Secret("t", value)]).mask(wrapped)
    assert STARS in masked and text[first:last] not in flat(masked)


@given(
    st.lists(st.sampled_from([*VALUES, "correct-", "horse", "aaaa", "x", "\n"])),
    st.lists(st.integers(0, 200)),
)
def test_pieces_are_masked_like_the_whole(words: list[str], cuts: list[int]) -> None:
    text = "".join(words).encode()
    masker = Masker([Secret(f"s{n}", value) for n, value in enumerate(VALUES)])
    stream, shown, at = masker.stream(), b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        shown += stream.feed(text[at:cut])
        at = cut
    shown += stream.end()
    assert shown == masker.mask(text)
    assert not any(value.encode() in flat(shown) for value in VALUES)


def test_secrets_that_overlap_leave_nothing_of_either() -> None:
    masker = Masker([Secret("a", "user:pass-1234"), Secret("b", "1234-the-rest")])
    assert masker.mask(b"<user:pass-1234-the-rest>") == b"<***>"
    stream = masker.stream()
    assert [stream.feed(b"<user:pass-1234"), stream.feed(b"-the-rest>"), stream.end()] == [
        b"<***",
        b">",
        b"",
    ]


def test_what_cannot_be_a_secret_is_shown_at_once() -> None:
    stream = Masker([Secret("t", "correct-horse-battery")]).stream()
    assert stream.feed(b"step 10 loss 0.5\n") == b"step 10 loss 0.5\n"
    assert stream.feed(b"token corr") == b"token "
    assert stream.feed(b"upt") == b"corrupt"
    assert stream.end() == b""


def test_a_secret_of_many_lines_is_found_whole_and_line_by_line() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----\n"
    masker = Masker([Secret("key", key)])
    assert masker.mask(f"a {key}b".encode()) == b"a ***\nb"
    assert masker.mask(b"line 2: kqhkiG9w0BAQEF.") == b"line 2: ***."
    assert masker.mask(base64.encodebytes(key.encode() * 9)).count(b"***") == 9


def test_a_secret_that_is_no_utf8_is_masked_in_bytes_and_in_text() -> None:
    masker = Masker([Secret("t", b"caf\xe9-\xff-token".decode("utf-8", "surrogateescape"))])
    assert masker.mask(b"<caf\xe9-\xff-token>") == b"<***>"
    assert masker.text("<caf\ufffd-\ufffd-token>") == "<***>"
    assert masker.text(b"<caf\xe9-\xff-token>".decode("utf-8", "surrogateescape")) == "<***>"
    assert masker.mask(base64.b64encode(b"caf\xe9-\xff-token")).startswith(b"***")


def test_values_are_masked_in_names_and_numbers_too() -> None:
    masker = Masker([Secret("t", "1234567")])
    assert masker.value({"a-1234567": [1234567, 0.5, True, None, {"b": "1234567"}]}) == {
        "a-***": ["***", 0.5, True, None, {"b": "***"}]
    }
    assert masker.value("\ud800 1234567") == "\ud800 ***"


def test_what_a_shell_prints_of_a_quoted_secret_is_masked() -> None:
    value = 'it\'s a $ecret & "more" \\ `x`'
    said = subprocess.run(
        ["bash", "-c", 'printf "%q\\n" "$1"; set -x; true "$1"', "bash", value],
        capture_output=True,
        check=True,
    )
    masker = Masker([Secret("t", value)])
    assert masker.mask(said.stdout) == b"***\n"
    assert b"***" in masker.mask(said.stderr) and b"ecret" not in masker.mask(said.stderr)


@pytest.mark.parametrize(
    ("value", "required", "words"),
    [
        ("hunter2", True, ""),
        (None, False, ""),
        ("", False, ""),
        (None, True, "is not set"),
        ("", True, "is empty: TOKEN is set, but to an empty text"),
        (
            "abcde",
            False,
            "is too short: TOKEN has 5 characters, but masking in logs requires at least 6",
        ),
    ],
)
def test_what_is_wrong_with_a_value_is_said(value: str | None, required: bool, words: str) -> None:
    assert describe_unusable("TOKEN", value, required=required) == words
