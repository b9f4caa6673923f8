package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/client"
)

// flaky serves one process whose streams break after so many bytes each, and that takes input.
type flaky struct {
	sandseav1connect.UnimplementedProcessServiceHandler
	out   []byte
	piece int               // of one message
	good  int               // bytes that a stream carries before it breaks; 0: it never breaks
	mute  bool              // a stream ends in good order, and without the end of the process
	end   *sandseav1.Result // of the process; nil: it exits with 3
	key   string            // of the start
	whole chan struct{}     // when set, the process begins to write when this is closed, which the end of its input does

	mu     sync.Mutex
	input  []byte   // guarded by mu
	sends  []int    // guarded by mu: sizes of the pieces of input
	killed []int64  // guarded by mu
	asked  []string // guarded by mu: the offsets of attaches
}

func (f *flaky) story(send func(*sandseav1.ProcessEvent) error, from int64) error {
	sent := 0
	for at := from; at < int64(len(f.out)); {
		if f.good > 0 && sent >= f.good {
			if f.mute {
				return nil
			}
			panic(http.ErrAbortHandler)
		}
		data := f.out[at:min(at+int64(f.piece), int64(len(f.out)))]
		err := send(&sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Data{
			Data: &sandseav1.OutputData{Stream: sandseav1.Stream_STREAM_STDOUT, Offset: at, Data: data},
		}})
		if err != nil {
			return err
		}
		at, sent = at+int64(len(data)), sent+len(data)
	}
	end := f.end
	if end == nil {
		end = &sandseav1.Result{ExitCode: 3, StdoutBytes: int64(len(f.out))}
	}
	return send(&sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Exited{Exited: &sandseav1.Process{
		Number: 7, Result: end,
	}}})
}

func (f *flaky) Start(_ context.Context, r *connect.Request[sandseav1.StartRequest],
	st *connect.ServerStream[sandseav1.StartResponse],
) error {
	f.key = r.Msg.GetKey()
	send := func(e *sandseav1.ProcessEvent) error { return st.Send(&sandseav1.StartResponse{Event: e}) }
	err := send(&sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Started{
		Started: &sandseav1.Process{Number: 7, State: sandseav1.ProcessState_PROCESS_STATE_RUNNING},
	}})
	if err != nil {
		return err
	}
	if f.whole != nil {
		<-f.whole
	}
	return f.story(send, 0)
}

func (f *flaky) Attach(_ context.Context, r *connect.Request[sandseav1.AttachRequest],
	st *connect.ServerStream[sandseav1.AttachResponse],
) error {
	f.mu.Lock()
	f.asked = append(f.asked, fmt.Sprint(r.Msg.GetNumber(), "@", r.Msg.GetStdoutOffset(), " ", r.Msg.GetLossless()))
	f.mu.Unlock()
	return f.story(func(e *sandseav1.ProcessEvent) error { return st.Send(&sandseav1.AttachResponse{Event: e}) },
		r.Msg.GetStdoutOffset())
}

func (f *flaky) SendInput(_ context.Context, r *connect.Request[sandseav1.SendInputRequest],
) (*connect.Response[sandseav1.SendInputResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Msg.GetOffset() != int64(len(f.input)) {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("a hole"))
	}
	f.input = append(f.input, r.Msg.GetData()...)
	f.sends = append(f.sends, len(r.Msg.GetData()))
	return connect.NewResponse(&sandseav1.SendInputResponse{NextOffset: int64(len(f.input))}), nil
}

func (f *flaky) CloseInput(context.Context, *connect.Request[sandseav1.CloseInputRequest],
) (*connect.Response[sandseav1.CloseInputResponse], error) {
	close(f.whole)
	return connect.NewResponse(&sandseav1.CloseInputResponse{}), nil
}

func (f *flaky) Signal(_ context.Context, r *connect.Request[sandseav1.SignalRequest],
) (*connect.Response[sandseav1.SignalResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.killed = append(f.killed, r.Msg.GetNumber())
	return connect.NewResponse(&sandseav1.SignalResponse{}), nil
}

// sandbox gives a handle that talks to f.
func (f *flaky) sandbox(t *testing.T) *client.Sandbox {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(sandseav1connect.NewProcessServiceHandler(f))
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	c, err := client.New(client.Config{URL: srv.URL, Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	return c.Sandbox("s")
}

func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b)
	return b
}

func TestFollowTakesABrokenStreamUpWhereItBroke(t *testing.T) {
	f := &flaky{out: noise(1000), piece: 100, good: 300}
	var got []byte
	breaks, exits := 0, 0
	events := f.sandbox(t).Follow(t.Context(), &sandseav1.StartRequest{Lossless: true}, func(err error) {
		if breaks++; !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("told of %v", err)
		}
	})
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e.GetData().GetData()...)
		if p := e.GetExited(); p != nil {
			exits++
			if p.GetResult().GetExitCode() != 3 {
				t.Errorf("ended with %v", p.GetResult())
			}
		}
	}
	if !bytes.Equal(got, f.out) || exits != 1 || breaks != 3 {
		t.Errorf("%d bytes, %d ends, %d breaks", len(got), exits, breaks)
	}
	if want := []string{"7@300 true", "7@600 true", "7@900 true"}; !slices.Equal(f.asked, want) {
		t.Errorf("attached at %q, want %q", f.asked, want)
	}
}

