"""Chromium by its DevTools protocol over a pipe, and what a page is asked there. Standard library only.

Messages are JSON with a NUL behind each, on the browser's descriptors 3 (to it) and 4 (from it)
(https://chromedevtools.github.io/devtools-protocol/)."""

import base64
import collections
import fcntl
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time

PATIENCE_S = 60
ANSWER_BYTES_MAX = 256 << 20
OPTIONS = [
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--no-default-browser-check", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--metrics-recording-only", "--mute-audio",
    # As on a dark screen, without an emulated scheme.
    "--blink-settings=preferredColorScheme=0",
    # Requests of a page beyond this machine are refused and recorded.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# Every visible text with its colour and background: the worst contrasts.
COLOURS = """(() => {
  const parse = (text) => { const n = (text.match(/[\\d.]+/g) || []).map(Number);
    return text.startsWith("rgb") ? [n[0], n[1], n[2], n[3] ?? 1]
      : text.startsWith("color(srgb") ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : null; };
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const luminance = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches
    && getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const canvas = dark ? [18, 18, 18] : [255, 255, 255];
  const behind = (node) => { const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor);
      if (c && c[3] > 0) { layers.push(c); if (c[3] === 1) break; }
    }
    return layers.reverse().reduce((below, top) => over(top, below), canvas); };
  const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT", "TITLE"].includes(node.tagName)) continue;
    if (style.visibility !== "visible") continue;
    if (!node.getClientRects().length) continue;
    const ink = parse(node instanceof SVGElement ? style.fill : style.color), ground = behind(node);
    if (!ink) continue;
    const [a, b] = [luminance(over(ink, ground)), luminance(ground)].sort((x, y) => y - x);
    texts.push([Math.round(100 * (a + .05) / (b + .05)) / 100, text.data.trim().slice(0, 40)]);
  }
  texts.sort((x, y) => x[0] - y[0]);
  return { ground: behind(document.body).map(Math.round), ink: parse(getComputedStyle(document.body).color).slice(0, 3),
    texts: texts.length, worst: texts.slice(0, 3) };
})()"""


class Failed(Exception):
    """The browser, or a page, did not carry out a command."""


class Browser:
    """A browser of its own, with a folder of its own, that ends with the block."""

    def __init__(self, command):
        self.folder = tempfile.TemporaryDirectory(prefix="baton-browser-", ignore_cleanup_errors=True)
        (read, self.into), (self.out, write) = os.pipe(), os.pipe()
        # Far from 3 and 4, so that neither is overwritten before it is copied.
        low = [read, write]
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in low)
        for fd in low:
            os.close(fd)
        self.log = open(pathlib.Path(self.folder.name) / "log", "w+")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [command, *OPTIONS, *root, f"--user-data-dir={self.folder.name}/profile"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *words]
        self.process = subprocess.Popen(shell, pass_fds=(read, write), stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log)
        os.close(read)
        os.close(write)
        self.number, self.rest, self.events = 0, b"", collections.defaultdict(list)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.into)
        os.close(self.out)
        self.log.close()
        self.folder.cleanup()

    def send(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.into, data):]
        return self.number

    def receive(self, seconds):
        """One message, or None; events are put to those of their session."""
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            if not select.select([self.out], [], [], max(0, end - time.monotonic()))[0]:
                return None
            some = os.read(self.out, 1 << 20)
            if not some or len(self.rest) > ANSWER_BYTES_MAX:
                self.log.seek(0)
                raise Failed(f"the browser has ended: {self.log.read()[-1000:]}")
            self.rest += some
        one, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(one)
        if "method" in message:
            self.events[message.get("sessionId")].append((message["method"], message["params"]))
        return message

    def call(self, method, session=None, **params):
        number = self.send(method, session, **params)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            message = self.receive(end - time.monotonic())
            if message and message.get("id") == number:
                if "error" in message:
                    raise Failed(f"{method}: {message['error']}")
                return message["result"]
        raise Failed(f"{method}: no answer within {PATIENCE_S} s")


class Page:
    """A tab of this width, in this scheme (`light`, `dark`, or as the screen is), on this medium."""

    def __init__(self, browser, width, scheme, medium=""):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(domain + ".enable")
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=844 if phone else 900,
                  deviceScaleFactor=2 if phone else 1, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme in ("light", "dark") else []
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.events.pop(self.session, None)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def told(self):
        """All events of the tab so far."""
        while self.browser.receive(0):
            pass
        return self.browser.events[self.session]

    def open(self, url):
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise Failed(f"{url}: {failed}")
        self.until("the page is loaded", lambda: any(name == "Page.loadEventFired" for name, _ in self.told()))

    def ask(self, expression):
        """The value of a JavaScript expression."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise Failed(f"{expression[:80]}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def until(self, what, look, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(0.1)
        raise Failed(f"not within {seconds} s: {what}")

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def printed(self):
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def complaints(self):
        """Errors on the console, exceptions, and what the content security policy forbade."""
        found = []
        for name, told in self.told():
            if name == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
                words = (str(word.get("value", word.get("description"))) for word in told["args"])
                found.append("console: " + " ".join(words))
            elif name == "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                found.append("exception: " + details.get("exception", {}).get("description", details["text"]))
            elif name == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(f"{told['entry']['source']}: {told['entry']['text']}")
            elif name == "Audits.issueAdded" and told["issue"]["code"] == "ContentSecurityPolicyIssue":
                found.append("content security policy: " + json.dumps(told["issue"]["details"])[:200])
        return found

    def requests(self):
        """Addresses of requests that leave the page."""
        urls = [told["request"]["url"] for name, told in self.told() if name == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "about:"))]
