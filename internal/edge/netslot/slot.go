package netslot

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/policy"
)

// Slot is one sandbox's place at the gate.
type Slot struct {
	g      *Gate
	number uint32
	name   string
	group  uint64

	mu       sync.Mutex // one change of the walls at a time
	released bool       // guarded by mu
}

// Number of the slot, for Adopt.
func (s *Slot) Number() uint32 { return s.number }

// Addr is the sandbox's address; its packets have no other source.
func (s *Slot) Addr() netip.Addr { return address(first + s.number) }

// Set puts walls in force. Meanwhile nothing passes that neither the old nor the new walls let pass, and after an error
// nothing that only one of them does. Invalid when there are more openings than can be enforced, Exhausted when the
// kernel has no room for them, NotFound after Release.
func (s *Slot) Set(w policy.Walls) error {
	prefixes, boxes, err := compile(w.Openings)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released {
		return errdefs.New(errdefs.NotFound, fmt.Sprintf("network slot %d", s.number), "it has been released")
	}
	// What passes must pass both walls, so either may be the first. This one runs into its limits.
	if err := s.g.wall.Put(s.group, cgroupbpf.Entry{Addr: s.Addr(), Names: w.Names, Openings: prefixes}); err != nil {
		return exhausted(s.name, err)
	}
	return s.g.table.Put(s.Addr(), w.Names, boxes)
}

// Release closes the walls for good. The number is given back once the link is gone, which goes with the sandbox's
// namespace. Idempotent; after an error the number stays taken.
func (s *Slot) Release() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released {
		return nil
	}
	if err := errors.Join(s.g.wall.Delete(s.group), s.g.table.Put(s.Addr(), false, nil)); err != nil {
		return fmt.Errorf("release network slot %d: %w", s.number, err)
	}
	s.released = true
	s.g.forget(s)
	return nil
}
