"""What `perdure plan` predicts is what a run holds."""

import dataclasses
import json
from pathlib import Path
from statistics import mean

import pytest
import torch

from elastic.world import World
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak
from tests.trainer.plan.rank import measure
from tests.trainer.plan.recipes import BLOCKS, EP, EVEN, PP, TP
from trainer.models.hf import config_json
from trainer.plan import predict
from trainer.plan.blueprint import read_blueprint
from trainer.plan.search import (
    RECOMPUTES,
)
from trainer.plan.trace import trace
from trainer.recipe import load_recipe

ROOT = Path(__file__).parents[3]
FULL = f"{BLOCKS} strategy.activation_checkpointing=full"
FEW_TOKENS = f"{FULL} data.seq_len=8"
HYBRID = "strategy.sharding=HYBRID_SHARD strategy.shard_size=2"
PAIRS = "objective.name=simpo"
MUON_OFFLOAD = "optimizer.name=muon strategy.offload=cpu"
ROWS = "model.architecture.hidden_size=128 optimizer.state_dtype=int8"
ROUNDED = f"{FULL} {ROWS} precision.master=bf16_stochastic"
CASES = {
    1: [
        "strategy.zero=2 precision.dtype=fp32 batch.micro_batch=8",
        f"{FEW_TOKENS} strategy.zero=3 batch.micro_batch=8",
        f"{FULL} strategy.zero=3 strategy.reduce_every_pass=true",
        "strategy.zero=3 optimizer.name=muon",
        f"strategy.zero=3 {MUON_OFFLOAD}",
        "strategy.name=ddp precision.dtype=fp32 optimizer.name=muon",
        f"{FULL} {ROWS} strategy.name=ddp precision.dtype=fp32",
        f"{ROUNDED} strategy.name=ddp",
    ],
    2: [
        "strategy.name=ddp",
        "strategy.zero=1 strategy.activation_checkpointing=selective",
        PAIRS,
        "strategy.zero=3 strategy.reduce_every_pass=true batch.micro_batch=1",
        f"{FULL} strategy.zero=3 optimizer.name=muon",
        f"{FULL} strategy.zero=3 {MUON_OFFLOAD}",
        "strategy.name=ddp optimizer.name=muon",
        "strategy.zero=1 optimizer.name=muon",
        f"{FULL} {ROWS} strategy.zero=1",
        f"{ROUNDED} strategy.zero=2",
        f"{ROUNDED} strategy.zero=3",
    ],
    3: [
        "strategy.zero=3",
        "strategy.zero=3 optimizer.name=muon",
        f"strategy.zero=3 {MUON_OFFLOAD}",
    ],
    4: [
        f"{HYBRID} batch.micro_batch=1 batch.global_batch=12 strategy.reduce_every_pass=true",
        "strategy.zero=2 optimizer.name=muon",
        f"{HYBRID} optimizer.name=muon",
        f"{HYBRID} {MUON_OFFLOAD} strategy.reduce_every_pass=true",
        f"{FULL} strategy.zero=1",
    ],
}

