"""The letters of vLLM's start scripts for Gaudi: start_gaudi_vllm_server.sh, and DeepSeek-R1's (--r1)."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from catenary.config import ConfigError
from catenary.gaudi import named_for_float32_scores
from catenary_apps.migration.launch import ENGINE, UP, Launch
from catenary_apps.migration.serve import parse_serve
from services.engine.vllm_variables import Row, Status

_TEST = "tests/unit/catenary_apps/migration/test_letters.py::"
_SETS = "test_letters_set_variables"
_BLOCK = 128
_LEAST_TOKENS = 2048
# Most prompts that an engine computes together; the default lengths of releases that have -i and -o.
_MOST_PROMPTS = 256
_PROMPTS, _COMPLETIONS = "4,1024", "4,2048"
# Lengths up to which the DeepSeek-R1 script leaves 0.85 of the memory to vLLM, and the shares.
_R1_SHORT, _R1_SHARE, _R1_LONG_SHARE = 16384, "0.85", "0.7"
_FP8 = "FP8 is not done yet: leave it out to compute in bfloat16"
_CARDS = "an engine on several cards is not done yet"


@dataclass(frozen=True, slots=True)
class Letters:
    """A script's letters with what was given or the script's own defaults. `given` are those that were."""

    values: Mapping[str, str]
    given: frozenset[str]
    r1: bool

    def __getitem__(self, letter: str) -> str:
        return self.values[letter]


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter of a script. `default` None: it must be given, or it is a switch that is off."""

    letter: str
    row: Row
    default: str | None = None
    switch: bool = False


def _letter(
    letter: str,
    note: str,
    default: str | None = None,
    *,
    test: str = _SETS,
    status: Status = Status.SUPPORTED,
    switch: bool = False,
) -> Letter:
    """Return a letter; `test` shows what a supported one does."""
    shown = f"{_TEST}{test}" if status is Status.SUPPORTED else ""
    return Letter(letter, Row((f"-{letter}",), status, note, test=shown), default, switch)


_NO: Final = Status.REFUSED

SCRIPT: Final[tuple[Letter, ...]] = (
    _letter("w", "`--model`"),
    _letter("t", f"cards of an engine: {_CARDS}; `1` is what happens anyway", "1", status=_NO),
    _letter("m", "module id of the card: HLS_MODULE_ID", "None", test="test_module_id"),
    _letter("a", "`--host` and `--port`, as ADDRESS:PORT", "127.0.0.1:30001"),
    _letter(
        "d",
        "`--dtype`, `bfloat16` or `float16`; `fp8`, `awq` and `gptq` are refused so far",
        "bfloat16",
        test="test_what_is_not_done_is_refused_by_name",
    ),
    _letter("q", f"file of an FP8 quantization: {_FP8}", status=_NO),
    _letter(
        "x",
        "`--max-model-len`, up to the next multiple of 128; so many tokens in a step, at least 2048",
        "16384",
        test="test_length_is_rounded_up_to_blocks",
    ),
    _letter("p", "`--max-prefill-batch` of the engine; an empty text leaves it to the engine", "1"),
    _letter("b", "`--max-num-seqs` of the engine", "128"),
    _letter("g", "`--max-capture-tokens` of the engine", "8192"),
    _letter("u", "`--gpu-memory-utilization`", "0.9"),
    _letter(
        "e",
        "options of `vllm serve`, in one text (`catenary vllm-serve --help` lists them)",
        "",
        test="test_extra_options_are_those_of_vllm",
    ),
    _letter(
        "l", "strategy `padding` with `--bucketing-pad-ratio`, 0 to 0.5", "0.25", test="test_padding_limit"
    ),
    _letter("c", "`--recipe-cache` of the engine", "", test="test_recipe_cache"),
    _letter("s", "`--warmup skip` of the engine", switch=True),
    _letter("f", "`--trace-steps` of the engine", test="test_profile_is_a_trace", switch=True),
    # Other releases of the script have these, where this one has -x and -t.
    _letter(
        "i",
        "shortest and longest prompt, as MIN,MAX, with `-o` in place of `-x`; the shortest sets how many "
        "prompts are computed together, unless `-p` does",
        test="test_ranges_of_lengths",
    ),
    _letter(
        "o",
        "shortest and longest completion, as MIN,MAX: `--max-model-len` is the longest of both together",
        test="test_ranges_of_lengths",
    ),
    _letter("n", f"cards of an engine, as `-t`: {_CARDS}; `1` is what happens anyway", status=_NO),
    _letter("z", "padding is masked, and never set to zero", status=Status.NOT_NEEDED, switch=True),
)
R1_SCRIPT: Final[tuple[Letter, ...]] = (
    _letter("w", "`--model`"),
    _letter("u", "`--host`", "0.0.0.0", test="test_r1_letters"),
    _letter("p", "`--port`", "8688", test="test_r1_letters"),
    _letter("l", "`--max-model-len`, and tokens of a step", "16384", test="test_r1_letters"),
    _letter("b", "`--max-num-seqs` of the engine", "64", test="test_r1_letters"),
    _letter("c", "`--recipe-cache` of the engine", "", test="test_recipe_cache"),
    _letter("m", "`--max-prefill-batch` of the engine", "1", test="test_r1_letters"),
    _letter("s", "`--warmup skip` of the engine", test="test_r1_letters", switch=True),
    _letter("q", f"FP8: {_FP8}", status=_NO, switch=True),
    _letter(
        "t",
        f"the script takes eight cards: {_CARDS}. `-t 1`, which the script has not, serves on one",
        "8",
        status=_NO,
    ),
)


