package sluice;

import io.grpc.Context;
import sluice.v1.Inference.Append;
import sluice.v1.Inference.Cancel;
import sluice.v1.Inference.CloseInput;
import sluice.v1.Inference.ConverseRequest;
import sluice.v1.Inference.Grant;
import sluice.v1.Inference.Open;
import sluice.v1.Inference.Update;
import sluice.v1.Types.TokenIds;

/** One generation of a session: its deltas, and the frames that can be sent to it while it runs. */
public final class Generation extends DeltaStream {
  private final Seat seat;

  Generation(Caller caller, Progress progress, OpenOptions options, Context context, Wire wire) {
    super(caller, progress, caller.attempts(options.timeout(), progress), context);
    seat = new Seat(wire, options.step(), options.keepsInputOpen());
    feed.begin(seat);
  }

  void start(Open open) {
    seat.tag = seat.wire.start(feed, open);
  }

  /** Grants credit: the server may sample `tokens` more tokens. */
  public void grant(int tokens) {
    seat.send(ConverseRequest.newBuilder().setGrant(Grant.newBuilder().setTokens(tokens)));
  }

  /** Appends to the prompt while the input is open. */
  public void append(String text) {
    seat.send(ConverseRequest.newBuilder().setAppend(Append.newBuilder().setText(text)));
  }

  /** Appends to the prompt while the input is open. */
  public void append(TokenIds ids) {
    seat.send(ConverseRequest.newBuilder().setAppend(Append.newBuilder().setTokenIds(ids)));
  }

  /** Completes the prompt: sampling starts. */
  public void closeInput() {
    seat.send(ConverseRequest.newBuilder().setCloseInput(CloseInput.getDefaultInstance()));
  }

  /** Changes sampling parameters from the next token on. */
  public void update(Update update) {
    progress.update(update);
    seat.send(ConverseRequest.newBuilder().setUpdate(update));
  }

  /** The generation's part of the session's call, which is read as frames come. Credit bounds the buffered frames. */
  private final class Seat implements Upstream {
    private final Wire wire;
    private final int step;
    private final boolean isAppended;
    private volatile long tag;
    private int numTaken;

    Seat(Wire wire, int step, boolean isAppended) {
      this.wire = wire;
      this.step = step;
      this.isAppended = isAppended;
    }

    void send(ConverseRequest.Builder frame) {
      wire.send(frame.setTag(tag).build());
    }

    @Override
    public void more() {}

    @Override
    public void taken(int numTokens) {
      numTaken += numTokens;
      if (step > 0 && numTaken >= step) {
        grant(numTaken);
        numTaken = 0;
      }
    }

    @Override
    public void cancel() {
      send(ConverseRequest.newBuilder().setCancel(Cancel.getDefaultInstance()));
    }

    @Override
    public boolean canBeFollowed() {
      progress.dropCredit(); // ResumeGenerate takes no grants
      return !isAppended || progress.detaches();
    }

    @Override
    public Pool.Lease lease() {
      return wire.lease();
    }
  }
}