FP32 = "precision.dtype=fp32"
INTERLEAVED = "strategy.pp_schedule=interleaved_1f1b strategy.pp_stages_per_rank=2"
EARLY = (
    f"{PP} strategy.pp_schedule=interleaved_1f1b strategy.pp_stages_per_rank=2 "
    "strategy.reduce_every_pass=true"
)
ZERO_BUBBLE = "strategy.pp_schedule=zero_bubble strategy.zero=2"
FEW_ROWS = (
    "data.seq_len=8 model.architecture.vocab_size=2067 model.architecture.num_hidden_layers=4"
)
FOUR_LAYERS = "model.architecture.num_hidden_layers=4"
ONE_BLOCK = "model.architecture.num_hidden_layers=2 batch.micro_batch=1 data.seq_len=32"
FEW = f"{BLOCKS} {FEW_ROWS}"
# Many rows of one weight on two stages: the peak is at its gradient on the first of them.
TIED = (
    f"{PP} model.architecture.tie_word_embeddings=true model.architecture.vocab_size=8192 "
    "data.seq_len=32 batch.micro_batch=1"
)
PARALLEL = [
    (2, [f"{TIED} {FP32}", f"{TIED} {FP32} {INTERLEAVED}", TIED, f"{TIED} {INTERLEAVED}"]),
    (
        2,
        [
            PP,
            f"{PP} model.architecture.tie_word_embeddings=true",
            f"{PP} batch.global_batch=16 strategy.zero=2 strategy.activation_checkpointing=full",
            f"{PP} strategy.pp_schedule=interleaved_1f1b strategy.pp_stages_per_rank=2",
            f"{PP} strategy.pp_schedule=gpipe batch.micro_batch=1",
            "strategy.cp=2",
        ],
    ),
    (2, [f"{EARLY} strategy.zero=2", f"{EARLY} strategy.zero=3"]),
    (
        2,
        [
            f"{PP} {ZERO_BUBBLE}",
            f"{PP} {ZERO_BUBBLE} batch.micro_batch=1",
            f"{PP} {ZERO_BUBBLE} strategy.activation_checkpointing=full",
            f"{PP} {ZERO_BUBBLE} {BLOCKS} {FEW_ROWS}",  # gradients of weights are most
        ],
    ),
    (
        2,  # nobody to shard with
        [
            f"{PP} {FP32}",
            f"{PP} {FP32} strategy.pp_schedule=gpipe batch.micro_batch=1",
            f"{PP} {FP32} strategy.pp_schedule=interleaved_1f1b strategy.pp_stages_per_rank=2",
            f"{PP} {FP32} {BLOCKS} batch.global_batch=16",
            f"{PP} {FP32} strategy.activation_checkpointing=full",
            f"{PP} {FP32} model.architecture.tie_word_embeddings=true",
        ],
    ),
    (
        2,
        [
            f"{PP} {FP32} {ZERO_BUBBLE}",
            f"{PP} {FP32} {ZERO_BUBBLE} batch.micro_batch=1",
            f"{PP} {FP32} {ZERO_BUBBLE} {BLOCKS} {FEW_ROWS}",
            f"{PP} {FP32} {ZERO_BUBBLE} {ONE_BLOCK}",
        ],
    ),
    (2, [f"{TP} strategy.sequence_parallel=true", TP, f"{TP} {EVEN} {PAIRS}"]),
    (2, [f"{TP} strategy.name=ddp strategy.activation_checkpointing=full"]),
    (4, [f"{PP} {MUON_OFFLOAD}", f"{TP} {EVEN} {MUON_OFFLOAD}"]),
    (4, [f"{PP} {INTERLEAVED} {FEW} strategy.zero=3 strategy.offload=cpu"]),
    (4, [f"{TP} {PP}", f"{TP} {EVEN}", f"{PP} batch.global_batch=16", "strategy.cp=2"]),
    (4, [f"strategy.pp=4 {ZERO_BUBBLE} batch.micro_batch=1", f"{TP} {PP} {ZERO_BUBBLE}"]),
    (8, [f"{TP} {PP} {EVEN} batch.global_batch=16"]),
    (8, [f"{TP} {EARLY} {EVEN} batch.global_batch=16 strategy.zero=2"]),
]
# Each token goes to all of them: among so few blocks a router's favourites make 5 %.
EVENLY = f"{EP} model.architecture.options.num_experts_per_tok=8"
EXPERTS = [
    (
        2,
        [
            f"{EP} strategy.zero=3",
            f"{EP} strategy.zero=2",
            f"{EP} strategy.zero=3 strategy.activation_checkpointing=full",
            f"{EP} strategy.zero=3 batch.micro_batch=1 strategy.reduce_every_pass=true",
            f"{EP} {FULL} strategy.zero=3",
        ],
    ),
    (4, [f"{EP} strategy.zero=3", f"{EP} {HYBRID}", f"{EP} {FULL} strategy.zero=3"]),
    (4, [f"{EVENLY} {PP} strategy.zero=2", f"{EVENLY} {PP} {ZERO_BUBBLE}"]),
    (
        4,
        [
            f"{EP} {TP} strategy.zero=3",
            f"{EP} {TP} strategy.sequence_parallel=true",
            f"{EP} strategy.cp=2",
        ],
    ),
]


