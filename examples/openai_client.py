"""Talk to Catenary with the openai package.

python examples/openai_client.py [--base-url URL] [--model NAME] [QUESTION]
"""

from __future__ import annotations

import argparse
import os
import sys

from openai import OpenAI, OpenAIError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Name the capital of France.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="the first that is served, unless given")
    options = parser.parse_args()

    client = OpenAI(base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = options.model or client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=64,
    )
    print(answer.choices[0].message.content)
    if answer.usage is not None:
        print(f"[{answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens]")

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    completion = client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    print(completion.choices[0].text)


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"{error} (see --base-url, and OPENAI_API_KEY if the server has keys)")
