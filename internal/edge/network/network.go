// Package network puts the policies of this node's sandboxes in force: in Aether, which judges everything that leaves a
// sandbox, and in the kernel's walls, which let pass less than Aether would ever be asked about.
//
// It owns what Aether is told: the policy of each sandbox as it should be in force, so that an Aether that was restarted
// is told everything again before anything passes. It keeps no policy beyond that; the runner's journal does.
//
// When a policy changes Aether learns of it first and the walls follow: Aether is the stricter of the two at any time, so
// nothing passes in between that neither policy allows. While there is no Aether nothing passes at all, and a change
// waits for it a little and then fails.
package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/policy"
)

// patience is how long a change waits for an Aether that is being started again.
const patience = 5 * time.Second

// rememberEvery is how often counters are asked for.
const rememberEvery = 2 * time.Second

// dropLimit is how long an end waits for an Aether that does not answer.
const dropLimit = 2 * time.Second

// reportLimit bounds how long counters and denials of the kernel wait for Aether; later denials are dropped.
const reportLimit = time.Second

// Aether is the line to the process; *wire.Conn is one.
type Aether interface {
	Sync(ctx context.Context, all []wire.Sandbox) error
	Put(ctx context.Context, s wire.Sandbox) error
	Drop(ctx context.Context, id string) (wire.Counters, error)
	Counters(ctx context.Context, ids []string) (map[string]wire.Counters, error)
	CA(ctx context.Context, id string) ([]byte, error)
	Denials(ctx context.Context, list []wire.Denial) error
}

// Config of a Network.
type Config struct {
	// Grants are the parts of the platform's deny list that the operator opened for a project; nil: none.
	Grants func(project string) policy.Grants
	// Secret tells whether sandboxes of a project may use one of the operator's secrets; nil: none.
	Secret func(project, name string) bool
	Log    *slog.Logger
}

// Network is what this node enforces. All methods may be called at once; those for one sandbox do not overlap, but for
// Release, which does not wait for an Enforce.
type Network struct {
	cfg Config

	mu     sync.Mutex
	line   Aether                  // guarded by mu: nil while there is none
	change chan struct{}           // guarded by mu: closed when line is replaced
	want   map[string]wire.Sandbox // guarded by mu: by id, each with the counters that were told last
}

// New makes a Network that has no Aether yet.
func New(cfg Config) *Network {
	return &Network{cfg: cfg, change: make(chan struct{}), want: map[string]wire.Sandbox{}}
}

// Connect hands over the line to another Aether, which is told everything first.
func (n *Network) Connect(ctx context.Context, line Aether) error {
	n.mu.Lock()
	defer n.mu.Unlock() // no change may slip in between what it is told and its being the line
	all := slices.SortedFunc(maps.Values(n.want), func(a, b wire.Sandbox) int { return a.Addr.Compare(b.Addr) })
	if err := line.Sync(ctx, all); err != nil {
		return fmt.Errorf("tell aether of %d sandboxes: %w", len(all), err)
	}
	n.line = line
	close(n.change)
	n.change = make(chan struct{})
	return nil
}

// Remember asks for the counters again and again, until ctx ends: limits of bytes hold over a sandbox's life, also when
// Aether does not live as long. What moved since the last answer is not counted then.
func (n *Network) Remember(ctx context.Context) {
	tick := time.NewTicker(rememberEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			n.remember(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (n *Network) remember(ctx context.Context) {
	n.mu.Lock()
	line := n.line
	ids := slices.Collect(maps.Keys(n.want))
	n.mu.Unlock()
	if line == nil || len(ids) == 0 {
		return
	}
	ctx, stop := context.WithTimeoutCause(ctx, reportLimit, errdefs.Deadline)
	defer stop()
	all, err := line.Counters(ctx, ids)
	if err != nil {
		n.cfg.Log.Debug("counters of sandboxes", "err", err)
		return
	}
	n.counted(all)
}

// Enforce puts a policy and a phase of it in force for a sandbox, whatever was before. After an error the old one holds; of
// a sandbox that was released meanwhile nothing does, and the error is NotFound.
// Denied says that the policy needs a grant of the operator's.
func (n *Network) Enforce(ctx context.Context, s wire.Sandbox, link backend.Link) error {
	if err := s.Policy.Granted(n.grants(s.Project)); err != nil {
		return err
	}
	if err := n.secrets(s); err != nil {
		return err
	}
	s.Addr = link.Addr()
	n.mu.Lock()
	old, known := n.want[s.ID]
	s.Before = old.Before
	n.want[s.ID] = s
	n.mu.Unlock()
	err := n.put(ctx, s)
	if err == nil {
		err = link.Set(policy.Compile(s.Policy, s.Phase, n.grants(s.Project)))
	}
	n.mu.Lock()
	_, wanted := n.want[s.ID]
	switch {
	case err == nil || !wanted:
	case known:
		n.want[s.ID] = old
	default:
		delete(n.want, s.ID)
	}
	n.mu.Unlock()
	if err == nil && wanted {
		return nil
	}
	// The walls were not moved, or not as they should be: what they let pass is judged by Aether, which goes back.
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), patience, errdefs.Deadline)
	defer stop()
	switch {
	case !wanted:
		// It was released meanwhile, and Aether was told of it again behind that. Its link goes, if it has not.
		_ = link.Set(policy.Walls{})
		if drop := n.drop(ctx, s.ID); drop != nil && !errors.Is(drop, errdefs.Unavailable) && !errors.Is(drop, errdefs.NotFound) {
			err = errors.Join(err, drop)
		}
		return errors.Join(errdefs.New(errdefs.NotFound, "sandbox "+s.ID, "it ended before its network policy was in force"), err)
	case known:
		err = errors.Join(err, n.put(ctx, old), link.Set(policy.Compile(old.Policy, old.Phase, n.grants(old.Project))))
	default:
		err = errors.Join(err, link.Set(policy.Walls{}), n.drop(ctx, s.ID))
	}
	return fmt.Errorf("put the network policy of sandbox %s in force: %w", s.ID, err)
}

// secrets checks that the secrets which a policy names are there for its project.
func (n *Network) secrets(s wire.Sandbox) error {
	for i, ph := range s.Policy.Phases {
		for j, r := range ph.Rules {
			if r.Secret == "" || n.cfg.Secret != nil && n.cfg.Secret(s.Project, r.Secret) {
				continue
			}
			field := fmt.Sprintf("network.phases[%d].rules[%d].secret", i, j)
			return errdefs.New(errdefs.Denied, "", "%s: there is no secret %q for project %s", field, r.Secret, s.Project).
				WithField(field, "").WithHint("The operator names secrets in aether.toml of the node")
		}
	}
	return nil
}

// Expect says what is in force for a sandbox that lives on from an edge before, and puts its walls up anew. An Aether
// that connects later is told.
func (n *Network) Expect(s wire.Sandbox, link backend.Link) error {
	s.Addr = link.Addr()
	n.mu.Lock()
	n.want[s.ID] = s
	n.mu.Unlock()
	return link.Set(policy.Compile(s.Policy, s.Phase, n.grants(s.Project)))
}

// Inherit takes over what an Aether that is about to be ended has counted, which nobody who begins anew can know.
func (n *Network) Inherit(ctx context.Context, last Aether) error {
	n.mu.Lock()
	ids := slices.Collect(maps.Keys(n.want))
	n.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, reportLimit, errNoAether)
	defer stop()
	all, err := last.Counters(ctx, ids)
	if err != nil {
		return err
	}
	n.counted(all)
	return nil
}

