#!/usr/bin/env python3
"""Texts of one prompt in batches of different sizes, of a pair and of one engine, without cancels and faults.

    bench/gpu/batching.py BATON [--tokens N] [-- options of the engines]

Repeats 300 prompts of 120 words with 1 to 64 clients, and prints how many texts differ from those of the first pass: one
request at a time, nothing cached. In bf16 the order of summation depends on the batch. In f32 (`-- --device cuda:0
--kv-cache-dtype f32`) a difference is a defect. Standard library only.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS, WORDS, CLIENTS, START_S = 300, 120, (1, 8, 64, 64), 60
PAIR, ENGINE = "http://127.0.0.1:8000", "127.0.0.1:8300"


def prompts():
    words = re.findall(r"[A-Za-z]+", (ROOT / "README.md").read_text())
    source = random.Random(3)
    return [" ".join(source.choice(words) for _ in range(WORDS)) for _ in range(PROMPTS)]


def ask(url, prompt, tokens):
    body = {"model": "baton-demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def wait(process, url):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return ask(url, "a", 1)
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.3)
    raise SystemExit(f"{url} does not answer")


def study(what, command, url, tokens):
    with socket.socket() as probe:
        if probe.connect_ex((urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port)) == 0:
            raise SystemExit(f"another server answers at {url}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(process, url)
        asked = prompts()
        first = [ask(url, prompt, tokens) for prompt in asked]
        for clients in CLIENTS:
            with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                texts = list(pool.map(lambda prompt: ask(url, prompt, tokens), asked))
            differ = sum(text != before for text, before in zip(texts, first))
            print(f"{what:6} {clients:3} clients  {differ:3} of {len(first)} differ", flush=True)
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("options", nargs="*", help="options of the engines, after --")
    given = parser.parse_args()
    study("pair", [given.baton, "up", "--", *given.options], PAIR, given.tokens)
    study("engine", [given.baton, "engine", "--listen", ENGINE, *given.options], f"http://{ENGINE}", given.tokens)


if __name__ == "__main__":
    main()
