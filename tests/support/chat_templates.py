"""Small chat templates in the manner of several model families, in our own words, for the tiny tokenizer."""

from __future__ import annotations

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions that may be called:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call>{"name": N, "arguments": A}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}
            {{- '\\n' + m.content }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and m.role == 'system') %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Thoughts are shown after the last question only; a request may switch them off.
QWEN = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson(indent=1)) + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else '' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set halves = content.split('</think>') %}
            {%- set thoughts = halves[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = halves[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thoughts %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Contents are stripped; tools stand in the first question; one call a message.
LLAMA = """
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{{- '<|im_start|>system\\nToday: ' + date_string + '<|im_end|>' }}
{%- for m in messages %}
    {%- if m.role == 'user' and loop.first and tools is not none %}
        {{- '<|im_start|>user\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- '\\n' }}
        {%- endfor %}
        {{- m.content | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception('One call a message is all that this model makes') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|im_end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>ipython\\n' }}
        {{- m.content | tojson if m.content is mapping else m.content }}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Questions and answers must alternate; ids of calls have nine letters.
MISTRAL = """
{%- set ns = namespace(user=true) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != ns.user %}
            {{- raise_exception('Questions and answers must alternate') }}
        {%- endif %}
        {%- set ns.user = not ns.user %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Ids of calls must have nine letters') }}
            {%- endif %}
            {%- set shown = call.function | tojson %}
            {{- shown[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""

# Arguments are put together as text; what was thought is cut off.
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>' }}
        {%- if m.content %}
            {{- m.content }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {{- '<tool_call>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>' + content + '<|im_end|>' }}
    {%- else %}
        {{- m.role + ': ' + m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|><think>\\n' if thinking | default(false) else '<|im_start|>' }}
{%- endif %}
"""

# Documents, a switch for thoughts, and the effort put into them.
GRANITE = """
{%- if tools %}
    {{- '<|im_start|>tools\\n' + (tools | tojson(indent=4)) + '<|im_end|>\\n' }}
{%- endif %}
{%- if documents %}
    {{- '<|im_start|>documents\\n' }}
    {%- for document in documents %}
        {{- '[' ~ loop.index ~ '] ' + document.title | default('untitled') + '\\n' + document.text + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant' }}
    {%- if reasoning_effort is defined %}
        {{- ' effort=' + reasoning_effort }}
    {%- endif %}
    {{- '\\n<think>' if thinking else '\\n' }}
{%- endif %}
"""

# Calls only where there is no content: not where it is empty, and not where the key is missing.
CONTENT_IS_NONE = """
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {{- '<|User|>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and m['content'] is none %}
        {%- for call in m['tool_calls'] %}
            {{- '<|Assistant|><tool_call>' + call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] + '\\n```' }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {{- '<|Assistant|>' + m['content'] + '<|im_end|>' }}
    {%- else %}
        {{- '<output>' + m['content'] + '</output>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|Assistant|>' }}
{%- endif %}
"""

# Ids of calls are made by the template and kept in a queue until their results come.
QUEUE = """
{%- set queue = namespace(ids=[], count=0) %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '<|im_middle|>' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {%- set made = 'functions.' + call.function.name + ':' + (queue.count | string) %}
        {%- set queue.count = queue.count + 1 %}
        {%- set _ = queue.ids.append(made) %}
        {{- '<|tool_call_begin|>' + made + '<|tool_call_argument_begin|>' }}
        {{- call.function.arguments | tojson }}
        {{- '<|tool_call_end|>' }}
    {%- endfor %}
    {%- if m.role == 'tool' %}
        {{- '\\n## Return of ' + queue.ids.pop(0) + '\\n' + m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|im_middle|>' }}
{%- endif %}
"""

FAMILIES = {
    "hermes": HERMES,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "granite": GRANITE,
}


def family(call: str, *, begins: str = "<|bot|>", thoughts: str = "", told: str = "", opens: str = "") -> str:
    """A template that writes calls and thoughts in a family's format.

    Args:
        call: how a call is written, from `f` (its function) and `id`.
        begins: what begins each answer.
        thoughts: how thoughts are written in front of an answer, from `m.reasoning_content`.
        told: what the model is told of tools.
        opens: what begins the answer that is asked for, behind `begins`.
    """
    return (
        "{% if tools %}" + told + "{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}" + begins + thoughts + "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{% set id, f = c.id, c.function %}" + call + "{% endfor %}<|end|>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + begins + opens + "{% endif %}"
    )


ONE_CALL_BESIDE_TEXT_OR_THOUGHTS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Not both content and thinking') }}{% endif %}"
    "<analysis>{{ m.content or m.thinking }}</analysis>"
    "<call>{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}</call>"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""As gpt-oss's: a message shows one call, and refuses text beside thoughts."""
