// Package conform is the suite that every store.Store passes.
package conform

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
)

// Faults lets the suite break a store where the implementation can; nil functions skip their tests.
type Faults struct {
	// Compact forgets history up to rev.
	Compact func(rev int64)
	// Away makes the store unreachable until called with false.
	Away func(bool)
	// LoseAnswers makes the next n transactions take effect without an answer.
	LoseAnswers func(n int)
}

// limit bounds every wait of the suite.
const limit = 20 * time.Second

var errLimit = fmt.Errorf("the suite's limit of %s: %w", limit, context.DeadlineExceeded)

// Run runs the suite. open gives a fresh, empty store whose Close is the suite's.
func Run(t *testing.T, open func(t *testing.T) (store.Store, Faults)) {
	t.Helper()
	tests := []struct {
		name string
		run  func(*testing.T, context.Context, store.Store, Faults)
	}{
		{"a transaction applies one of its two lists by its conditions", conditions},
		{"a transaction is all or nothing", allOrNothing},
		{"gets inside a transaction see the state before its writes", getsInside},
		{"a prefix is deleted with all that is under it", deletePrefix},
		{"a range pages in key order at one revision", paging},
		{"a range at an old revision shows the old state", oldRevision},
		{"a watch is ordered, gapless and without duplicates", watchOrder},
		{"a watch resumes after any revision that it saw", watchResume},
		{"a watch ends with its context", watchCancel},
		{"a watch of a compacted revision says so", watchCompacted},
		{"a lease that is kept alive stays and one that is not lapses with its keys", leases},
		{"revoking a lease removes its keys", revoke},
		{"concurrent increments by revision lose nothing", increments},
		{"a get sees all that was answered before, to whomever", answered},
		{"a value of a mebibyte is kept", bigValue},
		{"an absent store is unavailable within a second", away},
		{"a lost answer is unknown, and the write took effect", unknown},
		{"a closed store is unavailable", closed},
		{"writing a key twice in one transaction is invalid", twice},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			s, faults := open(t)
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			ctx, stop := context.WithTimeoutCause(t.Context(), limit, errLimit)
			defer stop()
			tc.run(t, ctx, s, faults)
		})
	}
}

func must(t *testing.T, s store.Store, ops ...store.Op) store.Result {
	t.Helper()
	res, err := s.Txn(t.Context(), nil, ops, nil)
	if err != nil {
		t.Fatalf("transaction: %v", err)
	}
	return res
}

func get(t *testing.T, s store.Store, key string) (store.Pair, bool) {
	t.Helper()
	res := must(t, s, store.Get(key))
	if len(res.Pairs) == 0 {
		return store.Pair{}, false
	}
	return res.Pairs[0], true
}

func values(p store.Page) []string {
	var out []string
	for _, kv := range p.Pairs {
		out = append(out, kv.Key+"="+string(kv.Value))
	}
	return out
}

func conditions(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	rev := must(t, s, store.Put("/a", []byte("1"))).Revision
	must(t, s, store.Put("/b", []byte("1")))
	tests := []struct {
		name  string
		conds []store.Cond
		want  bool
	}{
		{"no condition", nil, true},
		{"present and there", []store.Cond{{Key: "/a", Present: true}}, true},
		{"present and not there", []store.Cond{{Key: "/x", Present: true}}, false},
		{"absent and not there", []store.Cond{{Key: "/x", Absent: true}}, true},
		{"absent and there", []store.Cond{{Key: "/a", Absent: true}}, false},
		{"the right revision", []store.Cond{{Key: "/a", ModRev: rev}}, true},
		{"another revision", []store.Cond{{Key: "/a", ModRev: rev + 1}}, false},
		{"a revision of an absent key", []store.Cond{{Key: "/x", ModRev: rev}}, false},
		{"one of two fails", []store.Cond{{Key: "/a", Present: true}, {Key: "/b", Absent: true}}, false},
	}
	for _, tc := range tests {
		res, err := s.Txn(ctx, tc.conds, []store.Op{store.Get("/a")}, []store.Op{store.Get("/b")})
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		wantKey := "/b"
		if tc.want {
			wantKey = "/a"
		}
		if res.Succeeded != tc.want || len(res.Pairs) != 1 || res.Pairs[0].Key != wantKey {
			t.Errorf("%s: got %+v, want succeeded %v and %s", tc.name, res, tc.want, wantKey)
		}
	}
}

