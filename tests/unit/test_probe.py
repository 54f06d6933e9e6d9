"""What the answer of a host amounts to, its resources and its findings, whatever it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers import machine
from drivers.base import Need, Resources, Wish
from runner.hosts.probe import ProbeLine, parse_findings

WHOLE = b"""\
root=/home/u/.recipe-host
home=/home/u
cpus=64
cpu_quota=800000/100000
memory=540000000000
memory=68719476736
disk=2000000000000
gpu=NVIDIA H100 80GB HBM3, 81559
gpu=NVIDIA H100 80GB HBM3, 81559
gpu_driver=570.86.15
cuda=12.8
system=Linux 6.8 x86_64
login=u
python3=3.11.9
agent=python3
venv=yes
writable=yes
executable=yes
links=yes
proc=yes
docker=ok 27.1.1
container_gpus=nvidia-ctk
""" + b"".join(
    b"tool=%s /usr/bin/%s\n" % (name, name)
    for name in b"bash cat chmod date env git ln mkdir mv python3 rm sed docker".split()
)


def of(what: str, said: bytes) -> list[ProbeLine]:
    return [finding for finding in parse_findings(said) if finding.what == what]


def without(*names: bytes) -> bytes:
    return b"".join(line + b"\n" for line in WHOLE.splitlines() if not line.startswith(names))


def test_a_host_that_has_everything_lacks_nothing() -> None:
    assert [finding for finding in parse_findings(WHOLE) if finding.state != "ok"] == []
    assert (
        of("gpus", WHOLE)[0].found
        == "2 x NVIDIA H100 80GB HBM3 with 86 GB (driver 570.86.15, CUDA 12.8)"
    )


def test_resources_are_the_smallest_limit_of_each_kind() -> None:
    told = machine.facts(WHOLE)
    assert machine.parse_resources(told) == Resources(
        8.0, 68719476736, 2, "NVIDIA H100 80GB HBM3", 81559 << 20, 2000000000000
    )


@pytest.mark.parametrize(
    ("gone", "what", "state"),
    [
        (b"tool=sed ", "sed", "missing"),
        (b"agent", "agent", "missing"),
        (b"writable", "root", "missing"),
        (b"executable", "root", "note"),
        (b"links", "root", "missing"),
        (b"tool=python3 ", "python3", "note"),
        (b"docker", "containers", "note"),
        (b"container_gpus", "gpus in containers", "note"),
        (b"gpu", "gpus", "note"),
        (b"disk", "disk", "note"),
    ],
)
def test_what_is_not_there_is_said_with_what_to_do(gone: bytes, what: str, state: str) -> None:
    (finding,) = [finding for finding in of(what, without(gone)) if finding.state != "ok"]
    assert finding.state == state
    assert finding.advice


def test_a_card_that_cannot_be_used_is_not_no_card() -> None:
    broken = (
        without(b"gpu")
        + b"gpu=NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\ncard=/dev/nvidia0\n"
    )
    (finding,) = of("gpus", broken)
    assert "cannot be used: NVIDIA-SMI has failed" in finding.found
    assert machine.parse_resources(machine.facts(broken)).gpus == 0


def test_an_nvidia_smi_that_does_not_end_is_a_fault_of_the_host() -> None:
    (finding,) = of("gpus", WHOLE + b"hung=nvidia-smi\n")
    assert (finding.state, finding.found) == ("missing", "nvidia-smi did not answer within 6 s")
    assert "reboot" in finding.advice
    told = machine.facts(WHOLE + b"hung=nvidia-smi\n")
    assert machine.parse_resources(told).gpus == 0
    assert machine.describe_shortfall(Resources(gpus=2), Need(), told) == machine.HUNG


def test_an_engine_that_is_installed_and_does_not_answer_is_said_in_its_words() -> None:
    (finding,) = of(
        "docker", without(b"docker") + b"docker=no permission denied while trying to connect\n"
    )
    assert (finding.state, finding.found) == (
        "note",
        "cannot be used: permission denied while trying to connect",
    )


def test_words_of_a_stranger_are_printable_and_short() -> None:
    for finding in parse_findings(
        without(b"system") + b"system=\x1b[2J\x1b]0;x\x07" + b"y" * 10_000 + b"\n"
    ):
        assert finding.found.isprintable()
        assert len(finding.found) < 400


@given(
    st.binary(max_size=300),
    st.lists(
        st.tuples(
            st.sampled_from([line.partition(b"=")[0] for line in WHOLE.splitlines()]),
            st.binary(max_size=20),
        )
    ),
)
def test_no_answer_is_too_strange(noise: bytes, lines: list[tuple[bytes, bytes]]) -> None:
    said = noise + b"\n" + b"".join(name + b"=" + value + b"\n" for name, value in lines)
    have = machine.parse_resources(machine.facts(said))
    assert all(finding.found.isprintable() for finding in parse_findings(said))
    assert machine.satisfies(have, Wish())
    assert not machine.satisfies(have, Wish(Need(cpus=1e300)))


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_machine_does_for_what_is_not_more_than_it_has(have: int, need: int) -> None:
    for name in ("cpus", "memory", "gpus", "gpu_memory", "disk"):
        assert machine.satisfies(Resources(**{name: have}), Wish(Need(**{name: need}))) is (
            need <= have
        )
    assert machine.satisfies(Resources(gpu="NVIDIA H100 80GB"), Wish(Need(gpu="h100")))
    assert not machine.satisfies(Resources(gpu="NVIDIA A100"), Wish(Need(gpu="H100")))
    assert not machine.satisfies(Resources(), Wish(Need(gpu="H100")))


def test_a_python_that_makes_no_environments_is_reported_and_uv_does_not_make_them() -> None:
    told = without(b"venv=") + b"tool=uv /usr/bin/uv\n"
    assert [finding.advice for finding in of("venv", told)] == [
        "install python3-venv for recipes that declare packages"
    ]
    assert of("venv", WHOLE) == []
