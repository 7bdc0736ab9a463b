"""What docker-compose.yml must do, asked of a deployment that deploy/compose-test.sh has started.

Two engines, gateways, tokenizers and routers: every replica serves; an engine or a router that is killed is
not missed by new requests; started again, it serves again; at idle nothing is left running.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from catenary.v1 import router_pb2, router_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

PROJECT = os.environ["COMPOSE_PROJECT_NAME"]
SECRET = (Path(os.environ["CATENARY_SECRETS"]) / "client").read_text(encoding="utf-8").strip()
METADATA = (("authorization", f"Bearer {SECRET}"),)
MODEL = "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 60.0

logger = logging.getLogger("compose_test")


class Failed(Exception):
    """Something is not as it must be."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise Failed(text)
    logger.info("ok: %s", text)


def wait_for(what: str, condition: Callable[[], object], timeout_s: float) -> None:
    """Wait until `condition` is true; connection errors count as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                logger.info("ok: %s", what)
                return
        except (OSError, grpc.RpcError):
            pass
        if time.monotonic() > deadline:
            raise Failed(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.5)


def docker(*arguments: str) -> list[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def containers(service: str) -> list[str]:
    labels = (f"com.docker.compose.project={PROJECT}", f"com.docker.compose.service={service}")
    return docker("ps", "-q", *(word for label in labels for word in ("--filter", f"label={label}")))


def addresses(service: str, port: int) -> list[str]:
    """Return the host addresses at which the replicas of a service are published."""
    return [docker("port", container, str(port))[0] for container in containers(service)]


def is_ready(gateway: str) -> bool:
    with urllib.request.urlopen(f"http://{gateway}/ready", timeout=5) as response:
        return bool(response.status == 200)


def ask(gateway: str, question: str = "Name the capital of France.", max_tokens: int = 24) -> str:
    """Return the answer to one chat request; raises on anything but 200."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    request = urllib.request.Request(
        f"http://{gateway}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return str(answer["choices"][0]["message"]["content"])


def ask_at_once(gateways: list[str], count: int) -> None:
    """Send so many requests side by side, spread over the gateways. Raises if any fails."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda index: ask(gateways[index % len(gateways)], f"Say {index}."), range(count)))


class Fleet:
    """A router's view, over its published port."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def read(self) -> router_pb2.GetFleetResponse:
        return self._stub.GetFleet(router_pb2.GetFleetRequest(), metadata=METADATA, timeout=10)

    def generated(self) -> dict[str, int]:
        """Return the tokens that each attached engine has generated, by instance."""
        return {engine.instance_id: engine.load.generated_tokens for engine in self.read().engines}

    def is_idle(self) -> bool:
        fleet = self.read()
        loads = [engine.load for engine in fleet.engines]
        placed = sum(engine.placed_sequences + engine.placed_tokens for engine in fleet.engines)
        return (
            not fleet.live_sequences and not placed and not any(load.running + load.waiting for load in loads)
        )


def has_rendered(container: str) -> bool:
    """Whether a tokenizer's own metrics count chats that it rendered."""
    url = f"http://127.0.0.1:{os.environ['CATENARY_METRICS_PORT']}/metrics"
    code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
    page = docker("exec", container, "python", "-c", code)
    return any(word.startswith("catenary_rpc_server_handled_total{") and "/Render" in word for word in page)


def check_replicas(fleet: Fleet, gateways: list[str]) -> None:
    for gateway in gateways:
        require("Paris" in ask(gateway), f"gateway {gateway} answers with Paris")
    tokenizers = addresses("tokenizer", 7071)
    require(len(tokenizers) == 2, "two tokenizers are published")
    for address in tokenizers:
        with grpc.insecure_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            request = tokenizer_pb2.TokenizeRequest(model=MODEL, text="hello")
            response = stub.Tokenize(request, metadata=METADATA, timeout=10)
        require(len(response.token_ids) > 0, f"tokenizer {address} tokenizes")
    ask_at_once(gateways, 8)
    for container in containers("tokenizer"):
        require(has_rendered(container), f"the gateways' calls reach tokenizer {container}")
    wait_for("both engines have generated", lambda: all(fleet.generated().values()), 10)