# Over an embedding that is frozen, and in an adapter's fewer and smaller gradients.
LORA = "model.architecture=null model.init_from=base model.adapter.rank=8"
WIDE = f"{LORA} {FP32} model.adapter.base=fp32"
NF4 = f"{LORA} model.init_from=blocks model.adapter.base=nf4"
ADAPTERS = [
    (1, [LORA, f"{WIDE} batch.micro_batch=8", f"{LORA} strategy.activation_checkpointing=full"]),
    (1, [f"{NF4} strategy.name=ddp strategy.activation_checkpointing=full", f"{NF4} {FP32}"]),
    (2, [f"{NF4} strategy.zero=3", f"{NF4} {TP}", f"{NF4} {PP}"]),
    (
        2,
        [
            f"{LORA} strategy.zero=3",
            f"{LORA} strategy.zero=2 strategy.activation_checkpointing=full",
            f"{LORA} strategy.name=ddp",
            f"{WIDE} strategy.zero=1",
            f"{LORA} strategy.zero=3 strategy.reduce_every_pass=true batch.micro_batch=1",
            f"{LORA} strategy.zero=3 model.adapter.also=[lm_head]",
            f"{LORA} {TP}",
            f"{LORA} {PP}",
            f"{WIDE} {PP}",
            f"{LORA} {PP} {ZERO_BUBBLE}",
            f"{LORA} strategy.cp=2",
            f"{LORA} strategy.zero=3 strategy.offload=cpu",
        ],
    ),
    (4, [f"{LORA} {HYBRID}", f"{LORA} {TP} {PP}"]),
]


