"""Injects the faults of a plan (plan.py) into a run on local nodes, and measures the recovery from
each in the ledger.

Faults act on processes from outside, as real ones do. Only a NaN in a gradient needs the training
process's help (`POISON`).
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastic.exits import EXIT_DONE, EXIT_REQUEUE
from lab.chaos.plan import LASTING, OF_NODES, OF_WORKERS, Fault, FaultPlan
from lab.local_nodes import LocalNode, LocalNodes

LOOK_SECONDS = 0.01
PHASE_SECONDS = 10.0
"""Longest wait for the phase that a fault is planned for; then the fault comes regardless."""
END_SECONDS = 30.0
"""Longest time from the end of the first node to the end of the others."""
TURN_SECONDS = 0.05
SETTLE_SECONDS = 30.0
"""Longest wait for the consequence of a fault (`settled`)."""
STOPPED_SECONDS = 0.5
"""Time after SIGSTOP in which steps that were under way may still complete."""
PHASES = {"init": ("init",), "load": ("load",), "step": ("step", "reduce"), "save": ("save",)}
"""Phase of a plan → phases that a rank reports (elastic/node/progress.py)."""
WRITER = "checkpointing.save.writer"
"""Module of the process that writes a node's checkpoints."""
POISON = "PERDURE_POISON"
"""Environment variable: a folder. A training process that finds a file there named by its process
id deletes the file and sets a value of one of its gradients to NaN."""
MARK = "PERDURE_CHAOS"
"""Environment variable that marks the processes of a run, to find leftovers."""


@dataclass
class FaultOutcome:
    """An injected fault, and what it cost."""

    fault: Fault
    target: str
    at: float
    """Time of the injection, by time.monotonic()."""
    step: int
    """Newest step completed before the fault."""
    missed: bool
    """Whether the fault came outside of the phase that it was planned for."""
    settled: Callable[[], bool]
    """Whether the fault's consequence has occurred: a new attempt, a training node, or a departed
    node. Steps that were under way when the fault came do not count as recovery."""
    beyond: int
    """Newest completed step when the consequence occurred; recovery ends with a later step."""
    recovery: float | None = None
    """Seconds from the fault to the first newly completed step; None: no step was completed
    since."""
    lost: int = 0
    """Steps that had to be repeated."""


