"""Messages between servicer and core: one tagged msgpack array each.

Both processes are started from the same files, so the format needs no versions. Token ids, counts and keys
are plain ints. A key names a sequence on this link; the servicer chooses it and never uses it twice while the
core lives.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from services.engine.domain import (
    BeamOptions,
    ConstraintOptions,
    CoreErrorCode,
    FinishReason,
    PoolingOptions,
    SamplingOptions,
)


class FollowKv(Struct, frozen=True, array_like=True, tag="follow_kv"):
    """A request to send the contents of the prefix cache, and all changes from then on."""


class KvContents(Struct, frozen=True, array_like=True, tag="kv_contents"):
    """A part of the names of all blocks that can be hit; `first` begins them and `last` completes them.

    They take the place of all that was told before. Nothing else about the cache comes between the parts.
    """

    names: bytes
    first: bool
    last: bool


class KvChanges(Struct, frozen=True, array_like=True, tag="kv"):
    """Net changes since the last message: first all blocks are dropped if `cleared`, then `removed` are
    dropped and `stored` added. No name is in both."""

    cleared: bool
    removed: bytes
    stored: bytes


class OfferedKv(Struct, frozen=True, array_like=True):
    """The contract's KvOffer: KV of a prompt's first `tokens` tokens, in `blocks` blocks, and where it is."""

    connector: str
    address: str
    ticket: bytes
    host_id: str
    blocks: int
    tokens: int
    layout: bytes


class TransferLoad(Struct, frozen=True, array_like=True):
    """KV handed on since the core's start.

    Of a prefill engine: offers made, and what became of them: `fetched`, `expired`, `evicted` (others needed
    the blocks, or there were too many), `withdrawn` (aborted, or their router left); `offers` and `blocks`
    are held now. Of a decode engine: prompts that `arrived`, and by cause those that did not; `fetching` now.
    """

    made: int = 0
    fetched: int = 0
    expired: int = 0
    evicted: int = 0
    withdrawn: int = 0
    offers: int = 0
    blocks: int = 0
    bytes_sent: int = 0
    arrived: int = 0
    fetching: int = 0
    bytes_received: int = 0
    faults: dict[str, int] = {}


class StartCore(Struct, frozen=True, array_like=True, tag="start"):
    """First frame: the JSON of the engine's configuration."""

    config_json: bytes


class SubmitSequence(Struct, frozen=True, array_like=True, tag="submit"):
    """A sequence whose options are all resolved.

    `token_ids` is the prompt (`prompt_len` ids), then what an earlier life of the sequence emitted.
    `max_tokens` and `min_tokens` count from `prompt_len`. `stop_token_ids` are the caller's; the core knows
    the model's own. A lower `priority` is more urgent. Sequences share cached KV only with an equal
    `cache_salt`. With `pooling` nothing is generated: the token ids are the whole document. `same_prompt_as`:
    key of another sequence with the same prompt and salt, 0 for none; it may have ended. With `beams` nothing
    is emitted before the end, and of `sampling` penalties, biases and bans alone count. `prefill_only`: the
    KV of the prompt is to be offered, and nothing is emitted. `kv_offer`: another engine offers it.
    """

    key: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingOptions
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    priority: int = 0
    cache_salt: str = ""
    pooling: PoolingOptions | None = None
    same_prompt_as: int = 0
    constraint: ConstraintOptions | None = None
    beams: BeamOptions | None = None
    prefill_only: bool = False
    kv_offer: OfferedKv | None = None


class AbortSequences(Struct, frozen=True, array_like=True, tag="abort"):
    """Ends these sequences, and withdraws what ended ones offer. Other keys are ignored."""

    keys: list[int]


class StartProfile(Struct, frozen=True, array_like=True, tag="profile"):
    """Records the next `steps` steps, or what comes of them in `seconds`; ends with a ProfileEnd of this id.

    Takes the place of a profile that runs. `device_activities`: also what the device's own profiler sees.
    """

    id: int
    steps: int
    seconds: float
    device_activities: bool = False


class CancelProfile(Struct, frozen=True, array_like=True, tag="no_profile"):
    """Gives this profile up. Nothing more comes of it, but what is on its way."""

    id: int


class StopCore(Struct, frozen=True, array_like=True, tag="stop"):
    """The core ends its process after the step it is in."""


class CoreProgress(Struct, frozen=True, array_like=True, tag="progress"):
    """Progress of a start; `fraction` is 0..1 of the whole start, None if it cannot be told."""

    activity: str
    fraction: float | None = None


