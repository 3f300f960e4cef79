"""Observes chat templates, to derive the renderings of a chat's beginnings from one rendering of
the whole chat.

[Note: one rendering] Trained spans need the renderings of messages[:n], with and without the
generation prompt. Most templates are a loop over the messages, with text before and after it.
Suppose that up to the end of the loop's body for message n - 1, the template has read neither a
later message nor the number of messages. Rendering messages[:n] then gives the same text up to that
point, and leaves the loop. If the text after the loop depends on no message, it is constant:

    render(messages[:n]) = text up to the end of that body + constant text after the loop

Reads are observed in every rendering; the text after the loop is checked in the source. If either
condition fails for a chat, each of its beginnings is rendered separately.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, nodes

PROMPT = "add_generation_prompt"
BODY_BEGINS, BODY_ENDS = "\ufdd2", "\ufdd3"
"""Marks that an observed template writes around each run of the loop's body. `ChatEncoder` rejects
chats that have such a character, see `MARKS` in template.py."""
TAKE = "_take"
"""Name of the filter `take` in templates."""
_OF_CHATS = {"messages", "tools", "documents", "loop", "self"}
"""Variables whose values differ between chats."""
_ELSEWHERE = nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport


class TemplateReads:
    """Records what a template has read of a chat so far."""

    def __init__(self) -> None:
        self.known: float = 0
        """Number of leading messages on which the written text may depend; infinite if it may
        depend on the number of messages."""
        self.taken = self._begun = 0
        """Number of messages that the loop has taken."""

    def begin(self) -> None:
        """Record that a run of the loop's body begins."""
        self._begun = self.taken

    def ends_beginning(self) -> bool:
        """Whether the text written so far depends only on the messages that the loop has taken.
        Called where a run of the loop's body ends. False if that run has taken a further
        message."""
        # A body that asks for the next message (loop.last) takes it during the run.
        return self.taken == self._begun and 0 < self.taken >= self.known


class ObservedMessages:
    """A list of messages for templates, which records what a template reads of it. Uses of a list
    that it does not know raise TypeError."""

    def __init__(self, messages: Sequence[Any], reading: TemplateReads, first: int = 0) -> None:
        """`first`: index of the list's first message in the chat."""
        self._all, self._reading, self._first = messages, reading, first

    def _whole(self) -> Sequence[Any]:
        self._reading.known = math.inf
        return self._all[self._first :]

    def _take(self) -> Iterator[Any]:
        """Yield the messages to the observed loop, and record how many it has taken."""
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
            return ObservedMessages(self._all, self._reading, self._first + start)
        return self._whole()[index]

    def __eq__(self, other: object) -> bool:
        raise TypeError("the chat template compares the list of messages")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise TypeError("the chat template writes the list of messages as a Python object")

    def __getattr__(self, name: str) -> Any:
        # Python itself looks up names with underscores; templates cannot.
        raise (AttributeError if name.startswith("_") else TypeError)(name)


def take(values: Any) -> Any:
    """Filter for the values of the observed loop: convert `ObservedMessages` to an iterator that
    records which messages the loop takes; return other values unchanged."""
    return values._take() if type(values) is ObservedMessages else values


def observe(tree: nodes.Template, environment: Environment) -> nodes.Template | None:
    """Change the last top-level loop of a template so that it is observed.

    Args:
        tree: the template; changed in place.
        environment: compiles it.

    Returns:
        The rest after the loop, as a template. None if the loop cannot be observed: there is none,
            the text up to its end depends on the generation prompt, or the rest on a chat.
    """
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places or any(tree.find_all(_ELSEWHERE)):
        return None
    until, after = tree.body[: places[-1] + 1], tree.body[places[-1] + 1 :]
    loop = until[-1]
    assert isinstance(loop, nodes.For)
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    assigned |= {macro.name for macro in tree.find_all(nodes.Macro)}
    if loop.recursive or PROMPT in _names(until) or (_OF_CHATS | assigned) & _names(after):
        return None
    loop.iter = nodes.Filter(loop.iter, TAKE, [], [], None, None)
    begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BODY_BEGINS, BODY_ENDS))
    loop.body = [begin, *loop.body, end]
    rest = nodes.Template(after)
    for template in (tree, rest):
        template.set_lineno(1).set_environment(environment)
    return rest


def _names(body: Iterable[nodes.Node]) -> set[str]:
    return {name.name for node in body for name in node.find_all(nodes.Name)}
