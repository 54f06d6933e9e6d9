"""A Ray cluster of two nodes on loopback: one head and one more raylet, both ours.  Knows nothing of the driver that asks it.

    with Ray() as cluster:
        cluster.address   # of its head
        cluster.add()     # a third node
        cluster.kill()    # of the nodes beside the head the one that has been there longest, as a machine that fails

Nodes have two processors each, no dashboard and no monitor; what they write is below `cluster.place`.  Where Ray is not installed a test is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from tests.tools import lacks

SERVE = """
import socket, sys
from ray._private import node, utils
from ray.cluster_utils import Cluster
utils.write_ray_address = lambda *_a, **_k: None
node.Node.start_api_server = lambda *_a, **_k: None
alike = dict(num_cpus=2, object_store_memory=80 << 20, include_log_monitor=False, no_monitor=True, include_dashboard=False, node_ip_address="127.0.0.1")
names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
start = node.Node.start_raylet

def start_raylet(self, *given, **more):  # which gives up when its agents have not said their ports within 15 seconds
    for name in names:
        with open(f"{self.get_session_dir_path()}/{name}_{self._node_id}", "w") as file:
            file.write(str(getattr(self._ray_params, name)))
    start(self, *given, **more)

def ports():
    held = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    found = {name: each.getsockname()[1] for name, each in zip(names, held)}
    for each in held:
        each.close()
    return found

node.Node.start_raylet = start_raylet
cluster = Cluster()
cluster.add_node(temp_dir=sys.argv[1], **alike, **ports())
others = []
for line in sys.stdin:
    if line == "kill\\n":
        cluster.remove_node(others.pop(0), allow_graceful=False)
    else:
        others.append(cluster.add_node(**alike, **ports()))
    print(cluster.address, flush=True)
cluster.shutdown()
"""


LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Every client stays on 127.0.0.1, on which a cluster listens nowhere else: Ray takes it for the address of the network card otherwise."""
QUICK = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # on a machine that others use, too
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
}
"""A node that fails is missed within seconds."""


class Ray:
    """The cluster."""

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            lacks("ray")
        self.place = Path(
            tempfile.mkdtemp(prefix="ray", dir="/tmp")
        )  # the path of a socket may have 107 bytes
        self.address = ""

    def __enter__(self) -> Self:
        env = {**os.environ, **QUICK, **LOOPBACK}
        self._said = (self.place / "said").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=env,
            text=True,
            start_new_session=True,
        )
        try:
            self.add()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def add(self) -> None:
        """Start one more node."""
        self._ask("add")

    def kill(self) -> None:
        """Kill a node, with all that Ray knows of it."""
        self._ask("kill")

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self.address = self._process.stdout.readline().strip()
        assert self.address, (self.place / "said").read_text()[-3000:]
