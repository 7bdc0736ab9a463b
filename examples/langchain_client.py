"""Talk to Catenary with LangChain (the package langchain-openai).

python examples/langchain_client.py [--base-url URL] [--model NAME] [QUESTION]
"""

from __future__ import annotations

import argparse
import os
import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAIError
from pydantic import BaseModel, Field, SecretStr


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=40)
    is_capital: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Name the capital of France.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    options = parser.parse_args()

    key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    model = ChatOpenAI(
        model=options.model, base_url=options.base_url, api_key=key, temperature=0, max_completion_tokens=64
    )
    prompt = ChatPromptTemplate([("system", "Answer in one sentence."), ("user", "{question}")])
    chain = prompt | model | StrOutputParser()
    print(chain.invoke({"question": options.question}))
    for piece in chain.stream({"question": options.question}):
        print(piece, end="", flush=True)
    print()

    # The answer is held to the schema while it is generated.
    structured = model.with_structured_output(City, method="json_schema")
    print(structured.invoke(f"{options.question} Answer as JSON."))


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"{error} (see --base-url, and OPENAI_API_KEY if the server has keys)")
