package client

import (
	"context"
	"crypto/rand"
	"errors"
	"iter"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// Sandbox is a handle: an id and the client to reach it. Making one asks nobody.
type Sandbox struct {
	ID string
	c  *Client
}

// Sandbox gives the handle for an id.
func (c *Client) Sandbox(id string) *Sandbox { return &Sandbox{ID: id, c: c} }

// takeBackLimit bounds the undoing of a create that was given up.
const takeBackLimit = time.Minute

// Create makes a sandbox and returns when commands and files work. key may be empty; with one, the call may be repeated
// after an unknown outcome and gives the same sandbox. Without one, a create that ctx ends leaves nothing behind: it is
// undone in the background, for up to a minute.
func (c *Client) Create(ctx context.Context, spec *sandseav1.SandboxSpec, key string) (*Sandbox, error) {
	sent := key
	if sent == "" {
		sent = "create-" + rand.Text()
	}
	res, err := c.create(ctx, spec, sent)
	if err == nil {
		return c.Sandbox(res.Msg.GetSandbox().GetId()), nil
	}
	if key == "" && ctx.Err() != nil {
		c.taking.Go(func() { c.takeBack(context.WithoutCancel(ctx), spec, sent) })
	}
	return nil, unsure(err, key)
}

// Settle waits until what creates made whose callers gave up has been ended again, for a program that is about to end and
// has no call under way. An error is why ctx ended first.
func (c *Client) Settle(ctx context.Context) error {
	settled := make(chan struct{})
	go func() {
		c.taking.Wait()
		close(settled)
	}()
	select {
	case <-settled:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Client) create(ctx context.Context, spec *sandseav1.SandboxSpec, key string) (
	*connect.Response[sandseav1.CreateSandboxResponse], error,
) {
	return c.Sandboxes.Create(ctx, connect.NewRequest(&sandseav1.CreateSandboxRequest{Spec: spec, Key: key}))
}

// takeBack ends what a create made whose answer nobody waited for. Its answer may have crossed the word that it is not
// wanted any more, so the server cannot undo it; the key finds it.
func (c *Client) takeBack(ctx context.Context, spec *sandseav1.SandboxSpec, key string) {
	ctx, stop := context.WithTimeoutCause(ctx, takeBackLimit, errdefs.Deadline)
	defer stop()
	if res, err := c.create(ctx, spec, key); err == nil {
		_ = c.Sandbox(res.Msg.GetSandbox().GetId()).Stop(ctx) // its limits end it otherwise
	}
}

// unsure says how to find out what became of a create whose answer was lost.
func unsure(err error, key string) error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.Unknown || e.Hint != "" {
		return err
	}
	if key == "" {
		return e.WithHint("Look for it: sandsea ls; with --key asking again would be safe")
	}
	return e.WithField("key", "").WithHint("Ask again with the same key: --key %s", key)
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
		return "", errdefs.New(errdefs.NotFound, "sandbox "+prefix, "none in %s", c.project(ctx)).WithHint("All: sandsea ls --all")
	case 1:
		return found[0], nil
	}
	near := found[:min(len(found), 8)]
	list := strings.Join(near, ", ")
	if len(found) > len(near) {
		list += ", …"
	}
	e := errdefs.New(errdefs.Invalid, "", "%s names %d sandboxes (%s)", prefix, len(found), list).
		WithField("id", "").WithHint("Give more letters")
	e.Near = near
	return "", e
}

// project names the caller's project for an error.
func (c *Client) project(ctx context.Context) string {
	res, err := c.IAM.WhoAmI(ctx, connect.NewRequest(&sandseav1.WhoAmIRequest{}))
	if err != nil {
		return "your project" // the error at hand is worth more
	}
	return "project " + res.Msg.GetProject()
}

// CreateBatch makes several sandboxes from one spec and yields one result per item as they are done.
func (c *Client) CreateBatch(ctx context.Context, req *sandseav1.CreateBatchRequest) iter.Seq2[*sandseav1.CreateBatchResponse, error] {
	return messages(ctx, c.Sandboxes.CreateBatch, req)
}

// Watch yields state changes until ctx ends.
func (c *Client) Watch(ctx context.Context, req *sandseav1.WatchSandboxesRequest) iter.Seq2[*sandseav1.WatchSandboxesResponse, error] {
	return messages(ctx, c.Sandboxes.Watch, req)
}

// StopMany ends several sandboxes and yields one result for each.
func (c *Client) StopMany(ctx context.Context, req *sandseav1.StopManyRequest) iter.Seq2[*sandseav1.StopManyResponse, error] {
	return messages(ctx, c.Sandboxes.StopMany, req)
}
