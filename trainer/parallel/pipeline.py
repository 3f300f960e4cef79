"""Pipeline parallelism: each rank holds the blocks of some stages, and micro-batches pass through.

[Note: pipeline] Each rank follows its order of actions from trainer/parallel/schedules.py. A stage
sends activations to the next stage, with statistics of its blocks if the model has some (such as
expert loads); the next stage sends back their gradients. All ranks of a pipeline have the same
micro-batches, whose shapes determine the sizes of messages. Receives are posted in the order of
sending, one ahead per neighbour; sends do not block. So messages need no tags and no handshake, and
the orders deadlock only if `schedules.arranged` raises an error for them.

A tied embedding is in the first and the last stage. Each computes a term of its gradient; both add
up the terms after backward, and apply the same update.

Shapes: B micro-batch, T sequence, D hidden.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule, fully_shard

from checkpointing.format.tensors import local_tensor
from trainer.models.decoder import Decoder
from trainer.parallel.fsdp import prepare_backward
from trainer.parallel.mesh import PIPELINE, Mesh
from trainer.parallel.passes import ParallelForwardPass, Passed, mark, means, seconds_between
from trainer.parallel.schedules import Order, PipelineAction, cut, incoming, schedule
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.strategies import pp, tp

if TYPE_CHECKING:
    from trainer.parallel.context import ContextParallel

Message = tuple[Tensor, ...]
"""Hidden states (B, T, D) and maybe the statistics of earlier blocks (blocks, …), or gradients."""


def blocks_by_stage(model: nn.Module, recipe: Recipe) -> list[range]:
    """Return the blocks of each stage, cut so that the highest cost of a stage is lowest. Raises
    RecipeError if the model cannot be cut into the recipe's stages."""
    if not isinstance(model, Decoder) or (model.family.beside_loss and not model.family.statistics):
        problem = f"{type(model).__name__} is not one of Perdure's decoders"
        if isinstance(model, Decoder):
            problem = f"{model.family.model_type} has scalars beside the loss that need all blocks"
        raise RecipeError(f"strategy.pp: {problem}; set strategy.pp=1")
    costs = model.block_costs(recipe.data.seq_len)
    stages = pp.stages(recipe.strategy)
    if stages > len(costs):
        raise RecipeError(
            f"strategy.pp: {len(costs)} blocks cannot be cut into {stages} stages; lower "
            "strategy.pp or strategy.pp_stages_per_rank"
        )
    return cut(tuple(costs), stages)


def check_model(model: nn.Module, recipe: Recipe, _shards: int) -> None:
    """Raise RecipeError if the model cannot be cut into the recipe's stages."""
    blocks_by_stage(model, recipe)


def stages_of(
    model: nn.Module, mesh: Mesh, recipe: Recipe
) -> tuple[dict[int, Decoder], list[float]]:
    """Return this rank's stages by number, and the forward costs of all stages, in the units of
    `Decoder.block_costs`. Works on the meta device."""
    rank, runs = mesh.device_mesh[PIPELINE].get_local_rank(), blocks_by_stage(model, recipe)
    assert isinstance(model, Decoder)  # `blocks_by_stage` has refused any other model
    mine = range(rank, len(runs), pp.ranks(recipe.strategy))
    by_block = model.block_costs(recipe.data.seq_len)
    costs = [sum(by_block[run.start : run.stop]) for run in runs]
    return {s: model.part(runs[s]) for s in mine}, costs


