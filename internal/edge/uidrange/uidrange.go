// Package uidrange gives each sandbox its own 65,536 host ids, never those of another sandbox of any edge on this
// machine.
//
// Ranges are claimed from the whole host a block of 64 at a time, under a lock: one file per block in
// /run/sandsea/uidrange/<boot id>, which names the tag of the edge that owns the block. Claims outlive the edge, as its
// sandboxes do; they end with Release or with the boot. Within its blocks an edge hands ranges out from memory, so
// that a create touches no file.
//
// A range comes with an open user namespace to map mounts through. Making one takes a child process, so a few are made
// ahead and kept with the ranges that come back.
//
// Order of calls: Open; Adopt once per sandbox that lives on; Settle; then Take and Lease.Give. Take works before
// Settle too, from fresh blocks. All methods may be called at once.
package uidrange

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/userns"
)

// Size is the number of ids in a range.
const Size = userns.Size

const (
	perBlock  = 64
	blockSize = perBlock * Size

	// Ids from high on are in use by nobody; those from low on are what systemd-nspawn picks from, at random, so they come
	// last. Above end lie ids of foreign images and, from 2^31 on, what some programs take for negative.
	high = 0x70000000
	low  = 0x10000000
	end  = 0x7fc00000

	highBlocks = (end - high) / blockSize
	blocks     = highBlocks + (high-low)/blockSize
)

// Ranges is how many there are on one machine.
const Ranges = blocks * perBlock

// Dir is where the claims of this machine lie.
const Dir = "/run/sandsea/uidrange"

// Config of a Pool.
type Config struct {
	// Tag of the edge, the first 8 hex digits of its data directory's id.
	Tag string
	// Dir is where claims lie; "" is the host's own. Only a test has another.
	Dir string
	// Warm is how many free ranges are kept with an open user namespace; 0: 16.
	Warm int
	// MaxNamespaces bounds the user namespaces held open, in free and used ranges together; 0: 256.
	MaxNamespaces int
	Log           *slog.Logger
}

var errClosed = errors.New("pool closed")

var tagForm = regexp.MustCompile(`^[0-9a-f]{8}$`)

// Pool is the ranges of one edge.
type Pool struct {
	cfg  Config
	dir  string // of this boot
	lock *os.File
	wake chan struct{} // has room for one: the warmer looks again
	stop context.CancelCauseFunc
	wg   sync.WaitGroup

	mu     sync.Mutex
	held   map[uint32]bool // guarded by mu: ranges of older blocks that nobody adopted yet, until Settle
	taken  map[uint32]bool // guarded by mu
	warm   []free          // guarded by mu: free with a namespace, last in first out
	cold   []uint32        // guarded by mu: free without
	open   int             // guarded by mu: namespaces that are open, or about to be
	mine   map[int]bool    // guarded by mu: blocks
	closed bool            // guarded by mu
}

type free struct {
	base uint32
	ns   *os.File
}

// Open finds the blocks that this edge owns already. Nothing of them is handed out before Settle.
func Open(cfg Config) (*Pool, error) {
	if !tagForm.MatchString(cfg.Tag) {
		return nil, errdefs.New(errdefs.Invalid, "uid ranges", "tag %q is not 8 hex digits", cfg.Tag)
	}
	if cfg.Log == nil {
		return nil, errdefs.New(errdefs.Invalid, "uid ranges", "no log")
	}
	if cfg.Dir == "" {
		cfg.Dir = Dir
	}
	if cfg.Warm == 0 {
		cfg.Warm = 16
	}
	if cfg.MaxNamespaces == 0 {
		cfg.MaxNamespaces = 256
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("uid ranges: %w", err)
	}
	bootID := strings.TrimSpace(string(boot))
	p := &Pool{
		cfg: cfg, dir: filepath.Join(cfg.Dir, bootID), wake: make(chan struct{}, 1),
		held: map[uint32]bool{}, taken: map[uint32]bool{}, mine: map[int]bool{},
	}
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return nil, fmt.Errorf("uid ranges: %w", err)
	}
	p.lock, err = os.OpenFile(filepath.Join(cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("uid ranges: %w", err)
	}
	err = p.locked(func() error {
		if err := dropOtherBoots(cfg.Dir, bootID); err != nil {
			return err
		}
		for n := range blocks {
			owner, err := p.owner(n)
			if err != nil {
				return err
			}
			if owner == cfg.Tag {
				p.mine[n] = true
				for i := range uint32(perBlock) {
					p.held[blockBase(n)+i*Size] = true
				}
			}
		}
		return nil
	})
	if err != nil {
		p.lock.Close()
		return nil, fmt.Errorf("uid ranges: %w", err)
	}
	ctx, stop := context.WithCancelCause(context.Background())
	p.stop = stop
	p.wg.Go(func() { p.keepWarm(ctx) })
	p.poke()
	return p, nil
}

