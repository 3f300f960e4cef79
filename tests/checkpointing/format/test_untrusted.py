"""Files that somebody else has written: names lead nowhere, damage is told in one line, and the
other checkpoints of the run are served."""

import json
import os
import pickle
import struct

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpointing import CheckpointError, CheckpointOptions, DamagedCheckpoint, load_model
from checkpointing.format.layout import (
    CommitRecord,
    _digest,
    block_checksums,
    parse_header,
    parse_index,
    parse_state,
)
from checkpointing.format.peft import adapter_tensors
from checkpointing.format.untrusted import is_plain, printable
from checkpointing.load.foreign import open_dcp
from checkpointing.tools.convert import export, import_checkpoint
from checkpointing.tools.diff import diff
from checkpointing.tools.inspect import ls, pruned, show, verify
from tests.checkpointing.stored import write_checkpoint

RECORD = "index.json"
STATE = "trainer_state.json"
INDEX = "model.safetensors.index.json"
MODEL = "model-00001-of-00001.safetensors"
EVIL = (
    "../../outside",
    "/etc/passwd",
    "a/../b",
    "a\0b",
    "a\nb",
    "\x1b[31mred",
    "a\u202eb",
    "",
    "./a",
    3,
)


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        write_checkpoint(
            tmp_path / "checkpoints" / f"step-{step:08}",
            step,
            model={"a": torch.full((4,), float(step)), "b": torch.ones(2)},
            optimizer={"a.step": torch.tensor(1.0)},
            state={"tokens": step, "recipe": {"checkpoint": {"keep": 5}}},
        )
    return tmp_path


NAMES = [name for name in EVIL if isinstance(name, str)]


def sealed(body):
    """A commit record with a checksum that is right: anybody can make one."""
    return json.dumps({**body, "sha256": _digest(body)}).encode()


def forge(step, **files):
    """Change files of a checkpoint (by their names, or `record` for the body of the commit record)
    and have the commit record agree."""
    body = json.loads((step / RECORD).read_bytes())
    del body["sha256"]
    change = files.pop("record", lambda body: None)
    for name, data in files.items():
        (step / name).write_bytes(data)
        sums = [f"{crc:08x}" for crc in block_checksums(data)]
        body["files"][name] = {"bytes": len(data), "crc32": sums}
    change(body)
    (step / RECORD).write_bytes(sealed(body))


def safetensors(text, data=b""):
    header = text.encode() if isinstance(text, str) else json.dumps(text).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(begin, end, dtype="F32", shape=None):
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index(target):
    return json.dumps({"weight_map": {"a": target, "b": MODEL}}).encode()


def also(name):
    def change(body):
        body["files"][name] = {"bytes": 0, "crc32": []}

    return change


