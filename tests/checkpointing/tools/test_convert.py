"""Checkpoints of ours to and from what others write."""

import json
import os
import resource
import signal
import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from checkpointing import CheckpointError, DamagedCheckpoint, StorageError, load_model
from checkpointing.format.layout import BLOCK_BYTES, LayoutTensor, TensorMeta
from checkpointing.storage import source
from checkpointing.storage.source import StorageTensorReader
from checkpointing.tools.convert import export, import_checkpoint
from checkpointing.tools.inspect import show, verify
from tests.checkpointing.stored import flip, raw, write_checkpoint
from tests.checkpointing.worlds import same_bits

TOKENIZER = b'{"version": "1.0"}'


def tiny(tied):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def weights_of(model):
    tied = model.config.tie_word_embeddings
    weights = model.state_dict()
    return {name: t for name, t in weights.items() if not (tied and name == "lm_head.weight")}


def config_of(model):
    return json.dumps({**model.config.to_dict(), "dtype": "float32"}).encode()


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    return tiny(request.param)


@pytest.fixture
def run(tmp_path, model):
    weights = weights_of(model)
    for step in (6, 7):
        write_checkpoint(
            tmp_path / f"run/checkpoints/step-{step:08}",
            step,
            weights if step == 7 else {"w": torch.zeros(1)},
            optimizer={"model.norm.weight.exp_avg": torch.ones(32)},
            files={
                "config.json": config_of(model),
                "generation_config.json": b"{}",
                "tokenizer.json": TOKENIZER,
            },
            max_bytes=10_000,
        )
    return tmp_path / "run"


# --- export ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "limit"), [("bf16", 10_000), ("fp16", 10**9), ("fp32", 10_000), (None, 10**9)]
)
def test_transformers_opens_what_was_exported(run, model, tmp_path, dtype, limit):
    out = tmp_path / "deep" / "out"
    report = export(run, out, dtype=dtype, max_shard_bytes=limit)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    names = sorted(path.name for path in out.iterdir())
    small = ["config.json", "generation_config.json", "tokenizer.json"]
    if limit == 10**9:
        assert names == [*small[:2], "model.safetensors", *small[2:]]
    else:
        assert "model.safetensors.index.json" in names
        assert len(names) == len(small) + 1 + report.files
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    opened = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert opened.dtype == torch_dtype
    for name, tensor in weights_of(model).items():
        assert same_bits(opened.state_dict()[name], tensor.to(torch_dtype)), name
    assert report.tensors == len(weights_of(model))
    config = json.loads((out / "config.json").read_bytes())
    assert config["dtype"] == str(torch_dtype).removeprefix("torch.")
    assert config.get("torch_dtype", config["dtype"]) == config["dtype"]
    assert out.stat().st_mode == out.parent.stat().st_mode
    assert list(out.parent.iterdir()) == [out]


def test_what_is_no_weight_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PIECE_BYTES", 16)
    model = {
        "big": torch.randn(17, 5, dtype=torch.float64),
        "half": torch.randn(9).half(),
        "nan": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1 / 3),
    }
    path = write_checkpoint(tmp_path / "step-00000001", 1, model, max_bytes=100)
    with pytest.raises(CheckpointError, match="nan holds NaN or infinity; export another step, or"):
        export(path, tmp_path / "out")
    report = export(path, tmp_path / "out", dtype="bf16", not_finite=True)
    assert "note: there is no config.json" in str(report)
    found = load_file(tmp_path / "out" / "model.safetensors")
    unchanged = {"ids", "mask", "eighth"}
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert same_bits(found[name], tensor if name in unchanged else tensor.bfloat16()), name
    export(
        tmp_path / "out", tmp_path / "again", dtype="fp32", not_finite=True
    )  # a plain directory, too
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(again["big"], model["big"].bfloat16().float())


def test_rounding_is_to_nearest_even(tmp_path):
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 2.0**-133 * 1.5])
    write_checkpoint(tmp_path / "a", 1, {"w": values})
    export(tmp_path / "a", tmp_path / "b", dtype="bf16")
    found = load_file(tmp_path / "b" / "model.safetensors")["w"].double()
    assert found.tolist() == [1, 1 + 2**-6, 1 + 2**-7, 2.0**-133 * 2]


def test_a_number_too_large_for_the_dtype_is_no_silent_infinity(tmp_path):
    large = {"fine": torch.full((4,), 65504.0), "w": torch.tensor([1.0, -7e4, torch.inf])}
    path = write_checkpoint(tmp_path / "step-00000001", 1, large)
    with pytest.raises(CheckpointError, match=r"w: holds 7e\+04, too large for F16; export with"):
        export(path, tmp_path / "out", dtype="fp16", not_finite=True)
    assert list(tmp_path.iterdir()) == [path]
    export(path, tmp_path / "out", dtype="bf16", not_finite=True)


def test_nothing_is_written_over_and_nothing_damaged_is_exported(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match="out: exists already; choose another name"):
        export(run, out)
    out.rmdir()
    step = run / "checkpoints" / "step-00000007"
    flip(sorted(step.glob("model-*.safetensors"))[1], -1)
    with pytest.raises(DamagedCheckpoint, match=r"model-00002-of-\S+: checksum of block 0"):
        export(run, out)
    assert os.listdir(tmp_path) == ["run"]
    with pytest.raises(StorageError, match="holds no checkpoints"):
        export(tmp_path / "elsewhere", out)
    (step / "config.json").write_bytes(b"[]")
    assert show(run).record.step == 6  # a run stands for its newest good checkpoint
    export(run, out)
    assert load_file(out / "model.safetensors").keys() == {"w"}


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(run, tmp_path):
    def attempt():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"cannot write \S+: \S+: File too large \(EFB"):
            export(run, tmp_path / "out")
        assert os.listdir(tmp_path) == ["run"]

    assert in_child(attempt) == 0


