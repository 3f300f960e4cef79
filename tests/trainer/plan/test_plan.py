"""What `perdure plan` says and recommends; test_measured.py holds it against runs."""

import dataclasses
import json
import math
import re
import shlex
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml

from tests.distributed.jobs import soak
from tests.trainer.plan.recipes import BLOCKS, EP, EVEN, PP, RECIPE, TP
from trainer.cli.main import main
from trainer.models.hf import config_json
from trainer.parallel import expert, tensor
from trainer.parallel.parallelize import DTYPES
from trainer.plan import predict
from trainer.plan.blueprint import layout_of, read_blueprint, stage_of, trained_of
from trainer.plan.costs import (
    DISK_BANDWIDTH,
    HOST_BANDWIDTH,
    PAGEABLE_SHARE,
    PLATEAU,
    TAKEN_SHARE,
    describe_machine,
)
from trainer.plan.imagined_ranks import PlannedRanks, imagined_ranks
from trainer.plan.search import (
    ROOM,
    _enough_nodes,
    _layouts,
    largest_micro_batch,
    make_plan,
)
from trainer.plan.times import PlannedCollective, exchange_seconds, traffic_of
from trainer.plan.trace import trace
from trainer.recipe import RecipeError, StrategySection, load_recipe
from trainer.tools.plan_text import plan_json, plan_text

ROOT = Path(__file__).parents[3]


def test_large_models_need_no_machine():
    """Llama-3.1-70B on 64 GPUs, without data and without memory for a single block."""
    strategy = "sharding: FULL_SHARD, reduce_every_pass: true, activation_checkpointing: full"
    recipe = load_recipe(ROOT / "recipes/llama3_70b.yaml", [f"strategy={{{strategy}}}"])
    machine = describe_machine("8xH100", 8, "bf16", net="8x400Gb/s", storage="10GB/s")
    prediction = predict(
        recipe, 64, 8, machine=machine, device="cuda", blueprint=published("llama3_70b")
    )
    parameters = 70_553_706_496
    assert prediction.parameters == pytest.approx(4 * parameters / 64, rel=1e-4)
    assert prediction.optimizer_state == pytest.approx(8 * parameters / 64, rel=1e-4)
    assert prediction.checkpoint_bytes == 12 * parameters
    assert prediction.checkpoint_seconds == 12 * parameters / 10e9
    # Every pass gathers bfloat16 twice, except embedding and head, and reduces float32 once; a rank
    # sends all but its own part.
    assert prediction.passes == 8
    sent = 8 * ((2 * 2 + 4) * parameters - 2 * 2 * 128256 * 8192) * 63 / 64
    assert prediction.communication_bytes == pytest.approx(sent, rel=1e-3)
    # Full recomputation: four forward passes' worth of work for three that MFU counts.
    assert 0 < prediction.mfu < 0.7 * 3 / 4 * 1.05


def test_all_that_a_strategy_of_layers_sends_is_recorded():
    """Or it fails: none goes uncounted. Of experts the rows are recorded, not their counts."""
    sent = []
    x, group = torch.empty(6), PlannedRanks(3)
    with imagined_ranks(lambda *message: sent.append(message), None):
        tensor.dist.all_to_all_single(torch.empty(6), x, group=group)
        tensor.dist.all_reduce(x, group=group)
        expert.dist.all_to_all_single(torch.empty(6), x, group=group)
        with pytest.raises(AttributeError):
            tensor.dist.all_reduce(x)
        with pytest.raises(AttributeError):
            tensor.dist.broadcast(x, 0, group=group)
    assert sent == [("layers", 16), ("layers", 32, 2)]


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen2", 32 * (4096 + 2 * 1024)),  # biases
        ("mistral", 0),
        ("olmo2", 32 * (4096 + 1024)),  # norms of all heads
        ("smollm3", 0),
        ("gemma3_text", 32 * 2 * (4096 + 128)),  # norms after as well, and of queries and keys
        ("phi3", 0),
        (
            "gpt_oss",
            # biases and sinks, 127 more experts, their biases, and routers
            32 * (4096 + 2 * 1024 + 4096 + 32)
            + 32 * (127 * 3 * 4096 * 14336 + 128 * (2 * 14336 + 4096) + 128 * 4097),
        ),
    ],
)
def test_parameters_of_each_family_are_counted(model_type, more):
    changes = [
        f"model.architecture.model_type={model_type}",
        "model.architecture.rope_scaling=null",
    ]
    recipe = load_recipe(ROOT / "recipes/llama3_8b.yaml", changes)
    assert read_blueprint(recipe).parameter_count == 8_030_261_248 + more


