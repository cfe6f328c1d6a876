package sluice

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
)

// RetryPolicy says when a client repeats and resumes failed calls.
type RetryPolicy struct {
	// Attempts is the most calls made before a generation is accepted.
	Attempts int
	// FirstDelay doubles with each attempt, up to MaxDelay.
	FirstDelay, MaxDelay time.Duration
	// Patience is how long the client tries to resume a lost generation without receiving an event, and the longest
	// delay in RetryInfo that it waits for.
	Patience time.Duration
}

// DefaultRetry repeats and resumes; Never does neither.
var (
	DefaultRetry = RetryPolicy{4, 50 * time.Millisecond, 2 * time.Second, 30 * time.Second}
	Never        = RetryPolicy{Attempts: 1}
)

type attempts struct {
	policy    RetryPolicy
	progress  *Progress // nil for a unary call
	chance    func() float64
	numFailed int
	numBroken int
	news      time.Time
	seen      uint64
}

func newAttempts(policy RetryPolicy, progress *Progress, chance func() float64) *attempts {
	return &attempts{policy: policy, progress: progress, chance: chance, news: time.Now()}
}

// pause waits before the next attempt, which may be made elsewhere; it returns the error if there is to be none.
func (a *attempts) pause(ctx context.Context, err *Error, elsewhere bool) error {
	begun := a.progress != nil && a.progress.Accepted != nil
	if a.progress != nil && a.progress.LastSeq > a.seen {
		a.seen, a.numFailed, a.news = a.progress.LastSeq, 0, time.Now()
	}
	a.numFailed++
	delay, ok := a.delay(err, begun, elsewhere)
	if !ok || (a.progress != nil && !a.progress.canGoOn()) {
		return err
	}
	if end, bound := ctx.Deadline(); bound && time.Until(end) <= delay {
		return err
	}
	if begun {
		a.numBroken++
	}
	select {
	case <-ctx.Done():
		return err
	case <-time.After(delay):
		return nil
	}
}

func (a *attempts) delay(err *Error, begun, elsewhere bool) (time.Duration, bool) {
	if !helps(err, begun, elsewhere) || (begun && time.Since(a.news) >= a.policy.Patience) {
		return 0, false
	}
	if !begun && a.numFailed >= a.policy.Attempts {
		return 0, false
	}
	own := a.policy.FirstDelay << min(a.numFailed-1, 16)
	if own > a.policy.MaxDelay {
		own = a.policy.MaxDelay
	}
	own = own/2 + time.Duration(a.chance()*float64(own)/2)
	// What one address names does not concern another.
	if elsewhere || err.RetryAfter == nil || *err.RetryAfter < own {
		return own, true
	}
	return *err.RetryAfter, *err.RetryAfter <= a.policy.Patience
}

func helps(err *Error, begun, elsewhere bool) bool {
	switch err.Code {
	case codes.Unavailable:
		return true
	case codes.ResourceExhausted:
		return err.RetryAfter != nil && err.Reason != "DEADLINE_UNATTAINABLE"
	case codes.Aborted:
		return begun && err.Reason == "SLOW_CONSUMER"
	case codes.FailedPrecondition: // another address may still serve the revision that it began with
		return begun && elsewhere && err.Reason == "REVISION_CHANGED"
	}
	return false
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}
