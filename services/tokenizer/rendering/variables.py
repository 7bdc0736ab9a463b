"""Which variables of a template a request may set."""

from __future__ import annotations

from collections.abc import Container, Iterator

from jinja2 import meta, nodes

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Words of transformers' own call. A caller who sets one means that, not a variable of the template.
_RESERVED = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "kwargs",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)
_SPECIAL_TOKENS = frozenset(
    f"{name}_token" for name in ("bos", "cls", "eos", "image", "mask", "pad", "sep", "unk")
)
_TESTS, _FILTERS = frozenset({"defined", "undefined", "none"}), frozenset({"default", "d"})


def names_read(parsed: nodes.Template) -> frozenset[str]:
    """Names that the template looks up outside of itself."""
    return frozenset(meta.find_undeclared_variables(parsed))


def settable_variables(parsed: nodes.Template, taken: Container[str]) -> frozenset[str]:
    """Names that the template reads and nobody but a request gives; `taken` are further ones that are given.

    A name that the template sets itself is one only if it asks whether it was given: jinja counts as read
    what is set in a branch and used after it.
    """
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"} - set(_asked(parsed))
    return frozenset(
        name
        for name in names_read(parsed) - _OURS - _RESERVED - _SPECIAL_TOKENS - own
        if not name.startswith("_") and name not in taken
    )


def _asked(parsed: nodes.Template) -> Iterator[str]:
    """Names of which the template asks whether they are defined, or for which it has a default."""
    for kind, names in ((nodes.Test, _TESTS), (nodes.Filter, _FILTERS)):
        for node in parsed.find_all(kind):
            if node.name in names and isinstance(node.node, nodes.Name):
                yield node.node.name