@dataclass
class LedgerTail:
    """State of a run, read from its ledger as it grows."""

    path: Path
    step: int = 0
    """Highest completed step."""
    starts: int = 0
    """Attempts that have started."""
    lost: int = 0
    """Steps that had to be repeated, in total."""
    _at: int = 0
    """Newest step of the running attempt."""
    _attempt: str = ""
    _offset: int = 0

    def look(self) -> None:
        """Read the lines added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            # a killed process may leave a torn line
            with suppress(ValueError, KeyError, TypeError):
                values = json.loads(line)
                if values["kind"] == "start":
                    self.starts += 1
                    self.lost += max(0, self._at - int(values["step"]))
                    self._attempt = values["attempt"]
                if values["kind"] in ("start", "step") and values["attempt"] == self._attempt:
                    self._at = int(values["step"])
                    # A start has a completed step, too: a killed process may lose its last line.
                    self.step = max(self.step, self._at)


@dataclass
class FaultInjector:
    """Carries out a plan of faults on local nodes; call `run` once.

    Args:
        nodes: local nodes with a running store; none is started yet.
        plan: the plan, whose random faults are drawn.
        ledger: file that the run writes.
        saving: returns whether a checkpoint is being written.
        patience: seconds without a new step after which the run counts as stuck.
    """

    nodes: LocalNodes
    plan: FaultPlan
    ledger: Path
    saving: Callable[[], bool]
    patience: float
    outcomes: list[FaultOutcome] = field(default_factory=list)
    longest: tuple[float, int] = (0.0, 0)
    """Longest time without a new step after the first step, in seconds, and the step before it."""
    problems: list[str] = field(default_factory=list)
    _up: list[LocalNode] = field(default_factory=list)
    _resting: list[LocalNode] = field(default_factory=list)
    """Nodes whose agent was killed; their machines are idle."""
    _leaving: list[LocalNode] = field(default_factory=list)
    _timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def run(self) -> None:
        """Start the nodes, inject all faults, and wait until the run ends."""
        self.watched = LedgerTail(self.ledger)
        self._progressed = time.monotonic()
        self._since, self._missed = 0.0, False
        for _ in range(self.plan.nodes):
            self._up.append(self.nodes.add())
        todo = list(self.plan.faults)
        try:
            while not self._ended() and not self._stuck():
                time.sleep(LOOK_SECONDS)
                self._look()
                if todo and self._due(todo[0]):
                    self._inject(todo.pop(0))
                    while todo and todo[0].delay is not None:
                        time.sleep(
                            max(0.0, self.outcomes[-1].at + todo[0].delay - time.monotonic())
                        )
                        self._inject(todo.pop(0))
            if todo and not self.problems:
                self.problems.append(
                    f"the run ended at step {self.watched.step}, before {len(todo)} fault(s) came, "
                    f"the next at step {todo[0].at}: give it more steps, or fewer faults"
                )
        finally:
            for _, action in self._timers:  # stopped processes cannot end until resumed
                action()
            self._timers.clear()
        if not self.problems:
            self._wait_for_all()

    @property
    def finished(self) -> list[LocalNode]:
        """Nodes that completed the run."""
        return [node for node in self._up if node.process.poll() == EXIT_DONE]

    # --- watching ----------------------------------------------------------------------------

    def _look(self) -> None:
        now, step, lost = time.monotonic(), self.watched.step, self.watched.lost
        self.watched.look()
        if self.watched.step > step:
            if step:
                self.longest = max(self.longest, (now - self._progressed, step))
            self._progressed = now
        for outcome in self.outcomes:
            if outcome.recovery is not None:
                continue
            if not outcome.settled() and now - outcome.at < SETTLE_SECONDS:
                outcome.beyond = self.watched.step
            elif self.watched.step > outcome.beyond:
                outcome.recovery = now - outcome.at
                print(f"  {outcome.fault}: step {self.watched.step} after {outcome.recovery:.2f} s")
        if self.outcomes and self.watched.lost > lost:
            self.outcomes[-1].lost += self.watched.lost - lost
        due = [timer for timer in self._timers if timer[0] <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for _, action in due:
            action()

    def _ended(self) -> bool:
        """Whether the run is over, by success or by a problem."""
        for node in list(self._up):
            code = node.process.poll()
            if code not in (None, EXIT_DONE):
                self._blame(node, f"ended with exit code {code} of its own accord")
        return bool(self.problems) or any(node.process.poll() == EXIT_DONE for node in self._up)

    def _stuck(self) -> bool:
        waited = time.monotonic() - self._progressed
        if waited > self.patience:
            self.problems.append(
                f"no new step for {waited:.0f} s after step {self.watched.step}; "
                f"see {self.nodes.logs}"
            )
        return waited > self.patience

    def _wait_for_all(self) -> None:
        """Wait until all nodes have ended; report those that are late or fail."""
        deadline = time.monotonic() + END_SECONDS
        for node in [*self._up, *self._leaving]:
            while node.process.poll() is None and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            expected = (EXIT_DONE, EXIT_REQUEUE) if node in self._leaving else (EXIT_DONE,)
            code = node.process.poll()
            if code is None:
                self._blame(node, f"still runs {END_SECONDS:.0f} s after the run has ended")
            elif code not in expected:
                self._blame(node, f"ended with exit code {code}")
        self._look()

    def _blame(self, node: LocalNode, what: str) -> None:
        lines = node.text().strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        self.problems.append(f"node {node.number} {what} ({node.log}{last})")

    # --- faults ------------------------------------------------------------------------------

    def _target(self, fault: Fault) -> LocalNode:
        return self._up[fault.node % len(self._up)]

    def _due(self, fault: Fault) -> bool:
        """Whether to inject a fault now; see [Note: order of faults]."""
        recovering = any(outcome.recovery is None for outcome in self.outcomes)
        if self.watched.step < fault.at or (fault.during == "step" and recovering):
            return False
        if fault.what in (*OF_WORKERS, "notice") and not self._target(fault).trainers():
            return False
        if fault.what in OF_NODES and not self._of_node(fault.what, self._target(fault)):
            return False
        now = time.monotonic()
        self._since = self._since or now
        self._missed = not self._in_phase(fault)
        return not self._missed or now - self._since > PHASE_SECONDS

    def _in_phase(self, fault: Fault) -> bool:
        node, local = self._target(fault), fault.rank % self.nodes.ranks
        if fault.during == "step" and fault.what not in (*OF_WORKERS, "notice"):
            return True
        if fault.during == "save" and self.saving():
            return True
        if fault.during == "rendezvous":
            between = not node.trainers() or self._is(node, local, ("start",))
            return between and node.zygote() is not None
        return self._is(node, local, PHASES[fault.during])

    def _is(self, node: LocalNode, local_rank: int, phases: Sequence[str]) -> bool:
        """Whether all ranks of a node run, and a rank is in one of these phases."""
        progress = node.progress(local_rank)
        if progress is None or progress.phase not in phases:
            return False
        return len(node.trainers()) == self.nodes.ranks

    def _inject(self, fault: Fault) -> None:
        node, now = self._target(fault), time.monotonic()
        target, workers = f"node {node.number}", node.trainers()
        if fault.what in OF_WORKERS:
            local = fault.rank % self.nodes.ranks
            target += f" rank {local}"
            for pid in workers[local : local + 1]:  # empty if the process has just ended
                self._to_worker(fault, pid)
        elif fault.what in OF_NODES:
            pids = self._of_node(fault.what, node)
            for pid in pids[fault.rank % len(pids) :][:1] if pids else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif fault.what == "partition" and node.container:
            node.container.cut(incoming=fault.way != "out", outgoing=fault.way != "in")
            self._later(fault.seconds, node.container.heal)
        elif fault.what == "storage":
            self._refuse_writes(node, fault.seconds)
        elif fault.what == "stop_node":
            self._stop([node.process.pid, *node.family()], fault.seconds)
        elif fault.what == "kill_agent":
            node.kill_agent()
            self._resting.append(node)
        elif fault.what == "kill_node":
            node.kill()
        elif fault.what == "notice":
            node.process.send_signal(signal.SIGTERM)
            self._leaving.append(node)
        elif fault.what == "store":
            target = "the store"
            self.nodes.kill_store()
            self._later(fault.seconds, self.nodes.start_store)
        else:
            node = self._join()
            target = f"node {node.number}"
        if fault.what in ("kill_agent", "kill_node", "notice"):
            self._up.remove(node)
        settled = self._settling(fault, node, bool(workers))
        step = self.watched.step
        self.outcomes.append(FaultOutcome(fault, target, now, step, self._missed, settled, step))
        self._since = 0.0
        print(f"step {step}: {fault}, {target}")

    def _of_node(self, what: str, node: LocalNode) -> list[int]:
        """Process ids of a node that a fault of OF_NODES may kill."""
        if what == "kill_stand_in":
            return node.stand_ins()
        if what == "kill_writer":
            return node.running(WRITER)
        return [pid for pid in (node.zygote(),) if pid]

    def _join(self) -> LocalNode:
        if self._resting:
            node = self._resting.pop(0)
            self.nodes.restart(node)
        else:
            node = self.nodes.add()
        self._up.append(node)
        return node

    def _settling(self, fault: Fault, node: LocalNode, trained: bool) -> Callable[[], bool]:
        """Return `FaultOutcome.settled` for a fault that was just injected.

        Args:
            fault: the injected fault.
            node: the node that it hit.
            trained: whether the node had training processes.
        """
        starts, now = self.watched.starts, time.monotonic()
        if fault.what == "join":
            return lambda: node not in self._up or self._is(node, 0, PHASES["step"])
        if fault.what == "notice":
            return lambda: node.process.poll() is not None
        if fault.what in ("nan", "kill_writer"):
            return lambda: True
        if fault.what in LASTING:
            return lambda: time.monotonic() > now + min(fault.seconds, STOPPED_SECONDS)
        return lambda: self.watched.starts > starts or not trained

    def _to_worker(self, fault: Fault, pid: int) -> None:
        if fault.what == "kill_worker":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif fault.what == "nan":
            (self.nodes.logs / str(pid)).touch()
        elif fault.what == "stop_worker":
            self._stop([pid], fault.seconds)
        else:
            for turn in range(int(fault.seconds / TURN_SECONDS / 2)):
                self._later(2 * turn * TURN_SECONDS, lambda: self._stop([pid], TURN_SECONDS))

    def _stop(self, pids: list[int], seconds: float) -> None:
        """Send SIGSTOP now and SIGCONT `seconds` later."""
        stopped = []
        for pid in pids:
            with suppress(ProcessLookupError):
                stopped.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(stopped[-1], signal.SIGSTOP)

        def resume() -> None:
            for descriptor in stopped:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                os.close(descriptor)

        self._later(seconds, resume)

    def _refuse_writes(self, node: LocalNode, seconds: float) -> None:
        """Let every write of the node's checkpoint writer fail for `seconds`, as on a full disk."""
        writers = node.running(WRITER)

        def limit(size: int) -> None:
            for pid in writers:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        limit(0)
        self._later(seconds, lambda: limit(resource.RLIM_INFINITY))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))


# --- leftovers -------------------------------------------------------------------------------


def processes_with(variable: str, value: str) -> list[str]:
    """Return the processes that have an environment variable with this value: id, name and command
    line of each."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{variable}={value}".encode() in path.read_bytes().split(b"\0"):
                name = (path.parent / "comm").read_text().strip()
                words = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                line = words.decode(errors="replace")[:200].strip()
                found.append(f"{path.parent.name} {name} ({line})")
    return found


def left_memory(nodes: list[LocalNode], pattern: str) -> list[str]:
    """Return the node and name of shared memory that the run has left on nodes.

    Args:
        nodes: nodes that completed the run.
        pattern: glob of the names of the run's shared memory.
    """
    found = []
    for node in nodes:
        where = node.container.memory if node.container else Path("/dev/shm")
        found += [f"node {node.number}: {path.name}" for path in sorted(where.glob(pattern))]
    return found