def check_killed_engine(fleet: Fleet, gateways: list[str]) -> None:
    killed, before = containers("engine")[0], set(fleet.generated())
    docker("kill", killed)
    started = time.monotonic()
    for gateway in gateways:
        require("Paris" in ask(gateway), f"gateway {gateway} answers with an engine killed")
    logger.info("ok: the first answers after the kill took %.1f s", time.monotonic() - started)
    wait_for("the killed engine has left the fleet", lambda: len(fleet.generated()) == 1, 30)
    docker("start", killed)
    wait_for("the engine is back, as a new instance", lambda: set(fleet.generated()) - before, 120)
    (new,) = set(fleet.generated()) - before

    def new_engine_generates() -> bool:
        ask_at_once(gateways, 8)
        return fleet.generated()[new] > 0

    wait_for("the restarted engine serves", new_engine_generates, 120)


def knows_all(router: str) -> bool:
    """Whether both engines and both gateways are connected to a router."""
    seen = Fleet(router).read()
    return len(seen.engines) == seen.sessions == 2


def check_routers(gateways: list[str]) -> None:
    """Each of two has the whole fleet; one may be lost."""
    published = addresses("router", 7070)
    require(len(published) == 2, f"two routers are published: {', '.join(published)}")
    for address in published:
        wait_for(f"all are connected to router {address}", lambda at=address: knows_all(at), 30)  # type: ignore[misc]
    killed = containers("router")[0]
    docker("kill", killed)
    ask_at_once(gateways, 4)
    logger.info("ok: requests are answered with a router killed")
    docker("start", killed)
    address = docker("port", killed, "7070")[0]
    wait_for("all are connected to the router again", lambda: knows_all(address), 60)


# Whether the image has the allocator, and how many of its cores run, with it and at all.
_ALLOCATOR = r"""
from contextlib import suppress
from pathlib import Path
cores = preloaded = 0
for process in Path("/proc").glob("[0-9]*"):
    # Health checks come and go.
    with suppress(OSError):
        if b"\0services.engine.core\0" in (process / "cmdline").read_bytes():
            cores += 1
            preloaded += "libtcmalloc_minimal" in (process / "maps").read_text()
print(any(Path("/usr/local/lib").glob("libtcmalloc_minimal.so.*")), preloaded, cores)
"""


def check_allocator() -> None:
    """An image may come without it; then the log says so here."""
    for container in containers("engine"):
        installed, preloaded, cores = docker("exec", container, "python", "-c", _ALLOCATOR)
        require(int(cores) == 1, f"engine {container} has one core")
        if installed == "True":
            require(int(preloaded) == 1, f"the core of engine {container} has tcmalloc preloaded")
        else:
            logger.info("the engine image was built where no tcmalloc could be installed")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="compose-test: %(message)s")
    # The model is prepared and the tokenizers are well before Compose creates a gateway, so all are there.
    gateways = addresses("gateway", 8000)
    require(len(gateways) == 2, f"two gateways are published: {', '.join(gateways)}")
    for gateway in gateways:
        wait_for(f"gateway {gateway} is ready", lambda at=gateway: is_ready(at), START_TIMEOUT_S)  # type: ignore[misc]
    fleet = Fleet(addresses("router", 7070)[0])
    wait_for("two engines are attached", lambda: len(fleet.generated()) == 2, START_TIMEOUT_S)
    check_allocator()
    check_replicas(fleet, gateways)
    check_killed_engine(fleet, gateways)
    check_routers(gateways)
    wait_for(
        "nothing is left running at idle",
        lambda: all(Fleet(address).is_idle() for address in addresses("router", 7070)),
        30,
    )
    for service in ("gateway", "router", "tokenizer"):
        probe = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('torch', 'transformers'))))"
        docker("exec", containers(service)[0], "python", "-c", probe)
        logger.info("ok: the %s image holds no torch", service)


if __name__ == "__main__":
    main()
