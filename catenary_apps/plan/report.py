"""Print a plan as a table and as JSON, and draw a card's memory."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from catenary.config import flag_name
from catenary.gaudi import supported
from catenary_apps.cli.output import counted
from catenary_apps.plan.advice import Recommendation, find_traps, gib, recommend, unserved
from catenary_apps.plan.dividing import GIB, Choice
from catenary_apps.plan.planning import Planned
from services.engine.bucketing import Bucket
from services.engine.memory import active_parameters, count_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20


def as_json(found: Planned) -> str:
    """Return one JSON object, a line for each key; docs/gaudi.md has its schema."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in document(found).items())
    return "{\n" + ",\n".join(lines) + "\n}"


def document(found: Planned) -> dict[str, Any]:
    """Return the document that `as_json` prints."""
    memory, config, limits = found.memory, found.config, found.limits
    settings = recommend(found)
    return {
        "model": found.shape.name,
        "device": found.card.name,
        "software": None if config.device == "custom" else supported(),
        "tensor_parallel_size": config.tensor_parallel_size,
        "weight_dtype": found.scheme.value,
        "not_served": unserved(found),
        "measured": list(found.measured),
        "variables": dict(found.origins),
        "device_memory_gib": gib(memory.total),
        "weights_gib": gib(memory.weights),
        "profile_gib": gib(memory.activations),
        "free_gib": gib(memory.available),
        "usable_gib": gib(memory.usable),
        "graph_gib": gib(memory.graphs),
        "kv_gib": gib(memory.kv),
        "margin_gib": gib(memory.available - memory.usable),
        "padding_block_gib": gib(found.block_bytes),
        "kv_blocks": found.kv.num_blocks,
        "block_size": limits.block_size,
        "block_mib": round(found.block_bytes / _MIB, 4),
        "kv_tokens": found.kv.num_blocks * limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "expected_len": found.ordinary,
        "graph_reserved_mem": found.draft.reserve,
        "largest_max_model_len": found.longest,
        "largest_max_num_seqs": found.most_seqs,
        "prompt_buckets": _triples(found.plan.prefill),
        "decode_buckets": _triples(found.plan.decode),
        "axes": {name: list(values) for name, values in found.plan.axes.items()},
        "graphs": _graphs(found),
        "warmup": {
            "cold_least_s": round(found.graphs.cold_s.low, 1),
            "cold_most_s": round(found.graphs.cold_s.high, 1),
            "cached_least_s": round(found.graphs.cached_s.low, 1),
            "cached_most_s": round(found.graphs.cached_s.high, 1),
        },
        "decode_tokens_per_second_bound": decode_bound(found),
        "prefill_tokens_per_second_bound": prefill_bound(found),
        "choices": [_choice(choice) for choice in found.choices],
        "recommended": {
            "engine": None if unserved(found) else dict(settings.engine),
            "vllm": dict(settings.vllm),
            "variables": dict(settings.variables),
        },
        "vllm_autocalc": None
        if found.rules is None
        else {name: getattr(found.rules, name) for name in found.rules.__slots__},
        "warnings": [{"name": trap.name, "text": trap.text} for trap in find_traps(found)],
    }


def decode_bound(found: Planned) -> float | None:
    """Return tokens a second of one sequence, if the memory's speed alone counts."""
    if not found.card.bytes_per_second:
        return None
    return round(found.card.bytes_per_second / found.active_weight_bytes, 1)


def prefill_bound(found: Planned) -> float | None:
    """Return prompt tokens a second by the matrix units alone: two operations for each parameter."""
    if not found.card.flops_per_second:
        return None
    # The head computes the last token of a prompt alone.
    layers = active_parameters(found.shape) - found.shape.vocab * found.shape.hidden
    each = 2 * layers / found.config.tensor_parallel_size
    return round(found.card.flops_per_second / each)


def _graphs(found: Planned) -> dict[str, int | float]:
    graphs, reserve, ratio = found.graphs, found.memory.graphs, found.config.graph_prompt_ratio
    return {
        "prompt": graphs.prefill,
        "decode": graphs.decode,
        "eager_prompts": graphs.eager_prefills,
        "least_gib": gib(graphs.bytes.low),
        "most_gib": gib(graphs.bytes.high),
        "kept_gib": gib(graphs.kept_bytes),
        "prompt_gib": gib(reserve * ratio),
        "decode_gib": gib(reserve * (1 - ratio)),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "tensor_parallel_size": choice.cards,
        "weight_dtype": choice.scheme.value,
        "weights_gib": gib(choice.weights),
        "kv_blocks": choice.kv_blocks,
        "max_model_len": choice.max_model_len,
        "max_num_seqs": choice.max_num_seqs,
    }


