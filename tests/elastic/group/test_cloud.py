"""Notices of the clouds: heard in time, told once; a bad metadata service costs a log line."""

import queue
import threading
import time
from contextlib import contextmanager

import pytest

from elastic.group import cloud
from elastic.group.cloud import CloudNotice, guess_cloud, parse_sources, watch
from tests.elastic.group.metadata import azure_event, metadata_service

CLOUDS = ["aws", "gcp", "azure"]


@pytest.fixture
def service():
    with metadata_service() as service:
        yield service


@contextmanager
def watching(sources):
    """A queue of the notices that are told."""
    told, stop = queue.Queue(), threading.Event()
    thread = watch(sources, told.put, stop, poll_seconds=0.01)
    try:
        yield told
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def turns(service, count):
    """Wait until the service was asked that many times more."""
    goal, deadline = service.asked.total() + count, time.monotonic() + 10
    while service.asked.total() < goal:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "what", "seconds"),
    [("aws", "terminate", 120), ("gcp", "preempt", 30), ("azure", "preempt", 30)],
)
def test_a_notice_is_seen_once_it_is_there_and_told_once(service, name, what, seconds):
    with watching(parse_sources(name, service.address)) as told:
        turns(service, 6)
        assert told.empty()
        service.interrupted = True
        notice = told.get(timeout=5)
        assert (notice.source, notice.what) == (name, what)
        assert seconds - 5 < notice.seconds <= seconds
        turns(service, 6)
        assert told.empty()


def test_aws_recommends_to_leave_before_it_interrupts(service):
    with watching(parse_sources("aws", service.address)) as told:
        service.rebalance = True
        assert told.get(timeout=5) == CloudNotice("aws", "rebalance", None)
        service.interrupted = True
        assert told.get(timeout=5).what == "terminate"


def test_aws_token_is_kept_and_renewed_when_it_has_expired(service):
    (aws,) = parse_sources("aws", service.address)
    put = "PUT", "/latest/api/token"
    for _ in range(3):
        assert aws.look() is None
    assert service.asked[put] == 1
    service.expire_token()
    service.interrupted = True
    assert aws.look().what == "terminate"
    assert service.asked[put] == 2


def test_azure_events_of_other_machines_and_of_other_kinds_are_no_notice(service):
    (azure,) = parse_sources("azure", service.address)
    service.events = [azure_event("Preempt", "trainers_8"), azure_event("Freeze", "trainers_7")]
    assert azure.look() is None
    service.events.append(azure_event("Terminate", "trainers_7", status="Started"))
    assert azure.look() == CloudNotice("azure", "terminate", 0.0)


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>Log in to the network</html>"),
        (200, b"\xff\xfe\x00"),
        (200, b""),
        (200, b"{}"),
        (200, b'{"Events": ["Preempt"], "action": ["terminate"]}'),
        (200, b'["TRUE"]'),
        (200, b"[" * 65536),
        (302, b""),
        (403, b""),
        (503, b"TRUE"),
    ],
)
def test_nonsense_is_no_notice_and_is_logged_once(service, caplog, name, answer):
    service.nonsense = answer
    with watching(parse_sources(name, service.address)) as told:
        turns(service, 6)
        assert told.empty()
        assert service.asked["GET", "/elsewhere"] == 0
        service.nonsense = None
        service.interrupted = True
        assert told.get(timeout=5).source == name
    (line,) = caplog.messages
    assert line.startswith(f"no notices from {name} now, still trying: ")


def test_a_time_that_cannot_be_read_does_not_hide_the_notice(service):
    (aws,) = parse_sources("aws", service.address)
    aws.look()
    service.nonsense = 200, b'{"action": "stop", "time": "soon"}'
    assert aws.look() == CloudNotice("aws", "stop", None)


def test_a_service_that_is_gone_does_not_hide_the_others(tmp_path, caplog):
    with metadata_service() as service:
        address = service.address
    trigger = tmp_path / "go"
    with watching(parse_sources(f"aws, gcp,azure,file:{trigger}", address)) as told:
        time.sleep(0.1)
        assert told.empty()
        trigger.touch()
        assert told.get(timeout=5) == CloudNotice(f"file:{trigger}", "trigger", None)
    assert sorted(line.split()[3] for line in caplog.messages) == sorted(CLOUDS)


@pytest.mark.parametrize("name", CLOUDS)
def test_a_service_that_does_not_answer_is_left_after_a_moment(service, monkeypatch, name):
    monkeypatch.setattr(cloud, "REQUEST_SECONDS", 0.2)
    service.silent = threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        parse_sources(name, service.address)[0].look()
    assert time.monotonic() - start < 2
    service.silent.set()


def test_proxies_are_not_asked(service, monkeypatch):
    with metadata_service() as proxy:
        pass
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    service.interrupted = True
    assert parse_sources("gcp", service.address)[0].look() == CloudNotice("gcp", "preempt", 30.0)


@pytest.mark.parametrize(
    ("firmware", "expected"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "p5.48xlarge\n"}, "aws"),
        ({"sys_vendor": "Xen\n", "bios_version": "4.11.amazon\n"}, "aws"),
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, "gcp"),
        (
            {
                "sys_vendor": "Microsoft Corporation\n",
                "product_name": "Virtual Machine\n",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation\n", "product_name": "Virtual Machine\n"}, None),
        ({"sys_vendor": "Google\n", "product_name": "Chromebook\n"}, None),
        ({}, None),
    ],
)
def test_auto_is_the_cloud_that_the_firmware_names_or_nothing(tmp_path, firmware, expected):
    for name, value in firmware.items():
        (tmp_path / name).write_text(value)
    assert guess_cloud(tmp_path) == expected
    names = [source.name for source in parse_sources("auto", dmi=tmp_path)]
    assert names == ([expected] if expected else [])


def test_without_sources_there_is_no_thread(tmp_path):
    for text in ("", "auto"):
        assert watch(parse_sources(text, dmi=tmp_path / "none"), print, threading.Event()) is None


def test_sources_are_named_once_and_wrong_names_refused():
    assert [source.name for source in parse_sources("aws,file:/a b,aws,")] == ["aws", "file:/a b"]
    with pytest.raises(
        ValueError, match=r"'awz' is no source .* name aws, gcp, azure, file:<path>"
    ):
        parse_sources("aws,awz")
    with pytest.raises(ValueError, match="'file:' is no source"):
        parse_sources("file:")
