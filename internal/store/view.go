package store

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

const (
	// pageSize is how many pairs All reads at once.
	pageSize = 1000
	// againAfter is the pause before a watch that broke begins anew.
	againAfter = time.Second
)

// All calls each for every pair under prefix, in key order and all at one revision, which it gives: a watch goes on
// from there.
func All(ctx context.Context, s Store, prefix string, each func(Pair)) (int64, error) {
	opts := RangeOptions{Limit: pageSize}
	for {
		page, err := s.Range(ctx, prefix, opts)
		if err != nil {
			return 0, err
		}
		for _, p := range page.Pairs {
			each(p)
		}
		if !page.More {
			return page.Revision, nil
		}
		opts.Revision, opts.After = page.Revision, page.Pairs[len(page.Pairs)-1].Key
	}
}

// Repeat runs a list-and-watch of what until ctx ends: again at once when its revision was compacted away, after a
// pause when it broke otherwise.
func Repeat(ctx context.Context, log *slog.Logger, what string, run func(context.Context) error) {
	for ctx.Err() == nil {
		err := run(ctx)
		if ctx.Err() != nil || errors.Is(err, ErrCompacted) {
			continue
		}
		log.Debug("watch broke", "of", what, "err", err)
		select {
		case <-time.After(againAfter):
		case <-ctx.Done():
		}
	}
}
