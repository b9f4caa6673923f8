package aether

import (
	"reflect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// handler is what an edge's calls act on.
type handler process

// Sync implements wire.Handler.
func (h *handler) Sync(all []wire.Sandbox) error { return h.roster.Sync(all) }

// Put implements wire.Handler.
func (h *handler) Put(s wire.Sandbox) error { return h.roster.Put(s) }

// Drop implements wire.Handler.
func (h *handler) Drop(id string) (wire.Counters, error) {
	n, err := h.roster.Drop(id)
	h.authorities.Forget(id)
	h.flows.Forget(id)
	return n, err
}

// Counters implements wire.Handler.
func (h *handler) Counters(ids []string) map[string]wire.Counters { return h.roster.Counters(ids) }

// CA implements wire.Handler.
func (h *handler) CA(id string) ([]byte, error) {
	if id == "" {
		return nil, errdefs.New(errdefs.Invalid, "aether", "ca: no sandbox is named")
	}
	return h.authorities.PEM(id)
}

// Denials implements wire.Handler.
func (h *handler) Denials(all []wire.Denial) {
	for _, d := range all {
		box, ok := h.roster.ByAddr(d.Addr)
		if !ok {
			continue // it ended meanwhile
		}
		v := box.Judge(policy.Question{Addr: d.To.Addr(), Port: d.To.Port(), Protocol: d.Protocol})
		if v.Allow { // by a policy that came in force since
			v = policy.Verdict{Rule: policy.RuleDefault, Reason: "it was rejected before the policy in force"}
		}
		if !d.To.IsValid() { // many at once
			v.Reason = "too many different addresses at once: they are not kept"
		}
		box.Event(flowlog.Event{
			Kind: flowlog.Connection, Denied: true, Rule: v.Rule, Address: d.To.Addr(), Port: d.To.Port(),
			Protocol: string(d.Protocol), Count: d.Count, Error: v.Reason,
		})
	}
}

// Services implements wire.Handler.
func (h *handler) Services() []wire.ServiceState { return h.shelf.states() }

// Upstreams implements wire.Handler. What is told again changes nothing.
func (h *handler) Upstreams(all upstream.Upstreams) error {
	h.shelf.mu.Lock()
	same := reflect.DeepEqual(h.shelf.upstreams, all)
	h.shelf.mu.Unlock()
	if !same {
		h.services.Use(h.shelf.use(all))
	}
	return nil
}

var _ wire.Handler = (*handler)(nil)

var _ roster.Log = (*flowlog.Store)(nil)
