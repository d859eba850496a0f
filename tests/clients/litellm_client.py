#!/usr/bin/env python3
"""LiteLLM as a library against Baton's router: what its users do, and the class of each error.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import asyncio
import importlib.metadata
import json
import logging
import os
import sys
import urllib.request

from suite import FACTS, Skip, cancels, cancels_a_call, check, everything_home, expect, main  # noqa: I001  (it sets the proxy variables)

# The package would otherwise fetch a table of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402

ANSWER = "The red box holds a key."
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


class Context:
    """The options of all calls."""

    def __init__(self, place):
        self.place = place
        litellm.suppress_debug_info = True
        # It logs an error for each model without a price.
        logging.getLogger("LiteLLM Proxy").setLevel(logging.CRITICAL)
        with urllib.request.urlopen(place.url + "/v1/models", timeout=30) as answer:
            self.model = json.load(answer)["data"][0]["id"]
        self.to = {"api_base": place.url + "/v1", "api_key": "not-needed", "max_retries": 0, "timeout": 120}

    def options(self, **options):
        """For chats. The first part of the model's name chooses LiteLLM's provider."""
        messages = [{"role": "user", "content": FACTS}]
        options = {"model": f"openai/{self.model}", "messages": messages, "max_tokens": 24, "temperature": 0, **options}
        return {**self.to, **options}

    def message_options(self, **options):
        """For Anthropic's messages."""
        options = {**self.options(), "model": f"anthropic/{self.model}", "api_base": self.place.url, **options}
        del options["max_retries"]
        return options

    def scripted(self, **options):
        return self.options(model="openai/scripted", api_base=self.place.scripted_or_skip() + "/v1", **options)


def raises(kind, call):
    try:
        call()
    except kind as error:
        expect(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}")
        return f"{kind.__name__} {error.status_code}"
    raise AssertionError(f"no error; {kind.__name__} was expected")


@check("the model list")
def models(ctx):
    found = litellm.get_valid_models(check_provider_endpoint=True, custom_llm_provider="openai",
                                     api_base=ctx.place.url, api_key="not-needed")
    expect(any(ctx.model in name for name in found), found)
    return str(found)


@check("completion and acompletion")
def chat(ctx):
    reply = litellm.completion(**ctx.options())
    again = asyncio.run(litellm.acompletion(**ctx.options()))
    text = reply.choices[0].message.content
    expect(text and text == again.choices[0].message.content, f"{text!r}")
    expect(not ctx.place.built_in or text == ANSWER, f"{text!r}")
    usage = reply.usage
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0, f"{usage}")
    return f"{text!r}, {usage.prompt_tokens}+{usage.completion_tokens} tokens"


@check("a stream is the whole chat in pieces, with usage")
def stream(ctx):
    whole = litellm.completion(**ctx.options())
    chunks = list(litellm.completion(**ctx.options(stream=True, stream_options={"include_usage": True})))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == whole.choices[0].message.content, f"{text!r}")
    built = litellm.stream_chunk_builder(chunks)
    expect(built.choices[0].finish_reason == whole.choices[0].finish_reason, built.choices[0].finish_reason)
    usage = [getattr(chunk, "usage", None) for chunk in chunks][-1]
    expect(usage and usage.total_tokens == whole.usage.total_tokens, f"{usage} instead of {whole.usage}")

    async def later():
        chunks = await litellm.acompletion(**ctx.options(stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    expect(asyncio.run(later()) == text, "the same with acompletion")
    return f"{len(chunks)} chunks, {usage.total_tokens} tokens"


@check("text_completion, whole and streamed")
def completion(ctx):
    options = {**ctx.to, "model": f"text-completion-openai/{ctx.model}", "prompt": "The capital of", "max_tokens": 16,
               "temperature": 0}
    text = litellm.text_completion(**options).choices[0].text
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **options)]
    expect(text and "".join(pieces) == text, f"{pieces} instead of {text!r}")
    return repr(text)


@check("anthropic_messages, whole and streamed")
def messages(ctx):
    whole = asyncio.run(litellm.anthropic_messages(**ctx.message_options()))
    expect(whole["content"][0]["text"] and whole["usage"]["output_tokens"] > 0, f"{whole}")

    async def later():
        stream = await litellm.anthropic_messages(**ctx.message_options(stream=True))
        return b"".join([chunk if isinstance(chunk, bytes) else chunk.encode() async for chunk in stream]).decode()

    events = asyncio.run(later())
    lines = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    text = "".join(line["delta"].get("text", "") for line in lines if line["type"] == "content_block_delta")
    expect(text == whole["content"][0]["text"], f"{text!r} of {whole['content']}")
    expect(lines[-1]["type"] == "message_stop", lines[-1])
    return f"{text!r}, {len(lines)} events"


