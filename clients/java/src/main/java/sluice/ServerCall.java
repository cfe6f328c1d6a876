package sluice;

import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.List;
import java.util.function.Consumer;
import java.util.function.Function;

/** One call of StreamGenerate or ResumeGenerate. It reads a message only when one is requested. */
final class ServerCall<Q, A> extends ClientCall.Listener<A> implements Upstream {
  private final ClientCall<Q, A> call;
  private final Pool pool;
  private final Pool.Lease lease;
  private final Function<A, List<Object>> eventsOf;
  private final Consumer<Object> news;
  private volatile boolean isAsked;

  ServerCall(ClientCall<Q, A> call, Pool pool, Pool.Lease lease, Function<A, List<Object>> eventsOf, Consumer<Object> news) {
    this.call = call;
    this.pool = pool;
    this.lease = lease;
    this.eventsOf = eventsOf;
    this.news = news;
  }

  ServerCall<Q, A> start(Metadata headers, Q request) {
    call.start(this, headers);
    call.sendMessage(request);
    call.halfClose();
    return this;
  }

  @Override
  public void more() {
    if (!isAsked) {
      isAsked = true;
      call.request(1);
    }
  }

  @Override
  public void taken(int numTokens) {}

  @Override
  public void cancel() {
    call.cancel("the caller does not want it any more", null);
  }

  @Override
  public boolean canBeFollowed() {
    return true;
  }

  @Override
  public Pool.Lease lease() {
    return lease;
  }

  @Override
  public void onMessage(A message) {
    List<Object> events = eventsOf.apply(message);
    int last = events.size() - 1;
    events.subList(0, last).forEach(news);
    isAsked = false; // before its last event, or the next message would be requested while there are events left
    news.accept(events.get(last));
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    pool.release(lease);
    Status early = Status.INTERNAL.withDescription("the stream ended before its last message");
    news.accept(SluiceException.fromRpc(status.isOk() ? early : status, trailers));
  }
}
