"""Chat templates: untrusted Jinja programs, rendered in a sandbox and within limits.

Templates have the same variables as in transformers: messages, tools, the tokenizer's special
tokens, `add_generation_prompt`, and the user's options.
"""

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpointing.format.untrusted import printable, read_object
from elastic.node.files import read_bytes
from trainer.data.prepare.blocks import LONGEST_LINE
from trainer.data.shards import DataError

# Unicode noncharacters: ordinary texts lack them, and template filters keep them.
SPELLED_BEGIN, SPELLED_END = "\ufdd0", "\ufdd1"
"""Marks around letters that spell a special token."""
_BLOCK_BEGIN, _BLOCK_END = "\ufdd2", "\ufdd3"
_BORDERS = re.compile(f"([{_BLOCK_BEGIN}{_BLOCK_END}])")
MARKS = SPELLED_BEGIN + SPELLED_END + _BLOCK_BEGIN + _BLOCK_END

SECONDS = 10
"""Longest CPU time of one rendering, in seconds. One second later the process is killed, because
an exception cannot interrupt an operation on huge numbers."""
MOST_CHARACTERS = LONGEST_LINE
"""Longest rendered chat, in characters."""
ROOM = 4 << 30
"""Bytes of address space that a process may add to its present size."""
_NAMES = ("default", "tool_use")


class RenderError(Exception):
    """A template cannot render a chat; the message has the cause, in one line."""


class _TimeExceeded(BaseException):
    """The time limit is exceeded. A BaseException, so that no `except Exception` inside catches
    it."""


class _GenerationTag(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks an assistant's output."""

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
    """Jinja's sandbox, which refuses powers, and bounds products of sequences. So powers and
    products are computed at run time, by `call_binop`, and never during compilation."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raise SecurityError for operations that make a large result from small operands."""
        if operator == "**":
            raise jinja2.exceptions.SecurityError(
                "the template computes a power, which is not allowed; write the number itself"
            )
        if operator == "*" and any(hasattr(value, "__len__") for value in (left, right)):
            times, sequence = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and times * len(sequence) > MOST_CHARACTERS:
                raise jinja2.exceptions.SecurityError(
                    f"the template repeats a sequence {times} times, to more than "
                    f"{MOST_CHARACTERS:,} elements"
                )
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute as Jinja does, with a fast path for keys of dicts, and for
        attributes of loops and namespaces. Of these, only names that begin with _ are unsafe."""
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
    """Jinja's namespace, but without names that begin with an underscore."""

    # `*args`, because a template may set an attribute `self`
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
        raise jinja2.exceptions.SecurityError(
            f"the template sets {name!r} of a namespace, but a name must not begin with _"
        )


class ChatTemplate:
    """Compiled chat template of a tokenizer. Some tokenizers have a second one, "tool_use", which
    renders chats that offer tools."""

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, Any], day: str | None
    ) -> None:
        """Args:
            sources: "default", and optionally "tool_use".
            variables: special tokens and options.
            day: YYYY-MM-DD for `strftime_now`; None: templates that call it are rejected.

        Raises:
            DataError: a source is no template.
        """
        environment = _environment(day)
        self._variables = {**environment.globals, **variables}
        self.has_blocks = any("endgeneration" in source for source in sources.values())
        """Whether the template marks the assistant's output."""
        try:
            with bounded():
                self._templates = {
                    name: environment.from_string(source) for name, source in sources.items()
                }
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"the chat template cannot be compiled: {_said(error)}") from error

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False
    ) -> str:
        """Render a chat, with marks around generation blocks; `prompt`: with the generation prompt
        at its end. Raises RenderError if the template rejects this chat."""
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
                        raise DataError(
                            f"the chat template writes more than {MOST_CHARACTERS:,} characters "
                            "for one chat; repair it, or set another one with --template"
                        )
        except DataError:
            raise
        except MemoryError:
            raise DataError(
                "the chat template exceeds the memory limit of one chat; repair it, or set another "
                "one with --template"
            ) from None
        except (Exception, RecursionError) as error:
            raise RenderError(_said(error)) from error
        return "".join(parts)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False) -> str:
        """Render a chat without marks; arguments as for `marked`."""
        return without_blocks(self.marked(messages, tools, prompt))