def _triples(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    return [[bucket.batch, bucket.query, bucket.context_blocks] for bucket in buckets]


# Wider than any line.
_NO_WRAP: Final = 100_000


# The options that say what is planned.
_SUBJECT: Final = ("model", "device", "tensor_parallel_size")


def as_table(found: Planned, *, width: int | None) -> str:
    """Return tables and lines for people, broken at `width` columns; None breaks none."""
    # Not at the top: --json and --help need no tables.
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width or _NO_WRAP, highlight=False)

    def say(line: str, *, whole: bool = False) -> None:
        console.print(line, markup=False, soft_wrap=whole or width is None)

    settings, missing = recommend(found), unserved(found)
    say(_headline(found))
    if missing:
        say(f"Catenary cannot serve this yet ({', '.join(missing)}): figures and lines for vLLM only.")
    if taken := _defaults(found):
        say(f"By default: {taken}.")
    for option, variable in found.origins.items():
        say(f"{flag_name(option)} {getattr(found.config, option)}: from {variable}")
    for table in _tables(found):
        console.print(table)
    for line in _estimates(found):
        say(line)
    if not missing:
        say("\nSettings for Catenary:")
        say(command(settings), whole=True)
        if found.config.device != "custom":
            say(f"Needs {supported()}.", whole=True)
    say("\nThe same for vLLM:")
    say(vllm_lines(found.config.model, settings), whole=True)
    for trap in find_traps(found):
        if trap.name != "not-served":
            say(f"\nwarning ({trap.name}): {trap.text}")
    # Rich pads the cells of tables to the end of their columns.
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()


def _defaults(found: Planned) -> str:
    """Return the options that say what is planned, and that were not given, with the values that stand for
    them."""
    given = found.config.model_fields_set
    return ", ".join(
        f"{flag_name(name)} {getattr(found.config, name)}" for name in _SUBJECT if name not in given
    )


def _headline(found: Planned) -> str:
    limits, cards = found.limits, found.config.tensor_parallel_size
    weights = count_weights(found.shape, cards)
    return (
        f"{found.shape.name} on {cards} x {found.card.name}: {weights.total / 1e9:.2f} billion parameters a "
        f"card in {found.scheme.value}; {counted(limits.max_num_seqs, 'sequence')} of up to "
        f"{limits.max_model_len} tokens, {limits.max_num_batched_tokens} tokens a step"
    )


def _tables(found: Planned) -> Iterator[Any]:
    yield _memory_table(found)
    yield _bucket_table(found)
    if found.choices:
        yield _choice_table(found)


def command(settings: Recommendation) -> str:
    """Return the engine's command line."""
    return "python -m services.engine " + " ".join(
        f"--{name} {_word(value)}" for name, value in settings.engine.items()
    )


def vllm_lines(model: str, settings: Recommendation) -> str:
    """Return the variables, and the command line of `vllm serve`."""
    exports = "\n".join(f"export {name}={_word(value)}" for name, value in settings.variables.items())
    options = " ".join(f"--{name} {_word(value)}" for name, value in settings.vllm.items())
    return f"{exports}\nvllm serve {_word(model)} {options}"


def _word(value: str) -> str:
    """Return a value as a shell reads it; a home directory at its beginning stays one."""
    home, rest = ("~/", value[2:]) if value.startswith("~/") else ("", value)
    return home + shlex.quote(rest)


