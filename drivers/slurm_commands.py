"""Slurm commands and parsers for their output.

Runs nothing itself, so another batch system needs only another such module.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from math import ceil, inf
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

from .base import (
    Argv,
    Denied,
    DriverError,
    HostLost,
    Rejected,
    Resources,
    Throttled,
    Unreachable,
    Unsure,
    suggest,
)

_Amount = TypeVar("_Amount", int, float)

OURS = (
    *(
        "--account",
        "--chdir",
        "--comment",
        "--constraint",
        "--cpus-per-task",
        "--exclusive",
        "--export",
        "--gres",
        "--job-name",
        "--mem",
        "--nodes",
    ),
    *(
        "--no-requeue",
        "--ntasks",
        "--ntasks-per-node",
        "--output",
        "--parsable",
        "--partition",
        "--qos",
        "--requeue",
        "--time",
        "--wait",
        "--wrap",
    ),
    *(
        "--array",
        "--deadline",
        "--hold",
        "--input",
        "--mem-per-cpu",
        "--mem-per-gpu",
        "--ntasks-per-socket",
        "--test-only",
        "--time-min",
    ),
    *("-H", "-a", "-i"),
    *("-A", "-C", "-D", "-J", "-N", "-W", "-c", "-n", "-o", "-p", "-q", "-t"),
)
"""Options of sbatch that the driver sets itself, or that would break it."""
CONTAINERS = ("apptainer", "singularity", "pyxis", "podman", "docker")
"""Container engines that may run steps' images on the nodes."""
TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}")
"""Slurm times: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
OVER = frozenset(
    (
        "COMPLETING",
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "REVOKED",
    )
)
"""States of a job that is no longer charged."""
ENDS = {
    "TIMEOUT": "its time limit expired",
    "NODE_FAIL": "one of its nodes failed",
    "BOOT_FAIL": "one of its nodes did not boot",
    "PREEMPTED": "preempted by another job",
    "DEADLINE": "its deadline passed",
    "OUT_OF_MEMORY": "out of memory; request more with `memory` in [drivers.slurm]",
    "CANCELLED": "it was cancelled",
}
"""Descriptions of a job's end, by state."""
DOWN = ("down", "drain", "drng", "fail", "maint", "unk", "inval", "boot", "power", "not_resp")
"""Prefixes of the states in which a node starts no jobs."""
NEVER = {
    "PartitionConfig": "the partition has too few nodes, or a lower time limit than `time`",
    "PartitionNodeLimit": "the partition allows fewer nodes per job",
    "PartitionTimeLimit": "the partition has a lower time limit than `time`",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition accepts no jobs now",
    "BadConstraints": "no node matches `constraint`, `gres` and `cpus`",
    "InvalidAccount": "this user may not use the `account`",
    "InvalidQOS": "this user may not use the `qos`",
    "ReqNodeNotAvail": "all matching nodes are reserved or down",
    "Licenses": "a licence in `options` does not exist",
}
"""Descriptions of pending reasons that do not pass by themselves.

`hopeless` knows more, such as AssocGrp, AssocMax and QOSMax.
"""
SILENT = (
    "unable to contact",
    "socket timed out",
    "connection refused",
    "connection timed out",
    "communication connection",
)
"""Lower-case parts of error messages that mean the controller does not respond."""
NO_PYTHON, NO_ROOM = 93, 94
"""Exit codes of the batch script if a node has no Python, or no writable work directory."""
YEAR = 365 * 86400
"""Seconds from now beyond which a start estimate means that Slurm does not know."""
WITHOUT_PYTHON = "a node of the cluster has no Python 3.9 or later: set `python` in [drivers.slurm], or load a Python in `setup`"
WITHOUT_ROOM = "the work directory on a node is not writable: set another `root` in [drivers.slurm]"
OLDEST = (20, 11)
"""First Slurm version with `srun --overlap`."""
NODE, JOB = "%N|%o", "%i|%T|%r|%V|%N|%L|%l|%j|%k"
GRACE, SHARE, MOST = 120.0, 0.25, 0.95
"""Seconds between SIGTERM and the walltime.

GRACE is the default, but at most SHARE of the walltime.  A configured value is capped at MOST of
the walltime.
"""


FEATURE = re.compile(r"[\w.:+-]+")
"""The name of one node feature: a constraint without operators, which are `&|!*,()[]`.

See https://slurm.schedmd.com/sbatch.html#OPT_constraint.
"""