def read_letters(words: Sequence[str]) -> Letters:
    """Return the letters of a command line; --r1 chooses the DeepSeek-R1 script. Raises ConfigError."""
    r1 = "--r1" in words
    table = R1_SCRIPT if r1 else SCRIPT
    shape = "".join(entry.letter + ("" if entry.switch else ":") for entry in table)
    try:
        found, rest = getopt.getopt([word for word in words if word != "--r1"], shape)
    except getopt.GetoptError as error:
        script = "the DeepSeek-R1 script" if r1 else "start_gaudi_vllm_server.sh"
        raise ConfigError(
            f"{error.msg} ({script} has {', '.join('-' + e.letter for e in table)}; options of catenary up "
            "follow behind --)"
        ) from None
    if rest:
        raise ConfigError(f"unexpected argument {rest[0][:60]!r}")
    values = {entry.letter: entry.default or "" for entry in table}
    given = {name.removeprefix("-"): value for name, value in found}
    if not given.get("w"):
        raise ConfigError("-w is missing: the model, as a directory or an id")
    return Letters(values | given, frozenset(given), r1)


def launch_of(letters: Letters) -> Launch:
    """Return the start that corresponds to the script's.

    Raises ConfigError, by the letter, for what cannot be done yet.
    """
    _check_cards(letters)
    launch = Launch()
    _set(launch, letters, "w", f"{UP}MODEL", letters["w"])
    launch.default(f"{UP}DEVICE", "hpu")
    launch.default(f"{ENGINE}BLOCK_SIZE", str(_BLOCK))
    launch.default("PT_HPU_LAZY_MODE", "1")
    if not letters.r1:
        launch.default(f"{ENGINE}ALLOW_LONG_MAX_MODEL_LEN", "true")
    for rule in _R1_RULES if letters.r1 else _RULES:
        rule(launch, letters)
    if letters["c"]:
        launch.ask(f"{ENGINE}RECIPE_CACHE", letters["c"])
        launch.ask(f"{ENGINE}RECIPE_CACHE_MIB", "16384" if letters.r1 else "40960")
    if "s" in letters.given:
        launch.ask(f"{ENGINE}WARMUP", "skip")
    return launch


