"""What processes tell each other: typed values come back as they were, and everything else is
refused without being made."""

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import wire
from checkpointing.errors import DamagedCheckpoint, RankFailure, StorageError, explain
from checkpointing.format.layout import TensorMeta
from checkpointing.format.plan import TensorLayout, TensorSpec, TensorSplit, plan_input
from checkpointing.options import CheckpointOptions
from checkpointing.save import messages as msg
from checkpointing.save.messages import SaveManifest
from checkpointing.save.slots import SaveSlots
from checkpointing.storage.object_storage import NewObjectStep
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.posix_storage import NewPosixStep
from checkpointing.wire import MAX_NESTING, WireError, pack, unpack

LAYOUT = TensorLayout((0, 1, 2, 3), (2, 2), (TensorSplit(None), TensorSplit(0, 2)))
SPECS = {"w": TensorSpec(TensorMeta("F32", (4, 2)), (LAYOUT,))}
MANIFEST = SaveManifest("a", 5, None, "d", 0, 2, {"f": [(0, 4), (8, 12)]}, {"f": [7, 9]}, "{}")
KEY = (5, 3)
WORK = msg.SaveBlockRange("model-00001-of-00001.safetensors", 0, 8)
PATHS = NewPosixStep(Path("/a/step-00000005"), Path("/a/step-00000005.tmp"))
OBJECTS = NewObjectStep(ObjectPath("s3", "b", "k"), ObjectPath("s3", "b", "k.tmp"), {"f": "token"})
OUTCOME = msg.SaveOutcome(5, "/a", None, None, None, None, 1, 2, 3, True)
FAILURE = RankFailure(1, "ValueError", "no\n\udcff")
MESSAGES = [
    msg.WriterSetup(
        1, 0, ((0, 1), (2, 3)), "/a", "t", CheckpointOptions(every="auto", max_shard_size="4 GB"),
        "\0name", "", 0, b"\0secret\n", 3,
    ),
    msg.SaveCallerGreeting("pull", 3), msg.SaveAddresses([("10.0.0.1", 80)]),
    msg.WantSlots("d", plan_input(SPECS, SPECS, 100)), msg.WantSlots("d", None),
    msg.SaveRequest(KEY, False, None), msg.RefuseSave(KEY, FAILURE),
    msg.StagedReport(KEY, (1, 2)),
    msg.SaveRequest(
        KEY, True, msg.SaveContents("/a", b"{}", {"x": b"\n\0", "y": b""}, ["s"], [], 4, True)
    ),
    msg.CopyFailed(KEY, "why"), msg.RankClosing(True), msg.SlotsReport("p", 2),
    msg.SlotRemembered(KEY),
    msg.SlotComplete(KEY, 1, MANIFEST), msg.PeerCopyEnded(1, KEY),
    msg.WriteReceipt(KEY, WORK, {0: 7, 1: 8}, {"at": 1.5, "of": [1, "x"]}),
    msg.GrantDropped(KEY, WORK),
    msg.NodeCannotSave(KEY, msg.NodeSaveFailure("m", None, 5)),
    msg.NodeCannotSave(KEY, msg.NodeSaveFailure("m", "f"), WORK),
    msg.WriterClosing(), msg.SaveAdmitted(KEY, 0, b"{}", 4), msg.SaveSkipped(KEY, "busy"),
    msg.SaveRefused(KEY, FAILURE), msg.WriteGrant(KEY, 0, WORK, PATHS, None),
    msg.WriteGrant(KEY, 0, WORK, OBJECTS, 1e6), msg.StopWriting(KEY),
    msg.CopySlot(1, KEY, 0, MANIFEST), msg.SaveEnded(KEY, OUTCOME), msg.AllClosed(),
    msg.ExitWriter(),
    msg.SlotsMade("d", SaveSlots([{"f": "/dev/shm/f"}], 4, "", True)), msg.NoSlots("why"),
    msg.StageInto(KEY, 1), msg.SaveFetch(msg.SlotInUse(1, KEY), "f", [(0, 4)]),
    msg.SaveFetch(msg.SaveLeftoverAddress("/dev/shm/x"), "f", []),
]  # fmt: skip


def test_every_message_of_a_save_comes_back_as_it_was():
    for message in MESSAGES:
        back = unpack(pack(message))
        assert type(back) is type(message)
        assert back == message
    unions = (msg.FromRank, msg.ToCoordinator, msg.ToNode, msg.ToRank)
    assert {kind for one in unions for kind in get_args(one)} <= set(map(type, MESSAGES))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text() | st.binary() | st.just(SPECS["w"]) | st.just(Path("/a")),
    lambda one: st.lists(one) | st.lists(one).map(tuple) | st.dictionaries(st.text(), one)
    | st.dictionaries(st.integers() | st.binary() | st.tuples(st.text()), one),
)  # fmt: skip


