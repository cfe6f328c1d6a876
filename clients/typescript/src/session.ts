/** Sessions: many generations on one Converse call, each with its own credit. They are resumed when it is lost. */

import { ClientDuplexStream, Metadata } from "@grpc/grpc-js";

import type { Stream } from "./client";
import { SluiceError, fromFailed, fromRpc } from "./errors";
import { ConverseRequest, ConverseResponse, Update } from "./gen/sluice/v1/inference";
import { Delta, GenerationSpec } from "./gen/sluice/v1/types";
import { Lease, Pool } from "./pool";
import { Progress } from "./progress";
import { GenerateOptions, Prompt, build } from "./spec";

const DEFAULT_WINDOW = 256;

export interface OpenOptions extends GenerateOptions {
  /** How many tokens the server may sample ahead of the reader; null is no limit. */
  window?: number | null;
  /** Whether the client grants credit for the tokens that were read. Default: true. */
  grants?: boolean;
  /** Whether sampling waits for `closeInput`. */
  keepInputOpen?: boolean;
}

export class Session {
  private wires: Wire[] = []; // new generations go to the last; those before it finish

  constructor(
    private readonly pool: Pool,
    private readonly metadata: () => Metadata,
    private readonly streamOf: (spec: GenerationSpec, timeoutS: number | undefined) => Stream,
  ) {}

  /** Starts a generation: `for await` over its deltas. */
  open(prompt: Prompt, options: OpenOptions = {}): Generation {
    const { window = DEFAULT_WINDOW, grants = true, keepInputOpen = false, ...others } = options;
    const spec = build(prompt, others);
    spec.creditWindow = window ?? undefined;
    const wire = this.openWire();
    const step = grants && window ? Math.ceil(window / 2) : 0;
    const generation = new Generation(wire, this.streamOf(spec, others.timeoutS), step, keepInputOpen);
    const deadline = others.timeoutS === undefined ? undefined : durationOf(others.timeoutS);
    wire.start(generation, { spec, keepInputOpen: keepInputOpen || undefined, deadline, joinedFrames: true });
    return generation;
  }

  /** Cancels the generations that still run. */
  close(): void {
    for (const wire of this.wires) wire.close();
  }

  private openWire(): Wire {
    const last = this.wires[this.wires.length - 1];
    if (last?.takesMore) return last;
    const made = new Wire(this.pool, this.metadata());
    this.wires = [...this.wires.filter((one) => !one.isLost), made];
    return made;
  }
}

type News = ConverseResponse["frame"] | SluiceError;

export class Generation implements AsyncIterable<Delta> {
  readonly tag: bigint;
  readonly progress: Progress;
  private readonly news: News[] = [];
  private wake: () => void = () => undefined;
  private taken = 0;

  constructor(
    private readonly wire: Wire,
    private readonly rest: Stream,
    private readonly step: number,
    private readonly isAppended: boolean,
  ) {
    this.tag = wire.nextTag();
    this.progress = rest.progress;
  }

  get numBroken(): number {
    return this.rest.numBroken;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Delta, void, undefined> {
    while (this.progress.finished === undefined) {
      const news = this.news.shift();
      if (news === undefined) {
        await new Promise<void>((resolve) => (this.wake = resolve));
        continue;
      }
      if (news instanceof SluiceError) {
        await this.rest.after(news, this.wire.lease, !this.isAppended);
        yield* this.rest;
        return;
      }
      const delta = this.progress.take(news);
      if (delta) {
        yield delta;
        this.taken += delta.consumed;
        if (this.step && this.taken >= this.step) {
          this.grant(this.taken);
          this.taken = 0;
        }
      }
    }
  }

  /** Receives an event from the session's call. */
  deliver(news: News): void {
    this.news.push(news);
    this.wake();
  }

  /** Grants credit: the server may sample `tokens` more tokens. */
  grant(tokens: number): void {
    this.wire.send({ tag: this.tag, frame: { $case: "grant", value: { tokens } } });
  }

  /** Appends to the prompt while the input is open. */
  append(text: string): void {
    this.wire.send({ tag: this.tag, frame: { $case: "append", value: { piece: { $case: "text", value: text } } } });
  }

  /** Completes the prompt: sampling starts. */
  closeInput(): void {
    this.wire.send({ tag: this.tag, frame: { $case: "closeInput", value: {} } });
  }

  /** Changes sampling parameters from the next token on. */
  update(update: Partial<Update>): void {
    this.wire.send({ tag: this.tag, frame: { $case: "update", value: Update.fromPartial(update) } });
  }

  /** Cancels the generation; its iterator throws CANCELLED. */
  cancel(): void {
    this.wire.send({ tag: this.tag, frame: { $case: "cancel", value: {} } });
    if (this.wire.isLost) this.rest.cancel();
  }
}

/** One Converse call. No frame is written after its end; the read side gets the status. */
class Wire {
  takesMore = true;
  isLost = false;
  readonly lease: Lease;
  private tag = 0n;
  private readonly generations = new Map<bigint, Generation>();
  private readonly call: ClientDuplexStream<ConverseRequest, ConverseResponse>;

  constructor(
    private readonly pool: Pool,
    metadata: Metadata,
  ) {
    this.lease = pool.lease();
    this.call = this.lease.client.converse(metadata);
    this.call.on("error", () => undefined); // the loop below throws it
    void this.read();
  }

  nextTag(): bigint {
    return (this.tag += 1n);
  }

  start(generation: Generation, open: Extract<NonNullable<ConverseRequest["frame"]>, { $case: "open" }>["value"]): void {
    this.generations.set(generation.tag, generation);
    this.send({ tag: generation.tag, frame: { $case: "open", value: open } });
  }

  send(frame: ConverseRequest): void {
    if (!this.isLost && this.generations.has(frame.tag)) this.call.write(frame);
  }

  close(): void {
    this.call.cancel();
  }

  private async read(): Promise<void> {
    let lost = new SluiceError(14, "the server ended the stream of this session");
    try {
      for await (const message of this.call as AsyncIterable<ConverseResponse>)
        for (const frame of [message, ...message.more]) this.deliver(frame);
    } catch (error) {
      lost = fromRpc(error);
      this.pool.failed(this.lease, lost);
    }
    this.isLost = true;
    this.takesMore = false;
    this.lease.numCalls -= 1;
    for (const generation of this.generations.values()) generation.deliver(lost);
  }

  private deliver({ tag, frame }: ConverseResponse): void {
    if (frame?.$case === "goingAway") this.takesMore = false;
    const generation = this.generations.get(tag);
    if (!generation) return;
    if (frame?.$case === "finished" || frame?.$case === "failed") this.generations.delete(tag);
    generation.deliver(frame?.$case === "failed" ? fromFailed(frame.value) : frame);
    if (!this.takesMore && this.generations.size === 0) this.call.end(); // the server waits for the half-close
  }
}

function durationOf(seconds: number): { seconds: bigint; nanos: number } {
  return { seconds: BigInt(Math.floor(seconds)), nanos: Math.floor((seconds % 1) * 1e9) };
}