def test_a_window_is_less_work_and_a_fused_product_is_cut():
    """Sequences of 8,192 tokens, of which each sees 1,024 at most."""
    found = {}
    for window in (1024, 8192):
        words = ["model_type=phi3", "rope_scaling=null", f"options.sliding_window={window}"]
        given = [f"model.architecture.{word}" for word in words]
        given += ["data.seq_len=8192", "strategy.tp=2"]
        recipe = load_recipe(ROOT / "recipes/llama3_8b.yaml", given)
        blueprint = read_blueprint(recipe)
        flops = blueprint.flops_per_token
        assert flops == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * window
        machine = describe_machine("8xH100", 8, "bf16")
        found[window] = predict(recipe, 8, 8, machine=machine, device="cuda", blueprint=blueprint)
    assert found[1024].seconds_per_step < 0.95 * found[8192].seconds_per_step
    assert found[1024].parameters == pytest.approx(4 * 8_030_261_248 / 8, rel=1e-3)


@cache
def published(name):
    """The model of a recipe, of which traces are remembered."""
    return read_blueprint(load_recipe(ROOT / f"recipes/{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "nodes", "overrides"),
    [
        ("qwen3_8b", 1, []),
        ("llama3_8b", 1, []),
        ("llama3_70b", 16, []),
        ("llama3_70b", 4, []),
        ("llama3_405b", 24, []),
        ("llama3_405b", 128, []),
        (
            "llama3_405b",
            8,
            ["strategy.tp=1", "strategy.sequence_parallel=false", "strategy.offload=cpu"],
        ),
    ],
)
def test_recipes_fit_where_they_say(name, nodes, overrides):
    """Nodes of eight GPUs sold with 80 GB, and the room that the plan leaves."""
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml", overrides)
    machine = describe_machine("8xH100", nodes, "bf16")
    prediction = predict(
        recipe, 8 * nodes, 8, machine=machine, device="cuda", blueprint=published(name)
    )
    assert prediction.peak < (1 - ROOM) * machine.gpu.memory


def test_a_gpu_of_24_gb_takes_qlora(tmp_path):
    """A weight under an adapter takes 4.5 bits; what was published in 16 would not fit."""
    published = load_recipe(ROOT / "recipes/qwen3_8b.yaml").model.architecture
    (tmp_path / "config.json").write_text(json.dumps(config_json(published)))
    given = [f"model.init_from={tmp_path}", "batch.micro_batch=1"]
    recipe = load_recipe(ROOT / "recipes/qwen3_8b_qlora_24gb.yaml", given)
    machine = describe_machine("1xRTX4090", 1, "bf16")
    blueprint = read_blueprint(recipe)
    prediction = predict(recipe, 1, 1, machine=machine, device="cuda", blueprint=blueprint)
    assert prediction.peak < (1 - ROOM) * machine.gpu.memory
    trained = sum(shape.weights for unit in blueprint.units for shape in trained_of(unit))
    in_nf4 = sum(s.weights for unit in blueprint.units for s in unit if not s.number)
    others = blueprint.parameter_count - trained - in_nf4
    assert prediction.parameters == 0.5625 * in_nf4 + 2 * others + 4 * trained
    assert in_nf4 == 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert blueprint.trained_count == trained == 43_646_976
    # Gathering sends the bytes, not numbers in bf16: in four passes, forward and backward.
    recipe = dataclasses.replace(recipe, strategy=StrategySection(sharding="FULL_SHARD"))
    layout = layout_of(recipe, 8, 8, "cuda")
    traffic = traffic_of([stage_of(blueprint, range(36), recipe.strategy)], recipe, layout)
    gathered = sum(collective.payload for collective in (*traffic.forward, *traffic.backward))
    in_blocks = 0.5625 * in_nf4 + 2 * (trained + 36 * (2 * 4096 + 2 * 128))
    assert gathered == 4 * 2 * in_blocks + 2 * (2 * 151936 + 1) * 4096


@soak
def test_the_recommended_lines_can_be_pasted(recipe_file, monkeypatch):
    recipe = load_recipe(recipe_file, ["strategy.compile=true", "batch.global_batch=4"])
    blueprint = read_blueprint(recipe)  # of which a trace is remembered
    monkeypatch.setattr("trainer.plan.search.read_blueprint", lambda _: blueprint)
    plan = make_plan(recipe, describe_machine("2x1GB", 2, "bf16", tflops=1), "cpu")
    assert [candidate.label for candidate in plan.candidates[::3]] == [
        "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid", "ZeRO-2, CPU offload", "ZeRO-3, CPU offload",
        "hybrid, CPU offload", "ZeRO-3, NVMe offload",
    ]  # fmt: skip
    figures = json.loads(json.dumps(plan_json(plan)))
    fitting = [candidate for candidate in figures["candidates"] if candidate["fits"]]
    assert figures["best"]["seconds_per_step"] == min(c["seconds_per_step"] for c in fitting)
    written = RECIPE.replace("global_batch: 8", "global_batch: 4")
    least = min(c.prediction.peak for c in plan.candidates if "offload" not in c.label)
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("full",))  # the thriftiest
    monkeypatch.setattr("trainer.plan.search.MICRO_BATCHES", (1,))
    tight = dataclasses.replace(plan.machine.gpu, memory=least / (1 - ROOM) - 1)
    cut = make_plan(recipe, dataclasses.replace(plan.machine, gpu=tight), "cpu").candidates[-1]
    assert cut.recipe.strategy.tp * cut.recipe.strategy.pp > 1, "nothing else fits on the GPUs"
    for best in (plan.best, plan.candidates[-1], cut):
        text = plan_text(dataclasses.replace(plan, best=best), "perdure train recipe.yaml")
        assert text.startswith("0.6 M parameters in bf16")
        assert "on 2 nodes of 2 CPU rank(s) with 1 GB" in text
        pasted, rest = text.split("In the recipe:\n\n")[1].split("\n\nor: ")
        sections = yaml.safe_load(written)
        for section, values in yaml.safe_load(pasted).items():
            sections[section] = values if section == "strategy" else sections[section] | values
        command = shlex.split(rest.splitlines()[0])
        recipe_file.write_text(written)
        assert best.recipe == load_recipe(recipe_file, command[3:])
        recipe_file.write_text(yaml.safe_dump(sections))
        assert best.recipe == load_recipe(recipe_file)
    assert ": tp=2 inside a node; pp=2 across 2 nodes." in " ".join(text.split())


