"""Promise: offers of all providers are compared by what the run costs on each, and what is not known is said."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from drivers import web
from drivers.fakes import WORLDS, kind
from drivers.fakes.app import Clock, application
from runner.advice import estimates
from runner.interface.cli.main import main
from runner.storage.records.ledger import LeaseRow, Ledger
from tests.support import Space

TRAINS = """
recipe: tuned@1
summary: A training of which no run has measured anything
inputs:
  base: {type: model, default: ./base}
  max_length: {type: integer, default: 512}
  max_steps: {type: integer, default: 2000}
  global_batch: {type: integer, default: 16}
steps:
  train:
    run: [train, "{{ inputs.base }}", "{{ inputs.max_length }}", "{{ inputs.max_steps }}", "{{ inputs.global_batch }}"]
    resources: {gpus: 1, gpu_memory: 20GB}
    state: {ckpt: {path: ckpt/}}
    outputs: {model: m}
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def four(space: Space, monkeypatch: pytest.MonkeyPatch) -> Iterator[Space]:
    """A workspace of an account at each of four providers, in this process."""
    served: dict[str, httpx.ASGITransport] = {}
    for name in WORLDS:
        of, clock = kind(name), Clock(virtual=True)
        served[name] = httpx.ASGITransport(application(of(0, (), clock.now()), clock))
        for line in of.exports:
            variable, _, value = line.format(url=f"http://{name}", key="fake", port=22).partition(
                "="
            )
            monkeypatch.setenv(variable, value)

    class Mounted(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return await served[request.url.host].handle_async_request(request)

    monkeypatch.setattr(web.Web, "_of_loop", lambda _: httpx.AsyncClient(transport=Mounted()))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(space.root.parent / "config"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    space.write("recipe.toml", "[drivers.prime]\nfirst_use = true\n")
    yield space


def told(space: Space, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    code = main(["offers", *words, "-C", str(space.root)])
    out, said = capsys.readouterr()
    assert code == 0, said
    return out, said


def ranked(space: Space, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    shelves = json.loads(told(space, capsys, *words, "--json")[0])
    found = [{**offer, "driver": shelf["driver"]} for shelf in shelves for offer in shelf["offers"]]
    return sorted(found, key=lambda offer: offer["rank"])


def test_offers_of_four_providers_are_ranked_by_the_total_of_the_run_before_its_first(
    four: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    four.write("tuned.yaml", TRAINS)
    four.write("base/config.json", json.dumps(CONFIG))
    found = ranked(four, capsys, "./tuned.yaml")
    known = [offer for offer in found if offer["usd"] is not None]
    assert {offer["driver"] for offer in known} == {*WORLDS} and len(known) > 8
    assert [offer["rank"] for offer in found] == [*range(1, len(found) + 1)]
    assert found[: len(known)] == known, "what is not known comes last"
    assert [offer["usd"] for offer in known] == sorted(offer["usd"] for offer in known)
    for offer in known:
        assert offer["hours_guessed"] and offer["hours_from"].startswith("a guess from")
        parts = ("usd_of_boot", "usd_of_preemptions", "usd_of_egress")
        rent = offer["usd_an_hour"] * offer["hours"]
        assert offer["usd"] == pytest.approx(rent + sum(offer[part] or 0.0 for part in parts))
    hours = {offer["gpu"]: offer["hours"] for offer in known}
    assert len({*hours.values()}) > 2, "a faster GPU takes less time"
    assert [offer["usd_an_hour"] for offer in known] != sorted(
        offer["usd_an_hour"] for offer in known
    ), "the cheapest hour is not the cheapest run"

    out, _ = told(four, capsys, "./tuned.yaml")
    head, columns, *rows = out.splitlines()
    assert head.endswith(", the cheapest run first") and columns.split()[0] == "provider"
    assert rows[0].split()[0] == known[0]["driver"] and re.search(r" ~\d+\.\d ", rows[0])
    assert "~: estimate, not measured by a run yet (a guess from its arithmetic" in out
    for name in WORLDS:
        assert f"\n{name} for train: " in out


def test_a_total_without_a_step_of_unknown_duration_is_marked_with_a_plus(
    four: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = (
        "  measure: {run: python m.py, needs: [train], resources: {gpus: 1, gpu_memory: 20GB}}\n"
    )
    four.write("tuned.yaml", TRAINS + measure)
    four.write("base/config.json", json.dumps(CONFIG))
    known = [offer for offer in ranked(four, capsys, "./tuned.yaml") if offer["usd"] is not None]
    assert known and all(offer["hours_without"] == ["measure"] for offer in known)
    out, _ = told(four, capsys, "./tuned.yaml")
    assert re.search(r" ~\d+\.\d\+ .* \d+\.\d\d\+ ", out)
    assert "\n+: without measure, whose duration is unknown" in out


def test_the_config_of_a_hub_model_is_downloaded_for_the_estimate(
    four: Space, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    four.write("tuned.yaml", TRAINS.replace("default: ./base", "default: 'hf://org/base'"))
    fetched: list[object] = []
    four.write("base/config.json", json.dumps(CONFIG))

    def fetch(address: object) -> bool:
        fetched.append(address)
        monkeypatch.setattr(estimates, "read_model_config", lambda *_words: CONFIG)
        return True

    monkeypatch.setattr(estimates, "fetch_config", fetch)
    found = ranked(four, capsys, "./tuned.yaml")
    assert {*fetched} == {"hf://org/base"} and any(offer["usd"] is not None for offer in found)


def test_without_any_hours_offers_are_ranked_by_their_price_and_the_total_is_unknown(
    four: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ranked(four, capsys)
    assert {offer["driver"] for offer in found} == {*WORLDS}
    assert {offer["usd"] for offer in found} == {None}
    prices = [offer["usd_an_hour"] for offer in found]
    assert prices == sorted(prices)


def test_what_the_ledger_says_of_a_provider_is_in_its_totals(
    four: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its spot machines were taken away often, and its machines were slow to come up."""
    four.write("tuned.yaml", TRAINS)
    four.write("base/config.json", json.dumps(CONFIG))
    config = Path(four.root / "recipe.toml")
    config.write_text(config.read_text() + '[drivers.vastai]\nmarket = "spot"\n')

    def parts() -> tuple[float, float]:
        (first, *_) = [each for each in ranked(four, capsys, "./tuned.yaml", "--driver", "vastai")]
        assert first["market"] == "spot"
        rent = first["usd_an_hour"] * first["hours"]
        return first["usd_of_preemptions"] / rent, first["usd_of_boot"] / first["usd_an_hour"]

    lost, boot = parts()
    assert (lost, boot) == pytest.approx((0.025, 0.05))
    now = time.time()
    row = LeaseRow(
        "", "vastai", "r", "w", {}, "h", "ASKED", {"market": "spot"}, now + 9e4, price=1.0
    )
    with Ledger.open(Path(os.environ["RECIPE_LEDGER"])) as ledger:
        for n in range(5):
            begun = now - 36000 - n
            asked = row._replace(key=f"k{n}", asked=begun)
            ledger.ask(asked)
            with pytest.MonkeyPatch.context() as patched:
                for state, after in (
                    ("COMING", 0),
                    ("UP", 1800),
                    ("RELEASING", 5400),
                    ("GONE", 5400),
                ):
                    patched.setattr(time, "time", lambda begun=begun, after=after: begun + after)
                    asked = ledger.move(asked, state, failure="taken-away" * (state == "GONE"))  # type: ignore[arg-type]
    lost, boot = parts()
    assert lost == pytest.approx((20 * 0.05 + 5) / 25 * 0.5, rel=0.01) and boot == 0.5


def asked(space: Space, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words, "-C", str(space.root)])
    out, said = capsys.readouterr()
    return code, out + said


def test_any_is_for_drivers_that_were_chosen_and_the_question_names_where_data_may_go(
    four: Space, capsys: pytest.CaptureFixture[str]
) -> None:
    four.write("tuned.yaml", TRAINS)
    four.write("base/config.json", json.dumps(CONFIG))
    run = ("run", "./tuned.yaml", "--driver")
    code, said = asked(four, capsys, *run, "any")
    assert (
        code == 2
        and "requires a list of drivers" in said
        and '`any = ["vastai", "runpod"]`' in said
    )
    code, said = asked(four, capsys, *run, "any:vastai,runpot")
    assert code == 3 and 'unknown driver "runpot"' in said and "runpod" in said
    code, said = asked(four, capsys, *run, "any:vastai,ssh")
    assert code == 2 and "--driver any cannot use ssh" in said

    config = Path(four.root / "recipe.toml")
    config.write_text(
        '[drivers]\nany = ["vastai", "gcp"]\n'
        + config.read_text()
        + "[drivers.gcp]\nconfirm = 0.01\n"
    )
    code, said = asked(four, capsys, *run, "any")
    assert code == 3 and "the run would cost about $" in said, said
    assert "the run's data and secrets may be sent to machines of vastai or gcp" in said
    code, said = asked(four, capsys, "plan", "./tuned.yaml", "--driver", "any")
    assert code == 0 and "rents for train: " in said and "machines of vastai or gcp" in said
    assert "runpod" not in said and "prime" not in said
    config.write_text(config.read_text().replace('"gcp"]', '"gpc"]'))
    code, said = asked(four, capsys, *run, "any")
    assert code == 3 and 'unknown driver "gpc"' in said, said
