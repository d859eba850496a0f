"""A pair with the NixlPushConnector: P writes the blocks, and both legs are sent at once."""

import json
import time

from .base import check, expect, post
from .clients import Call
from .engines import alone, generated

PROMPT_BLOCKS, TOKENS = 8, 24
# A write that frees D's blocks follows P's prefill.
WRITTEN_S = 20


def limit(options):
    return 300 + options.rounds * 30


def completion(pair, stream=False):
    return {"model": "demo", "prompt": pair.prompt(PROMPT_BLOCKS), "temperature": 0, "ignore_eos": True,
            "max_tokens": TOKENS, "stream": stream, "return_token_ids": not stream}


@check("push-texts", "texts equal those of one engine; after the first request both legs are sent at once", kind="push",
       limit_s=limit)
def texts(pair):
    moved = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    equal, seconds = 0, []
    for _ in range(pair.rounds):
        body = completion(pair)
        begun = time.monotonic()
        status, answer = post(pair.url + "/v1/completions", body)
        seconds.append(time.monotonic() - begun)
        expect(status == 200, f"{status}: {answer}")
        equal += generated(answer) == alone(pair.prefill, body["prompt"], TOKENS)
    expect(equal == pair.rounds, f"{equal} of {pair.rounds} texts are equal")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        now = pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        if now - moved >= pair.rounds * PROMPT_BLOCKS * 16:
            break
        time.sleep(0.1)
    expect(now > moved, "no prompt token was transferred")
    took = pair.home()
    expect(took < WRITTEN_S, f"blocks were in use {took:.1f} s after the last request")
    return f"{equal} of {pair.rounds} equal, {now - moved:.0f} tokens moved, {json.dumps(sorted(seconds)[-3:])} s at most"


@check("push-chat", "a chat and a stream are answered, and a request with several choices needs no transfer",
       kind="push", limit_s=limit)
def chat(pair):
    messages = pair.prompts[0]["messages"]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    status, answer = post(pair.url + "/v1/chat/completions", body)
    expect(status == 200, f"{status}: {answer}")
    expect(json.loads(answer)["choices"][0]["message"]["content"].strip() == pair.prompts[0]["answer"], answer)
    seen = Call(pair.url, "/v1/completions", completion(pair, stream=True)).read_to_end()
    expect(b"[DONE]" in seen, f"the stream ended early: {seen[-200:]!r}")
    status, answer = post(pair.url + "/v1/completions", {**completion(pair), "n": 2, "temperature": 1})
    expect(status == 200 and len(json.loads(answer)["choices"]) == 2, f"{status}: {answer}")
    took = pair.home()
    return f"blocks free {took:.1f} s after the last response"


@check("push-cancel", "clients leave at drawn instants, and both engines free their blocks without a lease's expiry",
       kind="push", limit_s=limit)
def cancel(pair):
    begun = time.monotonic()
    status, answer = post(pair.url + "/v1/completions", completion(pair))
    expect(status == 200, f"{status}: {answer}")
    whole, left, slowest = time.monotonic() - begun, 0, 0.0
    expired = pair.prefill.expired()
    for number in range(pair.rounds):
        call = Call(pair.url, "/v1/completions", completion(pair, stream=bool(number % 2)))
        time.sleep(pair.random.uniform(0, whole))
        left += not call.leave("rst" if number % 4 // 2 else "fin")
        slowest = max(slowest, pair.home())
    expired = pair.prefill.expired() - expired
    return f"{left} of {pair.rounds} left, blocks of both free after {slowest:.1f} s at most, {expired} leases expired"
