// Package tcp sets what package net does not set of a TCP connection. It owns nothing; all functions may be called at
// once.
package tcp

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// GiveUp breaks a connection when what was sent is not acknowledged for so long, as by a machine that lost its power. The
// kernel's own limit is about a quarter of an hour, and keep-alive is silent meanwhile.
func GiveUp(c syscall.RawConn, after time.Duration) error {
	var err error
	cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after.Milliseconds()))
	})
	if cerr != nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("limit how long what was sent may go unacknowledged: %w", err)
	}
	return nil
}
