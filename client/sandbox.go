package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

func isEOF(err error) bool { return errors.Is(err, io.EOF) }

// Sandbox is a handle: an id and the client to reach it. Making one asks nobody.
type Sandbox struct {
	ID string
	c  *Client
}

// Sandbox gives the handle for an id.
func (c *Client) Sandbox(id string) *Sandbox { return &Sandbox{ID: id, c: c} }

// Create makes a sandbox and returns when commands and files work. key may be empty; with one, the call may be repeated
// after an unknown outcome and gives the same sandbox.
func (c *Client) Create(ctx context.Context, spec *sandseav1.SandboxSpec, key string) (*Sandbox, error) {
	res, err := c.Sandboxes.Create(ctx, connect.NewRequest(&sandseav1.CreateSandboxRequest{Spec: spec, Key: key}))
	if err != nil {
		return nil, err
	}
	return c.Sandbox(res.Msg.GetSandbox().GetId()), nil
}

// Info asks the sandbox's node for its state. It neither wakes it nor counts as use.
func (s *Sandbox) Info(ctx context.Context) (*sandseav1.Sandbox, error) {
	res, err := s.c.Sandboxes.Get(ctx, connect.NewRequest(&sandseav1.GetSandboxRequest{Id: s.ID}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

// Stop ends the sandbox; one that has ended is no error.
func (s *Sandbox) Stop(ctx context.Context) error {
	_, err := s.c.Sandboxes.Stop(ctx, connect.NewRequest(&sandseav1.StopSandboxRequest{Id: s.ID}))
	return err
}

// ExtendTTL moves the hard end to ttl from now.
func (s *Sandbox) ExtendTTL(ctx context.Context, ttl time.Duration) error {
	_, err := s.c.Sandboxes.ExtendTTL(ctx,
		connect.NewRequest(&sandseav1.ExtendTTLRequest{Id: s.ID, TtlMs: ttl.Milliseconds()}))
	return err
}

// List yields sandboxes, newest first, page after page.
func (c *Client) List(ctx context.Context, req *sandseav1.ListSandboxesRequest) iter.Seq2[*sandseav1.Sandbox, error] {
	return func(yield func(*sandseav1.Sandbox, error) bool) {
		for {
			res, err := c.Sandboxes.List(ctx, connect.NewRequest(req))
			if err != nil {
				yield(nil, err)
				return
			}
			for _, sb := range res.Msg.GetSandboxes() {
				if !yield(sb, nil) {
					return
				}
			}
			if res.Msg.GetNextPageToken() == "" {
				return
			}
			req = &sandseav1.ListSandboxesRequest{
				All: req.GetAll(), Labels: req.GetLabels(), States: req.GetStates(), IdPrefix: req.GetIdPrefix(),
				PageSize: req.GetPageSize(), PageToken: res.Msg.GetNextPageToken(),
			}
		}
	}
}

// Resolve finds the full id for the first letters of one, at least four. A full id is returned as it is.
func (c *Client) Resolve(ctx context.Context, prefix string) (string, error) {
	if len(prefix) == 27 {
		return prefix, nil
	}
	if len(prefix) < 4 {
		return "", errdefs.New(errdefs.Invalid, "", "%q is too short for a sandbox id", prefix).
			WithField("id", "4 letters").WithHint("Give at least 4 letters. All: sandsea ls")
	}
	var found []string
	for sb, err := range c.List(ctx, &sandseav1.ListSandboxesRequest{IdPrefix: prefix, All: true}) {
		if err != nil {
			return "", err
		}
		found = append(found, sb.GetId())
	}
	switch len(found) {
	case 0:
		return "", errdefs.New(errdefs.NotFound, "sandbox "+prefix, "none here").WithHint("All: sandsea ls --all")
	case 1:
		return found[0], nil
	}
	e := errdefs.New(errdefs.Invalid, "", "%s names %d sandboxes", prefix, len(found)).
		WithField("id", "").WithHint("Give more letters")
	e.Near = found[:min(len(found), 8)]
	return "", e
}

// CreateBatch makes several sandboxes from one spec and yields one result per item as they are done.
func (c *Client) CreateBatch(ctx context.Context, req *sandseav1.CreateBatchRequest) iter.Seq2[*sandseav1.CreateBatchResponse, error] {
	return func(yield func(*sandseav1.CreateBatchResponse, error) bool) {
		stream, err := c.Sandboxes.CreateBatch(ctx, connect.NewRequest(req))
		receive(stream, err, yield)
	}
}

// Watch yields state changes until ctx ends.
func (c *Client) Watch(ctx context.Context, req *sandseav1.WatchSandboxesRequest) iter.Seq2[*sandseav1.WatchSandboxesResponse, error] {
	return func(yield func(*sandseav1.WatchSandboxesResponse, error) bool) {
		stream, err := c.Sandboxes.Watch(ctx, connect.NewRequest(req))
		receive(stream, err, yield)
	}
}

// StopMany ends several sandboxes and yields one result for each.
func (c *Client) StopMany(ctx context.Context, req *sandseav1.StopManyRequest) iter.Seq2[*sandseav1.StopManyResponse, error] {
	return func(yield func(*sandseav1.StopManyResponse, error) bool) {
		stream, err := c.Sandboxes.StopMany(ctx, connect.NewRequest(req))
		receive(stream, err, yield)
	}
}

// receive yields the messages of a server stream and closes it when the loop is left.
func receive[M any](stream *connect.ServerStreamForClient[M], err error, yield func(*M, error) bool) {
	if err != nil {
		yield(nil, err)
		return
	}
	defer stream.Close()
	for stream.Receive() {
		if !yield(stream.Msg(), nil) {
			return
		}
	}
	if err := stream.Err(); err != nil {
		yield(nil, err)
	}
}
