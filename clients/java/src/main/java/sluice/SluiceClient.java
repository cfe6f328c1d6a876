package sluice;

import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.netty.NettyChannelBuilder;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.BiFunction;
import java.util.function.Supplier;
import sluice.v1.Control.Adapter;
import sluice.v1.Control.ListAdaptersRequest;
import sluice.v1.Control.ListAdaptersResponse;
import sluice.v1.Control.LoadAdapterRequest;
import sluice.v1.Control.UnloadAdapterRequest;
import sluice.v1.ControlServiceGrpc;
import sluice.v1.Inference.GenerateRequest;
import sluice.v1.Inference.GenerateResponse;
import sluice.v1.InferenceServiceGrpc;
import sluice.v1.Types.GenerationSpec;

/**
 * A client of one server, whose gateways may share its port, or of several with the same model. A call goes to the server
 * on which the client has fewest; what one does not take, or loses, goes on at another. Thread-safe.
 */
public final class SluiceClient implements AutoCloseable {
  private static final int MAX_RECEIVED_BYTES = 64 << 20;
  private static final int HTTP2_WINDOW_BYTES = 65_535; // most bytes of a stream that pile up when its reader stops
  private static final int MAX_ADAPTERS = 1000; // of one answer
  private final Caller caller;

  private SluiceClient(Caller caller) {
    this.caller = caller;
  }

  /** Returns a builder of a client of these servers, each host:port. The client connects on first use. */
  public static Builder builder(String... targets) {
    return new Builder(List.of(targets));
  }

  /** Returns the whole answer at once. Blocks. Throws SluiceException. */
  public GenerateResponse generate(GenerationSpec spec) {
    return waited(generateAsync(spec));
  }

  /** Does the same with a timeout of its own. */
  public GenerateResponse generate(GenerationSpec spec, Duration timeout) {
    return waited(generateAsync(spec, timeout));
  }

  /** Returns a future of the whole answer. It fails with SluiceException; cancelling it ends the generation. */
  public CompletableFuture<GenerateResponse> generateAsync(GenerationSpec spec) {
    return generateAsync(spec, null);
  }

  /** Does the same with a timeout of its own. */
  public CompletableFuture<GenerateResponse> generateAsync(GenerationSpec spec, Duration timeout) {
    GenerateRequest request = GenerateRequest.newBuilder().setSpec(spec).build();
    return caller.once(InferenceServiceGrpc.getGenerateMethod(), request, timeout);
  }

  /** Returns the answer as a stream. The call starts when the stream is first read. */
  public DeltaStream stream(GenerationSpec spec) {
    return stream(spec, null);
  }

  /** Does the same with a timeout of its own, which starts now. */
  public DeltaStream stream(GenerationSpec spec, Duration timeout) {
    Progress progress = new Progress(spec);
    return new DeltaStream(caller, progress, caller.attempts(timeout, progress), Context.current());
  }

  /** Opens a session: many generations on one call, each with its own credit. */
  public Session converse() {
    return new Session(caller);
  }

  /** Cancels a generation by its id; does nothing if it has ended. Blocks. */
  public void cancel(String generationId) {
    try {
      waited(caller.cancel(generationId));
    } catch (SluiceException.NotFound ended) {
      return;
    }
  }

  /**
   * Loads an adapter from the server's folder of adapters, and names it. Of several servers it is one that does; any loads
   * a folder, or a repository that it allows, when a request names it. Blocks. Throws SluiceException.
   */
  public Adapter loadAdapter(LoadAdapterRequest request) {
    return waited(caller.once(ControlServiceGrpc.getLoadAdapterMethod(), request, null)).getAdapter();
  }

  /** Takes an adapter's name away. Its generations go on to their ends, or for the request's grace. Blocks. */
  public void unloadAdapter(UnloadAdapterRequest request) {
    waited(caller.once(ControlServiceGrpc.getUnloadAdapterMethod(), request, null));
  }

