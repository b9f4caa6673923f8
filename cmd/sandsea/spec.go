package main

import (
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// specFlags are the flags that say what a sandbox shall be.
type specFlags struct {
	image, base, workspace string
	toolkits               []string
	backend, class         string
	memory, disk, output   string
	cpu                    float64
	pids, openFiles        int64
	user, workdir          string
	env, labels            []string
	idle, ttl              time.Duration
	key                    string
	noNewPrivs             bool
	require                []string
	network                networkFlags
}

func (f *specFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.image, "image", "", "image to start from (default: the only one there is)")
	fl.StringVar(&f.base, "base", "", "compose: lowest image")
	fl.StringVar(&f.workspace, "workspace", "", "compose: image above the base")
	fl.StringSliceVar(&f.toolkits, "toolkit", nil, "compose: images above the workspace, lowest first")
	fl.StringVar(&f.backend, "backend", "container", "kind of isolation")
	fl.StringVar(&f.class, "class", "native", "runtime class of the backend")
	fl.StringVar(&f.memory, "memory", "", "memory and swap, as 512M (default 512M)")
	fl.Float64Var(&f.cpu, "cpu", 0, "CPUs, as 0.5 (default 1)")
	fl.StringVar(&f.disk, "disk", "", "writable bytes, as 2G (default 10G)")
	fl.Int64Var(&f.pids, "pids", 0, "processes and threads (default 4096)")
	fl.Int64Var(&f.openFiles, "open-files", 0, "open files per process (default 65536 or the node's limit)")
	fl.StringVar(&f.output, "output", "", "recorded output kept, as 64M (default 64M)")
	fl.StringVarP(&f.user, "user", "u", "", "name, uid or uid:gid of commands (default: the image's)")
	fl.StringVarP(&f.workdir, "workdir", "w", "", "working directory of commands (default: the image's)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment variable, as K=V")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label, as k=v")
	fl.DurationVar(&f.idle, "idle", 0, "end after so long without use, as 300s (default: never)")
	fl.DurationVar(&f.ttl, "ttl", 0, "end so long after the start, as 2h (default 24h)")
	fl.StringVar(&f.key, "key", "", "idempotency key: the same key gives the same sandbox")
	fl.BoolVar(&f.noNewPrivs, "no-new-privs", false, "set-user-id programs gain nothing inside")
	fl.StringSliceVar(&f.require, "require", nil, "features that the node must enforce (see sandsea doctor)")
	f.network.register(cmd, "network")
}

// pairs reads "k=v" flags.
func pairs(flag string, list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, misuse(errdefs.New(errdefs.Invalid, "", "--%s %s: no name=value", flag, ui.Text(kv)).
				WithField(flag, "").WithHint("Write it as --%s NAME=VALUE", flag))
		}
		out[k] = v
	}
	return out, nil
}

// minCPU is the smallest share of the CPUs that can be enforced.
const minCPU = float64(sandbox.MinCPUMillis) / 1000

// spec makes the request from the flags.
func (f *specFlags) spec(cmd *cobra.Command) (*sandseav1.SandboxSpec, error) {
	if f.backend != "container" {
		return nil, usage(cmd, "--backend %s: this version has container", ui.Text(f.backend))
	}
	env, err := pairs("env", f.env)
	if err != nil {
		return nil, err
	}
	labels, err := pairs("label", f.labels)
	if err != nil {
		return nil, err
	}
	if cmd.Flags().Changed("cpu") && !(f.cpu >= minCPU) {
		return nil, misuse(errdefs.New(errdefs.Invalid, "", "--cpu %v: at least %v", f.cpu, minCPU).WithField("cpu", "").
			WithHint("Leave it out for 1"))
	}
	limits := &sandseav1.Limits{CpuMillis: int64(f.cpu * 1000), Pids: f.pids, OpenFiles: f.openFiles}
	for _, size := range []struct {
		flag, text string
		to         *int64
	}{
		{"memory", f.memory, &limits.MemoryBytes}, {"disk", f.disk, &limits.DiskBytes}, {"output", f.output, &limits.OutputBytes},
	} {
		if size.text == "" {
			continue
		}
		if *size.to, err = ui.ParseSize(size.flag, size.text); err != nil {
			return nil, &exitError{code: 2, err: err}
		}
	}
	network, err := f.network.policy(cmd)
	if err != nil {
		return nil, err
	}
	return &sandseav1.SandboxSpec{
		Backend: sandseav1.Backend_BACKEND_CONTAINER, Class: f.class,
		Environment: &sandseav1.Environment{Image: f.image, Base: f.base, Workspace: f.workspace, Toolkits: f.toolkits},
		Limits:      limits, IdleMs: f.idle.Milliseconds(), TtlMs: f.ttl.Milliseconds(), User: f.user, Workdir: f.workdir,
		Env: env, Labels: labels, NoNewPrivs: f.noNewPrivs, Require: f.require, Network: network,
	}, nil
}

// defaultImage fills in the image when none is named and there is exactly one.
func (a *app) defaultImage(cmd *cobra.Command, spec *sandseav1.SandboxSpec) error {
	env := spec.GetEnvironment()
	if env.GetImage() != "" || env.GetBase() != "" {
		return nil
	}
	images, err := a.images(cmd.Context())
	if err != nil {
		return err
	}
	switch len(images) {
	case 0:
		return errdefs.New(errdefs.FailedPrecondition, "", "no image yet").WithField("image", "").
			WithHint("About a minute: sandsea image import debian:bookworm --include python3,git")
	case 1:
		env.Image = images[0].GetName()
		return nil
	}
	return misuse(errdefs.New(errdefs.Invalid, "", "%d images and none named", len(images)).
		WithField("image", "").WithHint("Name one: --image %s. All: sandsea image ls", ui.Text(images[0].GetName())))
}
