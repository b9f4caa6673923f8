package sessions_test

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// small is an output limit that one command's record of big bytes goes beyond. big is no whole number of blocks.
const (
	small = 1 << 20
	big   = 4<<20 + 123
)

func trimRig(t *testing.T, change ...func(*sessions.Config)) *rig {
	t.Helper()
	return newRig(t, func(c *sessions.Config) {
		c.Output = small
		for _, f := range change {
			f(c)
		}
	})
}

// trimmed runs commands until the records hold at most so much.
func (r *rig) trimmed(most int64) bool {
	return wait.For(patience, func() bool {
		r.run(cmd("echo", "x"))
		return r.table.OutputBytes() <= most
	})
}

func TestARecordKeepsItsSizeWhileItIsDropped(t *testing.T) {
	r := trimRig(t)
	for range 20 {
		number := r.launch(cmd("bytes", fmt.Sprint(big))).Number
		r.attach(number, big, false)
		stop := make(chan struct{})
		var g errgroup.Group
		g.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				at := sessions.From{Stdout: big, NoFollow: true}
				for e, err := range r.table.Attach(t.Context(), number, at) {
					if err != nil || len(e.Data) > 0 || e.Gap > 0 {
						return fmt.Errorf("a reader at the end: %d bytes, gap of %d, %w", len(e.Data), e.Gap, err)
					}
				}
			}
		})
		if !r.trimmed(small) {
			t.Error("it is not dropped")
		}
		close(stop)
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		var gap int64
		for e, err := range r.table.Attach(t.Context(), number, sessions.From{}) {
			if err != nil || len(e.Data) > 0 {
				t.Fatalf("%d bytes of a record that was dropped, %v", len(e.Data), err)
			}
			gap += e.Gap
		}
		if gap != big {
			t.Fatalf("a gap of %d bytes, want %d", gap, big)
		}
	}
}

func TestAnAnswerIsWholeThoughOthersMakeRoom(t *testing.T) {
	r := trimRig(t)
	const size = small / 3
	want := fake.Pattern(0, size)
	var g errgroup.Group
	for range 8 {
		g.Go(func() error {
			for range 20 {
				a, err := r.table.Run(t.Context(), cmd("bytes", fmt.Sprint(size)), 0)
				if err != nil {
					return err
				}
				if !bytes.Equal(a.Stdout.Head, want) || a.Result.Truncated {
					return fmt.Errorf("%d of %d bytes, gap of %d, truncated %v", len(a.Stdout.Head), size, a.Stdout.Gap, a.Result.Truncated)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if !r.trimmed(small) {
		t.Errorf("%d bytes are kept for nobody", r.table.OutputBytes())
	}
}

// lagging starts a command whose lossless reader takes one piece, then calls lag, then takes the rest. It gives what was
// read and what was missing.
func (r *rig) lagging(lag func()) (got []byte, gap int64) {
	r.t.Helper()
	ctx, stop := context.WithTimeout(r.t.Context(), patience)
	defer stop()
	s := cmd("bytes", fmt.Sprint(big))
	s.Lossless = true
	var number int64
	for e, err := range r.table.Start(ctx, s, false) {
		if err != nil {
			r.t.Fatal(err)
		}
		if e.Started != nil {
			number = e.Started.Number
		}
		first := len(got) == 0 && len(e.Data) > 0
		got = append(got, e.Data...)
		gap += e.Gap
		if first {
			wait.Until(r.t, patience, func() bool { return r.table.List()[number-1].Result != nil }, "the command's end")
			lag()
		}
	}
	return got, gap
}

func TestALosslessReaderLosesNothingToThoseWhoMakeRoom(t *testing.T) {
	r := trimRig(t)
	got, gap := r.lagging(func() {
		r.run(cmd("bytes", fmt.Sprint(big)))
		if !r.trimmed(big + small) {
			t.Errorf("%d bytes are kept, more than the reader needs", r.table.OutputBytes())
		}
	})
	if gap != 0 || !bytes.Equal(got, fake.Pattern(0, big)) {
		t.Errorf("%d of %d bytes, gap of %d", len(got), big, gap)
	}
	if !r.trimmed(small) {
		t.Errorf("%d bytes are kept for nobody", r.table.OutputBytes())
	}
}

func TestALosslessReaderThatStandsStillKeepsNothing(t *testing.T) {
	var ahead atomic.Int64
	r := trimRig(t, func(c *sessions.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	got, gap := r.lagging(func() {
		ahead.Store(int64(time.Minute))
		if !r.trimmed(small) {
			t.Errorf("%d bytes are kept for a reader that stands still", r.table.OutputBytes())
		}
	})
	if gap == 0 || int64(len(got))+gap != big {
		t.Errorf("%d bytes and a gap of %d, together not %d", len(got), gap, big)
	}
}
