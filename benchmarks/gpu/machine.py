"""Slice 0: what the machine can do, to hold everything else against."""

import mmap
import os
import platform
import shutil
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.setting import Setting, command, device_memory, run_command
from checkpointing.save.staging import PORTION_BYTES, register
from elastic import usable_cores
from trainer.plan.costs import PlannedGpu, named_gpu


def host(setting: Setting) -> dict[str, Any]:
    """Software, memory, disk, and whether a forked rank's allocator grows its segments."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": usable_cores(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "shared_memory_gb": shutil.disk_usage("/dev/shm").total / 1e9,
        "disk_free_gb": shutil.disk_usage(setting.scratch).free / 1e9,
        "disk_write_gb_per_s": write_speed(setting),
    }
    if setting.on_gpu():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_memory_gb": device_memory() / 1e9,
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
            "expandable_segments": segments_grow(setting),
        }
    return found


def segments_grow(setting: Setting) -> int:
    """1 if they do in a forked rank, else 0."""
    return int(run_command(setting, command("benchmarks.gpu.forked")).split()[-1])


def write_speed(setting: Setting) -> float:
    """GB/s of one writer with fsync."""
    content = os.urandom(16 << 20)
    blocks = 2 if setting.toy else 128
    began = time.perf_counter()
    with (setting.scratch / "written").open("wb") as file:
        for _ in range(blocks):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return blocks * len(content) / (time.perf_counter() - began) / 1e9


def seconds(work: Callable[[], object], times: int = 10) -> float:
    """Seconds of a call: the mean of `times` after two that warm up; on a GPU by its own clock."""
    for _ in range(2):
        work()
    if not torch.cuda.is_initialized():  # then nothing of it is on a GPU
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / times


def matmul(setting: Setting) -> dict[str, Any]:
    """bf16, 8192 x 8192 x 8192, of random numbers, and in 8 bits where the device can."""
    size, device = (256 if setting.toy else 8192), setting.place()
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    tflops = 2 * size**3 / seconds(lambda: left @ right) / 1e12
    gpu, fp8 = data_sheet(setting), None
    try:
        fp8 = 2 * size**3 / seconds(in_8_bits(left, right)) / 1e12
    except RuntimeError as error:
        print(f"8 bits: {error}")
    return {
        "tflops": tflops,
        "share_of_peak": tflops / gpu.tflops if gpu else None,
        "fp8_tflops": fp8,
        "fp8_share_of_peak": fp8 / gpu.fp8_tflops if fp8 and gpu and gpu.fp8_tflops else None,
    }


def in_8_bits(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """Their product, (M, K) by (N, K), all of one scale, as a function."""
    left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    one = torch.ones((), device=left.device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)


def data_sheet(setting: Setting) -> PlannedGpu | None:
    """What the GPU should be able to do, where that is known."""
    return named_gpu(torch.cuda.get_device_name()) if setting.on_gpu() else None


def copies(setting: Setting) -> dict[str, Any]:
    """GB/s within the device (read and written) and between it and pinned and pageable memory."""
    setting.need_gpu("copying to and from a device")
    nbytes = 64 << 20 if setting.toy else 2 << 30
    there, other = (torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    pinned = torch.ones(nbytes, dtype=torch.uint8).pin_memory()

    def rate(target: Tensor, source: Tensor) -> float:
        copying = seconds(lambda: target.copy_(source, non_blocking=True), 4)
        return nbytes / copying / 1e9

    gpu = data_sheet(setting)
    within = 2 * rate(other, there)
    return {
        "device_gb_per_s": within,
        "device_share_of_peak": within * 1e9 / gpu.bandwidth if gpu else None,
        "to_host_pinned": rate(pinned, there),
        "from_host_pinned": rate(there, pinned),
        "to_host_pageable": rate(pageable, there),
        "from_host_pageable": rate(there, pageable),
    }


def pinning(setting: Setting) -> dict[str, Any]:
    """Pin host memory as saves do while another thread launches kernels: how fast, and how long a
    launch is held up at worst; and all of it by one call of cudaHostRegister."""
    setting.need_gpu("cudaHostRegister")
    total = 128 << 20 if setting.toy else 8 << 30
    # Begins with a page, or portions would share one, and that can be pinned only once; touched, as
    # slots are when they are pinned.
    memory = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8).fill_(1)
    small = torch.zeros(1024, device="cuda")
    delays: list[float] = []
    begun, ended = Event(), Event()

    def launch() -> None:
        torch.cuda.synchronize()
        begun.set()
        while not ended.is_set():
            began = time.perf_counter()
            small.add_(1)
            delays.append(time.perf_counter() - began)
            time.sleep(50e-6)

    def pin(portion: int, call: Callable[[int, int], int]) -> tuple[float, float]:
        """GB/s; milliseconds of the slowest launch."""
        delays.clear()
        begun.clear()
        ended.clear()
        thread = Thread(target=launch)
        thread.start()
        begun.wait()
        began = time.perf_counter()
        # The call lets go of the interpreter, so that launches go on beside it.
        for start in range(0, total, portion):
            if error := call(memory.data_ptr() + start, portion):
                raise RuntimeError(f"cudaHostRegister of {portion} bytes: error {error}")
        rate = total / (time.perf_counter() - began) / 1e9
        ended.set()
        thread.join()
        for start in range(0, total, portion):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr() + start)
        return rate, max(delays, default=0.0) * 1e3

    def at_once(pointer: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))

    rate, worst = pin(PORTION_BYTES, register)
    whole_rate, whole_worst = pin(total, at_once)
    return {
        "portion_mib": PORTION_BYTES >> 20,
        "gb_per_s": rate,
        "worst_launch_ms": worst,
        "gb_per_s_at_once": whole_rate,
        "worst_launch_ms_at_once": whole_worst,
    }


def attention(setting: Setting) -> dict[str, Any]:
    """Milliseconds of forward and backward of causal attention, 16 heads over 8 of keys and
    values, by backend of scaled_dot_product_attention; None: it refuses."""
    device, length = setting.place(), 64 if setting.toy else 4096
    q, k, v = (
        torch.randn(
            (2, heads, length, 128), device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (16, 8, 8)
    )

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    found: dict[str, Any] = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                found[f"{name.split('_')[0].lower()}_ms"] = seconds(both) * 1e3
        except RuntimeError as error:
            print(f"{name}: {error}")
            found[f"{name.split('_')[0].lower()}_ms"] = None
    return found
