package etcd

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
)

// Txn is all or nothing.
func (s *Store) Txn(ctx context.Context, conds []store.Cond, then, otherwise []store.Op) (store.Result, error) {
	ctx, stop, err := s.begin(ctx)
	if err != nil {
		return store.Result{}, err
	}
	defer stop()
	if err := s.trusted(ctx); err != nil {
		return store.Result{}, err
	}
	cmps := make([]clientv3.Cmp, 0, len(conds))
	for _, c := range conds {
		switch {
		case c.Absent:
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(c.Key), "=", 0))
		case c.ModRev > 0:
			cmps = append(cmps, clientv3.Compare(clientv3.ModRevision(c.Key), "=", c.ModRev))
		default:
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(c.Key), ">", 0))
		}
	}
	ops, err := s.toOps(then)
	if err != nil {
		return store.Result{}, err
	}
	elseOps, err := s.toOps(otherwise)
	if err != nil {
		return store.Result{}, err
	}
	resp, err := s.cli.Txn(ctx).If(cmps...).Then(ops...).Else(elseOps...).Commit()
	if err != nil {
		return store.Result{}, s.wrote(err)
	}
	if !s.member || !reads(then) || !reads(otherwise) {
		s.suspect.Store(false)
	} // else memory has answered, which says nothing of writes
	res := store.Result{Succeeded: resp.Succeeded, Revision: resp.Header.Revision}
	for _, r := range resp.Responses {
		if rr := r.GetResponseRange(); rr != nil {
			for _, kv := range rr.Kvs {
				res.Pairs = append(res.Pairs, pair(kv))
			}
		}
	}
	return res, nil
}

// Range gives pairs in key order at one revision.
func (s *Store) Range(ctx context.Context, prefix string, opts store.RangeOptions) (store.Page, error) {
	ctx, stop, err := s.begin(ctx)
	if err != nil {
		return store.Page{}, err
	}
	defer stop()
	start, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	if prefix == "" {
		start = "\x00"
	}
	if opts.After >= start {
		start = opts.After + "\x00"
	}
	resp, err := s.cli.Get(ctx, start, clientv3.WithRange(end), clientv3.WithRev(opts.Revision),
		clientv3.WithLimit(int64(opts.Limit)), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend))
	if err != nil {
		return store.Page{}, readError(err)
	}
	s.suspect.Store(false)
	page := store.Page{Revision: resp.Header.Revision, More: resp.More}
	if opts.Revision != 0 {
		page.Revision = opts.Revision
	}
	for _, kv := range resp.Kvs {
		page.Pairs = append(page.Pairs, pair(kv))
	}
	return page, nil
}

// quiet is how long a watch may be without any sign of the store before it ends as Unavailable.
const quiet = 5 * time.Second

// Watch yields events after rev in order.
func (s *Store) Watch(ctx context.Context, prefix string, rev int64) iter.Seq2[store.Event, error] {
	return func(yield func(store.Event, error) bool) {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		if rev == 0 {
			page, err := s.Range(ctx, prefix, store.RangeOptions{Limit: 1})
			if err != nil {
				yield(store.Event{}, err)
				return
			}
			rev = page.Revision
		}
		if s.closed.Load() {
			yield(store.Event{}, unavailable("it is closed"))
			return
		}
		opts := []clientv3.OpOption{clientv3.WithRev(rev + 1), clientv3.WithProgressNotify(), clientv3.WithCreatedNotify()}
		if prefix == "" {
			prefix, opts = "\x00", append(opts, clientv3.WithFromKey())
		} else {
			opts = append(opts, clientv3.WithPrefix())
		}
		events := s.cli.Watch(clientv3.WithRequireLeader(ctx), prefix, opts...)
		tick := time.NewTicker(quiet / 3)
		defer tick.Stop()
		heard := time.Now()
		for {
			select {
			case resp, open := <-events:
				if !open {
					yield(store.Event{}, s.watchEnd(ctx))
					return
				}
				if resp.CompactRevision != 0 {
					yield(store.Event{}, store.ErrCompacted)
					return
				}
				if err := resp.Err(); err != nil {
					yield(store.Event{}, readError(err))
					return
				}
				for _, e := range resp.Events {
					ev := store.Event{Pair: pair(e.Kv), Deleted: e.Type == clientv3.EventTypeDelete}
					if ev.Deleted {
						ev.Value, ev.LeaseID = nil, 0
					}
					if !yield(ev, nil) {
						return
					}
				}
				heard = time.Now() // the time of who watches is no silence of the store
			case <-tick.C:
				if len(events) == 0 && time.Since(heard) > quiet {
					// etcd's client goes on dialling in silence; whoever watches must know that it sees nothing.
					yield(store.Event{}, unavailable("no sign of it for %s", quiet))
					return
				}
				// The answer arrives on events; an error shows as silence.
				_ = s.cli.RequestProgress(clientv3.WithRequireLeader(ctx))
			case <-ctx.Done():
				yield(store.Event{}, context.Cause(ctx))
				return
			}
		}
	}
}

func (s *Store) watchEnd(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return unavailable("the watch ended")
}

// Lease makes a claim that lapses unless kept alive.
func (s *Store) Lease(ctx context.Context, ttl time.Duration) (store.Lease, error) {
	ctx, stop, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	resp, err := s.cli.Grant(ctx, max(1, int64(math.Ceil(ttl.Seconds()))))
	if err != nil {
		return nil, readError(err) // a lease that nobody knows lapses by itself
	}
	return &lease{store: s, id: resp.ID, ttl: time.Duration(resp.TTL) * time.Second}, nil
}

type lease struct {
	store *Store
	id    clientv3.LeaseID
	ttl   time.Duration
}

func (l *lease) ID() int64 { return int64(l.id) }

