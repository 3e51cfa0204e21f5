"""DeepSeek-V4: a conversation as callers write it, checked field by field and brought into the turns of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotset.errors import RequestError

_COMMON = {"role", "content"}
#: What a message of each role may hold.
FIELDS = {
    "system": _COMMON | {"tools", "response_format"},
    "developer": _COMMON | {"tools", "response_format"},
    "user": _COMMON | {"task"},
    "assistant": _COMMON | {"reasoning_content", "tool_calls", "task"},
    "tool": _COMMON | {"tool_call_id"},
    "latest_reminder": _COMMON,
}
#: Tasks by name, and the token that asks for each.
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}


#: Makes the error for a fault: what was found, and optionally a hint.
Fault = Callable[..., RequestError]


@dataclass(frozen=True)
class Argument:
    """One argument of a call: a string as it is, or the JSON text of any other value."""

    name: str
    text: str
    is_string: bool


@dataclass(frozen=True)
class Call:
    """A tool call of the history."""

    call_id: str
    name: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Result:
    """What a tool answered to the call ``call_id``."""

    call_id: str
    text: str


@dataclass
class Turn:
    """One turn of the prompt. ``parts`` are a user's texts and tool results; other roles have at most one text."""

    role: str
    parts: list[str | Result]
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[str, ...] = ()
    tool_names: tuple[str, ...] = ()
    response_format: str = ""
    task: str = ""

    @property
    def opens_answer(self) -> bool:
        """The model may answer this turn."""
        return self.role in ("user", "developer")


