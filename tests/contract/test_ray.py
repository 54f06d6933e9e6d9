"""The ray driver keeps the contract, on a cluster of two nodes, and carries out whole runs there.  Claims of the agent, which is the same on every host, are for `make proof`."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from driver_contract import DriverContract, ExcludingContract

from drivers.base import Denied, Driver, Order, Wish
from runner.execution.terms import Settings
from runner.hosts.link.client import Client
from tests.servers.ray import LOOPBACK
from tests.servers.ray import Ray as Cluster
from tests.support import Space, Workers, until

pytest.importorskip("ray", reason="ray is not installed")

import ray
from ray.util.placement_group import PlacementGroup

from drivers.ray import Ray, _check_address, translate_error

RENTS = (
    "test_what_is_offered_can_be_rented_is_listed_and_given_back",
    "test_a_lease_that_was_given_back_has_no_hosts",
)
OF_THIS_DRIVER = (
    *RENTS,
    "test_nothing_is_offered_to_a_need_that_nothing_satisfies",
    "test_an_optional_member_has_its_part_of_this_suite",
    "test_what_was_left_out_is_counted_by_its_reason",
    "test_what_is_kept_on_a_host_is_below_its_root",
    "test_a_command_gets_its_arguments_directory_and_environment_and_nothing_else",
    "test_a_job_outlives_its_worker_and_is_found_again",
    "test_what_a_command_leaves_behind_is_ended_with_it_and_counted",
    "test_a_tree_travels_through_calls",
    "test_a_call_that_fails_is_rejected_with_what_it_said",
    "test_a_call_whose_input_breaks_off_raises_what_broke_it",
    "test_a_call_need_not_read_all_it_is_given",
    "test_a_call_that_is_given_up_is_ended",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, Cluster() as cluster:
        patch.setattr(
            "ray._private.ray_constants.ENABLE_RAY_CLUSTER", False
        )  # what LOOPBACK says to those that import it later
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        yield cluster
        ray.shutdown()  # type: ignore[no-untyped-call]


class OnRay(DriverContract, ExcludingContract):
    """An actor takes a second to begin: those claims that are of jobs share one, each with a folder of its own."""

    memory = 96_000  # Ray maps its object store

    @pytest.fixture(autouse=True)
    def found(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setenv("RECIPE_TEST_RAY", str(cluster.place))

    def make(self, place: Path) -> Ray:
        return Ray(root=str(place / "root"), installation=str(place / "installation"), idle=0)

    async def host(self, driver: Driver) -> Client:
        held = self.make(Path(os.environ["RECIPE_TEST_RAY"]))
        lease = await held.acquire(
            Order((await held.offers(Wish()))[0], "held", datetime.now(UTC) + timedelta(hours=1))
        )
        while (hosts := await held.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])


class TestRay(OnRay):
    pass


def _for_proof(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def tried(*arguments: object, **more: object) -> None:
        test(*arguments, **more)

    return pytest.mark.proof(tried)


for _name in {name for name in dir(OnRay) if name.startswith("test_")} - set(OF_THIS_DRIVER):
    setattr(TestRay, _name, _for_proof(getattr(OnRay, _name)))


# --- whole runs

RAY = Settings(driver="ray")


@pytest.fixture
def on_ray(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Space]:
    """A workspace whose runs are of this cluster; its folders on the nodes lie beside it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RECIPE_LEDGER", str(tmp_path / "ledger.db"))
    space = Workers(tmp_path / "work")
    space.write("recipe.toml", f"[drivers.ray]\nroot = '{tmp_path}/there'\n")
    give_back()  # what the claims above share
    yield space
    space.end()
    give_back()


def groups() -> dict[str, str]:
    """The placement groups that there are: their ids and names."""
    table = ray.util.placement_group_table()
    return {id: group["name"] for id, group in table.items() if group["state"] != "REMOVED"}


def give_back() -> None:
    for id in groups():
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))))
    until(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"),
        seconds=30,
    )


def test_a_run_on_ray_makes_what_it_makes_here_and_leaves_nothing(on_ray: Space) -> None:
    on_ray.recipe(
        "steps:\n"
        "  a: {run: 'env | cut -d= -f1 | grep RAY_ | wc -l > {{ outputs.o }}; seq 100000 > {{ outputs.n }}', outputs: {o: o.txt, n: n.txt}}\n"
        "  b: {nodes: 2, deps: [n.txt], run: 'echo $NODE_RANK of $NNODES; cksum < n.txt > {{ outputs.p }}', outputs: {p: p.txt}}\n"
    )
    assert on_ray.run(settings=RAY) == ["a", "b"]
    assert on_ray.read("o.txt").strip() == "0", "a step is not told that it is a worker of Ray"
    assert on_ray.read("n.txt") == "".join(f"{number}\n" for number in range(1, 100001))
    assert [on_ray.command("logs", "b", "--node", str(rank))[1] for rank in (0, 1)] == [
        "0 of 2\n",
        "1 of 2\n",
    ]
    assert on_ray.run() == [], "what was made on a cluster is fresh here"
    assert groups() == {} and ray.util.list_named_actors(all_namespaces=True) == []


