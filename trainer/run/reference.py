"""Computes log-probabilities of answers under the initial model, for objectives such as DPO.

[Note: reference] They are computed once, with the weights of step 0, and are equal at any world
size. A safetensors file keeps them: for each split one float32 per document, NaN where the pair
fits into no sequence. A start with other base weights, data or dtype computes anew.
"""

import hashlib
import json
import struct
import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from checkpointing.format.tensors import broadcast
from checkpointing.format.untrusted import an_object, read_object
from elastic import Pulse, World
from elastic.node.exchange import received
from elastic.node.files import read_bytes
from trainer.data.loader import TokenStream, load
from trainer.data.prepare.writer import atomic
from trainer.data.stream import COUNTED
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import Recipe
from trainer.tasks.task import Task

FILE = "reference.safetensors"
_HEADER_BYTES = 1 << 16


class RunReference:
    """The reference log-probabilities of a run. `init_from`: digest of its initial weights."""

    def __init__(self, recipe: Recipe, task: Task, init_from: str) -> None:
        self._recipe = recipe
        streams = {"train": task.stream, "validation": task.validation and task.validation.stream}
        self._streams = {k: one for k, one in streams.items() if isinstance(one, TokenStream)}
        prints = [stream.fingerprint for stream in self._streams.values()]
        precision, adapter = recipe.precision, recipe.model.adapter
        formats = (precision.dtype, precision.matmul, adapter.base if adapter else None)
        self._made_of = {
            "base": init_from,
            "data": hashlib.sha256(" ".join(prints).encode()).hexdigest(),
            "dtype": " ".join(filter(None, formats)),
        }
        self._path = recipe.directory / FILE
        self.lines: list[str] = []
        """Lines for the log of the run; [] on ranks other than 0."""

    def find(self, world: World, mesh: Mesh) -> bool:
        """Broadcast the log-probabilities in memory or the file. Returns whether a rank has any."""
        kept = all(stream.reference is not None for stream in self._streams.values())
        read = world.is_main and not kept and self._read()
        owner = torch.tensor(world.world_size, device=world.device)
        if kept or read:
            owner.fill_(world.rank)
        dist.all_reduce(owner, dist.ReduceOp.MIN, group=mesh.group)
        source = received(owner)
        if source == world.world_size:
            return False
        held = [
            torch.empty(one.documents) if one.reference is None else torch.from_numpy(one.reference)
            for one in self._streams.values()
        ]
        broadcast(held, source, mesh.group, world.device)
        for stream, values in zip(self._streams.values(), held, strict=True):
            stream.reference = values.numpy()
        # Rank 0 may have moved to another node with another disk.
        if world.is_main and not read and not (kept and self._path.exists()):
            self._write()
        return True

    def compute(self, model: ParallelModel, world: World, mesh: Mesh, pulse: Pulse) -> None:
        """Compute the log-probabilities with `model`, whose weights are of step 0. On all ranks."""
        pairs = sum(stream.documents for stream in self._streams.values()) // 2
        if world.is_main:
            print(f"reference: log-probabilities of {pairs:,} pairs are computed once", flush=True)
        began = time.monotonic()
        for stream in self._streams.values():
            size = self._recipe.micro_batch
            stream.reference = _log_probs(model, stream, size, world, mesh, pulse)
        if world.is_main:
            seconds = time.monotonic() - began
            self.lines.append(f"reference: computed in {seconds:.1f} s, kept in {self._path}")
            self._write()

    def _read(self) -> bool:
        """Attach the numbers in the file. Returns False if it is missing or unusable."""
        size = 4 * sum(stream.documents for stream in self._streams.values())
        try:
            data = read_bytes(self._path, _HEADER_BYTES + size)
            length = 8 + int.from_bytes(data[:8], "little")
            made_of = an_object(read_object(data[8:length]).get("__metadata__"))
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error})"
        else:
            if other := [key for key, one in self._made_of.items() if made_of.get(key) != one]:
                why = f"is of another {' and '.join(other)}"
            elif made_of.get("sha256") != hashlib.sha256(data[length:]).hexdigest():
                why = "is damaged"
            elif len(data) - length != size:
                why = "has another size than the data"
            else:
                for stream in self._streams.values():
                    values = np.frombuffer(data, "<f4", stream.documents, length)
                    stream.reference = values.copy()
                    length += values.nbytes
                self.lines.append(f"reference: log-probabilities are read from {self._path}")
                return True
        self.lines.append(f"note: {self._path} {why}, so the reference is computed anew")
        return False

    def _write(self) -> None:
        values = {split: stream.reference for split, stream in self._streams.items()}
        parts = {k: one.astype("<f4").tobytes() for k, one in values.items() if one is not None}
        content, place = b"".join(parts.values()), 0
        digest = hashlib.sha256(content).hexdigest()
        header: dict[str, object] = {"__metadata__": {**self._made_of, "sha256": digest}}
        for split, part in parts.items():
            span = [place, place := place + len(part)]
            header[split] = {"dtype": "F32", "shape": [len(part) // 4], "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        try:
            with atomic(self._path) as file:
                file.write(struct.pack("<Q", len(text)) + text + content)
        except OSError as error:
            self.lines.append(
                f"note: {self._path} cannot be written ({error.strerror}); the next start computes "
                "the reference anew"
            )


@torch.no_grad()
def _log_probs(
    model: ParallelModel, stream: TokenStream, size: int, world: World, mesh: Mesh, pulse: Pulse
) -> NDArray[np.float32]:
    ordered, device = stream.in_file_order, world.device
    answers = ordered.documents_at(np.arange(stream.sequences))
    cuts, requests = mesh.deal(stream.sequences, size)
    batches = load(ordered, requests, workers=0, pin_memory=device.type == "cuda")
    log_probs_by_document = torch.zeros(stream.documents, device=device)
    with pulse.during("data"), model.evaluating():
        for cut, batch in zip(cuts, batches, strict=True):
            pulse.report(0, "evaluate")
            inputs = {key: one.to(device) for key, one in batch.items() if key != COUNTED}
            with model.autocast():
                log_probs = model.module(**inputs)
            if cut and mesh.counts:
                places = np.concatenate(answers[cut.start : cut.stop])
                log_probs_by_document[torch.from_numpy(places).to(device)] = log_probs.float()
            pulse.report(0, "data")
        pulse.report(0, "evaluate")
        # All ranks but the one that computed a number hold 0 for it.
        dist.all_reduce(log_probs_by_document, group=mesh.group)
    # FSDP's gathered copies would keep these weights when others are loaded next.
    for unit in fsdp_units(model.module):
        unit.reshard()
    values = log_probs_by_document.cpu().numpy()
    values[np.setdiff1d(np.arange(stream.documents), np.concatenate(answers))] = np.nan
    return values
