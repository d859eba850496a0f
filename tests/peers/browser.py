"""/top and the report of `baton bench disconnect` in a real browser. See browser.sh. Standard library only.

Before it looks at them it looks at a page on which everything is wrong, and must see all of it."""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

from chromium import COLOURS, Browser, Failed, Page
from processes import ROOT, ask, free_port, running

CONTRAST_MIN = 4.5
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
# A4 at 96 dots per inch, less the report's margins of 12 mm. Blink lays out up to half as much again and shrinks it;
# what is wider is cut.
PAPER, SHRINKS = 703, 1.5
# Of /top under load: lists have a bound, which is lower on a phone.
HIGH_MAX = 8000
OVERFLOW = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
WRONG = """<!doctype html><meta http-equiv="Content-Security-Policy"
content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src *">
<style>body{background:#777;color:#888}</style>
<div style="width:3000px">hardly to be read</div><img src="http://127.0.0.1:9/x.png">
<svg width="0" height="0"></svg>
<script>console.error("planted"); fetch("http://127.0.0.1:9/y").catch(() => 0); throw new Error("thrown")</script>"""


def luminance(colour):
    channels = [value / 255 for value in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """By WCAG 2: from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def wrong(page, allowed, room=0):
    """The defects of the visible page, and its colours."""
    found = page.complaints()
    found += [f"asks {url}" for url in page.requests() if not url.startswith(allowed)]
    beyond = page.ask(OVERFLOW)
    if beyond > room:
        widest = page.ask("""[...document.body.querySelectorAll("*")]
            .map((e) => [e.getBoundingClientRect().right, e.tagName + "." + e.className])
            .sort((a, b) => b[0] - a[0])[0].join(" ")""")
        found.append(f"is {beyond} px wider than the window: {widest}")
    colours = page.ask(COLOURS)
    of_ink = contrast(colours["ink"], colours["ground"])
    if of_ink < CONTRAST_MIN:
        found.append(f"text {colours['ink']} on {colours['ground']} has a contrast of {of_ink:.2f}")
    found += [f"`{text}` has a contrast of {ratio}" for ratio, text in colours["worst"] if ratio < CONTRAST_MIN]
    return found, colours


def flat_svgs(page):
    return page.ask("""[...document.querySelectorAll("svg")].map((e) => e.getBoundingClientRect())
        .filter((r) => !(r.width > 0 && r.height > 0)).length""")


def sees_what_is_planted(browser, folder):
    """The judge's own test."""
    planted = folder / "wrong.html"
    planted.write_text(WRONG)
    with Page(browser, 1280, "light") as page:
        page.open(planted.as_uri())
        page.until("the exception is told", lambda: len(page.complaints()) >= 3)
        found, _ = wrong(page, planted.as_uri())
        text = "\n".join(found)
        for sign in ("console: planted", "exception: Error: thrown", "ecurity", "asks http://127.0.0.1:9/y", "px wider",
                     "on [119, 119, 119] has a contrast", "`hardly to be read` has a contrast"):
            if sign not in text:
                raise Failed(f"the planted page is called well of `{sign}`: {text}")
        if flat_svgs(page) != 1:
            raise Failed("an SVG without a size is not seen")
    print("== a page on which everything is wrong: all of it is seen")


class Looks:
    """The checked pages and their defects."""

    def __init__(self, browser, out):
        self.browser, self.out, self.found, self.seen = browser, out, [], {}

    def at(self, name, url, allowed, width, scheme, more, medium=""):
        """Opens a page and judges it; `more` does what only this page has."""
        with Page(self.browser, width, scheme, medium) as page:
            said, found = "", []
            try:
                page.open(url)
                said = more(page) or ""
                found, colours = wrong(page, allowed, room=width * (SHRINKS - 1) if medium == "print" else 0)
                self.seen[name, width, scheme] = colours["ground"], colours["ink"]
                said += (f", contrast {contrast(colours['ink'], colours['ground']):.1f} "
                         f"(of {colours['texts']} texts {colours['worst'][0][0]} or more)")
            except Failed as failed:
                found = [str(failed), *page.complaints()]
            picture = f"{name}-{scheme}-{width}.png"
            if self.out:
                # A dialog is in the window, not on the page.
                page.picture(self.out / picture, whole=not page.ask('Boolean(document.querySelector("dialog[open]"))'))
        for one in found:
            self.found.append(f"{name}, {scheme}, {width} px: {one}")
        word, text = "FAIL" if found else "ok  ", "; ".join(found) or said.lstrip(", ")
        print(f"{word} {name}, {scheme}, {width} px: {text}", flush=True)

    def schemes_differ(self, name):
        for width in WIDTHS:
            one, other = (self.seen.get((name, width, scheme)) for scheme in SCHEMES)
            if one and other and (one[0] == other[0] or one[1] == other[1]):
                self.found.append(f"{name}, {width} px: the same colours in light and in dark: {one}, {other}")


def report(looks, file):
    url = file.as_uri()

    def svgs(page):
        count, flat = page.ask('document.querySelectorAll("svg").length'), flat_svgs(page)
        if not count or flat:
            raise Failed(f"{flat} of {count} SVGs have no size")
        return f"{count} SVGs"

    for scheme in SCHEMES:
        for width in WIDTHS:
            looks.at("report", url, url, width, scheme, svgs)

    def on_paper(page):
        """As it is laid out for paper."""
        said, wide = svgs(page), page.ask("document.scrollingElement.scrollWidth")
        return f"{said}, shrunk to {100 * min(1, PAPER / wide):.0f} % to fit the paper"

    def printed(page):
        """As it is really printed from a dark screen, and the colours that it has meanwhile."""
        if luminance(page.ask(COLOURS)["ground"]) > 0.2:
            raise Failed("the screen is not dark")
        page.ask("""matchMedia("print").addEventListener("change", (event) => { if (event.matches) globalThis.onPaper =
            getComputedStyle(document.body).backgroundColor + " " + getComputedStyle(document.body).color; })""")
        pdf = page.printed()
        pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
        if not pdf.startswith(b"%PDF") or not pages:
            raise Failed("it cannot be printed")
        if looks.out:
            (looks.out / "report.pdf").write_bytes(pdf)
        colours = re.findall(r"rgba?\((\d+), (\d+), (\d+)", page.ask("globalThis.onPaper") or "")
        if len(colours) != 2:
            raise Failed("it has not been told that it is printed")
        ground, ink = ([int(value) for value in colour] for colour in colours)
        if luminance(ground) < 0.8 or contrast(ground, ink) < CONTRAST_MIN:
            raise Failed(f"it is printed as {ink} on {ground}")
        return f"{pages} pages of paper, {ink} on {ground}"

    looks.at("report-print", url, url, PAPER, "light", on_paper, medium="print")
    looks.at("report-printed", url, url, WIDTHS[0], "screen", printed)
    looks.schemes_differ("report")


def top(looks, admin):
    url, origin = f"http://{admin}/top", f"http://{admin}/"

    def lives(page):
        page.until("engines have bars", lambda: page.ask(
            'document.querySelectorAll("#engines .engine").length === 2 && '
            '[...document.querySelectorAll("#engines .engine .bar")].every((bar) => '
            '[...bar.children].some((part) => '
            'part.getBoundingClientRect().width > 0 && bar.getBoundingClientRect().height > 0))'))
        numbers = 'document.querySelector("main").innerText.replace(/[^0-9.]+/g, " ")'
        polls = lambda: sum(asked.endswith("/debug/kv") for asked in page.requests())
        before, asked = page.ask(numbers), polls()
        page.until("it goes on by itself: numbers change", lambda: polls() > asked and page.ask(numbers) != before)
        high = page.ask("document.scrollingElement.scrollHeight")
        if high > HIGH_MAX:
            raise Failed(f"it is {high} px long")
        return f"2 engines with bars, {polls()} polls, and numbers change"

    def shown(page):
        """The timeline that is open: its request and how many moments."""
        return page.ask('(() => { const open = document.querySelector("#timeline[open]"); '
                        'const moments = document.querySelectorAll("#timeline .moment").length;'
                        'return open && moments ? [open.querySelector(".mono").textContent, moments] : null; })()')

    def chosen(page):
        """Clicks on a request until one is open: the list is redrawn each second."""
        said = lives(page)
        for _ in range(10):
            place = page.until("requests are in flight", lambda: page.ask(
                '(() => { const link = document.querySelector("#requests button.link"); if (!link) return null; '
                'link.scrollIntoView({block: "center"});'
                'const r = link.getBoundingClientRect(); '
                'return [r.x + r.width / 2, r.y + r.height / 2, link.textContent]; })()'))
            page.click(*place[:2])
            try:
                request, moments = page.until("a timeline is open", lambda: shown(page), 3)
            except Failed:
                # The request left the list, or is older than the remembered ones.
                page.ask('document.getElementById("timeline").close()')
                continue
            if request not in page.ask("decodeURIComponent(location.hash)"):
                raise Failed(f"the address does not name {request}")
            return f"{said}; a click on {request} shows {moments} moments"
        raise Failed("no click on a request shows its timeline")

    for scheme in SCHEMES:
        for width in WIDTHS:
            looks.at("top", url, origin, width, scheme, lives)
            looks.at("top-request", url, origin, width, scheme, chosen)

    # A link to one request, which has ended or ends soon.
    oldest = ask(admin, "GET", "/debug/kv")["requests"]["oldest"]
    name = oldest[0]["request_id"]

    def linked(page):
        request, moments = page.until("the linked request is open", lambda: shown(page))
        if request != name:
            raise Failed(f"{request} is shown where {name} was linked")
        # Also from its end, on a screen that has no Escape.
        place = page.ask("""(() => {
            const open = document.getElementById("timeline"); open.scrollTop = open.scrollHeight;
            const r = open.querySelector(".head button").getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; })()""")
        page.click(*place)
        page.until("Close closes it",
                   lambda: page.ask('!document.querySelector("dialog[open]") && location.hash === ""'))
        return f"#request={name} shows {moments} moments, and closes"

    looks.at("top-linked", f"{url}#request={name}", origin, WIDTHS[1], "light", linked)
    looks.schemes_differ("top")


def up(baton, folder, processes):
    """`baton up` with load, until the block ends: its admin listener."""
    log = open(folder / "up.log", "w")
    words = [baton, "up", "--listen", f"127.0.0.1:{free_port()}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.PIPE, text=True)
    processes.append(process)
    url = admin = None
    for line in process.stdout:
        if found := re.search(r"Baton is up after .*: (\S+)/v1", line):
            url = found[1]
        if found := re.search(r"Watch it: http://(\S+)/top", line):
            admin = found[1]
        if url and admin:
            break
    else:
        sys.exit(f"baton up ended:\n{(folder / 'up.log').read_text()[-2000:]}")
    threading.Thread(target=process.stdout.read, daemon=True).start()
    words = [baton, "bench", "serve", "--url", url, "--duration", "900", "--max-concurrency", "3",
             "--input-len", "120", "--output-len", "400", "--json"]
    load = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=open(folder / "load.log", "w"))
    processes.append(load)
    end = time.monotonic() + 60
    while not ask(admin, "GET", "/debug/kv")["requests"]["in_flight"]:
        if load.poll() is not None or time.monotonic() > end:
            sys.exit(f"there is no load:\n{(folder / 'load.log').read_text()[-2000:]}")
        time.sleep(0.2)
    return admin


def newest_report():
    reports = sorted(ROOT.glob("bench/results/disconnect/[0-9]*/report.html"))
    return reports[-1] if reports else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baton", nargs="?", default=os.environ.get("BATON_BIN") or str(ROOT / "target/release/baton"))
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="keep pictures of the pages here, and the printed report")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", default=newest_report(),
                        help="the newest that is committed, by default")
    options = parser.parse_args()
    if not os.access(options.baton, os.X_OK):
        sys.exit(f"no {options.baton}: cargo build --release first, or name the binary")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    with running("browser") as (folder, processes), Browser(os.environ.get("CHROMIUM", "chromium")) as browser:
        sees_what_is_planted(browser, folder)
        looks = Looks(browser, options.out)
        report(looks, options.report.resolve())
        try:
            top(looks, up(options.baton, folder, processes))
        finally:
            # `baton up` also ends its engines.
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)
    for one in looks.found:
        print("!!", one, file=sys.stderr)
    return 1 if looks.found else 0


if __name__ == "__main__":
    sys.exit(main())
