package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
)

// paged shows what show prints by the program that PAGER names, when a terminal is looked at that does not hold it all.
// Otherwise, or when there is no such program, it is printed as it is. What goes to standard error follows.
func (a *app) paged(ctx context.Context, show func()) {
	pager := os.Getenv("PAGER")
	if pager == "" || !a.io.OutTTY || !a.io.InTTY {
		show()
		return
	}
	out, errs := a.io.Out, a.io.Err
	var page, notes bytes.Buffer
	a.io.Out, a.io.Err = &page, &notes
	show()
	a.io.Out, a.io.Err = out, errs
	if _, rows := a.io.Size(); bytes.Count(page.Bytes(), []byte("\n")) < rows || !a.throughPager(ctx, pager, page.Bytes()) {
		_, _ = out.Write(page.Bytes()) // OutError tells
	}
	_, _ = io.Copy(errs, &notes) // there is nowhere else to say it
}

// throughPager runs the pager to its end; false if it cannot be run. Ctrl-C is the pager's as long as it runs.
func (a *app) throughPager(ctx context.Context, pager string, page []byte) (ran bool) {
	take := func(sig os.Signal) bool { return sig == os.Interrupt }
	a.onInterrupt.Store(&take)
	defer a.onInterrupt.Store(nil)
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", pager)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(page), os.Stdout, os.Stderr
	cmd.Env = os.Environ()
	if _, set := os.LookupEnv("LESS"); !set {
		cmd.Env = append(cmd.Env, "LESS=R") // else it shows the letters of our colours
	}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return !slices.Contains([]int{126, 127}, exit.ExitCode()) // as sh says that there is no such program
	}
	return err == nil
}
