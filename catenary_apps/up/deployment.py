"""Start the services of a deployment in order, and report progress until the models serve."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx2

from catenary.directories import expanded
from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.up.config import UpConfig
from catenary_apps.up.models import ReadyModel
from catenary_apps.up.plan import ChildSpec, Places, overruled, plan
from catenary_apps.up.reporter import Reporter
from catenary_apps.up.resources import bracketed, loopback_of
from catenary_apps.up.supervisor import Supervisor

PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Progress of an engine; `fraction` of the start is 0..1 or None."""

    serving: bool
    activity: str
    fraction: float | None = None
    # The failure that keeps it from serving, if it knows one.
    trouble: str = ""
    # What an operator could mend while it serves.
    notes: tuple[str, ...] = ()


STATE_TEXTS = {
    engine_pb2.ENGINE_STATE_STARTING: "starting",
    engine_pb2.ENGINE_STATE_SERVING: "serving",
    engine_pb2.ENGINE_STATE_STALLED: "stalled",
    engine_pb2.ENGINE_STATE_DRAINING: "draining",
    engine_pb2.ENGINE_STATE_NOT_SERVING: "restarting its core",
}


class EngineProbe:
    """Reads one engine's status over its unix socket."""

    def __init__(self, target: str, secret: str) -> None:
        self._socket = Path(target.removeprefix("unix:"))
        self._channel = open_channel(target, secret=secret)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)

    async def read(self) -> EngineProgress:
        """Return the engine's progress; an engine that does not answer is not serving."""
        # Dialling a socket that is not there yet would only lengthen the channel's own backoff.
        if not self._socket.exists():
            return EngineProgress(serving=False, activity="starting")
        try:
            status = await self._stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return EngineProgress(serving=False, activity="starting")
        attached = status.attached_routers > 0
        serving = status.state == engine_pb2.ENGINE_STATE_SERVING and attached
        return EngineProgress(
            serving=serving,
            activity="serving" if serving else status.activity or STATE_TEXTS.get(status.state, "starting"),
            fraction=status.progress if status.HasField("progress") else None,
            trouble=status.trouble,
            notes=tuple(status.notes),
        )

    async def close(self) -> None:
        await self._channel.close()