@soak
def test_beside_model_parallelism_of_the_recipe_others_are_looked_for(recipe_file, monkeypatch):
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("full",))
    recipe = load_recipe(recipe_file, [TP, EVEN, "strategy.compile=true", "batch.global_batch=2"])
    plan = make_plan(recipe, describe_machine("2xL4", 1, "bf16", tflops=1), "cpu")
    labels = [one.label for one in plan.candidates]
    assert len(labels) == len(set(labels))
    assert {"TP2 DDP", "TP2 ZeRO-3", "ZeRO-3"} <= set(labels)
    assert any(label.startswith("PP2") for label in labels)
    assert all(one.recipe.strategy.compile for one in plan.candidates)


def test_a_recipe_that_cannot_run_there_as_it_is_has_a_reason_for_a_line(recipe_file, monkeypatch):
    """And what can run instead has one line, not two."""
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("full",))
    monkeypatch.setattr("trainer.plan.search.MICRO_BATCHES", (1,))
    fewer = ["batch.global_batch=32", EVEN, "run.steps=0", "run.epochs=1.5"]  # than ranks
    plan = make_plan(
        load_recipe(recipe_file, fewer), describe_machine("8x1GB", 8, "bf16", tflops=1), "cpu"
    )
    text = plan_text(plan, "")
    assert "1.5 epoch(s): hours are unknown, as the data are not here." in text
    assert "\n\nThe recipe as written cannot run there: batch.global_batch" in text
    marked = [line for line in text.splitlines() if " * " in line]
    assert len(marked) == 1
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("or: "))
    assert re.match("TP2|PP2", marked[0])


