"""Grammars by xgrammar, which is an extra: `pip install --no-deps` of it and of apache-tvm-ffi is enough."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np

from catenary.constraints import (
    DEFAULT_LIMITS,
    TAG_GAP,
    ConstraintError,
    ConstraintKind,
    ConstraintLimits,
    clean_schema,
    first_to_fire,
    read_regex,
    read_schema,
    to_llguidance,
)
from services.engine.constraints.vocabulary import (
    Bits,
    ConstraintRefused,
    Grammar,
    GrammarBackend,
    Matcher,
    Vocabulary,
)
from services.engine.domain import ConstraintOptions

# Keywords that say nothing about a value.
_NOTES: Final = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
)
# Keywords of which one alone decides.
_CHOICES: Final = frozenset({"enum", "const", "$ref", "anyOf"})
_BY_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def honoured(schema: Any) -> Any:
    """Return the schema as xgrammar honours it. Raises ConstraintRefused for what it might pass over.

    Its depth was checked before.
    """
    if isinstance(schema, bool):
        return schema
    found = {key: value for key, value in schema.items() if not key.startswith("x-")}
    keys = found.keys() - _NOTES
    choices = keys & _CHOICES
    if choices:
        _check_choice(found, keys, choices)
    else:
        _check_typed(found, keys)
        _write_lengths(found)
    if "properties" in found:
        # Within structural tags xgrammar takes an object that says nothing of other properties for closed.
        found.setdefault("additionalProperties", True)
    for name in ("$defs", "definitions", "properties"):
        if name in found:
            found[name] = {key: honoured(part) for key, part in found[name].items()}
    for name in ("anyOf", "prefixItems"):
        if name in found:
            found[name] = [honoured(part) for part in found[name]]
    for name in ("additionalProperties", "items"):
        if name in found:
            found[name] = honoured(found[name])
    return found


def _check_choice(schema: dict[str, Any], keys: set[str], choices: set[str]) -> None:
    allowed = {"type"} if choices <= {"enum", "const"} else set()
    _refuse(sorted(keys - choices - allowed) or sorted(choices)[1:])
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if kind is not None and not all(_is_of(value, kind) for value in values):
        raise ConstraintRefused("The JSON schema's 'enum' has values that its 'type' does not allow.")


def _check_typed(schema: dict[str, Any], keys: set[str]) -> None:
    given = schema.get("type")
    kinds = list(_BY_TYPE) if given is None else given if isinstance(given, list) else [given]
    known = {"type"}.union(*(_BY_TYPE.get(kind, frozenset()) for kind in kinds))
    _refuse(sorted(keys - known))
    if given is None and keys:
        raise ConstraintRefused("xgrammar honours a JSON schema's keywords only beside a 'type'.")
    if "pattern" in keys and keys & {"minLength", "maxLength"}:
        raise ConstraintRefused("xgrammar does not honour 'pattern' beside 'minLength' or 'maxLength'.")
    missing = set(schema.get("required", ())) - schema.get("properties", {}).keys()
    if missing:
        raise ConstraintRefused("The JSON schema's 'required' names what is not among its 'properties'.")


def _write_lengths(schema: dict[str, Any]) -> None:
    """Express a string's length as a pattern: xgrammar would allow control characters, which are no JSON."""
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.pop("minLength", 0), schema.pop("maxLength", "")
        schema["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'


def _is_of(value: Any, kind: str | list[str]) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return any(
        isinstance(value, _TYPES.get(one, ())) and (one == "boolean" or not isinstance(value, bool))
        for one in kinds
    )


def _refuse(keywords: list[str]) -> None:
    if keywords:
        raise ConstraintRefused(f"The JSON schema uses '{keywords[0][:64]}', which xgrammar does not honour.")


# As the grammars of llguidance have it (`ConstraintLimits`).
_MOST_WHITE_SPACE: Final = 32


class XgrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, inner: Any, words: int) -> None:
        self.inner = inner
        self._words = words
        self.failed = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self.failed or not self.inner.accept_token(token_id):
                self.failed = True
                return False
        return True

    def allows(self, token_id: int) -> bool:
        bits = np.zeros((1, self._words), dtype=np.int32)
        self.inner.fill_next_token_bitmask(bits, 0)
        return bool(bits[0, token_id // 32] >> token_id % 32 & 1)

    @property
    def accepting(self) -> bool:
        return bool(self.inner.is_completed())


class XgrammarGrammar:
    """Implements `Grammar`."""

    def __init__(self, library: Any, compiled: Any, words: int) -> None:
        self._library = library
        self._compiled = compiled
        self._words = words

    def matcher(self) -> Matcher:
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled), self._words)


