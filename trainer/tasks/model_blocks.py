"""The blocks of a model: units of sharding, recomputation and compilation."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, each once, in order of registration.

    They are the items of its outermost lists: `nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`.
    Lists of lists are flattened, such as the stages of a ResNet. All items of an `nn.ModuleList`
    are blocks. In the other two, items of a class that occurs once, such as a stem or a head, are
    blocks only if there are no others. Modules with parts are preferred to single layers.
    """
    items = list(dict.fromkeys(_items(model)))
    counts = Counter(type(item) for item, _ in items)
    certain = {item: listed or counts[type(item)] > 1 for item, listed in items}
    blocks = [
        inner
        for item, sure in certain.items()
        for inner in ([item] if sure else repeated_blocks(item))
    ]
    blocks = blocks or list(certain)
    return [item for item in blocks if any(item.children())] or blocks


def _items(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (item of an outermost list, whether that is an `nn.ModuleList`) for items with
    parameters."""
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
    """Whether a module is a list of blocks, rather than a block of single layers: it is never
    called, or its items have parts."""
    if not isinstance(module, _LISTS):
        return False
    called = type(module).forward is not nn.Module.forward
    return not called or any(any(child.children()) for child in module.children())


def name_blocks(blocks: Iterable[nn.Module]) -> str:
    """A phrase such as `12 blocks of class Block`, or `8 blocks (4 of Attention, 4 of MLP)`."""
    counts = Counter(type(block).__name__ for block in blocks)
    total = counts.total()
    what = f"{total} block{'s' if total > 1 else ''}"
    if len(counts) == 1:
        return f"{what} of class {next(iter(counts))}"
    return f"{what} ({', '.join(f'{count} of {name}' for name, count in counts.items())})"
