package sluice;

import com.google.protobuf.Duration;
import io.grpc.Context;
import sluice.v1.Inference.Open;
import sluice.v1.Types.GenerationSpec;

/** A session: many generations on one call, each with its own credit. They are resumed when the call is lost. */
public final class Session implements AutoCloseable {
  private final Caller caller;
  private final Context.CancellableContext context = Context.current().withCancellation();
  private Wire wire;

  Session(Caller caller) {
    this.caller = caller;
  }

  /** Starts a generation with {@link OpenOptions#DEFAULT}. */
  public Generation open(GenerationSpec spec) {
    return open(spec, OpenOptions.DEFAULT);
  }

  /** Starts a generation at once. */
  public Generation open(GenerationSpec spec, OpenOptions options) {
    GenerationSpec.Builder bounded = spec.toBuilder();
    options.creditWindow().ifPresent(bounded::setCreditWindow);
    Open.Builder open = Open.newBuilder().setSpec(bounded).setJoinedFrames(true);
    if (options.keepsInputOpen()) {
      open.setKeepInputOpen(true);
    }
    if (options.timeout() != null) {
      java.time.Duration time = options.timeout();
      open.setDeadline(Duration.newBuilder().setSeconds(time.getSeconds()).setNanos(time.getNano()));
    }
    Generation made = new Generation(caller, new Progress(open.getSpec()), options, context, line());
    made.start(open.build());
    return made;
  }

  private synchronized Wire line() {
    if (wire == null || !wire.takesMore()) {
      wire = new Wire(caller, context);
    }
    return wire;
  }

  /** Cancels the generations that still run. */
  @Override
  public void close() {
    context.cancel(null);
  }
}
