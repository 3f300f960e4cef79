"""Strangers between ranks: they write to the stores in which ranks find each other, from the first
moment on and through a recovery; and they are first where torch keeps compiled code by default.
Part of attack.py."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks.support import python_path
from lab.container import Container
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT
from tests.opt_in.attack import (
    OVERRIDES,
    Attack,
    connect,
    descendants,
    drop_rights,
    listening,
    newest,
    result_of,
    say,
    stranger,
    until,
)

RUNS = ("wire-one", "wire-two")
STEPS = 60
ADDRESSES = "5. ranks' addresses in the stores of rounds"


def attack_addresses(told: str, stop: str, address: str) -> Attack:
    """5. Overwrite, exchange, replay and delete every key of every store of a round, and set those
    that torch would use, as fast as it goes: with addresses that lead to this stranger. Whoever
    connects there has been led astray."""
    attack = Attack(ADDRESSES)
    drop_rights()
    lure = socket.create_server((address, 0x4E00))  # low, as gloo compares: so ranks dial it

    def wait_for_ranks() -> None:
        while True:
            victim, _ = lure.accept()
            attack.got_in.append("a rank has connected to the stranger")
            victim.close()

    def tamper(host: str, port: int) -> None:
        recorded: list[bytes] = []
        with suppress(dist.DistError):  # the store has ended with its round, or is none
            store = connect(host, port)
            names = store.list_keys()
            while not Path(stop).exists() and not any(key.startswith("perdure/") for key in names):
                values = [store.get(name) for name in names if store.check([name])]
                recorded += [value for value in values if value not in recorded][:50]
                for name, value in zip(names, values, strict=False):
                    for forged in (lured(value), *reversed(values), *recorded[:4]):
                        if not name.startswith("/init/"):
                            store.set(name, forged)
                            attack.tried += 1
                for name in names[::2]:
                    if not name.startswith("/init/"):
                        store.delete_key(name)
                        attack.tried += 1
                for rank in range(4):
                    store.set(f"generation-0/0//cpu//0/{rank}", lured(b""))
                    attack.tried += 1
                names = store.list_keys()

    def lured(value: bytes) -> bytes:
        """A value with gloo's binary address in it, which leads here."""
        family, port = (2).to_bytes(2, "little"), (0x4E00).to_bytes(2)
        there = (family + port + socket.inet_aton(address)).ljust(128, b"\0")
        plain = b"\2" + bytes(7) + b"vm" + (136).to_bytes(8, "little") + there + bytes(24)
        return value[:64] + plain if value[:64].isalnum() else plain

    threading.Thread(target=wait_for_ranks, daemon=True).start()
    seen: set[str] = set()
    while not Path(stop).exists():
        for place in set(Path(told).read_text().split()) - seen:
            seen.add(place)
            host, _, port = place.rpartition(":")
            threading.Thread(target=tamper, args=(host, int(port)), daemon=True).start()
        time.sleep(0.01)
    return attack


def attack_caches(temporary: str, user: str) -> Attack:
    """6. Make torch's default directory for compiled code first, open to all."""
    attack = Attack("6. directories for compiled code")
    drop_rights()
    os.umask(0)
    (Path(temporary) / f"torchinductor_{user}").mkdir()
    attack.tried += 1
    return attack


def between_ranks(scratch: Path) -> list[Attack]:
    """The runs that strangers try to get between the ranks of."""
    return [*_one_machine(scratch), *_two_machines(scratch), *_compiled(scratch)]


def _start(
    machine: Container, scratch: Path, name: str, *more: str, **environment: str
) -> "subprocess.Popen[bytes]":
    """`perdure train` on a machine."""
    worker = ["train", "recipe.yaml", *OVERRIDES, f"run.dir={name}", f"run.steps={STEPS}", *more]
    own = {"PYTHONPATH": python_path(ROOT), "XDG_CACHE_HOME": str(scratch / "cache")}
    with open(scratch / "log" / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *machine.inside, "trainer.cli", *worker, "--nproc-per-node=2"],
            cwd=scratch, stdout=log, stderr=log,
            env={**os.environ, **own, **environment},
        )  # fmt: skip


class _Telling(threading.Thread):
    """Tells strangers where something listens, all the time."""

    def __init__(self, told: Path, places: Callable[[], list[str]]) -> None:
        super().__init__(daemon=True)
        self._told, self._places, self._end = told, places, threading.Event()
        told.write_text("")

    def run(self) -> None:
        while not self._end.wait(0.02):
            aside = self._told.with_suffix(".new")
            with suppress(OSError):
                aside.write_text("\n".join(self._places()))
                aside.replace(self._told)

    def stop(self) -> None:
        """Before the processes that it looks at are gone."""
        self._end.set()
        self.join()


def _places(host: str, pids: Callable[[], list[int]]) -> list[str]:
    return [f"{host}:{port}" for _, port in listening(pids())]


