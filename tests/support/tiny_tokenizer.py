"""A byte-level BPE tokenizer of exactly 512 tokens, written as a Hugging Face model directory.

How the ids are laid out (so that a test can name any token without a tokenizer at hand):

    0 <|endoftext|>   1 <|im_start|>   2 <|im_end|>            special (control) tokens
    3 <think>         4 </think>       5 <tool_call>   6 </tool_call>      added, but not special
    7..58             a space and a letter, " a".." z" then " A".." Z"
    59..254           the pairs of the letters "etaoinshrdlucm", "ee", "et", ... "mm"
    255               two newlines
    256..511          the 256 single bytes: the id of byte b is `byte_id(b)` == 256 + b

Every byte is a token, so any UTF-8 text can be fed byte by byte (`byte_ids("é") == [451, 425]`) and a
character can be cut anywhere. The template is ChatML. End of sequence is <|im_end|>.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
ENDOFTEXT_ID, IM_START_ID, IM_END_ID, THINK_ID = 0, 1, 2, 3
EOS_ID = IM_END_ID
SPECIAL_IDS = (ENDOFTEXT_ID, IM_START_ID, IM_END_ID)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = (*SPECIAL_TOKENS, "<think>", "</think>", "<tool_call>", "</tool_call>")
FIRST_BYTE_ID = 256

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML_TEMPLATE


def byte_id(byte: int) -> int:
    """The id of the token that is this one byte (0..255)."""
    return FIRST_BYTE_ID + byte


def byte_ids(text: str) -> list[int]:
    """The UTF-8 bytes of `text`, one token each. Decoding them gives `text` back."""
    return [byte_id(byte) for byte in text.encode()]


def write_tiny_model(
    directory: Path, *, chat_template: str | None = CHATML_TEMPLATE, add_bos: bool = False
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory` and return it.

    `chat_template=None`: a model without one. `add_bos`: <|endoftext|> becomes the BOS that the tokenizer
    puts before a text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(add_bos=add_bos), ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>" if add_bos else "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    return directory


def tokenizer_json(*, add_bos: bool = False) -> dict[str, Any]:
    """The content of tokenizer.json."""
    alphabet = _byte_alphabet()
    pairs = _merged_pairs()
    vocab = {token: index for index, token in enumerate(ADDED_TOKENS)}
    vocab |= {left + right: len(ADDED_TOKENS) + index for index, (left, right) in enumerate(pairs)}
    vocab |= {alphabet[byte]: byte_id(byte) for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(index, token) for index, token in enumerate(ADDED_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _bos_processor() if add_bos else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in pairs],
        },
    }


def _added_token(index: int, token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": token in SPECIAL_TOKENS}


def _bos_processor() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [ENDOFTEXT_ID], "tokens": ["<|endoftext|>"]}
        },
    }


def _merged_pairs() -> list[tuple[str, str]]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    spaced = [("Ġ", letter) for letter in letters + letters.upper()]
    common = [(left, right) for left in "etaoinshrdlucm" for right in "etaoinshrdlucm"]
    return [*spaced, *common, ("Ċ", "Ċ")]


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in stand_ins]
    stand_ins |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]
