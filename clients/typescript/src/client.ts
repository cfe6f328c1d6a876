/** The client: `generate`, `stream`, `converse`, adapters. Streams are resumed when their connection breaks. */

import { readFileSync } from "node:fs";

import { CallOptions, ChannelCredentials, Metadata, ServiceError } from "@grpc/grpc-js";

import { LoadAdapterOptions, MAX_PAGE, UnloadAdapterOptions, controlOf, durationOf } from "./adapters";
import { SluiceError, fromRpc } from "./errors";
import { Adapter, ListAdaptersResponse, LoadAdapterResponse, UnloadAdapterResponse } from "./gen/sluice/v1/control";
import { GenerateResponse, InferenceServiceClient } from "./gen/sluice/v1/inference";
import { Delta, GenerationSpec } from "./gen/sluice/v1/types";
import { Lease, Pool } from "./pool";
import { Progress } from "./progress";
import { Attempts, DEFAULT_RETRY, RetryPolicy } from "./retry";
import { Session } from "./session";
import { GenerateOptions, Prompt, build } from "./spec";

export interface Tls {
  /** Paths of PEM files; without `ca` Node's own authorities are trusted. */
  ca?: string;
  certificate?: string;
  key?: string;
}

export interface ClientOptions {
  token?: string;
  tls?: Tls;
  /** Timeout in seconds of requests without one of their own. */
  timeoutS?: number;
  /** The most connections; they are opened as calls overlap. */
  channels?: number;
  retry?: RetryPolicy;
  /** Called for each call; returns the W3C trace context to send. */
  trace?: () => Record<string, string>;
}

const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": 64 << 20,
  "grpc.max_send_message_length": -1,
  "grpc.use_local_subchannel_pool": 1,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
};

/** Where there are other addresses to go to, one that is silent is left sooner. */
const QUICK_KEEPALIVE = { "grpc.keepalive_time_ms": 5_000, "grpc.keepalive_timeout_ms": 5_000 };

export class Client {
  private readonly pool: Pool;

  /** Throws if a token would be sent in plaintext to another host. */
  constructor(
    target: string | string[] = "127.0.0.1:50051",
    private readonly options: ClientOptions = {},
  ) {
    const targets = typeof target === "string" ? [target] : target;
    if (options.token && !options.tls) targets.forEach(checkLocal);
    const credentials = credentialsOf(options.tls);
    const channelOptions = targets.length > 1 ? { ...CHANNEL_OPTIONS, ...QUICK_KEEPALIVE } : CHANNEL_OPTIONS;
    this.pool = new Pool(
      targets,
      options.channels ?? 4,
      (address) => new InferenceServiceClient(address, credentials, channelOptions),
    );
  }

  /** Closes the connections. */
  close(): void {
    this.pool.close();
  }

  /** Returns the whole answer at once. */
  async generate(prompt: Prompt, options: GenerateOptions = {}): Promise<GenerateResponse> {
    const spec = build(prompt, options);
    return this.unary<GenerateResponse>(options.timeoutS, ({ client }, ...call) => client.generate({ spec }, ...call));
  }

  /** Loads an adapter from the server's folder of adapters, and names it. Of several servers it is one that does; any
   * loads a folder, or a repository that it allows, when a request names it. */
  async loadAdapter(name: string, options: LoadAdapterOptions = {}): Promise<Adapter> {
    const { timeoutS, ...asked } = options;
    const request = { adapter: name, ...asked };
    const answer = await this.unary<LoadAdapterResponse>(timeoutS, (lease, ...call) =>
      controlOf(lease).loadAdapter(request, ...call),
    );
    return answer.adapter!;
  }

  /** Takes an adapter's name away. Its generations go on to their ends, or for `graceS`. */
  async unloadAdapter(name: string, options: UnloadAdapterOptions = {}): Promise<void> {
    const grace = options.graceS === undefined ? undefined : durationOf(options.graceS);
    await this.unary<UnloadAdapterResponse>(options.timeoutS, (lease, ...call) =>
      controlOf(lease).unloadAdapter({ adapter: name, grace }, ...call),
    );
  }

  /** Returns the adapters that are loaded, by name. */
  async adapters(options: { timeoutS?: number } = {}): Promise<Adapter[]> {
    const found: Adapter[] = [];
    let pageToken = "";
    do {
      const request = { pageSize: MAX_PAGE, pageToken };
      const page = await this.unary<ListAdaptersResponse>(options.timeoutS, (lease, ...call) =>
        controlOf(lease).listAdapters(request, ...call),
      );
      found.push(...page.adapters);
      pageToken = page.nextPageToken;
    } while (pageToken);
    return found;
  }

  /** Returns the answer as a stream: `for await` over its deltas. Leaving the loop cancels it. */
  stream(prompt: Prompt, options: GenerateOptions = {}): Stream {
    return this.streamOf(build(prompt, options), options.timeoutS);
  }

  /** Opens a session: many generations on one call, each with its own credit. */
  converse(): Session {
    return new Session(this.pool, () => this.metadata(), (spec, timeoutS) => this.streamOf(spec, timeoutS));
  }

