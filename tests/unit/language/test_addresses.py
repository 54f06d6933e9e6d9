"""Addresses: their schemes, their secrets, and the one form of each."""

from __future__ import annotations

import pytest

from runner.language.addresses import AddressType, kind_of, normalize, split_secrets
from runner.language.bad_values import BadValue


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("hf://org/name", "hf"),
        ("s3://b/k", "s3"),
        ("./a", "path"),
        ("org/name", "path"),
        ("ftp://x", "path"),
    ],
)
def test_the_scheme_is_the_kind(address: str, kind: str) -> None:
    assert kind_of(address) == kind


def test_login_query_and_signatures_are_kept_out_of_what_is_shown() -> None:
    signature = "s" * 16
    shown, secrets = split_secrets(f"https://me:pw@host/data.tar?part=1&sig={signature}")
    assert shown == "https://host/data.tar"
    assert secrets == ("me:pw", f"part=1&sig={signature}", signature)


@pytest.mark.parametrize(
    ("kind", "written", "address"),
    [
        ("model", "org/name", "hf://org/name"),
        ("model", "./org/name", "./org/name"),
        ("dataset", "org/name", "org/name"),
        ("dataset", "hf://org/name", "hf://datasets/org/name"),
        ("dataset", "hf://datasets/org/name@v1", "hf://datasets/org/name@v1"),
        ("file", "https://host/x", "https://host/x"),
        ("file", "s3://b/sp ace/a%20b.txt", "s3://b/sp ace/a%20b.txt"),
        ("dataset", "gs://b/a folder/", "gs://b/a folder/"),
    ],
)
def test_an_address_has_one_form(kind: AddressType, written: str, address: str) -> None:
    assert normalize(kind, written) == address


@pytest.mark.parametrize(
    ("kind", "written", "says"),
    [
        ("file", "hf://org/name", "has type file"),
        ("model", "hf://datasets/org/name", "must be hf://org/name"),
        ("dataset", "hf:///x", "must be hf://org/name"),
        ("dataset", "ftp://host/x", 'has the unknown scheme "ftp://"'),
        ("dataset", "s3://b/a::c", "an address within an address"),
        ("dataset", "s3://", "incomplete address"),
        ("dataset", "s3://a b", "incomplete address"),
        ("dataset", "s3://a/b ", "incomplete address"),
        ("dataset", "s3://a/b\nc", "incomplete address"),
        ("dataset", "https://host/a b", "incomplete address"),
        ("dataset", "s3://b/p//", "has an empty name"),
        ("dataset", "s3://b//p", "has an empty name"),
        ("dataset", "gs://b/p/../q", "has an empty name"),
        ("dataset", "", "must be the address of a dataset"),
        ("dataset", 5, "must be the address of a dataset, not 5"),
    ],
)
def test_an_address_that_names_nothing_is_refused(
    kind: AddressType, written: object, says: str
) -> None:
    with pytest.raises(BadValue) as caught:
        normalize(kind, written)
    assert says in caught.value.message
