"""Pipeline parallelism: ranks have the blocks of a model in stages, and micro-batches go through.

[Note: pipeline] Each rank follows its order of trainer/parallel/schedules.py. A stage sends its
activations to the next one, with the statistics of blocks that have some, and the gradients of
these to the one before. All ranks of a pipeline have the same micro-batches, whose shapes tell how
large a message is. Receives are posted
in the order of sending, one ahead of each neighbour; sends wait for nobody. So there is no tag, no
handshake and no deadlock but one that `simulate` would find.

A tied embedding is in the first and the last stage. Each has a part of its gradient; they exchange
them after backward, so both make the same update.

Shapes: B micro-batch, T sequence, D hidden.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule, fully_shard

from checkpointing.format.tensors import local_tensor
from trainer.models.decoder import Decoder
from trainer.parallel.clock import mark, seconds_between
from trainer.parallel.fsdp import prepare_backward
from trainer.parallel.mesh import PIPELINE, Mesh
from trainer.parallel.passes import Compute, Passed, means
from trainer.parallel.schedules import Action, Order, cut, incoming, schedule
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.strategies import pp, tp

if TYPE_CHECKING:
    from trainer.parallel.context import Context

Message = tuple[Tensor, ...]
"""Hidden states (B, T, D), and the statistics of the blocks before (blocks, …), if they have some;
or the gradients of these."""


def runs_of(model: nn.Module, recipe: Recipe) -> list[range]:
    """The blocks of each stage: as much for each to compute as can be.

    Raises:
        RecipeError: the model cannot be cut into the stages of the recipe.
    """
    if not isinstance(model, Decoder) or (model.family.beside_loss and not model.family.statistics):
        name = model.family.model_type if isinstance(model, Decoder) else type(model).__name__
        raise RecipeError(f"strategy.pp: {name} cannot be cut into stages; set strategy.pp=1")
    costs = model.block_costs(recipe.data.seq_len)
    stages = pp.stages(recipe.strategy)
    if stages > len(costs):
        raise RecipeError(
            f"strategy.pp: {len(costs)} blocks cannot be cut into {stages} stages; lower "
            "strategy.pp or strategy.pp_stages_per_rank"
        )
    return cut(tuple(costs), stages)


def stages_of(model: nn.Module, mesh: Mesh, recipe: Recipe) -> dict[int, Decoder]:
    """This rank's stages by number, in order. Works on the meta device."""
    rank, runs = mesh.device_mesh[PIPELINE].get_local_rank(), runs_of(model, recipe)
    assert isinstance(model, Decoder)  # or it would have been refused
    return {s: model.part(runs[s]) for s in range(rank, len(runs), pp.ranks(recipe.strategy))}


def costs_of(model: nn.Module, recipe: Recipe) -> list[float]:
    """What forward of each stage costs, as `runs_of` takes it."""
    assert isinstance(model, Decoder)  # or it would have been refused
    costs = model.block_costs(recipe.data.seq_len)
    return [sum(costs[run.start : run.stop]) for run in runs_of(model, recipe)]


