package sluice

import (
	"context"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "example.com/sluice/go/sluicev1"
)

// Stream is the stream of one generation's deltas. Recv and Cancel may be called from different goroutines.
type Stream struct {
	// Progress is what was received so far; read it from the goroutine that calls Recv.
	Progress *Progress

	client   *Client
	ctx      context.Context
	cancel   context.CancelFunc
	attempts *attempts
	line     *line
	call     func() (event, error) // reads the next message of the running call; nil without a call
	further  []event               // that came with the last message, and were not returned yet
}

// joined is a message that may bring further events.
type joined[M any] interface {
	event
	GetMore() []M
}

// NumBroken returns how often the connection was lost and the generation resumed.
func (s *Stream) NumBroken() int { return s.attempts.numBroken }

// Recv returns the next delta, each once; io.EOF at the end, otherwise an *Error.
func (s *Stream) Recv() (*pb.Delta, error) {
	for {
		if s.Progress.Finished != nil {
			s.end()
			return nil, io.EOF
		}
		next, err := s.next()
		if err == nil {
			if delta := s.Progress.take(next); delta != nil {
				return delta, nil
			}
			continue
		}
		if err == io.EOF {
			err = &Error{Code: codes.Internal, Message: "the stream ended before its last message"}
		}
		s.end()
		if err := s.pause(fromRPC(err)); err != nil {
			s.cancel()
			return nil, err
		}
	}
}

// Cancel ends the generation; Recv then returns CANCELLED.
func (s *Stream) Cancel() {
	if accepted := s.Progress.Accepted; accepted != nil && s.Progress.detaches() {
		if used, err := s.client.pool.lease(s.line, true); err == nil {
			request := &pb.CancelGenerationRequest{GenerationId: accepted.GenerationId}
			_, _ = used.stub.CancelGeneration(s.client.outgoing(s.ctx), request) // fails if it has ended
			s.client.pool.release(used)
		}
	}
	s.cancel()
}

// after takes over a generation whose own call, on `used`, ended with an error.
func (s *Stream) after(err *Error, used *line, canGoOn bool) error {
	if !canGoOn && !s.Progress.detaches() {
		return err
	}
	s.line = used
	s.Progress.spec.CreditWindow = nil // ResumeGenerate takes no grants
	return s.pause(err)
}

func (s *Stream) pause(err *Error) error {
	elsewhere := s.line != nil && s.client.pool.failed(s.line, err) && !s.Progress.stays()
	return s.attempts.pause(s.ctx, err, elsewhere)
}

func (s *Stream) end() {
	if s.call != nil {
		s.call = nil
		s.client.pool.release(s.line)
	}
}

func (s *Stream) next() (event, error) {
	if len(s.further) > 0 {
		next := s.further[0]
		s.further = s.further[1:]
		return next, nil
	}
	if s.call == nil {
		if err := s.open(); err != nil {
			return nil, err
		}
	}
	return s.call()
}

func (s *Stream) open() error {
	used, err := s.client.pool.lease(s.line, s.Progress.stays())
	if err != nil {
		return err
	}
	s.line = used
	ctx := s.client.outgoing(s.ctx)
	if s.Progress.hasBegun() {
		request := &pb.ResumeGenerateRequest{Spec: s.Progress.rest(), JoinedEvents: proto.Bool(true)}
		call, err := used.stub.ResumeGenerate(ctx, request)
		s.call = func() (event, error) {
			message, err := call.Recv()
			return received(s, message, err)
		}
		return s.opened(err)
	}
	request := &pb.StreamGenerateRequest{Spec: s.Progress.spec, JoinedEvents: proto.Bool(true)}
	call, err := used.stub.StreamGenerate(ctx, request)
	s.call = func() (event, error) {
		message, err := call.Recv()
		return received(s, message, err)
	}
	return s.opened(err)
}

// received returns the event of a message, and keeps the further ones of it for the next calls.
func received[M joined[M]](s *Stream, message M, err error) (event, error) {
	if err != nil {
		return nil, err
	}
	for _, one := range message.GetMore() {
		s.further = append(s.further, one)
	}
	return message, nil
}

func (s *Stream) opened(err error) error {
	if err != nil {
		s.end()
	}
	return err
}
