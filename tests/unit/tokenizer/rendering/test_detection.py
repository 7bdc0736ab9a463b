"""Which parsers a chat template tells of, by what it writes. The templates only look like the families'."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.parsers import REASONING_PARSERS, TOOL_PARSERS
from gateway.parsing.choice import REASONING_PARSERS as READ_REASONING
from gateway.parsing.choice import TOOL_PARSERS as READ_TOOLS
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import ModelFiles, Parsers, Renderer
from services.tokenizer.rendering.detection import NAME
from services.tokenizer.rendering.template import ChatTemplate
from tests.support import chat_templates
from tests.support import tiny_tokenizer as tiny
from tests.support.chat_templates import family

DOCUMENT = json.dumps(tiny.tokenizer_json()).encode()


def detected(template: str | None, named: dict[str, str] | None = None, **fields: Any) -> Parsers:
    """What is found in a model's templates."""
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    files = ModelFiles(DOCUMENT, template, tokens, None, named or {}, **fields)
    return Renderer(files, max_rendered_chars=1_000_000).parsers


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


BEGIN, SEPARATOR, END = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
ARGS = "{{ f.arguments | tojson }}"
OBJECT = '{"name": "{{ f.name }}", "arguments": ' + ARGS + "}"
PARAMETERS = '{"name": "{{ f.name }}", "parameters": ' + ARGS + "}"
HERMES = f"\n<tool_call>\n{OBJECT}\n</tool_call>"
CODER = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}"
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
)
WITH_ID = OBJECT[:-1] + ', "id": "{{ id }}"}'
INVOKE = (
    '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>'
)
HY = (
    "<tool_calls:opensource>\n<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
    "{% for k, v in f.arguments.items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>\n"
    "<arg_value:opensource>{{ v }}</arg_value:opensource>\n{% endfor %}</tool_call:opensource>\n"
    "</tool_calls:opensource>"
)
PYTHON = "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]"
KIMI = "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>" + ARGS + "<|tool_call_end|>"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
CUTS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + HERMES + "{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)
# As in OpenAI's template, the recipient is put together of two texts, and nothing is constrained.
HARMONY = family(
    "{{- '<|start|>assistant to=' }}{{- 'functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    + ARGS
    + "<|call|>",
    begins="<|start|>assistant",
    thoughts="{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}",
)
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOLD = "Answer with JSON of a name and parameters. Environment: ipython, behind <|python_tag|>. "
FAMILIES = {
    "Qwen 2.5": (family(HERMES), "hermes", ""),
    "Qwen 3": (family(HERMES, thoughts=THINK, opens=SWITCH), "hermes", "qwen3"),
    "QwQ": (CUTS, "hermes", "deepseek_r1"),
    "arguments first": (
        family('<tool_call>{"arguments": ' + ARGS + ', "name": "{{ f.name }}"}</tool_call>'),
        "hermes",
        "",
    ),
    "Qwen 3 Coder": (family(CODER), "qwen3_coder", ""),
    "DeepSeek V3": (
        family(f"{BEGIN}function{SEPARATOR}{{{{ f.name }}}}\n```json\n{ARGS}\n```{END}"),
        "deepseek_v3",
        "",
    ),
    "DeepSeek R1": (
        chat_templates.CONTENT_IS_NONE.replace("{{- '<|Assistant|>' }}", "<think>\n"),
        "",
        "deepseek_r1",
    ),
    "DeepSeek V3.1": (
        family(f"{BEGIN}{{{{ f.name }}}}{SEPARATOR}{ARGS}{END}", opens="</think>"),
        "deepseek_v31",
        "deepseek_r1",
    ),
    "Mistral Nemo": (
        family('[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": ' + ARGS + ', "id": "{{ id }}"}]'),
        "mistral",
        "",
    ),
    "Mistral Small": (family("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ id }}[ARGS]" + ARGS), "mistral", ""),
    "Magistral": (
        family("[TOOL_CALLS]{{ f.name }}[ARGS]" + ARGS, told="Think in [THINK] and [/THINK]. "),
        "mistral",
        "mistral",
    ),
    "GLM 4.5": (family(GLM, thoughts=THINK), "glm45", "glm45"),
    "Kimi K2": (family(KIMI, begins="<|im_assistant|>bot<|im_middle|>"), "kimi_k2", ""),
    "Kimi K2, made ids": (chat_templates.QUEUE, "kimi_k2", ""),
    "Kimi K2 Thinking": (
        family(
            KIMI,
            begins="<|im_assistant|>bot<|im_middle|>",
            thoughts="<think>{{ m.reasoning_content or '' }}</think>",
        ),
        "kimi_k2",
        "kimi_k2",
    ),
    "gpt-oss": (HARMONY, "openai", "gptoss"),
    "gpt-oss, other order": (
        family(
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>" + ARGS,
            begins="<|start|>assistant",
        ),
        "openai",
        "",
    ),
    "Granite 3.2": (
        "{% if tools %}Answer with <|tool_call|> and a JSON list of calls: {{ tools | tojson }}{% endif %}"
        "{% if thinking %}Begin with 'Here is my thought process:'.{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        "granite",
        "granite",
    ),
    "Granite, with a history": (family(f"<|tool_call|>[{OBJECT}]"), "granite", ""),
    "Phi 4 mini": (
        '{% if tools %}Answer with functools[{"name": N, "arguments": A}]: {{ tools | tojson }}{% endif %}'
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        "phi4_mini_json",
        "",
    ),
    "Phi, with a history": (family(f"functools[{OBJECT}]"), "phi4_mini_json", ""),
    "Llama 3.1": (family(PARAMETERS, begins=LLAMA_HEADER, told=LLAMA_TOLD), "llama3_json", ""),
    "Llama 3.2": (family(PARAMETERS, begins=LLAMA_HEADER), "llama3_json", ""),
    "Llama 3.1, marked": (family("<|python_tag|>" + PARAMETERS), "llama3_json", ""),
    "Llama 3.2, Python": (family(PYTHON, begins=LLAMA_HEADER), "pythonic", ""),
    "Llama 4": (
        family(
            "<|python_start|><|python_end|>" + PARAMETERS,
            told="Write [func_name1(params_name1=params_value1)]. ",
        ),
        "pythonic",
        "",
    ),
    "told Python, shown JSON": (
        family(PARAMETERS, told="Write [func_name1(params_name1=params_value1)]. "),
        "pythonic",
        "",
    ),
    "SmolLM 2": (tiny.CHATML_TEMPLATE, "", ""),
    "Seed-OSS": (
        family(
            "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
            "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
            thoughts=THINK.replace("think>", "seed:think>"),
        ),
        "seed_oss",
        "seed_oss",
    ),
    "Apriel 1.5": (
        family(
            f"<tool_calls>[{WITH_ID}]</tool_calls>",
            told="Not <tool_call>, but <tool_calls>. Answer in [BEGIN FINAL RESPONSE] [END FINAL RESPONSE]. ",
        ),
        "apriel",
        "apriel",
    ),
    "Apriel 1.6": (
        family(
            f"<tool_calls>[{OBJECT}]</tool_calls>",
            thoughts="{% if m.reasoning_content %}{{ m.reasoning_content }}\n[BEGIN FINAL RESPONSE]\n"
            "{% endif %}",
            opens="Here are my reasoning steps:\n",
        ),
        "apriel",
        "apriel",
    ),
    "Jamba": (family(f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>"), "apriel", ""),
    "functionary 3.1": (
        family(
            "<function={{ f.name }}>" + ARGS + "</function>", told="No <|python_tag|>, and no <parameter=. "
        ),
        "functionary_v31",
        "",
    ),
    "Nemotron Nano 2": (
        family(f"<TOOLCALL>[{OBJECT}]</TOOLCALL>", opens="<think>\n"),
        "nemotron_json",
        "deepseek_r1",
    ),
    "Nemotron 3": (family(CODER, thoughts=THINK, opens=SWITCH), "qwen3_coder", "qwen3"),
    "LFM 2.5": (
        family("<|tool_call_start|>" + PYTHON + "<|tool_call_end|>", thoughts=THINK),
        "lfm2",
        "deepseek_r1",
    ),
    "LFM 2, JSON": (family(f"<|tool_call_start|>[{OBJECT}]<|tool_call_end|>"), "lfm2", ""),
    # Tools are told of, calls are not shown: what the model would write is not known.
    "LFM 2, without calls": (
        "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% endfor %}",
        "",
        "",
    ),
    "OLMo 3": (family("<function_calls>" + PYTHON[1:-1] + "</function_calls>"), "olmo3", ""),
    "MiniMax M1": (family(f"<tool_calls>\n{OBJECT}\n</tool_calls>"), "minimax", ""),
    "MiniMax M2": (family(INVOKE, thoughts=THINK, opens="<think>\n"), "minimax_m2", "deepseek_r1"),
    "MiniMax M2's tags in another frame": (family(INVOKE.replace("minimax:", "own:")), "", ""),
    "Hunyuan 3": (
        family(HY, thoughts=THINK.replace("think>", "think:opensource>")),
        "hy_v3",
        "hy_v3",
    ),
    "GigaChat 3": (family(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}"), "gigachat3", ""),
    "GigaChat 3.1": (family(f"<|function_call|>{OBJECT}"), "gigachat3", ""),
    "InternLM 2.5": (
        family(f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>"),
        "internlm",
        "",
    ),
    "Command R7B": (
        family(
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
            + ARGS
            + "}\n]<|END_ACTION|>",
            thoughts="{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>"
            "{% endif %}",
        ),
        "cohere_command3",
        "cohere_command3",
    ),
    "LongCat": (family(f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>"), "longcat", ""),
    "xLAM 2": (family(f"[{OBJECT}]", begins=LLAMA_HEADER), "xlam", ""),
    # Formats that no parser reads, with the markers of some that are read.
    "tags of its own around a coder's": (
        family(CODER.replace("tool_call>", "own:tool_call>"), thoughts=THINK.replace("think>", "own:think>")),
        "",
        "",
    ),
    "MiniMax M3": (
        family(']<]mm[>[<tool_call>\n]<]mm[>[<invoke name="{{ f.name }}">' + ARGS + "]<]mm[>[</tool_call>"),
        "",
        "",
    ),
    "calls behind a role": (family(f"<|end|>\n<|function|>{OBJECT}"), "", ""),
    "Solar": (family("<|tool_call:name|>{{ f.name }}<|tool_call:args|>" + ARGS), "", ""),
    "arguments as a string": (family(HERMES.replace("| tojson", "| tojson | tojson")), "", ""),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_tells_the_parsers(name: str) -> None:
    template, tool, reasoning = FAMILIES[name]
    assert detected(template) == Parsers(tool, reasoning)


def test_the_template_for_tools_tells_of_calls_and_all_tell_of_thoughts() -> None:
    hermes, llama = FAMILIES["Qwen 2.5"][0], FAMILIES["Llama 3.2"][0]
    assert detected(llama, {"tool_use": hermes}) == Parsers("hermes")
    assert detected(hermes, {"rag": llama}) == Parsers("hermes")
    assert detected(FAMILIES["Qwen 3"][0], {"tool_use": llama}) == Parsers("llama3_json", "qwen3")
    assert detected(None) == Parsers()


def test_a_template_that_changes_its_lists_changes_no_other_rendering() -> None:
    shows = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}"
    grown = "{% set _ = tools[0].function.parameters.required.append('more') %}"
    changes = shows + grown + "{% set _ = tools.pop() %}{% endif %}"
    for _ in range(2):
        texts = ChatTemplate(changes, {}, max_chars=100_000).written().prompts
        assert any(NAME in text for text in texts)
        assert not any("more" in text for text in texts)
    assert detected(family(HERMES)).tool == "hermes"


def test_the_operator_has_the_last_word() -> None:
    found = detected(FAMILIES["Qwen 3"][0], response_template="{}")
    assert found.chosen(None, None) == Parsers("hermes", "qwen3", "{}")
    assert found.chosen("none", "granite") == Parsers("", "granite")
    assert found.chosen("mistral", None) == Parsers("mistral", "qwen3")
    assert Parsers(response_template="{}").chosen(None, None) == Parsers(response_template="{}")
    assert Parsers(response_template="{}").chosen("hermes", None) == Parsers("hermes")


def test_names_are_those_of_the_gateways_parsers() -> None:
    assert TOOL_PARSERS == READ_TOOLS
    assert REASONING_PARSERS == READ_REASONING


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((name, True) for name in ("lfm2", "minimax", "minimax_m2", "jamba", "olmo3", "nemotron_json")),
        *((name, True) for name in ("glm47", "granite4", "granite-20b-fc", "mimo", "step3p5", "poolside_v1")),
        *((name, True) for name in ("cohere_command3", "gigachat3", "hy_v3", "internlm", "longcat", "xlam")),
        *((name, False) for name in ("gemma4", "functiongemma", "kimi_k3", "minimax_m3", "minicpm5")),
        *((name, False) for name in ("apertus", "ernie45", "hunyuan_a13b", "step3", "deepseek_v32")),
    ],
)
def test_names_of_vllm_are_taken_or_refused(name: str, read: bool) -> None:
    fields = {"model_dir": "/", "tool_parser": name}
    if read:
        assert TokenizerConfig.model_validate(fields).tool_parser == name
    else:
        with pytest.raises(ValueError, match="tool_parser"):
            TokenizerConfig.model_validate(fields)


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"hermes|qwen3"):
        TokenizerConfig.model_validate({"model_dir": "/", option: "gorilla"})
