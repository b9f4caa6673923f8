package spawner

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Redial returns a client that connects when it is first used and again after its connection broke, so that it lives
// through restarts of the spawner. A call finds the spawner back within patience or is errdefs.Unavailable; a spawn
// that was under way when the connection broke is never repeated here, since only the caller can undo it.
func Redial(socket, dataID string, patience time.Duration) Client {
	return &redialer{socket: socket, dataID: dataID, patience: patience}
}

type redialer struct {
	socket, dataID string
	patience       time.Duration

	mu     sync.Mutex
	client Client // guarded by mu
	closed bool   // guarded by mu
}

var errAway = errors.New("the spawner is away")

// redialPause is how often a spawner that is away is looked for.
const redialPause = 5 * time.Millisecond

func (r *redialer) Spawn(ctx context.Context, s Spec) (Child, error) {
	c, err := r.get(ctx)
	if err != nil {
		return Child{}, err
	}
	ch, err := c.Spawn(ctx, s)
	if errors.Is(err, errdefs.Unavailable) {
		r.mu.Lock()
		if r.client == c {
			r.client = nil
		}
		r.mu.Unlock()
		_ = c.Close()
	}
	return ch, err
}

func (r *redialer) get(ctx context.Context) (Client, error) {
	ctx, stop := context.WithTimeoutCause(ctx, r.patience, errAway)
	defer stop()
	tick := time.NewTicker(redialPause)
	defer tick.Stop()
	for {
		c, err := r.try(ctx)
		if !errors.Is(err, errdefs.Unavailable) {
			return c, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

// try dials under mu: there is one connection, and whoever waits for mu wants the same one.
func (r *redialer) try(ctx context.Context) (Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errdefs.New(errdefs.FailedPrecondition, "spawner", "the client is closed")
	}
	if r.client == nil {
		c, err := Dial(ctx, r.socket, r.dataID)
		if err != nil {
			return nil, err
		}
		r.client = c
	}
	return r.client, nil
}

func (r *redialer) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.client == nil {
		return nil
	}
	c := r.client
	r.client = nil
	return c.Close()
}
