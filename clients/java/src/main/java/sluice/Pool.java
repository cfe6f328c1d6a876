package sluice;

import io.grpc.ManagedChannel;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.stream.Collectors;

/** The channels of one client: which server a call goes to, and on which channel there. */
final class Pool {
  private static final long GRACE_SECONDS = 1;
  private static final long FIRST_REST_NANOS = TimeUnit.MILLISECONDS.toNanos(500); // doubles with each failure in a row
  private static final long MAX_REST_NANOS = TimeUnit.SECONDS.toNanos(10);

  /** A service, with its own gateways and engines. */
  private static final class Address {
    private final String target;
    private final int size;
    private final List<Lease> leases = new ArrayList<>();
    private long restsUntil = System.nanoTime() - MAX_REST_NANOS;
    private int numFailed;

    private Address(String target, int size) {
      this.target = target;
      this.size = size;
    }

    private boolean rests(long now) {
      return now - restsUntil < 0;
    }

    private int numCalls() {
      return leases.stream().mapToInt(one -> one.numCalls).sum();
    }
  }

  /** A channel in use by a call. The call releases it once, at its end. */
  static final class Lease {
    final ManagedChannel channel;
    private final Address address;
    private int numCalls;

    private Lease(ManagedChannel channel, Address address) {
      this.channel = channel;
      this.address = address;
    }
  }

  private final List<Address> addresses = new ArrayList<>();
  private final Function<String, ManagedChannel> open;
  private boolean isClosed;

  Pool(List<String> targets, int size, Function<String, ManagedChannel> open) {
    int most = Math.max(size, targets.size());
    for (int at = 0; at < targets.size(); at++) {
      int own = most / targets.size() + (at < most % targets.size() ? 1 : 0);
      addresses.add(new Address(targets.get(at), own));
    }
    this.open = open;
  }

  /** Returns a channel for a call: not that of the failed call, but one of its address if it must stay there. */
  synchronized Lease lease(Lease avoid, boolean stays) {
    if (isClosed) {
      throw SluiceException.of(Status.Code.CANCELLED, "the client is closed");
    }
    return lease(stays && avoid != null ? avoid.address : choose(System.nanoTime()), avoid);
  }

  /** Returns a channel to the address of this number; not that of the failed call. */
  synchronized Lease leaseAt(int number, Lease avoid) {
    if (isClosed) {
      throw SluiceException.of(Status.Code.CANCELLED, "the client is closed");
    }
    return lease(addresses.get(number), avoid);
  }

  int numAddresses() {
    return addresses.size();
  }

  private Lease lease(Address address, Lease avoid) {
    Lease best = null;
    for (Lease one : address.leases) {
      if (one != avoid && (best == null || one.numCalls < best.numCalls)) {
        best = one;
      }
    }
    if ((best == null || best.numCalls > 0) && address.leases.size() < address.size) {
      best = new Lease(open.apply(address.target), address);
      address.leases.add(best);
    }
    best = best == null ? avoid : best;
    best.numCalls++;
    if (avoid != null) {
      // The client itself pauses between attempts: during gRPC's own pause of 1 to 120 s an attempt would fail at once.
      best.channel.resetConnectBackoff();
    }
    return best;
  }

  /**
   * Takes the failure of a call: an address that is lost, stopping or full is not asked for a while. Calls that fail
   * together count once. Returns whether another address can be asked at once.
   */
  synchronized boolean failed(Lease lease, SluiceException error, long now) {
    Address address = lease.address;
    if (concernsAddress(error) && !address.rests(now)) {
      // After a long rest without another failure it counts as well again.
      address.numFailed = now - address.restsUntil > MAX_REST_NANOS ? 1 : address.numFailed + 1;
      long rest = FIRST_REST_NANOS << Math.min(address.numFailed - 1, 16);
      rest = Math.max(rest, error.retryAfter().orElse(Duration.ZERO).toNanos());
      address.restsUntil = now + Math.min(rest, MAX_REST_NANOS);
    }
    return addresses.stream().anyMatch(one -> one != address && !one.rests(now));
  }

  /** Returns the address with fewest calls among those that do not rest; the one that rests shortest if all do. */
  private Address choose(long now) {
    Address best = null;
    Address next = addresses.get(0);
    int start = ThreadLocalRandom.current().nextInt(addresses.size()); // clients that begin together begin apart
    for (int at = 0; at < addresses.size(); at++) {
      Address one = addresses.get((start + at) % addresses.size());
      if (!one.rests(now) && (best == null || one.numCalls() < best.numCalls())) {
        best = one;
      }
      next = one.restsUntil - next.restsUntil < 0 ? one : next;
    }
    return best == null ? next : best;
  }

  private static boolean concernsAddress(SluiceException error) {
    return error.code() == Status.Code.UNAVAILABLE
        || (error.code() == Status.Code.RESOURCE_EXHAUSTED && error.reason().equals("QUEUE_FULL"));
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
      open = addresses.stream().flatMap(one -> one.leases.stream()).collect(Collectors.toList());
      addresses.forEach(one -> one.leases.clear());
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
