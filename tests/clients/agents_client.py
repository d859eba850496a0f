#!/usr/bin/env python3
"""Agents with tools of openai-python and LangChain against `baton up` with the checkpoint that calls tools.

Prints one line for each thing it did; exits with 1 if any of them failed. See README.md in this folder.
"""

import asyncio
import importlib.metadata
import json
import pathlib
import subprocess
import sys

from suite import check, everything_home, expect, main  # noqa: I001  (it sets the proxy variables)

import openai
import pydantic
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "engine/models/tools"
TURNS_MAX = 8
WEATHER = "What is the weather in Paris?"
BOTH = "What is the weather in Paris? Add 12 and 30."
WEATHER_TOLD = "The weather in Paris is 21 degrees and sunny."
BOTH_TOLD = WEATHER_TOLD + " The sum of 12 and 30 is 42."
CALLS = [("get_weather", {"city": "Paris"}), ("add", {"a": 12, "b": 30})]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return {"Paris": "21 degrees and sunny", "London": "rain"}[city]


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


RUN = {"get_weather": get_weather, "add": add}


def function(name, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    schema["required"] = list(properties)
    return {"type": "function", "function": {"name": name, "description": f"The tool {name}.", "parameters": schema}}


TOOLS = [function("get_weather", city="string"), function("add", a="integer", b="integer")]


class Context:
    """A client of each package, and the model."""

    def __init__(self, place):
        self.place = place
        options = {"base_url": place.url + "/v1", "api_key": "not-needed", "max_retries": 0, "timeout": 120}
        self.client = openai.OpenAI(**options)
        self.model = self.client.models.list().data[0].id
        self.langchain = ChatOpenAI(model=self.model, temperature=0, stream_usage=True, **options)

    def options(self, text=WEATHER, **more):
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "tools": TOOLS, "temperature": 0, **more}

    def chat(self, text=WEATHER, **more):
        return self.client.chat.completions.create(**self.options(text, **more)).choices[0]

    def streamed(self, text=WEATHER, **more):
        """The pieces of a stream, put together: content, calls as (id, name, arguments), reason of the end, and usage."""
        content, calls, finish, usage = "", [], None, None
        options = self.options(text, stream=True, stream_options={"include_usage": True}, **more)
        for chunk in self.client.chat.completions.create(**options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.index == len(calls):
                        calls.append([call.id, call.function.name, ""])
                    calls[call.index][2] += call.function.arguments or ""
        return content, calls, finish, usage

    def agent(self, **more):
        return create_agent(self.langchain, [get_weather, add], **more)


def called(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def same(found, wanted):
    expect(found == wanted, f"{found!r} instead of {wanted!r}")


def refused(call, param):
    """Checks that the call is BadRequestError about this field. Returns the message."""
    try:
        call()
    except openai.BadRequestError as error:
        same((error.status_code, error.param), (400, param))
        expect(error.body.get("message"), f"no message: {error.body!r}")
        return error.body["message"]
    raise AssertionError(f"no error about {param}")


def loop(ctx, question, turn):
    """An agent in the words of OpenAI's guide: call, run, tell, until there is an answer."""
    messages = [{"role": "user", "content": question}]
    for count in range(1, TURNS_MAX):
        content, calls = turn(messages)
        if not calls:
            return count, content
        named = [{"id": key, "type": "function", "function": {"name": name, "arguments": text}} for key, name, text in calls]
        messages.append({"role": "assistant", "content": content or None, "tool_calls": named})
        for key, name, text in calls:
            messages.append({"role": "tool", "tool_call_id": key, "content": str(RUN[name].invoke(json.loads(text)))})
    raise AssertionError(f"no answer in {TURNS_MAX} turns: {messages}")


@check("openai: a call, whole and streamed")
def call(ctx):
    choice = ctx.chat()
    same((called(choice.message), choice.message.content, choice.finish_reason), (CALLS[:1], None, "tool_calls"))
    content, calls, finish, usage = ctx.streamed()
    same((content, [(name, json.loads(text)) for _, name, text in calls], finish), ("", CALLS[:1], "tool_calls"))
    expect(calls[0][0].startswith("call_") and usage.completion_tokens > 0, f"{calls}, {usage}")
    return f"{calls}, {usage.prompt_tokens}+{usage.completion_tokens} tokens"


@check("openai: an agent's loop, whole and streamed")
def agent(ctx):
    def whole(messages):
        message = ctx.chat(list(messages)).message
        return message.content, [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]

    for question, told in ((WEATHER, WEATHER_TOLD), (BOTH, BOTH_TOLD)):
        for turn in (whole, lambda messages: ctx.streamed(list(messages))[:2]):
            same(loop(ctx, question, turn), (2, told))
    return told


@check("openai: calls in one turn, and one at a time with parallel_tool_calls false")
def parallel(ctx):
    message = ctx.chat(BOTH).message
    same(called(message), CALLS)
    expect(len({call.id for call in message.tool_calls}) == 2, f"an id each: {message.tool_calls}")
    same([(name, json.loads(text)) for _, name, text in ctx.streamed(BOTH)[1]], CALLS)
    same(called(ctx.chat(BOTH, parallel_tool_calls=False).message), CALLS[:1])
    turn = lambda messages: ctx.streamed(list(messages), parallel_tool_calls=False)[:2]  # noqa: E731
    same(loop(ctx, BOTH, turn), (3, BOTH_TOLD))
    return BOTH_TOLD


@check("openai: tool_choice none, required, and a named function")
def choice(ctx):
    none = ctx.chat(tool_choice="none")
    expect(none.message.content and not none.message.tool_calls and none.finish_reason == "stop", f"{none}")
    required = ctx.chat(tool_choice="required")
    same((called(required.message), required.finish_reason), (CALLS[:1], "tool_calls"))
    named = ctx.chat(tool_choice={"type": "function", "function": {"name": "get_weather"}})
    same((called(named.message), named.finish_reason), (CALLS[:1], "stop"))
    return f"without tools: {none.message.content!r}"


@check("openai: chat.completions.parse and .stream with a pydantic tool")
def helpers(ctx):
    class GetWeather(pydantic.BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    message = ctx.client.chat.completions.parse(**ctx.options(tools=tools)).choices[0].message
    parsed = message.tool_calls[0].function.parsed_arguments
    same(parsed, GetWeather(city="Paris"))
    with ctx.client.chat.completions.stream(**ctx.options(tools=tools)) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    same([(event.name, json.loads(event.arguments)) for event in done], CALLS[:1])
    same((final.finish_reason, final.message.tool_calls[0].function.parsed_arguments), ("tool_calls", parsed))
    return repr(parsed)


@check("openai: reasoning before a call")
def reasoning(ctx):
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ctx.chat(**thinks).message
    same((called(message), message.model_extra["reasoning_content"]), (CALLS[:1], "I call get_weather."))
    expect(not message.content, f"{message.content!r}")
    return message.model_extra["reasoning_content"]


@check("openai: BadRequestError with the field: an unknown tool, none, a bad schema, bad arguments")
def refusals(ctx):
    refused(lambda: ctx.chat(tool_choice={"type": "function", "function": {"name": "get_wether"}}), "tool_choice")
    refused(lambda: ctx.chat(tools=[], tool_choice="required"), "tool_choice")
    refused(lambda: ctx.chat(tool_choice="often"), "tool_choice")
    refused(lambda: ctx.streamed(tools=["get_weather"]), "tools[0]")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "not": {}}
    bad = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    refused(lambda: ctx.chat(tools=bad, tool_choice="required"), "tools")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "tool_calls": [call]}]
    return refused(lambda: ctx.chat(messages), "messages[1].tool_calls[0].function.arguments")