NESTED = b"[" * 200_000
FORGERIES = {
    **{f"record names {name!r}": {"record": also(name)} for name in NAMES},
    **{f"index names {name!r}": {INDEX: index(name)} for name in EVIL},
    "index names a file that was not saved": {INDEX: index("other.safetensors")},
    "index is a list": {INDEX: b"[1]"},
    "index maps nothing": {INDEX: b'{"weight_map": [1]}'},
    "index is nested": {INDEX: NESTED},
    "state is a list": {STATE: b"[1]"},
    "state is nested": {STATE: b'{"a":' * 5000 + b"1" + b"}" * 5000},
    "state is nested too deep to print": {STATE: b'{"a":' * 300 + b"1" + b"}" * 300},
    "state is not text": {STATE: b"\xff\xfe\x00"},
    "header is a list": {MODEL: safetensors("[1]")},
    "header holds a list": {MODEL: safetensors({"a": [1], "b": entry(0, 8)}, bytes(8))},
    "header is nested": {MODEL: safetensors("[" * 200_000)},
    "header is longer than its file": {MODEL: struct.pack("<Q", 2**63) + b"{}"},
    "tensors overlap": {MODEL: safetensors({"a": entry(0, 16), "b": entry(8, 24)}, bytes(24))},
    "tensors beyond the file": {MODEL: safetensors({"a": entry(0, 1 << 40)}, bytes(8))},
    "negative offsets": {MODEL: safetensors({"a": entry(-8, 8)}, bytes(8))},
    "negative shape": {MODEL: safetensors({"a": entry(0, 8, shape=[-1, -2])}, bytes(8))},
    "a fraction for a size": {MODEL: safetensors({"a": entry(0, 8, shape=[2.0])}, bytes(8))},
    "a word for a size": {MODEL: safetensors({"a": entry(0, 8, shape=["2"])}, bytes(8))},
    "a shape that no memory has": {
        MODEL: safetensors({"a": entry(0, 0, shape=[0, 2**62, 2**62])}, b"")
    },
    "an unknown dtype": {MODEL: safetensors({"a": entry(0, 8, dtype=["F32"])}, bytes(8))},
    "a tensor with a name that steers": {MODEL: safetensors({"\x1b[2J": entry(0, 8)}, bytes(8))},
    "files are a list": {"record": lambda body: body.update(files=[1])},
    "a file is a list": {"record": lambda body: body["files"].update({STATE: [1]})},
    "negative bytes": {"record": lambda body: body["files"][STATE].update(bytes=-1)},
    "bytes are a fraction": {"record": lambda body: body["files"][STATE].update(bytes=1.5)},
    "a checksum is a number": {"record": lambda body: body["files"][STATE].update(crc32=[7])},
    "a step is a word": {"record": lambda body: body.update(step="2")},
    "a format is a list": {"record": lambda body: body.update(format=[1])},
    "no state": {"record": lambda body: body["files"].pop(STATE)},
    "no index": {"record": lambda body: body["files"].pop(INDEX)},
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_checkpoint_is_damaged_and_disables_nothing(forgery, run):
    first, second = (run / "checkpoints" / f"step-{step:08}" for step in (1, 2))
    (run / "outside").write_bytes(b"")
    forge(second, **FORGERIES[forgery])
    check_that_only_the_first_serves(run, first, second)


def only_our_errors(work):
    try:
        return work()
    except CheckpointError as error:
        message = str(error)
    assert message.isprintable()
    return None


def check_that_only_the_first_serves(run, first, second):
    for look in (lambda: show(second), lambda: diff(second, first), lambda: export(second, run)):
        with pytest.raises(DamagedCheckpoint) as caught:
            look()
        assert str(caught.value).isprintable()
    assert show(run).record.step == 1
    for result in (ls(run), verify(run), pruned(run, CheckpointOptions(), dry_run=True)):
        assert all(line.isprintable() for line in str(result).splitlines())
    assert ls(run).rows[1].problem is None
    assert {problem.checkpoint for problem in verify(run).problems} == {second}
    kept = pruned(run, CheckpointOptions(keep=1), dry_run=True)
    assert [item.path for item in kept.decisions if item.stays][-1] == first
    weights = {"a": torch.zeros(4), "b": torch.zeros(2)}
    only_our_errors(lambda: load_model(second, weights))
    load_model(first, weights)
    assert weights["a"].tolist() == [1.0] * 4


def link_outside(path):
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def link_folder(path):
    outside = path.parents[2] / "outside"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def huge(path):
    with open(path, "r+b") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (MODEL, link_outside),
        (STATE, link_outside),
        ("optimizer/optimizer-00001-of-00001.safetensors", link_folder),
        (RECORD, pipe),
        (STATE, pipe),
        (MODEL, pipe),
        (RECORD, huge),
    ],
)
def test_what_is_no_file_of_the_checkpoint_is_neither_followed_nor_waited_for(name, change, run):
    first, second = (run / "checkpoints" / f"step-{step:08}" for step in (1, 2))
    change(second / name)
    check_that_only_the_first_serves(run, first, second)


def test_values_that_steer_a_terminal_are_shown_as_text(run):
    second = run / "checkpoints" / "step-00000002"
    evil = "\x1b]0;owned\x07\n\x9b31m\u202e"
    state = {evil: evil, "notes": evil, "world": {"world_size": evil}, "large": 10**400}
    forge(second, **{STATE: json.dumps(state).encode()})
    for result in (ls(run), show(second), diff(second, run / "checkpoints" / "step-00000001")):
        text = str(result)
        assert all(line.isprintable() for line in text.splitlines())
        assert "\\x1b" in text or "\\u001b" in text
    options = CheckpointOptions(keep=1, keep_best=1, best_by="large")
    assert len(pruned(run, options, dry_run=True).decisions) == 2


@pytest.mark.parametrize("target", EVIL)
def test_a_hugging_face_index_names_files_beside_it(target, tmp_path):
    (tmp_path / INDEX).write_bytes(index(target))
    with pytest.raises(DamagedCheckpoint, match="names no file below its folder"):
        import_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_metadata_names_files_beside_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"a": torch.ones(4)}}, checkpoint_id=tmp_path)
    assert open_dcp(tmp_path).read(open_dcp(tmp_path).model["a"]).tolist() == [1.0] * 4
    where = tmp_path / ".metadata"
    metadata = pickle.loads(where.read_bytes())
    (info,) = metadata.storage_data.values()
    for info.relative_path in EVIL:
        where.write_bytes(pickle.dumps(metadata))
        with pytest.raises(DamagedCheckpoint, match="is no file in its directory") as caught:
            open_dcp(tmp_path)
        assert str(caught.value).isprintable()


