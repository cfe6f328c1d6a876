/** The client of sluice. `Client` is the entry point; `v1` holds the generated types of the contract. */

export { LoadAdapterOptions, UnloadAdapterOptions } from "./adapters";
export { Client, ClientOptions, Stream, Tls } from "./client";
export { SluiceError } from "./errors";
export { Progress } from "./progress";
export { NEVER, RetryPolicy } from "./retry";
export { Generation, OpenOptions, Session } from "./session";
export { GenerateOptions, Prompt } from "./spec";
export * as control from "./gen/sluice/v1/control";
export * as inference from "./gen/sluice/v1/inference";
export * as types from "./gen/sluice/v1/types";
