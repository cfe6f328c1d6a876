package sluice;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import java.io.Serializable;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import sluice.rpc.BadRequest;
import sluice.rpc.ErrorInfo;
import sluice.rpc.RetryInfo;
import sluice.rpc.Status;
import sluice.v1.Types.Usage;

/** The error details of google.rpc that a program reads. Malformed ones are ignored: code and message remain. */
final class ErrorDetails implements Serializable {
  private static final long serialVersionUID = 1L;

  String reason = "";
  final HashMap<String, String> metadata = new HashMap<>();
  Duration retryAfter;
  final ArrayList<String> fields = new ArrayList<>();
  String generationId = "";
  long lastSeq;
  Usage usage;
  String traceId = "";

  /** Reads the details from the header grpc-status-details-bin. */
  void takeAll(byte[] packed) {
    try {
      Status.parseFrom(packed).getDetailsList().forEach(this::take);
    } catch (InvalidProtocolBufferException broken) {
      traceId = "";
    }
  }

  void take(Any packed) {
    try {
      if (packed.is(ErrorInfo.class)) {
        takeInfo(packed.unpack(ErrorInfo.class));
      } else if (packed.is(RetryInfo.class)) {
        com.google.protobuf.Duration delay = packed.unpack(RetryInfo.class).getRetryDelay();
        retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
      } else if (packed.is(BadRequest.class)) {
        packed.unpack(BadRequest.class).getFieldViolationsList().forEach(one -> fields.add(one.getField()));
      } else if (packed.is(Usage.class)) {
        usage = packed.unpack(Usage.class);
      }
    } catch (InvalidProtocolBufferException | NumberFormatException broken) {
      return;
    }
  }

  private void takeInfo(ErrorInfo info) {
    reason = info.getReason();
    metadata.putAll(info.getMetadataMap());
    generationId = metadata.getOrDefault("generation_id", "");
    lastSeq = Long.parseLong(metadata.getOrDefault("last_seq", "0"));
  }
}
