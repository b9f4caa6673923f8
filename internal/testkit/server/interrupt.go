package server

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// interruptLimit bounds an interrupt, and all of them.
const interruptLimit = 20 * time.Second

var errInterruptLimit = fmt.Errorf("no answer in %s: %w", interruptLimit, context.DeadlineExceeded)

// Interrupt interrupts the command of a shell session until done gives its end. One interrupt may not do: like a key that
// is pressed, it is not seen by a program that the shell is just about to start.
func Interrupt[T any](t testing.TB, sh *client.ShellSession, done <-chan T) (end T) {
	t.Helper()
	wait.Until(t, interruptLimit, func() bool {
		ctx, stop := context.WithTimeoutCause(t.Context(), interruptLimit, errInterruptLimit)
		defer stop()
		if err := sh.Interrupt(ctx); err != nil && !errors.Is(err, errdefs.NotFound) {
			t.Fatalf("interrupt: %v", err)
		}
		select {
		case end = <-done:
			return true
		default:
			return false
		}
	}, "the command ends by an interrupt")
	return end
}
