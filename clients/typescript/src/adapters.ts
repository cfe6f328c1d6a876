/** Adapters of a server: the options of a load, and the calls of ControlService on a client's own channels. */

import { ChannelCredentials } from "@grpc/grpc-js";

import { ControlServiceClient } from "./gen/sluice/v1/control";
import { Duration } from "./gen/google/protobuf/duration";
import { Lease } from "./pool";

export interface LoadAdapterOptions {
  /** Its folder below the server's folder of adapters, or a hub's repository that the server allows; default: its name. */
  path?: string;
  /** The model that it must belong to. */
  baseModel?: string;
  /** Keep it loaded. */
  pinned?: boolean;
  /** The digest that its files must have. */
  expectedDigest?: string;
  timeoutS?: number;
}

export interface UnloadAdapterOptions {
  /** How long its generations may go on; default: to their ends. */
  graceS?: number;
  timeoutS?: number;
}

/** The most adapters of one answer. */
export const MAX_PAGE = 1000;

/** Returns the stub of ControlService on a lease's channel. */
export function controlOf(lease: Lease): ControlServiceClient {
  const channelOverride = lease.client.getChannel();
  return new ControlServiceClient(lease.address.target, ChannelCredentials.createInsecure(), { channelOverride });
}

/** Returns seconds as the contract has them. */
export function durationOf(seconds: number): Duration {
  const whole = Math.floor(seconds);
  return { seconds: BigInt(whole), nanos: Math.round((seconds - whole) * 1e9) };
}
