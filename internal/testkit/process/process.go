// Package process tells a test of processes that need not be its children.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/sandsea/sandsea/internal/linux/pidfd"
)

// Alive reports whether any thread of a process still runs, so that it has its files. One that nobody has waited for is
// not alive, nor is one that somebody waits for at this moment.
func Alive(pid int) bool {
	f, err := pidfd.Open(pid)
	if err != nil {
		return !errors.Is(err, os.ErrProcessDone)
	}
	defer f.Close()
	done, err := pidfd.Done(f)
	return err != nil || !done
}

// Session is the session of a process.
func Session(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The sixth field of proc(5); the second may hold anything.
	return strconv.Atoi(strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))[6-3])
}
