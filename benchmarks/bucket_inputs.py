"""A run on a host behind a long wire whose input is in a bucket: through this machine, and past it.

usage: bucket_inputs.py [--files 4] [--size 50] [--rtt 100] [--mb 125]

`--size` is MB of each file, `--rtt` milliseconds of a round trip between here and the host, `--mb` megabytes a second that a connection between them
takes each way.  The bucket (moto) is at loopback for both: what it costs to bring its bytes here over a line is not in the figures.  Seconds are
those of `recipe run` with one step, which reads all of it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from runner.execution.terms import Settings
from runner.hosts.place.folder import RemoteFolder
from tests.servers.long_wire import LongWire
from tests.servers.moto import Moto
from tests.servers.sshd import Sshd
from tests.support import Space


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("files", 4), ("size", 50.0), ("rtt", 100.0), ("mb", 125.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for past in (False, True):
        with tempfile.TemporaryDirectory() as top, Moto() as moto, Sshd(Path(top) / "sshd") as sshd:
            os.environ |= {**moto.environ, "RECIPE_LEDGER": f"{top}/ledger.db"}
            name = moto.bucket()
            for n in range(args.files):
                moto.s3.put_object(
                    Bucket=name,
                    Key=f"rows/{n}.bin",
                    Body=random.Random(n).randbytes(int(args.size * 10**6)),
                )
            with LongWire(sshd.port, rtt=args.rtt / 1000, rate=args.mb * 1e6) as wire:
                space = Space(Path(top) / "space")
                keys = sshd.settings(hosts=[sshd.address.replace(str(sshd.port), str(wire.port))])
                Path(keys["known_hosts"]).write_text(
                    Path(keys["known_hosts"]).read_text().replace(str(sshd.port), str(wire.port))
                )
                lines = "".join(
                    f"{key} = {keys[key]!r}\n" for key in ("hosts", "known_hosts", "identity")
                )
                space.write(
                    "recipe.toml",
                    f'[stores.b]\nurl = "s3://{name}/s"\nendpoint = "{moto.endpoint}"\n[drivers.ssh]\nagent = false\n{lines}',
                )
                space.recipe(
                    "inputs: {data: {type: dataset}}\nsteps: {s: {run: 'cat {{ inputs.data }}/* | wc -c > o', outputs: {o: o}}}\n"
                )
                if not past:
                    RemoteFolder.can_pull, kept = False, RemoteFolder.can_pull  # type: ignore[method-assign, assignment]
                begun = time.monotonic()
                space.run({"data": f"s3://{name}/rows"}, settings=Settings(driver="ssh"))
                seconds = time.monotonic() - begun
                if not past:
                    RemoteFolder.can_pull = kept  # type: ignore[method-assign]
                assert int(space.read("o")) == args.files * int(args.size * 10**6)
                print(f"{'past' if past else 'through'} this machine: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
