package sluice;

/** Where the news of one generation come from. Used by one thread at a time. */
interface Upstream {
  /** All news were taken, and more are wanted. */
  void more();

  /** The reader has taken so many sampled tokens, and wants more. */
  void taken(int numTokens);

  /** End the generation there. What it ends with comes as news. */
  void cancel();

  /** It has failed and another one follows; false when none can. */
  boolean canBeFollowed();

  /** The channel that it used. */
  Pool.Lease lease();
}