// dropOtherBoots removes claims that a machine whose /run outlives a boot has kept.
func dropOtherBoots(dir, bootID string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != bootID {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func blockBase(n int) uint32 {
	if n < highBlocks {
		return high + uint32(n)*blockSize
	}
	return low + uint32(n-highBlocks)*blockSize
}

func (p *Pool) claim(n int) string {
	return filepath.Join(p.dir, strconv.FormatUint(uint64(blockBase(n)), 16))
}

// owner is the tag that owns a block, "" for none.
func (p *Pool) owner(n int) (string, error) {
	b, err := os.ReadFile(p.claim(n))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

// locked runs fn while no other edge of this machine changes claims.
func (p *Pool) locked(fn func() error) error {
	for {
		err := syscall.Flock(int(p.lock.Fd()), syscall.LOCK_EX)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("lock %s: %w", p.lock.Name(), err)
		}
		break
	}
	defer func() { _ = syscall.Flock(int(p.lock.Fd()), syscall.LOCK_UN) }()
	return fn()
}

// growLocked claims one more block. It does I/O under mu, once in 64 ranges: the flock excludes other processes only.
func (p *Pool) growLocked() error {
	return p.locked(func() error {
		for n := range blocks {
			if p.mine[n] {
				continue
			}
			owner, err := p.owner(n)
			if err != nil {
				return err
			}
			if owner != "" {
				continue
			}
			tmp := filepath.Join(p.dir, "."+p.cfg.Tag)
			if err := os.WriteFile(tmp, []byte(p.cfg.Tag+"\n"), 0o644); err != nil {
				return err
			}
			if err := os.Rename(tmp, p.claim(n)); err != nil {
				return err
			}
			p.mine[n] = true
			for i := range uint32(perBlock) {
				p.cold = append(p.cold, blockBase(n)+(perBlock-1-i)*Size)
			}
			return nil
		}
		return errdefs.New(errdefs.Exhausted, "uid ranges", "all %d ranges of this machine are claimed", Ranges).
			WithHint("End edges that are not needed with sandsea down")
	})
}

// Adopt takes a range that a sandbox from before uses. FailedPrecondition when it is not this edge's to give.
func (p *Pool) Adopt(base uint32) (*Lease, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.held[base] {
		return nil, errdefs.New(errdefs.FailedPrecondition, "uid ranges",
			"%#x is no range of this edge that is left to adopt", base)
	}
	delete(p.held, base)
	p.taken[base] = true
	return &Lease{Base: base, p: p}, nil
}

// Settle says that all sandboxes from before have been adopted or are gone for good: what is left is free. Idempotent.
func (p *Pool) Settle() {
	p.mu.Lock()
	for base := range p.held {
		p.cold = append(p.cold, base)
	}
	clear(p.held)
	p.mu.Unlock()
	p.poke()
}

// Lease is a range in use by one sandbox.
type Lease struct {
	// Base is the first id.
	Base uint32

	p  *Pool
	ns *os.File // guarded by p.mu
}

// Take gives a range that no sandbox on this machine uses. Exhausted when there is none.
func (p *Pool) Take() (*Lease, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, errdefs.New(errdefs.Unavailable, "uid ranges", "closed")
	}
	if n := len(p.warm); n > 0 {
		f := p.warm[n-1]
		p.warm = p.warm[:n-1]
		p.taken[f.base] = true
		p.mu.Unlock()
		p.poke()
		return &Lease{Base: f.base, p: p, ns: f.ns}, nil
	}
	base, err := p.takeColdLocked()
	if err == nil {
		p.taken[base] = true
		p.open++ // beyond the bound if need be: a sandbox that starts needs its namespace
	}
	p.mu.Unlock()
	p.poke()
	if err != nil {
		return nil, err
	}
	l := &Lease{Base: base, p: p}
	ns, err := userns.New(base)
	p.mu.Lock()
	if err != nil {
		p.open--
	}
	l.ns = ns
	p.mu.Unlock()
	if err != nil {
		l.Give()
		return nil, fmt.Errorf("uid ranges: %w", err)
	}
	return l, nil
}

func (p *Pool) takeColdLocked() (uint32, error) {
	if len(p.cold) == 0 {
		if err := p.growLocked(); err != nil {
			return 0, err
		}
	}
	base := p.cold[len(p.cold)-1]
	p.cold = p.cold[:len(p.cold)-1]
	return base, nil
}

// UserNS is a user namespace in which ids 0 to Size-1 are the range. It stays the lease's; nil after Mounted.
func (l *Lease) UserNS() *os.File {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.ns
}

// Mounted says that the namespace is not needed any more for now. It is kept for the next use of the range as long as
// there are not too many.
func (l *Lease) Mounted() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if l.ns != nil && l.p.open > l.p.cfg.MaxNamespaces {
		l.ns.Close()
		l.ns = nil
		l.p.open--
	}
}

