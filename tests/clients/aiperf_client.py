#!/usr/bin/env python3
"""aiperf's load against Baton's router: its own records are compared with what was asked for. Standard library only.

Its cancels are checked by tests/peers/aiperf.sh, of which a short form runs here. Prints one line for each thing it did;
exits with 1 if any of them failed. See README.md in this folder.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request

from suite import Skip, check, everything_home, expect, main

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN_S = 300
COMMAND = os.environ.get("AIPERF", "aiperf")


class Context:
    """The model."""

    def __init__(self, place):
        self.place = place
        with urllib.request.urlopen(place.url + "/v1/models", timeout=30) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def run(self, endpoint, *options, url=None, model=None, tokens=16):
        """aiperf's records of 40 requests, 8 at once."""
        with tempfile.TemporaryDirectory(prefix="baton-aiperf-") as folder:
            command = [COMMAND, "profile", "--model", model or self.model, "--url", url or self.place.url,
                       "--endpoint-type", endpoint, "--tokenizer", str(ROOT / "engine/models/demo"),
                       "--request-count", "40", "--concurrency", "8", "--isl", "64", "--osl", str(tokens),
                       "--random-seed", "7", "--ui", "none", "--export-level", "records", "--artifact-dir", folder, *options]
            environment = {**os.environ, "AIPERF_LOG_LEVEL": "WARNING"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
            records = pathlib.Path(folder) / "profile_export.jsonl"
            expect(records.exists(), f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return [json.loads(line) for line in records.read_text().splitlines()]


def complete(records, tokens=None):
    """All requests succeeded, with the server's count of tokens."""
    errors = [record["error"] for record in records if record.get("error")]
    expect(len(records) == 40 and not errors, f"{len(records)} records, {len(errors)} errors: {errors[:1]}")
    found = sorted({record["metrics"]["output_sequence_length"]["value"] for record in records})
    expect(tokens is None or found == [tokens], f"{found} output tokens instead of {tokens}")
    return f"40 requests, {found} tokens"


EXACT = ("--use-server-token-count", "--extra-inputs", "ignore_eos:true")


@check("streamed chats")
def chats(ctx):
    return f"{complete(ctx.run('chat', '--streaming', *EXACT), 16)}; {everything_home(ctx)}"


@check("whole completions")
def completions(ctx):
    return f"{complete(ctx.run('completions', *EXACT), 16)}; {everything_home(ctx)}"


@check("streamed messages")
def messages(ctx):
    return f"{complete(ctx.run('messages', '--streaming', '--use-server-token-count'))}; {everything_home(ctx)}"


@check("streamed responses of /v1/responses")
def responses(ctx):
    url = ctx.place.scripted_or_skip()
    # The scripted engine always has three tokens.
    options = ("--streaming", "--use-server-token-count")
    return complete(ctx.run("responses", *options, url=url, model="scripted"), 3)


@check("an unknown model: 404 in its records")
def unknown(ctx):
    codes = {(record.get("error") or {}).get("code") for record in ctx.run("chat", model="no-such-model")}
    expect(codes == {404}, codes)
    return "40 times 404"


@check("cancelled streams, by tests/peers/aiperf.sh")
def cancelled(ctx):
    if not ctx.place.built_in:
        raise Skip("it starts a `baton up` of its own")
    # On a busy machine an earlier cancel may reach no engine, and a later one may cross the end of the response.
    command = [ROOT / "tests/peers/aiperf.sh", "--requests", "60", "--rates", "50", "--delays", "0.05"]
    environment = {**os.environ, "AIPERF": shutil.which(COMMAND)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * RUN_S, check=False)
    lines = done.stdout.strip().splitlines()
    expect(done.returncode == 0 and lines[0].startswith("ok"), f"{done.returncode}: {done.stdout}{done.stderr[-1000:]}")
    return lines[-2]


if __name__ == "__main__":
    shown = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    sys.exit(main(f"aiperf {shown}", __doc__, Context))
