package wire

import (
	"errors"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

func TestAnInsideOfAnOlderVersionIsNotAskedForAShellSession(t *testing.T) {
	c, p := greetedPair(t, running(1))
	io := stdio(t)
	io.StateIn, io.StateOut = io.In, io.Out
	_, err := c.Spawn(within(t), chronus.Spawn{Number: 2, Argv: []string{"sh"}}, io)
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	// What it is asked next comes first.
	go func() {
		m := p.read()
		if m.kind != kindSignal {
			t.Errorf("asked for %d", m.kind)
		}
		p.say(message{head: head{kind: kindSignalled, seq: m.seq, cookie: m.cookie}})
	}()
	if err := c.Signal(within(t), 1, syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}
