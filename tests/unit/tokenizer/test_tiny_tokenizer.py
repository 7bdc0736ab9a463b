from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.support import tiny_tokenizer as tiny


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.write_tiny_model(directory) / "tokenizer.json"))


def test_it_has_512_tokens_and_every_byte_is_one(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.get_vocab_size() == tiny.VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(tiny.VOCAB_SIZE))
    for text in ("é", "日本", "🙂", "a\x00b\x7f"):
        assert tokenizer.decode(tiny.byte_ids(text)) == text


def test_text_goes_there_and_back(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    for text in ("Hello the world\n\n  x", "naïve 日本 🙂", "<|im_start|>user\nhi<|im_end|>"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|><think>").ids == [tiny.IM_END_ID, tiny.THINK_ID]