class Pipeline:
    """This rank's part of a pipeline. Made, and each method called, on all its ranks."""

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        mesh: Mesh,
        recipe: Recipe,
        dtype: torch.dtype,
        context: "Context | None",
        costs: Sequence[float],
    ) -> None:
        """
        Args:
            stages: of this rank, by number; see `is_sharded_by_fsdp`.
            mesh: with PIPELINE.
            recipe: of the run.
            dtype: of hidden states.
            context: by which a stage computes with a part of each sequence.
            costs: of all stages, see `costs_of`.
        """
        self.costs = costs
        self._stages, self._recipe, self._dtype = stages, recipe, dtype
        self._context = context
        self.join(mesh)
        self.tied: Tensor | None = None
        """A weight that the first and the last rank have in common, on these."""
        self._before: dict[int, int] = {}  # blocks before a stage
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
        """Send and receive by the groups of `mesh` from now on."""
        self._links = _Links(mesh, len(self._stages) > 1)

    @property
    def counted_elsewhere(self) -> Tensor | None:
        """A weight of this rank that the norm is to count on another, which has it, too."""
        return self.tied if self._links.rank == self._links.ranks - 1 else None

    @property
    def beside_loss(self) -> list[str]:
        """What the last stage returns beside the loss."""
        family, architecture = self._family, self._architecture
        if not (family.beside_loss and family.statistics):
            return []
        some = torch.zeros(1, *family.statistics(architecture, 1))
        return ["cross_entropy", *family.beside_loss(some.unbind(), architecture)]

    @property
    def seconds(self) -> tuple[float, float]:
        """How long the last `run` with a backward took on this rank, and how much of that it waited
        for messages. To be asked once the device has been waited for."""
        began, ended, waits = self._marks
        return seconds_between(began, ended), sum(seconds_between(*wait) for wait in waits)

    def run(self, inputs: Sequence[Mapping[str, Tensor]], compute: Compute, train: bool) -> None:
        """All micro-batches forward and, if `train`, backward; then FSDP has reduced gradients.

        Args:
            inputs: micro-batches of any sizes, with `input_ids` (B, T).
            compute: called for each micro-batch and each stage of this rank.
            train: whether there is a backward.
        """
        strategy, rank = self._recipe.strategy, self._links.rank
        orders = schedule(*pp.shape(strategy), len(inputs))
        if not train:
            orders = [[action for action in order if action.kind == "F"] for order in orders]
        shapes = [batch["input_ids"].shape for batch in inputs]
        began = mark(self._links.device)
        messages = _Messages(
            self._links, orders, lambda action: self._room(action, *shapes[action.micro_batch])
        )
        top = pp.stages(strategy) - 1
        kept: dict[tuple[int, int], tuple[Message, Message]] = {}
        weights: dict[tuple[int, int], Callable[[], None]] = {}
        left = dict.fromkeys(self._stages, len(inputs))
        for action in orders[rank]:
            kind, s, number = action
            stage = self._stages[s]
            if kind == "F":
                given = messages.receive(action) if s else ()
                for x in given:
                    x.requires_grad_(train)
                found = compute(number, inputs[number], partial(self._forward, stage, given))
                out = found if isinstance(found, tuple) else (found,)
                if s < top:
                    messages.send(Action("F", s + 1, number), [x.detach() for x in out])
                if train:
                    kept[s, number] = given, out
                del found
                continue
            if kind == "W":
                weights.pop((s, number))()
                continue
            gradients = messages.receive(action) if s < top else None
            given, out = kept.pop((s, number))
            left[s] -= 1
            # What FSDP is told holds for a stage until it is told otherwise.
            last = left[s] == 0
            if kind == "B":
                self._backward(stage, out, gradients, last)
            elif not given:  # nobody waits for the gradient of its input
                weights[s, number] = partial(self._backward, stage, out, gradients, last)
            else:
                weights[s, number] = self._backward_of_input(stage, given, out, gradients, last)
            if given:
                back = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
                messages.send(Action(kind, s - 1, number), back)
                del back
            del given, out, gradients  # before the next micro-batch is under way
        messages.finish()
        if train:
            self._marks = began, mark(self._links.device), messages.waits

    def _room(self, action: Action, rows: int, length: int) -> Message:
        """Where the message that an action needs is to come: between its stage and the one before
        forward, the one after backward."""
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
        self, stage: Decoder, given: Message, inputs: Mapping[str, Tensor]
    ) -> Passed | dict[str, Tensor]:
        beside = dict(zip(("hidden", "statistics"), given, strict=False))
        found = (
            self._context(stage, inputs, **beside) if self._context else stage(**inputs, **beside)
        )
        return means(found) if stage.has_head else found

    def _backward(
        self, stage: nn.Module, out: Message, gradients: Message | None, last: bool
    ) -> None:
        prepare_backward(stage, last, self._recipe)
        torch.autograd.backward(out, gradients)

    def _backward_of_input(
        self, stage: nn.Module, given: Message, out: Message, gradients: Message | None, last: bool
    ) -> Callable[[], None]:
        """The gradients of what was given; returns what computes those of the weights, from what is
        kept for it."""
        # torch's own schedules have no other way to do it.
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )

        prepare_backward(stage, False, self._recipe)  # the weights are still needed
        roots = [x.view_as(x).grad_fn for x in out]
        _, groups = stage_backward_input(
            [*out], None if gradients is None else [*gradients], [*given], stage.parameters()
        )
        owners = _owners(roots, {node for group in groups for node in group["intermediates"]})
        del roots

        def backward_of_weights() -> None:
            while groups:
                # From the last layer on: with it goes what only it and those above have needed.
                group = groups.pop()
                used = group["intermediates"]
                stage_backward_weight(iter([node.variable for node in group["params"]]), [group])
                for node in used:
                    owners.pop(node, None)
                del used, group, node
            if not isinstance(stage, FSDPModule):
                return
            # These gradients come past FSDP's hooks, the last of which takes care of what did.
            prepare_backward(stage, last, self._recipe)
            fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]

        return backward_of_weights

    def add_tied_gradients(self) -> None:
        """After `run`: both stages that have a tied weight get the sum of its gradients."""
        if self.tied is None or self.tied.grad is None:
            return
        gradient, peer = self.tied.grad, self._links.ranks - 1 - self._links.rank
        mine = local_tensor(gradient)  # on the host, with strategy.offload
        mine += self._links.exchange(mine.to(self._links.device), peer).to(mine.device)


def _owners(roots: Sequence[Node | None], nodes: Collection[Node]) -> dict[Node, Node]:
    """What keeps each of `nodes` alive that Python defines, such as the loss: in torch 2.11 they
    end with the tensor that they lead to, whatever else refers to them, but for a node above that
    Python does not define.

    Args:
        roots: of the graph; torch's own.
        nodes: some of it.
    """
    wanted = {node for node in nodes if isinstance(node, torch._C._FunctionBase)}
    found: dict[Node, Node] = {}
    left, seen = [(root, root) for root in roots if root], set(roots)
    while len(found) < len(wanted) and left:
        node, above = left.pop()
        owner = above if isinstance(node, torch._C._FunctionBase) else node
        for below, _ in node.next_functions:
            if below in wanted:
                found.setdefault(below, owner)
            if below and below not in seen:
                left.append((below, owner))
                seen.add(below)
    return found