func TestABrokenStreamIsAnErrorAndNeverAnEnd(t *testing.T) {
	for name, f := range map[string]*flaky{
		"cut": {out: noise(1000), piece: 100, good: 300}, "ended in good order": {out: noise(1000), piece: 100, good: 300, mute: true},
	} {
		sb := f.sandbox(t)
		for call, events := range map[string]func(func(*sandseav1.ProcessEvent, error) bool){
			"start": sb.Start(t.Context(), &sandseav1.StartRequest{}), "attach": sb.Attach(t.Context(), &sandseav1.AttachRequest{}),
		} {
			var last error
			for e, err := range events {
				if last = err; e.GetExited() != nil {
					t.Errorf("%s, %s: an end was invented: %v", name, call, e)
				}
			}
			if !errors.Is(last, errdefs.Unavailable) {
				t.Errorf("%s, %s: %v", name, call, last)
			}
		}
	}
}

func TestWhoLeavesARejoinedStreamEndsTheCommand(t *testing.T) {
	for key, want := range map[string]int{"": 1, "k": 0} {
		f := &flaky{out: noise(1000), piece: 100, good: 300}
		n := 0
		for _, err := range f.sandbox(t).Follow(t.Context(), &sandseav1.StartRequest{Key: key}, nil) {
			if n++; err != nil || n > 5 {
				break
			}
		}
		if len(f.killed) != want {
			t.Errorf("key %q: %d signals, want %d", key, len(f.killed), want)
		}
	}
}

func TestACommandThatWasKilledWithItsLinkHasNoResult(t *testing.T) {
	kill := &sandseav1.Result{ExitCode: 137, Signal: 9, SignalName: "SIGKILL"}
	for name, c := range map[string]struct {
		good    int
		key     string
		end     *sandseav1.Result
		unknown bool
	}{
		"the link broke":         {300, "", kill, true},
		"it has a key":           {300, "k", kill, false},
		"the link held":          {0, "", kill, false},
		"its memory was used up": {300, "", &sandseav1.Result{ExitCode: 137, Signal: 9, Oom: true}, false},
		"its time was over":      {300, "", &sandseav1.Result{ExitCode: 124, Signal: 9, TimedOut: true}, false},
		"another signal":         {300, "", &sandseav1.Result{ExitCode: 143, Signal: 15}, false},
	} {
		f := &flaky{out: noise(1000), piece: 100, good: c.good, end: c.end}
		var last error
		exits := 0
		for e, err := range f.sandbox(t).Follow(t.Context(), &sandseav1.StartRequest{Key: c.key}, nil) {
			if last = err; e.GetExited() != nil {
				exits++
			}
		}
		if errors.Is(last, errdefs.Unknown) != c.unknown || (exits == 0) != c.unknown || len(f.killed) > 0 {
			t.Errorf("%s: %d ends, %v, %d signals", name, exits, last, len(f.killed))
		}
	}
}

func TestInputThatNoMessageHoldsIsSentInPieces(t *testing.T) {
	in := noise(3<<20 + 5)
	for policy, want := range map[sandseav1.Overflow]struct{ head, tail, at int64 }{
		sandseav1.Overflow_OVERFLOW_HEAD_TAIL: {100, 100, 100},
		sandseav1.Overflow_OVERFLOW_TAIL:      {0, 200, 0},
		sandseav1.Overflow_OVERFLOW_HEAD:      {200, 0, 200},
		sandseav1.Overflow_OVERFLOW_FAIL:      {200, 0, 200},
	} {
		f := &flaky{out: noise(1000), piece: 130, whole: make(chan struct{})}
		cmd := client.Argv("cat")
		cmd.Overflow = policy
		res, err := f.sandbox(t).RunRequest(t.Context(), &sandseav1.RunRequest{
			Command: cmd, Stdin: in, MaxOutputBytes: 200, Key: "k",
		})
		if err != nil {
			t.Fatal(err)
		}
		r := res.GetResult()
		if !bytes.Equal(res.GetStdout(), slices.Concat(f.out[:want.head], f.out[1000-want.tail:])) ||
			res.GetStdoutGapBytes() != 800 || res.GetStdoutGapAt() != want.at || !r.GetTruncated() ||
			r.GetOutputExceeded() != (policy == sandseav1.Overflow_OVERFLOW_FAIL) || res.GetNumber() != 7 {
			t.Errorf("%s: %d bytes, %d missing at %d, %v", policy, len(res.GetStdout()), res.GetStdoutGapBytes(),
				res.GetStdoutGapAt(), r)
		}
		if !bytes.Equal(f.input, in) || slices.Max(f.sends) > 1<<20 || f.key != "k" {
			t.Errorf("%s: %d bytes of input in pieces of %v, key %q", policy, len(f.input), f.sends, f.key)
		}
	}
}
