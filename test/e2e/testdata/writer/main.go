// Command writer writes a sequence to standard output until SIGTERM and then says on standard error how much it was and
// how long the longest write took: "BYTES MICROSECONDS". Usage: writer SEED.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	tick := time.NewTicker(4 * time.Millisecond)
	var total int
	var longest time.Duration
	for n := 0; ; n++ {
		select {
		case <-stop:
			fmt.Fprintf(os.Stderr, "%d %d\n", total, longest.Microseconds())
			return
		case <-tick.C:
		}
		began := time.Now()
		m, err := fmt.Printf("%s %d ----------------------------------------------------------------\n", os.Args[1], n)
		longest = max(longest, time.Since(began))
		total += m
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
