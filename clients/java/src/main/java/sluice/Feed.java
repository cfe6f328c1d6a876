package sluice;

import io.grpc.Status;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Function;
import sluice.v1.Types.Delta;
import sluice.v1.Types.Finished;

/**
 * Passes the events of one generation to its one subscriber on demand, from one upstream after another.
 *
 * <p>Events, demand and cancellation come from any thread. The thread that adds one handles all pending ones, unless
 * another thread does so already: `work` counts them. Only the handling thread uses fields that are neither final nor
 * volatile.
 */
final class Feed implements Flow.Subscription {
  private static final Object AGAIN = new Object(); // the pause is over

  private final Progress progress;
  private final Caller caller;
  private final Attempts attempts;
  private final Function<Pool.Lease, Upstream> open;

  private final Queue<Object> news = new ConcurrentLinkedQueue<>();
  private final AtomicInteger work = new AtomicInteger();
  private final AtomicLong demand = new AtomicLong();
  private volatile boolean isCancelled;
  private volatile boolean isDone;
  private volatile Flow.Subscriber<? super Delta> subscriber; // null: there is no subscriber, or no longer

  private Upstream upstream; // null: none yet, or a pause
  private boolean isPaused;
  private boolean hasCancelled;
  private int numUntaken; // tokens of the last delta that the reader received
  private Pool.Lease avoid;

  /** Makes a feed. `open` returns the next upstream, on another channel than the one given. */
  Feed(Progress progress, Caller caller, Attempts attempts, Function<Pool.Lease, Upstream> open) {
    this.progress = progress;
    this.caller = caller;
    this.attempts = attempts;
    this.open = open;
  }

  /** Sets the first upstream if it exists already; called before all other methods. */
  void begin(Upstream first) {
    upstream = first;
  }

  void subscribe(Flow.Subscriber<? super Delta> wanted) {
    subscriber = wanted;
    wanted.onSubscribe(this);
  }

  /** Adds an event of the contract, or a SluiceException if the upstream has ended without Finished. */
  void tell(Object told) {
    news.add(told);
    drain();
  }

  @Override
  public void request(long num) {
    if (num <= 0) {
      tell(new IllegalArgumentException("a demand of " + num + ": it must be above 0"));
      return;
    }
    demand.accumulateAndGet(num, (had, more) -> had + more < 0 ? Long.MAX_VALUE : had + more);
    drain();
  }

  @Override
  public void cancel() {
    subscriber = null;
    end();
  }

  /** Cancels the generation; its reader gets Cancelled. */
  void end() {
    isCancelled = true;
    drain();
  }

  boolean isDone() {
    return isDone;
  }

  private void drain() {
    if (work.getAndIncrement() != 0) {
      return;
    }
    int seen = 1;
    do {
      while (step()) {
        continue;
      }
      seen = work.addAndGet(-seen);
    } while (seen != 0);
  }

  /** Handles one pending item; returns whether there may be another. */
  private boolean step() {
    if (isDone) {
      news.clear();
      return false;
    }
    if (isCancelled && !hasCancelled) {
      hasCancelled = true;
      cancelUpstream();
      return true;
    }
    if (demand.get() > 0 && numUntaken > 0 && upstream != null) {
      upstream.taken(numUntaken);
      numUntaken = 0;
    }
    Object next = news.peek();
    if (next == null) {
      return demand.get() > 0 && !isPaused && wantMore();
    }
    if (next instanceof Delta && demand.get() == 0) {
      return false;
    }
    handle(news.poll());
    return true;
  }

  private void cancelUpstream() {
    if (progress.detaches()) {
      progress.accepted().ifPresent(one -> caller.cancel(one.getGenerationId())); // the server keeps a detached one
    }
    if (upstream != null) {
      upstream.cancel();
    } else {
      finish(SluiceException.of(Status.Code.CANCELLED, "the caller does not want it any more"));
    }
  }

  private boolean wantMore() {
    try {
      upstream = upstream == null ? open.apply(avoid) : upstream;
      upstream.more();
    } catch (SluiceException closed) {
      finish(closed);
    }
    return false;
  }

  private void handle(Object told) {
    if (told == AGAIN) {
      isPaused = false;
    } else if (told instanceof SluiceException) {
      failed((SluiceException) told);
    } else if (told instanceof Throwable) {
      finish((Throwable) told);
    } else {
      Delta delta = progress.take(told);
      if (delta != null) {
        give(delta);
      } else if (told instanceof Finished) {
        finish(null);
      }
    }
  }

  private void failed(SluiceException error) {
    Upstream lost = upstream;
    upstream = null;
    avoid = lost.lease();
    isPaused = !isCancelled && lost.canBeFollowed() && caller.again(attempts, error, avoid, progress.stays(), () -> tell(AGAIN));
    if (!isPaused) {
      finish(error);
    }
  }

  private void give(Delta delta) {
    demand.accumulateAndGet(1, (had, one) -> had == Long.MAX_VALUE ? had : had - one);
    numUntaken = delta.getConsumed();
    Flow.Subscriber<? super Delta> reader = subscriber;
    if (reader == null) {
      return;
    }
    try {
      reader.onNext(delta);
    } catch (RuntimeException thrown) {
      finish(thrown);
    }
  }

  /** Ends the feed with an error or null. */
  private void finish(Throwable error) {
    isDone = true;
    if (upstream != null && error == null) {
      upstream.more(); // reads the call's end, so that its channel is given back
    } else if (upstream != null && !hasCancelled) {
      hasCancelled = true;
      cancelUpstream();
    }
    Flow.Subscriber<? super Delta> reader = subscriber;
    if (reader != null && error == null) {
      reader.onComplete();
    } else if (reader != null) {
      reader.onError(error);
    }
  }
}
