"""What can be said of the Docker deployment without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

COMPOSE = Path(sys.executable).with_name("docker-compose")


def compose_config(profile: str, **variables: str) -> dict[str, dict[str, Any]]:
    environment = {"PATH": os.environ["PATH"], "COMPOSE_PROFILES": profile, **variables}
    command = [str(COMPOSE), "-f", str(ROOT / "docker-compose.yml"), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    config: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return config


def compose_services(profile: str, **variables: str) -> dict[str, dict[str, Any]]:
    return compose_config(profile, **variables)["services"]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose_services("cpu")


def test_make_names_what_a_person_types() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed >= {"help", "setup", "serve", "test", "test-long", "check", "protos", "compose-test"}


def test_profiles_choose_the_engine(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"model", "router", "tokenizer", "engine", "gateway"}
    hpu = compose_services("hpu")
    assert set(hpu) == {"model", "router", "tokenizer", "engine-hpu", "gateway"}
    engine = hpu["engine-hpu"]
    assert engine["runtime"] == "habana"
    assert engine["ipc"] == "host"
    assert engine["cap_add"] == ["SYS_NICE"]
    assert engine["environment"]["HABANA_VISIBLE_DEVICES"] == "all"
    assert engine["environment"]["CATENARY_ENGINE_DEVICE"] == "hpu"
    assert engine["environment"]["CATENARY_ENGINE_RECIPE_CACHE"].startswith("/cache/")
    assert "/cache" in [volume["target"] for volume in engine["volumes"]]
    assert engine["ulimits"]["memlock"] == -1


def test_the_gaudi_image_is_chosen_by_release_and_cores_by_a_variable() -> None:
    assert not [name for name in compose_services("hpu")["engine-hpu"]["build"]["args"] if "GAUDI" in name]
    chosen = {"GAUDI_VERSION": "1.23.0", "GAUDI_TORCH": "2.9.0", "GAUDI_OS": "rhel9.6"}
    engine = compose_services("hpu", CATENARY_CPUSET="0-55", **chosen)["engine-hpu"]
    assert chosen.items() <= engine["build"]["args"].items()
    assert engine["cpuset"] == "0-55"


def test_a_build_reads_nothing_beyond_its_context_and_asks_for_no_privilege() -> None:
    config = compose_config("cpu")
    builds = [service["build"] for service in config["services"].values()]
    used = {secret["source"] for build in builds for secret in build["secrets"]}
    for name in used:
        file = Path(config["secrets"][name]["file"])
        assert file.is_relative_to(ROOT)
        assert file.read_bytes() == b""
    for build in builds:
        assert Path(build["context"]) == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert build["network"] == "default"
        assert not build.keys() & {"privileged", "entitlements", "ssh"}


def test_containers_can_do_little(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_everything_is_published_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = {name for name, service in services.items() if service.get("ports")}
    assert published == {"gateway", "router", "tokenizer"}
    for name in published:
        assert all(port["host_ip"] == "127.0.0.1" for port in services[name]["ports"]), name


def test_only_router_and_engine_hold_the_engine_secret(services: dict[str, dict[str, Any]]) -> None:
    holders = {
        name
        for name, service in services.items()
        if any(secret["source"] == "engine" for secret in service.get("secrets", []))
    }
    assert holders == {"router", "engine"}


@pytest.mark.parametrize("service", ["gateway", "router", "tokenizer", "engine"])
def test_images_run_as_a_user_and_install_by_hash(service: str) -> None:
    text = (ROOT / f"deploy/docker/{service}.Dockerfile").read_text(encoding="utf-8")
    assert text.rstrip().splitlines()[-2 if service == "engine" else -3].startswith("USER 10001")
    assert f"--require-hashes -r /build/{service}.lock" in text
    if service != "engine":
        lock = (ROOT / f"requirements/{service}.lock").read_text(encoding="utf-8")
        assert not re.search(r"^(torch|transformers)==", lock, re.MULTILINE)


def test_secrets_are_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    script = [str(ROOT / "deploy/make-secrets.sh"), str(directory)]
    subprocess.run(script, check=True, capture_output=True, timeout=30)
    first = {file.name: file.read_text(encoding="utf-8") for file in directory.iterdir()}
    assert set(first) == {"client", "engine"}
    assert first["client"] != first["engine"]
    assert all(re.fullmatch(r"[\w-]{43}\n", value) for value in first.values())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    subprocess.run(script, check=True, capture_output=True, timeout=30)
    assert first == {file.name: file.read_text(encoding="utf-8") for file in directory.iterdir()}
