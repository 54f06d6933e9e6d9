"""How messages are sent to each kind of receiver: webhooks, the training platform, chats, the program of `[hooks] spend`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

from drivers import install_line

from ..errors import CannotRun, Infrastructure, RecipeError
from ..storage.records.letters import LOCAL
from ..storage.records.outbox import Waiting
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from . import addresses, points
from .sealing import unseal
from .sending import Answer, send

if TYPE_CHECKING:
    from ..settings import Receiver

DONE: Final = 200
TOKEN: Final = "the reporting token of a job"  # noqa: S105
SECRET: Final = "the secret of a webhook"  # noqa: S105
Try: TypeAlias = Callable[[], Answer]
"""One try; called in any thread."""


class Receivers:
    """Those that this process can tell, by its settings and environment."""

    def __init__(self, ws: Workspace) -> None:
        self._root, self._environ = ws.own, ws.environ
        settings = ws.letters
        config = ws.config if settings is not None and ws.has_settings else None
        self._webhooks: Mapping[str, Receiver] = (
            {each.url: each for each in config.webhooks} if config else {}
        )
        self._spend = ws.spend
        backend = self._environ.get("BACKEND_URL", "").rstrip("/")
        known = {f"webhook POST {url} " for url in self._webhooks} | {
            f"notify {each.url} " for each in (config.notify if config else ())
        }
        known |= (
            {f"{kind} {backend}{LOCAL}/" for kind in ("status PATCH", "metrics PUT", "logs POST")}
            if backend
            else set()
        )
        known |= {
            f"{kind} POST {url} " for kind, name in _NAMED if (url := self._environ.get(name))
        }
        known |= {f"{points.receiver(self._spend)} "} if self._spend else set()
        self.known: frozenset[str] = frozenset(known | {"hook POST "})
        """What `Outbox.take` is asked for."""

    def to_send(self, letter: Waiting, run: RunRow | None) -> Try:
        """How a letter is sent.  `run` is None where it is stored no more."""
        kind, _, rest = letter.receiver.partition(" ")
        if kind == "notify":
            return lambda: self._notified(letter, rest)
        if kind == "spend":
            return lambda: points.ask(self._spend, letter.body, self._root, self._environ)
        method, _, url = rest.partition(" ")
        return lambda: self._sent(letter, run, kind, method, url)

    def _sent(
        self, letter: Waiting, run: RunRow | None, kind: str, method: str, url: str
    ) -> Answer:
        try:
            endpoint = addresses.public_endpoint(url) if kind == "hook" else None
            secrets = self._secrets(kind, url, run)
            headers = {
                "Content-Type": "application/json",
                "User-Agent": "recipe",
                **_headers(kind, letter, secrets),
            }
        except RecipeError as error:
            return Answer(0, str(error))
        return send(method, url, headers, letter.body.encode(), endpoint)

    def _secrets(self, kind: str, url: str, run: RunRow | None) -> Sequence[str]:
        """What a receiver is shown, or what is signed with.  Raises CannotRun."""
        if kind == "webhook":
            name = self._webhooks[url].secret
            if name and not self._environ.get(name):
                raise CannotRun(f"{name}, which has the secret of the webhook, is not set here")
            return self._environ.get(name, "").split() if name else ()
        if kind == "hook":
            own = run.data.get("webhooks") if run is not None else None
            sealed = (
                next((each.get("secret") for each in own if each["url"] == url), "")
                if isinstance(own, list)
                else ""
            )
            return unseal(sealed, SECRET, self._environ).split() if sealed else ()
        if kind == "alert":
            return [self._environ.get("INTERNAL_API_KEY", "").strip()]
        job = run.data.get("job") if run is not None else None
        sealed = job.get("token") if isinstance(job, dict) else None
        return [
            unseal(sealed, TOKEN, self._environ)
            if sealed
            else (self._environ.get("JOB_TOKEN") or self._environ.get("API_KEY", "")).strip()
        ]

    def _notified(self, letter: Waiting, name: str) -> Answer:
        """Notified by chat or mail."""
        address = self._environ.get(name, "")
        if not address:
            return Answer(0, f"{name} is not set here")
        try:
            import apprise
        except ImportError:
            return Answer(0, f"apprise is not installed: {install_line('notify')}")
        service = apprise.Apprise()
        if not service.add(address):
            return Answer(0, f"{name} is no address that apprise knows")
        return (
            Answer(DONE)
            if service.notify(title=letter.type, body=_sentence(letter))
            else Answer(0, "the service did not take it")
        )


_NAMED: Final = (("metrics", "METRICS_API_URL"), ("alert", "ALERT_API_URL"))


def _headers(kind: str, letter: Waiting, secrets: Sequence[str]) -> dict[str, str]:
    if kind in ("webhook", "hook"):
        now = datetime.now(UTC)
        headers = {"webhook-id": letter.id, "webhook-timestamp": str(int(now.timestamp()))}
        if secrets:
            headers["webhook-signature"] = " ".join(
                _signature(secret, letter, now) for secret in secrets
            )
        return headers
    if kind == "alert":
        return {"X-API-Key": secrets[0]} if secrets[0] else {}
    return {"Authorization": f"Bearer {secrets[0]}"} if secrets[0] else {}


def _signature(secret: str, letter: Waiting, now: datetime) -> str:
    """Raises CannotRun for a secret that is none."""
    try:
        from standardwebhooks.webhooks import Webhook

        return Webhook(secret).sign(msg_id=letter.id, timestamp=now, data=letter.body)
    except ImportError as error:
        raise Infrastructure(
            "standardwebhooks is not installed", fix=install_line("reports")
        ) from error
    except (ValueError, RuntimeError) as error:
        raise CannotRun("the secret of a webhook is not written as whsec_ and base64") from error


def _sentence(letter: Waiting) -> str:
    facts = json.loads(letter.body)["data"]
    about = facts.get("message") or facts.get("error") or facts.get("reason") or ""
    return f"{facts['recipe']} {facts['run']}: {facts.get('state') or facts.get('alert')}" + (
        f" ({about})" if about else ""
    )
