#!/usr/bin/env python3
"""The official OpenAI client against Baton's router: what users of the package do, and what they rely on.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import asyncio
import json
import re
import sys
import urllib.request

from suite import FACTS, Skip, cancels, check, everything_home, expect, main  # noqa: I001  (it sets the proxy variables)

import openai


class Context:
    """A client and its model."""

    def __init__(self, place):
        self.place, url = place, place.url
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="not-needed", max_retries=0, timeout=120)
        self.card = self.client.models.list().data[0]
        self.model = self.card.id

    def chat(self, **options):
        options = {"model": self.model, "messages": [{"role": "user", "content": FACTS}], **options}
        return self.client.chat.completions.create(**{"temperature": 0, "max_tokens": 24, **options})

    def respond(self, **options):
        options = {"model": self.model, "input": FACTS, **options}
        return self.client.responses.create(**{"temperature": 0, "max_output_tokens": 24, **options})

    def complete(self, **options):
        options = {"model": self.model, "prompt": "The capital of", **options}
        return self.client.completions.create(**{"temperature": 0, "max_tokens": 16, **options})


def raises(kind, status, call, code=None, param=None):
    """Checks that the call fails with this class of the package, this status and this code. Returns the message."""
    try:
        call()
    except kind as error:
        expect(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}")
        expect(error.status_code == status, f"status {error.status_code} instead of {status}")
        expect(code is None or error.code == code, f"code {error.code!r} instead of {code!r}")
        expect(param is None or error.param == param, f"param {error.param!r} instead of {param!r}")
        expect(isinstance(error.body, dict) and error.body.get("message"), f"no message: {error.body!r}")
        return f"{kind.__name__} {status} {error.code or error.type}: {error.body['message']}"
    raise AssertionError(f"no error; {kind.__name__} was expected")


@check("models.list, models.retrieve")
def models(ctx):
    expect(ctx.card.object == "model", "object")
    expect(ctx.client.models.retrieve(ctx.model).id == ctx.model, "retrieve")
    return f"{ctx.model}, context {(ctx.card.model_extra or {}).get('max_model_len')}"


@check("completions.create")
def completion(ctx):
    reply = ctx.complete()
    expect(reply.object == "text_completion" and len(reply.choices) == 1, "shape")
    expect(reply.choices[0].text and reply.choices[0].finish_reason in ("stop", "length"), "a text and its end")
    usage = reply.usage
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage adds up")
    return f"{reply.choices[0].text!r}, {usage.prompt_tokens}+{usage.completion_tokens} tokens"


@check("completions.create with two prompts, and with token ids")
def prompts(ctx):
    one, two = (ctx.complete(prompt=text).choices[0].text for text in ("One two three", "Red green blue"))
    both = ctx.complete(prompt=["One two three", "Red green blue"]).choices
    expect([choice.index for choice in both] == [0, 1], "an index each")
    expect([choice.text for choice in both] == [one, two], "each prompt as if it were alone")
    body = json.dumps({"model": ctx.model, "prompt": "One two three"}).encode()
    request = urllib.request.Request(ctx.place.url + "/tokenize", body, {"content-type": "application/json"})
    tokens = json.load(urllib.request.urlopen(request, timeout=30))["tokens"]
    expect(ctx.complete(prompt=tokens).choices[0].text == one, "token ids say what their text says")
    return f"{len(tokens)} token ids say what their text says"


@check("chat.completions.create")
def chat(ctx):
    reply = ctx.chat()
    message = reply.choices[0].message
    expect(reply.object == "chat.completion" and message.role == "assistant" and message.content, "a message")
    if ctx.place.built_in:
        expect(message.content == "The red box holds a key.", f"the fact of the prompt: {message.content!r}")
    return repr(message.content)


@check("a streamed chat with usage is the whole chat in pieces")
def streamed_chat(ctx):
    whole = ctx.chat()
    text, finish, usage, chunks = "", None, None, 0
    for chunk in ctx.chat(stream=True, stream_options={"include_usage": True}):
        chunks += 1
        if chunk.usage is not None:
            expect(not chunk.choices, "usage comes in a chunk of its own")
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    expect(text == whole.choices[0].message.content, f"{text!r} instead of {whole.choices[0].message.content!r}")
    expect(finish == whole.choices[0].finish_reason, "the same end")
    expect(usage is not None and usage.total_tokens == whole.usage.total_tokens, "the same usage")
    return f"{chunks} chunks, {usage.prompt_tokens}+{usage.completion_tokens} tokens, {finish}"


@check("a streamed completion is the whole completion in pieces")
def streamed_completion(ctx):
    pieces = [choice.text for chunk in ctx.complete(stream=True) for choice in chunk.choices]
    expect("".join(pieces) == ctx.complete().choices[0].text, "the same text")
    return f"{len(pieces)} pieces"


@check("a stream that is cancelled midway")
def cancelled(ctx):
    length = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    def leave():
        with ctx.complete(stream=True, **length) as stream:
            seen = [next(stream) for _ in range(3)]
            expect(all(choice.finish_reason is None for chunk in seen for choice in chunk.choices), "midway")

    return "after 3 of 1500 tokens, " + cancels(ctx, 3, leave)


@check("n=2, and the same seed twice")
def choices(ctx):
    options = {"n": 2, "temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True}}
    first, again = ctx.complete(**options), ctx.complete(**options)
    texts = [choice.text for choice in first.choices]
    expect([choice.index for choice in first.choices] == [0, 1], "an index each")
    expect(texts == [choice.text for choice in again.choices], "a seed makes it repeatable")
    expect(first.usage.completion_tokens == 32, f"both are counted: {first.usage}")
    return f"{texts[0]!r} and {texts[1]!r}"


@check("logprobs of a chat and of a completion")
def logprobs(ctx):
    tokens = ctx.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    for token in tokens:
        expect(token.logprob <= 0 and len(token.top_logprobs) == 3, f"three alternatives: {token}")
        expect(token.top_logprobs[0].logprob == max(top.logprob for top in token.top_logprobs), "in order")
        expect(token.token == token.top_logprobs[0].token, "at temperature 0 the likeliest is taken")
    old = ctx.complete(logprobs=2).choices[0].logprobs
    expect(len(old.tokens) == len(old.token_logprobs) == len(old.text_offset) == len(old.top_logprobs), "lengths")
    return f"{tokens[0].token!r} at {tokens[0].logprob:.4f}"


@check("a stop string")
def stop(ctx):
    whole = ctx.complete().choices[0].text
    word = next((word for word in re.findall(r"\w+", whole)[1:] if word), whole[-1])
    reply = ctx.complete(stop=[word]).choices[0]
    expect(reply.finish_reason == "stop", reply.finish_reason)
    expect(reply.text == whole[: whole.index(word)], f"{reply.text!r} of {whole!r}, stopped at {word!r}")
    return f"{reply.text!r} before {word!r}"


@check("a conversation with a system message and turns")
def conversation(ctx):
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": FACTS}]},
    ]
    reply = ctx.chat(messages=messages, max_tokens=None, max_completion_tokens=8)
    expect(reply.usage.completion_tokens <= 8, "max_completion_tokens")
    return repr(reply.choices[0].message.content)


@check("16 calls at once with the asynchronous client")
def concurrent(ctx):
    async def all_of_them():
        options = {"base_url": ctx.place.url + "/v1", "api_key": "x", "max_retries": 0, "timeout": 120}
        async with openai.AsyncOpenAI(**options) as client:
            ask = client.completions.create
            options = {"model": ctx.model, "max_tokens": 16, "temperature": 0}
            return await asyncio.gather(*(ask(prompt=f"Number {n % 4} is", **options) for n in range(16)))

    texts = [reply.choices[0].text for reply in asyncio.run(all_of_them())]
    expect(all(texts[n] == texts[n % 4] for n in range(16)), f"equal prompts, equal answers: {texts}")
    return f"{len(texts)} answers"


@check("an unknown model: NotFoundError")
def unknown_model(ctx):
    not_found = openai.NotFoundError
    raises(not_found, 404, lambda: ctx.client.models.retrieve("no-such-model"), "model_not_found")
    raises(not_found, 404, lambda: ctx.complete(model="no-such-model"), "model_not_found")
    return raises(not_found, 404, lambda: ctx.chat(model="no-such-model"), "model_not_found")


@check("a bad parameter: BadRequestError")
def bad_parameter(ctx):
    bad = openai.BadRequestError
    raises(bad, 400, lambda: ctx.complete(max_tokens=-1), param="max_tokens")
    raises(bad, 400, lambda: ctx.complete(n=0), param="n")
    raises(bad, 400, lambda: ctx.chat(messages=[]), param="messages")
    raises(bad, 400, lambda: ctx.complete(prompt=[10**9]), param="prompt[0]")
    raises(bad, 400, lambda: ctx.chat(stream=True, temperature=-1), param="temperature")
    return raises(bad, 400, lambda: ctx.chat(temperature="warm"), param="temperature")


@check("a prompt that is too long: BadRequestError")
def too_long(ctx):
    call = lambda: ctx.complete(prompt="one two three " * 20_000)  # noqa: E731
    return raises(openai.BadRequestError, 400, call, "context_length_exceeded")


@check("an unknown path: NotFoundError")
def unknown_path(ctx):
    return raises(openai.NotFoundError, 404, lambda: ctx.client.moderations.create(input="x"))


def tool_calls(client, **options):
    """The calls of a streamed chat, put together."""
    name, arguments, finish = None, "", None
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                name, arguments = call.function.name or name, arguments + (call.function.arguments or "")
    return name, json.loads(arguments), finish


@check("a tool: its call, whole and streamed, and its result")
def tools(ctx):
    client = openai.OpenAI(base_url=ctx.place.scripted_or_skip() + "/v1", api_key="x", max_retries=0)
    messages = [{"role": "user", "content": FACTS}]
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    options = {"model": "scripted", "messages": messages, "tools": [tool]}
    choice = client.chat.completions.create(**options).choices[0]
    call = choice.message.tool_calls[0]
    wanted = ("find", {"what": "box"}, "tool_calls")
    found = (call.function.name, json.loads(call.function.arguments), choice.finish_reason)
    expect(found == wanted, f"{found} instead of {wanted}")
    found = tool_calls(client, **options)
    expect(found == wanted, f"streamed: {found} instead of {wanted}")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "a key"}]
    text = client.chat.completions.create(**options).choices[0].message.content
    expect(text == "The red box holds a key.", text)
    return f"{call.function.name}({call.function.arguments})"


@check("responses.create is the chat, whole and streamed")
def responses(ctx):
    chat, whole = ctx.chat(), ctx.respond()
    expect((whole.object, whole.status, whole.error) == ("response", "completed", None), f"{whole}")
    expect(whole.output_text == chat.choices[0].message.content, f"{whole.output_text!r} instead of the chat's")
    expect(whole.usage.output_tokens == chat.usage.completion_tokens, f"{whole.usage} instead of {chat.usage}")
    with ctx.client.responses.stream(model=ctx.model, input=FACTS, temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
        final = stream.get_final_response()
    expect([event.sequence_number for event in events] == list(range(len(events))), "numbered without a gap")
    kinds = [event.type for event in events]
    expect(kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed", kinds)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    expect("".join(pieces) == final.output_text == whole.output_text, f"{pieces} instead of {whole.output_text!r}")
    expect(final.usage.output_tokens == whole.usage.output_tokens, f"{final.usage} instead of {whole.usage}")
    cut = ctx.respond(max_output_tokens=1)
    found = (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens)
    expect(found == ("incomplete", "max_output_tokens", 1), f"{found}")
    return f"{len(pieces)} pieces in {len(events)} events, {whole.usage.input_tokens}+{whole.usage.output_tokens} tokens"


@check("responses.create: turns of items, a forced call and its result, structured output")
def response_items(ctx):
    first = ctx.respond()
    turns = [{"role": "user", "content": FACTS}, *first.output, {"role": "user", "content": "Again."}]
    expect(ctx.respond(input=turns, instructions="Be brief.").output_text, "a second turn")
    tool = {"type": "function", "name": "find", "strict": True, "parameters": {
        "type": "object", "properties": {"what": {"enum": ["box"]}}, "required": ["what"], "additionalProperties": False}}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "name": "find"}, "max_output_tokens": 200}
    call = ctx.respond(**forced).output[-1]
    expect((call.type, call.name, json.loads(call.arguments)) == ("function_call", "find", {"what": "box"}), f"{call}")
    arguments = ""
    for event in ctx.respond(stream=True, **forced):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    expect(json.loads(arguments) == {"what": "box"}, arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "The red box holds a key."}
    turns = [{"role": "user", "content": FACTS}, call, result]
    expect(ctx.respond(input=turns, tools=[tool], tool_choice="none").output_text, "an answer to the result")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    found = json.loads(ctx.respond(text=form, max_output_tokens=100).output_text)
    expect(found["n"] in (1, 2), f"{found}")
    return f"{call.name}({call.arguments}), {found}"


@check("responses.create: what needs stored responses is refused by name")
def response_refusals(ctx):
    if not ctx.place.built_in:
        raise Skip("the engines may store responses")
    bad = openai.BadRequestError
    raises(bad, 400, lambda: ctx.respond(previous_response_id="resp_1"), "unsupported_parameter", "previous_response_id")
    raises(bad, 400, lambda: ctx.respond(conversation="conv_1"), "unsupported_parameter", "conversation")
    raises(bad, 400, lambda: ctx.respond(background=True), "unsupported_parameter", "background")
    raises(bad, 400, lambda: ctx.respond(max_output_tokens=0), param="max_output_tokens")
    raises(bad, 400, lambda: ctx.respond(input="one two three " * 20_000), "context_length_exceeded", "input")
    raises(openai.NotFoundError, 404, lambda: ctx.client.responses.retrieve("resp_1"))
    tools = [{"type": "web_search"}]
    return raises(bad, 400, lambda: ctx.respond(tools=tools, stream=True), "unsupported_parameter", "tools[0].type")


@check("a stream of responses that is closed midway")
def cancelled_response(ctx):
    length = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}

    def leave():
        with ctx.respond(stream=True, **length) as stream:
            seen = [event.type for event, _ in zip(stream, range(6))]
            expect("response.completed" not in seen, "midway")

    return "after 6 events, " + cancels(ctx, 3, leave)


@check("responses of engines that have them, whole and streamed, and a tool's call")
def native_responses(ctx):
    client = openai.OpenAI(base_url=ctx.place.scripted_or_skip() + "/v1", api_key="x", max_retries=0)
    reply = client.responses.create(model="scripted", input=FACTS)
    expect(reply.output_text == "The red box holds a key." and reply.usage.output_tokens == 3, f"{reply}")
    with client.responses.stream(model="scripted", input=FACTS) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        expect("".join(pieces) == reply.output_text, pieces)
        expect(stream.get_final_response().usage == reply.usage, "the same usage")
    tool = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}, "strict": False}
    call = client.responses.create(model="scripted", input=FACTS, tools=[tool]).output[0]
    expect((call.type, call.name, json.loads(call.arguments)) == ("function_call", "find", {"what": "box"}), f"{call}")
    return f"{len(pieces)} pieces"


@check("the same client goes on after all that")
def afterwards(ctx):
    expect(ctx.chat().choices[0].message.content == ctx.chat().choices[0].message.content, "the same answer")
    return everything_home(ctx)


if __name__ == "__main__":
    sys.exit(main(f"openai {openai.__version__}", __doc__, Context))
