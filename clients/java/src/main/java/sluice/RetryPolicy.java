package sluice;

import java.time.Duration;

/** When a client repeats and resumes failed calls. Immutable. */
public final class RetryPolicy {
  /** Repeats and resumes. */
  public static final RetryPolicy DEFAULT =
      new RetryPolicy(4, Duration.ofMillis(50), Duration.ofSeconds(2), Duration.ofSeconds(30));

  /** Does neither. */
  public static final RetryPolicy NEVER = new RetryPolicy(1, Duration.ZERO, Duration.ZERO, Duration.ZERO);

  final int attempts;
  final Duration firstDelay;
  final Duration maxDelay;
  final Duration patience;

  /**
   * A policy.
   *
   * @param attempts calls made at most before a generation is accepted; 1 never repeats one
   * @param firstDelay pause before the second; it doubles with each
   * @param maxDelay longest pause of our own choice
   * @param patience how long a lost generation is tried without an event, and the longest wait that a server may ask
   *     for (RetryInfo) that is obeyed and not raised; zero never resumes
   */
  public RetryPolicy(int attempts, Duration firstDelay, Duration maxDelay, Duration patience) {
    this.attempts = attempts;
    this.firstDelay = firstDelay;
    this.maxDelay = maxDelay;
    this.patience = patience;
  }
}
