package sluice;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.HashMap;
import java.util.Map;
import sluice.v1.Inference.ConverseRequest;
import sluice.v1.Inference.ConverseResponse;
import sluice.v1.Inference.Open;
import sluice.v1.InferenceServiceGrpc;

/** One Converse call and its generations by tag. No frame is written after its end; the read side gets the status. */
final class Wire extends ClientCall.Listener<ConverseResponse> {
  private final Pool pool;
  private final Pool.Lease lease;
  private final ClientCall<ConverseRequest, ConverseResponse> call;
  private final Map<Long, Feed> feeds = new HashMap<>();
  private long tag;
  private boolean isGoingAway;
  private SluiceException lost; // null while the call runs

  Wire(Caller caller, Context context) {
    pool = caller.pool;
    lease = pool.lease(null, false);
    Context before = context.attach();
    try {
      call = lease.channel.newCall(InferenceServiceGrpc.getConverseMethod(), CallOptions.DEFAULT);
      call.start(this, caller.headers());
      call.request(1);
    } finally {
      context.detach(before);
    }
  }

  Pool.Lease lease() {
    return lease;
  }

  synchronized boolean takesMore() {
    return !isGoingAway && lost == null;
  }

  /** Sends the open frame of a generation with a new tag; frames with that tag are delivered to it. */
  long start(Feed feed, Open open) {
    synchronized (this) {
      tag++;
      if (lost == null) {
        feeds.put(tag, feed);
        call.sendMessage(ConverseRequest.newBuilder().setTag(tag).setOpen(open).build());
        return tag;
      }
    }
    feed.tell(lost);
    return 0;
  }

  /** Sends a frame; drops it if its generation has ended. */
  synchronized void send(ConverseRequest frame) {
    if (lost == null && feeds.containsKey(frame.getTag())) {
      call.sendMessage(frame);
    }
  }

  @Override
  public void onMessage(ConverseResponse message) {
    deliver(message);
    message.getMoreList().forEach(this::deliver);
    call.request(1);
  }

  private void deliver(ConverseResponse frame) {
    Feed feed;
    synchronized (this) {
      isGoingAway |= frame.hasGoingAway();
      boolean isLast = frame.hasFinished() || frame.hasFailed();
      feed = isLast ? feeds.remove(frame.getTag()) : feeds.get(frame.getTag());
      if (isGoingAway && feeds.isEmpty() && lost == null) {
        lost = SluiceException.of(Status.Code.UNAVAILABLE, "the server ends the stream of this session");
        call.halfClose(); // the server waits for the half-close
      }
    }
    if (feed != null) {
      feed.tell(Events.of(frame));
    }
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    Status early = Status.UNAVAILABLE.withDescription("the server ended the stream of this session");
    SluiceException error = SluiceException.fromRpc(status.isOk() ? early : status, trailers);
    Map<Long, Feed> left;
    synchronized (this) {
      lost = error;
      left = Map.copyOf(feeds);
      feeds.clear();
    }
    pool.release(lease);
    left.values().forEach(feed -> feed.tell(error));
  }
}
