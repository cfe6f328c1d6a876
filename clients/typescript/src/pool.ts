/** The channels of one client: which address a call goes to, and on which channel there. */

import { status } from "@grpc/grpc-js";

import { SluiceError } from "./errors";
import { InferenceServiceClient } from "./gen/sluice/v1/inference";

/** How long an address is not asked after a failure; it doubles with each further one in a row. */
const FIRST_REST_S = 0.5;
const MAX_REST_S = 10;

/** A service, with its own gateways and engines. */
interface Address {
  readonly target: string;
  readonly size: number;
  readonly leases: Lease[];
  restsUntilS: number;
  numFailed: number;
}

export interface Lease {
  readonly client: InferenceServiceClient;
  readonly address: Address;
  numCalls: number;
}

/** Lends the channel with fewest calls, of the address with fewest; channels are opened as calls overlap. */
export class Pool {
  private readonly addresses: Address[];

  constructor(
    targets: string[],
    size: number,
    private readonly open: (address: string) => InferenceServiceClient,
  ) {
    const most = Math.max(size, targets.length);
    this.addresses = targets.map((target, at) => ({
      target,
      size: Math.floor(most / targets.length) + (at < most % targets.length ? 1 : 0),
      leases: [],
      restsUntilS: 0,
      numFailed: 0,
    }));
  }

  /** Returns a channel for a call; not that of the failed call `avoid`, but one of its address if it must `stay`. */
  lease(avoid?: Lease, stay = false): Lease {
    const address = stay && avoid ? avoid.address : this.choose();
    const others = address.leases.filter((one) => one !== avoid).sort((a, b) => a.numCalls - b.numCalls);
    let best = others[0];
    if ((!best || best.numCalls) && address.leases.length < address.size) {
      best = { client: this.open(address.target), address, numCalls: 0 };
      address.leases.push(best);
    }
    best ??= address.leases[0]!;
    best.numCalls += 1;
    return best;
  }

  /** Takes the failure of a call: an address that is lost, stopping or full is not asked for a while. Calls that fail
   *  together count once. Returns whether another address can be asked at once. */
  failed(lease: Lease, error: SluiceError): boolean {
    const { address } = lease;
    const nowS = Date.now() / 1000;
    if (concernsAddress(error) && nowS >= address.restsUntilS) {
      // After a long rest without another failure it counts as well again.
      address.numFailed = nowS - address.restsUntilS > MAX_REST_S ? 1 : address.numFailed + 1;
      const ownS = Math.min(FIRST_REST_S * 2 ** (address.numFailed - 1), MAX_REST_S);
      address.restsUntilS = nowS + Math.max(ownS, Math.min(error.retryAfterS ?? 0, MAX_REST_S));
    }
    return this.addresses.some((one) => one !== address && one.restsUntilS <= nowS);
  }

  close(): void {
    this.addresses.forEach(({ leases }) => leases.splice(0).forEach((one) => one.client.close()));
  }

  private choose(): Address {
    const nowS = Date.now() / 1000;
    const awake = this.addresses.filter((one) => one.restsUntilS <= nowS);
    if (!awake.length) return this.addresses.reduce((a, b) => (b.restsUntilS < a.restsUntilS ? b : a));
    const start = Math.floor(Math.random() * awake.length); // clients that begin together begin apart
    const order = [...awake.slice(start), ...awake.slice(0, start)];
    return order.reduce((a, b) => (numCalls(b) < numCalls(a) ? b : a));
  }
}

function numCalls(address: Address): number {
  return address.leases.reduce((sum, one) => sum + one.numCalls, 0);
}

function concernsAddress(error: SluiceError): boolean {
  if (error.code === status.UNAVAILABLE) return true;
  return error.code === status.RESOURCE_EXHAUSTED && error.reason === "QUEUE_FULL";
}