func allOrNothing(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	res := must(t, s, store.Put("/a", []byte("1")), store.Put("/b", []byte("1")), store.Delete("/never"))
	a, _ := get(t, s, "/a")
	b, _ := get(t, s, "/b")
	if a.ModRev != res.Revision || b.ModRev != res.Revision {
		t.Errorf("revisions %d, %d, want both %d", a.ModRev, b.ModRev, res.Revision)
	}
	_, err := s.Txn(ctx, nil, []store.Op{
		store.Put("/c", []byte("1")), {Kind: store.OpPut, Key: "/d", Value: []byte("1"), Lease: 1 << 40},
	}, nil)
	if !errors.Is(err, errdefs.NotFound) {
		t.Errorf("a put under an unknown lease: got %v, want NotFound", err)
	}
	if _, ok := get(t, s, "/c"); ok {
		t.Error("half of a failed transaction was applied")
	}
}

func getsInside(t *testing.T, _ context.Context, s store.Store, _ Faults) {
	must(t, s, store.Put("/a", []byte("old")))
	res := must(t, s, store.Get("/a"), store.Get("/none"), store.Put("/a", []byte("new")))
	if len(res.Pairs) != 1 || string(res.Pairs[0].Value) != "old" {
		t.Errorf("got %+v, want the old value alone", res.Pairs)
	}
}

func deletePrefix(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	must(t, s, store.Put("/p/1", nil), store.Put("/p/2", nil), store.Put("/q", []byte("x")))
	must(t, s, store.Op{Kind: store.OpDeletePrefix, Key: "/p/"})
	page, err := s.Range(ctx, "/", store.RangeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/q=x"}, values(page)); diff != "" {
		t.Error(diff)
	}
}

func paging(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	var want []string
	for i := range 25 {
		must(t, s, store.Put(fmt.Sprintf("/k/%02d", i), []byte("v")))
		want = append(want, fmt.Sprintf("/k/%02d=v", i))
	}
	must(t, s, store.Put("/l", []byte("other")))
	var got []string
	var opts store.RangeOptions
	opts.Limit = 10
	pages := 0
	for {
		page, err := s.Range(ctx, "/k/", opts)
		if err != nil {
			t.Fatal(err)
		}
		pages++
		got = append(got, values(page)...)
		if pages == 1 {
			// A write between pages is not seen at the first page's revision.
			must(t, s, store.Put("/k/99", []byte("late")))
		}
		if !page.More {
			break
		}
		opts.Revision, opts.After = page.Revision, page.Pairs[len(page.Pairs)-1].Key
	}
	if diff := cmp.Diff(want, got); diff != "" || pages != 3 {
		t.Errorf("%d pages, want 3: %s", pages, diff)
	}
}

func oldRevision(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	rev := must(t, s, store.Put("/a", []byte("1"))).Revision
	must(t, s, store.Put("/a", []byte("2")), store.Put("/b", []byte("2")))
	must(t, s, store.Delete("/a"))
	page, err := s.Range(ctx, "/", store.RangeOptions{Revision: rev})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/a=1"}, values(page)); diff != "" {
		t.Error(diff)
	}
	_, err = s.Range(ctx, "/", store.RangeOptions{Revision: rev + 1000})
	if !errors.Is(err, errdefs.Invalid) {
		t.Errorf("future revision: got %v, want Invalid", err)
	}
}

// collect watches until n events are there.
func collect(ctx context.Context, s store.Store, prefix string, rev int64, n int) ([]store.Event, error) {
	var out []store.Event
	for e, err := range s.Watch(ctx, prefix, rev) {
		if err != nil {
			return out, err
		}
		if out = append(out, e); len(out) == n {
			return out, nil
		}
	}
	return out, errors.New("the watch ended without an error")
}

func watchOrder(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	first := must(t, s, store.Put("/w/start", nil)).Revision
	const writers, each = 4, 50
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				key := fmt.Sprintf("/w/%d", w)
				if _, err := s.Txn(ctx, nil, []store.Op{
					store.Put(key, []byte(strconv.Itoa(i))), store.Put("/other", nil),
				}, nil); err != nil {
					t.Errorf("write: %v", err)
				}
			}
		})
	}
	events, err := collect(ctx, s, "/w/", first, writers*each)
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	next := map[string]int{}
	last := first
	for _, e := range events {
		if e.ModRev <= last {
			t.Fatalf("revision %d after %d", e.ModRev, last)
		}
		last = e.ModRev
		if string(e.Value) != strconv.Itoa(next[e.Key]) {
			t.Fatalf("%s: got %s, want %d", e.Key, e.Value, next[e.Key])
		}
		next[e.Key]++
	}
	rev := must(t, s, store.Delete("/w/0")).Revision
	events, err = collect(ctx, s, "/w/", rev-1, 1)
	if err != nil || !events[0].Deleted || events[0].Key != "/w/0" || events[0].ModRev != rev || events[0].Value != nil {
		t.Errorf("deletion: got %+v, %v", events, err)
	}
}

