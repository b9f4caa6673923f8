package etcd

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// fill writes until the database is full, each value over the one before.
func fill(t *testing.T, s *Store) {
	t.Helper()
	value := make([]byte, 256<<10)
	for range 200 {
		_, err := s.Txn(t.Context(), nil, []store.Op{store.Put("/images/x", value)}, nil)
		if errors.Is(err, errdefs.Exhausted) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Fatal("it never was full")
}

func TestADatabaseThatWasFullTakesWritesAgain(t *testing.T) {
	for name, restart := range map[string]bool{"while it runs": false, "at the next start": true} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Dir: t.TempDir(), Quota: 8 << 20, Upkeep: 200 * time.Millisecond, CallTimeout: patience}
			first := cfg
			if restart {
				first.Upkeep = time.Hour
			}
			s, err := Open(t.Context(), first)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			fill(t, s)
			if restart {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if s, err = Open(t.Context(), cfg); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = s.Close() })
			}
			for n := range 3 {
				wait.Until(t, 20*time.Second, func() bool {
					_, err := s.Txn(t.Context(), nil, []store.Op{store.Put(fmt.Sprint("/images/y", n), []byte("z"))}, nil)
					return err == nil
				}, "a write is taken")
			}
			if _, err := s.Lease(t.Context(), time.Second); err != nil {
				t.Errorf("a lease: %v", err)
			}
		})
	}
}