def machine_with(memory, **more):
    """Two GPUs; `memory` is needed on each, besides the room."""
    machine = describe_machine("2x1GB", 1, "bf16", tflops=1)
    gpu = dataclasses.replace(machine.gpu, memory=memory / 0.89)
    return dataclasses.replace(machine, gpu=gpu, **more)


@soak
def test_nothing_fits(recipe_file, monkeypatch):
    """What four nodes would hold, one holds with NVMe offload alone, and without a disk not."""
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("full",))  # the thriftiest
    recipe = load_recipe(recipe_file)
    thrifty = ["strategy.activation_checkpointing=full", "strategy.reduce_every_pass=true"]
    thrifty += ["batch.micro_batch=1"]
    need = predict(load_recipe(recipe_file, thrifty), 8, 2, device="cpu").peak
    blueprint = read_blueprint(recipe)  # of which a trace is remembered
    monkeypatch.setattr("trainer.plan.search.read_blueprint", lambda _: blueprint)
    plan = make_plan(recipe, machine_with(need), "cpu")
    assert plan.best.label == "ZeRO-3, NVMe offload"
    assert plan.enough_nodes == 4
    assert "On 4 such nodes ZeRO-3 with full recomputation fits" in plan_text(plan, "")
    plan = make_plan(recipe, machine_with(need, node_disk=1e6), "cpu")
    assert plan.best is None
    assert plan.enough_nodes == 4
    assert "disk over" in plan_text(plan, "")
    assert "Nothing fits with 10% room" in plan_text(plan, "")
    assert "On 4 such nodes" in plan_text(plan, "")
    plan = make_plan(recipe, machine_with(need / 10), "cpu")
    assert plan.best is None
    assert plan.enough_nodes is None
    assert "Use larger GPUs" in plan_text(plan, "")


@soak
def test_one_pass_may_fit_where_several_do_not(recipe_file, monkeypatch):
    """It keeps no gradients for a next one."""
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("full",))
    full = ["strategy.activation_checkpointing=full", "batch.micro_batch=4"]
    one = load_recipe(recipe_file, [*BLOCKS.split(" "), "data.seq_len=16", *full])
    plan = make_plan(one, machine_with(predict(one, 2, 2, device="cpu").peak), "cpu")
    tried = [c.prediction.passes for c in plan.tried if c.label == "ZeRO-3"]
    assert tried == [4, 4, 1]
    assert plan.best.prediction.passes == 1
    assert plan.best.recipe.strategy.offload == "none"


@soak
def test_offload_takes_what_the_host_has(recipe_file):
    """A GPU that no strategy fits without offload, and hosts that hold a checkpoint's slot only."""
    large = "model.architecture.hidden_size=960 model.architecture.intermediate_size=2240 "
    large += "batch.global_batch=2 batch.micro_batch=1"
    recipe = load_recipe(recipe_file, large.split())
    offloaded = load_recipe(recipe_file, [*large.split(), "strategy.offload=cpu"])
    on_host, on_gpu = (predict(one, 2, 2, device="cuda") for one in (offloaded, recipe))
    state = on_gpu.parameters + on_gpu.gradients + on_gpu.optimizer_state
    shapes = [shape for unit in read_blueprint(recipe).units for shape in unit]
    pinned = sum(2 ** math.ceil(math.log2(4 * shape.sharded(2))) for shape in shapes)
    assert on_host.host == 2 * pinned + on_gpu.optimizer_state > state
    assert on_host.node_memory == 2 * on_host.host + on_host.checkpoint_bytes
    assert on_gpu.node_memory == on_gpu.slot_bytes == on_gpu.checkpoint_bytes
    roomy, small = (
        make_plan(recipe, machine_with(on_host.peak, node_memory=memory), "cuda")
        for memory in (2 * on_host.node_memory, on_host.node_memory - 1)
    )
    verdicts = [
        {c.label: c.lacking(plan.machine) for c in plan.candidates if "CPU" in c.label}
        for plan in (roomy, small)
    ]
    assert verdicts[0]["ZeRO-3, CPU offload"] == ""
    assert verdicts[1]["ZeRO-3, CPU offload"] == "host over"
    assert roomy.best.recipe.strategy.offload == "cpu"
    assert small.best.label == "ZeRO-3, NVMe offload"
    assert "host over" in plan_text(small, "")


