package main

import (
	"bytes"
	"testing"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func TestWhatIsNotKeptIsSaidOnce(t *testing.T) {
	var said bytes.Buffer
	a := &app{io: &ui.IO{Err: &said}}
	out := &outcome{offsets: map[sandseav1.Stream]int64{}}
	for i := range int64(3) {
		gap := &sandseav1.OutputGap{Stream: sandseav1.Stream_STREAM_STDOUT, Offset: 2 * i << 20, Bytes: 1 << 20}
		if err := a.take(out, &sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Gap{Gap: gap}}); err != nil {
			t.Fatal(err)
		}
	}
	if said.Len() > 0 {
		t.Errorf("said before the end: %q", said.String())
	}
	a.tellGap(out)
	if want := "sandsea: 3 MiB of output not kept. Keep more: --output SIZE where the sandbox is made\n"; said.String() != want {
		t.Errorf("%q, want %q", said.String(), want)
	}
}
