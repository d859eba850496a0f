#!/usr/bin/env python3
"""guidellm's benchmark against Baton's router: its own report is compared with what was asked for. Standard library only.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from suite import Skip, aborted, check, everything_home, expect, main

TOKENIZER = pathlib.Path(__file__).resolve().parents[2] / "engine/models/demo"
RUN_S = 300
COMMAND = os.environ.get("GUIDELLM", "guidellm")


class Context:
    """The model, and a folder for reports."""

    def __init__(self, place):
        self.place = place
        with urllib.request.urlopen(place.url + "/v1/models", timeout=30) as answer:
            self.model = json.load(answer)["data"][0]["id"]
        self.folder = tempfile.TemporaryDirectory(prefix="baton-guidellm-")

    def run(self, backend, profile, constraint, tokens=16, url=None, model=None):
        """The requests of a benchmark, by how they ended."""
        report = pathlib.Path(self.folder.name) / "report.json"
        report.unlink(missing_ok=True)
        target = f"kind=openai_http,target={url or self.place.url},model={model or self.model},{backend}"
        command = [COMMAND, "run", "--backend", target, "--profile", profile, "--constraint", constraint,
                   "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
                   "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={tokens}",
                   "--output", f"kind=json,path={report}", "--disable-console"]
        # The tokenizer is in the repository. Each of ten workers would load the packages again.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=environment, check=False)
        expect(report.exists(), f"guidellm ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return json.loads(report.read_text())["benchmarks"][0]["requests"]


def complete(requests, count, tokens=16):
    """All requests succeeded, with the tokens that were asked for."""
    ended = {name: len(of or []) for name, of in requests.items()}
    expect(ended["successful"] == count and not ended["errored"], f"{ended}: {(requests['errored'] or [None])[0]}")
    found = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    expect(found == {tokens}, f"{found} output tokens instead of {tokens}")
    expect(all(request["output"] for request in requests["successful"]), "a text each")
    return f"{count} requests, {tokens} tokens each"


@check("40 streamed chats, 8 at once")
def chats(ctx):
    run = ctx.run("request_format=/v1/chat/completions", "kind=concurrent,streams=8", "kind=max_requests,count=40")
    pieces = {request["info"]["timings"]["token_iterations"] for request in run["successful"]}
    return f"{complete(run, 40)} in {sorted(pieces)} pieces; {everything_home(ctx)}"


@check("40 whole completions, 8 at once")
def completions(ctx):
    run = ctx.run("request_format=/v1/completions,stream=false", "kind=concurrent,streams=8", "kind=max_requests,count=40")
    return f"{complete(run, 40)}; {everything_home(ctx)}"


@check("streams that its time limit cuts")
def cut(ctx):
    before = aborted(ctx)
    run = ctx.run("request_format=/v1/chat/completions", "kind=concurrent,streams=8", "kind=max_duration,seconds=3", 1500)
    home = everything_home(ctx)
    expect(not run["errored"], run["errored"])
    expect(run["incomplete"], "none was cut")
    found = aborted(ctx) - before
    known = ctx.place.engines and ctx.place.built_in
    expect(not known or found > 0, "no engine aborted a request")
    return f"{len(run['successful'])} complete, {len(run['incomplete'])} cut, {found:.0f} aborted in engines; {home}"


@check("8 streamed responses of /v1/responses")
def responses(ctx):
    url = ctx.place.scripted_or_skip()
    # The scripted engine always has three tokens.
    run = ctx.run("request_format=/v1/responses", "kind=synchronous", "kind=max_requests,count=8", 16, url, "scripted")
    return complete(run, 8, 3)


@check("an unknown model fails, and is not counted as a success")
def unknown(ctx):
    try:
        run = ctx.run("validate_backend=false", "kind=synchronous", "kind=max_requests,count=2", model="no-such-model")
    except AssertionError as error:
        raise Skip(f"guidellm writes no report: {error}") from error
    expect(not run["successful"] and len(run["errored"]) == 2, f"{[len(of or []) for of in run.values()]}")
    expect("404" in run["errored"][0]["info"]["error"], run["errored"][0]["info"]["error"])
    return run["errored"][0]["info"]["error"][:160]


if __name__ == "__main__":
    shown = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    sys.exit(main(shown.splitlines()[-1], __doc__, Context))