# --- whatever stands there -----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
BODY = {
    "format": 1,
    "step": 3,
    "block_bytes": 16 << 20,
    "files": {"a": {"bytes": 5, "crc32": ["00000007"]}, "b/c": {"bytes": 0, "crc32": []}},
}
HEADER = {"a": entry(0, 16), "b": entry(16, 24), "__metadata__": {"format": "pt"}}


@st.composite
def mutated(draw, tree):
    """A JSON tree with one place, or its key, replaced by anything."""
    tree = json.loads(json.dumps(tree))
    holder, keys = tree, list(tree)
    while True:
        key = draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
            break
        holder, keys = inner, list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    if isinstance(holder, dict) and draw(st.booleans()):
        holder[draw(st.text(max_size=8) | st.sampled_from([e for e in EVIL if e != 3]))] = (
            holder.pop(key)
        )
    else:
        holder[key] = draw(JSON | st.sampled_from(EVIL))
    return tree


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(mutated(BODY))
def test_any_commit_record_is_read_or_refused(body):
    record = only_our_errors(lambda: CommitRecord.decode(sealed(body), "here"))
    if record is not None:
        assert all(is_plain(name) for name in record.files)
        assert CommitRecord.decode(record.encode(), "here") == record


@given(mutated(HEADER))
def test_any_header_is_read_or_refused(header):
    data = safetensors(header)
    tensors = only_our_errors(lambda: parse_header(data, "f", len(data) + 24, "here"))
    if tensors is not None:
        assert sum(tensor.meta.nbytes for tensor in tensors.values()) == 24


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
@example(NESTED)
@example(b'{"a":' * 990 + b"1" + b"}" * 990)
@example(b'{"step": 1' + b"0" * 5000 + b"}")
def test_any_bytes_are_read_or_refused(data):
    only_our_errors(lambda: CommitRecord.decode(data, "here"))
    only_our_errors(lambda: parse_index(data, "here"))
    only_our_errors(lambda: parse_state(data, "here", 1))
    only_our_errors(lambda: parse_header(bytes(8) + data, "f", len(data), "here"))


@given(st.text() | st.sampled_from(NAMES))
def test_a_plain_name_stays_in_its_directory(name):
    assert printable(name).isprintable()
    if is_plain(name):
        assert printable(name) == name
        assert os.path.normpath(f"/folder/{name}").startswith("/folder/")
        assert name == os.path.normpath(name)


def with_state(**changed):
    def change(step):
        state = {**json.loads((step / STATE).read_text()), **changed}
        forge(step, **{STATE: json.dumps(state).encode()})

    return change


def with_weight(value):
    def change(step):
        data = bytearray((step / MODEL).read_bytes())
        data[-4:] = struct.pack("<f", value)
        forge(step, **{MODEL: bytes(data)})

    return change


def named_twice(step):
    data = (step / MODEL).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + size].rstrip()
    text = text[:-1] + b',"a":' + json.dumps(json.loads(text)["b"]).encode() + b"}"
    text += b" " * (-len(text) % 8)
    forge(step, **{MODEL: struct.pack("<Q", len(text)) + text + data[8 + size :]})


def in_two_files(step):
    forge(step, **{"model-00002-of-00002.safetensors": (step / MODEL).read_bytes()})


FORGED = {
    "another step": (with_state(step=9), "is of step 9"),
    "no number of sequences": (with_state(sequences=float("nan")), "sequences is nan"),
    "text for a number": (with_state(tokens="2"), "tokens is '2'"),
    "half a step": (with_state(step=2.5), "step is 2.5"),
    "a list for the recipe": (with_state(recipe=[1]), "where an object is due"),
    "NaN": (with_weight(float("nan")), "NaN or infinity in b"),
    "a name twice": (named_twice, "the name 'a' occurs twice"),
    "a tensor twice": (in_two_files, "holds tensors that no index names"),
}


@pytest.mark.parametrize("how", FORGED)
def test_what_contradicts_itself_is_not_good_though_its_checksums_are_right(run, how):
    step = run / "checkpoints" / "step-00000002"
    change, why = FORGED[how]
    change(step)
    (problem,) = verify(run).problems
    assert problem.checkpoint == step
    assert why in problem.message


def test_other_peoples_loops_may_keep_nan(tmp_path):
    tensors = {"mask": torch.tensor([0.0, float("nan"), float("-inf")])}
    write_checkpoint(tmp_path / "step-00000001", 1, tensors, state={"anything": float("nan")})
    assert not verify(tmp_path).problems


def test_a_tensor_of_an_adapter_has_one_name():
    names = ["base_model.model.norm", "base_model.model.norm.weight"]
    with pytest.raises(DamagedCheckpoint, match=r"norm\.weight name one tensor"):
        adapter_tensors(names, "adapter_model.safetensors")
