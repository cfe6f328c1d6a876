/** What a client has received of one generation, and the request for the rest of it. No I/O. */

import { ConverseResponse, StreamGenerateResponse } from "./gen/sluice/v1/inference";
import {
  Accepted,
  Delta,
  DisconnectAction,
  Finished,
  GenerationSpec,
  OutputFinished,
  PromptInfo,
} from "./gen/sluice/v1/types";

export type Event = StreamGenerateResponse["event"] | ConverseResponse["frame"];

export class Progress {
  accepted: Accepted | undefined;
  promptInfo: PromptInfo | undefined;
  finished: Finished | undefined;
  /** How each output ended. */
  readonly ends = new Map<number, OutputFinished>();
  lastSeq = 0n;
  private numTokens = 0;
  private readonly ids = new Map<number, number[]>();

  constructor(public spec: GenerationSpec) {}

  /** Whether the server keeps the generation when its connection is lost. */
  get detaches(): boolean {
    return this.spec.scheduling?.onDisconnect === DisconnectAction.DISCONNECT_ACTION_DETACH;
  }

  /** Whether the generation is continued by ResumeGenerate; otherwise the request is sent again. */
  get hasBegun(): boolean {
    return this.accepted !== undefined && (this.lastSeq > 0n || this.detaches);
  }

  /** Whether the generation can be resumed after its connection was lost. */
  get canGoOn(): boolean {
    return this.lastSeq === 0n || this.detaches || this.hasAllIds;
  }

  /** Whether only the server that has the generation can continue it: ids are missing here. */
  get stays(): boolean {
    return this.detaches && !this.hasAllIds;
  }

  private get hasAllIds(): boolean {
    return [...this.ids.values()].reduce((sum, ids) => sum + ids.length, 0) === this.numTokens;
  }

  /** Records an event. Returns its delta, unless it has none or the delta was received before. */
  take(event: Event): Delta | undefined {
    switch (event?.$case) {
      case "delta":
        return this.takeDelta(event.value);
      case "accepted":
        this.accepted = event.value;
        return undefined;
      case "promptInfo":
        this.promptInfo = event.value;
        return undefined;
      case "outputFinished":
        if (!this.ends.has(event.value.outputIndex)) this.ends.set(event.value.outputIndex, event.value);
        return undefined;
      case "finished":
        this.finished = event.value;
        return undefined;
      default:
        return undefined;
    }
  }

  /** Returns the spec for ResumeGenerate; without a prompt if ids are missing, so that no gateway starts it again. */
  rest(): GenerationSpec {
    const accepted = this.accepted!;
    const outputs = [...this.ids].map(([outputIndex, tokenIds]) => ({ outputIndex, tokenIds }));
    const { generationId, adapterDigest } = accepted;
    const resume = { generationId, afterSeq: this.lastSeq, outputs, adapterDigest };
    if (!this.hasAllIds) return GenerationSpec.fromPartial({ resume });
    const { model, revision, params } = accepted;
    const rest = { ...this.spec, ...params, model, revision, resume, creditWindow: undefined };
    // Converse accepts a generation before its max_tokens is known.
    const maxTokens = params?.sampling?.maxTokens ?? this.spec.sampling?.maxTokens;
    if (params?.sampling) rest.sampling = { ...params.sampling, maxTokens };
    return rest;
  }

  private takeDelta(delta: Delta): Delta | undefined {
    if (delta.seq <= this.lastSeq) return undefined;
    this.lastSeq = delta.seq;
    this.numTokens += delta.consumed;
    if (delta.tokens.length) {
      const ids = this.ids.get(delta.outputIndex) ?? [];
      this.ids.set(delta.outputIndex, ids);
      for (const token of delta.tokens) ids.push(token.id);
    }
    return delta;
  }
}