def test_files_hold_what_a_gpu_then_does_not(recipe_file):
    nvme = ["strategy.offload=nvme", "strategy.offload_directory=/local/nvme"]
    blueprint = read_blueprint(load_recipe(recipe_file))
    plain, offloaded = (
        predict(load_recipe(recipe_file, more), 2, 2, device="cuda", blueprint=blueprint)
        for more in ([], nvme)
    )
    state = plain.parameters + plain.optimizer_state
    assert offloaded.peak <= plain.peak - state
    assert offloaded.disk == state + plain.gradients
    assert offloaded.node_disk == 2 * offloaded.disk + offloaded.slot_bytes
    # Buffers that the update works in, and no slot of a checkpoint.
    assert offloaded.node_memory == 2 * offloaded.host < 0.3e9


def test_nothing_hides_sums_on_the_host(recipe_file):
    """Four passes on GPUs so slow that all the rest lies beside computation."""
    machine = describe_machine("2xH100", 1, "bf16", tflops=1e-4)
    seconds, blueprint = [], read_blueprint(load_recipe(recipe_file))
    for more in ([], ["strategy.reduce_every_pass=true"]):
        overrides = ["batch.micro_batch=1", "strategy.offload=cpu", *more]
        recipe = load_recipe(recipe_file, overrides)
        found = predict(recipe, 2, 2, machine=machine, device="cuda", blueprint=blueprint)
        moving = found.communication_seconds + found.transfer_seconds
        # Four blocks, and the rest: the share of one is waited for.
        taken = TAKEN_SHARE * found.communication_seconds * 4 / 5
        assert found.exposed_seconds == pytest.approx(moving / 5 + taken)
        seconds.append(found.seconds_per_step - found.exposed_seconds)
    added = 3 * 2 * 3 * found.gradients / HOST_BANDWIDTH  # two are read, one is written
    assert seconds[1] - seconds[0] == pytest.approx(added, rel=1e-3)


def test_files_are_read_again_and_copied_without_pinned_memory(recipe_file):
    """Four passes; the disk of the first machine is the slowest part, the link of the second."""
    machine = describe_machine("2xH100", 1, "bf16")
    slow_link = dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, pcie=1e9))
    nvme = ["strategy.offload=nvme", "strategy.offload_directory=/local/nvme"]
    recipe, every_pass, in_memory = (
        load_recipe(recipe_file, ["batch.micro_batch=1", *more])
        for more in (nvme, [*nvme, "strategy.reduce_every_pass=true"], ["strategy.offload=cpu"])
    )

    blueprint = read_blueprint(recipe)

    def transfers(recipe, machine):
        prediction = predict(recipe, 2, 2, machine=machine, device="cuda", blueprint=blueprint)
        return prediction.transfer_seconds, prediction.gradients

    (once, gradients), (often, _) = (transfers(r, machine) for r in (recipe, every_pass))
    on_disk = 2 * gradients / DISK_BANDWIDTH
    assert often - once == pytest.approx(3 * on_disk)
    (from_files, _), (pinned, _) = (transfers(r, slow_link) for r in (recipe, in_memory))
    assert from_files == pytest.approx(pinned / PAGEABLE_SHARE)