class NodeGroup(NamedTuple):
    """A group of identical nodes of one partition."""

    partition: str
    default: bool
    nodes: int
    have: Resources
    features: frozenset[str]
    longest: float = inf  # time limit of a job, in seconds
    """Time limit of the partition's jobs, in seconds."""


class QueuedJob(NamedTuple):
    """A job in the Slurm queue."""

    id: str
    state: str
    reason: str
    submitted: float
    """Seconds since the epoch, read as local time of this machine; 0 if unknown."""
    nodes: str
    left: float
    """Seconds until the walltime."""
    walltime: float
    """Total time limit, in seconds."""
    name: str
    comment: str


class SbatchOptions(NamedTuple):
    """The options of an sbatch request."""

    name: str
    comment: str
    nodes: int
    partition: str
    account: str = ""
    qos: str = ""
    gres: str = ""
    constraint: str = ""
    time: str = ""
    cpus: int | None = None
    memory: str = ""
    options: tuple[str, ...] = ()


# --- commands


def sinfo() -> Argv:
    """Return the command that lists nodes by partition and resources."""
    return ("sinfo", "-h", "-e", "-o", "%P|%D|%t|%c|%m|%d|%l|%G|%f")


def names(nodes: str) -> Argv:
    """Return the command that looks up the names and addresses of nodes."""
    return ("sinfo", "-h", "-N", "-n", nodes, "-o", NODE)


def squeue(name: str = "") -> Argv:
    """Return the command that lists this login's jobs: all, or only jobs with a given name.

    `squeue --json` ignores such filters in Slurm 22.05.
    """
    command = ("squeue", "--me", "-h", "-o", JOB)
    return (*command, "-n", name) if name else command


def scancel(job: str) -> Argv:
    return ("scancel", job)


def story(job: str) -> Argv:
    """Return the command that shows the controller's record of a job, which may have finished."""
    return ("scontrol", "show", "job", "-o", job)


def record(job: str) -> Argv:
    """Return the command that shows the accounting record of a job and its steps.

    It fails on clusters without accounting.
    """
    return ("sacct", "-n", "-P", "-j", job, "-o", "JobIDRaw,State,ExitCode")


def config_of() -> Argv:
    """Return the command that shows the cluster's configuration."""
    return ("scontrol", "show", "config")


def sbatch(order: SbatchOptions) -> Argv:
    """Return the command that requests an allocation of whole nodes, or of `cpus` CPUs if set.

    The batch script is read from stdin.
    """
    share = [f"--cpus-per-task={order.cpus}"] if order.cpus else ["--exclusive"]
    if order.memory or not order.cpus:
        share.append(f"--mem={order.memory or 0}")  # 0: all of it
    said = {
        "account": order.account,
        "qos": order.qos,
        "gres": order.gres,
        "constraint": order.constraint,
        "time": order.time,
    }
    return (
        "sbatch",
        "--parsable",
        f"--job-name={order.name}",
        f"--comment={order.comment}",
        "--no-requeue",
        f"--nodes={order.nodes}",
        "--ntasks-per-node=1",
        "--output=/dev/null",
        "--chdir=/",
        f"--partition={order.partition}",
        *share,
        *_format_options(said),
        *order.options,
    )


def _format_options(said: Mapping[str, str]) -> list[str]:
    """Return the options of a Slurm command, without those that are not set."""
    return [f"--{name}={value}" for name, value in said.items() if value]


def look(order: SbatchOptions, python: str, root: str, probe: str, setup: Sequence[str]) -> Argv:
    """Return the command that checks the equipment of a currently idle node.

    It prints lines of name=value. `probe` is the name of a file in `root`, which the node sees if
    it shares a disk with this machine.
    """
    said = {
        "partition": order.partition,
        "account": order.account,
        "qos": order.qos,
        "constraint": order.constraint,
    }
    script = [
        *setup,
        'case $1 in /*) root=$1 ;; *) root=$HOME/$1 ;; esac; echo "node=$SLURMD_NODENAME"',
        '"$0" -c "import sys; v = sys.version_info; print(\'python=%d.%d.%d\' % v[:3]) if v >= (3, 9) else None" 2>/dev/null',
        '[ -e "$root/$2" ] && echo shared=yes; mkdir -p "$root" && [ -w "$root" ] && echo "root=$root"; rmdir "$root" 2>/dev/null; :',
    ]
    # Lines of `setup` may use modules, which only a login shell has.
    shell = ("/bin/bash", "-lc") if setup else ("/bin/sh", "-c")
    return (
        "srun",
        "--quiet",
        "--immediate=10",
        "--time=1",
        "--nodes=1",
        "--ntasks=1",
        "--chdir=/",
        "--input=none",
        *_format_options(said),
        *order.options,
        *shell,
        "\n".join(script),
        python or "python3",
        root,
        probe,
    )


