// openai for Node.js: chat, stream, completions, a parsed answer, a tool.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

const said = await client.chat.completions.create({ model, messages, max_completion_tokens: 16, temperature: 0 });
assert(said.choices[0].message.content);
console.log("chat");

let streamed = "";
const stream = client.chat.completions.stream({ model, messages, max_completion_tokens: 16, temperature: 0 });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, said.choices[0].message.content);
assert.equal((await stream.finalChatCompletion()).choices[0].message.content, streamed);
console.log("chat streamed");

const text = await client.completions.create({ model, prompt: "1, 2, 3,", max_tokens: 4, temperature: 0 });
assert(text.choices[0].text);
console.log("completions");

const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema } };
const parsed = await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: 200 });
assert.equal(typeof parsed.choices[0].message.parsed.city, "string");
console.log("parse");

const tools = [{ type: "function", function: { name: "answer", strict: true, parameters: schema } }];
const called = await client.chat.completions.create({
  model,
  messages,
  tools,
  tool_choice: "required",
  parallel_tool_calls: false,
  max_tokens: 200,
});
const [call] = called.choices[0].message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
const result = { role: "tool", tool_call_id: call.id, content: "ok" };
await client.chat.completions.create({
  model,
  messages: [...messages, called.choices[0].message, result],
  tools,
  max_tokens: 8,
});
console.log("tools, required and strict, over two turns");
