"""Chat templates: a conversation rendered as text by the Jinja2 program that comes with a checkpoint.

The program is not trusted: it runs in Jinja2's immutable sandbox, with the names and filters that Hugging Face
transformers gives to templates and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.chat.dialect import AnswerParser, ChatSettings, Coder, Message, PlainParser
from hotset.chat.folder_tokenizer import read_config, read_settings
from hotset.chat.guard import Guard
from hotset.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Names that the renderer itself gives to a template.
_OURS = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "strftime_now"})
#: What templates call settings that have no common name.
_NAMES = {"thinking": ("thinking", "enable_thinking"), "effort": ("effort", "reasoning_effort")}


class _Refusal(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """A compiled template. Rendering keeps no state, so one template serves many threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile ``source``; CheckpointError when it is not a valid template."""
        from jinja2 import TemplateError, meta

        environment = _environment()
        try:
            self._variables = meta.find_undeclared_variables(environment.parse(source)) - _OURS
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template of the checkpoint is not valid: {error}") from error
        self.source = source
        self._names = {"bos_token": bos_token, "eos_token": eos_token}

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, beside the messages: what ``options`` may hold."""
        return frozenset(self._variables)

    def render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as text, control tokens spelled out, with the opening of the model's turn.

        Each message is a mapping with at least a ``role``; a ``content`` that is a list of text parts is joined.
        ``options`` are variables of the template (``tools``, ``enable_thinking``, ...). RequestError when the template
        does not read one of them, or refuses the conversation.
        """
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        options = options or {}
        unread = sorted(set(options) - self._variables)
        if unread:
            raise RequestError(
                f"the chat template does not read {', '.join(unread)}",
                f"it reads: {', '.join(sorted(self._variables - {'add_generation_prompt'})) or 'messages only'}",
            )
        values = {"add_generation_prompt": True, **self._names, **options}
        try:
            return self._template.render(messages=[_plain(message) for message in messages], **values)
        except _Refusal as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        except SecurityError as error:
            raise CheckpointError(f"the chat template of the checkpoint does what it may not: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RequestError(
                f"the chat template cannot render these messages: {error}",
                'each message needs a role and a text, e.g. {"role": "user", "content": "Hello"}',
            ) from error


class TemplateDialect:
    """Implements :class:`hotset.chat.dialect.Dialect` with the checkpoint's own template."""

    name = "chat template"

    def __init__(self, template: ChatTemplate, guard: Guard, coder: Coder) -> None:
        """``coder`` is the tokenizer of the checkpoint, ``guard`` keeps its control tokens out of messages."""
        self._template = template
        self._guard = guard
        self._coder = coder

    def encode(self, messages: Sequence[Message], settings: ChatSettings) -> list[int]:
        """Return the tokens of the conversation up to the opening of the model's turn, see ``Dialect``."""
        (messages, options), mark = self._guard.protect((list(messages), self._options(settings)))
        text = self._template.render(messages, options)
        if mark is None:
            return self._coder.encode_prompt(text)
        return self._coder.encode_parts(self._guard.split(text, mark))

    def parser(self, messages: Sequence[Message], settings: ChatSettings) -> AnswerParser:
        """Templates say nothing about answers, so all text is content."""
        return PlainParser()

    def _options(self, settings: ChatSettings) -> dict[str, Any]:
        """The settings under the names that the template has for them; one without a name is left for it to refuse."""
        options = dict(settings.variables)
        for setting, value in settings.named.items():
            names = _NAMES.get(setting, (setting,))
            options[next((name for name in names if name in self._template.variables), setting)] = value
        return options


def _plain(message: Message) -> dict[str, Any]:
    """Return the message with a list of text parts as one string; RequestError for parts that are not text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message has no role: {str(message)[:80]}", 'e.g. {"role": "user", "content": "Hello"}')
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"a {message['role']} message holds a part of type {kind!r}, only text is supported")
    return {**message, "content": "".join(part["text"] for part in content)}


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the model's own text for training; for us it is its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja2's own filter escapes HTML, which a model must not see.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _raise(message: str) -> None:
    raise _Refusal(message)


def find_gguf_template(metadata: Mapping[str, Any]) -> str | None:
    """Return the default chat template of a GGUF file."""
    source = metadata.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise CheckpointError("tokenizer.chat_template is not a string")
    return source


def find_folder_template(folder: Path) -> str | None:
    """Return the default chat template of a model folder: chat_template.jinja, else the config files."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from error
    source = read_settings(folder).get("chat_template") or read_config(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{folder}: chat_template is neither a string nor a list with one named default")
    return source