func watchResume(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	var revs []int64
	for i := range 10 {
		revs = append(revs, must(t, s, store.Put("/r", []byte(strconv.Itoa(i)))).Revision)
	}
	for i, rev := range revs[:9] {
		events, err := collect(ctx, s, "/r", rev, 9-i)
		if err != nil {
			t.Fatal(err)
		}
		if string(events[0].Value) != strconv.Itoa(i+1) {
			t.Errorf("after revision %d: got %s, want %d", rev, events[0].Value, i+1)
		}
	}
	// From now: nothing of the past.
	got := make(chan store.Event, 1)
	started := make(chan struct{})
	go func() {
		close(started)
		for e, err := range s.Watch(ctx, "/r", 0) {
			if err == nil {
				got <- e
			}
			return
		}
	}()
	<-started
	for i := 10; ; i++ {
		must(t, s, store.Put("/r", []byte(strconv.Itoa(i))))
		select {
		case e := <-got:
			if n, _ := strconv.Atoi(string(e.Value)); n < 10 {
				t.Errorf("a watch from now saw %d", n)
			}
			return
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			t.Fatal("a watch from now saw nothing")
		}
	}
}

func watchCancel(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	why := errors.New("enough")
	ctx, stop := context.WithCancelCause(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := collect(ctx, s, "/", 0, 1)
		ended <- err
	}()
	stop(why)
	select {
	case err := <-ended:
		if err == nil {
			t.Error("ended without an error")
		}
	case <-time.After(limit):
		t.Error("did not end")
	}
}

func watchCompacted(t *testing.T, ctx context.Context, s store.Store, f Faults) {
	if f.Compact == nil {
		t.Skip("this store cannot be compacted by hand")
	}
	first := must(t, s, store.Put("/a", []byte("1"))).Revision
	last := first
	for i := range 5 {
		last = must(t, s, store.Put("/a", []byte(strconv.Itoa(i)))).Revision
	}
	f.Compact(last)
	if _, err := collect(ctx, s, "/", first, 10); !errors.Is(err, store.ErrCompacted) {
		t.Errorf("watch: got %v, want ErrCompacted", err)
	}
	if _, err := s.Range(ctx, "/", store.RangeOptions{Revision: first}); !errors.Is(err, store.ErrCompacted) {
		t.Errorf("range: got %v, want ErrCompacted", err)
	}
	must(t, s, store.Put("/a", []byte("after")))
	events, err := collect(ctx, s, "/", last, 1)
	if err != nil || string(events[0].Value) != "after" {
		t.Errorf("watch from the compacted revision on: got %+v, %v", events, err)
	}
}

