// The driver of the Go client; tests/conformance/README.md has the contract.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	sluice "example.com/sluice/go"
	pb "example.com/sluice/go/sluicev1"
)

type request struct {
	Call        string
	Text        string
	Image       string
	Repeat      int
	MaxTokens   uint32 `json:"max_tokens"`
	Seed        *uint64
	Choices     []string
	TimeoutS    float64 `json:"timeout_s"`
	Count       int
	Window      uint32
	Grants      []uint32
	CancelAfter int `json:"cancel_after"`
	PauseAfter  int `json:"pause_after"`
}

type failure struct {
	Code         string   `json:"code"`
	Reason       string   `json:"reason"`
	Message      string   `json:"message"`
	Fields       []string `json:"fields"`
	RetryAfterS  float64  `json:"retry_after_s"`
	GenerationID string   `json:"generation_id"`
	LastSeq      uint64   `json:"last_seq"`
}

type end struct {
	Text             string   `json:"text"`
	TokenIDs         []uint32 `json:"token_ids"`
	FinishReason     string   `json:"finish_reason"`
	CompletionTokens *uint32  `json:"completion_tokens"`
	NumDeltas        int      `json:"num_deltas"`
	NumEmpty         int      `json:"num_empty"`
	SeqsRise         bool     `json:"seqs_rise"`
	NumBroken        int      `json:"num_broken"`
	Error            *failure `json:"error"`
}

// reader is a stream or a generation of a session.
type reader interface {
	Recv() (*pb.Delta, error)
	Cancel()
	NumBroken() int
}

var (
	stdin  = bufio.NewReader(os.Stdin)
	stdout sync.Mutex
	names  = map[codes.Code]string{
		codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
		codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
		codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
		codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
		codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
		codes.Unauthenticated: "UNAUTHENTICATED",
	}
)

func main() {
	address, token := flag.String("address", "", ""), flag.String("token", "", "")
	ca, cert, key := flag.String("tls-ca", "", ""), flag.String("tls-cert", "", ""), flag.String("tls-key", "", "")
	noRetry := flag.Bool("no-retry", false, "")
	flag.Parse()
	options := sluice.Options{Token: *token}
	if *ca != "" {
		options.TLS = transport(*ca, *cert, *key)
	}
	if *noRetry {
		options.Retry = &sluice.Never
	}
	client, err := sluice.NewClientOfSeveral(strings.Split(*address, ","), options)
	check(err)
	var asked request
	line, err := stdin.ReadString('\n')
	check(err)
	check(json.Unmarshal([]byte(line), &asked))
	ctx := context.Background()
	if asked.TimeoutS > 0 {
		timed, cancel := context.WithTimeout(ctx, time.Duration(asked.TimeoutS*float64(time.Second)))
		defer cancel()
		ctx = timed
	}
	session := client.Converse(ctx)
	var group sync.WaitGroup
	for at := 0; at < atLeastOne(asked.Count); at++ {
		group.Add(1)
		go func() {
			defer group.Done()
			do(ctx, client, session, &asked)
		}()
	}
	group.Wait()
	session.Close()
	client.Close()
}

func do(ctx context.Context, client *sluice.Client, session *sluice.Session, asked *request) {
	switch asked.Call {
	case "generate":
		generate(ctx, client, asked)
	case "adapters":
		adapters(ctx, client, asked.Text)
	case "stream":
		stream := client.Stream(ctx, specOf(asked))
		follow(stream, stream.Progress, asked)
	default:
		options := sluice.OpenOptions{Window: asked.Window, NoGrants: asked.Grants != nil}
		opened, err := session.Open(specOf(asked), options)
		check(err)
		follow(opened, opened.Progress, asked)
	}
}

func generate(ctx context.Context, client *sluice.Client, asked *request) {
	told := end{TokenIDs: []uint32{}, SeqsRise: true}
	answer, err := client.Generate(ctx, specOf(asked))
	if err != nil {
		told.Error = failed(err)
	} else {
		output := answer.Outputs[0]
		told.Text, told.FinishReason = output.Text, reason(output.FinishReason)
		told.CompletionTokens = &answer.Usage.CompletionTokens
		for _, one := range output.Tokens {
			told.TokenIDs = append(told.TokenIDs, one.Id)
		}
	}
	say(map[string]interface{}{"end": told})
}

func adapters(ctx context.Context, client *sluice.Client, name string) {
	told := end{TokenIDs: []uint32{}, SeqsRise: true}
	loaded, err := client.LoadAdapter(ctx, &pb.LoadAdapterRequest{Adapter: name, Path: &name})
	if err == nil {
		told.Text = fmt.Sprintf("%d %s", len(loaded.Digest), adapterNames(ctx, client))
		err = client.UnloadAdapter(ctx, &pb.UnloadAdapterRequest{Adapter: name})
		told.Text += " " + adapterNames(ctx, client)
	}
	if err != nil {
		told.Error = failed(err)
	}
	say(map[string]interface{}{"end": told})
}

