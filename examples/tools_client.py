"""Let the model call functions, with the openai package: ask, run what it calls, tell it the results.

python examples/tools_client.py [--base-url URL] [--model NAME] [--required] [QUESTION]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from openai import OpenAI, OpenAIError

ROUNDS = 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "clear", "degrees": 21})


def result_of(name: str, arguments: str) -> str:
    """What a call gives. A small model writes bad calls too: it is told, and may try again."""
    try:
        return {"get_weather": get_weather}[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the weather in Paris?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="the first that is served, unless given")
    parser.add_argument("--required", action="store_true", help="have the first answer be a call")
    options = parser.parse_args()

    client = OpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = options.model or client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": options.question}]
    for turn in range(ROUNDS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if options.required and turn == 0 else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        message = answer.choices[0].message
        if message.content:
            print(message.content)
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = result_of(call.function.name, call.function.arguments)
            print(f"{call.function.name}({' '.join(call.function.arguments.split())}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"{error} (see --base-url, and OPENAI_API_KEY if the server has keys)")
