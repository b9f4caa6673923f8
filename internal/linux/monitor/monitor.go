// Package monitor slows down the thread with which the Go runtime watches a process.
//
// While anything runs in a process, that thread (runtime.sysmon) sleeps 20 µs at a time for the first millisecond of each
// burst, and as long as there is something to do for it. A daemon whose work comes in short bursts with system calls in
// between never gets out of that: some 3,000 wake-ups a second, on the development machine a sixth of the time of our
// daemons. A coarser timer for this one thread makes a few hundred of them.
//
// What the runtime loses: a system call that blocks gives its processor to another goroutine after some 0.3 ms and not
// 0.03, and a goroutine that computes is interrupted after 10.3 ms and not 10. Nothing that is right depends on either.
package monitor

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// Slack is worth setting: most of what there is to gain, and not yet felt by a call that waits for a processor.
const Slack = 300 * time.Microsecond

// Relax lets the monitor's timers be late by up to slack. It does not matter when it is called. Threads that the monitor
// makes afterwards inherit it, others do not change. Repeats are harmless.
func Relax(slack time.Duration) error {
	tid, err := find()
	if err != nil {
		return err
	}
	value := []byte(strconv.FormatInt(slack.Nanoseconds(), 10))
	if err := os.WriteFile("/proc/"+tid+"/timerslack_ns", value, 0); err != nil {
		return fmt.Errorf("slow down the runtime's monitor: %w", err)
	}
	return nil
}

// find gives the monitor's thread. The runtime makes it before any other.
func find() (tid string, err error) {
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return "", fmt.Errorf("find the runtime's monitor: %w", err)
	}
	defer dir.Close()
	// Not sorted: the kernel lists threads in the order of their making.
	tids, err := dir.Readdirnames(-1)
	if err != nil {
		return "", fmt.Errorf("find the runtime's monitor: %w", err)
	}
	if len(tids) < 2 || tids[0] != strconv.Itoa(os.Getpid()) {
		return "", errors.New("find the runtime's monitor: it is not the second thread")
	}
	return tids[1], nil
}
