package sluice;

import io.grpc.Deadline;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** The attempts at one call: its deadline, and the pause after a failure. Time and random numbers are arguments. */
final class Attempts {
  private final RetryPolicy policy;
  private final Deadline deadline;
  private final Progress progress;
  private int numFailed;
  private int numBroken;
  private long newsNanos;
  private long seenSeq;

  /** The attempts at a generation, or, with progress null, at a unary call. A null deadline means none. */
  Attempts(RetryPolicy policy, Deadline deadline, Progress progress, long nowNanos) {
    this.policy = policy;
    this.deadline = deadline;
    this.progress = progress;
    this.newsNanos = nowNanos;
  }

  Deadline deadline() {
    return deadline;
  }

  /** How often the generation was lost after it had been accepted, and was resumed. */
  synchronized int numBroken() {
    return numBroken;
  }

  /**
   * Returns the pause before the next attempt, `elsewhere` if another address can be asked; empty if there is none.
   * `chance` is a random number from 0 to 1.
   */
  synchronized Optional<Duration> pause(SluiceException error, boolean elsewhere, long nowNanos, double chance) {
    boolean begun = progress != null && progress.accepted().isPresent();
    if (progress != null && progress.lastSeq() > seenSeq) {
      seenSeq = progress.lastSeq();
      numFailed = 0;
      newsNanos = nowNanos;
    }
    numFailed++;
    // What one address names does not concern another.
    Duration asked = elsewhere ? Duration.ZERO : error.retryAfter().orElse(Duration.ZERO);
    boolean helps = helps(error, begun, elsewhere) && asked.compareTo(policy.patience) <= 0;
    if (!helps || !mayGoOn(begun, nowNanos) || (progress != null && !progress.canGoOn())) {
      return Optional.empty();
    }
    Duration delay = delay(asked, chance);
    if (deadline != null && deadline.timeRemaining(TimeUnit.NANOSECONDS) <= delay.toNanos()) {
      return Optional.empty();
    }
    numBroken += begun ? 1 : 0;
    return Optional.of(delay);
  }

  private boolean mayGoOn(boolean begun, long nowNanos) {
    return begun ? nowNanos - newsNanos < policy.patience.toNanos() : numFailed < policy.attempts;
  }

  private Duration delay(Duration asked, double chance) {
    double own = Math.min(
        policy.firstDelay.toNanos() * (double) (1L << Math.min(numFailed - 1, 16)), policy.maxDelay.toNanos());
    Duration spread = Duration.ofNanos((long) (own * (0.5 + chance / 2)));
    return asked.compareTo(spread) > 0 ? asked : spread;
  }

  private static boolean helps(SluiceException error, boolean begun, boolean elsewhere) {
    if (error.code() == Status.Code.UNAVAILABLE) {
      return true;
    }
    if (error.code() == Status.Code.RESOURCE_EXHAUSTED) {
      return error.retryAfter().isPresent() && !error.reason().equals("DEADLINE_UNATTAINABLE");
    }
    if (error.code() == Status.Code.FAILED_PRECONDITION) {
      // Another address may still serve the revision that it began with.
      return begun && elsewhere && error.reason().equals("REVISION_CHANGED");
    }
    return error.code() == Status.Code.ABORTED && begun && error.reason().equals("SLOW_CONSUMER");
  }
}
