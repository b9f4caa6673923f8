package wire

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/tty"
)

// carry takes the descriptor that belongs to a message; none may come beside.
func (m *message) carry(files []*os.File) error {
	want := 0
	if m.kind == kindPTY {
		want = 1
	}
	if len(files) != want {
		return fmt.Errorf("%w: kind %d with %d descriptors", errMessage, m.kind, len(files))
	}
	if want > 0 {
		m.file = files[0]
	}
	return nil
}

// cut accepts a message that came without the descriptor that belongs to it.
func (m *message) cut() error {
	if m.kind != kindPTY {
		return fmt.Errorf("%w: kind %d with descriptors", errMessage, m.kind)
	}
	return nil
}

// drop closes what came with a message that nobody waits for.
func (m *message) drop() {
	if m.file != nil {
		_ = m.file.Close()
	}
}

// knowsTerminals refuses for an inside that was made before there were any: what it does not know ends it.
func (c *Channel) knowsTerminals(object string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead != nil {
		return c.dead
	}
	if !c.terminals {
		return errdefs.New(errdefs.FailedPrecondition, object, "was made by an older version, without terminals").
			WithHint("Create a new sandbox")
	}
	return nil
}

// OpenPTY implements chronus.Channel.
func (c *Channel) OpenPTY(ctx context.Context) (*os.File, error) {
	if err := c.knowsTerminals("sandbox"); err != nil {
		return nil, err
	}
	m, err := c.ask(ctx, message{head: head{kind: kindOpenPTY}}, nil)
	switch {
	case err != nil:
		return nil, err
	case m.kind == kindFailed:
		return nil, m.startError()
	case m.kind != kindPTY:
		return nil, c.distrust(m)
	case m.file == nil:
		return nil, noDescriptor(syscall.EMFILE)
	}
	master, err := tty.Master(m.file)
	if errors.Is(err, syscall.EMFILE) {
		return nil, noDescriptor(err)
	}
	if err != nil {
		c.die(fmt.Errorf("%w: its terminal: %w", errMessage, err))
		return nil, c.reason()
	}
	return master, nil
}

func noDescriptor(err error) error {
	return errdefs.New(errdefs.Exhausted, "node", "it can hold no more descriptors now").
		WithHint("Try again in a moment").WithRetryAfter(time.Second).Wrap(err)
}