class XgrammarBackend:
    """Implements `GrammarBackend`. What llguidance refuses is refused here too, under the same limits.

    Tags are spelled in text: a control token that one begins with cannot be told apart from text.
    """

    def __init__(
        self, library: Any, vocabulary: Vocabulary, threads: int, limits: ConstraintLimits = DEFAULT_LIMITS
    ) -> None:
        control = set(vocabulary.control.values())
        # Tokens without text are never part of one.
        texts = [b"" if token in control else text for token, text in enumerate(vocabulary.texts)]
        info = library.TokenizerInfo(
            texts,
            library.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=sorted(vocabulary.closing),
        )
        self._library = library
        self._limits = limits
        self._words = vocabulary.words
        # The caller has threads and a cache of its own.
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = library.BatchGrammarMatcher(threads)

    def compile(self, options: ConstraintOptions) -> Grammar:
        try:
            # A refusal of llguidance holds here too.
            to_llguidance(options.kind, options.source, self._limits, closed=options.closed)
        except ConstraintError as error:
            raise ConstraintRefused(str(error)) from None
        try:
            compiled = self._compile(options)
        except RuntimeError:
            raise ConstraintRefused("The constraint cannot be compiled by xgrammar.") from None
        return XgrammarGrammar(self._library, compiled, self._words)

    def _compile(self, options: ConstraintOptions) -> Any:
        compiler, source = self._compiler, options.source
        limits = replace(self._limits, closed_objects=options.closed)
        match options.kind:
            case ConstraintKind.JSON_SCHEMA:
                schema = honoured(read_schema(source, limits))
                return compiler.compile_json_schema(
                    json.dumps(schema, ensure_ascii=False),
                    max_whitespace_cnt=_MOST_WHITE_SPACE,
                    strict_mode=False,
                )
            case ConstraintKind.REGEX:
                return compiler.compile_regex(read_regex(source, limits))
            case ConstraintKind.GRAMMAR:
                return compiler.compile_lark(source)
            case ConstraintKind.GBNF:
                return compiler.compile_grammar(source)
            case ConstraintKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(_tag(json.loads(source), limits))

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
        found = [(cast(XgrammarMatcher, matcher), row) for matcher, row in matchers]
        working = [(matcher.inner, row) for matcher, row in found if not matcher.failed]
        if working:
            inner, rows = zip(*working, strict=True)
            self._batch.batch_fill_next_token_bitmask(list(inner), bits, list(rows))


def _tag(given: dict[str, Any], limits: ConstraintLimits) -> dict[str, Any]:
    """Return a structural tag of the contract as one of xgrammar."""
    tags: list[dict[str, Any]] = []
    for structure in given["structures"]:
        if structure.get("parameters") is not None:
            raise ConstraintRefused("Values with tags of their own are not supported by xgrammar.")
        content: dict[str, Any] = {"type": "any_text"}
        if structure.get("schema") is not None:
            content = _json(structure["schema"], limits)
        tags.append({"begin": structure["begin"], "content": content, "end": structure.get("end", "")})
    required, single = given.get("at_least_one", False), given.get("stop_after_first", False)
    otherwise = given.get("otherwise")
    form: dict[str, Any] = {
        "type": "triggered_tags",
        "triggers": first_to_fire(given["triggers"]),
        "tags": tags,
        "at_least_one": required,
        "stop_after_first": single,
    }
    if given.get("only_tags", False) or otherwise is not None:
        form = _only(tags, single=single)
        if not required:
            form = {"type": "or", "elements": [form, _json(otherwise, limits)]}
    return {"type": "structural_tag", "format": form}


def _json(schema: Any, limits: ConstraintLimits) -> dict[str, Any]:
    """Return a JSON value of a schema."""
    schema = honoured(clean_schema(schema, limits))
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITE_SPACE}


def _only(tags: list[dict[str, Any]], *, single: bool) -> dict[str, Any]:
    """Return a tag of tags alone: a `single` one, or one at least."""
    tag = {"type": "or", "elements": [{"type": "tag", **each} for each in tags]}
    if single:
        return tag
    gap = {"type": "optional", "content": {"type": "regex", "pattern": TAG_GAP}}
    more = {"type": "star", "content": {"type": "sequence", "elements": [gap, tag]}}
    return {"type": "sequence", "elements": [tag, more]}


def open_xgrammar(
    vocabulary: Vocabulary, threads: int, limits: ConstraintLimits = DEFAULT_LIMITS
) -> GrammarBackend:
    """Raise ValueError if the package is not there."""
    try:
        library = importlib.import_module("xgrammar")
    except ImportError as error:
        raise ValueError(
            f"grammar-backend xgrammar needs the package {error.name}: install catenary's extra xgrammar"
        ) from None
    return XgrammarBackend(library, vocabulary, threads, limits)