def _check_cards(letters: Letters) -> None:
    number = _number("-t", letters["t"], 1, 1024)
    if "n" in letters.given and _number("-n", letters["n"], 1, 1024) > 1:
        raise ConfigError(f"-n {letters['n']}: {_CARDS}")
    if letters.r1 and "t" not in letters.given:
        raise ConfigError(f"--r1: the script takes eight cards, and {_CARDS}; -t 1 serves on one")
    if number > 1:
        raise ConfigError(f"-t {number}: {_CARDS}")
    if "q" in letters.given:
        raise ConfigError(f"-q: {_FP8}")


def _set(launch: Launch, letters: Letters, letter: str, variable: str, value: str) -> None:
    """Ask for what a letter says, or set the script's default."""
    (launch.ask if letter in letters.given else launch.default)(variable, value)


def _number(letter: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{letter} {text[:40]!r}: must be a whole number, {least} to {most}")
    return int(text)


def _share(letter: str, text: str, most: float) -> str:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not float(text) <= most:
        raise ConfigError(f"{letter} {text[:40]!r}: must be a number, 0 to {most}")
    return text


def _address(launch: Launch, letters: Letters) -> None:
    if letters.r1:
        _set(launch, letters, "u", f"{UP}HOST", letters["u"])
        _set(launch, letters, "p", f"{UP}PORT", str(_number("-p", letters["p"], 0, 65535)))
        return
    host, colon, port = letters["a"].rpartition(":")
    if not colon or not host:
        raise ConfigError(f"-a {letters['a'][:60]!r}: must be ADDRESS:PORT")
    _set(launch, letters, "a", f"{UP}HOST", host.strip("[]"))
    _set(launch, letters, "a", f"{UP}PORT", str(_number("-a", port, 0, 65535)))


def _dtype(launch: Launch, letters: Letters) -> None:
    dtype = letters["d"]
    if dtype not in ("bfloat16", "float16"):
        reason = _FP8 if dtype == "fp8" else "quantized models are not done yet"
        raise ConfigError(
            f"-d {dtype}: {reason}"
            if dtype in ("fp8", "awq", "gptq")
            else f"-d {dtype[:40]!r}: must be bfloat16, float16, fp8, awq or gptq"
        )
    _set(launch, letters, "d", f"{UP}DTYPE", dtype)


def _length(launch: Launch, letters: Letters) -> None:
    ranges = [letter for letter in "io" if letter in letters.given]
    if ranges:
        _ranges(launch, letters, ranges[0])
        return
    letter = "l" if letters.r1 else "x"
    length = _number(f"-{letter}", letters[letter], 1, 2**30)
    if not letters.r1:
        length = _up_to_blocks(length)
    tokens = length if letters.r1 else max(length, _LEAST_TOKENS)
    _set(launch, letters, letter, f"{UP}MAX_MODEL_LEN", str(length))
    _set(launch, letters, letter, f"{ENGINE}MAX_NUM_BATCHED_TOKENS", str(tokens))


def _ranges(launch: Launch, letters: Letters, letter: str) -> None:
    """Set lengths as other releases of the script name them: of prompts and of completions."""
    if "x" in letters.given:
        raise ConfigError(f"-{letter} says the length of a sequence, and so does -x: give one of them")
    shortest, prompt = _range("-i", letters["i"] or _PROMPTS)
    _, completion = _range("-o", letters["o"] or _COMPLETIONS)
    length = _up_to_blocks(prompt + completion)
    tokens = max(length, _LEAST_TOKENS)
    launch.ask(f"{UP}MAX_MODEL_LEN", str(length))
    launch.ask(f"{ENGINE}MAX_NUM_BATCHED_TOKENS", str(tokens))
    if "i" in letters.given and "p" not in letters.given:
        rows = min(_MOST_PROMPTS, max(1, tokens // _up_to_blocks(shortest)))
        launch.ask(f"{ENGINE}MAX_PREFILL_BATCH", str(rows))


def _range(letter: str, text: str) -> tuple[int, int]:
    least, comma, most = text.partition(",")
    if not comma:
        raise ConfigError(f"{letter} {text[:40]!r}: must be MIN,MAX")
    low, high = _number(letter, least.strip(), 1, 2**30), _number(letter, most.strip(), 1, 2**30)
    if low > high:
        raise ConfigError(f"{letter} {text[:40]!r}: the first number must not be above the second")
    return low, high


def _up_to_blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK


def _zeros(launch: Launch, letters: Letters) -> None:
    if "z" in letters.given:
        launch.warn("-z has no effect: padding is masked, and never set to zero")


def _batches(launch: Launch, letters: Letters) -> None:
    _set(launch, letters, "b", f"{ENGINE}MAX_NUM_SEQS", str(_number("-b", letters["b"], 1, 4096)))
    letter = "m" if letters.r1 else "p"
    if letters[letter]:
        rows = _number(f"-{letter}", letters[letter], 1, 256)
        _set(launch, letters, letter, f"{ENGINE}MAX_PREFILL_BATCH", str(rows))


def _module(launch: Launch, letters: Letters) -> None:
    ids = letters["m"]
    if ids == "None":
        return
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", ids):
        raise ConfigError(f"-m {ids[:40]!r}: must be a module id, 0 to 7")
    if "," in ids:
        raise ConfigError(f"-m {ids[:40]}: {_CARDS}; name one module")
    launch.ask("HLS_MODULE_ID", str(_number("-m", ids, 0, 7)))


def _capture(launch: Launch, letters: Letters) -> None:
    tokens = _number("-g", letters["g"], 1, 2**30)
    _set(launch, letters, "g", f"{ENGINE}MAX_CAPTURE_TOKENS", str(tokens))


def _memory(launch: Launch, letters: Letters) -> None:
    if letters.r1:
        share = _R1_SHARE if int(letters["l"]) <= _R1_SHORT else _R1_LONG_SHARE
        launch.default(f"{UP}GPU_MEMORY_UTILIZATION", share)
        launch.default(f"{ENGINE}GRAPH_RESERVED_MEM", "0.2")
        launch.default(f"{ENGINE}GRAPH_PROMPT_RATIO", "0")
    else:
        _set(launch, letters, "u", f"{UP}GPU_MEMORY_UTILIZATION", _share("-u", letters["u"], 1.0))


def _padding(launch: Launch, letters: Letters) -> None:
    ratio = "0.25" if letters.r1 else _share("-l", letters["l"], 0.5)
    if not letters.r1 and "l" in letters.given:
        launch.ask(f"{ENGINE}BUCKETING_STRATEGY", "padding")
        launch.ask(f"{ENGINE}BUCKETING_PAD_RATIO", ratio)
    else:
        # Both or none: the ratio is no setting of another strategy.
        launch.default(f"{ENGINE}BUCKETING_STRATEGY", "padding")
        launch.default(f"{ENGINE}BUCKETING_PAD_RATIO", ratio, beside=f"{ENGINE}BUCKETING_STRATEGY")


def _scores(launch: Launch, letters: Letters) -> None:
    if named_for_float32_scores(PurePath(letters["w"]).name):
        launch.default(f"{ENGINE}ATTENTION_SOFTMAX", "fp32")


def _profile(launch: Launch, letters: Letters) -> None:
    if "f" in letters.given:
        launch.ask(f"{ENGINE}TRACE_STEPS", f"serve_{PurePath(letters['w']).name}_profile.json")


def _extra(launch: Launch, letters: Letters) -> None:
    try:
        words = shlex.split(letters["e"])
    except ValueError:
        raise ConfigError("-e: a quotation mark has no partner") from None
    if any(not word.startswith("-") for word in words[:1]):
        raise ConfigError(f"-e {words[0][:60]!r}: must begin with an option of vllm serve")
    parse_serve(words, launch)


_Rule = Callable[[Launch, Letters], None]
_R1_RULES: Final[tuple[_Rule, ...]] = (_address, _length, _batches, _memory, _padding)
_RULES: Final[tuple[_Rule, ...]] = (*_R1_RULES, _scores, _dtype, _module, _capture, _profile, _zeros, _extra)
