"""Notices of the cloud that this machine will be taken away, and a trigger file for other systems.

A cloud announces this through its metadata service, an HTTP server that only the machine itself
reaches. A thread of each node's agent polls the service every POLL_SECONDS.

    AWS    2 min ahead, and earlier a recommendation to leave
           docs.aws.amazon.com/AWSEC2/latest/UserGuide: spot-instance-termination-notices.html,
           rebalance-recommendations.html, configuring-instance-metadata-service.html
    GCP    30 s ahead; cloud.google.com/compute/docs/instances/preemptible
    Azure  30 s ahead; learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import json
import logging
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

ADDRESS = "http://169.254.169.254"
DMI = Path("/sys/class/dmi/id")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Identifies an Azure machine; its vendor and product are those of any Hyper-V guest."""

POLL_SECONDS = 2.0  # frequent, as GCP and Azure announce only 30 s ahead
REQUEST_SECONDS = 2.0
MAX_ANSWER = 1 << 16

# No handlers for proxies, redirects and errors: every HTTP status is an answer of the service.
_opener = urllib.request.OpenerDirector()
_opener.add_handler(urllib.request.HTTPHandler())


@dataclass(frozen=True)
class CloudNotice:
    """An announcement that this machine is going to be taken away."""

    source: str
    """"aws", "gcp", "azure" or "file:<path>"."""
    what: str
    """AWS: "terminate", "stop", "hibernate", or "rebalance" (a raised risk). GCP: "preempt". Azure:
    "preempt" or "terminate". A file: "trigger"."""
    seconds: float | None
    """Seconds until the machine is taken away; None if the source gives no time."""


class _NoticeSource(Protocol):
    """A service or file that may announce that this machine will be taken away."""

    name: str

    def look(self) -> CloudNotice | None:
        """Returns the current notice, if any. A slow service may block it for a few seconds, and it
        may raise any exception."""


@dataclass
class _TriggerFile:
    """A file whose existence is a notice."""

    path: Path

    def __post_init__(self) -> None:
        self.name = f"file:{self.path}"

    def look(self) -> CloudNotice | None:
        return CloudNotice(self.name, "trigger", None) if self.path.exists() else None


@dataclass
class _Aws:
    """EC2 spot instances, read from the instance metadata service, version 2."""

    address: str
    name: str = "aws"
    _token: str = field(default="", repr=False)

    def look(self) -> CloudNotice | None:
        answer = self._get("spot/instance-action")
        if answer is not None:
            action = _json_object(answer)
            if action.get("action") not in ("terminate", "stop", "hibernate"):
                raise ValueError(f"spot/instance-action is {answer[:80]!r}")
            seconds = _seconds_until(datetime.fromisoformat, action.get("time"))
            return CloudNotice(self.name, action["action"], seconds)
        answer = self._get("events/recommendations/rebalance")
        if answer is not None:
            if "noticeTime" not in _json_object(answer):
                raise ValueError(f"events/recommendations/rebalance is {answer[:80]!r}")
            return CloudNotice(self.name, "rebalance", None)
        return None

    def _get(self, path: str) -> str | None:
        """Returns the text at `path`; None for status 404, which means that there is no notice."""
        url = f"{self.address}/latest/meta-data/{path}"
        status, answer = _request(url, self._token_header())
        if status not in (200, 404):
            self._token = ""  # 401: the token has expired; other statuses may come from a bad token
            status, answer = _request(url, self._token_header())
        return None if status == 404 else _expect_ok(url, status, answer)

    def _token_header(self) -> dict[str, str]:
        if not self._token:
            url = f"{self.address}/latest/api/token"
            longest = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _expect_ok(url, *_request(url, longest, "PUT")).strip()
        return {"X-aws-ec2-metadata-token": self._token}


@dataclass
class _Gcp:
    """Spot and preemptible machines of Compute Engine."""

    address: str
    name: str = "gcp"

    def look(self) -> CloudNotice | None:
        url = f"{self.address}/computeMetadata/v1/instance/preempted"
        answer = _expect_ok(url, *_request(url, {"Metadata-Flavor": "Google"})).strip()
        if answer not in ("TRUE", "FALSE"):
            raise ValueError(f"instance/preempted is {answer[:80]!r}")
        # The service gives no time. The machine is stopped 30 s after the answer becomes TRUE.
        return CloudNotice(self.name, "preempt", 30.0) if answer == "TRUE" else None