@check("completion of the provider `anthropic`, whole and streamed")
def anthropic_provider(ctx):
    options = ctx.message_options()
    whole = litellm.completion(**options)
    chunks = list(litellm.completion(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    expect(text and text == whole.choices[0].message.content, f"{text!r} instead of {whole.choices[0].message.content!r}")
    return f"{text!r}, {len(chunks)} chunks"


@check("tools: a call, whole and streamed, and its result")
def tools(ctx):
    options = ctx.scripted(tools=[TOOL])
    call = litellm.completion(**options).choices[0].message.tool_calls[0]
    wanted = ("find", {"what": "box"})
    expect((call.function.name, json.loads(call.function.arguments)) == wanted, f"{call}")
    built = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True))).choices[0]
    streamed = built.message.tool_calls[0].function
    expect((streamed.name, json.loads(streamed.arguments)) == wanted, f"streamed: {streamed}")
    expect(built.finish_reason == "tool_calls", built.finish_reason)
    result = {"role": "tool", "tool_call_id": call.id, "content": "a key"}
    assistant = {"role": "assistant", "tool_calls": [call.model_dump()]}
    reply = litellm.completion(**{**options, "messages": [*options["messages"], assistant, result]})
    expect(reply.choices[0].message.content == ANSWER, reply.choices[0].message.content)
    return f"{call.function.name}({call.function.arguments})"


@check("responses, whole and streamed")
def responses(ctx):
    options = {key: value for key, value in ctx.scripted().items() if key not in ("messages", "max_tokens", "temperature")}
    reply = litellm.responses(**options, input=FACTS)
    expect(reply.output[0].content[0].text == ANSWER, f"{reply}")
    events = list(litellm.responses(**options, input=FACTS, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == ANSWER, text)
    return f"{len(events)} events"


@check("16 calls at once")
def concurrent(ctx):
    async def all_of_them():
        return await asyncio.gather(*(litellm.acompletion(**ctx.options()) for _ in range(16)))

    texts = {reply.choices[0].message.content for reply in asyncio.run(all_of_them())}
    expect(len(texts) == 1, f"equal prompts, equal answers: {texts}")
    return "16 answers"


@check("a stream that is left midway")
def leave(ctx):
    options = ctx.options(messages=[{"role": "user", "content": "x " * 50}], max_tokens=1500, stream=True)

    async def leaves():
        stream = await litellm.acompletion(**options)
        async for _ in stream:
            break
        await stream.aclose()

    return cancels(ctx, 3, lambda: asyncio.run(leaves()))


@check("a call that is cancelled")
def cancelled(ctx):
    options = ctx.options(messages=[{"role": "user", "content": "x " * 50}], max_tokens=1500)
    return cancels(ctx, 3, lambda: asyncio.run(cancels_a_call(ctx, lambda: litellm.acompletion(**options))))


@check("errors: their classes")
def errors(ctx):
    raises(litellm.NotFoundError, lambda: litellm.completion(**ctx.options(model="openai/no-such-model")))
    raises(litellm.NotFoundError, lambda: litellm.completion(**ctx.options(model="openai/no-such-model"), stream=True))
    raises(litellm.BadRequestError, lambda: litellm.completion(**ctx.options(temperature=-1)))
    raises(litellm.NotFoundError, lambda: litellm.completion(**ctx.message_options(model="anthropic/no-such-model")))
    return raises(litellm.NotFoundError, lambda: litellm.embedding(**ctx.to, model="openai/no-such-model", input=["x"]))


LONG = [{"role": "user", "content": "one two three " * 20_000}]


@check("a prompt that is too long for vLLM: ContextWindowExceededError")
def too_long(ctx):
    return raises(litellm.ContextWindowExceededError, lambda: litellm.completion(**ctx.scripted(messages=LONG)))


@check("a prompt that is too long for the built-in model: ContextWindowExceededError")
def too_long_built_in(ctx):
    call = lambda: litellm.completion(**ctx.options(messages=LONG))  # noqa: E731
    try:
        call()
    except litellm.ContextWindowExceededError as error:
        return f"{type(error).__name__} {error.status_code}"
    except litellm.BadRequestError as error:
        raise Skip("LiteLLM knows this error by words of OpenAI and vLLM, Baton's engine has the code and other words: "
                   f"{error}") from error
    raise AssertionError("no error")


@check("calls go on after all that")
def afterwards(ctx):
    expect(litellm.completion(**ctx.options()).choices[0].message.content, "an answer")
    return everything_home(ctx)


if __name__ == "__main__":
    sys.exit(main(f"litellm {importlib.metadata.version('litellm')}", __doc__, Context))
