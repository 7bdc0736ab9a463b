"""Assembly of the gateway: its parts, and its upstreams (routers, tokenizer services, their models)."""

from __future__ import annotations

import asyncio

import grpc
from starlette.types import ASGIApp

from catenary.config import ConfigError
from catenary.rpc import CLIENT_SECRET_ENV, TcpAddress, TlsFiles, open_channel, parse_address, read_secret
from catenary.telemetry import get_logger, new_id
from gateway.application import guarded, routed
from gateway.config import GatewayConfig
from gateway.cross_origin import CrossOrigin
from gateway.generation.prompts import PromptService
from gateway.generation.requests import Requests
from gateway.generation.service import GenerationService
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.limits.limiter import LimitGate, limiter_of
from gateway.link.failover import FailoverSession
from gateway.metrics import FleetCollector, GatewayMetrics
from gateway.pooling.service import PoolingService
from gateway.routes.completions import chat_completion_routes, completion_routes, tokenize_routes
from gateway.routes.pooling import (
    classify_routes,
    embedding_routes,
    pooling_routes,
    rerank_routes,
    score_routes,
)
from gateway.routes.sagemaker import sagemaker_routes
from gateway.routes.server import health_routes, home_routes, metrics_routes, model_routes, openapi_routes
from gateway.routing import Routes, batch_endpoints, limited_paths
from gateway.stored import StoredApis
from gateway.text.models import ModelRegistry
from gateway.text.pool import TokenizerPool

_log = get_logger(__name__)


class Upstreams:
    """Connections to routers and tokenizer services, from `tasks` to `close`, and their models."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        """Prepare them. Raises StartRefused for options that cannot work: addresses, key files, TLS files."""
        secret = read_secret(config.client_secret_file, CLIENT_SECRET_ENV, option="client_secret_file")
        tls = _tls(config)

        def dial(address: str, name: str) -> grpc.aio.Channel:
            parsed = parse_address(name)
            return open_channel(
                address,
                secret=secret,
                tls=tls,
                max_message_mib=config.max_message_mib,
                keepalive_s=config.keepalive_s,
                server_name=parsed.host if isinstance(parsed, TcpAddress) and address != name else None,
            )

        try:
            self.tokenizers = TokenizerPool(
                config.tokenizer,
                dial,
                render_timeout_s=config.render_timeout_s,
                wait_s=config.failover_wait_s,
                silence_s=config.tokenizer_silence_s,
                max_message_mib=config.max_message_mib,
            )
            self.models = ModelRegistry(self.tokenizers.fetch, config.aliases, wait_s=config.failover_wait_s)
            self.session = FailoverSession(
                config.router,
                dial,
                instance_id=new_id("gateway-"),
                policy=config.resume_policy(),
                models=self.models,
                on_resumed=metrics.resumed,
                on_given_up=metrics.given_up,
                poisoned=config.poisoned_requests(),
                connect_timeout_s=config.connect_timeout_s,
                silence_s=config.router_silence_s,
                max_outbound=config.max_outbound,
            )
        except ValueError as error:
            raise ConfigError(f"--router or --tokenizer: {error}") from None

    @property
    def serve_any(self) -> bool:
        return self.models.ready and self.tokenizers.answering

    def serve(self, model: str) -> bool:
        return self.tokenizers.answering and self.models.serves(model)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start to connect; return the tasks, which run until cancelled."""
        return [
            asyncio.create_task(self.session.run(), name="routers"),
            asyncio.create_task(self.models.run(), name="model-registry"),
            asyncio.create_task(self.tokenizers.run(), name="tokenizer-checks"),
        ]

    async def close(self) -> None:
        """Close all channels, once the tasks have ended."""
        await self.session.close()
        await self.tokenizers.close()


def _tls(config: GatewayConfig) -> TlsFiles | None:
    if config.tls_ca is None and config.tls_cert is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)


