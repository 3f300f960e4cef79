"""A run in a Slurm of its own, through a time limit, a requeue and two lost nodes: started by
slurm.sh, in namespaces where nothing else runs."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support import python_path
from tests.distributed.jobs import RECIPE, ROOT, losses
from trainer.data.prepare.prepare import prepare

ENDED = "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"
NODE = """\
mount -t tmpfs none /dev/shm
hostname {name}
slurmd -D -N {name} >> {log} 2>&1 &
wait
"""


@dataclass
class Node:
    """A machine: one slurmd, with processes and shared memory of its own."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch it on."""
        namespaces = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = NODE.format(name=self.name, log=self.log)
        self.process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-ec", script], stderr=self.log.open("a")
        )

    def kill(self) -> None:
        """SIGKILL to its first process, upon which the kernel kills all others, slurmd among
        them."""
        subprocess.run(["kill", "-KILL", str(self.first_process())], check=True)
        self.process.wait()

    def first_process(self) -> int:
        """Process id, seen from here."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def cores(self) -> set[int]:
        """Cores that the ranks of a job may use."""
        warm = [pid for pid, command in self._commands().items() if "perdure-zygote" in command]
        return set.intersection(*map(os.sched_getaffinity, warm))

    def left(self) -> list[str]:
        """What a job has left on it: processes, and names in shared memory."""
        memory = Path(f"/proc/{self.first_process()}/root/dev/shm")
        of_jobs = re.compile("python|slurmstepd|slurm_script")
        running = [command for command in self._commands().values() if of_jobs.search(command)]
        return [*(path.name for path in memory.iterdir()), *running]

    def _commands(self) -> dict[int, str]:
        """Names and command lines of all its processes."""
        namespace = os.readlink(f"/proc/{self.first_process()}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                command = f"{(path / 'comm').read_text().strip()} {line}"
                if os.readlink(path / "ns/pid") == namespace:
                    found[int(path.name)] = command
        return found


def main(scratch: Path) -> None:
    """Start the nodes and the job, let things happen to them, check what is left."""
    log = scratch / "log"
    write_recipe(scratch, steps=10**6)
    corpus = scratch / "corpus"
    corpus.mkdir()
    for number, path in enumerate(sorted((ROOT / "trainer").rglob("*.py"))):
        (corpus / f"{number:03}.txt").write_text(path.read_text())
    prepare([str(corpus)], scratch / "data", tokenizer="bytes", validation_fraction=0.1)
    nodes = [Node(name, log / f"{name}.log") for name in ("node1", "node2")]
    for node in nodes:
        node.start()
    wait_for("two idle nodes", lambda: slurm("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")
    job = Job(scratch, submit(scratch, log))
    say(f"job {job.number}: a time limit of two minutes, SIGUSR1 45 s before it")
    job.wait_for_steps(20)
    for node in nodes:
        assert len(node.cores()) == 2, f"{node.name}: its ranks share core {node.cores()}"
    job.wait_for_requeue(1)
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    assert job.wait_for_start(1) == 0, "steps lost"

    say(f"scontrol requeue, in step {job.step()}")
    slurm("scontrol", "requeue", job.number)
    job.wait_for_requeue(2)
    assert job.wait_for_start(2) == 0, "steps lost"

    for requeues, lost in ((3, nodes[1]), (4, nodes[0])):
        hosts = "the store and the job's shell" if lost is nodes[0] else "nothing but ranks"
        say(f"{lost.name}, which hosts {hosts}, is lost in step {job.step()}")
        before = len(job.starts())
        lost.kill()
        if lost is nodes[1]:
            job.wait_for_start(before)
        job.wait_for_requeue(requeues)
        say(f"Slurm has noticed, in step {job.step()}")
        last = job.step() + 300
        if lost is nodes[0]:
            write_recipe(scratch, steps=last)
        lost.start()
        job.wait_for_start()

    wait_for("the job's end", lambda: job.state() in ENDED, 900)
    say(f"{job.state()} in step {job.step()}, {job.restarts()} requeues")
    report = [sys.executable, "-m", "trainer.cli", "report", str(scratch / "run")]
    subprocess.run(report, check=True)
    assert job.state() == "COMPLETED"
    assert job.step() == last
    subprocess.run([*report, "--check"], check=True)
    check_array(scratch, log, job)
    subprocess.run([*report, "--check"], check=True)
    wait_for("the nodes to be empty", lambda: not any(node.left() for node in nodes), 10)
    say("nothing is left on the nodes")


@dataclass
class Job:
    """The job, seen through its ledger and through Slurm."""

    scratch: Path
    number: str

    def step(self) -> int:
        """The newest step."""
        return max(losses(self.scratch, "run"), default=0)

    def starts(self) -> list[tuple[int, int, int]]:
        """Of every start of its ranks: (nodes, step it began after, steps done before)."""
        path = self.scratch / "run" / "ledger.jsonl"
        text = path.read_text() if path.exists() else ""
        found, done = [], 0
        for line in text.splitlines():
            record = json.loads(line)
            if record["kind"] == "start":
                found.append((record["nodes"], record["step"], done))
            elif record["kind"] == "step":
                done = record["step"]
        return found

    def state(self) -> str:
        """As Slurm calls it."""
        return self._field("JobState")

    def restarts(self) -> int:
        """How often it was requeued."""
        return int(self._field("Restarts"))

    def wait_for_requeue(self, number: int) -> None:
        """Until it was requeued for the time `number`."""
        wait_for(f"requeue {number}", lambda: self.restarts() >= number or self._ended())

    def wait_for_start(self, before: int | None = None) -> int:
        """Until it has begun again, and done some steps; returns how many it had lost.

        Args:
            before: starts until now; None for all.
        """
        before = len(self.starts()) if before is None else before
        wait_for("a start", lambda: len(self.starts()) > before or self._ended())
        nodes, step, done = self.starts()[before]
        say(f"it goes on after step {step}, on {nodes} node(s); {done - step} step(s) lost")
        self.wait_for_steps(20)
        return done - step

    def wait_for_steps(self, more: int) -> None:
        """Until it has done so many more."""
        goal = self.step() + more
        wait_for(f"step {goal}", lambda: self.step() >= goal or self._ended())

    def _field(self, name: str) -> str:
        return re.search(rf"{name}=(\w+)", slurm("scontrol", "show", "job", self.number))[1]

    def _ended(self) -> bool:
        """Never True: the check fails if the job has ended too early."""
        if self.state() in ENDED:
            sys.exit(f"slurm_check: {self.state()} too early, in step {self.step()}")
        return False


def submit(scratch: Path, log: Path, *launch: str, minutes: int = 2) -> str:
    """Have `perdure launch` write the script, and submit it; returns the number of the job.

    Args:
        scratch: folder of the run.
        log: folder of the job's log.
        launch: more options of `perdure launch`.
        minutes: time limit.
    """
    script = str(scratch / f"train{''.join(launch)}.sbatch")
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    write = [sys.executable, "-P", "-m", "trainer.cli", "launch", "slurm", "recipe.yaml"]
    write += ["checkpoint.every=20", "--nodes", "1:2", "--nproc-per-node", "1"]
    subprocess.run([*write, *launch, "--out", script], cwd=scratch, env=environment, check=True)
    options = ["--nodes=2", f"--time={minutes}", "--signal=USR1@45", f"--output={log}/job.log"]
    variables = f"--export=ALL,PYTHONPATH={environment['PYTHONPATH']}"
    return slurm("sbatch", "--parsable", *options, variables, f"--chdir={scratch}", script)


def check_array(scratch: Path, log: Path, job: "Job") -> None:
    """Train on in an array of allocations: a notice ends the first, the second does the rest, and
    the third is cancelled."""
    write_recipe(scratch, steps=10**6)
    before = len(job.starts())
    array = submit(scratch, log, "--allocations", "3", minutes=10)
    say(f"job {array}: an array of three allocations, which may not be requeued")
    wait_for("a start", lambda: len(job.starts()) > before)
    goal = job.step() + 20
    wait_for(f"step {goal}", lambda: job.step() >= goal)
    write_recipe(scratch, steps=job.step() + 300)
    # Slurm 22.05 sends the signal, and says that the task of an array cannot be altered.
    subprocess.run(["scancel", "--quiet", "--signal=USR1", f"{array}_1"], check=False)
    wait_for("another start", lambda: len(job.starts()) > before + 1)
    nodes, step, done = job.starts()[-1]
    say(f"it goes on after step {step}, on {nodes} node(s); {done - step} step(s) lost")
    assert done == step
    wait_for("an empty queue", lambda: slurm("squeue", "--noheader") == "", 300)
    shown = slurm("scontrol", "show", "job", array)
    tasks = re.findall(r"ArrayTaskId=(\S+).*?JobState=(\w+).*?ExitCode=(\d+)", shown, flags=re.S)
    found = {task.partition("%")[0]: (state, code) for task, state, code in tasks}
    assert found == {
        "1": ("FAILED", "75"), "2": ("COMPLETED", "0"), "3": ("CANCELLED", "0"),
    }, found  # fmt: skip


def write_recipe(scratch: Path, steps: int) -> None:
    """What the job trains; it reads it whenever it starts."""
    (scratch / "recipe.yaml").write_text(RECIPE.replace("steps: 50", f"steps: {steps}"))


def slurm(*command: str) -> str:
    """Output of a command of Slurm."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
    """Until it is there, or the check fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"slurm_check: {what} did not come within {seconds:.0f} s")
        time.sleep(0.2)


def say(what: str) -> None:
    """On the console, with the time since the beginning."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {what}", flush=True)


BEGAN = time.monotonic()

if __name__ == "__main__":
    main(Path(sys.argv[1]))
