"""``hotset synth``: writes a random checkpoint in the layout of a model that is not here."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from hotset.units import format_bytes

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@click.command(name="synth")
@click.argument("name")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Only the first N layers [default: all].")
@click.option("--seed", type=click.IntRange(min=0), default=1, metavar="N", help="Seed of the weights [default: 1].")
@click.option("--headers-only", is_flag=True, help="Write headers and sparse files without data: seconds for any size.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder to write [default: in the store].")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder with a tokenizer.json to copy [default: a token per byte; none for GLM].",
)
@click.option("--force", is_flag=True, help="Replace what an earlier synth wrote there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    name: str,
    layers: int | None,
    seed: int,
    headers_only: bool,
    out: Path | None,
    tokenizer: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a random checkpoint of the model NAME: its tensor names, shapes and formats, well-scaled random weights.

    NAME is deepseek-v4-flash, deepseek-v4-pro, glm-5.2 or glm-5.2-int4, at full width, or the smaller deepseek-v4-mid,
    deepseek-v4-mini and deepseek-v4-narrow.
    With --layers only the first layers are written, without the draft head. It computes as fast as the real model does,
    and answers with noise: for benchmarks and tests.

    Without --out it becomes the model synth/NAME-lN-sN, which `hotset list` shows and `hotset run` takes. The path is
    printed on standard output.
    """
    from hotset.checkpoint.progress import BarProgress, LineProgress
    from hotset.checkpoint.synth import write_checkpoint
    from hotset.config import load_settings
    from hotset.plan.cards import cut_layers, describe_config, read_card

    config = read_card(name).config
    model = f"synth/{name}-{f'l{layers}-' if layers else ''}{'headers' if headers_only else f's{seed}'}"
    if layers is not None:
        config = cut_layers(config, layers)
    spec = describe_config(name, config)
    files = _tokenizer(tokenizer, config)
    folder = load_settings().models_dir / model if out is None else out
    write = partial(
        write_checkpoint, folder, model if out is None else folder.name, config, spec.tensors, seed,
        headers_only=headers_only, files=files, force=force,
    )  # fmt: skip
    if sys.stderr.isatty():
        with BarProgress(sys.stderr) as progress:
            record = write(progress)
    else:
        record = write(LineProgress(sys.stderr, "write"))
    what = f"{len(spec.tensors):,} tensors, {format_bytes(record.total_bytes)}"
    click.echo(f"{record.name} is ready ({what}{', no data' if headers_only else ''})", err=True)
    if as_json:
        content = {"name": record.name, "path": str(folder), "tensors": len(spec.tensors), "bytes": record.total_bytes}
        click.echo(json.dumps(content | {"seed": seed, "has_data": not headers_only}, indent=2))
    else:
        click.echo(str(folder))


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> dict[str, str]:
    """The tokenizer's files by name: those of ``folder``, or one token per byte. RequestError when one is too large.

    A family without a beginning-of-text token has no such stand-in, and nothing runs it yet: no files.
    """
    from hotset.chat.random_tokenizer import byte_tokenizer
    from hotset.chat.tokenizer import Tokenizer
    from hotset.errors import RequestError

    vocab_size = config["vocab_size"]
    if folder is None and "bos_token_id" not in config:
        return {}
    if folder is None:
        return byte_tokenizer(vocab_size, config["bos_token_id"], config["eos_token_id"])
    size = Tokenizer.from_folder(folder).vocab_size
    if size > vocab_size:
        raise RequestError(f"the tokenizer in {folder} has {size} tokens, the model {vocab_size}")
    return {name: (folder / name).read_text("utf-8") for name in _TOKENIZER_FILES if (folder / name).is_file()}
