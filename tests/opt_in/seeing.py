"""A live page in Chromium follows a run that is killed; see seeing.sh."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic.process import descendants
from trainer.data.prepare.prepare import prepare

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEPS, KILLS = 300, (70, 140)
ALL_AT = 200
RECIPE = f"""\
run:
  {{dir: runs/river, steps: {STEPS}, log_every: 2, evaluate_every: 50, device: cpu,
   samples: ["Number 7 of the", "A <b>river</b>"]}}
model:
  architecture:
    {{model_type: qwen3, vocab_size: 512, hidden_size: 64, intermediate_size: 128,
     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
     tie_word_embeddings: true}}
data: {{sources: [{{path: data}}], seq_len: 64, validation_sequences: 16}}
batch: {{global_batch: 8, micro_batch: 4}}
optimizer: {{lr: 3e-3, clip_norm: 1.0}}
schedule: {{name: cosine, warmup_steps: 20}}
precision: {{dtype: fp32}}
checkpoint: {{every: 50, keep: 2}}
elastic: {{snapshot_every: 10}}
"""
WIDTHS = {"1600": 1600, "390": 390}
SAMPLES = """
const part = document.querySelector("section[aria-label$=samples]");
if (!part) return ["", "", ""];
return [part.querySelector("output").textContent, part.textContent,
        part.querySelector("input").getAttribute("aria-valuetext")];"""
"""Step whose samples are shown, the text of the section, and what a screen reader says."""


class Browser:
    """Chromium, told what to do by the WebDriver protocol."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={self._port}", "--silent"], stdout=subprocess.DEVNULL
        )
        until(lambda: self._call("GET", "/status")["ready"], 30, "chromedriver")
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-background-networking", "--no-first-run"]
        options = {"args": words, "binary": "/usr/bin/chromium"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        wanted["goog:loggingPrefs"] = {"browser": "ALL"}
        began = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{began['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        """Open a page."""
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def press(self, key: str) -> None:
        """Press and release a key, as a keyboard does."""
        code = {"ArrowLeft": 37, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.tell(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def tell(self, command: str, **arguments: Any) -> Any:
        """A command of Chromium's own."""
        body = {"cmd": command, "params": arguments}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def complaints(self) -> list[str]:
        """Errors on the console since the last call: of scripts, and of what the policy forbids."""
        lines = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] == "SEVERE"]

    def picture(self, width: int, scheme: str) -> bytes:
        """The whole page as PNG."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.tell("Emulation.setEmulatedMedia", features=[feature])
        time.sleep(1)
        wide = self.run("return document.documentElement.scrollWidth")
        assert wide <= width, f"at {width} px the page is {wide} px wide"
        height = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.tell(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=clip, format="png"
        )
        return base64.b64decode(shot["data"])


def until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := true():
                return found
        except OSError:
            pass
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def newest_step(run: Path) -> int:
    """By the records of a run."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


def ranks_of(launcher: int) -> list[int]:
    """Training processes below a launcher."""
    found = []
    for pid in descendants(launcher):
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith("perdure-rank"):
                found.append(pid)
        except OSError:
            continue
    return found


def main(out: Path) -> None:
    """Train, kill, follow, take pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-seeing-")))
        texts = [{"text": f"Number {n} of the texts about a river. " * 30} for n in range(400)]
        (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
        prepare([str(folder / "texts.jsonl")], str(folder / "data"), train_bpe=512)
        (folder / "recipe.yaml").write_text(RECIPE)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        run = folder / "runs/river"

        def start(*words: str) -> subprocess.Popen[str]:
            started = subprocess.Popen(
                [str(BIN / "perdure"), *words], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE if words[0] == "watch" else subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(end, started)
            return started

        launcher = start("train", "recipe.yaml")
        until(lambda: newest_step(run) >= 4, 120, "the first steps")
        opened, watch = time.monotonic(), start("watch", str(run), "--port", "0")
        assert watch.stdout
        link = watch.stdout.readline().split()[1]
        browser = stack.enter_context(Browser())
        browser.open(link)
        browser.run("window.loaded = 'once'; return 1")

        def follows(failures: int, step: int) -> bool:
            cells = browser.run(
                "return [...document.querySelectorAll('.card div')].map(one => one.textContent)"
            )
            reached = next((one for one in cells if one.startswith("step")), "")
            done = re.search(r"([\d,]+)$", reached)
            seen = browser.run("return document.querySelectorAll('li.failed').length")
            return bool(done) and int(done[1].replace(",", "")) >= step and seen >= failures

        for number, at in enumerate(KILLS, 1):
            until(lambda at=at: newest_step(run) >= at, 120, f"step {at}")
            os.kill(ranks_of(launcher.pid)[-number % 2], signal.SIGKILL)
            until(lambda n=number, at=at: follows(n, at + 5), 90, f"failure {number} on the page")
            print(f"the page shows failure {number} and goes on beyond step {at}", flush=True)
        until(lambda: newest_step(run) >= ALL_AT, 120, f"step {ALL_AT}")
        for pid in [launcher.pid, *descendants(launcher.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        launcher.wait()
        time.sleep(4)
        launcher = start("train", "recipe.yaml")
        assert launcher.wait(timeout=240) == 0
        until(lambda: follows(3, STEPS), 60, "the end on the page")
        until(lambda: browser.run(SAMPLES)[0] == f"after step {STEPS}", 60, "the last samples")
        assert "A <b>river</b>" in browser.run(SAMPLES)[1], "a prompt is text"
        browser.run("document.querySelector('section[aria-label$=samples] input').focus()")
        browser.press("ArrowLeft")
        said, _, value = browser.run(SAMPLES)
        assert said == value != f"after step {STEPS}", "the arrow key goes back a step"
        browser.run("document.activeElement.blur()")
        print(f"samples of the last step, and by the arrow key those {said}", flush=True)
        assert browser.run("return window.loaded") == "once", "the page was loaded again"
        ticks = Path(f"/proc/{watch.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        busy = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        lasted = time.monotonic() - opened
        print(f"the page's server took {busy:.2f} s of CPU in {lasted:.0f} s: {busy / lasted:.1%}")
        asked = browser.run("return performance.getEntriesByType('resource').map(one => one.name)")
        host = link.partition("/?")[0]
        assert all(one.startswith(host) for one in asked), asked
        assert browser.complaints() == []
        print(f"one page followed {STEPS} steps and 3 failures in {len(asked)} questions")

        page = folder / "page.html"
        subprocess.run(
            [str(BIN / "perdure"), "report", str(run), "--html", str(page)],
            cwd=folder, env=environment, check=True,
        )  # fmt: skip
        browser.open(page.as_uri())
        for width in WIDTHS.values():
            for scheme in ("light", "dark"):
                name = out / f"seeing-{width}-{scheme}.png"
                name.write_bytes(browser.picture(width, scheme))
                print(name)
        assert browser.complaints() == []
        if out == ROOT / "docs/images":
            (out / "seeing-1600-light.png").replace(out / "seeing.png")
            for other in out.glob("seeing-*-*.png"):
                other.unlink()


def end(process: subprocess.Popen[str]) -> None:
    """End what is still there of a process and its descendants."""
    family = [process.pid, *descendants(process.pid)] if process.poll() is None else []
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / "docs/images")
