// Package bench is the harness behind `sandsea bench`: it measures peers side by side and says how sure the figures
// are.
//
// Peers take turns within one run, round by round, on the same root file system, so that what disturbs the machine
// disturbs all of them. Percentiles are nearest rank over all samples; a failure is counted and never dropped in
// silence; the interval of a ratio comes from drawing rounds anew (bootstrap). Peers are measured from outside, as
// their users see them, never by themselves. A Document is what `--json` prints, WriteTable what people read.
package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Schema names the form of a Document. Fields are only added.
const Schema = "sandsea.bench/1"

// Peer is one of those that are compared.
//
// Prepare is called once before everything. Once does the measured thing and its undo, and returns how long the
// measured part took; calls overlap only in the rate phase, and then up to Config.Workers of them. Close is called once
// and leaves nothing, also after a failed Prepare.
type Peer interface {
	Name() string
	Prepare(ctx context.Context) error
	Once(ctx context.Context) (time.Duration, error)
	Close() error
}

// Noter is a Peer with something to say about what it does and does not do.
type Noter interface {
	Notes() []string
}

// Config of a run.
type Config struct {
	// Bench is the name of the run, as "create"; Metric that of its figure, as "create_ready", and RateMetric that of its
	// rate; Title is the head of the table.
	Bench, Metric, RateMetric, Title string
	// Version of what is measured.
	Version string
	// Warmup is how many calls of each peer come first and do not count.
	Warmup int
	// Rounds is how often each peer has its turn.
	Rounds int
	// PerRound is how many samples a peer gives in one round, by name; DefaultPerRound for others.
	PerRound map[string]int
	// Added compares the first peer with the others by how much longer it takes, not by how many times faster it is.
	Added bool
	// RateFor is how long a peer is driven by Workers at once in each round to find its rate. 0: no rate.
	RateFor time.Duration
	// Workers in the rate phase. 0: one per CPU.
	Workers int
	// MaxFailures ends the run: what fails this often is broken, not slow. 0: 10.
	MaxFailures int
	// Seed of the interval's draws.
	Seed uint64
	// Progress, if set, hears of each finished round.
	Progress func(round, of int)
}

// DefaultPerRound is how many samples a peer gives in a round when nothing is said.
const DefaultPerRound = 10

// LeastRounds is of how many rounds an interval can be told: fewer resemble each other too often by chance.
const LeastRounds = 5

// Validate checks the configuration.
func (c Config) Validate() error {
	switch {
	case c.Bench == "" || c.Metric == "":
		return errors.New("bench: a run needs a name and a metric")
	case c.Rounds < 1:
		return fmt.Errorf("bench: %d rounds", c.Rounds)
	case c.Warmup < 0 || c.RateFor < 0 || c.Workers < 0 || c.MaxFailures < 0:
		return errors.New("bench: a negative setting")
	}
	for name, n := range c.PerRound {
		if n < 1 {
			return fmt.Errorf("bench: %d samples a round of %s", n, name)
		}
	}
	return nil
}

// Document is the outcome of a run.
type Document struct {
	Schema  string    `json:"schema"`
	Bench   string    `json:"bench"`
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"`
	Machine Machine   `json:"machine"`
	Results []Result  `json:"results"`
	// Failures counts every call that did not succeed, those of the warm-up included.
	Failures int `json:"failures"`

	Title  string `json:"title,omitempty"`
	Warmup int    `json:"warmup"`
	Rounds int    `json:"rounds"`
	// Steal is the part of the machine's time that its host gave to others.
	Steal float64 `json:"steal"`
	// Load is how many processes ran or waited for a processor, on average over the minute before.
	Load float64 `json:"load"`
	// Notes are what a reader must know to compare.
	Notes []string `json:"notes,omitempty"`
	// Errors are the first failures.
	Errors []string `json:"errors,omitempty"`
}

// Result is one figure: a distribution (P50 to Max) or a Value.
type Result struct {
	Metric string `json:"metric"`
	Of     string `json:"of"`
	// Against is the peer that a ratio or difference compares with.
	Against string   `json:"against,omitempty"`
	Unit    string   `json:"unit"`
	N       int      `json:"n"`
	P50     *float64 `json:"p50,omitempty"`
	P90     *float64 `json:"p90,omitempty"`
	P99     *float64 `json:"p99,omitempty"`
	Max     *float64 `json:"max,omitempty"`
	Value   *float64 `json:"value,omitempty"`
	// Low and High bound Value with a confidence of 95 %; nil after fewer than LeastRounds.
	Low  *float64 `json:"low,omitempty"`
	High *float64 `json:"high,omitempty"`
}

// Join makes one document of the parts of a bench that were measured one after the other.
func Join(name, title string, parts ...Document) Document {
	d := parts[0]
	d.Bench, d.Title = name, title
	for _, p := range parts[1:] {
		// Each part's own steal, by the time that it took.
		if all := d.Seconds + p.Seconds; all > 0 {
			d.Steal = round3((d.Steal*d.Seconds + p.Steal*p.Seconds) / all)
		}
		d.Seconds = round3(d.Seconds + p.Seconds)
		d.Failures += p.Failures
		d.Results = append(slices.Clip(d.Results), p.Results...)
		d.Notes = append(slices.Clip(d.Notes), p.Notes...)
		d.Errors = append(slices.Clip(d.Errors), p.Errors...)
	}
	return d
}

// record is what one peer gave.
type record struct {
	peer   Peer
	rounds [][]time.Duration
	rates  []float64
}

// run is one run under way.
type run struct {
	cfg Config
	mu  sync.Mutex
	// guarded by mu
	failures int
	errs     []string
}

