"""The model that comes with the installation, as it is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import Tokenizer

from catenary_apps.up.deployment import EXAMPLE_QUESTION
from services.engine.memory import read_shape
from services.engine.model import prepare_model, read_config, read_facts, resolve_source
from services.engine.model.gguf_file import read_gguf_config
from services.tokenizer.rendering import ChatOptions, ChatTurn, Parsers, Renderer, TurnCall, read_model_files
from tests.support.reference import Reference

pytestmark = pytest.mark.model

# Names in a Hugging Face directory, and in a GGUF file.
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def test_samples_as_its_authors_advise() -> None:
    directory = prepare_model("smollm2")
    facts = read_facts(directory, read_config(directory))
    assert facts.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_its_metadata_say_what_its_conversion_says(model_directory: Path) -> None:
    file = resolve_source("smollm2").path
    assert file is not None
    converted = read_shape(read_config(model_directory), "m")
    assert read_shape(read_gguf_config(file), "m") == converted


def test_the_example_question_is_answered_without_a_near_tie(reference: Reference) -> None:
    """So that the first answer that somebody sees is the same in bfloat16: "What is the capital of France?"
    has 0.1 between the two best first tokens, and was answered without Paris there."""
    prompt = reference.chat(EXAMPLE_QUESTION)
    answer = reference.greedy(prompt, 24)
    assert reference.text(answer).startswith("The capital of France is Paris.")
    (logits,) = reference.logits([(prompt, answer)])
    for best, second in logits[-len(answer) - 1 : -1].topk(2).values.tolist():
        assert best - second > 0.9


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection whose rotary pairs lie side by side, with the pairs' halves apart."""
    return weight.view(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def template_of_file() -> str:
    """The chat template in the GGUF file."""
    file = resolve_source("smollm2").path
    assert file is not None
    reader: Any = GGUFReader(file)
    return bytes(reader.fields["tokenizer.chat_template"].parts[-1]).decode()


def test_holds_what_its_gguf_file_holds(model_directory: Path) -> None:
    """Read without transformers, which does the conversion and is the reference of the parity tests."""
    file = resolve_source("smollm2").path
    assert file is not None
    reader: Any = GGUFReader(file)
    config = json.loads((model_directory / "config.json").read_bytes())
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in OUTER.items()}
    for index in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{index}.{o}.weight": f"blk.{index}.{t}.weight" for o, t in LAYER.items()}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(model_directory / "model.safetensors")
    assert weights.keys() == names.keys()
    assert stored.keys() == set(names.values())
    for ours, theirs in names.items():
        tensor = stored[theirs]
        expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).bfloat16()
        rotated = heads.get(ours.split(".")[-2])
        assert torch.equal(weights[ours], halves(expected, rotated) if rotated else expected), ours

    words = reader.fields["tokenizer.ggml.tokens"]
    tokens = [bytes(words.parts[place]).decode() for place in words.data]
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    assert [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())] == tokens
    assert (model_directory / "chat_template.jinja").read_text() == template_of_file()


def test_shows_tools_and_writes_all_else_as_its_own_template_does(model_directory: Path) -> None:
    """Its file's template knows no tools. Without tools, prompts are those that this one writes."""
    files = read_model_files(model_directory)
    renderer = Renderer(files, max_rendered_chars=100_000)
    assert renderer.parsers == Parsers(tool="hermes")
    assert renderer.reads_tools
    # The service itself goes on rendering small chats.
    assert renderer.is_simple
    own = ImmutableSandboxedEnvironment().from_string(template_of_file())
    call = TurnCall("c", "weather", '{"city": "Ulm"}')
    user, result = ChatTurn("user", "Is it sunny?"), ChatTurn("tool", "sunny", tool_call_id="c")
    for turns in (
        [user],
        [ChatTurn("system", "Be brief."), user, ChatTurn("assistant", "  No.\n"), user],
        [user, ChatTurn("assistant", "", tool_calls=(call,)), result],
    ):
        for generate in (True, False):
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            written = own.render(messages=messages, add_generation_prompt=generate)
            ids = renderer.chat(turns, ChatOptions(add_generation_prompt=generate)).ids
            assert ids == renderer.tokenize(written, add_special_tokens=False)
            assert renderer.detokenize(ids, skip_special_tokens=False) == written
    tools = '[{"type": "function", "function": {"name": "weather", "description": "Tells the weather."}}]'
    turns = [user, ChatTurn("assistant", None, tool_calls=(call,)), result]
    shown = renderer.detokenize(renderer.chat(turns, ChatOptions(tools=tools)).ids, skip_special_tokens=False)
    assert '<tools>\n{"name": "weather", "description": "Tells the weather."}\n</tools>' in shown
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>' in shown
    assert shown.endswith("<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
