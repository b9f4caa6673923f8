package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/guest"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Network puts policies in force; *network.Network is one.
type Network interface {
	// Enforce puts a policy in force in place of the one before. After an error that one holds.
	Enforce(ctx context.Context, s wire.Sandbox, link backend.Link) error
	// Expect says what is in force for a sandbox from before this edge.
	Expect(s wire.Sandbox, link backend.Link) error
	Release(ctx context.Context, id string) error
	Counters(ctx context.Context, id string) (wire.Counters, error)
	// CA is the sandbox's certificate authority, in PEM.
	CA(ctx context.Context, id string) ([]byte, error)
	Evaluate(project string, p policy.Policy, phase string, q policy.Question) policy.Verdict
}

// insideLimit bounds the writing of a certificate authority or resolver into a sandbox.
const insideLimit = 10 * time.Second

// network is what Aether is told of a sandbox, but for its address.
func (rec entry) network() wire.Sandbox {
	return wire.Sandbox{ID: string(rec.ID), Project: rec.Project, Policy: rec.Spec.Network, Phase: rec.Phase}
}

// noNetwork is why a policy that allows something is refused here.
func noNetwork(b *box) error {
	e := errdefs.New(errdefs.FailedPrecondition, b.object(), "network: this node cannot enforce a network policy").
		WithField("network", "").WithHint("See what is missing: sandsea doctor")
	e.Feature = node.FeatureEgress
	return e
}

// openNetwork puts the policy of a sandbox in force that is being made.
func (r *Runner) openNetwork(ctx context.Context, b *box, link backend.Link) error {
	if r.cfg.Network == nil {
		return noNetwork(b)
	}
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	return r.cfg.Network.Enforce(ctx, rec.network(), link)
}

// expectNetwork tells what is in force for a sandbox that was found.
func (r *Runner) expectNetwork(ctx context.Context, b *box, inst backend.Instance) error {
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	if !rec.Spec.Network.Open() {
		return nil
	}
	if r.cfg.Network == nil {
		r.cfg.Log.Warn("this node lost its gate: a sandbox stays without network", "sandbox", b.id)
		return nil
	}
	link, err := inst.Link(ctx)
	if err != nil {
		return err
	}
	return r.cfg.Network.Expect(rec.network(), link)
}

// releaseNetwork forgets what was in force.
func (r *Runner) releaseNetwork(ctx context.Context, b *box) error {
	if r.cfg.Network == nil {
		return nil
	}
	return r.cfg.Network.Release(ctx, string(b.id))
}

// SetPolicy replaces a sandbox's network policy, which has been validated, and puts its first phase in force. It returns
// when the new policy holds; after an error the old one does.
func (r *Runner) SetPolicy(ctx context.Context, id sandbox.ID, p policy.Policy) (Snapshot, error) {
	return r.changeNetwork(ctx, id, func(rec *entry) error {
		rec.Spec.Network, rec.Phase = p, p.Start
		return nil
	})
}

// SetPhase puts another phase of a sandbox's policy in force, likewise.
func (r *Runner) SetPhase(ctx context.Context, id sandbox.ID, phase string) (Snapshot, error) {
	return r.changeNetwork(ctx, id, func(rec *entry) error {
		if _, ok := rec.Spec.Network.Phase(phase); !ok {
			var names []string
			for _, p := range rec.Spec.Network.Phases {
				names = append(names, p.Name)
			}
			return errdefs.New(errdefs.Invalid, "sandbox "+id.Short(), "phase: its policy has none named %q", phase).
				WithField("phase", "").WithHint("It has: %s", strings.Join(names, ", "))
		}
		rec.Phase = phase
		return nil
	})
}

// changeNetwork applies change to what the journal has. The kernel and Aether first: an edge that is killed in between
// puts the old policy back, and nobody was answered.
func (r *Runner) changeNetwork(ctx context.Context, id sandbox.ID, change func(*entry) error) (Snapshot, error) {
	b, err := r.find(id)
	if err != nil {
		return Snapshot{}, err
	}
	b.net.Lock() // not step, which a stop must not wait for
	defer b.net.Unlock()
	b.mu.Lock()
	old, inst, table := b.rec, b.inst, b.table
	b.mu.Unlock()
	if old.State != sandbox.Running || inst == nil {
		return Snapshot{}, unready(b)
	}
	rec := old
	if err := change(&rec); err != nil {
		return Snapshot{}, err
	}
	changes := old.Spec.Network.Open() || rec.Spec.Network.Open()
	if changes {
		if err := r.enforce(ctx, b, inst, old, rec); err != nil {
			return Snapshot{}, err
		}
	}
	err = r.commitNetwork(b, inst, rec)
	if err != nil && changes {
		err = errors.Join(err, r.restore(ctx, b, inst, old))
	}
	if err != nil {
		return Snapshot{}, err
	}
	b.cutVisits()
	table.SetEnv(environment(rec))
	return b.snapshot(r.cfg.Now()), nil
}

