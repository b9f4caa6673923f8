package netslot

import (
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	// foldFor is how long denials of the same are counted together.
	foldFor = time.Second
	// maxFolded is how many different denials are kept meanwhile; of more only their number is, by sandbox.
	maxFolded = 4096
	// waiting is how many a slow reader can be behind.
	waiting = 1024
)

// denials are folded and handed on.
type denials struct {
	out  chan wire.Denial
	done sync.WaitGroup
}

// tell begins to read the walls' denials. It ends when the wall is closed.
func (g *Gate) tell() *denials {
	d := &denials{out: make(chan wire.Denial, waiting)}
	events := make(chan cgroupbpf.Event)
	d.done.Go(func() {
		defer close(events)
		for {
			e, err := g.wall.Next()
			if err != nil {
				return
			}
			events <- e
		}
	})
	d.done.Go(func() { g.fold(d.out, events) })
	return d
}

func (d *denials) wait() { d.done.Wait() }

// Denials are what the walls rejected, folded per second. One without To counts what was too much to tell singly. The
// channel is closed by Close; who does not read loses no more than details.
func (g *Gate) Denials() <-chan wire.Denial { return g.told.out }

func (g *Gate) fold(out chan<- wire.Denial, events <-chan cgroupbpf.Event) {
	defer close(out)
	folded := folder{}
	var flush <-chan time.Time
	for {
		select {
		case e, ok := <-events:
			if !ok {
				folded.hand(out)
				return
			}
			g.mu.Lock()
			s, known := g.groups[e.Group]
			g.mu.Unlock()
			if !known {
				continue // released, or not adopted yet
			}
			folded.add(s.Addr(), e)
			if flush == nil {
				flush = time.After(foldFor)
			}
		case <-flush:
			flush = nil
			if !folded.hand(out) {
				flush = time.After(foldFor)
			}
		}
	}
}

// what is denied is told apart by.
type what struct {
	addr     netip.Addr
	to       netip.AddrPort
	protocol policy.Protocol
}

// folder counts denials.
type folder map[what]int64

func (f folder) add(addr netip.Addr, e cgroupbpf.Event) {
	w := what{addr, e.To, protocol(e.Protocol)}
	if _, ok := f[w]; !ok && len(f) >= maxFolded {
		w = what{addr: addr}
	}
	f[w]++
	if e.Untold > 0 {
		f[what{addr: addr}] += int64(e.Untold)
	}
}

// hand passes on what there is room for, and reports whether that is all.
func (f folder) hand(out chan<- wire.Denial) bool {
	for w, n := range f {
		select {
		case out <- wire.Denial{Addr: w.addr, To: w.to, Protocol: w.protocol, Count: n}:
			delete(f, w)
		default:
			return false
		}
	}
	return true
}

func protocol(number uint8) policy.Protocol {
	switch number {
	case tcp:
		return policy.TCP
	case udp:
		return policy.UDP
	default:
		return policy.Protocol(strconv.Itoa(int(number)))
	}
}
