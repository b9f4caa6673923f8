// Package mem is the store in memory, for tests and simulation: the same words and the same edge cases as etcd, nothing
// durable. It passes the suite of store/conform.
//
// Safe for concurrent use. Every mutation takes one lock; watchers read the history behind it and are woken by a closed
// channel, so a slow watcher holds nobody up.
package mem

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
)

// Config of a Store; the zero value is good.
type Config struct {
	// History is how many events are kept for watchers and for ranges at an old revision; 0 means 100,000.
	History int
}

// Store is an in-memory store.Store.
type Store struct {
	history int

	mu      sync.Mutex
	rev     int64                 // guarded by mu
	kept    int64                 // guarded by mu; events with a revision above it are all in log
	pairs   map[string]store.Pair // guarded by mu
	log     []store.Event         // guarded by mu; ModRev ascending
	old     map[string][]version  // guarded by mu; what keys held before, for ranges at a revision
	leases  map[int64]*lease      // guarded by mu
	leaseID int64                 // guarded by mu
	changed chan struct{}         // guarded by mu; closed and replaced at every change
	closed  bool                  // guarded by mu
	away    bool                  // guarded by mu
	lose    int                   // guarded by mu; answers of transactions to lose
}

// version is what a key held from a revision on.
type version struct {
	rev     int64
	pair    store.Pair
	deleted bool
}

// New makes an empty store.
func New(cfg Config) *Store {
	return &Store{
		history: cmp.Or(cfg.History, 100_000), pairs: map[string]store.Pair{}, old: map[string][]version{},
		leases: map[int64]*lease{}, changed: make(chan struct{}), rev: 1, kept: 1,
	}
}

// SetAway makes every call fail as if the store could not be reached, until it is called with false.
func (s *Store) SetAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
	s.wakeLocked()
}

// LoseAnswers makes the next n transactions take effect while their answers are lost.
func (s *Store) LoseAnswers(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lose = n
}

// Compact forgets all history up to and including rev.
func (s *Store) Compact(rev int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compactLocked(min(rev, s.rev))
	s.wakeLocked()
}

// Close ends all watches. Later calls fail.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	for _, l := range s.leases {
		l.timer.Stop()
	}
	s.wakeLocked()
	return nil
}

