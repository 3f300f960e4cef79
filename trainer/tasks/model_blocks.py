"""Finds the blocks of a model: units of sharding, recomputation and compilation."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, each once, in order of registration.

    Blocks are the items of the model's outermost lists: `nn.ModuleList`, `nn.Sequential`,
    `nn.ModuleDict`. Lists of lists are flattened, such as the stages of a ResNet. All items of an
    `nn.ModuleList` are blocks. In `nn.Sequential` and `nn.ModuleDict`, items whose class occurs
    once, such as a stem or a head, are blocks only if there are no other blocks. If some blocks
    have child modules, blocks without child modules are left out.
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
    """Yield (item, whether its list is an `nn.ModuleList`) for outermost items with parameters."""
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
    """Return whether a module is a list of blocks, not a block of single layers: it has no
    `forward`, or its items have child modules."""
    if not isinstance(module, _LISTS):
        return False
    called = type(module).forward is not nn.Module.forward
    return not called or any(any(child.children()) for child in module.children())


def name_blocks(blocks: Iterable[nn.Module]) -> str:
    """Describe blocks: `12 blocks of class Block`, or `8 blocks (4 of Attention, 4 of MLP)`."""
    counts = Counter(type(block).__name__ for block in blocks)
    total = counts.total()
    what = f"{total} block{'s' if total > 1 else ''}"
    if len(counts) == 1:
        return f"{what} of class {next(iter(counts))}"
    return f"{what} ({', '.join(f'{count} of {name}' for name, count in counts.items())})"
