"""Records memory and work of a pass on fake tensors, phase by phase."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.plan.storages import PlanLiveTensors, storage_of


class _KernelWork(NamedTuple):
    """Work of an operator, or of a compiled kernel, over its launches in a pass."""

    operations: float
    """Floating-point operations of all launches."""
    traffic: float
    """Bytes read and written by all launches."""
    attention: bool = False
    """Whether the kernel is attention, which reaches a smaller fraction of the peak."""
    launches: int = 1

    def repeated(self, times: int) -> "_KernelWork":
        operations, traffic = times * self.operations, times * self.traffic
        return _KernelWork(operations, traffic, self.attention, times * self.launches)


Work: TypeAlias = tuple[_KernelWork, ...]

_NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
_NAMESPACES = ("aten", "torch_attn", "perdure")


class _FusedOperators:
    """Elementwise operators that torch.compile fuses into one kernel. The kernel reads the
    operators' inputs, and writes results that are used later. Other results never reach memory."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._written: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, args: Any, kwargs: Any, result: Any) -> None:
        for place, tensor in _tensors((args, kwargs)).items():
            own = self._written.get(place)
            if own is None or own[0]() is None:
                self._read[place] = max(self._read.get(place, 0), tensor.nbytes)
        for place, tensor in _tensors(result).items():
            self._written[place] = (weakref.ref(storage_of(tensor)), tensor.nbytes)

    def kernel(self) -> _KernelWork:
        written = sum(nbytes for storage, nbytes in self._written.values() if storage() is not None)
        return _KernelWork(0.0, float(sum(self._read.values()) + written))


def is_kernel(operator: Any, result: Any) -> bool:
    """Return whether an operator computes or copies, rather than create a view or empty memory."""
    if operator.namespace not in _NAMESPACES or operator.overloadpacket.__name__ in _NO_TRAFFIC:
        return False
    return bool(_tensors(result)) and not operator.is_view


