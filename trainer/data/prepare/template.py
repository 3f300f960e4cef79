"""Chat templates: untrusted Jinja programs, rendered in a sandbox and within limits.

A template gets what transformers gives it: messages, tools, the tokenizer's special tokens,
`add_generation_prompt`, and the user's options.
"""

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpointing.format.untrusted import printable, read_object
from elastic.node.files import read_bytes
from trainer.data.prepare.beginnings import (
    BODY_BEGINS,
    BODY_ENDS,
    PROMPT,
    TAKE,
    Messages,
    Reading,
    observe,
    take,
)
from trainer.data.prepare.blocks import LONGEST_LINE
from trainer.data.shards import DataError

# Unicode noncharacters: no text has them, and template filters keep them.
SPELLED_BEGIN, SPELLED_END = "\ufdd0", "\ufdd1"
"""Marks around letters that spell a special token."""
_BLOCK_BEGIN, _BLOCK_END = "\ufdd2", "\ufdd3"
_BORDERS = re.compile(f"([{_BLOCK_BEGIN}{_BLOCK_END}])")
MARKS = SPELLED_BEGIN + SPELLED_END + _BLOCK_BEGIN + _BLOCK_END

SECONDS = 10
"""CPU time of one rendering. A second later the process is killed, because an operation on huge
numbers cannot be interrupted by an exception."""
MOST_CHARACTERS = LONGEST_LINE
"""Longest text of a rendered chat."""
ROOM = 4 << 30
"""Bytes of address space that a process may add to its present size."""
_NAMES = ("default", "tool_use")


class RenderError(Exception):
    """A template cannot render a chat; the message says why, in one line."""


class _TooLong(BaseException):
    """Time limit exceeded. A BaseException, so that no `except Exception` inside catches it."""


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks what an assistant has
    written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """Replace the block by a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BLOCK_BEGIN}{caller()}{_BLOCK_END}"


_OF_DICTS = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, with bounded powers and products. They are computed in `call_binop` at run
    time, never during compilation."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations that make a large result of small factors."""
        if operator == "**":
            raise jinja2.exceptions.SecurityError("it computes a power, which no template needs")
        if operator == "*" and any(hasattr(one, "__len__") for one in (left, right)):
            times = next((one for one in (left, right) if isinstance(one, int)), 0)
            sizes = [len(one) for one in (left, right) if hasattr(one, "__len__")]
            if times * max(sizes) > MOST_CHARACTERS:
                raise jinja2.exceptions.SecurityError(f"it repeats something {times} times")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in Jinja, with a fast path for common cases: dict keys first, and attributes of loops
        and namespaces, where only names with _ are unsafe."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is _Namespace) and attribute[:1] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    # `*args`: a template may set an attribute `self`
    def __init__(*args: Any, **named: Any) -> None:
        attributes = dict(*args[1:], **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"it sets the attribute {name!r} of a namespace")


