package sluice;

import io.grpc.Status;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import sluice.v1.Types.Delta;

/** A subscriber that requests one delta when the reading thread needs it, and blocks until it comes. */
final class BlockingDeltas implements Iterator<Delta>, Flow.Subscriber<Delta> {
  private static final Object END = new Object();

  private final BlockingQueue<Object> told = new LinkedBlockingQueue<>();
  private volatile Flow.Subscription subscription;
  private Object next; // a delta, END or an error; null: not requested yet

  @Override
  public boolean hasNext() {
    if (next == null) {
      subscription.request(1);
      next = waited();
    }
    if (next instanceof RuntimeException) {
      RuntimeException error = (RuntimeException) next;
      error.fillInStackTrace(); // the stack of the reading thread instead of gRPC's
      throw error;
    }
    return next != END;
  }

  @Override
  public Delta next() {
    if (!hasNext()) {
      throw new NoSuchElementException("the generation has ended");
    }
    Delta delta = (Delta) next;
    next = null;
    return delta;
  }

  private Object waited() {
    try {
      return told.take();
    } catch (InterruptedException interrupted) {
      subscription.cancel();
      Thread.currentThread().interrupt();
      return SluiceException.of(Status.Code.CANCELLED, "the thread that read it was interrupted");
    }
  }

  @Override
  public void onSubscribe(Flow.Subscription begun) {
    subscription = begun;
  }

  @Override
  public void onNext(Delta delta) {
    told.add(delta);
  }

  @Override
  public void onError(Throwable error) {
    told.add(error);
  }

  @Override
  public void onComplete() {
    told.add(END);
  }
}
