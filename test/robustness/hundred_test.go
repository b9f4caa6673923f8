package robustness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	hundred = 100
	// rowSize is the bytes of a line, whose place in the stream can be told from it.
	rowSize = 8000
	// enough is what all have to write together for the test to mean what it says, in bytes per second.
	enough = 1 << 20
)

// rows writes lines of rowSize until /tmp/stop is there, twice a second without a process of its own, and ends as it
// was told to: with a code, or by a signal. Their numbers begin so high that all are of one length.
const rows = `
[ -t 1 ] && stty raw -echo
pad=$(printf '%%0%[2]dd' 0)
mkfifo /tmp/never; exec 3<>/tmp/never
n=10000000
while [ ! -e /tmp/stop ]; do echo "writer %03[1]d row $n $pad"; n=$((n+1)); read -r -t 0.5 x <&3; done
%[3]s`

// row is a line as it must be.
func row(writer int, n int64) []byte {
	head := fmt.Sprintf("writer %03d row %d ", writer, 10_000_000+n)
	return append(append([]byte(head), bytes.Repeat([]byte{'0'}, rowSize-1-len(head))...), '\n')
}

// streamer is a sandbox whose command writes rows, to a pipe or to a terminal.
type streamer struct {
	i        int
	sb       *client.Sandbox
	number   int64
	terminal bool
	code     int32
	signal   int32
	seen     atomic.Int64 // what a reader saw of its record
}

func (w *streamer) begin(ctx context.Context) error {
	last := fmt.Sprintf("exit %d", w.code)
	if w.signal != 0 {
		last = fmt.Sprintf("kill -%d $$; sleep 60", w.signal)
	}
	head := len(fmt.Sprintf("writer %03d row %d ", w.i, 10_000_000))
	req := &sandseav1.StartRequest{
		Command: client.Shell(fmt.Sprintf(rows, w.i, rowSize-1-head, last)), Detached: true, Key: "rows",
	}
	if w.terminal {
		req.Terminal = client.Terminal(80, 24)
	}
	for e, err := range w.sb.Start(ctx, req) {
		if err != nil {
			return err
		}
		w.number = e.GetStarted().GetNumber()
	}
	return nil
}

// read follows the record from an offset and compares every byte. It ends with the command, or with ctx.
func (w *streamer) read(ctx context.Context, from int64) (int64, *sandseav1.Process, error) {
	at := from
	for e, err := range w.sb.Attach(ctx, &sandseav1.AttachRequest{Number: w.number, StdoutOffset: from}) {
		if err != nil {
			return at, nil, err
		}
		if g := e.GetGap(); g != nil {
			return at, nil, fmt.Errorf("writer %d: bytes are lost: %v", w.i, g)
		}
		if d := e.GetData(); d != nil {
			if d.GetStream() != sandseav1.Stream_STREAM_STDOUT || d.GetOffset() != at {
				return at, nil, fmt.Errorf("writer %d: %s piece at %d after %d", w.i, d.GetStream(), d.GetOffset(), at)
			}
			for b := d.GetData(); len(b) > 0; {
				want := row(w.i, at/rowSize)[at%rowSize:]
				n := min(len(want), len(b))
				if !bytes.Equal(b[:n], want[:n]) {
					return at, nil, fmt.Errorf("writer %d: what is recorded at %d is not what was written: %.60q", w.i, at, b[:n])
				}
				b, at = b[n:], at+int64(n)
			}
			for seen := w.seen.Load(); at > seen && !w.seen.CompareAndSwap(seen, at); seen = w.seen.Load() {
			}
		}
		if p := e.GetExited(); p != nil {
			return at, p, nil
		}
	}
	return at, nil, nil
}

// visit is a reader that comes somewhere and leaves some time.
func (w *streamer) visit(t testing.TB, r *rand.Rand) error {
	stay := time.Duration(50+r.IntN(2000)) * time.Millisecond
	ctx, stop := context.WithTimeoutCause(t.Context(), stay, errors.New("has seen enough"))
	defer stop()
	_, p, err := w.read(ctx, r.Int64N(w.seen.Load()+1))
	switch {
	case p != nil:
		return fmt.Errorf("writer %d ended: %v", w.i, p)
	case ctx.Err() != nil || passing(err):
		return nil
	}
	return err
}

// finish ends the command and compares the whole record and the result.
func (w *streamer) finish(t testing.TB) (int64, error) {
	err := insist(t, "stop a writer", func(ctx context.Context) error {
		_, err := w.sb.Run(ctx, client.Argv("touch", "/tmp/stop"))
		return err
	})
	if err != nil {
		return 0, err
	}
	var size int64
	var p *sandseav1.Process
	err = insist(t, "read a record", func(ctx context.Context) (err error) {
		size, p, err = w.read(ctx, 0)
		return err
	})
	if err != nil {
		return 0, err
	}
	r := p.GetResult()
	if r.GetExitCode() != w.code || r.GetSignal() != w.signal || r.GetStdoutBytes() != size || size%rowSize != 0 ||
		r.GetStderrBytes() != 0 || r.GetTruncated() || r.GetInfraError() != "" || r.GetOom() || r.GetTimedOut() ||
		(p.GetTerminal() != nil) != w.terminal {
		return 0, fmt.Errorf("writer %d, %d bytes, want code %d: %v", w.i, size, w.code, p)
	}
	return size, nil
}

