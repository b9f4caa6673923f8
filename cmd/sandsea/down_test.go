package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func TestDownWaitsForADaemonThatEndsByItself(t *testing.T) {
	path := t.TempDir()
	dir, err := openDataDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.close()
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir.join("lock"), fmt.Appendln(nil, ended.Process.Pid), 0o600); err != nil {
		t.Fatal(err)
	}
	a, enough := &app{io: &ui.IO{}}, errors.New("enough")
	ctx, stop := context.WithCancelCause(t.Context())
	stop(enough)
	if _, _, err := a.takeOver(ctx, path); !errors.Is(err, enough) {
		t.Errorf("%v, want to wait on", err)
	}
}
