package monitor

import (
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestItIsTheMonitorThatIsSlowedDown: it is a thread that sleeps while goroutines run on others.
func TestItIsTheMonitorThatIsSlowedDown(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to look at threads")
	}
	if err := Relax(123 * time.Microsecond); err != nil {
		t.Fatal(err)
	}
	tid, err := find()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile("/proc/" + tid + "/timerslack_ns"); err != nil || strings.TrimSpace(string(b)) != "123000" {
		t.Errorf("its slack is %q, %v", b, err)
	}
	// A goroutine that computes keeps the monitor at its short sleeps; nanosleep is what no other thread of ours is in.
	var stop atomic.Bool
	var spins sync.WaitGroup
	spins.Go(func() {
		for !stop.Load() {
		}
	})
	defer spins.Wait()
	defer stop.Store(true)
	for end := time.Now().Add(20 * time.Second); ; {
		b, err := os.ReadFile("/proc/self/task/" + tid + "/syscall")
		if err != nil {
			t.Skipf("this kernel does not tell what threads do: %v", err)
		}
		if strings.HasPrefix(string(b), nanosleep) {
			return
		}
		if time.Now().After(end) {
			t.Fatal("it is never seen in a short sleep")
		}
	}
}