def test_what_a_killed_export_left_goes_with_the_next(run, tmp_path):
    def killed():
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        export(run, tmp_path / "out")

    assert in_child(killed) == signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def in_child(work):
    """Exit status of work() in a forked process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


# --- import ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_what_transformers_saved_becomes_a_checkpoint(model, tmp_path, shard):
    theirs, out = tmp_path / "theirs", tmp_path / "mine"
    model.bfloat16().save_pretrained(theirs, max_shard_size=shard)
    (theirs / "tokenizer.json").write_bytes(TOKENIZER)
    (theirs / "trainer_state.json").write_text('{"global_step": 5}')  # the Trainer's, not ours
    (theirs / "optimizer.pt").write_bytes(b"pickle")
    (theirs / ".gitattributes").write_text("")
    report = import_checkpoint(theirs, out, max_shard_bytes=12_000)
    assert report.notes == ()
    assert not verify(out).problems
    contents = show(out)
    assert contents.record.step == 0
    assert contents.optimizer == {}
    assert contents.state == {"step": 0, "imported_from": str(theirs)}
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER
    assert not (out / "optimizer.pt").exists()
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights_of(model).items()}
    load_model(out, targets)
    for name, tensor in weights_of(model).items():
        assert same_bits(targets[name], tensor), name
    opened = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(opened.model.norm.weight, model.model.norm.weight)
    assert sorted(os.listdir(tmp_path)) == ["mine", "theirs"]


def test_blocks_and_files_are_those_of_a_save(tmp_path, monkeypatch):
    """Tensors larger than a block, and pieces that end anywhere in one."""
    monkeypatch.setattr(source, "PIECE_BYTES", 7_000_008)
    rows = BLOCK_BYTES // 4 // 1000
    model = {
        "a": torch.arange(2 * rows * 1000 + 3, dtype=torch.int32),
        "b": torch.randn(rows, 1000),
        "c": torch.randn(5).bfloat16(),
    }
    (tmp_path / "theirs").mkdir()
    save_file(model, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "checkpoints" / "step-00000012"
    assert "note: there is no config.json" in str(import_checkpoint(tmp_path / "theirs", out))
    saved = write_checkpoint(
        tmp_path / "step-00000012", 12, model, state={"imported_from": str(tmp_path / "theirs")}
    )
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert len(files) == 5
    for file in files:
        assert (out / file).read_bytes() == (saved / file).read_bytes(), file
    assert verify(out.parent).checked == [out]
    assert not verify(out.parent).problems
    flip(out / "model-00001-of-00001.safetensors", -1)
    with pytest.raises(DamagedCheckpoint, match=r"checksum of block 2 \(from byte 33554432"):
        export(out, tmp_path / "exported")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_checkpoint_comes_with_its_optimizer(model, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    weights, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": of_optimizer, "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    out = tmp_path / "mine" / "step-00000005"
    assert "note: there is no config.json" in str(import_checkpoint(tmp_path / "theirs", out))
    assert not verify(out).problems
    contents = show(out)
    assert contents.record.step == 5
    assert contents.model.keys() == weights.keys()
    moments = {
        f"{name}.{leaf}": tensor
        for name, leaves in of_optimizer["state"].items()
        for leaf, tensor in leaves.items()
    }
    assert len(moments) == 3 * len(list(model.parameters()))
    assert contents.optimizer.keys() == moments.keys()
    for section, tensors in ((contents.model, weights), (contents.optimizer, moments)):
        with StorageTensorReader(out, contents.record.files) as reader:
            for name, tensor in tensors.items():
                found = bytearray(section[name].meta.nbytes)
                reader.read(section[name], 0, memoryview(found))
                assert found == raw(tensor), name
    next((tmp_path / "theirs").glob("*.distcp")).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"distcp: is missing"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["mine", "theirs"]


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    (tmp_path / "w").write_bytes(bytes(100))
    with (
        StorageTensorReader(tmp_path, {}) as reader,
        pytest.raises(DamagedCheckpoint, match="w: ends too early; it was cut short"),
    ):
        reader.read(LayoutTensor("w", 90, TensorMeta("U8", (20,))), 0, memoryview(bytearray(20)))


def test_imports_that_make_no_sense(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with pytest.raises(StorageError, match=r"theirs: holds neither model\.safetensors nor"):
        import_checkpoint(theirs, tmp_path / "out")
    with pytest.raises(StorageError, match=r"nowhere: holds neither model\.safetensors nor"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    save_file({"w": torch.ones(3)}, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match="is the name of step 3, not of step 4; change one"):
        import_checkpoint(theirs, tmp_path / "step-00000003", step=4)
    with pytest.raises(DamagedCheckpoint, match=r"config\.json: is missing"):
        import_checkpoint(theirs, tmp_path / "out", config=tmp_path / "config.json")
    assert os.listdir(tmp_path) == ["theirs"]
    (tmp_path / "config.json").write_text("{}")
    import_checkpoint(theirs, tmp_path / "out", step=4, config=tmp_path / "config.json")
    assert show(tmp_path / "out").record.step == 4
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="is a checkpoint of perdure already"):
        import_checkpoint(tmp_path / "out", tmp_path / "again")
