package cgroup

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/internal/sandbox"
)

func TestFindMounts(t *testing.T) {
	for _, c := range []struct {
		name, table string
		want        mounts
	}{
		{
			"a v2 machine has one tree",
			"30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
			mounts{v2: "/sys/fs/cgroup", v1: map[string]string{}},
		},
		{
			"a hybrid machine has both, with controllers that share a mount",
			"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
				"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
				"33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
				"34 31 0:31 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n" +
				"35 31 0:32 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n" +
				"36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			mounts{v2: "/sys/fs/cgroup/unified", v1: map[string]string{
				"cpu": "/sys/fs/cgroup/cpu,cpuacct", "memory": "/sys/fs/cgroup/memory", "pids": "/sys/fs/cgroup/pids",
			}},
		},
		{
			"a machine without v2 shows none",
			"33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
			mounts{v1: map[string]string{"memory": "/sys/fs/cgroup/memory"}},
		},
		{
			"a tree that cannot be written does not count",
			"30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw\n",
			mounts{v1: map[string]string{}},
		},
		{
			"the mount that shows most of the tree wins over a bind of a part",
			"30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n" +
				"31 23 0:26 /part /other rw - cgroup2 cgroup2 rw\n",
			mounts{v2: "/cg", v1: map[string]string{}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			table, err := mountinfo.GetMountsFromReader(strings.NewReader(c.table), nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, findMounts(table), cmp.AllowUnexported(mounts{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSettings(t *testing.T) {
	l := sandbox.Limits{Memory: 64 << 20, CPUMillis: 1500, Pids: 100}
	write := func(controller string, v2 bool, l sandbox.Limits, swap bool) string {
		var b strings.Builder
		for _, s := range settings(controller, v2, l, swap) {
			b.WriteString(s.file + "=" + s.value + "\n")
		}
		return b.String()
	}
	for _, c := range []struct{ name, got, want string }{
		{
			"v1 memory covers swap", write("memory", false, l, true),
			"memory.limit_in_bytes=67108864\nmemory.memsw.limit_in_bytes=67108864\n",
		},
		{
			"v2 memory allows no swap beside it", write("memory", true, l, true),
			"memory.max=67108864\nmemory.swap.max=0\n",
		},
		{
			"a kernel that does not count swap is not asked to", write("memory", false, l, false),
			"memory.limit_in_bytes=67108864\n",
		},
		{
			"v1 cpu has period, no burst, then quota", write("cpu", false, l, true),
			"cpu.cfs_period_us=100000\ncpu.cfs_burst_us=0\ncpu.cfs_quota_us=150000\n",
		},
		{"v2 cpu has quota and period", write("cpu", true, l, true), "cpu.max=150000 100000\ncpu.max.burst=0\n"},
		{
			"the least cpu share is the least quota of the kernel",
			write("cpu", true, sandbox.Limits{CPUMillis: sandbox.MinCPUMillis}, true),
			"cpu.max=1000 100000\ncpu.max.burst=0\n",
		},
		{"pids", write("pids", true, l, true), "pids.max=100\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.got != c.want {
				t.Errorf("got\n%swant\n%s", c.got, c.want)
			}
		})
	}
}
