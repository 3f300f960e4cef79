"""Whoever reaches the store of a job and does not know its secret decides nothing."""

import os
import time
from dataclasses import replace

import pytest

from checkpointing import StorageError
from checkpointing.save.channel import job_secret
from elastic.group.job_claim import claim_key
from elastic.group.job_secret import (
    JobSecret,
    JobSecretError,
    find_secret,
    make_secret,
    read_secret,
)
from elastic.group.member import Member
from elastic.group.membership import (
    Membership,
    MembershipEnd,
    MembershipLimits,
    MembershipRequest,
    heed,
)
from elastic.group.sealed import key_prefix
from elastic.group.store import StoreClient, host_store

SECRET = JobSecret(b"of the job" * 4)
LIMITS = MembershipLimits(2, 2, first_call=0.0, settle=0.0)


@pytest.fixture
def job():
    """job(*names) → members in a round of a real store; `.stranger` is a client of it."""
    store = host_store("127.0.0.1", 0)
    members = []

    class Job:
        stranger = StoreClient("127.0.0.1", store.port, 5.0)

        def __call__(self, *names):
            for name in names:
                client = StoreClient("127.0.0.1", store.port, 5.0)
                member = Member(client, "run", name, LIMITS, lambda: None, lease=2.0)
                member.start(SECRET)
                member.request(MembershipRequest())
                members.append(member)
            for member in members:
                assert member.wait_for(lambda state: state.size == len(names), 10)
            return members

    yield Job()
    for member in members:
        member.stop(timeout=1.0)


def still_works(members):
    """Whether a change by one node reaches the other."""
    generation = members[0].state.generation + 1
    members[0].change(lambda state: replace(state, generation=generation))
    return members[1].wait_for(lambda state: state.generation == generation, 10)


def test_what_strangers_write_is_dropped_and_told_once(job, caplog):
    members = job("a", "b")
    prefix = key_prefix("run", SECRET)
    closed = replace(members[0].state, version=1 << 60, closed=MembershipEnd(0, "by a stranger"))
    for value in (b"\xff\xfe garbage", b"{}", closed.encode(), b"0" * 64 + closed.encode()):
        for key in (f"{prefix}/state", f"{prefix}/beat/a", f"{prefix}/beat/b", "perdure/run/state"):
            job.stranger.set(key, value)
        assert still_works(members)
    assert members[0].state.closed is None
    assert members[0].state.members == ("a", "b")
    assert sum(member.keys.dropped[f"{prefix}/state"] for member in members) > 0
    told = [record for record in caplog.records if f"{prefix}/state" in record.getMessage()]
    assert len(told) <= len(members)
    assert not [record for record in caplog.records if record.exc_info]


def test_what_was_true_once_or_elsewhere_is_not_true_again(job):
    members = job("a", "b")
    prefix = key_prefix("run", SECRET)
    old = job.stranger.get(f"{prefix}/state")
    assert still_works(members)
    version = members[0].state.version
    job.stranger.set(f"{prefix}/state", old)
    assert still_works(members)
    assert members[1].state.version > version
    sealing = SECRET.derive("membership")
    assert sealing.open(f"{prefix}/state", old)
    assert sealing.open("perdure/other/state", old) is None
    # Of the same name and secret, and recorded before this job began: a long life, and its end.
    before = Membership(
        version=(int(time.time()) - 3600) * 1000, closed=MembershipEnd(0, "finished")
    )
    key = f"{prefix}/state"
    job.stranger.set(key, sealing.seal(key, before.encode()))
    assert still_works(members)
    assert members[0].state.closed is None


def test_a_newcomer_who_finds_garbage_or_an_empty_store_does_not_end_the_job(job):
    members = job("a", "b")
    key = f"{key_prefix('run', SECRET)}/state"
    newcomers = heed(
        Membership(), "c", MembershipRequest(), time.time() + 9
    )  # it was faster than a and b
    assert newcomers.version > members[0].state.version
    job.stranger.set(key, SECRET.derive("membership").seal(key, newcomers.encode()))
    assert still_works(members)
    assert members[0].state.members == ("a", "b")
    stored = SECRET.derive("membership").open(key, job.stranger.get(key))
    assert Membership.decode(stored).version > newcomers.version, "or it would not give way"


def test_a_job_that_waits_for_nodes_tells_by_which_secret():
    """Or those who come with another would wait for themselves, and nobody would say why."""
    store = host_store("127.0.0.1", 0)
    clients = [StoreClient("127.0.0.1", store.port, 5.0) for _ in range(2)]
    member = Member(clients[0], "run", "a", LIMITS, lambda: None, lease=2.0)
    member.start(SECRET)
    member.request(MembershipRequest())
    deadline = time.monotonic() + 10
    while not (found := clients[1].get(claim_key("run"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    member.stop(timeout=1.0)
    assert found
    assert found.startswith(SECRET.fingerprint.encode())


def test_a_secret_that_others_may_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PERDURE_SECRET_FILE", "")  # and what is set below ends with this test
    secret = find_secret(None, str(tmp_path))
    path = tmp_path / ".secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.environ["PERDURE_SECRET_FILE"] == str(path)
    assert list(tmp_path.iterdir()) == [path]
    make_secret(path)
    assert read_secret(path) == secret, "made once"
    assert job_secret() == secret.derive("checkpoints").key

    def refused(why):
        with pytest.raises(JobSecretError, match=why):
            read_secret(path)
        with pytest.raises(StorageError, match="the secret of the job"):  # that of checkpoints
            job_secret()

    path.chmod(0o640)
    refused(r"others may read .*mode 640")
    path.chmod(0o600)
    path.write_text("short")
    refused("has 5 bytes")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        refused(r"not a file of yours .* but of uid 65534")
    monkeypatch.setenv("PERDURE_SECRET_FILE", "")
    with pytest.raises(JobSecretError, match="must share a secret"):
        find_secret(None, None)