def _ranks(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "perdure-rank\n":
                found.append(pid)
    return found


def _under_attack(
    outcome: Attack,
    run: Path,
    machine: Container,
    address: str,
    places: Callable[[], list[str]],
    family: Callable[[], list[int]],
    ended: Callable[[], bool],
) -> Attack:
    """Have a stranger at work while a run starts, loses a rank, recovers and ends."""
    files = run.parent / "strangers"
    told, stop = files / f"{run.name}-told", files / f"{run.name}-stop"
    telling = _Telling(told, places)
    telling.start()
    enemy = stranger(machine, "attack_addresses", told, stop, address)
    try:
        until(outcome, f"step 20 of {run.name}", lambda: newest(run) >= 20 or ended())
        for rank in _ranks(family())[:1]:
            os.kill(rank, signal.SIGKILL)
        until(outcome, f"step {STEPS} of {run.name}", lambda: newest(run) >= STEPS, seconds=180)
    finally:
        stop.touch()  # before the last barrier of torchrun's agents, whose counter is not sealed
        telling.stop()
    found = result_of(enemy)
    until(outcome, f"the end of {run.name}", ended)
    return found


def _one_machine(scratch: Path) -> list[Attack]:
    outcome = Attack("results of the runs")
    network = Container.start_network("10.79.0.1")
    try:
        machine = Container.start(network, "10.79.0.11")
        try:
            say("one machine: another user between its two ranks, through a recovery")
            job = _start(machine, scratch, RUNS[0], "checkpoint.every=20")
            family = partial(descendants, job.pid)
            found = _under_attack(
                outcome, scratch / RUNS[0], machine, "127.0.0.1",
                lambda: _places("127.0.0.1", family), family, lambda: job.poll() is not None,
            )  # fmt: skip
            if job.poll() != 0:
                outcome.got_in.append(f"{RUNS[0]} ended with {job.poll()}")
        finally:
            machine.kill()
    finally:
        network.kill()
    return [outcome, found]


def _two_machines(scratch: Path) -> list[Attack]:
    outcome = Attack("results of the runs")
    worker = ["recipe.yaml", *OVERRIDES, f"run.dir={RUNS[1]}", f"run.steps={STEPS}"]
    with LocalNodes(
        [*worker, "checkpoint.every=20"], folder=scratch, nnodes="2", logs=scratch / "log",
        environment={"PYTHONPATH": python_path(ROOT)}, launcher=("trainer.cli", "train"),
        own_network=True,
    ) as nodes:  # fmt: skip
        outside = Container.start(nodes._network, f"{nodes.prefix}.99")
        try:
            say("two machines: a third between their ranks, through a recovery")
            both = [nodes.add(), nodes.add()]

            def family() -> list[int]:
                return [pid for node in both for pid in (node.process.pid, *node.family())]

            def places() -> list[str]:
                return [
                    f"{nodes.prefix}.{node.number + 11}:{port}"
                    for node in both
                    for address, port in listening([node.process.pid, *node.family()])
                    if address != "loopback"
                ]

            found = _under_attack(
                outcome, scratch / RUNS[1], outside, f"{nodes.prefix}.99", places, family,
                lambda: all(node.process.poll() is not None for node in both),
            )  # fmt: skip
        finally:
            outside.kill()
        codes = [node.process.poll() for node in both]
        if codes != [0, 0]:
            outcome.got_in.append(f"the agents of {RUNS[1]} ended with {codes}")
    return [outcome, found]


def _compiled(scratch: Path) -> list[Attack]:
    """A run that compiles, in a temporary directory that a stranger was in first."""
    outcome = Attack("results of the runs")
    (scratch / "tmp").mkdir(exist_ok=True)
    (scratch / "tmp").chmod(0o1777)
    network = Container.start_network("10.80.0.1")
    try:
        machine = Container.start(network, "10.80.0.11")
        try:
            say("a run that compiles, where a stranger has made torch's directory for that")
            enemy = stranger(machine, "attack_caches", scratch / "tmp", "root")
            found = result_of(enemy)
            more = (
                "strategy.compile=true",
                "run.determinism=fast",
                "run.steps=3",
                "schedule.warmup_steps=1",
            )
            job = _start(machine, scratch, "wire-compiled", *more, TMPDIR=str(scratch / "tmp"))
            until(outcome, "the run that compiles", lambda: job.poll() is not None, seconds=240)
            if job.poll() != 2:  # refused in one line
                outcome.got_in.append(f"the run that compiles ended with {job.poll()}")
            if used := list((scratch / "tmp" / "torchinductor_root").iterdir()):
                found.got_in.append(f"compiled code is kept in the stranger's {used[0]}")
        finally:
            machine.kill()
    finally:
        network.kill()
    return [outcome, found]
