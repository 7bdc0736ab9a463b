"""Bucket variables: the strategy, and the settings of each axis."""

from __future__ import annotations

from collections.abc import Mapping

from catenary.config import ConfigError
from services.engine.bucketing import FILE as BUCKET_FILE
from services.engine.bucketing import STRATEGIES, takers, vllm_names
from services.engine.vllm_variables.rows import Row, Status, Variables, equivalent

_TEST = "tests/unit/engine/vllm_variables/test_buckets.py::"
STRATEGY, OLD_SWITCH, FILE = (
    "VLLM_BUCKETING_STRATEGY",
    "VLLM_EXPONENTIAL_BUCKETING",
    "VLLM_BUCKETING_FROM_FILE",
)
STRATEGY_VARIABLES = (STRATEGY, OLD_SWITCH, FILE)
_STRATEGIES = vllm_names()
_SHORT = {long: short for short, long in _STRATEGIES.items()}
# Options by axis, each with the names that its variables may have; the first one set counts.
_AXES = {
    "bucket_prefill_batch": ("PROMPT_BS",),
    "bucket_prefill_query": ("PROMPT_QUERY", "PROMPT_SEQ"),
    "bucket_prefill_context": ("PROMPT_CTX",),
    "bucket_decode_batch": ("DECODE_BS",),
    "bucket_decode_blocks": ("DECODE_BLOCK",),
}
_SETTINGS = ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
_MOST_PERCENT = 50
_PREFILL_ROWS = "VLLM_PROMPT_BS_BUCKET_MAX"


def axis_variable(axis: str, setting: str) -> str:
    """Return the variable of an axis as vLLM names it: PROMPT_BS and MIN make VLLM_PROMPT_BS_BUCKET_MIN."""
    return f"VLLM_{axis}_BUCKET_{setting}"


def _strategy(variables: Variables) -> str:
    """Return the strategy that counts, by its long name; gives the options that choose it."""
    asked = variables.choice(STRATEGY, _STRATEGIES)
    switch = variables.boolean(OLD_SWITCH)
    file = variables.text(FILE)
    chosen, origin = asked or "exponential", STRATEGY
    if switch is not None:
        forced = "exponential" if switch else "linear"
        variables.warn(f"{OLD_SWITCH} is deprecated: use {STRATEGY}")
        if forced != chosen:
            variables.warn(
                f"{OLD_SWITCH}: Overriding bucketing strategy {_SHORT[chosen]} with {_SHORT[forced]}"
            )
        chosen, origin = forced, OLD_SWITCH
    own = {"bucketing_strategy", "bucketing_file"} & variables.own.keys()
    if own:
        given = [name for name in STRATEGY_VARIABLES if variables.text(name)]
        if given:
            variables.warn(f"{', '.join(given)}: the option {min(own)} wins")
        strategy = str(variables.own.get("bucketing_strategy", "file"))
        return _STRATEGIES.get(strategy, strategy)
    if file is not None:
        variables.give("bucketing_strategy", "file", FILE)
        variables.give("bucketing_file", file, FILE)
        return "file"
    if asked is not None or switch is not None:
        variables.give("bucketing_strategy", chosen, origin)
        return chosen
    return _strategy_of_settings(variables) or chosen


def _strategy_of_settings(variables: Variables) -> str | None:
    """Return the strategy that takes what is set, where none is named and the default would not; gives its
    option.

    Recipes for long contexts set ranges for a vLLM whose default is linear.
    """
    idle = [
        (name, setting)
        for option, axes in _AXES.items()
        for setting in _SETTINGS
        for name in (axis_variable(axis, setting) for axis in axes)
        if (text := variables.text(name)) is not None
        and name != _PREFILL_ROWS
        and _refusal("exponential", option, setting, int(text == "1"))
    ]
    if not idle:
        return None
    pads = [name for name, setting in idle if setting.startswith("PAD")]
    name, chosen = (pads[0], "padding") if pads else (idle[0][0], "linear")
    variables.give("bucketing_strategy", chosen, name)
    variables.warn(
        f"{name} chooses the {chosen} strategy, as {STRATEGY}={_SHORT[chosen]} does; {STRATEGY}=exp leaves "
        "the buckets to the exponential one"
    )
    return chosen