def describe_limits(found: Iterable[NodeGroup]) -> str:
    """Describe partitions with their node counts and time limits."""
    nodes: Counter[tuple[str, float]] = Counter()
    for group in found:
        nodes[group.partition, group.longest] += group.nodes
    lines = []
    for (name, longest), count in nodes.items():
        limit = "no limit" if longest == inf else f"{longest / 60:g} minutes"
        lines.append(f"{name} ({count} nodes, {limit})")
    return ", ".join(lines)


def worker_job(order: SbatchOptions, cwd: str, log: str, grace: float) -> Argv:
    """Return the command that requests a job for executing a run.

    Its own needs are small, so it can share a node.
    """
    said = {
        "partition": order.partition,
        "account": order.account,
        "qos": order.qos,
        "time": order.time,
    }
    return (
        "sbatch",
        "--parsable",
        f"--job-name={order.name}",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--signal=B:USR1@{max(1, round(grace))}",
        f"--output={log}",
        "--open-mode=append",
        f"--chdir={cwd}",
        *_format_options(said),
    )


def worker_script(job: Argv, command: Argv, kept: str) -> bytes:
    """Return the worker job's script, which also saves itself to the file `kept`.

    Warned before its walltime, the script submits its successor and leaves the steps to the
    successor's worker.
    """
    return f"""#!/bin/sh
cat "$0" >{shlex.quote(kept)}
next() {{
  {job[0]} --dependency=afterany:$SLURM_JOB_ID {shlex.join(job[1:])} {shlex.quote(kept)} && kill -KILL $worker && exit 0
}}
trap next USR1
{shlex.join(command)} &
worker=$!
while :; do
  wait $worker
  code=$?
  kill -0 $worker 2>/dev/null || exit $code
done
""".encode("utf-8", "surrogateescape")


def trial(asked: Argv) -> Argv:
    """Return a dry run of an `sbatch` command, which prints the estimated start on stdout.

    The dry run rejects impossible requests.
    """
    keep = 'said=$("$@" 2>&1) && echo "$said" || { code=$?; echo "$said" >&2; exit $code; }'
    return ("/bin/sh", "-c", keep, "sh", asked[0], "--test-only", *asked[1:])


def srun(job: str, node: str, program: Argv) -> Argv:
    """Return the command that runs a program on one node of an allocation, beside other programs.

    A killed srun leaves its step running; an srun that gets SIGTERM ends it.  So a wrapper that may
    be killed runs srun.
    """
    mind = ("setpriv", "--pdeathsig", "KILL", "setsid", "--wait", "setpriv", "--pdeathsig", "TERM")
    step = (
        "srun",
        "--quiet",
        "--overlap",
        "--mem=0",
        f"--jobid={job}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--unbuffered",
    )
    return (*mind, *step, *program)


def keeper_name(job: str, node: str) -> str:
    """Return the name of a node's keeper process."""
    return f"recipe-{job}-{node}"


class KeeperParameters(NamedTuple):
    """Parameters of the keeper processes of an allocation."""

    root: str
    idle: float
    """Seconds without a running program after which keepers exit; 0: never."""
    leave: float = 0.0
    """Seconds after the job's start at which to end its programs; 0: never."""
    grace: float = 0.0
    """Seconds for programs to save and exit."""


def script(keeper: str, python: str, asked: KeeperParameters, setup: Sequence[str]) -> bytes:
    """Return the batch script, which starts one keeper process per node as a single step."""
    task = (
        'case $3 in /*) root=$3 ;; *) root=$HOME/$3 ;; esac; mkdir -p "$root" && [ -w "$root" ] || exit 94; '
        '"$0" -c "import sys; sys.exit(sys.version_info < (3, 9))" || exit 93; '
        'exec "$0" -I -c "$1" keep "recipe-$SLURM_JOB_ID-$SLURMD_NODENAME" "$2" "$root/$SLURMD_NODENAME" "$4" "$5" "$6"'
    )
    step = "srun --overlap --mem=0 --ntasks-per-node=1 --cpus-per-task=$SLURM_CPUS_ON_NODE --cpu-bind=none --wait=0 --kill-on-bad-exit=1 /bin/sh -c"
    given = (f"{asked.idle:g}", asked.root, f"{asked.leave:g}", f"{asked.grace:g}")
    words = " ".join(shlex.quote(word) for word in (task, python or "python3", keeper, *given))
    shell = "#!/bin/bash -l" if setup else "#!/bin/sh"
    return "\n".join(
        [shell, "recipe_began=$(date +%s)", *setup, f'exec {step} {words} "$recipe_began"', ""]
    ).encode()


