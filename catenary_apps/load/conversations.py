"""What is asked: conversations of one turn or several, random ones made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from catenary_apps.load.lengths import Lengths
from catenary_apps.load.sources import Prompt, Source


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `output_tokens`: the longest answer, None: as the server likes."""

    prompt: Prompt
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one session, at least one; each further one is asked when the one before is answered, with all
    that was said so far in front of it.
    """

    turns: tuple[Turn, ...]


def random_conversations(
    count: int,
    *,
    prompts: Lengths,
    outputs: Lengths,
    source: Source,
    seed: int = 0,
    prefix_tokens: int = 0,
    prefixes: int = 1,
    turns: int = 1,
) -> list[Conversation]:
    """`count` conversations of random prompts; each depends on the seed and its own number alone.

    Args:
        prompts: lengths of the prompts in tokens, without prefix.
        outputs: lengths of the answers in tokens.
        source: what makes prompts of that many tokens.
        prefix_tokens: length of what stands before the first prompt of a conversation, one of `prefixes`
            texts.
        turns: requests of each conversation.
    """
    heads = [source.make(random.Random(f"prefix {seed} {index}"), prefix_tokens) for index in range(prefixes)]

    def conversation(index: int) -> Conversation:
        generator = random.Random(f"conversation {seed} {index}")
        head = generator.choice(heads)
        made = []
        for number in range(turns):
            prompt = source.make(generator, prompts.draw(generator))
            if prefix_tokens and number == 0:
                prompt = source.join(head, prompt)
            made.append(Turn(prompt, outputs.draw(generator)))
        return Conversation(tuple(made))

    return [conversation(index) for index in range(count)]
