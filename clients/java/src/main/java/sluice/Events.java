package sluice;

import java.util.ArrayList;
import java.util.List;
import java.util.function.Function;
import sluice.v1.Inference.ConverseResponse;
import sluice.v1.Inference.ResumeGenerateResponse;
import sluice.v1.Inference.StreamGenerateResponse;

/** Returns the events in a message about a generation; the message itself for one that this client does not know. */
final class Events {
  private Events() {}

  static List<Object> allOf(StreamGenerateResponse message) {
    return all(of(message), message.getMoreList(), Events::of);
  }

  static List<Object> allOf(ResumeGenerateResponse message) {
    return all(of(message), message.getMoreList(), Events::of);
  }

  private static <A> List<Object> all(Object first, List<A> further, Function<A, Object> eventOf) {
    if (further.isEmpty()) {
      return List.of(first);
    }
    List<Object> events = new ArrayList<>(List.of(first));
    further.forEach(one -> events.add(eventOf.apply(one)));
    return events;
  }

  private static Object of(StreamGenerateResponse message) {
    switch (message.getEventCase()) {
      case ACCEPTED:
        return message.getAccepted();
      case PROMPT_INFO:
        return message.getPromptInfo();
      case DELTA:
        return message.getDelta();
      case OUTPUT_FINISHED:
        return message.getOutputFinished();
      case FINISHED:
        return message.getFinished();
      default:
        return message;
    }
  }

  private static Object of(ResumeGenerateResponse message) {
    switch (message.getEventCase()) {
      case ACCEPTED:
        return message.getAccepted();
      case PROMPT_INFO:
        return message.getPromptInfo();
      case DELTA:
        return message.getDelta();
      case OUTPUT_FINISHED:
        return message.getOutputFinished();
      case FINISHED:
        return message.getFinished();
      default:
        return message;
    }
  }

  static Object of(ConverseResponse message) {
    switch (message.getFrameCase()) {
      case ACCEPTED:
        return message.getAccepted();
      case PROMPT_INFO:
        return message.getPromptInfo();
      case DELTA:
        return message.getDelta();
      case OUTPUT_FINISHED:
        return message.getOutputFinished();
      case FINISHED:
        return message.getFinished();
      case FAILED:
        return SluiceException.fromFailed(message.getFailed());
      case THROTTLED:
        return message.getThrottled();
      default:
        return message;
    }
  }
}
