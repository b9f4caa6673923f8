package nodeapi

import (
	"bufio"
	"net"
	"time"
)

// BlobsAtOnce is how many blobs are read at once.
const BlobsAtOnce = blobsAtOnce

// SetStall says how long a reader of a blob may take nothing. Before the first call only.
func (s *Server) SetStall(d time.Duration) { s.stall = d }

// Waking is waking, for the test of the whole table.
func Waking(procedure string) (wakes, ok bool) { return waking(procedure) }

// Join is join, with nothing that came along with the request.
func Join(outside, inside net.Conn) { join(outside, bufio.NewReader(outside), inside) }
