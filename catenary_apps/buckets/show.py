"""A comparison as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from catenary_apps.buckets.compare import Comparison, Verdict

_GIB = 2**30
_SHOWN_OMITTED = 5


def as_json(comparison: Comparison) -> str:
    """One JSON object; times in seconds, padding as shares, memory in bytes."""
    limits = comparison.limits
    document: dict[str, Any] = {
        "model": comparison.sizes.name,
        "limits": asdict(limits),
        "kv_bytes": limits.num_blocks * limits.block_size * comparison.sizes.kv_bytes_per_token,
        "workload": comparison.source,
        "sequences": comparison.sequences,
        "step_times": comparison.step_times,
        "strategies": {name: _entry(verdict) for name, verdict in comparison.verdicts.items()},
    }
    return json.dumps(document, indent=2)


def _entry(verdict: Verdict) -> dict[str, Any]:
    found = verdict.assessment
    return {
        "graphs": found.graphs,
        "decode_padding": found.decode_padding,
        "query_padding": found.query_padding,
        "step_time": found.step_time,
        "prefill_graphs": found.prefill_graphs,
        "decode_graphs": found.decode_graphs,
        "decode_row_padding": found.decode_row_padding,
        "decode_block_padding": found.decode_block_padding,
        "graph_bytes": verdict.graph_bytes,
        "covered": verdict.covered,
        "notes": list(verdict.plan.notes),
        "omitted": [[b.batch, b.query, b.context_blocks] for b in verdict.plan.omitted],
    }


def as_table(comparison: Comparison) -> str:
    """Lines for people."""
    limits = comparison.limits
    lines = [
        f"{comparison.sizes.name}: up to {limits.max_model_len} tokens, {limits.max_num_seqs} sequences, "
        f"{limits.max_num_batched_tokens} tokens a step, {limits.max_prefill_seqs} prompts together",
        f"KV: {limits.num_blocks} blocks of {limits.block_size} tokens"
        + (", fetched contiguously" if limits.contiguous else ""),
        f"workload: {comparison.sequences} sequences, {comparison.source}",
        f"step times: {comparison.step_times}",
        "",
        f"{'strategy':<12}{'prefill':>8}{'decode':>8}{'graphs':>8}{'memory':>11}  {'covered':<9}"
        f"{'rows':>8}{'blocks':>8}{'query':>8}{'step':>11}",
    ]
    for name, verdict in comparison.verdicts.items():
        found = verdict.assessment
        lines.append(
            f"{name:<12}{found.prefill_graphs:>8}{found.decode_graphs:>8}{found.graphs:>8}"
            f"{verdict.graph_bytes / _GIB:>7.2f} GiB  {'all' if verdict.covered else 'not all':<9}"
            f"{found.decode_row_padding:>8.1%}{found.decode_block_padding:>8.1%}{found.query_padding:>8.1%}"
            f"{found.step_time * 1e3:>8.3f} ms"
        )
    lines += ["", "rows, blocks: padding of decode; query: padding of prefill tokens, empty rows included"]
    for name, verdict in comparison.verdicts.items():
        omitted = verdict.plan.omitted
        if omitted:
            shown = ", ".join(str((b.batch, b.query, b.context_blocks)) for b in omitted[:_SHOWN_OMITTED])
            more = f" and {len(omitted) - _SHOWN_OMITTED} more" if len(omitted) > _SHOWN_OMITTED else ""
            lines.append(f"{name}: beyond the limits and left out: {shown}{more}")
        lines += [f"{name}: {note}" for note in verdict.plan.notes]
    return "\n".join(lines)
