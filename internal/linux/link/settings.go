package link

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/mount"
)

// settings sets values below /proc/sys/net for the namespace of the calling thread.
//
// A procfs keeps an entry of each namespace that was looked at through it, all under one name, and looks at every one of
// them whenever it is looked for another: with 3,000 namespaces a single setting takes milliseconds. So each procfs here is
// one of our own, and serves only so many namespaces. Methods may be called at once.
type settings struct {
	mu   sync.Mutex
	proc *os.File // guarded by mu: a procfs, mounted nowhere; nil: none yet
	uses int      // guarded by mu
}

// usesOfProc is how many namespaces one procfs serves.
const usesOfProc = 128

func (s *settings) set(name, value string) error {
	f, err := s.open("sys/net/" + name)
	if err == nil {
		_, err = f.WriteString(value)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("set net/%s: %w", name, err)
	}
	return nil
}

func (s *settings) open(path string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uses >= usesOfProc {
		if err := s.closeLocked(); err != nil {
			return nil, err
		}
	}
	if s.proc == nil {
		var err error
		if s.proc, err = mount.New("proc", mount.NoSUID|mount.NoDev|mount.NoExec); err != nil {
			return nil, err
		}
	}
	s.uses++
	fd, err := unix.Openat(int(s.proc.Fd()), path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (s *settings) closeLocked() error {
	if s.proc == nil {
		return nil
	}
	err := s.proc.Close()
	s.proc, s.uses = nil, 0
	return err
}

func (s *settings) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closeLocked()
}
