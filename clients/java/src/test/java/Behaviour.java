import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import sluice.DeltaStream;
import sluice.Generation;
import sluice.OpenOptions;
import sluice.Session;
import sluice.SluiceClient;
import sluice.SluiceException;
import sluice.v1.Control.GetLoadRequest;
import sluice.v1.ControlServiceGrpc;
import sluice.v1.Inference.CancelGenerationRequest;
import sluice.v1.Inference.GenerationState;
import sluice.v1.InferenceServiceGrpc;
import sluice.v1.Types.Delta;
import sluice.v1.Types.DisconnectAction;
import sluice.v1.Types.GenerationSpec;
import sluice.v1.Types.SamplingParams;
import sluice.v1.Types.SchedulingOptions;
import sluice.v1.Types.StopConditions;

/** Tests of demand, threads and early ends, besides the conformance suite. `java Behaviour HOST:PORT` runs them. */
final class Behaviour {
  private static final GenerationSpec LONG = GenerationSpec.newBuilder()
      .setText("Once upon a time")
      .setSampling(SamplingParams.newBuilder().setMaxTokens(1800).setTemperature(0))
      .setStop(StopConditions.newBuilder().setIgnoreEos(true))
      .build();
  private static final GenerationSpec SHORT =
      LONG.toBuilder().setSampling(LONG.getSampling().toBuilder().setMaxTokens(40)).build();
  private static final String TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  private static final OpenOptions NARROW = OpenOptions.DEFAULT.window(16);
  private static final GenerationSpec DETACHED = LONG.toBuilder()
      .setScheduling(
          SchedulingOptions.newBuilder().setOnDisconnect(DisconnectAction.DISCONNECT_ACTION_DETACH))
      .build();