@dataclass
class _Azure:
    """Azure machines, whose notices are scheduled events."""

    address: str
    name: str = "azure"

    def look(self) -> CloudNotice | None:
        document = _json_object(self._get("scheduledevents?api-version=2020-07-01"))
        for event in document["Events"]:
            if event["EventType"] not in ("Preempt", "Terminate"):
                continue
            # The service lists all events of the scale set.
            machine = self._get("instance/compute/name?api-version=2021-02-01&format=text")
            if machine.strip().lower() in [str(name).lower() for name in event["Resources"]]:
                started = event.get("EventStatus") == "Started"
                when = _seconds_until(parsedate_to_datetime, event.get("NotBefore"))
                return CloudNotice(self.name, event["EventType"].lower(), 0.0 if started else when)
        return None

    def _get(self, path: str) -> str:
        url = f"{self.address}/metadata/{path}"
        return _expect_ok(url, *_request(url, {"Metadata": "true"}))


CLOUDS: dict[str, Callable[[str], _NoticeSource]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def parse_sources(text: str, address: str = ADDRESS, dmi: Path = DMI) -> list[_NoticeSource]:
    """Create the notice sources that `text` names: "aws", "gcp", "azure", "file:<path>" and "auto",
    separated by commas; may be empty. "auto" is the cloud that this machine is in, if it is one of
    the three. Raises ValueError for any other word. `dmi`: folder with the firmware's description
    of the machine."""
    sources: dict[str, _NoticeSource] = {}
    for word in (part.strip() for part in text.split(",")):
        name = guess_cloud(dmi) if word == "auto" else word
        if not name:
            continue
        if name in CLOUDS:
            sources[name] = CLOUDS[name](address)
        elif name.startswith("file:") and name != "file:":
            sources[name] = _TriggerFile(Path(name.removeprefix("file:")))
        else:
            raise ValueError(
                f"{name!r} is no source of notices: name aws, gcp, azure, file:<path> or auto, "
                "separated by commas"
            )
    return list(sources.values())


def guess_cloud(dmi: Path = DMI) -> str | None:
    """Name of the cloud that this machine is in, judged by its firmware; None: no known cloud."""

    def read(name: str) -> str:
        try:
            return (dmi / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    # Machines of EC2's older Xen generation, such as P3, name Amazon only in the BIOS version.
    if read("sys_vendor") == "Amazon EC2" or "amazon" in read("bios_version").lower():
        return "aws"
    if read("product_name") == "Google Compute Engine":
        return "gcp"
    if read("chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    return None


def watch(
    sources: Sequence[_NoticeSource],
    notify: Callable[[CloudNotice], None],
    stop: threading.Event,
    poll_seconds: float = POLL_SECONDS,
) -> threading.Thread | None:
    """Poll the sources in a daemon thread, once per node, until `stop` is set. Returns the thread;
    None without sources. A source that fails is logged once, and polled again. `notify`: called in
    the thread, once for each source and `CloudNotice.what`. Must not raise."""
    if not sources:
        return None
    reported: set[tuple[str, str]] = set()
    failing: set[str] = set()

    def work() -> None:
        while not stop.is_set():
            for source in sources:
                try:
                    notice = source.look()
                except Exception as error:  # one source's failure must not stop the other sources
                    if source.name not in failing:
                        failing.add(source.name)
                        why = f"{type(error).__name__}: {error}"
                        logger.warning("no notices from %s now, still trying: %s", source.name, why)
                    continue
                if notice and (notice.source, notice.what) not in reported:
                    reported.add((notice.source, notice.what))
                    notify(notice)
            stop.wait(poll_seconds)

    thread = threading.Thread(target=work, name="perdure-cloud", daemon=True)
    thread.start()
    return thread


def _request(url: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers, method=method)
    with _opener.open(request, timeout=REQUEST_SECONDS) as response:
        return response.status, response.read(MAX_ANSWER).decode()


def _expect_ok(url: str, status: int, answer: str) -> str:
    if status != 200:
        raise OSError(f"{url} answered with status {status}")
    return answer


def _json_object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise ValueError(f"{text[:80]!r} is no JSON object")
    return parsed


def _seconds_until(parse: Callable[[str], datetime], text: object) -> float | None:
    try:
        when = parse(str(text))
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
