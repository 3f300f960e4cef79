"""How a model that knows no ranks is spread over them. `parallelize` is the only door."""

from trainer.parallel.mesh import DATA_PARALLEL, build_mesh, mesh_shape
from trainer.parallel.parallelize import ParallelModel, parallelize

__all__ = ["DATA_PARALLEL", "ParallelModel", "build_mesh", "mesh_shape", "parallelize"]
