package ui

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Progress shows stages of long work on standard error: a live block on a terminal, repainted at most ten times a second;
// elsewhere plain lines, at the start and end of each stage and every ten seconds, also when there is no news. Clear
// ends it.
type Progress struct {
	io    *IO
	now   func() time.Time
	began time.Time
	every time.Duration // between looks at whether to show what is known again; 0: never

	mu      sync.Mutex
	stages  []*stage  // guarded by mu
	painted int       // lines of the live block; guarded by mu
	last    time.Time // of the last paint or plain line; guarded by mu

	stop chan struct{} // closed by Clear; guarded by mu, nil while nothing ticks
	done sync.WaitGroup
}

type stage struct {
	name, text  string
	done, total int64
	unit        string
	began       time.Time
	took        time.Duration
	finished    bool
}

// NewProgress starts the clock.
func (s *IO) NewProgress() *Progress {
	return &Progress{io: s, now: time.Now, began: time.Now(), every: 500 * time.Millisecond}
}

// Update tells where a stage stands. total 0 is unknown.
func (p *Progress) Update(name string, done, total int64, unit, detail string, finished bool) {
	if p.io.Quiet {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tickLocked()
	now := p.now()
	i := slices.IndexFunc(p.stages, func(s *stage) bool { return s.name == name })
	fresh := i < 0
	if fresh {
		began := now
		if len(p.stages) == 0 { // it may have been kept quiet for a while
			began = p.began
		}
		p.stages = append(p.stages, &stage{name: name, began: began})
		i = len(p.stages) - 1
	}
	st := p.stages[i]
	ended := finished && !st.finished
	st.done, st.total, st.unit, st.text = done, total, unit, Text(detail)
	if ended {
		st.finished, st.took = true, now.Sub(st.began)
	}
	if p.io.ErrTTY {
		if ended || fresh || now.Sub(p.last) >= 100*time.Millisecond {
			p.paintLocked(now)
		}
		return
	}
	if ended || fresh || now.Sub(p.last) >= plainEvery {
		p.plainLocked(st, ended, now)
	}
}

// plainEvery is the time between two plain lines of one stage.
const plainEvery = 10 * time.Second

func (p *Progress) plainLocked(st *stage, ended bool, now time.Time) {
	word := ""
	if ended {
		word = "done: "
	}
	at := now.Sub(p.began)
	line := fmt.Sprintf("%02d:%04.1f %s %s%s", int(at.Minutes()), at.Seconds()-60*float64(int(at.Minutes())),
		st.name, word, st.line(now))
	fmt.Fprintln(p.io.Err, strings.TrimRight(line, " "))
	p.last = now
}

// tickLocked starts what shows again what is known while no news comes.
func (p *Progress) tickLocked() {
	if p.stop != nil || p.every == 0 {
		return
	}
	p.stop = make(chan struct{})
	stop := p.stop
	p.done.Go(func() {
		for pause(stop, p.every) {
			p.again()
		}
	})
}

// again shows the stages that are under way as they are known.
func (p *Progress) again() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	i := slices.IndexFunc(p.stages, func(s *stage) bool { return !s.finished })
	switch {
	case i < 0:
	case p.io.ErrTTY && now.Sub(p.last) >= p.every:
		p.paintLocked(now)
	case !p.io.ErrTTY && now.Sub(p.last) >= plainEvery:
		p.plainLocked(p.stages[i], false, now)
	}
}

// Clear removes the live block, so that what follows starts on a clean line.
func (p *Progress) Clear() {
	p.mu.Lock()
	if p.stop != nil {
		close(p.stop)
		p.stop = nil
	}
	p.mu.Unlock()
	p.done.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eraseLocked()
}

func (p *Progress) eraseLocked() {
	if p.painted > 0 {
		fmt.Fprintf(p.io.Err, "\x1b[%dA\x1b[J", p.painted)
		p.painted = 0
	}
}

func (p *Progress) paintLocked(now time.Time) {
	p.eraseLocked()
	for _, st := range p.stages {
		line := fmt.Sprintf("%-9s %s", st.name, st.line(now))
		fmt.Fprintln(p.io.Err, p.io.Middle(line, p.io.Width-1))
		p.painted++
	}
	p.last = now
}

// line is the state of a stage as one line without its name.
func (s *stage) line(now time.Time) string {
	if s.finished {
		return strings.TrimSpace(fmt.Sprintf("%-50s %s", s.amount(), Took(s.took)))
	}
	out := s.amount()
	if s.total > 0 && s.done > 0 {
		out += "  " + bar(s.done, s.total, 20)
		if spent := now.Sub(s.began); spent > time.Second {
			rate := float64(s.done) / spent.Seconds()
			if s.unit == "bytes" {
				out += "  " + LongSize(int64(rate)) + "/s"
			}
			if s.done < s.total {
				out += "  ETA " + eta(time.Duration(float64(s.total-s.done)/rate*float64(time.Second)))
			}
		}
	}
	return out
}

// eta is a time to come in whole seconds: "6 s", "8:15 min".
func eta(d time.Duration) string {
	if d = d.Round(time.Second); d < time.Minute {
		return fmt.Sprintf("%d s", int(d.Seconds()))
	}
	return Took(d)
}

func (s *stage) amount() string {
	var out string
	switch {
	case s.unit == "bytes" && s.total > 0:
		out = LongSize(s.done) + " / " + LongSize(s.total)
	case s.unit == "bytes":
		out = LongSize(s.done)
	case s.total > 0:
		out = fmt.Sprintf("%d / %d %s", s.done, s.total, s.unit)
	case s.done > 0:
		out = fmt.Sprintf("%d %s", s.done, s.unit)
	}
	return strings.TrimSpace(out + " " + s.text)
}

func bar(done, total int64, width int) string {
	n := int(min(done, total) * int64(width) / total)
	if n >= width {
		return "[" + strings.Repeat("=", width) + "]"
	}
	return "[" + strings.Repeat("=", n) + ">" + strings.Repeat("-", width-n-1) + "]"
}
