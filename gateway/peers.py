"""The peers of a gateway: the routers, the tokenizer services, and the models that both tell of."""

from __future__ import annotations

import asyncio

import grpc

from catenary.config import ConfigError
from catenary.rpc import CLIENT_SECRET_ENV, TcpAddress, TlsFiles, open_channel, parse_address, read_secret
from catenary.telemetry import new_id
from gateway.config import GatewayConfig
from gateway.link.routers import Routers
from gateway.metrics import GatewayMetrics
from gateway.text.models import ModelBoard
from gateway.text.pool import TokenizerPool


class Peers:
    """Connected from `tasks` to `close`; until the first answers nothing can be served."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        """Raises StartRefused for options that cannot work: addresses, key files, TLS files."""
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
            self.models = ModelBoard(
                self.tokenizers.fetch,
                lambda: self.session.connected > 0,
                lambda name: self.session.awaits(name),
                config.aliases,
            )
            self.session = Routers(
                config.router,
                dial,
                instance_id=new_id("gateway-"),
                policy=config.resume_policy(),
                on_models=self.models.update,
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
        """Whether any model can be used."""
        return self.models.ready and self.tokenizers.answering

    def serve(self, model: str) -> bool:
        """Whether this model can be used."""
        return self.tokenizers.answering and self.models.serves(model)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Begin to connect; they run until cancelled."""
        return [
            asyncio.create_task(self.session.run(), name="routers"),
            asyncio.create_task(self.models.run(), name="model-board"),
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