def test_a_single_rank_waits_for_what_it_has_offloaded(recipe_file):
    """FSDP's all-gather is a copy then, on the stream that computes."""
    one_pass = ["batch.micro_batch=8", "strategy.offload=cpu"]
    recipe = load_recipe(recipe_file, [*one_pass, "strategy.sharding=SHARD_GRAD_OP"])
    slow = describe_machine("H100", 1, "bf16")
    slow = dataclasses.replace(slow, gpu=dataclasses.replace(slow.gpu, pcie=1e6))
    seen = partial(predict, recipe, device="cuda", blueprint=read_blueprint(recipe))
    up = seen(1, 1, machine=slow).parameters / 1e6
    fast = dataclasses.replace(slow, peak_flops=1.0)  # beside which anything is hidden
    hidden = seen(2, 2, machine=dataclasses.replace(fast, gpus_per_node=2))
    assert seen(1, 1, machine=fast).exposed_seconds >= up
    assert hidden.exposed_seconds < up / 2


def test_gpus_without_flash_attention(recipe_file):
    """They hold repeated heads of keys and values, and in bf16 whole rows of attention."""
    recipe = load_recipe(recipe_file, ["data.document_mask=false", "precision.dtype=fp16"])
    kept, blueprint = {}, read_blueprint(recipe)
    gpus = [(gpu, dtype) for gpu in ("L4", "T4") for dtype in ("fp16", "bf16")]
    for gpu, dtype in [*gpus, ("V100 32GB", "fp16")]:
        precision = dataclasses.replace(recipe.precision, dtype=dtype)
        one = dataclasses.replace(recipe, precision=precision)
        machine = describe_machine(f"2x{gpu}", 1, dtype)
        found = predict(one, 2, 2, machine=machine, device="cuda", blueprint=blueprint)
        kept[gpu, dtype] = found.activations
    per_head, layers = 2 * 128 * 16 * 2, 4  # two bytes for each number
    # Keys and values of 2 heads become those of 6; flash attention lays out what 6 heads give in a
    # way that needs a copy.
    repeated = (2 * (6 - 2) - 6) * per_head * layers
    assert kept["L4", "fp16"] == kept["L4", "bf16"]
    assert kept["T4", "fp16"] == kept["V100 32GB", "fp16"]
    assert kept["T4", "fp16"] - kept["L4", "fp16"] == pytest.approx(repeated, rel=0.01)
    # At least the softmax of each head.
    assert kept["T4", "bf16"] - kept["T4", "fp16"] > 2 * 6 * 128 * 128 * 4 * layers


def test_the_peak_is_that_of_the_format():
    assert describe_machine("4xT4", 1, "fp16").peak_flops == 65e12
    machine = describe_machine("4xT4", 1, "bf16")
    assert machine.peak_flops == 8.1e12
    assert "set precision.dtype=fp16" in machine.note
    assert describe_machine("1xRTX4090", 1, "fp32").peak_flops == 82.6e12
    assert describe_machine("8x80GB", 1, "fp32").peak_flops == 19.5e12


def test_memory_is_what_the_device_reports():
    """An H200, sold with 141 GB, has room for Qwen3-8B that a plan of 141e9 bytes refuses."""
    assert describe_machine("H200", 1, "bf16").gpu.memory == 143_771 << 20
    assert describe_machine("141GB", 1, "bf16").gpu.memory == 141e9
    for unknown in ("8xB300", "H100 MIG"):
        with pytest.raises(RecipeError, match=r"not a number of GPUs; .*B200.*MI300X"):
            describe_machine(unknown, 1, "bf16")


def test_more_nodes_may_do_a_step_in_one_pass(recipe_file):
    """Micro-batch 1 would take several, and keep gradients from one to the next."""
    full = ["strategy.activation_checkpointing=full"]
    recipe = load_recipe(recipe_file, [*BLOCKS.split(" "), "data.seq_len=16", *full])
    one_pass = load_recipe(
        recipe_file, [*BLOCKS.split(" "), "data.seq_len=16", *full, "batch.micro_batch=2"]
    )
    blueprint = read_blueprint(recipe)
    need = predict(one_pass, 4, 2, device="cpu", blueprint=blueprint).peak
    several = dataclasses.replace(
        one_pass,
        batch=dataclasses.replace(one_pass.batch, micro_batch=1),
        strategy=dataclasses.replace(one_pass.strategy, reduce_every_pass=True),
    )
    assert predict(several, 4, 2, device="cpu", blueprint=blueprint).peak > need
    machine = machine_with(need)
    assert _enough_nodes(recipe, machine, "cpu", blueprint) == 2


