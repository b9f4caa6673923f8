package keeper

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/record"
)

var wide = record.Caps{Head: 1 << 40, Tail: 1 << 40}

// TestAKilledKeeperLosesNoByte kills the keeper again and again while writers write at full speed. The test is the
// edge: it holds the second descriptors and records again with each new keeper.
func TestAKilledKeeperLosesNoByte(t *testing.T) {
	const writers, total, kills = 3, 96 << 20, 25
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, uint64(os.Getpid())))
	deaths := 0
	var longest time.Duration
	for number := int64(1); deaths < kills; number += writers {
		var children []*child
		for i := range int64(writers) {
			children = append(children, startWriter(t, c, dir, Key{"s1", number + i}, total, wide))
		}
		whileWriting(t, children, r, 60*time.Millisecond, func() {
			if deaths >= kills {
				return
			}
			p.kill(t)
			c.Close()
			begin := time.Now()
			p.start(t)
			c = p.dial(t)
			l = listen(c)
			if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
				t.Fatal(err)
			}
			for _, ch := range children {
				if err := c.Record(t.Context(), ch.exec); err != nil {
					t.Fatal(err)
				}
			}
			longest = max(longest, time.Since(begin))
			deaths++
		})
		for _, ch := range children {
			e := l.wait(t, of(Closed, ch.exec.Key))
			if e.Size != total {
				t.Errorf("stream of %d bytes, want %d", e.Size, total)
			}
			checkRecord(t, ch.path, ch.seed, total)
			if err := c.Release(t.Context(), ch.exec.Key); err != nil {
				t.Fatal(err)
			}
			os.Remove(ch.path)
		}
	}
	t.Logf("%d kills, longest time without a keeper %v", deaths, longest)
}

// edgeRole: DIR is an edge that starts two writers, says so, and waits to be killed.
func edgeRole(args []string) int {
	dir := args[0]
	c, err := Dial(context.Background(), filepath.Join(dir, "keeper.sock"), "data")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if err := c.Hold(context.Background(), Sandbox{ID: "s1"}); err != nil {
		fmt.Println(err)
		return 1
	}
	for number := int64(1); number <= 2; number++ {
		k := Key{"s1", number}
		r, w, err := os.Pipe()
		if err != nil {
			return 1
		}
		path := record.Path(dir, k.Sandbox, k.Number, record.Stdout)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return 1
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return 1
		}
		err = c.Record(context.Background(), Exec{
			Key: k, Caps: wide, Streams: []Stream{{Stream: record.Stdout, Pipe: r, File: f}},
			Remaining: time.Hour, Kill: f,
		})
		if err != nil {
			fmt.Println(err)
			return 1
		}
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=writer %d %d", roleEnv, number, edgeTotal))
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			return 1
		}
		w.Close()
	}
	fmt.Println("started")
	select {}
}

const edgeTotal = 192 << 20

// TestAKilledEdgeStopsNothing kills the edge under its writers. Its successor finds all in the roster; then the keeper
// dies too, and the successor's descriptors carry on.
func TestAKilledEdgeStopsNothing(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	p.dial(t).Close()
	edge := exec.Command("/proc/self/exe")
	edge.Env = append(os.Environ(), roleEnv+"=edge "+dir)
	out, err := edge.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := edge.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 8)
	_, err = io.ReadFull(out, line)
	_ = edge.Process.Kill()
	_ = edge.Wait()
	if err != nil || !strings.HasPrefix(string(line), "started") {
		t.Fatalf("edge: %q, %v", line, err)
	}
	c := p.dial(t)
	held, err := c.Roster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { CloseHeld(held) })
	if len(held) != 3 || held[0].Sandbox == nil || held[0].Sandbox.ID != "s1" {
		t.Fatalf("roster: %+v", held)
	}
	p.kill(t)
	p.start(t)
	c = p.dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), *held[0].Sandbox); err != nil {
		t.Fatal(err)
	}
	for _, h := range held[1:] {
		if h.Exec.Remaining <= 0 || h.Exec.Remaining > time.Hour || h.Fired {
			t.Errorf("remaining %v, fired %v", h.Exec.Remaining, h.Fired)
		}
		if err := c.Record(t.Context(), *h.Exec); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range held[1:] {
		e := l.wait(t, of(Closed, h.Exec.Key))
		if e.Size != edgeTotal {
			t.Errorf("stream of %d bytes, want %d", e.Size, edgeTotal)
		}
		checkRecord(t, record.Path(dir, "s1", h.Exec.Key.Number, record.Stdout), uint64(h.Exec.Key.Number), edgeTotal)
	}
}

// whileWriting calls fault again and again, at random moments at most so far apart, until every child has ended well.
func whileWriting(t *testing.T, children []*child, r *rand.Rand, most time.Duration, fault func()) {
	t.Helper()
	ended := make(chan error, len(children))
	for _, ch := range children {
		go func() { ended <- ch.cmd.Wait() }()
	}
	for left := len(children); left > 0; {
		pause := time.NewTimer(time.Duration(r.Int64N(int64(most))))
		select {
		case err := <-ended:
			pause.Stop()
			left--
			if err != nil {
				t.Fatalf("writer: %v: %s", err, children[0].stderr.String())
			}
		case <-pause.C:
			fault()
		}
	}
}
