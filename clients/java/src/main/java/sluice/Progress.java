package sluice;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import sluice.v1.Inference.Throttled;
import sluice.v1.Inference.Update;
import sluice.v1.Types.Accepted;
import sluice.v1.Types.Delta;
import sluice.v1.Types.DisconnectAction;
import sluice.v1.Types.EffectiveParams;
import sluice.v1.Types.Finished;
import sluice.v1.Types.GenerationSpec;
import sluice.v1.Types.OutputFinished;
import sluice.v1.Types.OutputPrefix;
import sluice.v1.Types.PromptInfo;
import sluice.v1.Types.ResumePoint;
import sluice.v1.Types.Token;

/** What a client has received of one generation, and the request for the rest of it. No I/O. Thread-safe. */
public final class Progress {
  private GenerationSpec spec;
  private Accepted accepted;
  private PromptInfo promptInfo;
  private Finished finished;
  private Throttled throttled;
  private final Map<Integer, OutputFinished> ends = new TreeMap<>();
  private final Map<Integer, List<Integer>> ids = new TreeMap<>();
  private long lastSeq;
  private int numTokens;
  private int numIds;

  Progress(GenerationSpec spec) {
    this.spec = spec;
  }

  /** The server's acceptance: id, model, revision and effective parameters of the generation. */
  public synchronized Optional<Accepted> accepted() {
    return Optional.ofNullable(accepted);
  }

  /** Facts about the prompt, if the request asked for them. */
  public synchronized Optional<PromptInfo> promptInfo() {
    return Optional.ofNullable(promptInfo);
  }

  /** The end, with usage and timings. */
  public synchronized Optional<Finished> finished() {
    return Optional.ofNullable(finished);
  }

  /** How the output of this index ended. */
  public synchronized Optional<OutputFinished> end(int outputIndex) {
    return Optional.ofNullable(ends.get(outputIndex));
  }

  /** What a generation of a session waits for; empty while it is running. */
  public synchronized Optional<Throttled> throttled() {
    return Optional.ofNullable(throttled);
  }

  /** Sequence number of the last delta; 0 without one. */
  public synchronized long lastSeq() {
    return lastSeq;
  }

  synchronized GenerationSpec spec() {
    return spec;
  }

  /** Removes the credit window, since ResumeGenerate takes no grants. */
  synchronized void dropCredit() {
    spec = spec.toBuilder().clearCreditWindow().build();
  }

  /** Whether the server keeps the generation when its connection is lost. */
  synchronized boolean detaches() {
    return spec.getScheduling().getOnDisconnect() == DisconnectAction.DISCONNECT_ACTION_DETACH;
  }

  /** Whether the generation is continued by ResumeGenerate; otherwise the request is sent again. */
  synchronized boolean hasBegun() {
    return accepted != null && (lastSeq > 0 || detaches());
  }

  /** Whether the generation can be resumed after its connection was lost. */
  synchronized boolean canGoOn() {
    return lastSeq == 0 || detaches() || numIds == numTokens;
  }

  /** Whether only the service that has the generation can go on with it. */
  synchronized boolean stays() {
    return accepted != null && detaches() && numIds != numTokens;
  }

  /** Records an event. Returns its delta; null if it has none or the delta was received before. */
  synchronized Delta take(Object event) {
    if (event instanceof Delta) {
      return takeDelta((Delta) event);
    }
    if (event instanceof Accepted) {
      accepted = (Accepted) event;
    } else if (event instanceof PromptInfo) {
      promptInfo = (PromptInfo) event;
    } else if (event instanceof OutputFinished) {
      ends.putIfAbsent(((OutputFinished) event).getOutputIndex(), (OutputFinished) event);
    } else if (event instanceof Finished) {
      finished = (Finished) event;
    } else if (event instanceof Throttled) {
      throttled = (Throttled) event;
    }
    return null;
  }

  private Delta takeDelta(Delta delta) {
    if (delta.getSeq() <= lastSeq) {
      return null;
    }
    lastSeq = delta.getSeq();
    throttled = null;
    numTokens += delta.getConsumed();
    numIds += delta.getTokensCount();
    List<Integer> known = ids.computeIfAbsent(delta.getOutputIndex(), index -> new ArrayList<>());
    for (Token token : delta.getTokensList()) {
      known.add(token.getId());
    }
    return delta;
  }

  /** Records an update of parameters, so that a resumption keeps it. */
  synchronized void update(Update update) {
    GenerationSpec.Builder changed = spec.toBuilder();
    Accepted known = accepted == null ? Accepted.getDefaultInstance() : accepted;
    EffectiveParams.Builder params = known.getParams().toBuilder();
    if (update.hasMaxTokens()) {
      changed.getSamplingBuilder().setMaxTokens(update.getMaxTokens());
      params.getSamplingBuilder().setMaxTokens(update.getMaxTokens());
    }
    if (update.hasPriority()) {
      changed.getSchedulingBuilder().setPriority(update.getPriority());
      params.getSchedulingBuilder().setPriority(update.getPriority());
    }
    if (update.hasStop()) {
      changed.setStop(update.getStop());
      params.setStop(update.getStop());
    }
    spec = changed.build();
    accepted = accepted == null ? null : accepted.toBuilder().setParams(params).build();
  }

  /** Returns the spec for ResumeGenerate; without a prompt if ids are missing, so that no gateway starts it again. */
  synchronized GenerationSpec rest() {
    GenerationSpec.Builder rest = numIds == numTokens ? whole() : GenerationSpec.newBuilder();
    ResumePoint.Builder point =
        ResumePoint.newBuilder()
            .setGenerationId(accepted.getGenerationId())
            .setAfterSeq(lastSeq)
            .setAdapterDigest(accepted.getAdapterDigest());
    ids.forEach((index, known) ->
        point.addOutputs(OutputPrefix.newBuilder().setOutputIndex(index).addAllTokenIds(known)));
    return rest.setResume(point).build();
  }

  private GenerationSpec.Builder whole() {
    GenerationSpec.Builder rest = spec.toBuilder().clearCreditWindow();
    rest.setModel(accepted.getModel()).setRevision(accepted.getRevision());
    EffectiveParams params = accepted.getParams();
    if (params.hasSampling()) {
      rest.setSampling(params.getSampling());
    }
    if (params.hasStop()) {
      rest.setStop(params.getStop());
    }
    if (params.hasOutput()) {
      rest.setOutput(params.getOutput());
    }
    if (params.hasConstraint()) {
      rest.setConstraint(params.getConstraint());
    }
    if (params.hasCache()) {
      rest.setCache(params.getCache());
    }
    if (params.hasScheduling()) {
      rest.setScheduling(params.getScheduling());
    }
    if (params.hasSpeculation()) {
      rest.setSpeculation(params.getSpeculation());
    }
    if (spec.getSampling().hasMaxTokens() && !rest.getSampling().hasMaxTokens()) {
      // Converse accepts a generation before its max_tokens is known.
      rest.getSamplingBuilder().setMaxTokens(spec.getSampling().getMaxTokens());
    }
    return rest;
  }
}
