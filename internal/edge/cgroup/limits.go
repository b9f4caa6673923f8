package cgroup

import (
	"strconv"

	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// cpuPeriod is the period of the CPU quota, in microseconds: the kernel's default. A quota may not be below 1 ms, which
// makes sandbox.MinCPUMillis of it.
const cpuPeriod = 100_000

// setting is one value in one file of a controller's group.
type setting struct {
	file    string
	value   string
	field   string // what the request calls it
	feature string
	// optional settings are skipped when the kernel does not have the file: they are the kernel's default then.
	optional bool
}

// settings translates the limits for a controller. The order is that for lowering: memory before memory with swap.
//
// The memory limit covers memory and swap together. v1 can say so. v2 has a limit for each, so there swap is 0: a
// sandbox that may swap beside its memory would have more than it was given.
func settings(controller string, v2 bool, l sandbox.Limits, swapAccounted bool) []setting {
	num := func(n int64) string { return strconv.FormatInt(n, 10) }
	quota := num(max(l.CPUMillis*cpuPeriod/1000, 1000))
	const memory, cpu, pids = "limits.memory_bytes", "limits.cpu_millis", "limits.pids"
	switch {
	case controller == "memory" && v2:
		s := []setting{{"memory.max", num(l.Memory), memory, node.FeatureMemory, false}}
		if swapAccounted {
			s = append(s, setting{"memory.swap.max", "0", memory, node.FeatureMemory, false})
		}
		// One task must not die alone and leave a sandbox that is half dead by surprise; which process goes is the
		// kernel's choice, as on a computer, so memory.oom.group stays 0.
		return s
	case controller == "memory":
		s := []setting{{"memory.limit_in_bytes", num(l.Memory), memory, node.FeatureMemory, false}}
		if swapAccounted {
			s = append(s, setting{"memory.memsw.limit_in_bytes", num(l.Memory), memory, node.FeatureMemory, false})
		}
		return s
	case controller == "cpu" && v2:
		return []setting{
			{"cpu.max", quota + " " + num(cpuPeriod), cpu, node.FeatureCPU, false},
			{"cpu.max.burst", "0", cpu, node.FeatureCPU, true},
		}
	case controller == "cpu":
		return []setting{
			{"cpu.cfs_period_us", num(cpuPeriod), cpu, node.FeatureCPU, false},
			{"cpu.cfs_burst_us", "0", cpu, node.FeatureCPU, true},
			{"cpu.cfs_quota_us", quota, cpu, node.FeatureCPU, false},
		}
	default:
		return []setting{{"pids.max", num(l.Pids), "limits.pids", node.FeaturePids, false}}
	}
}

// mechanism names how a controller enforces its limit, for people.
func mechanism(controller string, v2, swapAccounted bool) string {
	switch {
	case controller == "memory" && v2 && swapAccounted:
		return "cgroup v2 memory.max, memory.swap.max 0"
	case controller == "memory" && v2:
		return "cgroup v2 memory.max, no swap on this machine"
	case controller == "memory" && swapAccounted:
		return "cgroup v1 memory.limit_in_bytes, memory.memsw.limit_in_bytes"
	case controller == "memory":
		return "cgroup v1 memory.limit_in_bytes, no swap on this machine"
	case controller == "cpu" && v2:
		return "cgroup v2 cpu.max"
	case controller == "cpu":
		return "cgroup v1 cpu.cfs_quota_us"
	case v2:
		return "cgroup v2 pids.max"
	default:
		return "cgroup v1 pids.max"
	}
}

// feature is the node feature that a controller enforces.
func feature(controller string) string {
	return map[string]string{"memory": node.FeatureMemory, "cpu": node.FeatureCPU, "pids": node.FeaturePids}[controller]
}
