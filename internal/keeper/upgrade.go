package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/memfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// A keeper becomes one of another version by exec, as the same process with the same descriptors. What it holds it
// writes into a memfd as Roster tells it to the edge, with the descriptors' numbers in place of the descriptors; the new
// program reads that as if an edge had sent it. Nothing else is passed on: how far each stream is stands in its file,
// which kills were decided in the index, and events come anew from there and from the kernel. So nothing is lost, and
// a child that writes waits for some milliseconds.
//
// The messages of a table, like all others, only gain fields: each version reads each other's. What the new program
// does not know of is left out, as the edge that asks is of the new program's version and has said what it knows.

const kUpgrade kind = 48

// tableVersion is of the frame around the messages. A table of another version is not read.
const tableVersion = 1

// maxTable bounds a table: more than the descriptors that a process can have.
const maxTable = 1 << 30

// maxArgv bounds the words of a command line.
const maxArgv = 64

// inherited is what a keeper got from the one that it was.
type inherited struct {
	listen  int      // the listening socket, so that a connection never finds nobody
	lock    *os.File // the lock on the index
	entries []inheritedEntry
}

type inheritedEntry struct {
	msg []byte
	fds []int
}

// upgrade becomes the program that came with the request; it answers only when it cannot.
func (s *server) upgrade(p *peer, id uint32, r *reader, fds []int) {
	defer scm.CloseAll(fds)
	argv, err := decodeArgv(r)
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d files, not the program alone", len(fds))
	}
	if err != nil {
		s.answer(p, id, invalid(err))
		return
	}
	err = s.become(fds[0], argv, p.knows)
	s.log.Error("keeper stays what it is", "program", argv[0], "err", err)
	s.answer(p, id, errdefs.New(errdefs.FailedPrecondition, "keeper", "cannot become %s: %v", argv[0], err).Wrap(err))
}

// become returns only with why it could not.
func (s *server) become(program int, argv []string, knows feature) error {
	table, fds := s.table(knows)
	f, err := memfd.Create("sandsea-keeper")
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(table); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	fds = append(fds, int(f.Fd()))
	defer func() {
		for _, fd := range fds {
			syscall.CloseOnExec(fd)
		}
	}()
	for _, fd := range fds {
		if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFD, 0); errno != 0 {
			return fmt.Errorf("pass descriptor %d on: %w", fd, errno)
		}
	}
	s.log.Info("keeper becomes another program", "program", argv[0])
	argv = append(argv, "--table", strconv.Itoa(int(f.Fd())))
	return syscall.Exec(pathOf(program, argv[0]), argv, os.Environ())
}

// pathOf names a program: by its path where that still leads to it, so that it is listed by its name, else by its
// descriptor.
func pathOf(program int, path string) string {
	var byFD, byPath syscall.Stat_t
	if syscall.Fstat(program, &byFD) == nil && syscall.Stat(path, &byPath) == nil && byFD.Dev == byPath.Dev &&
		byFD.Ino == byPath.Ino {
		return path
	}
	return fmt.Sprintf("/proc/self/fd/%d", program)
}

// table encodes what is held, and lists the descriptors that it names.
func (s *server) table(knows feature) (table []byte, fds []int) {
	w := &writer{}
	w.u32(tableVersion)
	w.str(s.cfg.DataID)
	w.u32(uint32(s.listen))
	w.u32(uint32(s.index.lock.Fd()))
	fds = append(fds, s.listen, int(s.index.lock.Fd()))
	add := func(msg []byte, own []int) {
		w.u32(uint32(len(own)))
		for _, fd := range own {
			w.u32(uint32(fd))
		}
		w.u32(uint32(len(msg)))
		w.b = append(w.b, msg...)
		fds = append(fds, own...)
	}
	for _, b := range s.boxes {
		add(s.describeBox(b, 0))
	}
	for _, b := range s.boxes {
		for _, e := range b.execs {
			add(s.describe(e, 0, knows))
		}
	}
	return w.b, fds
}

// inherit reads the table that descriptor fd is, for a keeper of that data directory.
func inherit(fd int, dataID string) (*inherited, error) {
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "table")
	defer f.Close()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read the table: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxTable))
	if err != nil {
		return nil, fmt.Errorf("read the table: %w", err)
	}
	h, lock, err := decodeTable(b, dataID)
	if err != nil {
		return nil, fmt.Errorf("read the table: %w", err)
	}
	h.lock = os.NewFile(uintptr(lock), "keeper lock")
	for _, e := range h.entries {
		for _, fd := range e.fds {
			syscall.CloseOnExec(fd)
		}
	}
	syscall.CloseOnExec(h.listen)
	syscall.CloseOnExec(lock)
	return h, nil
}

