package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// trickle gives a copy its content bit by bit, until the copy says something.
func trickle(t *testing.T, pipe string, said func() string, word string) *os.File {
	t.Helper()
	w, err := os.OpenFile(pipe, os.O_RDWR|syscall.O_NONBLOCK, 0) // else it would wait for a reader
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	if err := w.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); !strings.Contains(said(), word); {
		if time.Since(began) > limit {
			t.Fatalf("it says %q", said())
		}
		if _, err := w.Write(make([]byte, 64<<10)); err != nil {
			t.Fatalf("%v; it says %q", err, said())
		}
	}
	return w
}

func TestACopySaysHowFarItIs(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"py"}})
	id := living(t, s, "--image=py")
	pipe := filepath.Join(t.TempDir(), "big")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f := following(t, program{args: []string{"cp", pipe, id + ":/big"}, env: against(s)})
	w := trickle(t, pipe, f.errs.String, "big")
	w.Close()
	if err := f.cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, f.errs)
	}
	if got := f.out.String(); got != "" {
		t.Errorf("on standard output: %q", got)
	}
	text := regexp.MustCompile(`[\d.]+ [KMG]iB`).ReplaceAllString(f.errs.String(), "N MiB")
	text = regexp.MustCompile(`\d+`).ReplaceAllString(text, "N")
	golden.Equal(t, "cp_progress.txt", []byte(regexp.MustCompile(` +`).ReplaceAllString(text, " ")))
}

func TestAnInterruptedCopySaysWhatIsLeft(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"py"}})
	id := living(t, s, "--image=py")
	pipe := filepath.Join(t.TempDir(), "big")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f := following(t, program{args: []string{"cp", pipe, id + ":/big"}, env: against(s)})
	trickle(t, pipe, f.errs.String, "big")
	f.interrupted(130)
	if want := "sandsea: interrupted: the file in the sandbox is as it was\n"; !strings.HasSuffix(f.errs.String(), want) {
		t.Errorf("it says %q", f.errs)
	}
	if r := (program{args: []string{"exec", id, "--", "test", "-e", "big"}, env: against(s)}).run(t); r.code != 1 {
		t.Errorf("the file is there: %+v", r)
	}
}

func TestACopyFromAPipeThatNobodyWritesToIsInterrupted(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"py"}})
	id := living(t, s, "--image=py")
	pipe := filepath.Join(t.TempDir(), "big")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f := following(t, program{args: []string{"cp", pipe, id + ":/big"}, env: against(s)})
	want := "sandsea: waiting for somebody to write to " + pipe + "\n"
	wait.Until(t, limit, func() bool { return f.errs.String() == want }, "it says what it waits for")
	f.interrupted(130)
	if want += "sandsea: interrupted\n"; f.errs.String() != want {
		t.Errorf("it says %q", f.errs)
	}
}

func TestACopyThatDoesNotLearnWhatIsThereLeavesItAlone(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"py"}})
	id := living(t, s, "--image=py")
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "x.txt"), []byte("ex"), 0o600); err != nil {
		t.Fatal(err)
	}
	inside := program{args: []string{"exec", id, "--", "sh", "-c", "mkdir -p work; echo mine >work/mine.txt"}, env: against(s)}
	if r := inside.run(t); r.code != 0 {
		t.Fatal(r)
	}
	var asked atomic.Int32
	s.Edge.Before(func(_ context.Context, call string) error {
		if call == "get" && asked.Add(1) == 1 { // the look at the destination
			return errdefs.New(errdefs.Unavailable, "node n1", "its daemon stops")
		}
		return nil
	})
	r := program{args: []string{"cp", src, id + ":/work"}, env: against(s)}.run(t)
	s.Edge.Before(nil)
	if r.code != 1 || !strings.Contains(r.stderr, "its daemon stops") {
		t.Errorf("%+v", r)
	}
	inside.args = []string{"exec", id, "--", "sh", "-c", "cat work/*"}
	if r := inside.run(t); r.stdout != "mine\n" {
		t.Errorf("%+v", r)
	}
}

func TestACopyIntoWhatIsNoFileGoesThroughIt(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"py"}})
	id := living(t, s, "--image=py")
	if r := (program{args: []string{"exec", id, "--", "sh", "-c", "echo hi >x"}, env: against(s)}).run(t); r.code != 0 {
		t.Fatal(r)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if r := (program{args: []string{"cp", id + ":/x", pipe}, env: against(s)}).run(t); r.code != 0 {
		t.Fatal(r)
	}
	if st, err := os.Lstat(pipe); err != nil || st.Mode()&os.ModeNamedPipe == 0 {
		t.Fatalf("the pipe is %v, %v", st.Mode(), err)
	}
	got := make([]byte, 3)
	if err := f.SetReadDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(f, got); err != nil || string(got) != "hi\n" {
		t.Errorf("%q, %v", got, err)
	}

	file, link := filepath.Join(t.TempDir(), "file"), filepath.Join(t.TempDir(), "link")
	if err := errors.Join(os.WriteFile(file, []byte("old"), 0o600), os.Symlink(file, link)); err != nil {
		t.Fatal(err)
	}
	if r := (program{args: []string{"cp", id + ":/x", link}, env: against(s)}).run(t); r.code != 0 {
		t.Fatal(r)
	}
	if to, err := os.Readlink(link); err != nil || to != file {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "hi\n" {
		t.Errorf("%q, %v", b, err)
	}
}