func leases(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	kept, err := s.Lease(ctx, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	left, err := s.Lease(ctx, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	must(t, s, store.Op{Kind: store.OpPut, Key: "/kept", Lease: kept.ID()},
		store.Op{Kind: store.OpPut, Key: "/left", Lease: left.ID()})
	if p, _ := get(t, s, "/kept"); p.LeaseID != kept.ID() {
		t.Errorf("lease of the pair: got %x, want %x", p.LeaseID, kept.ID())
	}
	keep, stop := context.WithCancelCause(ctx)
	ended := make(chan error, 1)
	go func() { ended <- kept.KeepAlive(keep) }()
	waitFor(t, ctx, func() bool { _, ok := get(t, s, "/left"); return !ok })
	if _, ok := get(t, s, "/kept"); !ok {
		t.Error("the kept lease lapsed")
	}
	if err := left.KeepAlive(ctx); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("keeping a lapsed lease alive: got %v, want NotFound", err)
	}
	stop(nil)
	select {
	case err := <-ended:
		if err == nil {
			t.Error("KeepAlive ended without a reason")
		}
	case <-ctx.Done():
		t.Error("KeepAlive did not end with its context")
	}
}

func revoke(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	l, err := s.Lease(ctx, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	rev := must(t, s, store.Op{Kind: store.OpPut, Key: "/l", Lease: l.ID()}).Revision
	if err := l.Revoke(ctx); err != nil {
		t.Fatal(err)
	}
	if _, ok := get(t, s, "/l"); ok {
		t.Error("the key outlived its lease")
	}
	events, err := collect(ctx, s, "/l", rev, 1)
	if err != nil || !events[0].Deleted {
		t.Errorf("watch: got %+v, %v, want a deletion", events, err)
	}
	if err := l.Revoke(ctx); err != nil {
		t.Errorf("again: %v", err)
	}
}

func increments(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	must(t, s, store.Put("/n", []byte("0")))
	const workers, each = 8, 25
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				for {
					res, err := s.Txn(ctx, nil, []store.Op{store.Get("/n")}, nil)
					if err != nil {
						t.Errorf("read: %v", err)
						return
					}
					p := res.Pairs[0]
					n, _ := strconv.Atoi(string(p.Value))
					res, err = s.Txn(ctx, []store.Cond{{Key: "/n", ModRev: p.ModRev}},
						[]store.Op{store.Put("/n", []byte(strconv.Itoa(n+1)))}, nil)
					if err != nil {
						t.Errorf("write: %v", err)
						return
					}
					if res.Succeeded {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	if p, _ := get(t, s, "/n"); string(p.Value) != strconv.Itoa(workers*each) {
		t.Errorf("got %s, want %d", p.Value, workers*each)
	}
}

func answered(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	const workers, each = 4, 50
	first := must(t, s, store.Put("/n", []byte("0"))).Revision
	var told atomic.Int64 // the newest revision that a writer was told
	told.Store(first)
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for range workers {
		writers.Go(func() {
			for range each {
				res, err := s.Txn(ctx, nil, []store.Op{store.Put("/n", []byte("x"))}, nil)
				if err != nil {
					t.Errorf("write: %v", err)
					return
				}
				for old := told.Load(); old < res.Revision && !told.CompareAndSwap(old, res.Revision); old = told.Load() {
				}
			}
		})
		readers.Go(func() {
			for {
				least := told.Load()
				// A condition on what was before must fail, and what is there must be as new.
				res, err := s.Txn(ctx, []store.Cond{{Key: "/n", ModRev: least - 1}}, nil, []store.Op{store.Get("/n")})
				if err != nil || res.Succeeded || len(res.Pairs) != 1 || res.Pairs[0].ModRev < least {
					t.Errorf("after revision %d: %+v, %v", least, res, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
}

func bigValue(t *testing.T, _ context.Context, s store.Store, _ Faults) {
	want := strings.Repeat("x", 1<<20)
	must(t, s, store.Put("/big", []byte(want)))
	if p, _ := get(t, s, "/big"); string(p.Value) != want {
		t.Errorf("got %d bytes, want %d", len(p.Value), len(want))
	}
}

func away(t *testing.T, ctx context.Context, s store.Store, f Faults) {
	if f.Away == nil {
		t.Skip("this store cannot be cut off")
	}
	must(t, s, store.Put("/a", []byte("1")))
	f.Away(true)
	began := time.Now()
	// The read comes first: a write in the instant of the cut may have been sent, which is Unknown.
	if _, err := s.Range(ctx, "/", store.RangeOptions{}); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("range: got %v, want Unavailable", err)
	}
	_, err := s.Txn(ctx, nil, []store.Op{store.Put("/a", []byte("2"))}, nil)
	if !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("transaction: got %v, want Unavailable", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("two calls took %s, want a second each at most", took)
	}
	f.Away(false)
	waitFor(t, ctx, func() bool {
		_, err := s.Range(ctx, "/", store.RangeOptions{})
		return err == nil
	})
	if p, _ := get(t, s, "/a"); string(p.Value) != "1" {
		t.Errorf("got %s, want 1: an unavailable write took effect", p.Value)
	}
}

func unknown(t *testing.T, ctx context.Context, s store.Store, f Faults) {
	if f.LoseAnswers == nil {
		t.Skip("this store cannot lose answers")
	}
	f.LoseAnswers(1)
	_, err := s.Txn(ctx, nil, []store.Op{store.Put("/u", []byte("1"))}, nil)
	if !errors.Is(err, errdefs.Unknown) {
		t.Errorf("got %v, want Unknown", err)
	}
	waitFor(t, ctx, func() bool { // the line may still be mute
		res, err := s.Txn(ctx, nil, []store.Op{store.Get("/u")}, nil)
		return err == nil && len(res.Pairs) == 1
	})
}

func closed(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	ended := make(chan error, 1)
	go func() {
		_, err := collect(ctx, s, "/", 0, 1)
		ended <- err
	}()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Range(ctx, "/", store.RangeOptions{}); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("got %v, want Unavailable", err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the watch ended without an error")
		}
	case <-ctx.Done():
		t.Error("the watch did not end")
	}
}

func twice(t *testing.T, ctx context.Context, s store.Store, _ Faults) {
	_, err := s.Txn(ctx, nil, []store.Op{store.Put("/a", []byte("1")), store.Put("/a", []byte("2"))}, nil)
	if !errors.Is(err, errdefs.Invalid) {
		t.Errorf("got %v, want Invalid", err)
	}
}

// waitFor polls until ok or the context ends.
func waitFor(t *testing.T, ctx context.Context, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("the condition did not come true in time")
		}
	}
}
