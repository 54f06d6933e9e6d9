"""What Slurm is asked and what it answers, without a cluster."""

from __future__ import annotations

import asyncio
from datetime import datetime
from math import inf
from typing import Any

import pytest

from drivers import slurm_commands as commands
from drivers.base import (
    Denied,
    DriverError,
    HostLost,
    Need,
    Rejected,
    Resources,
    Throttled,
    Unreachable,
    Unsure,
    Wish,
)
from drivers.slurm import Slurm, _End


@pytest.mark.parametrize(
    ("program", "words", "kind", "said"),
    [
        ("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Unsure, "the reply to sbatch was lost"),
        ("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Unreachable, "cannot reach slurmctld"),
        ("sbatch", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", Unreachable, "cannot reach slurmctld"),
        ("sbatch", "sbatch: error: slurm_job_submit: Resource temporarily unavailable; try again later", Throttled, "try again"),
        ("squeue", "squeue: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\"", Denied, "start munged"),
        ("sbatch", "cannot run sbatch: [Errno 2] No such file or directory: 'sbatch'", Denied, "install the Slurm commands"),
        ("sinfo", "sh: 1: exec: sinfo: not found", Denied, "install the Slurm commands"),
        ("sbatch", "sbatch: error: invalid partition specified: mian\nsbatch: error: Invalid partition name specified", Denied, 'did you mean "main"'),
        ("sbatch", "Batch job submission failed: Invalid account or account/partition combination specified", Denied, "`account`"),
        ("sbatch", "Batch job submission failed: Invalid qos specification", Denied, "`qos`"),
        ("sbatch", "Batch job submission failed: Invalid generic resource (gres) specification", Denied, "`gres`"),
        ("sbatch", "Batch job submission failed: Invalid feature specification", Denied, "`constraint`"),
        ("sbatch", "sbatch: unrecognized option '--no-such'\nTry \"sbatch --help\" for more information", Rejected, "`options`"),
        ("sbatch", "Batch job submission failed: Requested node configuration is not available", Denied, "Slurm rejected the job"),
    ],
)  # fmt: skip
def test_what_slurm_complains_of_says_what_to_do(
    program: str, words: str, kind: type[DriverError], said: str
) -> None:
    error = commands.why_refused(program, f"{program} ended with 1: {words}", ["main", "short"])
    assert type(error) is kind and said in str(error)


@pytest.mark.parametrize(
    ("reason", "never"),
    [("PartitionConfig", True), ("AssocGrpGRES", True), ("QOSMaxWallDurationPerJobLimit", True), ("ReqNodeNotAvail, UnavailableNodes:n1", True),
     ("Resources", False), ("Priority", False), ("None", False)],
)  # fmt: skip
def test_a_reason_that_does_not_pass_is_distinguished_from_one_that_does(
    reason: str, never: bool
) -> None:
    assert bool(commands.hopeless(reason)) is never


def test_jobs_that_are_over_are_not_listed_and_a_comment_bears_any_key() -> None:
    key = "a/key with: |odd| characters \udcff"
    lines = [
        f"7|RUNNING|None|2026-11-22T10:00:00|n[1-2]|1:02|1-00:00:00|recipe-1|{commands.comment('m', key)}",
        "8|COMPLETING|None|2026-11-22T10:00:00|n1|0:00|1:00|recipe-2|recipe:m:x",
        "9|PENDING|Resources|N/A||UNLIMITED|UNLIMITED|other|",
    ]
    found = commands.parse_jobs("\n".join(lines))
    assert [(job.id, commands.key_of(job.comment, "m")) for job in found] == [
        ("7", key),
        ("9", None),
    ]
    assert [(job.left, job.walltime) for job in found] == [(62, 86_400), (inf, inf)]
    assert commands.key_of(found[0].comment, "another installation") is None


def test_nodes_that_are_down_are_not_offered_and_the_default_partition_comes_first() -> None:
    said = "gpu|4|idle|64|512000|100|2-00:00:00|gpu:a100:8(S:0-1)|a100\nmain*|2|mix|8|2000|0|infinite|(null)|(null)\n"
    said += "main*|9|drained*|8|2000|0|infinite|(null)|(null)\nmain*|1|idle*|8|1|0|infinite||"
    found = commands.parse_groups(said)
    assert [(group.partition, group.nodes, group.have.gpus) for group in found] == [
        ("main", 2, 0),
        ("gpu", 4, 8),
    ]
    assert [group.longest for group in found] == [inf, 172_800]
    assert commands.parse_partitions(said) == ["gpu", "main"]
    assert commands.count_gpus("gpu:2,gpu:h100:4,shard:8") == 6 and commands.count_gpus("gpu") == 1


def test_a_gpu_model_with_a_digit_that_counts_nothing_is_a_model() -> None:
    assert commands.count_gpus("gpu:a²,gpu:²") == 2
    assert commands.find_gpu_model("gpu:²") == "²"


def test_a_node_that_lacks_something_is_a_persons_affair_and_another_end_is_a_lost_host() -> None:
    assert isinstance(
        commands.why_ended("7", "JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=93:0"),
        Denied,
    )
    lost = commands.why_ended("7", "JobId=7 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15")
    assert (
        isinstance(lost, HostLost)
        and str(lost) == "Slurm job 7 has finished: its time limit expired (TIMEOUT, TimeLimit)"
    )


@pytest.mark.parametrize(
    ("story", "record", "said"),
    [
        (
            "JobState=CANCELLED Reason=None ExitCode=0:0",
            "7|CANCELLED by 1000|0:0\n7.batch|CANCELLED|0:15\n",
            "it was cancelled by ann (CANCELLED)",
        ),
        ("", "7|NODE_FAIL|1:0\n7.0|CANCELLED|0:15\n", "one of its nodes failed (NODE_FAIL)"),
        ("", "7|PREEMPTED|0:0\n", "preempted by another job (PREEMPTED)"),
        (
            "JobState=FAILED Reason=NonZeroExitCode",
            "7|FAILED|137:0\n7.0|OUT_OF_MEMORY|0:125\n",
            "out of memory; request more with `memory`",
        ),
        ("JobState=FAILED Reason=NonZeroExitCode", "7|RUNNING|0:0\n", "FAILED, NonZeroExitCode"),
        ("JobState=COMPLETING Reason=None", "", "Slurm job 7 has finished"),
        ("", "7|FAILED|93:0\n", "no Python 3.9"),
    ],
)
def test_accounting_says_how_a_job_ended_where_there_is_any(
    story: str, record: str, said: str
) -> None:
    """Recorded from slurmdbd 22.05; without it, or before it knows, the controller's word stands."""
    assert said in str(commands.why_ended("7", story, record, {"1000": "ann"}.__getitem__))


def test_settings_that_fight_the_drivers_own_are_named() -> None:
    assert "--nodes=3" in commands.check_settings(["--reservation=x", "--nodes=3"], "")
    assert "--nod=3" in commands.check_settings(["--nod=3"], ""), "sbatch takes it for --nodes"
    assert not commands.check_settings(
        [
            "--nodelist=n1",
            "--nice",
            "--gres-flags=enforce-binding",
            "--mail-type=END",
            "--begin=18:00",
        ],
        "",
    )
    assert "-N2" in commands.check_settings(
        ["-N2"], ""
    ) and "is not an sbatch option" in commands.check_settings(["exclusive"], "")


def test_a_queue_is_asked_often_at_first_and_at_last_once_a_minute() -> None:
    asked, age = 0, 0.0
    while age < 3600:
        asked, age = asked + 1, age + max(0.2, commands.pause(age))
    assert (
        asked < 110
        and commands.pause(0) <= 0.1
        and commands.pause(40) == 10
        and commands.pause(7200) == 60
    )


def test_a_cluster_without_overlap_is_too_old() -> None:
    assert (
        "20.11 or later" in commands.too_old("19.05.5")
        and not commands.too_old("22.05.8")
        and not commands.too_old("")
    )


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("0:05", 5),
        ("UNLIMITED", inf),
        ("NOT_SET", inf),
    ],
)
def test_times_are_read_as_slurm_writes_them(time: str, seconds: float) -> None:
    assert commands.parse_time(time) == seconds


@pytest.mark.parametrize(
    ("time", "hours", "longest", "asked"),
    [
        ("2:00:00", 9, 60, "2:00:00"),
        ("", 1.5, inf, "90"),
        ("", 1.5, 3600, "60"),
        ("", None, 3600, "60"),
        ("", None, inf, ""),
        ("", 0.001, inf, "1"),
    ],
)
def test_the_walltime_is_what_is_needed_or_the_longest_that_the_partition_allows(
    time: str, hours: float | None, longest: float, asked: str
) -> None:
    assert commands.walltime(time, hours, longest) == asked


def test_a_short_walltime_has_a_short_grace() -> None:
    assert [commands.grace(None, walltime) for walltime in (60, 3600)] == [15, 120]
    assert [commands.grace(300, walltime) for walltime in (60, 3600)] == [57, 300]


@pytest.mark.parametrize(
    ("when", "shown"),
    [
        ("2026-11-23T14:03:00", "2026-11-23 14:03"),
        ("2026-11-23T12:00:30", ""),
        ("6109-01-01T00:00:00", ""),
    ],
)
def test_an_estimate_of_the_start_is_shown_unless_it_is_of_another_age(
    when: str, shown: str
) -> None:
    said = f"sbatch: Job 7 to start at {when} using 2 processors on nodes n[1-2] in partition main"
    assert commands.begins(said, datetime(2026, 11, 23, 12)) == shown


@pytest.mark.parametrize(
    ("together", "settings", "asked"),
    [
        (Resources(cpus=None, gpus=4), {}, {"gres": "gpu:4"}),
        (Resources(cpus=None, gpus=0), {}, {}),
        (Resources(cpus=64, gpus=99), {}, {"gres": "gpu:8", "cpus": 16}),
        (Resources(cpus=2.5, memory=3 << 30, gpus=0), {}, {"cpus": 3, "memory": "3072M"}),
        (
            Resources(cpus=2, memory=3 << 30, gpus=2),
            {"cpus": 8, "memory": "9G", "gres": "gpu:1"},
            {},
        ),
    ],
)
def test_an_allocation_is_as_large_as_what_runs_at_once_unless_settings_say_it(
    together: Resources, settings: dict[str, Any], asked: dict[str, object]
) -> None:
    driver, wish = Slurm(**settings), Wish(together=together)
    assert (
        driver._request_share(
            driver._share(Resources(cpus=16, memory=64 << 30, gpus=8), wish), wish
        )
        == asked
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_end_of_a_program_is_found_in_its_output_however_it_is_cut(size: int) -> None:
    mark = b"\x1eabcdefgh "
    said = b"out\x1eput \x1eabcdef" + mark + b"ended with 3\nits words\n" + mark
    end = _End(mark)
    ours = b"".join(end.feed(said[at : at + size]) for at in range(0, len(said), size))
    assert ours == b"out\x1eput \x1eabcdef" and end.words == b"ended with 3\nits words\n"


@pytest.mark.parametrize(
    ("gres", "model"),
    [
        ("gpu:h100:4(S:0-1)", "h100"),
        ("gpu:2", None),
        ("gpu:a100:2,gpu:h100:2", None),
        ("shard:8,gres/gpu:rtx_4090:1", "rtx_4090"),
        ("(null)", None),
    ],
)
def test_the_model_of_a_gpu_is_the_name_that_slurm_has_for_it(gres: str, model: str | None) -> None:
    assert commands.find_gpu_model(gres) == model


@pytest.mark.parametrize(
    ("gpu", "asked"),
    [("H100", "gpu:h100:2"), ("RTX 4090", "gpu:rtx_4090:2"), (None, "gpu:2"), ("B200", None)],
)
def test_a_model_of_gpu_is_asked_for_by_its_name(
    gpu: str | None, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (
        "a*|2|idle|8|64000|0|1:00:00|gpu:h100:4|x\nb|2|idle|8|64000|0|1:00:00|gpu:rtx_4090:4|x\n"
    )
    driver = Slurm()

    async def told(*_: object) -> str:
        return listed

    monkeypatch.setattr(driver, "_ask", told)
    offers = asyncio.run(driver.offers(Wish(Need(gpus=2, gpu=gpu), together=Resources(gpus=2))))
    assert [offer.data["gres"] for offer in offers][:1] == ([asked] if asked else [])


def test_a_node_costs_what_the_settings_say_of_its_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def told(*_: object) -> str:
        return "a*|2|idle|8|64000|0|1:00:00|gpu:h100:4|x\nb|2|idle|8|64000|0|1:00:00|(null)|x\n"

    def offered(**prices: str) -> list[tuple[str, float]]:
        driver = Slurm(prices=prices)
        monkeypatch.setattr(driver, "_ask", told)
        return [
            (offer.id, offer.price) for offer in asyncio.run(driver.offers(Wish(Need(nodes=2))))
        ]

    assert offered(a="1.20 USD") == [("a", 2.4), ("b", 0.0)] and offered() == [
        ("a", 0.0),
        ("b", 0.0),
    ]
    assert (
        Slurm(prices={"a": "1.20 USD"}).traits.billed
        and not Slurm(prices={"a": "0 USD"}).traits.billed
        and not Slurm().traits.billed
    )
    with pytest.raises(Denied, match=r'`prices` of .* unknown partition "aa", did you mean "a"'):
        offered(aa="1.20 USD")
