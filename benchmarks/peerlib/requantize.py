"""Requantise a GGUF with llama.cpp's own quantiser (runs in the llama-cpp-python environment).

.peers/llama-cpp/bin/python benchmarks/peerlib/requantize.py --format Q4_0 IN.gguf OUT.gguf

``pure``: every matrix, embeddings too, in the one format that the name promises.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp

FILE_TYPES = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


def requantize(source: Path, target: Path, format_name: str) -> None:
    """Write ``target``; it appears under its name only when complete."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = 2
    params.ftype = FILE_TYPES[format_name]
    params.allow_requantize = True
    params.quantize_output_tensor = True
    params.pure = True
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), params)
    if status != 0:
        raise SystemExit(f"llama_model_quantize of {source} to {format_name} returned {status}")
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=sorted(FILE_TYPES), required=True)
    options = parser.parse_args()
    requantize(options.source, options.target, options.format)


if __name__ == "__main__":
    main()
