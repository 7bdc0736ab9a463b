"""The configuration of an engine's process: its options checked against one another, and its TLS."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from catenary.config import settings
from catenary.rpc import RpcConfig, TcpAddress, TlsFiles, parse_address
from services.engine.options import EngineOptions


class EngineConfig(EngineOptions, RpcConfig):
    """Options of `python -m services.engine`: flags, CATENARY_ENGINE_* variables, a YAML file, defaults."""

    model_config = settings(prefix="CATENARY_ENGINE_")

    def tls(self) -> TlsFiles | None:
        """The TLS files of the status service: none without a certificate, for then they are for dialling."""
        if self.tls_cert is None and self.tls_key is None and not self.tls_require_client_cert:
            return None
        return super().tls()

    def router_tls(self) -> TlsFiles | None:
        """The TLS files for dialling routers."""
        return super().tls()

    @model_validator(mode="after")
    def _a_step_holds_all_that_run(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token in a step"
            )
        return self

    @model_validator(mode="after")
    def _an_idle_step_is_no_smaller(self) -> Self:
        idle = self.max_idle_batched_tokens
        if idle is not None and idle < self.max_num_batched_tokens:
            raise ValueError(
                f"max_idle_batched_tokens ({idle}) must be at least max_num_batched_tokens "
                f"({self.max_num_batched_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _steps_are_traced_into_a_file(self) -> Self:
        if self.profile_steps is not None and self.trace_steps is None:
            raise ValueError("profile_steps needs trace_steps, the file that they are written to")
        return self

    @model_validator(mode="after")
    def _certificates_for_kv(self) -> Self:
        if self.kv_connector == "tls" and None in (self.tls_cert, self.tls_key, self.tls_ca):
            raise ValueError("kv_connector tls needs tls_cert, tls_key and tls_ca")
        return self

    @model_validator(mode="after")
    def _waiting_for_kv_is_no_stall(self) -> Self:
        if self.role == "decode" and self.kv_transfer_timeout_s + 2 > self.stall_limit_s:
            raise ValueError(
                f"kv_transfer_timeout_s ({self.kv_transfer_timeout_s:g}) must be 2 s below stall_limit_s "
                f"({self.stall_limit_s:g}), and below stall_s of the routers: an engine whose sequences wait "
                "for KV makes no step"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_execute(self) -> Self:
        if self.compile and self.enforce_eager:
            raise ValueError("compile and enforce-eager exclude each other: choose one")
        return self

    @model_validator(mode="after")
    def _native_kernels_are_a_cpus(self) -> Self:
        if self.device != "cpu" and self.quantization != "none":
            raise ValueError(f"quantization {self.quantization} is for device cpu, not {self.device}")
        if self.device != "cpu" and self.cpu_kernels == "native":
            raise ValueError(f"cpu-kernels native is for device cpu, not {self.device}")
        if self.cpu_kernels == "torch" and self.quantization != "none":
            raise ValueError(f"quantization {self.quantization} excludes cpu-kernels torch")
        if self.compile and (self.quantization != "none" or self.cpu_kernels == "native"):
            raise ValueError("compile excludes quantization and cpu-kernels native: torch computes then")
        return self

    @model_validator(mode="after")
    def _one_way_to_fetch(self) -> Self:
        if self.contiguous_kv and self.enable_prefix_caching:
            raise ValueError(
                "contiguous-kv excludes enable-prefix-caching, whose blocks are fetched by id: switch one off"
            )
        return self

    @model_validator(mode="after")
    def _blocks_stay_where_they_are(self) -> Self:
        if self.contiguous_kv and self.role != "both":
            raise ValueError(f"contiguous-kv moves blocks, which role {self.role} hands on: use role both")
        return self

    @model_validator(mode="after")
    def _recipes_have_a_directory(self) -> Self:
        for name in ("recipe_cache_mib", "recipe_cache_clear"):
            if self.recipe_cache is None and getattr(self, name) != EngineOptions.model_fields[name].default:
                raise ValueError(f"{name} needs recipe_cache, the directory that recipes are kept in")
        return self

    @model_validator(mode="after")
    def _an_address_to_dial(self) -> Self:
        listen = parse_address(self.kv_transfer_listen)
        everywhere = isinstance(listen, TcpAddress) and listen.host in ("0.0.0.0", "::", "[::]")
        given = self.kv_connector != "shm" and self.kv_transfer_advertise is None
        if self.role == "prefill" and given and everywhere:
            raise ValueError(
                f"kv_transfer_listen {self.kv_transfer_listen} is no address that others can dial: set "
                "kv_transfer_advertise"
            )
        return self

    @model_validator(mode="after")
    def _buckets_have_their_strategy(self) -> Self:
        self.check_buckets()
        return self
