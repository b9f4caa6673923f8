// Package affinity reads and sets on which processors threads may run. It owns nothing; all functions may be called at
// once.
package affinity

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxCPU is the largest number of processors that the kernel's mask holds here.
const maxCPU = 1024

// Allowed lists the processors that this process may use, in order.
func Allowed() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read processor affinity: %w", err)
	}
	var out []int
	for cpu := range maxCPU {
		if set.IsSet(cpu) {
			out = append(out, cpu)
		}
	}
	return out, nil
}

// Set lets every thread of a process run on these processors. A thread that ends meanwhile is no error; os.ErrNotExist
// when the process is gone. A thread made meanwhile may be missed: call it twice.
func Set(pid int, cpus []int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return fmt.Errorf("threads of process %d: %w", pid, err)
	}
	for _, t := range threads {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("set processor affinity of thread %d: %w", tid, err)
		}
	}
	return nil
}
