package apiserver_test

import (
	"context"
	"testing"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
)

// A server that stops does not wait for who only waits, and lets everybody else finish.
func TestAServerThatLeavesEndsCallsThatWait(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	in, release := make(chan string, 3), make(chan struct{})
	h.edges[0].Before(func(ctx context.Context, call string) error {
		if call != "run" {
			return nil
		}
		in <- call
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	run := func(key string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := c.processes.Run(context.Background(), connect.NewRequest(&pb.RunRequest{
				Id: sb.GetId(), Key: key, Command: &pb.Command{Argv: []string{"echo"}},
			}))
			done <- errwire.FromConnect(err)
		}()
		<-in
		return done
	}
	keyed, unkeyed := run("k"), run("")
	watched := make(chan error, 1)
	go func() {
		st, err := c.sandboxes.Watch(context.Background(), connect.NewRequest(&pb.WatchSandboxesRequest{}))
		if err == nil {
			for st.Receive() {
			}
			err = st.Err()
		}
		watched <- errwire.FromConnect(err)
	}()

	h.server.Leave()
	h.server.Leave()
	for name, got := range map[string]<-chan error{"a command with a key": keyed, "the events": watched} {
		if err := <-got; errdefs.KindOf(err) != errdefs.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.get(t, sb.GetId()); err != nil {
		t.Errorf("a call that takes no time: %v", err)
	}
	close(release)
	if err := <-unkeyed; err != nil {
		t.Errorf("a command without a key, which would be ended with its call: %v", err)
	}
}
