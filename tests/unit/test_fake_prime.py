"""Promise: the fake Prime Intellect has the provider's known quirks."""

from __future__ import annotations

from drivers.fakes.world import Request
from tests.fake_accounts import KEY, PrimeAccount


def test_active_is_not_ready() -> None:
    account = PrimeAccount("boot=60")
    pod = account.create("a")
    assert pod
    seen = []
    for _ in range(3):
        shown = account.show(pod)
        seen.append(
            (
                shown["status"],
                shown["installationStatus"],
                shown["installationProgress"],
                shown["sshConnection"],
            )
        )
        account.wait(35)
    assert [row[:3] for row in seen] == [
        ("PROVISIONING", "PENDING", 0),
        ("ACTIVE", "INSTALLING", 40),
        ("ACTIVE", "FINISHED", 100),
    ]
    assert (
        seen[0][3] == [None]
        and str(seen[2][3]).startswith("root@")
        and str(seen[2][3]).endswith(" -p 22")
    )


def test_an_installation_may_fail_while_it_is_billed() -> None:
    account = PrimeAccount("failed=1,boot=10")
    pod = account.create("a")
    account.wait(600)
    shown = account.show(str(pod))
    assert (shown["status"], shown["installationStatus"]) == (
        "ACTIVE",
        "ERROR",
    ) and "failed" in shown["installationFailure"]
    assert account.billed() > 0


def test_several_nodes_have_a_list_of_logins() -> None:
    account = PrimeAccount("boot=5")
    made = account.data(account.rent(account.offers("multi-node")[0], "a"))
    account.wait(10)
    shown = account.show(made["id"])
    assert [login.endswith(" -p 22") for login in shown["sshConnection"]] == [True, True] and len(
        set(shown["ip"])
    ) == 2


def test_the_status_of_several_pods_is_asked_at_once_and_leaves_out_what_is_gone() -> None:
    account = PrimeAccount()
    one, other = account.create("a"), account.create("b")
    assert one and other
    account.destroy(one)
    reply = account.world.handle(
        Request("GET", "/api/v1/pods/status", f"pod_ids={one}&pod_ids={other}", KEY), account.now
    )
    assert [row["podId"] for row in account.data(reply)["data"]] == [other]


def test_no_capacity_a_high_price_and_a_wrong_body_are_distinguished() -> None:
    account = PrimeAccount("taken@create=once")
    offer = account.offers()[0]
    none = account.rent(offer, "a")
    assert none.status == 400 and "no capacity" in str(none.body)
    assert account.rent(offer, "a", maxPrice=0.001).status == 400
    wrong = account.rent({**offer, "socket": ""}, "a")
    assert (
        wrong.status == 422
        and isinstance(wrong.body, dict)
        and wrong.body["detail"][0]["loc"] == ["body", "pod", "socket"]
    )
    assert account.rent({**offer, "cloudId": "nosuch"}, "a").status == 404


def test_history_has_what_a_pod_has_cost() -> None:
    account = PrimeAccount("boot=10")
    pod = account.create("a")
    account.wait(3605)
    account.destroy(str(pod))
    [row] = account.data(account.call("GET", "/api/v1/pods/history"))["data"]
    assert (
        row["totalBilledPrice"] == account.billed()
        and abs(row["totalBilledPrice"] - row["priceHr"]) < 1e-6 * 3600
    )
