#!/usr/bin/env python3
"""The official OpenAI client with Baton: a completion, a chat, a stream and a cancelled stream.

    cargo run --release -- up             # in another terminal
    pip install openai
    python3 examples/openai_client.py

BATON_URL, BATON_MODEL and BATON_KEY select another router, model and API key.
"""

import os

from openai import OpenAI

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("BATON_MODEL", "baton-demo")
# `baton up` needs no key, but the client requires a value.
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BATON_KEY", "unused"))

# The built-in model recalls facts from its prompt.
FACTS = "Alice lives in Paris. Bob has a dog named Rex. The red box holds a key. "
QUESTION = [{"role": "user", "content": FACTS + "What does the red box hold?"}]

# A completion continues a text.
reply = client.completions.create(model=MODEL, prompt=FACTS + "Alice lives in", max_tokens=8, temperature=0)
print(f"completion: {reply.choices[0].text!r}, {reply.usage.total_tokens} tokens")

# A chat answers messages.
reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
print(f"chat:       {reply.choices[0].message.content!r}")

# A stream returns the answer in pieces. With `include_usage` its last chunk has the usage and no choices.
stream = client.chat.completions.create(
    model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
)
print("stream:     ", end="")
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f" ({chunk.usage.completion_tokens} tokens)")

# A cancelled stream: the end of the `with` block closes the connection. The router then aborts the request on its
# engines, which free all KV blocks. The engine option `ignore_eos` keeps the answer long.
with client.completions.create(
    model=MODEL,
    prompt=FACTS,
    max_tokens=1500,
    stream=True,
    extra_body={"ignore_eos": True},
    extra_headers={"x-request-id": "example-cancelled"},
) as stream:
    for _ in range(3):
        next(stream)
print("cancelled:  after 3 of 1500 tokens; `baton explain example-cancelled` shows the steps")