// decodeTable also gives the descriptor of the lock, which is not wrapped yet.
func decodeTable(b []byte, dataID string) (h *inherited, lock int, err error) {
	r := &reader{b: b}
	if v := r.u32(); v != tableVersion {
		return nil, 0, fmt.Errorf("it is of version %d, this reads %d", v, tableVersion)
	}
	if id := r.str(); id != dataID {
		return nil, 0, errors.New("it is of another data directory")
	}
	number := func() int {
		n := r.u32()
		if n == 0 || n > math.MaxInt32 {
			r.fail("descriptor %d", n)
		}
		return int(n)
	}
	h = &inherited{listen: number()}
	lock = number()
	for len(r.b) > 0 && r.err() == nil {
		e := inheritedEntry{}
		n := r.u32()
		if n > scm.MaxFiles {
			r.fail("an entry with %d descriptors", n)
			break
		}
		for range n {
			e.fds = append(e.fds, number())
		}
		size := int(r.u32())
		if e.msg = r.take(size); size == 0 || len(e.msg) != size {
			r.fail("an entry of %d bytes is cut", size)
		}
		h.entries = append(h.entries, e)
	}
	return h, lock, r.err()
}

// restore holds and records what was inherited, before the loop begins.
func (s *server) restore(h *inherited) {
	for _, e := range h.entries {
		k, _, r := open(e.msg)
		var err error
		switch k {
		case kHeldSandbox:
			var m sandboxMsg
			if m, err = decodeSandbox(r); err == nil && m.fileCount() == len(e.fds) {
				err = s.hold(m, e.fds)
				break
			}
			scm.CloseAll(e.fds)
		case kHeldExec:
			var m execMsg
			if m, err = decodeExec(r); err == nil && m.fileCount() == len(e.fds) {
				err = s.record(m, e.fds)
				break
			}
			scm.CloseAll(e.fds)
		default:
			err = fmt.Errorf("unknown entry %d", k)
		}
		if err != nil {
			s.log.Error("an inherited entry is lost", "err", err)
		}
	}
	s.startTold()
	s.log.Info("keeper goes on as another program", "entries", len(h.entries))
}

func encodeArgv(id uint32, argv []string) []byte {
	w := begin(kUpgrade, id)
	w.u8(uint8(len(argv)))
	for _, a := range argv {
		w.str(a)
	}
	return w.b
}

func decodeArgv(r *reader) ([]string, error) {
	n := int(r.u8())
	if n == 0 || n > maxArgv {
		r.fail("%d words", n)
	}
	argv := make([]string, 0, n)
	for range n {
		argv = append(argv, r.str())
	}
	return argv, r.err()
}

// The edge's end.

// errTooOld: the running keeper cannot become another program.
var errTooOld = errors.New("the running keeper is of a version that cannot be upgraded; it stays until sandsea down")

// upgradeLimit is how long a keeper may take to be there again.
const upgradeLimit = 10 * time.Second

// Upgrade has the keeper at socket go on as another program with that command line, whatever version it is of now. It
// returns what the keeper held before, with descriptors that are the caller's: whatever becomes of the keeper, the
// caller gives them to the next connection by Restore. The line that another edge has breaks.
func Upgrade(ctx context.Context, socket, dataID string, program *os.File, argv []string) ([]Held, error) {
	if len(argv) > maxArgv {
		return nil, errdefs.New(errdefs.Internal, "keeper", "a command line of %d words", len(argv))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, upgradeLimit, errSilent)
	defer cancel()
	c, err := dial(ctx, socket, dataID, true)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	if c.knows&upgrades == 0 {
		return nil, errTooOld
	}
	held, err := c.Roster(ctx)
	if err != nil {
		return nil, err
	}
	_, err = c.call(ctx, "upgrade", func(id uint32) []byte { return encodeArgv(id, argv) }, program)
	if !errors.Is(err, errdefs.Unavailable) {
		// It has an answer, or none in time: it is what it was.
		return held, err
	}
	return held, nil // the line broke with the old program
}

// Restore gives a keeper what Upgrade returned, as far as it has not got it already, and closes that.
func Restore(ctx context.Context, c Client, held []Held) error {
	defer CloseHeld(held)
	var errs []error
	for _, h := range held {
		if h.Sandbox != nil {
			errs = append(errs, c.Hold(ctx, *h.Sandbox))
		}
	}
	for _, h := range held {
		if h.Exec != nil {
			errs = append(errs, c.Record(ctx, *h.Exec))
		}
	}
	return errors.Join(errs...)
}