def _memory_table(found: Planned) -> Any:
    from rich.table import Table

    memory, config = found.memory, found.config
    table = Table(title="memory of one card", title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("from")

    def origin(name: str, otherwise: str) -> str:
        return "given" if name in found.measured else otherwise

    rows = [
        ("card", memory.total, origin("device_memory_gib", "what its runtime reports")),
        ("weights", memory.weights, origin("weights_gib", "the config, and 0.6 % as loaded")),
        (
            "largest prefill",
            memory.activations,
            origin("profile_gib", "estimated: MLP and head of a profile run"),
        ),
        ("free", memory.available, origin("free_gib", "the card without both")),
        ("usable", memory.usable, f"gpu-memory-utilization {config.gpu_memory_utilization:g}"),
        ("graphs", memory.graphs, origin("graph_gib", f"graph-reserved-mem {found.draft.reserve:g}")),
        (
            "KV",
            memory.kv,
            f"{found.kv.num_blocks} blocks of {found.limits.block_size} tokens, "
            f"{found.block_bytes / _MIB:g} MiB each",
        ),
        ("left free", memory.available - memory.usable, "padding block, context of long prefills, safety"),
    ]
    for name, size, note in rows:
        if size or name not in ("weights", "largest prefill"):
            table.add_row(name, f"{size / GIB:.2f}", note)
    return table


def _bucket_table(found: Planned) -> Any:
    from rich.table import Table

    table = Table(title=f"buckets, strategy {found.config.bucketing_strategy}", title_justify="left")
    for name in ("phase", "shapes", "rows", "tokens of a row", "blocks"):
        table.add_column(name, justify="right" if name == "shapes" else "left")
    for phase, buckets in (("prefill", found.plan.prefill), ("decode", found.plan.decode)):
        columns = zip(*((b.batch, b.query, b.context_blocks) for b in buckets), strict=True)
        table.add_row(phase, str(len(buckets)), *(_listed(sorted(set(values))) for values in columns))
    return table


def _choice_table(found: Planned) -> Any:
    from rich.table import Table

    table = Table(title="what would fit otherwise", title_justify="left")
    for name in ("cards", "weights", "GiB a card", "KV blocks", "longest sequence", "of that length at once"):
        table.add_column(name, justify="left" if name == "weights" else "right")
    for choice in found.choices:
        cells = (choice.kv_blocks, choice.max_model_len, choice.max_num_seqs)
        fits = (f"{choice.weights / GIB:.2f}", *map(str, cells)) if choice.kv_blocks else ("does not fit",)
        table.add_row(str(choice.cards), choice.scheme.value, *fits)
    return table


def _estimates(found: Planned) -> list[str]:
    graphs, limits = found.graphs, found.limits
    lines = [
        f"the KV holds {found.kv.num_blocks * limits.block_size} tokens: "
        f"{counted(found.most_seqs, 'sequence')} of {limits.max_model_len}, or one of up to {found.longest} "
        "(largest max-model-len)"
    ]
    if found.ordinary is not None:
        lines.append(
            f"max-num-seqs {limits.max_num_seqs}: as many sequences of {found.ordinary} tokens, prompt and "
            "completion (--expected-len), as fit together, down to a size of bucket and at most 256"
        )
    shapes = len(found.plan.prefill) + len(found.plan.decode)
    cold = graphs.cold_s
    lines += [
        f"graphs: {graphs.prefill} prefill and {graphs.decode} decode, {graphs.bytes.low / GIB:.2f} to "
        f"{graphs.bytes.high / GIB:.2f} GiB",
        f"warm-up of {counted(shapes, 'shape')}: {_time(cold.low)} at {cold.low / shapes:.2g} s a shape (the "
        f"published pace of an 8B model, for this number of layers) to {_time(cold.high)} at "
        f"{cold.high / shapes:.2g} s (that of a 405B model on 8 cards). The compiler's release decides: the "
        "first shapes in a start's log show it; "
        f"{_time(graphs.cached_s.low)} to {_time(graphs.cached_s.high)} with a recipe cache",
    ]
    decode, prefill = decode_bound(found), prefill_bound(found)
    if decode is not None and prefill is not None:
        lines.append(
            f"bounds: one sequence decodes at most {decode:g} tokens a second (a card reads its weights for "
            f"each), prompts are computed at {prefill} tokens a second at the most"
        )
    if (rules := found.rules) is not None:
        lines.append(
            f"vLLM's container would choose max-num-seqs {rules.max_num_seqs}, gpu-memory-utilization "
            f"{rules.gpu_memory_utilization:g}, VLLM_GRAPH_RESERVED_MEM {rules.graph_reserved_mem:g}, "
            f"VLLM_DECODE_BLOCK_BUCKET_MAX {rules.decode_block_max}"
        )
    return lines


def _listed(values: list[int]) -> str:
    if len(values) > 12:
        return f"{values[0]}, {values[1]} .. {values[-1]} ({len(values)} values)"
    return ", ".join(map(str, values))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


_SIZE = (9.0, 2.4)
_PARTS: Final = (
    ("weights", "#465aa0"),
    ("largest prefill", "#c8783c"),
    ("graphs", "#dcb43c"),
    ("KV", "#46965a"),
    ("padding block", "#963c3c"),
    ("left free", "#e1e1e1"),
)


def draw(found: Planned) -> Figure:
    """Return a bar of one card's memory in GiB, with the part of each of its uses."""
    from matplotlib.figure import Figure

    memory = found.memory
    pool = found.kv.num_blocks * found.block_bytes
    taken = memory.weights + memory.activations + memory.graphs + pool + found.block_bytes
    sizes = (
        memory.weights,
        memory.activations,
        memory.graphs,
        pool,
        found.block_bytes,
        max(0, memory.total - taken),
    )
    figure = Figure(figsize=_SIZE, layout="constrained")
    axis = figure.subplots()
    axis.set_title(
        f"{found.shape.name} on {found.config.tensor_parallel_size} x {found.card.name}: "
        f"{memory.total / GIB:.2f} GiB, {found.kv.num_blocks} blocks of {found.limits.block_size} tokens",
        parse_math=False,
    )
    left = 0.0
    for (name, colour), size in zip(_PARTS, sizes, strict=True):
        axis.barh(0, size / GIB, left=left, color=colour, label=f"{name} {size / GIB:.2f} GiB")
        left += size / GIB
    axis.set_xlim(0, left)
    axis.set_xlabel("GiB of one card")
    axis.set_yticks([])
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
