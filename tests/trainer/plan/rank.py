"""One rank of a torchrun job that trains three steps under each of several recipes, and writes what
it measured and what was predicted: python -m torch.distributed.run … rank.py RECIPE.yaml OUT.json
'["override …", …]'"""

import dataclasses
import json
import sys
import weakref
from contextlib import nullcontext
from functools import partial, partialmethod
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from elastic.group.batch_plan import plan_batch
from elastic.world import join_world, leave_world, read_environment
from trainer.data.packing import cu_seqlens_of
from trainer.models import init_parameter
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer
from trainer.parallel import pipeline
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.plan import predict
from trainer.plan.storages import PlanLiveTensors, nbytes, storages
from trainer.recipe import load_recipe
from trainer.tasks.task import bare_model


def held(tensors):
    """Bytes of their storages."""
    return nbytes(storages(tensors, torch.device("cpu")))


def measure(recipe, world):
    """Bytes of this rank: of its state, its activations, at the peak of the third step, from when
    on DDP's buckets stay the same, and of what a pipeline sends in it."""
    decoder, blocks, _ = bare_model(recipe)
    architecture = decoder.model.architecture
    mesh = build_mesh(recipe, world)
    model = parallelize(
        decoder, blocks, mesh, recipe, world.device,
        lambda name, shape: init_parameter(name, shape, architecture, 0),
    )  # fmt: skip
    model.draw_weights()
    optimizer = build_optimizer(
        model.optimized, recipe.optimizer, exact=recipe.exact, zeros_like=model.zeros_like
    )
    plan = plan_batch(recipe.batch.global_batch, mesh.dp_size, recipe.batch.micro_batch)
    shape = (plan.micro_batch, recipe.data.seq_len)
    words = architecture.vocab_size  # any of them, as routers see what a token is
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(words, shape, generator=draw) for name in ("input_ids", "labels")}
    if recipe.data.document_mask:
        batch["cu_seqlens"] = cu_seqlens_of(torch.zeros(shape, dtype=torch.int32))
    if decoder.preference:
        rows, length = shape
        halves = torch.arange(2).repeat_interleave(length // 2)  # a pair a sequence
        batch["segments"] = halves + 2 * torch.arange(rows)[:, None]
        batch["answer_labels"] = torch.full((2 * rows,), length // 2)
        batch["reference"] = torch.zeros(2 * rows)
    weights = [*model.parameters.values(), *model.optimized.values()]
    activations, received = 0, []

    def call(step, forward):
        nonlocal activations
        followed = step == 2 and (forward.number == 0 or model.pipeline)
        message = forward.call.args[1] if model.pipeline else ()
        # Of a pipeline those of all micro-batches under way, and what it has received for them.
        live.label = "forward"
        with (
            PlanLiveTensors() if followed and not model.pipeline else nullcontext() as followed_pass
        ):
            found = forward(batch)
        live.label = ""
        if followed and model.pipeline:
            received.extend(map(weakref.ref, message))
            messages = held(x for reference in received if (x := reference()) is not None)
            made = live.total("forward", ignored=model.module.parameters())
            activations = max(activations, made + messages)
        elif followed:
            activations = followed_pass.total(ignored=model.module.parameters())
        if isinstance(found, dict):
            forward.root = found["loss"]

    sent, links = 0, pipeline._Links
    plain = {"send": links.send, "exchange": links.exchange}

    def counted(name, links, tensor, peer):
        nonlocal sent
        sent += tensor.nbytes
        return plain[name](links, tensor, peer)

    counting = {name: partialmethod(partial(counted, name)) for name in plain}
    with PlanLiveTensors() as live, patch.multiple(links, **counting):
        for step in range(3):
            live.peak = sent = 0
            for forward in model.run([batch] * plan.passes, train=True):
                call(step, forward)
            model.collect_gradients()
            gradients = held(weight.grad for weight in weights if weight.grad is not None)
            update(optimizer, model.portions(optimizer), 1.0)
            model.publish_weights()
            model.zero_gradients()
    state = held(value for of_one in optimizer.state.values() for value in of_one.values())
    standing = 0 if model.file else held(weights) + state
    return {
        "parameters": held(weights),
        "gradients": gradients,
        "optimizer_state": state,
        "buffers": held(model.module.buffers()),
        "activations": activations,
        "peak": live.peak + standing,
        "communication_bytes": sent,
    }


def main():
    rank, _, world_size, local_world_size = read_environment()
    world = join_world("cpu", 60)
    results = {}
    for case in json.loads(sys.argv[3]):
        recipe = load_recipe(sys.argv[1], case.split(" "))
        measured = measure(recipe, world)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, measured)
        if rank == 0:
            predicted = dataclasses.asdict(predict(recipe, world_size, local_world_size))
            most = {key: max(ranks[key] for ranks in everyone) for key in measured}
            results[case] = {"measured": most, "predicted": predicted}
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave_world(0)


if __name__ == "__main__":
    main()
