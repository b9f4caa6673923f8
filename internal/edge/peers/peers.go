// Package peers gets the layers that a node lacks from nodes that have them.
//
// It owns the search (the registrations in the store, in a random order), the transfer (node.v1 ReadBlob, resumed at
// its offset when a line breaks, from the same node or another) and the bound on how many run at once. A blob is in the
// store only when its digest is right, whoever sent it. Who alone sent a wrong one is not asked for it again; of
// several nobody knows who was wrong, so each is asked for all of it. However many ask for one layer, it is fetched
// once; a fetch goes on when they have all gone, so that who asks again finds more of it. It deletes nothing: the
// collector does.
//
// Everything may be called at once. Close ends the fetches.
package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	// atOnce is how many blobs are fetched at the same time.
	atOnce = 4
	// rounds is how often every node is asked for a blob that broke off.
	rounds = 3
	// flightLimit bounds the fetch of a layer, stall the silence of a node in it.
	flightLimit = 30 * time.Minute
	stall       = 20 * time.Second
	dialLimit   = 2 * time.Second
	maxMessage  = 1 << 20
)

var (
	errClosed = errors.New("the edge shuts down")
	errLimit  = fmt.Errorf("not fetched in %s: %w", flightLimit, context.DeadlineExceeded)
	errStall  = fmt.Errorf("silent for %s: %w", stall, context.DeadlineExceeded)
)

// Config of Layers.
type Config struct {
	Blobs blob.Creator
	Store store.Store
	// Self is this node, which is not asked.
	Self node.Number
	// Identity calls other nodes; nil: this node belongs to no cluster, and asks nobody.
	Identity *cluster.Identity
	// Free tells the bytes that are free where blobs lie, of which Reserve stay so.
	Free    func() (int64, error)
	Reserve int64
	Log     *slog.Logger
}

// Layers are the layers that this node has or can get.
type Layers struct {
	cfg  Config
	turn chan struct{}
	ctx  context.Context // ends with Close; for the flights
	stop context.CancelCauseFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	whole   map[image.Digest]bool    // guarded by mu: seen complete since the last collection
	flights map[image.Digest]*flight // guarded by mu
}

// flight is one fetch; err is set before done is closed.
type flight struct {
	done chan struct{}
	err  error
}

// New makes it; nothing is fetched yet.
func New(cfg Config) *Layers {
	l := &Layers{
		cfg: cfg, turn: make(chan struct{}, atOnce), whole: map[image.Digest]bool{}, flights: map[image.Digest]*flight{},
	}
	l.ctx, l.stop = context.WithCancelCause(context.Background())
	return l
}

// Close ends the fetches. Idempotent.
func (l *Layers) Close() error {
	l.stop(errClosed)
	l.wg.Wait()
	return nil
}

// Collected says that layers may have been removed.
func (l *Layers) Collected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.whole = map[image.Digest]bool{} // not cleared: what is being looked at is noted in the one before
}

// Ensure returns when all of these layers are here. Refused when one cannot be had; Deadline or Canceled when ctx ends
// first, and the fetch goes on.
func (l *Layers) Ensure(ctx context.Context, layers []image.Digest) error {
	var waiting []*flight
	for _, d := range layers {
		l.mu.Lock()
		whole := l.whole
		known := whole[d]
		l.mu.Unlock()
		if known {
			continue
		}
		if _, here, err := l.look(ctx, d); err != nil {
			return err
		} else if here {
			l.mu.Lock()
			whole[d] = true
			l.mu.Unlock()
			continue
		}
		waiting = append(waiting, l.join(d))
	}
	for _, f := range waiting {
		select {
		case <-f.done:
			if f.err != nil {
				return f.err
			}
		case <-ctx.Done():
			kind := errdefs.Canceled
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				kind = errdefs.Deadline
			}
			return errdefs.New(kind, "", "image: its layers were not here in time").Wrap(context.Cause(ctx)).
				WithHint("They are still being fetched. Try again, with more time")
		}
	}
	return nil
}