def world_of(ranks, rank):
    """As this rank sees it."""
    return World(
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, nodes=1, round=0,
        generation=0, cause=None, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES[2][1:2]),
        *(pytest.param(ranks, cases, marks=soak) for ranks, cases in CASES.items()),
        *(
            pytest.param(ranks, cases, marks=soak)
            for ranks, cases in (*PARALLEL, *EXPERTS, *ADAPTERS)
        ),
    ],
)
def test_a_run_holds_what_was_predicted(recipe_file, ranks, cases, monkeypatch):
    base = load_recipe(recipe_file).model.architecture
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    blocks = dataclasses.replace(base, **sizes)  # whole ones of nf4, also for tp=2
    for name, architecture in (("base", base), ("blocks", blocks)):
        (recipe_file.parent / name).mkdir()
        config = json.dumps(config_json(architecture))
        (recipe_file.parent / name / "config.json").write_text(config)
    monkeypatch.chdir(recipe_file.parent)
    recipes = {case: load_recipe(recipe_file, case.split(" ")) for case in cases}

    def work(rank):
        return [measure(recipe, world_of(ranks, rank)) for recipe in recipes.values()]

    everyone = run_ranks(ranks, work, recipe_file.parent)
    assert all(isinstance(measured, list) for measured in everyone), everyone
    for number, (case, recipe) in enumerate(recipes.items()):
        measured = {kind: max(m[number][kind] for m in everyone) for kind in everyone[0][number]}
        predicted = dataclasses.asdict(predict(recipe, ranks, ranks))
        for kind in ("parameters", "gradients", "optimizer_state", "buffers"):
            assert predicted[kind] == measured[kind], (case, kind)
        if ranks == 2 and PP in case:  # messages of the pipeline are all that is sent
            assert predicted["communication_bytes"] == measured["communication_bytes"], case
        # Equal when this was written, of model parallelism to 1 %; other versions of torch may
        # buffer otherwise.
        most = 0.03 if any(key in case for key in (TP, PP, "cp=2")) else 0.01
        if LORA in case:  # the plan takes the first block for one whose input has a gradient
            most = 0.08
        if EP in case:  # the plan's router is even; this one's rows are so in the mean of two ranks
            pairs = zip(everyone[::2], everyone[1::2], strict=True)
            both = [[of_rank[number]["activations"] for of_rank in pair] for pair in pairs]
            measured["activations"] = max(map(mean, both))
        assert predicted["activations"] == pytest.approx(measured["activations"], rel=most), case
        most = 0.05 if LORA in case else 0.03
        if NF4 in case and PP in case:  # the plan said 5.5 % more when this was written
            most = 0.06
        assert predicted["peak"] == pytest.approx(measured["peak"], rel=most), case


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(1, f"{BLOCKS} strategy.zero=3", marks=soak),
        *(
            pytest.param(*case, marks=soak)
            for case in (
                (4, f"{BLOCKS} {HYBRID} strategy.activation_checkpointing=full"),
                (2, PP),
                (2, f"{PP} {FP32} {BLOCKS}"),
                (2, f"{PP} {ZERO_BUBBLE}"),
                (2, f"{EARLY} {BLOCKS} {FEW_ROWS} strategy.zero=2"),
                (4, f"{PP} {BLOCKS} {FEW_ROWS} strategy.zero=3"),
                (4, f"{TP} {EVEN} {PP} {FP32}"),
                (2, f"{EP} {FULL} strategy.zero=3"),
                (4, f"{PP} {INTERLEAVED} {FEW} strategy.zero=3"),
                (4, f"{PP} {INTERLEAVED} {BLOCKS} {FOUR_LAYERS} strategy.zero=3"),
                (4, f"{PP} {INTERLEAVED} {FEW} {FP32} strategy.zero=3"),
                (2, f"{PP} {INTERLEAVED} strategy.activation_checkpointing=full"),
                (4, f"{EARLY} {FEW} strategy.zero=2"),
                (2, f"{PP} {ZERO_BUBBLE} {FEW}"),
                (4, f"{PP} {ZERO_BUBBLE} {FEW}"),
                (4, f"{TP} {FEW} model.architecture.vocab_size=2068 strategy.zero=2"),
                (4, f"{EVENLY} {FEW} strategy.zero=3"),
                (4, f"{EVENLY} {PP} {FEW} strategy.zero=2"),
            )
        ),
    ],
)
def test_a_run_on_files_holds_what_was_predicted(recipe_file, ranks, case):
    """Pages of the files are counted neither here nor there."""
    offload = ["strategy.offload=nvme", f"strategy.offload_directory={recipe_file.parent}"]
    recipe = load_recipe(recipe_file, [*case.split(" "), *offload])

    def work(rank):
        return measure(recipe, world_of(ranks, rank))

    measured = run_ranks(ranks, work, recipe_file.parent)
    predicted = predict(recipe, ranks, ranks)
    for kind, tolerance in (("activations", 0.03 if TP in case else 0.01), ("peak", 0.03)):
        most = max(of_one[kind] for of_one in measured)
        assert getattr(predicted, kind) == pytest.approx(most, rel=tolerance), kind


@soak
def test_deeper_models_and_larger_batches_need_what_a_whole_trace_says(recipe_file):
    """Two blocks are traced and the rest is multiplied: as if all were traced."""
    recipe = load_recipe(recipe_file, ["strategy.activation_checkpointing=full"])
    short = read_blueprint(recipe)
    whole = dataclasses.replace(short, traced=short.model)
    for recompute in RECOMPUTES:
        for device in ("cpu", "cuda") if recompute == "none" else ("cuda",):
            pair = [
                trace(blueprint, 3, recompute, torch.bfloat16, False, device)
                for blueprint in (short, whole)
            ]
            ours, theirs = map(dataclasses.asdict, pair)
            for key in (
                "saved",
                "head_forward",
                "head_backward",
                "last_backward",
                "first_backward",
                "after_block",
                "tail_backward",
            ):
                assert ours[key] == theirs[key], (recompute, device, key)
            for key in ("forward", "backward"):
                flops = [sum(work[0] for work in trace[key]) for trace in (ours, theirs)]
                assert flops[0] == flops[1], (recompute, device, key)
