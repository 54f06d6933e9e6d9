"""Promise: a fake provider bills what a machine cost and no more, lists what there is, and does the same again when it is asked the same again."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs import faults_page
from drivers.fakes.account import lines
from drivers.fakes.faults import AMOUNTS, CHANCES, Luck, parse
from drivers.fakes.world import Request
from tests.fake_accounts import ACCOUNTS, KEY, Account

EVERY = pytest.mark.parametrize("kind", ACCOUNTS, ids=lambda kind: kind.name)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("create", "destroy", "pause", "resume", "list")),
        st.integers(0, 5),
        st.floats(0, 4000),
    ),
    max_size=14,
)
FAULTS = st.sampled_from(
    (
        "",
        "lost=0.3",
        "crashed=0.3",
        "undead=0.5",
        "taken=0.3",
        "stuck=0.3,failed=0.3",
        "late=90",
        "preempted=2",
        "balance=0.05",
        "foreign=3",
        "broken=0.2,cut=0.2",
    )
)


def play(account: Account, actions: list[tuple[str, int, float]]) -> None:
    """Do these things, one after the other; an index beyond what there is means nothing."""
    made: list[str] = []
    for number, (action, which, seconds) in enumerate(actions):
        account.wait(seconds)
        if action == "create":
            made += [name] if (name := account.create(f"job-{number}")) else []
        elif action == "list":
            account.listing()
        elif which < len(made):
            account.destroy(made[which]) if action == "destroy" else account.pause(
                made[which], action == "resume"
            ) if account.pauses else None
    account.wait(100)


@EVERY
@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, faults=FAULTS, seed=st.integers(0, 99))
def test_what_is_billed_is_what_was_rented(
    kind: type[Account], actions: list[tuple[str, int, float]], faults: str, seed: int
) -> None:
    account = kind(faults, seed)
    play(account, actions)
    ledger = account.world.account.settle()
    assert [entry.at for entry in ledger] == sorted(entry.at for entry in ledger)
    born = {entry.machine: entry.at for entry in ledger if entry.event == "created"}
    ended = {entry.machine: entry.at for entry in ledger if entry.event == "destroyed"}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in ledger:
        if entry.event == "billed":
            assert (
                born[entry.machine]
                <= entry.since
                < entry.at
                <= ended.get(entry.machine, account.now)
            ), "billed outside of its life"
            assert entry.usd == pytest.approx(entry.rate * (entry.at - entry.since) / 3600)
            spans.setdefault((entry.machine, entry.what), []).append((entry.since, entry.at))
    assert all(
        before[1] <= after[0] for of in spans.values() for before, after in itertools.pairwise(of)
    ), "a second is billed twice"
    assert account.world.account.credit == pytest.approx(
        account.world.amount("balance", 100.0) - account.billed(), abs=1e-6
    )
    assert {machine.id for machine in account.world.account.alive()} == born.keys() - ended.keys()


@EVERY
@settings(max_examples=15, deadline=None)
@given(actions=ACTIONS, faults=FAULTS, seed=st.integers(0, 99))
def test_the_same_requests_have_the_same_replies(
    kind: type[Account], actions: list[tuple[str, int, float]], faults: str, seed: int
) -> None:
    one, other = kind(faults, seed), kind(faults, seed)
    play(one, actions)
    play(other, actions)
    assert one.replies == other.replies
    assert lines(one.world.account.settle()) == lines(other.world.account.settle())


@EVERY
def test_a_copy_of_a_world_lives_on_by_itself(kind: type[Account]) -> None:
    account = kind()
    assert account.create("a")
    twin = copy.deepcopy(account)
    assert twin.create("b")
    assert len(account.listing()) == 1 and len(twin.listing()) == 2


@EVERY
@settings(max_examples=10, deadline=None)
@given(count=st.integers(0, 9))
def test_the_pages_of_a_listing_have_each_machine_once(kind: type[Account], count: int) -> None:
    account = kind()
    made = [account.create(f"job-{number}") for number in range(count)]
    assert sorted(account.listing()) == sorted(str(name) for name in made)


@EVERY
def test_a_machine_whose_creation_was_never_answered_is_there(kind: type[Account]) -> None:
    account = kind("lost@create=once")
    account.create("recipe-1")
    assert account.replies[-1][2].lost
    assert len(account.listing()) == 1
    assert account.events() == ["created"]
    assert account.create("recipe-2"), "the fault was ordered once"


@EVERY
def test_a_machine_that_needs_no_time_to_boot_is_up_while_the_clock_stands(
    kind: type[Account],
) -> None:
    account = kind("boot=0")
    account.create("recipe-1")
    account.wait(0)
    assert account.events() == ["created", "started"]


@EVERY
def test_a_request_that_is_cut_off_has_no_effect(kind: type[Account]) -> None:
    account = kind("cut@create=once")
    account.create("recipe-1")
    assert account.replies[-1][2].lost and account.listing() == []


@EVERY
def test_a_new_machine_may_be_missing_from_listings_for_a_while(kind: type[Account]) -> None:
    account = kind("late=90", seed=3)
    assert account.create("recipe-1")
    assert account.listing() == []
    account.wait(90)
    assert len(account.listing()) == 1


@EVERY
def test_a_machine_may_survive_a_destroy_that_was_confirmed(kind: type[Account]) -> None:
    account = kind("undead@destroy=once,boot=5")
    machine = account.create("recipe-1")
    assert machine
    account.wait(10)
    assert account.destroy(machine).status < 300
    account.wait(60)
    assert account.listing() == [machine] and account.billed() > 0
    account.destroy(machine)
    account.wait(60)
    assert account.listing() == [] and account.events()[-1] == "destroyed"


@EVERY
def test_what_is_destroyed_already_is_not_found(kind: type[Account]) -> None:
    account = kind()
    machine = account.create("recipe-1")
    assert machine
    account.destroy(machine)
    account.wait(60)
    assert account.destroy(machine).status == 404


@EVERY
def test_an_empty_account_stops_what_runs(kind: type[Account]) -> None:
    account = kind("boot=5")
    assert account.create("recipe-1")
    account.world.account.credit = 0.01
    account.wait(7200)
    assert not any(machine.up for machine in account.world.account.alive())
    assert account.billed() < 0.1
    account.create("recipe-2")
    assert account.replies[-1][2].status >= 400, "and rents nothing"


@EVERY
def test_no_key_and_a_refused_key_are_distinguished_from_what_is_not_there(
    kind: type[Account],
) -> None:
    account = kind()
    route = account.world.routes[0]
    if route.operation not in account.world.open:
        assert account.call(route.method, route.path, {}, key=False).status in (401, 403)
    account.world.faults[:] = parse("denied=1")
    assert account.call(route.method, route.path, {}).status in (401, 403, 404)


@EVERY
@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, 99),
    name=st.sampled_from(("1", "-", "%00", "a" * 300, "nosuch")),
    body=st.binary(max_size=40) | st.sampled_from((b"[1]", b"{", b'{"q": 3, "ids": 4}')),
)
def test_no_request_is_too_strange_for_an_answer(
    kind: type[Account], which: int, name: str, body: bytes
) -> None:
    account = kind()
    route = account.world.routes[which % len(account.world.routes)]
    path = "/".join(name if part.startswith("{") else part for part in route.path.split("/"))
    for query in (
        "",
        "limit=x&select_filters=[1&after_token=zz&pageToken=q&offset=-1&day=3",
        "select_filters={%22id%22:3}&maxResults=0",
    ):
        reply = account.world.handle(Request(route.method, path, query, KEY, body), account.now)
        assert reply.status < 500 and isinstance(reply.encode(), bytes)


@given(word=st.sampled_from((*CHANCES, *AMOUNTS)), value=st.floats(0, 1))
def test_a_fault_is_read_as_it_is_written(word: str, value: float) -> None:
    assert parse(f" {word}={value!r} ,")[0][:2] == (word, value)
    assert [parse(str(fault))[0].name for fault in parse(f"{word}={value!r}")] == [word]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("throtled=1", 'did you mean "throttled"'),
        ("lost=2", "a chance from 0 to 1"),
        ("lost=soon", "a chance from 0 to 1"),
        ("late=-1", "at least 0"),
        ("late=once", "at least 0"),
        ("lost@creat=1", 'no operation "creat"'),
        ("late@create=3", "whole provider"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text, ["create"])


def test_every_fault_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "fakes.md").read_text("utf-8")
    assert faults_page.refreshed(guide) == guide, "run python -m docs.generate"
    assert [name for name in (*CHANCES, *AMOUNTS) if f"| `{name}` |" not in guide] == []


def test_what_the_guide_calls_reproduced_has_a_fault_and_a_test() -> None:
    root = Path(__file__).parents[2]
    table = (
        (root / "docs" / "fakes.md")
        .read_text("utf-8")
        .partition("## What is reproduced")[2]
        .partition("\n## ")[0]
    )
    tests = "".join(
        path.read_text("utf-8")
        for folder in ("unit", "system")
        for path in (root / "tests" / folder).glob("test_*.py")
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(rows) >= 40
    for _provider, behaviour, faults, test in rows:
        assert (
            parse(
                faults.replace("`", "").replace("always", "").replace(", ", "=1,")
                + "=1" * (faults != "always")
            )
            or faults == "always"
        )
        assert f"def test_{test.strip('`')}" in tests, behaviour


def test_the_luck_of_a_chance_is_about_that_chance() -> None:
    faults = list(parse("lost@create=0.25"))
    assert (
        200
        < sum(Luck(faults, f"0/{number}", "create").strikes("lost") for number in range(1000))
        < 300
    )
    assert not any(Luck(faults, f"0/{number}", "list").strikes("lost") for number in range(100))
