"""Senders for each kind of receiver: webhooks, the training platform, chats, and the program of
`[hooks] spend`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeAlias

from drivers import install_line

from ..errors import CannotRun, Infrastructure, RecipeError
from ..storage.records.letters import LOCAL
from ..storage.records.outbox import PendingDelivery
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from . import addresses, points
from .sealing import unseal
from .sending import ReceiverResponse, send

if TYPE_CHECKING:
    from ..settings import Receiver

DONE: Final = 200
TOKEN: Final = "the reporting token of a job"  # noqa: S105
SECRET: Final = "the secret of a webhook"  # noqa: S105
Try: TypeAlias = Callable[[], ReceiverResponse]
"""One attempt, callable in any thread."""


class Receivers:
    """The receivers that this process can reach with its settings and environment."""

    def __init__(self, ws: Workspace) -> None:
        self._root, self._environ = ws.own, ws.environ
        config = ws.config if ws.letters is not None and ws.has_settings else None
        webhooks = config.webhooks if config is not None else ()
        self._webhooks: Mapping[str, Receiver] = {each.url: each for each in webhooks}
        self._spend = ws.spend
        self.known = frozenset(self._prefixes(config.notify if config is not None else ()))
        """Receiver prefixes for `Outbox.take`."""

    def _prefixes(self, notify: Iterable[Receiver]) -> Iterator[str]:
        """Yield the prefixes of the known receivers' names."""
        yield "hook POST "
        yield from (f"webhook POST {url} " for url in self._webhooks)
        yield from (f"notify {each.url} " for each in notify)
        backend = self._environ.get("BACKEND_URL", "").rstrip("/")
        if backend:
            for kind in ("status PATCH", "metrics PUT", "logs POST"):
                yield f"{kind} {backend}{LOCAL}/"
        for kind, variable in _NAMED:
            url = self._environ.get(variable)
            if url:
                yield f"{kind} POST {url} "
        if self._spend:
            yield f"{points.receiver(self._spend)} "

    def to_send(self, letter: PendingDelivery, run: RunRow | None) -> Try:
        """Return the send function for a delivery; `run` is None if it is no longer stored."""
        kind, _, rest = letter.receiver.partition(" ")
        if kind == "notify":
            return lambda: self._notify(letter, rest)
        if kind == "spend":
            return lambda: points.ask(self._spend, letter.body, self._root, self._environ)
        method, _, url = rest.partition(" ")
        return lambda: self._send(letter, run, kind, method, url)

    def _send(
        self, letter: PendingDelivery, run: RunRow | None, kind: str, method: str, url: str
    ) -> ReceiverResponse:
        try:
            endpoint = addresses.public_endpoint(url) if kind == "hook" else None
            secrets = self._secrets(kind, url, run)
            headers = {
                "Content-Type": "application/json",
                "User-Agent": "recipe",
                **_headers(kind, letter, secrets),
            }
        except RecipeError as error:
            return ReceiverResponse(0, str(error))
        return send(method, url, headers, letter.body.encode(), endpoint)

    def _secrets(self, kind: str, url: str, run: RunRow | None) -> Sequence[str]:
        """Return the credentials or signing secrets of a receiver. Raises CannotRun."""
        if kind == "webhook":
            return self._webhook_secrets(url)
        if kind == "hook":
            sealed = _sealed_secret(run, url)
            return unseal(sealed, SECRET, self._environ).split() if sealed else ()
        if kind == "alert":
            return [self._environ.get("INTERNAL_API_KEY", "").strip()]
        sealed = _sealed_token(run)
        if sealed:
            return [unseal(sealed, TOKEN, self._environ)]
        return [(self._environ.get("JOB_TOKEN") or self._environ.get("API_KEY", "")).strip()]

    def _webhook_secrets(self, url: str) -> Sequence[str]:
        """Return the secrets of a webhook from the settings. Raises CannotRun."""
        name = self._webhooks[url].secret
        if not name:
            return ()
        secrets = self._environ.get(name)
        if not secrets:
            raise CannotRun(f"the webhook secret {name} is not set in this environment")
        return secrets.split()

    def _notify(self, letter: PendingDelivery, name: str) -> ReceiverResponse:
        """Send a message by chat or mail to the address in the variable `name`."""
        address = self._environ.get(name, "")
        if not address:
            return ReceiverResponse(0, f"{name} is not set in this environment")
        try:
            import apprise
        except ImportError:
            return ReceiverResponse(0, f"apprise is not installed: {install_line('notify')}")
        service = apprise.Apprise()
        if not service.add(address):
            return ReceiverResponse(0, f"{name} is not an apprise URL")
        if not service.notify(title=letter.type, body=_describe(letter)):
            return ReceiverResponse(0, "the service rejected the message")
        return ReceiverResponse(DONE)


def _sealed_secret(run: RunRow | None, url: str) -> str:
    """Return the encrypted secret of a run's own webhook; empty without one."""
    webhooks = run.data.get("webhooks") if run is not None else None
    if isinstance(webhooks, list):
        for each in webhooks:
            if each["url"] == url:
                return str(each.get("secret") or "")
    return ""


def _sealed_token(run: RunRow | None) -> str:
    """Return the encrypted reporting token of a platform job; empty without one."""
    job = run.data.get("job") if run is not None else None
    return str(job.get("token") or "") if isinstance(job, dict) else ""


_NAMED: Final = (("metrics", "METRICS_API_URL"), ("alert", "ALERT_API_URL"))


def _headers(kind: str, letter: PendingDelivery, secrets: Sequence[str]) -> dict[str, str]:
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


def _signature(secret: str, letter: PendingDelivery, now: datetime) -> str:
    """Sign a message. Raises CannotRun for an invalid secret."""
    try:
        from standardwebhooks.webhooks import Webhook

        return Webhook(secret).sign(msg_id=letter.id, timestamp=now, data=letter.body)
    except ImportError as error:
        raise Infrastructure(
            "standardwebhooks is not installed", fix=install_line("reports")
        ) from error
    except (ValueError, RuntimeError) as error:
        raise CannotRun("invalid webhook secret: expected whsec_ followed by base64") from error


def _describe(letter: PendingDelivery) -> str:
    """Format a message as a sentence."""
    facts = json.loads(letter.body)["data"]
    state = facts.get("state") or facts.get("alert")
    about = facts.get("message") or facts.get("error") or facts.get("reason") or ""
    sentence = f"{facts['recipe']} {facts['run']}: {state}"
    return f"{sentence} ({about})" if about else sentence
