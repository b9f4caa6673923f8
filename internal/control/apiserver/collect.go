package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	collectLimit = 2 * time.Minute
	// collectEvery is how often layers are collected though nothing happened here: nodes were away, other servers died,
	// sandboxes ended, and what was made lately was kept.
	collectEvery = time.Hour
)

var errCollectLimit = fmt.Errorf("not collected in %s: %w", collectLimit, context.DeadlineExceeded)

// leave notes that there may be layers that no image names any more.
func (i *imports) leave() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.left = true
}

// due tells whether there is anything to collect at a time.
func (i *imports) due(now time.Time) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if now.Sub(i.hourly) >= collectEvery {
		i.hourly, i.left = now, true
	}
	return i.left
}

// collectLoop collects what imports have left, or have kept others from collecting, as soon as they are over.
func (s *Server) collectLoop(ctx context.Context) {
	for {
		select {
		case <-s.imports.over:
			s.collectDue(ctx, time.Now())
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) collectDue(ctx context.Context, now time.Time) {
	if s.imports.due(now) {
		s.collect(ctx)
	}
}

// collect lets every node remove the blobs of layers that no image names and gives the bytes freed. While an import runs
// nothing is collected, since its layers have no name yet; its end does it, or the next sweep if it runs on another
// server. A failure costs disk, not truth, so it is only logged, and the next collection makes it good.
func (s *Server) collect(ctx context.Context) int64 {
	s.imports.collecting.Lock()
	defer s.imports.collecting.Unlock()
	s.imports.leave() // before the try: an import that ends now sees it
	// Not waited for: an import may take hours, and who waits to write holds up all imports that begin meanwhile.
	if !s.imports.naming.TryLock() {
		s.log.Debug("layers not collected: an import runs")
		return 0
	}
	defer s.imports.naming.Unlock()
	page, err := s.store.Range(ctx, keys.Imports, store.RangeOptions{Limit: 1})
	if err != nil || len(page.Pairs) > 0 {
		s.log.Debug("layers not collected", "imports", len(page.Pairs), "err", err)
		return 0
	}
	s.imports.mu.Lock()
	s.imports.left = false
	s.imports.mu.Unlock()
	keep, err := s.catalogue.layers(ctx)
	if err != nil {
		s.log.Warn("layers not collected", "err", err)
		return 0
	}
	ctx, stop := context.WithTimeoutCause(ctx, collectLimit, errCollectLimit)
	defer stop()
	var freed int64
	for _, n := range s.watcher.View().Nodes {
		client, name, reachable, ok := s.watcher.Node(n.Number)
		if !ok || !reachable {
			continue
		}
		req := connect.NewRequest(&nodev1.CollectRequest{Keep: keep})
		speak(req.Header(), iam.Caller{Principal: cmp.Or(caller(ctx).Principal, "platform")})
		resp, err := client.Edge.Collect(ctx, req)
		if err != nil {
			s.log.Info("layers not collected", "node", name, "err", err)
			continue
		}
		freed += resp.Msg.GetFreedBytes()
	}
	return freed
}