// Give gives the range back. No process, mount or file with its ids may be left. Idempotent.
func (l *Lease) Give() {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.taken[l.Base] {
		return
	}
	delete(p.taken, l.Base)
	ns := l.ns
	l.ns = nil
	switch {
	case ns != nil && !p.closed && p.open <= p.cfg.MaxNamespaces:
		p.warm = append(p.warm, free{l.Base, ns})
	default:
		if ns != nil {
			ns.Close()
			p.open--
		}
		p.cold = append(p.cold, l.Base)
	}
}

func (p *Pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// keepWarm makes namespaces ahead.
func (p *Pool) keepWarm(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		}
		for ctx.Err() == nil {
			p.mu.Lock()
			// Before Settle no block is claimed only to be ahead: an edge that starts again and again would take the machine.
			early := len(p.held) > 0 && len(p.cold) == 0
			if early || len(p.warm) >= p.cfg.Warm || p.open >= p.cfg.MaxNamespaces {
				p.mu.Unlock()
				break
			}
			base, err := p.takeColdLocked()
			if err == nil {
				p.open++
			}
			p.mu.Unlock()
			if err != nil {
				break // Take will say so
			}
			ns, err := userns.New(base)
			p.mu.Lock()
			if err != nil || p.closed {
				p.open--
				p.cold = append(p.cold, base)
			} else {
				p.warm = append(p.warm, free{base, ns})
			}
			closed := p.closed
			p.mu.Unlock()
			if err != nil {
				p.cfg.Log.Warn("no user namespace could be made ahead", "err", err)
				break
			}
			if closed {
				ns.Close()
				return
			}
		}
	}
}

// Close ends the pool and keeps its claims, since sandboxes may live on. Idempotent.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	for _, f := range p.warm {
		f.ns.Close()
		p.cold = append(p.cold, f.base)
		p.open--
	}
	p.warm = nil
	p.mu.Unlock()
	p.stop(errClosed)
	p.wg.Wait()
	return p.lock.Close()
}

// Release gives up every claim of this edge; only when no sandbox of it is left. The Pool is closed by it.
func (p *Pool) Release() error {
	p.mu.Lock()
	if n := len(p.taken); n > 0 {
		p.mu.Unlock()
		return errdefs.New(errdefs.FailedPrecondition, "uid ranges", "%d are in use", n).WithHint("Stop the sandboxes first")
	}
	var errs []error
	if !p.closed {
		errs = append(errs, p.locked(func() error {
			for n := range p.mine {
				if err := os.Remove(p.claim(n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
			}
			_ = os.Remove(p.dir) // when nobody else has claims
			return nil
		}))
	}
	p.mu.Unlock()
	return errors.Join(append(errs, p.Close())...)
}

// Taken is how many ranges sandboxes have.
func (p *Pool) Taken() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.taken)
}
