"""Convert a GGUF file to a Hugging Face directory: `python -m services.engine.model.gguf FILE DIRECTORY`.

Run by `prepare` in a process of its own; a failure's reason is the last line on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import modeling_gguf_pytorch_utils as gguf_utils

# Neither is annotated by transformers.
_model_from_config: Any = AutoModelForCausalLM.from_config
_load_gguf: Any = gguf_utils.load_gguf_checkpoint


def convert(file: Path, directory: Path) -> None:
    """Write the config, generation config, tokenizer, chat template and bfloat16 weights of `file`."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.save_pretrained(directory)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    # The module is only asked for its parameters' names. `from_pretrained` would want accelerate for the same
    # work, and `save_pretrained` refuses a model that came from GGUF.
    with torch.device("meta"):
        model = _model_from_config(config)
    tensors = _load_gguf(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)[
        "tensors"
    ]
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(dict(model.named_parameters())) - set(tensors) - tied)
    if missing:
        raise ValueError(f"the file holds no {missing[0]} (and {len(missing) - 1} other tensors)")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
