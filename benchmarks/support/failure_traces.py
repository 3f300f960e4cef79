"""Published failures of large training jobs, as traces that a simulated run can be put under.

A figure stands here only if it was read in the source, or quoted from it word by word. How causes
are sorted into the five `KINDS` is this project's judgement, and stands beside each. Alibaba's
papers (C4, Unicron) were not found with both a rate and causes. Microsoft's trace of Philly (Jeon
et al., ATC 2019) counts trials of small jobs, most of which fail by their users' errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

DAY = 86400.0
HOUR = 3600.0
PER_NODE = 8
"""GPUs of a node."""

KINDS = {
    "process": "a process dies, its machine is well",
    "hang": "a process hangs",
    "node": "a node is lost, with its memory",
    "rack": "a node and its neighbour are lost, and so the copy of its memory",
    "notice": "a node is told to go",
}
NODES_LOST = {"node": 1, "rack": 2, "notice": 1}
"""Nodes that a failure takes away until they are mended."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Failures of one source."""

    name: str
    source: str
    sorting: str
    """How the causes of the source were sorted, and what was assumed."""
    causes: Mapping[str, tuple[str, int]]
    """Cause → (one of `KINDS`, count)."""
    gpus: int = 0
    """GPUs that had the failures."""
    days: float = 0.0
    """Days in which they had them."""
    hours: Mapping[int, float] = field(default_factory=dict)
    """GPUs of a job → hours between its failures, where the source has them; else in proportion."""
    gaps: Sequence[float] = ()
    """Times between failures by their mean, each as likely; none: a Poisson process."""
    repair_days: float = 1.0
    """Mean days until a lost node is back."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of failures of each kind."""
        counts = dict.fromkeys(KINDS, 0)
        for kind, count in self.causes.values():
            counts[kind] += count
        return counts

    def mtbf(self, gpus: int) -> float:
        """Mean seconds between failures of a job of `gpus` GPUs."""
        if self.hours:
            return self.hours[gpus] * HOUR
        return self.days * DAY / sum(self.counts.values()) * self.gpus / gpus

    def nodes_away(self, gpus: int) -> float:
        """Mean number of nodes that are being mended."""
        counts = self.counts
        lost = sum(counts[kind] * nodes for kind, nodes in NODES_LOST.items())
        return lost / sum(counts.values()) / self.mtbf(gpus) * self.repair_days * DAY

    def failures(self, gpus: int, draw: Random) -> Iterator[tuple[float, str]]:
        """Endless (seconds since the start, kind) of failures, in order."""
        mean, counts, now = self.mtbf(gpus), self.counts, 0.0
        kinds, weights = list(counts), list(counts.values())
        while True:
            now += mean * (draw.choice(self.gaps) if self.gaps else draw.expovariate(1.0))
            yield now, draw.choices(kinds, weights)[0]


LLAMA_3_CAUSES = MappingProxyType(
    {
        "faulty GPU": ("node", 148),
        "GPU HBM3 memory": ("node", 72),
        "software bug": ("process", 54),
        "network switch or cable": ("rack", 35),
        "host maintenance, unplanned": ("node", 32),
        "GPU SRAM memory": ("node", 19),
        "GPU system processor": ("node", 17),
        "NIC": ("node", 7),
        "NCCL watchdog time-outs": ("hang", 7),
        "silent data corruption": ("node", 6),
        "GPU thermal interface and sensor": ("node", 6),
        "SSD": ("node", 3),
        "power supply": ("node", 3),
        "server chassis": ("node", 2),
        "IO expansion board": ("node", 2),
        "dependency": ("process", 2),
        "CPU": ("node", 2),
        "system memory": ("node", 2),
    }
)

LLAMA_3 = Trace(
    name="Llama 3",
    source='Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), section '
    "3.3.4 and table 5: 466 interruptions in 54 days on 16,384 H100s, 47 of them planned",
    sorting="Planned ones are notices; a switch or cable is a rack.",
    causes={**LLAMA_3_CAUSES, "planned": ("notice", 47)},
    gpus=16384,
    days=54,
)

OPT = Trace(
    name="OPT",
    source='Zhang et al. 2022, "OPT" (arXiv 2205.01068), section 2.5: in 2 months on 992 A100s '
    "hardware caused at least 35 manual restarts, an estimated 70 or more automatic ones, and the "
    "cycling of over 100 hosts",
    sorting="100 of the 105 restarts lost a host; of the other five, a process is assumed.",
    causes={"host cycled": ("node", 100), "restart without": ("process", 5)},
    gpus=992,
    days=61,
)

RSC = Trace(
    name="Meta RSC",
    source='Kokolis et al. 2025, "Revisiting Reliability in Large-Scale Machine Learning Research '
    'Clusters" (arXiv 2410.21680): 7.9 hours between the failures of jobs of 1,024 A100s, and 1.8 '
    "projected for 16,384",
    sorting="The paper has no counts of causes: those of Llama 3's unplanned interruptions.",
    causes=LLAMA_3_CAUSES,
    hours={1024: 7.9, 16384: 1.8},
)

BYTEROBUST = Trace(
    name="ByteDance",
    source='Wan et al. 2025, "Robust LLM Training Infrastructure at ByteDance" (arXiv 2509.16293), '
    "table 1: causes of incidents in three months; section 2.1: 28 runs, each a restart, in 10 "
    "days on 1,000 GPUs",
    sorting="CUDA errors and what a host's software does are processes; a fall of MFU costs the "
    "node; a change of code or data is a notice.",
    causes={
        "CUDA error": ("process", 19968),
        "CPU overload": ("process", 6095),
        "CPU out of memory": ("process", 5567),
        "insufficient disk space": ("process", 2755),
        "InfiniBand error": ("node", 1599),
        "file system mount": ("node", 1176),
        "HDFS error": ("process", 1104),
        "container error": ("process", 781),
        "OS kernel panic": ("node", 203),
        "GPU memory error": ("node", 188),
        "external service error": ("process", 128),
        "GPU unavailable": ("node", 76),
        "disk fault": ("node", 47),
        "job hang": ("hang", 5506),
        "MFU decline": ("node", 442),
        "NaN value": ("process", 148),
        "code or data adjustment": ("notice", 9582),
    },
    # Counted in all jobs; their rate is that of the one job whose restarts the paper counts.
    hours={gpus: 24 * 10 / 28 * 1000 / gpus for gpus in (1024, 16384)},
)

STEPFUN = Trace(
    name="StepFun",
    source='Shou et al. 2025, "InfiniteHBD" (arXiv 2502.03885), the trace that it publishes '
    "(github.com/stepfun-ai/InfiniteHBD-Trace): 485 faults of 400 nodes in 349 days, without those "
    "found in stress tests. 40 nodes have 43 % of them",
    sorting="Faults within 15 minutes are one, of a rank if of several nodes; what was taken "
    "offline for a change or on suspicion is a notice. Times between them are the trace's own: "
    "bursts, and long silences.",
    causes={"one node": ("node", 360), "several": ("rack", 41), "taken offline": ("notice", 18)},
    gpus=400 * PER_NODE,
    days=349,
    # Means of twenty equal parts of the times between failures, in order, by their mean.
    gaps=(
        *(0.019, 0.043, 0.078, 0.112, 0.167, 0.215, 0.266, 0.332, 0.416, 0.497),
        *(0.567, 0.660, 0.796, 0.955, 1.146, 1.380, 1.709, 2.095, 2.764, 5.783),
    ),
    repair_days=6.4,
)

TRACES = (LLAMA_3, OPT, RSC, BYTEROBUST, STEPFUN)
