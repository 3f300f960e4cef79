"""Converts records to chats, from all forms in docs/fine_tuning.md."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
ASSISTANT = "assistant"
COLUMN_OF_CHATS = "prompt"  # identifies a table of chats
_LISTS = ("messages", "conversations", "conversation")
_ROLES = {
    **{"human": "user", "prompter": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT},
    **{"bot": ASSISTANT, "model": ASSISTANT, "observation": "tool"},
}
"""ShareGPT's name of a role → the usual name."""
_USUAL = "system", "developer", "user", ASSISTANT, "tool"
_CALL = "function_call"  # ShareGPT's role of a message in which the assistant calls tools
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning; templates read the first two."""
_NOT_FOR_TEMPLATES = ("train", "weight")
_MOST_DEPTH = 100


class ChatError(ValueError):
    """A record cannot be trained; the message is shown after its file and line."""


@dataclass(frozen=True)
class Chat:
    """A conversation, as chat templates accept it."""

    messages: list[Message]
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
    """Convert a record of any form except pairs. Raises ChatError if it is no chat."""
    for name in _LISTS:
        if isinstance(record.get(name), list):
            return _chat([*_system(record), *_messages(record[name], name)], record)
    if {"prompt", "completion"} <= record.keys():
        prompt = _side(record["prompt"], "prompt", "user")
        completion = _side(record["completion"], "completion", ASSISTANT)
        return _chat([*prompt, *completion], record, first=len(prompt))
    if {"instruction", "output"} <= record.keys():
        return _chat([*_system(record), *_alpaca(record)], record)
    keys = ", ".join(list(record)[:8]) or "nothing"
    raise ChatError(
        "no chat: it has neither messages, nor conversations, nor prompt and completion, nor "
        f"instruction and output, but {keys}"
    )


def read_pair(record: Mapping[str, Any]) -> tuple[Chat, Chat]:
    """Convert a pair to chats with (chosen, rejected) answers. Raises ChatError."""
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if missing:
        raise ChatError(f"no pair: it has no {' and no '.join(missing)}")
    sides = [_side(record[name], name, ASSISTANT) for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = _side(record["prompt"], "prompt", "user")
        # Some data sets repeat the prompt in both answers.
        sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    else:
        equal = takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))
        prompt = [message for message, _ in equal]
        sides = [side[len(prompt) :] for side in sides]
    if not prompt or not all(sides):
        raise ChatError(
            "no pair: there is no prompt, or an answer is missing, or both answers are equal"
        )
    chosen, rejected = (_chat([*prompt, *side], record, first=len(prompt)) for side in sides)
    return chosen, rejected


def with_texts(chat: Chat, change: Callable[[str], str]) -> Chat:
    """Return a copy of a chat with all texts changed, including keys."""

    def changed(value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            return change(value)
        # Records are untrusted, and Python's recursion is limited.
        if depth > _MOST_DEPTH:
            raise ChatError(f"its values are nested more than {_MOST_DEPTH} levels deep")
        if isinstance(value, dict):
            return {
                # asked here, too, to save most calls
                change(key): change(item) if type(item) is str else changed(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [changed(item, depth + 1) for item in value]
        return value

    return replace(chat, messages=changed(chat.messages), tools=changed(chat.tools))


def _chat(messages: Iterable[Message], record: Mapping[str, Any], first: int = 0) -> Chat:
    """Make a chat; the assistant's messages from index `first` on may be trained."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools)
    if tools not in (None, "") and not isinstance(tools, list):
        raise ChatError("tools is no list")
    kept: list[Message] = []
    trained = []
    for number, message in enumerate(messages):
        wanted = message.get("train", message.get("weight", True))
        if number >= first and message["role"] == ASSISTANT and wanted not in (False, 0):
            trained.append(number)
            if not any(message.get(key) for key in ("content", "tool_calls", "reasoning_content")):
                raise ChatError(
                    f"the assistant's message {number} is empty; write an answer, or train: false"
                )
        kept.append({k: v for k, v in message.items() if k not in _NOT_FOR_TEMPLATES})
    if not trained:
        raise ChatError("it has no assistant message that may be trained")
    return Chat(kept, tuple(trained), tools or None)


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
    role = message.get("role")
    if not isinstance(role, str):
        raise ChatError(f"{where} has no role")
    # Templates of some models know further roles, so only a misspelt usual one is an error.
    if role not in _USUAL and (meant := get_close_matches(role.lower(), _USUAL, 1, 0.85)):
        raise ChatError(f"{where} has the role {role!r}; write {meant[0]}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined(content, where)
    elif content is not None and not isinstance(content, str):
        raise ChatError(f"{where}.content is no text")
    if content is None and role != ASSISTANT:
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
    """Return the messages of a prompt or an answer; plain text becomes one message by `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise ChatError(f"{name} is neither a text nor a list of messages")
    return _messages(value, name)


def _alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    history, more = record.get("history"), record.get("input")
    turns = history if isinstance(history, list) else []
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2 or not all(map(_is_text, turn)):
            raise ChatError("history is no list of pairs of texts")
    instruction, output = record["instruction"], record["output"]
    if not _is_text(instruction) or not isinstance(output, str):
        raise ChatError("instruction or output is not a text, or the instruction is blank")
    asked = f"{instruction}\n{more}" if _is_text(more) else instruction
    for question, answer in [*turns, (asked, output)]:
        yield {"role": "user", "content": question}
        yield {"role": ASSISTANT, "content": answer}


def _system(record: Mapping[str, Any]) -> list[Message]:
    text = record.get("system")
    return [{"role": "system", "content": text}] if _is_text(text) else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