class PipelineParallel:
    """Executes this rank's stages of a pipeline. Created, and each method called, on all ranks of
    the pipeline.

    Args:
        stages: this rank's stages, by number; sharded if `is_sharded_by_fsdp`.
        dtype: dtype of hidden states.
        context: computes stages with a part of each sequence; None: with whole sequences.
        costs: costs of all stages, see `stages_of`.
    """

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        mesh: Mesh,
        recipe: Recipe,
        dtype: torch.dtype,
        context: "ContextParallel | None",
        costs: Sequence[float],
    ) -> None:
        self.costs = costs
        self._stages, self._recipe, self._dtype = stages, recipe, dtype
        self._context = context
        self.join(mesh)
        self.tied: Tensor | None = None
        """The tied embedding weight, on the first and last rank; None on other ranks."""
        self._before: dict[int, int] = {}  # stage → index of its first block
        self._marks: tuple[Any, Any, list[tuple[Any, Any]]] = 0.0, 0.0, []
        for number, stage in stages.items():
            architecture = stage.model.architecture
            self._width, self._family = architecture.hidden_size, stage.family
            self._architecture = architecture
            blocks = [int(name) for name in stage.model.layers._modules]
            self._before |= {number: blocks[0], number + 1: blocks[-1] + 1}
            if architecture.tie_word_embeddings and hasattr(stage.model, "embed_tokens"):
                self.tied = stage.model.embed_tokens.weight

    def join(self, mesh: Mesh) -> None:
        self._links = _Links(mesh, len(self._stages) > 1)

    @property
    def counted_elsewhere(self) -> Tensor | None:
        """The tied weight on the last rank, whose gradient the first rank adds to the norm; None on
        other ranks."""
        return self.tied if self._links.rank == self._links.ranks - 1 else None

    @property
    def beside_loss(self) -> list[str]:
        """Names of the scalars beside the loss that the last stage returns."""
        family, architecture = self._family, self._architecture
        if not (family.beside_loss and family.statistics):
            return []
        some = torch.zeros(1, *family.statistics(architecture, 1))
        return ["cross_entropy", *family.beside_loss(some.unbind(), architecture)]

    @property
    def seconds(self) -> tuple[float, float]:
        """(seconds of this rank's last `run` with backward, seconds of that run spent waiting for
        messages). Read it only after the device is synchronised."""
        began, ended, waits = self._marks
        return seconds_between(began, ended), sum(seconds_between(*wait) for wait in waits)

    def run(
        self, inputs: Sequence[Mapping[str, Tensor]], train: bool
    ) -> Iterator[ParallelForwardPass]:
        """Yield the forward passes of all micro-batches, with `input_ids` (B, T), through each
        stage of this rank. If `train`, run backward in between; at the end FSDP has reduced the
        gradients."""
        strategy, rank = self._recipe.strategy, self._links.rank
        orders = schedule(*pp.shape(strategy), len(inputs))
        if not train:
            orders = [[action for action in order if action.kind == "F"] for order in orders]
        shapes = [batch["input_ids"].shape for batch in inputs]
        began = mark(self._links.device)
        messages = _Messages(
            self._links,
            orders,
            lambda action: self._message_buffer(action, *shapes[action.micro_batch]),
        )
        top = pp.stages(strategy) - 1
        kept: dict[tuple[int, int], tuple[Message, Message]] = {}
        weights: dict[tuple[int, int], Callable[[], None]] = {}
        remaining = dict.fromkeys(self._stages, len(inputs))
        for action in orders[rank]:
            kind, s, number = action
            stage = self._stages[s]
            if kind == "F":
                received = messages.receive(action) if s else ()
                for x in received:
                    x.requires_grad_(train)  # leaves of this stage's graph
                forward = ParallelForwardPass(number, partial(self._forward, stage, received))
                yield forward
                root = forward.take_root()
                out = root if isinstance(root, tuple) else (root,)
                if s < top:
                    # Detached, because each stage has its own autograd graph.
                    messages.send(PipelineAction("F", s + 1, number), [x.detach() for x in out])
                if train:
                    kept[s, number] = received, out
                del root
                continue
            if kind == "W":
                weights.pop((s, number))()
                continue
            gradients = messages.receive(action) if s < top else None
            received, out = kept.pop((s, number))
            remaining[s] -= 1
            # The last backward of a stage in this step reduces its gradients.
            last = remaining[s] == 0
            if kind == "B":
                self._backward(stage, out, gradients, last)
            elif not received:  # no rank waits for the first stage: its whole backward is put off
                weights[s, number] = partial(self._backward, stage, out, gradients, last)
            else:
                weights[s, number] = self._backward_of_input(stage, received, out, gradients, last)
            if received:
                # Zeros where there is no gradient, because the previous stage waits for a message.
                back = [torch.zeros_like(x) if x.grad is None else x.grad for x in received]
                messages.send(PipelineAction(kind, s - 1, number), back)
                del back
            del received, out, gradients  # frees them before the next micro-batch allocates
        messages.finish()
        if train:
            self._marks = began, mark(self._links.device), messages.waits

    def _message_buffer(self, action: PipelineAction, rows: int, length: int) -> Message:
        device = self._links.device
        tokens = self._context.tokens(length) if self._context else length
        shape = rows, tokens // tp.stream_parts(self._recipe.strategy), self._width
        hidden = torch.empty(shape, dtype=self._dtype, device=device)
        if not (self._family.beside_loss and self._family.statistics):
            return (hidden,)
        blocks = self._before[action.stage + (action.kind != "F")]
        of_each = self._family.statistics(self._architecture, rows)
        return hidden, torch.empty((blocks, *of_each), dtype=torch.float32, device=device)

    def _forward(
        self, stage: Decoder, message: Message, inputs: Mapping[str, Tensor]
    ) -> Passed | dict[str, Tensor]:
        beside = dict(zip(("hidden", "statistics"), message, strict=False))
        result = (
            self._context(stage, inputs, **beside) if self._context else stage(**inputs, **beside)
        )
        return means(result) if stage.has_head else result

    def _backward(
        self, stage: nn.Module, out: Message, gradients: Message | None, last: bool
    ) -> None:
        prepare_backward(stage, last, self._recipe)
        torch.autograd.backward(out, gradients)

    def _backward_of_input(
        self, stage: nn.Module, given: Message, out: Message, gradients: Message | None, last: bool
    ) -> Callable[[], None]:
        # Private functions, because torch has no public ones that split backward.
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )

        # No resharding yet: the weight gradients need the gathered weights later.
        prepare_backward(stage, False, self._recipe)
        roots = [x.view_as(x).grad_fn for x in out]
        _, groups = stage_backward_input(
            [*out], None if gradients is None else [*gradients], [*given], stage.parameters()
        )
        owners = _owners(roots, {node for group in groups for node in group["intermediates"]})
        del roots

        def backward_of_weights() -> None:
            while groups:
                # From the last layer on, so that each group frees its part of the graph.
                group = groups.pop()
                used = group["intermediates"]
                stage_backward_weight(iter([node.variable for node in group["params"]]), [group])
                for node in used:
                    owners.pop(node, None)
                del used, group, node
            if not isinstance(stage, FSDPModule):
                return
            # These gradients bypass FSDP's hooks, so FSDP's final callback is called here.
            prepare_backward(stage, last, self._recipe)
            fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]

        return backward_of_weights

    def add_tied_gradients(self) -> None:
        """Add up the gradients of a tied weight on the first and last stage. Called after `run`."""
        if self.tied is None or self.tied.grad is None:
            return
        gradient, peer = self.tied.grad, self._links.ranks - 1 - self._links.rank
        # With strategy.offload the gradient is on the host, but the group sends from the device.
        mine = local_tensor(gradient)
        mine += self._links.exchange(mine.to(self._links.device), peer).to(mine.device)


