package keeper

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// index is the small append-only file that remembers which kills were decided, so that the successor of a killed
// keeper still knows them. A line is written before its kill. It is not fsynced: what it speaks of does not outlive
// the machine, and the page cache outlives us. The file of another boot or data directory is begun anew.
//
//	sandsea-keeper 1 BOOT DATA
//	fired SANDBOX NUMBER
//	overflow SANDBOX NUMBER
//	gone SANDBOX NUMBER
//
// The flock on the file beside it makes sure that there is one keeper.
type index struct {
	lock *os.File
	path string
	f    *os.File // nil until the first rewrite
	size int64
	live map[mark]struct{}
	head string
}

// mark is one decided kill.
type mark struct {
	kind EventKind
	key  Key
}

// compactAt is the size from which on the file is written anew when most of it is history.
const compactAt = 1 << 20

// ErrRunning: another keeper holds the index.
var ErrRunning = errors.New("another keeper is running")

// openIndex opens it; lock is the lock of the program that this process was before, nil if it was none.
func openIndex(path, boot, data string, lock *os.File) (*index, error) {
	if lock == nil {
		var err error
		if lock, err = lockIndex(path); err != nil {
			return nil, err
		}
	}
	x := &index{lock: lock, path: path, head: fmt.Sprintf("sandsea-keeper 1 %s %s\n", boot, data)}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		lock.Close()
		return nil, fmt.Errorf("read keeper index: %w", err)
	}
	x.live = parseIndex(old, x.head)
	if err := x.rewrite(); err != nil {
		lock.Close()
		return nil, err
	}
	return x, nil
}

func lockIndex(path string) (*os.File, error) {
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open keeper lock: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, ErrRunning)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return lock, nil
}

// parseIndex is total: a line that was cut by a kill, or that a later version wrote, is skipped.
func parseIndex(b []byte, head string) map[mark]struct{} {
	live := make(map[mark]struct{})
	rest, ok := bytes.CutPrefix(b, []byte(head))
	if !ok {
		return live
	}
	end := bytes.LastIndexByte(rest, '\n')
	s := bufio.NewScanner(bytes.NewReader(rest[:end+1]))
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) != 3 {
			continue
		}
		n, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil || n < 0 {
			continue
		}
		k := Key{Sandbox: f[1], Number: n}
		switch f[0] {
		case string(Fired), string(Overflow):
			live[mark{EventKind(f[0]), k}] = struct{}{}
		case "gone":
			delete(live, mark{Fired, k})
			delete(live, mark{Overflow, k})
		}
	}
	return live
}

// rewrite replaces the file by one that holds what is live.
func (x *index) rewrite() error {
	var b bytes.Buffer
	b.WriteString(x.head)
	for m := range x.live {
		fmt.Fprintf(&b, "%s %s %d\n", m.kind, m.key.Sandbox, m.key.Number)
	}
	next := x.path + ".next"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("begin keeper index: %w", err)
	}
	// Room for marks also on a full disk; where the call is not supported there is none, which is no reason to stop.
	const keepSize = 1
	_ = syscall.Fallocate(int(f.Fd()), keepSize, 0, 64<<10)
	_, err = f.Write(b.Bytes())
	if err == nil {
		err = os.Rename(next, x.path)
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("write keeper index: %w", err)
	}
	if x.f != nil {
		x.f.Close()
	}
	x.f, x.size = f, int64(b.Len())
	return nil
}

func (x *index) has(kind EventKind, k Key) bool {
	_, ok := x.live[mark{kind, k}]
	return ok
}

// add remembers a decided kill; it returns when a kill -9 of this process can no longer undo that.
func (x *index) add(kind EventKind, k Key) error {
	x.live[mark{kind, k}] = struct{}{}
	return x.append(string(kind), k)
}

// forget drops what is known of a key, if anything is.
func (x *index) forget(k Key) error {
	if !x.has(Fired, k) && !x.has(Overflow, k) {
		return nil
	}
	delete(x.live, mark{Fired, k})
	delete(x.live, mark{Overflow, k})
	return x.append("gone", k)
}

// keys yields the marks of a sandbox's commands and of itself.
func (x *index) keys(sandbox string) (ks []Key) {
	for m := range x.live {
		if m.key.Sandbox == sandbox {
			ks = append(ks, m.key)
		}
	}
	return ks
}

func (x *index) append(word string, k Key) error {
	if x.size > compactAt && x.size > int64(len(x.live))*200 {
		return x.rewrite()
	}
	n, err := fmt.Fprintf(x.f, "%s %s %d\n", word, k.Sandbox, k.Number)
	x.size += int64(n)
	if err != nil {
		return fmt.Errorf("write keeper index: %w", err)
	}
	return nil
}

func (x *index) close() error { return errors.Join(x.f.Close(), x.lock.Close()) }
