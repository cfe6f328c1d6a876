package sluice;

import java.time.Duration;
import java.util.OptionalInt;

/** Options with which a generation of a session is opened. Immutable. */
public final class OpenOptions {
  /** A window of 256 tokens, which are granted again as they are read. */
  public static final OpenOptions DEFAULT = new OpenOptions(256, true, false, null);

  private final int window;
  private final boolean isGranted;
  private final boolean keepsInputOpen;
  private final Duration timeout;

  private OpenOptions(int window, boolean isGranted, boolean keepsInputOpen, Duration timeout) {
    this.window = window;
    this.isGranted = isGranted;
    this.keepsInputOpen = keepsInputOpen;
    this.timeout = timeout;
  }

  /** How many tokens the server may sample ahead of the reader. */
  public OpenOptions window(int tokens) {
    return new OpenOptions(tokens, isGranted, keepsInputOpen, timeout);
  }

  /** No limit on the tokens that are sampled ahead of the reader and buffered in this process. */
  public OpenOptions withoutWindow() {
    return new OpenOptions(-1, isGranted, keepsInputOpen, timeout);
  }

  /** The program grants credit itself, by {@link Generation#grant}. */
  public OpenOptions withoutGrants() {
    return new OpenOptions(window, false, keepsInputOpen, timeout);
  }

  /** The prompt is extended by {@link Generation#append}; sampling waits for {@link Generation#closeInput}. */
  public OpenOptions keepInputOpen() {
    return new OpenOptions(window, isGranted, true, timeout);
  }

  /** The timeout of the generation, from its opening. */
  public OpenOptions timeout(Duration time) {
    return new OpenOptions(window, isGranted, keepsInputOpen, time);
  }

  OptionalInt creditWindow() {
    return window < 0 ? OptionalInt.empty() : OptionalInt.of(window);
  }

  /** How many tokens to grant at a time: half a window; 0 grants none. */
  int step() {
    return isGranted && window > 0 ? (window + 1) / 2 : 0;
  }

  boolean keepsInputOpen() {
    return keepsInputOpen;
  }

  Duration timeout() {
    return timeout;
  }
}
