package admission

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

func id(t testing.TB) sandbox.ID {
	t.Helper()
	id, err := sandbox.Mint(1, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func gate(t testing.TB, c Capacity) *Admission {
	t.Helper()
	a, err := New(c, func() (int64, error) { return 100, nil })
	if err != nil {
		t.Fatal(err)
	}
	return a
}

var small = Capacity{Sandboxes: 4, Starting: 2, Memory: 1000, CPUMillis: 1000, Pids: 1000, DiskReserve: 50}

func TestRefusalsNameTheReason(t *testing.T) {
	for name, c := range map[string]struct {
		want  sandbox.Limits
		field string
		word  string
	}{
		"memory":    {sandbox.Limits{Memory: 901, CPUMillis: 1, Pids: 1}, "limits.memory_bytes", "memory"},
		"CPU":       {sandbox.Limits{Memory: 1, CPUMillis: 901, Pids: 1}, "limits.cpu_millis", "CPU"},
		"processes": {sandbox.Limits{Memory: 1, CPUMillis: 1, Pids: 901}, "limits.pids", "processes"},
		"overflow":  {sandbox.Limits{Memory: 1<<63 - 1, CPUMillis: 1, Pids: 1}, "limits.memory_bytes", "memory"},
	} {
		t.Run(name, func(t *testing.T) {
			a := gate(t, small)
			g, err := a.Admit(t.Context(), id(t), sandbox.Limits{Memory: 100, CPUMillis: 100, Pids: 100})
			if err != nil {
				t.Fatal(err)
			}
			_, err = a.Admit(t.Context(), id(t), c.want)
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Refused || e.Field != c.field || !strings.Contains(e.Msg, c.word) || e.Limit == "" {
				t.Fatalf("%v", err)
			}
			g.Release()
			g.Release()
			if l := a.Load(); l.Memory != 0 || l.CPUMillis != 0 || l.Sandboxes != 0 || l.Starting != 0 {
				t.Fatalf("after the release: %+v", l)
			}
		})
	}
	t.Run("sandboxes", func(t *testing.T) {
		a := gate(t, small)
		for range small.Sandboxes {
			if _, err := a.Adopt(id(t), sandbox.Limits{Memory: 1}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := a.Admit(t.Context(), id(t), sandbox.Limits{}); !errors.Is(err, errdefs.Refused) {
			t.Fatal(err)
		}
	})
	t.Run("disk", func(t *testing.T) {
		a, err := New(small, func() (int64, error) { return 49, nil })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Admit(t.Context(), id(t), sandbox.Limits{}); !errors.Is(err, errdefs.Refused) {
			t.Fatal(err)
		}
	})
	t.Run("the same sandbox twice is a bug", func(t *testing.T) {
		a := gate(t, small)
		x := id(t)
		if _, err := a.Adopt(x, sandbox.Limits{}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Admit(t.Context(), x, sandbox.Limits{}); !errors.Is(err, errdefs.Internal) {
			t.Fatal(err)
		}
	})
}

func TestTheStartQueueWaitsAsLongAsTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := gate(t, small)
		var grants []*Grant
		for range small.Starting {
			g, err := a.Admit(t.Context(), id(t), sandbox.Limits{Memory: 1})
			if err != nil {
				t.Fatal(err)
			}
			grants = append(grants, g)
		}
		begin := time.Now()
		ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
		defer stop()
		_, err := a.Admit(ctx, id(t), sandbox.Limits{Memory: 1})
		if !errors.Is(err, errdefs.Refused) || !strings.Contains(err.Error(), "queue") || time.Since(begin) != 30*time.Second {
			t.Fatalf("after %s: %v", time.Since(begin), err)
		}
		if l := a.Load(); l.Sandboxes != 2 || l.Memory != 2 || l.Starting != 2 {
			t.Fatalf("%+v", l)
		}
		time.AfterFunc(time.Second, grants[0].Started)
		begin = time.Now()
		g, err := a.Admit(t.Context(), id(t), sandbox.Limits{Memory: 1})
		if err != nil || time.Since(begin) != time.Second {
			t.Fatalf("after %s: %v", time.Since(begin), err)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := a.Admit(gone, id(t), sandbox.Limits{Memory: 1}); !errors.Is(err, errdefs.Canceled) {
			t.Fatal(err)
		}
		for _, g := range append(grants, g) {
			g.Release()
		}
		if l := a.Load(); l.Sandboxes != 0 || l.Starting != 0 || len(a.starts) != 0 {
			t.Fatalf("%+v", l)
		}
	})
}

func TestAThousandAdmissionsAtOnceNeverExceedABound(t *testing.T) {
	a := gate(t, Capacity{Sandboxes: 50, Starting: 8, Memory: 10_000, CPUMillis: 1 << 40, Pids: 1 << 40})
	var wg sync.WaitGroup
	var held, starting, admitted, refusals atomic.Int64
	for i := range 1000 {
		x := id(t)
		l := sandbox.Limits{Memory: int64(100 + i%400), CPUMillis: 1, Pids: 1}
		wg.Go(func() {
			g, err := a.Admit(t.Context(), x, l)
			if err != nil {
				if !errors.Is(err, errdefs.Refused) {
					t.Errorf("%v", err)
				}
				refusals.Add(1)
				return
			}
			if n := starting.Add(1); n > 8 {
				t.Errorf("%d starts at once", n)
			}
			if n := held.Add(l.Memory); n > 10_000 {
				t.Errorf("%d bytes promised", n)
			}
			admitted.Add(1)
			starting.Add(-1)
			g.Started()
			held.Add(-l.Memory)
			g.Release()
		})
	}
	wg.Wait()
	if l := a.Load(); l.Sandboxes != 0 || l.Memory != 0 || admitted.Load()+refusals.Load() != 1000 || admitted.Load() == 0 {
		t.Fatalf("%+v, %d admitted, %d refused", l, admitted.Load(), refusals.Load())
	}
}

func TestCapacityOfAMachine(t *testing.T) {
	c := Of(node.Capabilities{CPUs: 2, Memory: 1 << 30, PidMax: 32768}, Overcommit{Memory: 2})
	if c.Memory != 2<<30 || c.CPUMillis != 2*1000*DefaultCPUFactor || c.Sandboxes != 4096 || c.Starting != 4 || c.Pids != 8*32768 {
		t.Fatalf("%+v", c)
	}
	if _, err := New(Of(node.Capabilities{}, Overcommit{}), nil); err == nil {
		t.Fatal("a machine without memory has a capacity")
	}
}
