from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.tokenizer.rendering import ModelFilesError, Renderer, read_model_files
from tests.support.tiny_tokenizer import CHATML_TEMPLATE, write_tiny_model


def refusal(directory: Path, **options: Path) -> str:
    with pytest.raises(ModelFilesError) as caught:
        Renderer(read_model_files(directory, **options), max_rendered_chars=1000)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")


def test_no_tokenizer_json_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert "save_pretrained" in refusal(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    assert "services.engine.model.prepare" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"\xff\xfe", b"[]", b"null", b'{"model": {"type": "BPE"}}']
)
def test_a_corrupt_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert "cut short or not a tokenizer" in refusal(tmp_path)


def test_a_tokenizer_json_cut_short(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "cut short or not a tokenizer" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_corrupt_configuration(tmp_path: Path, content: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert "tokenizer_config.json" in refusal(tmp_path)


def test_a_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    assert read_model_files(tmp_path / "model", chat_template=other).chat_template == other.read_text()
    assert "cannot be read" in refusal(tmp_path / "model", chat_template=tmp_path / "none.jinja")
    other.write_bytes(b"\xff")
    assert "not UTF-8" in refusal(tmp_path / "model", chat_template=other)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, chat_template=None)
    assert read_model_files(tmp_path).chat_template is None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    for value, expected in ((named, "d"), ("text", "text"), (named[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))
        files = read_model_files(tmp_path)
        assert files.chat_template == expected
        assert files.named_templates == ({} if value == "text" else {"rag": "r"})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert read_model_files(tmp_path).chat_template == "processor"
    (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    assert read_model_files(tmp_path).chat_template == CHATML_TEMPLATE


def test_named_templates_in_files_of_their_own(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("t")
    (more / "notes.txt").write_text("no template")
    assert read_model_files(tmp_path).templates == {"default": CHATML_TEMPLATE, "tool_use": "t"}
    other = tmp_path / "other.jinja"
    other.write_text("o")
    assert read_model_files(tmp_path, chat_template=other).templates == {"default": "o"}
    for index in range(64):
        (more / f"{index}.jinja").write_text("x")
    assert "more than 64 chat templates" in refusal(tmp_path)


def test_special_tokens_come_in_several_shapes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    config["extra_special_tokens"] = {"image_token": "<image>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "old", "unk_token": "<unk>"}))
    files = read_model_files(tmp_path)
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<image>"}
    assert files.special_tokens == expected
    assert files.add_bos is True
