"""Two training platforms that take nothing but their contract: an address, header, field or type that they do not know is answered with 4xx.

`service` gets metrics at an address of its own and alerts with a key; `backend` gets metrics, status and logs of each job below `/api/training/local`.
The bodies are judged by schemas/platform.schema.json.  What was refused, and why, is in `refused`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema

from tests.servers.receiver import Got, Receiver

SCHEMA: Final = Path(__file__).parents[2] / "schemas" / "platform.schema.json"
TOKEN, KEY, USER = "token-of-the-job", "internal", "ann"
SENT: Final = {
    "accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent",
}  # fmt: skip
"""Headers that any client may send."""
SERVICE: Final = {"POST /metrics": "metrics", "POST /alerts": "alert"}
BACKEND: Final = {
    f"{method} /api/training/local/JOB/{what}": what
    for method, what in (("PUT", "metrics"), ("PATCH", "status"), ("POST", "logs"))
}


@cache
def _checker(body: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{body}", "$defs": schema["$defs"]})


def wrong(body: str, found: object) -> str:
    """What is wrong with a body of this kind (`metrics`, `status`, `logs` or `alert`); empty where nothing is."""
    return "; ".join(
        f"{error.json_path}: {error.message}" for error in _checker(body).iter_errors(found)
    )


class Platform(Receiver):
    """One of the two.  `routes`: what each address takes, JOB for the id of a job."""

    def __init__(self, routes: dict[str, str]) -> None:
        self.refused: list[str] = []
        self._routes = routes
        self._steps: dict[str, int] = {}
        super().__init__(self._judge)

    @classmethod
    def service(cls) -> Platform:
        return cls(SERVICE)

    @classmethod
    def backend(cls) -> Platform:
        return cls(BACKEND)

    def environ(self, **job: str) -> dict[str, str]:
        """What a pod of this platform, or its server, has in its environment."""
        told = {"JOB_TOKEN": TOKEN, "INTERNAL_API_KEY": KEY, "USER_ID": USER, **job}
        if self._routes is BACKEND:
            return {"BACKEND_URL": self.url, **told}
        return {
            "METRICS_API_URL": f"{self.url}/metrics",
            "ALERT_API_URL": f"{self.url}/alerts",
        } | told

    def bodies(self, kind: str) -> list[Any]:
        """The bodies of this kind that came, in order."""
        return [each.json for each in self.got if self._kind(each) == kind]

    def points(self) -> list[Any]:
        return [point for body in self.bodies("metrics") for point in body["metrics"]]

    def _kind(self, got: Got) -> str:
        path = re.sub(r"(?<=^/api/training/local/)[^/]+", "JOB", got.path)
        return self._routes.get(f"{got.method} {path}", "")

    def _judge(self, got: Got) -> int:
        status, why = self._status(got)
        if why:
            self.refused.append(f"{got.method} {got.path}: {status} {why}: {got.body!r}")
        return status

    def _status(self, got: Got) -> tuple[int, str]:
        kind = self._kind(got)
        if not kind:
            return 404, "no such address"
        name, secret = (
            ("x-api-key", KEY) if kind == "alert" else ("authorization", f"Bearer {TOKEN}")
        )
        if got.headers.get(name) != secret:
            return 401, f"{name} is {got.headers.get(name)}"
        if more := got.headers.keys() - SENT - {name}:
            return 400, f"headers {more}"
        if got.headers.get("content-type") != "application/json":
            return 415, str(got.headers.get("content-type"))
        try:
            body = json.loads(got.body)
        except ValueError as error:
            return 400, str(error)
        if why := wrong(kind, body):
            return 422, why
        job = got.path.split("/")[-2] if self._routes is BACKEND else body["job_id"]
        if job != body["job_id"]:
            return 422, "the job of another address"
        for point in body.get("metrics", ()):
            if point["step"] < self._steps.get(job, 0):
                return 409, f"step {point['step']} after {self._steps[job]}"
            self._steps[job] = point["step"]
        return 204, ""
