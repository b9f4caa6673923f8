package main

import (
	"bytes"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/testkit/golden"
)

var noon = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(noon.Add(-d)) }

// fleet is a list with everything that a table must bear.
func fleet() []*sandseav1.Sandbox {
	box := func(id, image string, state sandseav1.SandboxState, memory int64, age, idle time.Duration) *sandseav1.Sandbox {
		return &sandseav1.Sandbox{
			Id: id + "w4xn6d2hr5tcabqe8vk", Project: "default", State: state, Node: "n1", Epoch: 1, CreatedAt: ago(age), IdleForMs: idle.Milliseconds(),
			Spec: &sandseav1.SandboxSpec{
				Environment: &sandseav1.Environment{Image: image}, Limits: &sandseav1.Limits{MemoryBytes: memory, CpuMillis: 1500, Pids: 4096, DiskBytes: 10 << 30, OpenFiles: 65536},
			},
		}
	}
	running, ended := sandseav1.SandboxState_SANDBOX_STATE_RUNNING, sandseav1.SandboxState_SANDBOX_STATE_ENDED
	a := box("s7q3k2m5", "debian:bookworm+git,python3", running, 512<<20, 3*time.Minute, 2*time.Second)
	a.Spec.Labels = map[string]string{"job": "eval-12", "rollout": "7"}
	b := box("s5xw2b4t", "swe-flask@4f1c", running, 4<<30, 2*time.Hour, time.Hour)
	c := box("sb3m6zd5", "py", ended, 512<<20, 6*time.Minute, 0)
	c.End = &sandseav1.End{Cause: "oom", Detail: "512 MiB, python3 pid 12", By: "workload", At: ago(5 * time.Minute)}
	d := box("s9n0q8r7", "evil\x1b]0;title\x07\u202e名前", sandseav1.SandboxState_SANDBOX_STATE_LOST, 1<<30, 5*24*time.Hour, 0)
	d.End = &sandseav1.End{Cause: "infra_lost", Detail: "node n1 restarted or was fenced", By: "platform", At: ago(time.Hour)}
	d.Spec.Labels = map[string]string{"name": "héllo wörld"}
	return []*sandseav1.Sandbox{a, b, c, d}
}

// show runs f with streams of a width; 0 is a pipe.
func show(width int, color bool, f func(a *app)) []byte {
	var out bytes.Buffer
	f(&app{now: func() time.Time { return noon }, io: &ui.IO{
		Out: &out, Err: &out, OutTTY: width > 0, ErrTTY: width > 0, Width: max(width, 40), Color: color,
	}})
	return out.Bytes()
}

func TestTables(t *testing.T) {
	images := []*sandseav1.Image{
		{
			Name: "debian:bookworm+git,python3", Digest: "sha256:4f1c5a27aa00bb11cc22dd33ee44ff55", Users: 14, CreatedAt: ago(3 * time.Hour),
			Layers: []*sandseav1.Layer{{Digest: "sha256:aa", Bytes: 204 << 20, Files: 9000, Source: "debian:bookworm"}},
		},
		{
			Name: "registry.example.org/team/task-17", Digest: "sha256:0011223344556677", CreatedAt: ago(40 * time.Second),
			Config: &sandseav1.ImageConfig{User: "agent", Workdir: "/work", Env: []string{"A=1", "B=two words"}, Entrypoint: []string{"python3"}, Cmd: []string{"-m", "task"}},
			Layers: []*sandseav1.Layer{
				{Digest: "sha256:aa", Bytes: 204 << 20, Files: 9000, Source: "debian:bookworm"}, {Digest: "sha256:bb", Bytes: 1 << 20, Files: 12, Source: "rootfs"},
			},
		},
	}
	nodes := []*sandseav1.Node{
		{Name: "n1", State: sandseav1.NodeState_NODE_STATE_READY, Kernel: "6.18.44", Cpus: 2, MemoryBytes: 25125558682, MemoryPromisedBytes: 3 << 30, DiskFreeBytes: 80 << 30, SandboxesRunning: 14, SandboxesMax: 3200},
		{Name: "n2", State: sandseav1.NodeState_NODE_STATE_UNREACHABLE, Kernel: "6.18.44", Cpus: 64, MemoryBytes: 256 << 30, SandboxesMax: 20000},
	}
	for name, f := range map[string]func(a *app){
		"ls":       func(a *app) { a.printSandboxes(fleet(), 212) },
		"image_ls": func(a *app) { a.printImages(images) },
		"node_ls":  func(a *app) { a.printNodes(nodes) },
	} {
		for _, width := range []int{40, 80, 120} {
			golden.Equal(t, filepath.Join("tables", fmt.Sprintf("%s_%d.txt", name, width)), show(width, false, f))
		}
		golden.Equal(t, filepath.Join("tables", name+"_pipe.txt"), show(0, false, f))
		golden.Equal(t, filepath.Join("tables", name+"_colour.txt"), show(80, true, f))
	}
	golden.Equal(t, "tables/image_inspect.txt", show(80, false, func(a *app) { a.printImage(images[1]) }))
	full := fleet()[2]
	full.Enforcement = []*sandseav1.Enforcement{{Name: "limit.memory", Mechanism: "cgroup v1"}}
	full.Layers = []string{"sha256:aa", "sha256:bb"}
	full.Usage = &sandseav1.Usage{MemoryBytes: 38 << 20, MemoryPeakBytes: 512 << 20, CpuUs: 8_200_000, Pids: 14, DiskBytes: 1 << 20, OutputBytes: 100}
	command := func(argv ...string) *sandseav1.Command { return &sandseav1.Command{Argv: argv} }
	exited := sandseav1.ProcessState_PROCESS_STATE_EXITED
	procs := []*sandseav1.Process{
		{Number: 1, Command: command("pytest", "-q"), State: exited, Result: &sandseav1.Result{ExitCode: 1, WallUs: 8_200_000}},
		{Number: 2, Command: command("sleep", "1000"), State: sandseav1.ProcessState_PROCESS_STATE_RUNNING, StartedAt: ago(2 * time.Minute)},
		{Number: 3, Command: command("evil\x1b[2J"), State: exited, Result: &sandseav1.Result{ExitCode: 124, TimedOut: true, Signal: 9, WallUs: 60_000_000}},
		{Number: 4, Command: command("./eat"), State: exited, Result: &sandseav1.Result{ExitCode: 137, Signal: 9, SignalName: "SIGKILL", Oom: true}},
		{Number: 5, Command: command("./x"), State: exited, Result: &sandseav1.Result{ExitCode: 143, Signal: 15, SignalName: "SIGTERM", WallUs: 900}},
		{Number: 6, Command: command("pytst"), State: sandseav1.ProcessState_PROCESS_STATE_FAILED, Result: &sandseav1.Result{ExitCode: 127, StartFailure: &sandseav1.StartFailure{Kind: "not_found"}}},
		{Number: 7, Command: command("y"), State: exited, Result: &sandseav1.Result{ExitCode: 125, InfraError: "the record is gone"}},
	}
	golden.Equal(t, "tables/inspect.txt", show(80, false, func(a *app) { a.printSandbox(full, procs) }))
}

