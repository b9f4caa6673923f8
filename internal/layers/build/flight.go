package build

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const reportEvery = 500 * time.Millisecond

// flight is an import that several callers may wait for. It ends when it is done or when nobody waits any more.
type flight struct {
	cancel context.CancelCauseFunc
	done   chan struct{}

	result Result // set before done is closed
	err    error

	waiters int // guarded by Builder.mu
	p       *progress
}

var errNobody = errors.New("nobody waits for it any more")

// join runs work, or waits for a run of the same kind and key. done is called once the work is over, or at once if that
// of another is joined.
func (b *Builder) join(
	ctx context.Context, kind, key string, report Report, done func(),
	work func(context.Context, *progress) (Result, error),
) (Result, error) {
	b.mu.Lock()
	f := b.flights[kind+" "+key]
	if f == nil || key == "" {
		// The work's context is its own: it goes on while one of its callers is there.
		wctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		f = &flight{cancel: cancel, done: make(chan struct{}), p: &progress{}}
		if key != "" {
			b.flights[kind+" "+key] = f
		}
		go func() {
			defer cancel(nil)
			res, err := work(wctx, f.p)
			done()
			b.mu.Lock()
			if b.flights[kind+" "+key] == f {
				delete(b.flights, kind+" "+key)
			}
			b.mu.Unlock()
			f.p.end()
			f.result, f.err = res, err
			close(f.done)
		}()
	} else {
		defer done()
	}
	f.waiters++
	b.mu.Unlock()
	err := f.wait(ctx, report)
	b.mu.Lock()
	f.waiters--
	last := f.waiters == 0
	if last && err != nil && b.flights[kind+" "+key] == f {
		delete(b.flights, kind+" "+key) // the next caller starts anew
	}
	b.mu.Unlock()
	if err != nil {
		if last {
			f.cancel(errNobody)
			<-f.done // what it staged is gone when the caller hears of it
		}
		return Result{}, err
	}
	return f.result, f.err
}

// wait reports progress until the flight is done. It fails only when ctx ends first.
func (f *flight) wait(ctx context.Context, report Report) error {
	if report == nil {
		report = func(Progress) {}
	}
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	seen := 0
	for {
		changed := f.p.changed()
		now, ended := f.p.since(seen)
		seen += len(ended)
		for _, p := range ended {
			report(p)
		}
		if now.Stage != "" {
			report(now)
		}
		select {
		case <-f.done:
			_, ended := f.p.since(seen)
			for _, p := range ended {
				report(p)
			}
			return nil
		case <-ctx.Done():
			select {
			case <-f.done:
				return nil
			default:
			}
			return fmt.Errorf("import: %w", context.Cause(ctx))
		case <-tick.C:
		case <-changed:
		}
	}
}

// progress is the state of an import: the stages that are over and the present one.
type progress struct {
	mu    sync.Mutex
	over  []Progress    // guarded by mu
	now   Progress      // guarded by mu
	event chan struct{} // guarded by mu; closed and replaced at a change of stage
}

// stage ends the present stage and begins another.
func (p *progress) stage(name, unit string, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked()
	p.now = Progress{Stage: name, Unit: unit, Total: total}
	p.changeLocked()
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked()
	p.changeLocked()
}

func (p *progress) endLocked() {
	if p.now.Stage == "" {
		return
	}
	p.now.Finished = true
	p.over = append(p.over, p.now)
	p.now = Progress{}
}

func (p *progress) changeLocked() {
	if p.event != nil {
		close(p.event)
		p.event = nil
	}
}

// add moves the present stage on.
func (p *progress) add(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.Done += n
}

// detail says what is at work.
func (p *progress) detail(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.Detail = text
}

// set replaces what the present stage says of itself.
func (p *progress) set(done, total int64, detail string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.Done, p.now.Total, p.now.Detail = done, total, detail
}

// within begins a stage unless it is the present one.
func (p *progress) within(name, unit string) {
	p.mu.Lock()
	same := p.now.Stage == name
	p.mu.Unlock()
	if !same {
		p.stage(name, unit, 0)
	}
}

func (p *progress) changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.event == nil {
		p.event = make(chan struct{})
	}
	return p.event
}

func (p *progress) since(seen int) (Progress, []Progress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now, p.over[seen:len(p.over):len(p.over)]
}
