// The AI SDK with its providers for OpenAI, OpenAI-compatible servers and Anthropic against Baton's router. See README.md
// in the folder above.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, FACTS, cancels, check, equal, everythingHome, expect, main, place, rejection, running, scriptedOrSkip } from "./suite.mjs";

// Warnings of the package about options of a provider would stand between the lines.
globalThis.AI_SDK_LOG_WARNINGS = false;

const model = (await (await fetch(`${place.url}/v1/models`)).json()).data[0].id;

/** Every provider's model, at this address. */
function models(url, name) {
  const options = { baseURL: `${url}/v1`, apiKey: "not-needed" };
  return {
    compatible: createOpenAICompatible({ ...options, name: "baton", includeUsage: true })(name),
    completion: createOpenAICompatible({ ...options, name: "baton", includeUsage: true }).completionModel(name),
    chat: createOpenAI(options).chat(name),
    responses: createOpenAI(options).responses(name),
    messages: createAnthropic(options)(name),
  };
}

const at = models(place.url, model);
const defaults = { maxRetries: 0, maxOutputTokens: 24, temperature: 0 };
const generate = (of, more = {}) => generateText({ model: of, prompt: FACTS, ...defaults, ...more });
const stream = (of, more = {}) => streamText({ model: of, prompt: FACTS, onError: () => {}, ...defaults, ...more });
const long = { prompt: "x ".repeat(50), maxOutputTokens: 1500 };

check("generateText, and streamText in the same pieces with usage: openai-compatible, openai, anthropic", async () => {
  for (const name of ["compatible", "chat", "messages"]) {
    const whole = await generate(at[name]);
    expect(whole.text, `${name}: a text`);
    if (place.builtIn) equal(whole.text, ANSWER, name);
    const streamed = stream(at[name]);
    let text = "";
    for await (const piece of streamed.textStream) text += piece;
    equal(text, whole.text, name);
    equal([await streamed.finishReason, (await streamed.usage).outputTokens], [whole.finishReason, whole.usage.outputTokens], name);
    equal((await streamed.usage).inputTokens, whole.usage.inputTokens, name);
  }
  return `${ANSWER} three times`;
});

check("the model of completions", async () => {
  const whole = await generate(at.completion, { prompt: "The capital of" });
  const streamed = stream(at.completion, { prompt: "The capital of" });
  equal([await streamed.text, (await streamed.usage).outputTokens], [whole.text, whole.usage.outputTokens]);
  return `${JSON.stringify(whole.text)}, ${whole.usage.outputTokens} tokens`;
});

check("a conversation with a system message and parts", async () => {
  const turns = [
    { role: "user", content: "Hello." },
    { role: "assistant", content: "Hello." },
    { role: "user", content: [{ type: "text", text: FACTS }] },
  ];
  for (const name of ["compatible", "chat", "messages"]) {
    expect((await generate(at[name], { prompt: undefined, system: "Be brief.", messages: turns })).text, name);
  }
  return "three providers";
});

check("a stream that is left midway by its signal", async () => {
  const found = [];
  for (const name of ["compatible", "chat", "messages"]) {
    const leave = async () => {
      const controller = new AbortController();
      const { fullStream } = stream(at[name], { ...long, abortSignal: controller.signal });
      for await (const part of fullStream) if (part.type === "text-delta") controller.abort();
    };
    found.push(`${name} ${await cancels(3, leave)}`);
  }
  return found.at(-1);
});

check("a whole call whose signal aborts", async () => {
  const leave = async () => {
    const controller = new AbortController();
    const ended = rejection(() => generate(at.chat, { ...long, abortSignal: controller.signal }));
    await running();
    controller.abort();
    equal((await ended).name, "AbortError");
  };
  return cancels(3, leave);
});

check("tools: call, execution and answer in steps, whole and streamed", async () => {
  const scripted = models(scriptedOrSkip(), "scripted");
  for (const name of ["compatible", "chat", "responses", "messages"]) {
    let called = [];
    const find = tool({
      description: "Finds a thing.",
      inputSchema: z.object({ what: z.string() }),
      execute: ({ what }) => (called.push(what), `a key in the ${what}`),
    });
    const more = { tools: { find }, stopWhen: stepCountIs(3), temperature: undefined };
    const whole = await generate(scripted[name], more);
    equal([whole.text, whole.steps.length, called], [ANSWER, 2, ["box"]], name);
    called = [];
    const streamed = stream(scripted[name], more);
    equal([await streamed.text, (await streamed.steps).length, called], [ANSWER, 2, ["box"]], `${name}, streamed:`);
  }
  return "two steps with four providers";
});

check("/v1/responses", async () => {
  const scripted = models(scriptedOrSkip(), "scripted").responses;
  const whole = await generate(scripted, { temperature: undefined });
  equal([whole.text, whole.usage.outputTokens], [ANSWER, 3]);
  equal(await stream(scripted, { temperature: undefined }).text, ANSWER);
  const translated = await generate(at.responses);
  equal(await stream(at.responses).text, translated.text);
  return JSON.stringify(translated.text);
});

async function raises(status, call) {
  const error = await rejection(call);
  expect(APICallError.isInstance(error), `${error?.name} instead of AI_APICallError`);
  equal(error.statusCode, status);
  return `${error.name} ${status}: ${error.message}`;
}

check("generateObject", async () => {
  const schema = z.object({ what: z.enum(["hat", "box"]) });
  const { object } = await generateObject({ model: at.chat, prompt: FACTS, schema, ...defaults, maxOutputTokens: 400 });
  return JSON.stringify(object);
});

check("errors: AI_APICallError with status and message", async () => {
  const unknown = models(place.url, "no-such-model");
  for (const name of ["compatible", "chat", "messages"]) {
    await raises(404, () => generate(unknown[name]));
    const errors = [];
    await rejection(async () => {
      const { text } = stream(unknown[name], { onError: ({ error }) => errors.push(error) });
      await text;
    });
    equal([errors.length, errors[0]?.statusCode], [1, 404], `${name}, streamed:`);
  }
  await raises(400, () => generate(at.chat, { temperature: -1 }));
  return raises(400, () => generate(at.messages, { prompt: "one two three ".repeat(20_000) }));
});

check("16 calls at once", async () => {
  const replies = await Promise.all(Array.from({ length: 16 }, () => generate(at.compatible)));
  equal(new Set(replies.map((reply) => reply.text)).size, 1);
  return "16 equal answers";
});

check("the same models go on after all that", async () => {
  expect((await generate(at.chat)).text, "an answer");
  return everythingHome();
});

await main();
