"""Export of Compute Engine instances and their surroundings as a Pulumi program, without secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple


class PulumiMachine(NamedTuple):
    """A machine for which to write a program.

    `seconds` is the time after each start until Google stops the machine, or deletes it if it is
    not persistent.
    """

    name: str  # of the stack, as names and labels at Google may have it
    project: str  # empty: that of the Pulumi stack
    zone: str
    kind: str
    image: str
    disk: int  # GB
    network: str
    port: int
    user: str
    spot: bool
    keep: bool
    seconds: int
    gpus: Mapping[str, int]  # accelerators to attach to the machine type
    metadata: Mapping[str, str]
    bucket: str = ""
    nodes: int = 1


_HEAD = '''"""The stack {stack} of recipe, as a Pulumi program: made by `recipe stack export {stack} --pulumi`.

pip install pulumi pulumi-gcp
pulumi config set --secret sshKey "$(cat ~/.ssh/id_ed25519.pub)"{project}
pulumi up
{use}

`recipe stack` and `recipe reap` know nothing of what this program makes: Pulumi has it, and `pulumi destroy` ends it.
"""

import pulumi
import pulumi_gcp as gcp

labels = {{"recipe-stack": {name}, "managed-by": "pulumi"}}
key = pulumi.Config().require("sshKey")
'''
_RULE = """
firewall = gcp.compute.Firewall(
    "ssh",
    name={tag},{project}
    network={network},
    direction="INGRESS",
    allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=[{port}])],
    source_ranges=["0.0.0.0/0"],
    target_tags=[{tag}],
)
"""
_INSIDE = """
inside = gcp.compute.Firewall(
    "inside",
    name={inside},{project}
    network={network},
    direction="INGRESS",
    allows=[gcp.compute.FirewallAllowArgs(protocol=each) for each in ("tcp", "udp", "icmp")],
    source_tags=[{tag}],
    target_tags=[{tag}],
)
"""
_MACHINE = """
{begin}(
    {resource},
    name={named},{project}
    zone={zone},
    machine_type={kind},
    boot_disk=gcp.compute.InstanceBootDiskArgs(
        auto_delete=True,
        initialize_params=gcp.compute.InstanceBootDiskInitializeParamsArgs(image={image}, size={disk}, type="pd-balanced", labels=labels),
    ),
    network_interfaces=[
        gcp.compute.InstanceNetworkInterfaceArgs(
            network={network},
            access_configs=[gcp.compute.InstanceNetworkInterfaceAccessConfigArgs()],
        )
    ],
    guest_accelerators=[{gpus}],
    metadata={{**{metadata}, "ssh-keys": pulumi.Output.concat({login}, key)}},
    labels=labels,
    tags=[{tag}],
    scheduling=gcp.compute.InstanceSchedulingArgs(
        on_host_maintenance="TERMINATE",
        automatic_restart=False,
        preemptible={spot},
        provisioning_model={model},
        instance_termination_action={action},
        max_run_duration=gcp.compute.InstanceSchedulingMaxRunDurationArgs(seconds={seconds}),
    ),
    allow_stopping_for_update=True,
){end}
"""
_BUCKET = """
bucket = gcp.storage.Bucket(
    "results",
    name={bucket},{project}
    location={location},
    uniform_bucket_level_access=True,
    labels=labels,
    opts=pulumi.ResourceOptions(retain_on_delete=True),  # `pulumi destroy` leaves the results
)
pulumi.export("bucket", bucket.url)
"""
_ENDS = """
address = machine.network_interfaces[0].access_configs[0].nat_ip
pulumi.export("host", pulumi.Output.concat({login}, address))
pulumi.export("zone", machine.zone)
"""
_ENDS_OF_SEVERAL = """

def table(found):
    rows = [f'{{{{host = "{user}@{{outside}}", address = "{{inside}}"}}}}' for outside, inside in found]
    return "[drivers.ssh]\\nhosts = [\\n" + "".join(f"  {{row}},\\n" for row in rows) + "]\\n"


nics = [each.network_interfaces[0] for each in machines]
pairs = [pulumi.Output.all(nic.access_configs[0].nat_ip, nic.network_ip) for nic in nics]
pulumi.export("settings", pulumi.Output.all(*pairs).apply(table))
pulumi.export("zone", machines[0].zone)
"""
_USE = 'recipe run RECIPE --driver ssh --host "$(pulumi stack output host)"'
_USE_OF_SEVERAL = """pulumi stack output settings >>recipe.toml
recipe run RECIPE --driver ssh"""


def program(made: PulumiMachine) -> str:
    """Return the text of the Pulumi program `__main__.py`."""
    tag = f"recipe-stack-{made.name}"
    several = made.nodes > 1
    project = f"\n    project={_quote(made.project)}," if made.project else ""
    common = {
        "tag": _quote(tag),
        "project": project,
        "network": _quote(made.network.removeprefix("global/networks/")),
    }
    configure = "" if made.project else "\npulumi config set gcp:project PROJECT"
    use = _USE_OF_SEVERAL if several else _USE
    parts = [
        _HEAD.format(stack=made.name, name=_quote(made.name), project=configure, use=use),
        _RULE.format(port=_quote(str(made.port)), **common),
    ]
    if several:
        parts.append(_INSIDE.format(inside=_quote(f"{tag}-inside"), **common))
    parts.append(_format_machine(made, tag, common))
    if several:
        parts.append(_ENDS_OF_SEVERAL.format(user=made.user))
    else:
        parts.append(_ENDS.format(login=_quote(f"{made.user}@")))
    if made.bucket:
        location = _quote(made.zone.rpartition("-")[0].upper())
        bucket = _quote(made.bucket)
        parts.append(_BUCKET.format(bucket=bucket, project=project, location=location))
    return "".join(parts)


def _format_machine(made: PulumiMachine, tag: str, common: Mapping[str, str]) -> str:
    """Return the part of the program that makes the machine, or a list of several machines."""
    if made.nodes > 1:
        begin, end = "machines = [gcp.compute.Instance", f" for number in range({made.nodes})]"
        resource, named = 'f"machine-{number}"', f'f"{tag}-{{number}}"'
    else:
        begin, end = "machine = gcp.compute.Instance", ""
        resource, named = _quote("machine"), _quote(tag)
    gpus = [
        f"gcp.compute.InstanceGuestAcceleratorArgs(type={_quote(gpu)}, count={count})"
        for gpu, count in made.gpus.items()
    ]
    model = "SPOT" if made.spot else "STANDARD"
    action = "STOP" if made.keep else "DELETE"
    return _MACHINE.format(
        begin=begin,
        resource=resource,
        named=named,
        end=end,
        zone=_quote(made.zone),
        kind=_quote(made.kind),
        image=_quote(made.image),
        disk=made.disk,
        gpus=", ".join(gpus),
        metadata=_quote(dict(made.metadata)),
        login=_quote(f"{made.user}:"),
        spot=made.spot,
        model=_quote(model),
        action=_quote(action),
        seconds=made.seconds,
        **common,
    )


def _quote(value: str | Mapping[str, str]) -> str:
    """Write a value as a literal of the program: JSON's texts and objects are Python's, too."""
    return json.dumps(value)