def _settings(variables: Variables, axes: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """Return the settings of one option's variables: the variable's name and its value.

    Raises ConfigError.
    """
    found: dict[str, tuple[str, int]] = {}
    for setting in _SETTINGS:
        for name in (axis_variable(axis, setting) for axis in axes):
            most = _MOST_PERCENT if setting == "PAD_PERCENT" else 2**31 - 1
            # Only context may be none at all, and a padding cap of 0 is the axis' maximum.
            least = 0 if (axes == ("PROMPT_CTX",) and setting != "STEP") or setting.startswith("PAD") else 1
            value = variables.integer(name, least=least, most=most)
            if value is None:
                continue
            if setting in found:
                variables.warn(f"{name} has no effect: {found[setting][0]} is set too and wins")
            else:
                found[setting] = name, value
    if "MIN" in found and "MAX" in found and found["MIN"][1] > found["MAX"][1]:
        (low, least), (high, most) = found["MIN"], found["MAX"]
        raise ConfigError(f"{low} {least}: must not exceed {high} {most}")
    return found


def _refusal(strategy: str, option: str, setting: str, value: int) -> str:
    """Return why a strategy does not take a setting, "" if it does."""
    if strategy == BUCKET_FILE:
        return f"the strategy {strategy} has its buckets from elsewhere"
    axis, name = option.removeprefix("bucket_"), setting.lower()
    if STRATEGIES[strategy].takes(axis, name, value):
        return ""
    others = [_SHORT[other] for other in takers(axis, name) if other in _SHORT]
    if len(others) == 1:
        return f"only {STRATEGY}={others[0]} takes it"
    return f"the {strategy} strategy spaces its buckets by itself; {STRATEGY}={' or '.join(others)} takes it"


def translate_buckets(variables: Variables) -> None:
    """Give the bucketing options. Raises ConfigError for values out of range."""
    strategy = _strategy(variables)
    if variables.boolean("VLLM_ENABLE_BUCKETING") is False:
        # As in vLLM there is no warm-up without buckets.
        variables.give("warmup", "skip", "VLLM_ENABLE_BUCKETING")
        variables.warn(
            "VLLM_ENABLE_BUCKETING=false skips the warm-up; forwards are padded to buckets even so"
        )
    for option, axes in _AXES.items():
        found = _settings(variables, axes)
        if axes == ("PROMPT_BS",) and "MAX" in found:
            # It bounds the rows of a prefill themselves, whatever the strategy, and the axis ends there.
            name, value = found.pop("MAX")
            variables.give("max_prefill_batch", value, name)
        kept: dict[str, str] = {}
        for setting, (name, value) in found.items():
            reason = _refusal(strategy, option, setting, value)
            if reason:
                variables.warn(f"{name} has no effect: {reason}")
            else:
                kept[name] = f"{setting.lower()}={value}"
        if kept:
            variables.give(option, ",".join(kept.values()), ", ".join(kept))


def _axis_rows() -> list[Row]:
    notes: Mapping[str, tuple[str, str]] = {
        "PROMPT_BS": ("bucket-prefill-batch", "rows of prefill"),
        "PROMPT_QUERY": ("bucket-prefill-query", "tokens of a prefill row"),
        "PROMPT_SEQ": (
            "bucket-prefill-query",
            "an older name of VLLM_PROMPT_QUERY_BUCKET_*, read where that is not set",
        ),
        "PROMPT_CTX": ("bucket-prefill-context", "computed blocks before a prefill row"),
        "DECODE_BS": ("bucket-decode-batch", "rows of decode"),
        "DECODE_BLOCK": ("bucket-decode-blocks", "KV blocks of a decode batch"),
    }
    rows = []
    for axis, (option, meaning) in notes.items():
        ranges = tuple(axis_variable(axis, setting) for setting in _SETTINGS[:3])
        pads = tuple(axis_variable(axis, setting) for setting in _SETTINGS[3:])
        if axis == "PROMPT_BS":
            ranges = ranges[:2]
        rows.append(
            Row(
                ranges,
                Status.SUPPORTED,
                f"`--{option}`: {meaning}. Chooses strategy `lin` where none is named. `pad` takes it too; "
                "`exp`, if named, spaces its buckets by itself and takes only "
                "`VLLM_PROMPT_QUERY_BUCKET_MIN=1`",
                translate_buckets,
                f"{_TEST}test_axis_variables_move_the_buckets_of_linear",
            )
        )
        rows.append(
            Row(
                pads,
                Status.SUPPORTED,
                f"`--{option}`, `pad_max` and `pad_percent` (0 to 50). Chooses strategy `pad` where none is "
                "named",
                translate_buckets,
                f"{_TEST}test_axis_variables_bound_the_padding",
            )
        )
    return rows


ROWS = (
    Row(
        (STRATEGY,),
        Status.SUPPORTED,
        "`--bucketing-strategy`: `exp`, `lin` or `pad`",
        translate_buckets,
        f"{_TEST}test_strategy_chooses_the_buckets",
    ),
    Row(
        (OLD_SWITCH,),
        Status.SUPPORTED,
        f"`--bucketing-strategy` `exp` or `lin`, over `{STRATEGY}`; deprecated, with vLLM's message",
        translate_buckets,
        f"{_TEST}test_old_switch_overrides_the_strategy_and_says_so",
    ),
    Row(
        (FILE,),
        Status.SUPPORTED,
        "`--bucketing-strategy file --bucketing-file`; the same format",
        translate_buckets,
        f"{_TEST}test_bucket_file_is_read",
    ),
    Row(
        (_PREFILL_ROWS,),
        Status.SUPPORTED,
        "`--max-prefill-batch`: rows of a prefill, whatever the strategy",
        translate_buckets,
        f"{_TEST}test_largest_prefill_batch_bounds_the_scheduler",
    ),
    *_axis_rows(),
    Row(
        ("VLLM_ENABLE_BUCKETING",),
        Status.SUPPORTED,
        "false: `--warmup skip`, and a line says that forwards are padded to buckets even so. true is what "
        "always happens",
        translate_buckets,
        f"{_TEST}test_without_buckets_there_is_no_warm_up",
    ),
    equivalent(
        "both phases have the strategy of `VLLM_BUCKETING_STRATEGY`",
        "VLLM_PROMPT_BUCKETING_STRATEGY",
        "VLLM_DECODE_BUCKETING_STRATEGY",
    ),
    equivalent(
        "the padding limit of one vLLM branch. `VLLM_BUCKETING_STRATEGY=pad` with `*_BUCKET_PAD_PERCENT` "
        "bounds padding",
        "VLLM_PROMPT_*_BUCKET_LIMIT",
        "VLLM_DECODE_*_BUCKET_LIMIT",
    ),
)
