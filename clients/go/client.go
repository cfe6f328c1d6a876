package sluice

import (
	"context"
	"fmt"
	"net"
	"strings"
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

// Client talks to one server, whose gateways may share its port, or to several. It is safe for concurrent use.
type Client struct {
	options Options
	retry   RetryPolicy
	pool    *pool
}

// NewClient makes a client of one server, which connects on first use. It returns an error if a token would be sent to
// another host in plaintext.
func NewClient(target string, options Options) (*Client, error) {
	return NewClientOfSeveral([]string{target}, options)
}

// NewClientOfSeveral makes a client of several servers with the same model. A call goes to the one on which the client
// has fewest; what one does not take, or loses, goes on at another.
func NewClientOfSeveral(targets []string, options Options) (*Client, error) {
	if len(targets) == 0 {
		return nil, errNoTarget
	}
	for _, target := range targets {
		if options.Token != "" && options.TLS == nil && !isLocal(target) {
			return nil, fmt.Errorf("the token would be sent to %s in plaintext: set TLS", target)
		}
	}
	if options.Channels == 0 {
		options.Channels = 4
	}
	client := &Client{options: options, retry: DefaultRetry}
	client.pool = newPool(targets, options.Channels, client.dial)
	if options.Retry != nil {
		client.retry = *options.Retry
	}
	return client, nil
}

// Close closes the connections.
func (c *Client) Close() { c.pool.close() }

// Generate returns the whole answer at once. The deadline of ctx is that of the generation.
func (c *Client) Generate(ctx context.Context, spec *pb.GenerationSpec) (*pb.GenerateResponse, error) {
	var answer *pb.GenerateResponse
	err := c.unary(ctx, func(ctx context.Context, used *line) (err error) {
		answer, err = used.stub.Generate(ctx, &pb.GenerateRequest{Spec: spec})
		return err
	})
	return answer, err
}

// unary makes a call that has one answer, again where the policy says so.
func (c *Client) unary(ctx context.Context, call func(ctx context.Context, used *line) error) error {
	tries := newAttempts(c.retry, nil, c.pool.chance)
	var used *line
	for {
		var err error
		if used, err = c.pool.lease(used, false); err != nil {
			return err
		}
		err = call(c.outgoing(ctx), used)
		c.pool.release(used)
		if err == nil {
			return nil
		}
		failure := fromRPC(err)
		if err := tries.pause(ctx, failure, c.pool.failed(used, failure)); err != nil {
			return err
		}
	}
}

// Stream returns the answer as a stream; see Stream.Recv. Cancelling ctx ends the generation.
func (c *Client) Stream(ctx context.Context, spec *pb.GenerationSpec) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	progress := newProgress(spec)
	return &Stream{Progress: progress, client: c, ctx: ctx, cancel: cancel, attempts: newAttempts(c.retry, progress, c.pool.chance)}
}

func (c *Client) outgoing(ctx context.Context) context.Context {
	if c.options.Token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.options.Token)
}

func (c *Client) dial(target string) (*grpc.ClientConn, error) {
	transport := grpc.WithInsecure()
	if c.options.TLS != nil {
		transport = grpc.WithTransportCredentials(c.options.TLS)
	}
	slow := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	return grpc.Dial(target, transport,
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