// look reports whether a layer is here, with its manifest if that is.
func (l *Layers) look(ctx context.Context, d image.Digest) (m build.Manifest, here bool, err error) {
	if m, err = build.ReadManifest(ctx, l.cfg.Blobs, d); err == nil {
		for _, part := range []image.Digest{m.Meta, m.Data} {
			if _, err = l.cfg.Blobs.Stat(ctx, part); err != nil {
				break
			}
		}
	}
	if errors.Is(err, errdefs.NotFound) {
		return m, false, nil
	}
	return m, err == nil, err
}

// join gives the flight that fetches d, begun if there is none.
func (l *Layers) join(d image.Digest) *flight {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.flights[d]
	if f != nil {
		return f
	}
	f = &flight{done: make(chan struct{})}
	l.flights[d] = f
	l.wg.Go(func() {
		ctx, stop := context.WithTimeoutCause(l.ctx, flightLimit, errLimit)
		defer stop()
		err := l.fetchLayer(ctx, d)
		l.mu.Lock()
		delete(l.flights, d)
		l.mu.Unlock()
		if err != nil {
			l.cfg.Log.Info("layer not fetched", "layer", d, "err", err)
			f.err = refusal(err)
		}
		close(f.done)
	})
	return f
}

// refusal is what a create hears: this node has nothing of it, and another may be asked.
func refusal(err error) error {
	if errors.Is(err, errdefs.Refused) {
		return err
	}
	return errdefs.New(errdefs.Refused, "node", "image: %s", errdefs.From(err).Error()).Wrap(err)
}

