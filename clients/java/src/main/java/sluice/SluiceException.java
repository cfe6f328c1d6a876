package sluice;

import io.grpc.Metadata;
import io.grpc.Status;
import java.io.IOException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import sluice.v1.Inference.Failed;
import sluice.v1.Types.Usage;

/** The failure of a call or a generation, with its google.rpc details. Each code that sluice uses has a class. */
public class SluiceException extends RuntimeException {
  private static final long serialVersionUID = 1L;
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final Metadata.Key<String> GENERATION =
      Metadata.Key.of("x-sluice-generation-id", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> TRACE =
      Metadata.Key.of("x-sluice-trace-id", Metadata.ASCII_STRING_MARSHALLER);

  private final Status.Code code;
  private final ErrorDetails details = new ErrorDetails();

  private SluiceException(Status.Code code, String message) {
    super(message);
    this.code = code;
  }

  /** The gRPC status code. */
  public Status.Code code() {
    return code;
  }

  /** The reason in ErrorInfo, such as "QUEUE_FULL"; "" if the server sent none (its transport failed). */
  public String reason() {
    return details.reason;
  }

  /** The metadata in ErrorInfo. */
  public Map<String, String> metadata() {
    return Map.copyOf(details.metadata);
  }

  /** How long to wait before another attempt; empty if the server named no time. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(details.retryAfter);
  }

  /** The fields whose values are not allowed. */
  public List<String> fields() {
    return List.copyOf(details.fields);
  }

  /** The generation that failed; "" when it had none. */
  public String generationId() {
    return details.generationId;
  }

  /** Sequence number of the last delta that the server sent; 0 without one. */
  public long lastSeq() {
    return details.lastSeq;
  }

  /** Tokens used before the failure; empty if the generation had not begun. */
  public Optional<Usage> usage() {
    return Optional.ofNullable(details.usage);
  }

  /** Id of the server's trace; "" without one. */
  public String traceId() {
    return details.traceId;
  }

  @Override
  public String toString() {
    String told = details.reason.isEmpty() ? code.name() : code + " (" + details.reason + ")";
    return getClass().getName() + ": " + told + ": " + getMessage();
  }

  /** Returns the error for the status of a call. */
  static SluiceException fromRpc(Status status, Metadata trailers) {
    Metadata found = trailers == null ? new Metadata() : trailers;
    String message = message(status);
    byte[] packed = found.get(DETAILS);
    SluiceException made = of(code(status), message);
    if (status.getCause() != null) {
      made.initCause(status.getCause());
    }
    if (packed != null) {
      made.details.takeAll(packed);
    }
    made.details.traceId = Optional.ofNullable(found.get(TRACE)).orElse("");
    if (made.details.generationId.isEmpty()) {
      made.details.generationId = Optional.ofNullable(found.get(GENERATION)).orElse("");
    }
    return made;
  }

  /** Returns UNAVAILABLE for a lost connection: grpc-java says UNKNOWN where it ended before the call was written. */
  private static Status.Code code(Status status) {
    boolean isLost = status.getCode() == Status.Code.UNKNOWN && status.getCause() instanceof IOException;
    return isLost ? Status.Code.UNAVAILABLE : status.getCode();
  }

  private static String message(Status status) {
    String cause = status.getCause() == null ? null : status.getCause().getMessage(); // such as "Connection refused"
    String told = status.getDescription() == null ? status.getCode().name() : status.getDescription();
    return cause == null || told.contains(cause) ? told : told + ": " + cause;
  }

  /** Returns the error in the last frame of a generation of Converse. */
  static SluiceException fromFailed(Failed failed) {
    SluiceException made = of(Status.fromCodeValue(failed.getCode()).getCode(), failed.getMessage());
    failed.getDetailsList().forEach(made.details::take);
    made.details.generationId = failed.getGenerationId();
    made.details.lastSeq = failed.getLastSeq();
    made.details.usage = failed.hasUsage() ? failed.getUsage() : null;
    return made;
  }

  /** Makes an exception of the class that belongs to the code. */
  static SluiceException of(Status.Code code, String message) {
    switch (code) {
      case INVALID_ARGUMENT:
        return new InvalidArgument(message);
      case NOT_FOUND:
        return new NotFound(message);
      case ALREADY_EXISTS:
        return new AlreadyExists(message);
      case PERMISSION_DENIED:
        return new PermissionDenied(message);
      case UNAUTHENTICATED:
        return new Unauthenticated(message);
      case RESOURCE_EXHAUSTED:
        return new ResourceExhausted(message);
      case FAILED_PRECONDITION:
        return new FailedPrecondition(message);
      case ABORTED:
        return new Aborted(message);
      case OUT_OF_RANGE:
        return new OutOfRange(message);
      case UNIMPLEMENTED:
        return new Unimplemented(message);
      case UNAVAILABLE:
        return new Unavailable(message);
      case DEADLINE_EXCEEDED:
        return new DeadlineExceeded(message);
      case CANCELLED:
        return new Cancelled(message);
      default:
        return new SluiceException(code, message);
    }
  }

  /** A field is malformed or out of its range: see fields(). */
  public static final class InvalidArgument extends SluiceException {
    private static final long serialVersionUID = 1L;

    private InvalidArgument(String message) {
      super(Status.Code.INVALID_ARGUMENT, message);
    }
  }

  /** No such model or generation. */
  public static final class NotFound extends SluiceException {
    private static final long serialVersionUID = 1L;

    private NotFound(String message) {
      super(Status.Code.NOT_FOUND, message);
    }
  }

  /** The idempotency key names a generation that is in flight. */
  public static final class AlreadyExists extends SluiceException {
    private static final long serialVersionUID = 1L;

    private AlreadyExists(String message) {
      super(Status.Code.ALREADY_EXISTS, message);
    }
  }

  /** The key or certificate is known, but not allowed to do this. */
  public static final class PermissionDenied extends SluiceException {
    private static final long serialVersionUID = 1L;

    private PermissionDenied(String message) {
      super(Status.Code.PERMISSION_DENIED, message);
    }
  }

  /** No key, or one that is not known. */
  public static final class Unauthenticated extends SluiceException {
    private static final long serialVersionUID = 1L;

    private Unauthenticated(String message) {
      super(Status.Code.UNAUTHENTICATED, message);
    }
  }

  /** A queue or cache is full, or the quota is used up: see retryAfter(). */
  public static final class ResourceExhausted extends SluiceException {
    private static final long serialVersionUID = 1L;

    private ResourceExhausted(String message) {
      super(Status.Code.RESOURCE_EXHAUSTED, message);
    }
  }

  /** The server's state does not allow it: another revision is served, or the request would never fit. */
  public static final class FailedPrecondition extends SluiceException {
    private static final long serialVersionUID = 1L;

    private FailedPrecondition(String message) {
      super(Status.Code.FAILED_PRECONDITION, message);
    }
  }

  /** The stream was not read fast enough, or another call has taken its generation over. */
  public static final class Aborted extends SluiceException {
    private static final long serialVersionUID = 1L;

    private Aborted(String message) {
      super(Status.Code.ABORTED, message);
    }
  }

  /** The point to resume from is no longer kept. */
  public static final class OutOfRange extends SluiceException {
    private static final long serialVersionUID = 1L;

    private OutOfRange(String message) {
      super(Status.Code.OUT_OF_RANGE, message);
    }
  }

  /** A feature of the contract that the server does not have. */
  public static final class Unimplemented extends SluiceException {
    private static final long serialVersionUID = 1L;

    private Unimplemented(String message) {
      super(Status.Code.UNIMPLEMENTED, message);
    }
  }

  /** No server answers, or it is about to stop or not ready yet, and trying again did not help. */
  public static final class Unavailable extends SluiceException {
    private static final long serialVersionUID = 1L;

    private Unavailable(String message) {
      super(Status.Code.UNAVAILABLE, message);
    }
  }

  /** The deadline passed. */
  public static final class DeadlineExceeded extends SluiceException {
    private static final long serialVersionUID = 1L;

    private DeadlineExceeded(String message) {
      super(Status.Code.DEADLINE_EXCEEDED, message);
    }
  }

  /** The call was cancelled. */
  public static final class Cancelled extends SluiceException {
    private static final long serialVersionUID = 1L;

    private Cancelled(String message) {
      super(Status.Code.CANCELLED, message);
    }
  }
}
