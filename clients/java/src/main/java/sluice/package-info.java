/**
 * The Java client of sluice, which serves language models over gRPC.
 *
 * <p>{@link sluice.SluiceClient} is the entry point. A {@link sluice.DeltaStream} resumes by itself when its connection
 * breaks or its gateway fails; a {@link sluice.Session} has many generations on one call, each with its own credit.
 * Errors are {@link sluice.SluiceException}s. {@code sluice.v1} holds the generated stubs of the contract.
 */
package sluice;
