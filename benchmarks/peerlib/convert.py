"""llama.cpp's own converter on a random checkpoint, in the environment that ``environments.ensure_converter`` makes.

    .peers/converter/bin/python benchmarks/peerlib/convert.py SOURCE FOLDER OUT.gguf

A checkpoint of ``hotset synth`` has a byte-level tokenizer that the converter does not know by its hash; how text is
cut does not matter here, so that question is answered with "gpt-2".
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    source, folder, out = sys.argv[1:4]
    sys.path[:0] = [f"{source}/gguf-py", source]
    base = importlib.import_module("conversion.base")
    for kind in vars(base).values():
        if isinstance(kind, type) and hasattr(kind, "get_vocab_base_pre"):
            kind.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # type: ignore[attr-defined]
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
