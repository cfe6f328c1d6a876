/** Makes a GenerationSpec of plain values. Options that are not given stay absent. */

import { Chat, DisconnectAction, GenerationSpec, Image, Role, SamplingParams } from "./gen/sluice/v1/types";

export type Prompt = string | number[] | { chat: [role: "system" | "user" | "assistant", said: string | (string | Uint8Array)[]][] } | GenerationSpec;

export interface GenerateOptions extends Partial<SamplingParams> {
  model?: string;
  adapter?: string;
  stop?: string[];
  ignoreEos?: boolean;
  logprobs?: number;
  jsonSchema?: string;
  choices?: string[];
  priority?: number;
  /** Whether the server keeps the generation running when the connection is lost. */
  detach?: boolean;
  /** The timeout of the request. */
  timeoutS?: number;
}

const ROLES = { system: Role.ROLE_SYSTEM, user: Role.ROLE_USER, assistant: Role.ROLE_ASSISTANT };

export function build(prompt: Prompt, options: GenerateOptions): GenerationSpec {
  const { model, adapter, stop, ignoreEos, logprobs, jsonSchema, choices, priority, detach, timeoutS, ...sampling } = options;
  const spec = prompted(prompt);
  spec.model = model ?? spec.model;
  spec.adapter = adapter ?? spec.adapter;
  spec.sampling = SamplingParams.fromPartial({ ...spec.sampling, ...sampling });
  if (stop || ignoreEos !== undefined)
    spec.stop = { ...{ tokenIds: [] }, ...spec.stop, strings: stop ?? spec.stop?.strings ?? [], ignoreEos };
  if (logprobs !== undefined) spec.output = { ...{ logprobTokenIds: [] }, ...spec.output, logprobs };
  if (jsonSchema) spec.constraint = { form: { $case: "jsonSchema", value: jsonSchema } };
  if (choices) spec.constraint = { form: { $case: "choice", value: { texts: choices } } };
  const onDisconnect = detach ? DisconnectAction.DISCONNECT_ACTION_DETACH : undefined;
  if (priority !== undefined || detach)
    spec.scheduling = { ...{ ttftTarget: undefined, detachTtl: undefined }, ...spec.scheduling, priority, onDisconnect };
  return spec;
}

function prompted(prompt: Prompt): GenerationSpec {
  if (typeof prompt === "string") return GenerationSpec.fromPartial({ prompt: { $case: "text", value: prompt } });
  if (Array.isArray(prompt)) return GenerationSpec.fromPartial({ prompt: { $case: "tokenIds", value: { ids: prompt } } });
  if (!("chat" in prompt)) return GenerationSpec.fromPartial(prompt);
  const messages = prompt.chat.map(([role, said]) => ({
    role: ROLES[role],
    parts: (typeof said === "string" ? [said] : said).map((one) => ({
      part:
        typeof one === "string"
          ? { $case: "text" as const, value: one }
          : { $case: "image" as const, value: Image.fromPartial({ data: Buffer.from(one) }) },
    })),
  }));
  return GenerationSpec.fromPartial({ prompt: { $case: "chat", value: Chat.fromPartial({ messages }) } });
}