def turns_of(rank: int, ranks: int, around: bool) -> list[tuple[int, ...]]:
    """Whom a rank makes groups with, one turn after the other: every two neighbours have a turn
    together. Whose turn it is not is alone, so that all make groups at the same time.

    Args:
        rank: of a pipeline.
        ranks: in it.
        around: the last and the first are neighbours, too.
    """
    last = ranks if around and ranks > 2 else ranks - 1
    pairs = [(first, (first + 1) % ranks) for first in range(last)]
    even = ranks - ranks % 2
    turns = [turn for turn in (pairs[:even:2], pairs[1::2], pairs[even:]) if turn]
    return [next((pair for pair in turn if rank in pair), (rank,)) for turn in turns]


class _Links:
    """This rank among those of its pipeline. Made on all ranks."""

    def __init__(self, mesh: Mesh, around: bool) -> None:
        """`around`: the last rank sends to the first, and back."""
        across = mesh.device_mesh[PIPELINE]
        self.rank, self.ranks = across.get_local_rank(), across.size()
        self.device = torch.device(mesh.device_mesh.device_type)
        self.group = across.get_group()
        self._members = dist.get_process_group_ranks(self.group)
        self._ways: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """Groups by (sender, receiver)."""
        if self.device.type != "cuda":
            return
        # What has one NCCL communicator is done one after the other. A receive is posted ahead: it
        # would hold up what goes to the next rank, and ranks would wait for each other.
        for turn in turns_of(self.rank, self.ranks, around):
            ranks = [self._members[number] for number in turn]
            for way in (turn, turn[::-1]):
                # All ranks are in one at a time: they split their communicator together.
                made: Any = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
                self._ways[way] = made

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to."""
        group = self._ways.get((self.rank, peer), self.group)
        work = dist.isend(tensor, self._members[peer], group)
        assert work
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to."""
        group = self._ways.get((peer, self.rank), self.group)
        work = dist.irecv(tensor, self._members[peer], group)
        assert work
        return work

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """What another rank, which calls it as well, has of the shape of this."""
        theirs = torch.empty_like(tensor)
        both = (dist.isend, tensor), (dist.irecv, theirs)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(way, x, group=self.group, group_peer=peer) for way, x in both]
        ):
            work.wait()
        return theirs


class _Messages:
    """Those of one run, of and for one rank; see [Note: pipeline]."""

    def __init__(
        self,
        links: _Links,
        orders: Sequence[Order],
        room: Callable[[Action], Message],
    ) -> None:
        self._links, self._room = links, room
        self._place = {action: place for order in orders for place, action in enumerate(order)}
        self._expected = {
            peer: iter(actions) for peer, actions in incoming(orders)[links.rank].items()
        }
        self._posted: dict[int, tuple[Action, Message, list[dist.Work]]] = {}
        self._ready: dict[Action, Message] = {}
        self._sent: dict[int, deque[tuple[int, Tensor, dist.Work]]] = {}
        self.waits: list[tuple[Any, Any]] = []
        """When this rank began to wait, and could go on."""
        for peer in self._expected:
            self._post(peer)

    def _post(self, peer: int) -> None:
        action = next(self._expected[peer], None)
        if action is not None:
            message = self._room(action)
            works = [self._links.receive(tensor, peer) for tensor in message]
            self._posted[peer] = action, message, works

    def receive(self, action: Action) -> Message:
        """The message that an action needs."""
        source = action.stage + (-1 if action.kind == "F" else 1)
        peer = source % self._links.ranks
        while action not in self._ready:
            found, message, works = self._posted.pop(peer)
            self._wait(works)
            self._post(peer)  # the next one travels while this one is used
            self._ready[found] = message
        # What the peer has used before it sent this has arrived there, and can be freed here.
        sent, reached = self._sent.get(peer), self._place[action._replace(stage=source)]
        while sent and sent[0][0] < reached:
            sent.popleft()[2].wait()
        return self._ready.pop(action)

    def send(self, action: Action, message: Sequence[Tensor]) -> None:
        """Begin to send what an action of another rank needs."""
        peer = action.stage % self._links.ranks
        for tensor in (tensor.contiguous() for tensor in message):
            work = self._links.send(tensor, peer)
            self._sent.setdefault(peer, deque()).append((self._place[action], tensor, work))

    def finish(self) -> None:
        """Wait until all is sent."""
        for sent in self._sent.values():
            self._wait([work for _, _, work in sent])

    def _wait(self, works: Sequence[dist.Work]) -> None:
        began = mark(self._links.device)
        for work in works:
            work.wait()
        self.waits.append((began, mark(self._links.device)))
