"""The tokenizer inside a GGUF file, rebuilt on the tokenizers library.

Layout of the ``tokenizer.ggml.*`` keys: ggml-org/ggml, docs/gguf.md; their meaning: ggml-org/llama.cpp,
src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hotset.chat.pretokenizers import find_cut, make_pre_tokenizer
from hotset.chat.vocabulary import SPACE_MARK, AddedToken, Spelling, TokenKind, Vocabulary, find_end_tokens
from hotset.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_KEY = "tokenizer.ggml."
#: tokenizer.ggml.token_type; an unknown token (2) stands for no text, like a control token.
_KINDS = {
    0: TokenKind.UNUSED,
    1: TokenKind.NORMAL,
    2: TokenKind.CONTROL,
    3: TokenKind.CONTROL,
    4: TokenKind.LITERAL,
    5: TokenKind.UNUSED,
    6: TokenKind.BYTE,
}


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Backend, Vocabulary]:
    """Build the tokenizer from the metadata of a GGUF file; CheckpointError names the key that is missing or wrong."""
    reader = _Reader(metadata)
    model = reader.text("model")
    if model == "gpt2":
        backend = _build_byte_level(reader)
    elif model == "llama":
        backend = _build_byte_fallback(reader)
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)",
            "use the model's original folder with its tokenizer.json",
        )
    return backend, _vocabulary(reader, is_byte_level=model == "gpt2")


class _Reader:
    """Typed access to the keys, and the lists that everything else needs."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.strings("tokens")
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for token_id, token in enumerate(self.tokens) if self.ids[token] != token_id)
            raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} twice")
        self.kinds = self._kinds()

    def _kinds(self) -> list[TokenKind]:
        types = self._metadata.get(_KEY + "token_type")
        if types is None:
            return [TokenKind.NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens")
        unknown = {int(code) for code in types} - _KINDS.keys()
        if unknown:
            raise CheckpointError(f"tokenizer.ggml.token_type holds {min(unknown)}, expected 0 to 6")
        return [_KINDS[int(code)] for code in types]

    def text(self, name: str) -> str:
        value = self._metadata.get(_KEY + name)
        if not isinstance(value, str):
            raise CheckpointError(f"tokenizer.ggml.{name} is {'missing' if value is None else 'not a string'}")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if _KEY + name in self._metadata else None

    def strings(self, name: str) -> list[str]:
        value = self._metadata.get(_KEY + name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
            raise CheckpointError(f"tokenizer.ggml.{name} is missing, or not a list of strings")
        return list(value)

    def scores(self) -> list[float]:
        value = self._metadata.get(_KEY + "scores")
        if value is None or len(value) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.scores is missing, or has not {len(self.tokens)} entries")
        return [float(score) for score in value]

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, expected true or false")
        return value

    def token_id(self, name: str) -> int | None:
        value = self._metadata.get(f"{_KEY}{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {value!r}, there are {len(self.tokens)} tokens")
        return value

    def added(self) -> tuple[AddedToken, ...]:
        return tuple(
            AddedToken(token, token_id, is_control=self.kinds[token_id] is TokenKind.CONTROL)
            for token_id, token in enumerate(self.tokens)
            if self.kinds[token_id] in (TokenKind.CONTROL, TokenKind.LITERAL) and token
        )


def _build_byte_level(reader: _Reader) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    cut = find_cut(reader.optional_text("pre"))
    merges = [_merge(line) for line in reader.strings("merges")]
    try:
        backend = Backend(models.BPE(vocab=reader.ids, merges=merges, ignore_merges=cut.ignore_merges))
    except Exception as error:  # the library raises plain Exception, e.g. for a merge of unknown tokens
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    if cut.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = make_pre_tokenizer(cut)
    _add_tokens(backend, reader)
    return backend


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise CheckpointError(f"tokenizer.ggml.merges holds {line!r}, expected two tokens and a space between")
    return left, right


def _build_byte_fallback(reader: _Reader) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    if reader.flag("remove_extra_whitespaces", False):
        raise CheckpointError("tokenizer.ggml.remove_extra_whitespaces is true, which hotset does not do")
    unknown_id = reader.token_id("unknown")
    model = models.BPE(
        vocab=reader.ids,
        merges=_merges_from_scores(reader),
        unk_token=None if unknown_id is None else reader.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    replace = normalizers.Replace(" ", SPACE_MARK)
    has_prefix = reader.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace] if has_prefix else [replace])
    _add_tokens(backend, reader)
    return backend


def _merges_from_scores(reader: _Reader) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's BPE would make, best first.

    SentencePiece joins the two neighbours whose union has the best score, the first such pair in the text when scores
    are equal. Every way to cut a token into two tokens is a merge with that token's score. Where scores are equal (runs
    of spaces), merges with a longer left part come first: that lets the first run grow, as in SentencePiece.
    """
    scores = reader.scores()
    normal = [token for token, kind in zip(reader.tokens, reader.kinds, strict=True) if kind is TokenKind.NORMAL]
    known = set(normal)
    merges = []
    for token in normal:
        score = scores[reader.ids[token]]
        for border in range(1, len(token)):
            left, right = token[:border], token[border:]
            if left in known and right in known:
                merges.append((-score, -len(left), -len(right), left, right))
    merges.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: Backend, reader: _Reader) -> None:
    from tokenizers import AddedToken as BackendToken

    backend.add_tokens(
        [BackendToken(token.content, special=token.is_guarded, normalized=False) for token in reader.added()]
    )


def _vocabulary(reader: _Reader, *, is_byte_level: bool) -> Vocabulary:
    added = reader.added()
    bos_id = reader.token_id("bos")
    named = (reader.token_id(name) for name in ("eos", "eot", "eom"))
    adds_bos = reader.flag("add_bos_token", not is_byte_level or find_cut(reader.optional_text("pre")).ignore_merges)
    if adds_bos and bos_id is None:
        raise CheckpointError("tokenizer.ggml.add_bos_token is true, and there is no tokenizer.ggml.bos_token_id")
    return Vocabulary(
        size=len(reader.tokens),
        spelling=Spelling.BYTE_LEVEL if is_byte_level else Spelling.BYTE_FALLBACK,
        text_of=lambda token_id: reader.tokens[token_id] if 0 <= token_id < len(reader.tokens) else None,
        kind_of=lambda token_id: reader.kinds[token_id] if token_id < len(reader.kinds) else TokenKind.UNUSED,
        added=added,
        bos_id=bos_id,
        eos_id=reader.token_id("eos"),
        eos_ids=frozenset(token_id for token_id in named if token_id is not None) | find_end_tokens(added),
        prefix_ids=(bos_id,) if adds_bos and bos_id is not None else (),
        has_space_prefix=not is_byte_level and reader.flag("add_space_prefix", True),
    )
