package cgroupfs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// signalRounds bounds how often Signal looks for processes that were forked while it was at work. A fork bomb outruns
// any number; cgroup.kill is for those.
const signalRounds = 64

// Signal sends sig to every process in the group itself, those that are forked meanwhile included, each once. It never
// hits a stranger that got the number of a process that ended: it holds a pidfd and looks again before it sends.
func Signal(dir *os.File, sig int) error {
	done := map[int]bool{}
	for range signalRounds {
		pids, err := Procs(dir)
		if err != nil {
			return err
		}
		pids = slices.DeleteFunc(pids, func(pid int) bool { return done[pid] })
		if len(pids) == 0 {
			return nil
		}
		if err := signalAll(dir, pids, unix.Signal(sig), done); err != nil {
			return err
		}
	}
	return fmt.Errorf("signal %d to %s: it forks faster than it can be signalled", sig, dir.Name())
}

// signalAll signals those of pids that are in the group after their pidfd was opened, in batches that keep the number
// of descriptors small.
func signalAll(dir *os.File, pids []int, sig unix.Signal, done map[int]bool) error {
	for batch := range slices.Chunk(pids, 64) {
		fds := make(map[int]int, len(batch))
		closeAll := func() {
			for _, fd := range fds {
				unix.Close(fd)
			}
		}
		for _, pid := range batch {
			done[pid] = true
			fd, err := unix.PidfdOpen(pid, 0)
			if errors.Is(err, unix.ESRCH) {
				continue
			}
			if err != nil {
				closeAll()
				return fmt.Errorf("pidfd of %d in %s: %w", pid, dir.Name(), err)
			}
			fds[pid] = fd
		}
		still, err := Procs(dir)
		if err != nil {
			closeAll()
			return err
		}
		for _, pid := range still {
			fd, ok := fds[pid]
			if !ok {
				continue
			}
			if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				closeAll()
				return fmt.Errorf("signal %d to %d in %s: %w", sig, pid, dir.Name(), err)
			}
		}
		closeAll()
	}
	return nil
}