class GatewayApp:
    """Parts of one gateway process and their life.

    `start` listens at once, before a router or tokenizer is reachable: until then /ready answers 503."""

    def __init__(self, config: GatewayConfig) -> None:
        """Build the parts. Raises StartRefused for options that cannot work: addresses, key or TLS files."""
        self.config = config
        self._metrics = GatewayMetrics()
        self.upstreams = Upstreams(config, self._metrics)
        self._metrics.registry.register(
            FleetCollector(
                lambda: self.upstreams.models.served,
                lambda: self.upstreams.session.live,
                lambda: self.upstreams.session.connected,
            )
        )
        upstreams = self.upstreams
        self.requests = Requests(
            config, session=upstreams.session, models=upstreams.models, metrics=self._metrics
        )
        self.generation = GenerationService(
            config, self.requests, session=upstreams.session, tokenizers=upstreams.tokenizers
        )
        self._limiter = limiter_of(config)
        self.stored = StoredApis(config, self.generation, self.upstreams.serve)
        self._pooling = PoolingService(
            config, self.requests, session=upstreams.session, tokenizers=upstreams.tokenizers
        )
        self.routers = self._made_routers()
        app = routed(self.routers, lenient=config.unknown_fields == "ignore")
        cross_origin = CrossOrigin(config.cors_allow_origins)
        self.stored.use(self._limited(app), batch_endpoints(self.routers))
        self.server = HttpServer(
            guarded(app, self.routers, config, self._metrics.observe_http, self._limited, cross_origin),
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
        return self.upstreams.serve_any and not self._leaving

    async def start(self) -> None:
        """Listen and begin to connect. Raises StartRefused: the port is in use, a store cannot be opened."""
        await self.stored.open()
        try:
            self.address = await self.server.start()
        except BaseException:
            await self.stored.close()
            raise
        self._tasks = [
            *self.upstreams.tasks(),
            *self.stored.tasks(),
        ]
        if self._limiter is not None:
            self._tasks.append(asyncio.create_task(self._limiter.run(), name="limits"))
        _log.info("listening", address=self.address)

    async def failed(self) -> None:
        """Wait for a defect that ends the gateway, and raise it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_s: float | None = None) -> None:
        """Tell clients to go elsewhere, and stop.

        Requests are served for drain_notice_s more; then new ones are refused, and running ones have the time
        of drain_s. With `grace_s`, new requests are refused at once, and running ones have that time."""
        self._leaving = True
        self.server.leave()
        if grace_s is None and self.upstreams.serve_any:
            _log.info("leaving", notice_s=self.config.drain_notice_s)
            await asyncio.sleep(self.config.drain_notice_s)
        self.server.close_connections()
        await self.stored.pause()
        await self.requests.drain(self.config.drain_s if grace_s is None else grace_s)
        self.stored.cut_off()
        await self.server.stop()
        for task in self._tasks:
            task.cancel()
        # `failed` reports the defect of a task that died; here everything is to be closed.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stored.close()
        await self.upstreams.close()
        if self._limiter is not None:
            await self._limiter.close()

    def _limited(self, app: ASGIApp) -> ASGIApp:
        """Put the limits of keys, if there are any, in front of the routes that engines work for."""
        return (
            app
            if self._limiter is None
            else LimitGate(app, self._limiter, frozenset(limited_paths(self.routers)))
        )

    def _made_routers(self) -> list[Routes]:
        def can_serve() -> bool:
            return self.upstreams.serve_any

        prompts = PromptService(self.requests, self.upstreams.tokenizers)
        routers = [
            chat_completion_routes(self.generation),
            completion_routes(self.generation),
            tokenize_routes(self.generation, prompts),
            sagemaker_routes(self.generation, self._pooling, can_serve=can_serve),
            *self.stored.routers(),
            embedding_routes(self._pooling),
            rerank_routes(self._pooling),
            score_routes(self._pooling),
            classify_routes(self._pooling),
            pooling_routes(self._pooling),
            model_routes(self.upstreams.models),
            health_routes(can_serve=lambda: self.upstreams.serve_any, draining=lambda: self._leaving),
            metrics_routes(self._metrics),
            home_routes(
                self.upstreams.models,
                can_serve=can_serve,
                keyed=bool(self.config.api_key or self.config.operator_key or self.config.api_key_file),
            ),
        ]
        return [*routers, openapi_routes(routers)]
