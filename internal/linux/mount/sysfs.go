package mount

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Sysfs returns a read-only detached sysfs of a new, empty network namespace: it shows the machine but no network
// device of the host.
func Sysfs() (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		// The thread leaves the host's network namespace, so it is never unlocked and ends with this goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("unshare the network for a sysfs: %w", err)}
			return
		}
		f, err := New("sysfs", ReadOnly|NoSUID|NoDev|NoExec)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}
