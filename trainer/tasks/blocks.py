"""The blocks of a model: units of sharding, recomputation and compilation."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, each once, in the order in which they are registered.

    They are what stands in its outermost lists: `nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`.
    A list of lists is looked through, as the stages of a ResNet are. In an `nn.ModuleList` each
    item is a block. In the other two the items of a class that occurs once, such as a stem or a
    head, are blocks only where there are no others. Modules that have parts are preferred to single
    layers.
    """
    items = list(dict.fromkeys(_items(model)))
    counts = Counter(type(item) for item, _ in items)
    certain = {item: listed or counts[type(item)] > 1 for item, listed in items}
    found = [
        inner
        for item, sure in certain.items()
        for inner in ([item] if sure else repeated_blocks(item))
    ]
    found = found or list(certain)
    return [item for item in found if any(item.children())] or found


def _items(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """(item of an outermost list, whether that is an `nn.ModuleList`), of callable modules that
    have parameters."""
    if not isinstance(module, _LISTS):
        for child in module.children():
            yield from _items(child)
        return
    for child in module.children():
        if _is_stage(child):
            yield from _items(child)
        elif next(child.parameters(), None) is not None:
            yield child, isinstance(module, nn.ModuleList)


def _is_stage(module: nn.Module) -> bool:
    """Whether a module is a list of blocks, and not a block of single layers: nobody calls it, or
    what is in it has parts."""
    if not isinstance(module, _LISTS):
        return False
    called = type(module).forward is not nn.Module.forward
    return not called or any(any(child.children()) for child in module.children())


def name_blocks(blocks: Iterable[nn.Module]) -> str:
    """Such as `12 blocks of class Block`, or `8 blocks (4 of Attention, 4 of MLP)`."""
    counts = Counter(type(block).__name__ for block in blocks)
    total = counts.total()
    what = f"{total} block{'s' if total > 1 else ''}"
    if len(counts) == 1:
        return f"{what} of class {next(iter(counts))}"
    return f"{what} ({', '.join(f'{count} of {name}' for name, count in counts.items())})"