def kernel_of(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> _KernelWork:
    """Return the work of an operator for which `is_kernel` is true."""
    touched = (*_tensors((args, kwargs)).values(), *_tensors(result).values())
    traffic = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    operations = _operations(operator, args, kwargs, result, seq_len)
    name = operator.overloadpacket.__name__
    return _KernelWork(operations, float(traffic), "attention" in name or "varlen" in name)


def _tensors(tree: Any) -> dict[int, torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage_of(tensor)._cdata: tensor for tensor in leaves}


def _operations(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> float:
    name = operator.overloadpacket.__name__
    named = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    products = 5 if "backward" in name else 2  # Dao et al. 2022: five products in backward
    if "varlen" in name:  # one document per sequence is assumed, because lengths are unknown
        tokens, heads, size = named["query"].shape
        left = (named.get("window_size") or (-1,))[0]
        if 0 <= left < seq_len - 1:
            # A token attends to itself and the `left` tokens before it, the first tokens to fewer.
            seen = (left + 1) * (2 - (left + 1) / seq_len)
            return products * tokens * heads * seen * size
        return float(products * tokens * heads * seq_len * size)
    # Ring attention: a call computes one range of queries with one range of keys.
    if name.startswith("_flash_attention"):
        queries, heads, size = named["query"].shape
        whole = 2.0 * products * queries * named["max_k"] * heads * size
        return whole / 2 if named["is_causal"] else whole
    if name.startswith("_scaled_dot_product"):
        batch, heads, queries, size = named["query"].shape
        whole = 2.0 * products * batch * heads * queries * named["key"].shape[2] * size
        return whole / 2 if named.get("is_causal") else whole
    if name == "_grouped_mm":  # each row on the left is multiplied with one of the matrices
        left, right = args[:2]
        return 2.0 * left.numel() * right.shape[-1]
    formula = flop_registry.get(operator.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


class PlannedPassTraffic(NamedTuple):
    """Bytes that a rank sends in forward or backward of a pass, and the number of calls."""

    layers: float = 0.0
    """Bytes in collectives of tensor parallelism."""
    ring: float = 0.0
    """Bytes to the next rank of a ring, by context parallelism."""
    experts: float = 0.0
    """Bytes to and from the ranks of experts, by expert parallelism."""
    layers_calls: float = 0.0
    ring_calls: float = 0.0
    experts_calls: float = 0.0
    attention: float = 0.0
    """Floating-point operations of attention, during which messages of a ring are sent."""


@dataclass(frozen=True)
class PlannedPassTrace:
    """Memory (bytes) and work of a pass over one micro-batch on one rank. Parameters and gradients
    are not counted, but peaks include gradients that FSDP has not reduced yet."""

    saved: int
    """Bytes of activations between forward and backward."""
    head_forward: int
    """Peak of forward until the loss is computed."""
    forward_entry: int
    """Bytes when forward reaches the last block."""
    last_forward: int
    """Peak in forward of the last block."""
    head_backward: int
    """Peak of backward before it reaches the blocks."""
    entry: int
    """Bytes when backward reaches the blocks."""
    last_backward: int
    """Peak in backward of the last block or, if all blocks are traced, of all but the first."""
    first_backward: int
    """Peak in backward of the first block. For a block in the middle, add `block_saved` for each
    block before it."""
    after_block: int
    """Bytes after backward of the first block, without its gradients. For other blocks, add
    `block_saved` for each block before them."""
    block_saved: int
    """Bytes of one block in `saved`."""
    tail_backward: int
    """Peak of backward after the blocks (of the embedding)."""
    experts: tuple[int, int]
    """With expert parallelism: bytes after backward of the experts of the last block, and after
    that of the first block, without gradients of experts."""
    rest: tuple[int, int]
    """With expert parallelism: peaks in backward of the last block, and of the first block, after
    backward of their experts."""
    forward: Work
    backward: Work
    """Work of backward, including recomputation."""
    sent: tuple[PlannedPassTraffic, PlannedPassTraffic] = (
        PlannedPassTraffic(),
        PlannedPassTraffic(),
    )
    hidden: int = 0
    """Bytes of the hidden states that a stage passes on."""
    kept: int = 0
    """Bytes of `saved` that are kept until postponed gradients of weights are computed."""
    put_off: int = 0
    """Bytes of gradients of activations that are kept until postponed gradients of weights are
    computed."""
    weights_peaks: tuple[int, ...] = ()
    """Peaks while postponed gradients of weights are computed: of the head, if the stage has it,
    then of each block from last to first. Gradients computed before are not included."""
    weights: Work = ()
    """Work of postponed gradients of weights, which is part of `backward`."""


_IN_BLOCKS = {
    "first", "others", "last back", "others back", "first back", "first weights", "others weights",
}  # fmt: skip


@dataclass
class _Phase:
    peak: int = 0
    experts: int = 0
    """Bytes after backward of expert-parallel experts."""
    rest: int = 0
    """Peak after backward of expert-parallel experts."""
    work: list[_KernelWork] = field(default_factory=list)
    fused: _FusedOperators | None = None
    """The operators that torch.compile would fuse with the next operator; None: none."""
    sent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(PlannedPassTraffic._fields, 0.0)
    )


class PlanTape(PlanLiveTensors):
    """Records what each phase of a traced forward and backward costs: allocated bytes, work of
    kernels (operations and memory traffic, see `_KernelWork`), and bytes sent to other ranks.
    `depth`: number of blocks that are traced. `compiled`: whether blocks are compiled."""

    def __init__(self, depth: int, seq_len: int, compiled: bool) -> None:
        super().__init__()
        self._depth, self._seq_len, self._compiled = depth, seq_len, compiled
        names = (
            "start", "first", "others", "head",
            "head back", "last back", "others back", "first back", "tail",
            "first weights", "others weights", "head weights",
        )  # fmt: skip
        self._phases = {name: _Phase() for name in names}
        self._phase = self._phases["start"]
        self._part_of: dict[nn.Parameter, str] = {}
        self._given: torch.Tensor | None = None
        self._after_input: dict[str, int] = {}
        """If gradients of weights are postponed: phase → bytes allocated in it that are kept for
        them."""
        self._before_weights: dict[str, int] = {}
        """If gradients of weights are postponed: phase → bytes before those of head or block;
        "end" → bytes after all. A frozen head has no such phase."""
        self._keeps_output = self._keeps_gradients = self._apart = False
        """`_keeps_output`: whether postponed gradients of weights need the blocks' output."""
        self._in_backward = False
        self._first_alive = self._first_saved = self._head_saved = 0
        self._after_block = self._after_head = self._forward_entry = self._entry = self._hidden = 0
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []
        """Storages of the input of the first block, and of the output of the last block."""
        self._kept = (True, True)
        """Whether autograd keeps each of `_ends` for backward."""
        self._enter("start")

    def follow(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        *,
        keep_gradients: bool,
        in_two: bool = False,
        experts: Iterable[nn.Module] = (),
        frozen_below: bool = False,
    ) -> None:
        """Register hooks that record the next pass of a model. `in_two`: `backward_in_two` runs its
        backward pass. `keep_gradients`: see `trace`. `experts`: expert-parallel modules, whose
        gradients FSDP reduces separately. `frozen_below`: whether the embedding is frozen, so
        that the input of the first block would get no gradient."""
        self._keeps_gradients = keep_gradients
        self._apart = in_two or frozen_below
        self._watch(list(blocks), in_two)
        for module in experts:
            module.register_forward_pre_hook(self._before_experts)
        # At the end of the model's forward, before autocast ends and frees casts of weights.
        model.register_forward_hook(lambda *_: self._note_alive())
        if not keep_gradients:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop)

    def send(self, whom: str, nbytes: float, calls: int = 1) -> None:
        """Record a message in the current phase. `whom`: "layers", "ring" or "experts", see
        `PlannedPassTraffic`."""
        self._end_kernel()
        self._phase.sent[whom] += nbytes
        self._phase.sent[f"{whom}_calls"] += calls

    def _end_kernel(self) -> None:
        if self._phase.fused:
            self._phase.work.append(self._phase.fused.kernel())
            self._phase.fused = None

    def _watch(self, blocks: list[nn.Module], in_two: bool) -> None:
        last = len(blocks) - 1
        for number, block in enumerate(blocks):
            self._part_of |= dict.fromkeys(block.parameters(), "others" if number else "first")

            def before(block: nn.Module, inputs: Any, number: int = number) -> Any:
                if self._in_backward:  # backward recomputes the block
                    return None
                if number == 0:
                    self._note_end(inputs)
                if number == last:
                    self._forward_entry = self.total()
                if number == 0 and self._apart:  # its input requires a gradient, as in later blocks
                    given = inputs[0].detach().requires_grad_()
                    self._given = given if in_two else None
                    inputs = (given, *inputs[1:])
                self._enter("others" if number else "first")
                following = ("tail", "first back", "others back")[min(number, 2)]
                _on_gradient(inputs, lambda: self._leave(block, following))
                return inputs

            def after(block: nn.Module, _inputs: Any, output: Any, number: int = number) -> None:
                if number == last and not self._in_backward:
                    self._hidden = self._note_end(output)
                    _on_gradient(output, self._leave_head)
                    self._enter("head")

            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)

    def _before_experts(self, module: nn.Module, inputs: Any) -> None:
        def over() -> None:
            _drop_all(module)
            self._phase.experts = self.total()

        if not self._in_backward:
            _on_gradient(inputs, over)

    def _note_end(self, given: Any) -> int:
        hidden = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        # Weak references, so that the tape itself keeps no storage allocated.
        self._ends.append(weakref.ref(storage_of(hidden)))
        return hidden.nbytes

    def _leave_head(self) -> None:
        self._after_head = self.total("head") + self.total("head back")
        self._entry = self.total()
        self._enter("last back")

    def _note_alive(self) -> None:
        self._first_alive = self.total("first")

    def _enter(self, phase: str) -> None:
        self._end_kernel()
        self.label = phase
        self._phase = self._phases[phase]

    def _leave(self, block: nn.Module, following: str) -> None:
        """Enter the phase that follows backward of a block. FSDP then reduces its gradients."""
        _drop_all(block)
        if following == "tail":
            self._after_block = self.total()
        self._enter(following)

    def forward_ends(self) -> None:
        """Mark the end of forward, when the loss is computed and autocast's casts are freed."""
        self._end_kernel()
        self._saved = self.total()
        self._first_saved, self._head_saved = self.total("first"), self.total("head")
        if len(self._ends) == 2:
            self._kept = self._ends[0]() is not None, self._ends[1]() is not None
        self._in_backward = True
        self._enter("head back")

    def backward_ends(self) -> None:
        self._end_kernel()

    def backward_in_two(self, loss: torch.Tensor, model: nn.Module) -> None:
        """Run backward as in a pipeline that postpones the gradients of weights."""
        # Imported only if the recipe uses it.
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )

        given, self._given = self._given, None
        assert given is not None  # set by the hook of the first block
        _, groups = stage_backward_input([loss], None, [given], model.parameters())
        del given, _  # frees the gradient, as a pipeline does after sending it
        self._after_input = {name: self.total(name) for name in self._phases}
        self._keeps_output = self._ends[1]() is not None
        while groups:
            group = groups.pop()
            weights = [node.variable for node in group["params"]]
            phase = f"{self._part_of.get(weights[0], 'head')} weights"
            if phase != self.label:
                _drop_all(model)  # peak_points.py adds the gradients of whole units
                self._enter(phase)
                self._before_weights[phase] = self.total()
            stage_backward_weight(iter(weights), [group])
            if not self._keeps_gradients:
                _drop_all(model)
        _drop_all(model)
        self._before_weights["end"] = self.total()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if operator.namespace == "prim":
            return result
        self._phase.peak = max(self._phase.peak, self.alive)
        if self._phase.experts:
            self._phase.rest = max(self._phase.rest, self.alive)
        if is_kernel(operator, result):
            self._note_kernel(operator, args, kwargs or {}, result)
        return result

    def _note_kernel(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        kernel = kernel_of(operator, args, kwargs, result, self._seq_len)
        if self._compiled and not kernel.operations and self.label in _IN_BLOCKS:
            self._phase.fused = self._phase.fused or _FusedOperators()
            self._phase.fused.add(args, kwargs, result)
            return
        self._end_kernel()
        if kernel.operations or kernel.traffic:
            self._phase.work.append(kernel)
        if kernel.attention:
            self._phase.sent["attention"] += kernel.operations

    def compute(self, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operator. Grouped products run in bf16, as they support no other fake tensors."""
        if operator is not torch.ops.aten._grouped_mm.default:
            return super().compute(operator, args, kwargs)
        left, right, *rest = args
        narrow = (x.to(torch.bfloat16) for x in (left, right))
        return operator(*narrow, *rest, **kwargs).to(left.dtype)

    def result(self, blocks: int, first: bool, last: bool) -> PlannedPassTrace:
        """Compute the trace of a pipeline stage from the recorded pass of a model. The stage has
        `blocks` equal blocks, with the embedding if it is the `first` stage, and with the head if
        it is the `last`."""
        extra = blocks - self._depth
        peaks = {name: phase.peak for name, phase in self._phases.items()}
        alive, saved = extra * self._first_alive, extra * self._first_saved
        all_saved = self._saved + saved
        # A pipeline holds inputs and outputs whether or not autograd keeps them.
        into, out = (0 if kept else self._hidden for kept in self._kept)
        # In backward of a stage: bytes to subtract, as it lacks the head, and to add for messages.
        passed = more = 0
        if not last:
            all_saved += out - self._head_saved
            peaks["head"], peaks["head back"] = 0, all_saved + self._hidden - saved
            passed = self._after_head - self._hidden - out
            more = 2 * self._hidden - out
        if not first:
            all_saved += into
            peaks["head"] += into
            peaks["head back"] += into
            passed -= into
            peaks["tail"] = self._after_block + self._hidden
        phases = {
            "start": first, "first": extra + 1, "others": 1 if self._depth > 1 else 0, "head": last,
            "head back": last, "last back": 1, "others back": 1, "first back": extra + 1,
            "tail": first,
            "first weights": extra + 1, "others weights": 1, "head weights": last,
        }  # fmt: skip
        times = {name: int(count) for name, count in phases.items()}
        names = [*phases]
        halves = names[:4], names[4:]
        first_backward = peaks["first back"] - passed + more
        last_back, first_back = (self._phases[name] for name in ("last back", "first back"))
        in_last, in_first = saved - passed, more - passed
        after_block, tail = (most - passed + more for most in (self._after_block, peaks["tail"]))
        kept, put_off, of_weights = all_saved, self._hidden, halves[1]
        weights_peaks: list[int] = []
        if after := self._after_input:
            # Gradients of activations in a block, and of its output, are kept for those of its
            # weights.
            of_block = after["last back"]
            # Backward of the inputs frees nothing.
            others = extra * (self._first_saved + of_block)
            first_backward, after_block, tail = (
                most + others for most in (first_backward, after_block, tail)
            )
            kept = sum(after[name] for name in halves[0]) + extra * after["first"]
            put_off = sum(after[name] for name in halves[1]) + extra * of_block
            if not last:
                kept -= after["head"] + (self._hidden if self._keeps_output else 0)
                put_off += of_block - after["first back"] - after["head back"]
            of_weights = ["first weights", "others weights", *(["head weights"] if last else [])]
            left, ends = kept + put_off, ["first weights", "others weights", "head weights"]
            began = [self._before_weights["end"]]
            for name in ends:
                began.append(self._before_weights.get(name, began[-1]))
            for name, (after_it, before_it) in reversed([*zip(ends, pairwise(began), strict=True)]):
                for _ in range(times[name]):
                    weights_peaks.append(left + max(peaks[name], before_it) - before_it)
                    left += after_it - before_it

        def work(half: list[str]) -> Work:
            return tuple(
                kernel.repeated(times[name])
                for name in half
                for kernel in (self._phases[name].work if times[name] else ())
            )

        def sent(half: list[str]) -> PlannedPassTraffic:
            return PlannedPassTraffic(
                *(
                    sum(times[n] * self._phases[n].sent[w] for n in half)
                    for w in PlannedPassTraffic._fields
                )
            )

        return PlannedPassTrace(
            saved=all_saved,
            head_forward=max(
                peaks["start"], peaks["first"], max(peaks["others"], peaks["head"]) + alive
            ),
            head_backward=peaks["head back"] + saved,
            forward_entry=self._forward_entry + alive,
            last_forward=peaks["others" if self._depth > 1 else "first"] + alive,
            entry=self._entry + in_last,
            last_backward=max(peaks["last back"] + saved, peaks["others back"]) - passed,
            first_backward=first_backward,
            after_block=after_block,
            block_saved=self._first_saved,
            tail_backward=tail,
            experts=(last_back.experts + in_last, first_back.experts + in_first),
            rest=(last_back.rest + in_last, first_back.rest + in_first),
            forward=work(halves[0]),
            backward=work(halves[1]),
            sent=(sent(halves[0]), sent(halves[1])),
            hidden=self._hidden,
            kept=kept,
            put_off=put_off,
            weights_peaks=tuple(weights_peaks),
            weights=work(of_weights),
        )


def _drop_all(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _on_gradient(value: Any, call: Callable[[], None]) -> None:
    """Register a hook that runs `call` once the gradient of the first differentiable tensor in
    `value` is complete."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _gradient: call())
            return
