package sluice

import (
	"errors"
	"math/rand"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "example.com/sluice/go/sluicev1"
)

// firstRest is how long an address is not asked after a failure; it doubles with each further one in a row.
const (
	firstRest = 500 * time.Millisecond
	maxRest   = 10 * time.Second
)

// address is a service, with its own gateways and engines.
type address struct {
	target     string
	size       int
	lines      []*line
	restsUntil time.Time
	numFailed  int
}

// line is a connection and the number of calls on it.
type line struct {
	address    *address
	connection *grpc.ClientConn
	stub       pb.InferenceServiceClient
	numCalls   int
}

// pool lends the connection with fewest calls, of the address with fewest; connections are opened as calls overlap.
type pool struct {
	mutex     sync.Mutex
	random    *rand.Rand // seeded, as that of the package is not before Go 1.20
	addresses []*address
	dial      func(target string) (*grpc.ClientConn, error)
	isClosed  bool
}

func newPool(targets []string, size int, dial func(target string) (*grpc.ClientConn, error)) *pool {
	made := &pool{dial: dial, random: rand.New(rand.NewSource(time.Now().UnixNano()))}
	if size < len(targets) {
		size = len(targets)
	}
	for at, target := range targets {
		own := size / len(targets)
		if at < size%len(targets) {
			own++
		}
		made.addresses = append(made.addresses, &address{target: target, size: own})
	}
	return made
}

// lease returns a connection for a call: not that of the failed call, but one of its address if it must stay there.
func (p *pool) lease(avoid *line, stays bool) (*line, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.isClosed {
		return nil, &Error{Code: codes.Canceled, Message: "the client is closed"}
	}
	chosen := p.choose(time.Now())
	if stays && avoid != nil {
		chosen = avoid.address
	}
	var best *line
	for _, one := range chosen.lines {
		if one != avoid && (best == nil || one.numCalls < best.numCalls) {
			best = one
		}
	}
	if (best == nil || best.numCalls > 0) && len(chosen.lines) < chosen.size {
		opened, err := p.dial(chosen.target)
		if err != nil {
			return nil, err
		}
		best = &line{address: chosen, connection: opened, stub: pb.NewInferenceServiceClient(opened)}
		chosen.lines = append(chosen.lines, best)
	}
	if best == nil {
		best = avoid
	}
	best.numCalls++
	return best, nil
}

func (p *pool) release(used *line) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	used.numCalls--
}

// failed takes the failure of a call: an address that is lost, stopping or full is not asked for a while. Calls that
// fail together count once. It returns whether another address can be asked at once.
func (p *pool) failed(used *line, err *Error) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	now, at := time.Now(), used.address
	if concernsAddress(err) && !now.Before(at.restsUntil) {
		if now.Sub(at.restsUntil) > maxRest { // after a long rest without another failure it counts as well again
			at.numFailed = 0
		}
		rest := firstRest << min(at.numFailed, 16)
		if err.RetryAfter != nil && *err.RetryAfter > rest {
			rest = *err.RetryAfter
		}
		if rest > maxRest {
			rest = maxRest
		}
		at.numFailed++
		at.restsUntil = now.Add(rest)
	}
	for _, one := range p.addresses {
		if one != at && !now.Before(one.restsUntil) {
			return true
		}
	}
	return false
}

// chance returns a random number from 0 to 1.
func (p *pool) chance() float64 {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.random.Float64()
}

func (p *pool) close() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.isClosed = true
	for _, one := range p.addresses {
		for _, each := range one.lines {
			each.connection.Close()
		}
		one.lines = nil
	}
}

// choose returns the address with fewest calls among those that do not rest; the one that rests shortest if all do.
func (p *pool) choose(now time.Time) *address {
	var best *address
	start := p.random.Intn(len(p.addresses)) // clients that begin together begin apart
	for at := range p.addresses {
		one := p.addresses[(start+at)%len(p.addresses)]
		if !now.Before(one.restsUntil) && (best == nil || one.numCalls() < best.numCalls()) {
			best = one
		}
	}
	if best != nil {
		return best
	}
	best = p.addresses[0]
	for _, one := range p.addresses {
		if one.restsUntil.Before(best.restsUntil) {
			best = one
		}
	}
	return best
}

func (a *address) numCalls() int {
	sum := 0
	for _, one := range a.lines {
		sum += one.numCalls
	}
	return sum
}

func concernsAddress(err *Error) bool {
	return err.Code == codes.Unavailable || (err.Code == codes.ResourceExhausted && err.Reason == "QUEUE_FULL")
}

var errNoTarget = errors.New("no target: give host:port")
