package probe

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/upper"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// limit bounds each trial. One takes milliseconds; a machine that needs seconds for one is not fit.
const limit = 10 * time.Second

var errLimit = fmt.Errorf("no answer within %s", limit)

// Config says what to try with.
type Config struct {
	// Dir is the data directory: layers are read from its file system and output is recorded there.
	Dir string
	// IDBase is the first of 65,536 host ids that are free to try with. 0: 1<<30.
	IDBase uint32
	// Cgroup are the edge's control groups. When nil, CgroupErr tells why there are none.
	Cgroup    *cgroup.Manager
	CgroupErr error
	// Upper are the edge's writable layers. When nil, UpperErr tells why there are none.
	Upper    *upper.Store
	UpperErr error
	// Filter is the seccomp program that sandboxes get. Nil: a small one is tried.
	Filter []byte
	// Log gets why a feature is missing. Nil discards.
	Log *slog.Logger
}

// result is what a trial found.
type result struct {
	status    node.Status
	mechanism string
	fix       string
}

func ok(mechanism string, args ...any) result {
	return result{status: node.OK, mechanism: fmt.Sprintf(mechanism, args...)}
}

func missing(err error, fix string, args ...any) result {
	return result{status: node.Missing, mechanism: text(err), fix: fmt.Sprintf(fix, args...)}
}

func unsure(err error, fix string, args ...any) result {
	return result{status: node.Unsure, mechanism: text(err), fix: fmt.Sprintf(fix, args...)}
}

// text is an error in one line, without the hint that fix gives anyhow.
func text(err error) string {
	s := err.Error()
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		s = e.Msg
		if s == "" {
			s = e.Kind.Error()
		}
	}
	return strings.Join(strings.Fields(s), " ")
}

// question is one feature and how to try it.
type question struct {
	feature  string
	optional bool
	run      func(ctx context.Context) result
}

