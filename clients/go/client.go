package sluice

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	pb "example.com/sluice/go/sluicev1"
)

// Version is the client's version: that of the server it was released with.
const Version = "0.1.0"

const maxReceiveBytes = 64 << 20

// Options of a client. The zero value means plaintext, no token, four connections and DefaultRetry.
type Options struct {
	// TLS are credentials made by credentials.NewTLS.
	TLS   credentials.TransportCredentials
	Token string
	// Channels is the most connections.
	Channels int
	Retry    *RetryPolicy
}

// Client talks to one server, whose gateways may share its port. It is safe for concurrent use.
type Client struct {
	target  string
	options Options
	retry   RetryPolicy

	mutex sync.Mutex
	lines []*line
}

// line is a connection and the number of calls on it.
type line struct {
	connection *grpc.ClientConn
	stub       pb.InferenceServiceClient
	numCalls   int
}

// NewClient makes a client, which connects on first use. It returns an error if a token would be sent to another host
// in plaintext.
func NewClient(target string, options Options) (*Client, error) {
	if options.Token != "" && options.TLS == nil && !isLocal(target) {
		return nil, fmt.Errorf("the token would be sent to %s in plaintext: set TLS", target)
	}
	if options.Channels == 0 {
		options.Channels = 4
	}
	client := &Client{target: target, options: options, retry: DefaultRetry}
	if options.Retry != nil {
		client.retry = *options.Retry
	}
	return client, nil
}

// Close closes the connections.
func (c *Client) Close() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for _, one := range c.lines {
		one.connection.Close()
	}
	c.lines = nil
}

// Generate returns the whole answer at once. The deadline of ctx is that of the generation.
func (c *Client) Generate(ctx context.Context, spec *pb.GenerationSpec) (*pb.GenerateResponse, error) {
	tries := newAttempts(c.retry, nil)
	var used *line
	for {
		var err error
		if used, err = c.lease(used); err != nil {
			return nil, err
		}
		answer, err := used.stub.Generate(c.outgoing(ctx), &pb.GenerateRequest{Spec: spec})
		c.release(used)
		if err == nil {
			return answer, nil
		}
		if err := tries.pause(ctx, fromRPC(err)); err != nil {
			return nil, err
		}
	}
}

// Stream returns the answer as a stream; see Stream.Recv. Cancelling ctx ends the generation.
func (c *Client) Stream(ctx context.Context, spec *pb.GenerationSpec) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	progress := newProgress(spec)
	return &Stream{Progress: progress, client: c, ctx: ctx, cancel: cancel, attempts: newAttempts(c.retry, progress)}
}

func (c *Client) outgoing(ctx context.Context) context.Context {
	if c.options.Token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.options.Token)
}

// lease returns the line with fewest calls, or a new one if all are in use, but not the one that has just failed.
func (c *Client) lease(avoid *line) (*line, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var best *line
	for _, one := range c.lines {
		if one != avoid && (best == nil || one.numCalls < best.numCalls) {
			best = one
		}
	}
	if (best == nil || best.numCalls > 0) && len(c.lines) < c.options.Channels {
		opened, err := c.dial()
		if err != nil {
			return nil, err
		}
		best = &line{connection: opened, stub: pb.NewInferenceServiceClient(opened)}
		c.lines = append(c.lines, best)
	}
	if best == nil {
		best = avoid
	}
	best.numCalls++
	return best, nil
}

func (c *Client) release(used *line) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	used.numCalls--
}

func (c *Client) dial() (*grpc.ClientConn, error) {
	transport := grpc.WithInsecure()
	if c.options.TLS != nil {
		transport = grpc.WithTransportCredentials(c.options.TLS)
	}
	slow := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	return grpc.Dial(c.target, transport,
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveBytes)),
		grpc.WithUserAgent("sluice-go/"+Version),
		// Small windows: when a reader stops, thousands of messages would otherwise pile up.
		grpc.WithInitialWindowSize(65536), grpc.WithInitialConnWindowSize(65536),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: slow, MinConnectTimeout: time.Second}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}))
}

func isLocal(target string) bool {
	host, _, err := net.SplitHostPort(target)
	ip := net.ParseIP(host)
	return strings.HasPrefix(target, "unix:") || (err == nil && (host == "localhost" || (ip != nil && ip.IsLoopback())))
}
