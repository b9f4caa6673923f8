package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// LoadConfig of a run of one system under callers at once.
type LoadConfig struct {
	// Bench is the name of the run, Metric that of its figure, RateMetric that of its rate, Of what is measured.
	Bench, Metric, RateMetric, Of string
	Title, Version                string
	// Warmup calls come first and do not count.
	Warmup int
	// Samples to take.
	Samples int
	// InFlight is how many callers there are; each makes its next call when its last one has ended.
	InFlight int
}

// Validate checks the configuration.
func (c LoadConfig) Validate() error {
	if c.Bench == "" || c.Metric == "" || c.Of == "" || c.Samples < 1 || c.InFlight < 1 || c.Warmup < 0 {
		return fmt.Errorf("bench: a load needs names, samples and callers: %+v", c)
	}
	return nil
}

// Load drives once by InFlight callers until Samples calls were measured. A failed call gives no sample and is counted;
// the rate is of whole calls, what once does beside the measured part included.
func Load(ctx context.Context, cfg LoadConfig, once func(context.Context) (time.Duration, error)) (Document, error) {
	if err := cfg.Validate(); err != nil {
		return Document{}, err
	}
	m, err := newMeter()
	if err != nil {
		return Document{}, err
	}
	l := load{doc: Document{Bench: cfg.Bench, Version: cfg.Version, Title: cfg.Title, Warmup: cfg.Warmup, Rounds: 1}}
	l.drive(ctx, cfg.Warmup, cfg.InFlight, once)
	l.samples = nil
	measured := time.Now()
	l.drive(ctx, cfg.Samples, cfg.InFlight, once)
	spent := time.Since(measured)
	if err := context.Cause(ctx); err != nil {
		return Document{}, fmt.Errorf("interrupted: %w", err)
	}
	if len(l.samples) == 0 {
		return Document{}, errors.New("bench: every call failed: " + l.doc.Errors[0])
	}
	if err := m.read(&l.doc); err != nil {
		return Document{}, err
	}
	rate := round3(float64(len(l.samples)) / spent.Seconds())
	l.doc.Results = []Result{distribution(cfg.Metric, cfg.Of, l.samples)}
	if cfg.RateMetric != "" {
		l.doc.Results = append(l.doc.Results, Result{Metric: cfg.RateMetric, Of: cfg.Of, Unit: "1/s", N: len(l.samples), Value: &rate})
	}
	return l.doc, nil
}

type load struct {
	mu      sync.Mutex
	doc     Document        // guarded by mu
	samples []time.Duration // guarded by mu
}

func (l *load) drive(ctx context.Context, n, callers int, once func(context.Context) (time.Duration, error)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for next.Add(1) <= int64(n) && ctx.Err() == nil {
				took, err := once(ctx)
				l.mu.Lock()
				if err == nil {
					l.samples = append(l.samples, took)
				} else {
					l.doc.Failures++
					if len(l.doc.Errors) < 5 {
						l.doc.Errors = append(l.doc.Errors, err.Error())
					}
				}
				l.mu.Unlock()
			}
		})
	}
	wg.Wait()
}
