// The official `openai` package for Node against Baton's router. See README.md in the folder above.

import OpenAI from "openai";
import { ANSWER, FACTS, cancels, check, equal, everythingHome, expect, main, place, rejection, running, scriptedOrSkip } from "./suite.mjs";

const client = new OpenAI({ baseURL: `${place.url}/v1`, apiKey: "not-needed", maxRetries: 0, timeout: 120_000 });
const scripted = () => new OpenAI({ baseURL: `${scriptedOrSkip()}/v1`, apiKey: "x", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: FACTS }];
const chat = (more = {}, options = {}) =>
  client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24, ...more }, options);
const complete = (more = {}) =>
  client.completions.create({ model, prompt: "The capital of", temperature: 0, max_tokens: 16, ...more });
const long = { model, messages: [{ role: "user", content: "x ".repeat(50) }], temperature: 0, max_tokens: 1500 };

async function raises(kind, status, call, code) {
  const error = await rejection(call);
  expect(error instanceof kind, `${error?.constructor?.name} instead of ${kind.name}`);
  equal(error.status, status);
  if (code) equal(error.code, code);
  expect(error.error?.message, `no message: ${JSON.stringify(error.error)}`);
  return `${kind.name} ${status} ${error.code ?? error.type}: ${error.error.message}`;
}

check("models.list, models.retrieve", async () => {
  equal((await client.models.retrieve(model)).id, model);
  return model;
});

check("chat.completions.create", async () => {
  const { choices, usage } = await chat();
  expect(choices[0].message.content, "a text");
  if (place.builtIn) equal(choices[0].message.content, ANSWER);
  equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  return `${choices[0].message.content}, ${usage.prompt_tokens}+${usage.completion_tokens} tokens`;
});

check("a streamed chat with usage is the whole chat in pieces", async () => {
  const whole = await chat();
  let [text, finish, usage, chunks] = ["", null, null, 0];
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
    chunks += 1;
    usage = chunk.usage ?? usage;
    text += chunk.choices[0]?.delta.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  equal([text, finish], [whole.choices[0].message.content, whole.choices[0].finish_reason]);
  equal(usage.total_tokens, whole.usage.total_tokens);
  return `${chunks} chunks, ${usage.total_tokens} tokens, ${finish}`;
});

check("the helper chat.completions.stream", async () => {
  const final = await client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 24 }).finalChatCompletion();
  equal(final.choices[0].message.content, (await chat()).choices[0].message.content);
  return final.choices[0].finish_reason;
});

check("completions.create, whole and streamed", async () => {
  const text = (await complete()).choices[0].text;
  let streamed = "";
  for await (const chunk of await complete({ stream: true })) streamed += chunk.choices[0]?.text ?? "";
  equal(streamed, text);
  return text;
});

check("a stream that is left midway: by `break`, and by its controller", async () => {
  const leave = async (abort) => {
    const stream = await client.chat.completions.create({ ...long, stream: true });
    for await (const _ of stream) {
      if (abort) stream.controller.abort();
      break;
    }
  };
  await cancels(3, () => leave(false));
  return cancels(3, () => leave(true));
});

check("a whole call whose signal aborts", async () => {
  const leave = async () => {
    const controller = new AbortController();
    const call = client.chat.completions.create(long, { signal: controller.signal });
    const ended = rejection(() => call);
    await running();
    controller.abort();
    const error = await ended;
    expect(error instanceof OpenAI.APIUserAbortError, `${error}`);
  };
  return cancels(3, leave);
});

check("16 calls at once", async () => {
  const replies = await Promise.all(Array.from({ length: 16 }, () => chat()));
  equal(new Set(replies.map((reply) => reply.choices[0].message.content)).size, 1);
  return "16 equal answers";
});

const tool = { type: "function", function: { name: "find", parameters: { type: "object", properties: {} } } };

check("a tool: its call, whole and streamed, and its result by runTools", async () => {
  const options = { model: "scripted", messages, tools: [tool] };
  const wanted = ["find", { what: "box" }];
  const parts = (call) => [call.function.name, JSON.parse(call.function.arguments)];
  const reply = await scripted().chat.completions.create(options);
  equal(parts(reply.choices[0].message.tool_calls[0]), wanted);
  const final = await scripted().chat.completions.stream(options).finalChatCompletion();
  equal(parts(final.choices[0].message.tool_calls[0]), wanted, "streamed:");
  let called = 0;
  const run = { ...tool.function, parse: JSON.parse, function: ({ what }) => ((called += 1), `a key in the ${what}`) };
  const runner = scripted().chat.completions.runTools({ model: "scripted", messages, tools: [{ type: "function", function: run }] });
  equal([await runner.finalContent(), called], [ANSWER, 1]);
  return JSON.stringify(wanted);
});

check("responses.create, whole and streamed", async () => {
  const options = { model, input: FACTS, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(options);
  equal((await client.responses.stream(options).finalResponse()).output_text, whole.output_text);
  await raises(OpenAI.BadRequestError, 400, () => client.responses.create({ ...options, previous_response_id: "resp_1" }), "unsupported_parameter");
  const reply = await scripted().responses.create({ model: "scripted", input: FACTS });
  equal([reply.output_text, reply.usage.output_tokens], [ANSWER, 3]);
  const stream = scripted().responses.stream({ model: "scripted", input: FACTS });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  equal((await stream.finalResponse()).output_text, ANSWER);
  equal(text, ANSWER);
  return JSON.stringify(whole.output_text);
});

check("errors: their classes and codes", async () => {
  await raises(OpenAI.NotFoundError, 404, () => chat({ model: "no-such-model" }), "model_not_found");
  await raises(OpenAI.NotFoundError, 404, () => chat({ model: "no-such-model", stream: true }), "model_not_found");
  await raises(OpenAI.BadRequestError, 400, () => chat({ temperature: -1 }));
  await raises(OpenAI.NotFoundError, 404, () => client.moderations.create({ input: "x" }));
  const tooLong = [{ role: "user", content: "one two three ".repeat(20_000) }];
  return raises(OpenAI.BadRequestError, 400, () => chat({ messages: tooLong }), "context_length_exceeded");
});

check("the same client goes on after all that", async () => {
  expect((await chat()).choices[0].message.content, "an answer");
  return everythingHome();
});

await main();
