"""Other people's readers open our checkpoints; we open theirs."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from checkpointing import (
    CheckpointOptions,
    DamagedCheckpoint,
    StorageError,
    TensorCheckpointer,
    WrongModel,
    load_model,
)
from checkpointing.load.foreign import open_dcp
from tests.checkpointing.worlds import local, run_ranks, same_bits, save_now, spread

CONFIG = Qwen3Config(
    vocab_size=67,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def weights():
    torch.manual_seed(0)
    return {
        name: parameter.detach().bfloat16()
        for name, parameter in Qwen3ForCausalLM(CONFIG).named_parameters()
    }


@pytest.fixture(scope="session")
def checkpoint(weights, tmp_path_factory) -> Path:
    """Saved from two ranks with rows split, in several files."""
    folder = tmp_path_factory.mktemp("qwen3")

    def work(rank):
        options = CheckpointOptions(max_shard_size=10_000)
        with TensorCheckpointer(folder / "run", options, dist.group.WORLD) as checkpointer:
            return save_now(
                checkpointer,
                1,
                model=spread(weights, "rows-2"),
                optimizer={"model.norm.weight.step": torch.tensor(1.0)},
                state={},
                files={"config.json": CONFIG.to_json_string().encode()},
            )

    return run_ranks(2, work, folder / "ranks")[0]


def test_transformers_opens_it(checkpoint, weights):
    model, loading = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(same_bits(found[name].detach(), weights[name]) for name in weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_safe_open_and_torch_open_it(checkpoint, weights):
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            names = file.keys()
            found |= {name: file.get_tensor(name) for name in names}
    assert found.keys() == weights.keys()
    assert all(same_bits(found[name], weights[name]) for name in weights)

    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(zeros, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    assert all(same_bits(zeros[name], weights[name]) for name in weights)


def test_hugging_face_directories_load_into_any_strategy_and_dtype(weights, tmp_path):
    Qwen3ForCausalLM(CONFIG).bfloat16().save_pretrained(tmp_path / "one")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def work(rank):
        for source in ("one", "many"):
            for strategy, dtype in (("rows-2", torch.float32), ("columns-2", torch.bfloat16)):
                whole = {
                    name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in wanted.items()
                }
                targets = spread(whole, strategy)
                load_model(tmp_path / source, targets)
                right = spread({name: t.to(dtype) for name, t in wanted.items()}, strategy)
                assert all(same_bits(local(targets[name]), local(right[name])) for name in right)
        return "good"

    assert run_ranks(2, work, tmp_path / "ranks") == ["good"] * 2


def test_what_does_not_fit_is_named(checkpoint, weights):
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    norm = targets.pop("model.norm.weight")
    load = "model.layers.0.self_attn.q_proj.weight"
    targets |= {
        "extra": norm,
        load: torch.zeros(3, 24),
        "model.embed_tokens.weight": torch.zeros(67, 24).int(),
    }
    with pytest.raises(WrongModel) as error:
        load_model(checkpoint, targets)
    file = re.search(r"24\], (\S+\.(safetensors|distcp))\)", str(error.value))[1]
    published = (checkpoint / "config.json").exists()
    advice = "; take the config.json that was saved with these weights" if published else ""
    assert str(error.value) == (
        f"{checkpoint} is of another model: the model has no model.norm.weight; the checkpoint has "
        f"no extra; other shapes: {load} [3, 24] (checkpoint [32, 24], {file}); dtypes that do not "
        f"convert: model.embed_tokens.weight I32 (checkpoint BF16){advice}"
    )


def test_a_plain_directory_that_is_incomplete_is_refused(tmp_path):
    with pytest.raises(StorageError, match="holds neither model"):
        load_model(tmp_path, {})
    save_file({"a": torch.ones(4)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    targets = {"a": torch.zeros(4), "b": torch.zeros(4)}
    with pytest.raises(DamagedCheckpoint, match=r"model-2.safetensors: is missing"):
        load_model(tmp_path, targets)
    save_file({"c": torch.ones(4)}, tmp_path / "model-2.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"model-2.safetensors: lacks b, which model"):
        load_model(tmp_path, targets)
    assert not targets["a"].any()
    cut = tmp_path / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    save_file({"b": torch.ones(4)}, tmp_path / "model-2.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"model-1.safetensors: has \d+ bytes, but its"):
        load_model(tmp_path, targets)


# --- torch.distributed.checkpoint ------------------------------------------------------------


class Stateful:
    """As torch's recipes nest an application's state."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return self.parts

    def load_state_dict(self, parts):
        pass


