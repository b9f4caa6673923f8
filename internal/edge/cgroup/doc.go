// Package cgroup makes, limits, measures and removes the control groups of the sandboxes of one edge.
//
// It owns the directories "sandsea-TAG" right below each mount that it uses, found in /proc/self/mountinfo, and all
// that lies below them:
//
//	<v2 mount>/sandsea-TAG/<name>            freeze, kill; on a v2 machine memory, cpu and pids too
//	<v2 mount>/sandsea-TAG/<name>/e<number>  one per command, without controllers
//	<v1 mount>/sandsea-TAG/<name>            memory, cpu, pids where v1 has the controller
//	<v2 mount>/sandsea-TAG/_<name>           a process of the platform that must outlive its parent's group
//
// A sandbox's group has whatever name its maker gave it. v2 groups cannot be renamed, and to move a process from one to
// another waits for RCU, so whoever makes groups before there is a sandbox (the native backend's pool) names them itself
// and remembers which is whose.
//
// Each controller is used where the kernel has it, v2 or v1; a v2 tree is needed in any case, since only it can kill a
// tree at once. Names are all there is to find things again after a crash: Names lists them, Remove takes one back, and
// Find opens one that a running sandbox still uses.
//
// It fails closed: Create returns a group in which every limit is in force, or an error that names the field and the
// mechanism and leaves nothing.
//
// Manager may be used concurrently. So may a Group, but for calls that end it (Remove, Close).
//
// Groups are not pooled here: directories and limits of v2 with v1 memory, cpu and pids take 0.10 ms at the median on
// the development machine (BenchmarkCreate).
package cgroup
