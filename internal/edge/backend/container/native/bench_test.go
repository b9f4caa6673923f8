package native

import (
	"context"
	"crypto/rand"
	"slices"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/sandbox"
)

// BenchmarkCreate measures the way from Start to READY with memory, cpu, pids and disk enforced; the stop is not
// counted. It prints percentiles by nearest rank, and the median of each stage.
func BenchmarkCreate(b *testing.B) { benchmarkCreate(b, DefaultWarm, 0) }

// BenchmarkCreateCold makes nothing ready ahead.
func BenchmarkCreateCold(b *testing.B) { benchmarkCreate(b, 0, 0) }

// BenchmarkCreateAfterAPause is a create now and then, as a person's: costs that a busy machine spreads over many show.
func BenchmarkCreateAfterAPause(b *testing.B) { benchmarkCreate(b, DefaultWarm, 50*time.Millisecond) }

func benchmarkCreate(b *testing.B, warm int, pause time.Duration) {
	m := use(b)
	e := m.openWarm(b, warm)
	if err := e.Sweep(b.Context(), func(sandbox.ID) bool { return false }); err != nil {
		b.Fatal(err)
	}
	stages := map[string][]time.Duration{}
	var order []string
	var last time.Time
	e.onStage = func(name string) {
		now := time.Now()
		if name != "" {
			if stages[name] == nil {
				order = append(order, name)
			}
			stages[name] = append(stages[name], now.Sub(last))
		}
		last = now
	}
	var all, stops []time.Duration
	create := func() (took, stopped time.Duration) {
		id, err := sandbox.Mint(1, rand.Reader)
		if err != nil {
			b.Fatal(err)
		}
		begin := time.Now()
		i, err := e.Start(context.Background(), m.spec(id))
		took = time.Since(begin)
		if err != nil {
			b.Fatal(err)
		}
		begin = time.Now()
		if _, err := i.Stop(context.Background(), 0); err != nil {
			b.Fatal(err)
		}
		return took, time.Since(begin)
	}
	for range 20 {
		create() // caches of all kinds
	}
	clear(stages)
	order = nil
	for b.Loop() {
		b.StopTimer()
		<-time.After(pause)
		took, stopped := create()
		all, stops = append(all, took), append(stops, stopped)
		b.StartTimer()
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(rank(all, 50)), "p50-ms")
	b.ReportMetric(ms(rank(all, 90)), "p90-ms")
	b.ReportMetric(ms(rank(all, 99)), "p99-ms")
	b.ReportMetric(ms(rank(stops, 50)), "stop-p50-ms")
	for _, s := range order {
		b.Logf("%-8s p50 %6.3f ms  p99 %6.3f ms", s, ms(rank(stages[s], 50)), ms(rank(stages[s], 99)))
	}
}

// rank is the percentile by nearest rank.
func rank(all []time.Duration, percent int) time.Duration {
	s := slices.Sorted(slices.Values(all))
	if len(s) == 0 {
		return 0
	}
	return s[max((len(s)*percent+99)/100, 1)-1]
}