// Txn is all or nothing.
func (s *Store) Txn(ctx context.Context, conds []store.Cond, then, otherwise []store.Op) (store.Result, error) {
	if err := ctx.Err(); err != nil {
		return store.Result{}, unavailable("transaction not sent").Wrap(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usableLocked(); err != nil {
		return store.Result{}, err
	}
	if err := checkOps(then, otherwise); err != nil {
		return store.Result{}, err
	}
	ops, res := then, store.Result{Succeeded: true}
	for _, c := range conds {
		if !s.holdsLocked(c) {
			ops, res.Succeeded = otherwise, false
			break
		}
	}
	for _, o := range ops {
		if o.Kind == store.OpPut && o.Lease != 0 {
			if _, ok := s.leases[o.Lease]; !ok {
				return store.Result{}, errdefs.New(errdefs.NotFound, "lease", "%x has lapsed", o.Lease)
			}
		}
	}
	rev := s.rev + 1
	var events []store.Event
	for _, o := range ops {
		switch o.Kind {
		case store.OpGet:
			if p, ok := s.pairs[o.Key]; ok {
				res.Pairs = append(res.Pairs, clone(p))
			}
		case store.OpPut:
			p := store.Pair{Key: o.Key, Value: slices.Clone(o.Value), ModRev: rev, LeaseID: o.Lease}
			s.setLocked(p, false)
			events = append(events, store.Event{Pair: p})
		case store.OpDelete:
			events = s.deleteLocked(o.Key, rev, events)
		case store.OpDeletePrefix:
			for _, k := range s.underLocked(o.Key) {
				events = s.deleteLocked(k, rev, events)
			}
		}
	}
	s.commitLocked(rev, events)
	res.Revision = s.rev
	if s.lose > 0 {
		s.lose--
		return store.Result{}, errdefs.New(errdefs.Unknown, "store", "the answer of a transaction did not arrive")
	}
	return res, nil
}

// Range gives pairs in key order.
func (s *Store) Range(ctx context.Context, prefix string, opts store.RangeOptions) (store.Page, error) {
	if err := ctx.Err(); err != nil {
		return store.Page{}, unavailable("range not sent").Wrap(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usableLocked(); err != nil {
		return store.Page{}, err
	}
	at := cmp.Or(opts.Revision, s.rev)
	if at > s.rev {
		return store.Page{}, errdefs.New(errdefs.Invalid, "store", "revision %d is in the future", at)
	}
	if at < s.kept {
		return store.Page{}, store.ErrCompacted
	}
	page := store.Page{Revision: at}
	for _, k := range s.underLocked(prefix) {
		if k <= opts.After && opts.After != "" {
			continue
		}
		p, ok := s.atLocked(k, at)
		if !ok {
			continue
		}
		if opts.Limit > 0 && len(page.Pairs) == opts.Limit {
			page.More = true
			break
		}
		page.Pairs = append(page.Pairs, clone(p))
	}
	return page, nil
}

// Watch yields events after rev in order.
func (s *Store) Watch(ctx context.Context, prefix string, rev int64) iter.Seq2[store.Event, error] {
	return func(yield func(store.Event, error) bool) {
		s.mu.Lock()
		if rev == 0 {
			rev = s.rev
		}
		s.mu.Unlock()
		for {
			s.mu.Lock()
			err, changed := s.usableLocked(), s.changed
			var batch []store.Event
			switch {
			case err != nil:
			case rev < s.kept:
				err = store.ErrCompacted
			default:
				i, _ := slices.BinarySearchFunc(s.log, rev+1, func(e store.Event, r int64) int { return cmp.Compare(e.ModRev, r) })
				for _, e := range s.log[i:] {
					if strings.HasPrefix(e.Key, prefix) {
						batch = append(batch, e)
					}
				}
				rev = s.rev
			}
			s.mu.Unlock()
			if err != nil {
				yield(store.Event{}, err)
				return
			}
			for _, e := range batch {
				e.Pair = clone(e.Pair)
				if !yield(e, nil) {
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(store.Event{}, context.Cause(ctx))
				return
			}
		}
	}
}

// Lease makes a claim that lapses after ttl.
func (s *Store) Lease(ctx context.Context, ttl time.Duration) (store.Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, unavailable("lease not asked").Wrap(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usableLocked(); err != nil {
		return nil, err
	}
	s.leaseID++
	l := &lease{store: s, id: s.leaseID, ttl: max(ttl, time.Second), gone: make(chan struct{})}
	l.timer = time.AfterFunc(l.ttl, l.lapse)
	s.leases[l.id] = l
	return l, nil
}

// lease implements store.Lease; its keys go when the timer fires.
type lease struct {
	store *Store
	id    int64
	ttl   time.Duration
	timer *time.Timer
	gone  chan struct{}
}

func (l *lease) ID() int64 { return l.id }

func (l *lease) KeepAlive(ctx context.Context) error {
	tick := time.NewTicker(l.ttl / 3)
	defer tick.Stop()
	for {
		select {
		case <-l.gone:
			return errdefs.New(errdefs.NotFound, "lease", "%x has lapsed", l.id)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			l.store.mu.Lock()
			if _, live := l.store.leases[l.id]; live && l.store.usableLocked() == nil {
				l.timer.Reset(l.ttl)
			}
			l.store.mu.Unlock()
		}
	}
}

func (l *lease) Revoke(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return unavailable("revoke not sent").Wrap(err)
	}
	l.store.mu.Lock()
	defer l.store.mu.Unlock()
	if err := l.store.usableLocked(); err != nil {
		return err
	}
	l.dropLocked()
	return nil
}

func (l *lease) lapse() {
	l.store.mu.Lock()
	defer l.store.mu.Unlock()
	if !l.store.closed {
		l.dropLocked()
	}
}

func (l *lease) dropLocked() {
	s := l.store
	if _, live := s.leases[l.id]; !live {
		return
	}
	l.timer.Stop()
	delete(s.leases, l.id)
	close(l.gone)
	var events []store.Event
	for _, k := range slices.Sorted(maps.Keys(s.pairs)) {
		if s.pairs[k].LeaseID == l.id {
			events = s.deleteLocked(k, s.rev+1, events)
		}
	}
	s.commitLocked(s.rev+1, events)
}

func (s *Store) usableLocked() error {
	switch {
	case s.closed:
		return unavailable("it is closed")
	case s.away:
		return unavailable("it is away")
	}
	return nil
}

func (s *Store) holdsLocked(c store.Cond) bool {
	p, ok := s.pairs[c.Key]
	switch {
	case c.Absent:
		return !ok
	case c.ModRev > 0:
		return ok && p.ModRev == c.ModRev
	default:
		return ok
	}
}

func (s *Store) setLocked(p store.Pair, deleted bool) {
	if deleted {
		delete(s.pairs, p.Key)
	} else {
		s.pairs[p.Key] = p
	}
	s.old[p.Key] = append(s.old[p.Key], version{rev: p.ModRev, pair: p, deleted: deleted})
}

func (s *Store) deleteLocked(key string, rev int64, events []store.Event) []store.Event {
	if _, ok := s.pairs[key]; !ok {
		return events
	}
	p := store.Pair{Key: key, ModRev: rev}
	s.setLocked(p, true)
	return append(events, store.Event{Pair: p, Deleted: true})
}

func (s *Store) commitLocked(rev int64, events []store.Event) {
	if len(events) == 0 {
		return
	}
	s.rev = rev
	s.log = append(s.log, events...)
	if len(s.log) > 2*s.history {
		s.compactLocked(s.log[len(s.log)-s.history].ModRev - 1)
	}
	s.wakeLocked()
}

func (s *Store) compactLocked(rev int64) {
	if rev <= s.kept {
		return
	}
	s.kept = rev
	i, _ := slices.BinarySearchFunc(s.log, rev+1, func(e store.Event, r int64) int { return cmp.Compare(e.ModRev, r) })
	s.log = slices.Clone(s.log[i:])
	for k, vs := range s.old {
		last := -1
		for j, v := range vs {
			if v.rev <= rev {
				last = j
			}
		}
		switch {
		case last < 0:
		case vs[last].deleted && last == len(vs)-1:
			delete(s.old, k)
		default:
			s.old[k] = slices.Clone(vs[last:])
		}
	}
}

func (s *Store) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// underLocked lists every key under prefix that lives or lived, sorted.
func (s *Store) underLocked(prefix string) []string {
	var out []string
	for k := range s.old {
		if strings.HasPrefix(k, prefix) {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

func (s *Store) atLocked(key string, rev int64) (store.Pair, bool) {
	for _, v := range slices.Backward(s.old[key]) {
		if v.rev <= rev {
			return v.pair, !v.deleted
		}
	}
	return store.Pair{}, false
}

func clone(p store.Pair) store.Pair {
	p.Value = slices.Clone(p.Value)
	return p
}

// checkOps refuses what etcd refuses: two writes of one key in one list, and operations without a key.
func checkOps(lists ...[]store.Op) error {
	for _, ops := range lists {
		seen := map[string]bool{}
		for _, o := range ops {
			switch {
			case o.Key == "":
				return errdefs.New(errdefs.Invalid, "store", "an operation without a key")
			case o.Kind == store.OpPut && seen[o.Key]:
				return errdefs.New(errdefs.Invalid, "store", "two writes of %q in one transaction", o.Key)
			case o.Kind == store.OpPut:
				seen[o.Key] = true
			}
		}
	}
	return nil
}

func unavailable(why string) *errdefs.Error {
	return errdefs.New(errdefs.Unavailable, "store", "%s", why).
		WithRetryAfter(time.Second).WithHint("Try again in a second")
}

var _ store.Store = (*Store)(nil)