  /** Returns the adapters that are loaded, by name. Blocks. */
  public List<Adapter> adapters() {
    List<Adapter> found = new ArrayList<>();
    String token = "";
    do {
      ListAdaptersRequest asked =
          ListAdaptersRequest.newBuilder().setPageSize(MAX_ADAPTERS).setPageToken(token).build();
      ListAdaptersResponse page = waited(caller.once(ControlServiceGrpc.getListAdaptersMethod(), asked, null));
      found.addAll(page.getAdaptersList());
      token = page.getNextPageToken();
    } while (!token.isEmpty());
    return found;
  }

  /** Closes the connections. Calls that still run are cut off after a second. */
  @Override
  public void close() {
    caller.pool.close();
  }

  private static <A> A waited(CompletableFuture<A> answer) {
    try {
      return answer.get();
    } catch (InterruptedException interrupted) {
      answer.cancel(true);
      Thread.currentThread().interrupt();
      throw SluiceException.of(Status.Code.CANCELLED, "the thread that waited was interrupted");
    } catch (ExecutionException failed) {
      SluiceException error = (SluiceException) failed.getCause();
      error.fillInStackTrace(); // the stack of the calling thread instead of gRPC's
      throw error;
    }
  }

  /** Settings of a client: addresses, TLS, key, deadlines. */
  public static final class Builder {
    private final List<String> targets;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private String token;
    private Duration timeout;
    private int channels = 4;
    private RetryPolicy retry = RetryPolicy.DEFAULT;
    private Supplier<Map<String, String>> trace = Map::of;
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private BiFunction<String, ChannelCredentials, ManagedChannelBuilder<?>> transport = Builder::netty;

    private Builder(List<String> targets) {
      if (targets.isEmpty()) {
        throw new IllegalArgumentException("no target: give host:port");
      }
      this.targets = targets;
    }

    /** Credentials of gRPC, such as TlsChannelCredentials.create(). Default: plaintext. */
    public Builder credentials(ChannelCredentials chosen) {
      credentials = chosen;
      return this;
    }

    /** The key to authenticate with. */
    public Builder token(String key) {
      token = key;
      return this;
    }

    /** Timeout of calls without one of their own. */
    public Builder timeout(Duration time) {
      timeout = time;
      return this;
    }

    /** The most connections; they are opened as calls overlap. Default: 4. */
    public Builder channels(int num) {
      channels = num;
      return this;
    }

    /** The policy by which failed calls are repeated. */
    public Builder retry(RetryPolicy policy) {
      retry = policy;
      return this;
    }

    /** Supplies the W3C trace context (traceparent, tracestate); called for each call on the caller's thread. */
    public Builder trace(Supplier<Map<String, String>> headers) {
      trace = headers;
      return this;
    }

    /** Adds an interceptor around every call; the last one added is the outermost. */
    public Builder intercept(ClientInterceptor interceptor) {
      interceptors.add(interceptor);
      return this;
    }

    /** Sets another transport than grpc-netty: a function of target and credentials that returns a channel builder. */
    public Builder transport(BiFunction<String, ChannelCredentials, ManagedChannelBuilder<?>> chosen) {
      transport = chosen;
      return this;
    }

    /** Builds the client. Throws IllegalArgumentException if a token would be sent in plaintext to another host. */
    public SluiceClient build() {
      if (token != null && credentials instanceof InsecureChannelCredentials) {
        targets.forEach(Builder::checkLocal);
      }
      return new SluiceClient(new Caller(new Pool(targets, channels, this::open), retry, timeout, token, trace));
    }

    private ManagedChannel open(String target) {
      return transport.apply(target, credentials)
          .maxInboundMessageSize(MAX_RECEIVED_BYTES)
          .keepAliveTime(30, TimeUnit.SECONDS)
          .keepAliveTimeout(10, TimeUnit.SECONDS)
          .intercept(interceptors)
          .build();
    }

    private static ManagedChannelBuilder<?> netty(String target, ChannelCredentials credentials) {
      return NettyChannelBuilder.forTarget(target, credentials).flowControlWindow(HTTP2_WINDOW_BYTES);
    }

    private static void checkLocal(String target) {
      if (!target.matches("(unix:|localhost:|127\\.[0-9.]+:|\\[::1\\]:).*")) {
        throw new IllegalArgumentException(
            "the token would be sent to " + target + " in plaintext: give TLS credentials");
      }
    }
  }
}
