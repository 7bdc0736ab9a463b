"""The gateway, put together."""

from __future__ import annotations

import asyncio

from catenary.telemetry import get_logger
from gateway import routes
from gateway.application import guarded, routed
from gateway.config import GatewayConfig
from gateway.cross_origin import CrossOrigin
from gateway.generation.prompts import PromptService
from gateway.generation.service import GenerationService
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.limits.gate import LimitGate
from gateway.limits.options import limiter_of
from gateway.metrics import FleetCollector, GatewayMetrics
from gateway.openapi.routing import Routes
from gateway.peers import Peers
from gateway.pooling.service import PoolingService
from gateway.stored import StoredApis

_log = get_logger(__name__)


class GatewayApp:
    """One gateway process's parts and their life.

    `start` listens at once, before a router or tokenizer is reachable: until then /ready says 503."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises StartRefused for options that cannot work: addresses, key files, TLS files."""
        self._config = config
        self._metrics = GatewayMetrics()
        self.peers = Peers(config, self._metrics)
        """The services that it talks to."""
        self._metrics.registry.register(
            FleetCollector(
                lambda: self.peers.models.served,
                lambda: self.peers.session.live,
                lambda: self.peers.session.connected,
            )
        )
        self._service = GenerationService(
            config,
            session=self.peers.session,
            models=self.peers.models,
            tokenizers=self.peers.tokenizers,
            metrics=self._metrics,
        )
        self._limiter = limiter_of(config)
        self._stored = StoredApis(config, self._service, self.peers.serve)
        self._pooling = PoolingService(
            config,
            places=self._service,
            session=self.peers.session,
            models=self.peers.models,
            tokenizers=self.peers.tokenizers,
            metrics=self._metrics,
        )
        self.routers = self._made_routers()
        """All routes, the OpenAPI document's among them."""
        app = routed(self.routers, lenient=config.unknown_fields == "ignore")
        cross_origin = CrossOrigin(config.cors_allow_origins)
        self._stored.use(app if self._limiter is None else LimitGate(app, self._limiter))
        self._server = HttpServer(
            guarded(app, config, self._metrics.observe_http, self._limiter, cross_origin),
            host=config.host,
            port=config.port,
            limits=HttpLimits(
                config.max_header_kib << 10,
                config.max_headers,
                config.header_timeout_s,
                config.max_connections,
                config.stalled_client_s,
                config.linger_s,
                int(config.max_discarded_mib * (1 << 20)),
            ),
            keep_alive_s=config.keep_alive_s,
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            client_ca=config.ssl_ca_certs,
            refusal_fields=cross_origin.fields,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self.address = ""
        """Base URL once started, such as `http://127.0.0.1:8000`."""

    @property
    def ready(self) -> bool:
        """Whether requests can be served, and clients should come."""
        return self.peers.serve_any and not self._leaving

    async def start(self) -> None:
        """Listen and begin to connect. Raises StartRefused: the port is in use, a store cannot be opened."""
        await self._stored.open()
        try:
            self.address = await self._server.start()
        except BaseException:
            await self._stored.close()
            raise
        self._tasks = [
            *self.peers.tasks(),
            *self._stored.tasks(),
        ]
        if self._limiter is not None:
            self._tasks.append(asyncio.create_task(self._limiter.run(), name="limits"))
        _log.info("listening", address=self.address)

    async def failed(self) -> None:
        """Wait for a defect that ends the gateway; raises it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_s: float | None = None) -> None:
        """Tell clients to go elsewhere, serving them for the time of the option drain_notice_s; then refuse
        new requests, give running ones the time of drain_s, and close.

        With `grace_s`, new requests are refused at once, and running ones have that time."""
        self._leaving = True
        self._server.leave()
        if grace_s is None and self.peers.serve_any:
            _log.info("leaving", notice_s=self._config.drain_notice_s)
            await asyncio.sleep(self._config.drain_notice_s)
        self._server.close_connections()
        await self._stored.pause()
        await self._service.drain(self._config.drain_s if grace_s is None else grace_s)
        self._pooling.cut_off()
        self._stored.cut_off()
        await self._server.stop()
        for task in self._tasks:
            task.cancel()
        # The defect of one that died is told by `failed`; here everything is to be closed.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stored.close()
        await self.peers.close()
        if self._limiter is not None:
            await self._limiter.close()

    def _made_routers(self) -> list[Routes]:
        def can_serve() -> bool:
            return self.peers.serve_any

        prompts = PromptService(self._service, models=self.peers.models, tokenizers=self.peers.tokenizers)
        routers = [
            routes.chat_completions.routes(self._service),
            routes.completions.routes(self._service),
            routes.tokenize.routes(prompts),
            routes.sagemaker.routes(self._service, self._pooling, self.peers.models, can_serve=can_serve),
            *self._stored.routers(),
            routes.embeddings.routes(self._pooling),
            routes.rerank.routes(self._pooling),
            routes.score.routes(self._pooling),
            routes.classify.routes(self._pooling),
            routes.pooling.routes(self._pooling),
            routes.models.routes(self.peers.models),
            routes.health.routes(can_serve=lambda: self.peers.serve_any, draining=lambda: self._leaving),
            routes.metrics.routes(self._metrics),
            routes.home.routes(
                self.peers.models,
                can_serve=can_serve,
                keyed=bool(self._config.api_key or self._config.operator_key or self._config.api_key_file),
            ),
        ]
        return [*routers, routes.openapi.routes(routers)]