// fetchLayer brings everything of a layer here. The manifest first: a collection meanwhile keeps what it names. One that
// came before the manifest may still have taken what followed, so it is looked at again.
func (l *Layers) fetchLayer(ctx context.Context, d image.Digest) error {
	began := time.Now()
	for range rounds {
		m, here, err := l.look(ctx, d)
		if err != nil {
			return err
		}
		if here {
			l.cfg.Log.Info("layer fetched", "layer", d, "bytes", m.MetaBytes+m.DataBytes, "took", time.Since(began))
			return nil
		}
		if m.Meta == "" {
			if err := l.fetch(ctx, d, build.MaxManifest); err != nil {
				return err
			}
			if m, err = build.ReadManifest(ctx, l.cfg.Blobs, d); err != nil {
				return err
			}
		}
		if err := l.room(m.MetaBytes + m.DataBytes); err != nil {
			return err
		}
		var wg sync.WaitGroup
		errs := make([]error, 2)
		wg.Go(func() { errs[0] = l.fetch(ctx, m.Meta, m.MetaBytes) })
		if m.Data != m.Meta {
			wg.Go(func() { errs[1] = l.fetch(ctx, m.Data, m.DataBytes) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return errdefs.New(errdefs.Unavailable, "layer "+string(d), "was collected while it was fetched")
}

func (l *Layers) room(need int64) error {
	free, err := l.cfg.Free()
	if err != nil {
		return fmt.Errorf("ask for free disk space: %w", err)
	}
	if free-l.cfg.Reserve < need {
		return errdefs.New(errdefs.Refused, "node", "image: its layer has %d bytes, %d bytes of disk are free", need, free)
	}
	return nil
}

// fetch brings one blob of at most so many bytes here.
func (l *Layers) fetch(ctx context.Context, d image.Digest, most int64) error {
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if _, err := l.cfg.Blobs.Stat(ctx, d); err == nil {
		return nil
	}
	list, err := l.others(ctx)
	if err != nil {
		return err
	}
	s := &staging{blobs: l.cfg.Blobs, digest: d, most: most}
	defer s.drop()
	var last error
	alone := false // no node goes on where another stopped
	for range rounds {
		left := list[:0]
		for _, p := range list {
			if alone && s.sender != p.Number {
				s.drop()
			}
			err := l.readFrom(ctx, p, s)
			if err == nil {
				if err = s.commit(ctx); err == nil {
					return nil
				}
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			l.cfg.Log.Debug("blob not read", "blob", d, "node", p.Name, "at", s.size, "err", err)
			if errors.Is(err, errLocal) {
				return err
			}
			wrong := errors.Is(err, errdefs.DataLoss)
			alone = alone || wrong && s.mixed
			if !errors.Is(err, errdefs.NotFound) && (!wrong || s.mixed) {
				left = append(left, p) // there may be more to have
			}
			last = err
		}
		list = left
	}
	e := errdefs.New(errdefs.Refused, "node", "image: no node that answers has blob %.19s", d)
	if last != nil {
		e = e.Wrap(last)
	}
	return e
}

// others lists the other nodes of the cluster, in a random order, so that all of them give alike.
func (l *Layers) others(ctx context.Context) (list []node.Registration, err error) {
	if l.cfg.Identity == nil {
		return nil, nil
	}
	_, err = store.All(ctx, l.cfg.Store, keys.Nodes, func(p store.Pair) {
		var r node.Registration
		if json.Unmarshal(p.Value, &r) == nil && r.Number != l.cfg.Self && !strings.HasPrefix(r.Address, "unix:") {
			list = append(list, r)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("ask who has the image: %w", err)
	}
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list, nil
}

// readFrom reads on where s ends, to the end of the blob.
func (l *Layers) readFrom(ctx context.Context, p node.Registration, s *staging) error {
	if err := s.open(ctx); err != nil {
		return err
	}
	transport := &http.Transport{
		DialContext: (&net.Dialer{Timeout: dialLimit}).DialContext, TLSClientConfig: l.cfg.Identity.DialNode(p.Name),
		DisableCompression: true, ReadBufferSize: 256 << 10,
	}
	defer transport.CloseIdleConnections()
	edge := nodev1connect.NewEdgeServiceClient(&http.Client{Transport: transport}, "https://"+p.Address,
		connect.WithReadMaxBytes(maxMessage), connect.WithAcceptCompression("gzip", nil, nil))
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	silence := time.AfterFunc(stall, func() { stop(errStall) })
	defer silence.Stop()
	st, err := edge.ReadBlob(ctx, connect.NewRequest(&nodev1.ReadBlobRequest{Digest: string(s.digest), Offset: s.size}))
	if err != nil {
		return errwire.FromConnect(err)
	}
	defer func() { _ = st.Close() }()
	for st.Receive() {
		silence.Reset(stall)
		if err := s.write(p.Number, st.Msg().GetData()); err != nil {
			return err
		}
	}
	if err := st.Err(); err != nil {
		return errwire.FromConnect(err)
	}
	return nil
}

// errLocal marks what went wrong on this machine, which no other node can make good.
var errLocal = errors.New("on this node")

// staging is a blob on its way. One goroutine uses it.
type staging struct {
	blobs  blob.Creator
	digest image.Digest
	most   int64

	w      blob.Writer // nil: nothing is staged
	size   int64
	sender node.Number // who sent last
	mixed  bool        // what is or was staged last has more than one sender
}

func (s *staging) open(ctx context.Context) (err error) {
	if s.w != nil {
		return nil
	}
	s.size, s.mixed = 0, false
	if s.w, err = s.blobs.Create(ctx); err != nil {
		return fmt.Errorf("%w: %w", errLocal, err)
	}
	return nil
}

func (s *staging) drop() {
	if s.w != nil {
		_ = s.w.Abort()
		s.w = nil
	}
}

func (s *staging) write(from node.Number, p []byte) error {
	s.mixed = s.mixed || s.size > 0 && s.sender != from
	s.sender = from
	if s.size+int64(len(p)) > s.most {
		s.drop()
		return errdefs.New(errdefs.DataLoss, "blob "+string(s.digest), "what the node sends has more than %d bytes", s.most)
	}
	n, err := s.w.Write(p)
	s.size += int64(n)
	if err != nil {
		s.drop()
		return fmt.Errorf("%w: %w", errLocal, err)
	}
	return nil
}

// commit makes the blob visible if it is the right one, and drops it if not.
func (s *staging) commit(ctx context.Context) error {
	if got := s.w.Digest(); got != s.digest {
		s.drop()
		return errdefs.New(errdefs.DataLoss, "blob "+string(s.digest), "what the node sent has digest %s", got)
	}
	w := s.w
	s.w = nil
	if _, err := w.Commit(ctx); err != nil {
		return fmt.Errorf("%w: %w", errLocal, err)
	}
	return nil
}