class ChatRendering:
    """Renderings of the beginnings of a chat, each computed once."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> None:
        self._render = cache(lambda n, prompt: template.marked(messages[:n], tools, prompt))

    def upto(self, count: int, prompt: bool = False) -> str:
        """Rendering of the first `count` messages, as by `ChatTemplate.marked`."""
        return self._render(count, prompt)


def without_blocks(marked: str) -> str:
    """Remove the marks of generation blocks from a rendered chat."""
    if _BLOCK_BEGIN not in marked:
        return marked
    return marked.replace(_BLOCK_BEGIN, "").replace(_BLOCK_END, "")


def blocks_in(marked: str) -> list[tuple[int, int]]:
    """Return (begin, end) of each non-empty generation block, in characters of the text without
    marks; a nested block belongs to its outer block."""
    blocks: list[tuple[int, int]] = []
    place = depth = begin = 0
    for piece in _BORDERS.split(marked):
        if piece == _BLOCK_BEGIN:
            begin = begin if depth else place
            depth += 1
        elif piece == _BLOCK_END:
            depth -= 1
            if not depth and place > begin:
                blocks.append((begin, place))
        else:
            place += len(piece)
    return blocks


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the CPU time of the block, in a process prepared by `confine`. Raises DataError if the
    time limit is exceeded."""
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS + 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TimeExceeded:
        raise DataError(
            f"the chat template computes for more than {SECONDS:g} s on one chat; repair it, or "
            "use another one with --template"
        ) from None


def confine() -> None:
    """Prepare this process for untrusted templates: `bounded` can raise at its time limit, and
    memory is limited. Call it in the main thread."""

    def stop(*_: Any) -> NoReturn:
        raise _TimeExceeded

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def read_template(given: str | None, home: Path | None) -> dict[str, str]:
    """Sources of a chat template by name, from the file `given` or a tokenizer's directory.

    Args:
        given: path by --template, or None.
        home: directory of the tokenizer.json, with chat_template.jinja or tokenizer_config.json.

    Raises:
        DataError: there is no template, or it cannot be read.
    """
    if given:
        return _checked(given, {"default": _read(Path(given))})
    if home and (file := home / "chat_template.jinja").is_file():
        return _checked(file, {"default": _read(file)})
    found = _config(home).get("chat_template") if home else None
    # Files of transformers 4 may list several named templates.
    named = [{"name": "default", "template": found}] if isinstance(found, str) else found or []
    sources = {
        one["name"]: one["template"]
        for one in named
        if isinstance(one, dict)
        and one.get("name") in _NAMES
        and isinstance(one.get("template"), str)
    }
    if home and "default" in sources:
        return _checked(home / "tokenizer_config.json", sources)
    where = f"there is no chat template in {home}" if home else "this tokenizer has no template"
    raise DataError(
        f"{where} (chat_template.jinja, or chat_template in tokenizer_config.json); use the "
        "tokenizer of a model for chats, or --template FILE"
    )


def special_variables(home: Path | None) -> dict[str, str]:
    """Return the template variables for special tokens, such as eos_token, with the tokens' texts.
    Raises DataError if tokenizer_config.json cannot be read."""
    variables = {}
    for key, value in (_config(home) if home else {}).items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            variables[key] = token
    return variables


def unknown_tokens(sources: Mapping[str, str], variables: Mapping[str, Any]) -> list[str]:
    """Variables of special tokens that a template uses, but no file defines; they render as
    nothing."""
    environment = _environment(None)
    used = set()
    for source in sources.values():
        used |= meta.find_undeclared_variables(environment.parse(source))
    return sorted(name for name in used if name.endswith("_token") and name not in variables)


def _environment(day: str | None) -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )

    def refuse(message: str) -> NoReturn:
        raise RenderError(printable(str(message)))

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
    environment.globals.update(
        raise_exception=refuse, strftime_now=strftime_now, namespace=_Namespace
    )
    return environment


def _checked(where: Any, sources: dict[str, str]) -> dict[str, str]:
    """Return sources after parsing them. Raises DataError if a source does not parse."""
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
        raise DataError(f"{path}: not a chat template: not UTF-8; convert the file") from error


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
