"""One forward and backward pass on fake tensors: bytes of activations, and work.

A model whose blocks are alike is traced with `DEPTH` of them; the others need what the first one
needs. Fake tensors have shapes and storages, but no memory, so this takes no GPU and a fraction of
a second for any size of model.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.data.documents import room_for_documents
from trainer.models import Decoder
from trainer.optim.optimizer import StateTensor, state_of
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.parallel.expert import stacked_modules
from trainer.plan.kernels import cuda_kernels
from trainer.plan.live import LiveTensors
from trainer.plan.storages import storage_of
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.sections import Optimizer
from trainer.tasks.task import bare_model, documents_for, repeated_blocks

DEPTH = 2
"""Blocks that are traced where all are alike: the last one, and one whose output another block
takes in."""

USUAL_GPU = 80e9
"""Bytes of a GPU of which nothing is said."""

Recompute: TypeAlias = Literal["none", "full", "selective"]


class Cut(NamedTuple):
    """How ranks that compute together divide the work of a micro-batch."""

    tp: int = 1
    sequence: bool = False
    """As `strategy.sequence_parallel`."""
    cp: int = 1
    ep: int = 1


WHOLE = Cut()
Work: TypeAlias = tuple[tuple[float, float], ...]
"""(floating-point operations, bytes read and written) of each operator."""


@dataclass(frozen=True)
class Shape:
    """A parameter, as sharding on dim 0 sees it."""

    rows: int
    row: int
    """Elements per row."""
    itemsize: int
    """Bytes per element."""
    state: tuple[StateTensor, ...] = ()
    """What the optimizer keeps for it."""
    stacked: bool = False
    """Whether its rows are experts."""
    ep: int = 1
    """Ranks that have other rows of it each, before any sharding."""

    def sharded(self, ranks: int) -> int:
        """Elements of the first rank's slice, which no other's exceeds. On one rank of `ep`, which
        do not share it, that is what it would have gathered."""
        return -(-self.rows // max(ranks, self.ep)) * self.row

    def gathered(self, ranks: int) -> int:
        """Elements of all slices that a rank gathers."""
        return max(1, ranks // self.ep) * self.sharded(ranks)

    def state_bytes(self, ranks: int) -> int:
        """Bytes of the optimizer's state on the first rank."""
        return sum(tensor.nbytes(self.sharded(ranks)) for tensor in self.state)

    def moment_bytes(self, ranks: int) -> int:
        """Bytes of the state that has the shape of the parameter, on the first rank."""
        return sum(t.nbytes(self.sharded(ranks)) for t in self.state if t.like_parameter)

    @property
    def saved_bytes(self) -> int:
        """In a checkpoint, but for numbers of updates."""
        state = sum(tensor.nbytes(self.rows * self.row) for tensor in self.state if tensor.shape)
        return self.rows * self.row * self.itemsize + state


@dataclass(frozen=True, eq=False)
class Blueprint:
    """What a recipe trains, without weights and data."""

    model: nn.Module
    """On the meta device."""
    traced: nn.Module
    """The same model with fewer blocks, or itself."""
    block_count: int
    seq_len: int
    documents: Literal["document_ids", "cu_seqlens"] | None
    """What of them the model is given."""
    flops_per_token: float
    """As `Task.flops_per_token`."""
    units: tuple[tuple[Shape, ...], ...]
    """Parameters by FSDP unit: what belongs to no block, then each block. Tied ones once."""
    buffers: int
    """Bytes."""
    optimizer: Optimizer
    """What keeps state for each parameter."""

    @property
    def parameter_count(self) -> int:
        """Elements."""
        return sum(shape.rows * shape.row for unit in self.units for shape in unit)


def read_blueprint(recipe: Recipe) -> Blueprint:
    """Build the model of a recipe on the meta device.

    Raises:
        RecipeError: it cannot be built.
        ConfigError: the config.json of `model.init_from` cannot be used.
    """
    model, blocks, flops = bare_model(recipe)
    model = model.to("meta")
    traced = model
    if isinstance(model, Decoder) and len(blocks) > DEPTH:
        with torch.device("meta"):
            shallow = dataclasses.replace(model.model.architecture, num_hidden_layers=DEPTH)
            traced = Decoder(shallow, recipe.model.attention, model.family)
    return Blueprint(
        model=model,
        traced=traced,
        block_count=len(blocks),
        seq_len=recipe.data.seq_len,
        documents=documents_for(recipe),
        flops_per_token=flops,
        units=_units(model, blocks, recipe.optimizer),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer=recipe.optimizer,
    )


