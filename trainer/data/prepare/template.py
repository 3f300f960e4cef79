"""Chat templates: untrusted Jinja programs, rendered in a sandbox and within limits."""

import hashlib
import json
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, missing

from checkpointing.format.untrusted import printable
from elastic.node.files import read_bytes
from trainer.data.prepare.blocks import LONGEST_LINE
from trainer.data.shards import DataError
from trainer.data.tokenizer import CONFIG, read_tokenizer_config, special_variables

# Unicode noncharacters: ordinary texts lack them, and template filters keep them.
SPELLED_BEGIN, SPELLED_END = "\ufdd0", "\ufdd1"
"""Marks around letters that spell a special token."""
_BLOCK_BEGIN, _BLOCK_END = "\ufdd2", "\ufdd3"
_BORDERS = re.compile(f"([{_BLOCK_BEGIN}{_BLOCK_END}])")
MARKS = SPELLED_BEGIN + SPELLED_END + _BLOCK_BEGIN + _BLOCK_END

SECONDS = 10
"""Most CPU time of a rendering. A second later the process is killed."""
MOST_CHARACTERS = LONGEST_LINE
ROOM = 4 << 30
"""Bytes of address space that a process may add to its present size."""
_OF_DICTS = frozenset(dir(dict))
_REPAIR = "one chat; repair it, or set another one with --template"


class ChatTemplateError(Exception):
    """A template cannot render a chat; the message has the cause, in one line."""


class _TimeExceeded(BaseException):
    """The time limit is exceeded. No `except Exception` inside Jinja catches it."""


class _GenerationTag(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks an assistant's output."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BLOCK_BEGIN}{caller()}{_BLOCK_END}"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which refuses powers, and bounds products of sequences."""

    # Jinja then computes them at run time by `call_binop`, never during compilation.
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError(
                "the template computes a power, which is not allowed; write the number itself"
            )
        if operator == "*" and any(hasattr(value, "__len__") for value in (left, right)):
            times, sequence = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and times * len(sequence) > MOST_CHARACTERS:
                most = f"more than {MOST_CHARACTERS:,} elements"
                raise SecurityError(f"the template repeats a sequence {times} times, to {most}")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Shortcuts for speed: dicts, loops and namespaces have few unsafe attributes.
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            value = obj.get(attribute, missing)
        elif (kind is LoopContext or kind is Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, missing)
        else:
            return super().getattr(obj, attribute)
        return self.undefined(obj=obj, name=attribute) if value is missing else value


@dataclass(frozen=True)
class ChatTemplateSource:
    """A chat template as its files have it."""

    sources: dict[str, str]
    """By name: default, and optionally tool_use, which renders chats that offer tools."""
    variables: dict[str, Any]
    notes: Sequence[str] = ()

    @property
    def digest(self) -> str:
        facts = [self.sources, self.variables]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class ChatTemplate:
    """Compiled chat template."""

    def __init__(self, source: ChatTemplateSource, day: str | None) -> None:
        """`day`: YYYY-MM-DD, for `strftime_now`."""
        environment = _environment(day)
        self._variables = {**environment.globals, **source.variables}
        self.has_blocks = any("endgeneration" in text for text in source.sources.values())
        try:
            with bounded():
                self._templates = {
                    name: environment.from_string(text) for name, text in source.sources.items()
                }
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"the chat template cannot be compiled: {_said(error)}") from error

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False
    ) -> str:
        """Render a chat with marks around generation blocks. `prompt`: add a generation prompt."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template, parts, size = self._templates[name], list[str](), 0
        given = {**self._variables, "messages": messages, "tools": tools, "documents": None}
        given["add_generation_prompt"] = prompt
        try:
            # As jinja's `generate` does, but `_variables` contain the globals already.
            context = template.new_context(given, shared=True)
            with bounded():
                for part in template.root_render_func(context):
                    parts.append(part)
                    size += len(part)
                    if size > MOST_CHARACTERS:
                        most = f"more than {MOST_CHARACTERS:,} characters"
                        raise DataError(f"the chat template writes {most} for {_REPAIR}")
        except DataError:
            raise
        except Exception as error:
            raise ChatTemplateError(_said(error)) from error
        return "".join(parts)


def split_blocks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendered chat without marks, and the (begin, end) of its generation blocks."""
    if _BLOCK_BEGIN not in marked:
        return marked, []
    blocks: list[tuple[int, int]] = []
    pieces = _BORDERS.split(marked)
    place = depth = begin = 0
    for piece in pieces:
        if piece == _BLOCK_BEGIN:
            begin = begin if depth else place
            depth += 1
        elif piece == _BLOCK_END:
            depth -= 1
            if not depth and place > begin:
                blocks.append((begin, place))
        else:
            place += len(piece)
    return "".join(pieces[::2]), blocks


@contextmanager
def bounded() -> Iterator[None]:
    """Raise DataError if the block exceeds a limit, in a process prepared by `confine`."""
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS + 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (_TimeExceeded, MemoryError) as error:
        what = "exceeds the memory limit of"
        if isinstance(error, _TimeExceeded):
            what = f"computes for more than {SECONDS:g} s on"
        raise DataError(f"the chat template {what} {_REPAIR}") from None


def confine() -> None:
    """Prepare this process for `bounded`. Call it in the main thread."""

    def stop(*_: Any) -> NoReturn:
        raise _TimeExceeded

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def read_template(
    given: str | None, home: Path | None, options: Mapping[str, Any]
) -> ChatTemplateSource:
    """Read a chat template from the file `given`, else from the tokenizer's directory `home`."""
    file = Path(given) if given else home and home / "chat_template.jinja"
    if file and (given or file.is_file()):
        sources = {"default": _read(file)}
    else:
        file = home and home / CONFIG
        found = read_tokenizer_config(home).get("chat_template")
        # Files of transformers 4 may list several named templates.
        named = found if isinstance(found, list) else [{"name": "default", "template": found}]
        sources = {
            one["name"]: one["template"]
            for one in named
            if isinstance(one, dict)
            and one.get("name") in ("default", "tool_use")
            and isinstance(one.get("template"), str)
        }
    if "default" not in sources:
        where = f"there is no chat template in {home}" if home else "this tokenizer has no template"
        raise DataError(
            f"{where} (chat_template.jinja, or chat_template in {CONFIG}); use the tokenizer of a "
            "model for chats, or --template FILE"
        )
    variables = {**special_variables(home), **options}
    environment, used = _environment(None), set[str]()
    try:
        for source in sources.values():
            used |= meta.find_undeclared_variables(environment.parse(source))
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise DataError(f"{file}{line}: not a chat template: {_said(error)}") from error
    notes = [
        f"the chat template writes {name}, but {CONFIG} names no such token: nothing is written "
        "there"
        for name in sorted(used.difference(variables))
        if name.endswith("_token")
    ]
    return ChatTemplateSource(sources, variables, notes)


def _environment(day: str | None) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> NoReturn:
        raise ChatTemplateError(printable(str(message)))

    def strftime_now(form: str) -> str:
        if day is None:
            raise DataError(
                "the chat template writes today's date, so the data would differ tomorrow; set "
                f"the day to write, such as --date {date.today()}"
            )
        return date.fromisoformat(day).strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own tojson escapes HTML characters.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=refuse, strftime_now=strftime_now)
    return environment


def _read(path: Path) -> str:
    try:
        return read_bytes(path, follow=True).decode()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a chat template: not UTF-8; convert the file") from error


def _said(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return printable(text)[:200]