// Run tries everything.
func Run(ctx context.Context, cfg Config) node.Capabilities {
	if cfg.IDBase == 0 {
		cfg.IDBase = 1 << 30
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &prober{cfg}
	c := node.Capabilities{
		Kernel: readLine("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU(), Memory: memory(),
		Cgroup: "none", NoFile: noFile(), PidMax: number(readLine("/proc/sys/kernel/pid_max")),
	}
	switch {
	case cfg.Cgroup != nil:
		c.Cgroup = cfg.Cgroup.Mode()
	case errors.Is(cfg.CgroupErr, errdefs.FailedPrecondition):
		c.Cgroup = "v1"
	}
	for _, t := range []question{
		{node.FeatureMemory, false, func(context.Context) result { return p.limit(node.FeatureMemory, "memory") }},
		{node.FeatureCPU, false, func(context.Context) result { return p.limit(node.FeatureCPU, "cpu") }},
		{node.FeaturePids, false, func(context.Context) result { return p.limit(node.FeaturePids, "pids") }},
		{node.FeatureDisk, false, p.disk},
		{node.FeatureOpenFiles, false, p.openFiles},
		{node.FeatureOutput, false, p.output},
		{node.FeatureKill, false, p.kill},
		{node.FeatureUserNS, false, p.userns},
		{node.FeatureSeccomp, false, p.seccomp},
		{node.FeatureLayers, false, p.layers},
		{node.FeatureNetwork, false, p.network},
		{node.FeatureEgress, false, p.egress},
		{node.FeatureDebian, true, p.debian},
		{node.FeatureExitFacts, true, p.exitFacts},
	} {
		r := bounded(ctx, t.run)
		if r.status != node.OK && r.status != node.Slower {
			cfg.Log.Info("feature is not there", "feature", t.feature, "status", r.status, "reason", r.mechanism)
		}
		c.Features = append(c.Features, node.Feature{
			Name: t.feature, Status: r.status, Mechanism: r.mechanism, Fix: r.fix, Optional: t.optional,
		})
	}
	slices.SortFunc(c.Features, func(a, b node.Feature) int { return strings.Compare(a.Name, b.Name) })
	return c
}

// bounded runs a trial and gives up on it after a while. A trial that hangs in the kernel cannot be ended; its
// goroutine goes when the kernel lets it.
func bounded(ctx context.Context, run func(context.Context) result) result {
	ctx, stop := context.WithTimeoutCause(ctx, limit, errLimit)
	defer stop()
	done := make(chan result, 1)
	go func() { done <- run(ctx) }()
	select {
	case r := <-done:
		return r
	case <-ctx.Done():
		return unsure(context.Cause(ctx), "See the kernel's log: dmesg")
	}
}

// Machine is Run with control groups and writable layers of its own, which it removes again. dir is the data directory
// that an edge would have; it need not exist.
func Machine(ctx context.Context, dir string, log *slog.Logger) (_ node.Capabilities, err error) {
	// What an edge would find on the file system of dir, in the nearest directory that there is.
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	if err := sweep(ctx, dir, log); err != nil {
		return node.Capabilities{}, fmt.Errorf("remove what a killed sandsea doctor has left: %w", err)
	}
	scratch, err := os.MkdirTemp(dir, fmt.Sprintf("%s%d-", scratchPrefix, os.Getpid()))
	if err != nil {
		return node.Capabilities{}, fmt.Errorf("try the file system of %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	cfg := Config{Dir: scratch, Log: log}
	cfg.Cgroup, cfg.CgroupErr = cgroup.Open(cgroup.Config{Tag: tagPrefix + strconv.Itoa(os.Getpid()), Log: log})
	if cfg.CgroupErr == nil {
		defer func() {
			undo, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errLimit)
			defer stop()
			err = errors.Join(err, cfg.Cgroup.Destroy(undo))
		}()
	}
	cfg.Upper, cfg.UpperErr = upper.Open(ctx, upper.Config{Dir: scratch, Log: log, Pool: -1, ImageBytes: 256 << 20})
	if cfg.UpperErr == nil {
		defer func() { err = errors.Join(err, cfg.Upper.Destroy()) }()
	}
	return Run(ctx, cfg), nil
}

// The names of what Machine makes, before its process id.
const (
	scratchPrefix = ".sandsea-doctor-"
	tagPrefix     = "doctor-"
)

// sweep removes the groups, and the scratch directories below dir, of processes that were killed in Machine.
func sweep(ctx context.Context, dir string, log *slog.Logger) error {
	var errs []error
	tags, err := cgroup.Tags(tagPrefix)
	errs = append(errs, err)
	for _, tag := range tags {
		if !dead(strings.TrimPrefix(tag, tagPrefix)) {
			continue
		}
		groups, err := cgroup.Open(cgroup.Config{Tag: tag, Log: log})
		if err == nil {
			err = groups.Destroy(ctx)
		}
		errs = append(errs, err)
	}
	entries, err := os.ReadDir(dir)
	errs = append(errs, err)
	for _, e := range entries {
		name, ours := strings.CutPrefix(e.Name(), scratchPrefix)
		if pid, _, ok := strings.Cut(name, "-"); ours && ok && dead(pid) {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// dead reports whether no process has this number.
func dead(pid string) bool {
	n, err := strconv.Atoi(pid)
	return err == nil && n > 0 && errors.Is(syscall.Kill(n, 0), syscall.ESRCH)
}

// Summary is the last line of `sandsea doctor`: what of the promises of the container backend holds, and whether all
// do.
func Summary(c node.Capabilities) (line string, good bool) {
	promises, broken, slower := 0, 0, 0
	for _, f := range c.Features {
		switch {
		case f.Optional:
			continue
		case f.Status == node.Slower:
			slower++
		case f.Status != node.OK:
			broken++
		}
		promises++
	}
	switch {
	case broken > 0:
		line = fmt.Sprintf("container: %d of %d promises not enforced; creates that need it are refused", broken, promises)
		return line, false
	case slower > 0:
		return fmt.Sprintf("container: enforces all it promises, %d by a slower way", slower), true
	default:
		return "container: enforces all it promises", true
	}
}

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	return string(line)
}

func number(s string) int64 {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// memory is the machine's.
func memory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "MemTotal:"); ok {
			return number(strings.TrimSuffix(v, "kB")) * 1024
		}
	}
	return 0
}

// noFile is the hard limit of open files, which a sandbox gets at most.
func noFile() int64 {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 0
	}
	return int64(min(l.Max, sandbox.DefaultOpenFiles))
}
