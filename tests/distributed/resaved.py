"""A rank that loads the newest checkpoint of a run, in the layout of a recipe, and saves it again:
python -m tests.distributed.resaved DIRECTORY RECIPE.yaml [key=value …]"""

import sys

import torch.distributed as dist

from checkpointing import TensorCheckpointer
from elastic.world import join_world, leave_world
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.recipe import load_recipe
from trainer.tasks.task import build_task

if __name__ == "__main__":
    directory, path, *overrides = sys.argv[1:]
    recipe, world = load_recipe(path, overrides), join_world("cpu", 60)
    task, mesh = build_task(recipe), build_mesh(recipe, world)
    model = parallelize(task.model, task.blocks, mesh, recipe, world.device, task.fill)
    optimizer = build_optimizer(model.optimized, recipe.optimizer)
    tensors = {"model": model.tensors, "optimizer": model.state_of(optimizer)}
    group, options = dist.group.WORLD, recipe.checkpoint
    with TensorCheckpointer(recipe.checkpoint_directory, options, group) as source:
        state = source.load(**tensors)
    assert state
    with TensorCheckpointer(directory, options, group) as target:
        target.save(state["step"], **tensors, state=state, files=task.files, wait=True)
    leave_world(0)
