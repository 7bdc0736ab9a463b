"""An engine's part in disaggregated serving: what it offers, or what it fetches, as the loop drives it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from catenary.directories import expanded
from catenary.transfer import (
    BUILTIN,
    Connector,
    TlsPaths,
    TransferFault,
    TransferSettings,
    load_connector,
)
from services.engine.core.arrivals import Arrivals, Waiting
from services.engine.core.errors import StartError
from services.engine.core.offers import OfferBook, OfferTerms
from services.engine.core.sizing import Sizing
from services.engine.domain import CoreErrorCode, SamplingOptions
from services.engine.link import OfferedKv, SubmitSequence, TransferLoad
from services.engine.model import weights_fingerprint
from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions
from services.engine.runner import BlockCopies
from services.engine.scheduler import Scheduler, Sequence, SequenceRefused, sequence_from

# Of the digest below: raised when the order of the numbers in a block changes.
_LAYOUT_VERSION = 2
_STRETCHED = ("dynamic", "longrope")


class Handover:
    """Either part, or none. `close` ends the connectors."""

    def __init__(
        self,
        scheduler: Scheduler,
        offers: OfferBook | None = None,
        arrivals: Arrivals | None = None,
        connectors: tuple[Connector, ...] = (),
    ) -> None:
        self._scheduler = scheduler
        self._offers = offers
        self._arrivals = arrivals
        self._connectors = connectors

    def __len__(self) -> int:
        """Sequences that wait for KV."""
        return 0 if self._arrivals is None else len(self._arrivals)

    def attach(self, wake: Callable[[], None]) -> None:
        """Tells what wakes the loop, from any thread."""
        for part in (self._offers, self._arrivals):
            if part is not None:
                part.attach(wake)

    @property
    def patience(self) -> float | None:
        """Seconds until something is to be done; None: until a thread wakes the loop."""
        limits = [part.patience() for part in (self._offers, self._arrivals) if part is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    def begin(self, sequence: Sequence, message: SubmitSequence) -> bool:
        """True if the sequence waits for KV, or for one that does; `turn` gives it back."""
        return self._arrivals is not None and self._arrivals.begin(sequence, message)

    def turn(self) -> tuple[list[Waiting], bool]:
        """What is due. Returns those that go on, and whether blocks came free."""
        freed = self._offers is not None and self._offers.turn()
        if self._arrivals is None:
            return [], freed
        self._arrivals.turn()
        return self._arrivals.ready(), freed

    def abort(self, key: int) -> Sequence | None:
        """Takes out one that waits, and returns it; or withdraws what a sequence that ended offers."""
        if self._offers is not None:
            self._offers.withdraw(key)
        return None if self._arrivals is None else self._arrivals.abort(key)

    def offer(self, sequence: Sequence) -> OfferedKv | None:
        """The offer of what was computed for another engine; None if it was given up already."""
        return None if self._offers is None else self._offers.offer(sequence)

    def forget(self, key: int) -> None:
        """Told of a sequence that ended before the scheduler had it: KV that came for it is freed."""
        if self._arrivals is not None:
            self._scheduler.kept.release(key)

    def load(self) -> TransferLoad:
        """For reports."""
        load = TransferLoad()
        if (book := self._offers) is not None:
            load = TransferLoad(
                made=book.made,
                fetched=book.fetched_count,
                expired=book.expired,
                evicted=book.evicted,
                withdrawn=book.withdrawn,
                offers=len(book),
                blocks=book.blocks,
                bytes_sent=book.bytes_sent,
            )
        if (arrivals := self._arrivals) is not None:
            faults, lost = dict(arrivals.faults), self._scheduler.forfeited
            if lost:
                no_blocks = TransferFault.NO_BLOCKS.value
                faults[no_blocks] = faults.get(no_blocks, 0) + lost
            load = replace(
                load,
                arrived=self._scheduler.provided,
                fetching=arrivals.fetching,
                bytes_received=arrivals.bytes_received,
                faults=faults,
            )
        return load

    def close(self) -> None:
        """Ends all threads, or lets them end soon."""
        if self._arrivals is not None:
            self._arrivals.close()
        for connector in self._connectors:
            connector.close()


def prompt_alone(message: SubmitSequence) -> Sequence:
    """The sequence that computes a prompt for another engine: all of it but the last token.

    It samples one token, which nobody sees: the scheduler ends a sequence with one, and whether the logits
    are numbers tells whether the KV is. Raises SequenceRefused for what cannot be handed over.
    """
    if not 2 <= message.prompt_len == len(message.token_ids) or message.beams is not None:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT,
            "prefill_only takes a prompt of at least 2 tokens, without emitted ones and beams",
        )
    sequence = sequence_from(
        replace(
            message,
            token_ids=message.token_ids[:-1],
            prompt_len=message.prompt_len - 1,
            sampling=SamplingOptions(temperature=0.0),
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=[],
            constraint=None,
        ),
        (),
    )
    sequence.hands_over = True
    return sequence


def open_handover(
    options: EngineOptions,
    sizing: Sizing,
    model: PagedModel,
    directory: Path,
    config: Mapping[str, Any],
    scheduler: Scheduler,
    copies: BlockCopies,
) -> Handover:
    """The part that the role asks for. Raises StartError if a connector cannot be had."""
    if options.role == "both":
        return Handover(scheduler)
    settings = TransferSettings(
        listen=options.kv_transfer_listen,
        advertise=options.kv_transfer_advertise,
        directory=_directory(options),
        timeout_s=options.kv_transfer_timeout_s,
        max_transfers=options.max_kv_transfers,
        tls=_tls(options),
    )
    layout = layout_of(options, sizing.block_size, model, directory, config)
    own = load_connector(options.kv_connector, BUILTIN)(settings)
    if options.role == "decode":
        connectors = {name: kind(settings) for name, kind in BUILTIN.items()} | {own.name: own}
        arrivals = Arrivals(
            scheduler,
            copies,
            connectors,
            layout=layout,
            block_size=sizing.block_size,
            timeout_s=options.kv_transfer_timeout_s,
            max_transfers=options.max_kv_transfers,
        )
        return Handover(scheduler, arrivals=arrivals, connectors=tuple(connectors.values()))
    offers = OfferBook(scheduler.kept, copies, block_size=sizing.block_size)
    try:
        address = own.serve(offers)
    except OSError as error:
        raise StartError(f"kv-connector {own.name} cannot listen: {error.strerror or error}") from None
    most = max(1, int(options.kv_offer_share * sizing.kv.num_blocks))
    offers.terms = OfferTerms(own.name, address, layout, options.kv_offer_ttl_s, most)
    return Handover(scheduler, offers, connectors=(own,))


def layout_of(
    options: EngineOptions, block_size: int, model: PagedModel, directory: Path, config: Mapping[str, Any]
) -> bytes:
    """What two engines must have alike so that one's blocks mean the same in the other, as 16 bytes.

    The same model with other weights, a fine-tune say, is another one.
    """
    rotary = json.dumps(config.get("rope_scaling") or config.get("rope_parameters"), default=str)
    # Positions are turned by an angle that depends on the longest sequence.
    stretched = options.max_model_len if any(kind in rotary for kind in _STRETCHED) else None
    facts = (
        _LAYOUT_VERSION,
        block_size,
        str(model.dtype),
        model.backend,
        weights_fingerprint(directory),
        [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in model.layers],
        json.dumps(config, sort_keys=True, default=str),
        stretched,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16, person=b"catenary layout").digest()


def _tls(options: EngineOptions) -> TlsPaths | None:
    if options.tls_cert is None or options.tls_key is None or options.tls_ca is None:
        return None
    return TlsPaths(str(options.tls_cert), str(options.tls_key), str(options.tls_ca))


def _directory(options: EngineOptions) -> Path:
    # One for this user alone: others may write to the temporary directory, and to many a shared volume.
    if options.kv_transfer_directory:
        return expanded(options.kv_transfer_directory) / f"kv-{os.geteuid()}"
    return Path(tempfile.gettempdir()) / f"catenary-kv-{os.geteuid()}"