// counted notes counters.
func (n *Network) counted(all map[string]wire.Counters) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, c := range all {
		if s, ok := n.want[id]; ok {
			s.Before = c
			n.want[id] = s
		}
	}
}

// Release forgets a sandbox that has ended. Its link is the backend's to give back.
func (n *Network) Release(ctx context.Context, id string) error {
	n.mu.Lock()
	_, known := n.want[id]
	delete(n.want, id)
	n.mu.Unlock()
	if !known {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, dropLimit, errNoAether)
	defer stop()
	err := n.drop(ctx, id)
	if errors.Is(err, errdefs.Unavailable) || errors.Is(err, errdefs.NotFound) {
		return nil // the next Aether is told of those that are left; one that only slept finds the message
	}
	return err
}

// Counters are what a sandbox has moved; zero for one without network.
func (n *Network) Counters(ctx context.Context, id string) (wire.Counters, error) {
	n.mu.Lock()
	line := n.line
	_, known := n.want[id]
	n.mu.Unlock()
	if !known || line == nil {
		return wire.Counters{}, nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, reportLimit, errNoAether)
	defer stop()
	all, err := line.Counters(ctx, []string{id})
	return all[id], err
}

// CA is the certificate authority of a sandbox whose policy inspects TLS, in PEM.
func (n *Network) CA(ctx context.Context, id string) (pem []byte, err error) {
	err = n.ask(ctx, func(ctx context.Context, line Aether) error {
		pem, err = line.CA(ctx, id)
		return err
	})
	return pem, err
}

// Evaluate says what the policy of a sandbox answers to a question.
func (n *Network) Evaluate(project string, p policy.Policy, phase string, q policy.Question) policy.Verdict {
	return policy.Evaluate(p, phase, q, n.grants(project))
}

// Report passes on what the kernel's walls rejected, until the channel is closed. What no Aether takes soon is lost to
// the flow log.
func (n *Network) Report(denials <-chan wire.Denial) {
	for d := range denials {
		list := []wire.Denial{d}
		for more := true; more && len(list) < 256; {
			select {
			case next, ok := <-denials:
				if more = ok; ok {
					list = append(list, next)
				}
			default:
				more = false
			}
		}
		n.mu.Lock()
		line := n.line
		n.mu.Unlock()
		if line == nil {
			continue
		}
		ctx, stop := context.WithTimeoutCause(context.Background(), reportLimit, errdefs.Deadline)
		if err := line.Denials(ctx, list); err != nil {
			n.cfg.Log.Debug("denials are not in the flow log", "denials", len(list), "err", err)
		}
		stop()
	}
}

func (n *Network) grants(project string) policy.Grants {
	if n.cfg.Grants == nil {
		return nil
	}
	return n.cfg.Grants(project)
}

func (n *Network) put(ctx context.Context, s wire.Sandbox) error {
	return n.ask(ctx, func(ctx context.Context, line Aether) error { return line.Put(ctx, s) })
}

func (n *Network) drop(ctx context.Context, id string) error {
	n.mu.Lock()
	line := n.line
	n.mu.Unlock()
	if line == nil {
		return errNoAether
	}
	_, err := line.Drop(ctx, id)
	return err
}

var errNoAether = errdefs.New(errdefs.Unavailable, "network", "aether does not answer").WithRetryAfter(time.Second)

// ask does something with the line, and once more with the next when the line breaks meanwhile: what is asked of it may
// be repeated.
func (n *Network) ask(ctx context.Context, do func(context.Context, Aether) error) error {
	ctx, stop := context.WithTimeoutCause(ctx, patience, errNoAether)
	defer stop()
	for {
		n.mu.Lock()
		line, change := n.line, n.change
		n.mu.Unlock()
		if line != nil {
			err := do(ctx, line)
			if ctx.Err() != nil {
				return errors.Join(context.Cause(ctx), err)
			}
			if !errors.Is(err, errdefs.Unavailable) {
				return err
			}
		}
		select {
		case <-change:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
