// Command newcomer does what somebody does who has just heard of Sandsea and has only the README: ten steps, with the
// mistakes that people make. Every command line is taken from the README; a step whose line is not there fails. Where a
// step leads into an error, the way out is the one that the error names.
//
// It prints a line for each step with the time it took, and how long it was from the clone to the first output of a
// sandbox. Runs as root on Debian 12.
//
//	go run ./test/newcomer                       from a fresh clone of this repository, with builds and the demo
//	go run ./test/newcomer -binary build/sandsea the short form: a binary that is there, no demo, no download
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	var n newcomer
	flag.StringVar(&n.source, "source", ".", "repository to clone")
	flag.StringVar(&n.binary, "binary", "", "short form with this binary")
	flag.StringVar(&n.python, "python", "", "short form: a Python that has the SDK")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	n.say = func(format string, args ...any) { fmt.Printf(format+"\n", args...) }
	if err := n.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "newcomer:", err)
		os.Exit(1)
	}
}

// coldLimit is what the time from the clone to the first output of a sandbox may be.
const coldLimit = 5 * time.Minute

// step is one of the ten.
type step struct {
	name string
	do   func(context.Context) error
}

// run does the ten steps and leaves nothing.
func (n *newcomer) run(ctx context.Context) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("needs root")
	}
	defer func() { err = errors.Join(err, n.leave()) }()
	if err := n.arrive(ctx); err != nil {
		return err
	}
	for i, s := range []step{
		{"clone, make demo", n.clone},
		{"up without root, then as told", n.up},
		{"run before any image, then as told", n.tooEarly},
		{"import with a typo, interrupted, again; hello", n.importImage},
		{"pip install denied: why, and as of a day", n.network},
		{"exceed memory, time, output; tell them apart", n.limits},
		{"create, shell, cp both ways, client killed, come back", n.session},
		{"the SDK's listing as a file and in a notebook", n.sdk},
		{"kill -9 of the daemon in a run: nothing is lost", n.killed},
		{"stop --all, down: nothing is left", n.end},
	} {
		began := time.Now()
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("step %d, %s: %w", i+1, s.name, err)
		}
		n.say("%2d  %-55s %6.1f s", i+1, s.name, time.Since(began).Seconds())
	}
	if !n.short() {
		n.say("clone to the first output of a sandbox: %.0f s in 4 commands, limit %.0f s", n.path.Seconds(), coldLimit.Seconds())
		if n.path > coldLimit {
			return fmt.Errorf("clone to the first output took %s", n.path)
		}
	}
	n.say("newcomer: ok")
	return nil
}
