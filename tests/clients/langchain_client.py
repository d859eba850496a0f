#!/usr/bin/env python3
"""LangChain's chat models for OpenAI and Anthropic against Baton's router: what users of the packages do.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import asyncio
import importlib.metadata
import sys

from suite import FACTS, Skip, cancels, cancels_a_call, check, everything_home, expect, main  # noqa: I001  (it sets the proxy variables)

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

ANSWER = "The red box holds a key."


@tool
def find(what: str) -> str:
    """Finds a thing."""
    return f"a key in the {what}"


class Context:
    """Models of both packages."""

    def __init__(self, place):
        self.place = place
        url = place.url + "/v1"
        self.model = openai.OpenAI(base_url=url, api_key="x").models.list().data[0].id
        self.chat = self.openai()
        self.messages = self.anthropic()

    def openai(self, **options):
        options = {"model": self.model, "base_url": self.place.url + "/v1", "max_tokens": 24, **options}
        return ChatOpenAI(**{"api_key": "not-needed", "max_retries": 0, "temperature": 0, "timeout": 120, **options})

    def anthropic(self, **options):
        options = {"model": self.model, "base_url": self.place.url, "max_tokens": 24, **options}
        return ChatAnthropic(**{"api_key": "not-needed", "max_retries": 0, "temperature": 0, "timeout": 120, **options})

    def both(self):
        return (("ChatOpenAI", self.chat), ("ChatAnthropic", self.messages))

    def scripted(self):
        url = self.place.scripted_or_skip()
        options = {"model": "scripted"}
        return (("ChatOpenAI", self.openai(base_url=url + "/v1", **options)),
                ("ChatOpenAI with /v1/responses", self.openai(base_url=url + "/v1", use_responses_api=True, **options)),
                ("ChatAnthropic", self.anthropic(base_url=url, **options)))


def raises(kind, status, call):
    try:
        call()
    except kind as error:
        expect(error.status_code == status, f"status {error.status_code} instead of {status}")
        return f"{type(error).__name__} {status}"
    raise AssertionError(f"no error; {kind.__name__} was expected")


@check("invoke")
def invoke(ctx):
    for name, model in ctx.both():
        reply = model.invoke([SystemMessage("Answer."), HumanMessage(FACTS)])
        expect(isinstance(reply, AIMessage) and reply.text, f"{name}: {reply!r}")
        expect(not ctx.place.built_in or reply.text == ANSWER, f"{name}: {reply.text!r}")
        usage = reply.usage_metadata
        expect(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0, f"{name}: {usage}")
    return f"{reply.text!r}, {usage['input_tokens']}+{usage['output_tokens']} tokens"


@check("stream is the whole message in pieces, with usage")
def stream(ctx):
    pieces = list(ctx.openai(stream_usage=True).stream(FACTS))
    whole = ctx.chat.invoke(FACTS)
    expect("".join(piece.text for piece in pieces) == whole.text, f"{[piece.text for piece in pieces]}")
    total = sum(pieces[1:], pieces[0])
    wanted, found = ({key: of.usage_metadata[key] for key in ("input_tokens", "output_tokens")} for of in (whole, total))
    expect(found == wanted, f"{found} instead of {wanted}")
    ends = total.response_metadata.get("finish_reason")
    expect(ends == whole.response_metadata["finish_reason"], ends)
    pieces = list(ctx.messages.stream(FACTS))
    total = sum(pieces[1:], pieces[0])
    expect(total.text and total.usage_metadata["output_tokens"] > 0, f"ChatAnthropic: {total}")
    return f"{len(pieces)} pieces, {total.usage_metadata}"


@check("batch of 16")
def batch(ctx):
    for name, model in ctx.both():
        texts = {reply.text for reply in model.batch([FACTS] * 16)}
        expect(len(texts) == 1, f"{name}: equal prompts, equal answers: {texts}")
    return "16 answers each"


@check("astream that is left midway")
def leave(ctx):
    found = []
    for name, model in (("ChatOpenAI", ctx.openai(max_tokens=1500)), ("ChatAnthropic", ctx.anthropic(max_tokens=1500))):
        async def leaves(model=model):
            texts, pieces = 0, model.astream("x " * 50)
            async for piece in pieces:
                texts += bool(piece.text)
                if texts == 3:
                    break
            await pieces.aclose()

        found.append(f"{name} {cancels(ctx, 3, lambda: asyncio.run(leaves()))}")  # noqa: B023
    return "; ".join(found)


@check("a task with ainvoke that is cancelled")
def cancelled(ctx):
    return cancels(ctx, 3, lambda: asyncio.run(cancels_a_call(ctx, lambda: ctx.openai(max_tokens=1500).ainvoke("x " * 50))))


@check("bind_tools: a call, whole and streamed, and its result")
def tools(ctx):
    for name, model in ctx.scripted():
        bound = model.bind_tools([find])
        reply = bound.invoke(FACTS)
        calls = [(call["name"], call["args"]) for call in reply.tool_calls]
        expect(calls == [("find", {"what": "box"})], f"{name}: {calls}")
        pieces = list(bound.stream(FACTS))
        total = sum(pieces[1:], pieces[0])
        expect([(call["name"], call["args"]) for call in total.tool_calls] == calls, f"{name}, streamed: {total.tool_calls}")
        result = ToolMessage(find.invoke(reply.tool_calls[0]["args"]), tool_call_id=reply.tool_calls[0]["id"])
        text = bound.invoke([HumanMessage(FACTS), reply, result]).text
        expect(text == ANSWER, f"{name}: {text!r}")
    return f"{calls} three times"


@check("/v1/responses")
def responses(ctx):
    _, model = ctx.scripted()[1]
    expect(model.invoke(FACTS).text == ANSWER, model.invoke(FACTS))
    pieces = [piece.text for piece in model.stream(FACTS)]
    expect("".join(pieces) == ANSWER, pieces)
    return f"{len(pieces)} pieces"


@check("the model of completions")
def completion(ctx):
    options = {"base_url": ctx.place.url + "/v1", "api_key": "x", "max_retries": 0, "temperature": 0, "max_tokens": 16}
    model = OpenAI(model=ctx.model, **options)
    text = model.invoke("The capital of")
    expect(text and "".join(model.stream("The capital of")) == text, "the same text")
    return repr(text)


@check("with_structured_output")
def structured(ctx):
    schema = {"title": "Box", "type": "object", "properties": {"what": {"enum": ["hat", "box"]}}, "required": ["what"],
              "additionalProperties": False}
    chat = ctx.chat.model_copy(update={"max_tokens": 400})
    value = chat.with_structured_output(schema, method="json_schema").invoke(FACTS)
    expect(value["what"] in ("hat", "box"), f"{value}")
    return f"{value}"


@check("errors: their classes and statuses")
def errors(ctx):
    raises(openai.NotFoundError, 404, lambda: ctx.openai(model="no-such-model").invoke(FACTS))
    raises(openai.NotFoundError, 404, lambda: list(ctx.openai(model="no-such-model").stream(FACTS)))
    raises(openai.BadRequestError, 400, lambda: ctx.openai(temperature=-1).invoke(FACTS))
    return raises(anthropic.NotFoundError, 404, lambda: ctx.anthropic(model="no-such-model").invoke(FACTS))


@check("a prompt that is too long: BadRequestError, and LangChain's ContextOverflowError")
def too_long(ctx):
    for (_, model), kind in zip(ctx.both(), (openai.BadRequestError, anthropic.BadRequestError), strict=True):
        raises(kind, 400, lambda: model.invoke("one two three " * 20_000))  # noqa: B023
    try:
        ctx.chat.invoke("one two three " * 20_000)
    except ContextOverflowError as error:
        return type(error).__name__
    except openai.BadRequestError as error:
        raise Skip("BadRequestError, but LangChain knows ContextOverflowError by `prompt is too long` in the message, and "
                   f"Baton's engine has the code and other words: {error}") from error
    raise AssertionError("no error")


@check("the same models go on after all that")
def afterwards(ctx):
    expect(ctx.chat.invoke(FACTS).text == ctx.chat.invoke(FACTS).text, "the same answer")
    expect(ctx.messages.invoke(FACTS).text, "an answer")
    return everything_home(ctx)


if __name__ == "__main__":
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("langchain-openai", "langchain-anthropic")]
    sys.exit(main(", ".join(versions), __doc__, Context))
