package sluice;

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import sluice.v1.Inference.CancelGenerationRequest;
import sluice.v1.Inference.CancelGenerationResponse;
import sluice.v1.InferenceServiceGrpc;

/** Makes calls: chooses the channel, adds headers, and repeats calls where that helps. */
final class Caller {
  private static final int ANY = -1;
  final Pool pool;
  final RetryPolicy retry;
  private final Duration timeout;
  private final String token;
  private final Supplier<Map<String, String>> trace;

  Caller(Pool pool, RetryPolicy retry, Duration timeout, String token, Supplier<Map<String, String>> trace) {
    this.pool = pool;
    this.retry = retry;
    this.timeout = timeout;
    this.token = token;
    this.trace = trace;
  }

  /** Returns the headers of an attempt at a call: the token and the trace context. */
  Metadata headers() {
    Metadata headers = new Metadata();
    if (token != null) {
      headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    }
    trace.get().forEach((key, value) -> headers.put(Metadata.Key.of(key, Metadata.ASCII_STRING_MARSHALLER), value));
    return headers;
  }

  /** The attempts at a call with this timeout; null: the client's. The deadline of gRPC's context applies too. */
  Attempts attempts(Duration own, Progress progress) {
    Duration chosen = own == null ? timeout : own;
    Deadline ends = chosen == null ? null : Deadline.after(chosen.toNanos(), TimeUnit.NANOSECONDS);
    Deadline around = Context.current().getDeadline();
    if (around != null) {
      ends = ends == null ? around : ends.minimum(around);
    }
    return new Attempts(retry, ends, progress, System.nanoTime());
  }

  /**
   * Runs the attempt after a pause. Returns false, and does nothing, if there is to be none. `failed`: the channel of
   * the call that failed; `stays`: the attempt is made at its address.
   */
  boolean again(Attempts attempts, SluiceException error, Pool.Lease failed, boolean stays, Runnable attempt) {
    double chance = ThreadLocalRandom.current().nextDouble();
    long now = System.nanoTime();
    boolean elsewhere = pool.failed(failed, error, now) && !stays;
    Optional<Duration> pause = pool.isClosed() ? Optional.empty() : attempts.pause(error, elsewhere, now, chance);
    pause.ifPresent(delay ->
        CompletableFuture.delayedExecutor(delay.toNanos(), TimeUnit.NANOSECONDS).execute(attempt));
    return pause.isPresent();
  }

  /** Makes a unary call and repeats it where that helps. Cancelling the future cancels the call. */
  <Q, A> CompletableFuture<A> once(MethodDescriptor<Q, A> method, Q request, Duration own) {
    return once(method, request, own, ANY);
  }

  private <Q, A> CompletableFuture<A> once(MethodDescriptor<Q, A> method, Q request, Duration own, int at) {
    CompletableFuture<A> answer = new CompletableFuture<>();
    new Once<>(method, request, attempts(own, null), answer, at).begin(null);
    return answer;
  }

  /** Cancels a generation by its id, at whichever server has it. */
  CompletableFuture<CancelGenerationResponse> cancel(String generationId) {
    return cancel(CancelGenerationRequest.newBuilder().setGenerationId(generationId).build(), 0);
  }

  private CompletableFuture<CancelGenerationResponse> cancel(CancelGenerationRequest request, int at) {
    CompletableFuture<CancelGenerationResponse> answer =
        once(InferenceServiceGrpc.getCancelGenerationMethod(), request, null, at);
    if (at + 1 == pool.numAddresses()) {
      return answer;
    }
    return answer.handle((told, error) -> error == null ? answer : cancel(request, at + 1)).thenCompose(one -> one);
  }

  private final class Once<Q, A> {
    private final MethodDescriptor<Q, A> method;
    private final Q request;
    private final Attempts attempts;
    private final CompletableFuture<A> answer;
    private final int at;
    private final Metadata headers = headers();
    private final Context context = Context.current();

    /** `at`: the number of the address, or ANY. */
    Once(MethodDescriptor<Q, A> method, Q request, Attempts attempts, CompletableFuture<A> answer, int at) {
      this.method = method;
      this.request = request;
      this.attempts = attempts;
      this.answer = answer;
      this.at = at;
    }

    void begin(Pool.Lease avoid) {
      try {
        Pool.Lease lease = at == ANY ? pool.lease(avoid, false) : pool.leaseAt(at, avoid);
        CallOptions options = CallOptions.DEFAULT.withDeadline(attempts.deadline());
        context.run(() -> ask(lease.channel.newCall(method, options), lease));
      } catch (SluiceException closed) {
        answer.completeExceptionally(closed);
      }
    }

    private void ask(ClientCall<Q, A> call, Pool.Lease lease) {
      call.start(new Listener(lease), copy(headers));
      call.sendMessage(request);
      call.halfClose();
      call.request(2);
      answer.whenComplete((told, error) -> {
        if (answer.isCancelled()) {
          call.cancel("the caller does not want it any more", null);
        }
      });
    }

    private final class Listener extends ClientCall.Listener<A> {
      private final Pool.Lease lease;
      private A told;

      Listener(Pool.Lease lease) {
        this.lease = lease;
      }

      @Override
      public void onMessage(A message) {
        told = message;
      }

      @Override
      public void onClose(Status status, Metadata trailers) {
        pool.release(lease);
        if (status.isOk() && told != null) {
          answer.complete(told);
          return;
        }
        Status found = status.isOk() ? Status.INTERNAL.withDescription("the call ended without an answer") : status;
        SluiceException error = SluiceException.fromRpc(found, trailers);
        if (answer.isDone() || !again(attempts, error, lease, at != ANY, () -> begin(lease))) {
          answer.completeExceptionally(error);
        }
      }
    }
  }

  /** Returns a copy of the headers, since gRPC adds its own to the object that it is given. */
  static Metadata copy(Metadata headers) {
    Metadata made = new Metadata();
    made.merge(headers);
    return made;
  }
}
