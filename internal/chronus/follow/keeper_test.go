package follow

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/record"
)

// TestASlowReaderHoldsUpNobody records by a real keeper. One reader keeps up, one stops after its first piece until
// all is written: neither the writer nor the other reader waits for it, and both see every offset.
func TestASlowReaderHoldsUpNobody(t *testing.T) {
	run := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	socket := filepath.Join(run, "keeper.sock")
	go func() {
		ended <- keeper.Run(ctx, keeper.Config{
			Socket: socket, DataID: "data", Index: run, Log: slog.New(slog.DiscardHandler),
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var c *keeper.Conn
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(10 * time.Second); c == nil; <-tick.C {
		var err error
		if c, err = keeper.Dial(ctx, socket, "data"); err != nil && time.Now().After(end) {
			t.Fatal(err)
		}
	}
	defer c.Close()

	out, f := newRec(t)
	r, w, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := c.Hold(ctx, keeper.Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	if err := c.Record(ctx, keeper.Exec{
		Key: keeper.Key{Sandbox: "s1", Number: 1}, Caps: record.Caps{Head: 4 << 20, Tail: 4 << 20},
		Streams: []keeper.Stream{{Stream: record.Stdout, Pipe: r, File: out.f}},
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		for e, err := range c.Events() {
			if err != nil || e.Kind == keeper.Closed {
				close(done)
				return
			}
		}
	}()

	const total = 24 << 20
	written := make(chan struct{})
	var wg sync.WaitGroup
	for _, slow := range []bool{false, true} {
		rd := open(t, f, 0, done)
		wg.Go(func() {
			buf := make([]byte, 64<<10)
			if slow {
				if p, err := rd.Next(t.Context(), buf); err != nil || len(p.Data) == 0 {
					t.Errorf("first piece: %+v, %v", p, err)
				}
				<-written
			}
			gaps, data, end := collect(t, rd, buf)
			if end != total {
				t.Errorf("slow %v: end %d, want %d", slow, end, total)
			}
			if slow && (len(gaps) != 1 || data < 7<<20 || data > 12<<20) {
				t.Errorf("slow %v: %d bytes, gaps %v", slow, data, gaps)
			}
		})
	}
	for off := int64(0); off < total; off += 1 << 20 {
		if _, err := w.Write(want(off, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("the writer was held up")
	}
	close(written)
	wg.Wait()
	if fi, err := os.Stat(record.Path(out.dir, "s1", 1, record.Stdout)); err != nil || fi.Size() != total {
		t.Errorf("size %d, %v", fi.Size(), err)
	}
}
