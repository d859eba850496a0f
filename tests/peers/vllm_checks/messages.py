"""Anthropic's Messages API and the Responses API of stock vLLM, disaggregated by the router."""

import json
import time

from .base import check, expect, post
from .clients import Call

TOKENS = 16


def moved(pair):
    return pair.decode_metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def wait_moved(pair, before):
    """vLLM publishes its counts some time after the response."""
    deadline = time.monotonic() + 5
    while moved(pair) <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    expect(moved(pair) > before, "no prompt token was transferred")
    return moved(pair) - before


def events(text):
    """The events of a stream: names and data."""
    found = []
    for frame in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line and not line.startswith(":"))
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def streamed(pair, path, body):
    call = Call(pair.url, path, body)
    call.socket.settimeout(60)
    while b"message_stop" not in call.seen and b"response.completed" not in call.seen:
        piece = call.socket.recv(65536)
        expect(piece, f"the stream ended early: {call.seen[-300:]!r}")
        call.seen += piece
    call.socket.close()
    # The chunk sizes are lines without a colon.
    return events(call.seen.decode().split("\r\n\r\n", 1)[1].replace("\r\n", "\n"))


@check("messages", "Messages are disaggregated, whole and streamed, and errors have Anthropic's envelope", kind="stock")
def messages(pair):
    before, prompt = moved(pair), pair.prompts[0]
    body = {"model": "demo", "max_tokens": TOKENS, "temperature": 0, "messages": prompt["messages"]}
    status, answer = post(pair.url + "/v1/messages", body)
    expect(status == 200, f"{status}: {answer}")
    whole = json.loads(answer)
    expect(whole["type"] == "message" and whole["content"][0]["text"].strip() == prompt["answer"], answer)
    expect(not whole.get("kv_transfer_params"), "the answer has transfer parameters")
    tokens = wait_moved(pair, before)
    seen = streamed(pair, "/v1/messages", {**body, "stream": True})
    names = [name for name, _ in seen]
    expect(names[0] == "message_start" and names[-1] == "message_stop", names)
    text = "".join(data["delta"].get("text", "") for name, data in seen if name == "content_block_delta")
    expect(text.strip() == prompt["answer"], text)
    status, answer = post(pair.url + "/v1/messages/count_tokens", {k: body[k] for k in ("model", "messages")})
    expect(status == 200 and json.loads(answer)["input_tokens"] > 0, f"{status}: {answer}")
    for wrong, expected in (({**body, "max_tokens": 0}, 400), ({**body, "model": "none"}, 404)):
        status, answer = post(pair.url + "/v1/messages", wrong)
        expect(status == expected and json.loads(answer)["type"] == "error", f"{status}: {answer}")
    took = pair.home()
    return f"{tokens:.0f} tokens moved, {len(seen)} events, blocks free {took:.1f} s after the last response"


@check("responses", "Responses are disaggregated, whole and streamed, and one that names another is computed by D",
       kind="stock")
def responses(pair):
    before, prompt = moved(pair), pair.prompts[0]
    body = {"model": "demo", "max_output_tokens": TOKENS, "temperature": 0, "input": prompt["messages"]}
    status, answer = post(pair.url + "/v1/responses", body)
    expect(status == 200, f"{status}: {answer}")
    whole = json.loads(answer)
    expect(not whole.get("kv_transfer_params"), "the answer has transfer parameters")
    tokens = wait_moved(pair, before)
    seen = streamed(pair, "/v1/responses", {**body, "stream": True})
    names = [name for name, _ in seen]
    expect(names[0] == "response.created" and names[-1] == "response.completed", names)
    expect(not seen[-1][1]["response"].get("kv_transfer_params"), "the last event has transfer parameters")
    status, answer = post(pair.url + "/v1/responses", {**body, "previous_response_id": "resp_unknown"})
    expect(status == 404, f"{status}: {answer}")
    took = pair.home()
    return f"{tokens:.0f} tokens moved, {len(seen)} events, blocks free {took:.1f} s after the last response"
