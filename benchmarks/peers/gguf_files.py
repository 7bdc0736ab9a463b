"""GGUF files of one precision from a GGUF file of another, for llama.cpp.

Run: `python -m benchmarks.peers.gguf_files SOURCE TARGET --type BF16`. Catenary converts the same source
to bfloat16, so a BF16 file holds the very weights that it computes with, a Q8_0 file those rounded once more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    dequantize,
    quantize,
)

TYPES = {
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
# The writer sets these by itself.
_WRITTEN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, target: Path, kind: str) -> None:
    """Write `source`'s metadata, and its matrices in another type. Vectors stay float32, as is usual."""
    matrix_type, file_type = TYPES[kind]
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise ValueError(f"{source} names no architecture")
    scratch = target.with_suffix(".part")
    writer = GGUFWriter(scratch, str(architecture.contents()))
    for field in reader.fields.values():
        if field.name.startswith(_WRITTEN):
            continue
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if weights.ndim < 2:
            writer.add_tensor(tensor.name, weights)
            continue
        # Rounded to bfloat16 first, as the weights that Catenary quantizes are.
        rounded = dequantize(quantize(weights, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, quantize(rounded, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.rename(target)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.gguf_files", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), required=True)
    options = parser.parse_args()
    convert(options.source, options.target, options.type)


if __name__ == "__main__":
    main()
