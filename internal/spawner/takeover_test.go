package spawner_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// A newer spawner takes the socket from one that lives: there is one to answer at every moment, and the children of the
// one before live on when it ends.
func TestASpawnerTakesOverFromOneThatLives(t *testing.T) {
	n := start(t)
	c := n.dial(t)
	s, g := n.spec(t, "before")
	child, err := c.Spawn(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeChild(child)
	old := n.cmd

	t.Setenv("SANDSEA_TEST_TAKEOVER", "1")
	n.run(t)
	wait(t, "the newer one answers", func() error {
		sc, err := scm.Dial(t.Context(), n.socket) // never refused
		if err != nil {
			t.Fatal(err)
		}
		defer sc.Close()
		cred, err := sc.Peer()
		if err == nil && cred.Pid != n.cmd.Process.Pid {
			err = os.ErrNotExist
		}
		return err
	})
	next := n.dial(t)
	if err := old.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := old.Wait(); err != nil {
		t.Errorf("the one before ended with %v", err)
	}
	if done, err := pidfd.Done(child.Pidfd); done || err != nil {
		t.Errorf("the child of the one before: done %v, %v", done, err)
	}
	later, g2 := n.spec(t, "after")
	second, err := next.Spawn(t.Context(), later)
	if err != nil {
		t.Fatal(err)
	}
	defer closeChild(second)
	for _, x := range []*cgroup.Group{g, g2} {
		if err := x.Kill(); err != nil {
			t.Error(err)
		}
		if err := x.WaitEmpty(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
