package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func TestInputIsPassedOnWhole(t *testing.T) {
	text := strings.Repeat("0123456789", 1000)
	for name, r := range map[string]io.Reader{
		"in one": strings.NewReader(text), "byte by byte": iotest.OneByteReader(strings.NewReader(text)), "with the end": iotest.DataErrReader(strings.NewReader(text)),
	} {
		got, err := io.ReadAll((&app{io: &ui.IO{In: r}}).input(t.Context()))
		if err != nil || string(got) != text {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	broken := errors.New("broken")
	if _, err := io.ReadAll((&app{io: &ui.IO{In: iotest.ErrReader(broken)}}).input(t.Context())); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestInputThatNeverComesEndsWithTheContext(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errInterrupted)
	if _, err := (&app{io: &ui.IO{In: r}}).input(ctx).Read(make([]byte, 1)); !errors.Is(err, errInterrupted) {
		t.Errorf("got %v", err)
	}
}
