"""Observes chat templates: what one writes of a whole chat tells what it writes of its beginnings.

[Note: one rendering] Spans need the renderings of messages[:n], with and without the generation
prompt. Most templates are a loop over the messages, with something before it and after it. Suppose
that until the end of the loop's body for message n - 1 the template has read nothing of later
messages, nor how many there are. Given messages[:n] only, it writes the same up to there, and then
leaves the loop. If what stands after the loop depends on no message, it is always the same text:

    render(messages[:n]) = what is written by the end of that body + this text

Reads are observed in every rendering; what stands after the loop is checked in the source. A chat
for which one of the two fails has each of its beginnings rendered by itself.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, nodes

PROMPT = "add_generation_prompt"
BODY_BEGINS, BODY_ENDS = "\ufdd2", "\ufdd3"
"""Pieces of text that an observed template writes besides its own, around the loop's body. They are
among `MARKS`, which no chat may have."""
TAKE = "_take"
"""Name of the filter `take`."""
_OF_CHATS = {"messages", "tools", "documents", "loop", "self"}
"""Names whose values differ between chats."""
_ELSEWHERE = nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport


class Reading:
    """What a template has read of a chat so far."""

    def __init__(self) -> None:
        self.known: float = 0
        """Messages on which the written text may depend, from the first on; infinite if also on
        their number."""
        self.taken = self._begun = 0
        """Messages that the loop has taken."""

    def begin(self) -> None:
        """The body of the loop begins."""
        self._begun = self.taken

    def ends_beginning(self) -> bool:
        """Whether the text up to here, the end of the body, is that of the taken messages alone."""
        # Something else was taken meanwhile if the body asked whether there is a next message.
        return self.taken == self._begun and 0 < self.taken >= self.known


class Messages:
    """A list of messages that reports what is read of it. Templates get it instead of a list; what
    a list can do beyond this raises TypeError."""

    def __init__(self, messages: Sequence[Any], reading: Reading, first: int = 0) -> None:
        """`first`: index of the first message that belongs to the list."""
        self._all, self._reading, self._first = messages, reading, first

    def _whole(self) -> Sequence[Any]:
        self._reading.known = math.inf
        return self._all[self._first :]

    def _take(self) -> Iterator[Any]:
        """Yield them to the observed loop."""
        for number in range(self._first, len(self._all)):
            self._reading.taken = number + 1
            yield self._all[number]
        self._reading.known = math.inf

    def _know(self, count: int) -> None:
        self._reading.known = max(self._reading.known, count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def __bool__(self) -> bool:
        if self._first >= len(self._all):
            return bool(self._whole())
        self._know(self._first + 1)
        return True

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < len(self._all) - self._first:
            self._know(self._first + index + 1)
            return self._all[self._first + index]
        start = index.start if type(index) is slice and index == slice(index.start, None) else None
        if type(start) is int and start >= 0:
            return Messages(self._all, self._reading, self._first + start)
        return self._whole()[index]

    def __eq__(self, other: object) -> bool:
        raise TypeError("messages are compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise TypeError("messages are written as they are")

    def __getattr__(self, name: str) -> Any:
        # Python itself asks for names with underscores; templates cannot.
        raise (AttributeError if name.startswith("_") else TypeError)(name)


def take(values: Any) -> Any:
    """The values of the loop, which are observed if they are messages."""
    return values._take() if type(values) is Messages else values


def observe(tree: nodes.Template, environment: Environment) -> nodes.Template | None:
    """Make the last loop at the top level of a template observed; returns what stands after it as a
    template. None if that depends on a chat, or there is no such loop."""
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places or any(tree.find_all(_ELSEWHERE)):
        return None
    until, after = tree.body[: places[-1] + 1], tree.body[places[-1] + 1 :]
    loop = until[-1]
    assert isinstance(loop, nodes.For)
    made = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    made |= {macro.name for macro in tree.find_all(nodes.Macro)}
    if loop.recursive or PROMPT in _names(until) or (_OF_CHATS | made) & _names(after):
        return None
    loop.iter = nodes.Filter(loop.iter, TAKE, [], [], None, None)
    begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BODY_BEGINS, BODY_ENDS))
    loop.body = [begin, *loop.body, end]
    rest = nodes.Template(after)
    for one in (tree, rest):
        one.set_lineno(1).set_environment(environment)
    return rest


def _names(body: Iterable[nodes.Node]) -> set[str]:
    return {name.name for node in body for name in node.find_all(nodes.Name)}
