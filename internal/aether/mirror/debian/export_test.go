package debian

import "time"

// ListAtMost makes s remember only so many files of pools.
func (s *Service) ListAtMost(n int) { s.listed = newTable(n, s.learning.forget) }

// List notes a file of an archive as if an index had it.
func (s *Service) List(archive, path, sha256 string) {
	s.listed.add(archive, path, sha256, time.Time{})
}