@given(VALUES)
def test_plain_values_come_back_with_their_types(value):
    back = unpack(pack(value))
    assert back == value
    assert repr(back) == repr(value), "tuples are no lists, numbers no texts"


def test_a_layout_travels_once_and_is_one_object_afterwards():
    specs = [TensorSpec(TensorMeta("F32", (n,)), (LAYOUT, replace(LAYOUT))) for n in range(100)]
    assert len(pack(specs)) < 100 * 60
    back = unpack(pack(specs))
    assert back == specs
    assert len({id(layout) for spec in back for layout in spec.layouts}) == 1


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        import os

        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"\n", b"null null", b"[", b"\xff\n", b"[" * 100_000, b"9" * 10_000 + b"\n"),
        *(b'{"$os.system":["id"]}\n', b'{"$Trap":["/"]}\n', b'{"$Path":[]}\n', b'{"$path":1}\n'),
        *(b'{"$Closed":[1]}\n', b'{"$Closed":{}}\n', b'{"$Stage":[[5,3]]}\n'),
        *(b'{"$Stage":[[5,3],"0"]}\n', b'{"$Stage":[[5,true],0]}\n', b'{"$Stage":[[5,3,1],0]}\n'),
        *(b'{"$Stage":[{"a":1},0]}\n', b'{"$StagedReport":[[5,3],null]}\n'),
        *(b'{"$bytes":-1}\n', b'{"$bytes":5}\nabc', b'{"$bytes":1e9}\n', b"null\nmore"),
        *(b'{"$SaveCallerGreeting":["root",1]}\n', b'{"$SaveCallerGreeting":[["rank"],1]}\n'),
        *(b'{"$TensorSpec":[["F32",[4]],[0]]}\n', b'{"$TensorSpec":[["F32",[4]],[-1]]}\n'),
        *(b'{"$TensorSpec":[["F32",["4"]],[]]}\n', b'{"$dict":[[[],1]]}\n', b'{"$dict":[1]}\n'),
        *(b'{"$WriteGrant":[[5,3],0,["f",0,1],{"$StopWriting":[[5,3]]},"fast"]}\n',),
        *(b'{"$SaveFetch":[{"$StopWriting":[[5,3]]},"f",[]]}\n',),
        *(b'{"$SaveFetch":[{"$StopWriting":[1]},"f",[]]}\n',),
        *(b'{"$WriteReceipt":[[5,3],["f",0,8],[["0",7]],{}]}\n',),
    ],
)  # fmt: skip
def test_what_no_process_of_a_run_sends_is_refused_in_one_line(said):
    with pytest.raises(WireError) as refused:
        unpack(said)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_pickle_is_refused_and_not_read(tmp_path):
    with pytest.raises(WireError):
        unpack(pickle.dumps(Trap(tmp_path / "trap")))
    assert not (tmp_path / "trap").exists()


def test_size_and_depth_have_bounds(monkeypatch):
    deep = []
    for _ in range(MAX_NESTING - 1):
        deep = [deep]
    assert unpack(pack(deep)) == deep
    with pytest.raises(WireError, match="nesting"):
        unpack(json.dumps([[deep]]).encode() + b"\n")
    monkeypatch.setattr(wire, "MAX_BYTES", 100)
    with pytest.raises(WireError, match="101 bytes, more than 100"):
        unpack(pack("x" * 98))


def test_what_is_no_value_does_not_travel():
    for odd in (object(), {1, 2}, len, Trap("x"), [ValueError("x")], type):
        with pytest.raises(TypeError, match="cannot be packed"):
            pack(odd)

    @dataclass(frozen=True)
    class StopWriting:
        key: int

    with pytest.raises(ValueError, match="two dataclasses called StopWriting"):
        wire.register(StopWriting)


def test_an_error_travels_as_a_name_and_an_unknown_name_is_a_plain_error():
    class SpecialError(StorageError):
        pass

    for error, kind in (
        (SpecialError("a"), StorageError), (DamagedCheckpoint("b"), DamagedCheckpoint),
        (OSError(5, "c"), StorageError), (KeyError("d"), RuntimeError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "e"), ValueError),
    ):  # fmt: skip
        back = unpack(pack(RankFailure.of(2, error)))
        assert (back.rank, back.kind) == (2, kind)
        assert back.message in (str(error), explain(error))
        assert str(back.kind(back.message))
    for name in ("SystemExit", "os.system", "", "SaveFailed"):
        assert RankFailure(0, name, "m").kind is RuntimeError
