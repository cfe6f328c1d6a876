package sluice;

import sluice.v1.Inference.ConverseResponse;
import sluice.v1.Inference.ResumeGenerateResponse;
import sluice.v1.Inference.StreamGenerateResponse;

/** Returns the event in a message about a generation; the message itself if this client does not know the event. */
final class Events {
  private Events() {}

  static Object of(StreamGenerateResponse message) {
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

  static Object of(ResumeGenerateResponse message) {
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