Units: TypeAlias = tuple[tuple[Shape, ...], ...]


def _units(model: nn.Module, blocks: Sequence[nn.Module], optimizer: Optimizer) -> Units:
    in_blocks = {p for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if p not in in_blocks]
    units = [rest, *(list(block.parameters()) for block in blocks)]
    named = dict(model.named_parameters())
    state = state_of(named, optimizer)
    kept = {parameter: state[name] for name, parameter in named.items()}
    stacked = {p for module in stacked_modules(model) for p in module.parameters()}
    return tuple(tuple(_shape(p, kept[p], p in stacked) for p in unit) for unit in units)


@dataclass(frozen=True, eq=False)
class Stage:
    """What of a model a rank computes: some blocks, with what is below the first and above the last
    one; all of it, unless there is a pipeline."""

    first: bool
    last: bool
    blocks: int
    units: Units
    """As of a `Blueprint`, as tensor parallelism cuts it."""
    tied: tuple[Shape, ...] = ()
    """The embedding, if another stage has it, too."""


def stage_of(blueprint: Blueprint, blocks: range, tp: int, ep: int = 1) -> Stage:
    """The stage with some of the blocks, on one of `tp` ranks, with experts of one of `ep`.

    Raises:
        RecipeError: the model cannot be cut so.
    """
    first, last = blocks.start == 0, blocks.stop == blueprint.block_count
    return _stage_of(blueprint, first, last, len(blocks), tp, ep)


@cache
def _stage_of(
    blueprint: Blueprint, first: bool, last: bool, blocks: int, tp: int, ep: int
) -> Stage:
    if first and last and tp == 1:
        units = tuple(
            tuple(dataclasses.replace(s, ep=ep) if s.stacked else s for s in unit)
            for unit in blueprint.units
        )
        return Stage(True, True, blocks, units)
    whole = _units_of_part(blueprint, True, True, tp)
    if not isinstance(blueprint.traced, Decoder):
        return Stage(first, last, blocks, whole)
    rest = _units_of_part(blueprint, first, last, tp)[0]
    tied: tuple[Shape, ...] = ()
    if first != last and blueprint.traced.model.architecture.tie_word_embeddings:
        tied = _units_of_part(blueprint, True, False, tp)[0]
    return Stage(first, last, blocks, (rest, *[whole[1]] * blocks), tied)


@cache
def _units_of_part(blueprint: Blueprint, first: bool, last: bool, tp: int) -> Units:
    """Units of the traced blocks, and what is below the first or above the last one."""
    part = blueprint.traced
    if first and last:
        part = copy.deepcopy(part)
    elif isinstance(part, Decoder):
        depth = len(list(part.blocks))
        if not (first or last):
            return ((),)
        part = part.part(range(0 if first else 1, depth if last else 1))
    if tp > 1:
        from trainer.parallel.tensor import apply_tensor_parallel  # others get by without
        from trainer.plan.ranks import Ranks, imagined_ranks

        ranks: Any = Ranks(tp)
        with imagined_ranks(lambda *_: None, None, None):
            apply_tensor_parallel(part, ranks, False)
    return _units(part, repeated_blocks(part), blueprint.optimizer)


def _shape(parameter: nn.Parameter, state: tuple[StateTensor, ...], stacked: bool) -> Shape:
    rows = parameter.shape[0] if parameter.dim() else 1
    row, itemsize = parameter.numel() // max(1, rows), parameter.element_size()
    return Shape(rows, row, itemsize, state, stacked)


class Sent(NamedTuple):
    """Bytes that a rank sends in rings, or of rows to the ranks of their experts (ep), and what
    hides them."""

    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    attention: float = 0.0
    """Operations of attention, beside which those of cp travel."""


