"""Container engines of clusters: Apptainer (or Singularity) and Enroot.

pyxis uses Enroot to run images.  The module `containers` calls this module.

These engines need no daemon and no root.  A container is an ordinary child process in the host's
process namespace and the job's cgroups, so it ends with the processes of the job.  Apptainer starts
an image file (SIF), Enroot a named root file system.  Both are created once per image.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Command
from drivers.devices import device_variables

from ..digest import of_value
from ..errors import CannotRun

if TYPE_CHECKING:
    from drivers.devices import Device

    from .engines import Engine, Mount

KINDS: Final = ("apptainer", "enroot")
BENEATH: Final = {"pyxis": "enroot"}
"""Alternative engine names -> the program.  pyxis is the plugin of srun that calls Enroot."""
SETTINGS: Final = ("ENROOT_", "APPTAINER_", "SINGULARITY_")
"""Prefixes of the variables that configure an engine, such as its image cache or registry
credentials.

A user or a site sets these variables.
"""
_FINDS: Final = ("PATH", "HOME")
"""Variables with which the engine finds its programs.

All other variables of Apptainer come from the step.
"""
_OWN: Final = ("APPTAINER", "SINGULARITY", "LD_", "PATH")
"""Prefixes of variables that Apptainer or its loader reads or drops.

A step's variables with these prefixes are passed with `APPTAINERENV_`.
"""
_HIDDEN: Final = "RECIPE_IN_"
"""Prefix of a step's variables while Enroot's client runs."""


def image_address(kind: str, image: str) -> str:
    """Return the engine's address of an image.  Paths and names with a transport stay unchanged."""
    if "://" in image or image.startswith("/"):
        return image
    name, at, digest = image.partition("@")
    if at and ":" in name.rpartition("/")[2]:
        name = name.rpartition(":")[0]  # neither engine accepts a tag beside a digest
    if kind == "enroot":
        name = _mark_registry(name)
    return f"docker://{name}{at}{digest}"


def _mark_registry(name: str) -> str:
    """Return an image name with `#` after its registry, as Enroot requires."""
    registry, slash, rest = name.partition("/")
    has_registry = "." in registry or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if slash and has_registry else name


def image_name(image: str) -> str:
    """Return the name under which the engine stores an image."""
    return f"recipe-{of_value('image', image)[:16]}"


def wrap(
    command: Command,
    image: str,
    engine: Engine,
    mounts: Sequence[Mount],
    gpus: Sequence[Device] | None,
) -> Command:
    """Return `command`, changed to run in a container as a child process.  Raises CannotRun.

    `image` is the path of an Apptainer image file, or a name of Enroot.
    """
    box = f"{command.cwd}.box"
    env = dict(command.env) | {"RECIPE_CONTAINER": posixpath.basename(box)}
    inside = replace(command, env=env)
    ordered = sorted(mounts, key=lambda mount: mount.target)  # parent directories first
    if engine.kind == "enroot":
        call = _call_enroot(inside, engine, ordered, gpus)
    else:
        call = _call_apptainer(inside, engine, ordered, gpus)
    argv = (*engine.words, *call.words, *engine.args, image, *command.argv)
    return replace(
        command,
        argv=("sh", "-c", _RUN, "recipe-container", engine.kind, box, command.cwd, _CONF, *argv),
        env=call.env,
        secrets=call.secrets,
    )


class _EngineCall(NamedTuple):
    """The call of an engine for one command."""

    words: Sequence[str]
    """The verb and its flags."""
    env: dict[str, str]
    """The client's variables, and those of the step in the form in which the client passes them on."""
    secrets: dict[str, str]
    """The step's secret variables in the same form."""


def _call_enroot(
    inside: Command, engine: Engine, mounts: Sequence[Mount], gpus: Sequence[Device] | None
) -> _EngineCall:
    client = _enroot_variables(engine, gpus)
    words = ["start", "--conf", f"{inside.cwd}.box/conf"]
    for mount in mounts:
        words += ["--mount", _fstab_mount(mount)]
    env = {**client, **_add_prefix(inside.env, _HIDDEN)}
    return _EngineCall(words, env, _add_prefix(inside.secrets, _HIDDEN))