# --- answers


def parse_groups(said: str) -> list[NodeGroup]:
    """Parse `sinfo` output to the node groups that may start jobs, default partition first."""
    found = []
    for line in said.splitlines():
        partition, count, state, cpus, memory, disk, longest, gres, features = line.split("|", 8)
        if state.startswith(DOWN) or state.endswith("*"):
            continue
        have = Resources(
            cpus=float(_parse_leading_number(cpus)),
            memory=_parse_leading_number(memory) << 20,
            gpus=count_gpus(gres),
            gpu=find_gpu_model(gres),
            disk=_parse_leading_number(disk) << 20,
        )
        asked = frozenset(features.split(","))
        found.append(
            NodeGroup(
                partition.rstrip("*"),
                partition.endswith("*"),
                _parse_leading_number(count),
                have,
                asked,
                parse_time(longest),
            )
        )
    return sorted(found, key=lambda group: not group.default)


def parse_config(said: str) -> dict[str, str]:
    """Parse the cluster's configuration to a dictionary."""
    settings: dict[str, str] = {}
    for line in said.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip()] = value.strip()
    return settings


def too_old(version: str) -> str:
    """Explain why this Slurm version is not supported.  Empty if it is supported or unknown."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    return f"Slurm {version} has no `srun --overlap`: Slurm 20.11 or later is required"


def parse_partitions(said: str) -> list[str]:
    """Return the names of all partitions, including partitions that are down."""
    return list(dict.fromkeys(line.split("|")[0].rstrip("*") for line in said.splitlines()))


def parse_addresses(said: str) -> list[tuple[str, str]]:
    """Return nodes with their network addresses, in rank order."""
    found: dict[tuple[str, str], None] = {}
    for line in filter(None, said.splitlines()):
        name, _, address = line.partition("|")
        found[name, address or name] = None
    return list(found)


def parse_jobs(said: str) -> list[QueuedJob]:
    """Parse `squeue` output to the unfinished jobs."""
    found = []
    for line in said.splitlines():
        id, state, reason, submitted, nodes, left, walltime, name, comment = line.split("|", 8)
        try:
            since = datetime.fromisoformat(submitted).timestamp()
        except ValueError:
            since = 0.0
        if state not in OVER:
            found.append(
                QueuedJob(
                    id,
                    state,
                    reason,
                    since,
                    nodes,
                    parse_time(left),
                    parse_time(walltime),
                    name,
                    comment,
                )
            )
    return found


def parse_job_id(said: str) -> str:
    """Parse the ID of an accepted job, with an optional cluster name. Raises ValueError."""
    found = re.search(r"^(\d+)(;\S*)?$", said.strip(), re.MULTILINE)
    if found is None:
        raise ValueError(f"sbatch answered {said!r}")
    return found[1]


def begins(said: str, now: datetime) -> str:
    """Return the start time estimated by a dry run, in the cluster's local time.

    Empty for a start within a minute, or without an estimate.  An estimate of a year or more counts
    as none.
    """
    found = re.search(r" to start at (\d{4}-\d\d-\d\dT\d\d:\d\d)", said)
    if found is None:
        return ""
    ahead = (datetime.fromisoformat(found[1]) - now).total_seconds()
    if not 60 < ahead < YEAR:
        return ""
    return found[1].replace("T", " ")


def why_ended(
    job: str, said: str, recorded: str = "", name: Callable[[str], str] = str
) -> DriverError:
    """Return an error that explains why a job has finished, from the output of `story` and
    `record`.

    Denied if the next job would end the same way.  `name` maps a user id to a user name.
    """
    told = dict(word.split("=", 1) for word in said.split() if "=" in word)
    state, by = told.get("JobState", ""), ""
    for line in recorded.splitlines():
        step, known, exit = (*line.split("|"), "", "")[:3]
        if "." not in step:
            first, _, by = known.partition(" by ")
            if first in OVER:
                state = first
            told.setdefault("ExitCode", exit)
        elif known.startswith("OUT_OF_ME"):
            state = "OUT_OF_MEMORY"  # the lack of memory ended the keeper, and so the job
    code = _parse_leading_number(told.get("ExitCode", "").partition(":")[0])
    if code == NO_PYTHON:
        return Denied(WITHOUT_PYTHON)
    if code == NO_ROOM:
        return Denied(WITHOUT_ROOM)
    why = ENDS.get(state, "")
    if by:
        why += f" by {name(by)}"
    marks = ", ".join(filter(_tells_more, (state, told.get("Reason", "None"))))
    if why:
        return HostLost(f"Slurm job {job} has finished: {why} ({marks})")
    if marks:
        return HostLost(f"Slurm job {job} has finished: {marks}")
    return HostLost(f"Slurm job {job} has finished")


def _tells_more(mark: str) -> bool:
    """Return True if the state or reason of a finished job says more than that it has finished."""
    return mark not in ("", "COMPLETING", "None")


def comment(mark: str, key: str) -> str:
    """Return the comment that identifies a job of this driver."""
    return f"recipe:{mark}:{quote(key, safe='', errors='surrogateescape')}"


def key_of(said: str, mark: str) -> str | None:
    """Return the lease key in a job's comment.  None if the job has another owner."""
    ours, _, rest = said.partition(f"recipe:{mark}:")
    return unquote(rest, errors="surrogateescape") if rest and not ours else None


