package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
)

// Machine is what a figure was measured on.
type Machine struct {
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	Kernel      string `json:"kernel"`
	Cgroup      string `json:"cgroup"` // "v2", "v1", "hybrid", "none"
	CPUModel    string `json:"cpu_model,omitempty"`
}

// ReadMachine describes this machine.
func ReadMachine() (Machine, error) {
	m := Machine{CPUs: runtime.NumCPU()}
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return m, err
	}
	m.Kernel = strings.TrimSpace(string(kernel))
	memory, err := field("/proc/meminfo", "MemTotal:")
	if err != nil {
		return m, err
	}
	kib, err := strconv.ParseInt(strings.TrimSuffix(memory, " kB"), 10, 64)
	if err != nil {
		return m, fmt.Errorf("MemTotal of /proc/meminfo: %w", err)
	}
	m.MemoryBytes = kib * 1024
	// Not on every machine.
	if m.CPUModel, err = field("/proc/cpuinfo", "model name"); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return m, err
	}
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return m, err
	}
	m.Cgroup = layout(table)
	return m, nil
}

// layout tells where controllers are: on v2 alone, on v1 beside a v2 tree, or on v1.
func layout(table []*mountinfo.Info) string {
	v2 := slices.ContainsFunc(table, func(i *mountinfo.Info) bool { return i.FSType == "cgroup2" })
	v1 := slices.ContainsFunc(table, func(i *mountinfo.Info) bool {
		return i.FSType == "cgroup" && slices.Contains(strings.Split(i.VFSOptions, ","), "memory")
	})
	switch {
	case v1 && v2:
		return "hybrid"
	case v2:
		return "v2"
	case v1:
		return "v1"
	default:
		return "none"
	}
}

// field gives what follows key in the first line that begins with it.
func field(path, key string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(strings.TrimLeft(rest, "\t :")), nil
		}
	}
	return "", fmt.Errorf("%s has no %s: %w", path, key, fs.ErrNotExist)
}

// meter knows what a run was measured under.
type meter struct {
	started time.Time
	cpu     cpuTimes
	load    float64
}

func newMeter() (m meter, err error) {
	m.started = time.Now()
	if m.load, err = loadAverage(); err != nil {
		return m, err
	}
	m.cpu, err = readCPU()
	return m, err
}

// read writes it into a document.
func (m meter) read(d *Document) error {
	after, err := readCPU()
	if err != nil {
		return err
	}
	if d.Machine, err = ReadMachine(); err != nil {
		return err
	}
	d.Schema, d.Started, d.Seconds = Schema, m.started.UTC().Truncate(time.Second), round3(time.Since(m.started).Seconds())
	d.Steal, d.Load = round3(m.cpu.stealUntil(after)), m.load
	return nil
}

// Measure adds to what do has measured how long it took, and under which circumstances.
func Measure(do func() (Document, error)) (Document, error) {
	m, err := newMeter()
	if err != nil {
		return Document{}, err
	}
	d, err := do()
	if err != nil {
		return Document{}, err
	}
	return d, m.read(&d)
}

// loadAverage is that of the minute before.
func loadAverage() (float64, error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(b), " ")
	return strconv.ParseFloat(first, 64)
}

// MemoryUsed is how much memory of the machine is not available, in bytes.
func MemoryUsed() (int64, error) {
	var at [2]int64
	for i, key := range []string{"MemTotal:", "MemAvailable:"} {
		text, err := field("/proc/meminfo", key)
		if err != nil {
			return 0, err
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(text, " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s of /proc/meminfo: %w", key, err)
		}
		at[i] = kib * 1024
	}
	return at[0] - at[1], nil
}

// cpuTimes are those of the whole machine, in ticks.
type cpuTimes struct{ total, steal int64 }

func readCPU() (cpuTimes, error) {
	line, err := field("/proc/stat", "cpu ")
	if err != nil {
		return cpuTimes{}, err
	}
	return parseCPU(line)
}

// parseCPU reads user nice system idle iowait irq softirq steal …; what follows is counted in user already.
func parseCPU(line string) (cpuTimes, error) {
	var t cpuTimes
	fields := strings.Fields(line)
	if len(fields) < 8 {
		return t, fmt.Errorf("/proc/stat: %q has no steal time", line)
	}
	for i, f := range fields[:8] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return t, fmt.Errorf("/proc/stat: %w", err)
		}
		t.total += n
		if i == 7 {
			t.steal = n
		}
	}
	return t, nil
}

// stealUntil is the part of the time from t to later that was stolen.
func (t cpuTimes) stealUntil(later cpuTimes) float64 {
	if later.total <= t.total {
		return 0
	}
	return float64(max(later.steal-t.steal, 0)) / float64(later.total-t.total)
}
