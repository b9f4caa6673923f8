package main

import (
	"bytes"
	"testing"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func TestDownOfAServerTwice(t *testing.T) {
	dir := t.TempDir()
	d, err := openDataDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	d.close()
	var said bytes.Buffer
	a := &app{io: &ui.IO{Out: &said, Err: &said}}
	cfg := defaultServerConfig()
	cfg.Data = dir
	if err := a.down(t.Context(), cfg); err != nil || said.String() != "nothing runs: "+dir+" has no daemon\n" {
		t.Errorf("%v, %q", err, said.String())
	}
}