func TestDoctor(t *testing.T) {
	ok := func(name, how string) node.Feature { return node.Feature{Name: name, Status: node.OK, Mechanism: how} }
	good := node.Capabilities{
		Kernel: "6.18.44", CPUs: 2, Memory: 25125558682, Cgroup: "hybrid", PidMax: 4 << 20,
		Features: []node.Feature{
			ok(node.FeatureExitFacts, "PIDFD_GET_INFO"), ok(node.FeatureKill, "cgroup v2 cgroup.kill, clone into the group"),
			ok(node.FeatureLayers, "EROFS from files, overlayfs by descriptor"), ok(node.FeatureCPU, "cgroup v1 cpu.cfs_quota_us"),
			ok(node.FeatureDisk, "btrfs simple quotas, loop image"), ok(node.FeatureMemory, "cgroup v1 memory.limit_in_bytes"),
			ok(node.FeaturePids, "cgroup v1 pids.max"), ok(node.FeatureSeccomp, "seccomp filter"),
			ok(node.FeatureUserNS, "user namespaces, id-mapped layers"), ok("new", "something of a later version"),
			ok(node.FeatureEgress, "veth to a gate, nft tproxy, cgroup bpf"),
		},
	}
	bad := node.Capabilities{
		Kernel: "6.18.44", CPUs: 2, Memory: 25125558682, Cgroup: "hybrid", PidMax: 32768,
		Features: []node.Feature{
			ok(node.FeatureMemory, "cgroup v1 memory.limit_in_bytes"), ok(node.FeatureCPU, "cgroup v1 cpu.cfs_quota_us"),
			{Name: node.FeatureDisk, Status: node.Unsure, Mechanism: "no \x1b[2Janswer within 10s", Fix: "Install btrfs-progs"},
			ok(node.FeatureUserNS, "user namespaces, id-mapped layers"),
			{Name: node.FeatureSeccomp, Status: node.Missing, Mechanism: "invalid argument", Fix: "Use a kernel with CONFIG_SECCOMP_FILTER"},
			{Name: node.FeatureLayers, Status: node.Slower, Mechanism: "on demand by FUSE; fanotify pre-content needs Linux 6.14"},
			{Name: node.FeatureNetwork, Status: node.Missing, Mechanism: "no network namespaces", Fix: "modprobe nf_tables, then sandsea doctor"},
			{Name: node.FeatureExitFacts, Status: node.Missing, Optional: true, Mechanism: "needs Linux 6.15"},
		},
	}
	services := upstream.Upstreams{
		"pypi": {URLs: []string{"https://index.example/simple"}, Found: "pip config"},
		"npm":  {Missing: "npm is not installed: name it as urls in [services.npm] of aether.toml"},
	}
	for name, c := range map[string]node.Capabilities{"doctor_good": good, "doctor": bad} {
		look := func(a *app) { a.printFindings(c, services, 4) }
		for _, width := range []int{40, 80, 120} {
			golden.Equal(t, filepath.Join("tables", fmt.Sprintf("%s_%d.txt", name, width)), show(width, false, look))
		}
		golden.Equal(t, filepath.Join("tables", name+"_pipe.txt"), show(0, false, look))
	}
	golden.Equal(t, "tables/doctor.json", show(0, false, func(a *app) {
		if err := printJSON(a.io.Out, doctorDocument(bad, services, "container: 3 of 7 promises not enforced", false)); err != nil {
			t.Error(err)
		}
	}))
}

func TestPidMaxIsToldOnlyWhereItBoundsTheNode(t *testing.T) {
	for _, tt := range []struct {
		name           string
		pidMax, memory int64
		few            bool
	}{
		{"the kernel's default on a machine with memory", 32768, 24 << 30, true},
		{"less memory than processes", 32768, 4 << 30, false},
		{"as much as the kernel takes", 4 << 20, 1 << 50, false},
		{"enough for as many as a node takes", 4<<20 - 1, 1 << 50, true},
		{"not known", 0, 24 << 30, false},
	} {
		if f, few := pidsFinding(node.Capabilities{CPUs: 2, PidMax: tt.pidMax, Memory: tt.memory}, 4); few != tt.few {
			t.Errorf("%s: %+v", tt.name, f)
		}
	}
}
