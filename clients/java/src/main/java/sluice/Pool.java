package sluice;

import io.grpc.ManagedChannel;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** The channels of one client. They are opened as calls overlap; a call takes the channel with fewest calls. */
final class Pool {
  private static final long GRACE_SECONDS = 1;

  /** A channel in use by a call. The call releases it once, at its end. */
  static final class Lease {
    final ManagedChannel channel;
    private int numCalls;

    private Lease(ManagedChannel channel) {
      this.channel = channel;
    }
  }

  private final List<String> targets;
  private final int size;
  private final Function<String, ManagedChannel> open;
  private final List<Lease> leases = new ArrayList<>();
  private boolean isClosed;

  Pool(List<String> targets, int size, Function<String, ManagedChannel> open) {
    this.targets = List.copyOf(targets);
    this.size = Math.max(size, targets.size());
    this.open = open;
  }

  /** Returns the channel with fewest calls, or a new one if all are in use; never the channel of the failed call. */
  synchronized Lease lease(Lease avoid) {
    if (isClosed) {
      throw SluiceException.of(Status.Code.CANCELLED, "the client is closed");
    }
    Lease best = null;
    for (Lease one : leases) {
      if (one != avoid && (best == null || one.numCalls < best.numCalls)) {
        best = one;
      }
    }
    if ((best == null || best.numCalls > 0) && leases.size() < size) {
      best = new Lease(open.apply(targets.get(leases.size() % targets.size())));
      leases.add(best);
    }
    best = best == null ? avoid : best;
    best.numCalls++;
    if (avoid != null) {
      // The client itself pauses between attempts: during gRPC's own pause of 1 to 120 s an attempt would fail at once.
      best.channel.resetConnectBackoff();
    }
    return best;
  }

  synchronized void release(Lease lease) {
    lease.numCalls--;
  }

  synchronized boolean isClosed() {
    return isClosed;
  }

  /** Lets cancelled calls end in order, then cuts off those that still run. */
  void close() {
    List<Lease> open;
    synchronized (this) {
      isClosed = true;
      open = List.copyOf(leases);
      leases.clear();
    }
    open.forEach(one -> one.channel.shutdown());
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(GRACE_SECONDS);
    try {
      for (Lease one : open) {
        one.channel.awaitTermination(end - System.nanoTime(), TimeUnit.NANOSECONDS);
      }
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    } finally {
      open.forEach(one -> one.channel.shutdownNow());
    }
  }
}
