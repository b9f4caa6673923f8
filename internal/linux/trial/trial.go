// Package trial tries what cannot be undone on a thread of its own, which ends with the trial: no other thread of the
// process notices, and nothing is left.
package trial

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoEffect is a call that succeeded and did nothing.
var ErrNoEffect = errors.New("the kernel accepted it and it has no effect")

// onThread runs do on a thread that is thrown away.
func onThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread never ends, and it is what /proc shows as the process. Holding on to it, we get another.
			defer runtime.UnlockOSThread()
			done <- onThread(do)
			return
		}
		// Never unlocked: the thread ends with this goroutine.
		done <- do()
	}()
	return <-done
}

// Network makes an empty network namespace and looks into it.
func Network() error {
	return onThread(func() error {
		before, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare the network: %w", err)
		}
		after, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		if before == after {
			return ErrNoEffect
		}
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		if err != nil {
			return err
		}
		// Two lines of head, then one per device: only loopback is born with a namespace.
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		for _, l := range lines[min(2, len(lines)):] {
			name, _, _ := strings.Cut(strings.TrimSpace(l), ":")
			// Some kernels give fallback tunnels to each namespace; they lead nowhere.
			if name != "lo" && !strings.HasSuffix(name, "0") {
				return fmt.Errorf("an empty network namespace has a device %s", name)
			}
		}
		return nil
	})
}