@dataclass(frozen=True)
class Trace:
    """Bytes and work of one pass over one micro-batch on one rank. Parameters are not counted, nor
    gradients, except those that FSDP has not reduced yet where a peak is meant."""

    saved: int
    """Activations: alive between forward and backward."""
    head_forward: int
    """Peak until the loss is there."""
    head_backward: int
    """Peak of the backward pass before it comes to the blocks."""
    last_backward: int
    """Peak in the backward pass of the last block, which is the first to go back (of all but the
    first, where they are all traced)."""
    first_backward: int
    """Peak in the backward pass of any other block, when the blocks above it are through and those
    below it are none; each of them holds `block_saved` more."""
    after_block: int
    """When the backward pass of a block is over, its gradients not counted; each block below it
    holds `block_saved` more."""
    block_saved: int
    """Part of `saved` that is one block's."""
    tail_backward: int
    """Peak of the backward pass after the blocks."""
    forward: Work
    backward: Work
    """Recomputation included."""
    sent: tuple[Sent, Sent] = (Sent(), Sent())
    """In forward and in backward."""
    hidden: int = 0
    """Bytes of what a stage passes on."""
    products: int = 0
    """Bytes of the results of forward's matrix products: so much is kept of their gradients until
    those of weights are computed, where that is put off."""


@cache
def trace(
    blueprint: Blueprint,
    micro_batch: int,
    recompute: Recompute,
    dtype: torch.dtype,
    autocast: bool,
    device: Literal["cpu", "cuda"],
    flash: bool = True,
    gpu_memory: float = USUAL_GPU,
    keep_gradients: bool | None = None,
    cut: Cut = WHOLE,
    stage: Stage | None = None,
) -> Trace:
    """Trace a pass. What of it a stage does is told from a pass of a whole model.

    Args:
        blueprint: of the model.
        micro_batch: sequences.
        recompute: `strategy.activation_checkpointing`.
        dtype: of the computation.
        autocast: parameters stay as they are and are cast operator by operator, as under DDP; else
            the parameters have `dtype`, as those that FSDP gathers.
        device: whose kernels for attention and norms are assumed.
        flash: whether a GPU has flash attention, as from compute capability 8.0 on.
        gpu_memory: bytes of a GPU, by which the loss goes.
        keep_gradients: those of a unit stay until all of them are there, as with FSDP, or where
            they have no other place (unless said: without autocast); else they go into buckets, or
            are added to those of passes before.
        cut: with which other ranks.
        stage: which blocks; all of them unless said.

    Raises:
        RecipeError: the model does not run on fake tensors.
    """
    keep = not autocast if keep_gradients is None else keep_gradients
    gpu = (flash, gpu_memory) if device == "cuda" else None
    tape = _taped(blueprint, micro_batch, recompute, dtype, autocast, gpu, keep, cut)
    if stage is None:
        return tape.result(blueprint.block_count, True, True)
    return tape.result(stage.blocks, stage.first, stage.last)


@cache
def _taped(
    blueprint: Blueprint,
    micro_batch: int,
    recompute: Recompute,
    dtype: torch.dtype,
    autocast: bool,
    gpu: tuple[bool, float] | None,
    keep: bool,
    cut: Cut,
) -> "_Tape":
    """See `trace`; `gpu`: whether it has flash attention, and its bytes."""
    model = copy.deepcopy(blueprint.traced)
    blocks = repeated_blocks(model)
    depth = len(blocks)
    tape = _Tape(depth, blueprint.seq_len)
    shape = (micro_batch, blueprint.seq_len)
    call: Callable[..., Any] = lambda inputs: model(**inputs)  # noqa: E731
    imagined: Any = nullcontext()
    if cut != WHOLE:
        from trainer.parallel.context import Context  # others get by without
        from trainer.parallel.expert import apply_expert_parallel
        from trainer.parallel.tensor import apply_tensor_parallel
        from trainer.plan.ranks import Ranks, imagined_ranks, ring_of

        ring = ring_of(*shape, cut.cp) if cut.cp > 1 else None
        imagined = imagined_ranks(tape.send, ring, gpu and gpu[1])
        if ring:
            call = partial(Context(ring.group), model)
        with imagined_ranks(tape.send, ring, None):
            ranks: Any = Ranks(max(cut.tp, cut.ep))
            if cut.tp > 1:
                apply_tensor_parallel(model, ranks, cut.sequence)
            if cut.ep > 1:
                apply_expert_parallel(model, ranks)
    if recompute != "none":
        blocks = apply_activation_checkpointing(model, blocks, recompute)
    if not autocast:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            model.to_empty(device="cpu")
            inputs = {
                name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")
            }
            if blueprint.documents == "document_ids":
                inputs["document_ids"] = torch.zeros(shape, dtype=torch.int32)
            elif blueprint.documents == "cu_seqlens":
                ends = room_for_documents(*shape) + 1
                inputs["cu_seqlens"] = torch.zeros(ends, dtype=torch.int32)
            tape.follow(model, blocks, keep_gradients=keep)
            if gpu:
                stack.enter_context(cuda_kernels(*gpu))
            stack.enter_context(imagined)
            stack.enter_context(tape)
            casts = autocast and dtype != torch.float32
            with (
                torch.autocast("cpu", dtype=dtype, cache_enabled=False) if casts else nullcontext()
            ):
                loss = _loss(call(inputs))
            tape.forward_ends()
            loss.backward()
    except Exception as error:  # whatever a user's own model may raise
        first_line = (str(error).splitlines() or [""])[0]
        raise RecipeError(
            f"model: cannot be traced on fake tensors ({type(error).__name__}: {first_line}), so "
            "its activations are not known; measure them with `perdure compare`"
        ) from error
    return tape


