package sluice

import (
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "example.com/sluice/go/sluicev1"
)

// Error is the failure of a call or a generation.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is that of ErrorInfo, such as "QUEUE_FULL"; "" if the server sent none.
	Reason string
	// Metadata is that of ErrorInfo.
	Metadata map[string]string
	// RetryAfter is how long to wait before another attempt; nil if the server named no time.
	RetryAfter *time.Duration
	// Fields are those whose values are not allowed.
	Fields       []string
	GenerationID string
	LastSeq      uint64
	// Usage is the tokens used before the failure; nil if the generation had not begun.
	Usage *pb.Usage
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return e.Code.String() + ": " + e.Message
	}
	return e.Code.String() + " (" + e.Reason + "): " + e.Message
}

func fromRPC(err error) *Error {
	if found, ok := err.(*Error); ok {
		return found
	}
	return fromStatus(status.Convert(err))
}

func fromStatus(found *status.Status) *Error {
	made := &Error{Code: found.Code(), Message: found.Message()}
	for _, detail := range found.Details() {
		made.take(detail)
	}
	return made
}

func fromFailed(failed *pb.Failed) *Error {
	packed := &spb.Status{Code: failed.Code, Message: failed.Message, Details: failed.Details}
	made := fromStatus(status.FromProto(packed))
	made.GenerationID, made.LastSeq, made.Usage = failed.GenerationId, failed.LastSeq, failed.Usage
	return made
}

func (e *Error) take(detail interface{}) {
	switch one := detail.(type) {
	case *errdetails.ErrorInfo:
		e.Reason, e.Metadata = one.Reason, one.Metadata
		e.GenerationID = one.Metadata["generation_id"]
		e.LastSeq, _ = strconv.ParseUint(one.Metadata["last_seq"], 10, 64)
	case *errdetails.RetryInfo:
		delay := time.Duration(one.RetryDelay.GetSeconds())*time.Second + time.Duration(one.RetryDelay.GetNanos())
		e.RetryAfter = &delay
	case *errdetails.BadRequest:
		for _, violation := range one.FieldViolations {
			e.Fields = append(e.Fields, violation.Field)
		}
	case *pb.Usage:
		e.Usage = one
	}
}