@check("openai: the program of docs/tutorial/agents.md")
def tutorial(ctx):
    page = (ROOT / "docs/tutorial/agents.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", ctx.place.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    same((done.returncode, done.stdout), (0, "The sum of 12 and 30 is 42.\n"))
    return done.stdout.strip()


@check("LangChain: create_agent, invoked")
def invoke(ctx):
    for question, told, results in ((WEATHER, WEATHER_TOLD, 1), (BOTH, BOTH_TOLD, 2)):
        for more in ({}, {"system_prompt": "You are a helpful assistant."}):
            messages = ctx.agent(**more).invoke({"messages": [{"role": "user", "content": question}]})["messages"]
            same(messages[-1].text, told)
            same([type(message) for message in messages[1:]], [AIMessage, *[ToolMessage] * results, AIMessage])
            usage = messages[-1].usage_metadata
            expect(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0, f"{usage}")
    return told


@check("LangChain: create_agent, streamed by tokens, and asynchronously")
def stream(ctx):
    asked = {"messages": [{"role": "user", "content": BOTH}]}
    text = lambda pieces: "".join(piece.text for piece, _ in pieces if isinstance(piece, AIMessageChunk))  # noqa: E731
    pieces = list(ctx.agent().stream(asked, stream_mode="messages"))
    same(text(pieces), BOTH_TOLD)

    async def asynchronous():
        return [piece async for piece in ctx.agent().astream(asked, stream_mode="messages")]

    same(text(asyncio.run(asynchronous())), BOTH_TOLD)
    return f"{len(pieces)} pieces"


@check("LangChain: the next question of a conversation")
def conversation(ctx):
    first = ctx.agent().invoke({"messages": [{"role": "user", "content": WEATHER}]})["messages"]
    messages = ctx.agent().invoke({"messages": [*first, {"role": "user", "content": "Add 12 and 30."}]})["messages"]
    same(messages[-1].text, "The sum of 12 and 30 is 42.")
    return f"{len(messages)} messages"


@check("LangChain: 16 agents at once")
def batch(ctx):
    asked = {"messages": [{"role": "user", "content": BOTH}]}
    told = {answer["messages"][-1].text for answer in ctx.agent().batch([asked] * 16)}
    same(told, {BOTH_TOLD})
    return "16 equal answers"


@check("LangChain: bind_tools with tool_choice, and a typed refusal")
def bound(ctx):
    for choice in ("any", "get_weather"):
        calls = ctx.langchain.bind_tools([get_weather, add], tool_choice=choice).invoke(WEATHER).tool_calls
        same([(call["name"], call["args"]) for call in calls], CALLS[:1])
    wrong = ctx.langchain.bind(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_wether"}})
    return refused(lambda: wrong.invoke(WEATHER), "tool_choice")


@check("the same clients go on after all that, and nothing is left")
def afterwards(ctx):
    same(ctx.chat("Hello!").message.content, ctx.chat("Hello!").message.content)
    return everything_home(ctx)


if __name__ == "__main__":
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("openai", "langchain", "langchain-openai")]
    sys.exit(main(", ".join(versions), __doc__, Context, MODEL))