class ModelFacts(Struct, frozen=True, array_like=True):
    """The loaded model.

    `sampling_defaults`: numbers of generation_config.json, by the names of `catenary.parameters.SAMPLING`.
    `task` is generate, embed, score or classify. Of a model that embeds: the width of its vectors, and the
    smaller ones that may be asked for. `labels`: names of the classes of a model that classifies.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    tokenizer_sha256: str
    sampling_defaults: dict[str, int | float] = {}
    task: str = "generate"
    embedding_width: int = 0
    embedding_dimensions: list[int] = []
    any_dimensions: bool = False
    labels: list[str] = []


class CapacityFacts(Struct, frozen=True, array_like=True):
    """Capacity of the engine. More than max_running + max_waiting live sequences are refused."""

    block_size: int
    total_blocks: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int


class CoreReady(Struct, frozen=True, array_like=True, tag="ready"):
    """The core takes sequences from now on. `publishes_kv`: it has a prefix cache and answers FollowKv.

    `notes`: lines for the operator, as about a slower way that was taken.
    """

    model: ModelFacts
    capacity: CapacityFacts
    publishes_kv: bool = False
    notes: list[str] = []


class PhaseLoad(Struct, frozen=True, array_like=True):
    """Work of a phase's forwards since the core's start: real work, and padding apart. A decode's tokens are
    its rows; blocks are those of the context."""

    tokens: int = 0
    padding_tokens: int = 0
    blocks: int = 0
    padding_blocks: int = 0


class GraphLoad(Struct, frozen=True, array_like=True):
    """State of the static shapes. `first_seen` counts those that serving met and warm-up did not. `warm` of
    `to_warm` shapes are visited by a warm-up that is over, or runs while the engine serves. `device`: counts
    of the device, by name."""

    captured: int = 0
    first_seen: int = 0
    warm: int = 0
    to_warm: int = 0
    prefill: PhaseLoad = PhaseLoad()
    decode: PhaseLoad = PhaseLoad()
    device: dict[str, int] = {}


class ConstraintLoad(Struct, frozen=True, array_like=True):
    """Constraints since the core's start: compiled, found compiled, refused; batches of masks filled.

    Seconds of the threads that compile, and of the loop while it fills masks.
    """

    compiled: int = 0
    reused: int = 0
    refused: int = 0
    masks: int = 0
    compile_seconds: float = 0.0
    mask_seconds: float = 0.0


class CoreLoad(Struct, frozen=True, array_like=True):
    """The core's load after a step. Counted since its start: `steps`, `generated_tokens`, tokens of prompts
    that were started, those of them whose KV was cached, and preemptions."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    pending_prefill_tokens: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    graphs: GraphLoad = GraphLoad()
    constraints: ConstraintLoad = ConstraintLoad()
    transfers: TransferLoad = TransferLoad()


class HypothesisRow(Struct, frozen=True, array_like=True):
    """A finished beam, `reason` STOP or LENGTH. The columns of log probabilities are as those of StepColumns,
    for all its tokens; None if none were asked for."""

    token_ids: list[int]
    score: float
    reason: FinishReason
    stop_token_id: int | None = None
    sampled: list[float] | None = None
    top_counts: list[int] | None = None
    top_ids: list[int] | None = None
    top_logprobs: list[float] | None = None


class EndRow(Struct, frozen=True, array_like=True):
    """The end of row `row` of the same StepColumns. The error fields are set for FinishReason.ERROR alone.

    `vector`: little-endian float32 of a pooled sequence. `hypotheses`: of a beam search, best first.
    `kv_offer`: of one that was `prefill_only`.
    """

    row: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    error_code: CoreErrorCode | None = None
    error_message: str | None = None
    vector: bytes | None = None
    error_param: str | None = None
    hypotheses: list[HypothesisRow] = []
    transferred_tokens: int = 0
    kv_offer: OfferedKv | None = None


class PromptColumns(Struct, frozen=True, array_like=True):
    """Log probabilities of prompt tokens: those of each of `rows` (rising) that follow what it had before.

    A row's first one is that of the prompt's second token. `counts` has one entry per row, `logprobs` and
    `top_counts` one per token.
    """

    rows: list[int] = []
    counts: list[int] = []
    logprobs: list[float] = []
    top_counts: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class StepColumns(Struct, frozen=True, array_like=True):
    """A step's output. Row i is keys[i] with the next token_counts[i] ids of token_ids (0: it only ends,
    or `prompts` has something of it).

    Logprob columns (natural logs) cover all tokens of the rows in `logprob_rows` (rising), in order:
    `sampled` and `top_counts` have one entry per token, `top_ids` and `top_logprobs` as many as top_counts
    says, best first.
    """

    keys: list[int] = []
    token_counts: list[int] = []
    token_ids: list[int] = []
    logprob_rows: list[int] = []
    sampled: list[float] = []
    top_counts: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    ends: list[EndRow] = []
    prompts: PromptColumns | None = None


class CoreStep(Struct, frozen=True, array_like=True, tag="step"):
    """Exactly one per engine step; an abort, a failed admission or warm-up may produce one without, and many
    hypotheses make several."""

    columns: StepColumns
    load: CoreLoad


class ProfilePart(Struct, frozen=True, array_like=True, tag="profile_part"):
    """The next bytes of a profile, which is a JSON document in Chrome's trace event format."""

    id: int
    data: bytes


class ProfileEnd(Struct, frozen=True, array_like=True, tag="profile_end"):
    """The profile is complete, with so many whole steps; `dropped_events` found no room.

    Or it failed, and `error` is one line for the caller.
    """

    id: int
    steps: int = 0
    dropped_events: int = 0
    error: str | None = None


class CoreFailed(Struct, frozen=True, array_like=True, tag="failed"):
    """The core cannot go on and ends its process. `reason` is one line for the operator."""

    reason: str


ToCore: TypeAlias = (
    StartCore | SubmitSequence | AbortSequences | FollowKv | StartProfile | CancelProfile | StopCore
)
FromCore: TypeAlias = (
    CoreProgress | CoreReady | CoreStep | KvContents | KvChanges | ProfilePart | ProfileEnd | CoreFailed
)
Message: TypeAlias = ToCore | FromCore