def hopeless(reason: str) -> str:
    """Explain why a job with this Slurm pending reason never starts.  Empty if it may start."""
    name = reason.partition(",")[0].strip()
    if name.startswith(("AssocGrp", "AssocMax", "QOSMax", "QOSGrp", "QOSMin")):
        return "the account or QOS does not allow this request"
    return NEVER.get(name, "")


def request_gpus(count: int, model: str | None) -> str:
    """Return the GRES string that requests GPUs, of one model or of any."""
    return f"gpu:{model}:{count}" if model else f"gpu:{count}"


def request_memory(size: int) -> str:
    """Return a size in bytes as Slurm reads it, in MiB."""
    return f"{ceil(size / (1 << 20))}M"


def count_gpus(gres: str) -> int:
    """Count the GPUs in a GRES string such as `gpu:a100:4(S:0-1),gpu:2`."""
    found = 0
    for each in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, _, rest = each.strip().partition(":")
        if kind in ("gpu", "gres/gpu"):
            count = rest.rpartition(":")[2]
            found += _parse_leading_number(count) if count.isdecimal() else 1
    return found


def find_gpu_model(gres: str) -> str | None:
    """Return the GPU model in a GRES string such as `gpu:a100:4(S:0-1)`, by Slurm's name.

    None if it names no model or several.
    """
    found = set(re.findall(r"(?:^|,)(?:gres/)?gpu:([^:,()]*[^:,()\d][^:,()]*)", gres))
    return found.pop() if len(found) == 1 else None


def why_refused(program: str, words: str, known: Iterable[str] = ()) -> DriverError:
    """Convert a Slurm command's error output to an error with a remedy.

    `known` holds the partitions.
    """
    said = re.sub(r"^\S+ ended with \d+: ", "", words.strip())
    said = re.sub(
        r"^(sbatch|squeue|sinfo|sacct|scancel|srun|scontrol|slurmstepd|allocation failure)\S*: (error: )?",
        "",
        said,
        flags=re.MULTILINE,
    )
    low = said.lower()
    is_unknown_to_shell = re.search(rf"\b{program}: (command )?not found", words)
    if is_unknown_to_shell or _has_both(low, "no such file", "cannot run"):
        return Denied(
            f"{program} is not installed: install the Slurm commands (package slurm-client), or set `login` to a login node"
        )
    if "munge" in low or "authentication" in low:
        return Denied(
            f"munge authentication with Slurm failed: start munged, or ask the administrators ({_join_last_lines(said)})"
        )
    if "socket timed out" in low and program == "sbatch":
        return Unsure(f"the reply to sbatch was lost: {_join_last_lines(said)}")
    if any(sign in low for sign in SILENT):
        return Unreachable(f"cannot reach slurmctld: {_join_last_lines(said)}")
    if "temporarily unable" in low or "try again later" in low:
        return Throttled(_join_last_lines(said))
    if program != "sbatch":
        return Denied(f"{program}: {_join_last_lines(said)}")
    named = re.search(r"specified: (\S+)", said)
    if named and _has_both(low, "partition", "invalid"):
        return Denied(no_partition(named[1], known))
    for sign, setting in (
        ("account", "account"),
        ("qos", "qos"),
        ("time limit", "time"),
        ("generic resource", "gres"),
        ("feature", "constraint"),
    ):
        if sign in low:
            return Denied(
                f"Slurm rejected `{setting}` of [drivers.slurm]: {_join_last_lines(said)}"
            )
    if "option" in low or "usage" in low:
        return Rejected(f"sbatch rejected `options`: {_join_last_lines(said)}")
    return Denied(f"Slurm rejected the job: {_join_last_lines(said)}")


