package runner

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
)

// dying is a keeper whose calls fail some time before its connection has ended.
type dying struct {
	keeper.Client
	done  chan struct{}
	after time.Duration
}

func (d *dying) Done() <-chan struct{} { return d.done }

func (d *dying) Suspend(context.Context, string) error {
	time.AfterFunc(d.after, func() { close(d.done) })
	return errdefs.New(errdefs.Unavailable, "keeper", "no connection")
}

type living struct{ keeper.Client }

func (living) Suspend(context.Context, string) error { return nil }

func TestACallThatAKeeperDiesUnderIsMadeAgain(t *testing.T) {
	for _, after := range []time.Duration{0, time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			l := NewLink(&dying{done: make(chan struct{}), after: after})
			time.AfterFunc(time.Second, func() { l.Set(living{}) })
			if err := l.Suspend(t.Context(), "s"); err != nil {
				t.Errorf("the connection ends %s after the call: %v", after, err)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		l := NewLink(&dying{done: make(chan struct{}), after: 2 * noticeLimit})
		if err := l.Suspend(t.Context(), "s"); !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("of a keeper that lives: %v", err)
		}
	})
}