@dataclass
class _Place:
    """Where a fault is, for messages about it."""

    index: int
    role: str = field(default="")

    def fault(self, what: str, hint: str | None = None) -> RequestError:
        role = f" ({self.role})" if self.role else ""
        return RequestError(f"message {self.index}{role}: {what}", hint)


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Check the messages and merge them into turns.

    Tool results become parts of the user turn before them; neighbouring user messages are one turn, unless the earlier
    has a task. Results of one turn are put in the order of the calls they answer. RequestError names the message and
    the field that cannot be.
    """
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        turn = _read_message(_Place(index), message)
        last = turns[-1] if turns else None
        is_result = turn.role == "tool"
        turn.role = "user" if is_result else turn.role
        if last and last.role == turn.role == "user" and (is_result or not last.task):
            last.parts += turn.parts
            last.task = last.task or turn.task
        else:
            turns.append(turn)
    _sort_results(turns)
    return turns


def _sort_results(turns: Sequence[Turn]) -> None:
    order: dict[str, int] = {}
    for turn in turns:
        if turn.calls:
            order = {call.call_id: number for number, call in enumerate(turn.calls) if call.call_id}
        results = [part for part in turn.parts if isinstance(part, Result)]
        if order and len(results) > 1:
            # A result of an unknown call stays in front, as in the official encoder.
            results.sort(key=lambda result: order.get(result.call_id, 0))
            turn.parts = [results.pop(0) if isinstance(part, Result) else part for part in turn.parts]


def _read_message(place: _Place, message: Mapping[str, Any]) -> Turn:
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise place.fault(f"the role is {role!r}", f"one of {', '.join(FIELDS)}")
    place.role = role
    unknown = sorted(map(str, set(message) - FIELDS[role]))
    if unknown:
        raise place.fault(
            f"this model's prompt has no place for {', '.join(unknown)}",
            f"a message of this role holds {', '.join(sorted(FIELDS[role]))}",
        )
    texts = _texts(place, message.get("content"))
    if role == "tool":
        call_id = _string(place, message, "tool_call_id")
        return Turn(role, [Result(call_id, "\n\n".join(texts))])
    if role == "developer" and not any(texts):
        raise place.fault("the content is empty")
    tools, names = read_tools(place.fault, message.get("tools"))
    return Turn(
        role,
        list(texts) if role == "user" else ["\n\n".join(texts)],
        reasoning=_string(place, message, "reasoning_content"),
        calls=_calls(place, message.get("tool_calls")),
        tools=tools,
        tool_names=names,
        response_format=read_format(place.fault, message.get("response_format")),
        task=_task(place, message.get("task")),
    )


def _texts(place: _Place, content: Any) -> list[str]:
    """The content as texts: a string, a list of text parts, or nothing where an assistant only calls tools."""
    if isinstance(content, str):
        return [content]
    if content is None and place.role == "assistant":
        return [""]
    if not isinstance(content, list) or not content:
        raise place.fault(f"the content is {_shown(content)}, expected a text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise place.fault(f"a part of the content is of type {kind!r}, only text is supported")
        texts.append(part["text"])
    return texts


def _string(place: _Place, message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise place.fault(f"{name} is {_shown(value)}, expected a text")
    return value or ""


def _task(place: _Place, task: Any) -> str:
    if task is None:
        return ""
    # An answer of the model has no place for a routing decision.
    known = [name for name in TASKS if place.role != "assistant" or name != "action"]
    if task not in known:
        raise place.fault(f"the task is {_shown(task)}", f"one of {', '.join(known)}")
    return str(task)


def _calls(place: _Place, calls: Any) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise place.fault(f"tool_calls is {_shown(calls)}, expected a list")
    return tuple(_call(place, call) for call in calls)


def _call(place: _Place, call: Any) -> Call:
    function = _function(place.fault, call, "a tool call", {"id", "type", "function"})
    unknown = sorted(map(str, set(function) - {"name", "arguments"}))
    if unknown:
        raise place.fault(f"a tool call's function holds {', '.join(unknown)}, expected name and arguments")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise place.fault(f"the id of a tool call is {_shown(call_id)}, expected a text")
    return Call(call_id or "", function["name"], _arguments(place, function.get("arguments")))


def _arguments(place: _Place, arguments: Any) -> tuple[Argument, ...]:
    """The arguments of a call in the history, given as JSON text or as an object.

    Text that is no JSON object, such as that of a call that was cut, becomes one argument called ``arguments``, as in
    the official encoder: the model sees what was there.
    """
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else {"arguments": arguments}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise place.fault(f"the arguments of a tool call are {_shown(arguments)}, expected a JSON object as text")
    return tuple(
        Argument(name, value, True) if isinstance(value, str) else Argument(name, to_json(place.fault, value), False)
        for name, value in arguments.items()
    )


def _function(fault: Fault, entry: Any, what: str, fields: set[str]) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping) or entry.get("type", "function") != "function":
        raise fault(f'{what} is {_shown(entry)}, expected {{"type": "function", "function": {{...}}}}')
    unknown = sorted(map(str, set(entry) - fields))
    if unknown:
        raise fault(f"{what} holds {', '.join(unknown)}, expected {', '.join(sorted(fields))}")
    function = entry.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise fault(f"the function of {what} has no name")
    return function


def read_tools(fault: Fault, tools: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the schema of every tool as one line of JSON, and the names; ``fault`` makes the error."""
    if tools is None:
        return (), ()
    if not isinstance(tools, list | tuple):
        raise fault(f"tools is {_shown(tools)}, expected a list")
    functions = [_function(fault, tool, "a tool", {"type", "function"}) for tool in tools]
    return tuple(to_json(fault, function) for function in functions), tuple(f["name"] for f in functions)


def read_format(fault: Fault, response_format: Any) -> str:
    """Return the schema of an answer as JSON, ``""`` when there is none; ``fault`` makes the error."""
    if response_format is None:
        return ""
    if not isinstance(response_format, Mapping) or not response_format:
        raise fault(f"response_format is {_shown(response_format)}, expected a JSON object")
    return to_json(fault, response_format)


def to_json(fault: Fault, value: Any) -> str:
    """Return a value as JSON, other letters than ASCII as they are; ``fault`` makes the error."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise fault(f"{_shown(value)} is not JSON: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
