package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/probe"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

func (a *app) doctorCommand() *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use: "doctor", Short: "Say what this machine enforces and by which mechanism", Args: cobra.NoArgs,
		Long: `Tries every feature that the container backend needs and says what was found: ok, warn for what works in a slower way
or for fewer sandboxes than it could, FAIL for what cannot be enforced, info for what nothing depends on. Exit 1 when
something FAILs, 0 otherwise. Then it says where each package service would draw from: what DIR/aether.toml names, else what
this machine's own clients (pip, npm, go, cargo, apt, mvn, gem) are configured with.`,
		Example: "  sudo sandsea doctor\n  sudo sandsea doctor --json | jq '.features[] | select(.status != \"ok\")'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errdefs.New(errdefs.Denied, "", "doctor tries kernel features and needs root").WithHint("Run: sudo sandsea doctor")
			}
			if !cmd.Flags().Changed("data") {
				cfg, err := loadServerConfig("", os.Getenv)
				if err != nil {
					return err
				}
				data = cfg.Data
			}
			c, err := probe.Machine(cmd.Context(), data, slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			services, err := findServices(cmd.Context(), data)
			if err != nil {
				return err
			}
			line, good := probe.Summary(c)
			if a.json {
				if err := printJSON(a.io.Out, doctorDocument(c, services, line, good)); err != nil {
					return err
				}
			} else {
				a.printFindings(c, services, defaultServerConfig().MemoryOvercommit)
				fmt.Fprintln(a.io.Out, line)
			}
			if !good {
				return &exitError{code: 1}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&data, "data", defaultServerConfig().Data, "data directory that would be used")
	return cmd
}

// finding is one line of doctor, with what to do below it.
type finding struct {
	word, group, text string
	fixes             []string
}

// findingWords from the best to the worst.
var findingWords = []string{"ok", "info", "warn", "FAIL"}

var findingColors = map[string]string{"ok": ui.Green, "info": ui.Yellow, "warn": ui.Yellow, "FAIL": ui.Red}

// isolation is the group whose mechanisms speak for themselves.
const isolation = "isolation"

// featureGroups are doctor's lines in their order. A feature of no group gets a line under its own name.
var featureGroups = []struct {
	name     string
	features []string
}{
	{"limits", []string{
		node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureKill, node.FeatureDisk, node.FeatureOpenFiles,
		node.FeatureOutput,
	}},
	{isolation, []string{node.FeatureUserNS, node.FeatureSeccomp}},
	{"layers", []string{node.FeatureLayers}},
	{"network", []string{node.FeatureNetwork}},
	{"egress", []string{node.FeatureEgress}},
	{"imports", []string{node.FeatureDebian}},
	{"exits", []string{node.FeatureExitFacts}},
}

// findServices gives the upstreams that an edge on the data directory would use.
func findServices(ctx context.Context, data string) (upstream.Upstreams, error) {
	cfg, err := config.Load(filepath.Join(data, config.FileName))
	if err != nil {
		return nil, err
	}
	return upstream.Discover(ctx, upstream.Node{Env: os.Environ()}, cfg.Services)
}

// serviceFindings are what doctor says of package services.
func serviceFindings(all upstream.Upstreams) []finding {
	var out []finding
	for _, name := range slices.Sorted(maps.Keys(all)) {
		u := all[name]
		if len(u.URLs) == 0 {
			out = append(out, finding{word: "info", group: name, text: "no upstream", fixes: []string{ui.Text(u.Missing)}})
			continue
		}
		out = append(out, finding{word: "ok", group: name, text: ui.Text(strings.Join(u.URLs, ", ") + " (" + u.Found + ")")})
	}
	return out
}

// findings are what doctor says of a machine whose memory may be promised overcommit times.
func findings(c node.Capabilities, overcommit float64) []finding {
	out := []finding{{word: "info", group: "node", text: fmt.Sprintf("Linux %s, %d CPUs, %s, cgroup %s",
		c.Kernel, c.CPUs, ui.LongSize(c.Memory), c.Cgroup)}}
	rest := slices.Clone(c.Features)
	take := func(group string, names ...string) {
		var list []node.Feature
		for _, name := range names {
			if i := slices.IndexFunc(rest, func(f node.Feature) bool { return f.Name == name }); i >= 0 {
				list = append(list, rest[i])
				rest = slices.Delete(rest, i, i+1)
			}
		}
		if len(list) > 0 {
			out = append(out, groupFinding(group, list))
		}
	}
	for _, g := range featureGroups {
		take(g.name, g.features...)
	}
	for len(rest) > 0 {
		take(rest[0].Name, rest[0].Name)
	}
	if f, few := pidsFinding(c, overcommit); few {
		out = append(out, f)
	}
	return out
}

