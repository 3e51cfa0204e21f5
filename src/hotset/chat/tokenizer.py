"""The tokenizer of a model: text to tokens, tokens to text, conversations to prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hotset.chat.detokenize import Detokenizer, decode
from hotset.chat.dialect import AnswerParser, ChatSettings, Dialect, DialectChoice, find_folder_dialect
from hotset.chat.folder_tokenizer import read_folder_tokenizer
from hotset.chat.gguf_tokenizer import read_gguf_tokenizer
from hotset.chat.guard import Guard
from hotset.chat.stream import AnswerStream
from hotset.chat.template import ChatTemplate, TemplateDialect, find_folder_template, find_gguf_template
from hotset.chat.vocabulary import Vocabulary
from hotset.errors import CheckpointError, InternalError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from hotset.checkpoint.checkpoint import Checkpoint


class Tokenizer:
    """Implements ``hotset.engine.text.TextCodec``. Safe to use from several threads.

    Control tokens in text count as such in :meth:`encode_prompt`, whose caller writes the whole prompt, and never in
    the content of messages (see :mod:`hotset.chat.guard`).
    """

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        template_source: str | None = None,
        choice: DialectChoice | None = None,
    ) -> None:
        """Wrap a tokenizer of the tokenizers library; CheckpointError when the template is not valid.

        Conversations are written in the dialect of ``choice``, or else with the template.
        """
        self._backend = backend
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self.template = None
        #: How conversations are written; None when the checkpoint does not say.
        self.dialect: Dialect | None = None
        if choice is not None:
            self.dialect = choice.make(self)
        elif template_source is not None:
            bos, eos = self._text(vocabulary.bos_id), self._text(vocabulary.eos_id)
            self.template = ChatTemplate(template_source, bos_token=bos, eos_token=eos)
            self.dialect = TemplateDialect(self.template, Guard(vocabulary.added), self)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Rebuild the tokenizer in a GGUF file's metadata; CheckpointError names what is missing or not known."""
        return cls(*read_gguf_tokenizer(metadata), find_gguf_template(metadata))

    @classmethod
    def from_folder(cls, folder: Path, family: str | None = None) -> Self:
        """Load tokenizer.json and the dialect of a model folder; CheckpointError when they cannot be used.

        ``family`` is the architecture that the checkpoint states, for families that bring more than a template.
        """
        template = find_folder_template(folder)
        choice = find_folder_dialect(family, folder, has_template=template is not None)
        return cls(*read_folder_tokenizer(folder, choice.protocol_tokens if choice else ()), template, choice)

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._vocabulary.text_of(token_id) or ""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. A model's logits may be wider; ids beyond stand for no text."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if there is one."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._vocabulary.eos_ids

    def encode(self, text: str, *, parses_control: bool = True) -> list[int]:
        """Return the tokens of a text, nothing put before them.

        With ``parses_control`` the spelling of a control token becomes that token; without, it is ordinary text.
        """
        backend = self._backend if parses_control else self._plain_backend
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half a character at {error.start} ({text[error.start]!r}), which UTF-8 cannot write"
            ) from error
        return backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt as its caller wrote it: control tokens count, the prefix is put before.

        The prefix (a beginning-of-text token, when the checkpoint asks for one) is there once, written or not.
        """
        return self._with_prefix(self.encode(text))

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation up to the opening of the model's turn.

        ``options`` are the fields of :class:`hotset.chat.dialect.ChatSettings`, and variables of the template. The
        content of a message cannot write control tokens. RequestError when there is no dialect, or it refuses.
        """
        return self._require_dialect().encode(messages, ChatSettings.from_options(options))

    def answer_parser(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> AnswerParser:
        """Return a parser for the answer to this conversation; arguments and errors as for ``encode_messages``."""
        return self._require_dialect().parser(messages, ChatSettings.from_options(options))

    def _require_dialect(self) -> Dialect:
        if self.dialect is None:
            raise RequestError("this model has no chat template", "give the prompt as text instead of messages")
        return self.dialect

    def encode_parts(self, parts: Iterable[int | str]) -> list[int]:
        """Return the tokens of a prompt that comes as token ids and as texts, which cannot write control tokens."""
        ids: list[int] = []
        # Neighbouring texts are one text: words may join over their border.
        texts: list[str] = []
        for part in (*parts, None):
            if isinstance(part, str):
                texts.append(part)
                continue
            if any(texts):
                ids += self._encode_guarded("".join(texts))
            texts.clear()
            if part is not None:
                ids.append(part)
        return self._with_prefix(ids)

    def control_id(self, spelling: str) -> int:
        """Return the id of an added token; CheckpointError when there is none of this spelling."""
        if spelling not in self._added_ids:
            raise CheckpointError(f"the tokenizer has no token {spelling}, which the model's prompt needs")
        return self._added_ids[spelling]

    def _encode_guarded(self, text: str) -> list[int]:
        ids = self.encode(text, parses_control=False)
        if not self._guarded_ids.isdisjoint(ids):
            raise InternalError("a control token came out of the text of a message")
        return ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self._vocabulary.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    @cached_property
    def _guarded_ids(self) -> frozenset[int]:
        return frozenset(token.token_id for token in self._vocabulary.added if token.is_guarded)

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: token.token_id for token in self._vocabulary.added}

    @cached_property
    def _plain_backend(self) -> Backend:
        # A copy, because the switch is on the tokenizer and other threads use it.
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of text that a token stands for, none for control tokens and ids beyond the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.token_bytes(token_id)
        return known

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of a whole sequence, without control tokens and without a space that encoding put first."""
        text = decode(self.token_bytes, token_ids)
        return text.removeprefix(" ") if self._vocabulary.has_space_prefix else text

    def stream(self, stop: tuple[str, ...] = ()) -> AnswerStream:
        """Return a stream for the tokens of one answer."""
        return AnswerStream(Detokenizer(self.token_bytes), stop)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint: the one inside a GGUF file, or beside the files of a folder."""
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.files[0].parent, checkpoint.metadata.get("model_type"))
