"""Nodes that do not see the same run directory, or have not the same secret, are never two worlds
of one job."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.group import job_claim as claims
from elastic.group.job_claim import JobClaim, claim, claim_key
from elastic.group.job_secret import JobSecret, JobSecretError
from elastic.group.member import Member
from elastic.group.membership import MembershipLimits, MembershipRequest
from elastic.group.store import StoreClient, host_store

SECRETS = [JobSecret(b"of the one" * 4), JobSecret(b"of another" * 4)]
KEY = claim_key("run")


@pytest.fixture
def client(monkeypatch):
    """client() → one of a real store."""
    monkeypatch.setattr(claims, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(claims, "VISIBLE_SECONDS", 0.2)
    store = host_store("127.0.0.1", 0)
    return lambda: StoreClient("127.0.0.1", store.port, 5.0)


@pytest.fixture
def start(client, tmp_path):
    """start(secret, directory) → its member, which trains alone unless others join it."""
    members = []

    def start(secret, directory):
        begun = claim(client(), "run", secret, str(tmp_path / directory))
        limits = MembershipLimits(1, 4, first_call=0.1, settle=0.0)
        member = Member(client(), "run", f"node {len(members)}", limits, lambda: None, None)
        members.append(member)
        member.start(secret, begun.mark)
        member.request(MembershipRequest())
        return member

    yield start
    for member in members:
        member.stop(timeout=1.0)


@pytest.mark.parametrize("gap", [0.0, 0.3])
@pytest.mark.parametrize(
    ("secrets", "directories", "why"),
    [
        (SECRETS, "ab", "with another secret .* put run.dir .* on storage that all nodes"),
        (SECRETS[:1] * 2, "ab", "in another run directory: .*put run.dir .* on storage that all"),
    ],
)
def test_one_of_two_worlds_is_refused_and_told_why(start, secrets, directories, why, gap):
    def later(number):
        time.sleep(gap * number)
        return start(secrets[number], directories[number])

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(later, number) for number in range(2)]
    errors = [one.exception() for one in both if one.exception()]
    assert len(errors) == 1
    with pytest.raises(JobSecretError, match=why):
        raise errors[0]
    (member,) = (one.result() for one in both if not one.exception())
    assert member.wait_for(lambda state: state.size == 1, 10)


def test_nodes_that_see_one_run_directory_are_one_world_whenever_they_come(
    start, client, tmp_path, monkeypatch
):
    with ThreadPoolExecutor() as pool:
        members = list(pool.map(lambda _: start(SECRETS[0], "a"), range(3)))
    monkeypatch.setattr(claims, "STALE_SECONDS", 10.0)
    before = time.monotonic()
    members.append(start(SECRETS[0], "a"))
    assert time.monotonic() - before < 10, "whether the job lives is not waited for"
    names = {member.name for member in members}
    for member in members:
        assert member.wait_for(lambda now: names <= {*now.members, *now.arrived}, 10)
    mark = JobClaim.decode(client().get(KEY)).mark
    assert (tmp_path / "a" / f".job-{mark}").exists()


def test_a_job_that_has_ended_is_taken_over(client, tmp_path):
    old = claim(client(), "run", SECRETS[0], str(tmp_path / "old"))
    assert claim(client(), "run", SECRETS[0], str(tmp_path / "old")) == old
    new = claim(client(), "run", SECRETS[1], str(tmp_path / "new"))
    assert new.fingerprint == SECRETS[1].fingerprint
    client().set(KEY, b"of a stranger ../../etc")
    again = claim(client(), "run", SECRETS[1], str(tmp_path / "new"))
    assert again.fingerprint == SECRETS[1].fingerprint


def test_who_came_first_stays_when_the_store_has_forgotten_it(start, client, tmp_path):
    first = start(SECRETS[0], "a")
    assert first.wait_for(lambda state: state.round == 1, 10)
    time.sleep(1.0)  # its counter is ahead
    held = threading.Event()
    keep = first._renew_claim
    first._renew_claim = lambda: held.is_set() and keep()  # as one that does not reach the store
    client().swap(KEY, client().get(KEY), b"")
    second = start(SECRETS[1], "b")
    held.set()
    assert second.wait_for(lambda state: bool(state.closed), 10)
    assert second.state.closed.code == 2
    assert first.state.closed is None