def _call_apptainer(
    inside: Command, engine: Engine, mounts: Sequence[Mount], gpus: Sequence[Device] | None
) -> _EngineCall:
    env = dict(inside.env)
    if gpus:
        env |= device_variables(gpus, env)
    words = ["exec", "--home", f"{inside.cwd}.box", "--pwd", inside.cwd]
    sees_gpus = gpus is None or bool(gpus)
    if engine.gpus and sees_gpus:
        words.append("--nv")
    for mount in mounts:
        words += ["--mount", _csv_mount(mount)]
    env.pop("HOME", None)  # `--home` sets it
    client = {name: value for name, value in engine.env.items() if name in _FINDS}
    is_singularity = posixpath.basename(engine.program) == "singularity"
    apart = "SINGULARITYENV_" if is_singularity else "APPTAINERENV_"
    passed = {**client, **_escape_own(env, apart)}
    return _EngineCall(words, passed, _escape_own(inside.secrets, apart))


def _enroot_variables(engine: Engine, gpus: Sequence[Device] | None) -> dict[str, str]:
    """Return the environment of Enroot's client, whose hook makes the GPUs visible."""
    variables = {
        **engine.env,
        "ENROOT_LOGIN_SHELL": "no",
        # The images of NVIDIA set this variable to "all", which would count otherwise.
        "NVIDIA_VISIBLE_DEVICES": "void",
    }
    cards = "all"
    if gpus is not None:
        cards = ",".join(gpu.uuid or gpu.name for gpu in gpus)
    if engine.gpus and cards:
        variables["NVIDIA_VISIBLE_DEVICES"] = cards
        variables["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    return variables


def _add_prefix(values: Mapping[str, str], before: str) -> dict[str, str]:
    return {before + name: value for name, value in values.items()}


def _escape_own(values: Mapping[str, str], apart: str) -> dict[str, str]:
    escaped: dict[str, str] = {}
    for name, value in values.items():
        escaped_name = apart + name if name.startswith(_OWN) else name
        escaped[escaped_name] = value
    return escaped


def _csv_mount(mount: Mount) -> str:
    """Return a mount as a CSV record, the format of Apptainer."""
    if "\n" in mount.path + mount.target:
        raise CannotRun(
            f"apptainer cannot mount {mount.path!r}", fix="rename the path without line breaks"
        )
    source, destination = f"source={mount.path}", f"destination={mount.target}"
    fields = ["type=bind", _csv_field(source), _csv_field(destination)]
    if not mount.writable:
        fields.append("ro")
    return ",".join(fields)


def _csv_field(text: str) -> str:
    escaped = text.replace('"', '""')
    if "," in text or '"' in text:
        return f'"{escaped}"'
    return escaped


def _fstab_mount(mount: Mount) -> str:
    """Return a mount as fstab fields with colons, the format of Enroot."""
    if ":" in mount.path + mount.target:
        raise CannotRun(f"enroot cannot mount {mount.path!r}", fix="rename the path without colons")
    access = "rw" if mount.writable else "ro"
    options = f"none:x-create=auto,bind,{access}"
    return f"{_escape_fstab(mount.path)}:{_escape_fstab(mount.target)}:{options}"


def _escape_fstab(path: str) -> str:
    """Escape a path for an fstab field."""
    return (
        path.replace("\\", "\\134")
        .replace(" ", "\\040")
        .replace("\t", "\\011")
        .replace("\n", "\\012")
    )


def explain(code: int | None, last: str, image: str) -> str:
    """Return an error message if the container did not start; empty if the command started.

    The message comes from the last line of the log.
    """
    if code == 255 and last.startswith("FATAL:"):
        reason = last.removeprefix("FATAL:").strip()
        if "executable file not found" in reason:
            program = reason.partition(":")[0].rpartition(" ")[2].strip('"')
            return f"the image {image} does not have {program} (a script requires /bin/sh, or bash with `shell: bash`)"
        return f"cannot start a container of {image}: {reason}"
    if code == 1 and last.startswith("[ERROR]"):
        return f"cannot start a container of {image}: {last.removeprefix('[ERROR]').strip()}"
    return ""


# -- what runs on the host -------------------------------------------------------------------------

LOOK: Final = r"""
kind=$1 name=$2 from=$3; shift 3
case $from in /*) name=$name-$(stat -c %Y%s "$from") ;; esac
case $kind in
  apptainer) file=${APPTAINER_CACHEDIR:-${SINGULARITY_CACHEDIR:-$HOME/.apptainer}}/recipe/$name.sif
    [ -e "$file" ] && echo "$file" ;;
  enroot) conf=$(mktemp) || exit 1
    echo 'rc() { [ -e /.recipe ]; }' >"$conf"
    "$@" list 2>/dev/null | grep -qx "$name" && "$@" start --conf "$conf" "$name" >/dev/null 2>&1 && echo "$name"
    rm -f "$conf" ;;
esac
:
"""
"""Script: print the `image` for `wrap` if it is stored.

Arguments: the engine kind, the image name, its address, the engine command.
"""

FETCH: Final = r"""
kind=$1 name=$2 from=$3; shift 3
case $from in /*) name=$name-$(stat -c %Y%s "$from") || exit 1 ;; esac
umask 077
case $kind in
  apptainer) folder=${APPTAINER_CACHEDIR:-${SINGULARITY_CACHEDIR:-$HOME/.apptainer}}/recipe
    mkdir -p "$folder" && new=$folder/.$name.$(uname -n).$$.sif && trap 'rm -f "$new"' EXIT || exit 1
    "$@" pull "$new" "$from" >&2 && mv -f "$new" "$folder/$name.sif" && echo "$folder/$name.sif" ;;
  enroot) new=$(mktemp -d) && trap 'rm -rf "$new"' EXIT && exec 9>"${TMPDIR:-/tmp}/$name.$(id -u).lock" && flock 9 || exit 1
    case $from in /*) file=$from ;; *) file=$new/image.sqsh; "$@" import --output "$file" "$from" >&2 9>&- || exit 1 ;; esac
    echo 'rc() { : >/.recipe; }' >"$new/conf"
    "$@" create --force --name "$name" "$file" >&2 9>&- && "$@" start --rw --conf "$new/conf" "$name" 9>&- && echo "$name" ;;
esac
"""
"""Script: store the image and print the same."""

_CONF: Final = r"""
hooks() {
  local each value
  {
    for each in "${!RECIPE_IN_@}" RECIPE_JOB; do
      [ -v "$each" ] || continue
      value=${!each//\'/\'\\\'\'}
      printf "export %s='%s'\n" "${each#RECIPE_IN_}" "$value"
    done
    printf "cd '%s' || exit 125\nexec \"\$@\"\n" "${RECIPE_CWD//\'/\'\\\'\'}"
  } >"${ENROOT_RUNTIME_PATH}/rc"
}
"""
"""Configuration script for Enroot that passes the step's variables in a file in memory.

Their values may contain line breaks.
"""

# Arguments: engine kind, directory for this script, the step's directory, Enroot's script, the
# command
_RUN: Final = r"""
kind=$1 box=$2 conf=$4; export RECIPE_CWD="$3"; shift 4
rm -rf "$box"; mkdir -m 700 "$box" || exit 125
[ "$kind" != enroot ] || printf %s "$conf" >"$box/conf"
metrics=${RECIPE_METRICS-${RECIPE_IN_RECIPE_METRICS-}}
[ -z "$metrics" ] || : >>"$metrics" # a file that is not there cannot be mounted
# One SIGTERM to each process of the step.  Apptainer has one that waits and hands signals on, and some that mount its image.
ask() {
  asked=yes
  if [ "$kind" = enroot ]; then kill -TERM -$client; return; fi
  found=
  for each in $(grep -lszFx "RECIPE_JOB=$RECIPE_JOB" /proc/[0-9]*/environ); do
    grep -Eqsz '^(APPTAINER|SINGULARITY)_CONTAINER=' $each || continue
    each=${each%/environ}
    kill -TERM ${each#/proc/} && found=yes
  done 2>/dev/null
  [ -n "$found" ] || kill -TERM $client
}
trap ask TERM
setsid "$@" </dev/null &
client=$!
code=
while :; do # a wait that a signal ended is repeated; the shell knows the end of a child until it was waited for
  asked=
  wait $client
  got=$?
  [ -n "$code" ] && [ $got = 127 ] && break
  code=$got
  [ -n "$asked" ] || break
done
rm -rf "$box"
exit $code
"""
