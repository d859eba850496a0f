"""A pair whose connector keeps KV blocks in files: P saves them, D loads them, and there is no handoff."""

import json
import pathlib
import time

from .base import check, expect, post
from .clients import Call
from .engines import alone, generated

PROMPT_BLOCKS, TOKENS = 8, 24


def limit(options):
    return 300 + options.rounds * 30


def completion(pair, stream=False):
    return {"model": "demo", "prompt": pair.prompt(PROMPT_BLOCKS), "temperature": 0, "ignore_eos": True,
            "max_tokens": TOKENS, "stream": stream, "return_token_ids": not stream}


@check("store-texts", "texts equal those of one engine, and D loads the blocks that P has saved", kind="store",
       limit_s=limit)
def texts(pair):
    source = "vllm:prompt_tokens_by_source_total"
    before, equal = pair.decode_metric(source, source="external_kv_transfer"), 0
    for _ in range(pair.rounds):
        body = completion(pair)
        status, answer = post(pair.url + "/v1/completions", body)
        expect(status == 200, f"{status}: {answer}")
        wanted = alone(pair.prefill, body["prompt"], TOKENS)
        equal += generated(answer) == wanted
    loaded = pair.decode_metric(source, source="external_kv_transfer") - before
    saved = len(list(pathlib.Path(pair.folder.name).iterdir()))
    expect(equal == pair.rounds, f"{equal} of {pair.rounds} texts are equal")
    expect(saved >= pair.rounds and loaded > 0, f"{saved} prompts saved, {loaded:.0f} tokens loaded")
    return f"{equal} of {pair.rounds} equal, {saved} prompts saved, {loaded:.0f} tokens loaded by D"


@check("store-cancel", "clients leave at drawn instants, and no block stays in use", kind="store", limit_s=limit)
def cancel(pair):
    begun = time.monotonic()
    status, answer = post(pair.url + "/v1/completions", completion(pair))
    expect(status == 200, f"{status}: {answer}")
    whole, left, slowest = time.monotonic() - begun, 0, 0.0
    for number in range(pair.rounds):
        call = Call(pair.url, "/v1/completions", completion(pair, stream=bool(number % 2)))
        time.sleep(pair.random.uniform(0, whole))
        left += not call.leave("rst" if number % 4 // 2 else "fin")
        slowest = max(slowest, pair.home())
    return f"{left} of {pair.rounds} left, blocks of both free after {slowest:.1f} s at most"


@check("store-chat", "a chat and a stream are answered", kind="store", limit_s=limit)
def chat(pair):
    prompt = pair.prompts[0]
    body = {"model": "demo", "messages": prompt["messages"], "temperature": 0, "max_tokens": TOKENS}
    status, answer = post(pair.url + "/v1/chat/completions", body)
    expect(status == 200, f"{status}: {answer}")
    expect(json.loads(answer)["choices"][0]["message"]["content"].strip() == prompt["answer"], answer)
    seen = Call(pair.url, "/v1/completions", completion(pair, stream=True)).read_to_end()
    expect(b"[DONE]" in seen, f"the stream ended early: {seen[-200:]!r}")
    return f"blocks free {pair.home():.1f} s after the last response"
