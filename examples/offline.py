"""Generate for many prompts in this process, without a server: python examples/offline.py [--model MODEL]"""

from __future__ import annotations

import argparse

from catenary import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The opposite of hot is", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="alias, directory, GGUF file or hub id")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    with LLM(options.model, dtype=options.dtype, kv_cache_gib=0.25) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        question = [{"role": "user", "content": "Name the capital of France."}]
        print(llm.chat(question, SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)

        choice = SamplingParams(temperature=0, structured_outputs={"choice": ["positive", "negative"]})
        print(llm.generate("I love it. This review is", choice)[0].outputs[0].text)


if __name__ == "__main__":
    main()
