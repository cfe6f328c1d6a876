package sluice

import (
	"google.golang.org/protobuf/proto"

	pb "example.com/sluice/go/sluicev1"
)

// Progress is what a client has received of one generation.
type Progress struct {
	Accepted   *pb.Accepted
	PromptInfo *pb.PromptInfo
	Finished   *pb.Finished
	// Ends says how each output ended, by index.
	Ends map[uint32]*pb.OutputFinished
	// LastSeq is the sequence number of the last delta.
	LastSeq uint64

	spec      *pb.GenerationSpec
	numTokens int
	numIDs    int
	ids       map[uint32][]uint32
}

// event is any message about a generation; one of its fields is set.
type event interface {
	GetAccepted() *pb.Accepted
	GetPromptInfo() *pb.PromptInfo
	GetDelta() *pb.Delta
	GetOutputFinished() *pb.OutputFinished
	GetFinished() *pb.Finished
}

func newProgress(spec *pb.GenerationSpec) *Progress {
	return &Progress{spec: spec, Ends: map[uint32]*pb.OutputFinished{}, ids: map[uint32][]uint32{}}
}

func (p *Progress) detaches() bool {
	return p.spec.GetScheduling().GetOnDisconnect() == pb.DisconnectAction_DISCONNECT_ACTION_DETACH
}

// hasBegun says whether the generation is continued by ResumeGenerate; otherwise the request is sent again.
func (p *Progress) hasBegun() bool { return p.Accepted != nil && (p.LastSeq > 0 || p.detaches()) }

// canGoOn says whether the generation can be resumed after its connection was lost.
func (p *Progress) canGoOn() bool { return p.LastSeq == 0 || p.detaches() || p.numIDs == p.numTokens }

// stays says whether only the service that has the generation can go on with it.
func (p *Progress) stays() bool { return p.Accepted != nil && p.detaches() && p.numIDs != p.numTokens }

// take records an event and returns its delta, unless it has none or the delta was received before.
func (p *Progress) take(e event) *pb.Delta {
	if delta := e.GetDelta(); delta != nil {
		return p.takeDelta(delta)
	}
	if accepted := e.GetAccepted(); accepted != nil {
		p.Accepted = accepted
	} else if info := e.GetPromptInfo(); info != nil {
		p.PromptInfo = info
	} else if finished := e.GetFinished(); finished != nil {
		p.Finished = finished
	} else if end := e.GetOutputFinished(); end != nil && p.Ends[end.OutputIndex] == nil {
		p.Ends[end.OutputIndex] = end
	}
	return nil
}

func (p *Progress) takeDelta(delta *pb.Delta) *pb.Delta {
	if delta.Seq <= p.LastSeq {
		return nil
	}
	p.LastSeq = delta.Seq
	p.numTokens += int(delta.Consumed)
	p.numIDs += len(delta.Tokens)
	for _, token := range delta.Tokens {
		p.ids[delta.OutputIndex] = append(p.ids[delta.OutputIndex], token.Id)
	}
	return delta
}

// rest returns the spec for ResumeGenerate. Unless all ids are known it has no prompt, so that no gateway starts the
// generation again from the beginning.
func (p *Progress) rest() *pb.GenerationSpec {
	rest := &pb.GenerationSpec{}
	if p.numIDs == p.numTokens {
		rest = proto.Clone(p.spec).(*pb.GenerationSpec)
		rest.CreditWindow = nil
		rest.Model, rest.Revision = proto.String(p.Accepted.Model), proto.String(p.Accepted.Revision)
		p.effective(rest)
	}
	rest.Resume = &pb.ResumePoint{
		GenerationId:  p.Accepted.GenerationId,
		AfterSeq:      p.LastSeq,
		AdapterDigest: p.Accepted.AdapterDigest,
	}
	for index, ids := range p.ids {
		rest.Resume.Outputs = append(rest.Resume.Outputs, &pb.OutputPrefix{OutputIndex: index, TokenIds: ids})
	}
	return rest
}

func (p *Progress) effective(rest *pb.GenerationSpec) {
	params := p.Accepted.Params
	if params == nil {
		return
	}
	asked := rest.GetSampling().GetMaxTokens()
	rest.Sampling, rest.Stop, rest.Output = params.Sampling, params.Stop, params.Output
	rest.Constraint, rest.Cache = params.Constraint, params.Cache
	rest.Scheduling, rest.Speculation = params.Scheduling, params.Speculation
	if asked > 0 && rest.Sampling != nil && rest.Sampling.MaxTokens == nil {
		// Converse accepts a generation before its max_tokens is known.
		rest.Sampling = proto.Clone(rest.Sampling).(*pb.SamplingParams)
		rest.Sampling.MaxTokens = proto.Uint32(asked)
	}
}