func adapterNames(ctx context.Context, client *sluice.Client) string {
	each, err := client.Adapters(ctx)
	check(err)
	found := []string{}
	for _, one := range each {
		found = append(found, one.Name)
	}
	return strings.Join(found, ",")
}

func follow(opened reader, progress *sluice.Progress, asked *request) {
	told := end{TokenIDs: []uint32{}, SeqsRise: true}
	allowed, consumed, grants := asked.Window, uint32(0), asked.Grants
	for {
		delta, err := opened.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			told.Error = failed(err)
			if used := err.(*sluice.Error).Usage; used != nil {
				told.CompletionTokens = &used.CompletionTokens
			}
			break
		}
		told.NumDeltas++
		told.SeqsRise = told.SeqsRise && delta.Seq == uint64(told.NumDeltas)
		told.Text += delta.Text
		consumed += delta.Consumed
		if len(delta.Tokens) > 0 && delta.Text == "" {
			told.NumEmpty++
		}
		for _, one := range delta.Tokens {
			told.TokenIDs = append(told.TokenIDs, one.Id)
		}
		if asked.Grants != nil && consumed >= allowed {
			if len(grants) == 0 {
				opened.Cancel()
			} else {
				allowed += grants[0]
				opened.(*sluice.Generation).Grant(grants[0])
				grants = grants[1:]
			}
		}
		if told.NumDeltas == asked.CancelAfter {
			opened.Cancel()
		}
		if told.NumDeltas == asked.PauseAfter {
			say(map[string]interface{}{"paused": map[string]string{"generation_id": progress.Accepted.GenerationId}})
			_, _ = stdin.ReadString('\n')
		}
	}
	if progress.Finished != nil {
		told.CompletionTokens = &progress.Finished.Usage.CompletionTokens
	}
	if finish := progress.Ends[0]; finish != nil {
		told.FinishReason = reason(finish.FinishReason)
	}
	told.NumBroken = opened.NumBroken()
	say(map[string]interface{}{"end": told})
}

func specOf(asked *request) *pb.GenerationSpec {
	text := strings.Repeat(asked.Text, atLeastOne(asked.Repeat))
	spec := &pb.GenerationSpec{
		Prompt:   &pb.GenerationSpec_Text{Text: text},
		Sampling: &pb.SamplingParams{Temperature: proto.Float64(0), Seed: asked.Seed},
	}
	if asked.Image != "" {
		file, err := os.ReadFile(asked.Image)
		if err != nil {
			panic(err)
		}
		parts := []*pb.ContentPart{
			{Part: &pb.ContentPart_Image{Image: &pb.Image{Data: file}}},
			{Part: &pb.ContentPart_Text{Text: text}},
		}
		turn := &pb.ChatMessage{Role: pb.Role_ROLE_USER, Parts: parts}
		spec.Prompt = &pb.GenerationSpec_Chat{Chat: &pb.Chat{Messages: []*pb.ChatMessage{turn}}}
	}
	if asked.MaxTokens > 0 {
		spec.Sampling.MaxTokens = proto.Uint32(asked.MaxTokens)
	}
	if asked.Choices != nil {
		choice := &pb.Constraint_Choice{Choice: &pb.Choice{Texts: asked.Choices}}
		spec.Constraint = &pb.Constraint{Form: choice}
	} else {
		spec.Stop = &pb.StopConditions{IgnoreEos: proto.Bool(true)}
	}
	return spec
}

func failed(err error) *failure {
	found := err.(*sluice.Error)
	told := &failure{
		Code: names[found.Code], Reason: found.Reason, Message: found.Message, Fields: found.Fields,
		GenerationID: found.GenerationID, LastSeq: found.LastSeq,
	}
	if found.RetryAfter != nil {
		told.RetryAfterS = found.RetryAfter.Seconds()
	}
	return told
}

func reason(finish pb.FinishReason) string {
	return strings.ToLower(strings.TrimPrefix(finish.String(), "FINISH_REASON_"))
}

func transport(ca, cert, key string) credentials.TransportCredentials {
	pem, err := os.ReadFile(ca)
	check(err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		check(err)
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config)
}

func atLeastOne(num int) int {
	if num < 1 {
		return 1
	}
	return num
}

func say(told interface{}) {
	line, err := json.Marshal(told)
	check(err)
	stdout.Lock()
	defer stdout.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
