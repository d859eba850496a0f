#!/usr/bin/env python3
"""The official Anthropic client against Baton's router: what users of the package do, and what they rely on.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import asyncio
import sys

from suite import FACTS, Skip, cancels, check, everything_home, expect, main  # noqa: I001  (it sets the proxy variables)

import anthropic

TOOL = {"name": "find", "description": "Finds a thing.", "input_schema": {"type": "object", "properties": {}}}


class Context:
    """A client and its model."""

    def __init__(self, place):
        self.place, url = place, place.url
        options = {"base_url": url, "api_key": "not-needed", "max_retries": 0, "timeout": 120}
        self.options = options
        self.client = anthropic.Anthropic(**options)
        # The list has OpenAI's form.
        self.model = self.client.get("/v1/models", cast_to=object)["data"][0]["id"]

    def message(self, **options):
        return self.client.messages.create(**self.request(**options))

    def request(self, **options):
        messages = [{"role": "user", "content": FACTS}]
        # The package has no argument for it.
        body = {"extra_body": {"temperature": 0}}
        return {"model": self.model, "messages": messages, "max_tokens": 24, **body, **options}


def raises(kind, status, call):
    """Checks that the call fails with this class of the package and this status. Returns the message."""
    try:
        call()
    except anthropic.APIStatusError as error:
        expect(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}")
        expect(error.status_code == status, f"status {error.status_code} instead of {status}")
        expect(error.request_id, "no request id")
        expect(isinstance(error.body, dict) and error.body.get("type") == "error", f"no envelope: {error.body!r}")
        return f"{kind.__name__} {status} {error.body['error']['type']}: {error.body['error']['message']}"
    raise AssertionError(f"no error; {kind.__name__} was expected")


@check("messages.create")
def message(ctx):
    reply = ctx.message()
    expect(reply.type == "message" and reply.role == "assistant" and reply.id, "a message")
    expect(reply.stop_reason in ("end_turn", "max_tokens"), reply.stop_reason)
    expect(reply.usage.input_tokens > 0 and reply.usage.output_tokens > 0, f"usage: {reply.usage}")
    text = reply.content[0].text
    if ctx.place.built_in:
        expect(text == "The red box holds a key.", f"the fact of the prompt: {text!r}")
    return f"{text!r}, {reply.usage.input_tokens}+{reply.usage.output_tokens} tokens, {reply._request_id}"


@check("messages.stream is the whole message in pieces")
def streamed(ctx):
    whole = ctx.message()
    with ctx.client.messages.stream(**ctx.request()) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    expect("".join(pieces) == whole.content[0].text, f"{pieces} instead of {whole.content[0].text!r}")
    expect(final.stop_reason == whole.stop_reason, "the same end")
    expect(final.usage.output_tokens == whole.usage.output_tokens, f"{final.usage} instead of {whole.usage}")
    tokens = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (final.usage, whole.usage)]
    expect(tokens[0] == tokens[1], f"{final.usage} instead of {whole.usage}")
    return f"{len(pieces)} pieces, {tokens[0]}+{final.usage.output_tokens} tokens"


@check("the events of a stream, in order")
def events(ctx):
    kinds = [event.type for event in ctx.message(stream=True)]
    expect(kinds[:2] == ["message_start", "content_block_start"], kinds[:2])
    expect(kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds[-3:])
    expect(set(kinds[2:-3]) <= {"content_block_delta", "ping"}, kinds)
    return f"{len(kinds)} events"


@check("max_tokens and a stop sequence")
def stops(ctx):
    whole = ctx.message().content[0].text
    cut = ctx.message(max_tokens=1)
    expect((cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1), f"{cut.stop_reason} {cut.usage}")
    word = whole.split()[2]
    reply = ctx.message(stop_sequences=[word])
    expect((reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word), f"{reply.stop_reason} {reply.stop_sequence}")
    expect(reply.content[0].text == whole[: whole.index(word)], f"{reply.content[0].text!r} of {whole!r}")
    return f"{reply.content[0].text!r} before {word!r}"


@check("system, turns, blocks, a tool and its result")
def conversation(ctx):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "What does the red box hold?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {"what": "box"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "The red box holds a key."}]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    reply = ctx.message(system=system, messages=turns, tools=[TOOL])
    expect(reply.stop_reason in ("end_turn", "max_tokens", "tool_use"), reply.stop_reason)
    return f"{reply.content}, {reply.stop_reason}"


@check("a tool: its call, whole and streamed, and its result")
def tools(ctx):
    client = anthropic.Anthropic(base_url=ctx.place.scripted_or_skip(), api_key="x", max_retries=0)
    messages = [{"role": "user", "content": FACTS}]
    options = {"model": "scripted", "max_tokens": 24, "messages": messages, "tools": [TOOL]}
    reply = client.messages.create(**options)
    call = reply.content[0]
    wanted = ("tool_use", "find", {"what": "box"})
    expect((call.type, call.name, call.input) == wanted and reply.stop_reason == "tool_use", f"{reply}")
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    call = final.content[0]
    expect((call.type, call.name, call.input) == wanted and final.stop_reason == "tool_use", f"streamed: {final}")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a key"}
    messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    text = client.messages.create(**options).content[0].text
    expect(text == "The red box holds a key.", text)
    return f"{call.name}({call.input})"


@check("messages.count_tokens")
def count(ctx):
    messages = [{"role": "user", "content": FACTS}]
    counted = ctx.client.messages.count_tokens(model=ctx.model, messages=messages).input_tokens
    usage = ctx.message(max_tokens=1).usage
    used = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    expect(counted == used, f"{counted} were counted, {used} were used")
    return f"{counted} tokens"


@check("a stream that is closed midway")
def cancelled(ctx):
    # The built-in model repeats it up to `max_tokens`.
    messages = [{"role": "user", "content": "x " * 50}]

    def leave():
        with ctx.client.messages.stream(**ctx.request(max_tokens=1500, messages=messages)) as stream:
            seen = [event.type for event, _ in zip(stream, range(5))]
            expect("message_stop" not in seen, "midway")

    return "after 5 events, " + cancels(ctx, 3, leave)


@check("16 calls at once with the asynchronous client")
def concurrent(ctx):
    async def all_of_them():
        async with anthropic.AsyncAnthropic(**ctx.options) as client:
            return await asyncio.gather(*(client.messages.create(**ctx.request()) for _ in range(16)))

    texts = {reply.content[0].text for reply in asyncio.run(all_of_them())}
    expect(len(texts) == 1, f"equal prompts, equal answers: {texts}")
    return "16 answers"


@check("errors: their classes, envelope and request id")
def errors(ctx):
    raises(anthropic.NotFoundError, 404, lambda: ctx.message(model="no-such-model"))
    raises(anthropic.BadRequestError, 400, lambda: ctx.message(max_tokens=0))
    raises(anthropic.BadRequestError, 400, lambda: ctx.message(messages=[{"role": "user", "content": "a " * 50_000}]))
    raises(anthropic.NotFoundError, 404, lambda: ctx.client.messages.batches.list())
    return raises(anthropic.BadRequestError, 400, lambda: ctx.message(extra_body={"temperature": -1}, stream=True))


@check("an image, which the built-in model does not read")
def image(ctx):
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    call = lambda: ctx.message(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])  # noqa: E731
    if not ctx.place.built_in:
        raise Skip("the model may read images")
    return raises(anthropic.BadRequestError, 400, call)


@check("the same client goes on after all that")
def afterwards(ctx):
    expect(ctx.message().content[0].text == ctx.message().content[0].text, "the same answer")
    return everything_home(ctx)


if __name__ == "__main__":
    sys.exit(main(f"anthropic {anthropic.__version__}", __doc__, Context))