// groupFinding sums up the features of one group: the worst of them first, and those of one mechanism together.
func groupFinding(group string, list []node.Feature) finding {
	rank := func(f node.Feature) int { return slices.Index(findingWords, featureWord(f)) }
	slices.SortStableFunc(list, func(a, b node.Feature) int { return rank(b) - rank(a) })
	out := finding{word: featureWord(list[0]), group: group}
	named, between := len(list) > 1, "; "
	if group == isolation && out.word == "ok" {
		named, between = false, ", "
	}
	var parts []string
	for i := 0; i < len(list); {
		how, names := mechanism(list[i]), []string(nil)
		for same := list[i].Status; i < len(list) && list[i].Status == same && mechanism(list[i]) == how; i++ {
			names = append(names, strings.ReplaceAll(strings.TrimPrefix(list[i].Name, "limit."), "_", " "))
			if fix := list[i].Fix; same != node.OK && fix != "" && !slices.Contains(out.fixes, fix) {
				out.fixes = append(out.fixes, fix)
			}
		}
		if named {
			how = strings.Join(names, ", ") + ": " + how
		}
		parts = append(parts, how)
	}
	out.text = strings.Join(parts, between)
	return out
}

// mechanism is how a feature is had, or why not. Of control groups the hierarchy says enough; --json has the files.
func mechanism(f node.Feature) string {
	words := strings.Fields(f.Mechanism)
	if f.Status == node.OK && len(words) > 2 && words[0] == "cgroup" {
		return ui.Text(strings.Join(words[:2], " "))
	}
	return ui.Text(f.Mechanism)
}

func featureWord(f node.Feature) string {
	switch {
	case f.Status == node.OK:
		return "ok"
	case f.Status == node.Slower:
		return "warn"
	case f.Optional:
		return "info"
	}
	return "FAIL"
}

// maxPidMax is the most that the kernel takes for kernel.pid_max.
const maxPidMax = 4 << 20

// pidsFinding tells when kernel.pid_max bounds a node before its memory does, with sandboxes of the default limits.
func pidsFinding(c node.Capabilities, overcommit float64) (_ finding, few bool) {
	room := admission.Of(c, admission.Overcommit{Memory: overcommit})
	byPids := min(room.Pids/sandbox.DefaultPids, int64(room.Sandboxes))
	free := c
	free.PidMax = maxPidMax
	byMemory := min(room.Memory/sandbox.DefaultMemory, int64(admission.Of(free, admission.Overcommit{}).Sandboxes))
	if c.PidMax <= 0 || c.PidMax >= maxPidMax || byPids >= byMemory {
		return finding{}, false
	}
	return finding{
		word: "warn", group: "pids",
		text: fmt.Sprintf("kernel.pid_max %d is room for %d sandboxes of the default limits, memory for %d",
			c.PidMax, byPids, byMemory),
		fixes: []string{fmt.Sprintf("sysctl -w kernel.pid_max=%d", maxPidMax)},
	}, true
}

// printFindings prints a line for each finding; on a terminal a long one goes on below itself.
func (a *app) printFindings(c node.Capabilities, services upstream.Upstreams, overcommit float64) {
	const indent = 17
	for _, f := range slices.Concat(findings(c, overcommit), serviceFindings(services)) {
		lines := a.folded(f.text, indent)
		fmt.Fprintf(a.io.Out, "%s  %-9s  %s\n", a.io.Paint(findingColors[f.word], fmt.Sprintf("%-4s", f.word)), f.group, lines[0])
		for _, fix := range f.fixes {
			lines = append(lines, a.folded("fix: "+ui.Text(fix), indent)...)
		}
		for _, l := range lines[1:] {
			fmt.Fprintf(a.io.Out, "%*s%s\n", indent, "", l)
		}
	}
}

// folded is text in lines that fit a terminal behind an indent; words never break. In a pipe it stays one line.
func (a *app) folded(text string, indent int) []string {
	if !a.io.OutTTY {
		return []string{text}
	}
	lines := []string{""}
	for _, word := range strings.Fields(text) {
		last := lines[len(lines)-1]
		switch {
		case last == "":
			lines[len(lines)-1] = word
		case ansi.StringWidth(last)+1+ansi.StringWidth(word) > a.io.Width-indent:
			lines = append(lines, word)
		default:
			lines[len(lines)-1] = last + " " + word
		}
	}
	return lines
}

func doctorDocument(c node.Capabilities, services upstream.Upstreams, line string, good bool) object {
	found := make([]object, 0, len(services))
	for _, name := range slices.Sorted(maps.Keys(services)) {
		u := services[name]
		found = append(found, object{
			{"name", name}, {"upstreams", append([]string{}, u.URLs...)}, {"found", u.Found}, {"missing", u.Missing},
		})
	}
	features := make([]object, 0, len(c.Features))
	for _, f := range c.Features {
		features = append(features, object{
			{"name", f.Name}, {"status", string(f.Status)}, {"mechanism", f.Mechanism}, {"fix", f.Fix}, {"optional", f.Optional},
		})
	}
	return object{
		{"schema", "sandsea.doctor/1"},
		{"kernel", c.Kernel},
		{"cpus", c.CPUs},
		{"memory_bytes", c.Memory},
		{"cgroup", c.Cgroup},
		{"features", features},
		{"services", found},
		{"container", object{{"enforces_all", good}, {"summary", line}}},
	}
}
