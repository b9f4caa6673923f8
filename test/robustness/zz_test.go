package robustness

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestZZ(t *testing.T) {
	s := server.Start(t, server.Config{TOML: "log_level = \"debug\"\n"})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	bad := 0
	for n := range 40 {
		before := len(s.Log())
		var g errgroup.Group
		for i := range 8 {
			g.Go(func() error {
				ctx := within(t, 30*time.Second)
				sb, err := s.Client.Create(ctx, spec(), fmt.Sprint(n, "-", i))
				if err != nil {
					bad++
					t.Logf("%d: %v", n, err)
					return err
				}
				return sb.Stop(ctx)
			})
		}
		pause(t, time.Duration(n%12)*time.Millisecond/2)
		s.Kill("spawner")
		if g.Wait() != nil && bad > 0 {
			_ = before
			for l := range strings.Lines(s.Log()) {
				if !strings.Contains(l, "part=etcd") && !strings.Contains(l, "stopped") && !strings.Contains(l, "closed") {
					fmt.Print(l)
				}
			}
			break
		}
		wait.Until(t, 10*time.Second, func() bool { return s.Pid("spawner") != 0 }, "back")
		pause(t, 300*time.Millisecond)
	}
}
