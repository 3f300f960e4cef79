"""The fake itself: what is wrong on a GPU must be wrong here."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.jobs import FORKS, ROOT
from trainer.models.attention import AttentionDocuments, attend
from trainer.models.kernels import choose_kernel, this_gpu


def test_late_copies_are_missed_by_who_does_not_wait(monkeypatch):
    found = in_processes(1, read_at_once, {"FAKE_CUDA": "late"})
    assert found == [(False, True)]
    assert in_processes(1, read_after_a_wait, {"FAKE_CUDA": "late"}) == [(True, True)]


def read_at_once(rank):
    return copied(lambda event: None)


def read_after_a_wait(rank):
    return copied(lambda event: event.synchronize())


def copied(wait):
    """Whether what a copy brings is there after `wait`, and after a synchronisation."""
    source, target = torch.ones(1000, device="cuda"), torch.zeros(1000, pin_memory=True)
    target.copy_(source, non_blocking=True)
    wait(torch.cuda.current_stream().record_event())
    at_once = bool((target == 1).all())
    torch.cuda.synchronize()
    return at_once, bool((target == 1).all())


def test_a_copy_across_two_registrations_is_refused():
    assert in_processes(1, copy_across, {}) == ["CUDA error: invalid argument"]


def copy_across(rank):
    memory = torch.zeros(3 * 4096, dtype=torch.uint8)
    begin = -(-memory.data_ptr() // 4096) * 4096
    cudart = torch.cuda.cudart()
    assert [int(cudart.cudaHostRegister(begin + n * 4096, 4096, 0)) for n in (0, 1)] == [0, 0]
    first = begin - memory.data_ptr()
    part = memory[first : first + 5000]
    try:
        part.copy_(torch.ones(5000, dtype=torch.uint8, device="cuda"), non_blocking=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "copied"


def test_unwritten_memory_is_no_number():
    torch.cuda.empty_cache()  # what other tests of this process have written
    assert torch.empty(1 << 20, device="cuda").isnan().all()


@pytest.mark.parametrize(("options", "grow"), [("", "1"), ("expandable_segments:False", "0")])
def test_a_forked_rank_sees_whether_segments_grow(options, grow):
    """Its options are set when torch has long been imported."""
    environment = {**os.environ, **({"PYTORCH_ALLOC_CONF": options} if options else {})}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.forked"], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == [grow], done.stderr


def test_host_synchronisation_is_told(recwarn):
    x = torch.arange(4.0, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        x.sum().item()
        x.nonzero()
        x * 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told = [w for w in recwarn if "synchronizing CUDA operation" in str(w.message)]
    assert len(told) == 2


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nccl_exchanges(ranks, copies):
    assert in_processes(ranks, exchange, {"FAKE_CUDA": copies}) == [None] * ranks


def exchange(rank):
    world = dist.get_world_size()
    n = 300_001  # several chunks, none whole
    ranks = torch.arange(world, device="cuda").float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        mine = torch.full((n,), rank + 1, device="cuda").to(dtype)
        for op, expected in (
            (dist.ReduceOp.SUM, (ranks + 1).sum()), (dist.ReduceOp.MAX, world),
            (dist.ReduceOp.MIN, 1),
        ):  # fmt: skip
            found = mine.clone()
            dist.all_reduce(found, op)
            assert (found == expected).all(), (dtype, op)
        parts = torch.empty(world * n, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(parts, mine)
        assert (parts.view(world, n).float() == (ranks + 1)[:, None]).all()
        part = torch.empty(n, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(part, parts)
        assert (part.float() == world * (rank + 1)).all()
        dist.broadcast(mine, world - 1)
        assert (mine == world).all()
    mean = torch.full((5,), float(rank), device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert (mean == ranks.mean()).all()
    around, here = torch.empty(n, device="cuda"), torch.full((n,), float(rank), device="cuda")
    if world > 1:
        sends = [dist.P2POp(dist.isend, here, (rank + 1) % world)]
        receives = [dist.P2POp(dist.irecv, around, (rank - 1) % world)]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        assert (around == (rank - 1) % world).all()
    for members in ([0], list(range(world))):
        group = dist.new_group(members)
        if rank in members:
            some = torch.ones(3, device="cuda")
            dist.all_reduce(some, group=group)
            assert (some == len(members)).all()
    torch.cuda.synchronize()


def test_abort_frees_who_waits_for_a_rank_that_never_comes():
    assert in_processes(2, abort, {}) == [True, True]


def abort(rank):
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.1)
        waiting = not work.is_completed()
        dist.distributed_c10d._abort_process_group()
        torch.cuda.synchronize()
        return waiting
    return True


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_attention_keeps_to_documents(kv_heads):
    """torch's own operator, which from torch 2.12 on is told of shared heads."""
    generator = torch.Generator().manual_seed(0)
    ends = [0, 5, 37, 64, 64, 64]
    shapes = [(64, 4, 32), (64, kv_heads, 32), (64, kv_heads, 32)]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    cumulative = torch.tensor(ends, dtype=torch.int32, device="cuda")
    (found,) = attend(*(x[None] for x in inputs), AttentionDocuments("varlen", cumulative))
    found.float().square().sum().backward()
    copies = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = by_document(*copies, ends)
    expected.float().square().sum().backward()
    assert torch.allclose(found.cpu().float(), expected.float(), atol=0.02)
    for ours, theirs in zip(inputs, copies, strict=True):
        assert torch.allclose(ours.grad.cpu().float(), theirs.grad.float(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_without_documents_torch_asks_cudnn_first(kv_heads, exact):
    """As the line at the start says; and not where kernels are to be deterministic."""
    shapes = [(2, 64, 4, 32), (2, 64, kv_heads, 32), (2, 64, kv_heads, 32)]
    inputs = [
        torch.ones(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes
    ]
    gpu = this_gpu(torch.device("cuda", 0))
    kernel = choose_kernel(gpu, "auto", torch.bfloat16, 32, documents=False, exact=exact)
    assert ("cuDNN" in kernel.name) != exact
    torch.use_deterministic_algorithms(exact, warn_only=False)
    try:
        with torch.profiler.profile(acc_events=True) as profile:
            attend(*inputs, None).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    names = {event.name for event in profile.events()}
    for kind in ("", "_backward"):
        for way in ("cudnn", "flash"):
            called = f"aten::_scaled_dot_product_{way}_attention{kind}" in names
            assert called == ((way == "flash") == exact), (way, kind)


def by_document(q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
    parts = []
    for start, stop in pairwise(ends):
        if stop > start:
            some = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*some, is_causal=True, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def in_processes(ranks, work, environment):
    """What `work(rank)` returns in each of so many new ranks of one NCCL group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = FORKS.SimpleQueue()
    processes = [
        FORKS.Process(target=be_rank, args=(rank, ranks, store.port, work, environment, results))
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        found = dict(results.get() for _ in processes)
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(ranks)]


def be_rank(rank, ranks, port, work, environment, results):
    os.environ |= environment
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    results.put((rank, work(rank)))
    os._exit(0)  # a group that was aborted cannot be left in order