// commitNetwork journals what is in force by now.
func (r *Runner) commitNetwork(b *box, inst backend.Instance, rec entry) error {
	b.step.Lock()
	defer b.step.Unlock()
	b.mu.Lock()
	now := b.rec
	b.mu.Unlock()
	if now.State != sandbox.Running {
		return unready(b)
	}
	now.Spec.Network, now.Phase, now.Handle = rec.Spec.Network, rec.Phase, []byte(inst.Handle())
	return b.commit(now, WhatNetwork)
}

// enforce puts what rec says in force in place of what old says. After an error what old says is in force.
func (r *Runner) enforce(ctx context.Context, b *box, inst backend.Instance, old, rec entry) error {
	if r.cfg.Network == nil {
		return noNetwork(b)
	}
	link, err := inst.Link(ctx)
	if err != nil {
		return err
	}
	if err := r.cfg.Network.Enforce(ctx, rec.network(), link); err != nil {
		return err
	}
	if err := r.prepare(ctx, b, old, rec); err != nil {
		return errors.Join(err, r.restore(ctx, b, inst, old))
	}
	return nil
}

// prepare writes into a sandbox what its programs need for what rec says and did not for what old says.
func (r *Runner) prepare(ctx context.Context, b *box, old, rec entry) error {
	if !old.Spec.Network.Open() {
		if err := r.putResolver(ctx, b); err != nil {
			return err
		}
	}
	if rec.Spec.Network.InspectTLS && !old.Spec.Network.InspectTLS {
		return r.putCA(ctx, b)
	}
	return nil
}

// restore puts what old says in force after a change that came to nothing further on: what the journal does not know is
// not to be open. Of a sandbox that has ended meanwhile nothing is.
func (r *Runner) restore(ctx context.Context, b *box, inst backend.Instance, old entry) error {
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), undoLimit, errdefs.Deadline)
	defer stop()
	if b.status().State != sandbox.Running {
		return r.releaseNetwork(ctx, b)
	}
	link, err := inst.Link(ctx)
	if err != nil {
		return err
	}
	if old.Spec.Network.Open() {
		return r.cfg.Network.Enforce(ctx, old.network(), link)
	}
	return errors.Join(link.Set(policy.Walls{}), r.releaseNetwork(ctx, b))
}

// services are those that programs are pointed at whenever there is a network: one that the policy rejects answers with
// the rule, which says more than a name that does not resolve.
var services = []string{
	policy.PyPI, policy.NPM, policy.Golang, policy.Crates, policy.Debian, policy.Maven, policy.RubyGems,
}

// guestEnv points a sandbox's programs at Aether.
func guestEnv(rec entry) map[string]string {
	if !rec.Spec.Network.Open() {
		return nil
	}
	return guest.Env(services, rec.Spec.Network.InspectTLS)
}

// putCA writes the certificates that the sandbox's programs are to trust: the image's own, which addresses that are
// dialled directly still show, and the sandbox's.
func (r *Runner) putCA(ctx context.Context, b *box) error {
	pem, err := r.cfg.Network.CA(ctx, string(b.id))
	if err != nil {
		return err
	}
	own, err := b.read(ctx, imageCAs)
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		r.cfg.Log.Info("an image's own certificates are left out", "sandbox", b.id, "err", err)
	}
	return b.write(ctx, guest.CAFile, own+string(pem))
}

// imageCAs is where most images have the certificates that they trust, and maxCAs how much of it is taken over.
const (
	imageCAs = "/etc/ssl/certs/ca-certificates.crt"
	maxCAs   = 2 << 20
)

// read gives a file inside, with a line end behind it.
func (b *box) read(ctx context.Context, path string) (string, error) {
	b.mu.Lock()
	h := b.files
	b.mu.Unlock()
	if h == nil {
		return "", unready(b)
	}
	ctx, stop := context.WithTimeoutCause(ctx, insideLimit, errdefs.Deadline)
	defer stop()
	f, _, err := h.As(chronus.IDs{Groups: []uint32{0}}, "/").Open(ctx, path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxCAs+1))
	if err != nil {
		return "", err
	}
	if len(text) > maxCAs {
		return "", errdefs.New(errdefs.Invalid, path, "is larger than %d MiB", maxCAs>>20)
	}
	return string(text) + "\n", nil
}

// putResolver writes what sandsea-init writes into a sandbox that has a network from the start.
func (r *Runner) putResolver(ctx context.Context, b *box) error {
	return b.write(ctx, "/etc/resolv.conf", "nameserver "+wire.Gateway.String()+"\noptions timeout:1 attempts:5\n")
}

