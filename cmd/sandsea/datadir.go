package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/renameio/v2"

	"github.com/sandsea/sandsea/api/errdefs"
)

// dataDir is an opened data directory: locked, with its permanent id.
type dataDir struct {
	path string
	id   string // 32 hex digits, for ever
	lock *os.File
	// fresh: nothing had been in it.
	fresh bool
}

// tag is the part of every kernel name that tells this edge's from another's.
func (d *dataDir) tag() string { return d.id[:8] }

func (d *dataDir) join(names ...string) string {
	return filepath.Join(append([]string{d.path}, names...)...)
}

func (d *dataDir) close() { d.lock.Close() }

// joinFile is the invitation that a node of a cluster keeps.
const joinFile = "node.join"

// What a directory has been used for. One of sandsea up is a server with an edge.

func (d *dataDir) has(name string) bool {
	_, err := os.Stat(d.join(name))
	return err == nil
}

func (d *dataDir) isNode() bool   { return d.has(joinFile) }
func (d *dataDir) isServer() bool { return d.has("etcd") }
func (d *dataDir) hasEdge() bool  { return d.has("node.json") }

// wrongDirectory refuses a directory that is of another use.
func wrongDirectory(d *dataDir, use, command string) error {
	return errdefs.New(errdefs.FailedPrecondition, d.path, "is the data of %s", use).WithField("data", "").
		WithHint("Run sandsea %s on it, or choose another: --data DIR", command)
}

// openDataDir makes the directory if it is missing, locks it against another edge and reads its id.
func openDataDir(path string) (*dataDir, error) {
	if err := os.MkdirAll(path, 0o711); err != nil {
		return nil, unwritable(path, err)
	}
	d := &dataDir{path: path}
	var err error
	d.lock, err = os.OpenFile(d.join("lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, unwritable(path, err)
	}
	if err := syscall.Flock(int(d.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, since := lockHolder(d.lock)
		d.close()
		down := "sandsea down"
		if path != defaultServerConfig().Data {
			down += " --data " + path
		}
		return nil, errdefs.New(errdefs.AlreadyExists, path, "in use by sandsea %s%s", holder, since).WithHint("End it: %s", down)
	}
	if err := d.lock.Truncate(0); err != nil {
		d.close()
		return nil, unwritable(path, err)
	}
	if _, err := d.lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0); err != nil {
		d.close()
		return nil, unwritable(path, err)
	}
	if err := d.identify(); err != nil {
		d.close()
		return nil, err
	}
	for _, name := range []string{"run", "tmp", "output", "journal"} {
		if err := os.MkdirAll(d.join(name), 0o700); err != nil {
			d.close()
			return nil, unwritable(path, err)
		}
	}
	return d, nil
}

// identify reads the directory's id, or gives it one.
func (d *dataDir) identify() error {
	text, err := os.ReadFile(d.join("id"))
	switch {
	case err == nil:
		d.id = strings.TrimSpace(string(text))
		if raw, err := hex.DecodeString(d.id); err != nil || len(raw) != 16 {
			return errdefs.New(errdefs.DataLoss, d.join("id"), "is damaged").
				WithHint("Restore it: its first 8 letters are in the names of the cgroups sandsea-*")
		}
		return nil
	case errors.Is(err, fs.ErrNotExist):
		raw := make([]byte, 16)
		if _, err := rand.Read(raw); err != nil {
			return fmt.Errorf("make an id for %s: %w", d.path, err)
		}
		d.id, d.fresh = hex.EncodeToString(raw), true
		if err := renameio.WriteFile(d.join("id"), []byte(d.id+"\n"), 0o644); err != nil {
			return unwritable(d.path, err)
		}
		return nil
	}
	return unwritable(d.path, err)
}

func unwritable(path string, err error) error {
	return errdefs.New(errdefs.FailedPrecondition, path, "%s", rootMessage(err)).WithField("data", "").
		WithHint("Choose another: --data DIR").Wrap(err)
}

// lockHolder reads who has the lock and since when.
func lockHolder(lock *os.File) (pid, since string) {
	text := make([]byte, 32)
	n, _ := lock.ReadAt(text, 0)
	number, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		return "itself", ""
	}
	st, err := os.Stat(fmt.Sprintf("/proc/%d", number))
	if err != nil {
		return fmt.Sprintf("pid %d", number), ""
	}
	return fmt.Sprintf("pid %d", number), ", up " + time.Since(st.ModTime()).Round(time.Second).String()
}

// portHolder names the process that listens on a TCP port of this machine, from /proc.
func portHolder(port string) string {
	want, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return ""
	}
	inode := listeningInode(uint16(want))
	if inode == "" {
		return ""
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return ""
	}
	for _, proc := range procs {
		fds, err := os.ReadDir(filepath.Join(proc, "fd"))
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if target, err := os.Readlink(filepath.Join(proc, "fd", fd.Name())); err == nil && target == "socket:["+inode+"]" {
				name, err := os.ReadFile(filepath.Join(proc, "comm"))
				if err != nil {
					return ""
				}
				return fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(name)), filepath.Base(proc))
			}
		}
	}
	return ""
}

func listeningInode(port uint16) string {
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			// Local address as HEX:PORT, state 0A is LISTEN, the inode is the tenth field.
			if len(f) > 9 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				return f[9]
			}
		}
	}
	return ""
}
