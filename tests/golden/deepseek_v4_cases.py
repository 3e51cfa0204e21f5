"""The tiny DeepSeek-V4 models with stored goldens; imported by the oracle script and by the tests."""

from __future__ import annotations

from dsv4_files import TinyV4

NUM_TOKENS = 300
MODELS = {
    # Every kind of layer twice, hash and score routing, as in Flash. Sixteen index heads: with eight, rows for which no
    # head is positive score exactly 0 often enough to meet at the border of the choice, where any of them may win.
    "flash_float": TinyV4(ratios=(0, 4, 128, 4, 128, 0), hash_layers=3, index_heads=16, seed=1),
    # Released formats; no layer without compression, as in Pro; other counts of heads, groups, streams and experts.
    "pro_official": TinyV4(
        ratios=(128, 4, 128), formats="official", hash_layers=1, heads=6, o_groups=3, head_dim=96, rotary=32,
        index_heads=12, index_dim=64, window=20, experts=6, top_k=3, streams=2, iterations=7, hidden=64, inter=64,
        seed=2,
    ),
}  # fmt: skip