// recordedBytes is how much is recorded of all commands on the server.
func recordedBytes(t testing.TB, s *server.Server) (sum int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.Dir, "output", "*", "*.1"))
	if err != nil || len(files) == 0 {
		t.Fatalf("records: %v, %v", files, err)
	}
	for _, f := range files {
		if fi, err := os.Stat(f); err == nil {
			sum += fi.Size()
		}
	}
	return sum
}

// file is where a writer's output is recorded.
func (w *streamer) file(s *server.Server) string {
	return filepath.Join(s.Dir, "output", w.sb.ID, fmt.Sprintf("%d.1", w.number))
}

// goesOn waits until every record has grown: whoever records now has all of them.
func goesOn(t testing.TB, s *server.Server, writers []*streamer) {
	t.Helper()
	size := func(w *streamer) int64 {
		fi, err := os.Stat(w.file(s))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Size()
	}
	before := make([]int64, len(writers))
	for i, w := range writers {
		before[i] = size(w)
	}
	for i, w := range writers {
		wait.Until(t, 60*time.Second, func() bool { return size(w) > before[i] }, fmt.Sprintf("writer %d is recorded", w.i))
	}
}

// TestAHundredSandboxesUnderRandomKills: half of them write to pipes, half to terminals, while readers come and go.
// KILLS makes a run longer.
func TestAHundredSandboxesUnderRandomKills(t *testing.T) {
	s := begin(t)
	seed, kills := setting("SEED", 1), setting("KILLS", 21)
	t.Logf("SEED=%d KILLS=%d", seed, kills)
	writers := make([]*streamer, hundred)
	var made errgroup.Group
	made.SetLimit(8)
	for i := range writers {
		w := &streamer{i: i, terminal: i%2 == 1, code: int32(1 + i%120)}
		if i%5 == 0 {
			w.code, w.signal = 128+11, 11
		}
		writers[i] = w
		made.Go(func() (err error) {
			ctx := within(t, 2*time.Minute)
			sp := spec()
			sp.Limits = &sandseav1.Limits{MemoryBytes: 32 << 20, DiskBytes: 16 << 20, Pids: 64}
			if w.sb, err = s.Client.Create(ctx, sp, strconv.Itoa(i)); err != nil {
				return err
			}
			return w.begin(ctx)
		})
	}
	if err := made.Wait(); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancelCause(t.Context())
	var readers sync.WaitGroup
	var visits atomic.Int64
	for n := range 6 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(seed), uint64(n)))
			for ctx.Err() == nil && !t.Failed() {
				if err := writers[r.IntN(hundred)].visit(t, r); err != nil {
					t.Error(err)
				}
				visits.Add(1)
				pause(t, 10*time.Millisecond) // while nobody listens
			}
		})
	}
	defer readers.Wait()
	defer leave(nil)
	r := rand.New(rand.NewPCG(uint64(seed), 1000))
	order := make([]string, kills)
	for n := range order {
		order[n] = []string{"up", "keeper", "spawner"}[n%3]
	}
	r.Shuffle(kills, func(a, b int) { order[a], order[b] = order[b], order[a] })
	before := recordedBytes(t, s)
	began := time.Now()
	for _, part := range order {
		if t.Failed() {
			break
		}
		// One at a time: only edge and keeper together may lose sandboxes.
		pause(t, time.Duration(r.IntN(1000))*time.Millisecond)
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
		if part == "up" {
			pause(t, time.Duration(r.IntN(300))*time.Millisecond)
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		back := func() bool { return s.Pid("keeper") != 0 && s.Pid("spawner") != 0 }
		wait.Until(t, 20*time.Second, back, "all parts are back")
		if part == "keeper" {
			goesOn(t, s, writers) // else edge and keeper are away together for those that the new one has not been told of
		}
		w := writers[r.IntN(hundred)]
		if err := insist(t, "after a kill", func(ctx context.Context) error {
			res, err := w.sb.Run(ctx, client.Argv("true"))
			if err == nil && res.GetResult().GetExitCode() != 0 {
				err = fmt.Errorf("true: %v", res.GetResult())
			}
			return err
		}); err != nil {
			t.Error(err)
		}
	}
	took := time.Since(began)
	leave(errors.New("all kills are done"))
	readers.Wait()
	wrote := recordedBytes(t, s) - before
	if rate := float64(wrote) / took.Seconds(); rate < enough {
		t.Errorf("only %.0f KiB/s were written under the kills", rate/1024)
	}

	var sum atomic.Int64
	var ends errgroup.Group
	ends.SetLimit(8)
	for _, w := range writers {
		ends.Go(func() error {
			n, err := w.finish(t)
			sum.Add(n)
			if err != nil {
				t.Error(err)
			}
			return nil
		})
	}
	_ = ends.Wait()
	t.Logf("%d kills in %s with %d KiB/s; %d readers came and left; %d MiB are right", kills, took.Round(time.Second),
		int64(float64(wrote)/took.Seconds())>>10, visits.Load(), sum.Load()>>20)
}
