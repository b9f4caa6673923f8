package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/backend"
)

const (
	// upkeepEvery is how often an embedded member looks at the size of its database.
	upkeepEvery = time.Minute
	// upkeepLimit bounds one round; to write the database anew takes seconds for each GiB that lives.
	upkeepLimit = 5 * time.Minute
)

var (
	errUpkeepLimit = fmt.Errorf("the database was not made smaller in %s: %w", upkeepLimit, context.DeadlineExceeded)
	errClosed      = errors.New("the store is closed")
)

// keepRoom makes room in an embedded member's database, now and from time to time until the store is closed. Compaction
// alone gives no space back, so that a database that has once met its quota would stay full for ever, and nobody could
// reach it to help: what listens, if anything, is for the records of nodes.
func (s *Store) keepRoom(ctx context.Context, e *embed.Etcd, quota int64, every time.Duration, log *slog.Logger) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	round := func(ctx context.Context) {
		if err := s.makeRoom(ctx, e.Server.Backend(), quota, log); err != nil && ctx.Err() == nil {
			log.Warn("make room in the store's database", "err", err)
		}
	}
	round(ctx) // whoever starts on a full one writes at once
	ctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				round(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	s.stop = func() {
		stop(errClosed)
		wg.Wait()
		e.Close()
	}
}

// makeRoom writes the database anew without what is free in it, when it has met its quota or is near it for no more
// reason than that, and lifts the alarm that refuses all writes. Calls wait meanwhile.
func (s *Store) makeRoom(ctx context.Context, db backend.Backend, quota int64, log *slog.Logger) error {
	ctx, stop := context.WithTimeoutCause(ctx, upkeepLimit, errUpkeepLimit)
	defer stop()
	st, err := s.cli.Status(ctx, "")
	if err != nil {
		return fmt.Errorf("ask for the size: %w", err)
	}
	alarms, err := s.cli.AlarmList(ctx)
	if err != nil {
		return fmt.Errorf("ask for alarms: %w", err)
	}
	full := false
	for _, a := range alarms.Alarms {
		full = full || a.Alarm == pb.AlarmType_NOSPACE
	}
	if !full && (st.DbSize < quota-quota/4 || st.DbSizeInUse > st.DbSize/2) {
		return nil
	}
	if full { // its history is all that can be given up; who watches lists again
		if _, err := s.cli.Compact(ctx, st.Header.GetRevision(), clientv3.WithCompactPhysical()); err != nil &&
			!errors.Is(err, rpctypes.ErrCompacted) {
			return fmt.Errorf("drop its history: %w", err)
		}
	}
	if err := db.Defrag(); err != nil { // etcd's client of a member in this process has no way to it
		return fmt.Errorf("defragment: %w", err)
	}
	if full {
		if _, err := s.cli.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
			return fmt.Errorf("lift the alarm: %w", err)
		}
	}
	log.Info("the store's database was written anew", "bytes", st.DbSize, "in_use", st.DbSizeInUse, "was_full", full)
	return nil
}
