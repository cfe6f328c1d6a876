package sluice;

import java.time.Duration;

/** When a client repeats and resumes failed calls. Immutable. */
public final class RetryPolicy {
  /** Repeats failed calls and resumes lost generations. */
  public static final RetryPolicy DEFAULT =
      new RetryPolicy(4, Duration.ofMillis(50), Duration.ofSeconds(2), Duration.ofSeconds(30));

  /** Neither repeats nor resumes. */
  public static final RetryPolicy NEVER = new RetryPolicy(1, Duration.ZERO, Duration.ZERO, Duration.ZERO);

  final int attempts;
  final Duration firstDelay;
  final Duration maxDelay;
  final Duration patience;

  /**
   * Makes a policy.
   *
   * @param attempts the most calls made before a generation is accepted; 1 never repeats a call
   * @param firstDelay pause before the second call; it doubles with each further one
   * @param maxDelay the longest pause that the client chooses itself
   * @param patience how long the client tries to resume a lost generation without receiving an event, and the longest
   *     delay in a server's RetryInfo that it waits for instead of throwing; zero never resumes
   */
  public RetryPolicy(int attempts, Duration firstDelay, Duration maxDelay, Duration patience) {
    this.attempts = attempts;
    this.firstDelay = firstDelay;
    this.maxDelay = maxDelay;
    this.patience = patience;
  }
}
