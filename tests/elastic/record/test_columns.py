"""Lines of one shape that are read as columns: the values of json, float and int, and no others."""

import json
import os
import random
import signal
import struct

import pytest

from elastic.record import columns, history
from elastic.record.columns import RecordLineBlock, RecordLineShape
from elastic.record.history import LedgerReader
from elastic.record.ledger import Ledger, StartLine

ODD = (
    *("-0.0", "0", "-0", "00", "01.5", "1.", ".5", "-", "--1", "", "1a", "1.2.3", "1e", "0x1"),
    *("1e5", "1e-05", "5e+16", "1E5", "1e999", "0.1e-.5", "1e-5", "2.5e-07", "1.5e300", "٣"),
    *("123456789012345678", "1234567890123456789", "9007199254740993", "9007199254740993.0"),
    *("9007199254740992.5", "0.12345678901234567890", "0.00000000000000000001", "0.30000000000004"),
    # in the middle between two float64, and just above
    *("1.0000000000000001110223", "1.00000000000000011103", "0.100000000000000012490"),
)


def test_numbers_are_those_of_json():
    draw = random.Random(0)
    plain = [repr(draw.uniform(-10, 10) * 10.0 ** draw.randint(-6, 6)) for _ in range(4000)]
    plain += [repr(round(draw.uniform(0, 1e6), draw.randint(0, 5))) for _ in range(1000)]
    plain += [repr(struct.unpack("f", draw.randbytes(3) + b"\x40")[0]) for _ in range(1000)]
    texts = plain + [str(draw.getrandbits(draw.randint(1, 56))) for _ in range(1000)] + [*ODD]
    draw.shuffle(texts)
    block = RecordLineBlock("".join(f'{{"x": {text}, "y": 1}}\n' for text in texts).encode())
    indices, (values,) = block.columns(RecordLineShape((b'{"x": ', b', "y": 1}\n'), ("number",)))
    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
        expected = float(json.loads(texts[index]))
        assert struct.pack("d", expected) == struct.pack("d", value), texts[index]
    assert set(plain) <= {texts[index] for index in indices.tolist()}


def test_numbers_beside_the_middle_of_two_floats_are_read_by_float(monkeypatch):
    """An odd number of 54 bits times a power of two is such a middle. `number` / 10^places is as
    near to one as a decimal gets: 5^places times the odd number and 2^power times `number` differ
    by one."""
    draw, texts, near = random.Random(4), [], []
    for places in range(10, 19):
        for power in range(24, 45):
            sign, odd = draw.choice([-1, 1]), draw.randrange(2**53 + 2**45, 2**54)
            odd -= (odd + sign * pow(5**places, -1, 2**power)) % 2**power
            number = (odd * 5**places + sign) >> power
            if 2**53 <= number < 10**19:
                texts.append(f"{number // 10**places}.{number % 10**places:0{places}}")
    quotient = columns._quotient
    monkeypatch.setattr(
        columns, "_quotient", lambda *of: near.append(result := quotient(*of)) or result
    )
    block = RecordLineBlock("".join(f"[{text}]\n" for text in texts).encode())
    _, (values,) = block.columns(RecordLineShape((b"[", b"]\n"), ("number",)))
    assert values.tolist() == [*map(float, texts)]
    assert near[0][0].sum() == len(texts) > 50


@pytest.fixture
def ledger(tmp_path):
    start = {"global_batch": 4, "world_size": 2, "records": ("loss", "norm", "consumed")}
    draw, path = random.Random(1), tmp_path / "ledger.jsonl"
    for begin in (0, 40):
        with Ledger(path, StartLine(step=begin, sequences=4 * begin, **start)) as lines:
            for step in range(begin + 1, begin + 41):
                numbers = {"loss": draw.uniform(-3, 3), "norm": draw.uniform(0, 30)}
                numbers["consumed"] = f"{draw.getrandbits(64):016x}"
                lines.step(step, 4 * step - 4, 4 * step, draw.uniform(0, 300), **numbers)
                if step % 20 == 0:
                    lines.save(step, 0.1)
    return path


def found(path, **how):
    reader = LedgerReader(path)
    read = reader.read(**how)
    steps = [[repr(tuple(step)) for step in attempt.steps] for attempt in read.attempts]
    times = [(attempt.written, attempt.steps.highest) for attempt in read.attempts]
    return steps, times, read.problems, reader.others, reader.offset, reader.number


def test_a_ledger_is_the_same_by_columns_and_line_by_line(ledger, monkeypatch):
    """As written, and after random changes of a byte."""
    whole, draw = ledger.read_bytes(), random.Random(2)
    block = RecordLineBlock(whole)
    assert len(history._usual_steps(block)[0]) == 80
    for change in range(80):
        text, at = bytearray(whole), 0
        if change:
            at = draw.randrange(600, len(text))
            text[at : at + draw.randint(0, 1)] = draw.choice([b"", b"0", b"x", b",", b".", b"\n"])
        ledger.write_bytes(text)
        with monkeypatch.context() as patch:
            patch.setattr(history, "FEWEST", 1 << 60)
            expected = found(ledger)
        assert found(ledger) == expected, bytes(text[max(0, at - 40) : at + 40])


def test_a_line_that_is_being_written_is_left_for_later(ledger, monkeypatch):
    whole = ledger.read_bytes()
    monkeypatch.setattr(columns, "BLOCK_BYTES", 1000)
    expected, reader = found(ledger), LedgerReader(ledger)
    for end in (len(whole) // 2, len(whole) - 1, len(whole)):
        ledger.write_bytes(whole[:end])
        reader.read()
        assert reader.offset == whole[:end].rfind(b"\n") + 1
    assert reader.others == expected[3]
    assert reader.read().step == 80


def test_three_processes_read_the_same(ledger, monkeypatch):
    """And if two are killed, this process reads their blocks."""
    expected = found(ledger)
    monkeypatch.setattr(columns, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(columns, "_WORTH_A_PROCESS", 4)
    monkeypatch.setattr(columns, "usable_cores", lambda: 3)
    monkeypatch.setattr(history, "FEWEST", 2)
    here, parse, me = [], history._usual_steps, os.getpid()

    def parsed(block):
        if os.getpid() == me:
            here.append(block)
        elif len(counts) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return parse(block)

    monkeypatch.setattr(history, "_usual_steps", parsed)
    counts = []
    for forks in (False, True, True):
        here.clear()
        assert found(ledger, forks=forks) == expected
        counts.append(len(here))
    assert counts[0] == counts[2] > 8
    assert counts[1] == -(-counts[0] // 3)
