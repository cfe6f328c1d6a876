package sluice;

import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Function;
import sluice.v1.Inference.ResumeGenerateRequest;
import sluice.v1.Inference.StreamGenerateRequest;
import sluice.v1.InferenceServiceGrpc;
import sluice.v1.Types.Delta;

/**
 * The deltas of one generation, in order, each once. A stream can be iterated over or subscribed to, once.
 *
 * <p>Messages are read from the network only on demand. The generation is resumed when its connection breaks. {@link
 * #close} ends a generation that has not ended, so use try-with-resources.
 */
public class DeltaStream implements Iterable<Delta>, Flow.Publisher<Delta>, AutoCloseable {
  final Progress progress;
  final Feed feed;
  private final Caller caller;
  private final Attempts attempts;
  private final Context context;
  private final Metadata headers;
  private final AtomicBoolean isRead = new AtomicBoolean();
  private BlockingDeltas blocking;

  DeltaStream(Caller caller, Progress progress, Attempts attempts, Context context) {
    this.caller = caller;
    this.progress = progress;
    this.attempts = attempts;
    this.context = context;
    this.headers = caller.headers();
    this.feed = new Feed(progress, caller, attempts, this::open);
  }

  /** What was received so far. */
  public Progress progress() {
    return progress;
  }

  /** How often the generation was lost after it had been accepted, and was resumed. */
  public int numBroken() {
    return attempts.numBroken();
  }

  /** Returns the iterator, always the same one. Its hasNext and next block and throw SluiceException. */
  @Override
  public synchronized Iterator<Delta> iterator() {
    if (blocking == null) {
      BlockingDeltas made = new BlockingDeltas();
      subscribe(made);
      blocking = made;
    }
    return blocking;
  }

  /** Reads to the end and returns the rest of the first output's text. Blocks. */
  public String text() {
    StringBuilder text = new StringBuilder();
    for (Delta delta : this) {
      text.append(delta.getOutputIndex() == 0 ? delta.getText() : "");
    }
    return text.toString();
  }

  /** Accepts one subscriber, called on gRPC's threads, one at a time. If it throws, the generation ends. */
  @Override
  public void subscribe(Flow.Subscriber<? super Delta> subscriber) {
    if (isRead.getAndSet(true)) {
      throw new IllegalStateException("a generation is read once");
    }
    feed.subscribe(subscriber);
  }

  /** Cancels the generation; its reader gets Cancelled. */
  public void cancel() {
    feed.end();
  }

  /** Ends the generation if it has not ended. */
  @Override
  public void close() {
    feed.end();
  }

  private Upstream open(Pool.Lease avoid) {
    Pool.Lease lease = caller.pool.lease(avoid, progress.stays());
    if (progress.hasBegun()) {
      ResumeGenerateRequest request = ResumeGenerateRequest.newBuilder().setSpec(progress.rest()).setJoinedEvents(true).build();
      return started(lease, InferenceServiceGrpc.getResumeGenerateMethod(), Events::allOf, request);
    }
    StreamGenerateRequest request = StreamGenerateRequest.newBuilder().setSpec(progress.spec()).setJoinedEvents(true).build();
    return started(lease, InferenceServiceGrpc.getStreamGenerateMethod(), Events::allOf, request);
  }

  private <Q, A> Upstream started(
      Pool.Lease lease, MethodDescriptor<Q, A> method, Function<A, List<Object>> eventsOf, Q request) {
    Context before = context.attach();
    try {
      CallOptions options = CallOptions.DEFAULT.withDeadline(attempts.deadline());
      return new ServerCall<>(lease.channel.newCall(method, options), caller.pool, lease, eventsOf, feed::tell)
          .start(Caller.copy(headers), request);
    } finally {
      context.detach(before);
    }
  }
}
