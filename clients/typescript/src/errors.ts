/** The error of a call: gRPC's code, with google.rpc details unpacked. */

import { Metadata, ServiceError, status } from "@grpc/grpc-js";

import { Any } from "./gen/google/protobuf/any";
import { BadRequest, ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details";
import { Status } from "./gen/google/rpc/status";
import { Failed } from "./gen/sluice/v1/inference";
import { Usage } from "./gen/sluice/v1/types";

export class SluiceError extends Error {
  /** The reason in ErrorInfo, such as "QUEUE_FULL"; "" if the server sent none. */
  reason = "";
  /** The metadata in ErrorInfo. */
  metadata: Record<string, string> = {};
  /** Seconds to wait before another attempt; undefined if the server named none. */
  retryAfterS: number | undefined;
  /** The fields whose values are not allowed. */
  fields: string[] = [];
  generationId = "";
  lastSeq = 0n;
  usage: Usage | undefined;

  constructor(
    readonly code: status,
    message: string,
    details: Any[] = [],
  ) {
    super(message);
    this.name = "SluiceError";
    details.forEach((detail) => this.take(detail));
  }

  /** The code's name, such as "UNAVAILABLE". */
  get codeName(): string {
    return status[this.code] ?? "UNKNOWN";
  }

  private take(detail: Any): void {
    switch (detail.typeUrl.split("/").pop()) {
      case "google.rpc.ErrorInfo": {
        const info = ErrorInfo.decode(detail.value);
        this.reason = info.reason;
        this.metadata = Object.fromEntries(
          info.metadata instanceof Map ? info.metadata : Object.entries(info.metadata),
        );
        this.generationId = this.metadata["generation_id"] ?? "";
        this.lastSeq = BigInt(this.metadata["last_seq"] ?? "0");
        break;
      }
      case "google.rpc.RetryInfo": {
        const delay = RetryInfo.decode(detail.value).retryDelay;
        this.retryAfterS = Number(delay?.seconds ?? 0) + (delay?.nanos ?? 0) / 1e9;
        break;
      }
      case "google.rpc.BadRequest":
        this.fields = BadRequest.decode(detail.value).fieldViolations.map((one) => one.field);
        break;
      case "sluice.v1.Usage":
        this.usage = Usage.decode(detail.value);
        break;
    }
  }
}

/** Returns the error for an exception of grpc-js. */
export function fromRpc(error: unknown): SluiceError {
  if (error instanceof SluiceError) return error;
  const found = error as Partial<ServiceError>;
  if (found.code === undefined) throw error;
  const packed = (found.metadata ?? new Metadata()).get("grpc-status-details-bin")[0];
  const details = packed instanceof Buffer ? Status.decode(packed).details : [];
  return new SluiceError(found.code, found.details || String(found.message), details);
}

/** Returns the error in the last frame of a generation of Converse. */
export function fromFailed(failed: Failed): SluiceError {
  const error = new SluiceError(failed.code, failed.message, failed.details);
  error.generationId = failed.generationId;
  error.lastSeq = failed.lastSeq;
  error.usage = failed.usage;
  return error;
}
