package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// Handler is what an edge's calls act on; they come one after the other. The methods are those of Conn.
type Handler interface {
	Sync(all []Sandbox) error
	Put(s Sandbox) error
	Drop(id string) (Counters, error)
	Counters(ids []string) map[string]Counters
	CA(id string) ([]byte, error)
	Denials(all []Denial)
	Services() []ServiceState
	Upstreams(all upstream.Upstreams) error
}

// Server is Aether's end. One edge is served at a time: a new connection means a new edge, and ends the one before.
type Server struct {
	dataID  string
	handler Handler
	log     *slog.Logger
	conns   sync.WaitGroup

	mu   sync.Mutex
	edge *peer // guarded by mu
}

// NewServer makes a Server for the data directory with this id.
func NewServer(dataID string, h Handler, log *slog.Logger) *Server {
	return &Server{dataID: dataID, handler: h, log: log}
}

// Serve accepts edges until ctx ends.
func (s *Server) Serve(ctx context.Context, ln *scm.Listener) error {
	defer s.conns.Wait()
	defer func() { s.replace(nil) }()
	for {
		c, err := ln.Accept(ctx)
		if ctx.Err() != nil {
			if err == nil {
				_ = c.Close()
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("aether: accept: %w", err)
		}
		p, err := s.greet(ctx, c)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, io.EOF) { // the edge looks who listens, and says nothing
				s.log.Warn("aether refuses a connection", "err", err)
			}
			_ = c.Close()
			continue
		}
		s.replace(p)
		s.conns.Go(func() {
			if err := p.serve(ctx); err != nil {
				s.log.Warn("aether loses its edge", "err", err)
			}
		})
	}
}

// greet checks the peer before anything else is read. A peer that says nothing holds up the next one for greetLimit.
func (s *Server) greet(ctx context.Context, c *scm.Conn) (*peer, error) {
	ctx, stop := context.WithTimeoutCause(ctx, greetLimit, errNoGreeting)
	defer stop()
	cred, err := c.Peer()
	if err != nil {
		return nil, err
	}
	if cred.UID != 0 {
		return nil, fmt.Errorf("the peer has uid %d", cred.UID)
	}
	p := newPeer(c, s.session())
	r, err := p.read(ctx, make([]byte, maxFrame+1))
	if err != nil {
		return nil, err
	}
	scm.CloseFiles(r.files)
	var h hello
	if err := json.Unmarshal(r.Body, &h); err != nil || r.Kind != kindHello {
		return nil, fmt.Errorf("greeting of kind %q: %w", r.Kind, err)
	}
	var refusal error
	switch {
	case h.DataID != s.dataID:
		refusal = errdefs.New(errdefs.FailedPrecondition, "aether", "it serves another data directory").
			WithHint("End it with sandsea down on that directory")
	case h.Version != version:
		refusal = errdefs.New(errdefs.FailedPrecondition, "aether", "it speaks version %d, not %d", version, h.Version)
	}
	if refusal != nil {
		_ = p.write(ctx, outgoing{Seq: r.Seq, Error: failureOf(refusal)}, nil)
		return nil, refusal
	}
	return p, p.write(ctx, outgoing{Seq: r.Seq, Body: hello{DataID: s.dataID, Version: version}}, nil)
}

func (s *Server) replace(p *peer) {
	s.mu.Lock()
	old := s.edge
	s.edge = p
	s.mu.Unlock()
	if old != nil {
		_ = old.conn.Close()
	}
}

// UDP asks the edge for a socket of the gate that is bound to an address which is not the gate's.
func (s *Server) UDP(ctx context.Context, from netip.AddrPort) (*os.File, error) {
	s.mu.Lock()
	p := s.edge
	s.mu.Unlock()
	if p == nil {
		return nil, errdefs.New(errdefs.Unavailable, "edge", "is not connected")
	}
	files, err := p.call(ctx, kindUDP, from, nil)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		scm.CloseFiles(files)
		return nil, errdefs.New(errdefs.Internal, "edge", "answered udp with %d files", len(files))
	}
	return files[0], nil
}

// session serves the calls of one connection.
func (s *Server) session() answerer {
	var syncing bool
	var all []Sandbox
	return func(k kind, body json.RawMessage) (any, *os.File, error) {
		decode := func(to any) error {
			if err := json.Unmarshal(body, to); err != nil {
				return errdefs.New(errdefs.Invalid, "aether", "%s: %v", k, err)
			}
			return nil
		}
		var err error
		var answer any = struct{}{}
		switch k {
		case kindSync:
			syncing, all = true, nil
		case kindAdd:
			var more []Sandbox
			err = decode(&more)
			if err == nil && !syncing {
				err = errdefs.New(errdefs.Invalid, "aether", "%s outside of a sync", k)
			}
			all = append(all, more...)
		case kindSynced:
			if !syncing {
				return nil, nil, errdefs.New(errdefs.Invalid, "aether", "%s outside of a sync", k)
			}
			err = s.handler.Sync(all)
			syncing, all = false, nil
		case kindPut:
			var b Sandbox
			if err = decode(&b); err == nil {
				err = s.handler.Put(b)
			}
		case kindDrop:
			var id string
			if err = decode(&id); err == nil {
				answer, err = s.handler.Drop(id)
			}
		case kindCounters:
			var ids []string
			if err = decode(&ids); err == nil {
				answer = s.handler.Counters(ids)
			}
		case kindCA:
			var id string
			if err = decode(&id); err == nil {
				answer, err = s.handler.CA(id)
			}
		case kindDenials:
			var denied []Denial
			if err = decode(&denied); err == nil {
				s.handler.Denials(denied)
			}
		case kindServices:
			answer = s.handler.Services()
		case kindUpstreams:
			var found upstream.Upstreams
			if err = decode(&found); err == nil {
				err = s.handler.Upstreams(found)
			}
		default:
			err = errdefs.New(errdefs.Invalid, "aether", "unknown call %q", k)
		}
		return answer, nil, err
	}
}
