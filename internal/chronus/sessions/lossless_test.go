package sessions_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/record"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// retentions is a keeper that notes where lossless readers stand.
type retentions struct {
	keeper.Client
	mu   sync.Mutex
	said map[record.Stream][]int64
}

func (k *retentions) Retain(_ context.Context, _ keeper.Key, s record.Stream, from int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.said[s] = append(k.said[s], from)
	return nil
}

func (k *retentions) of(s record.Stream) []int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.said[s])
}

func losslessRig(t *testing.T) (*rig, *retentions) {
	t.Helper()
	k := &retentions{said: map[record.Stream][]int64{}}
	r := newRig(t, func(c *sessions.Config) { k.Client, c.Keeper = c.Keeper, k })
	return r, k
}

func TestTheKeeperIsToldWhereALosslessReaderStands(t *testing.T) {
	r, k := losslessRig(t)
	const size = 20 << 20
	s := cmd("bytes", fmt.Sprint(size))
	s.Lossless = true
	var got int64
	for e, err := range r.table.Start(t.Context(), s, false) {
		if err != nil {
			t.Fatal(err)
		}
		if said := k.of(record.Stdout); e.Started != nil && (len(said) == 0 || said[0] != 0) {
			t.Error("it runs before its output is kept")
		}
		got += int64(len(e.Data))
	}
	said := k.of(record.Stdout)
	if n := len(said); n > 0 && said[n-1] == -1 {
		said = said[:n-1] // that nobody reads any more, unless the command was over before
	}
	if got != size || !slices.IsSorted(said) || len(said) < 3 {
		t.Errorf("%d bytes; told %v", got, said)
	}
	// A reader that leaves sets the writer free.
	n := r.launch(cmd("sleep", "60")).Number
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, err := range r.table.Attach(ctx, n, sessions.From{Lossless: true}) {
			if err != nil {
				return
			}
		}
	}()
	before := len(k.of(record.Stdout))
	wait.Until(t, patience, func() bool { return len(k.of(record.Stdout)) > before }, "the reader")
	cancel()
	<-done
	if said := k.of(record.Stdout); said[len(said)-1] != -1 {
		t.Errorf("told %v last", said)
	}
}

func TestTheSlowestLosslessReaderCounts(t *testing.T) {
	r, k := losslessRig(t)
	n := r.launch(cmd("sleep", "60")).Number
	// A reader at the live end takes what comes and waits.
	reader := func(from int64) (leave func()) {
		t.Helper()
		before := len(k.of(record.Stderr))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range r.table.Attach(ctx, n, sessions.From{Stderr: from, Lossless: true}) {
			}
		}()
		wait.Until(t, patience, func() bool { return len(k.of(record.Stderr)) > before }, "the reader")
		return func() { cancel(); <-done }
	}
	last := func() int64 { said := k.of(record.Stderr); return said[len(said)-1] }
	slow := reader(0)
	fast := reader(0)
	fast()
	if last() != 0 {
		t.Errorf("after the first left: %d", last())
	}
	// A new keeper hears of it too.
	before := len(k.of(record.Stderr))
	if err := r.table.Rerecord(t.Context()); err != nil {
		t.Fatal(err)
	}
	if said := k.of(record.Stderr); len(said) != before+1 || last() != 0 {
		t.Errorf("a new keeper is told %v", said[before:])
	}
	slow()
	if last() != -1 {
		t.Errorf("after both left: %d", last())
	}
}

func TestADetachedCommandHasNoLosslessReader(t *testing.T) {
	r := newRig(t)
	s := cmd("echo", "a")
	s.Lossless = true
	_, err := first(r.table.Start(t.Context(), s, true))
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "lossless" {
		t.Errorf("got %v", err)
	}
}