// write makes a file inside as root, whatever is there.
func (b *box) write(ctx context.Context, path, body string) error {
	b.mu.Lock()
	h := b.files
	b.mu.Unlock()
	if h == nil {
		return unready(b)
	}
	ctx, stop := context.WithTimeoutCause(ctx, insideLimit, errdefs.Deadline)
	defer stop()
	root := h.As(chronus.IDs{Groups: []uint32{0}}, "/")
	err := root.Remove(ctx, path, false)
	if err == nil || errors.Is(err, syscall.ENOENT) {
		if err = root.MakeDir(ctx, filepath.Dir(path), 0o755, true); err == nil {
			size := int64(len(body))
			_, err = root.Write(ctx, path, 0o644, &size, strings.NewReader(body))
		}
	}
	if err != nil {
		return fmt.Errorf("write %s into %s: %w", path, b.object(), err)
	}
	return nil
}

// Check says what the policy in force answers.
func (r *Runner) Check(id sandbox.ID, q policy.Question) (policy.Verdict, Snapshot, error) {
	b, err := r.find(id)
	if err != nil {
		return policy.Verdict{}, Snapshot{}, err
	}
	s := b.snapshot(r.cfg.Now())
	if r.cfg.Network == nil {
		return policy.Evaluate(s.Spec.Network, s.Phase, q, nil), s, nil
	}
	return r.cfg.Network.Evaluate(s.Project, s.Spec.Network, s.Phase, q), s, nil
}

// NetUsage is what crossed a sandbox's network.
func (r *Runner) NetUsage(ctx context.Context, id sandbox.ID) (wire.Counters, error) {
	if r.cfg.Network == nil {
		return wire.Counters{}, nil
	}
	return r.cfg.Network.Counters(ctx, string(id))
}

// mostVisits is how many connections of endpoints to servers inside one sandbox may have. One whose caller is gone lasts
// until the server inside closes it, which a hung or hostile one never does.
const mostVisits = 2048

// visit is a connection of an endpoint to a server inside.
type visit struct {
	port uint16
	end  context.CancelCauseFunc
}

// Dial connects to a server inside a sandbox, if the phase in force lets endpoints reach its port; Exhausted when too many are
// connected. allowed ends when a phase comes in force that does not, and with the call: what is carried over the connection
// ends with it.
func (u *Use) Dial(ctx context.Context, port uint16) (c net.Conn, allowed context.Context, err error) {
	v := &visit{port: port}
	allowed, v.end = context.WithCancelCause(context.WithoutCancel(ctx))
	// It is on the list before it is judged, so that no change passes between the two.
	u.b.mu.Lock()
	full := len(u.b.visits) >= mostVisits
	if !full {
		u.b.visits[v] = struct{}{}
	}
	rec, inst := u.b.rec, u.b.inst
	u.b.mu.Unlock()
	defer func() {
		if err != nil {
			u.b.leave(v)
		}
	}()
	if rec.State != sandbox.Running || inst == nil {
		return nil, nil, unready(u.b)
	}
	if full {
		e := errdefs.New(errdefs.Exhausted, u.b.object(), "%d connections to its servers are open", mostVisits).
			WithHint("Have the servers inside close those whose client is gone").WithRetryAfter(time.Second)
		e.Limit = fmt.Sprintf("%d connections", mostVisits)
		return nil, nil, e
	}
	if err := inbound(u.b, rec, port); err != nil {
		return nil, nil, err
	}
	if c, err = inst.Dial(ctx, port); err != nil {
		return nil, nil, err
	}
	u.visits = append(u.visits, v)
	return c, allowed, nil
}

// inbound is why a phase does not let endpoints reach a port; nil: it does.
func inbound(b *box, rec entry, port uint16) error {
	v := rec.Spec.Network.Inbound(rec.Phase, port)
	if v.Allow {
		return nil
	}
	return errdefs.New(errdefs.Denied, b.object(), "port %d: %s (rule %s)", port, v.Reason, v.Rule).WithField("port", "").
		WithHint("Put a phase in force that lets endpoints reach it: sandsea net phase, or sandsea net set")
}

// leave ends visits.
func (b *box) leave(all ...*visit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, v := range all {
		delete(b.visits, v)
		v.end(nil)
	}
}

// cutVisits ends those that the phase in force does not allow.
func (b *box) cutVisits() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for v := range b.visits {
		if err := inbound(b, b.rec, v.port); err != nil {
			v.end(err)
		}
	}
}

// Ended gives a channel that is closed when a sandbox has ended.
func (r *Runner) Ended(id sandbox.ID) (<-chan struct{}, error) {
	b, err := r.find(id)
	if err != nil {
		return nil, err
	}
	return b.ended, nil
}

// Flows is the directory of flow logs.
func (r *Runner) Flows() string { return r.cfg.Flows }

// forgetFlows drops the flow log of an ended sandbox.
func (r *Runner) forgetFlows(id sandbox.ID) error {
	if r.cfg.Flows == "" {
		return nil
	}
	return flowlog.Remove(r.cfg.Flows, string(id))
}
