package sluice

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "example.com/sluice/go/sluicev1"
)

// DefaultWindow is the default of OpenOptions.Window, in tokens.
const DefaultWindow = 256

// Session has many generations on one Converse call. When the call is lost, its generations are resumed.
type Session struct {
	client *Client
	ctx    context.Context
	cancel context.CancelFunc
	mutex  sync.Mutex
	wire   *wire
}

// OpenOptions of a generation of a session.
type OpenOptions struct {
	// Window is how many tokens the server may sample ahead of the reader; 0 means DefaultWindow.
	Window uint32
	// NoGrants says that the program grants credit itself, by Generation.Grant.
	NoGrants bool
}

// Converse opens a session. Cancelling ctx, or Close, ends the generations that run on it.
func (c *Client) Converse(ctx context.Context) *Session {
	ctx, cancel := context.WithCancel(ctx)
	return &Session{client: c, ctx: ctx, cancel: cancel}
}

// Close cancels the generations that still run.
func (s *Session) Close() { s.cancel() }

// Open starts a generation. Cancelling ctx does not end it: Generation.Cancel does.
func (s *Session) Open(spec *pb.GenerationSpec, options OpenOptions) (*Generation, error) {
	window := options.Window
	if window == 0 {
		window = DefaultWindow
	}
	spec = proto.Clone(spec).(*pb.GenerationSpec)
	spec.CreditWindow = proto.Uint32(window)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.wire == nil || !s.wire.takesMore() {
		opened, err := s.client.openWire(s.ctx)
		if err != nil {
			return nil, err
		}
		s.wire = opened
	}
	generation := &Generation{rest: s.client.Stream(s.ctx, spec), wire: s.wire, news: make(chan news, window+8)}
	generation.Progress = generation.rest.Progress
	if !options.NoGrants {
		generation.step = (window + 1) / 2
	}
	s.wire.start(generation, spec)
	return generation, nil
}

// Generation is one generation of a session.
type Generation struct {
	// Progress is what was received so far; read it from the goroutine that calls Recv.
	Progress *Progress

	rest     *Stream
	wire     *wire
	tag      uint64
	news     chan news // large enough for its credit and its other frames, so that the call's reader never blocks
	step     uint32
	taken    uint32
	isOnRest bool
}

type news struct {
	frame *pb.ConverseResponse
	err   *Error
}

// NumBroken returns how often the connection was lost and the generation resumed.
func (g *Generation) NumBroken() int { return g.rest.NumBroken() }

// Recv returns the next delta, each once; io.EOF at the end, otherwise an *Error. Calling it again grants the credit of
// the delta before.
func (g *Generation) Recv() (*pb.Delta, error) {
	g.give()
	for g.Progress.Finished == nil {
		if g.isOnRest {
			return g.rest.Recv()
		}
		told := <-g.news
		if told.err != nil {
			if err := g.rest.after(told.err, g.wire.line, true); err != nil {
				return nil, err
			}
			g.isOnRest = true
		} else if delta := g.Progress.take(told.frame); delta != nil {
			g.taken += delta.Consumed
			return delta, nil
		}
	}
	return nil, io.EOF
}

func (g *Generation) give() {
	if g.step > 0 && g.taken >= g.step {
		g.Grant(g.taken)
		g.taken = 0
	}
}

// Grant lets the server sample that many more tokens.
func (g *Generation) Grant(tokens uint32) {
	g.wire.send(&pb.ConverseRequest{Tag: g.tag, Frame: &pb.ConverseRequest_Grant{Grant: &pb.Grant{Tokens: tokens}}})
}

// Cancel ends the generation; Recv then returns CANCELLED.
func (g *Generation) Cancel() {
	g.wire.send(&pb.ConverseRequest{Tag: g.tag, Frame: &pb.ConverseRequest_Cancel{Cancel: &pb.Cancel{}}})
	if g.isOnRest {
		g.rest.Cancel()
	}
}

// wire is one Converse call. No frame is written after its end; the read side gets the status.
type wire struct {
	client      *Client
	line        *line
	call        pb.InferenceService_ConverseClient
	mutex       sync.Mutex
	tag         uint64
	isGoingAway bool
	lost        *Error
	generations map[uint64]*Generation
}

func (c *Client) openWire(ctx context.Context) (*wire, error) {
	used, err := c.pool.lease(nil, false)
	if err != nil {
		return nil, err
	}
	made := &wire{client: c, line: used, generations: map[uint64]*Generation{}}
	if made.call, err = used.stub.Converse(c.outgoing(ctx)); err != nil {
		c.pool.release(used)
		made.lost = fromRPC(err)
		return made, nil
	}
	go made.read()
	return made, nil
}

func (w *wire) takesMore() bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return !w.isGoingAway && w.lost == nil
}

func (w *wire) start(generation *Generation, spec *pb.GenerationSpec) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.tag++
	generation.tag = w.tag
	if w.lost != nil {
		generation.news <- news{err: w.lost}
		return
	}
	w.generations[w.tag] = generation
	open := &pb.Open{Spec: spec, JoinedFrames: proto.Bool(true)}
	_ = w.call.Send(&pb.ConverseRequest{Tag: w.tag, Frame: &pb.ConverseRequest_Open{Open: open}})
}

func (w *wire) send(frame *pb.ConverseRequest) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.lost == nil && w.generations[frame.Tag] != nil {
		_ = w.call.Send(frame) // the read side gets the status
	}
}

func (w *wire) read() {
	for {
		frame, err := w.call.Recv()
		if err != nil {
			w.end(err)
			return
		}
		w.deliver(frame)
		for _, further := range frame.GetMore() {
			w.deliver(further)
		}
	}
}

func (w *wire) end(err error) {
	lost := &Error{Code: codes.Unavailable, Message: "the server ended the stream of this session"}
	if err != io.EOF {
		lost = fromRPC(err)
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.lost = lost
	for _, generation := range w.generations {
		generation.news <- news{err: lost}
	}
	w.client.pool.release(w.line)
}

func (w *wire) deliver(frame *pb.ConverseResponse) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if frame.GetGoingAway() != nil {
		w.isGoingAway = true
	}
	generation := w.generations[frame.Tag]
	if generation == nil {
		return
	}
	told := news{frame: frame}
	if failed := frame.GetFailed(); failed != nil {
		told = news{err: fromFailed(failed)}
	}
	if frame.GetFinished() != nil || told.err != nil {
		delete(w.generations, frame.Tag)
	}
	generation.news <- told
	if w.isGoingAway && len(w.generations) == 0 {
		_ = w.call.CloseSend() // the server waits for the half-close
	}
}
