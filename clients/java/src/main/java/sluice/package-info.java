/**
 * The Java client of sluice, which serves language models over gRPC.
 *
 * <p>{@link sluice.SluiceClient} is the way in. A {@link sluice.DeltaStream} goes on by itself when its connection
 * breaks or its gateway dies; a {@link sluice.Session} has many generations on one call, each with its own credit. What
 * fails is a {@link sluice.SluiceException}. {@code sluice.v1} holds the generated stubs of the contract.
 */
package sluice;