func (l *lease) KeepAlive(ctx context.Context) error {
	tick := time.NewTicker(l.ttl / 4)
	defer tick.Stop()
	renewed := time.Now()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			asked := time.Now()
			err := l.renew(ctx)
			switch {
			case err == nil:
				renewed = asked
			case errors.Is(err, errdefs.NotFound):
				return errdefs.New(errdefs.NotFound, "lease", "%x has lapsed", l.ID()).Wrap(err)
			case time.Since(renewed) > l.ttl:
				return errdefs.New(errdefs.Unavailable, "lease", "%x not renewed for %s", l.ID(), l.ttl).Wrap(err)
			}
		}
	}
}

func (l *lease) renew(ctx context.Context) error {
	ctx, stop, err := l.store.begin(ctx)
	if err != nil {
		return err
	}
	defer stop()
	_, err = l.store.cli.KeepAliveOnce(ctx, l.id)
	return readError(err)
}

func (l *lease) Revoke(ctx context.Context) error {
	ctx, stop, err := l.store.begin(ctx)
	if err != nil {
		return err
	}
	defer stop()
	_, err = l.store.cli.Revoke(ctx, l.id)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return readError(err)
}

// begin gives a call its limit and, with a cluster, waits for a connection first: what was not sent is Unavailable.
func (s *Store) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if s.closed.Load() {
		return nil, nil, unavailable("it is closed")
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, unavailable("the call was not sent").Wrap(err)
	}
	ctx, stop := context.WithTimeoutCause(ctx, s.limit, fmt.Errorf("no answer of the store in %s: %w", s.limit,
		context.DeadlineExceeded))
	if s.ready != nil {
		if err := s.ready(ctx); err != nil {
			stop()
			return nil, nil, err
		}
	}
	return ctx, stop, nil
}

// trusted asks, after an unanswered write, whether the store answers a read before another write is sent.
func (s *Store) trusted(ctx context.Context) error {
	if !s.suspect.Load() {
		return nil
	}
	if _, err := s.cli.Get(ctx, "/", clientv3.WithKeysOnly(), clientv3.WithLimit(1)); err != nil {
		return readError(err)
	}
	s.suspect.Store(false)
	return nil
}

// wrote turns the error of a transaction into its kind: whatever may have been applied is Unknown.
func (s *Store) wrote(err error) error {
	if known := definite(err); known != nil {
		return known
	}
	s.suspect.Store(true)
	return errdefs.New(errdefs.Unknown, "store", "no answer to a transaction; it may have been applied").
		WithHint("Read before deciding").Wrap(err)
}

func readError(err error) error {
	if err == nil {
		return nil
	}
	if known := definite(err); known != nil {
		return known
	}
	if errors.Is(err, context.Canceled) {
		return errdefs.New(errdefs.Canceled, "store", "the call was canceled").Wrap(err)
	}
	return unavailable("no answer").Wrap(err)
}

// definite gives the error for answers that say what happened; nil when nobody knows.
func definite(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return store.ErrCompacted
	case errors.Is(err, rpctypes.ErrNoSpace):
		return errdefs.New(errdefs.Exhausted, "store", "its database is full").
			WithField("", "quota").WithHint("Room is made once a minute. If it stays full: end jobs and delete images").Wrap(err)
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return errdefs.New(errdefs.NotFound, "lease", "has lapsed").Wrap(err)
	case errors.Is(err, rpctypes.ErrFutureRev), errors.Is(err, rpctypes.ErrDuplicateKey),
		errors.Is(err, rpctypes.ErrEmptyKey), errors.Is(err, rpctypes.ErrTooManyOps),
		errors.Is(err, rpctypes.ErrRequestTooLarge):
		return errdefs.New(errdefs.Invalid, "store", "%v", err).Wrap(err)
	case errors.Is(err, rpctypes.ErrNoLeader), errors.Is(err, rpctypes.ErrTooManyRequests),
		errors.Is(err, rpctypes.ErrNotCapable):
		return unavailable("%v", err).Wrap(err)
	}
	if status.Code(err) == codes.Unauthenticated || status.Code(err) == codes.PermissionDenied {
		return errdefs.New(errdefs.Denied, "store", "%v", err).Wrap(err)
	}
	return nil
}

func unavailable(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Unavailable, "store", "%s", fmt.Sprintf(format, args...)).
		WithRetryAfter(time.Second).WithHint("Try again in a second")
}

// reads reports whether none of these writes.
func reads(ops []store.Op) bool {
	return !slices.ContainsFunc(ops, func(o store.Op) bool { return o.Kind != store.OpGet })
}

func (s *Store) toOps(ops []store.Op) ([]clientv3.Op, error) {
	var local []clientv3.OpOption
	if s.member {
		local = []clientv3.OpOption{clientv3.WithSerializable()}
	}
	out := make([]clientv3.Op, 0, len(ops))
	for _, o := range ops {
		switch o.Kind {
		case store.OpPut:
			out = append(out, clientv3.OpPut(o.Key, string(o.Value), clientv3.WithLease(clientv3.LeaseID(o.Lease))))
		case store.OpDelete:
			out = append(out, clientv3.OpDelete(o.Key))
		case store.OpGet:
			out = append(out, clientv3.OpGet(o.Key, local...))
		case store.OpDeletePrefix:
			out = append(out, clientv3.OpDelete(o.Key, clientv3.WithPrefix()))
		default:
			return nil, errdefs.New(errdefs.Invalid, "store", "operation %d is not known", o.Kind)
		}
	}
	return out, nil
}

func pair(kv *mvccpb.KeyValue) store.Pair {
	return store.Pair{Key: string(kv.Key), Value: kv.Value, ModRev: kv.ModRevision, LeaseID: kv.Lease}
}
