// Vercel's AI SDK with its provider for OpenAI-compatible servers: text, stream, object, tool.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "own",
  baseURL: url,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = { model: provider(name), maxOutputTokens: 200, temperature: 0, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
});

const said = await generateText({ ...options, prompt: "Hello" });
assert(said.text && said.usage.outputTokens > 0);
console.log("a text");

let streamed = "";
for await (const part of streamText({ ...options, prompt: "Hello" }).textStream) streamed += part;
assert.equal(streamed, said.text);
console.log("a text streamed");

const object = await generateText({ ...options, prompt: "Name a city.", output: Output.object({ schema }) });
assert.equal(typeof object.output.city, "string");
console.log("an object");

const weather = tool({ description: "the weather", inputSchema: schema, execute: async () => "sunny" });
const called = await generateText({
  ...options,
  prompt: "What is the weather in Paris?",
  tools: { weather },
  toolChoice: "required",
});
assert.equal(called.toolResults[0].output, "sunny");
console.log("a tool, required");
