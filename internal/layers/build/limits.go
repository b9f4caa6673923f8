package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Limits bound what an import may cost. A zero field has the default that its comment names.
type Limits struct {
	// Bytes of file content, holes included; 64 GiB.
	Bytes int64
	// Entries of one image, over all its layers; 1,000,000.
	Entries int64
	// Metadata is the sum of names, link targets and attributes in bytes; 512 MiB.
	Metadata int64
	// Ratio of decompressed to compressed bytes, looked at after the first GiB; 1,000.
	Ratio int64
	// Layers of an OCI image; 64.
	Layers int
	// Document is the largest OCI index, manifest or config in bytes; 4 MiB.
	Document int64
	// Time that an import from a registry may take; 2 h.
	Time time.Duration
	// Reserve is the space that an import leaves free in the data directory; 256 MiB.
	Reserve int64
}

func (l Limits) withDefaults() Limits {
	for _, f := range []struct {
		p *int64
		v int64
	}{
		{&l.Bytes, 64 << 30},
		{&l.Entries, 1_000_000},
		{&l.Metadata, 512 << 20},
		{&l.Ratio, 1000},
		{&l.Document, 4 << 20},
		{&l.Reserve, 256 << 20},
	} {
		if *f.p == 0 {
			*f.p = f.v
		}
	}
	if l.Layers == 0 {
		l.Layers = 64
	}
	if l.Time == 0 {
		l.Time = 2 * time.Hour
	}
	return l
}

const ratioFrom = 1 << 30

const (
	// importsAtOnce is how many imports have trees in memory at the same time, and largeAtOnce how many of them large
	// ones; more wait.
	importsAtOnce = 16
	largeAtOnce   = 2
	// smallShare is the part of the limits on entries and metadata up to which an import is not a large one.
	smallShare = 8
)

// turn waits until an import may fill memory, and gives what it counts in. done lets the next one go on. Nothing that
// waits for somebody else may be done in between.
func (b *Builder) turn(ctx context.Context, p *progress) (used *usage, done func(), err error) {
	large := false
	wait := func(tokens chan struct{}) error {
		select {
		case tokens <- struct{}{}:
			return nil
		default:
		}
		p.detail("waiting for other imports")
		select {
		case tokens <- struct{}{}:
			p.detail("")
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err := wait(b.turns); err != nil {
		return nil, nil, err
	}
	used = &usage{grow: func(entries, metadata int64) error {
		if large || entries <= b.limits.Entries/smallShare && metadata <= b.limits.Metadata/smallShare {
			return nil
		}
		if err := wait(b.large); err != nil {
			return err
		}
		large = true
		return nil
	}}
	return used, func() {
		if large {
			<-b.large
		}
		<-b.turns
	}, nil
}

// unpacked is the largest size of a tar: contents, and for each entry headers and padding.
func (l Limits) unpacked() int64 { return l.Bytes + 2*l.Metadata + 3072*l.Entries }

// meter counts the bytes that pass a reader, gives up when the context ends, and stops at a limit.
type meter struct {
	alive func() error // context.Cause of the import
	r     io.Reader
	check func(total int64) error
	on    func(n int64)

	mu    sync.Mutex
	total int64 // guarded by mu: decompressors read from goroutines of their own
}

func (m *meter) Read(p []byte) (int, error) {
	if err := m.alive(); err != nil {
		return 0, err
	}
	n, err := m.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &sourceError{err}
	}
	m.mu.Lock()
	m.total += int64(n)
	total := m.total
	m.mu.Unlock()
	if m.on != nil {
		m.on(int64(n))
	}
	if m.check != nil && n > 0 {
		if err := m.check(total); err != nil {
			return n, err
		}
	}
	return n, err
}

func aliveIn(ctx context.Context) func() error {
	return func() error { return context.Cause(ctx) }
}

// sourceError is one of the bytes' source, apart from what is wrong with the bytes.
type sourceError struct{ err error }

func (e *sourceError) Error() string { return e.err.Error() }
func (e *sourceError) Unwrap() error { return e.err }

// writeError is one of our own files.
type writeError struct{ err error }

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// isSystem tells errors that say nothing about an archive.
func isSystem(err error) bool {
	if _, ok := errors.AsType[*sourceError](err); ok {
		return true
	}
	_, ok := errors.AsType[*writeError](err)
	return ok
}

func (m *meter) count() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.total
}

// freeBytes is the space that is left in dir for us.
func freeBytes(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// roomFor refuses what does not fit.
func roomFor(dir string, need, reserve int64) error {
	free, err := freeBytes(dir)
	if err != nil {
		return err
	}
	if free-reserve < need {
		return noRoom(dir, need+reserve, free)
	}
	return nil
}

func noRoom(dir string, need, have int64) error {
	return errdefs.New(errdefs.Exhausted, "", "import needs %s, %s has %s", gib(need), dir, gib(have)).
		WithField("dir", gib(have)).WithHint("Free some: sandsea image rm")
}

// roomErr gives an error about a full disk its sentence.
func roomErr(dir string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		free, ferr := freeBytes(dir)
		if ferr != nil {
			free = 0
		}
		return errdefs.New(errdefs.Exhausted, "", "import needs more than %s, which has %s left", dir, gib(free)).
			WithHint("Free some: sandsea image rm").Wrap(err)
	}
	return err
}

func gib(n int64) string {
	if n < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}
