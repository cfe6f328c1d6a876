/** The driver of the TypeScript client; tests/conformance/README.md has the contract. Uses the built package. */
"use strict";

const { readFileSync } = require("node:fs");
const readline = require("node:readline");
const { parseArgs } = require("node:util");
const { Client, NEVER, SluiceError, types } = require("sluice-client");

const text = { type: "string" };
const { values } = parseArgs({
  options: {
    address: text, "tls-ca": text, "tls-cert": text, "tls-key": text, token: text, "no-retry": { type: "boolean" },
  },
});
const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (told) => process.stdout.write(JSON.stringify(told) + "\n");

function failure(error) {
  if (!error) return null;
  if (!(error instanceof SluiceError)) throw error;
  return {
    code: error.codeName, reason: error.reason, message: error.message, fields: error.fields,
    retry_after_s: error.retryAfterS ?? 0, generation_id: error.generationId, last_seq: Number(error.lastSeq),
  };
}

const reason = (end) => (end ? types.FinishReason[end.finishReason].replace("FINISH_REASON_", "").toLowerCase() : "");

async function generate(client, asked, prompt, options) {
  const end = { text: "", token_ids: [], finish_reason: "", completion_tokens: null };
  let error;
  try {
    const answer = await client.generate(prompt, options);
    const output = answer.outputs[0];
    Object.assign(end, { text: output.text, token_ids: output.tokens.map((one) => one.id) });
    Object.assign(end, { finish_reason: reason(output), completion_tokens: answer.usage.completionTokens });
  } catch (failed) {
    error = failed;
  }
  say({ end: { ...end, num_deltas: 0, num_empty: 0, seqs_rise: true, num_broken: 0, error: failure(error) } });
}

async function adapters(client, name) {
  const end = { text: "", token_ids: [], finish_reason: "", completion_tokens: null };
  const names = async () => (await client.adapters()).map((one) => one.name).join(",");
  let error;
  try {
    const { digest } = await client.loadAdapter(name, { path: name });
    const [loaded] = [await names(), await client.unloadAdapter(name, { graceS: 1.5 })];
    end.text = `${digest.length} ${loaded} ${await names()}`;
  } catch (failed) {
    error = failed;
  }
  say({ end: { ...end, num_deltas: 0, num_empty: 0, seqs_rise: true, num_broken: 0, error: failure(error) } });
}

async function follow(opened, asked) {
  const seen = { text: "", ids: [], seqs: [], empty: 0, consumed: 0 };
  const grants = [...(asked.grants ?? [])];
  let allowed = asked.window;
  let error;
  try {
    for await (const delta of opened) {
      seen.text += delta.text;
      seen.ids.push(...delta.tokens.map((one) => one.id));
      seen.seqs.push(Number(delta.seq));
      seen.empty += delta.tokens.length && !delta.text ? 1 : 0;
      seen.consumed += delta.consumed;
      if (asked.grants && seen.consumed >= allowed) {
        allowed += grants[0] ?? 0;
        if (grants.length) opened.grant(grants.shift());
        else opened.cancel();
      }
      if (seen.seqs.length === asked.cancel_after) opened.cancel();
      if (seen.seqs.length === asked.pause_after) {
        say({ paused: { generation_id: opened.progress.accepted.generationId } });
        await lines.next();
      }
    }
  } catch (failed) {
    error = failed;
  }
  const used = opened.progress.finished?.usage ?? error?.usage;
  say({
    end: {
      text: seen.text, token_ids: seen.ids, finish_reason: reason(opened.progress.ends.get(0)),
      completion_tokens: used?.completionTokens ?? null, num_deltas: seen.seqs.length, num_empty: seen.empty,
      seqs_rise: seen.seqs.every((seq, at) => seq === at + 1), num_broken: opened.numBroken, error: failure(error),
    },
  });
}

async function main() {
  const asked = JSON.parse((await lines.next()).value);
  const tls = values["tls-ca"] && { ca: values["tls-ca"], certificate: values["tls-cert"], key: values["tls-key"] };
  const client = new Client(values.address.split(","), { tls, token: values.token, retry: values["no-retry"] ? NEVER : undefined });
  const said = (asked.text ?? "").repeat(asked.repeat ?? 1);
  const prompt = asked.image ? { chat: [["user", [readFileSync(asked.image), said]]] } : said;
  const options = { temperature: 0, maxTokens: asked.max_tokens, timeoutS: asked.timeout_s };
  if (asked.seed !== undefined) options.seed = BigInt(asked.seed);
  if (asked.choices) options.choices = asked.choices;
  else options.ignoreEos = true;
  const session = client.converse();
  const start = {
    generate: () => generate(client, asked, prompt, options),
    adapters: () => adapters(client, prompt),
    stream: () => follow(client.stream(prompt, options), asked),
    converse: () => {
      const more = "window" in asked ? { window: asked.window } : {};
      return follow(session.open(prompt, { ...options, ...more, grants: !asked.grants }), asked);
    },
  }[asked.call];
  await Promise.all(Array.from({ length: asked.count ?? 1 }, start));
  session.close();
  client.close();
  process.exit(0);
}

main();