def _owners(roots: Sequence[Node | None], nodes: Collection[Node]) -> dict[Node, Node]:
    """Return for each autograd node of a Python function among `nodes` the C++ node that keeps it
    alive. In torch 2.11 a node of a Python function is freed with the tensor that it produced,
    unless a C++ node that leads to it is referenced. `roots`: C++ nodes, roots of the graph."""
    wanted = {node for node in nodes if isinstance(node, torch._C._FunctionBase)}
    owners: dict[Node, Node] = {}
    pending, seen = [(root, root) for root in roots if root], set(roots)
    while len(owners) < len(wanted) and pending:
        node, above = pending.pop()
        owner = above if isinstance(node, torch._C._FunctionBase) else node
        for below, _ in node.next_functions:
            if below in wanted:
                owners.setdefault(below, owner)
            if below and below not in seen:
                pending.append((below, owner))
                seen.add(below)
    return owners


def neighbour_turns(rank: int, ranks: int, around: bool) -> list[tuple[int, ...]]:
    """Return the groups that `rank` of a pipeline of `ranks` ranks creates one after the other, so
    that every two neighbours share a group. All ranks create a group at once, a rank without a
    partner one of its own. `around`: whether the last and the first rank are neighbours too."""
    last = ranks if around and ranks > 2 else ranks - 1
    pairs = [(first, (first + 1) % ranks) for first in range(last)]
    even = ranks - ranks % 2
    turns = [turn for turn in (pairs[:even:2], pairs[1::2], pairs[even:]) if turn]
    return [next((pair for pair in turn if rank in pair), (rank,)) for turn in turns]


