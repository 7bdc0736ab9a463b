"""The gateway's options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from catenary.config import Expert, ServiceConfig, settings
from catenary.resume import ResumeOptions
from catenary.sequence_limits import MAX_CONSTRAINT_BYTES
from gateway.schemas.base import RequestLimits

_LIMITS = RequestLimits()


class GatewayConfig(ResumeOptions, ServiceConfig):
    """The gateway: the OpenAI API over HTTP."""

    model_config = settings("CATENARY_GATEWAY_")

    headings: ClassVar[Mapping[str, str]] = {
        "host": "Addresses of the gateway, routers and tokenizers",
        "api_key": "Keys and limits of keys",
        "cors_allow_origins": "Browsers, TLS",
        "max_body_mib": Expert("Limits of connections and requests"),
        "state_dir": "Stored responses",
        "batches": "Files and batches",
        "max_constraint_bytes": "Structured output",
        "render_timeout_s": Expert("Timeouts and buffers"),
    }

    host: str = Field("127.0.0.1", description="Address to listen on for HTTP.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    router: tuple[str, ...] = Field(
        ("127.0.0.1:7070",),
        description="gRPC addresses of routers; a name stands for all that it resolves to, now and later.",
    )
    tokenizer: tuple[str, ...] = Field(
        ("127.0.0.1:7071",),
        description="gRPC addresses of tokenizer services; a name stands for all that it resolves to. The "
        "least busy one is asked.",
    )

    model_alias: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="Further names of models, each as ALIAS=MODEL. Requests may use them, /v1/models lists "
        "them, and answers have the name that was asked for.",
    )

    client_secret_file: Path | None = Field(
        None, description="File with the client role's secret for gRPC (or CATENARY_CLIENT_SECRET)."
    )
    tls_ca: Path | None = Field(None, description="CA certificate for gRPC over TLS.")
    tls_cert: Path | None = Field(None, description="Client certificate for mutual TLS.")
    tls_key: Path | None = Field(None, description="Private key of the client certificate.")
    max_message_mib: int = Field(64, ge=1, le=1024, description="Largest gRPC message in MiB.")
    keepalive_s: float = Field(30.0, ge=0.1, le=3600, description="Seconds between gRPC keepalive pings.")

    api_key: tuple[str, ...] = Field((), description="API keys of which clients must send one.")
    api_key_file: Path | None = Field(
        None,
        description="File of API keys, one a line; # starts a comment. Behind a key may stand limits of its "
        "own: requests-per-minute=N, tokens-per-minute=N, concurrent=N.",
    )
    operator_key: tuple[str, ...] = Field(
        (), description="API keys that may also ask for the class system (header x-priority-class)."
    )
    key_requests_per_minute: int = Field(
        0,
        ge=0,
        le=1 << 31,
        description="Generating requests that a key may begin in a minute; 0 is no limit.",
    )
    key_tokens_per_minute: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Prompt and generated tokens that a key may use in a minute; 0 is no limit.",
    )
    key_concurrent: int = Field(
        0, ge=0, le=1 << 31, description="Generating requests of a key at a time; 0 is no limit."
    )
    limits_store: str | None = Field(
        None,
        description="redis://HOST:PORT/DB in which several gateways count the limits of keys together; "
        "default: each gateway counts for itself.",
    )
    limits_store_away: Literal["local", "refuse"] = Field(
        "local",
        description="While limits-store does not answer: local: this gateway counts for itself; refuse: "
        "requests are answered with 503.",
    )
    limits_store_timeout_s: float = Field(
        0.5, gt=0, le=60, description="Seconds after which a call of limits-store has failed."
    )
    metrics_public: bool = Field(False, description="Serve /metrics without a key when keys are set.")
    cors_allow_origins: tuple[str, ...] = Field((), description="Origins that browsers may call from.")
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host header names that are answered; * is any. Default: any, but on a loopback address "
        "without API keys only localhost and IP addresses (a guard against DNS rebinding).",
    )
    ssl_certfile: Path | None = Field(None, description="Certificate chain for HTTPS.")
    ssl_keyfile: Path | None = Field(None, description="Private key for HTTPS.")
    ssl_ca_certs: Path | None = Field(None, description="CA of client certificates; they are then required.")

    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="Fields of a request that no route knows: refuse it, or ignore them and name them in the "
        "answer's header x-catenary-ignored. Known fields that are not supported are refused either way.",
    )
    max_body_mib: float = Field(8.0, gt=0, le=1024, description="Largest request body in MiB.")
    max_body_values: int = Field(
        100_000,
        ge=1000,
        description="Most strings, arrays and objects in a request's body, names of fields included. Of "
        "values of all kinds it may have ten times as many.",
    )
    max_header_kib: int = Field(32, ge=1, le=1024, description="Largest request head in KiB.")
    max_headers: int = Field(128, ge=8, description="Most header fields of a request.")
    header_timeout_s: float = Field(20.0, gt=0, description="Seconds for a client to send a request's head.")
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds for a client to send a request's body.")
    keep_alive_s: int = Field(75, ge=1, description="Seconds that an idle HTTP connection is kept.")
    max_connections: int = Field(4096, ge=1, description="Most open HTTP connections.")
    linger_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds for which a connection that the gateway ends takes, and drops, what its client "
        "still sends, so that the client gets to read the answer; 0: none.",
    )
    max_discarded_mib: float = Field(
        64.0,
        ge=0,
        le=4096,
        description="Most MiB of a refused request that are taken, and dropped, before it is cut.",
    )
    max_requests: int = Field(1024, ge=1, description="Most generation requests at a time.")

    max_wait_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Seconds that a request may wait for an engine, if it does not say (header "
        "x-max-wait-ms); default: the router's, by class.",
    )

    max_n: int = Field(_LIMITS.max_n, ge=1, le=128, description="Largest n of a request.")
    max_prompts: int = Field(_LIMITS.max_prompts, ge=1, description="Most prompts of one completion request.")
    max_sequences: int = Field(
        _LIMITS.max_sequences, ge=1, description="Most sequences (prompts times n) of one request."
    )
    max_messages: int = Field(_LIMITS.max_messages, ge=1, description="Most messages of a chat request.")
    max_content_parts: int = Field(
        _LIMITS.max_content_parts, ge=1, description="Most content parts of a chat together."
    )
    max_tools: int = Field(_LIMITS.max_tools, ge=0, description="Most tools of a chat request.")
    max_tools_bytes: int = Field(
        _LIMITS.max_tools_bytes,
        ge=0,
        description="Most bytes of a chat's tools together, as its template sees them.",
    )
    max_tool_calls: int = Field(
        _LIMITS.max_tool_calls, ge=0, description="Most tool calls of a chat's messages together."
    )
    max_documents: int = Field(_LIMITS.max_documents, ge=0, description="Most documents of a chat request.")
    max_json_depth: int = Field(
        _LIMITS.max_json_depth, ge=1, le=256, description="Nesting of free-form JSON in a request."
    )
    max_json_values: int = Field(_LIMITS.max_json_values, ge=1, description="Most values in such JSON.")
    max_detokenize_ids: int = Field(
        _LIMITS.max_detokenize_ids, ge=1, description="Most token ids of a /detokenize request."
    )
    max_stop_length: int = Field(
        _LIMITS.max_stop_length, ge=1, description="Longest stop string, in characters."
    )
    max_stop_token_ids: int = Field(
        _LIMITS.max_stop_token_ids, ge=1, description="Most stop_token_ids of a request."
    )
    max_logit_bias: int = Field(
        _LIMITS.max_logit_bias, ge=1, description="Most tokens in a request's logit_bias."
    )
    max_allowed_token_ids: int = Field(
        _LIMITS.max_allowed_token_ids, ge=1, description="Most allowed_token_ids of a request."
    )
    max_bad_words: int = Field(_LIMITS.max_bad_words, ge=1, description="Most bad_words of a request.")
    max_bad_word_length: int = Field(
        _LIMITS.max_bad_word_length, ge=1, description="Longest of the bad_words, in characters."
    )
    max_scored_prompt_tokens: int = Field(
        _LIMITS.max_scored_prompt_tokens,
        ge=1,
        description="Most prompt tokens with log probabilities in an answer, each choice's counted.",
    )
    min_priority: int = Field(
        _LIMITS.min_priority, ge=-(2**31), le=0, description="Lowest (first) priority of a request."
    )
    max_priority: int = Field(
        _LIMITS.max_priority, ge=0, lt=2**31, description="Highest (last) priority of a request."
    )
    priority_tier: int = Field(
        -10, ge=-(2**31), lt=2**31, description="Priority of requests with service_tier priority."
    )
    flex_tier: int = Field(
        10, ge=-(2**31), lt=2**31, description="Priority of requests with service_tier flex."
    )
    max_embedding_inputs: int = Field(
        _LIMITS.max_embedding_inputs, ge=1, description="Most texts of one embeddings request."
    )
    max_pairs: int = Field(
        _LIMITS.max_pairs,
        ge=1,
        description="Most documents of a rerank request, and most pairs of a score request.",
    )
    document_window: int = Field(
        64,
        ge=1,
        description="Documents of one embeddings, rerank or score request that are in the engines at a time.",
    )

    state_dir: Path | None = Field(
        None,
        description="Directory of what is stored, which gateways of one host may share. Default: "
        "~/.local/state/catenary/gateway-PORT; with port 0 a temporary one.",
    )
    state_reserve_mib: float = Field(
        4.0,
        ge=0,
        description="MiB of the state directory's disk that are kept, so that things can be deleted, and "
        "the server be started, when it is full; on a small disk, a 16th of it. 0: none.",
    )
    store_responses: bool = Field(True, description="Store responses, unless a request says store: false.")
    max_stored_responses: int = Field(10_000, ge=1, description="Most responses that are stored.")
    max_stored_mib: float = Field(1024.0, ge=1, description="Most MiB of responses that are stored.")
    stored_response_days: float = Field(
        30.0, gt=0, description="Days after its last use at which a stored response is forgotten."
    )
    max_item_references: int = Field(
        512, ge=0, description="Most references to stored items in the input of a response."
    )
    max_background: int = Field(64, ge=1, description="Most background responses at work at a time.")
    max_event_mib: float = Field(
        16.0,
        gt=0,
        le=1024,
        description="Most MiB of events that are kept of a background response with a stream; of one with "
        "more none is kept.",
    )
    max_event_streams: int = Field(
        256, ge=1, description="Most streams of background responses that are sent at a time."
    )
    batches: bool = Field(True, description="Take files, and run batches of requests.")
    max_file_mib: float = Field(200.0, gt=0, le=4096, description="Largest uploaded file in MiB.")
    upload_timeout_s: float = Field(600.0, gt=0, description="Seconds for a client to upload a file.")
    max_files: int = Field(1000, ge=2, description="Most files that are stored, results included.")
    max_files_mib: float = Field(
        4096.0, ge=1, description="MiB of stored files from which on no upload is taken."
    )
    file_days: float = Field(30.0, gt=0, description="Days for which results of batches are kept.")
    max_batch_lines: int = Field(50_000, ge=1, description="Most requests of a batch.")
    max_batches: int = Field(64, ge=1, description="Most batches that have not ended.")
    batches_at_work: int = Field(4, ge=1, description="Most batches that a gateway runs at a time.")
    batch_lines_at_work: int = Field(
        32, ge=1, le=1024, description="Most requests of batches that a gateway runs at a time."
    )
    batch_priority: int = Field(
        10, ge=-(2**31), lt=2**31, description="Priority of requests of batches that name none."
    )
    batch_model_wait_s: float = Field(
        60.0,
        ge=0,
        description="Seconds after its start during which requests of batches wait for models that no engine "
        "has brought.",
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        le=600,
        description="Seconds after which the batches of a dead gateway are taken over, and its background "
        "responses ended, by those with the same state-dir.",
    )
    max_constraint_bytes: int = Field(
        _LIMITS.max_constraint_bytes,
        ge=1,
        le=MAX_CONSTRAINT_BYTES,
        description="Longest schema, regular expression or grammar, in bytes.",
    )
    max_constraint_depth: int = Field(
        _LIMITS.max_constraint_depth, ge=1, le=256, description="Nesting of a JSON schema."
    )
    max_constraint_values: int = Field(
        _LIMITS.max_constraint_values,
        ge=1,
        le=1 << 20,
        description="JSON values in a schema, the inner ones counted too.",
    )
    max_constraint_choices: int = Field(
        _LIMITS.max_constraint_choices, ge=1, le=100_000, description="Texts of a choice."
    )
    open_objects: bool = Field(
        False,
        description="Objects of a JSON schema that list `properties`, and say nothing of others, may have "
        "any others, as the specification has it. Without: they have none.",
    )

    render_timeout_s: float = Field(30.0, gt=0, description="Seconds for a tokenizer to render a prompt.")
    request_timeout_s: float = Field(
        3600.0, gt=0, description="Seconds from a request's arrival to its answer's end."
    )
    stalled_client_s: float = Field(
        30.0, gt=0, description="Seconds that a client may leave its answer unread before it is dropped."
    )
    stream_buffer_tokens: int = Field(
        32768, ge=16, description="Tokens that a stream may be behind before it is aborted."
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Seconds for the router to answer a new session.")
    router_silence_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds without a word from the router after which it is lost; at least three of its "
        "heartbeats.",
    )
    tokenizer_silence_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds without an answer of any tokenizer after which the gateway is not ready.",
    )
    max_outbound: int = Field(4096, ge=1, description="Submits that may wait to be sent to the router.")
    drain_notice_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="Seconds at shutdown in which new requests are still served, while /ready says draining "
        "and each answer ends its connection, so that clients and load balancers go elsewhere in time.",
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds that streams then get to end at shutdown."
    )

    @property
    def aliases(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.model_alias)

    @field_validator("model_alias")
    @classmethod
    def _aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        pairs = [text.partition("=") for text in value]
        if not all(alias and model for alias, _, model in pairs):
            raise ValueError("model-alias is ALIAS=MODEL")
        if len({alias for alias, _, _ in pairs}) < len(pairs):
            raise ValueError("model-alias has an alias twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl-certfile and ssl-keyfile go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("ssl-ca-certs needs ssl-certfile and ssl-keyfile")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key go together")
        if not self.min_priority <= self.batch_priority <= self.max_priority:
            raise ValueError("batch-priority must lie between min-priority and max-priority")
        if not self.tokenizer:
            raise ValueError("tokenizer needs at least one address")
        if not self.router:
            raise ValueError("router needs at least one address")
        return self
