package nodeapi

import (
	"bufio"
	"net"
)

// Waking is waking, for the test of the whole table.
func Waking(procedure string) (wakes, ok bool) { return waking(procedure) }

// Join is join, with nothing that came along with the request.
func Join(outside, inside net.Conn) { join(outside, bufio.NewReader(outside), inside) }
