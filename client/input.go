package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

const (
	// inputPiece is the largest piece of input in one message. What is larger does not go with the request.
	inputPiece = 1 << 20
	// The limits of Run's inline output.
	defaultInline = 8 << 20
	maxInline     = 64 << 20
)

// runLarge is Run with more input than one message holds: the command is started, its input sent in pieces, and its
// output gathered as the server would.
func (s *Sandbox) runLarge(ctx context.Context, req *sandseav1.RunRequest) (*sandseav1.RunResponse, error) {
	limit := req.GetMaxOutputBytes()
	if limit < 0 || limit > maxInline {
		return nil, errdefs.New(errdefs.Invalid, "", "max_output_bytes: %d is not between 0 and 64 MiB", limit).
			WithField("max_output_bytes", "64 MiB").WithHint("Use Start to stream more")
	}
	if limit == 0 {
		limit = defaultInline
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := map[sandseav1.Stream]*inline{}
	for _, st := range []sandseav1.Stream{sandseav1.Stream_STREAM_STDOUT, sandseav1.Stream_STREAM_STDERR} {
		out[st] = newInline(limit, req.GetCommand().GetOverflow())
	}
	fed := make(chan error, 1)
	feeding := false
	defer func() {
		if feeding {
			cancel(nil)
			<-fed //nolint:errcheck // it has been told of, or nobody waits for it any more
		}
	}()
	start := &sandseav1.StartRequest{Command: req.GetCommand(), Stdin: true, Key: req.GetKey(), Note: req.GetNote()}
	for e, err := range s.Follow(ctx, start, nil) {
		if err != nil {
			if in, ok := errors.AsType[*inputError](context.Cause(ctx)); ok {
				return nil, in.err
			}
			return nil, err
		}
		switch e := e.GetEvent().(type) {
		case *sandseav1.ProcessEvent_Started:
			if !feeding && e.Started.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING {
				feeding = true
				go func() {
					err := s.feed(ctx, e.Started.GetNumber(), req.GetStdin())
					if err != nil {
						cancel(&inputError{err})
					}
					fed <- err
				}()
			}
		case *sandseav1.ProcessEvent_Data:
			out[e.Data.GetStream()].add(e.Data.GetData())
		case *sandseav1.ProcessEvent_Gap:
			out[e.Gap.GetStream()].skip(e.Gap.GetBytes())
		case *sandseav1.ProcessEvent_Exited:
			return answer(e.Exited, req.GetCommand().GetOverflow(), out), nil
		}
	}
	return nil, errdefs.New(errdefs.Internal, "", "a process's story without an end")
}

// inputError cancels a call whose input could not be sent.
type inputError struct{ err error }

func (e *inputError) Error() string { return e.err.Error() }
func (e *inputError) Unwrap() error { return e.err }

func answer(p *sandseav1.Process, policy sandseav1.Overflow, out map[sandseav1.Stream]*inline) *sandseav1.RunResponse {
	r := &sandseav1.RunResponse{Number: p.GetNumber(), Result: proto.CloneOf(p.GetResult())}
	if r.GetResult() == nil {
		r.Result = &sandseav1.Result{}
	}
	r.Stdout, r.StdoutGapBytes, r.StdoutGapAt = out[sandseav1.Stream_STREAM_STDOUT].whole()
	r.Stderr, r.StderrGapBytes, r.StderrGapAt = out[sandseav1.Stream_STREAM_STDERR].whole()
	if r.GetStdoutGapBytes() > 0 || r.GetStderrGapBytes() > 0 {
		r.Result.Truncated = true
		r.Result.OutputExceeded = r.Result.OutputExceeded || policy == sandseav1.Overflow_OVERFLOW_FAIL
	}
	return r
}

// feed sends all of a process's input and closes it. A process that does not read it to its end is no error.
func (s *Sandbox) feed(ctx context.Context, number int64, data []byte) error {
	for at := int64(0); at < int64(len(data)); {
		var next int64
		err := s.patiently(ctx, func() (err error) {
			next, err = s.SendInput(ctx, number, at, data[at:min(at+inputPiece, int64(len(data)))])
			return err
		})
		switch {
		case errors.Is(err, errdefs.FailedPrecondition):
			return nil // it has ended or closed its input: its end tells the rest
		case err != nil:
			return fmt.Errorf("send input: %w", err)
		}
		at = next
	}
	err := s.patiently(ctx, func() error { return s.CloseInput(ctx, number) })
	if errors.Is(err, errdefs.FailedPrecondition) {
		return nil
	}
	return err
}

// patiently repeats a call that may be repeated while the server is away.
func (s *Sandbox) patiently(ctx context.Context, call func() error) error {
	began := time.Now()
	for wait := rejoinFirst; ; wait = min(2*wait, rejoinLast) {
		err := call()
		if err == nil || !isCut(ctx, err) || time.Since(began) > rejoinLimit {
			return err
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return err
		}
	}
}

// inline gathers a stream as a Run's answer carries it.
type inline struct {
	most [2]int64 // of the head and of the tail
	head []byte
	tail []byte // may be up to twice what is kept of it
	size int64
	gap  bool // something after the head is missing
}

func newInline(limit int64, policy sandseav1.Overflow) *inline {
	switch policy {
	case sandseav1.Overflow_OVERFLOW_TAIL:
		return &inline{most: [2]int64{0, limit}}
	case sandseav1.Overflow_OVERFLOW_HEAD, sandseav1.Overflow_OVERFLOW_FAIL:
		return &inline{most: [2]int64{limit, 0}}
	case sandseav1.Overflow_OVERFLOW_UNSPECIFIED, sandseav1.Overflow_OVERFLOW_HEAD_TAIL:
	}
	return &inline{most: [2]int64{limit - limit/2, limit / 2}}
}

func (in *inline) add(data []byte) {
	in.size += int64(len(data))
	if !in.gap {
		n := min(in.most[0]-int64(len(in.head)), int64(len(data)))
		in.head = append(in.head, data[:n]...)
		data = data[n:]
	}
	in.tail = append(in.tail, data...)
	if most := int(in.most[1]); len(in.tail) > 2*most {
		in.trim(most)
	}
}

// trim forgets all but the last most bytes of the tail.
func (in *inline) trim(most int) {
	if drop := len(in.tail) - most; drop > 0 {
		in.tail = in.tail[:copy(in.tail, in.tail[drop:])]
		in.gap = true
	}
}

func (in *inline) skip(n int64) {
	in.size += n
	in.tail, in.gap = in.tail[:0], true
}

// whole gives what is kept, how many bytes are missing, and after how many kept ones.
func (in *inline) whole() (data []byte, gap, at int64) {
	in.trim(int(in.most[1]))
	data = append(in.head, in.tail...)
	if gap = in.size - int64(len(data)); gap > 0 {
		at = int64(len(in.head))
	}
	return data, gap, at
}
