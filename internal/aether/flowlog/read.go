package flowlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/segment"
)

const (
	// lookEvery is how often a reader at the end looks for more.
	lookEvery = 100 * time.Millisecond
	// batch is the most events that come at once.
	batch = 256
)

// Batch is a run of events in order.
type Batch struct {
	Events []*sandseav1.NetworkEvent
	Next   int64 // number to go on from
	// Missing is how many events before the first of Events are gone.
	Missing int64
}

// Read gives at most limit events of a sandbox, from number from on; fewer only where no more are there. next is the
// number to go on from, missing how many before the first of them are gone. A sandbox without a log has no events.
func Read(dir, sandbox string, from int64, limit int) (events []*sandseav1.NetworkEvent, next, missing int64, err error) {
	r, err := open(dir, sandbox, from)
	if err != nil {
		return nil, 0, 0, err
	}
	defer r.close()
	b, err := r.next(limit)
	return b.Events, b.Next, b.Missing, err
}

// Follow yields the events of a sandbox from number from on, and goes on with those that come until ended is closed:
// then what is left, and the end. A closed one gives what is there. nil goes on until ctx ends, which is an error, and the
// last.
func Follow(ctx context.Context, dir, sandbox string, from int64, ended <-chan struct{}) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		r, err := open(dir, sandbox, from)
		if err != nil {
			yield(Batch{}, err)
			return
		}
		defer r.close()
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for over := false; ; {
			b, err := r.next(batch)
			if err == nil && len(b.Events) == 0 && b.Missing == 0 {
				if over {
					return
				}
				select {
				case <-ctx.Done():
					err = context.Cause(ctx)
				case <-ended:
					over = true
					continue
				case <-tick.C:
					continue
				}
			}
			if !yield(b, err) || err != nil {
				return
			}
		}
	}
}

// Remove removes a sandbox's log. It must be written no more.
func Remove(dir, sandbox string) error {
	if err := check(sandbox); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove flow log of %s: %w", sandbox, err)
	}
	defer root.Close()
	if err := root.RemoveAll(sandbox); err != nil {
		return fmt.Errorf("remove flow log of %s: %w", sandbox, err)
	}
	return nil
}

// check refuses what is no name of one directory.
func check(sandbox string) error {
	if sandbox == "." || !filepath.IsLocal(sandbox) || filepath.Base(sandbox) != sandbox {
		return errdefs.New(errdefs.Invalid, "flow log", "%q is no sandbox", sandbox).WithHint("Give a sandbox's full id")
	}
	return nil
}

// mostRecord is more than any event takes; a longer record is none of ours.
const mostRecord = 64 << 10

// reader reads a log in batches.
type reader struct {
	root *os.Root
	r    *segment.Reader
	want int64
	held *sandseav1.NetworkEvent // behind a gap: begins the next batch
}

func open(dir, sandbox string, from int64) (*reader, error) {
	if err := check(sandbox); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("flow log of %s: %w", sandbox, err)
	}
	from = max(0, from)
	return &reader{root: root, r: segment.OpenReader(root, sandbox, from), want: from}, nil
}

func (r *reader) close() {
	r.r.Close()
	_ = r.root.Close() // read only
}

// next gives at most limit events that are there. A gap begins a batch.
func (r *reader) next(limit int) (b Batch, err error) {
	for len(b.Events) < limit {
		e, err := r.event()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && len(b.Events) == 0 {
			return b, err
		}
		if err != nil {
			break // it comes again
		}
		if e.GetSeq() > r.want {
			if len(b.Events) > 0 {
				r.held = e
				break
			}
			b.Missing = e.GetSeq() - r.want
		}
		b.Events = append(b.Events, e)
		r.want = e.GetSeq() + 1
	}
	b.Next = r.want
	return b, nil //nolint:nilerr // it comes again at the next call
}

// event gives the next event. What is damaged is passed over, unless nothing follows it.
func (r *reader) event() (*sandseav1.NetworkEvent, error) {
	if e := r.held; e != nil {
		r.held = nil
		return e, nil
	}
	for lost := false; ; {
		seq, payload, err := r.r.Next()
		switch {
		case errors.Is(err, errdefs.DataLoss) && !lost:
			lost = true
			continue
		case err != nil:
			return nil, err
		}
		lost = false
		var e sandseav1.NetworkEvent
		if len(payload) > mostRecord || proto.Unmarshal(payload, &e) != nil {
			continue // the number that is missing tells
		}
		e.Seq = seq
		return &e, nil
	}
}