class ChatTemplate:
    """A compiled chat template, or two: tool_use is for chats with tools."""

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, Any], day: str | None
    ) -> None:
        """Args:
            sources: "default", and perhaps "tool_use".
            variables: special tokens and options.
            day: YYYY-MM-DD for `strftime_now`; None: templates that call it are refused.

        Raises:
            DataError: a source is no template.
        """
        environment = _environment(day)
        self._variables = {**environment.globals, **variables}
        self.has_blocks = any("endgeneration" in source for source in sources.values())
        """Whether it marks what an assistant has written."""
        self._observed: dict[str, tuple[jinja2.Template, dict[bool, str]]] = {}
        try:
            with bounded():
                self._templates = {
                    name: environment.from_string(source) for name, source in sources.items()
                }
                for name, source in ({} if self.has_blocks else sources).items():
                    self._observe(environment, name, source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"the chat template: {_said(error)}") from error

    def _observe(self, environment: jinja2.Environment, name: str, source: str) -> None:
        """Compile a template whose loop is observed, if it has such a loop."""
        tree = environment.parse(source)
        if rest := observe(tree, environment):
            after = environment.from_string(rest)
            # One that cannot be rendered without a chat depends on it.
            with suppress(RenderError):
                asked = {prompt: {PROMPT: prompt} for prompt in (False, True)}
                ends = {key: "".join(self._written(after, given)) for key, given in asked.items()}
                self._observed[name] = environment.from_string(tree), ends

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False
    ) -> str:
        """Render a chat, with marks around generation blocks.

        Args:
            tools: that the assistant may call, if any.
            prompt: whether to end with the generation prompt.

        Raises:
            RenderError: the template refuses this chat.
        """
        given = {"messages": messages, "tools": tools, "documents": None, PROMPT: prompt}
        with bounded():
            return "".join(self._written(self._templates[self._name(tools)], given))

    def _name(self, tools: Any) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _written(self, template: jinja2.Template, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a template writes, piece by piece."""
        size = 0
        try:
            # As `generate` does, with globals that are set already.
            context = template.new_context({**self._variables, **given}, shared=True)
            for part in template.root_render_func(context):
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise DataError(
                        f"the chat template makes more than {MOST_CHARACTERS:,} characters of "
                        "one chat; mend it, or give another with --template"
                    )
                yield part
        except DataError:
            raise
        except MemoryError:
            raise DataError(
                "the chat template takes more memory than there may be of one chat; mend it, or "
                "give another with --template"
            ) from None
        except (Exception, RecursionError) as error:
            raise RenderError(_said(error)) from error

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False) -> str:
        """`marked` without the marks."""
        return without_blocks(self.marked(messages, tools, prompt))

    def rendering(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> "Rendering":
        """Render a chat, once for all of its beginnings where that is possible.

        Raises:
            RenderError: the template refuses this chat.
        """
        if observed := self._observed.get(self._name(tools)):
            template, ends = observed
            reading, parts, places = Reading(), list[str](), dict[int, int]()
            given = {"messages": Messages(messages, reading), "tools": tools, "documents": None}
            with suppress(RenderError), bounded():
                for part in self._written(template, {**given, PROMPT: False}):
                    if part == BODY_BEGINS:
                        reading.begin()
                    elif part != BODY_ENDS:
                        parts.append(part)
                    elif reading.ends_beginning():
                        places[reading.taken] = len(parts)
                return Rendering(self, messages, tools, parts, places, ends)
        return Rendering(self, messages, tools, [self.marked(messages, tools)])


class Rendering:
    """A rendered chat, and the renderings of its beginnings."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        parts: Sequence[str],
        places: Mapping[int, int] = MappingProxyType({}),
        ends: Mapping[bool, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        template: renders.
        messages: of the chat.
        tools: that the assistant may call.
        parts: what the template writes of all messages.
        places: number of messages → number of parts that these begin with.
        ends: what follows there, without the generation prompt and with it."""
        self._template, self._messages, self._tools = template, messages, tools
        self._parts, self._places, self._ends = parts, places, ends
        self._texts = {(len(messages), False): "".join(parts)}

    def upto(self, count: int, prompt: bool = False) -> str:
        """As `ChatTemplate.marked` of the first `count` messages."""
        if (text := self._texts.get((count, prompt))) is not None:
            return text
        if (place := self._places.get(count)) is not None:
            text = "".join(self._parts[:place]) + self._ends[prompt]
        else:
            text = self._template.marked(self._messages[:count], self._tools, prompt)
        self._texts[count, prompt] = text
        return text


def without_blocks(marked: str) -> str:
    """A rendered chat without marks of generation blocks."""
    if _BLOCK_BEGIN not in marked:
        return marked
    return marked.replace(_BLOCK_BEGIN, "").replace(_BLOCK_END, "")


def blocks_in(marked: str) -> list[tuple[int, int]]:
    """(begin, end) of each non-empty generation block, in characters of the text without marks;
    nested blocks belong to the outer one."""
    found: list[tuple[int, int]] = []
    place = depth = begin = 0
    for piece in _BORDERS.split(marked):
        if piece == _BLOCK_BEGIN:
            begin = begin if depth else place
            depth += 1
        elif piece == _BLOCK_END:
            depth -= 1
            if not depth and place > begin:
                found.append((begin, place))
        else:
            place += len(piece)
    return found


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the CPU time of the block, in a confined process.

    Raises:
        DataError: the time limit is exceeded.
    """
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS + 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooLong:
        raise DataError(
            f"the chat template computes for more than {SECONDS:g} s on one chat; mend it, or give "
            "another with --template"
        ) from None


def confine() -> None:
    """Prepare this process for untrusted templates: exceeding the time of `bounded` raises, and
    memory is limited. Call it in the main thread."""

    def stop(*_: Any) -> NoReturn:
        raise _TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def read_template(given: str | None, home: Path | None) -> dict[str, str]:
    """Sources of a chat template by name: from the file `given`, else from a tokenizer's directory.

    Args:
        given: --template.
        home: directory of the tokenizer.json, with chat_template.jinja, or tokenizer_config.json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if given:
        return _checked(given, {"default": _read(Path(given))})
    file = home / "chat_template.jinja" if home else None
    if file and file.is_file():
        return _checked(file, {"default": _read(file)})
    config = home / "tokenizer_config.json" if home else None
    found = _config(home).get("chat_template") if home else None
    if isinstance(found, str):
        return _checked(config, {"default": found})
    # Files of transformers 4 may list several named templates.
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, dict)]
        sources = {
            str(one["name"]): one["template"]
            for one in named
            if one.get("name") in _NAMES and isinstance(one.get("template"), str)
        }
        if "default" in sources:
            return _checked(config, sources)
    where = f"there is no chat template in {home}" if home else "this tokenizer has no template"
    raise DataError(
        f"{where} (chat_template.jinja, or chat_template in tokenizer_config.json); give the "
        "tokenizer of a model for chats, or --template FILE"
    )


def special_variables(home: Path | None) -> dict[str, str]:
    """Special tokens by their variable names in templates, such as eos_token.

    Raises:
        DataError: a file with them cannot be read.
    """
    found = {}
    for key, value in (_config(home) if home else {}).items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            found[key] = token
    return found


def unknown_tokens(sources: Mapping[str, str], variables: Mapping[str, Any]) -> list[str]:
    """Special tokens that a template uses and no file names; they render as nothing."""
    environment = _environment(None)
    used = set()
    for source in sources.values():
        used |= meta.find_undeclared_variables(environment.parse(source))
    return sorted(name for name in used if name.endswith("_token") and name not in variables)


def _environment(day: str | None) -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )

    def refuse(message: str) -> NoReturn:
        raise RenderError(printable(str(message)))

    def strftime_now(form: str) -> str:
        if day is None:
            raise DataError(
                "the chat template writes today's date, so the data would differ tomorrow; give "
                f"the day that it is to write, such as --date {date.today()}"
            )
        return date.fromisoformat(day).strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes HTML characters.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment.filters |= {"tojson": tojson, TAKE: take}
    environment.globals.update(
        raise_exception=refuse, strftime_now=strftime_now, namespace=_Namespace
    )
    return environment


def _checked(where: Any, sources: dict[str, str]) -> dict[str, str]:
    """Sources, after parsing them.

    Raises:
        DataError: one does not parse.
    """
    for source in sources.values():
        try:
            _environment(None).parse(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"{where}{line}: not a chat template: {_said(error)}") from error
    return sources


def _read(path: Path) -> str:
    try:
        return read_bytes(path, follow=True).decode()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a chat template: not UTF-8") from error


def _config(home: Path) -> dict[str, Any]:
    file = home / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        return read_object(read_bytes(file, follow=True))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a JSON object: {error}; copy the file again") from error


def _said(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return printable(text)[:200]
