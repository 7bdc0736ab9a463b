"""Options that `catenary up` does not have, since they are those of one service."""

from __future__ import annotations

from collections.abc import Iterable

from catenary.config import SERVICE_PREFIXES, VARIABLES, ServiceConfig, flag_name


def service_classes() -> tuple[type[ServiceConfig], ...]:
    """The option classes of all services. They bring gRPC and an HTTP server, which take seconds to load."""
    from gateway import GatewayConfig
    from services.engine.config import EngineConfig
    from services.router.config import RouterConfig
    from services.tokenizer.config import TokenizerConfig

    return GatewayConfig, RouterConfig, TokenizerConfig, EngineConfig


def has_service_variables(names: Iterable[str]) -> bool:
    """Whether one of the variables is an option of a service, or looks like one."""
    return any(name.startswith(SERVICE_PREFIXES) for name in names)


def service_flags() -> frozenset[str]:
    """The flags of all services, without loading their option classes."""
    return frozenset(flag_name(name) for prefix in SERVICE_PREFIXES for name in VARIABLES[prefix])


def variables_of(flag: str) -> tuple[str, ...]:
    """The variables that set the option of this flag, one for each service that has it; of --no-X, false."""
    found = []
    for prefix in SERVICE_PREFIXES:
        for name in VARIABLES[prefix]:
            if flag == flag_name(name):
                found.append(f"{prefix}{name.upper()}")
            elif flag == "--no" + flag_name(name)[1:]:
                found.append(f"{prefix}{name.upper()}=false")
    return tuple(found)
