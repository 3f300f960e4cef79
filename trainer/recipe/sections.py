"""The sections of a recipe. The docstring of a field is its documentation: the reference page and
the JSON Schema are generated from it."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator, ConfigDict

from checkpointing.options import CheckpointOptions, number_of_bytes
from elastic.options import ElasticOptions
from trainer.recipe.architecture import Architecture
from trainer.recipe.value_types import (
    Amount,
    Count,
    Position,
    Positive,
    Share,
    in_bucket,
    local_copy,
)

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
    """How long a run is, and where its files are."""

    dir: str
    """Directory of this run: resolved recipe, metrics, checkpoints. Starting the same recipe again
    resumes from the newest checkpoint in it. s3://bucket/folder, gs://… or az://…: nodes need no
    disk in common."""

    steps: Count = 0
    """Optimizer steps of the whole run, counted from its beginning. 0: the length is given by
    `epochs`."""

    epochs: Amount = 0.0
    """Passes of the whole run over the training data, instead of `steps`; 1.5 is allowed. The steps
    are epochs x sequences / `batch.global_batch`, rounded up. 0: the length is given by `steps`."""

    seed: Count = 0
    """Seed of the initial weights, the order of the data, and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU, else the CPU."""

    determinism: Literal["fast", "exact"] = "fast"
    """exact: losses, weights and optimizer state are bitwise equal at every world size and under
    every sharding, also when ranks come and go. This holds on one kind of device, with one
    batch.micro_batch, strategy.tp, pp and cp. It is slower and needs more memory: gradients are
    float64, and a CPU rank has one thread."""

    log_every: Positive = 10
    """Steps between console lines and between records in metrics.jsonl."""

    evaluate_every: Count = 0
    """Steps between validation passes. A pass also follows the last step. 0: no validation."""

    stop_after: Count = 0
    """End the run after this many validation passes in a row without a new lowest validation loss.
    The last step is saved, and with `checkpoint.keep_best` the best step too. The exit code is 0.
    0: never."""

    samples: tuple[str, ...] = ()
    """Prompts that a process beside rank 0 continues, on one CPU thread. It uses the first
    checkpoint at or after each validation pass, and the last checkpoint; without validation, each
    checkpoint. The texts go to <run.dir>/samples.jsonl and the live page; see docs/seeing.md."""

    @property
    def length(self) -> str:
        """The run's length in words, in epochs or steps as in the recipe."""
        return f"{self.epochs:g} epoch(s)" if self.epochs else f"{self.steps:,} steps"


