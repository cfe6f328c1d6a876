/** The channels of one client. They are opened as calls overlap; a call takes the channel with fewest calls. */

import { InferenceServiceClient } from "./gen/sluice/v1/inference";

export interface Lease {
  readonly client: InferenceServiceClient;
  numCalls: number;
}

export class Pool {
  private readonly leases: Lease[] = [];
  private readonly size: number;

  constructor(
    private readonly targets: string[],
    size: number,
    private readonly open: (address: string) => InferenceServiceClient,
  ) {
    this.size = Math.max(size, targets.length);
  }

  /** Returns the channel with fewest calls, or a new one if all are in use; never the channel of the failed call. */
  lease(avoid?: Lease): Lease {
    const others = this.leases.filter((one) => one !== avoid).sort((a, b) => a.numCalls - b.numCalls);
    let best = others[0];
    if ((!best || best.numCalls) && this.leases.length < this.size) {
      best = { client: this.open(this.targets[this.leases.length % this.targets.length]!), numCalls: 0 };
      this.leases.push(best);
    }
    best ??= this.leases[0]!;
    best.numCalls += 1;
    return best;
  }

  close(): void {
    this.leases.splice(0).forEach((one) => one.client.close());
  }
}
