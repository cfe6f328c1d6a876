import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.protobuf.ByteString;
import io.grpc.TlsChannelCredentials;
import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.stream.Collectors;
import sluice.DeltaStream;
import sluice.Generation;
import sluice.OpenOptions;
import sluice.RetryPolicy;
import sluice.Session;
import sluice.SluiceClient;
import sluice.SluiceException;
import sluice.v1.Control.Adapter;
import sluice.v1.Control.LoadAdapterRequest;
import sluice.v1.Control.UnloadAdapterRequest;
import sluice.v1.Inference.GenerateResponse;
import sluice.v1.Types.Chat;
import sluice.v1.Types.ChatMessage;
import sluice.v1.Types.Choice;
import sluice.v1.Types.Constraint;
import sluice.v1.Types.ContentPart;
import sluice.v1.Types.Delta;
import sluice.v1.Types.FinishReason;
import sluice.v1.Types.GenerationSpec;
import sluice.v1.Types.Image;
import sluice.v1.Types.Output;
import sluice.v1.Types.Role;
import sluice.v1.Types.SamplingParams;
import sluice.v1.Types.StopConditions;
import sluice.v1.Types.Token;
import sluice.v1.Types.Usage;

/** The driver of the Java client; tests/conformance/README.md has the contract. Uses the built jar. */
final class Driver {
  /** A request; the names are those of its JSON. */
  private static final class Asked {
    String call;
    String text = "";
    String image;
    int repeat = 1;
    Integer max_tokens;
    Long seed;
    List<String> choices;
    Double timeout_s;
    int count = 1;
    Integer window;
    List<Integer> grants;
    int cancel_after;
    int pause_after;
  }

  /** The driver's report on a generation; the names are those of its JSON. */
  private static final class End {
    final StringBuilder text = new StringBuilder();
    final List<Integer> token_ids = new ArrayList<>();
    String finish_reason = "";
    Integer completion_tokens;
    int num_deltas;
    int num_empty;
    boolean seqs_rise = true;
    int num_broken;
    Map<String, Object> error;
  }

  private static final Gson JSON = new com.google.gson.GsonBuilder().serializeNulls().create();
  private static final BufferedReader INPUT =
      new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

  private final SluiceClient client;
  private final Asked asked;
  private final GenerationSpec spec;
  private final Duration timeout;

  private Driver(SluiceClient client, Asked asked) {
    this.client = client;
    this.asked = asked;
    this.spec = specOf(asked);
    this.timeout = asked.timeout_s == null ? null : Duration.ofMillis(Math.round(asked.timeout_s * 1000));
  }

  public static void main(String[] arguments) throws IOException {
    Map<String, String> options = new HashMap<>();
    for (int at = 0; at < arguments.length; at++) {
      options.put(arguments[at], arguments[at].equals("--no-retry") ? "" : arguments[++at]);
    }
    try (SluiceClient client = client(options)) {
      new Driver(client, JSON.fromJson(INPUT.readLine(), Asked.class)).run();
    }
  }

  private static SluiceClient client(Map<String, String> options) throws IOException {
    SluiceClient.Builder builder = SluiceClient.builder(options.get("--address").split(",")).token(options.get("--token"));
    if (options.containsKey("--tls-ca")) {
      TlsChannelCredentials.Builder tls =
          TlsChannelCredentials.newBuilder().trustManager(new File(options.get("--tls-ca")));
      if (options.containsKey("--tls-cert")) {
        tls.keyManager(new File(options.get("--tls-cert")), new File(options.get("--tls-key")));
      }
      builder.credentials(tls.build());
    }
    return builder.retry(options.containsKey("--no-retry") ? RetryPolicy.NEVER : RetryPolicy.DEFAULT).build();
  }

  private void run() {
    ExecutorService threads = Executors.newCachedThreadPool();
    try (Session session = client.converse()) {
      List<CompletableFuture<Void>> all = new ArrayList<>();
      for (int at = 0; at < asked.count; at++) {
        all.add(CompletableFuture.runAsync(() -> say("end", one(session)), threads));
      }
      all.forEach(CompletableFuture::join);
    } finally {
      threads.shutdown();
    }
  }

  private End one(Session session) {
    switch (asked.call) {
      case "generate":
        return generate();
      case "adapters":
        return adapters(asked.text);
      case "stream":
        return follow(client.stream(spec, timeout));
      default:
        OpenOptions options = OpenOptions.DEFAULT.timeout(timeout);
        options = asked.window == null ? options : options.window(asked.window);
        return follow(session.open(spec, asked.grants == null ? options : options.withoutGrants()));
    }
  }

  private End adapters(String name) {
    End end = new End();
    try {
      LoadAdapterRequest wanted = LoadAdapterRequest.newBuilder().setAdapter(name).setPath(name).build();
      int digest = client.loadAdapter(wanted).getDigest().length();
      String loaded = names();
      client.unloadAdapter(UnloadAdapterRequest.newBuilder().setAdapter(name).build());
      end.text.append(digest + " " + loaded + " " + names());
    } catch (SluiceException failed) {
      end.error = told(failed);
    }
    return end;
  }

