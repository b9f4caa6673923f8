package uidrange_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
)

func open(t *testing.T, dir, tag string) *uidrange.Pool {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to map 65,536 ids")
	}
	p, err := uidrange.Open(uidrange.Config{Tag: tag, Dir: dir, Warm: 2, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func take(t *testing.T, p *uidrange.Pool) *uidrange.Lease {
	t.Helper()
	l, err := p.Take()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestRangesOfTwoEdgesNeverOverlap(t *testing.T) {
	dir := t.TempDir()
	pools := []*uidrange.Pool{open(t, dir, "aaaaaaaa"), open(t, dir, "bbbbbbbb")}
	var mu sync.Mutex
	seen := map[uint32]string{}
	var wg sync.WaitGroup
	for i, p := range pools {
		p.Settle()
		for range 2 {
			wg.Go(func() {
				for range 50 { // more than one block each
					l, err := p.Take()
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					if other, ok := seen[l.Base]; ok {
						t.Errorf("%#x given to edge %d and to %s", l.Base, i, other)
					}
					seen[l.Base] = string(rune('0' + i))
					mu.Unlock()
					if l.Base < 1<<28 || l.Base+uidrange.Size > 1<<31 || l.Base%uidrange.Size != 0 {
						t.Errorf("range %#x", l.Base)
					}
					if l.UserNS() == nil {
						t.Errorf("range %#x without a namespace", l.Base)
					}
				}
			})
		}
	}
	wg.Wait()
	if len(seen) != 200 {
		t.Errorf("%d ranges, want 200", len(seen))
	}
}

func TestRangesOfALivingSandboxSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, "aaaaaaaa")
	lives, gone := take(t, p).Base, take(t, p).Base
	p.Close()

	p = open(t, dir, "aaaaaaaa")
	if l := take(t, p); l.Base == lives || l.Base == gone {
		t.Fatalf("before Settle range %#x was given though its sandbox may live", l.Base)
	}
	a, err := p.Adopt(lives)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Adopt(lives); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("second Adopt = %v", err)
	}
	p.Settle()
	again := false
	for range 200 {
		switch take(t, p).Base {
		case lives:
			t.Fatalf("range %#x given twice", lives)
		case gone:
			again = true
		}
	}
	if !again {
		t.Errorf("range %#x was not given again", gone)
	}
	a.Give()
	a.Give()
	for range 200 {
		if take(t, p).Base == lives {
			return
		}
	}
	t.Errorf("range %#x did not come back", lives)
}

func TestForeignRangesAreNotAdopted(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir, "aaaaaaaa"), open(t, dir, "bbbbbbbb")
	l := take(t, a)
	if _, err := b.Adopt(l.Base); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("Adopt of another edge's range = %v", err)
	}
	if _, err := b.Adopt(0); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("Adopt of host root = %v", err)
	}
}

func TestReleaseLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, "aaaaaaaa")
	l := take(t, p)
	if err := p.Release(); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("Release with a range in use = %v", err)
	}
	l.Give()
	if err := p.Release(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Take(); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("Take after Release = %v", err)
	}
	left, err := filepath.Glob(dir + "/*/*")
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

func TestClaimsOfAnotherBootAreDropped(t *testing.T) {
	dir := t.TempDir()
	old := filepath.Join(dir, "11111111-1111-1111-1111-111111111111")
	if err := os.MkdirAll(old, 0o755); err != nil {
		t.Fatal(err)
	}
	open(t, dir, "aaaaaaaa")
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat = %v", err)
	}
}

func TestNamespacesHeldOpenAreBounded(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to map 65,536 ids")
	}
	p, err := uidrange.Open(uidrange.Config{
		Tag: "aaaaaaaa", Dir: t.TempDir(), Warm: 1, MaxNamespaces: 4, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var leases []*uidrange.Lease
	for range 20 {
		l := take(t, p)
		l.Mounted()
		leases = append(leases, l)
	}
	open := 0
	for _, l := range leases {
		if l.UserNS() != nil {
			open++
		}
		l.Give()
	}
	if open > 4 {
		t.Errorf("%d namespaces open, want at most 4", open)
	}
}

// What an edge claimed is its own until the boot ends: one that starts again and again must not take the whole machine.
func TestAStartClaimsNoBlockAhead(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, "aaaaaaaa")
	take(t, p)
	p.Close()
	for range 5 {
		p = open(t, dir, "aaaaaaaa")
		// The goroutine that works ahead has looked by the time that it is gone.
		for range 100 {
			runtime.Gosched()
		}
		p.Close()
	}
	claims, err := filepath.Glob(filepath.Join(dir, "*", "[0-9a-f]*"))
	if err != nil || len(claims) != 1 {
		t.Errorf("claims %v, %v", claims, err)
	}
}