  private streamOf(spec: GenerationSpec, timeoutS: number | undefined): Stream {
    const progress = new Progress(spec);
    const attempts = new Attempts(this.retry, timeoutS ?? this.options.timeoutS, progress);
    return new Stream(this.pool, progress, attempts, () => this.metadata());
  }

  /** Makes a call that has one answer, again where the policy says so. */
  private async unary<T>(
    timeoutS: number | undefined,
    send: (lease: Lease, metadata: Metadata, options: CallOptions, done: (error: ServiceError | null, answer: T) => void) => void,
  ): Promise<T> {
    const attempts = new Attempts(this.retry, timeoutS ?? this.options.timeoutS);
    let lease: Lease | undefined;
    for (;;) {
      const used = (lease = this.pool.lease(lease));
      try {
        return await new Promise<T>((resolve, reject) =>
          send(used, this.metadata(), { deadline: attempts.deadline }, (error, answer) => (error ? reject(error) : resolve(answer))),
        );
      } catch (error) {
        const failed = fromRpc(error);
        await attempts.pause(failed, this.pool.failed(used, failed));
      } finally {
        used.numCalls -= 1;
      }
    }
  }

  private get retry(): RetryPolicy {
    return this.options.retry ?? DEFAULT_RETRY;
  }

  private metadata(): Metadata {
    const metadata = new Metadata();
    if (this.options.token) metadata.set("authorization", `Bearer ${this.options.token}`);
    for (const [key, value] of Object.entries(this.options.trace?.() ?? {})) metadata.set(key, value);
    return metadata;
  }
}

/** One generation: `for await` yields its deltas, each once, and throws SluiceError if it fails. */
export class Stream implements AsyncIterable<Delta> {
  private call: { cancel(): void } | undefined;
  private isCancelled = false;
  private avoid: Lease | undefined;

  constructor(
    private readonly pool: Pool,
    readonly progress: Progress,
    private readonly attempts: Attempts,
    private readonly metadata: () => Metadata,
  ) {}

  /** How often the connection was lost and the generation resumed. */
  get numBroken(): number {
    return this.attempts.numBroken;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Delta, void, undefined> {
    while (this.progress.finished === undefined) {
      const lease = (this.avoid = this.pool.lease(this.avoid, this.progress.stays));
      const call = (this.call = this.open(lease));
      call.on("error", () => undefined); // the loop below throws it; a later one has no reader
      try {
        for await (const message of call) {
          for (const { event } of [message, ...message.more]) {
            const delta = this.progress.take(event);
            if (delta) yield delta;
          }
        }
        if (this.progress.finished === undefined) throw new SluiceError(13, "the stream ended before its last message");
      } catch (error) {
        if (this.progress.finished !== undefined) return;
        await this.pause(fromRpc(error), lease);
      } finally {
        call.cancel();
        lease.numCalls -= 1;
      }
    }
  }

  /** Cancels the generation; its iterator throws CANCELLED. */
  cancel(): void {
    this.isCancelled = true;
    this.call?.cancel();
    const accepted = this.progress.accepted;
    if (!this.progress.detaches || !accepted) return;
    const lease = this.pool.lease(this.avoid, true); // at the address that has it
    lease.client.cancelGeneration({ generationId: accepted.generationId }, this.metadata(), () => {
      lease.numCalls -= 1;
    });
  }

  /** Takes over a generation whose own call, on `lease`, ended with `error`; throws `error` if it cannot be resumed. */
  async after(error: SluiceError, lease: Lease, canGoOn: boolean): Promise<void> {
    this.avoid = lease;
    if (!canGoOn && !this.progress.detaches) throw error;
    this.progress.spec = { ...this.progress.spec, creditWindow: undefined }; // ResumeGenerate takes no grants
    await this.pause(error, lease);
  }

  private open(lease: Lease) {
    const options = { deadline: this.attempts.deadline };
    return this.progress.hasBegun
      ? lease.client.resumeGenerate({ spec: this.progress.rest(), joinedEvents: true }, this.metadata(), options)
      : lease.client.streamGenerate({ spec: this.progress.spec, joinedEvents: true }, this.metadata(), options);
  }

  private async pause(error: SluiceError, lease: Lease): Promise<void> {
    if (this.isCancelled) throw error;
    const elsewhere = this.pool.failed(lease, error) && !this.progress.stays;
    await this.attempts.pause(error, elsewhere);
  }
}

function credentialsOf(tls: Tls | undefined): ChannelCredentials {
  if (!tls) return ChannelCredentials.createInsecure();
  const [ca, key, certificate] = [tls.ca, tls.key, tls.certificate].map((path) => (path ? readFileSync(path) : null));
  return ChannelCredentials.createSsl(ca, key, certificate);
}

function checkLocal(target: string): void {
  if (!/^(unix:|localhost:|127\.|\[::1\]:)/.test(target))
    throw new Error(`the token would be sent to ${target} in plaintext: give tls: {}`);
}