def test_the_loss_takes_a_share_of_a_gpu(recipe_file):
    """The logits and the log of their softmax, both float32, for as many rows as its memory
    suggests. A CPU keeps those of so few rows for the backward pass."""
    vocabulary, rows = 20000, 4 * 128
    recipe = load_recipe(recipe_file, [f"model.architecture.vocab_size={vocabulary}"])
    blueprint = read_blueprint(recipe)

    def most(device, memory=80e9):
        options = (blueprint, 4, "full", torch.bfloat16, False, device)
        return trace(*options, gpu_memory=memory).head_forward

    in_quarters = 16 * 8 * vocabulary * rows / 4
    more = most("cuda") - most("cuda", in_quarters)
    assert more == pytest.approx(8 * vocabulary * rows * 3 / 4, rel=1e-3)
    assert most("cuda", in_quarters) < most("cpu")


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("qwen3_8b", 32768),
        *(
            pytest.param("qwen3_0_6b", 4096, marks=soak),
            pytest.param("qwen3_0_6b", 32768, marks=soak),
            pytest.param("qwen3_8b", 4096, marks=soak),
        ),
    ],
)
def test_documents_cost_no_activations(name, length):
    """Attention inside documents keeps what causal attention keeps."""
    options = [
        f"data.seq_len={length}",
        "batch.micro_batch=1",
        "strategy.activation_checkpointing=selective",
    ]
    with_documents, without = (
        predict(
            load_recipe(ROOT / f"recipes/{name}.yaml", [*options, f"data.document_mask={given}"]),
            8,
            8,
            machine=describe_machine("8xH100", 1, "bf16"),
            device="cuda",
        )
        for given in ("true", "false")
    )
    assert with_documents.activations == pytest.approx(without.activations, rel=0.03)
    assert with_documents.seconds_per_step == pytest.approx(without.seconds_per_step, rel=0.03)


def test_rings_are_as_slow_as_their_slowest_link():
    machine = describe_machine("8xH100", 2, "bf16", net="400Gb/s")
    inside = PlannedCollective(8 * 10**9, 1, ranks=8, stride=1)
    across = PlannedCollective(16 * 10**9, 1, ranks=16, stride=1)
    replicas = PlannedCollective(2 * 10**9, 2, ranks=2, stride=8)
    wire = dataclasses.replace(machine, call=0, hop=0, hop_between=0)
    assert inside.seconds(wire) == pytest.approx(7e9 / (450e9 * 0.8))
    assert across.seconds(wire) == pytest.approx(15e9 / (50e9 * 0.8))
    # Eight groups share the network of a node.
    assert replicas.seconds(wire) == pytest.approx(2e9 / (50e9 / 8 * 0.8))
    late = dataclasses.replace(machine, call=1, hop=10, hop_between=100)
    steps = [one.seconds(late) - one.seconds(wire) for one in (inside, across, replicas)]
    assert steps == pytest.approx([1 + 7 * 10, 1 + PLATEAU * (14 * 10 + 100), 1 + 2 * 100])
    # An all-reduce over many nodes goes up and down a tree of them.
    many = PlannedCollective(10**9, 2, ranks=1024, stride=1, calls=3)
    across_many = dataclasses.replace(late, nodes=128)
    assert many.latency(across_many) == 1 + 2 * (7 * 10 + 7 * 100)
    assert many.seconds(across_many) - many.seconds(wire) == pytest.approx(3 * 1541)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_products_are_work(recipe_file, dtype):
    """As much as `perdure train` counts: with what each token goes through of the experts."""
    recipe = load_recipe(recipe_file, [*EP.split(" ")[1:], f"precision.dtype={dtype}"])
    blueprint = read_blueprint(recipe)
    passed = trace(blueprint, 2, "none", DTYPES[dtype], False, "cpu")
    operations = sum(work[0] for work in (*passed.forward, *passed.backward))
    # Grouped products are a fifth. Attention is counted as if it were not causal, and with four
    # products in backward; it is causal here in fp32, and has five.
    assert operations == pytest.approx(blueprint.flops_per_token * 2 * 128, rel=0.1)


