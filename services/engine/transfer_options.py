"""Options of engines that compute prompts for others, or generate from what others computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from catenary.rpc import TcpAddress, parse_address


class TransferOptions(BaseModel):
    """A part of the engine's options."""

    headings: ClassVar[Mapping[str, str]] = {
        "role": "Prefill and decode on different engines",
    }

    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: computes long prompts and hands their KV on. decode: fetches it and generates. "
        "Either serves whole requests too where the other is missing. Not with contiguous_kv.",
    )
    kv_connector: str = Field(
        "shm",
        min_length=1,
        max_length=256,
        description="How a prefill engine gives KV away: shm (engines of one host), tcp, tls (tcp under "
        "tls_cert, tls_key and tls_ca, which both sides show and check), or MODULE:CLASS of a "
        "catenary.transfer.Connector. A decode engine fetches by shm, tcp, tls if it has these files, "
        "and the one named here.",
    )
    kv_transfer_listen: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT on which connectors tcp and tls answer (port 0: any free one). With tcp, KV "
        "crosses it in the clear: for a network of engines alone.",
    )
    kv_transfer_advertise: str | None = Field(
        None,
        description="HOST:PORT under which other hosts reach that (port 0: the one that it listens on). "
        "Absent: kv_transfer_listen.",
    )
    kv_transfer_directory: Path | None = Field(
        None,
        description="Directory that all engines of a host see: connector shm has its sockets in kv-UID "
        "there, which is for the user alone. Absent: catenary-kv-UID in the system's directory for temporary "
        "files.",
    )
    kv_transfer_timeout_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="Longest that the KV of one prompt may take to arrive; then the prompt is recomputed.",
    )
    max_kv_transfers: int = Field(
        8, ge=1, le=256, description="Prompts whose KV is given away, or fetched, at once."
    )
    kv_offer_ttl_s: float = Field(
        30.0,
        gt=0,
        le=3_600,
        description="Time for which a prefill engine keeps the KV of a prompt for others.",
    )
    kv_offer_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the KV blocks that such prompts may hold together, but for the latest one: the "
        "oldest go. They also go, oldest first, as soon as running sequences are short of blocks.",
    )

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

    @field_validator("kv_transfer_listen", "kv_transfer_advertise")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not isinstance(parse_address(value), TcpAddress):
            raise ValueError(f"{value!r}: write HOST:PORT")
        return value