  private String names() {
    return client.adapters().stream().map(Adapter::getName).collect(Collectors.joining(","));
  }

  private End generate() {
    End end = new End();
    try {
      GenerateResponse answer = client.generate(spec, timeout);
      Output output = answer.getOutputs(0);
      end.text.append(output.getText());
      output.getTokensList().forEach(token -> end.token_ids.add(token.getId()));
      end.finish_reason = reason(output.getFinishReason());
      end.completion_tokens = answer.getUsage().getCompletionTokens();
    } catch (SluiceException failed) {
      end.error = told(failed);
    }
    return end;
  }

  private End follow(DeltaStream stream) {
    End end = new End();
    Credit credit = new Credit();
    try {
      for (Delta delta : stream) {
        note(delta, end);
        credit.spend(delta, stream);
        if (end.num_deltas == asked.cancel_after) {
          stream.cancel();
        }
        if (end.num_deltas == asked.pause_after) {
          pause(stream);
        }
      }
    } catch (SluiceException failed) {
      end.error = told(failed);
      end.completion_tokens = failed.usage().map(Usage::getCompletionTokens).orElse(null);
    }
    stream.progress().finished().ifPresent(last -> end.completion_tokens = last.getUsage().getCompletionTokens());
    stream.progress().end(0).ifPresent(last -> end.finish_reason = reason(last.getFinishReason()));
    end.num_broken = stream.numBroken();
    return end;
  }

  private static void note(Delta delta, End end) {
    end.num_deltas++;
    end.seqs_rise &= delta.getSeq() == end.num_deltas;
    end.text.append(delta.getText());
    end.num_empty += delta.getTokensCount() > 0 && delta.getText().isEmpty() ? 1 : 0;
    for (Token token : delta.getTokensList()) {
      end.token_ids.add(token.getId());
    }
  }

  /** Makes the grants of the list, if there is one. */
  private final class Credit {
    private int allowed = asked.window == null ? 0 : asked.window;
    private int consumed;
    private int next;

    void spend(Delta delta, DeltaStream stream) {
      consumed += delta.getConsumed();
      if (asked.grants == null || consumed < allowed) {
        return;
      }
      if (next == asked.grants.size()) {
        stream.cancel();
      } else {
        allowed += asked.grants.get(next);
        ((Generation) stream).grant(asked.grants.get(next++));
      }
    }
  }

  private static void pause(DeltaStream stream) {
    JsonObject told = new JsonObject();
    told.addProperty("generation_id", stream.progress().accepted().orElseThrow().getGenerationId());
    say("paused", told);
    try {
      INPUT.readLine();
    } catch (IOException failed) {
      throw new UncheckedIOException(failed);
    }
  }

  private static ChatMessage turnOf(String image, String text) {
    try {
      ByteString file = ByteString.copyFrom(Files.readAllBytes(Path.of(image)));
      return ChatMessage.newBuilder()
          .setRole(Role.ROLE_USER)
          .addParts(ContentPart.newBuilder().setImage(Image.newBuilder().setData(file)))
          .addParts(ContentPart.newBuilder().setText(text))
          .build();
    } catch (IOException failed) {
      throw new UncheckedIOException(failed);
    }
  }

  private static GenerationSpec specOf(Asked asked) {
    SamplingParams.Builder sampling = SamplingParams.newBuilder().setTemperature(0);
    if (asked.max_tokens != null) {
      sampling.setMaxTokens(asked.max_tokens);
    }
    if (asked.seed != null) {
      sampling.setSeed(asked.seed);
    }
    String text = asked.text.repeat(asked.repeat);
    GenerationSpec.Builder spec = GenerationSpec.newBuilder().setSampling(sampling);
    if (asked.image == null) {
      spec.setText(text);
    } else {
      spec.setChat(Chat.newBuilder().addMessages(turnOf(asked.image, text)));
    }
    if (asked.choices == null) {
      return spec.setStop(StopConditions.newBuilder().setIgnoreEos(true)).build();
    }
    Choice choice = Choice.newBuilder().addAllTexts(asked.choices).build();
    return spec.setConstraint(Constraint.newBuilder().setChoice(choice)).build();
  }

  private static Map<String, Object> told(SluiceException error) {
    return Map.of(
        "code", error.code().name(),
        "reason", error.reason(),
        "message", error.getMessage(),
        "fields", error.fields(),
        "retry_after_s", error.retryAfter().orElse(Duration.ZERO).toMillis() / 1e3,
        "generation_id", error.generationId(),
        "last_seq", error.lastSeq());
  }

  private static String reason(FinishReason finish) {
    return finish.name().replace("FINISH_REASON_", "").toLowerCase(java.util.Locale.ROOT);
  }

  private static synchronized void say(String name, Object told) {
    System.out.println(JSON.toJson(Map.of(name, told)));
    System.out.flush();
  }
}