def test_a_worker_that_is_killed_leaves_its_actor_to_the_next_and_the_step_begins_once(
    on_ray: Space,
) -> None:
    gate, begun = on_ray.root / "gate", on_ray.root / "begun"
    on_ray.recipe(
        f"steps: {{s: {{outputs: {{o: o.txt}}, run: 'echo begun >> {begun}; until [ -e {gate} ]; do sleep 0.05; done; echo made > o.txt'}}}}"
    )
    worker = on_ray.start("run", "--driver", "ray")
    until(lambda: begun.exists() or worker.poll() is not None)
    before, actors = groups(), ray.util.list_named_actors(all_namespaces=True)
    worker.kill()
    worker.communicate()
    again = on_ray.start("run", "--driver", "ray")
    gate.touch()
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert begun.read_text() == "begun\n" and on_ray.read("o.txt") == "made\n", said
    assert len(before) == len(actors) == 1 and groups() == {}


@pytest.mark.proof
def test_a_node_that_is_killed_is_a_preemption_and_the_step_goes_on_elsewhere(
    on_ray: Space, cluster: Cluster
) -> None:
    gate, begun = on_ray.root / "gate", on_ray.root / "begun"
    on_ray.recipe(
        f"steps: {{s: {{nodes: 2, outputs: {{o: o.txt}}, run: 'echo $NODE_RANK >> {begun}; until [ -e {gate} ]; do sleep 0.05; done; echo made > o.txt'}}}}"
    )
    worker = on_ray.start("run", "--driver", "ray")
    until(
        lambda: (
            (begun.exists() and len(begun.read_text().split()) == 2) or worker.poll() is not None
        )
    )
    cluster.add()
    cluster.kill()
    until(lambda: len(begun.read_text().split()) == 4 or worker.poll() is not None, seconds=120)
    gate.touch()
    _, said = worker.communicate(timeout=90)
    assert worker.returncode == 0, said
    assert (
        sorted(begun.read_text().split()) == ["0", "0", "1", "1"]
        and on_ray.read("o.txt") == "made\n"
    ), said
    assert groups() == {}


@pytest.mark.proof
def test_what_a_killed_actor_left_is_ended_before_its_lease_is_over(
    on_ray: Space, tmp_path: Path
) -> None:
    begun = on_ray.root / "begun"
    on_ray.recipe(f"steps: {{s: {{run: 'echo $$ > {begun}; trap \"\" HUP; sleep 1000'}}}}")
    worker = on_ray.start("run", "--driver", "ray")
    until(lambda: (begun.exists() and begun.read_text()) or worker.poll() is not None)
    worker.kill()
    worker.communicate()
    [named] = ray.util.list_named_actors(all_namespaces=True)
    ray.kill(ray.get_actor(**named))
    code, out, said = on_ray.command("reap", "--dead", "-y", "--driver", "ray")
    assert not Path(f"/proc/{int(begun.read_text())}").exists(), (code, out, said)
    assert groups() == {}, (code, out, said)


def test_doctor_describes_the_cluster_and_a_closed_port_is_refused_in_a_sentence(
    on_ray: Space,
) -> None:
    code, out, _ = on_ray.command("doctor", "--driver", "ray")
    assert code == 0 and str(ray.__version__) in out and "nodes" in out, out
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        on_ray.write(
            "recipe.toml", f"[drivers.ray]\naddress = '127.0.0.1:{closed.getsockname()[1]}'\n"
        )
        on_ray.recipe("steps: {s: {run: 'true'}}")
        code, _, said = on_ray.command("run", "--driver", "ray")
    assert code == 5 and "cannot reach a Ray cluster" in said and "Traceback" not in said, said


def test_a_cluster_of_another_version_is_refused_in_a_sentence() -> None:
    words = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\nThis process on node 10.0.0.1 was started with: Ray: 2.60.0"
    refused = translate_error(RuntimeError(words))
    assert (
        type(refused) is Denied
        and "another Ray or Python version" in str(refused)
        and "2.9.0" in str(refused)
    )


def test_an_address_whose_port_is_no_number_is_left_to_ray() -> None:
    _check_address("ray://127.0.0.1:²")