class GatewayProbe:
    """Reads a gateway's /ready."""

    def __init__(self) -> None:
        # The certificate names the public host, and this only asks our own child over loopback.
        self._client = httpx2.AsyncClient(verify=False, trust_env=False, timeout=PROBE_TIMEOUT_S)

    async def is_ready(self, base_url: str) -> bool:
        try:
            return (await self._client.get(f"{base_url}/ready")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def close(self) -> None:
        await self._client.aclose()


POLL_S = 0.25
# Where `catenary chat` looks for a server that it is not told of.
DEFAULT_URL = "http://127.0.0.1:8000"
# No near tie for the built-in model: it is answered alike in bfloat16, and drawn at a low temperature.
EXAMPLE_QUESTION = "Name the capital of France."
SERVING_POLL_S = 2.0


class Deployment:
    """The running services of one `catenary up`; reports their state to a person."""

    def __init__(
        self,
        config: UpConfig,
        runtime: RuntimeDirectory,
        places: Places,
        reporter: Reporter,
        cache: Path,
        started: float,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._places = places
        self._reporter = reporter
        self._started = started
        self._specs = plan(config, runtime, places)
        self._ready = False
        self._told: dict[str, str] = {}
        self._troubles: dict[str, str] = {}
        self._noted: set[tuple[str, str]] = set()
        self._serving: set[str] = set()
        in_cache = cache / "logs" / str(places.gateway_ports[0])
        self._log_dir = expanded(config.log_dir) if config.log_dir else in_cache
        self._supervisor = Supervisor(
            self._specs,
            reporter=reporter,
            log_dir=self._log_dir,
            drain_s=config.drain_s,
            verbose=config.verbose,
        )
        scheme = "https" if config.ssl_certfile else "http"
        self._urls = [
            f"{scheme}://{bracketed(loopback_of(config.host))}:{port}" for port in places.gateway_ports
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then drain."""
        for line in overruled(self._specs, os.environ):
            self._reporter.line(f"warning: {line}")
        await self._supervisor.run(stop, self._watch, self._drains)
        self._reporter.line("stopped")

    def _drains(self) -> None:
        self._reporter.line(
            f"stopping: running requests get {self._config.drain_s:g} s to end; Ctrl-C again ends them now"
        )

    async def _watch(self) -> None:
        """Follow the start to the ready line, and the engines for ever."""
        secret = self._runtime.client_secret.read_text(encoding="utf-8").strip()
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                if spec.status_target:
                    group.create_task(self._watch_engine(spec, EngineProbe(spec.status_target, secret)))
            group.create_task(self._watch_gateways())

    async def _watch_engine(self, spec: ChildSpec, probe: EngineProbe) -> None:
        try:
            while True:
                progress = await probe.read()
                if progress.serving:
                    self._serving.add(spec.model_name)
                if len(self._places.models) > 1:
                    progress = replace(progress, activity=f"{progress.activity} ({spec.model_name})")
                self._tell(spec.name, progress)
                await asyncio.sleep(SERVING_POLL_S if progress.serving else POLL_S)
        finally:
            await probe.close()

    def _tell(self, name: str, progress: EngineProgress) -> None:
        if progress.trouble and self._troubles.get(name) != progress.trouble:
            self._reporter.line(f"{name}: {progress.trouble} (log: {self._log_dir / f'{name}.log'})")
        self._troubles[name] = progress.trouble
        for note in progress.notes:
            if (name, note) not in self._noted:
                self._noted.add((name, note))
                self._reporter.line(f"warning: {name}: {note}")
        if not self._ready:
            self._reporter.activity(name, progress.activity, progress.fraction)
        elif self._told.get(name) != progress.activity:
            # The bars are gone by now.
            self._reporter.line(f"{name}: {progress.activity}")
        self._told[name] = progress.activity

    async def _watch_gateways(self) -> None:
        probe = GatewayProbe()
        try:
            waiting = list(self._urls)
            while True:
                waiting = [url for url in waiting if not await probe.is_ready(url)]
                if not waiting and self._every_model_serves():
                    break
                await asyncio.sleep(POLL_S)
        finally:
            await probe.close()
        self._ready = True
        self._supervisor.mark_ready()
        self._reporter.close()
        for text in self._ready_lines():
            self._reporter.line(text)

    def _every_model_serves(self) -> bool:
        """Return whether all models serve; a gateway that is ready says so where there is one model."""
        models = self._places.models
        return len(models) == 1 or self._serving.issuperset(model.name for model in models)

    def _ready_lines(self) -> list[str]:
        config, models = self._config, self._places.models
        lines = [f"gateway-{index}: {url}/v1" for index, url in enumerate(self._urls) if len(self._urls) > 1]
        if len(models) > 1:
            lines.append(f"models: {', '.join(model.name for model in models)}")
        if config.router_port:
            ports = range(config.router_port, config.router_port + config.routers)
            listening = [f"router 127.0.0.1:{port}" for port in ports]
            if config.first_tokenizer_port:
                listening.append(f"tokenizer 127.0.0.1:{config.first_tokenizer_port}")
            lines.append(f"gRPC: {', '.join(listening)}, secret in {self._runtime.client_secret}")
        lines.append(f"logs: {self._log_dir}")
        lines.append(f"try it: {self._request()}")
        if any(model.generates for model in models):
            lines.append(f"talk to it: {own_command()} chat{self._chat_options()}")
        lines.append(
            f"ready in {time.monotonic() - self._started:.1f} s: {self._urls[0]}/v1 is served; "
            "Ctrl-C stops it"
        )
        return lines

    def _request(self) -> str:
        """Return a request that the deployment answers, as a command to paste."""
        path, question = example_request(self._places.models)
        keyed = bool(self._config.api_key or self._config.api_key_file)
        words = [
            # A key is not shown: the command reads it from a variable that its user sets.
            "API_KEY=...; curl" if keyed else "curl",
            *(("-k",) if self._config.ssl_certfile else ()),
            f"{self._urls[0]}{path}",
            "-H 'Content-Type: application/json'",
            *(('-H "Authorization: Bearer $API_KEY"',) if keyed else ()),
            f"-d {shlex.quote(json.dumps(question))}",
        ]
        return " ".join(words)

    def _chat_options(self) -> str:
        """Return the options with which `catenary chat` reaches the deployment."""
        url = "" if self._urls[0] == DEFAULT_URL else f" --base-url {self._urls[0]}"
        key = " --api-key ..." if self._config.api_key or self._config.api_key_file else ""
        return url + (" --insecure" if self._config.ssl_certfile else "") + key


def own_command() -> str:
    """Return the words that start this program again from the same shell: `catenary` where PATH has it."""
    mine = sys.argv[0]
    if os.path.basename(mine) != "catenary":
        return f"{shlex.quote(sys.executable)} -m catenary_apps.cli.main"
    found = shutil.which("catenary")
    return "catenary" if found and os.path.samefile(found, mine) else shlex.quote(mine)


def example_request(models: Sequence[ReadyModel]) -> tuple[str, dict[str, object]]:
    """Return a request that the deployment answers: its path and its body."""
    chat = next((model for model in models if model.generates), None)
    if chat is None and models[0].serves == "classify":
        return "/classify", {"model": models[0].name, "input": ["A lovely film.", "A waste of time."]}
    if chat is None:
        return "/v1/rerank", {"model": models[0].name, "query": "fruit", "documents": ["An apple.", "A car."]}
    message = {"role": "user", "content": EXAMPLE_QUESTION}
    # A small model drawn from at temperature 1 makes a poor first impression.
    return "/v1/chat/completions", {
        "model": chat.name,
        "messages": [message],
        "temperature": 0,
        "max_tokens": 64,
    }
