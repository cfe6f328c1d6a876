package sluice;

/** A source of one generation's events: a call, or a part of a session's call. Used by one thread at a time. */
interface Upstream {
  /** Requests the next event, after all earlier ones were taken. */
  void more();

  /** Notes that the reader has read `tokens` sampled tokens, so that as many can be granted. */
  void taken(int numTokens);

  /** Cancels the generation at the server. Its end comes as an event. */
  void cancel();

  /** Notes that it has failed and another upstream follows; returns false if none can. */
  boolean canBeFollowed();

  /** The channel that it uses. */
  Pool.Lease lease();
}