NESTINGS = {
    "flat": lambda model, rest: {**model, "train_state": rest},
    "model": lambda model, rest: {"model": model, "optim": {"state": {"a": {"exp_avg": rest}}}},
    "app": lambda model, rest: {"app": Stateful(model=model, optim={"param_groups": [rest]})},
    "state_dict": lambda model, rest: {"state_dict": {"model": model}, "extra": rest},
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_dcp_checkpoints_load_into_any_strategy_and_dtype(nesting, weights, tmp_path):
    path = tmp_path / "dcp"

    def work(rank):
        state = NESTINGS[nesting](spread(weights, "rows-2"), torch.ones(3))
        dcp.save(state, checkpoint_id=str(path))
        for strategy, dtype in (("rows-2", torch.float32), ("columns-2", torch.bfloat16)):
            right = spread({name: t.to(dtype) for name, t in weights.items()}, strategy)
            for group in (dist.group.WORLD, None):
                targets = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
                optional = ("train_state", "extra")
                load_model(path, targets, group=group, optional=optional)
                assert all(same_bits(local(targets[name]), local(right[name])) for name in right)
        return "good"

    assert run_ranks(2, work, tmp_path / "ranks") == ["good"] * 2
    found = open_dcp(path)
    if nesting != "flat":  # there nobody can tell `train_state` from weights
        assert {name: at.meta.shape for name, at in found.model.items()} == {
            name: tuple(tensor.shape) for name, tensor in weights.items()
        }
    assert all(same_bits(found.read(found.model[name]), weights[name]) for name in weights)
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    norm = targets.pop("model.norm.weight")
    targets["model.embed_tokens.weight"] = torch.zeros(67, 25)
    with pytest.raises(WrongModel, match=r"the model has no model.norm.weight.*; other shapes: mo"):
        load_model(path, targets, optional=("train_state",))
    assert not norm.any()


def test_the_optimizer_of_a_dcp_checkpoint_is_found_by_our_names(tmp_path):
    def work(rank):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(tmp_path / "dcp"))
        return {
            f"{name}.{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value)
            for name, values in state["state"].items()
            for key, value in values.items()
        }

    wanted, _ = run_ranks(2, work, tmp_path / "ranks")
    found = open_dcp(tmp_path / "dcp")
    assert found.optimizer.keys() == wanted.keys()
    assert "0.weight.exp_avg_sq" in wanted
    assert found.model.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, at in found.optimizer.items():
        assert same_bits(found.read(at), wanted[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_in_a_dcp_checkpoint_is_named(tmp_path):
    weights = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path))
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    (data,) = tmp_path.glob("*.distcp")
    whole, metadata = data.read_bytes(), tmp_path / ".metadata"
    data.write_bytes(whole[:600])
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path}: a saved chunk is damaged: "):
        load_model(tmp_path, targets)
    data.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{data}: is missing"):
        load_model(tmp_path, targets)
    data.write_bytes(whole)
    load_model(tmp_path, targets)
    assert torch.equal(targets["a"], weights["a"])
    pickled = metadata.read_bytes()
    metadata.write_bytes(pickled[:50])
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: malformed: "):
        load_model(tmp_path, targets)
    lacking = pickle.loads(pickled)
    lacking.state_dict_metadata["model.a"].chunks.clear()
    metadata.write_bytes(pickle.dumps(lacking))
    with pytest.raises(DamagedCheckpoint, match=r"0 of 1000 elements of model\.a were saved"):
        load_model(tmp_path, targets)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_metadata_that_would_run_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(StorageError, match=r"\.metadata names posix.mkdir"):
        load_model(tmp_path, {})
    assert not (tmp_path / "ran").exists()