def _has_both(text: str, one: str, other: str) -> bool:
    return one in text and other in text


def no_partition(name: str, known: Iterable[str]) -> str:
    """Report an unknown partition, with a suggestion of similar names."""
    return f'unknown partition "{name}"{suggest(name, known, "there are")}'


def check_settings(options: Sequence[str], container: str) -> str:
    """Describe errors in the driver's Slurm settings.  Empty if the settings are valid."""
    if container and container not in CONTAINERS:
        near = get_close_matches(container, CONTAINERS, n=1)
        known = f'did you mean "{near[0]}"?' if near else f"available: {', '.join(CONTAINERS)}"
        return f'unknown container engine "{container}": {known}'
    for option in options:
        wrong = _check_option(option)
        if wrong:
            return wrong
    return ""


def _check_option(option: str) -> str:
    """Describe the error in one of the configured sbatch options, or return ""."""
    name = option.partition("=")[0] if option.startswith("--") else option[:2]
    is_named = len(name) > 1 and name != "--"
    # sbatch accepts abbreviated option names.
    if is_named and any(ours.startswith(name) for ours in OURS):
        return f'`options` cannot contain "{option}": use the setting in [drivers.slurm] instead'
    if not name.startswith("-"):
        return f'"{option}" in `options` is not an sbatch option: write it as one word, such as "--reservation=NAME"'
    return ""


def parse_time(time: str) -> float:
    """Parse a Slurm time limit into seconds.  Infinite if the text is no time.  See `TIME`."""
    if not TIME.fullmatch(time):
        return inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )


def walltime(time: str, hours: float | None, longest: float) -> str:
    """Return the walltime in minutes to request: setting, wanted time, or the partition's limit.

    Empty if the partition has no limit.  A setting is returned as it is, in Slurm's notation.
    """
    if time:
        return time
    asked = longest if hours is None else min(longest, hours * 3600)
    if asked == inf:
        return ""
    # Rounded up, the time may be longer than the partition allows, which Slurm would reject.
    minutes = min(ceil(asked / 60), int(min(longest, 1e9) / 60))
    return str(max(1, minutes))


def grace(setting: float | None, walltime: float) -> float:
    """Return how many seconds before the walltime programs are asked to save and exit."""
    if setting is None:
        return min(GRACE, walltime * SHARE)
    return min(setting, walltime * MOST)


def pause(age: float) -> float:
    """Return the seconds until the next poll of a pending job.

    The interval grows with the job's age, to 10 s in its first minute and later to 60 s.
    """
    if age > 60:
        return min(60.0, age / 6)
    return min(10.0, max(0.1, age / 4))


def find_common_resources(found: Sequence[NodeGroup]) -> Resources:
    """Return the resources common to all nodes of several groups."""
    haves = [group.have for group in found]
    models = {have.gpu for have in haves}
    gpu = models.pop() if len(models) == 1 else None
    cpus = float(_find_smallest(have.cpus for have in haves))
    memory = _find_smallest(have.memory for have in haves)
    gpus = _find_smallest(have.gpus for have in haves)
    disk = _find_smallest(have.disk for have in haves)
    return Resources(cpus=cpus, memory=memory, gpus=gpus, gpu=gpu, disk=disk)


def _find_smallest(amounts: Iterable[_Amount | None]) -> _Amount:
    """Return the smallest of some amounts. An unknown amount counts as 0."""
    return min((amount or 0 for amount in amounts), default=0)


def _parse_leading_number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _join_last_lines(said: str) -> str:
    """Return the last two lines of a message as one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-2:])[:500]
