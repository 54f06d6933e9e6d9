"""The peers of durable.py, run by a Python that has them: `durable_peers.py procrastinate|dbos submit|work URL COUNT noop|true`.

`submit` prints jobs a second, one by one.  `work` ends when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time


def until_told() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def rate(count: int, submit: object) -> None:
    begun = time.perf_counter()
    for n in range(count):
        submit(n)  # type: ignore[operator]
    print(count / (time.perf_counter() - begun))


def with_procrastinate(verb: str, url: str, count: int, kind: str) -> None:
    import procrastinate

    connector = (
        procrastinate.SyncPsycopgConnector(conninfo=url)
        if verb == "submit"
        else procrastinate.PsycopgConnector(conninfo=url)
    )
    app = procrastinate.App(connector=connector)

    if kind == "noop":

        @app.task(name="job")
        async def job(n: int) -> None: ...

    else:

        @app.task(name="job")
        def job(n: int) -> None:
            subprocess.run(["/bin/true"], check=True)

    if verb == "submit":
        with app.open():
            app.schema_manager.apply_schema()
            rate(count, lambda n: job.defer(n=n))
    else:
        app.run_worker(concurrency=10, install_signal_handlers=False)


def with_dbos(verb: str, url: str, count: int, kind: str) -> None:
    from dbos import DBOS, DBOSClient

    if verb == "submit":
        DBOS(
            config={
                "name": "bench",
                "system_database_url": url,
                "application_version": "1",
                "log_level": "ERROR",
                "executor_id": "submit",
            }
        )
        DBOS.launch()
        client = DBOSClient(system_database_url=url)
        rate(
            count,
            lambda n: client.enqueue(
                {"queue_name": "q", "workflow_name": "flow", "app_version": "1"}, n
            ),
        )
        os._exit(0)
    config = {
        "name": "bench",
        "system_database_url": url,
        "application_version": "1",
        "log_level": "ERROR",
        "executor_id": f"w{os.getpid()}",
    }
    DBOS(config=config)  # type: ignore[arg-type]

    @DBOS.step()
    def step() -> None:
        if kind == "true":
            subprocess.run(["/bin/true"], check=True)

    @DBOS.workflow(name="flow")
    def flow(n: int) -> None:
        step()

    DBOS.launch()
    DBOS.register_queue("q", worker_concurrency=100, polling_interval_sec=0.05)
    threading.Event().wait()


if __name__ == "__main__":
    peer, verb, url, count, kind = sys.argv[1:]
    if verb == "work":
        threading.Thread(target=until_told, daemon=True).start()
    {"procrastinate": with_procrastinate, "dbos": with_dbos}[peer](verb, url, int(count), kind)
