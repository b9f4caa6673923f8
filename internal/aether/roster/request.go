package roster

import (
	"context"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// HTTP requests of one sandbox at once, which hold their headers: so many are served, as many again wait for their turn,
// for so long. What it has said of others, in bytes, is bounded too.
const (
	mostServed  = 64
	mostWaiting = 64
	turnWithin  = 30 * time.Second
	mostUnbegun = 4 << 20
)

var (
	errCrowd  = limit("requests", "too many requests wait for their turn")
	errTurn   = limit("requests", "too many requests are under way")
	errHeld   = limit("requests", "too many requests have begun and are not said to the end")
	errAtDoor = limit("project_flows", "too many connections of the project are open")
)

// Request calls serve when it is a request's turn: with nil, or with why there was none in time. It returns an error
// without having called serve when too many wait already, or ctx ends: then the request should be forgotten at once.
func (s *Sandbox) Request(ctx context.Context, serve func(error)) error {
	defer s.asked.Add(-1)
	if s.asked.Add(1) > mostServed+mostWaiting {
		return errCrowd
	}
	wait, stop := context.WithTimeoutCause(ctx, turnWithin, errdefs.Deadline)
	defer stop()
	select {
	case s.turns <- struct{}{}:
		stop()
		defer func() { <-s.turns }()
		serve(nil)
		return nil
	case <-wait.Done():
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	serve(errTurn)
	return nil
}

// Hold counts bytes of requests that have not begun, -n what was counted before. An error, of which nothing is counted,
// says that they are too many.
func (s *Sandbox) Hold(n int) error {
	if s.unbegun.Add(int64(n)) > mostUnbegun && n > 0 {
		s.unbegun.Add(int64(-n))
		return errHeld
	}
	return nil
}

// Arrive counts a connection that is no flow yet, as far as a limit of the project goes, until leave is called, which is
// idempotent.
func (s *Sandbox) Arrive() (leave func(), err error) {
	leave = sync.OnceFunc(func() { s.project.flows.Add(-1) })
	if s.project.flows.Add(1) > int64(s.roster.cfg.Limits.ProjectFlows) {
		leave()
		return nil, errAtDoor
	}
	return leave, nil
}