  /** A subscriber that records its calls. */
  private static class Kept implements Flow.Subscriber<Delta> {
    final BlockingQueue<Object> told = new LinkedBlockingQueue<>();
    Flow.Subscription subscription;

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
      told.add("complete");
    }
  }

  private final String address;
  private final ControlServiceGrpc.ControlServiceBlockingStub control;
  private final InferenceServiceGrpc.InferenceServiceBlockingStub inference;

  private Behaviour(String address, ManagedChannel channel) {
    this.address = address;
    this.control = ControlServiceGrpc.newBlockingStub(channel);
    this.inference = InferenceServiceGrpc.newBlockingStub(channel);
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    Behaviour checks = new Behaviour(arguments[0], channel);
    checks.holds("as many deltas as demanded", client -> checks.demand(client, client.stream(SHORT)));
    checks.holds("as many of a session", client -> checks.demand(client, client.converse().open(SHORT, NARROW)));
    checks.holds("trace context goes along", checks::trace);
    checks.holds("a subscriber that throws ends the generation", checks::thrower);
    checks.holds("a demand of nothing is an error", checks::nothing);
    checks.holds("a cancelled subscription is silent and ends the generation", checks::unsubscribed);
    checks.holds("a cancelled future ends the generation", checks::future);
    checks.holds("leaving a loop ends the generation", checks::left);
    checks.holds("a detached generation ends when it is left", checks::detached);
    checks.holds("an interrupted reader gets Cancelled", checks::interrupted);
    checks.holds("a cancelled context ends the generation", checks::context);
    checks.holds("closing a session ends its generations", checks::session);
    checks.holds("a closed client says so", checks::closed);
    channel.shutdownNow();
  }

  private interface Check {
    void of(SluiceClient client) throws Exception;
  }

  private void holds(String name, Check check) throws Exception {
    try (SluiceClient client = SluiceClient.builder(address).build()) {
      check.of(client);
      for (long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(10); numOpen() > 0; ) {
        expect(System.nanoTime() < end, name + ": the engine goes on");
      }
    }
    System.out.println(name);
  }

  /** Waits until the server reports an open request, so that a later report of none proves that it ended. */
  private void running() {
    while (numOpen() == 0) {
      Thread.onSpinWait();
    }
  }

  private long numOpen() {
    return control.getLoad(GetLoadRequest.getDefaultInstance()).getLoad().getEnginesList().stream()
        .mapToLong(one -> one.getRunningRequests() + one.getWaitingRequests())
        .sum();
  }

  private void demand(SluiceClient client, DeltaStream stream) throws Exception {
    Kept kept = new Kept();
    stream.subscribe(kept);
    kept.subscription.request(2);
    expect(((Delta) kept.told.take()).getSeq() == 1 && ((Delta) kept.told.take()).getSeq() == 2, "not the first two");
    client.generate(SHORT); // in the same steps: what was not demanded has been sent, as far as its credit goes
    expect(kept.told.isEmpty() && stream.progress().lastSeq() == 2, "more than were demanded");
    kept.subscription.request(Long.MAX_VALUE);
    long last = 2;
    for (Object told = kept.told.take(); told instanceof Delta; told = kept.told.take()) {
      expect(((Delta) told).getSeq() == ++last, "a delta lost");
    }
    expect(stream.progress().finished().orElseThrow().getLastSeq() == last, "not all were told");
  }

  private void trace(SluiceClient unused) throws Exception {
    BlockingQueue<String> sent = new LinkedBlockingQueue<>();
    ClientInterceptor seen = new ClientInterceptor() {
      @Override
      public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        return new SimpleForwardingClientCall<Q, A>(next.newCall(method, options)) {
          @Override
          public void start(Listener<A> listener, Metadata headers) {
            sent.add(headers.get(Metadata.Key.of("traceparent", Metadata.ASCII_STRING_MARSHALLER)));
            super.start(listener, headers);
          }
        };
      }
    };
    SluiceClient.Builder builder = SluiceClient.builder(address).trace(() -> Map.of("traceparent", TRACE));
    try (SluiceClient client = builder.intercept(seen).build(); Session session = client.converse()) {
      client.generate(SHORT);
      client.stream(SHORT).text();
      session.open(SHORT).text();
    }
    expect(List.copyOf(sent).equals(List.of(TRACE, TRACE, TRACE)), "sent " + sent);
  }

  private void thrower(SluiceClient client) throws Exception {
    Kept kept = new Kept() {
      @Override
      public void onNext(Delta delta) {
        running();
        throw new IllegalStateException("no more");
      }
    };
    client.stream(LONG).subscribe(kept);
    kept.subscription.request(1);
    expect(kept.told.take() instanceof IllegalStateException, "it was not told what it threw");
  }

  private void nothing(SluiceClient client) throws Exception {
    Kept kept = new Kept();
    client.stream(LONG).subscribe(kept);
    kept.subscription.request(0);
    expect(kept.told.take() instanceof IllegalArgumentException, "a demand of nothing was taken");
  }

  private void unsubscribed(SluiceClient client) throws Exception {
    Kept kept = new Kept();
    client.stream(LONG).subscribe(kept);
    kept.subscription.request(1);
    kept.told.take();
    running();
    kept.subscription.cancel();
    client.generate(SHORT);
    expect(kept.told.isEmpty(), "it was told after it had cancelled");
  }

  private void future(SluiceClient client) throws Exception {
    CompletableFuture<?> answer = client.generateAsync(LONG);
    running();
    answer.cancel(true);
  }

  private void left(SluiceClient client) {
    try (DeltaStream stream = client.stream(LONG)) {
      stream.iterator().next();
      running();
    }
  }

  private void detached(SluiceClient client) {
    DeltaStream stream = client.stream(DETACHED);
    stream.iterator().next();
    running();
    stream.close();
    while (numOpen() > 0) {
      Thread.onSpinWait();
    }
    String id = stream.progress().accepted().orElseThrow().getGenerationId();
    CancelGenerationRequest request = CancelGenerationRequest.newBuilder().setGenerationId(id).build();
    GenerationState found = inference.cancelGeneration(request).getFound();
    expect(found == GenerationState.GENERATION_STATE_CANCELLED, "it was left to run: " + found);
  }

  private void interrupted(SluiceClient client) throws Exception {
    CompletableFuture<Throwable> seen = new CompletableFuture<>();
    CountDownLatch begun = new CountDownLatch(1);
    Thread reader = new Thread(() -> seen.complete(error(client.stream(LONG), delta -> begun.countDown())));
    reader.start();
    begun.await();
    running();
    reader.interrupt();
    expect(seen.get() instanceof SluiceException.Cancelled, "not Cancelled");
  }

  private void context(SluiceClient client) throws Exception {
    Context.CancellableContext around = Context.current().withCancellation();
    DeltaStream stream = around.call(() -> client.stream(LONG));
    expect(error(stream, delta -> {
      running();
      around.cancel(null);
    }) instanceof SluiceException.Cancelled, "not Cancelled");
  }

  private void session(SluiceClient client) {
    Session session = client.converse();
    List<Generation> all = List.of(session.open(LONG), session.open(LONG, OpenOptions.DEFAULT.window(4)));
    all.forEach(one -> one.iterator().next());
    running();
    session.close();
    for (Generation one : all) {
      expect(error(one, delta -> { }) instanceof SluiceException.Cancelled, "not Cancelled");
    }
  }

  private void closed(SluiceClient client) {
    DeltaStream open = client.stream(LONG);
    open.iterator().next();
    running();
    client.close();
    expect(error(open, delta -> { }) != null, "it runs on");
    expect(error(client.stream(LONG), delta -> { }) instanceof SluiceException.Cancelled, "not Cancelled");
    try {
      client.generate(LONG);
      expect(false, "a closed client answers");
    } catch (SluiceException refused) {
      expect(refused.code() == Status.Code.CANCELLED, "not CANCELLED");
    }
  }

  private static RuntimeException error(DeltaStream stream, Consumer<Delta> each) {
    try {
      stream.forEach(each);
      return null;
    } catch (RuntimeException found) {
      return found;
    }
  }

  private static void expect(boolean holds, String message) {
    if (!holds) {
      throw new AssertionError(message);
    }
  }
}