@dataclass(frozen=True, kw_only=True)
class AdapterSection:
    """LoRA (Hu et al. 2021): the weights of `init_from` are frozen, but those in `also`. Beside
    each linear layer of the blocks that `targets` names, two small matrices A and B are trained.
    Such a layer computes W x + alpha / rank · B A x.
    See docs/fine_tuning.md."""

    rank: Positive = 16
    """Rows of A, and columns of B."""

    alpha: Amount = 32.0
    """Numerator of the factor alpha / rank."""

    rslora: bool = False
    """Divide alpha by the root of the rank instead of the rank (Kalajdzievski 2023)."""

    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear layers of the blocks, or suffixes of these: `q_proj`, `layers.0.mlp.up_proj`.
    all-linear: all of them."""

    dropout: Share = 0.0
    """Fraction of the elements of x that training drops in A x."""

    base: Literal["bf16", "fp32", "nf4"] = "bf16"
    """Format of the frozen weights. bf16 goes with `precision.dtype: bf16`. nf4 (QLoRA, Dettmers et
    al. 2023): weights with an adapter take 4.5 bits each, and other weights have the format of
    `precision.dtype`."""

    also: tuple[str, ...] = ()
    """Names of modules that are trained whole, or suffixes of these: `lm_head`. PEFT calls them
    modules_to_save."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSection:
    """The loss: cross-entropy of tokens (sft), or a preference for the chosen answer of each pair.
    See docs/fine_tuning.md."""

    name: Literal["sft", "dpo", "ipo", "simpo", "orpo"] = "sft"
    """sft: the cross-entropy of trained tokens. dpo (Rafailov et al. 2023), ipo (Azar et al. 2023),
    simpo (Meng et al. 2024), orpo (Hong et al. 2024): for data prepared with `--pairs`. dpo and ipo
    compare with the initial model of the run."""

    beta: Annotated[float, Gt(0)] | None = None
    """beta in these papers; for orpo their lambda. Default: 2.0 for simpo, otherwise 0.1."""

    gamma: Amount | None = None
    """For simpo: required margin of the chosen answer. Default: 1.0."""

    sft_weight: Amount | None = None
    """For dpo, ipo, simpo and orpo: weight of the mean cross-entropy of the chosen answer's tokens,
    which is added to the loss. Default: 1 for orpo, otherwise 0."""

    @property
    def compares(self) -> bool:
        return self.name != "sft"

    @property
    def referenced(self) -> bool:
        return self.name in ("dpo", "ipo")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: exactly one of `architecture`, `init_from` and `factory`, which may come with
    `init_from`."""

    architecture: Architecture | None = None
    """A decoder with fresh weights, described by the keys of a Hugging Face config.json."""

    family: str | None = None
    """`package.module:NAME` of a `Family`, if `architecture` or `init_from` is of a family that
    Perdure does not bundle; see docs/extending.md."""

    init_from: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors, sharded or not) whose
    architecture and weights the run starts from; or its URL in an object store, such as
    "s3://bucket/folder". With `factory` it gives weights alone."""

    implementation: Literal["auto", "perdure", "transformers"] = "auto"
    """What computes the model of `init_from`. perdure: one of Perdure's families. transformers: the
    module of transformers (pip install 'perdure[transformers]'; see docs/extending.md). auto:
    Perdure if it has the family, else transformers."""

    adapter: AdapterSection | None = None
    """Train an adapter over the frozen weights of `init_from`. Checkpoints hold only the adapter,
    as in PEFT. `adapter: {}` is LoRA of rank 16 in all linear layers."""

    factory: str | None = None
    """`package.module:function` that returns any nn.Module; see docs/extending.md."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    """How attention stays inside documents, with data.document_mask (see docs/data.md). varlen:
    FlashAttention of torch, with the boundaries of documents. flex: FlexAttention, compiled, on
    GPUs only. sdpa: one additive mask. auto: the first of these that works, with FlashAttention-3
    or -4 if it is installed; on CPUs sdpa for bf16 up to 256 tokens."""


@dataclass(frozen=True, kw_only=True)
class SourceSection:
    """One prepared data set of the mixture."""

    path: str
    """Directory written by `perdure data prepare`, or the URL of its copy in an object store, such
    as "s3://bucket/folder"."""

    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the sequences taken from this source, relative to the other weights. With `stages`,
    each stage sets the weights."""

    name: str | None = None
    """Name of this source in `stages`. Default: the last part of `path`."""

    @property
    def called(self) -> str:
        """The name of this source in `stages`."""
        return self.name or self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class DataStageSection:
    """A part of the run with its own mixture of sources (see docs/data.md)."""

    until: Position | None = None
    """Sequences of the whole run after which the next stage begins: steps x `batch.global_batch`.
    The last stage has no `until`."""

    weights: dict[str, Annotated[float, Gt(0)]] | None = None
    """Name of a source → share of the sequences, relative to the other weights. A source that is
    not named pauses, and later continues where it stopped. Default: the weights of the stage
    before."""

    append: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a source → names of further data sets in `sources`, whose sequences are added to it
    from this stage on."""


@dataclass(frozen=True, kw_only=True)
class DataCacheSection:
    """Copies of the shards of `sources` in an object store, on a local disk of each node. They are
    made in the background, if all of them fit, and shared by the ranks of the node."""

    directory: str
    """Directory on a local disk. Copies stay there for the next run."""

    size: int | str
    """Largest number of bytes that copies may take, as 2000000000000 or "2 TB"."""

    def __post_init__(self) -> None:
        if self.most_bytes < 1:
            raise ValueError("size must be at least one byte")

    @property
    def most_bytes(self) -> int:
        """`size` in bytes."""
        return number_of_bytes("size", self.size)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The training data and its order: `sources` and `seq_len`, or `factory`."""

    sources: tuple[SourceSection, ...] = ()
    """Prepared data sets. The order of samples is a function of seed and position."""

    seq_len: int = 0
    """Tokens per sequence."""

    stages: tuple[DataStageSection, ...] = ()
    """Mixtures of `sources` that follow each other. A sample is repeated only in the next epoch of
    its source, and none is skipped, wherever a stage ends. Empty: one mixture for the whole run."""

    factory: str | None = None
    """`package.module:function` that returns any map-style data set, or a stream with an order of
    its own; see docs/extending.md."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    pack: Literal["auto", "whole", "stream"] = "auto"
    """How documents become sequences. whole: documents are not cut; a sequence holds as many as
    fit, and padding. stream: documents follow each other, and are cut where a sequence ends. auto:
    whole for chats, stream for other data."""

    document_mask: bool = True
    """Attention stays inside a document when several are packed into one sequence."""

    validation_sequences: Positive = 64
    """Sequences of the fixed validation set; fewer if the validation split is smaller. The
    validation set of `factory` is used whole."""

    reader: Literal["auto", "mmap", "pread", "ram"] = "auto"
    """How shards are read. auto: pread on network filesystems, mmap elsewhere."""

    ahead: Positive = 8
    """Micro-batches whose tokens a rank requests before it reads them, for `sources` in an object
    store. The rank's `workers` divide these, and each worker reads four micro-batches before they
    are used."""

    cache: DataCacheSection | None = None
    """Copies of whole shards on a local disk, for `sources` in an object store. Default: none."""

    workers: Count = 0
    """Background loader processes per rank. 0: the training process reads, which is fastest for
    prepared tokens on a local disk."""


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """Sequences per optimizer step, equal for any number of machines."""

    global_batch: Positive
    """Sequences per optimizer step over all ranks."""

    micro_batch: Positive | Literal["auto"] = 1
    """Largest number of sequences that one rank holds in one forward pass. A larger share of the
    global batch is computed in several passes (gradient accumulation). auto: as many as `perdure
    plan` finds room for, halved when memory runs out (see docs/strategies.md); not with
    run.determinism: exact."""

    balance: Literal["equal", "speed"] = "equal"
    """equal: ranks get equally many sequences. speed: in proportion to their measured speed, for
    machines of unequal speed (see docs/strategies.md). The global batch, the order of samples and
    the loss stay the same."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Optimizer settings for the parameters whose names match a pattern."""

    match: str
    """Pattern of parameter names for `fnmatch`, such as `*.norm.*`. The first group that matches a
    parameter applies."""

    lr_scale: Amount = 1.0
    """Factor on the learning rate of the schedule."""

    weight_decay: Amount | None = None
    """Replaces `optimizer.weight_decay` for these parameters, whatever their shape."""


