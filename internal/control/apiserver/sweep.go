package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	sweepEvery = 10 * time.Minute
	firstSweep = 15 * time.Second
	// keyKept is how long a key stands for its create.
	keyKept = 24 * time.Hour
	// jobKeyKept is the same for a key that names a job, until a job can be closed: no sandbox outlives it.
	jobKeyKept = sandbox.MaxTTL + keyKept
	// doubt is the age below which a record without a sandbox may belong to a create in work.
	doubt     = 2 * maxReady
	sweepPage = 500
)

// sweepLoop removes what is no longer promised. Several servers may do it at once: every removal names the revision.
func (s *Server) sweepLoop(ctx context.Context) {
	wait := firstSweep
	for {
		pause(ctx, wait)
		if ctx.Err() != nil {
			return
		}
		wait = sweepEvery
		if err := s.Sweep(ctx, time.Now()); err != nil && ctx.Err() == nil {
			s.log.Info("sweep of records broke off", "err", err)
		}
	}
}

// Sweep removes keys after 24 hours when their sandboxes are over, ends after 24 hours with the records of their creates,
// and records of creates that never became a sandbox. A record of an earlier epoch of a node that answers is a lost
// sandbox: that is written down as its end. It collects layers when that is due.
func (s *Server) Sweep(ctx context.Context, now time.Time) error {
	s.collectDue(ctx, now)
	return errors.Join(
		s.sweep(ctx, keys.CreateKeys, func(p store.Pair) verdict { return s.judgeKey(p, now) }),
		s.sweep(ctx, keys.Ended, func(p store.Pair) verdict {
			project, id, ok := keys.ParseSandbox(p.Key)
			sb, err := sandboxpb.DecodeEnded(p.Value)
			if !ok || err != nil || now.Sub(sb.GetEnd().GetAt().AsTime()) < watcher.EndedKept {
				return verdict{}
			}
			return verdict{ops: []store.Op{store.Delete(p.Key), store.Delete(keys.Sandbox(project, id))}}
		}),
		s.sweep(ctx, keys.Sandboxes, func(p store.Pair) verdict { return s.judge(p, now) }),
	)
}

// verdict is what is done about a record if the conditions hold; without ops it stays.
type verdict struct {
	ops   []store.Op
	conds []store.Cond
}

// judgeKey says what becomes of the key of a create. That of a living sandbox stands longer: a retry must not make a
// second one. Of a node that is not there, or is away, nobody can say what lives: then the key goes with the record of
// the sandbox.
func (s *Server) judgeKey(p store.Pair, now time.Time) verdict {
	var rec createRecord
	if json.Unmarshal(p.Value, &rec) != nil {
		return verdict{}
	}
	kept := keyKept
	if rec.Job != "" {
		kept = jobKeyKept
	}
	if now.Sub(rec.Created) < kept {
		return verdict{}
	}
	gone := verdict{ops: []store.Op{store.Delete(p.Key)}}
	if sb, ok := s.watcher.Sandbox(string(rec.ID)); ok {
		if sandboxpb.Over(sb.GetState()) {
			return gone
		}
		return verdict{}
	}
	if _, _, reachable, there := s.watcher.Node(rec.Node); !there || !reachable {
		gone.conds = []store.Cond{{Key: keys.Sandbox(rec.Project, string(rec.ID)), Absent: true}}
	}
	return gone
}

// judge says what becomes of the record of a create. An end is never overwritten.
func (s *Server) judge(p store.Pair, now time.Time) verdict {
	var rec createRecord
	if json.Unmarshal(p.Value, &rec) != nil {
		return verdict{}
	}
	if _, ok := s.watcher.Sandbox(string(rec.ID)); ok {
		return verdict{} // it lives, or the record goes with that of its end
	}
	_, name, reachable, there := s.watcher.Node(rec.Node)
	if !there || !reachable {
		return verdict{} // nobody can say
	}
	end := keys.EndedSandbox(rec.Project, string(rec.ID))
	switch {
	case s.epoch(rec.Node) > rec.NodeEpoch:
		value, err := sandboxpb.EncodeEnded(lostSandbox(rec, name))
		if err != nil {
			return verdict{}
		}
		return verdict{[]store.Op{store.Put(end, value)}, []store.Cond{{Key: end, Absent: true}}}
	case now.Sub(rec.Created) > doubt:
		return verdict{ops: []store.Op{store.Delete(p.Key)}}
	}
	return verdict{}
}

// sweep walks all pairs under prefix and applies what decide says, each against the revision that it saw.
func (s *Server) sweep(ctx context.Context, prefix string, decide func(store.Pair) verdict) error {
	opts := store.RangeOptions{Limit: sweepPage}
	for {
		page, err := s.store.Range(ctx, prefix, opts)
		if err != nil {
			return err
		}
		for _, p := range page.Pairs {
			v := decide(p)
			if len(v.ops) == 0 {
				continue
			}
			conds := append(v.conds, store.Cond{Key: p.Key, ModRev: p.ModRev})
			if _, err := s.store.Txn(ctx, conds, v.ops, nil); err != nil && !errors.Is(err, errdefs.Unknown) {
				return err
			}
		}
		if !page.More {
			return nil
		}
		// Each page at the newest revision: what moved meanwhile is seen in the next sweep.
		opts.After = page.Pairs[len(page.Pairs)-1].Key
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
