package upper

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/leak"
)

// victimDir makes this program, started again, the edge that TestKill kills.
const victimDir = "UPPER_TEST_VICTIM_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(victimDir); dir != "" {
		victim(dir)
		return
	}
	os.Exit(leak.Main(m))
}

// victim takes layers for ever and says which it has, and which it is about to give back.
func victim(dir string) {
	out := bufio.NewWriter(os.Stdout)
	say := func(format string, a ...any) {
		fmt.Fprintf(out, format+"\n", a...)
		out.Flush()
	}
	s, err := Open(context.Background(), testConfig(dir))
	if err != nil {
		say("error %v", err)
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // the test is gone
		os.Exit(1)
	}()
	for i := 0; ; i++ {
		u, err := s.Take(context.Background(), fmt.Sprintf("s%d", i), 32<<20, 1<<20)
		if err != nil {
			say("error %v", err)
			return
		}
		u.Close()
		say("took s%d", i)
		if i%3 == 0 {
			say("releasing s%d", i)
			if err := s.Release(fmt.Sprintf("s%d", i)); err != nil {
				say("error %v", err)
				return
			}
		}
	}
}