def _loss(result: Any) -> torch.Tensor:
    return result["loss"] if isinstance(result, Mapping) else getattr(result, "loss", result)


@dataclass
class _Phase:
    peak: int = 0
    work: list[tuple[float, float]] = field(default_factory=list)
    products: int = 0
    sent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(Sent._fields, 0.0))


class _Tape(LiveTensors):
    """Notes live bytes and work while a pass goes through its phases."""

    def __init__(self, depth: int, seq_len: int) -> None:
        super().__init__()
        self._depth, self._seq_len = depth, seq_len
        names = ("start", "first", "others", "head", "head back", "last back", "others back",
                 "first back", "tail")  # fmt: skip
        self._phases = {name: _Phase() for name in names}
        self._in_backward = False
        self._first_alive = self._first_saved = self._head_saved = 0
        self._after_block = self._after_head = self._hidden = 0
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []
        """What comes into the blocks, and out of them."""
        self._kept = (True, True)
        """Whether autograd keeps these."""
        self._enter("start")

    def follow(
        self, model: nn.Module, blocks: Iterable[nn.Module], *, keep_gradients: bool
    ) -> None:
        """The model of the pass that comes."""
        self._watch(list(blocks))
        # Within autocast, whose casts of weights live until its end.
        model.register_forward_hook(lambda *_: self._note_alive())
        if not keep_gradients:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_drop)

    def send(self, whom: str, nbytes: float) -> None:
        """In the phase that is under way."""
        self._phase.sent[whom] += nbytes

    def _watch(self, blocks: list[nn.Module]) -> None:
        last = len(blocks) - 1
        for number, block in enumerate(blocks):

            def before(block: nn.Module, inputs: Any, number: int = number) -> None:
                if not self._in_backward:  # else it is recomputed
                    if number == 0:
                        self._note_end(inputs)
                    self._enter("others" if number else "first")
                    following = ("tail", "first back", "others back")[min(number, 2)]
                    _on_gradient(inputs, lambda: self._leave(block, following))

            def after(block: nn.Module, _inputs: Any, output: Any, number: int = number) -> None:
                if number == last and not self._in_backward:
                    self._hidden = self._note_end(output)
                    _on_gradient(output, self._leave_head)
                    self._enter("head")

            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)

    def _note_end(self, given: Any) -> int:
        hidden = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        self._ends.append(weakref.ref(storage_of(hidden)))
        return hidden.nbytes

    def _leave_head(self) -> None:
        self._after_head = self.total("head") + self.total("head back")
        self._enter("last back")

    def _note_alive(self) -> None:
        self._first_alive = self.total("first")

    def _enter(self, phase: str) -> None:
        self.label = phase
        self._phase = self._phases[phase]

    def _leave(self, block: nn.Module, following: str) -> None:
        """The backward pass of a block is over: FSDP would reduce its gradients now."""
        for parameter in block.parameters():
            parameter.grad = None
        if following == "tail":
            self._after_block = self.total()
        self._enter(following)

    def forward_ends(self) -> None:
        """The loss is there; what autocast has kept is gone."""
        self._saved = self.total()
        self._first_saved, self._head_saved = self.total("first"), self.total("head")
        if len(self._ends) == 2:
            self._kept = self._ends[0]() is not None, self._ends[1]() is not None
        self._in_backward = True
        self._enter("head back")

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if operator.namespace == "prim":
            return result
        self._phase.peak = max(self._phase.peak, self.alive)
        work = _work(operator, args, kwargs or {}, result, self._seq_len)
        if any(work):
            self._phase.work.append(work)
        if operator.overloadpacket in _PRODUCTS and not self._in_backward:
            self._phase.products += result.nbytes
        if "attention" in operator.overloadpacket.__name__:
            self._phase.sent["attention"] += work[0]
        return result

    def result(self, blocks: int, first: bool, last: bool) -> Trace:
        """For so many blocks, each like the first one, with what is below the `first` of a model
        and above the `last`. Without that a stage has hidden states from elsewhere, which take as
        much as an embedding gives, and a gradient of what it passes on."""
        extra = blocks - self._depth
        peaks = {name: phase.peak for name, phase in self._phases.items()}
        alive, saved = extra * self._first_alive, extra * self._first_saved
        all_saved = self._saved + saved
        # A pipeline holds what comes in and goes out, whether or not autograd does.
        into, out = (0 if kept else self._hidden for kept in self._kept)
        passed = more = 0  # in backward, what the head has left; then what a pipeline holds
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
        }  # fmt: skip
        times = {name: int(count) for name, count in phases.items()}
        names = [*phases]
        halves = names[:4], names[4:]

        def work(half: list[str]) -> Work:
            return tuple(one for name in half for one in self._phases[name].work * times[name])

        def sent(half: list[str]) -> Sent:
            return Sent(
                *(sum(times[n] * self._phases[n].sent[w] for n in half) for w in Sent._fields)
            )

        return Trace(
            saved=all_saved,
            head_forward=max(
                peaks["start"], peaks["first"], max(peaks["others"], peaks["head"]) + alive
            ),
            head_backward=peaks["head back"] + saved,
            last_backward=max(peaks["last back"] + saved, peaks["others back"]) - passed,
            first_backward=peaks["first back"] - passed + more,
            after_block=self._after_block - passed + more,
            block_saved=self._first_saved,
            tail_backward=peaks["tail"] - passed + more,
            forward=work(halves[0]),
            backward=work(halves[1]),
            sent=(sent(halves[0]), sent(halves[1])),
            hidden=self._hidden,
            products=sum(times[name] * self._phases[name].products for name in halves[0]),
        )


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _on_gradient(value: Any, call: Callable[[], None]) -> None:
    """Call when the gradient of the first tensor in `value` that has one is complete."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _gradient: call())
            return


# --- work ------------------------------------------------------------------------------------

_NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}


_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
_NAMESPACES = ("aten", "torch_attn", "perdure")


def _work(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> tuple[float, float]:
    """Operations and bytes of an operator; none for one that only makes another view."""
    if operator.namespace not in _NAMESPACES or operator.overloadpacket.__name__ in _NO_TRAFFIC:
        return 0.0, 0.0
    given = {_place(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    made = {_place(t): t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    if operator.is_view or not made:
        return 0.0, 0.0
    traffic = sum(t.numel() * t.element_size() for t in (*given.values(), *made.values()))
    return _operations(operator, args, kwargs, result, seq_len), float(traffic)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _operations(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> float:
    name = operator.overloadpacket.__name__
    named = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    products = 5 if "backward" in name else 2  # Dao et al. 2022: five products in backward
    if "varlen" in name:  # as if each sequence were one document: how long they are is not known
        tokens, heads, size = named["query"].shape
        return float(products * tokens * heads * seq_len * size)
    if name.startswith("_flash_attention"):  # of a ring: each range of queries sees one of keys
        queries, heads, size = named["query"].shape
        whole = 2.0 * products * queries * named["max_k"] * heads * size
        return whole / 2 if named["is_causal"] else whole
    if name.startswith("_scaled_dot_product"):
        batch, heads, queries, size = named["query"].shape
        whole = 2.0 * products * batch * heads * queries * named["key"].shape[2] * size
        return whole / 2 if named.get("is_causal") else whole
    formula = flop_registry.get(operator.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
