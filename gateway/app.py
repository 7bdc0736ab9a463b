"""The gateway, put together."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from ipaddress import ip_address

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from catenary import __version__
from catenary.rpc import CLIENT_SECRET_ENV, TlsFiles, open_channel, read_secret
from catenary.runtime import StartRefused
from catenary.telemetry import get_logger, new_id
from gateway import routes
from gateway.auth import AuthGate, read_keys
from gateway.config import GatewayConfig
from gateway.errors import ApiError, internal
from gateway.generation.prompts import PromptService
from gateway.generation.service import GenerationService
from gateway.http.context import RequestContext
from gateway.http.protocol import HttpLimits
from gateway.http.respond import error_response
from gateway.http.server import HttpServer
from gateway.link import RouterSession
from gateway.metrics import FleetCollector, GatewayMetrics
from gateway.pooling.service import PoolingService
from gateway.stored import StoredApis
from gateway.text.models import ModelBoard
from gateway.text.pool import TokenizerPool

_log = get_logger(__name__)


class GatewayApp:
    """One gateway process's parts and their life.

    `start` listens at once, before a router or tokenizer is reachable: until then /ready says 503."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises StartRefused for options that cannot work: addresses, key files, TLS files."""
        self._config = config
        secret = read_secret(config.client_secret_file, CLIENT_SECRET_ENV, option="client_secret_file")
        tls = _tls(config)
        try:
            self._channel = open_channel(
                config.router,
                secret=secret,
                tls=tls,
                max_message_mib=config.max_message_mib,
                keepalive_s=config.keepalive_s,
            )
            self._tokenizers = TokenizerPool(
                config.tokenizer,
                secret=secret,
                tls=tls,
                max_message_mib=config.max_message_mib,
                keepalive_s=config.keepalive_s,
                render_timeout_s=config.render_timeout_s,
                silence_s=config.tokenizer_silence_s,
            )
        except ValueError as error:
            raise StartRefused(f"--router or --tokenizer: {error}") from None
        self._models = ModelBoard(self._tokenizers.fetch, lambda: self._session.connected)
        self._session = RouterSession(
            self._channel,
            instance_id=new_id("gateway-"),
            on_models=self._models.update,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.router_silence_s,
            max_outbound=config.max_outbound,
        )
        self._metrics = GatewayMetrics()
        self._metrics.registry.register(
            FleetCollector(
                lambda: self._models.served, lambda: self._session.live, lambda: self._session.connected
            )
        )
        self._service = GenerationService(
            config,
            session=self._session,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=self._metrics,
        )
        self._stored = StoredApis(
            config, self._service, lambda name: self._tokenizers.answering and self._models.serves(name)
        )
        self._pooling = PoolingService(
            config,
            places=self._service,
            session=self._session,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=self._metrics,
        )
        self.routers = self._made_routers()
        """All routes, the OpenAPI document's among them."""
        self._server = HttpServer(
            self._application(),
            host=config.host,
            port=config.port,
            limits=HttpLimits(
                config.max_header_kib << 10,
                config.max_headers,
                config.header_timeout_s,
                config.max_connections,
                config.stalled_client_s,
            ),
            keep_alive_s=config.keep_alive_s,
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            client_ca=config.ssl_ca_certs,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        """Base URL once started, such as `http://127.0.0.1:8000`."""

    @property
    def ready(self) -> bool:
        """Whether requests can be served."""
        return self._can_serve() and not self._service.draining

    async def start(self) -> None:
        """Listen and begin to connect. Raises StartRefused: the port is in use, a store cannot be opened."""
        await self._stored.open()
        try:
            self.address = await self._server.start()
        except BaseException:
            await self._stored.close()
            raise
        self._tasks = [
            asyncio.create_task(self._session.run(), name="router-session"),
            asyncio.create_task(self._models.run(), name="model-board"),
            asyncio.create_task(self._tokenizers.run(), name="tokenizer-checks"),
            *self._stored.tasks(),
        ]
        _log.info("listening", address=self.address)

    async def failed(self) -> None:
        """Wait for a defect that ends the gateway; raises it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, give running ones `grace_s` (default: the option drain_s), then close."""
        await self._stored.pause()
        await self._service.drain(self._config.drain_s if grace_s is None else grace_s)
        self._pooling.cut_off()
        await self._server.stop()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._stored.close()
        await self._channel.close()
        await self._tokenizers.close()

    def _can_serve(self) -> bool:
        return self._models.ready and self._tokenizers.answering

    def _made_routers(self) -> list[APIRouter]:
        prompts = PromptService(self._service, models=self._models, tokenizers=self._tokenizers)
        routers = [
            routes.chat_completions.routes(self._service),
            routes.completions.routes(self._service),
            routes.tokenize.routes(prompts),
            routes.sagemaker.routes(self._service, can_serve=self._can_serve),
            *self._stored.routers(),
            routes.embeddings.routes(self._pooling),
            routes.rerank.routes(self._pooling),
            routes.score.routes(self._pooling),
            routes.models.routes(self._models),
            routes.health.routes(can_serve=self._can_serve, draining=lambda: self._service.draining),
            routes.metrics.routes(self._metrics),
        ]
        return [*routers, routes.openapi.routes(routers)]

    def _application(self) -> ASGIApp:
        config = self._config
        app = FastAPI(
            title="Catenary",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
        )
        app.add_exception_handler(ApiError, _on_api_error)
        app.add_exception_handler(Exception, _on_defect)
        app.add_exception_handler(HTTPException, _on_http_error)
        for router in self.routers:
            app.include_router(router)
        self._stored.use(app)
        keys = read_keys(config.api_key, config.api_key_file)
        guarded: ASGIApp = AuthGate(app, keys, metrics_public=config.metrics_public)
        if config.cors_allow_origins:
            guarded = CORSMiddleware(
                guarded,
                allow_origins=config.cors_allow_origins,
                allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        hosts = config.allowed_hosts or (None if _is_loopback(config.host) and not keys else ("*",))
        return RequestContext(
            guarded,
            allowed_hosts=hosts,
            observe=self._metrics.observe_http,
            stall_s=config.stalled_client_s,
        )


def _tls(config: GatewayConfig) -> TlsFiles | None:
    if config.tls_ca is None and config.tls_cert is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _on_api_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error_response(error)


async def _on_defect(_request: Request, _error: Exception) -> Response:
    """The framework raises the defect again when this is sent; RequestContext logs it."""
    return error_response(internal())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and wrong methods."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return error_response(
            ApiError(
                405,
                "This method is not allowed here.",
                code="method_not_allowed",
                headers=(("allow", allow),),
            )
        )
    return error_response(ApiError(404, "Unknown request URL.", code="unknown_url"))
