package roster

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/policy"
)

// Flow is one connection of a sandbox. Whoever opens it closes it.
type Flow struct {
	s        *Sandbox
	began    time.Time
	sent     atomic.Int64
	received atomic.Int64
	active   atomic.Int64 // when something was last said, Unix nanoseconds
	ending   sync.Once

	mu       sync.Mutex
	question policy.Question // guarded by mu
	// during are the questions of requests under way on a connection that serves several.
	during  []*policy.Question // guarded by mu
	needs   []func() error     // guarded by mu: what must be true of the policy beside verdicts
	label   Label              // guarded by mu
	cut     func()             // guarded by mu; nil once it was called
	cause   error              // guarded by mu: why it was cut
	failure error              // guarded by mu: of a request on it, the last
	verdict policy.Verdict     // guarded by mu: that let it pass
}

// Label is how the log shows a flow.
type Label struct {
	Name     string // of the host that was meant
	Addr     netip.Addr
	Port     uint16
	Protocol string // tcp, udp, tls, http, connect, socks5
	Service  string // package service, or empty
}

// Open opens a flow for a question, the zero one being for what is judged at each request. cut must end it at once,
// without waiting; it is called at most once. needs are as Needs takes them. An error is the verdict, the need or the limit
// that is in the way: a *Denial.
func (s *Sandbox) Open(q policy.Question, l Label, cut func(), needs ...func() error) (*Flow, error) {
	f := &Flow{s: s, began: time.Now(), question: q, label: l, cut: cut, needs: needs}
	f.active.Store(f.began.UnixNano())
	limits := s.state.Load().limits
	s.mu.Lock()
	if s.gone {
		s.mu.Unlock()
		return nil, errGone
	}
	s.flows[f] = struct{}{}
	n := s.open.Add(1)
	s.mu.Unlock()
	all := s.project.flows.Add(1)
	err := f.check()
	switch {
	case err != nil:
	case n > int64(limits.Flows):
		err = limit("flows", "too many connections are open")
	case all > int64(s.roster.cfg.Limits.ProjectFlows):
		err = errAtDoor
	case limits.Bytes > 0 && s.used() >= limits.Bytes:
		err = limit("bytes", "the sandbox has used up its bytes")
	case q.Name != "":
		// Whoever tells a proxy a name asks the world for it as much as who asks the resolver.
		_, err = s.Resolve(q.Name)
	}
	if err != nil {
		f.ending.Do(func() { // unless the sandbox has ended meanwhile
			f.leave()
			f.remove()
		})
		return nil, err
	}
	s.roster.opened.Add(1)
	return f, nil
}

// judge asks the policy in force. Of several questions the first that is not allowed decides.
func (f *Flow) judge() policy.Verdict {
	f.mu.Lock()
	asked := make([]policy.Question, 0, 1+len(f.during))
	asked = append(asked, f.question)
	for _, q := range f.during {
		asked = append(asked, *q)
	}
	f.mu.Unlock()
	v := policy.Verdict{Allow: true}
	for _, q := range asked {
		if q == (policy.Question{}) {
			continue
		}
		if v = f.s.Judge(q); !v.Allow {
			break
		}
	}
	f.mu.Lock()
	f.verdict = v
	f.mu.Unlock()
	return v
}

// check judges, and asks for what else must be true.
func (f *Flow) check() error {
	if v := f.judge(); !v.Allow {
		return Refusal(v)
	}
	f.mu.Lock()
	needs := slices.Clone(f.needs)
	f.mu.Unlock()
	for _, need := range needs {
		if err := need(); err != nil {
			return err
		}
	}
	return nil
}

// Needs has the flow be cut when a policy comes in force by which need fails: what goes by unseen, or answers, is no matter
// of a verdict. It gives what need says now.
func (f *Flow) Needs(need func() error) error {
	f.mu.Lock()
	f.needs = append(f.needs, need)
	f.mu.Unlock()
	return need()
}

// During has the flow be about one more question for as long as a request takes, until done is called. It gives the
// verdict on that question alone.
func (f *Flow) During(q policy.Question) (v policy.Verdict, done func()) {
	mine := &q
	f.mu.Lock()
	f.during = append(f.during, mine)
	f.mu.Unlock()
	v = f.s.Judge(q)
	done = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.during = slices.DeleteFunc(f.during, func(p *policy.Question) bool { return p == mine })
	}
	if !v.Allow {
		done() // it is told by itself, and is no matter of what else the flow carries
		return v, done
	}
	f.mu.Lock()
	f.verdict = v
	f.mu.Unlock()
	return v, done
}