class _Links:
    """Point-to-point connections of this rank to other ranks of its pipeline. Created on all ranks.
    `around`: see `neighbour_turns`."""

    def __init__(self, mesh: Mesh, around: bool) -> None:
        across = mesh.device_mesh[PIPELINE]
        self.rank, self.ranks = across.get_local_rank(), across.size()
        self.device = torch.device(mesh.device_mesh.device_type)
        self.group = across.get_group()
        self._members = dist.get_process_group_ranks(self.group)
        self._ways: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """(sender, receiver), as ranks of the pipeline → process group; empty on a CPU."""
        if self.device.type != "cuda":
            return
        # Each direction has its own group: operations of one NCCL communicator run one after the
        # other, so a receive that is posted ahead would block a send, and ranks would deadlock.
        for turn in neighbour_turns(self.rank, self.ranks, around):
            ranks = [self._members[number] for number in turn]
            for way in (turn, turn[::-1]):
                # Called by all ranks together, because it splits their communicator.
                group: Any = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
                self._ways[way] = group

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        group = self._ways.get((self.rank, peer), self.group)
        work = dist.isend(tensor, self._members[peer], group)
        assert work
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        group = self._ways.get((peer, self.rank), self.group)
        work = dist.irecv(tensor, self._members[peer], group)
        assert work
        return work

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to `peer`, and return the peer's tensor. Called on both ranks."""
        theirs = torch.empty_like(tensor)
        both = (dist.isend, tensor), (dist.irecv, theirs)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(way, x, group=self.group, group_peer=peer) for way, x in both]
        ):
            work.wait()
        return theirs


class _Messages:
    """Sends and receives this rank's messages in one `PipelineParallel.run`, see [Note:
    pipeline]."""

    def __init__(
        self,
        links: _Links,
        orders: Sequence[Order],
        message_buffer: Callable[[PipelineAction], Message],
    ) -> None:
        self._links, self._message_buffer = links, message_buffer
        self._place = {action: place for order in orders for place, action in enumerate(order)}
        self._expected = {
            peer: iter(actions) for peer, actions in incoming(orders)[links.rank].items()
        }
        self._posted: dict[int, tuple[PipelineAction, Message, list[dist.Work]]] = {}
        self._ready: dict[PipelineAction, Message] = {}
        self._sent: dict[int, deque[tuple[int, Tensor, dist.Work]]] = {}
        self.waits: list[tuple[Any, Any]] = []
        """(begin, end) marks of each wait for a message."""
        for peer in self._expected:
            self._post(peer)

    def _post(self, peer: int) -> None:
        action = next(self._expected[peer], None)
        if action is not None:
            message = self._message_buffer(action)
            works = [self._links.receive(tensor, peer) for tensor in message]
            self._posted[peer] = action, message, works

    def receive(self, action: PipelineAction) -> Message:
        source = action.stage + (-1 if action.kind == "F" else 1)
        peer = source % self._links.ranks
        while action not in self._ready:
            arrived, message, works = self._posted.pop(peer)
            self._wait(works)
            self._post(peer)  # receive the next message while this one is used
            self._ready[arrived] = message
        # Messages to actions of the peer before the one that sent this message have arrived, so
        # their memory can be freed.
        sent, reached = self._sent.get(peer), self._place[action._replace(stage=source)]
        while sent and sent[0][0] < reached:
            sent.popleft()[2].wait()
        return self._ready.pop(action)

    def send(self, action: PipelineAction, message: Sequence[Tensor]) -> None:
        """Begin to send the message that `action` on another rank needs."""
        peer = action.stage % self._links.ranks
        for tensor in (tensor.contiguous() for tensor in message):
            work = self._links.send(tensor, peer)
            self._sent.setdefault(peer, deque()).append((self._place[action], tensor, work))

    def finish(self) -> None:
        for sent in self._sent.values():
            self._wait([work for _, _, work in sent])

    def _wait(self, works: Sequence[dist.Work]) -> None:
        began = mark(self._links.device)
        for work in works:
            work.wait()
        self.waits.append((began, mark(self._links.device)))
