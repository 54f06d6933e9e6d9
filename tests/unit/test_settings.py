"""Settings files: what is in force, where it comes from, and every mistake in its place."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import settings
from runner.errors import Invalid, NotFound
from runner.paths import shipped

SCHEMA = json.loads((shipped() / "schemas" / "config.schema.json").read_text())


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user" / "recipe" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


def loaded(root: Path, user: Path | None = None) -> settings.Config:
    return settings.load(root, {"XDG_CONFIG_HOME": str(user.parents[1]) if user else "/nowhere"})


def problems(root: Path, text: str) -> list[tuple[int, str, str]]:
    (root / "recipe.toml").write_text(text)
    with pytest.raises(Invalid) as caught:
        loaded(root)
    return [(p.where.line if p.where else 0, p.message, p.fix) for p in caught.value.problems]


def test_without_files_nothing_is_set_and_nothing_is_imported(root: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from runner import settings; "
        f"assert settings.load(Path({str(root)!r}), {{'XDG_CONFIG_HOME': '/nowhere'}}) is settings.NOTHING; "
        "print(sorted({'tomllib', 'jsonschema', 'fsspec', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=shipped(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_table_of_the_workspace_replaces_the_users_whole(root: Path, user: Path) -> None:
    user.write_text(
        'store = "mine"\n[stores.mine]\nurl = "/a"\n[stores.team]\nurl = "s3://theirs"\nprofile = "work"\n[drivers.ssh]\nhosts = ["a"]\n'
    )
    (root / "recipe.toml").write_text('[stores.team]\nurl = "s3://ours/project"\npush = true\n')
    found = loaded(root, user)
    assert found.stores["team"] == settings.StoreSettings("team", "s3://ours/project", push=True), (
        "no profile of another address"
    )
    assert found.stores["mine"].url == "/a"
    assert found.store == "mine"
    assert found.driver("ssh") == {"hosts": ["a"]}
    assert found.driver("local") == {}
    assert found.said["stores", "team", "url"][1] == f"{root}/recipe.toml:2"
    assert found.said["store",][1] == f"{user}:1"
    assert ("stores", "team", "profile") not in found.said


def test_a_store_is_named_by_a_word_or_a_url(root: Path) -> None:
    (root / "recipe.toml").write_text('[stores.team]\nurl = "s3://b"\n')
    found = loaded(root)
    assert found.store_named(None) is None
    assert found.store_named("team") == settings.StoreSettings("team", "s3://b")
    assert found.store_named("./folder") == settings.StoreSettings("./folder", "./folder")
    with pytest.raises(NotFound) as caught:
        found.store_named("taem")
    assert 'did you mean "team"?' in caught.value.fix


@pytest.mark.parametrize(
    ("text", "line", "message", "fix"),
    [
        ("stor = 1\n", 1, 'unknown setting "stor"', '"store"'),
        ('store = "x\n', 1, "Illegal character", ""),
        ('[stores.a]\nurl = "s3://b"\npusch = true\n', 3, "stores.a.pusch", '"push"'),
        ('[stores.a]\nurl = "s3://b"\nsecret_key = "AKIA"\n', 3, "stores.a.secret_key", "remove the credentials"),
        ('[stores.a]\nurl = "s3://b"\nendpoint = "localhost:9000"\n', 3, 'endpoint has an invalid value "localhost:9000"', "Server URL"),
        ('[stores.a]\nregion = "eu"\n', 1, "stores.a has no url", "s3://"),
        ('[stores.a]\nurl = "s3://b"\nowner = 12\n', 3, "stores.a.owner must be a text", ""),
        ('[drivers.ssh]\nhosts = ["a", {host = "b", slots = 0}]\n', 2, "must be at least 1", ""),
        ('[drivers.ssh]\ndeadman = 5\n', 2, "drivers.ssh.deadman must be at least 60", ""),
        ('[drivers.ssh]\ndeadman = "1h"\n', 2, "drivers.ssh.deadman must be a number", ""),
        ('[drivers.ssh]\nhosts = "a"\n', 2, "must be a list", ""),
        ("[drivers.ssh]\nknown_host = 'x'\n", 2, "drivers.ssh.known_host", '"known_hosts"'),
        ('[drivers.vastai]\nmax_prise = 1\n', 2, "drivers.vastai.max_prise", '"max_price"'),
        ('[drivers.slurm]\nprices = {gpu = "1.20 EUR"}\n', 2, 'drivers.slurm.prices.gpu has an invalid value "1.20 EUR"', "US dollars"),
        ('[drivers.slurm.prices]\na = "1 USD"\ngpu = "-1 USD"\n', 3, 'drivers.slurm.prices.gpu has an invalid value "-1 USD"', "US dollars"),
        ('[stacks.a]\ndriver = "gcp"\nextra = {projekt = "x"}\n', 3, 'unknown setting "stacks.a.extra.projekt"', '"project"'),
        ('[stacks.a]\ndriver = "slurm"\n[stacks.a.extra]\nqos = "q"\ncpus = 0\n', 5, "stacks.a.extra.cpus must be at least 1", ""),
        ('[drivers.gcp]\nleast = "1h"\n', 2, "drivers.gcp.least must be a number", ""),
        ('[drivers.prime]\nmarket = "cheap"\n', 2, 'drivers.prime.market has an invalid value "cheap"', "on-demand, spot or any"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_line_and_what_to_do(
    root: Path, text: str, line: int, message: str, fix: str
) -> None:
    ((at, words, advice),) = problems(root, text)
    assert at == line
    assert message in words
    assert fix in advice


def test_all_mistakes_of_both_files_come_at_once(root: Path, user: Path) -> None:
    user.write_text("a = 1\n")
    (root / "recipe.toml").write_text("b = 1\nc = 2\n")
    with pytest.raises(Invalid) as caught:
        loaded(root, user)
    assert [p.where.path.rpartition("/")[2] for p in caught.value.problems if p.where] == [
        "recipe.toml",
        "recipe.toml",
        "config.toml",
    ]


def test_a_file_that_is_not_text_is_reported(root: Path) -> None:
    (root / "recipe.toml").write_bytes(b'store = "\xff"\n')
    with pytest.raises(Invalid, match="not UTF-8"):
        loaded(root)


@pytest.mark.parametrize(
    "value",
    [
        {"stores": {"a": {"url": "x"}}},
        {"stores": {"a": {"url": ""}}},
        {"stores": {"a": {}}},
        {"stores": 3},
        {"store": True},
        {"drivers": {"other": {"any": [1]}}},
        {"drivers": {"other": 1}},
        {"drivers": {"ssh": {"agent": True, "keepalive": 0.5, "hosts": ["a", {"host": "b"}]}}},
        {"drivers": {"ssh": {"agent": 3}}},
        {"drivers": {"ssh": {"keepalive": True}}},
        {"drivers": {"ssh": {"slots": 1.5}}},
        {"drivers": {"ssh": {"hosts": [{"host": "b", "nope": 1}]}}},
    ],
)
def test_our_reading_of_the_schema_is_that_of_jsonschema(value: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    assert (settings._check(SCHEMA, SCHEMA, value, ()) == []) == Draft202012Validator(
        SCHEMA
    ).is_valid(value)


def test_every_setting_is_described() -> None:
    def described(part: Any) -> bool:
        if isinstance(part, list):
            return all(map(described, part))
        if not isinstance(part, dict):
            return True
        for inner in part.get("properties", {}).values():
            if "$ref" not in inner and not inner.get("description"):
                return False
        return all(map(described, part.values()))

    assert described(SCHEMA)
    assert not described({"properties": {"a": {"type": "string"}}})


@pytest.mark.parametrize(
    ("name", "place"), [("ssh", "drivers.ssh:Ssh"), ("loopback", "drivers.loopback:Loopback")]
)
def test_the_settings_of_a_driver_are_what_it_takes(name: str, place: str) -> None:
    from importlib import import_module
    from inspect import signature

    from runner.hosts.renting.leases import RECIPE_SETTINGS

    module, _, attribute = place.partition(":")
    assert set(SCHEMA["$defs"][name]["properties"]) - set(RECIPE_SETTINGS) == set(
        signature(getattr(import_module(module), attribute)).parameters
    )


def test_the_settings_of_a_provider_are_filters_and_what_one_of_them_takes() -> None:
    from drivers import cloud, gcp, prime, runpod, vastai
    from runner.hosts.renting.leases import RECIPE_SETTINGS

    providers = (gcp.Gcp, prime.Prime, runpod.Runpod, vastai.Vastai)
    taken = {name for each in providers for name in inspect.signature(each).parameters} - {
        "filters"
    }
    assert set(SCHEMA["$defs"]["rented"]["properties"]) == taken | set(RECIPE_SETTINGS) | set(
        cloud.Filters._fields
    )


def test_of_several_stores_in_a_bucket_the_one_nearest_to_an_address_says_how_it_is_asked(
    tmp_path: Path,
) -> None:
    stores = {
        "a": "s3://bucket/team",
        "b": "s3://bucket/team/deep/",
        "c": "s3://bucket",
        "d": "gs://bucket/team",
        "e": "bucket",
    }
    found = settings.Config(
        stores={name: settings.StoreSettings(name, url) for name, url in stores.items()}
    )
    asked = (
        "s3://bucket/team/deep/x",
        "s3://bucket/team/x",
        "s3://bucket/other",
        "gs://bucket/team",
        "s3://other/team",
        "s3://bucket",
    )
    answers = [
        store.name if (store := found.store_of(address)) is not None else None for address in asked
    ]
    assert answers == ["b", "a", "c", "d", None, "c"]