// Question is what the flow is about, apart from During.
func (f *Flow) Question() policy.Question {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.question
}

// Is tells the log what the flow turned out to be.
func (f *Flow) Is(protocol, service string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.label.Protocol, f.label.Service = protocol, service
}

// Reached tells the log the address on the far side. The flow is about it from then on, if it is about a name.
func (f *Flow) Reached(a netip.Addr) policy.Verdict {
	f.mu.Lock()
	f.label.Addr = a
	if f.question.Name != "" {
		f.question.Addr = a
	}
	f.mu.Unlock()
	return f.judge()
}

// Failed tells the log that a request on the connection could not be answered by its target. The connection goes on.
func (f *Flow) Failed(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failure = err
}

// Sandbox that the flow is of.
func (f *Flow) Sandbox() *Sandbox { return f.s }

// used are the bytes of the sandbox, both ways.
func (s *Sandbox) used() int64 { return s.sent.Load() + s.received.Load() }

// Sent counts bytes that came from the sandbox. An error says that they were too many; the flow must end.
func (f *Flow) Sent(n int) error { return f.count(n, &f.sent, &f.s.sent, &f.s.roster.sent) }

// Received counts bytes that went to the sandbox, likewise.
func (f *Flow) Received(n int) error {
	return f.count(n, &f.received, &f.s.received, &f.s.roster.received)
}

func (f *Flow) count(n int, counters ...*atomic.Int64) error {
	if n == 0 {
		return nil
	}
	for _, c := range counters {
		c.Add(int64(n))
	}
	f.active.Store(time.Now().UnixNano())
	if most := f.s.state.Load().limits.Bytes; most > 0 && f.s.used() > most {
		err := limit("bytes", "the sandbox has used up its bytes")
		f.Cut(err)
		return err
	}
	return nil
}

// Room is how many bytes may pass before they are counted, at most n.
func (f *Flow) Room(n int64) int64 {
	if most := f.s.state.Load().limits.Bytes; most > 0 {
		return max(min(n, most-f.s.used()+1), 1)
	}
	return n
}

// Cut ends the flow from outside.
func (f *Flow) Cut(cause error) {
	f.mu.Lock()
	cut := f.cut
	f.cut = nil
	if cut != nil {
		f.cause = cause
	}
	f.mu.Unlock()
	if cut != nil {
		cut()
	}
}

// Cause is why the flow was cut, nil if it was not.
func (f *Flow) Cause() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cause
}

// Close ends the flow and writes its record. err is how it ended, nil: well. Idempotent; the record is written when it
// returns, whoever closes it.
func (f *Flow) Close(err error) { f.ending.Do(func() { f.close(err) }) }

func (f *Flow) close(err error) {
	f.mu.Lock()
	f.cut = nil
	if f.cause != nil {
		err = f.cause
	} else if err == nil {
		err = f.failure
	}
	e := flowlog.Event{
		Kind: flowlog.Connection, Rule: f.verdict.Rule, Service: f.label.Service, Name: f.label.Name, Address: f.label.Addr,
		Port: f.label.Port, Protocol: f.label.Protocol, Sent: f.sent.Load(), Received: f.received.Load(), Duration: time.Since(f.began),
	}
	f.mu.Unlock()
	if err != nil {
		e.Error = err.Error()
	}
	if d, ok := errors.AsType[*Denial](err); ok {
		e.Denied, e.Rule, e.Error = true, d.Rule, d.Reason
	} else if errors.Is(err, errdefs.Denied) {
		e.Denied = true
	}
	f.leave()
	f.s.Event(e)
	f.remove() // until here, whoever ends the sandbox waits for the record
}

// leave makes room for another flow.
func (f *Flow) leave() {
	f.s.open.Add(-1)
	f.s.project.flows.Add(-1)
}

// remove takes the flow off the list.
func (f *Flow) remove() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	delete(f.s.flows, f)
}

// Deny writes the record of a connection, or of a request on one, that was refused.
func (s *Sandbox) Deny(l Label, err error) {
	e := flowlog.Event{
		Kind: flowlog.Connection, Denied: true, Service: l.Service, Name: l.Name, Address: l.Addr, Port: l.Port,
		Protocol: l.Protocol, Error: err.Error(),
	}
	if d, ok := errors.AsType[*Denial](err); ok {
		e.Rule, e.Error = d.Rule, d.Reason
	}
	s.Event(e)
}
