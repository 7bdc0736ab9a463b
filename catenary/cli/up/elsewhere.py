"""Options that `catenary up` does not have, since they are those of one service."""

from __future__ import annotations

from catenary.config import ServiceConfig, env_name, flag_name


def service_classes() -> tuple[type[ServiceConfig], ...]:
    """The option classes of all services. It takes a quarter of a second to load them."""
    from gateway import GatewayConfig
    from services.engine.config import EngineConfig
    from services.router.config import RouterConfig
    from services.tokenizer.config import TokenizerConfig

    return GatewayConfig, RouterConfig, TokenizerConfig, EngineConfig


def variables_of(flag: str) -> tuple[str, ...]:
    """The variables that set the option of this flag, one for each service that has it; of --no-X, false."""
    found = []
    for cls in service_classes():
        for name in cls.model_fields:
            if flag == flag_name(name):
                found.append(env_name(cls, name))
            elif flag == "--no" + flag_name(name)[1:]:
                found.append(f"{env_name(cls, name)}=false")
    return tuple(found)