@soak
def test_experts_beside_other_parallelism(recipe_file):
    """Over nodes, too; `batch.micro_batch: auto` finds a size, and the search looks at both."""
    auto = [*f"{EP} {PP} {TP}".split(" "), "batch.micro_batch=auto", "batch.global_batch=64"]
    for ranks_of_a_node, ep in ((4, 2), (2, 4)):
        recipe = load_recipe(recipe_file, [*auto, f"strategy.ep={ep}"])
        assert largest_micro_batch(recipe, 8, ranks_of_a_node, 1e9, "cpu") == 4
    machine = describe_machine("4xH100", 4, "bf16", net="400Gb/s")
    inside, across = exchange_seconds(7e9, 8, machine)
    assert inside == pytest.approx(3e9 / (450e9 * 0.8))
    assert across == pytest.approx(4 * 4e9 / (50e9 * 0.8))  # four GPUs share the network
    plain = load_recipe(recipe_file, [*EP.split(" ")[1:], "batch.global_batch=16"])
    labels = [label for label, _ in _layouts(plain, machine, read_blueprint(plain))]
    assert {"TP2 EP4 hybrid", "TP2 EP4 PP2x2 ZeRO-3", "EP4 PP2 hybrid", "PP2 hybrid"} <= {*labels}
    assert not any("TP" in label and "EP" not in label for label in labels)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("8x80", 1, "bf16"), "--gpus: '8x80' is not a number of GPUs; write 8x80GB"),
        (("8xRTX4900", 1, "bf16"), "not a number of GPUs; did you mean '8xRTX 4090'"),
        (("8xH100", 0, "bf16"), "--nodes: must be at least 1"),
    ],
)
def test_a_machine_that_cannot_be(words, part):
    with pytest.raises(RecipeError, match=part):
        describe_machine(*words)
    with pytest.raises(RecipeError, match="--net: 'fast' is not a rate; write 400Gb/s"):
        describe_machine("8xH100", 2, "bf16", net="fast")


def test_a_recommender_is_told_that_it_cannot_be_planned(monkeypatch, capsys):
    arguments = ["perdure", "plan", f"{ROOT}/recipes/kgat_lastfm.yaml", "--gpus", "8xH100"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        "error: data.factory: only prepared tokens can be planned; "
        "`perdure compare` measures what training on other data takes\n"
    )


@soak
def test_a_recipe_that_comes_along_is_planned_by_its_name(tmp_path, monkeypatch, capsys):
    """Elsewhere, in fp32, on one GPU; what it says to run copies that first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.plan.search.RECOMPUTES", ("none",))
    arguments = ["perdure", "plan", "quickstart", "--gpus", "1xRTX4090", "--price", "3600"]
    arguments += ["--json", "plan.json"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    with pytest.raises(SystemExit, match="0"):
        main()
    text = capsys.readouterr().out
    copied = "or: perdure recipe copy quickstart quickstart.yaml && perdure train quickstart.yaml "
    assert copied in text
    assert "82.6 TFLOP/s" in text
    assert [line.split("  ")[0] for line in text.splitlines() if " x " in line][:5] == [
        "as it is", "DDP … ZeRO-3 *", "ZeRO-2 +CPU", "ZeRO-3 +CPU", "ZeRO-3 +NVMe",
    ]  # fmt: skip
    best = json.loads(Path("plan.json").read_text())["best"]
    seconds = 300 * best["seconds_per_step"]
    assert best["hours"] == best["gpu_hours"] == pytest.approx(seconds / 3600)
    assert best["cost"] == pytest.approx(seconds)
    assert f"which cost {best['cost']:.3g} at 3600 each" in text
