"""What a gateway talks to: the router, the tokenizer services, and the models that both tell of."""

from __future__ import annotations

import asyncio

from catenary.rpc import CLIENT_SECRET_ENV, TlsFiles, open_channel, read_secret
from catenary.runtime import StartRefused
from catenary.telemetry import new_id
from gateway.config import GatewayConfig
from gateway.link import RouterSession
from gateway.text.models import ModelBoard
from gateway.text.pool import TokenizerPool


class Peers:
    """Connected from `tasks` to `close`; until the first answers nothing can be served."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises StartRefused for options that cannot work: addresses, key files, TLS files."""
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
            self.tokenizers = TokenizerPool(
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
        self.models = ModelBoard(self.tokenizers.fetch, lambda: self.session.connected)
        self.session = RouterSession(
            self._channel,
            instance_id=new_id("gateway-"),
            on_models=self.models.update,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.router_silence_s,
            max_outbound=config.max_outbound,
        )

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
            asyncio.create_task(self.session.run(), name="router-session"),
            asyncio.create_task(self.models.run(), name="model-board"),
            asyncio.create_task(self.tokenizers.run(), name="tokenizer-checks"),
        ]

    async def close(self) -> None:
        """Close all channels, once the tasks have ended."""
        await self._channel.close()
        await self.tokenizers.close()


def _tls(config: GatewayConfig) -> TlsFiles | None:
    if config.tls_ca is None and config.tls_cert is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