@dataclass(frozen=True, kw_only=True)
class MuonSection:
    """Muon (Jordan et al. 2024), with the mathematics of torch.optim.Muon."""

    momentum: Share = 0.95
    """Decay of the running mean of the gradient."""

    nesterov: bool = True
    """Mix the gradient into the running mean once more (Nesterov momentum)."""

    ns_steps: Annotated[int, Ge(1), Lt(100)] = 5
    """Newton-Schulz iterations, in bfloat16."""

    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the quintic polynomial that each iteration applies to the singular values."""

    eps: Amount = 1e-7
    """Lower bound of the norm by which a matrix is divided before the iterations."""

    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix of A rows and B columns. match_rms_adamw: 0.2
    sqrt(max(A, B)), so that one rate serves AdamW too (Liu et al. 2025). original: sqrt(max(1, A /
    B))."""

    adamw: tuple[str, ...] = (
        "*embed*", "*wte*", "*wpe*", "*lm_head*", "head.*", "*.head.*", "*_bias",
    )  # fmt: skip
    """Patterns of the names of matrices that AdamW updates: embeddings, output heads, and stacked
    biases of experts."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The update of weights from gradients (see docs/extending.md)."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW (Loshchilov & Hutter 2019), fused. muon: Muon for matrices, AdamW for
    embeddings, output heads and all other parameters."""

    factory: str | None = None
    """`package.module:function`, or a class, that returns a torch.optim.Optimizer instead. It is
    called with the parameter groups, and `factory_options` by keyword. The schedule multiplies the
    learning rates of the optimizer's groups."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    lr: Amount
    """Peak learning rate."""

    betas: tuple[Share, Share] = (0.9, 0.95)
    """For AdamW: decay of the running means of gradient and squared gradient."""

    eps: Amount = 1e-8
    """For AdamW: added to the root of the second moment."""

    weight_decay: Amount = 0.1
    """Decoupled decay of matrices and embeddings; norms, biases and other vectors have none. An
    optimizer factory gets it in the parameter groups, unless `factory_options` has a
    `weight_decay`."""

    clip_norm: Amount = 1.0
    """Largest global gradient norm; 0 does not clip."""

    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the moments of adamw and muon, in 4, 2 or 1.03 bytes an element. bf16 is rounded
    stochastically. int8 has a scale for each 128 elements of a row; for parameters whose rows are
    no multiple of 128 the moments are bf16. See docs/strategies.md."""

    groups: tuple[ParameterGroup, ...] = ()
    """Groups of parameters with another learning rate or weight decay."""

    muon: MuonSection | None = None
    """Settings of optimizer.name: muon."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Learning rate over the run: linear warm-up, then a shape."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """wsd: warm-up, stable, then linear decay over the last `decay_steps`."""

    warmup_steps: Count | Share = 0
    """Steps of linear warm-up from 0 to optimizer.lr. Below 1: share of the run, rounded up; 0.03
    is 3 % of its steps."""

    decay_steps: Count | Share = 0
    """Steps of the final decay, for wsd only. Below 1: share of the run, rounded down."""

    min_lr_ratio: Amount = 0.1
    """Learning rate at the last step as a share of optimizer.lr (cosine, linear, wsd)."""

    factory: str | None = None
    """`package.module:function` instead of a name. It is called with `steps`, `lr` and
    `factory_options` by keyword, and returns a pure function from a step (1 to `steps`) to its
    learning rate."""

    factory_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def lengths(self, steps: int) -> tuple[int, int]:
        """Return (steps of warm-up, steps of the final decay) in a run of `steps` steps."""
        warmup, decay = (
            # The decimal fraction as written: 0.07 of 100 steps is 7, but the float 0.07 gives a
            # little more.
            Fraction(repr(length)) * steps if isinstance(length, float) else length
            for length in (self.warmup_steps, self.decay_steps)
        )
        if isinstance(warmup, Fraction):
            # At least one step follows the warm-up.
            warmup = min(math.ceil(warmup), steps - 1)
        if isinstance(decay, Fraction):
            decay = max(math.floor(decay), 1) if decay else 0
        return warmup, decay


@dataclass(frozen=True, kw_only=True)
class StrategySection:
    """How the model is distributed over ranks."""

    name: Literal["ddp", "fsdp"] = "fsdp"
    """ddp: every rank holds everything. fsdp: shards by `sharding` (FSDP2)."""

    sharding: Sharding | None = None
    """What fsdp shards; FULL_SHARD unless set. NO_SHARD: nothing. OPTIMIZER_STATE: the optimizer
    state (ZeRO-1). SHARD_GRAD_OP: also gradients (ZeRO-2). FULL_SHARD: also parameters (ZeRO-3).
    HYBRID_SHARD: everything, inside groups of `shard_size` ranks."""

    zero: Literal[0, 1, 2, 3] | None = None
    """Synonym of `sharding`, by DeepSpeed's numbers; set only one of the two."""

    shard_size: int | None = None
    """Ranks per shard group for HYBRID_SHARD; with `tp` the number of tp groups. Default: the ranks
    of one node."""

    tp: Positive = 1
    """Ranks of a node that compute each layer together, by heads and columns (tensor parallelism).
    Each such group counts as one data-parallel rank of `name` and `sharding`. See
    docs/parallelism.md."""

    sequence_parallel: bool = False
    """With `tp`: cut the activations between the layers along the sequence as well."""

    pp: Positive = 1
    """Ranks among which the layers are cut into stages (pipeline parallelism). Micro-batches pass
    through the stages. Each pipeline counts as one data-parallel rank of `name` and `sharding`. See
    docs/parallelism.md."""

    pp_schedule: Annotated[
        PipelineSchedule, BeforeValidator(lambda name: str(name).lower())  # papers write 1F1B
    ] = "1f1b"
    """Order of the passes with `pp`. gpipe: all forward before all backward. 1f1b: alternating.
    interleaved_1f1b: alternating, with several stages per rank. zero_bubble: alternating, with
    gradients of weights computed when a rank would wait."""

    pp_stages_per_rank: Positive = 1
    """Stages on each rank of `pp`, for interleaved_1f1b."""

    cp: Positive = 1
    """Ranks of a node that each hold a part of every sequence, for long sequences (context
    parallelism). Parameters are sharded over them as over data-parallel ranks. See
    docs/parallelism.md."""

    ep: Positive = 1
    """Ranks that divide the experts of each layer (expert parallelism), among the ranks over which
    `sharding` shards parameters. Tokens are sent to their experts. See docs/parallelism.md."""

    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where sharded parameters, gradients and optimizer state are kept, and the optimizer runs: on
    the device, in host memory, or in files on a local disk (see docs/strategies.md)."""

    offload_directory: str | None = None
    """Directory on a local disk, for offload: nvme. Each rank takes 16 bytes there for each
    parameter of its shard, until its process ends."""

    reduce_every_pass: bool = False
    """Reduce-scatter gradients after every accumulation pass instead of once per step. Ranks then
    send more, but no rank holds unsharded gradients between passes."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: recompute each block in the backward pass. selective: keep the results of matrix
    products and attention, recompute all other operations."""

    compile: bool = False
    """torch.compile each block. The first step then takes longer."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Number formats. Trained parameters are float32 unless `master` says otherwise; a factory's
    parameters in bf16 or fp16 are converted."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format of activations and matrix products (and of gathered parameters under fsdp).
    Gradients are reduced in float32. fp16 uses a dynamic loss scale."""

    master: Literal["fp32", "bf16_stochastic"] = "fp32"
    """Format of the weights that are updated. bf16_stochastic: bf16, rounded stochastically, in 2
    bytes a parameter; reduced gradients also take 2. See docs/strategies.md."""

    matmul: Literal["fp8_rowwise", "fp8_tensorwise", "mxfp8"] | None = None
    """Multiply in 8 bits in the linear layers of the blocks, through torchao. There is one scale
    per row, per tensor, or for mxfp8 per 32 elements. fp8 needs compute capability 8.9, mxfp8 10.0.
    Under fsdp fp8_tensorwise also sends weights in 8 bits."""

    loss_scale: Annotated[float, Ge(1)] = 65536.0
    """First loss scale for fp16; halved on overflow, doubled after 2000 good steps."""


@dataclass(frozen=True, kw_only=True)
class AlertSection:
    """Runs a command or calls a webhook when a condition begins to hold, and again only after the
    condition has ended."""

    when: str
    """The condition. `NAME > NUMBER` or `NAME < NUMBER`, with a name in docs/metrics.md. `failure`:
    ranks were restarted because of a failure. `no step for 10 min` (s, min, h): there was no record
    for that long."""

    run: str | None = None
    """Command for `sh -c`, with the message in the environment variable PERDURE_ALERT."""

    post: str | None = None
    """URL to which `{"text": …}` is posted, the format of Slack, Mattermost and Discord
    (`…/slack`). `env:NAME` reads a secret URL from the environment, as recipes are stored in
    run.dir."""


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """Destinations of metrics and events besides the console and metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events to <run.dir>/tensorboard."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; a restarted run continues under the same run id. WANDB_MODE in the
    environment overrides offline and online; see docs/metrics.md."""

    prometheus: str | None = None
    """Path of a file, NAME.prom, for the textfile collector of Prometheus's node exporter. It is
    replaced at each record, by rank 0."""

    sinks: tuple[str, ...] = ()
    """Functions of your own, each as `package.module:function`, which get the records that
    TensorBoard gets; see docs/extending.md."""

    hooks: tuple[str, ...] = ()
    """Functions of your own, each as `package.module:function`, called when a run starts, steps,
    validates, saves, restarts and ends; see docs/extending.md."""

    alerts: tuple[AlertSection, ...] = ()
    """Conditions under which a process beside rank 0 runs a command or calls a webhook; see
    docs/metrics.md."""

    project: str = "perdure"
    """Weights & Biases project."""

    name: str | None = None
    """Name of the run in trackers. Default: the last part of run.dir."""

    profile_steps: Count = 0
    """Steps to run under the profiler. Each rank writes its trace and a record of its memory to
    <run.dir>/profile (see docs/metrics.md). These steps are slower, and excluded from the reported
    speed. 0: none."""

    profile_after: Positive = 4
    """Steps after a start or restart before the first profiled step."""

    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device at precision.dtype, for MFU. Known for common GPUs;
    elsewhere MFU is left out unless this is set."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, by section."""

    run: RunSection
    model: ModelSection
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    schedule: ScheduleSection = ScheduleSection()
    strategy: StrategySection = StrategySection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    tracking: TrackingSection = TrackingSection()

    # Applies to nested sections too: unknown keys, infinity and NaN are errors.
    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "allow_inf_nan": False}

    @property
    def checkpoint_directory(self) -> str:
        """Path or URL of the run's checkpoints."""
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
    def paths(self) -> dict[str, str]:
        """Recipe key → path or URL that it names, of everything that all nodes read or write."""
        named = {
            "run.dir": self.run.dir,
            "checkpoint.directory": self.checkpoint.directory,
            "model.init_from": self.model.init_from,
            **{f"data.sources.{n}.path": one.path for n, one in enumerate(self.data.sources)},
        }
        return {key: path for key, path in named.items() if path}

    @property
    def own_code(self) -> dict[str, str]:
        """Recipe key of user's code that changes the results of steps → `package.module:name`."""
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
        """Whether results must be bitwise equal at every world size."""
        return self.run.determinism == "exact"

    @property
    def micro_batch(self) -> int:
        """`batch.micro_batch`, or 1 if it is auto and not resolved yet."""
        return 1 if self.batch.micro_batch == "auto" else self.batch.micro_batch

    @property
    def draws(self) -> bool:
        """Whether a pass may draw random numbers: a user's model or family, and an adapter, may
        have dropout. Bundled decoders have none."""
        model = self.model
        dropout = model.adapter and model.adapter.dropout
        return bool(model.factory or model.family or dropout)

    @property
    def gathers_twice(self) -> bool:
        """Whether FSDP frees parameters after forward and gathers them again for backward
        (ZeRO-3)."""
        return self.sharding in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def sharding(self) -> Sharding:
        """What FSDP shards; DDP counts as NO_SHARD."""
        if self.strategy.name == "ddp":
            return "NO_SHARD"
        return self.strategy.sharding or "FULL_SHARD"
