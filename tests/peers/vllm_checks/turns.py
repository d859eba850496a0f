"""Bidirectional KV: D keeps the blocks of a response, and the P of the conversation's next turn reads them."""

import json
import time

from .base import check, expect, get, post
from .engines import KEPT_S, alone, generated
from .pair import TURN_IDLE_S

# P computes less than 64 tokens itself (`kv_recompute_threshold`).
PROMPT_BLOCKS, TOKENS = 8, 112
SOURCE = "vllm:prompt_tokens_by_source_total"


def limit(options):
    return 300 + options.rounds * 30


def read_by_prefill(pair):
    return pair.prefill.metric(SOURCE, source="external_kv_transfer")


def counter(pair, name, label):
    """The sum of a counter's series with this label."""
    lines = get(pair.admin + "/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{") and label in line)


def ended(pair, end):
    return counter(pair, "baton_router_kept_turns_ended_total", f'end="{end}"')


def tokens_of(pair, text):
    status, answer = post(pair.prefill.url + "/tokenize", {"model": "demo", "prompt": text})
    expect(status == 200, f"{status}: {answer}")
    return json.loads(answer)["tokens"]


def turn(pair, prompt):
    """The generated tokens."""
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS,
            "return_token_ids": True}
    status, answer = post(pair.url + "/v1/completions", body)
    expect(status == 200, f"{status}: {answer}")
    expect("remote_engine_id" not in answer, "the client gets transfer parameters")
    wanted = alone(pair.prefill, prompt, TOKENS)
    expect(generated(answer) == wanted, f"{generated(answer)} instead of {wanted}")
    return generated(answer)[0][1]


@check("turns", "the prefill engine of a next turn reads the blocks of D, and the texts equal those of one engine",
       kind="turns", limit_s=limit)
def turns(pair):
    before, used = read_by_prefill(pair), ended(pair, "used")
    more = tokens_of(pair, " And then? ")
    for _ in range(pair.rounds):
        prompt = tokens_of(pair, pair.prompt(PROMPT_BLOCKS))
        for _ in range(3):
            prompt = prompt + turn(pair, prompt) + more
    used = ended(pair, "used") - used
    expect(used == 2 * pair.rounds, f"{used:.0f} of {2 * pair.rounds} turns read kept blocks")
    time.sleep(2)
    moved = read_by_prefill(pair) - before
    expect(moved > 0, "P has read no block of D")
    took = pair.home()
    expect(took < TURN_IDLE_S + 5, f"kept blocks were in use {took:.1f} s after the last turn")
    return f"{3 * pair.rounds} turns equal, P read {moved:.0f} tokens of D in {used:.0f} turns, free after {took:.1f} s"


@check("turns-changed", "a turn that differs in one token reads no kept block, and its text is right", kind="turns",
       limit_s=limit)
def changed(pair):
    used = ended(pair, "used")
    for number in range(pair.rounds):
        prompt = tokens_of(pair, pair.prompt(PROMPT_BLOCKS))
        answer = turn(pair, prompt)
        following = prompt + answer + prompt[:16]
        at = number * len(prompt + answer[:-1]) // pair.rounds
        following[at] = following[at] + 1 if following[at] < 100 else following[at] - 1
        turn(pair, following)
    expect(ended(pair, "used") == used, "kept blocks were read")
    took = pair.home()
    expired = ended(pair, "expired")
    expect(expired > 0 and took < TURN_IDLE_S + 5, f"{took:.1f} s after the last turn, {expired:.0f} released")
    return f"{pair.rounds} turns equal without kept blocks, {expired:.0f} released by the router, free after {took:.1f} s"


@check("turns-tokenized", "an engine tells the tokens of a chat, and its next turn reads the blocks of D", kind="turns",
       limit_s=limit)
def tokenized(pair):
    used = ended(pair, "used")
    asked = counter(pair, "baton_router_tokenize_total", 'result="engine"')
    before, equal = read_by_prefill(pair), 0
    for _ in range(pair.rounds):
        messages = [{"role": "user", "content": pair.prompt(PROMPT_BLOCKS)}]
        for _ in range(2):
            body = {"model": "demo", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
            status, answer = post(pair.url + "/v1/chat/completions", body)
            expect(status == 200, f"{status}: {answer}")
            text = json.loads(answer)["choices"][0]["message"]["content"]
            status, answer = post(pair.prefill.url + "/v1/chat/completions", {**body, "cache_salt": "reference"})
            equal += json.loads(answer)["choices"][0]["message"]["content"] == text
            messages = messages + [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    used = ended(pair, "used") - used
    asked = counter(pair, "baton_router_tokenize_total", 'result="engine"') - asked
    expect(equal == 2 * pair.rounds, f"{equal} of {2 * pair.rounds} texts are equal")
    expect(asked >= 2 * pair.rounds, f"{asked:.0f} of {2 * pair.rounds} prompts were tokenized by an engine")
    time.sleep(2)
    moved, took = read_by_prefill(pair) - before, pair.home()
    # A text that is tokenized again may have other tokens, and then no kept block is read.
    return (f"{equal} equal, {asked:.0f} prompts tokenized, {used:.0f} of {pair.rounds} next turns read kept blocks, "
            f"{moved:.0f} tokens of D, free after {took:.1f} s")


@check("turns-chat", "a chat's D uses the token ids of P's reply, whole and streamed", kind="turns", limit_s=limit)
def chat(pair):
    prompt = pair.prompts[0]
    body = {"model": "demo", "messages": prompt["messages"], "temperature": 0, "max_tokens": 24}
    status, answer = post(pair.url + "/v1/chat/completions", body)
    expect(status == 200, f"{status}: {answer}")
    reply = json.loads(answer)
    expect(reply["choices"][0]["message"]["content"].strip() == prompt["answer"], answer)
    expect(not reply.get("prompt_token_ids") and not reply["choices"][0].get("token_ids"), answer)
    status, answer = post(pair.url + "/v1/chat/completions", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    expect(status == 200 and text.strip() == prompt["answer"], f"{status}: {text}")
    expect("token_ids" not in answer.replace('"token_ids":null', ""), answer)
    # vLLM 0.32 returns no parameters in a stream, so its blocks stay until D's own limit.
    took = pair.home()
    expect(took < KEPT_S + 5, f"kept blocks were in use {took:.1f} s after the last response")
    return f"{len(events)} events, blocks free {took:.1f} s after the last response"