// Run measures the peers and returns the document. It ends with an error when a peer cannot be prepared, fails more
// than MaxFailures times, or ctx ends; what is measured until then is thrown away, since a part of a run is not a run.
// Every peer is closed in any case.
func Run(ctx context.Context, cfg Config, peers ...Peer) (_ Document, err error) {
	if err := cfg.Validate(); err != nil {
		return Document{}, err
	}
	if len(peers) == 0 {
		return Document{}, errors.New("bench: no peers")
	}
	if cfg.Workers == 0 {
		cfg.Workers = runtime.NumCPU()
	}
	if cfg.MaxFailures == 0 {
		cfg.MaxFailures = 10
	}
	started := time.Now()
	var records []*record
	defer func() {
		for _, r := range records {
			if closeErr := r.peer.Close(); closeErr != nil {
				err = errors.Join(err, fmt.Errorf("clean up after %s: %w", r.peer.Name(), closeErr))
			}
		}
	}()
	for _, p := range peers {
		records = append(records, &record{peer: p})
		if err := p.Prepare(ctx); err != nil {
			return Document{}, fmt.Errorf("prepare %s: %w", p.Name(), err)
		}
	}
	b := &run{cfg: cfg}
	for _, r := range records {
		if _, err := b.samples(ctx, r.peer, cfg.Warmup); err != nil {
			return Document{}, err
		}
	}
	m, err := newMeter()
	if err != nil {
		return Document{}, err
	}
	for round := range cfg.Rounds {
		if err := b.round(ctx, records, round); err != nil {
			return Document{}, err
		}
		if cfg.Progress != nil {
			cfg.Progress(round+1, cfg.Rounds)
		}
	}
	m.started = started
	d := Document{
		Bench: cfg.Bench, Version: cfg.Version, Failures: b.failures, Title: cfg.Title, Warmup: cfg.Warmup, Rounds: cfg.Rounds, Errors: b.errs,
	}
	if err := m.read(&d); err != nil {
		return Document{}, err
	}
	d.Results = results(cfg, records)
	for _, r := range records {
		if n, ok := r.peer.(Noter); ok {
			d.Notes = append(d.Notes, n.Notes()...)
		}
	}
	return d, nil
}

// round gives each peer its turn, another one first each time, so that none always follows the same.
func (b *run) round(ctx context.Context, records []*record, round int) error {
	for i := range records {
		r := records[(i+round)%len(records)]
		n, ok := b.cfg.PerRound[r.peer.Name()]
		if !ok {
			n = DefaultPerRound
		}
		s, err := b.samples(ctx, r.peer, n)
		if err != nil {
			return err
		}
		r.rounds = append(r.rounds, s)
	}
	if b.cfg.RateFor == 0 {
		return nil
	}
	for i := range records {
		r := records[(i+round)%len(records)]
		rate, err := b.rate(ctx, r.peer)
		if err != nil {
			return err
		}
		r.rates = append(r.rates, rate)
	}
	return nil
}

// samples calls a peer n times. A failure gives no sample.
func (b *run) samples(ctx context.Context, p Peer, n int) ([]time.Duration, error) {
	out := make([]time.Duration, 0, n)
	for range n {
		d, err := p.Once(ctx)
		if err == nil {
			out = append(out, d)
			continue
		}
		if err := b.failed(ctx, p, err); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// rate drives a peer by all workers for a while and gives whole calls, undo included, per second.
func (b *run) rate(ctx context.Context, p Peer) (float64, error) {
	var mu sync.Mutex
	done := 0
	var first error
	start := time.Now()
	var workers sync.WaitGroup
	for range b.cfg.Workers {
		workers.Go(func() {
			for time.Since(start) < b.cfg.RateFor {
				_, err := p.Once(ctx)
				if err != nil {
					err = b.failed(ctx, p, err)
				} else {
					mu.Lock()
					done++
					mu.Unlock()
				}
				if err != nil {
					mu.Lock()
					first = err
					mu.Unlock()
					return
				}
			}
		})
	}
	workers.Wait()
	return float64(done) / time.Since(start).Seconds(), first
}

// failed counts a failure and returns an error when the run must end.
func (b *run) failed(ctx context.Context, p Peer, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("interrupted: %w", cause)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures++
	if len(b.errs) < 5 {
		b.errs = append(b.errs, fmt.Sprintf("%s: %v", p.Name(), err))
	}
	if b.failures > b.cfg.MaxFailures {
		return fmt.Errorf("%d failures, the last of %s: %w", b.failures, p.Name(), err)
	}
	return nil
}

// results makes the figures: each peer's distribution and rate, then how the first compares with each other one.
func results(cfg Config, records []*record) []Result {
	var out []Result
	for _, r := range records {
		out = append(out, distribution(cfg.Metric, r.peer.Name(), slices.Concat(r.rounds...)))
	}
	for _, r := range records {
		if len(r.rates) == 0 || cfg.RateMetric == "" {
			continue
		}
		v := round3(median(r.rates))
		out = append(out, Result{Metric: cfg.RateMetric, Of: r.peer.Name(), Unit: "1/s", N: len(r.rates), Value: &v})
	}
	random := rand.New(rand.NewPCG(cfg.Seed, 0))
	for _, other := range records[1:] {
		c, suffix, unit := comparison(faster), "_ratio", "x"
		if cfg.Added {
			c, suffix, unit = added, "_added", "ms"
		}
		v, low, high, ok := compare(records[0].rounds, other.rounds, c, random)
		if !ok {
			continue
		}
		v, low, high = round3(v), round3(low), round3(high)
		r := Result{
			Metric: cfg.Metric + suffix, Of: records[0].peer.Name(), Against: other.peer.Name(), Unit: unit, N: cfg.Rounds, Value: &v,
		}
		if cfg.Rounds >= LeastRounds {
			r.Low, r.High = &low, &high
		}
		out = append(out, r)
	}
	return out
}
