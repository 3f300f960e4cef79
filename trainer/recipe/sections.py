"""The vocabulary of a recipe. The docstring under a field is its documentation: the reference page
and the JSON Schema are made from them."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator, ConfigDict

from checkpointing.options import CheckpointOptions
from elastic.options import ElasticOptions
from trainer.recipe.architecture import Architecture
from trainer.recipe.bounds import Amount, Count, Positive, Share
from trainer.recipe.kgat_options import GraphData, Kgat
from trainer.recipe.objective import Objective
from trainer.recipe.paths import in_bucket, local_copy

Sharding = Literal["NO_SHARD", "OPTIMIZER_STATE", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
ZERO_STAGES: dict[int, Sharding] = {
    0: "NO_SHARD",
    1: "OPTIMIZER_STATE",
    2: "SHARD_GRAD_OP",
    3: "FULL_SHARD",
}


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """What is run, for how long, and where it leaves its files."""

    dir: str
    """Directory of this run: resolved recipe, metrics, checkpoints. Starting the same recipe again
    resumes from the newest checkpoint in it. s3://bucket/folder: nodes need no disk in common."""

    steps: Count = 0
    """Optimizer steps of the whole run, counted from its beginning. 0: `epochs` says it."""

    epochs: Amount = 0.0
    """Passes of the whole run over the training data, instead of `steps`; 1.5 is allowed. The steps
    are epochs x sequences / `batch.global_batch`, rounded up. 0: `steps` says it."""

    seed: Count = 0
    """Seed of the initial weights, the order of the data, and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, else the CPU."""

    determinism: Literal["fast", "exact"] = "fast"
    """exact: losses, weights and optimizer state are the same bit for bit at every world size and
    under every sharding, also when ranks come and go. This holds on one kind of device, with one
    batch.micro_batch, strategy.tp, pp and cp. It is slower and needs more memory: gradients are
    float64, and a CPU rank has one thread."""

    log_every: Positive = 10
    """Steps between console lines and between records in metrics.jsonl."""

    evaluate_every: Count = 0
    """Steps between validation passes; also one after the last step. 0: no validation."""

    stop_after: Count = 0
    """End the run once so many validation passes in a row have found no lower validation loss than
    the best before them. The last step is saved, with `checkpoint.keep_best` the best one too. The
    exit code is 0. 0: no such end."""

    @property
    def length(self) -> str:
        """How long the run is, in words, as the recipe says it."""
        return f"{self.epochs:g} epoch(s)" if self.epochs else f"{self.steps:,} steps"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA (Hu et al. 2021): the weights of `init_from` stay as they are, and two small matrices A
    and B beside each of its linear layers are trained. A layer then gives W x + alpha / rank · B A
    x. See docs/fine_tuning.md."""

    rank: Positive = 16
    """Rows of A, and columns of B."""

    alpha: Amount = 32.0
    """Numerator of alpha / rank."""

    rslora: bool = False
    """Divide alpha by the root of the rank instead of the rank (Kalajdzievski 2023)."""

    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear layers of the blocks, or how these names end: `q_proj`,
    `layers.0.mlp.up_proj`. all-linear: all of them."""

    dropout: Share = 0.0
    """Share of the elements of x that training leaves out of A x."""

    base: Literal["bf16", "fp32", "nf4"] = "bf16"
    """Format of the weights that are not trained. bf16 goes with `precision.dtype: bf16`. nf4
    (QLoRA, Dettmers et al. 2023): the weights under A and B take 4.5 bits each, the others the
    format that is computed with."""

    also: tuple[str, ...] = ()
    """Names of modules that are trained whole, or how these names end: `lm_head`. PEFT calls them
    modules_to_save."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: exactly one of `architecture`, `init_from`, `factory` and `kgat`, which may come
    with `init_from`."""

    architecture: Architecture | None = None
    """A decoder, in the words of a Hugging Face config.json, with fresh weights."""

    family: str | None = None
    """`package.module:NAME` of a `Family`, for `architecture` or `init_from` of another family than
    those that come with Perdure; see docs/extending.md."""

    init_from: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors, sharded or not) whose
    architecture and weights the run starts from."""

    implementation: Literal["auto", "perdure", "transformers"] = "auto"
    """What computes the model of `init_from`. perdure: a family of Perdure's own. transformers: the
    module that transformers has for it (pip install 'perdure[transformers]'; see
    docs/extending.md). auto: Perdure where it has a family for it, else transformers."""

    adapter: Adapter | None = None
    """Train an adapter over the weights of `init_from` instead of these. Checkpoints hold the
    adapter alone, as PEFT does. `adapter: {}` is LoRA of rank 16 in all linear layers."""

    factory: str | None = None
    """`package.module:function` that returns any nn.Module; see docs/extending.md."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    """How attention stays inside documents, with data.document_mask (see docs/data.md). varlen:
    FlashAttention over their boundaries, as torch brings it. flex: FlexAttention, compiled, on GPUs
    only. sdpa: one additive mask. auto: the first of them that works, with FlashAttention-3 or -4
    where that is installed; on CPUs sdpa for bf16 up to 256 tokens."""

    kgat: Kgat | None = None
    """A recommender, with data.graph. `kgat: {}` is the paper's model. With `init_from` it starts
    from the embeddings of that checkpoint, such as one of BPR-MF."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One prepared data set of the mixture."""

    path: str
    """Directory written by `perdure data prepare`."""

    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the sequences taken from this source, relative to the other weights."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, and in which order: `sources` and `seq_len`, or `factory`, or `graph`."""

    sources: tuple[Source, ...] = ()
    """Prepared data sets; the order of the samples is a function of seed and position alone."""

    seq_len: int = 0
    """Tokens per sequence."""

    factory: str | None = None
    """`package.module:function` that returns any map-style data set; see docs/extending.md."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of this factory."""

    graph: GraphData | None = None
    """Interactions and a knowledge graph, for model.kgat."""

    pack: Literal["auto", "whole", "stream"] = "auto"
    """How documents become sequences. whole: none is cut; as many as fit are put together, and the
    rest of the sequence is padding. stream: back to back, cut where a sequence ends. auto: whole
    for chats, stream for others."""

    document_mask: bool = True
    """Attention stays inside a document when several are packed into one sequence."""

    validation_sequences: Positive = 64
    """Sequences of the fixed validation set; fewer if the validation split is smaller. That of
    `factory` is taken whole."""

    reader: Literal["auto", "mmap", "pread", "ram"] = "auto"
    """How shards are read. auto: pread on network filesystems, mmap elsewhere."""

    workers: Count = 0
    """Background loader processes per rank. 0 reads in the training process, which is fastest for
    prepared tokens on a local disk."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences per optimizer step; constant whatever the number of machines."""

    global_batch: Positive
    """Sequences per optimizer step over all ranks."""

    micro_batch: Positive | Literal["auto"] = 1
    """Most sequences that one rank holds in one forward pass; the rest is gradient accumulation.
    auto: as many as `perdure plan` finds room for, halved when memory runs out (see
    docs/strategies.md); not with run.determinism: exact."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """What differs for some parameters."""

    match: str
    """Pattern of their names, such as `*.norm.*`, as `fnmatch` reads it. The first group that
    matches a parameter counts."""

    lr_scale: Amount = 1.0
    """Their learning rate as a multiple of that of the schedule."""

    weight_decay: Amount | None = None
    """For these, whatever their shape, instead of `optimizer.weight_decay`."""


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon (Jordan et al. 2024), with the mathematics of torch.optim.Muon."""

    momentum: Share = 0.95
    """Decay of the running mean of the gradient."""

    nesterov: bool = True
    """Mix the gradient into that mean once more."""

    ns_steps: Annotated[int, Ge(1), Lt(100)] = 5
    """Newton-Schulz iterations, in bfloat16."""

    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the quintic polynomial that each iteration applies to the singular values."""

    eps: Amount = 1e-7
    """Least norm that an update is divided by."""

    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """By what the learning rate is multiplied for a matrix of A rows and B columns.
    match_rms_adamw: 0.2 sqrt(max(A, B)), so that one rate serves AdamW too (Liu et al. 2025).
    original: sqrt(max(1, A / B))."""

    adamw: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "head.*", "*.head.*")
    """Patterns of the names of matrices that AdamW updates: embeddings and output heads."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights follow from gradients (see docs/extending.md)."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW (Loshchilov & Hutter 2019), fused. muon: Muon for the matrices, AdamW for
    embeddings, output heads and all that is no matrix."""

    factory: str | None = None
    """`package.module:function`, or a class, that returns a torch.optim.Optimizer instead. It is
    called with the parameter groups, and `factory_options` by keyword. The rates of the groups that
    it returns count, and the schedule multiplies them."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    lr: Amount
    """Peak learning rate."""

    betas: tuple[Share, Share] = (0.9, 0.95)
    """For AdamW: decay of the running means of gradient and squared gradient."""

    eps: Amount = 1e-8
    """For AdamW: added to the root of the second moment."""

    weight_decay: Amount = 0.1
    """Decoupled decay of matrices and embeddings; norms, biases and other vectors have none. The
    groups that a factory gets carry it, unless `factory_options` has a `weight_decay`."""

    clip_norm: Amount = 1.0
    """Largest global gradient norm; 0 does not clip."""

    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """For adamw and muon: how their running means are stored, in 4, 2 or 1.03 bytes an element.
    bf16 is rounded stochastically. int8 has a scale for each 128 elements of a row; of parameters
    whose rows are no multiple of that, means are bf16. See docs/strategies.md."""

    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with a learning rate or a weight decay of their own."""

    muon: Muon | None = None
    """Settings of optimizer.name: muon."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over the run: linear warm-up, then a shape."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """wsd: warm-up, stable, then linear decay over the last `decay_steps`."""

    warmup_steps: Count | Share = 0
    """Steps of linear warm-up from 0 to optimizer.lr; below 1 their share of the run, rounded up:
    0.03 are 3 % of its steps."""

    decay_steps: Count | Share = 0
    """Steps of the final decay, for wsd only; below 1 their share of the run, rounded down."""

    min_lr_ratio: Amount = 0.1
    """Learning rate at the last step as a share of optimizer.lr (cosine, linear, wsd)."""

    factory: str | None = None
    """`package.module:function` instead of a name: called with `steps`, `lr` and `factory_options`
    by keyword, it returns a pure function from a step (1 to `steps`) to its learning rate."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def lengths(self, steps: int) -> tuple[int, int]:
        """Steps of warm-up, and of the final decay, in a run of `steps`."""
        warmup, decay = (
            # As it is written: 0.07 of 100 steps are 7, though as binary fractions a little more.
            Fraction(repr(length)) * steps if isinstance(length, float) else length
            for length in (self.warmup_steps, self.decay_steps)
        )
        if isinstance(warmup, Fraction):
            warmup = min(math.ceil(warmup), steps - 1)
        if isinstance(decay, Fraction):
            decay = max(math.floor(decay), 1) if decay else 0
        return warmup, decay


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the model is spread over ranks."""

    name: Literal["ddp", "fsdp"] = "fsdp"
    """ddp: every rank holds everything. fsdp: shards by `sharding` (FSDP2)."""

    sharding: Sharding | None = None
    """What fsdp shards; FULL_SHARD unless set. NO_SHARD: nothing. OPTIMIZER_STATE: the optimizer
    state (ZeRO-1). SHARD_GRAD_OP: also gradients (ZeRO-2). FULL_SHARD: also parameters (ZeRO-3).
    HYBRID_SHARD: everything, inside groups of `shard_size` ranks."""

    zero: Literal[0, 1, 2, 3] | None = None
    """The same as `sharding`, in DeepSpeed's numbers: give one of the two."""

    shard_size: int | None = None
    """Ranks per shard group for HYBRID_SHARD, with `tp` groups of such ranks; those of one node
    unless set."""

    tp: Positive = 1
    """Ranks of a node that compute each layer together, by heads and columns (tensor parallelism);
    the others share the data as `name` and `sharding` say. See docs/parallelism.md."""

    sequence_parallel: bool = False
    """With `tp`: these ranks also cut what lies between the layers, along the sequence."""

    pp: Positive = 1
    """Ranks among which the layers are cut into stages (pipeline parallelism); the others share the
    data as `name` and `sharding` say. A micro-batch goes through one after the other. See
    docs/parallelism.md."""

    pp_schedule: Annotated[
        PipelineSchedule, BeforeValidator(lambda name: str(name).lower())  # 1F1B, as papers write
    ] = "1f1b"
    """The order of the passes of `pp`: all forward, then all backward; in turn; in turn with
    several stages a rank; in turn with the weights' gradients computed where a rank would wait."""

    pp_stages_per_rank: Positive = 1
    """Stages of each rank of `pp`, for interleaved_1f1b."""

    cp: Positive = 1
    """Ranks of a node that have a part of each sequence each, for long ones (context parallelism);
    parameters are spread over them as over any others. See docs/parallelism.md."""

    ep: Positive = 1
    """Ranks among which the experts of each layer are divided, of those that share parameters as
    `sharding` says (expert parallelism); tokens go to their experts. See docs/parallelism.md."""

    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where sharded parameters, gradients and optimizer state live, and the optimizer runs: on the
    device, in host memory, or in files on a local disk (see docs/strategies.md)."""

    offload_directory: str | None = None
    """Directory on a local disk, for offload: nvme. Each rank takes 16 bytes there for each
    parameter of its shard, until its process ends."""

    reduce_every_pass: bool = False
    """Reduce-scatter gradients after every accumulation pass instead of once per step. It sends
    more, but no rank holds unsharded gradients between passes."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: recompute each block in the backward pass. selective: keep the results of matrix
    products and attention, recompute the rest."""

    compile: bool = False
    """torch.compile each block. The first step then takes longer."""

    @property
    def together(self) -> int:
        """Ranks that have a share of the data in common, and compute it together."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. Trained parameters are float32 unless `master` says otherwise; what a factory
    makes in bf16 or fp16 is converted."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format of activations and matrix products (and of gathered parameters under fsdp).
    Gradients are reduced in float32. fp16 uses a dynamic loss scale."""

    master: Literal["fp32", "bf16_stochastic"] = "fp32"
    """Format of the weights that an update changes. bf16_stochastic: bf16, rounded stochastically,
    in 2 bytes a parameter; gradients have 2, too, once they are reduced. See docs/strategies.md."""

    matmul: Literal["fp8_rowwise", "fp8_tensorwise", "mxfp8"] | None = None
    """Have the linear layers of the blocks multiply in 8 bits, through torchao. One scale for each
    row, each tensor, or each 32 elements. fp8 needs compute capability 8.9, mxfp8 10.0. Under fsdp
    fp8_tensorwise also sends weights in 8 bits."""

    loss_scale: Annotated[float, Ge(1)] = 65536.0
    """First loss scale for fp16; halved on overflow, doubled after 2000 good steps."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something to be told of when it begins, and again only after it was over."""

    when: str
    """`NAME > NUMBER` or `NAME < NUMBER`, with a name of docs/metrics.md; `failure`: the ranks were
    started again after one; `no step for 10 min` (s, min, h): no record has come for so long."""

    run: str | None = None
    """Command for `sh -c`, with what happened in the environment's PERDURE_ALERT."""

    post: str | None = None
    """URL to which `{"text": …}` is posted, as Slack, Mattermost and Discord (`…/slack`) take it.
    `env:NAME` takes it from the environment, for one that is secret: recipes lie in run.dir."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where metrics and events go besides the console and metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to <run.dir>/tensorboard."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; a restarted run continues under the same run id. The environment's
    WANDB_MODE comes before offline and online; see docs/metrics.md."""

    prometheus: str | None = None
    """Path of a file, NAME.prom, for the textfile collector of Prometheus's node exporter. It is
    replaced at each record, by rank 0."""

    sinks: tuple[str, ...] = ()
    """`package.module:function` of your own, which get what TensorBoard gets; see
    docs/extending.md."""

    hooks: tuple[str, ...] = ()
    """`package.module:function` of your own, which are called when a run starts, steps, validates,
    saves, restarts and ends; see docs/extending.md."""

    alerts: tuple[Alert, ...] = ()
    """When to run a command or call a webhook, from a process beside rank 0; see
    docs/metrics.md."""

    project: str = "perdure"
    """Weights & Biases project."""

    name: str | None = None
    """Name of the run in trackers; the last part of run.dir unless set."""

    profile_steps: Count = 0
    """Run so many steps under the profiler; each rank leaves its trace and a record of what it
    holds in <run.dir>/profile (see docs/metrics.md). They are slower, and count in no speed. 0:
    none."""

    profile_after: Positive = 4
    """Steps after a start, or a restart, that come before the profiled ones."""

    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device at precision.dtype, for MFU. Known for common GPUs;
    elsewhere MFU is left out unless this is set."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run depends on."""

    run: RunSection
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = Schedule()
    strategy: Strategy = Strategy()
    precision: Precision = Precision()
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    tracking: Tracking = Tracking()

    # Reaches the nested sections too: unknown keys are errors, as are infinity and NaN, which no
    # number of a recipe means anything by; docstrings become descriptions.
    __pydantic_config__: ClassVar[ConfigDict] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    @property
    def checkpoint_directory(self) -> str:
        """Where the checkpoints of the run lie: a path or a URL."""
        if self.in_bucket:
            return self.checkpoint.directory or f"{self.run.dir.rstrip('/')}/checkpoints"
        return self.checkpoint.directory or str(Path(self.run.dir) / "checkpoints")

    @property
    def in_bucket(self) -> bool:
        """Whether `run.dir` is a folder of a bucket."""
        return in_bucket(self.run.dir)

    @property
    def directory(self) -> Path:
        """The directory of the run on this machine: `run.dir`, unless that is in a bucket."""
        return local_copy(self.run.dir) if self.in_bucket else Path(self.run.dir)

    @property
    def own_code(self) -> dict[str, str]:
        """What it names of the user's own code that decides a step: key → `package.module:name`."""
        named = {
            "model.factory": self.model.factory,
            "model.family": self.model.family,
            "data.factory": self.data.factory,
            "optimizer.factory": self.optimizer.factory,
            "schedule.factory": self.schedule.factory,
        }
        return {key: name for key, name in named.items() if name}

    @property
    def exact(self) -> bool:
        """Whether results must not depend on the world size in any bit."""
        return self.run.determinism == "exact"

    @property
    def micro_batch(self) -> int:
        """`batch.micro_batch`; 1, which is always possible, where it has not been chosen yet."""
        return 1 if self.batch.micro_batch == "auto" else self.batch.micro_batch

    @property
    def draws(self) -> bool:
        """Whether a pass may draw random numbers: a model or family of the user's, and KGAT, may
        have dropout, as an adapter may. The decoders that come with Perdure have none."""
        model = self.model
        dropout = model.adapter and model.adapter.dropout
        return bool(model.factory or model.family or model.kgat or dropout)

    @property
    def gathers_twice(self) -> bool:
        """Whether FSDP frees parameters after the forward pass and fetches them again for the
        backward pass (ZeRO-3)."""
        return self.sharding in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def sharding(self) -> Sharding:
        """What FSDP shards; DDP counts as NO_SHARD."""
        if self.strategy.name == "ddp":
            return "NO_SHARD"
        return self.strategy.sharding or "FULL_SHARD"
