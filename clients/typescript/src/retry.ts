/** Decides whether and when a failed call is repeated within its deadline. */

import { status } from "@grpc/grpc-js";

import { SluiceError } from "./errors";
import { Progress } from "./progress";

export interface RetryPolicy {
  /** The most calls made before a generation is accepted. */
  attempts: number;
  firstDelayS: number;
  maxDelayS: number;
  /** Seconds to try to resume a lost generation without an event, and the longest RetryInfo delay that is respected. */
  patienceS: number;
}

export const DEFAULT_RETRY: RetryPolicy = { attempts: 4, firstDelayS: 0.05, maxDelayS: 2, patienceS: 30 };
export const NEVER: RetryPolicy = { attempts: 1, firstDelayS: 0, maxDelayS: 0, patienceS: 0 };

/** The attempts at one call; with `progress` if it is a generation. */
export class Attempts {
  /** How often the generation was lost after it had been accepted, and was resumed. */
  numBroken = 0;
  private numFailed = 0;
  private newsS = now();
  private seenSeq = 0n;
  private readonly endS: number | undefined;

  constructor(
    private readonly policy: RetryPolicy,
    timeoutS: number | undefined,
    private readonly progress?: Progress,
  ) {
    this.endS = timeoutS === undefined ? undefined : now() + timeoutS;
  }

  /** The deadline to give to grpc for the next attempt. */
  get deadline(): Date | undefined {
    return this.endS === undefined ? undefined : new Date(this.endS * 1000);
  }

  /** Waits before the next attempt, `elsewhere` at another address. Throws `error` if there is to be none. */
  async pause(error: SluiceError, elsewhere = false): Promise<void> {
    const begun = this.progress?.accepted !== undefined;
    if (this.progress && this.progress.lastSeq > this.seenSeq) {
      this.seenSeq = this.progress.lastSeq;
      this.numFailed = 0;
      this.newsS = now();
    }
    this.numFailed += 1;
    const delayS = this.delayS(error, begun, elsewhere);
    if (delayS === undefined || (this.progress && !this.progress.canGoOn)) throw error;
    if (this.endS !== undefined && now() + delayS >= this.endS) throw error;
    this.numBroken += begun ? 1 : 0;
    await new Promise((resolve) => setTimeout(resolve, delayS * 1000));
  }

  private delayS(error: SluiceError, begun: boolean, elsewhere: boolean): number | undefined {
    const { attempts, firstDelayS, maxDelayS, patienceS } = this.policy;
    if (!helps(error, begun, elsewhere)) return undefined;
    if (begun ? now() - this.newsS >= patienceS : this.numFailed >= attempts) return undefined;
    const namedS = elsewhere ? 0 : (error.retryAfterS ?? 0); // what one address names does not concern another
    if (namedS > patienceS) return undefined;
    const own = Math.min(firstDelayS * 2 ** (this.numFailed - 1), maxDelayS);
    return Math.max(namedS, own * (0.5 + Math.random() / 2));
  }
}

function helps(error: SluiceError, begun: boolean, elsewhere: boolean): boolean {
  switch (error.code) {
    case status.UNAVAILABLE:
      return true;
    case status.RESOURCE_EXHAUSTED:
      return error.retryAfterS !== undefined && error.reason !== "DEADLINE_UNATTAINABLE";
    case status.ABORTED:
      return begun && error.reason === "SLOW_CONSUMER";
    case status.FAILED_PRECONDITION: // another address may still serve the revision that it began with
      return begun && elsewhere && error.reason === "REVISION_CHANGED";
    default:
      return false;
  }
}

function now(): number {
  return Date.now() / 1000;
}
