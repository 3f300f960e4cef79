"""Converts records of all known forms to chats.

| form | keys |
|---|---|
| messages | `messages` with role and content, and `tools`; also as `conversations` |
| ShareGPT | `conversations` with from and value, and `system`, `tools` |
| Alpaca | `instruction`, `input`, `output`, and `system`, `history` |
| prompt and completion | `prompt`, `completion`, each a text or messages |
| pairs | `prompt`, `chosen`, `rejected`, each a text or messages; the prompt may be in both |
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
ASSISTANT = "assistant"
COLUMN_OF_CHATS = "prompt"
"""Column that identifies a table of chats."""
_LISTS = ("messages", "conversations", "conversation")
_ROLES = {
    **{"human": "user", "prompter": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT},
    **{"bot": ASSISTANT, "model": ASSISTANT, "observation": "tool"},
}
"""ShareGPT's name of a role → the usual name."""
_CALL = "function_call"
"""ShareGPT's role of a message in which the assistant calls tools."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning before its answer; templates read the first two."""
_NOT_FOR_TEMPLATES = ("train", "weight")
_MOST_DEPTH = 100


class ChatError(ValueError):
    """A record is no chat. The message is shown after the record's file and line."""


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form that chat templates accept."""

    messages: Sequence[Message]
    trained: tuple[int, ...]
    """Indices of the trained messages, all by the assistant."""
    tools: Sequence[Any] | None = None


def form_of(record: Any) -> str:
    """What a record holds by its keys: "chats" or "pairs"; "" if neither."""
    if not isinstance(record, Mapping):
        return ""
    if "chosen" in record and "rejected" in record:
        return "pairs"
    if any(isinstance(record.get(name), list) for name in _LISTS):
        return "chats"
    known = ({"prompt", "completion"}, {"instruction", "output"})
    return "chats" if any(keys <= record.keys() for keys in known) else ""


def read_chat(record: Mapping[str, Any]) -> Chat:
    """Convert a record of any form except pairs to a chat. Raises ChatError if the record has no
    known form, or violates it."""
    tools = _tools(record.get("tools"))
    for name in _LISTS:
        if isinstance(record.get(name), list):
            system_text = record.get("system")
            system = [{"role": "system", "content": system_text}] if _is_text(system_text) else []
            return _chat([*system, *_messages(record[name], name)], tools)
    if {"prompt", "completion"} <= record.keys():
        prompt = _side(record["prompt"], "prompt", "user")
        completion = _side(record["completion"], "completion", ASSISTANT)
        return _chat([*prompt, *completion], tools, first=len(prompt))
    if {"instruction", "output"} <= record.keys():
        return _chat(_alpaca(record), tools)
    keys = ", ".join(list(record)[:8]) or "nothing"
    raise ChatError(
        "no chat: it has neither messages, nor conversations, nor prompt and completion, nor "
        f"instruction and output, but {keys}"
    )


def read_pair(record: Mapping[str, Any]) -> tuple[Chat, Chat]:
    """Convert a record to (chat with the chosen answer, chat with the rejected answer). Raises
    ChatError if the record is no pair."""
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if missing:
        raise ChatError(f"no pair: it has no {' and no '.join(missing)}")
    sides = [_side(record[name], name, ASSISTANT) for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = _side(record["prompt"], "prompt", "user")
        # Some data sets repeat the prompt in both answers.
        sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    else:
        alike = zip(*sides, strict=False)
        same = next((n for n, (one, other) in enumerate(alike) if one != other), None)
        count = min(map(len, sides)) if same is None else same
        prompt, sides = sides[0][:count], [side[count:] for side in sides]
    if not prompt or not all(sides):
        raise ChatError(
            "no pair: there is no prompt, or an answer is missing, or both answers are equal"
        )
    tools = _tools(record.get("tools"))
    chosen, rejected = (_chat([*prompt, *side], tools, first=len(prompt)) for side in sides)
    return chosen, rejected


def texts_of(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield all texts in a value, including keys. Raises ChatError if the value is nested too
    deeply."""
    # Records are untrusted, and Python's recursion is limited.
    if depth > _MOST_DEPTH:
        raise ChatError(f"its values are nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts_of(item, depth + 1)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts_of(item, depth + 1)


def with_texts(chat: Chat, change: Callable[[str], str]) -> Chat:
    """Return a copy of a chat with `change` applied to all texts."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {change(key): changed(item) for key, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else value

    return replace(chat, messages=changed(list(chat.messages)), tools=changed(chat.tools))


def _chat(messages: Iterable[Message], tools: Sequence[Any] | None, first: int = 0) -> Chat:
    """Make a chat; the assistant's messages from index `first` on may be trained."""
    kept: list[Message] = []
    trained = []
    for number, message in enumerate(messages):
        wanted = message.get("train", message.get("weight", True))
        if number >= first and message["role"] == ASSISTANT and wanted not in (False, 0):
            trained.append(number)
        kept.append({k: v for k, v in message.items() if k not in _NOT_FOR_TEMPLATES})
    if not trained:
        raise ChatError("it has no assistant message that may be trained")
    return Chat(kept, tuple(trained), tools)


def _messages(values: Sequence[Any], name: str) -> list[Message]:
    messages: list[Message] = []
    for number, value in enumerate(values):
        where = f"{name}.{number}"
        if not isinstance(value, Mapping):
            raise ChatError(f"{where} is no object with a role and content")
        # null means absent, as in model servers
        message = {key: item for key, item in value.items() if item is not None}
        if "role" not in message and "from" in message:
            message = _of_sharegpt(message, where)
        messages.append(_normal(message, where))
    if not messages:
        raise ChatError(f"{name} is empty")
    return messages


def _of_sharegpt(message: Message, where: str) -> Message:
    role, text = str(message["from"]).lower(), message.get("value", "")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    if role != _CALL:
        return {**others, "role": _ROLES.get(role, role), "content": text}
    calls = _parsed(text) if isinstance(text, str) else text
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ChatError(f"{where} is a {_CALL}, but its value is not a JSON object with a name")
    wrapped = [{"type": "function", "function": dict(call)} for call in calls]
    return {**others, "role": ASSISTANT, "content": "", "tool_calls": wrapped}


def _normal(message: Message, where: str) -> Message:
    """Convert a message to the form that templates accept."""
    if not isinstance(message.get("role"), str):
        raise ChatError(f"{where} has no role")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined(content, where)
    elif content is not None and not isinstance(content, str):
        raise ChatError(f"{where}.content is no text")
    if content is None and message["role"] != ASSISTANT:
        raise ChatError(f"{where} has no content")
    thought = next((message[key] for key in _REASONING if key in message), None)
    if thought is not None:
        # Some templates read one of these keys, some the other.
        message = {"thinking": thought, **message, "reasoning_content": thought}
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise ChatError(f"{where}.tool_calls is no list of objects")
        message["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _joined(content: Sequence[Any], where: str) -> str:
    """Join the texts of a message's content that is a list of parts."""
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"{where}.content has a part that is no text, but {kind}")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Mapping[str, Any]) -> Message:
    """Convert a tool call's arguments from JSON text to an object, as model servers do."""
    function = call.get("function")
    inner = dict(function if isinstance(function, Mapping) else call)
    arguments = inner.get("arguments")
    if isinstance(arguments, str) and isinstance(parsed := _parsed(arguments), Mapping):
        inner["arguments"] = parsed
    return {**call, "function": inner} if isinstance(function, Mapping) else inner


def _side(value: Any, name: str, role: str) -> list[Message]:
    """Return the messages of a prompt or an answer. If it is plain text, it becomes one message by
    `role`. `name`: key of the record, for messages about errors."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise ChatError(f"{name} is neither a text nor a list of messages")
    return _messages(value, name)


def _alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    system, history, more = record.get("system"), record.get("history"), record.get("input")
    if _is_text(system):
        yield {"role": "system", "content": system}
    for turn in history if isinstance(history, list) else []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(map(_is_text, turn)):
            raise ChatError("history is no list of pairs of texts")
        yield {"role": "user", "content": turn[0]}
        yield {"role": ASSISTANT, "content": turn[1]}
    if not _is_text(record["instruction"]) or not isinstance(record["output"], str):
        raise ChatError("instruction or output is not a text, or the instruction is blank")
    instruction = record["instruction"]
    yield {"role": "user", "content": f"{instruction}\n{more}" if _is_text(more) else instruction}
    yield {"role": ASSISTANT, "content": record["output"]}


def _tools(value: Any) -> Sequence[Any] | None:
    if isinstance(value, str) and value.strip():
        value = _parsed(value)
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list):
        raise ChatError("tools is no list")
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
